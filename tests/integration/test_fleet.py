"""Three real servers and one trainer: who commits when one of them fails, and how it comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
import torch

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from support.contract_server import ContractServer, ReceiverProcess
from support.raw import read_tensors
from support.server import ServerProcess
from support.traffic import Traffic
from weightpush_client import ErrorCode, PushError, PushPhase, PushProgress, PushReport, WeightPusher
from weightpush_client import http as client_http
from weightpush_client.sources import open_source
from weightpush_protocol.messages import Deadlines, ManifestAnswer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BUCKET_BYTES = 40_000


@dataclass
class Servers:
    """Three servers, and what a server answers that was started on A."""

    all: list[ServerProcess]
    cold_a: dict[str, str]

    def settle(self, checkpoints: Checkpoints) -> None:
        """Have all of them serve A, whatever the last test left."""
        for server in self.all:
            server.set_faults()
            server.wait_up()
        with pusher_for(self.all) as pusher:
            pusher.push(checkpoints.a, weight_version="A")


@pytest.fixture(scope="module")
def three(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    # One that is killed comes back by itself, and awaits weights.
    options = ["--restart-on-failure", "20", "--staging-budget-mb", "64"]
    servers = [
        ServerProcess(checkpoints.a, options, folder=tmp_path_factory.mktemp(f"fleet-{number}"), token=TOKEN)
        for number in range(3)
    ]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_ready()
        yield Servers(servers, {prompt: servers[0].answer(prompt) for prompt in PROMPTS})


@pytest.fixture
def fleet(three: Servers, checkpoints: Checkpoints) -> list[ServerProcess]:
    """All three, serving A."""
    three.settle(checkpoints)
    return three.all


def pusher_for(servers: list[ServerProcess], **options: object) -> WeightPusher:
    settings = {"token": TOKEN, "transport": "gloo", "bucket_bytes": BUCKET_BYTES, **options}
    return WeightPusher([server.url for server in servers], **settings)  # type: ignore[arg-type] # options of many types


def at(phase: PushPhase, bucket: int, action: Callable[[], object]) -> Callable[[PushProgress], None]:
    """Return a progress callback that calls ``action`` once, when the push gets there."""
    done = []

    def progress(seen: PushProgress) -> None:
        if (seen.phase, seen.bucket) == (phase, bucket) and not done:
            done.append(action())

    return progress


def kill(server: ServerProcess) -> None:
    """Kill the server's processes as the out-of-memory killer does; its supervisor starts it again."""
    os.kill(server.server_pid, signal.SIGKILL)


def back(server: ServerProcess) -> None:
    """Wait until a killed server is there again."""
    server.wait_up()
    server.wait_state("awaiting_weights")


def versions(servers: list[ServerProcess]) -> list[tuple[str, str]]:
    return [(status["state"], status["weight_version"]) for status in (server.status() for server in servers)]


def serves(server: ServerProcess, version: str, answers: dict[str, str]) -> None:
    """It answers as a cold start would, under this version, by its own account and in every worker."""
    status = server.status()
    assert (status["state"], status["weight_version"]) == ("serving", version)
    assert {worker["weight_version"] for worker in status["workers"]} == {version}
    assert {server.complete(prompt).headers["X-Weight-Version"] for prompt in PROMPTS} == {version}
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == answers


def honest(report: PushReport, servers: list[ServerProcess]) -> None:
    """The report says of each server that committed what the server says itself."""
    status_of = {server.url: server.status() for server in servers}
    assert report.servers
    for part in report.servers:
        status = status_of[part.url]
        assert (part.instance_id, part.weight_version) == (status["instance_id"], status["weight_version"])
        assert (part.fingerprint, part.weight_version) == (status["fingerprint"], report.weight_version)
    assert {part.url for part in report.servers} & {part.url for part in report.excluded} == set()


