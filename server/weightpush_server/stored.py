"""Checkpoint tensors that lie in files, and how a worker reads them: what a staged update, a kept copy and a checkpoint
on disk have in common. A description travels between the processes of a host as JSON; the bytes stay where they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import BucketTable, TensorSpec
from weightpush_server.prefault import prefault

#: A piece of tensors that is landed, and counted, in one go, in bytes. As small as the buckets of one host: what it
#: makes complete is processed before the next one, so that little scratch memory is in use at a time.
PIECE_BYTES: Final = 16 * 2**20
#: A piece reaches over at most this many times as many bytes: what lies between its tensors may be read with them.
_SPREAD: Final = 4
#: A piece begins at a multiple of this in its file, so that offsets say what is aligned, in bytes.
_ALIGNMENT: Final = 64
#: Layouts that are not worked out anew where they come again.
_KEPT_LAYOUTS: Final = 2


class StoredFile(BaseModel):
    """One file. ``path`` may name a descriptor that another process holds open: ``/proc/<pid>/fd/<n>``.

    ``in_memory``: an anonymous file in memory, which nobody shortens: it is mapped. Any other file is read, since a
    mapping of a file that somebody cuts short would kill the worker.
    """

    model_config = ConfigDict(frozen=True)

    path: str
    in_memory: bool = False


class StoredTensor(BaseModel):
    """One tensor: its bytes, contiguous and in the machine's order, start at byte ``offset`` of file ``file``.

    The offset need not be a multiple of the element size.
    """

    model_config = ConfigDict(frozen=True)

    spec: TensorSpec
    file: NonNegativeInt
    offset: NonNegativeInt

    @property
    def end(self) -> int:
        """Byte offset behind it."""
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, eq=False)
class Piece:
    """Tensors of file ``file`` that are landed in one go.

    Attributes:
        start, end: the bytes of the file that hold them, and maybe others between them.
        first: the number of its first tensor among all of the checkpoint.
        nbytes: of its tensors.
        table: its tensors; offsets count from ``start``.
    """

    file: int
    start: int
    end: int
    first: int
    nbytes: int
    table: BucketTable


@dataclass(frozen=True)
class StoredLayout:
    """Tensors in the order in which they land, and where they lie. What follows from that is worked out once."""

    tensors: tuple[StoredTensor, ...]

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, without where they lie."""
        return tuple(tensor.spec for tensor in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def last(self) -> Mapping[int, StoredTensor]:
        """The tensor that ends last in each file. Not an empty one: it may stand behind the end of its file."""
        last: dict[int, StoredTensor] = {}
        for tensor in self.tensors:
            before = last.get(tensor.file)
            if tensor.spec.nbytes and (before is None or tensor.end > before.end):
                last[tensor.file] = tensor
        return last

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors in order, in runs of about ``PIECE_BYTES`` bytes that ascend in one file."""
        return tuple(_pieces(self.tensors))

    @cached_property
    def text(self) -> str:
        """The tensors as JSON."""
        return _LAYOUT.dump_json(self.tensors).decode()


_LAYOUT: Final = TypeAdapter(tuple[StoredTensor, ...])


@lru_cache(maxsize=_KEPT_LAYOUTS)
def _layout_of(text: str) -> StoredLayout:
    # The same object for the same text: plans know by it that they have seen the layout before.
    return StoredLayout(_LAYOUT.validate_json(text))


@dataclass(frozen=True)
class StoredCheckpoint:
    """Files, the tensors in them, and the digests of these as far as they are known."""

    files: tuple[StoredFile, ...]
    layout: StoredLayout
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors in the order in which they land."""
        return self.layout.tensors

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, without where they lie."""
        return self.layout.specs

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.layout.nbytes

    def to_json(self) -> str:
        """Return what :meth:`from_json` takes, in another process of this host, too."""
        files = [file.model_dump() for file in self.files]
        # A text in a text: most updates differ from the one before in nothing but the path of their file.
        return json.dumps({"files": files, "layout": self.layout.text, "digests": dict(self.digests)})

    @classmethod
    def from_json(cls, text: str) -> StoredCheckpoint:
        """Return the checkpoint; its layout is the same object as before where it is the same layout."""
        given: dict[str, Any] = json.loads(text)
        files = tuple(StoredFile.model_validate(file) for file in given["files"])
        return cls(files, _layout_of(given["layout"]), given["digests"])


def _pieces(tensors: Sequence[StoredTensor]) -> Iterator[Piece]:
    run: list[StoredTensor] = []
    nbytes = start = end = 0
    for number, tensor in enumerate(tensors):
        size = tensor.spec.nbytes
        begins = not nbytes  # Where an empty tensor stands means nothing.
        if run and (
            tensor.file != run[0].file
            or nbytes + size > PIECE_BYTES
            or (size and not begins and (tensor.offset < end or tensor.end - start > _SPREAD * PIECE_BYTES))
        ):
            yield _piece(run, number - len(run), nbytes, start, end)
            run, nbytes, begins = [], 0, True
        run.append(tensor)
        nbytes += size
        if size:
            start, end = (tensor.offset if begins else start), tensor.end
    if run:
        yield _piece(run, len(tensors) - len(run), nbytes, start, end)


def _piece(run: Sequence[StoredTensor], first: int, nbytes: int, start: int, end: int) -> Piece:
    if not nbytes:
        start = end = 0
    start -= start % _ALIGNMENT
    entries = [(tensor.spec, tensor.offset - start if tensor.spec.nbytes else 0) for tensor in run]
    return Piece(run[0].file, start, end, first, nbytes, BucketTable.of(entries))


def view_tensor(buffer: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor that lies at byte ``offset`` of a 1-d uint8 buffer, without a copy where it is aligned."""
    raw = buffer[offset : offset + spec.nbytes]
    if (raw.data_ptr() % max(spec.torch_dtype.itemsize, 1)) or (raw.storage_offset() % spec.torch_dtype.itemsize):
        raw = raw.clone()
    return raw.view(spec.torch_dtype).view(spec.shape)


class OpenCheckpoint:
    """A stored checkpoint whose files this process holds open. ``close`` it; safe to call twice.

    Raises:
        WeightPushError: ``landing_failed``, before anything is written, where a file cannot be opened or is shorter
            than its tensors say.
    """

    def __init__(self, stored: StoredCheckpoint) -> None:
        self.stored = stored
        self._descriptors: list[int] = []
        self._mapped: dict[int, torch.Tensor] = {}
        try:
            for index, file in enumerate(stored.files):
                self._open(index, file, stored.layout.last.get(index))
        except BaseException:
            self.close()
            raise

    def _open(self, index: int, file: StoredFile, last: StoredTensor | None) -> None:
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(file, f"cannot be opened: {error.strerror}") from error
        self._descriptors.append(descriptor)
        size = os.fstat(descriptor).st_size
        if last is not None and last.end > size:
            raise _unreadable(file, f"has {size} bytes, too few for {last.spec.name!r}", last.spec.name)
        if file.in_memory and size:
            # Private and read-only: a shared mapping would want write access, and would make a file that is missing.
            own = f"/proc/self/fd/{descriptor}"
            self._mapped[index] = torch.from_file(own, shared=False, size=size, dtype=torch.uint8)

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return one tensor on the CPU: a view of memory that must not be written to, or a copy read from its file.

        Raises:
            WeightPushError: ``landing_failed``: the file became shorter, or reading failed.
        """
        (piece,) = _pieces([tensor])
        buffer = self._mapping(piece)
        if buffer is None:
            buffer = torch.empty(piece.end - piece.start, dtype=torch.uint8)
            self._read_into(piece, buffer)
        return view_tensor(buffer, piece.table.places[0][0], tensor.spec)

    def pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield all pieces in order, each with its bytes on the CPU (1-d uint8, the first at ``piece.start``).

        These are memory that must not be written to, or a buffer that the next piece is read into. Raises as `read`.
        """
        buffer = torch.empty(0, dtype=torch.uint8)
        for piece in self.stored.layout.pieces:
            mapping = self._mapping(piece)
            if mapping is not None:
                yield piece, mapping
                continue
            size = piece.end - piece.start
            if buffer.numel() < size:
                buffer = torch.empty(0, dtype=torch.uint8)  # The old one is given back first.
                buffer = torch.empty(size, dtype=torch.uint8)
            self._read_into(piece, buffer[:size])
            yield piece, buffer[:size]

    def prefault(self) -> None:
        """Map all pages of files in memory, so that landing need not. For a thread of its own: `close` ends it soon."""
        # Held here, the mappings stay until this ends.
        for mapped in list(self._mapped.values()):
            prefault(mapped, lambda: bool(self._descriptors))

    def _mapping(self, piece: Piece) -> torch.Tensor | None:
        """Return the bytes of a piece where its file is mapped."""
        mapped = self._mapped.get(piece.file)
        return None if mapped is None else mapped[piece.start : piece.end]

    def _read_into(self, piece: Piece, target: torch.Tensor) -> None:
        file, memory = self.stored.files[piece.file], memoryview(target.numpy().data)
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._descriptors[piece.file], [memory[done:]], piece.start + done)
            except OSError as error:
                raise _unreadable(file, f"cannot be read: {error.strerror}", _at(piece, done)) from error
            if count == 0:
                name = _at(piece, done)
                raise _unreadable(file, f"became shorter while {name!r} was read", name)
            done += count

    def close(self) -> None:
        """Let go of the files. Tensors that were read stay valid."""
        self._mapped.clear()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _at(piece: Piece, offset: int) -> str:
    """Return the name of the tensor that holds byte ``offset`` of a piece, or of the first one behind it."""
    table = piece.table
    return next(name for name, (start, size) in zip(table.names, table.places, strict=True) if start + size > offset)


def _unreadable(file: StoredFile, why: str, name: str | None = None) -> WeightPushError:
    details = {"path": file.path} if name is None else {"path": file.path, "tensor": name}
    return WeightPushError(ErrorCode.LANDING_FAILED, f"{file.path} {why}; load a complete checkpoint", details=details)
