"""Servers of several processes: every API process shuts its gate, every worker lands, embeddings are gated too."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from integration.conftest import PROMPTS, Checkpoints
from support import trainer
from support.otlp import Collector
from support.prometheus import scrape, value
from support.raw import read_tensors
from support.server import ServerProcess
from weightpush_client import WeightPusher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def push(server: ServerProcess, directory: Path, version: str, transport: str, mode: str = "direct") -> None:
    with WeightPusher(server.url, transport=transport, mode=mode, bucket_bytes=40_000) as pusher:
        pusher.push(directory, weight_version=version)


def over_new_connections(server: ServerProcess, times: int = 24) -> list[httpx.Response]:
    """Ask over connections that the kernel spreads over the API processes."""
    return [server.complete(PROMPTS[0], max_tokens=4) for _ in range(times)]


def test_two_api_processes_share_one_gate(checkpoints: Checkpoints, cold_b: dict[str, str], tmp_path: Path) -> None:
    with (
        Collector() as collector,
        ServerProcess(
            checkpoints.a, ["--api-server-count", "2"], folder=tmp_path, environment=collector.environment()
        ) as server,
    ):
        assert {answer.status_code for answer in over_new_connections(server)} == {200}
        process = trainer.start(
            server.url, checkpoints.b, "lost", transport="gloo", pause_at="stream:2", token=None, lease_s=30.0
        )
        assert {answer.status_code for answer in over_new_connections(server)} == {503}
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert server.wait_state("failed")["last_error"]["code"] == "transport_failed"
        assert {answer.status_code for answer in over_new_connections(server)} == {503}
        for number in range(4):  # Calls of one update meet both processes.
            mode = ("direct", "staged")[number // 2]
            push(server, checkpoints.b, f"B{number}", ("gloo", "http")[number % 2], mode)
        answers = over_new_connections(server)
        assert {answer.headers["X-Weight-Version"] for answer in answers} == {"B3"}
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {cold_b[PROMPTS[0]][:4]}
        assert {server.status()["instance_id"] for _ in range(8)} == {server.status()["instance_id"]}
        check_what_is_seen(server, collector)
        check_nobody_else_gets_its_port(server, tmp_path / "other")


def check_nobody_else_gets_its_port(server: ServerProcess, folder: Path) -> None:
    """The kernel would let another one in that shares its port among its own processes, too."""
    folder.mkdir()
    other = ServerProcess(server.model, ["--api-server-count", "2"], folder=folder, port=server.port).start()
    try:
        assert other.wait_exit() == 1
        assert f"127.0.0.1:{server.port}: Address already in use" in other.log.read_text()
    finally:
        other.stop()
    assert {server.status()["weight_version"] for _ in range(8)} == {"B3"}


def check_what_is_seen(server: ServerProcess, collector: Collector) -> None:
    """After a failed push and two in each mode every process says the same, and one of them has sent each trace."""
    for _ in range(8):  # Over new connections.
        page = scrape(server.url)
        for mode in ("direct", "staged"):
            assert value(page, "weightpush_updates_total", mode=mode, outcome="committed") == 2
            assert value(page, "weightpush_pause_seconds_count", mode=mode) == 2
        assert value(page, "weightpush_updates_total", mode="direct", outcome="failed") == 1
        assert value(page, "weightpush_update_failures_total", code="transport_failed") == 1
        assert value(page, "weightpush_gate_refusals_total", state="updating") >= 24
        assert value(page, "weightpush_gate_refusals_total", state="failed") >= 24
        assert value(page, "weightpush_weight_version_info", weight_version="B3") == 1
        assert any(name.startswith("vllm:") for name, _ in page)
    deadline = time.monotonic() + 60
    while len(updates := [span for span in collector.spans() if span.name == "weightpush.update"]) < 5:
        assert time.monotonic() < deadline, f"only {len(updates)} traces came"
        time.sleep(0.1)
    seen = [{a.key.removeprefix("weightpush."): a.value.string_value for a in span.attributes} for span in updates]
    assert sorted((each["outcome"], each["weight_version"]) for each in seen) == [
        *(("committed", f"B{number}") for number in range(4)),
        ("failed", "lost"),
    ]
    assert len({span.trace_id for span in updates}) == 5
    log = server.log.read_text()
    assert log.count("event=weightpush.update_began ") == 5
    assert log.count("event=weightpush.update_committed ") == 4
    assert log.count("event=weightpush.update_failed ") == 1


def vllm_round(server: ServerProcess, checkpoints: Checkpoints, workers: int) -> None:
    """Push B from vLLM's own trainer engine: all workers take part in its broadcasts, and all end where a push ends."""
    from support.vllm_trainer import TensorSource, trainer_engine

    push(server, checkpoints.b, "B", "http")
    pushed = server.status()["fingerprint"]
    push(server, checkpoints.a, "A", "http")
    with trainer_engine(server.url, TensorSource(read_tensors(checkpoints.b)), workers=workers) as engine:
        for _ in range(3):  # Calls of one round meet all API processes.
            engine.send_weights()
            status = server.status()
            assert status["fingerprint"] == pushed
            versions = {worker["weight_version"] for worker in status["workers"]}
            assert versions == {status["weight_version"]}


