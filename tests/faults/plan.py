"""Which fault meets which push, where and how hard. Pure: one seed, one plan.

::

    plan(seed, 500) ──► Shot, Shot, ...      one shot is one push with one fault
                          │ fault            what happens, see ``Fault``
                          │ point, where     when: a phase of the server, or a bucket as a share of all
                          │ after_ms         and how much later
                          │ pick             a number that actors choose their details with
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final


class Point(StrEnum):
    """Where a fault strikes: before the push begins, in a phase of the server, or at a bucket."""

    START = "start"
    CHECKING = "checking"
    RENDEZVOUS = "rendezvous"
    DRAINING = "draining"
    OPENING = "opening"
    BUCKET = "bucket"
    LANDING = "landing"
    CLOSING = "closing"
    RESETTING_CACHES = "resetting_caches"
    PUBLISHING = "publishing"


class Fault(StrEnum):
    """What happens to a push."""

    NONE = "none"
    KILL_TRAINER = "kill_trainer"
    STOP_TRAINER = "stop_trainer"
    STOP_SERVER = "stop_server"
    CUT_CONTROL = "cut_control"
    DELAY_CONTROL = "delay_control"
    DROP_RESPONSE = "drop_response"
    CUT_DATA = "cut_data"
    FLIP_BYTE = "flip_byte"
    SWAP_TENSORS = "swap_tensors"
    TRUNCATE = "truncate"
    REPEAT = "repeat"
    REORDER = "reorder"
    WRONG_TOKEN = "wrong_token"
    STALE_EPOCH = "stale_epoch"
    SECOND_TRAINER = "second_trainer"
    ABORT = "abort"
    LANDING_ERROR = "landing_error"
    SLOW_LANDING = "slow_landing"
    PWAL_ERROR = "pwal_error"
    STAGING_FULL = "staging_full"
    DISK_TRUNCATED = "disk_truncated"
    ROLL_BACK = "roll_back"
    KILL_API = "kill_api"
    KILL_ENGINE = "kill_engine"
    KILL_WORKER = "kill_worker"
    KILL_KEEPER = "kill_keeper"
    KILL_SUPERVISOR = "kill_supervisor"


#: Faults that change what a bucket brings; the trainer's child process carries them out.
CORRUPTIONS: Final = frozenset(
    {Fault.FLIP_BYTE, Fault.SWAP_TENSORS, Fault.TRUNCATE, Fault.REPEAT, Fault.REORDER, Fault.CUT_DATA}
)
#: Faults that end the server; it must end wholly and is started again.
SERVER_KILLS: Final = frozenset(
    {Fault.KILL_API, Fault.KILL_ENGINE, Fault.KILL_WORKER, Fault.KILL_KEEPER, Fault.KILL_SUPERVISOR}
)

#: Faults that are there from the start of a push, or come after it.
SET_UP: Final = CORRUPTIONS | {
    *(Fault.NONE, Fault.WRONG_TOKEN, Fault.DROP_RESPONSE, Fault.LANDING_ERROR, Fault.SLOW_LANDING, Fault.PWAL_ERROR),
    *(Fault.STAGING_FULL, Fault.DISK_TRUNCATED, Fault.ROLL_BACK),
}
#: Where other faults may strike, if not anywhere.
_POINTS: Final[dict[Fault, tuple[Point, ...]]] = {
    **dict.fromkeys(SET_UP, (Point.START,)),
    **dict.fromkeys(CORRUPTIONS, (Point.BUCKET,)),
    Fault.STALE_EPOCH: (Point.BUCKET,),
    Fault.SECOND_TRAINER: (Point.BUCKET, Point.OPENING, Point.CLOSING),
    Fault.ABORT: tuple(point for point in Point if point is not Point.START),
}
#: Shared memory has no connection that bytes come over, and what comes after the last bucket is never looked at.
_TRANSPORTS: Final = {Fault.CUT_DATA: ("gloo",), Fault.REPEAT: ("http", "gloo")}
_ONLY_MODE: Final = {Fault.STAGING_FULL: "staged"}
#: How a failed server is repaired before the next shot; ``none``: the next shot meets it as it is.
_REPAIRS: Final = ("push", "push", "push", "rollback", "disk", "none")
#: How often a fault is dealt after the first round, in which every one is dealt once.
_WEIGHT: Final = {
    Fault.KILL_TRAINER: 4,
    Fault.STOP_TRAINER: 2,
    Fault.STOP_SERVER: 2,
    Fault.CUT_CONTROL: 2,
    Fault.ABORT: 3,
    Fault.NONE: 2,
    **dict.fromkeys(SERVER_KILLS, 0.25),
}


@dataclass(frozen=True)
class Shot:
    """One push and the fault that it meets. ``where``: which bucket, as a share of all, in [0, 1)."""

    number: int
    fault: Fault
    mode: str
    transport: str
    point: Point
    where: float
    after_ms: int
    pick: int
    in_flight: str
    #: How a server that this leaves failed is repaired before the next shot: see ``_REPAIRS``.
    repair: str

    def as_json(self) -> dict[str, object]:
        """Return the fields, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """What a plan is made of. ``server_kills``: how many shots may end the server (None: as they come)."""

    pushes: int
    modes: Sequence[str] = ("direct", "staged")
    transports: Sequence[str] = ("http", "gloo", "shm")
    only: Sequence[Fault] = field(default_factory=tuple)
    server_kills: int | None = None


