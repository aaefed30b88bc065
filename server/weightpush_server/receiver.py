"""The worker's side of the data plane: a thread that receives and checks the buckets of one update, and lands them.

Where buckets come in copies, a second thread lands them while the next bucket arrives: two buffers take turns.
All this is in threads of its own because an RPC to a worker is serial with everything else that the engine asks of it:
the RPC that announces a bucket only puts it on a queue. Progress and the first error go to the shared record.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from weightpush_protocol.digest import raw_digests
from weightpush_protocol.digest_text import TensorDigests, raw_of, texts
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import BucketTable, TensorSpec
from weightpush_protocol.messages import BeginRequest, DigestKind, UpdateMode
from weightpush_protocol.transports.base import BorrowingReceiver, Receiver
from weightpush_protocol.transports.endpoints import make_receiver
from weightpush_protocol.transports.frames import frame_bytes, read_digests
from weightpush_protocol.transports.http import digests_from_metadata, parse_header
from weightpush_server.hostcopy import HostCopy
from weightpush_server.progress import ProgressWriter
from weightpush_server.reload import ReloadSession
from weightpush_server.stored import view_tensor
from weightpush_server.timing import PartSeconds

#: How often a waiting worker looks whether its trainer still lives, in seconds.
_LOOK_S: Final = 0.25
#: How long the trainer's own reason for hanging up is waited for, in seconds.
_REASON_S: Final = 0.5


@dataclass(frozen=True)
class _Job:
    bucket: int
    digests: dict[str, str] = field(default_factory=dict)
    #: File that holds the bucket (``http`` transport); ``None``: it comes over the collective transport.
    spool: Path | None = None


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Bytes, what lies where in them, and the digests that came along, eight bytes each; none where none are used."""

    buffer: torch.Tensor
    table: BucketTable
    digests: bytes


