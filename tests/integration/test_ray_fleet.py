"""A fleet on a real Ray cluster of this machine, with real servers: what dies comes back, and nothing is left."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray.util import placement_group, remove_placement_group

from support.server import CHEAP_ARGUMENTS, CHEAP_ENVIRONMENT, PLUGIN_FOLDER
from weightpush_client import ErrorCode, WeightPushError
from weightpush_client.ray import ReplicaState, ServerFleet

pytestmark = [pytest.mark.timeout(1200)]

CPUS = 8
DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "ray"
SERVER_ARGS = (*CHEAP_ARGUMENTS, "--distributed-executor-backend", "uni")
#: Ray would end actors while other tests fill the machine's memory, and has its workers stand back behind them.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
}


def server_environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PLUGIN_FOLDER), os.environ.get("PYTHONPATH")]))
    return {**CHEAP_ENVIRONMENT, "PYTHONPATH": path}


def until(check: Callable[[], Any], what: Callable[[], Any], timeout_s: float = 240) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)
    return found


def processes_with(entry: str) -> dict[int, str]:
    """Return the command line of every process, zombies apart, that was started with ``NAME=VALUE`` around it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


@pytest.fixture(scope="module")
def marker() -> str:
    """What every process of the servers of this module has in its environment."""
    return f"WP_TEST_FLEET={uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("WEIGHTPUSH_CONTROL_TOKEN", raising=False)
        ray.init(
            address="local",
            num_cpus=CPUS,
            include_dashboard=False,
            object_store_memory=80_000_000,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def job() -> Iterator[ModuleType]:
    """``deploy/ray/job.py`` as a module; workers get it by value, for it is in no package."""
    spec = importlib.util.spec_from_file_location("weightpush_ray_job", DEPLOY / "job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    yield module
    ray.cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def fleet(cluster: None, checkpoints: Any, marker: str) -> Iterator[ServerFleet]:
    """Two replicas, started on A."""
    name, _, value = marker.partition("=")
    made = ServerFleet.launch(
        str(checkpoints.a),
        replicas=2,
        server_args=SERVER_ARGS,
        env={**server_environment(), name: value},
        start_timeout_s=700,
    )
    yield made
    made.shutdown()


def versions(fleet: ServerFleet) -> list[str]:
    """Return the version that each server says it has, whether it serves it or not."""
    return [status.server.weight_version for status in fleet.status() if status.server is not None]


def states(fleet: ServerFleet) -> list[str]:
    return [status.server.state.value for status in fleet.status() if status.server is not None]


@pytest.mark.slow
def test_a_fleet_serves_and_is_guarded_by_its_token(fleet: ServerFleet, checkpoints: Any, marker: str) -> None:
    urls = fleet.urls()
    assert len(set(urls)) == len(fleet) == 2
    assert all(url.startswith(f"http://{ray.util.get_node_ip_address()}:") for url in urls)
    assert states(fleet) == ["serving", "serving"]
    assert ray.available_resources()["CPU"] == CPUS - 2
    for url in urls:
        refused = httpx.get(f"{url}/reload/manifest", trust_env=False)
        assert refused.status_code == 401
        allowed = httpx.get(
            f"{url}/reload/manifest", headers={"Authorization": f"Bearer {fleet.token}"}, trust_env=False
        )
        assert allowed.status_code == 200
    servers = processes_with(marker)
    assert servers
    for pid, command in servers.items():
        assert fleet.token not in command
        assert fleet.token.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert fleet.token not in repr(fleet)
    assert not any(fleet.token in repr(status) for status in fleet.status())


@pytest.mark.slow
def test_a_push_reaches_all_and_whoever_dies_comes_back(fleet: ServerFleet, checkpoints: Any, job: ModuleType) -> None:
    with fleet.pusher() as pusher:
        report = pusher.push(checkpoints.b, weight_version="b-1")
        assert {server.url for server in report.servers} == set(fleet.urls())
        assert len({server.fingerprint for server in report.servers}) == 1
        assert job.versions(fleet) == ["b-1", "b-1"]
        before = fleet.status()

        # A server dies: the other takes the next push alone.
        fleet.kill(0)
        assert fleet.urls() == [before[1].url]
        report = pusher.push(checkpoints.a, weight_version="a-2")
        assert [server.url for server in report.servers] == [before[1].url]
        assert versions(fleet) == ["a-2"]

        # Then the other's actor dies, with its server.
        server = before[1].pid
        assert server is not None
        os.kill(parent_of(server), signal.SIGKILL)
        until(lambda: not Path(f"/proc/{server}").exists(), lambda: f"server {server} outlived its actor", 60)
        until(lambda: fleet.status()[1].state is ReplicaState.UNREACHABLE, lambda: fleet.status()[1], 60)
        with pytest.raises(WeightPushError, match=r"no replica of the fleet is up: replica 0.*replica 1") as nobody:
            pusher.push(checkpoints.b, weight_version="nobody")
        assert nobody.value.code is ErrorCode.UNREACHABLE

        # Both come back by themselves, as other servers, and serve nothing until weights come.
        fleet.wait_up(timeout_s=600)
        after = fleet.status()
        assert states(fleet) == ["awaiting_weights", "awaiting_weights"]
        assert [(status.restarts, status.actor_restarted) for status in after] == [(1, False), (0, True)]
        assert "killed by SIGKILL" in (after[0].reason or "")
        assert after[0].url == before[0].url
        for one, other in zip(before, after, strict=True):
            assert one.server is not None
            assert other.server is not None
            assert one.server.instance_id != other.server.instance_id
        answer = httpx.post(f"{fleet.urls()[0]}/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert answer.status_code == 503
        report = pusher.catch_up(checkpoints.a)
        assert report.weight_version == "a-2"
        assert {server.url for server in report.servers} == set(fleet.urls())
        assert job.versions(fleet) == ["a-2", "a-2"]


@pytest.mark.slow
def test_a_trainer_of_several_actors_pushes(fleet: ServerFleet, checkpoints: Any, job: ModuleType) -> None:
    with fleet.pusher() as pusher:
        whole = pusher.push(checkpoints.b, weight_version="whole")
    trainers = job.make_trainers(2, str(checkpoints.b), fleet, num_cpus=1)
    sharded = ray.get([trainer.push.remote("sharded") for trainer in trainers])
    assert sharded[0] == sharded[1]
    # Two ranks with half of each tensor push what the whole checkpoint is.
    assert {server.fingerprint for server in sharded[0].servers} == {whole.servers[0].fingerprint}
    assert len(sharded[0].servers) == 2
    # Trained weights differ, and every answer carries the version of its step.
    reports = job.train(trainers, fleet, steps=2)
    ray.get([trainer.leave.remote() for trainer in trainers])
    for trainer in trainers:
        ray.kill(trainer)
    assert [report.weight_version for report in reports] == ["step-1", "step-2"]
    assert len({whole.servers[0].fingerprint, *(report.servers[0].fingerprint for report in reports)}) == 3
    assert versions(fleet) == ["step-2", "step-2"]


@pytest.mark.slow
def test_a_failed_launch_names_the_replica_and_leaves_nothing(
    cluster: None, marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"WP_TEST_BAD={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    free = ray.available_resources()["CPU"]
    group = placement_group([{"CPU": 1}, {"CPU": 1}])
    with pytest.raises(WeightPushError, match="replica 2 has no bundle") as too_few:
        ServerFleet.launch(str(tmp_path), replicas=3, placement=group)
    assert too_few.value.code is ErrorCode.INVALID_REQUEST
    with pytest.raises(WeightPushError) as bad_model:
        ServerFleet.launch(
            str(tmp_path / "no-such-model"),
            placement=group,
            server_args=SERVER_ARGS,
            env={**server_environment(), name: value},
            start_timeout_s=600,
        )
    assert bad_model.value.code is ErrorCode.LAUNCH_FAILED
    assert "replica 0 is not up: replica 0 (node " in bad_model.value.message
    assert "the server exited with 1 before it was up" in bad_model.value.message
    log = bad_model.value.message.partition("--- the end of its log ---")[2]
    assert "no-such-model" in log
    until(lambda: not processes_with(mark), lambda: processes_with(mark), 60)
    remove_placement_group(group)
    until(lambda: ray.available_resources()["CPU"] >= free, ray.available_resources, 60)


@pytest.mark.slow
def test_whoever_interrupts_a_launch_and_its_end_leaves_nothing(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, and again since ending takes a while; a notebook keeps the error, and with it all handles."""
    mark = f"WP_TEST_IMPATIENT={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    free = ray.available_resources()["CPU"]
    ask, asked = ServerFleet._ask, []

    def interrupted(fleet: ServerFleet, method: str, *arguments: Any, **options: Any) -> list[Any]:
        if processes_with(mark):
            asked.append(method)
            raise KeyboardInterrupt
        return ask(fleet, method, *arguments, **options)

    monkeypatch.setattr(ServerFleet, "_ask", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        ServerFleet.launch(str(tmp_path / "model"), env={**server_environment(), name: value}, start_timeout_s=240)
    assert len(asked) == 2
    until(lambda: not processes_with(mark), lambda: processes_with(mark), 60)
    until(lambda: ray.available_resources()["CPU"] >= free, ray.available_resources, 60)
    del kept


@pytest.mark.parametrize("placement", ["spread", "pack"])
def test_a_fleet_that_does_not_fit_is_refused_in_time(cluster: None, placement: str) -> None:
    free = ray.available_resources()["CPU"]
    with pytest.raises(WeightPushError, match=r"no room within . s for replicas 0, 1 of CPU 1000 each") as no_room:
        ServerFleet.launch("m", replicas=2, resources_per_replica={"CPU": 1000}, placement=placement, start_timeout_s=2)
    assert no_room.value.code is ErrorCode.LAUNCH_FAILED
    assert f"the cluster has CPU {CPUS}" in no_room.value.message
    until(lambda: ray.available_resources()["CPU"] >= free, ray.available_resources, 60)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"placement": "anywhere"}, "'anywhere' is neither"),
        ({"resources_per_replica": {"CPU": -1}}, "resources_per_replica"),
        ({"server_args": ["--port", "1"]}, "--port"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_wrong_arguments_are_refused(cluster: None, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightPushError, match=named) as refused:
        ServerFleet.launch("m", start_timeout_s=5, **arguments)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.slow
def test_no_server_outlives_a_driver_that_is_killed(checkpoints: Any, tmp_path: Path) -> None:
    mark = f"WP_TEST_JOB={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    environment = {**os.environ, **RAY_ENVIRONMENT, **server_environment(), name: value}
    environment.pop("RAY_ADDRESS", None)
    environment["RAY_ADDRESS"] = "local"  # Not the cluster of the other tests.
    command = [sys.executable, str(DEPLOY / "job.py"), "--model", str(checkpoints.a), "--", *SERVER_ARGS]
    log = tmp_path / "job.log"

    def servers() -> dict[int, str]:
        return {pid: line for pid, line in processes_with(mark).items() if "-m weightpush_server " in line}

    with log.open("wb") as output:
        driver = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        until(servers, log.read_text)
        assert driver.poll() is None, log.read_text()
    finally:
        driver.kill()
        driver.wait()
    until(lambda: not processes_with(mark), lambda: processes_with(mark), 120)


def test_the_files_for_a_cluster_are_what_ray_takes() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.runtime_env import RuntimeEnv

    config = yaml.safe_load((DEPLOY / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    assert {"head", "gpu"} == set(config["available_node_types"])
    RuntimeEnv(**yaml.safe_load((DEPLOY / "runtime_env.yaml").read_text()))


@pytest.mark.slow
def test_shutdown_leaves_no_process(fleet: ServerFleet, marker: str) -> None:
    # The last of this module: the others share the fleet.
    assert processes_with(marker)
    again = ray.cloudpickle.loads(ray.cloudpickle.dumps(fleet))
    fleet.shutdown()
    assert not processes_with(marker)
    assert fleet.urls() == []
    assert again.urls() == []
    until(lambda: ray.available_resources().get("CPU") == CPUS, ray.available_resources, 60)
    fleet.shutdown()