def round_trips(server: ServerProcess, checkpoints: Checkpoints, workers: int, engines: int = 1) -> None:
    """Push B and A over every transport; answers and fingerprints of one checkpoint never change, on no engine."""
    cold_a = {prompt: server.answer(prompt) for prompt in PROMPTS}
    answers: dict[str, dict[str, str]] = {"A": cold_a}
    fingerprints: dict[str, str] = {}
    for label, transport, mode in (
        ("B", "gloo", "direct"),
        ("A", "http", "staged"),
        ("B", "http", "direct"),
        ("A", "gloo", "staged"),
        ("B", "shm", "direct"),
        ("A", "shm", "staged"),
    ):
        push(server, checkpoints.a if label == "A" else checkpoints.b, label, transport, mode)
        for engine in range(engines):
            before = server.answered(engine)
            for _ in range(4):
                seen = {prompt: server.answer(prompt, engine=engine) for prompt in PROMPTS}
                assert answers.setdefault(label, seen) == seen
            assert server.answered(engine) == before + 4 * len(PROMPTS)
        status = server.status()
        assert fingerprints.setdefault(label, status["fingerprint"]) == status["fingerprint"]
        assert [worker["weight_version"] for worker in status["workers"]] == [label] * workers
        assert {worker["tensors_done"] for worker in status["workers"]} == {25}
    assert answers["A"] != answers["B"]
    assert fingerprints["A"] != fingerprints["B"]


@pytest.mark.case("C72", "C107")
def test_tensor_parallel_workers_each_land_their_part(checkpoints: Checkpoints, tmp_path: Path) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "WP_TEST_VLLM_PLANE": "gloo"}
    options = ["--tensor-parallel-size", "2", "--compat", "vllm"]
    with ServerProcess(checkpoints.a, options, environment=environment, folder=tmp_path, executor="mp") as server:
        round_trips(server, checkpoints, workers=2)
        vllm_round(server, checkpoints, workers=2)


@pytest.mark.case("C72")
def test_data_parallel_engines_all_change(checkpoints: Checkpoints, tmp_path: Path) -> None:
    options = ["--data-parallel-size", "2", "--compat", "vllm"]
    environment = {"WP_TEST_VLLM_PLANE": "gloo"}
    with ServerProcess(checkpoints.a, options, environment=environment, folder=tmp_path) as server:
        round_trips(server, checkpoints, workers=2, engines=2)
        vllm_round(server, checkpoints, workers=2)


def test_embeddings_are_gated_and_follow_the_push(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def embed(server: ServerProcess) -> httpx.Response:
        body = {"model": str(server.model), "input": "some text"}
        return httpx.post(f"{server.url}/v1/embeddings", json=body, trust_env=False, timeout=60)

    with ServerProcess(checkpoints.a, ["--runner", "pooling"], folder=tmp_path, host="::1") as server:
        cold = embed(server).json()["data"][0]["embedding"]
        push(server, checkpoints.b, "B", "gloo")
        other = embed(server)
        assert other.headers["X-Weight-Version"] == "B"
        assert other.json()["data"][0]["embedding"] != cold
        process = trainer.start(
            server.url, checkpoints.a, "lost", transport="gloo", pause_at="stream:1", token=None, lease_s=1.0
        )
        for path in ("/v1/embeddings", "/pooling", "/v2/embed", "/score", "/rerank", "/classify", "/invocations"):
            answer = httpx.post(f"{server.url}{path}", json={"input": "x"}, trust_env=False)
            assert answer.status_code == 503, path
        process.kill()
        process.wait()
        server.wait_state("failed")
        push(server, checkpoints.a, "A", "http")
        assert embed(server).json()["data"][0]["embedding"] == cold


def test_a_server_ends_while_somebody_watches_it(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with (
        ServerProcess(checkpoints.a, folder=tmp_path) as server,
        server.client() as client,
        client.stream("GET", "/reload/events") as events,
    ):
        assert next(events.iter_lines()) == "event: status"
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait_exit(20) == 0


@pytest.mark.case("C14")
def test_a_killed_worker_is_reported_and_the_trainer_does_not_hang(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with ServerProcess(checkpoints.a, folder=tmp_path) as server:
        server.set_faults(slow_land_ms=500)
        process = trainer.start(
            server.url, checkpoints.b, "B", transport="gloo", pause_at="none", token=None, lease_s=30
        )
        status = server.wait_state("updating", timeout_s=60)
        os.kill(status["workers"][0]["pid"], signal.SIGKILL)
        seen = []
        while process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                seen.append(server.status())
            time.sleep(0.02)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "PushError" in errors
        assert not any(status["serving"] for status in seen)
        assert server.wait_exit(60) != 0 or seen[-1]["last_error"]["code"] == "worker_lost"


@pytest.mark.case("C69")
def test_every_route_of_the_application_is_known(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """While the server is failed, what is not on the short list of harmless routes answers 503."""
    from weightpush_server.gate import is_control_path, is_gated

    with ServerProcess(checkpoints.a, folder=tmp_path) as server:
        process = trainer.start(
            server.url, checkpoints.a, "lost", transport="gloo", pause_at="stream:1", token=None, lease_s=0.5
        )
        process.kill()
        process.wait()
        server.wait_state("failed")
        time.sleep(0.1)
        routes = [
            (method, route)
            for line in server.log.read_text().splitlines()
            if "Route: " in line and "Methods: " in line
            for route in [line.partition("Route: ")[2].partition(", Methods: ")[0]]
            for method in line.partition("Methods: ")[2].split(", ")
        ]
        assert len(routes) > 20
        for method, route in routes:
            if is_control_path(route) or not is_gated(method, route):
                continue
            answer = httpx.request(method, f"{server.url}{route}", trust_env=False, timeout=30)
            assert answer.status_code == 503, (method, route)
        generating = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations"}
        assert generating <= {route for method, route in routes if is_gated(method, route)}