def plan(seed: int, choice: Choice) -> list[Shot]:
    """Return the shots of a run. The same arguments give the same plan, on any machine.

    Raises:
        ValueError: no fault fits the transports and modes that were asked for.
    """
    dice = random.Random(seed)
    faults = _possible(choice)
    kills = len(SERVER_KILLS) * choice.pushes if choice.server_kills is None else choice.server_kills
    shots: list[Shot] = []
    deck: list[Fault] = []
    while len(shots) < choice.pushes:
        if not deck:
            deck = _deck(dice, faults, first=not shots)
        fault = deck.pop()
        if fault in SERVER_KILLS:
            if not kills:
                if not set(faults) - SERVER_KILLS:
                    raise ValueError("only faults that end the server were asked for, and none of them is allowed")
                continue
            kills -= 1
        shots.append(_shot(dice, len(shots), fault, choice))
    return shots


def _possible(choice: Choice) -> list[Fault]:
    faults = [
        fault
        for fault in (choice.only or tuple(Fault))
        if _transports(fault, choice) and _ONLY_MODE.get(fault, choice.modes[0]) in choice.modes
    ]
    if not faults:
        raise ValueError(f"none of the faults {list(choice.only)} is possible over {choice.transports}, {choice.modes}")
    return faults


def _transports(fault: Fault, choice: Choice) -> list[str]:
    return [name for name in choice.transports if name in _TRANSPORTS.get(fault, choice.transports)]


def _deck(dice: random.Random, faults: Sequence[Fault], *, first: bool) -> list[Fault]:
    deck: list[Fault] = []
    for fault in faults:
        weight = 1 if first else _WEIGHT.get(fault, 1)
        deck += [fault] * (int(weight) if weight >= 1 else int(dice.random() < weight))
    dice.shuffle(deck)
    return deck


def _shot(dice: random.Random, number: int, fault: Fault, choice: Choice) -> Shot:
    mode = _ONLY_MODE.get(fault) or dice.choice(list(choice.modes))
    points = _POINTS.get(fault, tuple(Point))
    return Shot(
        number=number,
        fault=fault,
        mode=mode,
        transport=dice.choice(_transports(fault, choice)),
        point=dice.choice([point for point in points if point is not Point.LANDING or mode == "staged"]),
        where=dice.random(),
        after_ms=dice.choice((0, 0, 20, 100)),
        pick=dice.randrange(10**6),
        in_flight=dice.choice(("wait", "wait", "abort")),
        repair=dice.choice(_REPAIRS),
    )
