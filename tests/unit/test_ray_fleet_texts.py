"""What a fleet says of replicas that do not answer, and of launches that fail."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from weightpush_client import ray as fleets
from weightpush_client.ray import ReplicaState, ReplicaStatus, ServerFleet
from weightpush_protocol.errors import ErrorCode, WeightPushError

IN_INIT = RayTaskError("__init__", "Traceback (most recent call last):\nValueError: vLLM is missing", ValueError())


def test_who_answered_is_taken_at_its_word() -> None:
    status = ReplicaStatus(1, ReplicaState.UP, url="http://a:1")
    assert fleets._status(1, status) is status


@pytest.mark.parametrize(
    ("result", "state", "reason"),
    [
        (TimeoutError("its actor did not answer within 10 s"), ReplicaState.UNREACHABLE, "did not answer within 10 s"),
        (ActorUnavailableError("the node is gone", b"0" * 16), ReplicaState.UNREACHABLE, "the node is gone"),
        (ActorDiedError(IN_INIT), ReplicaState.GAVE_UP, "ValueError: vLLM is missing"),
    ],
)
def test_who_did_not_answer_may_come_back_or_not(result: Exception, state: ReplicaState, reason: str) -> None:
    status = fleets._status(2, result)
    assert (status.index, status.state, status.url) == (2, state, None)
    assert status.reason is not None
    assert reason in status.reason
    assert "\n" not in status.reason


def test_a_failed_launch_ends_with_the_log_of_the_first() -> None:
    dead = ReplicaStatus(
        1, ReplicaState.GAVE_UP, node="10.0.0.5", reason="the server exited with 1 before it was up", log="a\nb: no GPU"
    )
    late = ReplicaStatus(3, ReplicaState.STARTING, node="10.0.0.7")
    error = fleets._launch_failed([dead], None)
    assert error.code is ErrorCode.LAUNCH_FAILED
    assert error.message == (
        "replica 1 is not up: replica 1 (node 10.0.0.5): gave_up: the server exited with 1 before it was up\n"
        "--- the end of its log ---\na\nb: no GPU"
    )
    assert fleets._launch_failed([late, dead], 60.0).message == (
        "replica 3 is not up within 60 s (replica 1 neither): replica 3 (node 10.0.0.7): starting"
    )
    assert fleets._launch_failed([late, dead], 60.0).details["replicas"] == [str(late), str(dead)]


def test_resources_in_words() -> None:
    resources: dict[str, Any] = {"node:10.0.0.1": 1.0, "CPU": 8.0, "GPU": 0.5, "CPU_group_0_abc": 1.0, "memory": 2e9}
    assert fleets._amounts(resources) == "CPU 8, GPU 0.5, memory 2e+09"
    assert fleets._amounts({}) == "nothing"


def test_ray_must_be_initialised() -> None:
    with pytest.raises(WeightPushError, match=r"call ray\.init\(\) first") as refused:
        ServerFleet.launch("m")
    assert refused.value.code is ErrorCode.INVALID_REQUEST
