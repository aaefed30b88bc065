"""How a bucket reaches all servers: broadcast, shown in shared memory, as an HTTP body, or several of these at once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from weightpush_client.fleet import Fleet
from weightpush_client.http import SLACK_S
from weightpush_client.loop import CallScope
from weightpush_client.policy import LOST_SERVERS
from weightpush_client.report import PushError
from weightpush_client.transport import Link
from weightpush_protocol.digest_text import texts
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest
from weightpush_protocol.memory import bytes_under
from weightpush_protocol.messages import StreamRequest
from weightpush_protocol.status import Status
from weightpush_protocol.transports.base import LendingSender, Sender
from weightpush_protocol.transports.frames import frame_bytes, write_digests
from weightpush_protocol.transports.http import digests_to_metadata, encode_header

# How long a server may take to notice what its trainer has noticed already, and how often it is asked.
_REASON_S: Final = 2.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class OpenUpdate:
    """An update that all servers have begun; ``epochs`` in the order of the servers. ``scope`` ends its calls."""

    update_id: str
    epochs: Sequence[int]
    bucket_s: float
    scope: CallScope


_Way = tuple[Link, Fleet, OpenUpdate]


class Delivery:
    """Sends buckets over all ``links``, at the same time; ``fleet`` and ``update`` are those of all servers.

    ``interrupt`` must make what still runs over the links fail soon. Use it as a context manager: entering it announces
    all that comes through shared memory, and leaving it waits for the answer.
    """

    def __init__(
        self,
        links: Sequence[Link],
        fleet: Fleet,
        update: OpenUpdate,
        manifest: Manifest,
        interrupt: Callable[[], None],
    ) -> None:
        self._ways = [
            (link, fleet.only(link.places), replace(update, epochs=[update.epochs[place] for place in link.places]))
            for link in links
        ]
        self._manifest = manifest
        self._interrupt = interrupt
        #: Memory that was lent for a bucket and not yet sent, by number.
        self._frames: dict[int, torch.Tensor] = {}
        self._context = ExitStack()
        self._announced: list[Future[None]] = []

    def __enter__(self) -> Delivery:
        shared = [way for way in self._ways if isinstance(way[0].sender, LendingSender)]
        if shared:
            pool = self._context.enter_context(ThreadPoolExecutor(len(shared), "weightpush-announce"))
            count = len(self._manifest.buckets)
            self._announced = [pool.submit(announce, fleet, update, 0, {}, count=count) for _, fleet, update in shared]
            for announced in self._announced:
                announced.add_done_callback(self._stop_without)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Wait for the announcements.

        Raises:
            PushError: a server refused one, or could not be reached; also where that made the stream fail.
        """
        self._context.close()
        failure = _first_failure(self._announced)
        # They refer to this object, which would live, and buffers with it, until somebody collects garbage.
        self._announced = []
        self._frames.clear()
        consequence = error is None or isinstance(error, WeightPushError | CancelledError)
        if consequence and failure is not None and not isinstance(failure, CancelledError):
            raise failure from error

    def _stop_without(self, announced: Future[None]) -> None:
        """Do not wait for workers that were not told what comes."""
        if announced.exception() is not None:
            self._interrupt()

    def lender(self, device: torch.device) -> Callable[[int], torch.Tensor] | None:
        """Return what lends buffers on ``device`` that need no copy; None where no link has any.

        What it returns raises as `__call__` does.
        """
        for way in self._ways:
            if isinstance(way[0].sender, LendingSender) and device.type == "cpu":
                return partial(self._lend, way)
        return None

    def _lend(self, way: _Way, number: int) -> torch.Tensor:
        """Return memory for bucket ``number``, with room for its digests behind it."""
        link, fleet, update = way
        assert isinstance(link.sender, LendingSender)
        bucket = self._manifest.buckets[number]
        try:
            frame = link.sender.lend(frame_bytes(bucket.nbytes, len(bucket.tensors)), update.bucket_s)
        except WeightPushError as error:
            link.note_lost(error)
            raise _with_reason(error, fleet, update) from error
        self._frames[number] = frame
        return frame[: bucket.nbytes]

    def __call__(self, number: int, buffer: torch.Tensor, digests: bytes) -> None:
        """Return when bucket ``number`` was delivered to all; ``digests``: eight bytes for each of its tensors.

        Raises:
            PushError: a server refused it, or what it says about a transport that failed.
            WeightPushError: ``transport_failed``, and no server knows why.
        """
        # These two read the host's memory; shared memory may lie anywhere.
        host = buffer.cpu() if any(link.name in {"http", "gloo"} for link, _, _ in self._ways) else buffer

        def send(way: _Way) -> None:
            link, fleet, update = way
            if link.sender is None:
                deliver_by_body(fleet, update, self._manifest, number, host, self._named(number, digests))
                return
            try:
                if isinstance(link.sender, LendingSender):
                    if number not in self._frames:
                        self._lend(way, number)
                    deliver_by_sharing(fleet, update, link.sender, self._frames.pop(number), number, buffer, digests)
                    return
                named = self._named(number, digests)
                deliver_by_broadcast(fleet, update, link.sender, number, buffer if link.name == "nccl" else host, named)
            except WeightPushError as error:
                link.note_lost(error)
                raise

        if len(self._ways) == 1:
            send(self._ways[0])
            return
        with ThreadPoolExecutor(len(self._ways), "weightpush-link") as pool:
            sending = [pool.submit(send, way) for way in self._ways]
            done, running = wait(sending, return_when=FIRST_EXCEPTION)
            failure = _first_failure(done)
            if failure is not None:
                if running:
                    self._interrupt()
                raise failure

    def _named(self, number: int, digests: bytes) -> dict[str, str]:
        """Return the digests of bucket ``number`` by name, as they go over HTTP."""
        return dict(zip(self._manifest.table(number).names, texts(digests), strict=True)) if digests else {}


