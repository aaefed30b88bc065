"""Our routes as ``/openapi.json`` describes them, with whatever fits that description and whatever does not.

No answer is a server error, every answer is as described, and nothing changes the state of the server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from integration.conftest import PROMPTS, Checkpoints
from support.raw import RawUpdate, read_tensors
from support.server import ServerProcess

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
#: The stream of events never ends.
LEFT_OUT = {"/reload/events"}


def describe(server: ServerProcess, paths: Collection[str] | None = None) -> dict[str, Any]:
    """Return the server's own description of the routes ``paths``, of all below ``/reload`` by default."""
    document: dict[str, Any] = httpx.get(f"{server.url}/openapi.json", **server.how).json()
    document["paths"] = {
        path: item
        for path, item in document["paths"].items()
        if (path.startswith("/reload") if paths is None else path in paths)
    }
    return document


def bounded(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def facts(server: ServerProcess) -> tuple[Any, ...]:
    status = server.status()
    return status["state"], status["weight_version"], status["update"], status["fingerprint"]


def each_call(
    server: ServerProcess,
    headers: dict[str, str],
    look: Callable[[Any, Any], None],
    examples: int,
    paths: Collection[str] | None = None,
) -> int:
    """Make calls of every operation, hand each answer to ``look`` and return how many operations there were."""
    schema = schemathesis.openapi.from_dict(describe(server, paths))
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.path not in LEFT_OUT]
    for operation, mode in itertools.product(operations, schemathesis.GenerationMode):
        if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body and not operation.query:
            continue  # There is no wrong way to ask.

        @given(case=operation.as_strategy(generation_mode=mode))
        @bounded(examples)
        def call(case: Any) -> None:
            response = case.call(base_url=server.url, headers=headers, timeout=60)
            look(case, response)

        call()
    return len(operations)


def test_the_description_is_complete(server: ServerProcess) -> None:
    document = describe(server)
    names = ("status", "manifest", "verify", "begin", "stream", "keep", "prepare", "finish", "abort", "rollback")
    assert set(document["paths"]) >= {
        "/reload",
        "/reload/events",
        "/reload/history",
        *(f"/reload/{name}" for name in names),
    }
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["description"], path
            assert {"401", "422", "503"} <= set(operation["responses"]), path
            if method == "post":
                body = operation["requestBody"]["content"]
                assert body["application/json"]["schema"]["properties"], path
    begin = document["paths"]["/reload/begin"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"weight_version", "transport"} <= set(begin["required"])
    # Either of them: the description of a model has no way to ask for exactly one.
    assert {"manifest", "manifest_digest"} <= set(begin["properties"])
    assert "application/octet-stream" in document["paths"]["/reload/stream"]["post"]["requestBody"]["content"]
    assert "$ref" not in str(begin)


def test_whatever_is_sent_is_answered_as_described_and_changes_nothing(
    server: ServerProcess, cold_a: dict[str, str]
) -> None:
    before = facts(server)
    seen: set[tuple[str, int]] = set()

    def look(case: Any, response: Any) -> None:
        seen.add((case.path, response.status_code))
        assert response.status_code != 401, "the token did not arrive"
        case.validate_response(response, checks=CHECKS)
        assert facts(server) == before

    assert each_call(server, server.headers(), look, examples=20) >= 8
    # What fits the description is understood, and what does not is refused for what it is.
    assert seen >= {(f"/reload/{name}", 200) for name in ("status", "manifest", "verify", "history")}
    after_begin = ("stream", "keep", "prepare", "finish", "abort")
    assert seen >= {(f"/reload/{name}", 422) for name in ("begin", "verify", *after_begin)}
    assert seen >= {(f"/reload/{name}", 409) for name in after_begin}
    assert server.answer(PROMPTS[0]) == cold_a[PROMPTS[0]]


@pytest.mark.case("C24")
def test_without_a_token_nothing_is_answered_but_the_status(server: ServerProcess) -> None:
    def look(case: Any, response: Any) -> None:
        case.validate_response(response, checks=CHECKS)
        assert response.status_code == 401 or (case.method, case.path) == ("GET", "/reload/status")

    each_call(server, {}, look, examples=8)


def test_calls_in_any_order_leave_a_server_that_a_push_repairs(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    tensors = read_tensors(checkpoints.a)
    names = st.sampled_from(["begin", "stream", "stream", "keep", "prepare", "finish", "abort"])

    @given(st.lists(st.tuples(names, st.integers(0, 3)), max_size=8))
    @bounded(15)
    def calls(steps: list[tuple[str, int]]) -> None:
        update = RawUpdate(server, tensors, version="A", bucket_bytes=200_000)
        last = len(update.manifest.buckets) - 1
        for name, number in steps:
            answer = update.stream(min(number, last)) if name == "stream" else getattr(update, name)()
            assert answer.status_code in (200, 409, 503), (name, answer.text)
            status = server.status()
            assert status["state"] in ("serving", "updating", "failed")
            assert status["serving"] == (status["state"] == "serving")
        if (running := server.status()["update"]) is not None:
            assert running["update_id"] == update.update_id
            update.abort()
        update.client.close()

    calls()
    final = RawUpdate(server, tensors, version="A")
    final.begin().raise_for_status()
    final.stream_all()
    final.finish().raise_for_status()
    assert server.answer(PROMPTS[0]) == cold_a[PROMPTS[0]]
