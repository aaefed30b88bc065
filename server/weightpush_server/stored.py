"""Checkpoint tensors that lie in files, and how a worker reads them: what a staged update, a kept copy and a checkpoint
on disk have in common. A description travels between the processes of a host as JSON; the bytes stay where they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec

#: A piece of tensors that is landed, and counted, in one go, in bytes.
PIECE_BYTES: Final = 64 * 2**20


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


class StoredCheckpoint(BaseModel):
    """Tensors in the order in which they land, and their digests as far as they are known."""

    model_config = ConfigDict(frozen=True)

    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]
    digests: Mapping[str, str] = Field(default_factory=dict)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, without where they lie."""
        return tuple(tensor.spec for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)


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
        # An empty tensor may stand behind the end of its file.
        last: dict[int, StoredTensor] = {}
        for tensor in stored.tensors:
            before = last.get(tensor.file)
            if tensor.spec.nbytes and (before is None or tensor.end > before.end):
                last[tensor.file] = tensor
        try:
            for index, file in enumerate(stored.files):
                self._open(index, file, last.get(index))
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
        spec = tensor.spec
        mapped = self._mapped.get(tensor.file)
        if mapped is not None:
            return view_tensor(mapped, tensor.offset, spec)
        raw = torch.empty(spec.nbytes, dtype=torch.uint8)
        if spec.nbytes:
            self._fill(tensor, memoryview(raw.numpy().data))
        return raw.view(spec.torch_dtype).view(spec.shape)

    def _fill(self, tensor: StoredTensor, target: memoryview) -> None:
        file = self.stored.files[tensor.file]
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptors[tensor.file], [target[done:]], tensor.offset + done)
            except OSError as error:
                raise _unreadable(file, f"cannot be read: {error.strerror}", tensor.spec.name) from error
            if count == 0:
                raise _unreadable(file, f"became shorter while {tensor.spec.name!r} was read", tensor.spec.name)
            done += count

    def pieces(self) -> Iterator[list[StoredTensor]]:
        """Yield the tensors in order, in runs of about ``PIECE_BYTES`` bytes."""
        piece: list[StoredTensor] = []
        nbytes = 0
        for tensor in self.stored.tensors:
            if piece and nbytes + tensor.spec.nbytes > PIECE_BYTES:
                yield piece
                piece, nbytes = [], 0
            piece.append(tensor)
            nbytes += tensor.spec.nbytes
        if piece:
            yield piece

    def close(self) -> None:
        """Let go of the files. Tensors that were read stay valid."""
        self._mapped.clear()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _unreadable(file: StoredFile, why: str, name: str | None = None) -> WeightPushError:
    details = {"path": file.path} if name is None else {"path": file.path, "tensor": name}
    return WeightPushError(ErrorCode.LANDING_FAILED, f"{file.path} {why}; load a complete checkpoint", details=details)
