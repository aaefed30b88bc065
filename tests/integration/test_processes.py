"""Real servers whose processes are killed: nothing of them is left, and what is started again awaits its weights."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.conftest import PROMPTS, TOKEN, Checkpoints, ColdStart
from support.raw import RawUpdate, error_of, read_tensors
from support.server import START_TIMEOUT_S, ServerProcess
from weightpush_client import PushError, WeightPusher

#: Within this, a server whose process was killed is gone, on a machine that other tests keep busy.
GONE_S = 60
SHARED_MEMORY = Path("/dev/shm")


class Watched:
    """What exists of a server now, to be missed later."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.pids = server.processes()
        self.run = next(SHARED_MEMORY.glob(f"weightpush-{os.getuid()}-{server.pid}-*"))
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in self.pids)
        #: Shared memory that its processes have mapped.
        self.memory = {name for name in os.listdir(SHARED_MEMORY) if f"/dev/shm/{name}" in maps}

    def pid(self, named: str) -> int:
        """Return the process whose command line has ``named`` in it."""
        return next(pid for pid, command in self.pids.items() if named in command)

    def left(self, *, supervisor: bool) -> dict[int, str]:
        """Return what still runs."""
        return {
            pid: command
            for pid, command in self.pids.items()
            if (supervisor or pid != self.server.pid) and Path(f"/proc/{pid}").exists()
        }

    def is_gone(self, *, supervisor: bool) -> None:
        """All of it ends: processes, run directory, shared memory, port."""
        deadline = time.monotonic() + GONE_S
        while self.left(supervisor=supervisor) or self.run.exists():
            assert time.monotonic() < deadline, (self.left(supervisor=supervisor), self.run, self.server.tail())
            time.sleep(0.05)
        assert not [name for name in self.memory if (SHARED_MEMORY / name).exists()]

    def port_is_free(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.server.port))


