"""What post-load processing changed on modules and their helpers, and how to take it back before it runs again.

Processing is written to run once. It leaves flags ("already done"), kernels and packed copies behind that make a second
run skip or reuse work: the MoE methods skip prepacking once they own a kernel, with weights of the right shape and
wrong content as the result. Instead of knowing every such guard by name, this compares the attributes of before and
after the first run, and puts the former back, so that each later run starts where the first one did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

from torch import nn

from weightpush_server.reload.fingerprint import LAYOUT_ATTRIBUTE, MODULE_INTERNALS


class Absent:
    """Stands for an attribute that is not there."""


#: Helpers of helpers (a method's scheme, the scheme's kernel) are followed this far.
_DEPTH: Final = 3
_CONTAINERS: Final = (list, dict, set)


def _helpers(owner: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the objects below ``owner`` that take part in post-load processing: methods, schemes, implementations."""
    for value in list(vars(owner).values()):
        if (
            not isinstance(value, (nn.Module, type))
            and hasattr(value, "__dict__")
            and callable(getattr(type(value), "process_weights_after_loading", None))
        ):
            yield value
            if depth > 1:
                yield from _helpers(value, depth - 1)


def owners_below(module: nn.Module) -> Iterator[Any]:
    """Yield the objects at and below ``module`` whose attributes post-load processing may change; some repeatedly."""
    for child in module.modules():
        yield child
        yield from _helpers(child)


class AttributeJournal:
    """The plain attributes that the first post-load processing changed, with their values of before.

    An attribute counts as changed if it holds another object, or a list, dict or set with other elements. Make the
    journal before the processing, call :meth:`close` after it, and :meth:`undo` before each repetition.
    """

    def __init__(self, model: nn.Module) -> None:
        owners: dict[int, Any] = {}
        owners.update((id(owner), owner) for owner in owners_below(model))
        self._before: list[tuple[Any, dict[str, Any]]] = [(owner, _attributes(owner)) for owner in owners.values()]
        self._changed: list[tuple[Any, dict[str, Any]]] = []
        containers: dict[int, Any] = {}
        for _, attributes in self._before:
            containers.update((id(value), value) for value in attributes.values() if type(value) in _CONTAINERS)
        self._contents = [(value, value.copy()) for value in containers.values()]

    def close(self) -> None:
        """Compare with the attributes of now; keep only the differences."""
        for owner, before in self._before:
            after = _attributes(owner)
            changed = {
                key: before.get(key, Absent)
                for key in before.keys() | after.keys()
                if before.get(key, Absent) is not after.get(key, Absent)
            }
            if changed:
                self._changed.append((owner, changed))
        self._before = []
        self._contents = [(value, copy) for value, copy in self._contents if not _same_elements(value, copy)]

    def undo(self, *, only: Collection[int] | None = None, without: Collection[int] = frozenset()) -> None:
        """Put the attributes back as they were before the first processing. May be repeated.

        ``only``, ``without``: ``id`` of owners; with ``only``, containers stay as they are.
        """
        for owner, changed in self._changed:
            if id(owner) in without or (only is not None and id(owner) not in only):
                continue
            # Written past __setattr__: it would register tensors, and refuse names that are parameters by now.
            for key, value in changed.items():
                if value is Absent:
                    vars(owner).pop(key, None)
                else:
                    vars(owner)[key] = value
        for value, copy in self._contents if only is None else ():
            if isinstance(value, list):
                value[:] = copy
            else:
                value.clear()
                value.update(copy)

    def among(self, owners: Iterator[Any]) -> frozenset[int]:
        """Return ``id`` of those of ``owners`` that processing changed."""
        mine = {id(owner) for owner, _ in self._changed}
        return frozenset(id(owner) for owner in owners if id(owner) in mine)

    def values(self) -> dict[int, list[Any]]:
        """Return what the changed attributes of each owner hold now, by its ``id``."""
        return {id(owner): [vars(owner).get(key, Absent) for key in changed] for owner, changed in self._changed}

    @property
    def changed_containers(self) -> bool:
        """Whether processing changed what a list, dict or set holds: nobody knows whose that is."""
        return bool(self._contents)

    def changed(self) -> Iterator[tuple[Any, str]]:
        """Yield ``(owner, attribute name)`` of every change."""
        for owner, changed in self._changed:
            yield from ((owner, key) for key in changed)


def _same_elements(value: Any, copy: Any) -> bool:
    """Compare by identity: elements may be tensors, which do not compare as a whole."""
    if len(value) != len(copy):
        return False
    if isinstance(value, set):
        return bool(value == copy)
    if isinstance(value, dict):
        return all(key in value and value[key] is element for key, element in copy.items())
    return all(element is other for element, other in zip(value, copy, strict=True))


def _attributes(owner: Any) -> dict[str, Any]:
    attributes = dict(vars(owner))
    if isinstance(owner, nn.Module):
        for key in (*MODULE_INTERNALS, LAYOUT_ATTRIBUTE):
            attributes.pop(key, None)
    return attributes
