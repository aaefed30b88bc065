"""What can be known before the first write is refused before it, by name, and changes nothing."""

from __future__ import annotations

import base64
import itertools
import pickle
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from support.raw import RawUpdate, error_of, read_tensors
from support.server import ServerProcess
from support.tiny import checkpoint
from weightpush_client import PushError, WeightPusher

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def _without(tensors: Tensors, name: str) -> Tensors:
    return {key: value for key, value in tensors.items() if key != name}


BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], str, str]] = {
    "unknown": (lambda t: {**t, "model.layers.9.extra": torch.ones(2)}, "unknown", "model.layers.9.extra"),
    "missing": (lambda t: _without(t, DOWN), "missing", DOWN),
    "missing part of a fused weight": (lambda t: _without(t, QUERY), "missing", QUERY),
    "wrong shape": (lambda t: {**t, DOWN: t[DOWN].T.contiguous()}, "wrong_shape", DOWN),
    "one row too many": (
        lambda t: {**t, "lm_head.weight": torch.cat([t["lm_head.weight"], t["lm_head.weight"][:1]])},
        "wrong_shape",
        "lm_head.weight",
    ),
    "wrong dtype": (lambda t: {**t, DOWN: t[DOWN].to(torch.int8)}, "wrong_dtype", DOWN),
    "empty": (lambda t: {}, "empty_manifest", ""),
}


def unchanged(server: ServerProcess, cold: dict[str, str]) -> None:
    status = server.status()
    assert status["serving"]
    assert status["update"] is None
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.case("C10", "C23", "C41", "C58")
def test_a_manifest_that_does_not_fit_is_refused_by_name(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str], kind: str
) -> None:
    breaking, problem, name = BROKEN[kind]
    before = server.status()["weight_version"]
    update = RawUpdate(server, breaking(read_tensors(checkpoints.b)), version="bad")
    answer = update.begin()
    assert answer.status_code == 422
    error = error_of(answer)
    assert error["code"] == "manifest_rejected"
    assert error["state"] == "serving"
    assert [(p["kind"], p["name"]) for p in error["details"]["problems"]] == [(problem, name)]
    assert name in error["message"]
    assert server.status()["weight_version"] == before
    assert server.status()["last_error"]["code"] == "manifest_rejected"
    unchanged(server, cold_a)


@pytest.mark.case("C23")
def test_a_larger_model_is_refused_with_the_first_twenty_offenders(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    tensors = read_tensors(checkpoints.b)
    deeper = {name.replace("layers.1.", f"layers.{n}."): t for n in range(1, 6) for name, t in tensors.items()}
    answer = RawUpdate(server, deeper, version="bad").begin()
    details = error_of(answer)["details"]
    assert answer.status_code == 422
    assert len(details["problems"]) == 20
    assert details["total"] == 4 * 11
    assert {p["kind"] for p in details["problems"]} == {"unknown"}
    assert "and 24 more" in error_of(answer)["message"]
    unchanged(server, cold_a)


def test_a_duplicate_is_refused(server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="bad")
    manifest: dict[str, Any] = {"tensors": update.manifest.model_dump(mode="json")["tensors"]}
    manifest["tensors"].append(manifest["tensors"][0])
    answer = update.begin(manifest=manifest)
    assert error_of(answer)["details"]["problems"][0]["kind"] == "duplicate"
    unchanged(server, cold_a)


@pytest.mark.case("C2")
def test_nccl_without_a_gpu_is_refused(server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="bad")
    transport = {"name": "nccl", "host": "127.0.0.1", "port": 1, "world_size": 2, "key": "0" * 32}
    answer = update.begin(transport=transport)
    assert (answer.status_code, error_of(answer)["code"]) == (422, "transport_unavailable")
    with pytest.raises(PushError) as refused, WeightPusher(server.url, token=TOKEN, transport="nccl") as pusher:
        pusher.push(checkpoints.b, weight_version="bad")
    assert refused.value.code == "transport_unavailable"
    unchanged(server, cold_a)


@pytest.mark.case("C70")
def test_a_data_port_that_nobody_listens_on_is_named(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.b), version="bad")
    transport = {"name": "gloo", "host": "127.0.0.1", "port": 9, "world_size": 2, "key": "0" * 32}
    answer = update.begin(transport=transport, deadlines={"rendezvous_s": 1.0})
    assert answer.status_code == 422
    assert error_of(answer)["code"] == "rendezvous_failed"
    assert "127.0.0.1:9" in error_of(answer)["message"]
    unchanged(server, cold_a)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weight_version": "two words"}, "weight_version"),
        ({"weight_version": "line\nbreak"}, "weight_version"),
        ({"weight_version": ""}, "weight_version"),
        ({"mode": "sideways"}, "mode"),
        ({"in_flight": "drop"}, "in_flight"),
        ({"deadlines": {"lease_s": -1}}, "deadlines.lease_s"),
        ({"transport": {"name": "carrier-pigeon"}}, "transport.name"),
        ({"transport": {"name": "gloo"}}, "transport"),
        ({"manifest": {"tensors": [{"name": "w", "dtype": "bfloat16", "shape": [-1]}]}}, "manifest.tensors.0.shape.0"),
        ({"manifest": {"tensors": [{"name": "w", "dtype": "bf17", "shape": [1]}]}}, "manifest.tensors.0.dtype"),
        ({"manifest": {"tensors": [{"name": "w", "dtype": "int8", "shape": [10**4200]}]}}, "manifest.tensors.0"),
        ({"manifest": {"tensors": [{"name": "w", "dtype": "int8", "shape": [2**40, 2**40]}]}}, "manifest.tensors.0"),
        ({"manifest": {"tensors": [{"name": "w\u0001", "dtype": "int8", "shape": [1]}]}}, "manifest.tensors.0.name"),
        ({"transport": {"name": "gloo", "host": "a" * 70, "port": 1, "world_size": 2, "key": "0" * 32}}, "transport"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_body_that_does_not_fit_names_the_field(
    server: ServerProcess, checkpoints: Checkpoints, change: dict[str, Any], field: str
) -> None:
    answer = RawUpdate(server, read_tensors(checkpoints.b), version="bad").begin(**change)
    assert answer.status_code == 422
    assert error_of(answer)["code"] == "invalid_request"
    assert error_of(answer)["details"]["problems"][0]["field"].startswith(field)
    assert server.status()["update"] is None


@pytest.mark.case("C26")
def test_no_body_is_ever_unpickled(server: ServerProcess, tmp_path: Any) -> None:
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(marker), "w"))

    evil = pickle.dumps(Evil())
    routes = ("begin", "stream", "keep", "prepare", "finish", "abort", "rollback", "status", "manifest", "events", "")
    kinds = ("application/json", "application/octet-stream", "application/python-pickle")
    with server.client() as client:
        for route, kind, content in itertools.product(routes, kinds, (evil, base64.b64encode(evil))):
            answer = client.post(f"/reload/{route}".rstrip("/"), content=content, headers={"Content-Type": kind})
            assert 400 <= answer.status_code < 500, (route, kind, answer.text)
    assert not marker.exists()


