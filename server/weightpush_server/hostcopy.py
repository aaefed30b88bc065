"""Checkpoint tensors in host memory: what a staged update brings, and what is kept for a rollback.

A server has one such copy of a version, whatever the number of its workers: the first one holds it in an anonymous
file in memory, and the others read it through ``/proc``. Anonymous files need no ``/dev/shm``, which containers keep
small, and the kernel frees them with the process that holds them, however that ends.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

import torch

from weightpush_protocol.dtypes import itemsize
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import BucketTable, TensorSpec
from weightpush_protocol.status import CopyRole
from weightpush_server.reload.memory import free_bytes
from weightpush_server.stored import OpenCheckpoint, StoredCheckpoint, StoredFile, StoredLayout, StoredTensor

#: Every tensor starts at a multiple of this, in bytes: aligned for any dtype, and for wide copies.
_ALIGNMENT: Final = 64
#: Written at once, in bytes: of what lies on a device no more is in host memory twice.
_WRITE_BYTES: Final = 16 * 2**20
#: Left alone where the budget is what the host has free, in bytes.
_RESERVE_BYTES: Final = 2**30
#: A copy whose files hold more than this many times its tensors is written anew.
_WASTE: Final = 2


@dataclass(frozen=True)
class HostBudget:
    """How much host memory copies may take together. ``limit_bytes``: ``None`` for what is free, less a reserve."""

    limit_bytes: int | None = None

    def total(self, held: int) -> int:
        """Return the bytes that copies may take now, those ``held`` already included."""
        if self.limit_bytes is not None:
            return self.limit_bytes
        return held + max(free_bytes(torch.device("cpu")) - _RESERVE_BYTES, 0)


class HostFile:
    """An anonymous file in memory; freed by ``close``, or with the last reference."""

    def __init__(self) -> None:
        self._own(os.memfd_create("weightpush", os.MFD_CLOEXEC))

    @classmethod
    def adopt(cls, path: str) -> HostFile:
        """Hold the anonymous file that another process still holds open at ``path``."""
        file = cls.__new__(cls)
        file._own(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return file

    def _own(self, descriptor: int) -> None:
        self._descriptor = descriptor
        #: Free it; safe to call twice.
        self.close: Callable[[], object] = weakref.finalize(self, os.close, descriptor)

    @property
    def path(self) -> str:
        """Where other processes of this user open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return os.fstat(self._descriptor).st_size

    def append(self, raw: torch.Tensor) -> int:
        """Write a 1-d uint8 tensor of any device behind what is there and return its byte offset."""
        offset = at = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        for start in range(0, raw.numel(), _WRITE_BYTES):
            rest = memoryview(raw[start : start + _WRITE_BYTES].cpu().numpy().data)
            while rest:
                count = os.pwrite(self._descriptor, rest, at)
                rest, at = rest[count:], at + count
        return offset


