"""A worker's part in a trainer's broadcasts: a thread that joins its group and takes whatever is sent there.

Everybody in the group must take part in every broadcast, else all others wait. So what is refused is received all the
same, and thrown away: the trainer gets its answer instead of being stuck in a collective.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, ErrorDetail, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.compat.messages import InitInfo
from weightpush_server.compat.nccl import Communicator
from weightpush_server.compat.packing import Chunk, cut_chunks
from weightpush_server.hostcopy import HostCopy
from weightpush_server.progress import ProgressWriter
from weightpush_server.stored import view_tensor

#: Joins the group: settings, rank, device, seconds.
Open = Callable[..., Communicator]
_STOP_S: Final = 3.0
#: Dtypes whose values mean the same without a scale.
_CAST: Final = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass
class Collection:
    """What one round has brought to this worker. ``copy``: where bytes are kept; the server's first worker has it.

    ``dtypes``: those of the checkpoint that the server expects, by name. A trainer that computes in another floating
    dtype sends that, and vLLM would cast it while loading; the result must be that of a cold start on the cast
    checkpoint, so it is cast here.
    """

    epoch: int
    copy: HostCopy | None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    specs: dict[str, TensorSpec] = field(default_factory=dict)

    def kept_as(self, spec: TensorSpec) -> TensorSpec:
        """Return ``spec`` as it will be kept."""
        wanted = self.dtypes.get(spec.name, spec.dtype)
        return spec.model_copy(update={"dtype": wanted}) if {wanted, spec.dtype} <= _CAST else spec

    def drop(self) -> None:
        """Keep nothing, now and of what still comes."""
        self.copy = None

    def take(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Keep the tensors of ``chunk``, whose bytes are ``buffer``, a 1-d uint8 tensor on any device."""
        for spec, offset in chunk.entries:
            kept = self.kept_as(spec)
            self.specs[spec.name] = kept
            copy = self.copy  # Another thread may drop it.
            if copy is None:
                continue
            tensor = view_tensor(buffer, offset, spec).to(kept.torch_dtype).cpu()
            copy.digests[spec.name] = tensor_digest(tensor)
            copy.add(kept, tensor.reshape(-1).view(torch.uint8))


@dataclass(frozen=True)
class _Job:
    specs: tuple[TensorSpec, ...]
    timeout_s: float
    collection: Collection | None
    refusal: WeightPushError | None


class Transfer:
    """Membership in one trainer's group. ``stop`` ends it, from any thread.

    Attributes:
        specs: the tensors of the last broadcasts, for a call that leaves them out.
    """

    def __init__(
        self,
        init: InitInfo,
        *,
        rank: int,
        device: torch.device,
        progress: ProgressWriter,
        open_communicator: Open,
        timeout_s: float,
    ) -> None:
        self.specs: tuple[TensorSpec, ...] = ()
        self._init = init
        self._rank = rank
        self._device = device
        self._progress = progress
        self._open = open_communicator
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending = 0
        self._counting = threading.Lock()
        self._joined = threading.Event()
        self._stopped = threading.Event()
        self._communicator: Communicator | None = None
        self._error: WeightPushError | None = None
        self._thread = threading.Thread(target=self._run, name="weightpush-vllm-transfer", daemon=True)

    # Called from the worker's main thread

    def start(self) -> None:
        """Join the trainer's group, in a thread of its own."""
        self._thread.start()

    @property
    def joined(self) -> bool:
        """Whether all members of the group have come, and none is known to have gone."""
        return self._joined.is_set() and self._error is None and not self._stopped.is_set()

    @property
    def error(self) -> ErrorDetail | None:
        """Why the group is of no use, if that is known."""
        return None if self._error is None else self._error.body().error

    @property
    def busy(self) -> bool:
        """Whether there are broadcasts still to come that were announced."""
        return self._pending > 0 and self._error is None

    def receive(
        self,
        specs: tuple[TensorSpec, ...],
        *,
        timeout_s: float,
        collection: Collection | None = None,
        refusal: WeightPushError | None = None,
    ) -> None:
        """Take part in the broadcasts that bring ``specs``; returns at once.

        ``collection`` keeps them; the worker's record for its update says when they are there, as one more bucket. With
        a ``refusal`` they are thrown away, and the refusal goes into that record when they are through.
        ``timeout_s``: the longest that the trainer may take for one broadcast.
        """
        self.specs = specs
        with self._counting:
            self._pending += 1
        self._jobs.put(_Job(specs, timeout_s, collection, refusal))

    def stop(self) -> None:
        """Leave the group."""
        self._stopped.set()
        self._jobs.put(None)
        if self._communicator is not None:
            self._communicator.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)

    # The thread

    def _run(self) -> None:
        try:
            self._communicator = self._open(
                self._init,
                rank=self._init.rank_offset + self._rank,
                device=self._device,
                timeout_s=self._timeout_s,
            )
        except WeightPushError as error:
            self._error = error
            return
        except Exception as error:  # noqa: BLE001 - whatever keeps this worker out must reach the trainer by name
            message = f"worker {self._rank} could not join the trainer's group: {type(error).__name__}: {error}"
            self._error = WeightPushError(ErrorCode.RENDEZVOUS_FAILED, message)
            return
        self._joined.set()
        try:
            while not self._stopped.is_set():
                job = self._jobs.get()
                if job is None:
                    break
                self._take(job)
                del job  # And with it what its round has collected.
                with self._counting:
                    self._pending -= 1
        finally:
            self._communicator.close()

    def _take(self, job: _Job) -> None:
        problem = job.refusal
        packed_bytes = self._init.packed_buffer_size_bytes if self._init.packed else None
        for chunk in cut_chunks(job.specs, packed_bytes=packed_bytes):
            if self._error is None:
                problem = self._take_chunk(job, chunk, problem)
        problem = self._error or problem
        if job.collection is None:
            return
        if problem is not None:
            problem.details.setdefault("worker_rank", self._rank)
            self._progress.update(epoch=job.collection.epoch, error=problem.body().error)
        else:
            self._progress.advance(epoch=job.collection.epoch, buckets=1, tensors=0, bytes=0)

    def _take_chunk(self, job: _Job, chunk: Chunk, problem: WeightPushError | None) -> WeightPushError | None:
        try:
            buffer = torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)
            assert self._communicator is not None
            self._communicator.receive(buffer, job.timeout_s)
        except WeightPushError as error:
            return self._lose(error)
        except Exception as error:  # noqa: BLE001 - whatever breaks the data plane must reach the trainer by name
            why = f"the trainer's broadcast broke: {type(error).__name__}: {error}"
            return self._lose(WeightPushError(ErrorCode.TRANSPORT_FAILED, why))
        if problem is not None or job.collection is None:
            return problem
        try:
            job.collection.take(chunk, buffer)
        except Exception as error:  # noqa: BLE001 - the rest must be received before anybody is told
            why = f"{type(error).__name__}: {error}"
            return WeightPushError(ErrorCode.LANDING_FAILED, f"a tensor could not be kept in host memory: {why}")
        self._progress.advance(
            epoch=job.collection.epoch,
            buckets=0,
            tensors=len(chunk.entries),
            bytes=chunk.nbytes,
        )
        return None

    def _lose(self, error: WeightPushError) -> WeightPushError:
        self._error = error
        assert self._communicator is not None
        self._communicator.close()  # The others wait for this end.
        return error
