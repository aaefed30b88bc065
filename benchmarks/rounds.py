"""Rounds in which competitors take turns, and what is made of their times. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

_T = TypeVar("_T")


def order(competitors: Sequence[_T], number: int) -> list[_T]:
    """Return who runs when in round ``number``: each round begins with another one, every second runs backwards.

    So nobody always follows the same neighbour, and a machine that gets slower or faster does so for all.
    """
    step = -1 if number % 2 else 1
    return [competitors[(number + step * turn) % len(competitors)] for turn in range(len(competitors))]


@dataclass(slots=True)
class Series:
    """What one competitor took: seconds by round, parts and pauses of the same rounds, and errors, if any."""

    seconds: dict[int, float] = field(default_factory=dict)
    pauses: dict[int, float] = field(default_factory=dict)
    parts: dict[int, dict[str, float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def add(self, number: int, seconds: float, *, pause: float, parts: Mapping[str, float]) -> None:
        """Note round ``number``."""
        self.seconds[number] = seconds
        self.pauses[number] = pause
        self.parts[number] = dict(parts)

    def as_dict(self) -> dict[str, object]:
        """Return medians and single rounds, for JSON. ``median`` is None where it never got to an end."""
        names = list(dict.fromkeys(name for parts in self.parts.values() for name in parts))
        return {
            "median": median(self.seconds.values()) if self.seconds else None,
            "pause": median(self.pauses.values()) if self.pauses else None,
            "parts": {name: median(parts[name] for parts in self.parts.values() if name in parts) for name in names},
            "rounds": {str(number): seconds for number, seconds in self.seconds.items()},
            "errors": self.errors,
        }


def ratio(one: Mapping[str, float], other: Mapping[str, float]) -> float | None:
    """Return the median of ``one / other`` over the rounds that both have; None where they share none."""
    shared = [number for number in one if number in other and other[number] > 0]
    return median(one[number] / other[number] for number in shared) if shared else None


def deviation_from_line(points: Sequence[tuple[float, float]]) -> float:
    """Return by how much the worst point misses the best straight line through all, as a share of its own height.

    Raises:
        ValueError: fewer than three points: a line always goes through two.
    """
    if len(points) < 3:
        raise ValueError(f"{len(points)} points say nothing about a line")
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return max(abs(mean_y + slope * (x - mean_x) - y) / y for x, y in points)


def spread(values: Sequence[float]) -> float:
    """Return the largest of ``values`` over the smallest."""
    return max(values) / min(values)
