"""The worker processes' only connection to the network: a local HTTP proxy that connects to allowed hosts only.

`sandbox` checks the addresses that files name. GDAL may contact further ones by itself: an allowed host can redirect
to any other, and the name of a reference system can be an address. All of these requests go through this proxy.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

CLOSED_PORT = "http://127.0.0.1:9"
"""Proxy address of a server without allowed hosts: the discard port, on which nothing listens."""
MOST_HEADER = 8 * 1024
TIMEOUT_S = 30.0


class Proxy:
    """Accepts CONNECT requests on loopback between `start` and `close`; one thread per connection."""

    def __init__(self, allow: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._allow = {name.lower() for name in allow}
        variables = environment or {}
        # Where the machine itself reaches the network through a proxy, connections are chained through that one.
        upstream = urlsplit(variables.get("HTTPS_PROXY") or variables.get("https_proxy") or "")
        self._upstream = (upstream.hostname, upstream.port or 3128) if upstream.hostname else None
        self._listening: socket.socket | None = None

    @property
    def address(self) -> str:
        """Address for GDAL_HTTP_PROXY of the worker processes."""
        return CLOSED_PORT if self._listening is None else f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def start(self) -> None:
        """Start to listen, unless no host is allowed."""
        if self._allow and self._listening is None:
            self._listening = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=self._accept, args=(self._listening,), name="sader-proxy", daemon=True).start()

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
                client, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="sader-proxy-connection", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(TIMEOUT_S)
            host = self._allowed_host(_header(client).split(b"\r\n", 1)[0].decode("latin-1"))
            if host is None:
                client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            with self._connect(host) as remote:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                _forward(client, remote)

    def _allowed_host(self, line: str) -> str | None:
        """Return the host of "CONNECT host:443 HTTP/1.1" if it is allowed. Plain http uses no CONNECT: refused."""
        words = line.split(" ")
        if len(words) != 3 or words[0] != "CONNECT":
            return None
        host, _, port = words[1].rpartition(":")
        return host.lower() if port == "443" and host.lower() in self._allow else None

    def _connect(self, host: str) -> socket.socket:
        if self._upstream is None:
            return socket.create_connection((host, 443), timeout=TIMEOUT_S)
        remote = socket.create_connection(self._upstream, timeout=TIMEOUT_S)
        remote.sendall(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n".encode())
        if b" 200" not in _header(remote).split(b"\r\n", 1)[0]:
            remote.close()
            raise ConnectionRefusedError(f"the upstream proxy does not connect to {host}")
        return remote


def _header(connection: socket.socket) -> bytes:
    """Return the bytes up to the first empty line, read one by one: the rest belongs to the tunnelled connection."""
    found = b""
    while not found.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte or len(found) >= MOST_HEADER:
            raise ConnectionAbortedError("incomplete or oversized request header")
        found += byte
    return found


def _forward(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes in both directions until one end closes or both are idle for four timeouts."""
    while True:
        ready, _, _ = select.select([one, other], [], [], 4 * TIMEOUT_S)
        if not ready:
            return
        for end in ready:
            piece = end.recv(64 * 1024)
            if not piece:
                return
            (other if end is one else one).sendall(piece)
