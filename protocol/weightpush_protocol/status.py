"""What a server says of itself: its status, its updates so far, the copies that it keeps."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import AwareDatetime, Field

from weightpush_protocol.errors import ErrorCode, ErrorDetail
from weightpush_protocol.messages import Answer, DigestKind, InFlight, UpdateMode
from weightpush_protocol.state import Phase, ServerState


class UpdateStatus(Answer):
    """The running update."""

    update_id: str
    epoch: int
    mode: UpdateMode
    phase: Phase
    weight_version: str
    transport: str
    in_flight: InFlight
    digest: DigestKind
    tensors_done: int = 0
    tensors_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    buckets_done: int = 0
    buckets_total: int = 0
    started_at: AwareDatetime
    lease_expires_at: AwareDatetime | None = None


class LastError(Answer):
    """Why the last update that failed did."""

    code: ErrorCode
    message: str
    phase: Phase | None = None
    update_id: str | None = None
    at: AwareDatetime
    details: dict[str, Any] = Field(default_factory=dict)


class LastUpdate(Answer):
    """The last update that was committed.

    ``phase_seconds``: how long the server was in each phase. ``worker_seconds``: what its slowest worker spent on each
    part (``receive``, ``digest``, ``copy``, ``open``, ``land``, ``postload``, ``proof``), beside each other or not;
    ``postload_early`` is the part of ``postload`` that went on while tensors landed.
    """

    update_id: str
    weight_version: str
    mode: UpdateMode
    transport: str
    digest: DigestKind
    tensors: int
    bytes: int
    seconds: float
    pause_seconds: float
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    worker_seconds: dict[str, float] = Field(default_factory=dict)
    finished_at: AwareDatetime


class UpdateKind(StrEnum):
    """Where the tensors of an update came from.

    ``push``: a trainer. ``disk``: ``POST /reload``. ``rollback``: a kept copy. ``undo``: a kept copy as well, after a
    staged update that had spoilt what was served; nobody asked for that.
    """

    PUSH = "push"
    DISK = "disk"
    ROLLBACK = "rollback"
    UNDO = "undo"


class OutcomeError(Answer):
    """Why an update failed, in short; ``last_error`` of the status has all of it for the last one."""

    code: ErrorCode
    message: str
    phase: Phase


class UpdateOutcome(Answer):
    """How an update ended. It was committed if ``error`` is None.

    ``weight_version`` is what it brought, or would have; ``state`` the server's afterwards. ``tensors`` and ``bytes``
    are those of its plan. ``seconds`` since ``begin``, ``pause_seconds`` with the gate closed, ``phase_seconds`` and
    ``worker_seconds`` as in ``LastUpdate``; of a failed update all of them until it had failed.
    """

    update_id: str
    epoch: int
    kind: UpdateKind
    weight_version: str
    mode: UpdateMode
    transport: str
    digest: DigestKind
    state: ServerState
    error: OutcomeError | None = None
    tensors: int
    bytes: int
    seconds: float
    pause_seconds: float
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    worker_seconds: dict[str, float] = Field(default_factory=dict)
    started_at: AwareDatetime
    finished_at: AwareDatetime


class HistoryAnswer(Answer):
    """``GET /reload/history``: the last ten updates since the server started, the latest first."""

    instance_id: str
    updates: list[UpdateOutcome] = Field(default_factory=list)


class CopyRole(StrEnum):
    """Which weights a kept copy holds: those committed last, or those before them."""

    SERVED = "served"
    PREVIOUS = "previous"


class CopyStatus(Answer):
    """Checkpoint tensors that a server keeps in host memory, for a rollback."""

    role: CopyRole
    weight_version: str
    bytes: int


class WorkerStatus(Answer):
    """One vLLM rank of this server. ``rank`` counts over all engines, in the order of the data plane.

    ``self_check`` says what became of the trial reload at start: ``passed``, ``failed``, ``skipped`` or ``off``.
    ``reload_refused``: the reason known at start for which this worker takes no update. ``host_id``: equal to the
    trainer's own (``transports.shared_memory.host_id``) where the two can share memory. ``gpu``: the UUID of its GPU,
    '' on a CPU.
    """

    rank: int
    pid: int
    device: str
    transports: list[str] = Field(default_factory=list)
    host_id: str = ""
    gpu: str = ""
    weight_version: str
    tainted: bool = False
    self_check: str | None = None
    reload_refused: ErrorDetail | None = None
    buckets_done: int = 0
    tensors_done: int = 0
    bytes_done: int = 0


class Status(Answer):
    """``GET /reload/status``: 200 while ``serving``, else 503 with the same body.

    ``expects``: the ``digest`` of what ``GET /reload/manifest`` would answer; whoever has that answer need not ask.
    ``paused``: a trainer asked for it over vLLM's own routes; requests wait until it resumes.
    """

    protocol: str
    instance_id: str
    state: ServerState
    serving: bool
    paused: bool = False
    weight_version: str
    previous_version: str | None = None
    update: UpdateStatus | None = None
    last_error: LastError | None = None
    last_update: LastUpdate | None = None
    fingerprint: str | None = None
    expects: str | None = None
    copies: list[CopyStatus] = Field(default_factory=list)
    workers: list[WorkerStatus] = Field(default_factory=list)
