"""Shared memory between trainer and real server: chosen, refused before anything is touched, and never left over."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from support import trainer
from support.raw import RawUpdate, error_of, read_tensors
from support.server import ServerProcess
from weightpush_client import WeightPusher
from weightpush_protocol.transports.shared_memory import MEMORY_NAME, SharedBuffers, host_id
from weightpush_protocol.transports.shm_sender import ShmSender


def held_by(server: ServerProcess) -> list[str]:
    """Return what the processes of a server hold of shared buffers, mapped or open."""
    held = []
    for pid in server.processes():
        with suppress(OSError):
            held += [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if MEMORY_NAME in line]
            held += [link for fd in os.listdir(f"/proc/{pid}/fd") if MEMORY_NAME in (link := _link(pid, fd))]
    return held


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
            assert held_by(server) == []


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
    assert held_by(server)
    process.send_signal(signal.SIGKILL)
    process.wait()
    status = server.wait_state("failed" if mode == "direct" else "serving", timeout_s=20)
    assert status["last_error"]["code"] in ("transport_failed", "lease_lost")
    assert held_by(server) == []
    with WeightPusher(server.url, token=TOKEN, transport="shm", bucket_bytes=40_000) as pusher:
        pusher.push(checkpoints.b, weight_version="B")
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold_b
    assert held_by(server) == []
