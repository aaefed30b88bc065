"""A model whose tensors stand in for the real ones: checkpoint layout, loader attributes, no data.

Loaders find their targets by name in the modules' tables and read attributes from them, so they can be run on a live
model without touching a weight of it, while the tables hold stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightpush_server.reload.journal import AttributeJournal
from weightpush_server.reload.layout import Member, ModelLayout, StorageGroup
from weightpush_server.reload.program import strided
from weightpush_server.reload.storage import storage_id

_CONTAINERS = (list, dict, set)


@dataclass(frozen=True)
class StandIns:
    """The storages (on the meta device) that stand for the layout's groups, and the tensors on them."""

    storages: list[torch.UntypedStorage]
    tensors: list[list[tuple[Member, torch.Tensor]]]

    def replaced(self) -> list[int]:
        """Return the groups of which a tensor was exchanged or moved to another storage by a loader."""
        return [
            index
            for index, (storage, tensors) in enumerate(zip(self.storages, self.tensors, strict=True))
            if any(not _in_place(member, tensor, storage) for member, tensor in tensors)
        ]


def _in_place(member: Member, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    same = (tensor.shape, tensor.stride(), tensor.dtype) == (member.shape, member.stride, member.dtype)
    return same and storage_id(tensor) == storage._cdata and all(slot.get() is tensor for slot in member.slots)


@contextmanager
def stand_ins(model: nn.Module, layout: ModelLayout) -> Iterator[StandIns]:
    """For the length of the body, let the modules of ``model`` hold stand-ins for all tensors of ``layout``.

    No forward may run meanwhile. Whatever the body does to tables and attributes of modules, quantization methods and
    kernels is undone at its end, also when it raises.
    """
    journal = AttributeJournal(model)
    shelves = [_Shelf(module) for module in model.modules()]
    try:
        # Loaders meet the attributes of before post-load processing, as at cold start.
        layout.journal.undo()
        storages: list[torch.UntypedStorage] = []
        tensors: list[list[tuple[Member, torch.Tensor]]] = []
        for group in layout.groups:
            storage = torch.empty(group.nbytes, dtype=torch.uint8, device="meta").untyped_storage()
            storages.append(storage)
            tensors.append(_put(group, storage))
        yield StandIns(storages, tensors)
    finally:
        journal.close()
        journal.undo()
        for shelf in shelves:
            shelf.restore()


def _put(group: StorageGroup, storage: torch.UntypedStorage) -> list[tuple[Member, torch.Tensor]]:
    put: list[tuple[Member, torch.Tensor]] = []
    for member in group.members:
        # A plain attribute that views a weight keeps its live tensor: loaders write through tables.
        if not member.slots:
            continue
        original = member.live()
        if original is None:
            original = member.template
        view = strided(storage, member.dtype, member.offset, tuple(member.shape), member.stride)
        tensor: torch.Tensor = torch.Tensor._make_subclass(type(original), view, original.requires_grad)
        tensor.__dict__.update({key: _copied(value) for key, value in original.__dict__.items()})
        for slot in member.slots:
            slot.set(tensor)
        put.append((member, tensor))
    return put


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else value


class _Shelf:
    """The attributes of a module, its tables of parameters and buffers among them, and the items of containers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._items = [
            (value, _copied(value)) for value in self._attributes.values() if type(value) in _CONTAINERS and value
        ]
        self._empty = [value for value in self._attributes.values() if type(value) in _CONTAINERS and not value]

    def restore(self) -> None:
        """Put everything back; what did not change is not touched."""
        now = vars(self._module)
        for key in now.keys() - self._attributes.keys():
            del now[key]
        for key, value in self._attributes.items():
            if now.get(key, _Shelf) is not value:
                now[key] = value
        for container in self._empty:
            container.clear()
        for container, items in self._items:
            if not _same_items(container, items):
                container.clear()
                (container.extend if type(container) is list else container.update)(items)


def _same_items(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if type(now) is set:
        return bool(now == before)
    if type(now) is dict:
        # The order counts: it is the order of named_parameters.
        pairs = zip(now.items(), before.items(), strict=True)
        return all(left[0] == right[0] and left[1] is right[1] for left, right in pairs)
    return all(left is right for left, right in zip(now, before, strict=True))