def _with_reason(error: WeightPushError, fleet: Fleet, update: OpenUpdate) -> WeightPushError:
    """Return what a server says about a transport that failed with ``error``; else ``error``."""
    reason = servers_reason(fleet, update.update_id, update.scope)
    if reason is None:
        return error
    # The trainer's end knows whose connection broke first.
    reason.details.update({key: error.details[key] for key in ("peer_rank", LOST_SERVERS) if key in error.details})
    return reason


def _first_failure(done: Iterable[Future[None]]) -> BaseException | None:
    errors = [error for future in done if (error := future.exception()) is not None]
    # What was cancelled only says that something else failed.
    return min(errors, key=lambda error: isinstance(error, CancelledError), default=None)


def announce(fleet: Fleet, update: OpenUpdate, number: int, digests: dict[str, str], *, count: int = 1) -> None:
    """Let all workers expect ``count`` buckets from ``number`` on.

    Raises:
        PushError: a server refused it.
    """
    call_id = uuid.uuid4().hex  # Repeated with the same id, an announcement is known for a retry.
    fleet.call(
        lambda index, server: server.announce(
            StreamRequest(
                update_id=update.update_id,
                epoch=update.epochs[index],
                bucket=number,
                count=count,
                call_id=call_id,
                digests=digests,
            ),
            update.bucket_s + SLACK_S,
        ),
        update.scope,
    )


def deliver_by_sharing(
    fleet: Fleet,
    update: OpenUpdate,
    sender: LendingSender,
    frame: torch.Tensor,
    number: int,
    buffer: torch.Tensor,
    digests: bytes,
) -> None:
    """Show bucket ``number``, which was announced, to all workers in ``frame``, where it may lie already.

    Raises:
        PushError: what a server says about a transport that failed.
        WeightPushError: ``transport_failed``, and no server knows why.
    """
    nbytes = buffer.numel()
    if buffer.data_ptr() != frame.data_ptr():
        frame[:nbytes].copy_(buffer)
    write_digests(frame, nbytes, digests)
    if frame.is_cuda:
        # Workers are told over a socket, which knows nothing of a GPU's queue.
        torch.cuda.current_stream(frame.device).synchronize()
    try:
        sender.send(number, frame, update.bucket_s)
    except WeightPushError as error:
        raise _with_reason(error, fleet, update) from error


def deliver_by_broadcast(
    fleet: Fleet, update: OpenUpdate, sender: Sender, number: int, buffer: torch.Tensor, digests: dict[str, str]
) -> None:
    """Announce bucket ``number`` to all servers, then send it once to all their workers.

    Raises:
        PushError: a server refused it or, where sending failed, what the server says about it.
        WeightPushError: ``transport_failed``: sending failed, and no server knows why.
    """
    announce(fleet, update, number, digests)
    try:
        sender.send(number, buffer, update.bucket_s)
    except WeightPushError as error:
        raise _with_reason(error, fleet, update) from error


def deliver_by_body(
    fleet: Fleet,
    update: OpenUpdate,
    manifest: Manifest,
    number: int,
    buffer: torch.Tensor,
    digests: dict[str, str],
) -> None:
    """Post bucket ``number`` to every server; return when it has landed on all.

    Raises:
        PushError: a server refused it, or broke off.
    """
    header = encode_header(manifest.bucket_tensors(number), digests_to_metadata(number, digests))
    parts = (header, bytes_under(buffer))
    try:
        fleet.call(
            lambda index, server: server.send_body(
                update_id=update.update_id,
                epoch=update.epochs[index],
                bucket=number,
                parts=parts,
                timeout_s=update.bucket_s + SLACK_S,
            ),
            update.scope,
        )
    except PushError as error:
        # A server that refuses a body early may close before the client has read why.
        if error.code is ErrorCode.UNREACHABLE and (reason := servers_reason(fleet, update.update_id, update.scope)):
            raise reason from error
        raise


def servers_reason(fleet: Fleet, update_id: str, scope: CallScope) -> PushError | None:
    """Return why a server ended update ``update_id``, or None where none says so within about two seconds."""
    deadline = time.monotonic() + _REASON_S
    while (left := deadline - time.monotonic()) > 0:
        statuses = fleet.statuses(left, scope)
        for server, status in zip(fleet.servers, statuses, strict=True):
            if isinstance(status, Status) and (error := status.last_error) and error.update_id == update_id:
                return PushError(
                    error.code,
                    error.message,
                    server=server.url,
                    details=error.details,
                    update_id=update_id,
                    state=status.state,
                )
        if all(isinstance(status, Exception) for status in statuses):
            return None
        time.sleep(_POLL_S)
    return None
