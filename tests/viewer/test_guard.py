"""Access control: other sites, other host names, clients without the token, oversized bodies."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
from urllib.parse import urlparse

import pytest

from sader.errors import ConfigError
from sader.viewer.launch import with_token
from sader.viewer.security.guard import Sessions
from sader.viewer.settings import ServeSettings, is_loopback

from .conftest import LIMITS, serving

TOKEN = "a-token-that-only-the-owner-knows"


def raw(url, method, path, headers, body=b""):
    """Send exactly these headers; return status, headers and body."""
    line = http.client.HTTPConnection(urlparse(url).netloc, timeout=30)
    line.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers:
        line.putheader(name, value)
    line.putheader("Content-Length", str(len(body)))
    line.endheaders(body)
    answer = line.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    line.close()
    return found


def host_of(url):
    return urlparse(url).netloc


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "0.0.0.0", "192.168.1.5"]
)
def test_other_names_are_not_answered(server, name):
    """DNS rebinding: the attacker's name points at 127.0.0.1, and the browser sends that name."""
    status, _, body = raw(server.url, "GET", "/jobs", [("Host", name)])
    assert status in (400, 421)
    assert b"jobID" not in body


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_names_of_this_machine_are_answered(server, name):
    port = host_of(server.url).rsplit(":", 1)[1]
    assert raw(server.url, "GET", "/conformance", [("Host", f"{name}:{port}")])[0] == 200


@pytest.mark.parametrize(
    "name", ["localhost:80/evil", "localhost:80@evil.example", "localhost:", "localhost:x", "[::1", "[::1]evil", "a b"]
)
def test_a_host_is_a_name_and_a_port(server, name):
    """Links in responses are built from it."""
    status, _, body = raw(server.url, "GET", "/?f=json", [("Host", name)])
    assert status in (400, 421)
    assert b"links" not in body


def test_huge_headers_are_refused_and_the_server_lives(server):
    own = ("Host", host_of(server.url))
    for headers in ([("X", "a" * 2**20)], [(f"X-{n}", "a") for n in range(50_000)]):
        with contextlib.suppress(OSError):  # it hung up in the middle
            assert raw(server.url, "GET", "/conformance", [own, *headers])[0] in (400, 431)
    with contextlib.suppress(OSError):
        assert raw(server.url, "GET", "/" + "a" * 2**20, [own])[0] in (400, 414)
    assert server.client.get("/conformance").status_code == 200


def test_two_hosts_are_refused(server):
    own = host_of(server.url)
    assert raw(server.url, "GET", "/jobs", [("Host", own), ("Host", "evil.example")])[0] == 400


@pytest.mark.parametrize(
    "headers",
    [
        [("Origin", "https://evil.example")],
        [("Origin", "null")],
        [("Origin", "http://localhost:1")],
        [("Sec-Fetch-Site", "cross-site")],
        [("Sec-Fetch-Site", "same-site")],
    ],
)
def test_pages_of_other_sites_change_nothing(server, headers, finished):
    _, job = finished
    own = [("Host", host_of(server.url)), *headers]
    body = json.dumps({"inputs": {"paths": ["small"]}}).encode()
    # text/plain is what a form of another site can send without being asked first.
    for kind in ("text/plain", "application/json"):
        path = "/processes/remove-clouds/execution"
        assert raw(server.url, "POST", path, [*own, ("Content-Type", kind)], body)[0] == 403
    assert raw(server.url, "DELETE", f"/jobs/{job}", own)[0] == 403
    assert raw(server.url, "PUT", f"/scenes/{'0' * 24}/files/a.tif", own, b"x")[0] == 403
    assert server.client.get(f"/jobs/{job}").json()["status"] == "successful"


def test_the_own_page_is_accepted(server):
    own = [("Host", host_of(server.url)), ("Origin", server.url), ("Sec-Fetch-Site", "same-origin")]
    assert raw(server.url, "POST", "/scenes", [*own, ("Content-Type", "application/json")], b"{}")[0] == 201


def test_answers_carry_safe_headers(server):
    for path, accept in (("/", "text/html"), ("/conformance", "*/*"), ("/nothing", "*/*"), ("/static/app.js", "*/*")):
        headers = server.client.get(path, headers={"Accept": accept}).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers or "uvicorn" not in headers["server"] or path


