"""The stream of one push: the next bucket is gathered and hashed while the one before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch

from weightpush_client.align import Outgoing
from weightpush_client.sources import WeightSource
from weightpush_protocol.digest import bucket_digests
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest
from weightpush_protocol.messages import DigestKind
from weightpush_protocol.transports.cuda_memory import CudaBuffers, gpu_id
from weightpush_protocol.transports.shared_memory import SharedBuffers, ShownBuffers

#: Returns a buffer for the bucket of that number, once nobody reads what was there before.
Lend = Callable[[int], torch.Tensor]
#: Sends bucket ``number``: its bytes as a 1-d uint8 tensor, and the digests of its tensors by name.
Deliver = Callable[[int, torch.Tensor, dict[str, str]], None]
#: So much is hashed while it is still in the processor's cache, of the second level.
_CACHED_BYTES: Final = 512 * 1024


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


class _Digests:
    """Digests of the tensors in ``buffer``, taken of several at a time: a call costs more than a small tensor."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._waiting: list[tuple[str, tuple[int, int]]] = []
        self._nbytes = 0
        self.taken: dict[str, str] = {}

    def add(self, name: str, offset: int, nbytes: int) -> int:
        """Note a tensor that is there now; return how many bytes wait in memory that the processor's cache holds."""
        self._waiting.append((name, (offset, nbytes)))
        self._nbytes += nbytes
        # A GPU copies later than it is told to.
        return 0 if self._buffer.is_cuda else self._nbytes

    def take(self) -> None:
        """Take the digests of those that wait."""
        found = bucket_digests(self._buffer, [place for _, place in self._waiting])
        self.taken.update(zip((name for name, _ in self._waiting), found, strict=True))
        self._waiting, self._nbytes = [], 0


class BucketStream:
    """Sends all buckets of ``manifest``, which describes ``outgoing`` in the same order.

    The source is read in the calling thread; ``deliver`` runs in one other thread, one bucket at a time. Two of
    ``buffers`` of the largest bucket on ``device`` are all the memory that it takes, or what ``lend`` returns.
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
    ) -> None:
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
        self.digests: dict[str, str] = {}

    @torch.no_grad()
    def run(self) -> None:
        """Send everything; return when the last bucket was delivered.

        Raises:
            WeightPushError: ``weights_rejected``: a tensor is not what the manifest declares.
            BaseException: whatever source, ``deliver`` or ``delivered`` raise.
        """
        buffers = self._take_buffers() if self._lend is None else []
        tensors = self._source.tensors(
            [item.held.name for item in self._outgoing],
            {item.held.name: item.sent.torch_dtype for item in self._outgoing},
        )
        with ThreadPoolExecutor(1, "weightpush-send") as executor:
            try:
                for number, bucket in enumerate(self._manifest.buckets):
                    if self._lend is not None:
                        buffer = self._borrow(self._lend, number)
                    else:
                        # Bucket number-2 used this buffer, and was delivered before number-1 was handed over.
                        buffer = buffers[number % len(buffers)][: bucket.nbytes]
                    digests = self._gather(number, buffer, tensors)
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

    def _gather(self, number: int, buffer: torch.Tensor, tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, str]:
        """Fill ``buffer``; return the digests of its tensors as they lie there, none where the update has none."""
        start, hashing = perf_counter(), self.seconds.digest
        bucket = self._manifest.buckets[number]
        digests = _Digests(buffer) if self._digest is not DigestKind.NONE else None
        # A bucket is a contiguous run of the manifest, laid out in another order.
        for index, offset in sorted(zip(bucket.tensors, bucket.offsets, strict=True)):
            tensor = self._next_tensor(index, tensors)
            spec = self._manifest.tensors[index]
            nbytes = spec.nbytes
            if nbytes:
                view = buffer[offset : offset + nbytes].view(spec.torch_dtype).view(spec.shape)
                # Casts, gathers strided views and crosses devices in one pass; equal to tensor.to(dtype).
                view.copy_(tensor)
            if digests is not None and digests.add(spec.name, offset, nbytes) >= _CACHED_BYTES:
                self._take(digests)
            if self._pending is not None and self._pending.done():
                self._pending.result()
        if buffer.is_cuda:
            # The sending thread has a stream of its own.
            torch.cuda.current_stream(buffer.device).synchronize()
        if digests is not None:
            self._take(digests)
            self.digests.update(digests.taken)
        self.seconds.gather += perf_counter() - start - (self.seconds.digest - hashing)
        if digests is None:
            return {}
        names = [self._manifest.tensors[index].name for index in bucket.tensors]
        return {name: digests.taken[name] for name in names}

    def _take(self, digests: _Digests) -> None:
        start = perf_counter()
        digests.take()
        self.seconds.digest += perf_counter() - start

    def _next_tensor(self, index: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
        held, sent = self._outgoing[index].held, self._outgoing[index].sent
        where = f"tensor {index + 1} of {len(self._outgoing)}"
        try:
            name, tensor = next(tensors)
        except StopIteration:
            raise _diverged(f"the source ended before {where}, {held.name!r}", held.name) from None
        # It may have been cast on the way already.
        dtype_fits = tensor.dtype in {held.torch_dtype, sent.torch_dtype}
        if (name, tuple(tensor.shape)) != (held.name, held.shape) or not dtype_fits:
            raise _diverged(
                f"{where} changed since the push began: declared {held.name!r} {held.dtype} {list(held.shape)}, "
                f"found {name!r} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}",
                held.name,
            )
        return tensor

    def _send(self, number: int, buffer: torch.Tensor, digests: dict[str, str]) -> None:
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


def _diverged(message: str, name: str) -> WeightPushError:
    return WeightPushError(ErrorCode.WEIGHTS_REJECTED, message, details={"tensor": name})
