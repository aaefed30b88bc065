"""A worker's own view of its progress, published to the shared state file."""

from __future__ import annotations

import threading
import time
from typing import Any

from weightpush_protocol.errors import ErrorDetail
from weightpush_server.records import WorkerRecord, shortened
from weightpush_server.shared_state import SharedState


class ProgressWriter:
    """Keeps one worker's record and writes it through. Used by its main thread and its receive thread."""

    def __init__(self, shared: SharedState, record: WorkerRecord) -> None:
        self._shared = shared
        self._record = record
        self._lock = threading.Lock()
        shared.write_worker(record)

    @property
    def record(self) -> WorkerRecord:
        """What was published last."""
        return self._record

    def begin(self, epoch: int) -> None:
        """Start counting anew for update ``epoch``."""
        self.update(
            epoch=epoch, connected=False, source_ready=False, buckets_done=0, tensors_done=0, bytes_done=0, error=None
        )

    def update(self, **changes: Any) -> None:
        """Change fields and publish. A change that names an older epoch than the present one is dropped."""
        if isinstance(changes.get("error"), ErrorDetail):
            changes["error"] = shortened(changes["error"])
        with self._lock:
            if changes.get("epoch", self._record.epoch) < self._record.epoch:
                return  # A thread of an update that is over.
            self._publish(changes)

    def advance(self, *, epoch: int, buckets: int, tensors: int, bytes: int) -> None:
        """Count what landed and publish."""
        with self._lock:
            if epoch != self._record.epoch:
                return
            record = self._record
            self._publish(
                {
                    "buckets_done": record.buckets_done + buckets,
                    "tensors_done": record.tensors_done + tensors,
                    "bytes_done": record.bytes_done + bytes,
                }
            )

    def _publish(self, changes: dict[str, Any]) -> None:
        self._record = self._record.model_copy(update={**changes, "progress_at": time.monotonic()})
        self._shared.write_worker(self._record)
