"""The only way out for the children: a proxy on this machine that connects to the allowed hosts and to nothing else.

The checks before (`inspect`, `sandbox`) look at the addresses that files name. GDAL may go on
from there: an allowed host can answer with a redirect to any other, and a reference system's name can be an address.
Whatever GDAL means to fetch, it goes through here.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

NOBODY = "http://127.0.0.1:9"
"""The proxy of a server that may fetch nothing: a port at which nothing listens."""
MOST_HEADER = 8 * 1024
WAIT_S = 30.0
_DONE = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Gate:
    """Listens on loopback from `start` to `close`; each connection has a thread of its own."""

    def __init__(self, allow: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._allow = {name.lower() for name in allow}
        said = environment or {}
        # Behind a proxy of a company, the way out leads through that one.
        proxy = urlsplit(said.get("HTTPS_PROXY") or said.get("https_proxy") or "")
        self._upstream = (proxy.hostname, proxy.port or 3128) if proxy.hostname else None
        self._listening: socket.socket | None = None

    @property
    def address(self) -> str:
        """What children are told to use."""
        return NOBODY if self._listening is None else f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def start(self) -> None:
        """Begin to listen, if there is anything that is allowed."""
        if self._allow and self._listening is None:
            self._listening = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=self._accept, args=(self._listening,), name="sader-gate", daemon=True).start()

    def close(self) -> None:
        """Stop to listen."""
        listening, self._listening = self._listening, None
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                caller, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(caller,), name="sader-gate-line", daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            caller.settimeout(WAIT_S)
            asked = _header(caller).split(b"\r\n", 1)[0].decode("latin-1")
            host = self._wanted(asked)
            if host is None:
                caller.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            with self._connect(host) as far:
                caller.sendall(_DONE)
                _pump(caller, far)

    def _wanted(self, line: str) -> str | None:
        """Return the host of "CONNECT host:443 HTTP/1.1", where it is allowed. Plain http has no CONNECT and no way."""
        words = line.split(" ")
        if len(words) != 3 or words[0] != "CONNECT":
            return None
        host, _, port = words[1].rpartition(":")
        return host.lower() if port == "443" and host.lower() in self._allow else None

    def _connect(self, host: str) -> socket.socket:
        if self._upstream is None:
            return socket.create_connection((host, 443), timeout=WAIT_S)
        far = socket.create_connection(self._upstream, timeout=WAIT_S)
        far.sendall(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n".encode())
        if b" 200" not in _header(far).split(b"\r\n", 1)[0]:
            far.close()
            raise ConnectionRefusedError(f"the proxy does not connect to {host}")
        return far


def _header(line: socket.socket) -> bytes:
    """Return what comes before an empty line, read byte by byte: what follows belongs to the other end."""
    found = b""
    while not found.endswith(b"\r\n\r\n"):
        one = line.recv(1)
        if not one or len(found) >= MOST_HEADER:
            raise ConnectionAbortedError("no header of a request")
        found += one
    return found


def _pump(one: socket.socket, other: socket.socket) -> None:
    """Hand bytes on in both directions until one end closes, or is silent for long."""
    while True:
        ready, _, _ = select.select([one, other], [], [], 4 * WAIT_S)
        if not ready:
            return
        for end in ready:
            piece = end.recv(64 * 1024)
            if not piece:
                return
            (other if end is one else one).sendall(piece)
