"""What must hold, whatever happened. Pure: every check takes what was seen and names what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any, Final

from faults.plan import CORRUPTIONS, SERVER_KILLS, Fault, Shot


class Wrong(StrEnum):
    """Kinds of violations."""

    MIXED = "mixed"
    MISLABELLED = "mislabelled"
    HANG = "hang"
    REQUEST = "request"
    OUTCOME = "outcome"
    STATE = "state"
    REPAIR = "repair"
    LEFTOVER = "leftover"
    RESOURCES = "resources"


@dataclass(frozen=True)
class Violation:
    """One thing that must not happen, and when: the number of the shot."""

    kind: Wrong
    text: str
    shot: int


@dataclass(frozen=True)
class Answer:
    """One answer with status 200. ``version`` is its header, ``finish`` vLLM's reason for its end."""

    prompt: str
    version: str
    text: str
    finish: str
    streamed: bool


@dataclass(frozen=True)
class Outcome:
    """How a trainer process ended. ``code`` of its error; a killed one has no outcome at all."""

    ok: bool
    code: str | None = None
    message: str = ""
    update_id: str | None = None


def letter(version: str) -> str:
    """Return which checkpoint a version label means: ``A`` of ``A-17``."""
    return version.partition("-")[0]


def check_answer(answer: Answer, pure: Mapping[str, Mapping[str, str]], known: Set[str], shot: int) -> Violation | None:
    """Compare an answer with those of cold starts; ``pure`` is letter → prompt → text, ``known`` the real versions.

    What was ended early (``abort``) must be the beginning of a pure answer.
    """
    whole = answer.finish != "abort"

    def fits(text: str) -> bool:
        return answer.text == text if whole else text.startswith(answer.text)

    where = f"{answer.version!r} answered {answer.text!r} ({answer.finish}) to {answer.prompt[:20]!r}"
    origins = [name for name, texts in pure.items() if fits(texts[answer.prompt])]
    if not origins:
        return Violation(Wrong.MIXED, f"{where}: no cold start says that", shot)
    if letter(answer.version) not in origins:
        return Violation(Wrong.MISLABELLED, f"{where}: that is what {origins} says", shot)
    if answer.version not in known:
        return Violation(Wrong.MISLABELLED, f"{where}: this version was never committed", shot)
    return None


#: Faults after which the push must succeed all the same.
_MUST_COMMIT: Final = frozenset(
    {Fault.NONE, Fault.STALE_EPOCH, Fault.SECOND_TRAINER, Fault.SLOW_LANDING, Fault.ROLL_BACK}
)
#: Faults after which the push must not succeed, if they struck, with the codes that may say so (none: any).
_MUST_FAIL: Final[dict[Fault, frozenset[str]]] = {
    Fault.FLIP_BYTE: frozenset({"digest_mismatch"}),
    Fault.SWAP_TENSORS: frozenset({"digest_mismatch"}),
    # Over shm all sizes were said before: what is missing there shows in the digests.
    Fault.TRUNCATE: frozenset({"bucket_mismatch", "transport_failed", "digest_mismatch"}),
    Fault.REPEAT: frozenset({"bucket_out_of_order"}),
    # Over shm the number is not in an announcement but with the bytes.
    Fault.REORDER: frozenset({"bucket_out_of_order", "transport_failed"}),
    Fault.CUT_DATA: frozenset({"transport_failed"}),
    Fault.WRONG_TOKEN: frozenset({"unauthorized"}),
    Fault.LANDING_ERROR: frozenset({"landing_failed"}),
    Fault.PWAL_ERROR: frozenset({"postload_failed"}),
    Fault.STAGING_FULL: frozenset({"staging_budget_exceeded"}),
    Fault.DISK_TRUNCATED: frozenset({"checkpoint_damaged"}),
}
#: Faults that are refused before anything happens, and then leave the server exactly as it was.
_UNTOUCHED: Final = frozenset({Fault.WRONG_TOKEN, Fault.STAGING_FULL, Fault.DISK_TRUNCATED})
#: Phases in which nothing was written yet, by mode: a serving server goes on serving then, whatever happens.
_UNWRITTEN: Final = {
    "direct": frozenset({"checking", "rendezvous", "draining"}),
    "staged": frozenset({"checking", "rendezvous", "receiving", "draining"}),
}
#: Faults that can keep the news of a commit from its trainer.
_MAY_MISS_THE_COMMIT: Final = frozenset(
    {
        *(Fault.STOP_TRAINER, Fault.STOP_SERVER, Fault.CUT_CONTROL, Fault.DELAY_CONTROL, Fault.DROP_RESPONSE),
        *SERVER_KILLS,
    }
)
#: States in which a server may be left when nothing runs.
_AT_REST: Final = frozenset({"serving", "failed", "awaiting_weights"})


