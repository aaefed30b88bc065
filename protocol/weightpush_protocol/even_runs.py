"""Copies of one kind whose sources and whose targets lie at even distances, which can be made at once as a strided one.

A mixture of experts has thousands of tensors that differ in their offsets only. Copied one by one they cost more time
in Python than in memory; the experts of a layer lie at even distances in a bucket, and in the weight that holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

#: Where a copy reads and where it writes, in bytes.
Offsets: TypeAlias = tuple[int, int]

#: How many of the following copies are tried as the second of a run: gate and up projections of experts alternate.
_LOOKS: Final = 3


def even_runs(places: Iterable[Offsets], units: Offsets) -> Iterator[list[Offsets]]:
    """Divide ``places``, of copies that differ in nothing else, into runs, each as long as can be found; any order.

    ``units``: bytes of an element at the source and at the target; the distances in a run are multiples of them, at the
    target of at least one. No two places are equal.
    """
    ordered = sorted(places, key=lambda place: place[1])
    left = set(ordered)
    for position, start in enumerate(ordered):
        if start not in left:
            continue
        seconds = ordered[position + 1 : position + 1 + _LOOKS]
        run = max((_run(left, start, second, units) for second in seconds), key=len, default=[start])
        left.difference_update(run)
        yield run


def _run(left: set[Offsets], start: Offsets, second: Offsets, units: Offsets) -> list[Offsets]:
    """Return the evenly spaced run among the places that are ``left`` which begins with these two."""
    gap, target_gap = second[0] - start[0], second[1] - start[1]
    if gap < 0 or target_gap <= 0 or gap % units[0] or target_gap % units[1]:
        return [start]
    run = [start]
    following = start[0] + gap, start[1] + target_gap
    while following in left:
        run.append(following)
        following = following[0] + gap, following[1] + target_gap
    return run
