"""Storages: their identity, and which of their bytes a tensor occupies.

An address is no identity: the allocator gives it out again as soon as a tensor dies. All ranges are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class StorageRef:
    """Names a storage without keeping its bytes. While this lives, no other storage takes over ``id``."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        reference: Any = StorageWeakRef  # untyped in torch
        self._reference = reference(storage)
        self.id = storage._cdata

    @property
    def alive(self) -> bool:
        """Whether something still holds the storage."""
        return not self._reference.expired()


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of the storage under ``tensor``, unique among those that are alive."""
    return int(tensor.untyped_storage()._cdata)


def extent(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Return the bytes from a tensor's first element to the end of its last one; zero if it has none."""
    if any(size == 0 for size in shape):
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * itemsize


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return first and end byte of ``tensor`` within its storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + extent(tensor.shape, tensor.stride(), tensor.element_size())


def storage_bytes(storage: torch.UntypedStorage, start: int, end: int) -> torch.Tensor:
    """Return bytes ``start`` to ``end`` of ``storage`` as a uint8 view."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, start, (end - start,), (1,))
