"""Whether modules still are what post-load processing made of them last, so that a partial update may leave them alone.

What processing packed shows no checkpoint bytes that could be compared any more. But it put objects in place that
nothing but another processing puts there; while these are the same ones, so is what they hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from weightpush_server.reload.layout import ModelLayout
    from weightpush_server.reload.modulewise import Unit

_Ref = Callable[[], Any]
#: What is the same where it is equal.
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, type, Enum, torch.dtype, torch.device)
#: Stands for what cannot be told from another one of its kind later.
_UNKNOWN: Final = object()


class Seal:
    """Weak references to what processing left behind: on each object of the journal, and in each group's slots.

    Weak, since packed weights must be free to go when the next update replaces them.
    """

    def __init__(self, layout: ModelLayout) -> None:
        """Note what is there now. Call it when processing has ended and its result was proven."""
        self._owners = {owner: [_refer(value) for value in values] for owner, values in layout.journal.values().items()}
        self._groups = [[_refer(tensor) for tensor in group.registered()] for group in layout.groups]
        self._broken: set[int] = set()

    def break_all(self, layout: ModelLayout, *, without: Collection[int]) -> None:
        """Note that an update has begun that may write all groups but those at the indices ``without``."""
        self._broken.update(index for index in range(len(layout.groups)) if index not in without)

    def intact(self, layout: ModelLayout, units: Iterable[Unit]) -> tuple[Unit, ...]:
        """Return those of ``units`` that are as they were."""
        owners = layout.journal.values()
        return tuple(
            unit
            for unit in units
            if self._broken.isdisjoint(unit.groups)
            and all(_same(self._groups[index], layout.groups[index].registered()) for index in unit.groups)
            and all(_same(self._owners[owner], owners[owner]) for owner in unit.owners)
        )


def _refer(value: Any) -> _Ref:
    if isinstance(value, _PLAIN):
        return lambda: value
    try:
        return weakref.ref(value)
    except TypeError:  # A list or a dict, say, which may hold anything, also what it did not hold before.
        return lambda: _UNKNOWN


def _same(references: Collection[_Ref], values: Collection[Any]) -> bool:
    return len(references) == len(values) and all(
        _is_same(reference(), value) for reference, value in zip(references, values, strict=True)
    )


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(now, _PLAIN) and type(before) is type(now) and before == now)
