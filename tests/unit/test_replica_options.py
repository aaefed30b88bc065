"""What replicas of a fleet are started with."""

from __future__ import annotations

from typing import Any

import pytest

from weightpush_client.replica_options import (
    actor_options,
    check_resources,
    default_resources,
    environment_of,
    taken_of,
    words_of,
    workers_of,
)
from weightpush_protocol.errors import ErrorCode, WeightPushError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), ()),
        (["--max-num-seqs", 8], ("--max-num-seqs", "8")),
        ({"tensor_parallel_size": 2}, ("--tensor-parallel-size", "2")),
        ({"--tensor-parallel-size": 2, "-dp": 2}, ("--tensor-parallel-size", "2", "-dp", "2")),
        ({"enforce_eager": True, "enable_prefix_caching": False}, ("--enforce-eager", "--no-enable-prefix-caching")),
        ({"seed": None}, ()),
        ({"served_model_name": ["a", "b"]}, ("--served-model-name", "a", "b")),
        ({"override_generation_config": {"top_k": 1}}, ("--override-generation-config", '{"top_k": 1}')),
    ],
)
def test_words(given: Any, words: tuple[str, ...]) -> None:
    assert words_of(given) == words


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--dtype bfloat16", "sequence of words"),
        (["--port", "1"], "--port"),
        (["--host=0.0.0.0"], "--host"),
        ({"control_token": "secret-1"}, "--control-token"),
        ({"control_token_file": "f"}, "token="),
        (["--restart_on_failure", "3"], "--restart-on-failure"),
        ({"ssl_certfile": "f"}, "--ssl-certfile"),
        ({"model": "m"}, "first argument"),
    ],
)
def test_what_the_fleet_sets_itself_is_refused(given: Any, named: str) -> None:
    with pytest.raises(WeightPushError, match=named) as refused:
        words_of(given)
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert "secret-1" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        ((), 1),
        (("--tensor-parallel-size", "2"), 2),
        (("--tensor_parallel_size=4", "-dp", "2", "--pipeline-parallel-size", "3"), 24),
        (("-tp", "2", "--seed", "7"), 2),
        (("-tp",), 1),
    ],
)
def test_workers(words: tuple[str, ...], workers: int) -> None:
    assert workers_of(words) == workers


def test_resources() -> None:
    assert default_resources(("-tp", "2"), 0.0) == {"CPU": 1}
    assert default_resources(("-tp", "2"), 8.0) == {"CPU": 1, "GPU": 2}
    assert actor_options({"CPU": 1, "GPU": 2}) == {"num_cpus": 1, "num_gpus": 2}
    # An actor without a number of CPUs would take one for its placement only.
    assert actor_options({"memory": 1e9, "accelerator_type:H100": 0.1}) == {
        "num_cpus": 0,
        "memory": 1e9,
        "resources": {"accelerator_type:H100": 0.1},
    }


@pytest.mark.parametrize("resources", [{}, {"CPU": 0}, {"GPU": -1}, {"CPU": "1"}, {"CPU": float("nan")}])
def test_amounts_that_nobody_can_give_are_refused(resources: Any) -> None:
    check_resources(None)
    check_resources({"CPU": 0, "GPU": 0.5})
    with pytest.raises(WeightPushError, match="resources_per_replica"):
        check_resources(resources)


def test_what_replicas_take_of_a_placement_group() -> None:
    bundles = [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 8.0}]
    assert taken_of(bundles, None, 2) == bundles[:2]
    assert taken_of(bundles, {"GPU": 1}, 2) == [{"GPU": 1}] * 2
    with pytest.raises(WeightPushError, match="replica 3 has no bundle: the placement group has 3 for 5 replicas"):
        taken_of(bundles, None, 5)
    with pytest.raises(WeightPushError, match="asks for CPU 2, and bundle 1 of the placement group has 1"):
        taken_of(bundles, {"CPU": 2}, 3)
    with pytest.raises(WeightPushError, match="asks for GPU 1, and bundle 2 of the placement group has 0"):
        taken_of(bundles, {"GPU": 1}, 3)


def test_environment() -> None:
    assert environment_of(None, None) == ({}, None)
    assert environment_of({"A": "1"}, "t") == ({"A": "1"}, "t")
    assert environment_of({"A": "1", "WEIGHTPUSH_CONTROL_TOKEN": "t"}, None) == ({"A": "1"}, "t")


@pytest.mark.parametrize(
    ("env", "token", "named"),
    [
        ({"OMP_NUM_THREADS": 1}, None, "OMP_NUM_THREADS"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None, "resources_per_replica"),
        ({"WEIGHTPUSH_CONTROL_TOKEN": "secret-1"}, "secret-2", "not both"),
    ],
)
def test_a_wrong_environment_is_refused(env: Any, token: str | None, named: str) -> None:
    with pytest.raises(WeightPushError, match=named) as refused:
        environment_of(env, token)
    assert "secret" not in str(refused.value)
