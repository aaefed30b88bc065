"""How a bucket reaches all servers: broadcast after an announcement, or as an HTTP body."""

from __future__ import annotations

import ctypes
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from weightpush_client.fleet import Fleet
from weightpush_client.http import SLACK_S, ServerApi
from weightpush_client.loop import CallScope
from weightpush_client.report import PushError
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest
from weightpush_protocol.messages import Status, StreamRequest
from weightpush_protocol.transports.base import Sender
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


def deliver_by_broadcast(
    fleet: Fleet, update: OpenUpdate, sender: Sender, number: int, buffer: torch.Tensor, digests: dict[str, str]
) -> None:
    """Announce bucket ``number`` to all servers, then send it once to all their workers.

    Raises:
        PushError: a server refused it or, where sending failed, what the server says about it.
        WeightPushError: ``transport_failed``: sending failed, and no server knows why.
    """
    call_id = uuid.uuid4().hex  # Repeated with the same id, an announcement is known for a retry.
    fleet.call(
        lambda index, server: server.announce(
            StreamRequest(
                update_id=update.update_id,
                epoch=update.epochs[index],
                bucket=number,
                call_id=call_id,
                digests=digests,
            ),
            update.bucket_s + SLACK_S,
        ),
        update.scope,
    )
    try:
        sender.send(number, buffer, update.bucket_s)
    except WeightPushError as error:
        if reason := servers_reason(fleet, update.update_id, update.scope):
            raise reason from error
        raise


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
    parts = (header, _bytes_of(buffer))
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
        statuses = fleet.call_to_the_end(partial(_status_within, left), scope)
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


async def _status_within(timeout_s: float, _: int, server: ServerApi) -> Status:
    return await server.status(timeout_s)


def _bytes_of(buffer: torch.Tensor) -> memoryview:
    # torch has no buffer protocol of its own, and numpy need not be there. The view keeps no reference:
    # the caller holds the buffer until the call returns.
    if buffer.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr())).cast("B")
