"""vLLM's own trainer engine and HTTP client, as they are installed, against a real server started with --compat vllm.

Only their NCCL communicator is replaced, on both sides, by one over Gloo (``support.gloo_plane``).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import ModuleSource, VLLMWeightSyncClient

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from integration.test_fuzz_http import CHECKS, each_call
from integration.test_security import check_rules
from support import vllm_trainer
from support.raw import read_tensors
from support.resources import copy_sizes
from support.server import ServerProcess
from support.vllm_trainer import TensorSource, credentials, trainer_engine
from weightpush_client import ErrorCode, PushError, WeightPusher
from weightpush_client.vllm import VllmSource, VllmSyncClient
from weightpush_server.compat.router import VLLM_PATHS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


@dataclass(frozen=True)
class Known:
    """What a server says that was brought to a checkpoint by our own client: answers, and the fingerprint."""

    answers: dict[str, str]
    fingerprint: str


@pytest.fixture(scope="module")
def started(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, dict[str, Known]]]:
    """A server that has served B once and serves A now, and what it said of each."""
    folder = tmp_path_factory.mktemp("vllm-routes")
    environment = {"WP_TEST_VLLM_PLANE": "gloo"}
    with ServerProcess(
        checkpoints.a, ["--compat", "vllm"], folder=folder, token=TOKEN, environment=environment
    ) as server:
        known = {}
        for label, directory in (("B", checkpoints.b), ("A", checkpoints.a)):
            push(server, directory, label)
            answers = {prompt: server.answer(prompt) for prompt in PROMPTS}
            known[label] = Known(answers, server.status()["fingerprint"])
        assert known["A"].fingerprint != known["B"].fingerprint
        yield server, known


def push(server: ServerProcess, directory: Path, version: str) -> None:
    with WeightPusher(server.url, token=TOKEN, transport="http") as pusher:
        pusher.push(directory, weight_version=version)


@pytest.fixture
def known(started: tuple[ServerProcess, dict[str, Known]]) -> dict[str, Known]:
    return started[1]


@pytest.fixture
def server(
    started: tuple[ServerProcess, dict[str, Known]], checkpoints: Checkpoints, tmp_path: Path
) -> Iterator[ServerProcess]:
    """The server of this module, serving A; clients of this process that know of no token send it."""
    server = started[0]
    server.set_faults()
    call(server, "/shutdown_weight_transfer_engine")
    call(server, "/resume")
    if server.status()["fingerprint"] != started[1]["A"].fingerprint:
        push(server, checkpoints.a, "A")
    with credentials(server.url, TOKEN, tmp_path):
        yield server
    server.set_faults()


def call(server: ServerProcess, path: str, method: str = "POST", **options: Any) -> httpx.Response:
    """Make a call with the token, as a bearer."""
    with server.client(timeout_s=120) as client:
        return client.request(method, path, **options)


def says(server: ServerProcess, known: Known) -> bool:
    """Whether the server serves these weights, by its fingerprint and its answers."""
    same = {prompt: server.answer(prompt) for prompt in PROMPTS} == known.answers
    assert same == (server.status()["fingerprint"] == known.fingerprint)
    return same


# Whole rounds


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_vllms_trainer_engine_pushes_round_after_round(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known], packed: bool
) -> None:
    source = TensorSource(read_tensors(checkpoints.b))
    with trainer_engine(server.url, source, packed=packed) as engine:
        engine.send_weights()
        assert says(server, known["B"])
        last = server.status()["last_update"]
        assert (last["transport"], last["mode"], last["tensors"]) == ("vllm", "staged", len(source.tensors))
        assert server.complete(PROMPTS[0]).headers["X-Weight-Version"] == last["weight_version"]
        assert re.fullmatch(r"vllm-\d+", last["weight_version"])
        # The next round of the same group, with other weights, and a third with the same.
        for label, directory in (("A", checkpoints.a), ("B", checkpoints.b), ("B", checkpoints.b)):
            source.tensors = read_tensors(directory)
            engine.send_weights()
            assert says(server, known[label])
        # Nothing of what was collected is kept.
        assert copy_sizes(server) == []
        sizes = engine.model_update_group.sizes
        assert len(sizes) == 4 * (6 if packed else len(source.tensors))


def test_a_trainer_in_float32_ends_where_a_cast_checkpoint_would(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    wide = {name: tensor.float() for name, tensor in read_tensors(checkpoints.b).items()}
    with trainer_engine(server.url, TensorSource(wide)) as engine:
        engine.send_weights()
    assert says(server, known["B"])


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_round_of_many_calls_ends_with_its_version(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    """The calls one by one, as trainers make them that name few tensors at a time."""
    client = HTTPVLLMWeightSyncClient(server.url)
    tensors = read_tensors(checkpoints.b)
    with trainer_engine(server.url, TensorSource(tensors), packed=False) as engine:
        client.start_weight_update()
        client.start_weight_update()  # Nothing came yet: the same round.
        for name, tensor in tensors.items():
            info = {"names": [name], "dtype_names": ["bfloat16"], "shapes": [list(tensor.shape)]}
            assert tensor.dtype is torch.bfloat16
            posting = in_background(lambda info=info: client.update_weights(info))
            engine.model_update_group.broadcast(tensor, src=0)
            posting.join(60)
        status = server.status()
        assert (status["state"], status["update"]["tensors_done"]) == ("staging", len(tensors))
        assert server.answer(PROMPTS[0]) == known["A"].answers[PROMPTS[0]]
        client.finish_weight_update("step-17")
    assert says(server, known["B"])
    assert call(server, "/weight_info", "GET").json() == {"weight_version": "step-17"}
    assert server.complete(PROMPTS[0]).headers["X-Weight-Version"] == "step-17"
    # And what names weights afterwards.
    answer = call(server, "/update_weight_version", json={"new_version": "step-17-final"})
    assert answer.json() == {"success": True, "new_version": "step-17-final"}
    assert call(server, "/weight_info", "GET").json() == {"weight_version": "step-17-final"}
    assert {worker["weight_version"] for worker in server.status()["workers"]} == {"step-17-final"}


# Our own objects in vLLM's places, and the other way round


def test_our_client_and_our_source_in_vllms_engine(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", os.devnull)
    with VllmSyncClient(server.url, token=TOKEN) as client:
        assert isinstance(client, VLLMWeightSyncClient)
        assert client.world_size == 2
        with trainer_engine(server.url, VllmSource(checkpoints.b), client=client) as engine:
            engine.send_weights()
            assert says(server, known["B"])
        client.shutdown_weight_transfer_engine()
        with pytest.raises(PushError, match="in no trainer's group") as error:
            client.start_weight_update()
        assert (error.value.code, error.value.server) == (ErrorCode.TRANSPORT_UNAVAILABLE, server.url)
    with VllmSyncClient(server.url, token="wrong") as stranger, pytest.raises(PushError) as error:
        stranger.start_weight_update()
    assert error.value.code is ErrorCode.UNAUTHORIZED


def test_a_module_in_vllms_engine_has_the_names_of_its_checkpoint(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    model = torch.compile(AutoModelForCausalLM.from_pretrained(checkpoints.b, dtype="bfloat16"))
    with trainer_engine(server.url, VllmSource(model)) as engine:
        engine.send_weights()
    assert says(server, known["B"])


@pytest.mark.parametrize("transport", ["shm", "http"])
def test_a_source_for_vllms_engines_in_our_pusher(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known], transport: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints.b, dtype="bfloat16")
    with WeightPusher(server.url, token=TOKEN, transport=transport, bucket_bytes=40_000) as pusher:
        pusher.push(ModuleSource(model), weight_version="from-vllms-source")
    assert says(server, known["B"])


@pytest.mark.case("C89")
def test_no_way_to_new_weights_leaves_features_of_the_old_encoder(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    """A text model has none; what counts is that every worker was asked, before the version was published."""

    def emptied() -> int:
        return server.log.read_text().count("wp_test_plugin: the encoder cache is empty")

    before = emptied()
    with trainer_engine(server.url, TensorSource(read_tensors(checkpoints.b))) as engine:
        engine.send_weights()
    assert emptied() == before + 1
    push(server, checkpoints.a, "A")
    assert emptied() == before + 2
    assert says(server, known["A"])


# What is refused


def refused(error: requests.HTTPError) -> tuple[int, str, str]:
    """Return status, code and message of a refusal; its shape is vLLM's."""
    assert error.response is not None
    detail = error.response.json()["error"]
    assert detail["code"] == error.response.status_code
    assert set(detail) == {"message", "type", "param", "code"}
    return error.response.status_code, detail["type"], detail["message"]


