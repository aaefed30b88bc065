"""Storages: their identity, and which of their bytes a tensor occupies.

An address is no identity: the allocator gives it out again as soon as a tensor dies. All ranges are in bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightpush_protocol.digest import tensor_digest


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
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    return start, start + extent(tensor.shape, tensor.stride(), tensor.element_size())


def storage_bytes(storage: torch.UntypedStorage, start: int, end: int) -> torch.Tensor:
    """Return bytes ``start`` to ``end`` of ``storage`` as a uint8 view."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, start, (end - start,), (1,))


@dataclass(frozen=True)
class Place:
    """Where some bytes lie: ``start`` counts bytes from the start of ``storage``. Keeps the storage alive."""

    storage: torch.UntypedStorage
    start: int
    nbytes: int

    @classmethod
    def new(cls, nbytes: int, device: torch.device) -> Place:
        """Take new storage; its content is undefined."""
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage(), 0, nbytes)

    @property
    def end(self) -> int:
        """Byte after the last one."""
        return self.start + self.nbytes

    def bytes(self) -> torch.Tensor:
        """Return a uint8 view."""
        return storage_bytes(self.storage, self.start, self.end)

    def digest(self) -> str:
        """Return the digest of the bytes, 16 hex digits."""
        return tensor_digest(self.bytes())

    def same(self, other: Place) -> bool:
        """Whether ``other`` is the same bytes of the same storage."""
        mine, theirs = (self.storage._cdata, self.start, self.nbytes), (other.storage._cdata, other.start, other.nbytes)
        return mine == theirs


def release_memory(device: torch.device) -> None:
    """Give memory that was freed back to the device: allocators keep a model's size of it otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # Another C library; its allocator is its own business.
        return
    trim(0)