@dataclass
class HostCopy:
    """The tensors of one version, in order. ``digests`` as far as they are known."""

    files: list[HostFile] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def adopt(cls, stored: StoredCheckpoint) -> HostCopy:
        """Return a copy of tensors that another process holds in memory: the same memory, held here as well."""
        files = [HostFile.adopt(file.path) for file in stored.files]
        return cls(files, {tensor.spec.name: tensor for tensor in stored.tensors}, dict(stored.digests))

    def add(self, spec: TensorSpec, raw: torch.Tensor) -> None:
        """Take one tensor in, given as its bytes: 1-d uint8, on any device. The tensor may be reused then."""
        if not self.files:
            self.files.append(HostFile())
        self.tensors[spec.name] = StoredTensor(spec=spec, file=0, offset=self.files[0].append(raw))

    def add_bucket(self, table: BucketTable, buffer: torch.Tensor) -> None:
        """Take in a bucket's tensors, given as its bytes: in one write where they lie aligned and without holes."""
        start = min(offset for offset, _ in table.places)
        end = max(offset + nbytes for offset, nbytes in table.places)
        aligned = all(
            (offset - start) % itemsize(spec.dtype) == 0 or not nbytes
            for (spec, offset), (_, nbytes) in zip(table.entries, table.places, strict=True)
        )
        if not aligned or end - start > sum(nbytes for _, nbytes in table.places):
            for (spec, offset), (_, nbytes) in zip(table.entries, table.places, strict=True):
                self.add(spec, buffer[offset : offset + nbytes])
            return
        if not self.files:
            self.files.append(HostFile())
        base = self.files[0].append(buffer[start:end]) - start
        for spec, offset in table.entries:
            self.tensors[spec.name] = StoredTensor(spec=spec, file=0, offset=base + offset)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.spec.nbytes for tensor in self.tensors.values())

    def describe(self) -> StoredCheckpoint:
        """Return what other processes need in order to read it."""
        return StoredCheckpoint(
            files=tuple(StoredFile(path=file.path, in_memory=True) for file in self.files),
            layout=StoredLayout(tuple(self.tensors.values())),
            digests={name: digest for name, digest in self.digests.items() if name in self.tensors},
        )

    def overlaid(self, new: HostCopy, *, optional: Collection[str]) -> HostCopy | None:
        """Return this copy with the tensors of a partial update in their places; it shares the files of both.

        ``optional`` names tensors that follow others (a tied head): old ones do not belong beside a new original.
        ``None`` where ``new`` has names that this copy lacks: which of the old tensors those replace is not known.
        """
        if not new.tensors.keys() <= self.tensors.keys() | set(optional):
            return None
        kept = [
            tensor for name, tensor in self.tensors.items() if name not in new.tensors and name not in set(optional)
        ]
        used = sorted({tensor.file for tensor in kept})
        place = {index: position for position, index in enumerate(used)}
        tensors = [tensor.model_copy(update={"file": place[tensor.file]}) for tensor in kept]
        tensors += [t.model_copy(update={"file": t.file + len(used)}) for t in new.tensors.values()]
        names = {tensor.spec.name for tensor in kept}
        digests = {name: digest for name, digest in self.digests.items() if name in names}
        return HostCopy(
            files=[*(self.files[index] for index in used), *new.files],
            tensors={tensor.spec.name: tensor for tensor in tensors},
            digests={**digests, **new.digests},
        )

    def compacted(self) -> HostCopy:
        """Return a copy without the tensors that partial updates have replaced, if those take too much room."""
        held = sum(file.nbytes for file in self.files)
        if held <= _WASTE * max(self.nbytes, _ALIGNMENT * len(self.tensors)):
            return self
        fresh = HostCopy(digests=dict(self.digests))
        source = OpenCheckpoint(self.describe())
        for tensor in self.tensors.values():
            fresh.add(tensor.spec, source.read(tensor).reshape(-1).view(torch.uint8))
        source.close()
        return fresh


@dataclass
class _Incoming:
    """What an update that runs brings. ``restores``: it is one of the kept copies that lands again."""

    epoch: int
    weight_version: str
    copy: HostCopy | None
    partial: bool
    optional: frozenset[str]
    restores: CopyRole | None = None


