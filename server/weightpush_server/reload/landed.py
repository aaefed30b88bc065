"""Which tensors have landed: each name once, a bucket at a time where buckets are those of the update before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

#: So many sets are remembered at most: with 16 MiB each a terabyte.
_KEPT: Final = 65536


class Apart:
    """Sets of names of which no two share a name, told apart by identity. A plan keeps one from update to update."""

    def __init__(self) -> None:
        #: They are held, so that no other object gets the identity of one of them.
        self._sets: dict[int, frozenset[str]] = {}
        self._all: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def takes(self, names: frozenset[str]) -> bool:
        """Whether ``names`` is one of the sets; it becomes one where it shares no name with any of them."""
        if id(names) in self._sets:
            return True
        if len(self._sets) >= _KEPT or not self._all.isdisjoint(names):
            return False
        self._sets[id(names)] = names
        self._all |= names
        return True

    def clear(self) -> None:
        """Begin anew: other buckets are in use now."""
        self._sets.clear()
        self._all.clear()


class LandedNames:
    """The tensors of one update that have landed, which are all among those that are expected, or optional."""

    def __init__(self, apart: Apart) -> None:
        self._apart = apart
        #: Sets that ``apart`` has taken, by identity, and all other names.
        self._buckets: dict[int, frozenset[str]] = {}
        self._others: set[str] = set()

    def __contains__(self, name: str) -> bool:
        if name in self._others:
            return True
        return name in self._apart and any(name in names for names in self._buckets.values())

    def __len__(self) -> int:
        return len(self._others) + sum(map(len, self._buckets.values()))

    def names(self) -> frozenset[str]:
        """Return all of them."""
        return frozenset(self._others).union(*self._buckets.values())

    def add(self, name: str) -> None:
        """Count a tensor that has not landed before."""
        self._others.add(name)

    def twice(self, names: frozenset[str]) -> str | None:
        """Return one of ``names`` that has landed already, or None."""
        if not self._buckets and not self._apart.takes(names):
            self._apart.clear()
        if id(names) in self._buckets:
            return next(iter(names), None)
        if not self._others.isdisjoint(names):
            return next(iter(self._others & names))
        if self._apart.takes(names):
            return None  # It shares no name with any other set here.
        return next((name for landed in self._buckets.values() for name in landed & names), None)

    def add_all(self, names: frozenset[str]) -> None:
        """Count a bucket's tensors, of which :meth:`twice` found none."""
        if self._apart.takes(names):
            self._buckets[id(names)] = names
        else:
            self._others |= names

    def missing(self, expected: Mapping[str, object], optional: Collection[str]) -> list[str]:
        """Return those of ``expected``, but for the ``optional`` ones, that have not landed, in order."""
        if len(self) - sum(name in optional for name in self._others) == len(expected):
            return []  # No name is counted twice, and these are all expected.
        landed = self.names()
        return [name for name in expected if name not in landed and name not in optional]
