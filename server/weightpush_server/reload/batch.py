"""The copies of a whole bucket, worked out once: tensors of one kind that lie evenly spaced go in one strided copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

import torch

from weightpush_protocol.even_runs import Offsets, even_runs
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.reload.coverage import ByteRanges, strided_ranges
from weightpush_server.reload.program import Kind, Program, View

#: Bytes that land before the modules that they complete are processed: the scratch storage of all these is taken at
#: the same time.
_MOST_BYTES: Final = 16 * 2**20

#: Tensors of a bucket, each with its byte offset in it.
Entries = Sequence[tuple[TensorSpec, int]]


class Source(NamedTuple):
    """A strided view into a bucket; ``offset`` counts bytes from its start."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Move(NamedTuple):
    """One copy from a bucket to a storage group; ``name`` is the first tensor that it brings."""

    name: str
    source: Source
    target: View


@dataclass(frozen=True)
class Batch:
    """How a bucket, or a part of a large one, lands.

    Attributes:
        names: the tensors that ``moves`` bring, wholly; no two moves write the same byte.
        nbytes: of these tensors.
        moves: the copies.
        rest: the tensors that have to land one by one.
    """

    names: frozenset[str]
    nbytes: int
    moves: tuple[Move, ...]
    rest: tuple[tuple[TensorSpec, int], ...]


def make_batches(
    programs: Mapping[str, Program], expected: Mapping[str, TensorSpec], entries: Entries
) -> tuple[Batch, ...]:
    """Work out how ``entries`` land by ``programs``, some MiB after the other; see :func:`make_batch`."""
    runs: list[list[tuple[TensorSpec, int]]] = [[]]
    nbytes = 0
    for spec, offset in entries:
        if nbytes and nbytes + spec.nbytes > _MOST_BYTES:
            runs.append([])
            nbytes = 0
        runs[-1].append((spec, offset))
        nbytes += spec.nbytes
    return tuple(make_batch(programs, expected, run) for run in runs)


def make_batch(programs: Mapping[str, Program], expected: Mapping[str, TensorSpec], entries: Entries) -> Batch:
    """Work out how ``entries`` land by ``programs``, which no two tensors share a byte of.

    What is not as ``expected``, not aligned, or needs more than copies, is left for one by one.
    """
    alone: list[Move] = []
    names: set[str] = set()
    rest: list[tuple[TensorSpec, int]] = []
    nbytes = 0
    for spec, offset in entries:
        program = programs.get(spec.name)
        if (
            program is None
            or spec.name in names
            or expected.get(spec.name) != spec
            or not _only_copies(program)
            or not _aligned(program, offset)
        ):
            rest.append((spec, offset))
            continue
        names.add(spec.name)
        nbytes += spec.nbytes
        for step in program.steps:
            source = step.source
            assert source is not None  # Else it is no copy.
            if prod(source.shape):
                start = Source(source.dtype, offset + source.offset, source.shape, source.stride)
                alone.append(Move(spec.name, start, step.target))
    return Batch(frozenset(names), nbytes, tuple(_joined(alone)), tuple(rest))


def _only_copies(program: Program) -> bool:
    """Whether the order of the steps does not matter, and each copies from the received tensor to a weight."""
    for target, source, _ in program.steps:
        if source is None or source.buffer.kind is not Kind.SOURCE or target.buffer.kind is not Kind.GROUP:
            return False
    if len(program.steps) < 2:
        return True
    written: defaultdict[int, ByteRanges] = defaultdict(ByteRanges)
    total = 0
    for target, _, _ in program.steps:
        ranges = strided_ranges(target.offset, target.shape, target.stride, target.dtype.itemsize)
        written[target.buffer.number].add(ranges)
        total += prod(target.shape) * target.dtype.itemsize
    return sum(len(ranges) for ranges in written.values()) == total


def _aligned(program: Program, offset: int) -> bool:
    """Whether every copy finds whole elements where it reads, the tensor being at byte ``offset``."""
    sources = (step.source for step in program.steps)
    return all(source is None or (offset + source.offset) % source.dtype.itemsize == 0 for source in sources)


def _joined(moves: Sequence[Move]) -> Iterator[Move]:
    """Join moves of one kind whose sources and whose targets lie at even distances."""
    kinds: defaultdict[object, dict[Offsets, Move]] = defaultdict(dict)
    for move in moves:
        source, target = move.source, move.target
        kind = (source.dtype, source.shape, source.stride, target.buffer, target.dtype, target.shape, target.stride)
        kinds[kind][source.offset, target.offset] = move
    for alike in kinds.values():
        first = next(iter(alike.values()))
        for run in even_runs(alike, (first.source.dtype.itemsize, first.target.dtype.itemsize)):
            yield _join([alike[offsets] for offsets in run])


def _distance(first: Move, second: Move) -> tuple[int, int]:
    return second.source.offset - first.source.offset, second.target.offset - first.target.offset


def _join(run: Sequence[Move]) -> Move:
    if len(run) == 1:
        return run[0]
    first = run[0]
    gap, target_gap = _distance(first, run[1])
    source, target = first.source, first.target
    return Move(
        first.name,
        source._replace(shape=(len(run), *source.shape), stride=(gap // source.dtype.itemsize, *source.stride)),
        target._replace(shape=(len(run), *target.shape), stride=(target_gap // target.dtype.itemsize, *target.stride)),
    )
