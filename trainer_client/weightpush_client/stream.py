"""The stream of one push: the next bucket is gathered and hashed while the one before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from weightpush_client.align import Outgoing
from weightpush_client.copies import Programs
from weightpush_client.gathering import AtOnce, Gatherer, OneByOne
from weightpush_client.sources import WeightSource
from weightpush_client.sources.resident import ResidentSource
from weightpush_protocol.digest import raw_digests
from weightpush_protocol.digest_text import TensorDigests
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest
from weightpush_protocol.messages import DigestKind
from weightpush_protocol.transports.cuda_memory import CudaBuffers, gpu_id
from weightpush_protocol.transports.shared_memory import SharedBuffers, ShownBuffers

#: Returns a buffer for the bucket of that number, once nobody reads what was there before.
Lend = Callable[[int], torch.Tensor]
#: Sends bucket ``number``: its bytes as a 1-d uint8 tensor, and the digests of its tensors, eight bytes each.
Deliver = Callable[[int, torch.Tensor, bytes], None]


@dataclass(slots=True)
class StreamSeconds:
    """Where the time of a stream went; see `weightpush_client.report.PhaseSeconds`."""

    gather: float = 0.0
    digest: float = 0.0
    send: float = 0.0
    wait: float = 0.0


class Buffers:
    """Two buffers that are kept from one push to the next: fresh memory costs more than filling it, pinned far more.

    They are private to the trainer or shared with the workers on its host.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._shared: ShownBuffers | None = None

    def take(self, count: int, nbytes: int, device: torch.device, *, pinned: bool) -> list[torch.Tensor]:
        """Return ``count`` 1-d uint8 tensors of at least ``nbytes`` bytes on ``device``, with whatever they hold."""

        def fits(kept: torch.Tensor) -> bool:
            # A device without an index is the current one.
            same = kept.device.type == device.type and device.index in {None, kept.device.index}
            return same and kept.numel() >= nbytes and kept.is_pinned() == pinned

        if len(self._kept) < count or not all(map(fits, self._kept)):
            self._kept = []
            if self._shared is not None and self._shared.tensor.device.type == device.type:
                self._drop_shared()
            # Inference tensors could not be written outside the caller's inference_mode.
            with torch.inference_mode(False):
                self._kept = [
                    torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(count)
                ]
        return self._kept[:count]

    def share(self, count: int, nbytes: int, gpu: torch.device | None = None) -> ShownBuffers:
        """Return memory with ``count`` buffers of at least ``nbytes`` bytes that workers on this host can read.

        It lies on the host, or on ``gpu``, which is that of all these workers.

        Raises:
            WeightPushError: ``transport_unavailable``: the system gives none.
        """
        where = torch.device("cpu") if gpu is None else gpu
        if self._kept and self._kept[0].device.type == where.type:
            self._kept = []
        if self._shared is None or not self._shared.holds(count, nbytes, gpu_id(where)):
            self._drop_shared()
            try:
                self._shared = SharedBuffers(count, nbytes) if gpu is None else CudaBuffers(count, nbytes, gpu)
            except OSError as error:
                raise WeightPushError(
                    ErrorCode.TRANSPORT_UNAVAILABLE,
                    f"no shared memory for {count} buffers of {nbytes} bytes on {where}: {error}; use 'gloo' or 'http'",
                    details={"transport": "shm", "exception": type(error).__name__},
                ) from error
        return self._shared

    @contextmanager
    def dropped_on_failure(self) -> Iterator[None]:
        """Give the memory back if the block fails: a transport that was cut off, or a worker, may still read it."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Give the memory back."""
        self._kept = []
        self._drop_shared()

    def _drop_shared(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None


class BucketStream:
    """Sends all buckets of ``manifest``, which describes ``outgoing`` in the same order.

    The source is read in the calling thread; ``deliver`` runs in one other thread, one bucket at a time. Two of
    ``buffers`` of the largest bucket on ``device`` are all the memory that it takes, or what ``lend`` returns.
    ``programs`` are the pusher's.
    ``interrupt`` must make a running ``deliver`` or ``lend`` raise soon; ``delivered`` is called in the calling thread
    after each bucket.
    """

    def __init__(
        self,
        source: WeightSource,
        outgoing: Sequence[Outgoing],
        manifest: Manifest,
        *,
        deliver: Deliver,
        interrupt: Callable[[], None],
        delivered: Callable[[int], None],
        digest: DigestKind,
        device: torch.device,
        buffers: Buffers,
        lend: Lend | None = None,
        programs: Programs | None = None,
    ) -> None:
        self._programs = programs or Programs()
        self._source = source
        self._outgoing = outgoing
        self._manifest = manifest
        self._deliver = deliver
        self._interrupt = interrupt
        self._delivered = delivered
        self._digest = digest
        self._device = device
        self._buffers = buffers
        self._lend = lend
        self._pending: Future[None] | None = None
        self.seconds = StreamSeconds()
        #: Of all tensors that were gathered so far, by the name under which they travel.
        self.digests = TensorDigests()

    @torch.no_grad()
    def run(self) -> None:
        """Send everything; return when the last bucket was delivered.

        Raises:
            WeightPushError: ``weights_rejected``: a tensor is not what the manifest declares.
            BaseException: whatever source, ``deliver`` or ``delivered`` raise.
        """
        buffers = self._take_buffers() if self._lend is None else []
        start = perf_counter()
        gatherer = self._gatherer()
        self.seconds.gather += perf_counter() - start
        with ThreadPoolExecutor(1, "weightpush-send") as executor:
            try:
                for number, bucket in enumerate(self._manifest.buckets):
                    if self._lend is not None:
                        buffer = self._borrow(self._lend, number)
                    else:
                        # Bucket number-2 used this buffer, and was delivered before number-1 was handed over.
                        buffer = buffers[number % len(buffers)][: bucket.nbytes]
                    digests = self._gather(number, buffer, gatherer)
                    self._await_delivery(number - 1)
                    self._pending = executor.submit(self._send, number, buffer, digests)
                self._await_delivery(len(self._manifest.buckets) - 1)
            except BaseException:
                self._interrupt()
                raise

    def _borrow(self, lend: Lend, number: int) -> torch.Tensor:
        start = perf_counter()
        try:
            return lend(number)
        except WeightPushError:
            # Why the bucket before could not be delivered tells more.
            if self._pending is not None and self._pending.done():
                self._pending.result()
            raise
        finally:
            self.seconds.wait += perf_counter() - start

    def _take_buffers(self) -> list[torch.Tensor]:
        size = max((bucket.nbytes for bucket in self._manifest.buckets), default=0)
        pinned = self._device.type == "cpu" and self._source.device.type == "cuda"
        return self._buffers.take(min(2, len(self._manifest.buckets)), size, self._device, pinned=pinned)

    def _gatherer(self) -> Gatherer:
        if isinstance(self._source, ResidentSource) and self._device.type == "cpu":
            program = self._programs.of(self._source, self._outgoing, self._manifest)
            return AtOnce(program, self._source, self._digest, self._hash, self._check)
        return OneByOne(self._source, self._outgoing, self._manifest, self._digest, self._hash, self._check)

    def _gather(self, number: int, buffer: torch.Tensor, gatherer: Gatherer) -> bytes:
        """Fill ``buffer``; return the digests of its tensors as they lie there, none where the update has none."""
        start, hashing = perf_counter(), self.seconds.digest
        raw = gatherer.fill(number, buffer)
        self.seconds.gather += perf_counter() - start - (self.seconds.digest - hashing)
        if raw:
            self.digests.add(self._manifest.table(number).names, raw)
        return raw

    def _hash(self, buffer: torch.Tensor, places: Sequence[tuple[int, int]]) -> bytes:
        start = perf_counter()
        raw = raw_digests(buffer, places)
        self.seconds.digest += perf_counter() - start
        return raw

    def _check(self) -> None:
        """Raise what the bucket before failed with, if it did."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def _send(self, number: int, buffer: torch.Tensor, digests: bytes) -> None:
        start = perf_counter()
        self._deliver(number, buffer, digests)
        self.seconds.send += perf_counter() - start

    def _await_delivery(self, number: int) -> None:
        if self._pending is None:
            return
        start = perf_counter()
        self._pending.result()
        self._pending = None
        self.seconds.wait += perf_counter() - start
        self._delivered(number)
