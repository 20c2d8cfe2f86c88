"""Start the server: the token, the socket, the page in a browser."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sader.errors import ConfigError, OutputError, require
from sader.viewer.settings import ServeSettings, is_loopback

LEAST_TOKEN = 16


def launch(settings: ServeSettings, *, token_file: Path | None, browser: bool, say: Callable[[str], None]) -> None:
    """Run the server until it is stopped."""
    uvicorn = require("uvicorn", extra="serve", purpose="the server")
    require("fastapi", extra="serve", purpose="the server")
    require("rasterio", extra="geo", purpose="reading GeoTIFF")
    settings, made = with_token(settings, token_file)
    from sader.viewer.app import build_app

    listening = bind(settings.host, settings.port)
    port = listening.getsockname()[1]
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{shown}:{port}/"
    app = build_app(replace(settings, port=port))
    say(f"sader serves {settings.data} at {address}")
    if settings.token is not None:
        if made:
            say(f"token: {settings.token}")
        say("others can reach this server: put it behind a proxy with https, or the token travels in clear.")
    say("stop with Ctrl-C")
    if browser and is_loopback(settings.host):
        timer = threading.Timer(1.0, webbrowser.open, [address])
        timer.daemon = True
        timer.start()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3
    )
    uvicorn.Server(config).run(sockets=[listening])


def with_token(settings: ServeSettings, token_file: Path | None) -> tuple[ServeSettings, bool]:
    """Return the settings with a token where one is wanted, and whether it is new: never open to others without one."""
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --token-file {token_file}: {error}.") from error
        if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(
                f"the token in {token_file} has {len(token)} characters; expected at least {LEAST_TOKEN}, in ASCII and "
                "without spaces. Make one: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        return replace(settings, token=token), False
    if is_loopback(settings.host):
        return settings, False
    return replace(settings, token=secrets.token_urlsafe(32)), True


def bind(host: str, port: int) -> socket.socket:
    """Return the listening socket; refuse an address that cannot be had with words that help."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(kind, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise OutputError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}. Another program may use the port: "
            "choose one with --port, or --port 0 for any."
        ) from error
    return listening