class UpdateReceiver:
    """Receives one update on one worker, and lands it unless it is staged.

    ``connect`` brings up the data plane, ``attach`` says where bytes land, ``expect`` announces buckets, ``stop`` ends
    it from any thread. After the first error nothing more is received or landed. ``copy`` gets every tensor, too; of a
    staged update all workers take part, but only the one that has the copy looks at the bytes.
    """

    def __init__(
        self,
        begin: BeginRequest,
        *,
        epoch: int,
        rank: int,
        device: torch.device,
        progress: ProgressWriter,
        copy: HostCopy | None = None,
    ) -> None:
        self.begin = begin
        self._copy = copy
        self._staged = begin.mode is UpdateMode.STAGED
        self.epoch = epoch
        self._rank = rank
        self._device = device
        self._progress = progress
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._session: ReloadSession | None = None
        self._buffers: list[torch.Tensor] = []
        self._received = 0
        self._landing: Future[None] | None = None
        self._failing = threading.Lock()
        self._failed = False
        #: What came as bodies so far: there the sender may cut as it likes.
        self._landed: set[str] = set()
        self.seconds = PartSeconds()
        self._arrived = 0
        #: Digests of the tensors that arrived, as far as the update has any.
        self.digests = TensorDigests()
        self._stopped = threading.Event()
        self._transport: Receiver | None = None
        if begin.transport.name != "http":
            plane_rank = begin.transport.rank_offset + rank
            # Gloo and shared buffers are host memory; landing then copies to the device.
            self._wire_device = device if begin.transport.name == "nccl" else torch.device("cpu")
            self._transport = make_receiver(begin.transport, rank=plane_rank, device=self._wire_device)
        self._thread = threading.Thread(target=self._run, name=f"weightpush-receive-{epoch}", daemon=True)

    # Called from the worker's main thread

    def connect(self) -> None:
        """Start the thread; it joins the rendezvous at once and says so in the shared record."""
        self._thread.start()

    def attach(self, session: ReloadSession) -> None:
        """Land what comes from now on into ``session``."""
        self._session = session

    @property
    def session(self) -> ReloadSession:
        """The open model. Raises ``WeightPushError`` (``internal``) before ``attach``."""
        if self._session is None:
            raise WeightPushError(ErrorCode.INTERNAL, "a bucket was announced before the model was opened")
        return self._session

    def expect(self, bucket: int, digests: dict[str, str], spool: Path | None = None) -> None:
        """Announce the next bucket. Returns at once. Over shm its ``digests`` come with it."""
        self._jobs.put(_Job(bucket, digests, spool))

    @property
    def alive(self) -> bool:
        """Whether the thread may still write: one tensor's copy cannot be interrupted."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 3.0) -> None:
        """End the thread and its transport, soon: see ``alive``. Safe to call twice and from any thread."""
        self._stopped.set()
        self._jobs.put(None)
        if self._transport is not None:
            self._transport.abort()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # The thread

    def _run(self) -> None:
        with ThreadPoolExecutor(1, f"weightpush-land-{self.epoch}") as second, self._telling() as where:
            try:
                if self._transport is not None:
                    self._transport.open(self.begin.deadlines.rendezvous_s)
                self._progress.update(epoch=self.epoch, connected=True)
                while (job := self._next_job()) is not None:
                    where["bucket"] = job.bucket
                    self._take(job, second)
            finally:
                if self._transport is not None:
                    self._transport.close()

    @contextmanager
    def _telling(self) -> Iterator[dict[str, object]]:
        """Put what goes wrong in the block on record, with what the block adds to the dict that it gets."""
        where: dict[str, object] = {"worker_rank": self._rank}
        try:
            yield where
        except WeightPushError as error:
            error.details.update(where)
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - whatever broke this thread must reach the trainer by name
            details = {**where, "exception": type(error).__name__}
            message = f"worker {self._rank} could not take a bucket: {type(error).__name__}: {error}"
            self._fail(WeightPushError(ErrorCode.LANDING_FAILED, message, details=details))

    def _next_job(self) -> _Job | None:
        """Wait for the next bucket, or ``None`` at the end; meanwhile look whether the trainer still lives."""
        while True:
            try:
                job = self._jobs.get(timeout=_LOOK_S)
            except queue.Empty:
                # Once all tensors are there, the trainer may close its end.
                if self._transport is not None and self._arrived < len(self.begin.manifest.tensors):
                    self._transport.check()
                continue
            return None if self._stopped.is_set() else job

    def _fail(self, error: WeightPushError) -> None:
        if error.code is ErrorCode.TRANSPORT_FAILED and isinstance(self._transport, BorrowingReceiver):
            # A trainer that gives up hangs up first, and then says why: that ends this thread, and tells more.
            self._stopped.wait(_REASON_S)
        with self._failing:
            if self._stopped.is_set() or self._failed:
                return  # Ended on purpose, or by the other thread; the reason is already on record.
            self._failed = True
        if self._transport is not None:
            self._transport.abort()
        self._progress.update(epoch=self.epoch, error=error.body().error)

    def _take(self, job: _Job, second: Executor) -> None:
        """Receive a bucket and land it, or leave that to the ``second`` thread once that has landed the one before."""
        with self.seconds.booking("receive"):
            bucket = self._read_spool(job) if job.spool is not None else self._receive(job)
        if job.spool is not None or isinstance(self._transport, BorrowingReceiver):
            self._land(job, bucket)
            return
        if self._landing is not None:
            self._landing.result()
        if not self._failed:
            self._landing = second.submit(self._land_and_tell, job, bucket)

    def _land_and_tell(self, job: _Job, bucket: _Bucket) -> None:
        with self._telling() as where:
            where["bucket"] = job.bucket
            self._land(job, bucket)

    def _land(self, job: _Job, bucket: _Bucket) -> None:
        buffer, table = bucket.buffer, bucket.table
        with self.seconds.booking("digest"):
            self._check_digests(bucket)
        if self._copy is not None:
            with self.seconds.booking("copy"):
                self._copy.add_bucket(table, buffer)
        if self._staged:
            self._give_back(job)
        else:
            with self.seconds.booking("land"):
                self._write(job, bucket)
        self._arrived += len(table.names)
        if job.spool is not None:
            self._landed.update(table.names)
        self._progress.advance(
            epoch=self.epoch,
            buckets=1,
            tensors=len(table.names),
            bytes=table.places.nbytes,
        )

    def _give_back(self, job: _Job) -> None:
        """Let the bytes of a bucket be overwritten. The trainer's next ones then come while this one is processed."""
        if self._device.type == "cuda":
            # Copies are queued; the buffer is reused and progress is told only when they are done.
            torch.cuda.synchronize(self._device)
        if isinstance(self._transport, BorrowingReceiver):
            self._transport.give_back(job.bucket)

    def _write(self, job: _Job, bucket: _Bucket) -> None:
        buffer, entries = bucket.buffer, bucket.table.entries
        if job.spool is None:
            self.session.land_bucket(
                buffer,
                self.begin.manifest.buckets[job.bucket],
                entries,
                check_wanted=self._check_wanted,
                read_only=isinstance(self._transport, BorrowingReceiver),
                let_go=lambda: self._give_back(job),
            )
            return
        self.session.land(self._until_stopped(buffer, entries))
        self._give_back(job)

    def _until_stopped(
        self, buffer: torch.Tensor, entries: Sequence[tuple[TensorSpec, int]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a bucket's tensors for landing, but none any more once the update was given up."""
        for spec, offset in entries:
            self._check_wanted()
            yield spec.name, view_tensor(buffer, offset, spec)

    def _check_wanted(self) -> None:
        if self._stopped.is_set() or self._failed:
            raise WeightPushError(ErrorCode.ABORTED, "the update was given up while a bucket was landing")

    def _receive(self, job: _Job) -> _Bucket:
        assert self._transport is not None  # A collective job is only made for a collective transport.
        manifest = self.begin.manifest
        nbytes, timeout_s = manifest.buckets[job.bucket].nbytes, self.begin.deadlines.bucket_s
        table = manifest.table(job.bucket)
        if isinstance(self._transport, BorrowingReceiver):
            # It was announced before the trainer began to gather it, which may take as long as its lease.
            timeout_s = max(timeout_s, self.begin.deadlines.lease_s)
            frame = self._transport.borrow(job.bucket, frame_bytes(nbytes, len(table.names)), timeout_s)
            return _Bucket(frame[:nbytes], table, read_digests(frame, nbytes, len(table.names)))
        turn = self._received % 2
        if turn == len(self._buffers):
            largest = max(bucket.nbytes for bucket in manifest.buckets)
            self._buffers.append(torch.empty(largest, dtype=torch.uint8, device=self._wire_device))
        # The bucket before the last one has landed: see `_take`.
        buffer = self._buffers[turn][:nbytes]
        self._received += 1
        self._transport.receive(job.bucket, buffer, timeout_s)
        return _Bucket(buffer, table, self._raw(table, job.digests))

    def _read_spool(self, job: _Job) -> _Bucket:
        assert job.spool is not None
        size = job.spool.stat().st_size
        raw = torch.from_file(str(job.spool), shared=True, size=size, dtype=torch.uint8)
        header = parse_header(memoryview(raw.numpy().data), total_bytes=size)
        number, digests = digests_from_metadata(header.metadata)
        if number is not None and number != job.bucket:
            message = f"bucket {number} came where bucket {job.bucket} was expected"
            raise WeightPushError(ErrorCode.BUCKET_OUT_OF_ORDER, message)
        self._check_entries(job.bucket, [spec for spec, _ in header.entries])
        table = BucketTable.of([(spec, header.data_start + offset) for spec, offset in header.entries])
        buffer = raw if self._device.type == "cpu" or self._staged else raw.to(self._device)
        return _Bucket(buffer, table, self._raw(table, digests))

    def _check_entries(self, number: int, specs: list[TensorSpec]) -> None:
        """Compare what a body holds with what the manifest promised."""
        manifest = self.begin.manifest
        promised = {spec.name: spec for spec in self._promised(number)}
        for spec in specs:
            wanted = promised.pop(spec.name, None)
            if spec.name in self._landed:
                raise _mismatch(ErrorCode.BUCKET_OUT_OF_ORDER, number, spec.name, "has already landed")
            if wanted is None:
                known = any(spec.name == listed.name for listed in manifest.tensors)
                why = "belongs into another bucket" if known else "is not in the manifest that `begin` brought"
                raise _mismatch(ErrorCode.BUCKET_MISMATCH, number, spec.name, why)
            if (wanted.dtype, wanted.shape) != (spec.dtype, spec.shape):
                text = f"is {spec.dtype} {list(spec.shape)}, the manifest says {wanted.dtype} {list(wanted.shape)}"
                raise _mismatch(ErrorCode.BUCKET_MISMATCH, number, spec.name, text)
        if manifest.buckets and promised:
            raise _mismatch(ErrorCode.BUCKET_MISMATCH, number, next(iter(promised)), "is missing from it")

    def _promised(self, number: int) -> Iterator[TensorSpec]:
        manifest = self.begin.manifest
        if not manifest.buckets:  # Bodies of the sender's own cut.
            yield from manifest.tensors
            return
        for spec, _ in manifest.bucket_tensors(number):
            yield spec

    def _raw(self, table: BucketTable, digests: Mapping[str, str]) -> bytes:
        """Return the digests of a bucket's tensors as bytes, which came by name."""
        if self.begin.digest is DigestKind.NONE:
            return b""
        missing = next((name for name in table.names if name not in digests), None)
        if missing is not None:
            message = f"no digest came with {missing!r}; send digests, or begin with digest 'none'"
            raise WeightPushError(ErrorCode.DIGEST_MISMATCH, message, details={"tensor": missing})
        return raw_of([digests[name] for name in table.names])

    def _check_digests(self, bucket: _Bucket) -> None:
        if self.begin.digest is DigestKind.NONE:
            return
        table, expected = bucket.table, bucket.digests
        # Only one worker's bytes of a staged update ever land.
        if self._copy is not None or not self._staged:
            found = raw_digests(bucket.buffer, table.places)
            if found != expected:
                for name, given, wanted in zip(table.names, texts(found), texts(expected), strict=True):
                    if given != wanted:
                        raise _changed(name, given, wanted)
        self.digests.add(table.names, expected)


def _changed(name: str, found: str, expected: str) -> WeightPushError:
    message = f"{name!r} arrived changed: digest {found}, the trainer says {expected}"
    details = {"tensor": name, "expected": expected, "given": found}
    return WeightPushError(ErrorCode.DIGEST_MISMATCH, message, details=details)


def _mismatch(code: ErrorCode, bucket: int, name: str, what: str) -> WeightPushError:
    return WeightPushError(code, f"bucket {bucket}: {name!r} {what}", details={"tensor": name, "bucket": bucket})
