"""Where a worker's time goes in an update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightpush_server.reload import ReloadProof


class PartSeconds:
    """Seconds by part of an update; each part is booked by one thread at a time.

    ``receive``: waiting for a bucket and taking it off the transport. ``digest``: hashing what came. ``copy``: putting
    it into a host copy. ``open``: giving the model its checkpoint layout back. ``land``: copying into it. ``postload``
    and ``proof``: what closing did. ``postload_early``: the part of ``postload`` that was done while tensors landed.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def booking(self, part: str) -> Iterator[None]:
        """Add the time that the block takes to ``part``."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(part, perf_counter() - start)

    def add(self, part: str, seconds: float) -> None:
        """Add ``seconds`` to ``part``."""
        self.spent[part] = self.spent.get(part, 0.0) + seconds

    def with_closing(self, proof: ReloadProof) -> dict[str, float]:
        """Return all parts, with those of ``proof``; what modules took that were closed on the way was no landing."""
        early = proof.seconds_early
        return {
            **self.spent,
            "land": self.spent.get("land", 0.0) - early,
            "postload": proof.seconds_postload,
            "postload_early": early,
            "proof": proof.seconds_proof,
        }


def slowest(workers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return, for each part, the seconds of the worker that took longest."""
    longest: dict[str, float] = {}
    for spent in workers:
        for part, seconds in spent.items():
            longest[part] = max(longest.get(part, 0.0), round(seconds, 6))
    return longest
