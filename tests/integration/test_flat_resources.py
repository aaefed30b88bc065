"""Nothing piles up in a server: processes, threads, descriptors, memory files, memory."""

from __future__ import annotations

import pytest

from faults.checks import ENOUGH, WARM_UP, Usage, check_flat
from faults.resources import settled_usage
from faults.trainers import Job, Trainer
from integration.conftest import PROMPTS, TOKEN, Checkpoints
from support.effort import LONG
from support.raw import RawUpdate, read_tensors
from support.server import ServerProcess
from weightpush_client import WeightPusher
from weightpush_protocol.messages import Deadlines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUICK = Deadlines(rendezvous_s=10, lease_s=1)
PUSHES = 100 if LONG else 30
BEGINS = 200 if LONG else 40


@pytest.mark.case("C75")
def test_many_pushes_leave_nothing_behind(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str], cold_a: dict[str, str]
) -> None:
    samples: list[Usage] = []
    directories = {"B": checkpoints.b, "A": checkpoints.a}
    for number in range(PUSHES):
        label = "BA"[number % 2]
        with WeightPusher(
            server.url, token=TOKEN, transport=("gloo", "http")[number // 2 % 2], bucket_bytes=40_000
        ) as pusher:
            pusher.push(directories[label], weight_version=f"{label}-{number}")
        samples.append(settled_usage(server.pid))
    assert len(samples) >= WARM_UP + ENOUGH
    assert list(check_flat(samples, PUSHES)) == []
    assert server.answer(PROMPTS[0]) == cold_a[PROMPTS[0]]


@pytest.mark.case("C47", "C75")
def test_begins_that_come_to_nothing_leave_nothing_behind(
    server: ServerProcess, checkpoints: Checkpoints, cold_b: dict[str, str]
) -> None:
    """Aborted by a client, aborted by its own trainer's death (gloo), lost with its lease (http), in turn."""
    instance = server.status()["instance_id"]
    tensors = read_tensors(checkpoints.b)
    samples: list[Usage] = []
    for number in range(BEGINS):
        if number % 2:
            update = RawUpdate(server, tensors, version=f"B-{number}")
            update.begin().raise_for_status()
            update.stream_all(range(number % 3))
            assert update.abort().json()["last_error"]["code"] == "aborted"
        else:
            transport = ("gloo", "http")[number // 2 % 2]
            job = Job(server.url, checkpoints.b, f"B-{number}", TOKEN, transport, deadlines=QUICK, pause_at="stream:1")
            trainer = Trainer(job)
            assert trainer.wait_paused(60), trainer.result(5)
            trainer.close()
            server.wait_state("failed")
        if number % 2:
            samples.append(settled_usage(server.pid))
    assert len(samples) >= WARM_UP + ENOUGH
    assert list(check_flat(samples, BEGINS)) == []
    with WeightPusher(server.url, token=TOKEN) as pusher:
        pusher.push(checkpoints.b, weight_version="B")
    assert server.answer(PROMPTS[0]) == cold_b[PROMPTS[0]]
    assert server.status()["instance_id"] == instance