def comes_back(server: ServerProcess, instance: str) -> str:
    """Wait until another instance awaits weights, with its gate shut; return its id."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        server.wait_up(deadline - time.monotonic())
        status = server.status()
        if status["instance_id"] != instance:
            break
        time.sleep(0.2)
    assert (status["state"], status["serving"], status["fingerprint"]) == ("awaiting_weights", False, None)
    assert [worker["tainted"] for worker in status["workers"]] == [True]
    refused = server.complete()
    assert (refused.status_code, error_of(refused)["state"]) == (503, "awaiting_weights")
    assert "Retry-After" not in refused.headers
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/reload/status").status_code == 503
    return str(status["instance_id"])


def serves(server: ServerProcess, cold: ColdStart) -> None:
    assert server.status()["fingerprint"] == cold.fingerprint
    assert {prompt: server.answer(prompt) for prompt in PROMPTS} == cold.answers


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.case("C103")
def test_a_server_that_dies_comes_back_and_awaits_weights(
    checkpoints: Checkpoints, cold_start_b: ColdStart, tmp_path: Path
) -> None:
    arguments = ["--restart-on-failure", "2", "--keep-previous", "--reload-root", str(checkpoints.b.parent)]
    with ServerProcess(checkpoints.a, arguments, folder=tmp_path, token=TOKEN) as server:
        instance = server.status()["instance_id"]
        watched = Watched(server)
        os.kill(server.server_pid, signal.SIGKILL)
        watched.is_gone(supervisor=False)
        instance = comes_back(server, instance)
        assert "restart 1 of 2" in server.log.read_text()

        # A part of a checkpoint is not enough, whatever it is called.
        tensors = read_tensors(checkpoints.b)
        part = dict(list(tensors.items())[:3])
        refused = RawUpdate(server, part, version="part").begin(partial=True)
        assert (refused.status_code, error_of(refused)["code"]) == (422, "manifest_rejected")
        assert error_of(refused)["state"] == "awaiting_weights"
        aborted = RawUpdate(server, tensors, version="torn")
        aborted.begin().raise_for_status()
        aborted.stream(0).raise_for_status()
        assert aborted.abort().json()["state"] == "failed"
        assert error_of(RawUpdate(server, part, version="part").begin(partial=True))["code"] == "manifest_rejected"
        with WeightPusher(server.url, token=TOKEN, transport="gloo") as pusher:
            pusher.push(checkpoints.b, weight_version="B", partial=True)
        serves(server, cold_start_b)

        watched = Watched(server)
        os.kill(watched.pid("VLLM::EngineCore"), signal.SIGKILL)
        watched.is_gone(supervisor=False)
        comes_back(server, instance)
        with WeightPusher(server.url, token=TOKEN) as pusher:
            (loaded,) = pusher.push_from_disk(checkpoints.b, weight_version="B")
            assert loaded.fingerprint == cold_start_b.fingerprint
            serves(server, cold_start_b)
            # What came from disk is kept as what was pushed: read into memory while it landed, or before.
            for version in ("A", "B2", "A2"):
                checkpoint = checkpoints.b if version == "B2" else checkpoints.a
                pusher.push_from_disk(checkpoint, weight_version=version)
            (back,) = pusher.rollback()
        assert (back.weight_version, back.fingerprint) == ("B2", cold_start_b.fingerprint)
        serves(server, cold_start_b)

        watched = Watched(server)
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait_exit(GONE_S) == -signal.SIGKILL
        watched.is_gone(supervisor=True)
        watched.port_is_free()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.case("C103")
def test_a_server_of_dummy_weights_awaits_real_ones(
    checkpoints: Checkpoints, cold_start_b: ColdStart, tmp_path: Path
) -> None:
    arguments = ["--load-format", "dummy", "--await-weights"]
    server = ServerProcess(checkpoints.a, arguments, folder=tmp_path, token=TOKEN).start()
    try:
        server.wait_up()
        comes_back(server, "none before")
        with server.client() as client:
            assert client.post("/reload/verify", json={}).status_code == 503
            assert error_of(client.post("/reload/rollback", json={}))["code"] == "no_copy"
        with WeightPusher(server.url, token=TOKEN, transport="http", mode="staged") as pusher:
            report = pusher.push(checkpoints.b, weight_version="B")
        assert report.servers[0].mode == "direct"
        serves(server, cold_start_b)
        assert server.status()["workers"][0]["tainted"] is False
        watched = Watched(server)
        os.kill(server.keeper_pid, signal.SIGKILL)
        assert server.wait_exit(GONE_S) == 128 + signal.SIGKILL
        watched.is_gone(supervisor=True)
        watched.port_is_free()
        assert "all of it was ended" in server.log.read_text()
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.case("C14", "C38")
def test_a_worker_that_dies_in_an_update_ends_it_by_name_and_the_server_whole(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    server = ServerProcess(
        checkpoints.a,
        ["--tensor-parallel-size", "2"],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        folder=tmp_path,
        token=TOKEN,
        executor="mp",
    )
    with server:
        watched = Watched(server)
        assert any(name.startswith("vllm_dist_") for name in watched.memory)
        server.set_faults(slow_land_ms=4000)
        with (
            ThreadPoolExecutor() as pool,
            WeightPusher(server.url, token=TOKEN, transport="http", bucket_bytes=40_000) as pusher,
        ):
            pushing = pool.submit(pusher.push, checkpoints.b, weight_version="B")
            server.wait_state("updating", timeout_s=60)
            os.kill(watched.pid("VLLM::Worker_TP1"), signal.SIGKILL)
            with pytest.raises(PushError) as failed:
                pushing.result(timeout=GONE_S)
        assert failed.value.code == "worker_lost"
        assert failed.value.server == server.url
        assert server.wait_exit(GONE_S) == 1
        watched.is_gone(supervisor=True)
        watched.port_is_free()
        assert "without being asked to; all of it was ended" in server.log.read_text()
