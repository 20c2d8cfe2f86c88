"""The OpenAPI document is correct: requests generated from it get the described responses, and never a 500."""

from __future__ import annotations

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is needed: pip install schemathesis")
hypothesis = pytest.importorskip("hypothesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
# Each run of the demo or of a job takes seconds: what they do is tested elsewhere, here the doors are.
SLOW = {("POST", "/processes/{process}/execution"), ("POST", "/scenes")}


@pytest.mark.parametrize("examples", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_responses_match_the_document(server, examples):
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
    schema.config.update(base_url=server.url)
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if (operation.method.upper(), operation.path) in SLOW:
            continue

        @hypothesis.settings(
            max_examples=examples, deadline=None, derandomize=True, database=None, phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy())
        def attack(case):
            nonlocal tried
            tried += 1
            answer = case.call(base_url=server.url)
            case.validate_response(answer, checks=CHECKS)

        attack()
    assert tried > 9 * examples


@pytest.mark.parametrize("path", ["/processes/remove-clouds/execution", "/scenes", "/session"])
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{", b'{"inputs": 1}', b'{"inputs": {"paths": [1]}}', b"\xff\xfe", b'"x"']
)
def test_bodies_that_are_none(server, path, body):
    answer = server.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"


def test_every_way_in_is_in_the_document(server):
    said = server.client.get("/openapi.json").json()["paths"]
    assert {
        "/", "/conformance", "/processes", "/processes/{process}", "/processes/{process}/execution", "/jobs",
        "/jobs/{job}", "/jobs/{job}/results",
    } <= set(said)  # fmt: skip
    assert set(said["/jobs/{job}"]) == {"get", "delete"}
    assert "201" in said["/processes/{process}/execution"]["post"]["responses"]
