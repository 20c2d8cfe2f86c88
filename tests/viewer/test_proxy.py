"""The network proxy: requests that GDAL makes by itself (redirects, CRS names) reach allowed hosts only."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

import pytest

from sader.viewer.security.proxy import CLOSED_PORT, MOST_HEADER, Proxy
from sader.viewer.security.sandbox import child_environment

CRS = "import sys; from rasterio.crs import CRS; CRS.from_user_input(sys.argv[1])"
READ = "import sys, rasterio; rasterio.open(sys.argv[1])"


def gdal(program, name, environment):
    """Run GDAL; only its requests matter, not its result."""
    subprocess.run([sys.executable, "-c", program, name], env=environment, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("allow", [(), ("good.example",)], ids=["nothing allowed", "one host allowed"])
def test_gdal_reaches_allowed_hosts_only(canary, allow):
    """A name of a reference system may be an address: GDAL as it comes goes there, GDAL in a child does not."""
    plain = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    gdal(CRS, f"{canary.url}/crs", plain)
    assert canary.calls == ["/crs"]  # the attack is real
    canary.calls.clear()
    proxy = Proxy(allow)
    proxy.start()
    try:
        assert (proxy.address == CLOSED_PORT) is (not allow)
        # no_proxy of the server's own environment must not open a way around.
        walled = child_environment({**os.environ, "NO_PROXY": "*", "no_proxy": "127.0.0.1"}, allow, proxy.address)
        gdal(CRS, f"{canary.url}/crs", walled)
        gdal(CRS, f"ESRI::{canary.url}/a.prj", walled)
        gdal(READ, f"/vsicurl/{canary.url}/a.tif", walled)
        gdal(READ, f"/vsicurl?url={canary.url}/a.tif", walled)
    finally:
        proxy.close()
    assert canary.calls == []


@pytest.fixture
def far(monkeypatch):
    """A host that answers with what it got; the proxy believes that every name is its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    real, asked = socket.create_connection, []

    def echo():
        while True:
            try:
                line, _ = listening.accept()
            except OSError:
                return
            with line:
                while piece := line.recv(1000):
                    line.sendall(piece.upper())

    threading.Thread(target=echo, daemon=True).start()

    def connect(address, timeout=None):
        asked.append(address)
        return real(listening.getsockname(), timeout=timeout)

    monkeypatch.setattr("sader.viewer.security.proxy.socket.create_connection", connect)
    yield real, asked
    listening.close()


def ask(real, proxy, line):
    host, port = proxy.address.removeprefix("http://").split(":")
    with real((host, int(port)), timeout=10) as caller:
        caller.sendall(line + b"\r\n\r\n")
        answer = caller.recv(1000)
        if b" 200 " not in answer:
            return answer
        caller.sendall(b"hello")
        return caller.recv(1000)


def test_allowed_hosts_are_connected_and_others_refused(far):
    real, asked = far
    proxy = Proxy(("Good.example",))
    proxy.start()
    assert ask(real, proxy, b"CONNECT good.example:443 HTTP/1.1") == b"HELLO"
    assert asked == [("good.example", 443)]
    for line in (
        b"CONNECT evil.example:443 HTTP/1.1", b"CONNECT good.example:22 HTTP/1.1", b"CONNECT good.example HTTP/1.1",
        b"CONNECT good.example:443@evil.example:443 HTTP/1.1", b"GET http://good.example/ HTTP/1.1",
        b"CONNECT 169.254.169.254:443 HTTP/1.1", b"CONNECT good.example.evil.example:443 HTTP/1.1", b"nonsense",
    ):  # fmt: skip
        assert ask(real, proxy, line).startswith(b"HTTP/1.1 403 "), line
    assert len(asked) == 1
    proxy.close()
    assert proxy.address == CLOSED_PORT


def test_a_header_without_end_is_dropped(far):
    real, _ = far
    proxy = Proxy(("good.example",))
    proxy.start()
    host, port = proxy.address.removeprefix("http://").split(":")
    with real((host, int(port)), timeout=10) as caller:
        caller.sendall(b"x" * (MOST_HEADER + 1))
        with contextlib.suppress(ConnectionResetError):  # hung up while there was more to read
            assert caller.recv(1) == b""
    proxy.close()


def test_connections_are_chained_through_the_proxy_of_the_environment(far):
    real, asked = far
    proxy = Proxy(("good.example",), {"HTTPS_PROXY": "http://proxy.example:3128"})
    proxy.start()
    # The echo answers the proxy's own CONNECT with itself, which is no "200": refused, and asked of the right one.
    assert ask(real, proxy, b"CONNECT good.example:443 HTTP/1.1") == b""
    assert asked == [("proxy.example", 3128)]
    proxy.close()
