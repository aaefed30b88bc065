"""Bodies of the HTTP calls under ``/reload`` and of the status that everybody reads.

Requests reject unknown fields, so that a typing error is an error. Answers ignore them, so that an older client reads
a newer server.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    model_validator,
)

from weightpush_protocol.manifest import MAX_NAME_LENGTH, MAX_TENSORS, Manifest, TensorSpec
from weightpush_protocol.transports.base import TransportConfig

#: Header on every answer of a generation route: the weight version that computed it.
VERSION_HEADER: Final = "X-Weight-Version"
#: Version of the weights that a server started with, unless ``--weight-version`` says otherwise.
INITIAL_VERSION: Final = "default"
#: What Linux allows, in characters.
MAX_PATH_LENGTH: Final = 4096


def utc_now() -> datetime:
    """Return the present moment, aware of its zone."""
    return datetime.now(UTC)


def _printable_ascii(value: str) -> str:
    # The version travels in a header; anything else would be cut, folded or refused there.
    if not re.fullmatch(r"[\x21-\x7e]+", value) or "," in value:
        raise ValueError("use visible ASCII characters without spaces and commas")
    return value


WeightVersion = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_printable_ascii)]
UpdateId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
#: What JSON readers of any language can hold.
Epoch = Annotated[int, Field(ge=0, lt=2**53)]
BucketNumber = Annotated[int, Field(ge=0, lt=2**31)]
ProtocolVersion = Annotated[str, Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}$")]
#: Digest of one tensor, see ``weightpush_protocol.digest``.
TensorDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
#: Name of a manifest, see ``Manifest.digest``.
ManifestDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TensorName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]


class UpdateMode(StrEnum):
    """``direct`` writes into the live model; ``staged`` keeps serving the old weights while bytes arrive."""

    DIRECT = "direct"
    STAGED = "staged"


class InFlight(StrEnum):
    """What becomes of requests that run when an update begins.

    ``wait``: let them finish, abort what is left when ``drain_s`` is over. ``abort``: end them now, with what they
    have. ``keep``: freeze them and let them go on with the new weights (their header then names all versions in turn).
    """

    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"


class DigestKind(StrEnum):
    """Whether each tensor's bytes are checked on arrival. ``none`` is for senders that cannot compute digests."""

    WP64 = "wp64"
    NONE = "none"


class _Request(BaseModel):
    # A validation error must not print the transport's key.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Deadlines(_Request):
    """How long each wait of an update may last, in seconds.

    ``rendezvous_s``: data plane up. ``bucket_s``: one bucket from its announcement to its landing. ``drain_s``: running
    requests end by themselves under ``in_flight="wait"``. ``commit_s``: post-load processing, proof, caches.
    ``lease_s``: no call and no byte from the trainer.

    ===========================  =================================
    ``Deadlines()``              the defaults
    ``Deadlines(lease_s=10)``    a dead trainer is noticed in 10 s
    ===========================  =================================
    """

    rendezvous_s: PositiveFloat = Field(default=30.0, le=3600)
    bucket_s: PositiveFloat = Field(default=60.0, le=3600)
    drain_s: PositiveFloat = Field(default=30.0, le=3600)
    commit_s: PositiveFloat = Field(default=300.0, le=3600)
    lease_s: PositiveFloat = Field(default=60.0, le=3600)


class BeginCall(_Request):
    """``POST /reload/begin``. A repeated call with the same ``update_id`` gets the same answer.

    ``manifest_digest`` stands for a manifest that the server has taken before. It remembers the last few, until it is
    restarted; of any other it says ``unknown_manifest``, and nothing has changed: send the whole one then.

    ``partial``: the manifest may leave out tensors, which then stay as they are. The server refuses if it cannot keep
    them exactly. Otherwise the manifest must be a complete checkpoint. ``protocol``: the client's version of this
    contract; a server that cannot do all that this version holds refuses.
    """

    weight_version: WeightVersion
    manifest: Manifest | None = None
    manifest_digest: ManifestDigest | None = None
    mode: UpdateMode = UpdateMode.DIRECT
    transport: TransportConfig
    in_flight: InFlight = InFlight.WAIT
    deadlines: Deadlines = Deadlines()
    digest: DigestKind = DigestKind.WP64
    partial: bool = False
    update_id: UpdateId | None = None
    protocol: ProtocolVersion | None = None

    @model_validator(mode="after")
    def _one_manifest(self) -> Self:
        if (self.manifest is None) == (self.manifest_digest is None):
            raise ValueError("bring the manifest, or the digest of one that the server knows")
        return self

    def with_manifest(self, manifest: Manifest) -> BeginRequest:
        """Return the request that this call stands for, whose manifest is ``manifest``."""
        fields = {name: getattr(self, name) for name in BeginCall.model_fields}
        return BeginRequest.model_construct(**{**fields, "manifest": manifest, "manifest_digest": None})