class HostCopies:
    """All copies of a server; kept by its first worker. ``keep``: of the version served and of the one before.

    An update's copy takes its place when the shared record says that the update was committed, never before: a commit
    that fails at the last step leaves the kept copies as they were.
    """

    def __init__(self, *, keep: bool, budget: HostBudget) -> None:
        self.keep = keep
        self._budget = budget
        self._kept: dict[CopyRole, tuple[str, HostCopy]] = {}
        self._incoming: _Incoming | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are held."""
        return sum(file.nbytes for file in self._files())

    def _files(self) -> Iterable[HostFile]:
        copies = [copy for _, copy in self._kept.values()]
        if self._incoming is not None and self._incoming.copy is not None:
            copies.append(self._incoming.copy)
        return {id(file): file for copy in copies for file in copy.files}.values()

    def sizes(self) -> dict[CopyRole, tuple[str, int]]:
        """Return version and bytes of each kept copy."""
        return {role: (version, copy.nbytes) for role, (version, copy) in self._kept.items()}

    def kept(self, role: CopyRole) -> tuple[str, HostCopy]:
        """Return a kept copy and its version. Raises ``WeightPushError`` (``no_copy``) where there is none."""
        if role not in self._kept:
            raise no_copy(role)
        return self._kept[role]

    def check_room(self, nbytes: int) -> None:
        """Refuse what does not fit beside the copies that are kept.

        Raises:
            WeightPushError: ``staging_budget_exceeded``, with the numbers.
        """
        held = self.nbytes
        budget = self._budget.total(held)
        if held + nbytes <= budget:
            return
        limited = self._budget.limit_bytes is not None
        why = "--staging-budget-mb" if limited else "what this host has free, less a reserve"
        raise WeightPushError(
            ErrorCode.STAGING_BUDGET_EXCEEDED,
            f"the update needs {nbytes} bytes of host memory beside {held} bytes of kept copies; the budget is "
            f"{budget} bytes ({why}). Push in mode 'direct', raise --staging-budget-mb, or start without "
            "--keep-previous",
            details={"needed_bytes": nbytes, "kept_bytes": held, "budget_bytes": budget},
        )

    def relabel(self, weight_version: str) -> None:
        """Call the copy of what is served ``weight_version``, if it is kept."""
        if (served := self._kept.get(CopyRole.SERVED)) is not None:
            self._kept[CopyRole.SERVED] = (weight_version, served[1])

    def start_with(self, weight_version: str, copy: HostCopy) -> None:
        """Keep what the server was started on."""
        if self.keep:
            self._kept[CopyRole.SERVED] = (weight_version, copy)

    def expect(
        self,
        epoch: int,
        weight_version: str,
        copy: HostCopy | None,
        *,
        partial: bool = False,
        optional: Collection[str] = (),
        restores: CopyRole | None = None,
    ) -> None:
        """Note what update ``epoch`` brings, to be kept once it is committed; ``None``: nobody copies it."""
        self._incoming = _Incoming(epoch, weight_version, copy, partial, frozenset(optional), restores)

    def drop(self, epoch: int) -> None:
        """Forget what update ``epoch`` brought."""
        if self._incoming is not None and self._incoming.epoch == epoch:
            self._incoming = None

    def settle(self, committed_epoch: int) -> None:
        """Let the update committed as ``committed_epoch`` take its place; one that runs since is not touched."""
        incoming = self._incoming
        if incoming is None or incoming.epoch > committed_epoch:
            return
        self._incoming = None
        if incoming.epoch < committed_epoch:
            return
        if incoming.restores is CopyRole.SERVED:
            return
        if incoming.restores is CopyRole.PREVIOUS:
            self._kept = {CopyRole.SERVED: self._kept[CopyRole.PREVIOUS]}
            return
        served = self._kept.pop(CopyRole.SERVED, None)
        self._kept = {CopyRole.PREVIOUS: served} if served is not None else {}
        copy = self._whole(incoming, served[1] if served is not None else None)
        if copy is not None and self.keep:
            self._kept[CopyRole.SERVED] = (incoming.weight_version, copy.compacted())

    @staticmethod
    def _whole(incoming: _Incoming, base: HostCopy | None) -> HostCopy | None:
        if incoming.copy is None or not incoming.partial:
            return incoming.copy
        return base.overlaid(incoming.copy, optional=incoming.optional) if base is not None else None


def no_copy(role: CopyRole) -> WeightPushError:
    """Return the refusal of a rollback to weights of which there is no copy."""
    which = "the version served last" if role is CopyRole.SERVED else "the version before the one served"
    return WeightPushError(
        ErrorCode.NO_COPY,
        f"this server has no copy of {which}: push it, load it with POST /reload, or restart the server on it. A "
        "server that is started with --keep-previous keeps copies of what it serves and of what it served before",
        details={"role": role.value},
    )
