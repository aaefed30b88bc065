"""Errors of the wire contract: stable codes, their HTTP status, and the one exception that carries them.

::

    WeightPushError                  code, message, details, update_id, state
      raised by the server           → {"error": {...}} with the code's HTTP status
      raised by the client           ← the same, rebuilt from the answer, or a client-side code

========================== ====== ==================================================================
code                       status when, and what is left behind
========================== ====== ==================================================================
unauthorized               401    no or wrong control token; nothing changed
too_large                  413    body, manifest or name over a limit; nothing changed
slow_body                  408    a body did not come in time; nothing changed (a bucket: update failed)
too_many_calls             429    too many control calls at the same time; nothing changed
invalid_request            422    the body does not fit the schema; nothing changed
manifest_rejected          422    names, shapes or dtypes do not fit this model; nothing changed
layout_unknown             422    the server cannot say what its model expects; nothing changed
reload_refused             422    this model or server cannot be reloaded safely; nothing changed
online_quantization        422    weights are quantized while loading; nothing changed
runtime_layout             422    weights were loaded already processed; nothing changed
unrecorded_parameter       422    a parameter was exchanged since the cold start; nothing changed
overlapping_storage        422    two weights share some of their bytes; nothing changed
storage_unavailable        422    policy strict: a weight has no storage of its own; nothing changed
frozen_weights             422    compilation froze the weights into its code; nothing changed
draft_shares_head          422    a draft model shares a quantized head with the target; no start
lora_with_moe              422    LoRA adapters on a mixture of experts; nothing changed
kv_connector               422    a KV connector whose cache cannot be emptied; nothing changed
self_check_failed          422    post-load processing cannot be repeated on this model; nothing changed
partial_refused            422    what a partial update leaves out is not at hand; nothing changed
staging_budget_exceeded    422    host memory for a staged update or a kept copy; nothing changed
no_copy                    422    no copy of the weights to roll back to; nothing changed
disk_reload_off            422    the server was started without --reload-root; nothing changed
path_refused               422    a path that is none, or leads out of the reload roots; nothing changed
checkpoint_damaged         422    the files are not one complete safetensors checkpoint; nothing changed
transport_unavailable      422    the transport cannot run here; nothing changed
rendezvous_failed          422    data plane did not come up in time; nothing changed
asleep                     409    the engine sleeps; nothing changed
drain_failed               409    running requests could not be drained; nothing changed
update_in_progress         409    another update runs; nothing changed
unknown_manifest           409    a manifest's digest alone came, and it is not known; nothing changed
stale_update               409    the call belongs to an older or unknown update; nothing changed
update_failed              409    this update has already failed; see ``details.cause``
bucket_out_of_order        409    bucket repeated, skipped or beyond the plan; update failed
bucket_mismatch            409    bucket's tensors or size differ from the manifest; update failed
digest_mismatch            409    bytes arrived changed; update failed
incomplete_update          409    ``finish`` before all buckets arrived; the update goes on
landing_failed             409    a worker could not write a bucket; update failed
transport_failed           409    the data plane broke; update failed
lease_lost                 409    no progress from the trainer for ``lease_s``; update failed
deadline_exceeded          409    a phase took longer than its deadline; update failed
aborted                    409    the update was aborted; see ``details.reason``
files_changed              409    checkpoint files changed while they were loaded; never served
worker_lost                409    a worker or engine died; update failed
postload_failed            409    post-load processing raised; update failed
proof_failed               409    the result could not be proven right; update failed
cache_reset_failed         409    a cache of the old weights could not be emptied; update failed
not_serving                503    the gate is closed
internal                   500    a fault of the server itself
unreachable                  -    client only: no connection, or no answer in time
protocol_error               -    client only: the answer is not of this protocol
weights_rejected             -    client only: the trainer's weights do not match what was declared
trainer_rank_lost            -    client only: a rank of the trainer ended, or kept the others waiting
launch_failed                -    client only: a replica of a Ray fleet did not come up; nothing is left
========================== ====== ==================================================================
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from weightpush_protocol.state import ServerState


class ErrorCode(StrEnum):
    """Stable names; clients may branch on them."""

    UNAUTHORIZED = "unauthorized"
    TOO_LARGE = "too_large"
    SLOW_BODY = "slow_body"
    TOO_MANY_CALLS = "too_many_calls"
    INVALID_REQUEST = "invalid_request"
    MANIFEST_REJECTED = "manifest_rejected"
    LAYOUT_UNKNOWN = "layout_unknown"
    RELOAD_REFUSED = "reload_refused"
    ONLINE_QUANTIZATION = "online_quantization"
    RUNTIME_LAYOUT = "runtime_layout"
    UNRECORDED_PARAMETER = "unrecorded_parameter"
    OVERLAPPING_STORAGE = "overlapping_storage"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    FROZEN_WEIGHTS = "frozen_weights"
    DRAFT_SHARES_HEAD = "draft_shares_head"
    LORA_WITH_MOE = "lora_with_moe"
    KV_CONNECTOR = "kv_connector"
    SELF_CHECK_FAILED = "self_check_failed"
    PARTIAL_REFUSED = "partial_refused"
    STAGING_BUDGET_EXCEEDED = "staging_budget_exceeded"
    NO_COPY = "no_copy"
    DISK_RELOAD_OFF = "disk_reload_off"
    PATH_REFUSED = "path_refused"
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    ASLEEP = "asleep"
    TRANSPORT_UNAVAILABLE = "transport_unavailable"
    RENDEZVOUS_FAILED = "rendezvous_failed"
    DRAIN_FAILED = "drain_failed"
    UPDATE_IN_PROGRESS = "update_in_progress"
    UNKNOWN_MANIFEST = "unknown_manifest"
    STALE_UPDATE = "stale_update"
    UPDATE_FAILED = "update_failed"
    BUCKET_OUT_OF_ORDER = "bucket_out_of_order"
    BUCKET_MISMATCH = "bucket_mismatch"
    DIGEST_MISMATCH = "digest_mismatch"
    INCOMPLETE_UPDATE = "incomplete_update"
    LANDING_FAILED = "landing_failed"
    TRANSPORT_FAILED = "transport_failed"
    LEASE_LOST = "lease_lost"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ABORTED = "aborted"
    FILES_CHANGED = "files_changed"
    WORKER_LOST = "worker_lost"
    POSTLOAD_FAILED = "postload_failed"
    PROOF_FAILED = "proof_failed"
    CACHE_RESET_FAILED = "cache_reset_failed"
    NOT_SERVING = "not_serving"
    INTERNAL = "internal"
    UNREACHABLE = "unreachable"
    PROTOCOL_ERROR = "protocol_error"
    WEIGHTS_REJECTED = "weights_rejected"
    TRAINER_RANK_LOST = "trainer_rank_lost"
    LAUNCH_FAILED = "launch_failed"


_REFUSALS = {
    ErrorCode.INVALID_REQUEST,
    ErrorCode.MANIFEST_REJECTED,
    ErrorCode.LAYOUT_UNKNOWN,
    ErrorCode.RELOAD_REFUSED,
    ErrorCode.ONLINE_QUANTIZATION,
    ErrorCode.RUNTIME_LAYOUT,
    ErrorCode.UNRECORDED_PARAMETER,
    ErrorCode.OVERLAPPING_STORAGE,
    ErrorCode.STORAGE_UNAVAILABLE,
    ErrorCode.FROZEN_WEIGHTS,
    ErrorCode.DRAFT_SHARES_HEAD,
    ErrorCode.LORA_WITH_MOE,
    ErrorCode.KV_CONNECTOR,
    ErrorCode.SELF_CHECK_FAILED,
    ErrorCode.PARTIAL_REFUSED,
    ErrorCode.STAGING_BUDGET_EXCEEDED,
    ErrorCode.NO_COPY,
    ErrorCode.DISK_RELOAD_OFF,
    ErrorCode.PATH_REFUSED,
    ErrorCode.CHECKPOINT_DAMAGED,
    ErrorCode.TRANSPORT_UNAVAILABLE,
    ErrorCode.RENDEZVOUS_FAILED,
}

#: HTTP status of each code that a server sends. What is not listed is a conflict, 409.
HTTP_STATUS: dict[ErrorCode, int] = {
    **dict.fromkeys(ErrorCode, 409),
    **dict.fromkeys(_REFUSALS, 422),
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.SLOW_BODY: 408,
    ErrorCode.TOO_MANY_CALLS: 429,
    ErrorCode.NOT_SERVING: 503,
    ErrorCode.INTERNAL: 500,
}


class ErrorDetail(BaseModel):
    """The body of every error answer, under the key ``error``."""

    model_config = ConfigDict(extra="ignore")

    code: ErrorCode
    message: str
    update_id: str | None = None
    state: ServerState | None = None
    details: dict[str, Any] = Field(default_factory=dict)


class ErrorBody(BaseModel):
    """``{"error": {...}}``."""

    error: ErrorDetail


def _speakable(value: Any) -> Any:
    """Return ``value`` with every text in a form that UTF-8 has: names of files may hold any bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_speakable(key): _speakable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_speakable(item) for item in value]
    return value


