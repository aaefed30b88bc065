"""One update as one worker sees it: where its tensors come from, and the open model that they land in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.digest_text import TensorDigests
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.hostcopy import HostCopy
from weightpush_server.progress import ProgressWriter
from weightpush_server.receiver import UpdateReceiver
from weightpush_server.reload import ReloadProof, ReloadSession
from weightpush_server.stored import OpenCheckpoint, StoredTensor
from weightpush_server.timing import PartSeconds


@dataclass
class WorkerUpdate:
    """Belongs to the worker's main thread, but for what its receiver does.

    Attributes:
        receiver: brings the tensors of a push; ``None`` where they are stored on this host already.
        source: the stored tensors, once they are known; ``None`` while, or where, the receiver lands by itself.
        copy: what this update leaves in host memory; the server's first worker alone has it.
        digests: of the tensors that landed, as far as this rank knows them.
        seconds: where the time of this worker goes; what its receiver does is booked there, too.
    """

    epoch: int
    specs: tuple[TensorSpec, ...]
    partial: bool = False
    receiver: UpdateReceiver | None = None
    source: OpenCheckpoint | None = None
    copy: HostCopy | None = None
    session: ReloadSession | None = None
    proof: ReloadProof | None = None
    take_digests: bool = False
    digests: TensorDigests = field(default_factory=TensorDigests)
    seconds: PartSeconds = field(default_factory=PartSeconds)

    @property
    def opened(self) -> ReloadSession:
        """The open model. Raises ``WeightPushError`` (``internal``) before it is opened."""
        if self.session is None:
            raise WeightPushError(ErrorCode.INTERNAL, "tensors were to be landed before the model was opened")
        return self.session

    def attach(self, session: ReloadSession) -> None:
        """Land into ``session`` from now on."""
        self.session = session
        if self.receiver is not None:
            self.receiver.attach(session)

    def read_from(self, source: OpenCheckpoint, *, take_digests: bool) -> None:
        """Land from ``source``; ``take_digests``: of the tensors whose digest it does not know."""
        if self.source is not None:
            self.source.close()
        self.source, self.take_digests = source, take_digests

    def land(
        self,
        *,
        device: torch.device,
        progress: ProgressWriter,
        check_wanted: Callable[[], None],
        is_mine: Callable[[int], bool],
        copy_too: bool,
    ) -> None:
        """Land all stored tensors, the engine being idle.

        ``check_wanted`` raises when nobody wants them any more; it is called for every piece, since this call cannot be
        taken back. ``is_mine``: whether this rank takes the digest of the tensor with that number. ``copy_too``: add
        each tensor to ``copy``.

        Raises:
            WeightPushError: the source's, the session's, or ``check_wanted``'s own.
        """
        if self.source is None:
            raise WeightPushError(ErrorCode.INTERNAL, "tensors were to be landed before it was known where they lie")
        progress.update(epoch=self.epoch, buckets_done=0, tensors_done=0, bytes_done=0)
        number = 0
        for piece in self.source.pieces():
            check_wanted()
            tensors = []
            for entry in piece:
                tensor = self.source.read(entry)
                self._note_digest(entry, tensor, is_mine(number))
                if copy_too and self.copy is not None:
                    self.copy.add(entry.spec, tensor.reshape(-1).view(torch.uint8))
                tensors.append((entry.spec.name, tensor.to(device)))
                number += 1
            with self.seconds.booking("land"):
                self.opened.land(tensors)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            nbytes = sum(entry.spec.nbytes for entry in piece)
            progress.advance(epoch=self.epoch, buckets=0, tensors=len(piece), bytes=nbytes)

    def _note_digest(self, entry: StoredTensor, tensor: torch.Tensor, is_mine: bool) -> None:
        assert self.source is not None
        name = entry.spec.name
        digest = self.source.stored.digests.get(name)
        if digest is None and self.take_digests and is_mine:
            digest = tensor_digest(tensor)
        if digest is not None:
            self.digests.add((name,), bytes.fromhex(digest))

    def stop(self) -> UpdateReceiver | None:
        """End what goes on; return the receiver if its thread may still write."""
        if self.source is not None:
            self.source.close()
        if self.receiver is None:
            return None
        self.receiver.stop()
        return self.receiver if self.receiver.alive else None