class BeginRequest(BeginCall):
    """A ``begin`` whose manifest is at hand."""

    manifest: Manifest

    def by_digest(self) -> BeginCall:
        """Return the call that names the manifest instead of bringing it."""
        fields = {name: getattr(self, name) for name in BeginCall.model_fields}
        return BeginCall(**{**fields, "manifest": None, "manifest_digest": self.manifest.digest()})


class PlanSummary(Answer):
    """How the tensors of an update land: counts of tensors, and the bytes of all.

    ``in_place``: copied to where the weights live. ``scratch``: copied to new storage, from which post-load processing
    makes the weights. ``via_loader``: written by the model's own loaders, which transform them. ``ignored``: no rank
    needs them. Where ranks differ, a tensor counts once, under the slowest of their ways.
    """

    in_place: int = 0
    scratch: int = 0
    via_loader: int = 0
    ignored: int = 0
    bytes: int = 0


class BeginAnswer(Answer):
    """The server waits for buckets. ``mode``: as asked for, but ``direct`` where nothing is served meanwhile anyway."""

    update_id: str
    epoch: int
    accepted_transport: str
    mode: UpdateMode = UpdateMode.DIRECT
    plan: PlanSummary


class StreamRequest(_Request):
    """``POST /reload/stream`` as JSON: bucket ``bucket`` comes next over the transport of the update.

    ``count``: and so many in all from this one on. Only ``shm`` can have more than one announced: there the digests
    come with each bucket, and are not in the call.

    A call repeated with its ``call_id`` is a retry and changes nothing; the same bucket under another one is an error.
    """

    update_id: UpdateId
    epoch: Epoch | None = None
    bucket: BucketNumber
    count: Annotated[int, Field(ge=1, le=MAX_TENSORS)] = 1
    call_id: UpdateId | None = None
    digests: Annotated[dict[TensorName, TensorDigest], Field(max_length=MAX_TENSORS)] = Field(default_factory=dict)


class StreamAnswer(Answer):
    """Progress after a bucket was accepted (collective) or landed (body); ``landed`` names the tensors of a body."""

    update_id: str
    bucket: int
    landed: list[str] = Field(default_factory=list)
    tensors_done: int
    tensors_total: int
    bytes_done: int
    bytes_total: int


class KeepRequest(_Request):
    """``POST /reload/keep``: the trainer is there, and waits for others; renews the lease and does nothing else."""

    update_id: UpdateId
    epoch: Epoch | None = None


class KeepAnswer(Answer):
    """The update runs; its lease ends ``lease_s`` seconds from now."""

    update_id: str
    epoch: int
    lease_s: float


class PrepareRequest(_Request):
    """``POST /reload/prepare``: all bytes have left; go as far as possible without serving the new weights."""

    update_id: UpdateId
    epoch: Epoch | None = None


class PrepareAnswer(Answer):
    """Nothing is left but what ``finish`` alone may do.

    ``fingerprint`` is that of the new weights where they are in the model already; None for a staged update, whose
    bytes are complete and checked, but land in ``finish``.
    """

    update_id: str
    epoch: int
    fingerprint: str | None = None


class FinishRequest(_Request):
    """``POST /reload/finish``."""

    update_id: UpdateId
    epoch: Epoch | None = None


class FinishAnswer(Answer):
    """The new weights serve. Seconds since ``begin``, and seconds during which the gate was closed."""

    update_id: str
    weight_version: str
    fingerprint: str
    tensors: int
    bytes: int
    seconds: float
    pause_seconds: float


