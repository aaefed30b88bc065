"""What is counted over the life of a server. It lies in the shared file, since any API process may end an update."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable

from pydantic import BaseModel, Field

from weightpush_protocol.errors import ErrorCode
from weightpush_protocol.state import ServerState
from weightpush_server.observe import series
from weightpush_server.observe.happenings import Happening, Outcome, StateChanged, UpdateEnded
from weightpush_server.observe.series import BOUNDS, Series


class Distribution(BaseModel):
    """A histogram: how many values fell into each bucket, not cumulated, and their sum."""

    counts: list[int] = Field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``, in seconds."""
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value


def counts(happening: Happening) -> bool:
    """Whether a happening moves a counter."""
    return isinstance(happening, StateChanged | UpdateEnded)


class Tally(BaseModel):
    """Counters and histograms by name of the series and label values, which are joined by ``|``."""

    counters: dict[str, dict[str, float]] = Field(default_factory=dict)
    histograms: dict[str, dict[str, Distribution]] = Field(default_factory=dict)
    #: ``time.monotonic``, which all processes of a host share.
    state_since: float = Field(default_factory=time.monotonic)

    def counter(self, of: Series, labels: tuple[str, ...] = ()) -> float:
        """Return the value of a counter; 0 if it never moved."""
        return self.counters.get(of.name, {}).get("|".join(labels), 0.0)

    def distribution(self, of: Series, labels: tuple[str, ...]) -> Distribution:
        """Return a histogram; an empty one if nothing was observed."""
        return self.histograms.get(of.name, {}).get("|".join(labels)) or Distribution()

    def labels(self, of: Series) -> list[tuple[str, ...]]:
        """Return the label values of a counter or histogram: those known from the start, and those that came."""
        found = {**self.counters.get(of.name, {}), **self.histograms.get(of.name, {})}
        came = (tuple(key.split("|")) for key in found) if of.labels else ()
        return list(dict.fromkeys([*of.known(), *came]))

    def add(self, to: Series, labels: tuple[str, ...] = (), amount: float = 1.0) -> None:
        """Move a counter on."""
        values = self.counters.setdefault(to.name, {})
        key = "|".join(labels)
        values[key] = values.get(key, 0.0) + amount

    def observe(self, to: Series, labels: tuple[str, ...], value: float) -> None:
        """Count ``value`` in a histogram."""
        self.histograms.setdefault(to.name, {}).setdefault("|".join(labels), Distribution()).observe(value)

    def count(self, happened: Iterable[Happening], now: float) -> None:
        """Count what happened by ``now``, in the clock of ``state_since``. Phases count when their update ends."""
        for happening in happened:
            if isinstance(happening, StateChanged):
                self.add(series.STATE_SECONDS, (happening.before.value,), now - self.state_since)
                self.state_since = now
            elif isinstance(happening, UpdateEnded):
                self._count_end(happening)

    def _count_end(self, end: UpdateEnded) -> None:
        mode = end.update.mode.value
        self.add(series.UPDATES, (mode, end.outcome.value))
        for phase, seconds in end.phase_seconds.items():
            self.observe(series.PHASE_SECONDS, (phase,), seconds)
        if end.outcome is Outcome.COMMITTED:
            self.add(series.BYTES, (end.update.transport,), end.update.bytes_total)
            self.observe(series.UPDATE_SECONDS, (mode,), end.seconds)
            for part, seconds in end.worker_seconds.items():
                self.add(series.WORKER_SECONDS, (part,), seconds)
        elif end.error is not None:
            self.add(series.FAILURES, (end.error.code.value,))
            if end.error.code is ErrorCode.LEASE_LOST:
                self.add(series.LEASE_LOSSES)
        if end.pause_seconds is not None and end.state.serving:
            self.observe(series.PAUSE_SECONDS, (mode,), end.pause_seconds)

    def state_seconds(self, state: ServerState, current: ServerState, now: float) -> float:
        """Return the time that the server was in ``state``, which is ``current`` if it still is."""
        spent = self.counter(series.STATE_SECONDS, (state.value,))
        return spent + max(0.0, now - self.state_since) if state is current else spent
