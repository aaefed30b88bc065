"""Either side stopped at any moment: the other one goes on in time, and who comes back late changes nothing."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from integration.test_faults import repaired
from support import trainer
from support.raw import RawUpdate, read_tensors
from support.server import ServerProcess
from unit.test_client_push import our_threads
from weightpush_client import Deadlines, ErrorCode, PushError, PushProgress, WeightPusher, delivery, http, update


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Deadlines:
    """Deadlines of seconds, and little slack on top of them."""
    for module in (http, delivery):
        monkeypatch.setattr(module, "SLACK_S", 0.5)
    for name in ("STATUS_S", "MANIFEST_S"):
        monkeypatch.setattr(http, name, 2.0)
    for module in (http, update):
        monkeypatch.setattr(module, "ABORT_S", 1.0)
    return Deadlines(rendezvous_s=2.0, bucket_s=2.0, drain_s=1.0, commit_s=4.0, lease_s=2.0)


def stop(server: ServerProcess, number: signal.Signals) -> None:
    """Send a signal to every process of a server."""
    for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
        process.send_signal(number)


@pytest.mark.case("C14", "C81")
@pytest.mark.parametrize(
    ("transport", "phase", "call"),
    [
        ("http", "check", "/reload/status"),
        ("http", "begin", "/reload/begin"),
        ("gloo", "begin", "/reload/begin"),
        ("http", "stream:2", "/reload/stream"),
        ("gloo", "stream:2", "/reload/stream"),
        ("http", "finish", "/reload/finish"),
    ],
)
def test_a_stopped_server_costs_its_trainer_a_deadline_and_nothing_more(
    server: ServerProcess,
    checkpoints: Checkpoints,
    cold_b: dict[str, str],
    short: Deadlines,
    transport: str,
    phase: str,
    call: str,
) -> None:
    def freeze(progress: PushProgress) -> None:
        if phase in (progress.phase.value, f"{progress.phase.value}:{progress.bucket}"):
            stop(server, signal.SIGSTOP)

    try:
        started = time.monotonic()
        with (
            WeightPusher(server.url, token=TOKEN, transport=transport, bucket_bytes=40_000, deadlines=short) as pusher,
            pytest.raises(PushError) as caught,
        ):
            pusher.push(checkpoints.b, weight_version="B", progress=freeze)
        assert time.monotonic() - started < 20
    finally:
        stop(server, signal.SIGCONT)
    error = caught.value
    assert error.code is ErrorCode.UNREACHABLE
    assert error.server == server.url
    assert call in error.message
    assert our_threads() == []
    # What it did with what it had already been sent is up to it; when it is through, the next push works.
    deadline = time.monotonic() + 30
    while server.status()["update"] is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    repaired(server, checkpoints, cold_b)


@pytest.mark.case("C81", "C99")
@pytest.mark.parametrize("transport", ["http", "gloo"])
def test_a_late_trainer_cannot_touch_a_newer_update(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str], transport: str
) -> None:
    late = trainer.start(
        server.url, checkpoints.a, "late", transport=transport, pause_at="stream:1", token=TOKEN, lease_s=1, pause_s=4
    )
    try:
        late.send_signal(signal.SIGSTOP)
        server.wait_state("failed", timeout_s=20)
        newer = RawUpdate(server, read_tensors(checkpoints.b), version="B")
        newer.begin().raise_for_status()
        newer.stream_all([0, 1])
        late.send_signal(signal.SIGCONT)
        output, errors = late.communicate(timeout=90)
        assert late.returncode != 0
        assert "committed" not in output
        assert "lease_lost" in errors
        running = server.status()["update"]
        assert (running["update_id"], running["buckets_done"]) == (newer.update_id, 2)
        newer.stream_all(range(2, len(newer.manifest.buckets)))
        newer.finish().raise_for_status()
    finally:
        late.kill()
        late.wait()
    assert server.status()["weight_version"] == "B"
    for prompt in PROMPTS:
        assert server.answer(prompt) == cold_b[prompt]