@pytest.mark.case("C17", "C38")
def test_of_two_begins_one_wins(server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]) -> None:
    tensors = read_tensors(checkpoints.a)
    for _ in range(50):
        updates = [RawUpdate(server, tensors, version=f"A-{number}") for number in range(2)]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda update: update.begin(), updates))
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        winner, loser = sorted(zip(answers, updates, strict=True), key=lambda pair: pair[0].status_code)
        error = error_of(loser[0])
        assert error["code"] == "update_in_progress"
        assert error["details"]["running"] == winner[1].update_id
        assert winner[1].abort().json()["state"] in ("serving", "failed")
        for update in updates:
            update.client.close()
    repaired = RawUpdate(server, tensors, version="A")
    repaired.begin().raise_for_status()
    repaired.stream_all()
    repaired.finish().raise_for_status()
    unchanged(server, cold_a)


@pytest.mark.case("C24", "C25", "C84")
def test_every_control_route_of_the_real_server_needs_the_token(server: ServerProcess) -> None:
    with httpx.Client(trust_env=False) as client:
        for route in (
            "begin",
            "stream",
            "keep",
            "prepare",
            "finish",
            "abort",
            "manifest",
            "events",
            "",
            "/begin",
            "rollback",
        ):
            for prefix in ("/reload/", "//reload/", "/RELOAD/", "/./reload/"):
                for method in ("GET", "POST", "HEAD", "OPTIONS"):
                    for headers in ({}, {"Authorization": "Bearer wrong"}):
                        answer = client.request(method, f"{server.url}{prefix}{route}", headers=headers)
                        assert answer.status_code == 401, (method, prefix, route)
        assert client.get(f"{server.url}/reload/status").status_code == 200
        answer = client.post(f"{server.url}/collective_rpc", json={"method": "weightpush_describe"})
        assert answer.status_code == 404
    with pytest.raises(PushError) as refused, WeightPusher(server.url, token="wrong") as pusher:
        pusher.push({"w": torch.ones(1)}, weight_version="bad")
    assert refused.value.code == "unauthorized"
    assert TOKEN not in server.log.read_text()


def test_the_callers_of_another_architecture_are_told_so(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str], tmp_path: Any
) -> None:
    other = checkpoint("qwen2", 1, tmp_path)
    with pytest.raises(PushError, match=r"unknown: .*bias") as refused, WeightPusher(server.url, token=TOKEN) as pusher:
        pusher.push(other, weight_version="bad")
    assert refused.value.server == server.url
    unchanged(server, cold_a)


def test_errors_of_any_size_leave_the_server_usable(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    tensors = [{"name": "\N{SNOWMAN}" * 500 + str(n), "dtype": "int8", "shape": [2**16] * 3} for n in range(300)]
    update = RawUpdate(server, read_tensors(checkpoints.b), version="bad")
    for _ in range(12):
        answer = update.begin(update_id=uuid.uuid4().hex, manifest={"tensors": tensors})
        assert (answer.status_code, error_of(answer)["code"]) == (422, "manifest_rejected")
        assert error_of(answer)["details"]["total"] == 325
    unchanged(server, cold_a)


def test_one_id_with_two_bodies_is_no_repetition(server: ServerProcess, checkpoints: Checkpoints) -> None:
    update = RawUpdate(server, read_tensors(checkpoints.a), version="A")
    update.begin().raise_for_status()
    other = update.begin(weight_version="other")
    assert (other.status_code, error_of(other)["code"]) == (409, "update_in_progress")
    update.begin().raise_for_status()
    update.stream_all()
    update.finish().raise_for_status()
    assert server.status()["weight_version"] == "A"
