"""``POST /reload``: a checkpoint on the server's disk goes through the machinery of a push."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import torch

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest
from weightpush_protocol.messages import BeginRequest, DigestKind, DiskReloadRequest, FinishAnswer, UpdateMode
from weightpush_protocol.state import ServerState
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
        answer = self._life.answer(update_id)
        if answer is not None:
            return answer
        directory = await asyncio.to_thread(resolve_directory, request.path, self._roots)
        digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()

        async def work() -> FinishAnswer:
            files = _Files(directory, self._roots)
            try:
                return await self._load(update_id, digest, request, files)
            finally:
                files.close()

        # A task that outlives its caller: the files stay open until the update has ended.
        return await self._life.once(("disk", update_id, digest), work)

    async def _load(self, update_id: str, digest: str, request: DiskReloadRequest, files: _Files) -> FinishAnswer:
        limit_s = request.deadlines.commit_s

        def make(control: ControlRecord) -> UpdateRecord:
            # Where nothing is served meanwhile, there is nothing to be gained by staging.
            mode = request.mode if control.state is ServerState.SERVING else UpdateMode.DIRECT
            return UpdateRecord(
                update_id=update_id,
                epoch=control.epoch,
                request_digest=digest,
                mode=mode,
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

    def __init__(self, directory: Path, roots: Sequence[Path]) -> None:
        self._directory = directory
        self._roots = roots
        self._closed = threading.Event()
        self._working = threading.Lock()
        self._disk: DiskCheckpoint | None = None
        self._copy: HostCopy | None = None

    def open(self) -> StoredCheckpoint:
        """Open the files and check them; return where their tensors are."""
        with self._working:
            self._disk = DiskCheckpoint(self._directory, self._roots)
            stored = self._disk.stored
        self._close_if_told()
        return stored

    def copy(self) -> StoredCheckpoint:
        """Read all tensors into memory, with their digests; return where they are now.

        Raises:
            WeightPushError: ``files_changed``, ``landing_failed`` where a file cannot be read.
        """
        try:
            with self._working:
                assert self._disk is not None
                self._copy = HostCopy()
                try:
                    self._fill(self._copy, self._disk.stored)
                except WeightPushError:
                    self._disk.check_unchanged()  # Says better why a file ended too early.
                    raise
                self._disk.check_unchanged()
                self._disk.close()
                self._disk = None
                return self._copy.describe()
        finally:
            self._close_if_told()

    def _fill(self, copy: HostCopy, stored: StoredCheckpoint) -> None:
        source = OpenCheckpoint(stored)
        try:
            for tensor in stored.tensors:
                if self._closed.is_set():
                    raise WeightPushError(ErrorCode.ABORTED, "the update was given up while its files were read")
                raw = source.read(tensor)
                copy.digests[tensor.spec.name] = tensor_digest(raw)
                copy.add(tensor.spec, raw.reshape(-1).view(torch.uint8))
        finally:
            source.close()

    def check(self) -> None:
        """Raise ``files_changed`` if what lands is still read from disk and is not what was opened."""
        with self._working:
            if self._disk is not None:
                self._disk.check_unchanged()
        self._close_if_told()

    def close(self) -> None:
        """Let go of files and memory, now or when the thread that uses them is done with its tensor."""
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


def _as_begin(request: DiskReloadRequest, stored: StoredCheckpoint) -> str:
    """Return the ``begin`` of a push that would bring the same tensors, for the checks that all updates share."""
    return BeginRequest(
        weight_version=request.weight_version,
        manifest=Manifest(tensors=stored.specs),
        mode=UpdateMode.STAGED,
        transport=TransportConfig(name="http"),
    ).model_dump_json()
