"""The Prometheus series of a server: name, unit, labels, meaning. ``docs/metrics.md`` says the same to users.

Labels have few values, all of them from enums: only the version's own series has one that a trainer chooses, and it has
one value at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import Final

from weightpush_protocol.messages import UpdateMode
from weightpush_protocol.state import Phase, ServerState
from weightpush_protocol.status import CopyRole
from weightpush_server.observe.happenings import Outcome
from weightpush_server.records import FROM_COPY, FROM_DISK, FROM_VLLM_TRAINER


class Kind(StrEnum):
    """Prometheus' kinds of series, as far as they are used."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False)
class Series:
    """One family of series. ``labels``: name to the values that are exported from the start; none: as they come."""

    name: str
    kind: Kind
    meaning: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def known(self) -> Iterator[tuple[str, ...]]:
        """Return the label values that are exported before anything happened."""
        return product(*self.labels.values())


#: Upper bounds of the histograms' buckets, in seconds.
BOUNDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: States in which requests are refused.
CLOSED: Final = tuple(state for state in ServerState if not state.serving)

_STATES: Final = tuple(state.value for state in ServerState)
_MODES: Final = tuple(mode.value for mode in UpdateMode)
_TRANSPORTS: Final = ("nccl", "gloo", "shm", "http", FROM_DISK, FROM_COPY, FROM_VLLM_TRAINER)
#: See `weightpush_server.timing.PartSeconds`.
_PARTS: Final = ("receive", "digest", "copy", "open", "land", "postload", "postload_early", "proof")

BUILD = Series(
    "weightpush_build_info",
    Kind.GAUGE,
    "1; versions of weightpush and of its protocol.",
    {"version": (), "protocol": ()},
)
STATE = Series("weightpush_state", Kind.GAUGE, "1 for the state that the server is in, else 0.", {"state": _STATES})
SERVING = Series("weightpush_serving", Kind.GAUGE, "1 while generation routes answer, else 0.")
STATE_SECONDS = Series(
    "weightpush_state_seconds_total",
    Kind.COUNTER,
    "Time in each state since the start, pauses between two scrapes included.",
    {"state": _STATES},
)
VERSION = Series(
    "weightpush_weight_version_info",
    Kind.GAUGE,
    "1; the weight version committed last. Whether it serves says weightpush_serving.",
    {"weight_version": ()},
)
UPDATES = Series(
    "weightpush_updates_total",
    Kind.COUNTER,
    "Updates that ended: committed, untouched (before the first write: nothing changed), failed (after it).",
    {"mode": _MODES, "outcome": tuple(outcome.value for outcome in Outcome)},
)
FAILURES = Series(
    "weightpush_update_failures_total", Kind.COUNTER, "Updates that were not committed, by error code.", {"code": ()}
)
LEASE_LOSSES = Series(
    "weightpush_lease_losses_total", Kind.COUNTER, "Updates that ended because their trainer was silent for too long."
)
BYTES = Series(
    "weightpush_update_bytes_total",
    Kind.COUNTER,
    "Bytes of checkpoint tensors in committed updates, by the way they came.",
    {"transport": _TRANSPORTS},
)
UPDATE_SECONDS = Series(
    "weightpush_update_seconds", Kind.HISTOGRAM, "Committed updates, from begin to commit.", {"mode": _MODES}
)
PAUSE_SECONDS = Series(
    "weightpush_pause_seconds",
    Kind.HISTOGRAM,
    "How long the gate was closed for an update after which the server serves.",
    {"mode": _MODES},
)
PHASE_SECONDS = Series(
    "weightpush_phase_seconds",
    Kind.HISTOGRAM,
    "Phases of all updates, however they ended.",
    {"phase": tuple(phase.value for phase in Phase)},
)
WORKER_SECONDS = Series(
    "weightpush_worker_seconds_total",
    Kind.COUNTER,
    "What the slowest worker of each committed update spent on each part, beside each other or not.",
    {"part": _PARTS},
)
LAST_UPDATE = Series(
    "weightpush_last_update_timestamp_seconds", Kind.GAUGE, "Unix time of the last commit; absent before the first."
)
RUNNING_SECONDS = Series("weightpush_running_update_seconds", Kind.GAUGE, "Age of the running update; 0 without one.")
RUNNING_BYTES = Series(
    "weightpush_running_update_bytes",
    Kind.GAUGE,
    "Bytes of the running update: expected, and done on its slowest worker; 0 without one.",
    {"kind": ("expected", "done")},
)
REFUSALS = Series(
    "weightpush_gate_refusals_total",
    Kind.COUNTER,
    "Requests that the closed gate answered 503, by the server's state.",
    {"state": tuple(state.value for state in CLOSED)},
)
IN_FLIGHT = Series(
    "weightpush_requests_in_flight",
    Kind.GAUGE,
    "Requests that have passed the gate and not ended: a drain waits for them.",
)
RELOAD_REFUSED = Series(
    "weightpush_reload_refused", Kind.GAUGE, "1 if this server takes no updates, for a reason known at its start."
)
COPY_BYTES = Series(
    "weightpush_copy_bytes",
    Kind.GAUGE,
    "Host memory of the copies that are kept for rollbacks.",
    {"role": tuple(role.value for role in CopyRole)},
)

ALL: Final = (
    *(BUILD, STATE, SERVING, STATE_SECONDS, VERSION, UPDATES, FAILURES, LEASE_LOSSES, BYTES, UPDATE_SECONDS),
    *(PAUSE_SECONDS, PHASE_SECONDS, WORKER_SECONDS, LAST_UPDATE, RUNNING_SECONDS, RUNNING_BYTES, REFUSALS),
    *(IN_FLIGHT, RELOAD_REFUSED, COPY_BYTES),
)