class WeightPushError(Exception):
    """Every failure of a push, on both sides.

    Attributes:
        code: stable name of what went wrong.
        message: what happened, who is concerned, and what to do.
        details: offenders, the peer's own error, limits: whatever a program may want to read.
        update_id: the update that is concerned, if there is one.
        state: the server's state after the failure, if it is known.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        update_id: str | None = None,
        state: ServerState | None = None,
    ) -> None:
        message = _speakable(message)
        super().__init__(f"{message} [{code.value}]")
        self.code = code
        self.message = message
        self.details = _speakable(details or {})
        self.update_id = update_id
        self.state = state

    @property
    def http_status(self) -> int:
        """Status with which a server answers this error."""
        return HTTP_STATUS[self.code]

    def body(self) -> ErrorBody:
        """Return the wire form."""
        return ErrorBody(
            error=ErrorDetail(
                code=self.code,
                message=self.message,
                update_id=self.update_id,
                state=self.state,
                details=self.details,
            )
        )

    @classmethod
    def from_detail(cls, detail: ErrorDetail) -> WeightPushError:
        """Rebuild the exception from its wire form."""
        return cls(detail.code, detail.message, details=detail.details, update_id=detail.update_id, state=detail.state)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not survive the default __reduce__ (worker RPCs, pytest).
        return (_rebuild, (self.body().model_dump(mode="json"),))


def _rebuild(body: dict[str, Any]) -> WeightPushError:
    return WeightPushError.from_detail(ErrorBody.model_validate(body).error)
