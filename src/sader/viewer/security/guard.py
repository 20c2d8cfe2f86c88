"""Access control: ASGI middleware for Host, Origin, token, size and duration of the body, and response headers.

A page of another site must not use the server of a person who has it open: neither by its own requests (Origin check)
nor by pointing its domain name at the server's address (Host check). Tokens are accepted in a header or an HttpOnly
cookie, never in a URL.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from sader.viewer.settings import ServeSettings, is_loopback

PROBLEM = "application/problem+json"
_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{1,5})?")
COOKIE = "sader_session"
SESSION_S = 12 * 3600
MOST_SESSIONS = 1000
WRONG_TOKENS = 10
"""Wrong tokens accepted from one address at once; afterwards `WRONG_TOKENS_PER_S`."""
WRONG_TOKENS_PER_S = 1.0
OPEN_PATHS = ("/", "/session", "/static/")
"""Paths that need no token: the page with its sign-in form."""
TILE_HOST = "https://tile.openstreetmap.org"
"""Source of the optional background map (static/background.js); images only."""
CSP = (
    f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' {TILE_HOST}; connect-src 'self'; "
    "font-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every response that does not set them."""
ONCE = ("host", "origin", "authorization", "content-length")
"""Headers that a request may have once only."""
MORE_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "5"}}


class Sessions:
    """The server's token, the browsers that have presented it, and the rate of wrong tokens per address."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._until: dict[str, float] = {}
        self._wrong: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Address -> (wrong tokens still allowed, time of that number)."""
        self._lock = threading.Lock()

    @property
    def needed(self) -> bool:
        """Whether callers must present a token."""
        return self._token is not None

    def accepts(self, token: str, address: str) -> bool | None:
        """Return whether a token is the server's (constant-time comparison); None without comparing it, where the
        address has presented too many wrong ones."""
        if self._token is None:
            return False
        now = time.monotonic()
        with self._lock:
            left, since = self._wrong.get(address, (float(WRONG_TOKENS), now))
            left = min(float(WRONG_TOKENS), left + (now - since) * WRONG_TOKENS_PER_S)
            if left < 1:
                return None
            if hmac.compare_digest(token.encode(), self._token.encode()):
                return True
            self._wrong[address] = (left - 1, now)
            self._wrong.move_to_end(address)
            while len(self._wrong) > MOST_SESSIONS:
                self._wrong.popitem(last=False)
        return False

    def open(self) -> str:
        """Return the value of a new session cookie."""
        name, now = secrets.token_urlsafe(32), time.monotonic()
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            while len(self._until) >= MOST_SESSIONS:
                self._until.pop(next(iter(self._until)))
            self._until[name] = now + SESSION_S
        return name

    def is_open(self, name: str) -> bool:
        """Whether a cookie is that of an open session."""
        with self._lock:
            return self._until.get(name, 0.0) > time.monotonic()


class Guard:
    """The ASGI middleware around the application."""

    def __init__(self, app: Any, settings: ServeSettings, sessions: Sessions) -> None:
        self.app, self.settings, self.sessions = app, settings, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        limits = self.settings.limits
        limit = None if scope["method"] == "PUT" and "/files/" in scope["path"] else limits.body_bytes
        refusal = self._refusal(scope, Headers(scope=scope), limit)
        if refusal is not None:
            await refused(*refusal)(scope, receive, send_with_headers)
            return
        await self.app(scope, _bounded(receive, limit, limits.body_s), send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers, limit: int | None) -> tuple[int, str] | None:
        twice = [name for name in ONCE if len(headers.getlist(name)) > 1]
        if twice:
            return 400, f"the header {twice[0]} was sent twice; expected it once."
        refusal = self._unknown_caller(scope, headers)
        length = headers.get("content-length", "")
        if refusal is None and limit is not None and length.isdecimal() and int(length) > limit:
            return 413, _too_large(limit)
        return refusal

    def _unknown_caller(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self._host_allowed(host):
            return 421, (
                f"this server does not answer requests for {host[:100]!r}. Use its address, or let its administrator "
                "allow the name (allow-host)."
            )
        if not self._origin_allowed(scope, headers, host):
            return 403, "requests from pages of another site are not accepted."
        if not self.sessions.needed or _is_open(scope["path"]):
            return None
        if self.sessions.is_open(HTTPConnection(scope).cookies.get(COOKIE, "")):
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            accepted = self.sessions.accepts(token.strip(), client_address(scope))
            if accepted is None:
                return 429, TOO_MANY_TOKENS
            if accepted:
                return None
        return 401, "this server needs its token: Authorization: Bearer TOKEN."

    def _host_allowed(self, host: str) -> bool:
        name = _host_name(host)
        if not name:
            return False
        if name in {allowed.lower() for allowed in self.settings.allow_hosts} or name == self.settings.host.lower():
            return True
        if is_loopback(self.settings.host):
            return is_loopback(name)
        # A domain name can be pointed at any address (DNS rebinding); an address cannot.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == "localhost"
        return True

    @staticmethod
    def _origin_allowed(scope: Scope, headers: Headers, host: str) -> bool:
        if scope["method"] in ("GET", "HEAD"):
            return True
        origin = headers.get("origin")
        if origin is not None:
            return origin.partition("://")[2].lower() == host.lower()
        # Browsers send at least one of the two headers; other programs may send neither.
        return headers.get("sec-fetch-site", "none") in ("none", "same-origin")


TOO_MANY_TOKENS = "too many wrong tokens came from this address; try again in a few seconds."


def refused(status: int, text: str, title: str = "Refused", headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error response that no exception of the package stands for."""
    content = {"type": "about:blank", "title": title, "status": status, "detail": text}
    return JSONResponse(content, status, headers or MORE_HEADERS.get(status), media_type=PROBLEM)


def client_address(scope: Scope) -> str:
    """Return the address a request came from."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _is_open(path: str) -> bool:
    return any(path == one or (one != "/" and one.endswith("/") and path.startswith(one)) for one in OPEN_PATHS)


def _host_name(host: str) -> str:
    """Return the name in a Host header without port and brackets, "" where the header holds anything else.

    Links in responses are built from this header, so only a name and a port are accepted.
    """
    found = _HOST.fullmatch(host.strip().lower())
    return (found["six"] or found["name"]) if found else ""


def _too_large(limit: int) -> str:
    return f"the request has more than {limit} bytes."


def _bounded(receive: Receive, limit: int | None, seconds: float) -> Receive:
    """Return `receive` with limits on the body: 413 above `limit` bytes, 408 where no data arrives for `seconds`."""
    received, complete = 0, False

    async def bounded() -> Message:
        nonlocal received, complete
        if complete:
            return await receive()  # waits for the client to disconnect
        try:
            message = await asyncio.wait_for(receive(), seconds)
        except TimeoutError:
            text = f"the rest of the request did not arrive within {seconds:g} s."
            raise HTTPException(408, text, {"Connection": "close"}) from None
        complete = not message.get("more_body", False)
        received += len(message.get("body", b""))
        if limit is not None and received > limit:
            raise HTTPException(413, _too_large(limit))
        return message

    return bounded
