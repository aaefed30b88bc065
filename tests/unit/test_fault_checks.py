"""The campaign's checks: each one finds what it is there for, and lets pass what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from faults.checks import (
    RSS_FLOOR,
    Answer,
    Outcome,
    Usage,
    Wrong,
    check_answer,
    check_flat,
    check_memory,
    check_outcome,
    check_state,
    slope,
)
from faults.plan import Choice, Fault, Shot, plan

PURE = {"A": {"p": "old words"}, "B": {"p": "new words"}}
KNOWN = {"A-1", "B-2"}
RIGHT = Answer("p", "A-1", "old words", "length", streamed=False)


def shot(fault: Fault) -> Shot:
    return replace(plan(1, Choice(pushes=1))[0], fault=fault)


def status(state: str = "serving", version: str = "A-1", **changes: Any) -> dict[str, Any]:
    return {"state": state, "serving": state == "serving", "weight_version": version, "last_error": None, **changes}


@pytest.mark.parametrize(
    "answer",
    [
        RIGHT,
        replace(RIGHT, version="B-2", text="new words"),
        replace(RIGHT, text="old", finish="abort"),
        replace(RIGHT, text="", finish="abort"),
    ],
)
def test_pure_answers_pass(answer: Answer) -> None:
    assert check_answer(answer, PURE, KNOWN, 0) is None


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (replace(RIGHT, text="old new words"), Wrong.MIXED),
        (replace(RIGHT, text="old"), Wrong.MIXED),
        (replace(RIGHT, text="old wards", finish="abort"), Wrong.MIXED),
        (replace(RIGHT, text="new words"), Wrong.MISLABELLED),
        (replace(RIGHT, text="new", finish="abort"), Wrong.MISLABELLED),
        (replace(RIGHT, version="B-2"), Wrong.MISLABELLED),
        (replace(RIGHT, version="A-9"), Wrong.MISLABELLED),
        (replace(RIGHT, version=""), Wrong.MISLABELLED),
        (replace(RIGHT, version="A-1, B-2"), Wrong.MISLABELLED),
    ],
)
def test_a_wrong_answer_is_found(answer: Answer, kind: Wrong) -> None:
    violation = check_answer(answer, PURE, KNOWN, 7)
    assert violation is not None
    assert (violation.kind, violation.shot) == (kind, 7)


SERVED = status(version="B-3")
FAILED = status("failed", last_error={"phase": "closing", "message": "broke"})
MISMATCH = Outcome(False, "digest_mismatch", "arrived changed")


@pytest.mark.parametrize(
    ("fault", "outcome", "after"),
    [
        (Fault.NONE, Outcome(True), SERVED),
        (Fault.KILL_TRAINER, None, FAILED),
        (Fault.KILL_TRAINER, None, SERVED),
        (Fault.FLIP_BYTE, MISMATCH, FAILED),
        (Fault.CUT_CONTROL, Outcome(False, "unreachable"), SERVED),
        (Fault.ABORT, Outcome(False, "aborted"), FAILED),
        (Fault.ABORT, Outcome(True), SERVED),
        (Fault.KILL_API, Outcome(False, "unreachable"), None),
        (Fault.WRONG_TOKEN, Outcome(False, "unauthorized"), status()),
    ],
)
def test_a_right_outcome_passes(fault: Fault, outcome: Outcome | None, after: dict[str, Any] | None) -> None:
    assert list(check_outcome(shot(fault), outcome, after, "B-3", struck=True)) == []


@pytest.mark.parametrize(
    ("fault", "outcome", "after", "says"),
    [
        (Fault.ABORT, Outcome(False, None, "KeyError"), FAILED, "without a code"),
        (Fault.NONE, Outcome(True), status(), "but the server is serving A-1"),
        (Fault.ABORT, Outcome(True), FAILED, "but the server is failed"),
        (Fault.ABORT, Outcome(False, "aborted"), SERVED, "but the server serves B-3"),
        (Fault.SECOND_TRAINER, Outcome(False, "lease_lost"), FAILED, "should have gone through"),
        (Fault.FLIP_BYTE, Outcome(True), SERVED, "corrupted weights are served"),
        (Fault.FLIP_BYTE, Outcome(False, "internal"), FAILED, "expected one of"),
        (Fault.PWAL_ERROR, Outcome(True), SERVED, "expected one of"),
        (Fault.WRONG_TOKEN, Outcome(False, "unreachable"), status(), "expected one of"),
    ],
)
def test_a_wrong_outcome_is_found(fault: Fault, outcome: Outcome, after: dict[str, Any], says: str) -> None:
    found = list(check_outcome(shot(fault), outcome, after, "B-3", struck=True))
    assert any(says in violation.text for violation in found), found
    assert {violation.kind for violation in found} == {Wrong.OUTCOME}


@pytest.mark.parametrize(("fault", "struck"), [(Fault.NONE, True), (Fault.KILL_API, True), (Fault.KILL_TRAINER, False)])
def test_a_trainer_that_dies_of_itself_is_found(fault: Fault, struck: bool) -> None:
    (found,) = check_outcome(shot(fault), None, status(), "B-3", struck=struck)
    assert "without a word" in found.text


def test_a_fault_that_came_too_late_may_have_committed() -> None:
    assert list(check_outcome(shot(Fault.FLIP_BYTE), Outcome(True), SERVED, "B-3", struck=False)) == []


@pytest.mark.parametrize("after", [status(), SERVED, FAILED])
def test_a_named_state_passes(after: dict[str, Any]) -> None:
    direct = replace(shot(Fault.ABORT), mode="direct")
    assert list(check_state(direct, status(), after, "B-3", struck=True, keeps=True)) == []


@pytest.mark.parametrize(
    ("fault", "after", "says"),
    [
        (Fault.ABORT, FAILED, "was not undone: broke"),
        (Fault.ABORT, status("failed", last_error={"phase": "receiving", "message": ""}), "cost the old version"),
        (Fault.ABORT, status("updating"), "at rest, but updating"),
        (Fault.ABORT, status("limbo"), "at rest, but limbo"),
        (Fault.ABORT, {**FAILED, "serving": True}, "serving=True"),
        (Fault.ABORT, status(version="C-4"), "neither the old version"),
        (Fault.ABORT, status("failed"), "does not say why"),
        (Fault.WRONG_TOKEN, FAILED, "wrong_token moved it"),
        (Fault.STAGING_FULL, status(version="B-3"), "staging_full moved it"),
    ],
)
def test_a_wrong_state_is_found(fault: Fault, after: dict[str, Any], says: str) -> None:
    staged = replace(shot(fault), mode="staged")
    found = list(check_state(staged, status(), after, "B-3", struck=True, keeps=True))
    assert any(says in violation.text for violation in found), found


def test_memory_must_be_that_of_its_letter_and_intact() -> None:
    intact = {"intact": True, "changed": []}
    seen: dict[str, str] = {}
    for version, fingerprint in (("A-1", "f1"), ("B-2", "f2"), ("A-3", "f1")):
        assert list(check_memory(version, fingerprint, intact, seen, 0)) == []
    (other,) = check_memory("B-4", "f1", intact, seen, 0)
    assert (other.kind, "another fingerprint" in other.text) == (Wrong.MIXED, True)
    (none,) = check_memory("B-4", None, intact, seen, 0)
    assert none.kind is Wrong.STATE
    (changed,) = check_memory("B-4", "f2", {"intact": False, "changed": ["norm"]}, seen, 0)
    assert (changed.kind, "norm" in changed.text) == (Wrong.MIXED, True)


def life(change: Callable[[int], dict[str, int]], pushes: int = 40) -> list[Usage]:
    base = Usage(processes=6, threads=80, descriptors=240, memfds=1, files=2, rss=4 * 2**30)
    return [replace(base, **{k: getattr(base, k) + v for k, v in change(i).items()}) for i in range(pushes)]


@pytest.mark.parametrize(
    "change",
    [
        lambda i: {},
        lambda i: {"threads": i % 3, "descriptors": -(i % 7), "rss": i % 5 * 2**20},
        lambda i: {"threads": 9 if i >= 4 else 0, "rss": 2**30 if i >= 5 else 0},
        lambda i: {"rss": 2**32 if i == 20 else 0},
    ],
)
def test_a_flat_life_passes(change: Callable[[int], dict[str, int]]) -> None:
    assert list(check_flat(life(change), 0)) == []


@pytest.mark.parametrize("name", ["processes", "threads", "descriptors", "memfds", "files"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_leak_is_found(name: str, every: int) -> None:
    found = list(check_flat(life(lambda i: {name: i // every + i % 2}), 5))
    assert [violation.kind for violation in found] == [Wrong.RESOURCES]
    assert name in found[0].text


def test_growing_memory_is_found() -> None:
    leak = 2 * RSS_FLOOR // 40
    found = list(check_flat(life(lambda i: {"rss": i * leak + i % 3 * 2**20}), 5))
    assert [violation.kind for violation in found] == [Wrong.RESOURCES]
    assert "resident memory grew" in found[0].text


def test_a_short_life_is_not_judged() -> None:
    assert list(check_flat(life(lambda i: {"threads": 100 * i}, pushes=10), 0)) == []


def test_slope() -> None:
    assert slope([]) == slope([3]) == 0
    assert slope([0, 2, 4, 600, 8]) == 2
