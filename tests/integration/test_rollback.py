"""Going back: to the last version after a failure, to the one before it on demand, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from integration.conftest import PROMPTS, TOKEN, Checkpoints
from integration.test_faults import closed
from integration.test_staged import push
from support.raw import RawUpdate, error_of, read_tensors
from support.resources import copy_sizes, resources
from support.server import ServerProcess
from support.traffic import Traffic
from weightpush_client import PushError, WeightPusher
from weightpush_client.cli import app


@dataclass(frozen=True)
class Look:
    """What a server serves: every bit of it, as far as can be seen."""

    version: str
    fingerprint: str
    answers: dict[str, str]


def look(server: ServerProcess) -> Look:
    status = server.status()
    assert (status["state"], status["update"]) == ("serving", None)
    answers = {prompt: server.answer(prompt) for prompt in PROMPTS}
    for prompt in PROMPTS:
        assert server.complete(prompt, max_tokens=1).headers["X-Weight-Version"] == status["weight_version"]
    return Look(status["weight_version"], status["fingerprint"], answers)


def kept(server: ServerProcess) -> dict[str, str]:
    """Return the version of each kept copy."""
    return {copy["role"]: copy["weight_version"] for copy in server.status()["copies"]}


def verified(server: ServerProcess, directory: Path) -> bool:
    """Whether the server says that it holds the checkpoint in ``directory``."""
    options = ["--against", str(directory), "--token", TOKEN]
    return CliRunner().invoke(app, ["verify", server.url, *options]).exit_code == 0


@pytest.fixture(scope="module")
def keeping_server(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, Look]]:
    """A server that keeps copies, and what it served at its start."""
    with ServerProcess(
        checkpoints.a,
        ["--keep-previous", "--reload-root", str(checkpoints.a.parent)],
        folder=tmp_path_factory.mktemp("keeping"),
        token=TOKEN,
    ) as server:
        assert kept(server) == {"served": "default"}
        yield server, look(server)


@pytest.fixture
def keeping(keeping_server: tuple[ServerProcess, Look]) -> Iterator[ServerProcess]:
    keeping_server[0].set_faults()
    yield keeping_server[0]
    keeping_server[0].set_faults()


def test_back_to_the_start(keeping_server: tuple[ServerProcess, Look], checkpoints: Checkpoints) -> None:
    """The first of this file: the copy is that of the cold start."""
    server, start = keeping_server
    push(server, checkpoints, "B", mode="direct")
    assert look(server).answers != start.answers
    assert kept(server) == {"served": "B", "previous": "default"}
    with server.client() as client:
        answers = [client.post("/reload/rollback", json={"update_id": "back"}).json() for _ in range(2)]
        assert answers[0] == answers[1]
        refused = client.post("/reload/rollback")
    assert (answers[0]["weight_version"], answers[0]["fingerprint"]) == ("default", start.fingerprint)
    assert look(server) == start
    assert kept(server) == {"served": "default"}
    assert verified(server, checkpoints.a)
    # It does not toggle: what was left behind is gone.
    assert (refused.status_code, error_of(refused)["code"]) == (422, "no_copy")
    assert look(server) == start
    # The old call is no call of now: what it went back to is served no more.
    push(server, checkpoints, "B")
    with server.client() as client:
        late = client.post("/reload/rollback", json={"update_id": "back"})
        other = client.post("/reload/rollback", json={"update_id": "back", "in_flight": "abort"})
    assert [error_of(answer)["code"] for answer in (late, other)] == ["stale_update"] * 2
    assert server.status()["weight_version"] == "B"
    push(server, checkpoints, "A")


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_bad_policy_is_left_behind(keeping: ServerProcess, checkpoints: Checkpoints, mode: str) -> None:
    push(keeping, checkpoints, "A1", mode=mode)
    good = look(keeping)
    push(keeping, checkpoints, "B1", mode=mode, transport="http")
    assert kept(keeping) == {"served": "B1", "previous": "A1"}
    assert {size["bytes"] for size in keeping.status()["copies"]} == {keeping.status()["last_update"]["bytes"]}
    with Traffic(keeping, PROMPTS) as traffic, WeightPusher(keeping.url, token=TOKEN) as pusher:
        (answer,) = pusher.rollback()
        assert answer.weight_version == "A1"
        assert 0 < answer.pause_seconds <= answer.seconds
    for version, prompt, text in traffic.answers:
        assert version in ("A1", "B1")
        if version == "A1":
            assert text == good.answers[prompt]
    assert look(keeping) == good
    assert keeping.status()["previous_version"] is None
    with WeightPusher(keeping.url, token=TOKEN) as pusher, pytest.raises(PushError, match="no copy") as refused:
        pusher.rollback()
    assert (refused.value.code, refused.value.state or "serving") == ("no_copy", "serving")
    assert look(keeping) == good


@pytest.mark.case("C4", "C96")
def test_a_failed_direct_push_is_taken_back_to_the_last_version(
    keeping: ServerProcess, checkpoints: Checkpoints
) -> None:
    push(keeping, checkpoints, "B2")
    push(keeping, checkpoints, "A2")
    good, copies = look(keeping), kept(keeping)
    for attempt in range(2):
        update = RawUpdate(keeping, read_tensors(checkpoints.b), version=f"bad-{attempt}")
        update.begin().raise_for_status()
        update.stream_all([0, 1])
        assert update.abort().json()["state"] == "failed"
        closed(keeping)
        assert kept(keeping) == copies
        if attempt == 1:  # A rollback that fails costs no copy either.
            keeping.set_faults(land_stored_once="host memory went away")
            with keeping.client() as client:
                failed = client.post("/reload/rollback")
            assert (error_of(failed)["code"], error_of(failed)["state"]) == ("landing_failed", "failed")
            assert kept(keeping) == copies
        result = CliRunner().invoke(app, ["rollback", keeping.url, "--token", TOKEN])
        assert result.exit_code == 0, result.output
        assert "serves A2: " in result.output
        assert look(keeping) == good
        assert (kept(keeping), keeping.status()["last_error"]) == (copies, None)
    # And from there to the one before.
    with WeightPusher(keeping.url, token=TOKEN) as pusher:
        assert pusher.rollback()[0].weight_version == "B2"
    assert kept(keeping) == {"served": "B2"}
    assert verified(keeping, checkpoints.b)


@pytest.mark.parametrize("transport", ["gloo", "http"])
@pytest.mark.parametrize("fault", ["close_once", "land_stored_once"])
@pytest.mark.case("C6", "C107")
def test_a_staged_push_that_fails_late_is_undone_by_itself(
    keeping: ServerProcess, checkpoints: Checkpoints, transport: str, fault: str
) -> None:
    push(keeping, checkpoints, "A3")
    good, copies = look(keeping), kept(keeping)
    keeping.set_faults(**{fault: "kernel refused the weight"})
    with (
        Traffic(keeping, PROMPTS) as traffic,
        pytest.raises(PushError, match="kernel refused the weight") as failed,
    ):
        push(keeping, checkpoints, "B3", transport=transport)
    assert failed.value.state == "serving"
    status = keeping.status()
    assert status["last_error"]["code"] == failed.value.code
    assert "kernel refused" in status["last_error"]["message"]
    assert {version for version, _, _ in traffic.answers} <= {"A3"}
    assert set(traffic.refused_in) <= {"updating", "failed"}
    assert look(keeping) == good
    assert kept(keeping) == copies
    keeping.set_faults()
    push(keeping, checkpoints, "B3", transport=transport)
    assert keeping.status()["last_error"] is None
    assert verified(keeping, checkpoints.b)


def test_where_undoing_fails_too_the_server_is_failed_and_goes_back_later(
    keeping: ServerProcess, checkpoints: Checkpoints
) -> None:
    push(keeping, checkpoints, "A4")
    good = look(keeping)
    keeping.set_faults(close="kernel refused the weight")
    with pytest.raises(PushError, match="kernel refused the weight") as failed:
        push(keeping, checkpoints, "B4")
    assert failed.value.state == "failed"
    error = keeping.status()["last_error"]
    assert error["update_id"].startswith("undo-")
    assert error["details"]["failed_before"]["code"] == "postload_failed"
    closed(keeping)
    keeping.set_faults()
    with WeightPusher(keeping.url, token=TOKEN) as pusher:
        assert pusher.rollback()[0].weight_version == "A4"
    assert look(keeping) == good


@pytest.mark.case("C57")
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_partial_pushes_can_be_gone_back_to(keeping: ServerProcess, checkpoints: Checkpoints, mode: str) -> None:
    """Both ways: to a version that was made of two pushes, and to what it was made from."""
    b = read_tensors(checkpoints.b)
    part = {name: tensor for name, tensor in b.items() if "norm" in name}
    push(keeping, checkpoints, "A5", mode=mode)
    whole = look(keeping)
    with WeightPusher(keeping.url, token=TOKEN, mode=mode, partial=True) as pusher:
        # Under `scratch` what processing packed away must come along.
        rest = {name: tensor for name, tensor in read_tensors(checkpoints.a).items() if "norm" not in name}
        left_out = next(iter(part))
        pusher.push({**rest, **{n: t for n, t in part.items() if n != left_out}}, weight_version="part")
        mixed = look(keeping)
        assert mixed.fingerprint != whole.fingerprint
        update = RawUpdate(keeping, b, version="bad")
        update.begin().raise_for_status()
        update.stream_all([0])
        update.abort().raise_for_status()
        assert pusher.rollback()[0].weight_version == "part"
        assert look(keeping) == mixed
        assert pusher.rollback()[0].weight_version == "A5"
        assert look(keeping) == whole


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_what_came_from_disk_is_kept_too(keeping: ServerProcess, checkpoints: Checkpoints, mode: str) -> None:
    push(keeping, checkpoints, "A5")
    with WeightPusher(keeping.url, token=TOKEN) as pusher:
        pusher.push_from_disk(checkpoints.b, weight_version="B5", mode=mode)
        from_disk = look(keeping)
        pusher.push_from_disk(checkpoints.a, weight_version="A6", mode=mode)
        assert kept(keeping) == {"served": "A6", "previous": "B5"}
        assert len(copy_sizes(keeping)) == 2
        pusher.rollback()
    assert look(keeping) == from_disk
    assert verified(keeping, checkpoints.b)


def test_memory_is_one_copy_a_version(keeping: ServerProcess, checkpoints: Checkpoints) -> None:
    push(keeping, checkpoints, "A6")
    push(keeping, checkpoints, "B6")
    size = keeping.status()["last_update"]["bytes"]
    sizes = copy_sizes(keeping)
    assert len(sizes) == 2
    assert all(size <= found <= 1.1 * size + 65_536 for found in sizes)
    update = RawUpdate(keeping, read_tensors(checkpoints.a), version="A7")
    update.begin(mode="staged").raise_for_status()
    update.stream_all()
    assert len(copy_sizes(keeping)) == 3
    update.abort().raise_for_status()
    assert len(copy_sizes(keeping)) == 2


@pytest.mark.case("C75")
def test_nothing_grows(keeping: ServerProcess, checkpoints: Checkpoints) -> None:
    counts: list[dict[str, Any]] = []
    for number in range(8):
        push(keeping, checkpoints, f"{'BA'[number % 2]}-{number}", mode=("staged", "direct")[number // 2 % 2])
        if number % 3 == 2:
            with WeightPusher(keeping.url, token=TOKEN) as pusher:
                pusher.rollback()
            push(keeping, checkpoints, f"{'AB'[number % 2]}-again")
        counts.append(resources(keeping))
    assert counts[-1] == counts[3]
    assert counts[-1]["copies"] == 2


@pytest.mark.slow
def test_what_does_not_fit_the_budget_is_refused_before_anything(checkpoints: Checkpoints, tmp_path: Path) -> None:
    tensors = read_tensors(checkpoints.b)
    size = sum(tensor.nbytes for tensor in tensors.values())
    # One copy and a half.
    arguments = ["--keep-previous", "--staging-budget-mb", str(1.5 * size / 2**20)]
    with ServerProcess(checkpoints.a, arguments, folder=tmp_path, token=TOKEN) as server:
        start = look(server)
        for mode in ("staged", "direct"):
            refused = RawUpdate(server, tensors, version="B").begin(mode=mode)
            assert (refused.status_code, error_of(refused)["code"]) == (422, "staging_budget_exceeded")
            details = error_of(refused)["details"]
            assert details["needed_bytes"] == size
            assert size <= details["kept_bytes"] <= 1.1 * size
            assert details["budget_bytes"] == int(1.5 * size)
            assert look(server) == start
        assert len(copy_sizes(server)) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.case("C72")
def test_workers_share_one_copy(checkpoints: Checkpoints, tmp_path: Path) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    arguments = ["--tensor-parallel-size", "2", "--keep-previous"]
    with ServerProcess(
        checkpoints.a, arguments, environment=environment, folder=tmp_path, executor="mp", token=TOKEN
    ) as server:
        start = look(server)
        assert len(copy_sizes(server)) == 1
        for transport in ("gloo", "http"):
            push(server, checkpoints, f"B-{transport}", transport=transport)
            assert {worker["tensors_done"] for worker in server.status()["workers"]} == {25}
            assert verified(server, checkpoints.b)
            other = look(server)
            assert other.answers != start.answers
            assert len(copy_sizes(server)) == 2
            server.set_faults(close_once="kernel refused the weight")
            with pytest.raises(PushError, match="kernel refused"):
                push(server, checkpoints, "A-bad", transport=transport)
            server.set_faults()
            assert look(server) == other
            with WeightPusher(server.url, token=TOKEN) as pusher:
                pusher.rollback()
            assert look(server).answers == start.answers
            assert server.status()["fingerprint"] == start.fingerprint
            assert verified(server, checkpoints.a)
