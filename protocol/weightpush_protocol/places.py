"""Where tensors lie in a bucket, with what every push of that bucket asks about it worked out once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Final, NamedTuple

#: So many tensors are one run at most: whoever works on one lets no other thread run meanwhile.
_LONGEST: Final = 1024


class PlaceRun(NamedTuple):
    """``times`` tensors of ``nbytes`` bytes each, one right behind the other, from byte ``start`` on."""

    start: int
    nbytes: int
    times: int


class Places(tuple[tuple[int, int], ...]):
    """Byte offset and size of each tensor, in order. Equal to a tuple of the same pairs."""

    def __new__(cls, pairs: Iterable[tuple[int, int]] = ()) -> Places:
        """Return the places of ``pairs``, which are not looked at."""
        return super().__new__(cls, pairs)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all of them together."""
        return sum(nbytes for _, nbytes in self)

    def first_outside(self, size: int) -> tuple[int, int] | None:
        """Return the first place that does not lie in a buffer of ``size`` bytes; None where all do."""
        start, end = self._bounds
        if start >= 0 and end <= size:
            return None
        return next(place for place in self if min(place) < 0 or sum(place) > size)

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """The lowest offset or size, and the first byte behind all of them."""
        return min(map(min, self), default=0), max(map(sum, self), default=0)

    @cached_property
    def runs(self) -> tuple[PlaceRun, ...]:
        """All of them in order, equally large neighbours together: the experts of a layer are one run, or a few."""
        runs: list[PlaceRun] = []
        for offset, nbytes in self:
            last = runs[-1] if runs else None
            # Those without any bytes have no distance, and stay alone.
            if last and nbytes and last[1] == nbytes and last[0] + nbytes * last[2] == offset and last[2] < _LONGEST:
                runs[-1] = last._replace(times=last.times + 1)
            else:
                runs.append(PlaceRun(offset, nbytes, 1))
        return tuple(runs)