def check_outcome(
    shot: Shot, outcome: Outcome | None, status: Mapping[str, Any] | None, version: str, *, struck: bool
) -> Iterable[Violation]:
    """Judge what the trainer was told against what the server came to.

    ``outcome``: None for a process that ended without a word. ``status``: None for a server that was killed.
    ``struck``: whether the fault happened at all; a push can be over before it.
    """
    served = status is not None and status["state"] == "serving" and status["weight_version"] == version
    if outcome is None:
        if not (struck and shot.fault is Fault.KILL_TRAINER):
            text = f"{shot.fault.value}: the trainer's process ended without a word, and nobody killed it"
            yield Violation(Wrong.OUTCOME, text, shot.number)
        return
    told = f"{shot.fault.value}: the trainer was told {outcome.code or 'success'}: {outcome.message[:300]}"
    if not outcome.ok and outcome.code is None:
        yield Violation(Wrong.OUTCOME, f"{told}: an error without a code", shot.number)
    if outcome.ok and status is not None and not served and shot.fault is not Fault.STOP_TRAINER:
        yield Violation(Wrong.OUTCOME, f"{told}, but the server is {_brief(status)}", shot.number)
    if not outcome.ok and served and shot.fault not in _MAY_MISS_THE_COMMIT:
        yield Violation(Wrong.OUTCOME, f"{told}, but the server serves {version}", shot.number)
    if shot.fault in _MUST_COMMIT and not outcome.ok:
        yield Violation(Wrong.OUTCOME, f"{told}: it should have gone through", shot.number)
    if shot.fault in _MUST_FAIL and struck:
        codes = _MUST_FAIL[shot.fault]
        if outcome.ok or (codes and outcome.code not in codes):
            yield Violation(Wrong.OUTCOME, f"{told}: expected one of {sorted(codes) or 'any error'}", shot.number)
    if shot.fault in CORRUPTIONS and struck and served:
        yield Violation(Wrong.OUTCOME, f"{told}: corrupted weights are served", shot.number)


def check_state(
    shot: Shot, before: Mapping[str, Any], status: Mapping[str, Any], version: str, *, struck: bool, keeps: bool
) -> Iterable[Violation]:
    """Judge where a server has come to rest; ``before`` is its status before the push.

    ``keeps``: it keeps a copy of what it serves, and so undoes a staged push that fails, unless that fails as well.
    """
    if status["state"] not in _AT_REST:
        yield Violation(Wrong.STATE, f"at rest, but {_brief(status)}", shot.number)
    if status["serving"] != (status["state"] == "serving"):
        yield Violation(Wrong.STATE, f"serving={status['serving']} in {_brief(status)}", shot.number)
    if status["weight_version"] not in (before["weight_version"], version):
        yield Violation(Wrong.STATE, f"neither the old version nor {version}: {_brief(status)}", shot.number)
    if status["state"] == "failed" and status["last_error"] is None:
        yield Violation(Wrong.STATE, "failed, and does not say why", shot.number)
    if shot.fault in _UNTOUCHED and struck and _brief(status) != _brief(before):
        moved = f"{shot.fault.value} moved it from {_brief(before)} to {_brief(status)}"
        yield Violation(Wrong.STATE, moved, shot.number)
    if before["serving"] and status["state"] == "failed" and status["last_error"] is not None:
        phase = status["last_error"]["phase"]
        if phase in _UNWRITTEN[shot.mode]:
            yield Violation(
                Wrong.STATE, f"a {shot.mode} push that broke while {phase} cost the old version", shot.number
            )
        if shot.mode == "staged" and keeps and shot.fault is not Fault.PWAL_ERROR:
            text = f"a staged push that broke while {phase} was not undone: {status['last_error']['message'][:300]}"
            yield Violation(Wrong.STATE, text, shot.number)


