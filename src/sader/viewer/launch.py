"""Start of the server: token, listening socket, HTTP protocol with timeouts, page in a browser."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sader.errors import ConfigError, OutputError, require
from sader.files import locked
from sader.viewer.security.folder import STATE
from sader.viewer.settings import ServeSettings, is_loopback

LEAST_TOKEN = 16


def launch(settings: ServeSettings, *, token_file: Path | None, browser: bool, notify: Callable[[str], None]) -> None:
    """Run the server until it is stopped."""
    uvicorn = require("uvicorn", extra="serve", purpose="the server")
    require("fastapi", extra="serve", purpose="the server")
    require("rasterio", extra="geo", purpose="reading GeoTIFF")
    settings, new = with_token(settings, token_file)
    from sader.viewer.app import build_app

    listening = bind(settings.host, settings.port)
    port = listening.getsockname()[1]
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{shown}:{port}/"
    app = build_app(replace(settings, port=port))
    busy = f"another server uses {settings.data}. Stop it, or choose another folder."
    with locked(settings.data / STATE / "server.lock", busy=busy):
        notify(f"serving {settings.data} at {address}")
        if settings.token is not None:
            if new:
                notify(f"token: {settings.token}")
            notify(
                "other machines can reach this server: use a reverse proxy with https, or the token is sent unencrypted"
            )
        notify("stop with Ctrl-C")
        if browser and is_loopback(settings.host):
            timer = threading.Timer(1.0, webbrowser.open, [address])
            timer.daemon = True
            timer.start()
        uvicorn.Server(server_config(app, settings)).run(sockets=[listening])


def server_config(app: Any, settings: ServeSettings) -> Any:
    """Return the uvicorn configuration of an application."""
    from uvicorn import Config
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        """HTTP that closes a connection whose request header is incomplete after `Limits.header_s` seconds.

        uvicorn limits idle connections between requests, and `security.guard` limits request bodies.
        """

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_header()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait_for_header()
            elif self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def connection_lost(self, exc: Exception | None) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            super().connection_lost(exc)

        def _wait_for_header(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(settings.limits.header_s, self.transport.close)

    return Config(
        app, http=Protocol, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3
    )


def with_token(settings: ServeSettings, token_file: Path | None) -> tuple[ServeSettings, bool]:
    """Return the settings with a token, and whether it is new; only a loopback server may be without one."""
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --token-file {token_file}: {error}.") from error
        if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(
                f"the token in {token_file} has {len(token)} characters; expected at least {LEAST_TOKEN}, in ASCII and "
                "without spaces. Create one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        return replace(settings, token=token), False
    if is_loopback(settings.host):
        return settings, False
    return replace(settings, token=secrets.token_urlsafe(32)), True


def bind(host: str, port: int) -> socket.socket:
    """Return the listening socket."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(kind, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise OutputError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}. If another program uses the port, "
            "choose another with --port, or --port 0 for a free one."
        ) from error
    return listening
