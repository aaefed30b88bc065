"""What the processes of one server tell each other through the shared state file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import groupby
from typing import Final

from pydantic import AwareDatetime, BaseModel, Field

from weightpush_protocol.errors import ErrorCode, ErrorDetail, WeightPushError
from weightpush_protocol.messages import (
    BeginAnswer,
    Deadlines,
    DigestKind,
    FinishAnswer,
    InFlight,
    PrepareAnswer,
    UpdateMode,
    utc_now,
)
from weightpush_protocol.state import Event, Phase, ServerState, next_state
from weightpush_protocol.status import CopyRole, CopyStatus, LastError, LastUpdate

#: What stands in the place of a transport where a kept copy lands again, or a checkpoint on the server's disk, and
#: where tensors come from one of vLLM's own trainer engines.
FROM_COPY: Final = "copy"
FROM_DISK: Final = "disk"
FROM_VLLM_TRAINER: Final = "vllm"

#: How many ended updates are remembered, so that a repeated call learns how its update ended.
_REMEMBERED = 8
#: How many updates are remembered that were aborted before they began. The shared record has a fixed size.
_ABORTED_AHEAD = 32
#: What is kept of an error: the caller gets all of it, the shared record has a fixed size.
_KEPT_MESSAGE = 2000
_KEPT_DETAILS = 8000


def shortened(error: ErrorDetail) -> ErrorDetail:
    """Return ``error`` in a form that fits the shared record, whatever a caller made us say."""
    message, details = error.message, error.details
    if len(message) > _KEPT_MESSAGE:
        message = f"{message[:_KEPT_MESSAGE]}..."
    if len(json.dumps(details, default=str)) > _KEPT_DETAILS:
        details = {"shortened": True}
        for key, value in error.details.items():
            kept = value if isinstance(value, int | float | bool | None) else str(value)[:300]
            if len(json.dumps({**details, key: kept})) <= _KEPT_DETAILS:
                details[key] = kept
    return error.model_copy(update={"message": message, "details": details})


class UpdateRecord(BaseModel):
    """The running update. Times without a date are ``time.monotonic``, which all processes of a host share."""

    update_id: str
    epoch: int
    #: SHA-256 of the whole ``begin``: the same id with another body is no repetition.
    request_digest: str
    mode: UpdateMode
    phase: Phase = Phase.CHECKING
    origin: ServerState
    weight_version: str
    transport: str
    in_flight: InFlight
    digest: DigestKind
    deadlines: Deadlines
    tensors_total: int = 0
    bytes_total: int = 0
    buckets_total: int = 0
    buckets_announced: int = 0
    #: Key of the last call that announced a bucket: the same call again is a retry, another one is a mistake.
    last_call_id: str | None = None
    started_at: AwareDatetime = Field(default_factory=utc_now)
    started: float = Field(default_factory=time.monotonic)
    phase_since: float = Field(default_factory=time.monotonic)
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    worker_seconds: dict[str, float] = Field(default_factory=dict)
    lease_renewed: float = Field(default_factory=time.monotonic)
    gate_closed: float | None = None
    #: Somebody is bringing the engine to rest, and will undo that if the update ends meanwhile.
    draining: bool = False
    #: Whether the model may have been changed: decides where a failure ends.
    written: bool = False
    #: API processes end the requests that they still carry for this update.
    evict: bool = False
    begin_answer: BeginAnswer | None = None
    preparing: bool = False
    prepare_answer: PrepareAnswer | None = None
    finishing: bool = False
    #: The kept copy that lands again: a rollback.
    restores: CopyRole | None = None
    #: The failed update that this rollback undoes without being asked.
    undoes: str | None = None
    #: Set when the update is lost: nobody goes on with it while its failure is being carried out.
    failure: ErrorDetail | None = None

    @property
    def awaits_trainer(self) -> bool:
        """Whether the next step is the trainer's; in every other phase the server itself is at work."""
        if self.phase is Phase.PREPARED:
            return not self.finishing
        return self.phase is Phase.RECEIVING and not (self.preparing or self.finishing)

    def enter(self, phase: Phase) -> None:
        """Go on to ``phase`` and book the time that the last one took, in seconds."""
        now = time.monotonic()
        spent = self.phase_seconds.get(self.phase.value, 0.0) + now - self.phase_since
        self.phase_seconds[self.phase.value] = round(spent, 6)
        self.phase, self.phase_since, self.lease_renewed = phase, now, now

    def take_bucket(self, bucket: int, call_id: str | None, *, as_body: bool, count: int = 1) -> bool:
        """Count ``count`` buckets from ``bucket`` on as announced; return ``False`` for a retry of the last call.

        Raises:
            WeightPushError: ``bucket_out_of_order``: it came twice, too early, after the end, or on another way than
                this update's transport, or several at once where that is not possible.
        """
        if call_id is not None and call_id == self.last_call_id and bucket == self.buckets_announced - count:
            return False
        if as_body != (self.transport == "http"):
            came = "came as a request body" if as_body else "was announced"
            raise self._bucket_error(bucket, f"{came}, but this update goes over {self.transport}")
        if self.phase is not Phase.RECEIVING or self.preparing or self.finishing:
            raise self._bucket_error(bucket, f"came while the update was {self.phase.value}")
        if count > 1 and self.transport != "shm":
            raise self._bucket_error(bucket, f"was announced with others, but over {self.transport} each comes alone")
        if self.buckets_total and bucket + count > self.buckets_total:
            raise self._bucket_error(bucket + count - 1, f"is beyond the plan of {self.buckets_total} buckets")
        if bucket < self.buckets_announced:
            raise self._bucket_error(bucket, "came twice")
        if bucket > self.buckets_announced:
            raise self._bucket_error(bucket, f"came out of order: bucket {self.buckets_announced} is next")
        self.buckets_announced += count
        self.last_call_id = call_id
        return True

    def _bucket_error(self, bucket: int, what: str) -> WeightPushError:
        return WeightPushError(
            ErrorCode.BUCKET_OUT_OF_ORDER,
            f"bucket {bucket} {what}",
            details={"bucket": bucket, "next": self.buckets_announced},
        )


