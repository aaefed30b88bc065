"""The campaign's plan: one seed is one plan, and every fault gets its turn."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from faults.plan import CORRUPTIONS, SERVER_KILLS, Choice, Fault, Point, plan


def test_a_seed_is_a_plan() -> None:
    choice = Choice(pushes=200)
    assert plan(7, choice) == plan(7, choice)
    assert plan(7, choice) != plan(8, choice)
    assert [shot.number for shot in plan(7, choice)] == list(range(200))


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    assert plan(7, Choice(pushes=300))[:50] == plan(7, Choice(pushes=50))


@pytest.mark.parametrize("seed", range(5))
def test_every_fault_comes_in_the_first_round(seed: int) -> None:
    shots = plan(seed, Choice(pushes=len(Fault)))
    assert {shot.fault for shot in shots} == set(Fault)


def test_every_point_and_transport_is_met() -> None:
    shots = plan(1, Choice(pushes=500))
    killed = {(shot.mode, shot.point) for shot in shots if shot.fault is Fault.KILL_TRAINER}
    assert {point for _, point in killed} == set(Point)
    assert ("direct", Point.LANDING) not in killed
    assert {shot.mode for shot in shots if shot.fault is Fault.STAGING_FULL} == {"staged"}
    assert {shot.repair for shot in shots} == {"push", "disk", "rollback", "none"}
    assert {shot.transport for shot in shots} == {"http", "gloo", "shm"}
    assert {shot.transport for shot in shots if shot.fault is Fault.CUT_DATA} == {"gloo"}
    assert {shot.point for shot in shots if shot.fault in CORRUPTIONS} == {Point.BUCKET}
    assert all(0 <= shot.where < 1 for shot in shots)
    counts = Counter(shot.fault for shot in shots)
    assert 1 <= counts[Fault.KILL_ENGINE] < counts[Fault.FLIP_BYTE] < counts[Fault.KILL_TRAINER]


@pytest.mark.parametrize("kills", [0, 1, 2])
def test_server_kills_are_bounded(kills: int) -> None:
    shots = plan(3, Choice(pushes=120, server_kills=kills))
    assert len(shots) == 120
    assert sum(shot.fault in SERVER_KILLS for shot in shots) == kills


def test_only_takes_what_was_asked_for() -> None:
    shots = plan(3, Choice(pushes=40, only=[Fault.ABORT, Fault.CUT_DATA], transports=["http"]))
    assert {shot.fault for shot in shots} == {Fault.ABORT}
    with pytest.raises(ValueError, match="staging_full"):
        plan(3, Choice(pushes=1, only=[Fault.STAGING_FULL], modes=["direct"]))
    with pytest.raises(ValueError, match="cut_data"):
        plan(3, Choice(pushes=1, only=[Fault.CUT_DATA], transports=["http"]))
    with pytest.raises(ValueError, match="none of them is allowed"):
        plan(3, Choice(pushes=1, only=[Fault.KILL_API], server_kills=0))


def test_a_shot_is_json() -> None:
    shot = plan(3, Choice(pushes=1))[0]
    assert json.loads(json.dumps(shot.as_json()))["fault"] == shot.fault.value
