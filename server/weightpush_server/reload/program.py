"""How one received tensor gets to its places: strided copies and fills, by way of temporaries where loaders use some.

All offsets are in bytes, all strides in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from weightpush_server.reload.storage import Place, extent


class Kind(Enum):
    """What a buffer of a program is."""

    SOURCE = "source"
    TEMPORARY = "temporary"
    GROUP = "group"


class Buffer(NamedTuple):
    """The received tensor (``number`` says which), a temporary, or the storage group at ``number`` of the layout."""

    kind: Kind
    number: int


class View(NamedTuple):
    """A strided view into a buffer; ``offset`` counts from the start of the received tensor, temporary or group."""

    buffer: Buffer
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, buffer: Buffer, tensor: torch.Tensor) -> View:
        """Describe ``tensor``, whose storage is ``buffer``."""
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return cls(buffer, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

    @property
    def end(self) -> int:
        """Byte after the last element, from the start of the buffer."""
        return self.offset + extent(self.shape, self.stride, self.dtype.itemsize)


class Step(NamedTuple):
    """``target.copy_(source)``, or ``target.fill_(value)`` where ``source`` is None."""

    target: View
    source: View | None
    value: float = 0.0


@dataclass(frozen=True)
class Program:
    """Everything that a model's loaders do with one tensor, in order.

    Attributes:
        steps: copies and fills; a temporary is written before it is read.
        temporaries: size in bytes of each temporary, by index.
        groups: indices of the storage groups that are written.
    """

    steps: tuple[Step, ...]
    temporaries: dict[int, int]
    groups: tuple[int, ...]


def strided(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return a view of ``storage`` that starts at byte ``offset``. Raises ValueError where that is not aligned."""
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage, _elements(offset, dtype), shape, stride)


def _elements(offset: int, dtype: torch.dtype) -> int:
    elements, rest = divmod(offset, dtype.itemsize)
    if rest:
        raise ValueError(f"byte {offset} is no place for elements of {dtype}")
    return elements


class Replayer:
    """Runs programs onto an opened model.

    ``place_of(group index)`` says where a group's bytes lie; it is asked once for each group. The replayer holds these
    storages until :meth:`close`.
    """

    def __init__(self, place_of: Callable[[int], Place]) -> None:
        self._place_of = place_of
        self._bases: dict[tuple[int, torch.dtype], tuple[torch.Tensor, int]] = {}

    def run(self, program: Program, tensor: torch.Tensor) -> None:
        """Write ``tensor`` (contiguous) where ``program`` says. The tensor may be reused once this returns."""
        temporaries = {
            index: torch.empty(nbytes, dtype=torch.uint8, device=tensor.device).untyped_storage()
            for index, nbytes in program.temporaries.items()
        }
        for target, source, value in program.steps:
            written = self._view(target, tensor, temporaries)
            if source is None:
                written.fill_(value)
            else:
                written.copy_(self._view(source, tensor, temporaries))

    def move(self, source: torch.Tensor, target: View) -> None:
        """Copy ``source`` to ``target``, a view into a storage group."""
        self._of_group(target).copy_(source)

    def forget(self, groups: Collection[int]) -> None:
        """Let go of the storages of ``groups``, given by index."""
        self._bases = {key: base for key, base in self._bases.items() if key[0] not in groups}

    def close(self) -> None:
        """Let go of the model's storages."""
        self._bases.clear()

    def _view(self, view: View, tensor: torch.Tensor, temporaries: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        (kind, index), dtype, offset, shape, stride = view
        if kind is Kind.GROUP:
            return self._of_group(view)
        if kind is Kind.TEMPORARY:
            return strided(temporaries[index], dtype, offset, shape, stride)
        if dtype is tensor.dtype:
            if shape == tensor.shape and stride == tensor.stride():
                return tensor
            return tensor.as_strided(shape, stride, int(tensor.storage_offset()) + _elements(offset, dtype))
        start = int(tensor.storage_offset()) * tensor.element_size()
        return strided(tensor.untyped_storage(), dtype, start + offset, shape, stride)

    def _of_group(self, view: View) -> torch.Tensor:
        (_, index), dtype, offset, shape, stride = view
        base, start = self._bases.get((index, dtype)) or self._base(index, dtype)
        return base.as_strided(shape, stride, _elements(start + offset, dtype))

    def _base(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        place = self._place_of(index)
        length = place.storage.nbytes() // dtype.itemsize
        base = strided(place.storage, dtype, 0, (length,), (1,))
        self._bases[index, dtype] = base, place.start
        return base, place.start