def test_abort_means_that_nobody_commits(
    three: Servers, fleet: list[ServerProcess], checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    first, second, third = fleet
    codes = (ErrorCode.UNREACHABLE, ErrorCode.TRANSPORT_FAILED, ErrorCode.WORKER_LOST)
    with pusher_for(fleet) as pusher, pytest.raises(PushError) as failed:
        pusher.push(checkpoints.b, weight_version="B", progress=at(PushPhase.STREAM, 2, lambda: kill(third)))
    assert failed.value.code in codes
    # Its first bytes are in the live model.
    assert versions([first, second]) == [("failed", "A")] * 2
    assert {server.complete().status_code for server in (first, second)} == {503}
    with pusher_for([first, second]) as pusher:
        honest(pusher.push(checkpoints.b, weight_version="B1"), fleet[:2])
    for server in (first, second):
        serves(server, "B1", cold_b)

    with pusher_for([first, second], mode="staged") as pusher, pytest.raises(PushError) as failed:
        pusher.push(checkpoints.a, weight_version="A", progress=at(PushPhase.STREAM, 2, lambda: kill(second)))
    assert failed.value.code in codes
    serves(first, "B1", cold_b)

    with pusher_for(fleet, on_server_failure="exclude") as pusher:
        report = pusher.push(checkpoints.a, weight_version="A1")
        assert [part.url for part in report.servers] == [first.url]
        assert {part.url: part.code for part in report.excluded} == {
            second.url: ErrorCode.UNREACHABLE,
            third.url: ErrorCode.UNREACHABLE,
        }
        for server in (second, third):
            back(server)
        # The next push takes them back.
        report = pusher.push(checkpoints.b, weight_version="B2")
        assert (len(report.servers), report.excluded) == (3, ())
    honest(report, fleet)
    for server in fleet:
        serves(server, "B2", cold_b)


def test_exclude_commits_on_the_others_and_catch_up_takes_it_back(
    three: Servers,
    fleet: list[ServerProcess],
    checkpoints: Checkpoints,
    cold_b: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, victim, last = fleet
    before = {server.url: server.status()["instance_id"] for server in fleet}
    with pusher_for(fleet, on_server_failure="exclude") as pusher:
        report = pusher.push(checkpoints.b, weight_version="B", progress=at(PushPhase.STREAM, 2, lambda: kill(victim)))
        assert [part.url for part in report.servers] == [first.url, last.url]
        honest(report, [first, last])
        (excluded,) = report.excluded
        assert (excluded.url, excluded.weight_version) == (victim.url, None)
        assert excluded.code in (ErrorCode.UNREACHABLE, ErrorCode.WORKER_LOST)
        assert len([record for record in caplog.records if victim.url in record.getMessage()]) == 1
        for server in (first, last):
            serves(server, "B", cold_b)
            assert server.status()["instance_id"] == before[server.url]
        back(victim)
        commits = [server.status()["last_update"] for server in (first, last)]
        caught_up = pusher.catch_up(checkpoints.b)
        assert [part.url for part in caught_up.servers] == [victim.url]
        assert (caught_up.weight_version, caught_up.excluded) == ("B", ())
        assert [server.status()["last_update"] for server in (first, last)] == commits
        assert not pusher.catch_up(checkpoints.b).servers
    honest(caught_up, fleet)
    assert victim.status()["instance_id"] != before[victim.url]
    for server in fleet:
        serves(server, "B", cold_b)


def test_exclude_in_staged_mode_lets_the_old_version_serve_until_all_is_there(
    three: Servers, fleet: list[ServerProcess], checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    first, broken, last = fleet
    broken.set_faults(land_bucket=2, error="out of memory")
    states: list[list[tuple[str, str]]] = []
    with pusher_for(fleet, mode="staged", on_server_failure="exclude") as pusher:
        report = pusher.push(
            checkpoints.b, weight_version="B", progress=lambda _: states.append(versions([first, last]))
        )
        (excluded,) = report.excluded
        assert (excluded.url, excluded.code) == (broken.url, ErrorCode.LANDING_FAILED)
        assert "out of memory" in excluded.message
        # It serves on, and nobody is told otherwise.
        assert (excluded.state, excluded.weight_version) == ("serving", "A")
        assert {version for seen in states for _, version in seen} == {"A"}
        assert {state for seen in states for state, _ in seen} == {"serving", "staging"}
        serves(broken, "A", three.cold_a)
        broken.set_faults()
        assert [part.url for part in pusher.catch_up(checkpoints.b).servers] == [broken.url]
    for server in fleet:
        serves(server, "B", cold_b)


def test_a_late_joiner_catches_up_with_the_same_weights_only(
    three: Servers, fleet: list[ServerProcess], checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    members = fleet[:2]
    with WeightPusher(
        lambda: [server.url for server in members], token=TOKEN, bucket_bytes=BUCKET_BYTES, on_server_failure="exclude"
    ) as pusher:
        with pytest.raises(PushError, match="pushed nothing yet"):
            pusher.catch_up(checkpoints.b)
        pusher.push(checkpoints.b, weight_version="B")
        members.append(fleet[2])
        assert [status.weight_version for status in pusher.status()] == ["B", "B", "A"]
        with pytest.raises(PushError, match="not the weights that were pushed last as 'B'") as refused:
            pusher.catch_up(checkpoints.a)
        assert refused.value.code is ErrorCode.WEIGHTS_REJECTED
        assert versions(fleet) == [("serving", "B"), ("serving", "B"), ("serving", "A")]
        report = pusher.catch_up(checkpoints.b)
        assert [part.url for part in report.servers] == [fleet[2].url]
        honest(report, fleet)
        # One that leaves is no failure.
        members.remove(fleet[0])
        assert pusher.push(checkpoints.b, weight_version="B2").excluded == ()
    assert versions(fleet) == [("serving", "B"), ("serving", "B2"), ("serving", "B2")]
    for server, version in zip(fleet, ("B", "B2", "B2"), strict=True):
        serves(server, version, cold_b)


@pytest.mark.case("C72")
@pytest.mark.parametrize("policy", ["abort", "exclude"])
def test_post_load_processing_that_breaks_on_one_server(
    three: Servers, fleet: list[ServerProcess], checkpoints: Checkpoints, cold_b: dict[str, str], policy: str
) -> None:
    """All are asked to prepare before any is asked to commit."""
    first, broken, last = fleet
    broken.set_faults(close="kernel refused the weight")
    with pusher_for(fleet, on_server_failure=policy) as pusher:
        if policy == "abort":
            with pytest.raises(PushError, match="kernel refused the weight") as failed:
                pusher.push(checkpoints.b, weight_version="B")
            assert (failed.value.code, failed.value.server) == (ErrorCode.POSTLOAD_FAILED, broken.url)
            assert versions(fleet) == [("failed", "A")] * 3
            broken.set_faults()
            assert len(pusher.push(checkpoints.b, weight_version="B1").servers) == 3
        else:
            report = pusher.push(checkpoints.b, weight_version="B1")
            assert [part.url for part in report.servers] == [first.url, last.url]
            (excluded,) = report.excluded
            assert (excluded.url, excluded.code) == (broken.url, ErrorCode.POSTLOAD_FAILED)
            assert (excluded.state, excluded.weight_version) == ("failed", "A")
            assert versions(fleet) == [("serving", "B1"), ("failed", "A"), ("serving", "B1")]
            broken.set_faults()
            assert [part.url for part in pusher.catch_up(checkpoints.b).servers] == [broken.url]
    for server in fleet:
        serves(server, "B1", cold_b)


def test_under_traffic_on_all_servers_every_answer_is_of_one_version(
    three: Servers, fleet: list[ServerProcess], checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    first, broken, _ = fleet
    with ExitStack() as stack, pusher_for(fleet, on_server_failure="exclude", in_flight="abort") as pusher:
        traffic = {server.url: stack.enter_context(Traffic(server, PROMPTS, clients=1)) for server in fleet}
        for number, mode in enumerate(("direct", "staged", "direct")):
            letter = "BA"[number % 2]
            directory = checkpoints.b if letter == "B" else checkpoints.a
            if number == 2:
                broken.set_faults(land_bucket=1, error="out of memory")
            with pusher_for(fleet, on_server_failure="exclude", mode=mode, in_flight="abort") as one:
                report = one.push(directory, weight_version=f"{letter}{number}")
            honest(report, fleet)
            assert [part.url for part in report.excluded] == ([broken.url] if number == 2 else [])
            answered = {url: found.completed for url, found in traffic.items()}
            committed = [part.url for part in report.servers]
            deadline = time.monotonic() + 60
            while any(traffic[url].completed < answered[url] + 3 for url in committed):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        broken.set_faults()
        pusher.push(checkpoints.b, weight_version="B3")
    for url, found in traffic.items():
        for version, prompt, text in found.answers:
            assert text == (cold_b if version[0] == "B" else three.cold_a)[prompt], (url, version)
        assert set(found.refused) <= {503}
    assert "B2" in {version for version, _, _ in traffic[first.url].answers}
    assert "B2" not in {version for version, _, _ in traffic[broken.url].answers}


def test_a_push_in_the_background_and_one_that_is_cancelled(
    three: Servers, fleet: list[ServerProcess], checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    weights = read_tensors(checkpoints.b)
    for server in fleet:
        server.set_faults(slow_land_ms=150)
    with pusher_for(fleet, mode="staged") as pusher:
        handle = pusher.push_async(weights, weight_version="B", copy=True)
        for tensor in weights.values():
            tensor.zero_()  # The trainer trains on.
        with pytest.raises(PushError, match="in the middle of another push"):
            pusher.push_async(weights, weight_version="B")
        assert len(handle.result(timeout=120).servers) == 3
        assert not handle.cancel()
        handle = pusher.push_async(open_pairs(checkpoints), weight_version="A")
        fleet[0].wait_state("staging")
        assert handle.cancel()
        with pytest.raises(PushError, match="cancelled") as cancelled:
            handle.result(timeout=60)
        assert cancelled.value.code is ErrorCode.ABORTED
        assert handle.done()
    for server in fleet:
        server.wait_state("serving")
        serves(server, "B", cold_b)


def open_pairs(checkpoints: Checkpoints) -> Iterator[tuple[str, torch.Tensor]]:
    source = open_source(checkpoints.a)
    return source.tensors([spec.name for spec in source.specs()])


def test_a_server_that_hangs_is_given_up_and_loses_its_lease(
    fleet: list[ServerProcess], checkpoints: Checkpoints, cold_b: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_http, "STATUS_S", 5.0)
    first, stuck, last = fleet
    deadlines = Deadlines(bucket_s=6, lease_s=4, commit_s=20, rendezvous_s=20)
    with pusher_for(fleet, on_server_failure="exclude", deadlines=deadlines) as pusher:
        pid = stuck.server_pid
        try:
            report = pusher.push(
                checkpoints.b,
                weight_version="B",
                progress=at(PushPhase.STREAM, 1, lambda: os.kill(pid, signal.SIGSTOP)),
            )
            assert [part.url for part in report.excluded] == [stuck.url]
            assert report.excluded[0].state is None
            for server in (first, last):
                serves(server, "B", cold_b)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert stuck.wait_state("failed", timeout_s=60)["last_error"]["code"] in ("lease_lost", "transport_failed")
        assert [part.url for part in pusher.catch_up(checkpoints.b).servers] == [stuck.url]
    serves(stuck, "B", cold_b)


@pytest.mark.parametrize("hung_at", ["rendezvous", "stream"])
def test_one_hung_worker_is_left_out_and_not_those_that_wait_for_it(
    fleet: list[ServerProcess], checkpoints: Checkpoints, cold_b: dict[str, str], hung_at: str
) -> None:
    """Its server answers, so nobody says whose fault it is: the trainer's end knows whom it waited for."""
    first, second, _ = fleet
    with httpx.Client(base_url=first.url, headers=first.headers(), **first.how) as client:
        expected = ManifestAnswer.model_validate_json(client.get("/reload/manifest").text)
    worker = ReceiverProcess()
    worker.call("close")  # It has started.
    stuck = ContractServer(expected.tensors, optional=expected.optional, workers=[worker], token=TOKEN)
    deadlines = Deadlines(rendezvous_s=4, bucket_s=3, commit_s=30)
    if hung_at == "rendezvous":
        worker.pause()
    try:
        urls = [stuck.url, first.url, second.url]
        with WeightPusher(
            urls, token=TOKEN, transport="gloo", on_server_failure="exclude", deadlines=deadlines, bucket_bytes=40_000
        ) as pusher:
            progress = at(PushPhase.STREAM, 1, worker.pause) if hung_at == "stream" else None
            report = pusher.push(checkpoints.b, weight_version="B", progress=progress)
        assert [part.url for part in report.excluded] == [stuck.url]
        honest(report, [first, second])
        for server in (first, second):
            serves(server, "B", cold_b)
    finally:
        worker.kill()
        stuck.close()
