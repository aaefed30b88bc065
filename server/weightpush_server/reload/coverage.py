"""Which bytes were written: an observer of tensor writes, and sets of byte ranges to compare.

Names say what a trainer sent; only the writes say what became of it. A cold start is watched once, every push is
watched again, and a push that leaves out a byte that the cold start wrote is not complete, whatever its names say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightpush_server.reload.storage import StorageRef, byte_range, storage_id

#: Operators after which every element of their first argument holds a new value that does not depend on the old one.
#: An operator that is not listed (``index_put_``, ``mul_``) counts as no write: then the bytes of before are kept.
_OVERWRITES: Final = frozenset(
    {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_"}
)
#: Pending ranges beyond this number are merged at once, to bound memory.
_MERGE_AT: Final = 4096


def covered_ranges(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of its storage that ``tensor`` covers: int64 ``[runs, 2]``, half open."""
    return strided_ranges(byte_range(tensor)[0], tensor.shape, tensor.stride(), tensor.element_size())


def strided_ranges(first: int, shape: Sequence[int], stride: Sequence[int], itemsize: int) -> torch.Tensor:
    """Return the bytes of a strided tensor whose elements start at byte ``first``: int64 ``[runs, 2]``, half open."""
    if 0 in shape:
        return torch.empty(0, 2, dtype=torch.int64, device="cpu")
    run = itemsize
    starts = torch.full((1,), first, dtype=torch.int64, device="cpu")
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1 or step == 0:
            continue
        if len(starts) == 1 and step * itemsize == run:
            run *= size
        else:
            steps = torch.arange(size, dtype=torch.int64, device="cpu") * (step * itemsize)
            starts = (starts[:, None] + steps).flatten()
    return torch.stack([starts, starts + run], dim=1)


#: Shared by all that are empty, and never written to.
_NO_RANGES: Final = torch.empty(0, 2, dtype=torch.int64, device="cpu")


class ByteRanges:
    """A set of bytes as half-open ranges."""

    def __init__(self, ranges: Sequence[tuple[int, int]] = ()) -> None:
        self._merged = _NO_RANGES
        self._pairs = list(ranges)
        self._pending: list[torch.Tensor] = []
        self._pending_runs = len(ranges)
        self._length: int | None = None

    def add_pair(self, start: int, end: int) -> None:
        """Add one range."""
        self._pairs.append((start, end))
        self._count(1)

    def add(self, ranges: torch.Tensor) -> None:
        """Add int64 ``[n, 2]`` ranges, which may overlap."""
        self._pending.append(ranges)
        self._count(len(ranges))

    def _count(self, runs: int) -> None:
        self._pending_runs += runs
        self._length = None
        if self._pending_runs > _MERGE_AT:
            self.merged()

    def merged(self) -> torch.Tensor:
        """Return the set as int64 ``[n, 2]``: sorted, disjoint, not touching, none empty."""
        if self._pending_runs:
            pairs = torch.tensor(self._pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)
            if self._is_one_run():
                # Most of what the loaders of a large model write is one run: nothing to sort.
                self._merged = pairs
            else:
                self._merged = _merge(torch.cat([self._merged, pairs, *self._pending]))
            self._pairs, self._pending, self._pending_runs = [], [], 0
        return self._merged

    def _is_one_run(self) -> bool:
        alone = len(self._pairs) == 1 and not self._pending and not self._merged.shape[0]
        return alone and self._pairs[0][0] < self._pairs[0][1]

    def within(self, start: int, end: int) -> ByteRanges:
        """Return the part between bytes ``start`` and ``end``, counted from ``start``."""
        part = self.merged().clamp(start, end) - start
        result = ByteRanges()
        result.add(part[part[:, 1] > part[:, 0]])
        return result

    def first_missing(self, wanted: ByteRanges) -> int | None:
        """Return the first byte of ``wanted`` that is not in this set, or None."""
        have = self.merged()
        for start, end in wanted.merged().tolist():
            index = int(torch.searchsorted(have[:, 0].contiguous(), start, right=True)) - 1
            held = int(have[index, 1]) if index >= 0 else int(start)
            if held < end:
                return max(int(start), held)
        return None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(start, end) for start, end in self.merged().tolist()])

    def __len__(self) -> int:
        if self._pending_runs and self._is_one_run():
            return self._pairs[0][1] - self._pairs[0][0]
        if self._length is None:
            self._length = int((self.merged()[:, 1] - self.merged()[:, 0]).sum())
        return self._length


def _merge(ranges: torch.Tensor) -> torch.Tensor:
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    if len(ranges) < 2:
        return ranges
    ranges = ranges[ranges[:, 0].argsort()]
    ends = ranges[:, 1].cummax(0).values
    first = torch.ones(len(ranges), dtype=torch.bool, device="cpu")
    first[1:] = ranges[1:, 0] > ends[:-1]
    last = first.roll(-1)
    return torch.stack([ranges[first, 0], ends[last]], dim=1)


@dataclass
class _Written:
    storage: StorageRef
    ranges: ByteRanges = field(default_factory=ByteRanges)


class WriteLog:
    """Byte ranges written, per storage. A storage is known by its identity, not its address, which comes back."""

    def __init__(self) -> None:
        self._of_storage: dict[int, _Written] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Note that every element of ``tensor`` was overwritten."""
        written = self._of_storage.get(storage_id(tensor))
        if written is None:
            reference = StorageRef(tensor.untyped_storage())
            written = self._of_storage[reference.id] = _Written(reference)
        if tensor.is_contiguous():
            written.ranges.add_pair(*byte_range(tensor))
        else:
            written.ranges.add(covered_ranges(tensor))

    def ranges(self, storage: torch.UntypedStorage) -> ByteRanges:
        """Return what was written to ``storage``, in bytes from its start."""
        written = self._of_storage.get(storage._cdata)
        return written.ranges if written is not None else ByteRanges()

    def forget_dead(self) -> None:
        """Drop the storages that are gone: temporaries of the loaders."""
        self._of_storage = {key: written for key, written in self._of_storage.items() if written.storage.alive}


class WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While entered, notes in ``log`` what this thread's operators overwrite. Other threads are not seen."""

    def __init__(self, log: WriteLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _OVERWRITES and not args[0].is_meta:
            self._log.add(args[0])
        return result