def check_memory(
    version: str, fingerprint: str | None, verified: Mapping[str, Any], seen: dict[str, str], shot: int
) -> Iterable[Violation]:
    """Judge a server that serves: its weights are those of its letter, bit for bit, and those that were committed.

    ``verified``: its answer to ``/reload/verify``. ``seen``: letter → fingerprint, filled with the first of each.
    """
    if fingerprint is None:
        yield Violation(Wrong.STATE, f"{version} is served without a fingerprint", shot)
    elif seen.setdefault(letter(version), fingerprint) != fingerprint:
        yield Violation(Wrong.MIXED, f"{version} has another fingerprint than {letter(version)} before it", shot)
    if not verified["intact"]:
        yield Violation(Wrong.MIXED, f"{version} changed in memory since its commit: {verified['changed'][:3]}", shot)


def _brief(status: Mapping[str, Any]) -> str:
    return f"{status['state']} {status['weight_version']}"


@dataclass(frozen=True)
class Usage:
    """What a server's processes hold while it is idle. ``files``: in its run directory; ``rss``: bytes."""

    processes: int
    threads: int
    descriptors: int
    memfds: int
    files: int
    rss: int


#: Pushes after which pools have their threads and heaps their pages.
WARM_UP: Final = 5
#: Fewer samples than this say nothing about a trend.
ENOUGH: Final = 12
#: Allowed trend of resident memory: bytes a push, and bytes over the whole life of a server.
RSS_PER_PUSH: Final = 128 * 1024
RSS_FLOOR: Final = 24 * 2**20


def check_flat(samples: Sequence[Usage], shot: int) -> Iterable[Violation]:
    """Look for leaks in the samples of one server's life, one a push.

    Counts: even the least of the last third must not exceed the most of the first third after the warm-up, which no
    leak passes and no flicker fails. Memory: the median slope between any two samples, times their number, stays
    below ``RSS_FLOOR`` or ``RSS_PER_PUSH`` a push.
    """
    settled = samples[WARM_UP:]
    if len(settled) < ENOUGH:
        return
    third = len(settled) // 3
    for name in ("processes", "threads", "descriptors", "memfds", "files"):
        early = max(getattr(sample, name) for sample in settled[:third])
        late = min(getattr(sample, name) for sample in settled[-third:])
        if late > early:
            text = f"{name} grew from at most {early} to at least {late} in {len(settled)} pushes"
            yield Violation(Wrong.RESOURCES, text, shot)
    growth = slope([sample.rss for sample in settled]) * len(settled)
    if growth > max(RSS_FLOOR, RSS_PER_PUSH * len(settled)):
        text = f"resident memory grew by {growth / 2**20:.0f} MiB in {len(settled)} pushes"
        yield Violation(Wrong.RESOURCES, text, shot)


def slope(values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of values (Theil and Sen); 0 for fewer than two."""
    pairs = [
        (values[later] - values[earlier]) / (later - earlier)
        for earlier in range(len(values))
        for later in range(earlier + 1, len(values))
    ]
    return float(median(pairs)) if pairs else 0.0
