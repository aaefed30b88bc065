"""``POST /reload``: a checkpoint on the server's disk goes through the machinery of a push."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from weightpush_protocol.digest import raw_digests
from weightpush_protocol.digest_text import texts
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import NAMED_OFFENDERS, Manifest
from weightpush_protocol.messages import BeginRequest, DigestKind, DiskReloadRequest, FinishAnswer, UpdateMode
from weightpush_protocol.transports.base import TransportConfig
from weightpush_server.disk import DiskCheckpoint, resolve_directory
from weightpush_server.engine import swallow
from weightpush_server.hostcopy import HostCopy
from weightpush_server.lifecycle import UpdateLifecycle
from weightpush_server.records import FROM_DISK, ControlRecord, UpdateRecord
from weightpush_server.shared_state import SharedState
from weightpush_server.stored import OpenCheckpoint, StoredCheckpoint
from weightpush_server.stored_updates import StoredUpdates

#: How often the event loop looks whether an update whose files are being read is still wanted, in seconds.
_LOOK_S: Final = 0.05

_T = TypeVar("_T")


class DiskReloads:
    """Loads checkpoints from below the allowed directories ``roots``, which are resolved."""

    def __init__(
        self, roots: Sequence[Path], shared: SharedState, lifecycle: UpdateLifecycle, updates: StoredUpdates
    ) -> None:
        self._roots = roots
        self._shared = shared
        self._life = lifecycle
        self._updates = updates

    async def load(self, request: DiskReloadRequest) -> FinishAnswer:
        """Carry out a whole update; repeated with the same id and body, it is the same update.

        Raises:
            WeightPushError: a refusal, of which a path's own leave no trace in the status, or why the update failed.
        """
        update_id = request.update_id or uuid.uuid4().hex
        # Off the event loop: there may be hundreds of thousands of digests.
        body = await asyncio.to_thread(request.model_dump_json)
        digest = hashlib.sha256(body.encode()).hexdigest()
        answer = self._life.answer_again(update_id, digest)
        if answer is not None:
            return answer
        directory = await asyncio.to_thread(resolve_directory, request.path, self._roots)

        async def work() -> FinishAnswer:
            files = _Files(directory, self._roots, request.digests)
            try:
                return await self._load(update_id, digest, request, files)
            finally:
                files.close()

        # A task that outlives its caller: the files stay open until the update has ended.
        return await self._life.once(("disk", update_id, digest), work)

    async def _load(self, update_id: str, digest: str, request: DiskReloadRequest, files: _Files) -> FinishAnswer:
        limit_s = request.deadlines.commit_s

        def make(control: ControlRecord) -> UpdateRecord:
            return UpdateRecord(
                update_id=update_id,
                epoch=control.epoch,
                request_digest=digest,
                mode=control.mode_for(request.mode),
                origin=control.state,
                weight_version=request.weight_version,
                transport=FROM_DISK,
                in_flight=request.in_flight,
                digest=DigestKind.NONE,
                deadlines=request.deadlines,
            )

        async def find(update: UpdateRecord) -> StoredCheckpoint:
            deadline = time.monotonic() + limit_s
            stored = await self._in_thread(update_id, deadline, files.open)
            if update.mode is UpdateMode.DIRECT:
                if request.digests:
                    await self._in_thread(update_id, deadline, files.verify)
                return stored
            # What does not fit this model, or the host's memory, is not worth reading.
            await self._life.rpc(update_id, limit_s, "weightpush_check", update.epoch, _as_begin(request, stored))
            return await self._in_thread(update_id, deadline, files.copy)

        async def check() -> None:
            await self._in_thread(update_id, time.monotonic() + limit_s, files.check)

        # What is read into memory first is checked then, and from there on the disk may change.
        return await self._updates.run(update_id, digest, make, find, before_write=check, after_landing=check)

    async def _in_thread(self, update_id: str, deadline: float, work: Callable[[], _T]) -> _T:
        """Let a thread read files, but wait no longer than until ``deadline``, or than the update lasts."""
        reading = asyncio.ensure_future(asyncio.to_thread(work))
        reading.add_done_callback(swallow)
        while not reading.done():
            await asyncio.wait({reading}, timeout=_LOOK_S)
            if not reading.done():
                self._shared.control().active(update_id)
                if time.monotonic() >= deadline:
                    raise WeightPushError(
                        ErrorCode.DEADLINE_EXCEEDED,
                        "the checkpoint's files were not read within commit_s: the disk is slow, or does not answer",
                    )
        return reading.result()


class _Files:
    """The checkpoint of one update. Its work runs in threads, one call at a time; ``close`` may come at any moment."""

    def __init__(self, directory: Path, roots: Sequence[Path], expected: Mapping[str, str]) -> None:
        self._directory = directory
        self._roots = roots
        self._expected = expected
        self._closed = threading.Event()
        self._working = threading.Lock()
        self._disk: DiskCheckpoint | None = None
        self._copy: HostCopy | None = None

    def open(self) -> StoredCheckpoint:
        """Open the files and check them; return where their tensors are."""
        try:
            with self._working:
                self._disk = DiskCheckpoint(self._directory, self._roots)
                check_names(self._disk.stored, self._expected)
                return self._disk.stored
        finally:
            self._close_if_told()

    def copy(self) -> StoredCheckpoint:
        """Read all tensors into memory, with their digests; return where they are now.

        Raises:
            WeightPushError: ``files_changed``, ``digest_mismatch``, ``landing_failed`` where a file cannot be read.
        """
        try:
            with self._working:
                self._copy = HostCopy()
                self._read(self._copy)
                assert self._disk is not None
                self._disk.close()
                self._disk = None
                return self._copy.describe()
        finally:
            self._close_if_told()

    def verify(self) -> None:
        """Read all tensors and compare them with what they must be; raises as `copy` does."""
        try:
            with self._working:
                self._read(None)
        finally:
            self._close_if_told()

    def _read(self, copy: HostCopy | None) -> None:
        assert self._disk is not None
        source: OpenCheckpoint | None = None
        try:
            source = OpenCheckpoint(self._disk.stored)
            for piece, buffer in source.pieces():
                if self._closed.is_set():
                    raise WeightPushError(ErrorCode.ABORTED, "the update was given up while its files were read")
                digests = texts(raw_digests(buffer, piece.table.places))
                for name, digest in zip(piece.table.names, digests, strict=True):
                    check_digest(name, digest, self._expected)
                if copy is not None:
                    copy.digests.update(zip(piece.table.names, digests, strict=True))
                    copy.add_bucket(piece.table, buffer)
        except WeightPushError:
            self._disk.check_unchanged()  # Says better why a file has ended too early, or is another one.
            raise
        finally:
            if source is not None:
                source.close()
        self._disk.check_unchanged()

    def check(self) -> None:
        """Raise ``files_changed`` if what lands is still read from disk and is not what was opened."""
        with self._working:
            if self._disk is not None:
                self._disk.check_unchanged()
        self._close_if_told()

    def close(self) -> None:
        """Let go of files and memory, now or when the thread that uses them is done with its piece."""
        self._closed.set()
        self._close_if_told()

    def _close_if_told(self) -> None:
        if self._closed.is_set() and self._working.acquire(blocking=False):
            try:
                if self._disk is not None:
                    self._disk.close()
                if self._copy is not None:
                    for file in self._copy.files:
                        file.close()
                self._disk = self._copy = None
            finally:
                self._working.release()


def check_names(stored: StoredCheckpoint, expected: Mapping[str, str]) -> None:
    """Refuse files that lack a tensor of which the digest is ``expected``.

    Raises:
        WeightPushError: ``checkpoint_damaged``, naming the first.
    """
    missing = sorted(expected.keys() - {tensor.spec.name for tensor in stored.tensors})
    if missing:
        raise WeightPushError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"the files lack {missing[0]!r}, and {len(missing) - 1} more of the tensors whose digests came with the "
            "request: is this the directory, and is it wholly written?",
            details={"missing": missing[:NAMED_OFFENDERS], "total": len(missing)},
        )


def check_digest(name: str, found: str, expected: Mapping[str, str]) -> None:
    """Refuse a tensor that is not what it must be; one of which no digest came may be anything.

    Raises:
        WeightPushError: ``digest_mismatch``, naming it.
    """
    wanted = expected.get(name, found)
    if found != wanted:
        raise WeightPushError(
            ErrorCode.DIGEST_MISMATCH,
            f"{name!r} in the files has digest {found}, the request says {wanted}: the directory holds another "
            "checkpoint, or is not wholly written; nothing was changed",
            details={"tensor": name, "expected": wanted, "given": found},
        )


def _as_begin(request: DiskReloadRequest, stored: StoredCheckpoint) -> str:
    """Return the ``begin`` of a push that would bring the same tensors, for the checks that all updates share."""
    return BeginRequest(
        weight_version=request.weight_version,
        manifest=Manifest(tensors=stored.specs),
        mode=UpdateMode.STAGED,
        transport=TransportConfig(name="http"),
    ).model_dump_json()
