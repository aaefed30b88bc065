"""Short, seeded runs of the fault campaign; ``make faults`` is the long one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from faults.campaign import Campaign, event_log
from faults.plan import SERVER_KILLS, Choice, Fault, Point, Shot, plan
from faults.report import Report
from integration.conftest import Checkpoints
from support.effort import LONG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SEED = 20
#: Trainers killed at each point.
KILLS = 10 if LONG else 1
#: Where a trainer can be killed, by mode; phases that both modes go through in the same way are met in one of them.
_PLACES: dict[str, list[Point]] = {
    "direct": [point for point in Point if point is not Point.LANDING],
    "staged": [Point.BUCKET, Point.DRAINING, Point.LANDING, Point.CLOSING],
}


def carry_out(
    shots: Sequence[Shot],
    checkpoints: Checkpoints,
    pure: dict[str, dict[str, str]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> Report:
    """Run a campaign on a server of its own, and show its table."""
    directories = {"A": checkpoints.a, "B": checkpoints.b}
    with event_log(folder / "events.jsonl") as log:
        campaign = Campaign(SEED, shots, directories, pure, folder, log, first_topology=1, switch_half_way=False)
        report = campaign.run()
    with capsys.disabled():
        print()
        report.show(Console(width=180))
    return report


@pytest.mark.case("C1", "C3", "C5", "C11", "C38", "C47", "C81", "C86")
def test_a_short_campaign(
    checkpoints: Checkpoints,
    cold_a: dict[str, str],
    cold_b: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every fault but those that end the server, which cost a restart each: one of them only."""
    shots = plan(SEED, Choice(pushes=25, server_kills=1))
    assert {shot.fault for shot in shots} >= set(Fault) - SERVER_KILLS
    report = carry_out(shots, checkpoints, {"A": cold_a, "B": cold_b}, tmp_path, capsys)
    assert report.findings == []
    assert report.shots == 25
    assert report.restarts == 1
    assert sum(line.counts["struck"] for line in report.lines.values()) >= 22  # A push can be over before it is met.
    assert report.answers["complete"] >= 25


@pytest.mark.case("C1", "C5", "C38")
def test_trainers_are_killed_at_every_point(
    checkpoints: Checkpoints,
    cold_a: dict[str, str],
    cold_b: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = [(mode, point) for mode, points in _PLACES.items() for point in points]
    shots = [
        replace(shot, mode=places[shot.number % len(places)][0], point=places[shot.number % len(places)][1])
        for shot in plan(SEED, Choice(pushes=KILLS * len(places), only=[Fault.KILL_TRAINER]))
    ]
    report = carry_out(shots, checkpoints, {"A": cold_a, "B": cold_b}, tmp_path, capsys)
    assert report.findings == []
    line = report.lines[Fault.KILL_TRAINER].counts
    assert line["runs"] == KILLS * len(places)
    assert line["struck"] >= line["runs"] - 2 - KILLS // 3
    assert report.restarts == 0