def test_refused_tensors_do_not_strand_the_trainer_in_its_broadcast(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    good = read_tensors(checkpoints.b)
    first = next(iter(good))
    source = TensorSource({**good, first: good[first][:-1].clone()})
    with trainer_engine(server.url, source) as engine:
        with pytest.raises(requests.HTTPError) as error:
            engine.send_weights()
        status, code, message = refused(error.value)
        assert (status, code) == (422, "manifest_rejected")
        assert first in message
        assert says(server, known["A"])
        assert server.status()["state"] == "serving"
        # The group is as good as before.
        source.tensors = good
        engine.send_weights()
    assert says(server, known["B"])


def test_half_a_checkpoint_is_never_served(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    tensors = read_tensors(checkpoints.b)
    half = dict(list(tensors.items())[: len(tensors) // 2])
    with trainer_engine(server.url, TensorSource(half)) as engine, pytest.raises(requests.HTTPError) as error:
        engine.send_weights()
    status, code, message = refused(error.value)
    assert (status, code) == (422, "manifest_rejected")
    assert list(tensors)[-1] in message or "more" in message
    assert copy_sizes(server) == []
    assert says(server, known["A"])
    with pytest.raises(requests.HTTPError) as error:
        HTTPVLLMWeightSyncClient(server.url).finish_weight_update()  # As TRL does, whatever came before.
    assert refused(error.value)[:2] == (409, "stale_update")


def test_weights_that_nobody_announced_are_received_and_refused(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    client = HTTPVLLMWeightSyncClient(server.url)
    tensor = torch.ones(64, dtype=torch.bfloat16)
    info = {"names": ["x"], "dtype_names": ["bfloat16"], "shapes": [[64]]}
    errors: list[Exception] = []

    def post() -> None:
        try:
            client.update_weights(info)
        except requests.HTTPError as error:
            errors.append(error)

    with trainer_engine(server.url, TensorSource(read_tensors(checkpoints.b)), packed=False) as engine:
        posting = in_background(post)
        engine.model_update_group.broadcast(tensor, src=0)  # Returns: nobody is stranded.
        posting.join(60)
        assert refused(errors[0])[:2] == (409, "stale_update")
        assert says(server, known["A"])
        engine.send_weights()
    assert says(server, known["B"])


def send_for_ever(engine: Any) -> None:
    for _ in range(1000):  # The first bytes may still find room on the way.
        engine.model_update_group.broadcast(torch.ones(2**20), src=0)


def test_what_cannot_be_understood_ends_the_connection_and_not_the_server(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    source = TensorSource(read_tensors(checkpoints.b))
    with trainer_engine(server.url, source, packed=False) as engine:
        HTTPVLLMWeightSyncClient(server.url).start_weight_update()
        info = {"names": ["x"], "dtype_names": ["complex64"], "shapes": [[64]]}
        answer = call(server, "/update_weights", json={"update_info": info})
        assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request")
        with pytest.raises(Exception, match=r"(?i)clos|reset|connect"):
            send_for_ever(engine)
        assert server.status()["last_error"]["code"] == "invalid_request"
        assert says(server, known["A"])
        with pytest.raises(requests.HTTPError) as error:
            engine.send_weights()
        assert refused(error.value)[:2] == (422, "transport_unavailable")
    with trainer_engine(server.url, source) as engine:
        engine.send_weights()
    assert says(server, known["B"])


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/start_weight_update", None, "transport_unavailable"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "reload_refused"),
        ("/start_draft_weight_update", {}, "reload_refused"),
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1, "world_size": 2}}, "invalid_request"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"master_address": "h", "master_port": 1, "rank_offset": 2, "world_size": 2}},
            "invalid_request",
        ),
        ("/update_weight_version", {"new_version": "a b"}, "invalid_request"),
    ],
)
@pytest.mark.case("C109")
def test_refusals_before_anything_happens(
    server: ServerProcess, known: dict[str, Known], path: str, body: Any, code: str
) -> None:
    answer = call(server, path, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, code)
    assert server.status()["state"] == "serving"


