"""The status that everybody may read, made of the shared record and of what the workers say."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Final

from weightpush_protocol import PROTOCOL_VERSION
from weightpush_protocol.messages import utc_now
from weightpush_protocol.status import Status, UpdateStatus, WorkerStatus
from weightpush_server.records import ControlRecord, UpdateRecord, WorkerRecord

#: What workers say for the server's own processes, or what is said elsewhere in the status.
_INTERNAL: Final = ("epoch", "error", "connected", "source_ready", "progress_at", "copies", "expects")


def build_status(control: ControlRecord, workers: list[WorkerRecord]) -> Status:
    """Assemble the public status. Progress of an update is that of its slowest worker."""
    update = control.update
    return Status(
        protocol=PROTOCOL_VERSION,
        instance_id=control.instance_id,
        state=control.state,
        serving=control.state.serving,
        paused=control.held is not None,
        weight_version=control.weight_version,
        previous_version=control.previous_version,
        update=_update_status(update, workers) if update is not None else None,
        last_error=control.last_error,
        last_update=control.last_update,
        fingerprint=control.fingerprint,
        expects=next((worker.expects for worker in workers), None),
        copies=[copy for worker in workers for copy in worker.copies],
        workers=[WorkerStatus(**worker.model_dump(exclude=set(_INTERNAL))) for worker in workers],
    )


def _update_status(update: UpdateRecord, workers: list[WorkerRecord]) -> UpdateStatus:
    slowest: dict[str, Any] = {}
    taking_part = [worker for worker in workers if worker.epoch == update.epoch]
    if taking_part:
        worker = min(taking_part, key=lambda worker: (worker.buckets_done, worker.bytes_done))
        slowest = worker.model_dump(include={"buckets_done", "tensors_done", "bytes_done"})
    lease_left = timedelta(seconds=update.lease_renewed + update.deadlines.lease_s - time.monotonic())
    return UpdateStatus(
        **update.model_dump(
            include={"update_id", "epoch", "mode", "phase", "weight_version", "transport", "in_flight", "digest"}
            | {"tensors_total", "bytes_total", "buckets_total", "started_at"}
        ),
        **slowest,
        lease_expires_at=utc_now() + lease_left,
    )