def test_bodies_are_bounded_with_and_without_a_declared_length(server):
    big = json.dumps({"inputs": {"paths": ["x" * 900] * 90}}).encode()
    assert len(big) > LIMITS.body_bytes
    headers = {"Content-Type": "application/json"}
    assert server.client.post("/scenes", content=big, headers=headers).status_code == 413

    def pieces():
        yield from (big[at : at + 1000] for at in range(0, len(big), 1000))

    assert server.client.post("/scenes", content=pieces(), headers=headers).status_code == 413


def test_every_request_needs_the_token(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(ServeSettings(data=tmp_path, port=0, token=TOKEN, limits=LIMITS)) as server:
        client = server.client
        assert client.get("/", headers={"Accept": "text/html"}).status_code == 200  # the page with its sign-in form
        assert client.get("/session").json() == {"needed": True, "open": False}
        for path in ("/jobs", "/processes", "/conformance", "/folder", "/openapi.json", "/nothing", "/static"):
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("//jobs", "/./jobs", "/static/../jobs", "/session/../jobs", "/%6aobs"):
            assert raw(server.url, "GET", path, [("Host", host_of(server.url))])[0] in (401, 404), path
        assert client.post("/scenes", json={}).status_code == 401
        wrong = [
            "",
            "Bearer",
            f"Bearer {TOKEN[:-1]}",
            f"Bearer {TOKEN}x",
            f"Basic {TOKEN}",
            TOKEN,
            "Bearer \xe9",
        ]
        for given in wrong:
            assert client.get("/jobs", headers={"Authorization": given.encode("latin-1")}).status_code == 401, given
        assert client.get(f"/jobs?token={TOKEN}").status_code == 401  # never in an address
        assert client.get("/jobs", headers={"Cookie": "sader_session=guess"}).status_code == 401
        assert client.get("/jobs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200

        assert client.post("/session", json={"token": "wrong"}).status_code == 401
        opened = client.post("/session", json={"token": TOKEN})
        assert opened.status_code == 200
        cookie = opened.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        assert client.get("/jobs").status_code == 200  # by the cookie
        assert client.get("/session").json() == {"needed": True, "open": True}
        status = raw(server.url, "POST", "/scenes", [
            ("Host", host_of(server.url)), ("Origin", "https://evil.example"), ("Content-Type", "application/json"),
            ("Cookie", cookie.partition(";")[0]),
        ], b"{}")[0]  # fmt: skip
        assert status == 403  # the cookie of a browser does not help another site
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("httpx")]
    assert not any(TOKEN in text for text in ours if "token=" not in text)


def test_tokens_are_compared_in_constant_time(monkeypatch):
    compared = []
    import hmac

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(1) or real(a, b))
    assert Sessions(TOKEN).accepts(TOKEN, "a")
    assert not Sessions(TOKEN).accepts(TOKEN[:-1], "a")
    assert not Sessions(None).accepts("", "a")
    assert len(compared) == 2


def test_a_server_that_others_can_reach_always_has_a_token(tmp_path):
    for host in ("0.0.0.0", "::", "192.168.1.5", "my-machine"):
        assert not is_loopback(host)
        settings, made = with_token(ServeSettings(data=tmp_path, host=host), None)
        assert made
        assert len(settings.token or "") > 30
    assert with_token(ServeSettings(data=tmp_path), None)[0].token is None
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert with_token(ServeSettings(data=tmp_path, host="0.0.0.0"), file)[0].token == TOKEN
    file.write_text("short")
    with pytest.raises(ConfigError, match="at least 16"):
        with_token(ServeSettings(data=tmp_path), file)


def test_names_are_checked_on_a_public_address_too(tmp_path):
    settings = ServeSettings(
        data=tmp_path, port=0, host="0.0.0.0", token=TOKEN, allow_hosts=("maps.example.org",), limits=LIMITS
    )
    with serving(settings) as server:
        bearer = ("Authorization", f"Bearer {TOKEN}")
        for name, status in (
            ("evil.example", 421),
            ("maps.example.org", 200),
            ("192.168.1.5:80", 200),
            ("127.0.0.1", 200),
        ):
            assert raw(server.url, "GET", "/conformance", [("Host", name), bearer])[0] == status, name
