"""The copies that fill the buckets of a push, worked out once for all pushes of weights that lie in the same way.

Where the source knows before the push where everything lies (`ResidentSource`), evenly spaced tensors go in one strided
copy, and the others of a kind are joined a few hundred KiB at a time, where they are still in the processor's cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch

from weightpush_client.align import Outgoing
from weightpush_client.sources.resident import Place, ResidentSource, Skeleton
from weightpush_protocol.even_runs import even_runs
from weightpush_protocol.manifest import Manifest
from weightpush_protocol.places import Places

#: So much is copied before it is hashed: it must still be in the processor's cache, that of the last level.
_WINDOW_BYTES: Final = 16 * 2**20
#: So much is joined before it is copied to the buffer: in the cache of the second level, in memory that is at hand.
_JOINED_BYTES: Final = 512 * 1024


class Run(NamedTuple):
    """One strided copy: from ``leaf``, ``offset`` elements after its first, to element ``to`` of the buffer."""

    leaf: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    to: int
    to_stride: tuple[int, ...]


class Joined(NamedTuple):
    """Whole leaves of one dtype that lie one after the other in the buffer, from element ``start`` to ``end``."""

    leaves: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


Copy: TypeAlias = Run | Joined


class Window(NamedTuple):
    """Copies, and what is in the buffer when they are done: byte offset and size of each tensor, in order."""

    copies: tuple[Copy, ...]
    places: Places


@dataclass(frozen=True, slots=True)
class Program:
    """How all buckets of ``manifest`` are filled with tensors of ``skeleton``.

    ``apart``: for runs over several leaves, how many bytes each of these lies behind the run's first one. ``seen``:
    addresses of all leaves, for which that was right.
    """

    skeleton: Skeleton
    manifest: Manifest
    outgoing: Sequence[Outgoing]
    buckets: tuple[tuple[Window, ...], ...]
    apart: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    seen: list[int]

    def fits(self, source: ResidentSource, outgoing: Sequence[Outgoing], manifest: Manifest) -> bool:
        """Whether it is right for a push of ``manifest`` from ``source``, as its tensors lie now."""
        if self.skeleton is not source.skeleton or self.manifest is not manifest or self.outgoing is not outgoing:
            return False
        if not self.apart:
            return True
        leaves = source.leaves
        addresses = [leaf.data_ptr() for leaf in leaves]
        if addresses != self.seen and not self._as_far_apart(addresses):
            return False
        self.seen[:] = addresses
        # What lies where it lay may be another's memory.
        for base, others, _ in self.apart:
            memory = leaves[base].untyped_storage()
            if addresses[others[-1]] + leaves[others[-1]].nbytes > memory.data_ptr() + memory.nbytes():
                return False
        return True

    def _as_far_apart(self, addresses: Sequence[int]) -> bool:
        return all(
            [addresses[other] - addresses[base] for other in others] == list(distances)
            for base, others, distances in self.apart
        )


class Programs:
    """The program of the last push, for the next one."""

    def __init__(self) -> None:
        self._last: Program | None = None

    def of(self, source: ResidentSource, outgoing: Sequence[Outgoing], manifest: Manifest) -> Program:
        """Return how the buckets of ``manifest``, which describes ``outgoing`` in order, are filled from ``source``."""
        if self._last is None or not self._last.fits(source, outgoing, manifest):
            self._last = make_program(source, outgoing, manifest)
        return self._last


def make_program(source: ResidentSource, outgoing: Sequence[Outgoing], manifest: Manifest) -> Program:
    """Work out what :meth:`Programs.of` returns."""
    maker = _Maker(source, outgoing)
    buckets = tuple(
        tuple(maker.window(entries) for entries in _windows(manifest, number))
        for number in range(len(manifest.buckets))
    )
    return Program(source.skeleton, manifest, outgoing, buckets, tuple(maker.apart), maker.addresses)


#: What copies that can be made at once have in common: memory, dtype, shape and stride of the source, and target dtype.
_Kind: TypeAlias = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], torch.dtype]


class Entry(NamedTuple):
    """A tensor of a bucket: its number in the manifest, its byte offset and size in the bucket."""

    number: int
    offset: int
    nbytes: int


def _windows(manifest: Manifest, number: int) -> Iterator[list[Entry]]:
    bucket, window, filled = manifest.buckets[number], list[Entry](), 0
    for index, (offset, nbytes) in zip(bucket.tensors, manifest.table(number).places, strict=True):
        if window and filled + nbytes > _WINDOW_BYTES:
            yield window
            window, filled = [], 0
        window.append(Entry(index, offset, nbytes))
        filled += nbytes
    yield window


class _Maker:
    """Finds the copies of one window after the other."""

    def __init__(self, source: ResidentSource, outgoing: Sequence[Outgoing]) -> None:
        self._outgoing = outgoing
        self._skeleton = source.skeleton
        #: Of all leaves.
        self.addresses = [leaf.data_ptr() for leaf in source.leaves]
        self._storages = [leaf.untyped_storage().data_ptr() for leaf in source.leaves]
        self.apart: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def window(self, entries: Sequence[Entry]) -> Window:
        """Return how ``entries`` get to their places."""
        kinds: defaultdict[_Kind, dict[tuple[int, int], Entry]] = defaultdict(dict)
        for entry in entries:
            if not entry.nbytes:
                continue
            place, dtype = self._place(entry)
            source_dtype = self._skeleton.dtypes[place.leaf]
            address = self.addresses[place.leaf] + place.offset * source_dtype.itemsize
            kind = (self._storages[place.leaf], source_dtype, place.shape, place.stride, dtype)
            kinds[kind][address, entry.offset] = entry
        copies: list[Copy] = []
        alone: list[Entry] = []
        for (_, source_dtype, _, _, dtype), alike in kinds.items():
            for run in even_runs(alike, (source_dtype.itemsize, dtype.itemsize)):
                found = [alike[offsets] for offsets in run]
                if len(run) == 1:
                    alone += found
                else:
                    copies.append(self._run(found, run[1][0] - run[0][0], run[1][1] - run[0][1]))
        copies += self._joined(sorted(alone, key=lambda entry: entry.offset))
        return Window(tuple(copies), Places((entry.offset, entry.nbytes) for entry in entries))

    def _place(self, entry: Entry) -> tuple[Place, torch.dtype]:
        item = self._outgoing[entry.number]
        return self._skeleton.places[item.held.name], item.sent.torch_dtype

    def _run(self, entries: Sequence[Entry], gap: int, to_gap: int) -> Run:
        """Return the copy of evenly spaced ``entries``, ``gap`` bytes apart at the source."""
        first, dtype = self._place(entries[0])
        leaves = list(dict.fromkeys(self._place(entry)[0].leaf for entry in entries))
        if len(leaves) > 1:
            start = self.addresses[first.leaf]
            others = tuple(leaves[1:])
            self.apart.append((first.leaf, others, tuple(self.addresses[leaf] - start for leaf in others)))
        alone = self._alone(entries[0])
        return alone._replace(
            shape=(len(entries), *alone.shape),
            stride=(gap // self._skeleton.dtypes[first.leaf].itemsize, *alone.stride),
            to_stride=(to_gap // dtype.itemsize, *alone.to_stride),
        )

    def _alone(self, entry: Entry) -> Run:
        place, dtype = self._place(entry)
        to_stride, step = list[int](), 1
        for size in reversed(place.shape):
            to_stride.insert(0, step)
            step *= max(size, 1)
        to = entry.offset // dtype.itemsize
        return Run(place.leaf, place.offset, place.shape, place.stride, dtype, to, tuple(to_stride))

    def _joined(self, entries: Sequence[Entry]) -> Iterator[Copy]:
        """Join what lies side by side in the buffer and is whole and small; the others come as they are."""
        waiting: list[Entry] = []
        for entry in entries:
            if waiting and not self._goes_with(waiting, entry):
                yield self._join(waiting)
                waiting = []
            waiting.append(entry)
        if waiting:
            yield self._join(waiting)

    def _goes_with(self, waiting: Sequence[Entry], entry: Entry) -> bool:
        last, (place, dtype), (before, last_dtype) = waiting[-1], self._place(entry), self._place(waiting[-1])
        dtypes = self._skeleton.dtypes
        return (
            place.whole
            and before.whole
            and last.offset + last.nbytes == entry.offset
            and dtype is last_dtype
            and dtypes[place.leaf] is dtypes[before.leaf]
            and entry.offset + entry.nbytes - waiting[0].offset <= _JOINED_BYTES
        )

    def _join(self, entries: Sequence[Entry]) -> Copy:
        if len(entries) == 1:
            return self._alone(entries[0])
        dtype = self._place(entries[0])[1]
        end = entries[-1].offset + entries[-1].nbytes
        leaves = tuple(self._place(entry)[0].leaf for entry in entries)
        return Joined(leaves, dtype, entries[0].offset // dtype.itemsize, end // dtype.itemsize)
