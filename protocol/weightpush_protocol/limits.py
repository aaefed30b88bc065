"""How long a server may take for each call of an update, in seconds: what its deadlines add up to.

A server ends each step by the step's own deadline; a client waits for as long as all steps of a call may take together,
and a little longer for the way. Both go by the figures here, so that no client gives up on what its server is about to
finish.
"""

from __future__ import annotations

from typing import Final

from weightpush_protocol.messages import Deadlines, UpdateMode

#: How long a commit waits for copies of the weights to be put in their places; the new weights serve already.
SETTLE_S: Final = 5.0
#: By how much a server waits longer for workers in the rendezvous than they do: they know why they give up.
REPORT_S: Final = 2.0
#: The most that the last step of a commit gets beyond ``commit_s``.
_PUBLISH_S: Final = 30.0


def publish_s(limits: Deadlines) -> float:
    """What the last step of a commit may take beyond ``commit_s``: half of it done, going on is better than failing."""
    return min(_PUBLISH_S, limits.commit_s)


def begin_s(limits: Deadlines) -> float:
    """Checking and planning, rendezvous, drain, opening the model."""
    return limits.commit_s + limits.rendezvous_s + REPORT_S + limits.drain_s + limits.commit_s


def prepare_s(limits: Deadlines, mode: UpdateMode) -> float:
    """The last bucket's landing, and the proof; for staged bytes their end, and what can be checked of them."""
    return limits.bucket_s + limits.commit_s * (2 if mode is UpdateMode.STAGED else 1)


def finish_s(limits: Deadlines, mode: UpdateMode) -> float:
    """All of it where nothing was prepared: landing, proof and commit; staged bytes may have to be undone."""
    if mode is UpdateMode.DIRECT:
        return limits.bucket_s + _commit_s(limits)
    return prepare_s(limits, mode) + 2 * _land_s(limits)


def rollback_s(limits: Deadlines) -> float:
    """Finding the copy and checking it, then drain, landing and commit."""
    return 2 * SETTLE_S + 2 * limits.commit_s + _land_s(limits)


def load_s(limits: Deadlines) -> float:
    """Checks, reading the files, checks of what was read and of the files again; drain, landing, commit; going back."""
    return 5 * limits.commit_s + 2 * _land_s(limits)


def _commit_s(limits: Deadlines) -> float:
    return limits.commit_s + publish_s(limits) + SETTLE_S


def _land_s(limits: Deadlines) -> float:
    return limits.drain_s + _commit_s(limits)