# What fails half-way


@pytest.mark.case("C3")
def test_the_gate_holds_when_a_round_fails(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    """Prints a transcript, which docs/integrations.md shows."""
    tensors = read_tensors(checkpoints.b)
    transcript: list[str] = []

    def say(what: str, result: str) -> None:
        transcript.append(f"{what:<44} {result}")

    def look() -> None:
        status, answer = server.status(), server.complete(PROMPTS[0])
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else None
        whose = next((label for label in known if known[label].answers[PROMPTS[0]] == text), "nothing")
        say("  GET /reload/status, POST /v1/completions", f"{status['state']}; {answer.status_code}, {whose}")

    def attempt(engine: Any) -> None:
        try:
            engine.send_weights()
            say("engine.send_weights()", "done")
        except requests.HTTPError as error:
            status, code, _ = refused(error)
            say("engine.send_weights()", f"HTTPError {status} ({code})")
        except RuntimeError as error:
            say("engine.send_weights()", f"RuntimeError: {error}")

    source = TensorSource(tensors, fail_at=list(tensors)[12])
    with trainer_engine(server.url, source, packed=False) as engine:
        say("trainer_init(...)", "workers and trainer have met")
        look()
        attempt(engine)
    assert server.wait_state("serving")["last_error"]["code"] == "transport_failed"
    say("engine.shutdown()", "the update ends: transport_failed")
    look()
    source.fail_at = None
    with trainer_engine(server.url, source, packed=False) as engine:
        say("trainer_init(...)", "workers and trainer have met again")
        server.set_faults(close="post-load processing broke")
        attempt(engine)
        look()
        say("POST /resume", call(server, "/resume").text)
        assert call(server, "/is_paused", "GET").json() == {"is_paused": True}
        look()
        server.set_faults()
        attempt(engine)
        look()
    print("\n".join(transcript))
    assert says(server, known["B"])
    assert "\n".join(transcript) in DOCS.read_text()


@pytest.mark.case("C3", "C14")
def test_a_killed_trainer_costs_nothing(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    process = vllm_trainer.start(server, checkpoints.b, stop_after=9)
    try:
        status = server.status()
        assert (status["state"], status["update"]["transport"]) == ("staging", "vllm")
        assert says(server, known["A"])
    finally:
        process.kill()
        process.wait()
    assert server.wait_state("serving")["last_error"]["code"] == "transport_failed"
    assert says(server, known["A"])
    with trainer_engine(server.url, TensorSource(read_tensors(checkpoints.b))) as engine:
        engine.send_weights()
    assert says(server, known["B"])


def test_a_trainer_that_comes_back_replaces_its_old_round(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    source = TensorSource(read_tensors(checkpoints.b))
    with trainer_engine(server.url, source):
        HTTPVLLMWeightSyncClient(server.url).start_weight_update()
        assert server.status()["state"] == "staging"
        with trainer_engine(server.url, source) as engine:
            assert server.status()["last_error"]["code"] == "aborted"
            engine.send_weights()
    assert says(server, known["B"])


# Pauses


def test_requests_of_a_paused_server_wait_for_the_new_weights(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    assert call(server, "/is_paused", "GET").json() == {"is_paused": False}
    assert call(server, "/pause?mode=abort&clear_cache=true").json() == {"status": "paused"}
    assert call(server, "/is_paused", "GET").json() == {"is_paused": True}
    assert server.status()["paused"] is True
    answers: list[httpx.Response] = []
    asking = in_background(lambda: answers.append(server.complete(PROMPTS[0])))
    with trainer_engine(server.url, TensorSource(read_tensors(checkpoints.b))) as engine:
        engine.send_weights()
    time.sleep(0.5)
    assert answers == []  # Nobody has resumed it yet.
    assert call(server, "/reset_prefix_cache").json() == {"success": True}
    assert call(server, "/resume").json() == {"status": "resumed"}
    asking.join(60)
    assert answers[0].json()["choices"][0]["text"] == known["B"].answers[PROMPTS[0]]
    assert answers[0].headers["X-Weight-Version"] == server.status()["weight_version"]
    assert call(server, "/resume").json() == {"status": "resumed"}  # Twice does no harm.
    assert says(server, known["B"])


@pytest.mark.case("C86")
def test_frozen_requests_go_on_with_the_new_weights(
    server: ServerProcess, checkpoints: Checkpoints, known: dict[str, Known]
) -> None:
    answers: list[httpx.Response] = []
    asking = in_background(lambda: answers.append(server.complete(PROMPTS[0], max_tokens=150)))
    server.wait_running()
    assert call(server, "/pause?mode=keep").json() == {"status": "paused"}
    before = server.status()["weight_version"]
    with trainer_engine(server.url, TensorSource(read_tensors(checkpoints.b))) as engine:
        engine.send_weights()
    call(server, "/resume")
    asking.join(60)
    assert answers[0].json()["usage"]["completion_tokens"] == 150
    assert answers[0].headers["X-Weight-Version"] == f"{before}, {server.status()['weight_version']}"
    assert says(server, known["B"])


# Who may do what


def test_what_clients_ask_about_the_server(server: ServerProcess) -> None:
    assert call(server, "/get_world_size", "GET").json() == {"world_size": 1}
    assert call(server, "/get_world_size?include_dp=false", "GET").json() == {"world_size": 1}
    facts = call(server, "/server_info?config_format=json", "GET").json()["vllm_config"]
    assert facts["weight_transfer_config"] is not None
    assert facts["model_config"]["dtype"] == "torch.bfloat16"
    assert (facts["model_config"]["logprobs_mode"], facts["lora_config"]) == ("raw_logprobs", None)
    assert call(server, "/shutdown_weight_transfer_engine").json() == {"message": "Weight transfer shut down"}


@pytest.mark.case("C24", "C25")
def test_every_route_has_a_rule(server: ServerProcess, checkpoints: Checkpoints) -> None:
    check_rules(server, checkpoints, more_control=VLLM_PATHS)
    push(server, checkpoints.a, "A")


@pytest.mark.case("C24")
def test_whatever_is_sent_is_answered_as_described(
    server: ServerProcess, known: dict[str, Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", os.devnull)
    # Joining a group that is nowhere takes as long as waiting for one: see test_vllm_messages.
    left_out = {"/init_weight_transfer_engine"}

    def look(case: Any, response: Any) -> None:
        assert response.status_code in (200, 408, 409, 413, 422), (case.path, response.text)
        case.validate_response(response, checks=CHECKS)

    assert each_call(server, server.headers(), look, examples=5, paths=VLLM_PATHS - left_out) == len(VLLM_PATHS) - 1

    def shut(case: Any, response: Any) -> None:
        assert response.status_code == 401, case.path
        case.validate_response(response, checks=CHECKS)

    each_call(server, {}, shut, examples=2, paths=VLLM_PATHS)
    call(server, "/resume")
    assert says(server, known["A"])