class RollbackRequest(_Request):
    """``POST /reload/rollback``, also without a body: back to a copy that the server keeps.

    From ``failed`` that is the version committed last, from ``serving`` the one before it.
    """

    update_id: UpdateId | None = None
    in_flight: InFlight = InFlight.WAIT
    deadlines: Deadlines = Deadlines()


class DiskReloadRequest(_Request):
    """``POST /reload``: load the safetensors checkpoint in a directory that the server sees.

    ``path``: absolute, and below one of the server's ``--reload-root`` directories. ``staged``: the files are copied to
    host memory while the old weights serve; ``direct``: they are read into the live model, which needs no memory for a
    copy and pauses for longer. A repeated call with the same ``update_id`` gets the same answer.

    ``digests``: what the tensors in the files must be; other files are refused before anything is written. A directory
    that is only half written can look whole: whoever knows what should be in it says so here.
    """

    path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_LENGTH)]
    weight_version: WeightVersion
    mode: UpdateMode = UpdateMode.STAGED
    in_flight: InFlight = InFlight.WAIT
    deadlines: Deadlines = Deadlines()
    digests: dict[TensorName, TensorDigest] = Field(default_factory=dict)
    update_id: UpdateId | None = None


class AbortRequest(_Request):
    """``POST /reload/abort``."""

    update_id: UpdateId
    epoch: Epoch | None = None
    reason: Annotated[str, Field(max_length=1000)] = "aborted by the client"


class VerifyRequest(_Request):
    """``POST /reload/verify``: what a checkpoint holds, as its tensors and their digests; nothing: only look.

    ``digests`` are those of ``weightpush_protocol.digest``, of the tensors in the dtypes that are named here.
    """

    tensors: Annotated[tuple[TensorSpec, ...], Field(max_length=MAX_TENSORS)] = ()
    digests: Annotated[dict[TensorName, TensorDigest], Field(max_length=MAX_TENSORS)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _every_tensor_has_a_digest(self) -> VerifyRequest:
        for spec in self.tensors:
            if spec.name not in self.digests:
                raise ValueError(f"tensor {spec.name!r} has no digest")
        return self


class VerifyDifference(Answer):
    """One way in which what is served is not what it should be.

    ``kind``: ``digest`` (the served tensor has other bytes), ``unrecorded`` (its digest was never taken), one of
    ``weightpush_protocol.manifest.ProblemKind`` (names, shapes, dtypes), or, of a tensor in a worker's memory,
    ``changed`` and ``vanished`` since the weights were committed. ``expected`` is what the checkpoint or the commit
    says.
    """

    kind: str
    name: str
    expected: str | None = None
    given: str | None = None
    worker_rank: int | None = None


class VerifyAnswer(Answer):
    """What a server found out about itself.

    ``equal``: nothing changed in memory since the commit, and what was committed is the checkpoint that was asked
    about, if one was. ``intact`` is the first half alone: ``changed`` lists the first tensors that are not as they
    were, ``converted`` those that the runtime itself made or cast since (tables, workspaces), which is no fault.
    ``differing`` lists the first tensors of the checkpoint that are not what was committed, out of ``compared``.
    ``unseen_bytes`` of weights lie in native handles that cannot be read back; only their landing was checked.
    """

    equal: bool
    intact: bool
    weight_version: str
    fingerprint_committed: str
    fingerprint_now: str
    tensors: int
    changed: list[VerifyDifference] = Field(default_factory=list)
    changed_total: int = 0
    converted: list[str] = Field(default_factory=list)
    compared: int = 0
    differing: list[VerifyDifference] = Field(default_factory=list)
    differing_total: int = 0
    unseen_bytes: int = 0


class ManifestAnswer(Answer):
    """``GET /reload/manifest``: the checkpoint that this server's model expects.

    ``optional`` tensors may be sent or left out (a tied ``lm_head``). ``tied`` names, for those of them that have no
    bytes of their own, the tensor that they must equal, since a cold start on two different ones would untie them.
    ``digest``: a name for this answer, equal as long as nothing in it changes; the status shows it as ``expects``.
    """

    tensors: list[TensorSpec]
    optional: list[TensorSpec] = Field(default_factory=list)
    tied: dict[str, str] = Field(default_factory=dict)
    digest: str | None = None
