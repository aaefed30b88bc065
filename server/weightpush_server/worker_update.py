"""One update as one worker sees it: where its tensors come from, and the open model that they land in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weightpush_protocol.digest import raw_digests
from weightpush_protocol.digest_text import TensorDigests, raw_of
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.hostcopy import HostCopy
from weightpush_server.progress import ProgressWriter
from weightpush_server.receiver import UpdateReceiver
from weightpush_server.reload import ReloadProof, ReloadSession
from weightpush_server.reload.plan import Plan
from weightpush_server.stored import OpenCheckpoint, Piece
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
        known = source.stored.digests
        if known:
            names = [spec.name for spec in source.stored.specs if spec.name in known]
            self.digests.add(names, raw_of([known[name] for name in names]))

    def foresee(self, plan: Plan, progress: ProgressWriter, *, hurry: bool) -> None:
        """Do all that landing the stored tensors by ``plan`` will need, while the old weights still serve.

        What can be done beside the engine's steps goes on in a thread, which says in the record when it is done.
        ``hurry``: nobody is served, so that is left out.
        """
        source, ready = self.source, {"epoch": self.epoch, "source_ready": True}
        assert source is not None
        for piece in source.stored.layout.pieces:
            plan.batches(piece, piece.table.entries)

        def prefault() -> None:
            try:
                source.prefault()
            finally:  # It only saves time: whatever happens, landing can begin.
                progress.update(**ready)

        if hurry:
            progress.update(**ready)
        else:
            threading.Thread(target=prefault, name=f"weightpush-prefault-{self.epoch}", daemon=True).start()

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

        ``check_wanted`` raises when nobody wants them any more; it is called for every piece, and every copy out of it,
        since this call cannot be taken back. ``is_mine``: whether this rank takes the digest of the tensor with that
        number. ``copy_too``: add each tensor to ``copy``.

        Raises:
            WeightPushError: the source's, the session's, or ``check_wanted``'s own.
        """
        if self.source is None:
            raise WeightPushError(ErrorCode.INTERNAL, "tensors were to be landed before it was known where they lie")
        progress.update(epoch=self.epoch, buckets_done=0, tensors_done=0, bytes_done=0)
        for piece, buffer in self.source.pieces():
            check_wanted()
            if self.take_digests:
                with self.seconds.booking("digest"):
                    self._digest(piece, buffer, is_mine)
            if copy_too and self.copy is not None:
                with self.seconds.booking("copy"):
                    self.copy.add_bucket(piece.table, buffer)
            with self.seconds.booking("land"):
                there = buffer if device.type == "cpu" else buffer.to(device)
                self.opened.land_bucket(there, piece, piece.table.entries, check_wanted=check_wanted)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            progress.advance(epoch=self.epoch, buckets=0, tensors=len(piece.table.names), bytes=piece.nbytes)

    def _digest(self, piece: Piece, buffer: torch.Tensor, is_mine: Callable[[int], bool]) -> None:
        """Take the digests of those tensors of a piece that fall to this rank and have none yet."""
        assert self.source is not None
        known, table = self.source.stored.digests, piece.table
        chosen = [at for at, name in enumerate(table.names) if name not in known and is_mine(piece.first + at)]
        if chosen:
            digests = raw_digests(buffer, [table.places[at] for at in chosen])
            self.digests.add([table.names[at] for at in chosen], digests)

    def stop(self) -> UpdateReceiver | None:
        """End what goes on; return the receiver if its thread may still write."""
        if self.source is not None:
            self.source.close()
        if self.receiver is None:
            return None
        self.receiver.stop()
        return self.receiver if self.receiver.alive else None
