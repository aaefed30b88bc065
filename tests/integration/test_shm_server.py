"""Shared memory between trainer and real server: chosen, refused before anything is touched, and never left over."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from faults import resources
from integration.conftest import PROMPTS, TOKEN, Checkpoints
from support import trainer
from support.raw import RawUpdate, error_of, read_tensors
from support.server import ServerProcess
from weightpush_client import PushError, PushProgress, WeightPusher
from weightpush_client.report import ProgressCallback
from weightpush_protocol.errors import ErrorCode
from weightpush_protocol.transports.shared_memory import MEMORY_NAME, SharedBuffers, host_id
from weightpush_protocol.transports.shm_sender import ShmSender


def held_by(processes: Iterable[int]) -> list[str]:
    """Return what processes hold of shared buffers, mapped or open."""
    held = []
    for pid in processes:
        with suppress(OSError):
            held += [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if MEMORY_NAME in line]
            held += [link for fd in os.listdir(f"/proc/{pid}/fd") if MEMORY_NAME in (link := _link(pid, fd))]
    return held


def listening() -> set[str]:
    """Return the names of the sockets of trainers on this machine."""
    return set(re.findall(r"@weightpush-[0-9a-f]{32}", Path("/proc/net/unix").read_text()))


def code_of_failure(pusher: WeightPusher, directory: Path, progress: ProgressCallback) -> ErrorCode:
    """Push and fail. The exception ends here: its frames hold the buffers."""
    try:
        pusher.push(directory, weight_version="B", progress=progress)
    except PushError as error:
        return error.code
    raise AssertionError("the push went through")


def _link(pid: int, descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""


def test_auto_finds_that_the_server_is_on_this_host(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str], cold_b: dict[str, str]
) -> None:
    assert {worker["host_id"] for worker in server.status()["workers"]} == {host_id()}
    with WeightPusher(server.url, token=TOKEN, bucket_bytes=40_000) as pusher:
        for label, directory, cold in (("B", checkpoints.b, cold_b), ("A", checkpoints.a, cold_a)):
            report = pusher.push(directory, weight_version=label)
            assert report.transport == server.status()["last_update"]["transport"] == "shm"
            assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold
            assert held_by(server.processes()) == []


def test_memory_that_cannot_be_mapped_is_refused_before_anything_is_touched(
    server: ServerProcess, checkpoints: Checkpoints, cold_a: dict[str, str]
) -> None:
    before = server.status()
    sender = ShmSender(SharedBuffers(1, 64), world_size=2)
    gone = sender.config
    sender.close()
    cases = [
        (gone.model_copy(update={"buffer_bytes": 2**20}), "transport_unavailable", "no trainer listens"),
        (gone, "invalid_request", "the trainer's shared buffers hold 4096"),
        (gone.model_copy(update={"socket": "../../tmp/socket"}), "invalid_request", "transport.socket"),
        (gone.model_copy(update={"key": None}), "invalid_request", "needs key"),
    ]
    for config, code, text in cases:
        update = RawUpdate(server, read_tensors(checkpoints.b), version="B")
        answer = update.begin(transport=config.model_dump(mode="json"))
        assert answer.status_code == 422
        error = error_of(answer)
        assert error["code"] == code
        assert text in str(error)
        status = server.status()
        assert (status["state"], status["update"]) == ("serving", None)
        for key in ("weight_version", "fingerprint", "last_update"):
            assert status[key] == before[key]
    assert server.answer(PROMPTS[0]) == cold_a[PROMPTS[0]]


@pytest.mark.case("C1", "C5")
@pytest.mark.parametrize(
    ("pause_at", "mode"), [("stream:0", "direct"), ("stream:2", "direct"), ("finish", "direct"), ("stream:2", "staged")]
)
def test_a_killed_trainer_leaves_no_memory_and_the_next_push_goes_through(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str], pause_at: str, mode: str
) -> None:
    process = trainer.start(
        server.url, checkpoints.b, "lost", transport="shm", pause_at=pause_at, token=TOKEN, lease_s=2.0, mode=mode
    )
    assert held_by(server.processes())
    others = listening()
    process.send_signal(signal.SIGKILL)
    process.wait()
    status = server.wait_state("failed" if mode == "direct" else "serving", timeout_s=20)
    assert listening() <= others
    assert status["last_error"]["code"] in ("transport_failed", "lease_lost")
    assert held_by(server.processes()) == []
    with WeightPusher(server.url, token=TOKEN, transport="shm", bucket_bytes=40_000) as pusher:
        pusher.push(checkpoints.b, weight_version="B")
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_b
    assert held_by(server.processes()) == []


@pytest.mark.slow
@pytest.mark.case("C1", "C5")
@pytest.mark.parametrize(("victim", "at"), [("worker", "stream:0"), ("api", "stream:2"), ("engine", "finish")])
def test_a_killed_server_leaves_nothing_behind_and_its_trainer_holds_nothing(
    checkpoints: Checkpoints, tmp_path: Path, victim: str, at: str
) -> None:
    with ServerProcess(checkpoints.a, folder=tmp_path, executor="mp") as server:
        known = resources.processes(server.pid)
        gc.collect()
        before, sockets = set(held_by([os.getpid()])), listening()

        def kill(progress: PushProgress) -> None:
            if at in (progress.phase.value, f"{progress.phase.value}:{progress.bucket}"):
                assert held_by(process.pid for process in known)
                resources.find(server.pid, victim).kill()

        with WeightPusher(server.url, transport="shm", bucket_bytes=40_000) as pusher:
            lost = {ErrorCode.TRANSPORT_FAILED, ErrorCode.UNREACHABLE, ErrorCode.WORKER_LOST, ErrorCode.INTERNAL}
            assert code_of_failure(pusher, checkpoints.b, kill) in lost
            gc.collect()
            assert set(held_by([os.getpid()])) <= before
            assert listening() <= sockets
        assert resources.left_of(known, 90) == []