class EndedUpdate(BaseModel):
    """How an earlier update ended: committed with an answer, or failed with an error."""

    update_id: str
    epoch: int
    request_digest: str = ""
    answer: FinishAnswer | None = None
    error: ErrorDetail | None = None


class ControlRecord(BaseModel):
    """State of the server. Its methods are the only places where the state changes."""

    instance_id: str
    state: ServerState = ServerState.SERVING
    weight_version: str
    previous_version: str | None = None
    #: False until the first commit of a server that awaits weights: what it was started on is nobody's version.
    has_served: bool = True
    epoch: int = 0
    committed_epoch: int = 0
    #: Epoch and version of the last committed updates that let requests go on across them (``in_flight: keep``).
    kept: list[tuple[int, str]] = Field(default_factory=list)
    fingerprint: str | None = None
    update: UpdateRecord | None = None
    #: A pause that a trainer asked for over vLLM's routes, and what it did to running requests.
    held: InFlight | None = None
    last_error: LastError | None = None
    last_update: LastUpdate | None = None
    ended: list[EndedUpdate] = Field(default_factory=list)
    #: Ids of updates whose abort overtook their begin: that begin is still on its way, and nobody waits for it.
    aborted_ahead: list[str] = Field(default_factory=list)

    @property
    def gate_open(self) -> bool:
        """Whether generation routes may answer."""
        return self.state.serving and self.held is None

    @property
    def waits_for_resume(self) -> bool:
        """Whether a request had better wait for the end of a pause than be refused."""
        return self.held is not None and (self.state.serving or self.update is not None)

    def apply(self, event: Event) -> None:
        """Move to the next state. Raises ``IllegalTransitionError`` where the table has no such row."""
        origin = self.update.origin if self.update is not None else self.state
        self.state = next_state(self.state, event, origin=origin)

    def mode_for(self, asked: UpdateMode) -> UpdateMode:
        """Return how an update is carried out: where nothing is served meanwhile, staging would gain nothing."""
        return asked if self.state is ServerState.SERVING else UpdateMode.DIRECT

    def stage(self) -> None:
        """Go to ``STAGING``: the old weights serve on while the new ones arrive."""
        self._running()
        self.apply(Event.BEGIN_STAGED)

    def reserve(
        self, update_id: str, request_digest: str, make: Callable[[ControlRecord], UpdateRecord]
    ) -> tuple[bool, UpdateRecord]:
        """Make an update the running one, if none is; ``False``: it is running already, and this call repeats it.

        ``make`` gets this record with the update's epoch in place; what it raises leaves everything as it was.

        Raises:
            WeightPushError: ``update_in_progress``, ``aborted`` if its abort came first, or what became of the update,
                if it ended before.
        """
        if self.find_ended(update_id) is not None:
            self.active(update_id)  # Raises what became of it.
        if update_id in self.aborted_ahead:
            raise WeightPushError(
                ErrorCode.ABORTED,
                f"update {update_id} was aborted before its begin arrived; use a new update_id",
                details={"reason": "aborted before its begin arrived"},
                update_id=update_id,
                state=self.state,
            )
        running = self.update
        if running is not None:
            if running.update_id == update_id and running.request_digest == request_digest:
                self.active(update_id)
                return False, running
            silent = time.monotonic() - running.lease_renewed
            raise WeightPushError(
                ErrorCode.UPDATE_IN_PROGRESS,
                f"update {running.update_id} is running ({running.phase.value}, last call {silent:.0f} s ago, "
                f"lease {running.deadlines.lease_s:g} s): wait for its end, or abort it (`weightpush abort URL`)",
                details={
                    "running": running.update_id,
                    "phase": running.phase.value,
                    "silent_s": round(silent, 3),
                    "lease_s": running.deadlines.lease_s,
                },
                update_id=running.update_id,
                state=self.state,
            )
        self.epoch += 1
        self.update = make(self)
        return True, self.update

    def begin_undoing(self, failed: UpdateRecord, copy: CopyStatus) -> UpdateRecord | None:
        """Begin to go back to the weights of before ``failed``, if that is a staged update that spoilt them."""
        if failed.mode is not UpdateMode.STAGED or self.state is not ServerState.FAILED:
            return None
        self.epoch += 1
        self.update = UpdateRecord(
            update_id=f"undo-{failed.update_id}"[:64],
            epoch=self.epoch,
            request_digest="",
            mode=UpdateMode.DIRECT,
            origin=self.state,
            weight_version=copy.weight_version,
            transport=FROM_COPY,
            in_flight=InFlight.ABORT,
            digest=DigestKind.NONE,
            # Not those of the failed update, which may have failed by them.
            deadlines=Deadlines(),
            restores=CopyRole.SERVED,
            undoes=failed.update_id,
        )
        return self.update

    def active(self, update_id: str, epoch: int | None = None) -> UpdateRecord:
        """Return the running update if it is this one.

        Raises:
            WeightPushError: ``stale_update`` for an update that is not known or was committed, ``update_failed`` for
                one that has failed, with its cause.
        """
        update = self.update
        if update is not None and update.update_id == update_id:
            if epoch is not None and epoch != update.epoch:
                raise self._stale(update_id, f"its epoch is {update.epoch}, not {epoch}")
            if update.failure is not None:
                raise self._failed(update_id, update.failure)
            return update
        ended = self.find_ended(update_id)
        if ended is None:
            raise self._stale(update_id, "this server does not know it")
        if ended.error is None:
            raise self._stale(update_id, "it was committed")
        raise self._failed(update_id, ended.error)

    def find_ended(self, update_id: str) -> EndedUpdate | None:
        """Return how an earlier update ended, if it is still remembered."""
        return next((ended for ended in self.ended if ended.update_id == update_id), None)

    def knows(self, update_id: str) -> bool:
        """Whether this update runs, or has ended and is still remembered."""
        return (self.update is not None and self.update.update_id == update_id) or (
            self.find_ended(update_id) is not None
        )

    def abort_ahead(self, update_id: str) -> None:
        """Refuse an update that is not known from now on; one that has begun meanwhile is left alone."""
        if not self.knows(update_id):
            others = [other for other in self.aborted_ahead if other != update_id]
            self.aborted_ahead = [*others, update_id][-_ABORTED_AHEAD:]

    def _failed(self, update_id: str, cause: ErrorDetail) -> WeightPushError:
        return WeightPushError(
            ErrorCode.UPDATE_FAILED,
            f"update {update_id} has failed: {cause.message}",
            details={"cause": cause.model_dump(mode="json")},
            update_id=update_id,
            state=self.state,
        )

    def _stale(self, update_id: str, why: str) -> WeightPushError:
        running = self.update.update_id if self.update is not None else None
        return WeightPushError(
            ErrorCode.STALE_UPDATE,
            f"update {update_id} is not running: {why}",
            details={"running": running},
            update_id=update_id,
            state=self.state,
        )

    def close_gate(self) -> None:
        """Go to ``UPDATING``: from here on generation routes answer 503."""
        update = self._running()
        self.apply(Event.LAND if self.state is ServerState.STAGING else Event.BEGIN_DIRECT)
        update.gate_closed = time.monotonic()

    def label(self, *, entered_epoch: int, entered_version: str) -> str:
        """Return the version of an answer whose request came in when ``entered_version`` served.

        ``entered_epoch``: the ``committed_epoch`` of then. Where the request was kept across updates, all versions in
        turn.
        """
        versions = [entered_version, *(version for epoch, version in self.kept if epoch > entered_epoch)]
        update = self.update
        if (
            update is not None
            and update.in_flight is InFlight.KEEP
            and update.phase is Phase.PUBLISHING
            and update.epoch > entered_epoch
        ):
            versions.append(update.weight_version)  # The engine may run again already.
        return ", ".join(version for version, _ in groupby(versions))

    def commit(self, *, fingerprint: str) -> FinishAnswer:
        """Publish the new version, open the gate and forget the update, in one step."""
        update = self._running()
        update.enter(update.phase)
        now = time.monotonic()
        answer = FinishAnswer(
            update_id=update.update_id,
            weight_version=update.weight_version,
            fingerprint=fingerprint,
            tensors=update.tensors_total,
            bytes=update.bytes_total,
            seconds=now - update.started,
            pause_seconds=now - update.gate_closed if update.gate_closed is not None else 0.0,
        )
        self.last_update = LastUpdate(
            **answer.model_dump(
                include={"update_id", "weight_version", "tensors", "bytes", "seconds", "pause_seconds"}
            ),
            mode=update.mode,
            transport=update.transport,
            digest=update.digest,
            phase_seconds=update.phase_seconds,
            worker_seconds=update.worker_seconds,
            finished_at=utc_now(),
        )
        if update.restores is None:
            self.previous_version = self.weight_version if self.has_served else None
        elif update.restores is CopyRole.PREVIOUS:
            self.previous_version = None  # What was served before that is not known any more.
        self.weight_version = update.weight_version
        self.fingerprint = fingerprint
        if update.undoes is None:
            self.last_error = None
        self.committed_epoch, self.has_served = update.epoch, True
        if update.in_flight is InFlight.KEEP:
            self.kept = [*self.kept, (update.epoch, update.weight_version)][-_REMEMBERED:]
        self.apply(Event.COMMIT)
        self._end(
            EndedUpdate(
                update_id=update.update_id, epoch=update.epoch, request_digest=update.request_digest, answer=answer
            )
        )
        return answer

    def fail(self, error: WeightPushError) -> UpdateRecord:
        """End the running update with ``error``: back to its origin, or ``FAILED`` if it may have written."""
        update = self._running()
        detail = error.body().error
        if update.origin is ServerState.FAILED and self.last_error is not None:
            # The server is down for the reason of before; this one only says why it could not be repaired.
            before = self.last_error.model_dump(mode="json", exclude={"details"})
            detail = detail.model_copy(update={"details": {"failed_before": before, **detail.details}})
        detail = shortened(detail)
        if self.state not in (update.origin, ServerState.FAILED):
            self.apply(Event.FAIL_WRITTEN if update.written else Event.FAIL_UNTOUCHED)
        if self.state is not ServerState.SERVING:
            self.fingerprint = None
        self.last_error = LastError(
            code=detail.code,
            message=detail.message,
            phase=update.phase,
            update_id=update.update_id,
            at=utc_now(),
            details=detail.details,
        )
        detail = detail.model_copy(update={"update_id": update.update_id, "state": self.state})
        self._end(EndedUpdate(update_id=update.update_id, epoch=update.epoch, error=detail))
        return update

    def _running(self) -> UpdateRecord:
        if self.update is None:
            raise RuntimeError("no update is running")
        return self.update

    def _end(self, ended: EndedUpdate) -> None:
        self.update = None
        self.ended = [*self.ended, ended][-_REMEMBERED:]


class WorkerRecord(BaseModel):
    """What one worker says of itself: who it is, and how far it is with update ``epoch``."""

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
    #: Digest of the checkpoint that its model expects, see ``expected``.
    expects: str | None = None
    epoch: int = 0
    connected: bool = False
    #: Whether stored tensors are ready to land; said before the gate closes.
    source_ready: bool = False
    buckets_done: int = 0
    tensors_done: int = 0
    bytes_done: int = 0
    progress_at: float = 0.0
    error: ErrorDetail | None = None
    copies: list[CopyStatus] = Field(default_factory=list)
