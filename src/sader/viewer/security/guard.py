"""Who may call: an ASGI layer before everything else. Host, origin, token, size of the body, safe headers.

A page of another site must not use the server of a person who has it open: not by its own requests (the Origin check),
not by giving its name the server's address (the Host check). Tokens travel in a header or an HttpOnly cookie, never in
an address.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sader.viewer.settings import ServeSettings, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?")
COOKIE = "sader_session"
SESSION_S = 12 * 3600
MOST_SESSIONS = 1000
OPEN_PATHS = ("/", "/session", "/static/")
"""What needs no token: the page, which then asks for it."""
TILE_HOST = "https://tile.openstreetmap.org"
"""Where the page takes its background map from, if the user turns it on (static/background.js): pictures, no more."""
CSP = (
    f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' {TILE_HOST}; connect-src 'self'; "
    "font-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = (
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


class Sessions:
    """Browsers that have shown the token."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def needed(self) -> bool:
        return self._token is not None

    def right(self, given: str) -> bool:
        """Whether a token is the server's, in a time that does not tell how much of it is right."""
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())

    def open(self) -> str:
        """Return the value of a new cookie."""
        name, now = secrets.token_urlsafe(32), time.monotonic()
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            while len(self._until) >= MOST_SESSIONS:
                self._until.pop(next(iter(self._until)))
            self._until[name] = now + SESSION_S
        return name

    def knows(self, name: str) -> bool:
        with self._lock:
            return self._until.get(name, 0.0) > time.monotonic()


class Guard:
    """The ASGI layer."""

    def __init__(self, app: Any, settings: ServeSettings, sessions: Sessions) -> None:
        self.app, self.settings, self.sessions = app, settings, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message.get("headers", [])}
                extra = [(name, value) for name, value in HEADERS if name not in there]
                if b"cache-control" not in there:
                    extra.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        headers: dict[str, str] = {}
        for raw, value in scope["headers"]:
            name = raw.decode("latin-1").lower()
            if name in ("host", "origin", "authorization", "content-length") and name in headers:
                await _refuse(send_safely, 400, f"the header {name} was sent twice.")
                return
            headers[name] = value.decode("latin-1")
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(send_safely, *refusal)
            return
        upload = scope["method"] == "PUT" and "/files/" in scope["path"]
        limit = None if upload else self.settings.limits.body_bytes
        if limit is not None and _number(headers.get("content-length")) > limit:
            await _refuse(send_safely, 413, f"the request has more than {limit} bytes.")
            return
        await self.app(scope, receive if limit is None else _bounded(receive, limit), send_safely)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self._host_allowed(host):
            return (
                421,
                f"this server does not answer to the name {host[:100]!r}. Start it with --allow-host to change that.",
            )
        if not self._origin_allowed(scope, headers, host):
            return 403, "a page of another site may not use this server."
        if not self.sessions.needed or _is_open(scope["path"]):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.sessions.right(given.strip()):
            return None
        if self.sessions.knows(_cookie(headers.get("cookie", ""))):
            return None
        return 401, "this server wants its token: Authorization: Bearer TOKEN."

    def _host_allowed(self, host: str) -> bool:
        name = _host_name(host)
        if not name:
            return False
        if name in {allowed.lower() for allowed in self.settings.allow_hosts} or name == self.settings.host.lower():
            return True
        if is_loopback(self.settings.host):
            return is_loopback(name)
        # A name can be made to point anywhere (DNS rebinding); an address cannot.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == "localhost"
        return True

    @staticmethod
    def _origin_allowed(scope: Scope, headers: dict[str, str], host: str) -> bool:
        if scope["method"] in ("GET", "HEAD"):
            return True
        origin = headers.get("origin")
        if origin is not None:
            return origin.partition("://")[2].lower() == host.lower()
        # No browser leaves both out; a program that is no browser may.
        return headers.get("sec-fetch-site", "none") in ("none", "same-origin")


def _is_open(path: str) -> bool:
    return any(path == one or (one != "/" and one.endswith("/") and path.startswith(one)) for one in OPEN_PATHS)


def _host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets; "" where it is none.

    Nothing but a name and a port: links of answers are made from this header.
    """
    found = _HOST.fullmatch(host.strip().lower())
    return (found["six"] or found["name"]) if found else ""


def _cookie(header: str) -> str:
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _bounded(receive: Receive, limit: int) -> Receive:
    """Return `receive` for a body without a declared length, which ends in 413 when it grows too large."""
    from starlette.exceptions import HTTPException

    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > limit:
            raise HTTPException(413, f"the request has more than {limit} bytes.")
        return message

    return bounded


async def _refuse(send: Send, status: int, text: str) -> None:
    body = json.dumps({"type": "about:blank", "title": "Refused", "status": status, "detail": text}).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
