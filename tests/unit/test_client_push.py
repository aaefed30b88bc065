"""`WeightPusher` against real HTTP servers and real Gloo receivers in processes of their own."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Response
from safetensors.torch import save_file

from support.contract_server import TOKEN, ContractServer, DroppingProxy, ReceiverProcess
from weightpush_client import (
    Deadlines,
    ErrorCode,
    PushError,
    PushPhase,
    PushProgress,
    WeightPusher,
    delivery,
    http,
)
from weightpush_protocol import PROTOCOL_VERSION
from weightpush_protocol.errors import WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import UpdateMode
from weightpush_protocol.state import ServerState

MakeServer = Callable[..., ContractServer]
BUCKET_BYTES = 4096


def make_weights() -> dict[str, torch.Tensor]:
    """Return tensors of every awkward kind; about 12 buckets of ``BUCKET_BYTES``."""
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(64, 48, generator=generator)
    return {
        "plain": whole.clone(),
        "transposed": whole.t(),
        "offset": whole.flatten()[5:700],
        "expanded": torch.randn(1, 9, generator=generator).expand(33, 9),
        "strided": whole[::3, ::2],
        "scalar": torch.tensor(0.1),
        "one": torch.tensor([0.2]),
        "empty": torch.empty(0, 7),
        "larger than a bucket": torch.randn(3000, generator=generator).requires_grad_(),
        "half": torch.randn(500, generator=generator).half(),
        "extremes": torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 3.4e38, 1e-8]),
        "int": torch.arange(700),
        "bool": torch.arange(33) % 3 == 0,
        "fp8": torch.randn(301, generator=generator).to(torch.float8_e4m3fn),
        "double": torch.randn(77, generator=generator, dtype=torch.float64),
    }


CASTS = {"plain": "bfloat16", "transposed": "bfloat16", "half": "bfloat16", "extremes": "float16", "double": "float32"}


def expected_specs() -> list[TensorSpec]:
    specs = [TensorSpec.of(name, tensor) for name, tensor in make_weights().items()]
    return [spec.model_copy(update={"dtype": CASTS.get(spec.name, spec.dtype)}) for spec in specs]


def assert_arrived(server: ContractServer) -> None:
    """Assert that the server holds, bit for bit, ``tensor.to(dtype)`` of every tensor."""
    weights = make_weights()
    assert set(server.weights) == set(weights)
    for spec in expected_specs():
        wanted = weights[spec.name].detach().to(spec.torch_dtype).contiguous()
        found = server.weights[spec.name]
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), spec.name
        assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), spec.name


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ReceiverProcess]]:
    processes = [ReceiverProcess(), ReceiverProcess()]
    yield processes
    for process in processes:
        process.close()


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    servers: list[ContractServer] = []

    def make(specs: list[TensorSpec] | None = None, **options: Any) -> ContractServer:
        servers.append(ContractServer(expected_specs() if specs is None else specs, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Deadlines:
    """Deadlines of a second, and next to no slack on top of them."""
    for module in (http, delivery):
        monkeypatch.setattr(module, "SLACK_S", 0.2)
    monkeypatch.setattr(delivery, "_REASON_S", 0.3)
    monkeypatch.setattr(http, "STATUS_S", 0.6)
    monkeypatch.setattr(http, "MANIFEST_S", 0.6)
    monkeypatch.setattr(http, "ABORT_S", 1.0)
    return Deadlines(rendezvous_s=0.5, bucket_s=0.5, drain_s=0.1, commit_s=0.2)


def pusher_for(*servers: ContractServer, **options: Any) -> WeightPusher:
    options = {"token": TOKEN, "bucket_bytes": BUCKET_BYTES, "transport": "http"} | options
    return WeightPusher([server.url for server in servers], **options)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weightpush")]


def push_fails(*servers: ContractServer, weights: Any = None, within: float = 5.0, **options: Any) -> PushError:
    """Push, and return the error; assert that it came in time, that no thread is left and no update runs."""
    progress = options.pop("progress", None)
    start = time.monotonic()
    with pusher_for(*servers, **options) as pusher, pytest.raises(PushError) as caught:
        pusher.push(make_weights() if weights is None else weights, weight_version="v1", progress=progress)
    assert time.monotonic() - start < within
    assert our_threads() == []
    for server in servers:
        assert server.status().update is None
    return caught.value


# success


@pytest.mark.case("C27", "C33", "C64", "C73")
@pytest.mark.parametrize("transport", ["http", "gloo", "shm"])
@pytest.mark.parametrize("bucket_bytes", [1, BUCKET_BYTES, 2**20])
def test_bytes_arrive(
    transport: str, bucket_bytes: int, make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    server = make_server(workers=workers)
    seen: list[PushProgress] = []
    with pusher_for(server, transport=transport, bucket_bytes=bucket_bytes) as pusher:
        report = pusher.push(make_weights(), weight_version="v1", progress=seen.append)
    assert_arrived(server)
    total = sum(spec.nbytes for spec in expected_specs())
    assert (report.weight_version, report.bytes, report.tensors, report.transport) == ("v1", total, 15, transport)
    assert report.update_id == server.begins[0].update_id
    assert [item.phase for item in seen[:3]] == [PushPhase.CHECK, PushPhase.BEGIN, PushPhase.STREAM]
    assert [item.bucket for item in seen[2:-1]] == list(range(report.buckets + 1))
    assert seen[-1] == PushProgress(PushPhase.FINISH, report.buckets, report.buckets, 15, 15, total, total)
    assert our_threads() == []


def test_the_report_says_how_each_server_took_a_staged_push(make_server: MakeServer) -> None:
    servers = make_server(), make_server()
    with pusher_for(*servers, mode="staged") as pusher:
        report = pusher.push(make_weights(), weight_version="v1")
    assert [server.begins[0].mode for server in servers] == ["staged", "staged"]
    assert [server.mode for server in report.servers] == ["staged", "staged"]
    assert report.pause_seconds == 0.25
    assert "staged, not serving for 0.25 s" in str(report)


def test_all_servers_go_back_or_the_error_says_which_did(make_server: MakeServer) -> None:
    servers = make_server(), make_server()
    deadlines = Deadlines(drain_s=7)
    with pusher_for(*servers, in_flight="abort", deadlines=deadlines) as pusher:
        for number in range(2):
            pusher.push(make_weights(), weight_version=f"v{number}")
        assert [answer.weight_version for answer in pusher.rollback()] == ["v0", "v0"]
    (request,) = servers[0].rollbacks
    assert servers[1].rollbacks == [request]
    assert (request.in_flight, request.deadlines) == ("abort", deadlines)
    with pusher_for(servers[0]) as pusher:
        pusher.push(make_weights(), weight_version="v2")
        pusher.rollback()
        first = servers[0].status().weight_version
        pusher.rollback()
    with pusher_for(servers[1]) as pusher:
        pusher.push(make_weights(), weight_version="v3")
    with pusher_for(*servers) as pusher, pytest.raises(PushError) as caught:
        pusher.rollback()
    assert first == "v0"
    assert (caught.value.code, caught.value.server) == (ErrorCode.NO_COPY, servers[0].url)
    assert caught.value.details == {"committed": [servers[1].url], "failed": [servers[0].url]}
    assert servers[1].status().weight_version == "v0"


def test_a_rollback_whose_answer_is_lost_is_not_repeated_as_another(make_server: MakeServer) -> None:
    server = make_server()
    with pusher_for(server) as pusher:
        for number in range(2):
            pusher.push(make_weights(), weight_version=f"v{number}")
    proxy = DroppingProxy(server.port, {"POST /reload/rollback": 1})
    try:
        with WeightPusher(proxy.url, token=TOKEN) as pusher:
            assert [answer.weight_version for answer in pusher.rollback()] == ["v0"]
    finally:
        proxy.close()
    assert [request.update_id for request in server.rollbacks] == [server.rollbacks[0].update_id] * 2


def test_what_servers_went_back_to_can_be_read_at_a_prompt(make_server: MakeServer) -> None:
    servers = make_server(), make_server()
    with pusher_for(*servers) as pusher:
        for number in range(2):
            pusher.push(make_weights(), weight_version=f"v{number}")
        answers = pusher.rollback()
    lines = repr(answers).splitlines()
    assert [line.partition(" in ")[0] for line in lines] == [
        f"{server.url} serves v0: {answer.tensors} tensors, {answer.bytes / 1e6:.1f} MB"
        for server, answer in zip(servers, answers, strict=True)
    ]
    again = pickle.loads(pickle.dumps(answers))
    assert (again, repr(again)) == (answers, repr(answers))


@pytest.mark.parametrize("transport", ["http", "gloo", "shm"])
def test_two_servers_take_one_update(transport: str, make_server: MakeServer, workers: list[ReceiverProcess]) -> None:
    servers = make_server(workers=workers[:1]), make_server(workers=workers[1:])
    with pusher_for(*servers, transport=transport) as pusher:
        reports = [pusher.push(make_weights(), weight_version=f"v{number}") for number in range(2)]
    for server in servers:
        assert_arrived(server)
        assert [begin.update_id for begin in server.begins] == [report.update_id for report in reports]
    assert [server.url for server in reports[0].servers] == [server.url for server in servers]
    if transport != "http":
        assert [server.begins[0].transport.rank_offset for server in servers] == [1, 2]
        assert servers[0].begins[0].transport.world_size == 3


def test_auto_means_gloo_with_workers_that_have_it_and_else_http(
    make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    with_workers, without, third = make_server(workers=workers[:1]), make_server(), make_server(workers=workers[1:])
    with pusher_for(with_workers, transport="auto") as pusher:
        assert pusher.push(make_weights(), weight_version="v1").transport == "gloo"
    with pusher_for(without, transport="auto") as pusher:
        assert pusher.push(make_weights(), weight_version="v2").transport == "http"
    # Each gets the same update in its own way, and those of one way are in one group.
    servers = (with_workers, without, third)
    with pusher_for(*servers, transport="auto") as pusher:
        report = pusher.push(make_weights(), weight_version="v3")
    assert report.transport == "gloo+http"
    for server in servers:
        assert_arrived(server)
        assert server.begins[-1].update_id == report.update_id
    assert [server.begins[-1].transport.name for server in servers] == ["gloo", "http", "gloo"]
    assert [server.begins[-1].transport.rank_offset for server in (with_workers, third)] == [1, 2]
    assert with_workers.begins[-1].transport.world_size == 3


@pytest.mark.case("C92")
@pytest.mark.parametrize("transport", ["http", "gloo"])
def test_an_fp32_trainer_sends_a_bf16_server_two_bytes_a_number(
    transport: str, make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    numbers = 4 * 256 * 256
    weights = {f"layers.{number}.weight": torch.randn(256, 256) for number in range(4)}
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=(256, 256)) for name in weights]
    server = make_server(specs, workers=workers[:1])
    with pusher_for(server, transport=transport, bucket_bytes=2**17) as pusher:
        report = pusher.push(weights, weight_version="v1")
    assert report.bytes == 2 * numbers
    # Beside the numbers only the header of each body.
    assert 2 * numbers <= server.bytes_received < 2 * numbers + 4096
    assert all(torch.equal(server.weights[name], tensor.bfloat16()) for name, tensor in weights.items())


def test_options_reach_the_server(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server()
    monkeypatch.setenv("WEIGHTPUSH_CONTROL_TOKEN", f" {TOKEN}\n")
    deadlines = Deadlines(drain_s=7)
    options: dict[str, Any] = {"mode": "staged", "in_flight": "keep", "digest": "none", "deadlines": deadlines}
    with pusher_for(server, token=None, **options) as pusher:
        assert [status.state for status in pusher.status()] == [ServerState.SERVING]
        pusher.push(make_weights(), weight_version="v1")
    begin = server.begins[0]
    assert (begin.mode, begin.in_flight, begin.digest) == (UpdateMode.STAGED, "keep", "none")
    assert begin.deadlines == deadlines


def test_a_partial_push_sends_what_there_is(make_server: MakeServer) -> None:
    server = make_server()
    part = dict(list(make_weights().items())[:2])
    with pusher_for(server) as pusher:
        with pytest.raises(PushError) as caught:
            pusher.push(part, weight_version="v1")
        assert caught.value.code is ErrorCode.MANIFEST_REJECTED
        assert pusher.push(part, weight_version="v2", partial=True).tensors == 2
    with pusher_for(server, partial=True) as pusher:
        assert pusher.push(part, weight_version="v3").tensors == 2
        pusher.push(make_weights(), weight_version="v4", partial=False)
    assert [begin.partial for begin in server.begins] == [False, True, True, False]


def test_names_of_the_users_own_come_before_everything_else(make_server: MakeServer) -> None:
    server = make_server()
    ours = {f"_orig_mod.policy.{name}": tensor for name, tensor in make_weights().items()}
    ours["module.value_head"] = torch.zeros(3)

    def names(name: str) -> str | None:
        return None if name == "value_head" else name.removeprefix("policy.")

    with WeightPusher(server.url, token=TOKEN, transport="http", names=names) as pusher:
        pusher.push(ours, weight_version="1")
    assert_arrived(server)
    with (
        WeightPusher(server.url, token=TOKEN, transport="http", names={"plain": "no such name"}) as pusher,
        pytest.raises(PushError, match="no such name") as caught,
    ):
        pusher.push(make_weights(), weight_version="2")
    assert caught.value.code is ErrorCode.MANIFEST_REJECTED


def test_the_report_reads_well(make_server: MakeServer) -> None:
    server = make_server()
    with pusher_for(server, bucket_bytes=2**20) as pusher:
        report = pusher.push(make_weights(), weight_version="step-7")
    lines = str(report).splitlines()
    assert lines[0].startswith("pushed step-7 in ")
    assert "15 tensors, " in lines[0]
    assert "in 1 bucket over http" in lines[0]
    assert lines[1] == f"  {server.url}: direct, not serving for 0.25 s, fingerprint ffffffffffffffff"
    assert lines[2].startswith("  seconds: check 0.")
    phases = report.phases
    assert 0 < phases.check + phases.begin + phases.finish < report.seconds


def test_a_push_from_inside_an_event_loop_and_under_inference_mode(
    make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    server = make_server(workers=workers)

    async def trainer() -> None:
        with torch.inference_mode(), pusher_for(server, transport="gloo") as pusher:
            pusher.push(make_weights(), weight_version="v1")

    asyncio.run(trainer())
    assert_arrived(server)


def test_the_environments_proxies_are_used_only_when_trusted(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, dead)
    server = make_server()
    with pusher_for(server) as pusher:
        pusher.push(make_weights(), weight_version="v1")
    assert_arrived(server)
    with pusher_for(server, trust_env=True) as pusher, pytest.raises(PushError, match="cannot connect"):
        pusher.status()


def test_connections_that_the_server_closed_meanwhile_do_not_matter(make_server: MakeServer) -> None:
    server = make_server(keep_alive_s=1)
    with pusher_for(server) as pusher:
        for number in range(2):
            pusher.push(make_weights(), weight_version=f"v{number}")
            time.sleep(1.2)
    assert server.status().weight_version == "v1"


@pytest.mark.case("C46")
@pytest.mark.parametrize("transport", ["http", "gloo"])
def test_lost_answers_of_idempotent_calls_are_asked_for_again(
    transport: str, make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    server = make_server(workers=workers)
    calls = ["GET /reload/status", "GET /reload/manifest", "POST /reload/begin", "POST /reload/finish"]
    if transport == "gloo":
        calls.append("POST /reload/stream")
    proxy = DroppingProxy(server.port, dict.fromkeys(calls, 1))
    with WeightPusher(proxy.url, token=TOKEN, transport=transport, bucket_bytes=BUCKET_BYTES) as pusher:
        pusher.push(make_weights(), weight_version="v1")
    proxy.close()
    assert set(proxy.drop.values()) == {0}
    assert_arrived(server)
    assert len(server.begins) == 1
    assert (server.calls.count("begin"), server.calls.count("finish")) == (2, 2)


def test_a_lost_answer_to_a_body_is_not_sent_again(make_server: MakeServer) -> None:
    server = make_server()
    proxy = DroppingProxy(server.port, {"POST /reload/stream": 1})
    start = time.monotonic()
    pusher = WeightPusher(proxy.url, token=TOKEN, transport="http", bucket_bytes=BUCKET_BYTES)
    with pusher, pytest.raises(PushError, match="got no answer") as caught:
        pusher.push(make_weights(), weight_version="v1")
    proxy.close()
    assert time.monotonic() - start < 4
    assert caught.value.code is ErrorCode.UNREACHABLE
    assert server.calls.count("stream") == 1
    assert list(server.ended.values()) == ["aborted"]


# refusals and faults of the server


def test_a_refused_manifest_is_the_servers_own_error(make_server: MakeServer, workers: list[ReceiverProcess]) -> None:
    server = make_server(workers=workers)
    for transport in ("http", "gloo"):
        weights = make_weights() | {"surplus": torch.zeros(2), "int": torch.zeros(4)}
        error = push_fails(server, weights=weights, transport=transport, within=3)
        assert (error.code, error.server) == (ErrorCode.MANIFEST_REJECTED, server.url)
        assert [problem["name"] for problem in error.details["problems"]] == ["int", "surplus"]
        assert str(error).startswith(f"{server.url}: the manifest does not fit: ")
    # The server never held an update, so there was nothing to abort.
    assert "abort" not in server.calls


def test_a_body_that_is_refused_unread_is_the_servers_own_error(make_server: MakeServer) -> None:
    weights = {"large": torch.zeros(64 * 2**20, dtype=torch.uint8)}
    server = make_server([TensorSpec.of(name, tensor) for name, tensor in weights.items()])

    async def refuse() -> None:
        raise WeightPushError(
            ErrorCode.TOO_LARGE, "the bucket is larger than 1000 bytes", details={"limit_bytes": 1000}
        )

    server.hooks["stream"] = refuse
    error = push_fails(server, weights=weights, bucket_bytes=2**30)
    assert (error.code, error.details) == (ErrorCode.TOO_LARGE, {"limit_bytes": 1000})


def test_an_error_survives_pickling(make_server: MakeServer) -> None:
    error = push_fails(make_server(), weights={"surplus": torch.zeros(2)})
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, PushError)
    assert (str(again), again.server, again.details, again.code) == (
        str(error),
        error.server,
        error.details,
        error.code,
    )


@pytest.mark.case("C14")
@pytest.mark.parametrize("route", ["status", "manifest", "begin", "stream", "finish"])
@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (500, "Internal Server Error", ErrorCode.PROTOCOL_ERROR),
        (502, "<html>bad gateway" + "x" * 1000, ErrorCode.UNREACHABLE),
        (404, '{"detail":"Not Found"}', ErrorCode.PROTOCOL_ERROR),
        (200, "[]", ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_an_answer_of_another_protocol_is_quoted(
    route: str, status: int, text: str, code: ErrorCode, make_server: MakeServer, quick: Deadlines
) -> None:
    server = make_server()

    async def answer() -> Response:
        return Response(text, status)

    server.hooks[route] = answer
    error = push_fails(server)
    assert (error.code, error.server) == (code, server.url)
    assert text[:20] in error.message
    assert len(error.message) < 800
    if status == 404:
        assert "is it a weightpush server" in error.message
    if route in {"stream", "finish"}:
        assert list(server.ended.values()) == ["aborted"]


@pytest.mark.case("C81")
@pytest.mark.parametrize(
    ("route", "transport"),
    [
        ("status", "http"),
        ("manifest", "http"),
        ("begin", "http"),
        ("stream", "http"),
        ("finish", "http"),
        ("begin", "gloo"),
        ("stream", "gloo"),
    ],
)
def test_a_server_that_never_answers_ends_in_time(
    route: str, transport: str, make_server: MakeServer, workers: list[ReceiverProcess], quick: Deadlines
) -> None:
    server = make_server(workers=workers)

    async def hang() -> None:
        await asyncio.sleep(60)

    server.hooks[route] = hang
    error = push_fails(server, transport=transport, deadlines=quick, within=8)
    assert error.code is ErrorCode.UNREACHABLE
    assert f"/reload/{route} within " in error.message
    if route not in {"status", "manifest"}:
        assert server.calls[-1] == "abort"


def test_an_abort_that_is_never_answered_is_given_up(make_server: MakeServer, quick: Deadlines) -> None:
    server = make_server()

    async def hang() -> None:
        await asyncio.sleep(60)

    async def refuse() -> None:
        raise WeightPushError(ErrorCode.INTERNAL, "out of luck")

    server.hooks.update(abort=hang, finish=refuse)
    start = time.monotonic()
    with pusher_for(server, deadlines=quick) as pusher, pytest.raises(PushError, match="out of luck"):
        pusher.push(make_weights(), weight_version="v1")
    assert time.monotonic() - start < 4
    assert our_threads() == []


@pytest.mark.parametrize("drip", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"])
def test_an_answer_that_drips_in_is_bounded_in_total(drip: bytes, quick: Deadlines) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(65536)
            client.sendall(drip)
            while not done.wait(0.05):
                try:
                    client.sendall(b"x")
                except OSError:
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    start = time.monotonic()
    with WeightPusher(f"127.0.0.1:{listener.getsockname()[1]}") as pusher, pytest.raises(PushError) as caught:
        pusher.status()
    assert time.monotonic() - start < 3
    done.set()
    thread.join()
    listener.close()
    assert caught.value.code is ErrorCode.UNREACHABLE


def test_a_dead_server_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with WeightPusher(url) as pusher, pytest.raises(PushError, match="cannot connect") as caught:
        pusher.push({"a": torch.zeros(1)}, weight_version="v1")
    assert (caught.value.code, caught.value.server) == (ErrorCode.UNREACHABLE, url)


@pytest.mark.case("C24")
def test_a_wrong_token_is_refused_and_never_shown(make_server: MakeServer) -> None:
    server = make_server()
    error = push_fails(server, token="some-other-secret")
    assert error.code is ErrorCode.UNAUTHORIZED
    assert "some-other-secret" not in repr(error) + str(error) + str(error.details)
    assert server.authorizations == {"Bearer some-other-secret"}
    with pytest.raises(PushError, match="visible ASCII") as caught:
        pusher_for(server, token="two words")
    assert "two words" not in str(caught.value)


def test_a_server_of_another_protocol_version_is_refused(make_server: MakeServer) -> None:
    server = make_server()
    server.protocol = "2.0"
    error = push_fails(server)
    assert error.code is ErrorCode.PROTOCOL_MISMATCH
    assert f"speaks protocol 2.0, the client {PROTOCOL_VERSION}" in error.message


# a push that fails in the middle


@pytest.mark.case("C15", "C42")
def test_what_went_wrong_with_a_bucket_comes_with_the_next_announcement(
    make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    server = make_server(workers=workers)

    async def fail_third() -> None:
        if server.calls.count("stream") == 3:
            server.fail(WeightPushError(ErrorCode.LANDING_FAILED, "worker 0: RuntimeError: no room for 'strided'"))

    server.hooks["stream"] = fail_third
    error = push_fails(server, transport="gloo")
    assert error.code is ErrorCode.LANDING_FAILED
    assert error.message == "worker 0: RuntimeError: no room for 'strided'"
    assert server.calls.count("stream") == 3
    with pusher_for(server, transport="gloo") as pusher:
        server.hooks.clear()
        pusher.push(make_weights(), weight_version="v2")
    assert_arrived(server)


@pytest.mark.case("C14")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_worker_that_is_killed_is_reported_by_the_server(transport: str, make_server: MakeServer) -> None:
    worker = ReceiverProcess()
    server = make_server(workers=[worker])

    def kill(progress: PushProgress) -> None:
        if progress.bucket == 2:
            worker.kill()

    error = push_fails(server, transport=transport, progress=kill, within=20)
    assert error.code is ErrorCode.WORKER_LOST
    assert (error.message, error.server) == ("a worker of the tests died", server.url)
    assert list(server.ended.values()) == ["worker_lost"]


def test_a_worker_that_does_not_join_ends_the_rendezvous(
    make_server: MakeServer, workers: list[ReceiverProcess], quick: Deadlines
) -> None:
    server = make_server(workers=workers)
    status = server.status()

    async def one_more() -> Response:
        shown = status.model_copy(update={"workers": [*status.workers, status.workers[0]]})
        return Response(shown.model_dump_json())

    server.hooks["status"] = one_more
    error = push_fails(server, transport="gloo", deadlines=quick)
    assert error.code is ErrorCode.RENDEZVOUS_FAILED
    assert error.server == server.url


@pytest.mark.parametrize("transport", ["http", "gloo", "shm"])
def test_a_digest_that_does_not_fit_fails_the_push(
    transport: str, make_server: MakeServer, workers: list[ReceiverProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(workers=workers)
    monkeypatch.setattr("weightpush_client.stream.raw_digests", lambda _, places: bytes(8 * len(places)))
    error = push_fails(server, transport=transport)
    assert error.code is ErrorCode.DIGEST_MISMATCH
    # From the answer to the abort.
    assert error.state is ServerState.FAILED


@pytest.mark.parametrize("transport", ["http", "gloo", "shm"])
@pytest.mark.parametrize("failure", [RuntimeError("the callback broke"), KeyboardInterrupt()])
@pytest.mark.parametrize("phase", [PushPhase.BEGIN, PushPhase.STREAM, PushPhase.FINISH])
def test_what_the_callback_raises_aborts_the_update(
    transport: str,
    failure: BaseException,
    phase: PushPhase,
    make_server: MakeServer,
    workers: list[ReceiverProcess],
) -> None:
    server = make_server(workers=workers)

    def callback(progress: PushProgress) -> None:
        if progress.phase is phase and (phase is not PushPhase.STREAM or progress.bucket == 3):
            raise failure

    with pusher_for(server, transport=transport) as pusher:
        with pytest.raises(type(failure)) as caught:
            pusher.push(make_weights(), weight_version="v1", progress=callback)
        assert caught.value is failure
        assert our_threads() == ["weightpush-http"]
        # Workers that share memory may see that their trainer has left before their server is told so.
        heard = {"aborted", "transport_failed"} if transport == "shm" else {"aborted"}
        assert len(server.ended) == (phase is not PushPhase.BEGIN)
        assert set(server.ended.values()) <= heard
        assert server.status().weight_version == "default"
        pusher.push(make_weights(), weight_version="v2")
    assert_arrived(server)


@pytest.mark.case("C3", "C19", "C104")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (torch.zeros(2, 3), r"tensor 2 of 3 changed .* declared 'b' float32 \[4\], found 'b' float32 \[2, 3\]"),
        (torch.zeros(4, dtype=torch.float64), r"found 'b' float64 \[4\]"),
        (None, r"cannot read tensor 'b'"),
    ],
)
def test_a_directory_that_changes_meanwhile_aborts_the_update(
    changed: torch.Tensor | None, message: str, make_server: MakeServer, tmp_path: Path
) -> None:
    weights = {name: torch.ones(4) for name in "abc"}
    save_file(weights, tmp_path / "model.safetensors")
    server = make_server([TensorSpec.of(name, tensor) for name, tensor in weights.items()])

    def change(progress: PushProgress) -> None:
        if progress.phase is PushPhase.BEGIN:
            others = {name: tensor for name, tensor in weights.items() if name != "b"}
            save_file(others if changed is None else others | {"b": changed}, tmp_path / "model.safetensors")

    error = push_fails(server, weights=tmp_path, progress=change)
    assert (error.code, error.server) == (ErrorCode.WEIGHTS_REJECTED, None)
    assert re.search(message, error.message), error.message
    assert list(server.ended.values()) == ["aborted"]


def test_a_directory_is_pushed(make_server: MakeServer, tmp_path: Path) -> None:
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in make_weights().items()},
        tmp_path / "model.safetensors",
    )
    server = make_server()
    with pusher_for(server) as pusher:
        pusher.push(str(tmp_path), weight_version="v1")
    assert_arrived(server)


# several servers


def test_one_server_that_refuses_ends_the_update_on_the_other(
    make_server: MakeServer, workers: list[ReceiverProcess]
) -> None:
    for transport in ("http", "gloo"):
        good, bad = make_server(workers=workers[:1]), make_server(workers=workers[1:])

        async def refuse() -> None:
            await asyncio.sleep(0.2)
            raise WeightPushError(ErrorCode.RELOAD_REFUSED, "online quantization")

        bad.hooks["begin"] = refuse
        error = push_fails(good, bad, transport=transport)
        assert (error.code, error.server, error.message) == (ErrorCode.RELOAD_REFUSED, bad.url, "online quantization")
        assert good.status().state is ServerState.SERVING
        assert len(good.ended) == 1
        assert "abort" not in bad.calls


def test_a_server_that_does_not_commit_is_named_with_those_that_did(make_server: MakeServer) -> None:
    good, bad = make_server(), make_server()

    async def refuse() -> None:
        raise WeightPushError(ErrorCode.PROOF_FAILED, "layer 3 has a hole")

    bad.hooks["finish"] = refuse
    error = push_fails(good, bad)
    assert (error.code, error.server) == (ErrorCode.PROOF_FAILED, bad.url)
    assert error.details == {"committed": [good.url], "failed": [bad.url]}
    assert good.calls.index("prepare") < good.calls.index("finish")
    assert list(good.ended.values()) == ["committed"]
    assert list(bad.ended.values()) == ["aborted"]


def test_servers_with_different_models_are_refused_before_anything_begins(make_server: MakeServer) -> None:
    one, other = make_server(), make_server(expected_specs()[1:])
    error = push_fails(one, other)
    assert error.code is ErrorCode.MANIFEST_REJECTED
    assert "first at 'plain'" in error.message
    assert one.begins == other.begins == []


# use


def test_one_push_at_a_time(make_server: MakeServer) -> None:
    server = make_server()

    with pusher_for(server) as pusher:

        def again(progress: PushProgress) -> None:
            if progress.phase is PushPhase.STREAM and progress.bucket == 1:
                with pytest.raises(PushError, match="in the middle of another push") as caught:
                    pusher.push(make_weights(), weight_version="v2")
                assert caught.value.code is ErrorCode.UPDATE_IN_PROGRESS

        pusher.push(make_weights(), weight_version="v1", progress=again)
    assert_arrived(server)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "carrier pigeon"}, "transport 'carrier pigeon' is none of auto, shm, gloo, nccl, http"),
        ({"mode": "stagged"}, "mode 'stagged' is none of direct, staged"),
        ({"in_flight": "maybe"}, "in_flight 'maybe' is none of wait, abort, keep"),
        ({"digest": "md5"}, "digest 'md5' is none of wp64, none"),
        ({"on_server_failure": "cry"}, "on_server_failure 'cry' is none of abort, exclude"),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        ({"verify": "/no/such/file"}, "there is no CA file /no/such/file"),
        ({"client_cert": ("/no/such/file", "/nor/this")}, "there is no client certificate /no/such/file"),
        ({"token": "a", "token_file": "b"}, "give a token or a token file, not both"),
        ({"data_host": "0.0.0.0"}, "data_host '0.0.0.0' is no address that a server can connect to"),
        ({"urls": []}, "at least one server"),
        ({"urls": ["h:1", "http://h:1/"]}, "named twice"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PushError, match=message) as caught:
        WeightPusher(**{"urls": "h:1", **options})
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert our_threads() == []


def test_a_version_that_cannot_be_a_header_is_refused_before_anything_begins(make_server: MakeServer) -> None:
    server = make_server()
    with pusher_for(server) as pusher, pytest.raises(PushError, match=r"weight_version: .*visible ASCII"):
        pusher.push(make_weights(), weight_version="v 1\r\n")
    assert server.begins == []


def test_nccl_is_refused_here_before_anything_begins(make_server: MakeServer, workers: list[ReceiverProcess]) -> None:
    server = make_server(workers=workers)
    error = push_fails(server, transport="nccl")
    assert error.code is ErrorCode.TRANSPORT_UNAVAILABLE
    assert server.begins == []


def test_a_collective_needs_workers(make_server: MakeServer) -> None:
    server = make_server()
    error = push_fails(server, transport="gloo")
    assert error.code is ErrorCode.TRANSPORT_UNAVAILABLE
    assert "lists no workers" in error.message
    assert error.server == server.url


def test_a_closed_pusher_says_so(make_server: MakeServer) -> None:
    pusher = pusher_for(make_server())
    pusher.close()
    pusher.close()
    with pytest.raises(RuntimeError, match="closed"):
        pusher.status()
    assert our_threads() == []


def test_a_pusher_that_is_forgotten_leaves_no_thread(make_server: MakeServer) -> None:
    pusher = pusher_for(make_server())
    assert pusher.status()[0].serving
    del pusher
    assert our_threads() == []


def test_a_forked_child_does_not_hang(make_server: MakeServer) -> None:
    with pusher_for(make_server()) as pusher:
        pid = os.fork()
        if pid == 0:
            try:
                pusher.status()
            except RuntimeError:
                os._exit(17)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
        assert pusher.status()[0].serving


def test_one_server_under_two_addresses_is_found_out(make_server: MakeServer) -> None:
    server = make_server()
    port = server.url.rpartition(":")[2]
    with WeightPusher([server.url, f"localhost:{port}"]) as pusher, pytest.raises(PushError) as refused:
        pusher.push({"w": torch.ones(1)}, weight_version="v1")
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert "are one server" in refused.value.message
    assert "begin" not in server.calls


def test_the_next_push_of_the_same_tensors_neither_fetches_nor_sends_a_list_of_them(make_server: MakeServer) -> None:
    weights = {f"t{number}": torch.full((3,), float(number)) for number in range(300)}
    server = make_server([TensorSpec.of(name, tensor) for name, tensor in weights.items()])
    with WeightPusher(server.url, token=TOKEN, transport="http") as pusher:
        pusher.push(weights, weight_version="v1")
        assert [server.calls.count(call) for call in ("manifest", "begin")] == [1, 2]
        for turn in (2, 3):
            server.calls.clear()
            weights = {name: tensor + 1 for name, tensor in weights.items()}
            pusher.push(weights, weight_version=f"v{turn}")
            assert server.calls == ["status", "begin", "stream", "finish"]
            assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights.items())
        # The server is now another one behind the same address, or learned what it expects.
        server.manifest.tensors[0] = TensorSpec(name="t0", dtype="bfloat16", shape=(3,))
        server.calls.clear()
        pusher.push(weights, weight_version="v4")
        assert [server.calls.count(call) for call in ("manifest", "begin")] == [1, 2]
        assert server.weights["t0"].dtype is torch.bfloat16


def test_a_second_name_that_is_no_longer_tied_is_sent_again(make_server: MakeServer) -> None:
    server = make_server([TensorSpec(name="embedding", dtype="float32", shape=(4,))])
    tied = torch.arange(4.0)
    with WeightPusher(server.url, token=TOKEN, transport="http") as pusher:
        for turn in range(2):
            pusher.push({"embedding": tied, "head": tied}, weight_version=f"v{turn}")
            assert list(server.weights) == ["embedding"]
        with pytest.raises(PushError, match="head"):
            pusher.push({"embedding": tied, "head": tied.clone()}, weight_version="v3")
