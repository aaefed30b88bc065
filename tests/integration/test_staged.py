"""Staged pushes: the old weights serve until all is there, and whatever breaks before the pause costs nothing."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from integration.test_faults import BAD_BUCKETS, closed, repaired
from support import trainer
from support.raw import RawUpdate, error_of, read_tensors
from support.resources import resources
from support.server import ServerProcess
from support.traffic import Traffic
from weightpush_client import PushError, PushReport, WeightPusher
from weightpush_protocol.messages import Deadlines

BUCKET_BYTES = 40_000
#: By how much the arrival of a bucket is slowed down, in seconds.
SLOW_S = 0.25


def push(server: ServerProcess, checkpoints: Checkpoints, version: str, **options: object) -> PushReport:
    """Push A or B, whichever letter ``version`` starts with."""
    directory = checkpoints.a if version[0] == "A" else checkpoints.b
    settings = {"mode": "staged", "transport": "gloo", "bucket_bytes": BUCKET_BYTES, "token": TOKEN, **options}
    with WeightPusher(server.url, **settings) as pusher:  # type: ignore[arg-type] # options of many types
        return pusher.push(directory, weight_version=version)


def untouched(server: ServerProcess, before: dict[str, object], cold: dict[str, str]) -> None:
    """The server serves what it served ``before``, as if nothing had been tried."""
    status = server.status()
    assert (status["state"], status["serving"], status["update"]) == ("serving", True, None)
    for key in ("weight_version", "fingerprint", "previous_version", "last_update", "copies"):
        assert status[key] == before[key], key
    assert not any(worker["tainted"] for worker in status["workers"])
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold


@pytest.mark.parametrize("transport", ["gloo", "http", "shm"])
@pytest.mark.case("C11", "C37", "C60", "C96")
def test_under_traffic_only_the_pause_refuses(
    server: ServerProcess,
    checkpoints: Checkpoints,
    cold_a: dict[str, str],
    cold_b: dict[str, str],
    transport: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.set_faults(slow_land_ms=SLOW_S * 1000)
    pauses: dict[str, list[float]] = {"staged": [], "direct": []}
    with Traffic(server, PROMPTS) as traffic:
        for number, bucket_bytes in enumerate((40_000, 150_000, 10_000_000)):
            began, answered = time.monotonic(), traffic.completed
            with ThreadPoolExecutor() as pool:
                version = "BA"[number % 2] + f"-{number}"
                pushing = pool.submit(
                    push, server, checkpoints, version, transport=transport, bucket_bytes=bucket_bytes
                )
                staging = server.wait_state("staging")
                assert (staging["update"]["mode"], staging["update"]["phase"]) == ("staged", "receiving")
                report = pushing.result()
            assert server.status()["weight_version"] == version
            assert report.servers[0].mode == "staged"
            # What arriving takes is no part of the pause.
            (part,) = report.servers
            assert 0 < part.pause_seconds <= part.seconds - SLOW_S * report.buckets < time.monotonic() - began
            pauses["staged"].append(report.pause_seconds)
            assert traffic.completed > answered
            for answer in traffic.answers:
                assert answer[2] == (cold_a if answer[0][0] in "Ad" else cold_b)[answer[1]]
        assert set(traffic.refused_in) <= {"updating"}
        assert {version for version, _, _ in traffic.answers} >= {"B-0", "A-1"}
        for version in ("A-3", "B-4"):
            report = push(server, checkpoints, version, transport=transport, mode="direct")
            assert report.pause_seconds >= SLOW_S * report.buckets
            pauses["direct"].append(report.pause_seconds)
    with capsys.disabled():
        shown = {mode: ", ".join(f"{pause:.3f}" for pause in found) for mode, found in pauses.items()}
        print(
            f"\n{transport}, buckets slowed down by {SLOW_S * 1000:.0f} ms each: not serving for {shown['staged']} s "
            f"staged, {shown['direct']} s direct; {sum(traffic.refused.values())} refused, {traffic.completed} answered"
        )


def test_staged_weights_are_those_of_a_direct_push(server: ServerProcess, checkpoints: Checkpoints) -> None:
    """To the bit, whatever the buckets in which they came to lie in host memory."""
    (direct,) = push(server, checkpoints, "B", mode="direct", transport="http").servers
    before = server.status()["fingerprint"]
    assert direct.fingerprint == before
    sizes = {"gloo": 10_000_000, "http": BUCKET_BYTES, "shm": 3_000}
    for transport, bucket_bytes in sizes.items():
        (other,) = push(server, checkpoints, f"A-{transport}", transport=transport).servers
        assert other.fingerprint != before
        for _ in range(2):  # The second finds everything worked out.
            (staged,) = push(
                server, checkpoints, f"B-{transport}", transport=transport, bucket_bytes=bucket_bytes
            ).servers
            assert (staged.mode, staged.fingerprint) == ("staged", before)
    last = server.status()["last_update"]
    assert last["worker_seconds"]["land"] > 0
    assert last["tensors"] == len(read_tensors(checkpoints.b))


@pytest.mark.parametrize("pause_at", ["stream:0", "stream:2", "finish"])
@pytest.mark.parametrize("transport", ["gloo", "http"])
@pytest.mark.case("C1", "C3", "C5")
def test_a_killed_trainer_costs_not_one_request(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str], pause_at: str, transport: str
) -> None:
    before = server.status()
    with Traffic(server, PROMPTS) as traffic:
        process = trainer.start(
            server.url,
            checkpoints.b,
            "B",
            transport=transport,
            pause_at=pause_at,
            token=TOKEN,
            lease_s=2.0,
            mode="staged",
        )
        assert server.status()["state"] == "staging"
        answered = traffic.completed
        process.send_signal(signal.SIGKILL)
        process.wait()
        status = server.wait_state("serving", timeout_s=15)
        assert status["last_error"]["code"] in ("transport_failed", "lease_lost")
        deadline = time.monotonic() + 60
        while traffic.completed < answered + 6:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not traffic.refused
    assert all(text == cold_a[prompt] for _, prompt, text in traffic.answers)
    untouched(server, before, cold_a)


@pytest.mark.parametrize("kind", BAD_BUCKETS)
@pytest.mark.case("C4", "C6", "C19", "C20", "C96")
def test_a_bad_bucket_leaves_the_old_version_serving(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str], kind: str
) -> None:
    send, code, named = BAD_BUCKETS[kind]
    before = server.status()
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    answer = update.begin(mode="staged")
    answer.raise_for_status()
    assert answer.json()["mode"] == "staged"
    assert answer.json()["plan"]["bytes"] == update.manifest.nbytes
    update.stream_all([0])
    error = error_of(send(update))  # type: ignore[arg-type] # every sender returns a response
    assert error["code"] == code
    assert named in error["message"]
    assert error["state"] == "serving"
    assert error_of(update.finish())["code"] == "update_failed"
    assert error_of(update.stream(1))["code"] == "update_failed"
    assert server.status()["last_error"]["code"] == code
    untouched(server, before, cold_a)


@pytest.mark.case("C3", "C10", "C46")
def test_finish_too_early_goes_on_and_an_abort_costs_nothing(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    before = server.status()
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    first = update.begin(mode="staged").json()
    assert update.begin(mode="staged").json() == first
    update.stream_all([0, 1])
    assert error_of(update.finish())["code"] == "incomplete_update"
    assert server.status()["state"] == "staging"
    other = RawUpdate(server, read_tensors(checkpoints.b), version="C").begin(mode="staged")
    assert error_of(other)["code"] == "update_in_progress"
    for _ in range(2):
        assert update.abort().json()["state"] == "serving"
    untouched(server, before, cold_a)


@pytest.mark.case("C6", "C107")
def test_without_a_copy_a_failure_after_the_first_write_is_failed(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    for fault, code, phase in (
        ("close", "postload_failed", "closing"),
        ("land_stored_once", "landing_failed", "landing"),
    ):
        server.set_faults(**{fault: "kernel refused the weight"})
        with pytest.raises(PushError, match="kernel refused the weight") as failed:
            push(server, checkpoints, "B")
        assert (failed.value.code, failed.value.state) == (code, "failed")
        assert server.status()["last_error"]["phase"] == phase
        server.set_faults()
        closed(server)
        with server.client() as client:
            refused = client.post("/reload/rollback")
        assert (refused.status_code, error_of(refused)["code"]) == (422, "no_copy")
        assert "--keep-previous" in error_of(refused)["message"]
        # Nothing is served, so there is nothing that staging would spare.
        direct = RawUpdate(server, read_tensors(checkpoints.a), version="A")
        assert direct.begin(mode="staged").json()["mode"] == "direct"
        assert direct.abort().json()["state"] == "failed"
        repaired(server, checkpoints, cold_b)
        assert server.status()["last_update"]["mode"] == "direct"


@pytest.mark.case("C47", "C87")
def test_an_abort_while_the_pause_begins_leaves_a_server_that_answers(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    before = server.status()
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    update.begin(mode="staged").raise_for_status()
    update.stream_all()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.complete, "long", max_tokens=200)
        server.wait_running()
        finishing = pool.submit(update.finish)
        while server.status()["state"] != "updating":
            time.sleep(0.002)
        assert server.status()["update"]["phase"] == "draining"
        assert update.abort().json()["state"] == "serving"
        assert error_of(finishing.result())["code"] == "aborted"
        assert running.result().status_code == 200
    untouched(server, before, cold_a)


@pytest.mark.case("C9", "C87")
def test_keep_names_both_versions(server: ServerProcess, checkpoints: Checkpoints) -> None:
    """Also of a request that came in while the new weights were being staged."""
    update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
    update.begin(mode="staged", in_flight="keep").raise_for_status()
    update.stream_all()
    version = server.status()["weight_version"]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.complete, "long", max_tokens=200)
        server.wait_running()
        update.finish().raise_for_status()
        assert running.result().headers["X-Weight-Version"] == f"{version}, B"
    assert server.complete("x").headers["X-Weight-Version"] == "B"


@pytest.mark.slow
@pytest.mark.case("C5", "C38", "C75")
def test_ten_dead_trainers_leave_nothing_behind(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    before = server.status()
    counts = []
    for number in range(10):
        process = trainer.start(
            server.url,
            checkpoints.b,
            f"B{number}",
            transport=("gloo", "http")[number % 2],
            pause_at=("stream:0", "stream:1", "stream:3", "finish")[number % 4],
            token=TOKEN,
            lease_s=0.5,
            mode="staged",
        )
        process.kill()
        process.wait()
        server.wait_state("serving", timeout_s=10)
        counts.append(resources(server))
    untouched(server, before, cold_a)
    assert counts[-1] == counts[4]
    assert counts[-1]["copies"] == 0


def test_a_commit_that_takes_too_long_is_failed(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    server.set_faults(slow_close_ms=2500)
    with pytest.raises(PushError, match="commit_s") as failed:
        push(server, checkpoints, "B", deadlines=Deadlines(commit_s=0.8))
    assert failed.value.code == "deadline_exceeded"
    assert server.wait_state("failed", timeout_s=10)["last_error"]["code"] == "deadline_exceeded"
    server.set_faults()
    repaired(server, checkpoints, cold_b)
