"""What a push tells its caller: progress, the report, and the one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from weightpush_protocol.errors import ErrorBody, ErrorCode, WeightPushError
from weightpush_protocol.messages import FinishAnswer, UpdateMode
from weightpush_protocol.state import ServerState


class PushError(WeightPushError):
    """A push that failed. The servers were told to abort; ``state`` says what that left behind, where it is known.

    Attributes:
        server: URL of the server whose answer or silence ended the push; None where the trainer's side did.
        message: the server's own text where it gave one.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        server: str | None = None,
        details: dict[str, Any] | None = None,
        update_id: str | None = None,
        state: ServerState | None = None,
    ) -> None:
        super().__init__(code, message, details=details, update_id=update_id, state=state)
        self.server = server

    def __str__(self) -> str:
        text = f"{self.message} [{self.code.value}]"
        return f"{self.server}: {text}" if self.server else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.body().model_dump(mode="json"), self.server))

    @classmethod
    def of(cls, error: WeightPushError, server: str | None = None) -> PushError:
        """Return ``error`` as a `PushError`, unchanged where it already is one."""
        if isinstance(error, PushError):
            return error
        return cls(
            error.code,
            error.message,
            server=server,
            details=error.details,
            update_id=error.update_id,
            state=error.state,
        )


def _rebuild(body: dict[str, Any], server: str | None) -> PushError:
    return PushError.of(WeightPushError.from_detail(ErrorBody.model_validate(body).error), server)


class PushPhase(StrEnum):
    """Where a push is, as its caller sees it. During ``finish`` all bytes have left, and nothing is served yet."""

    CHECK = "check"
    BEGIN = "begin"
    STREAM = "stream"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class PushProgress:
    """What has left the trainer so far: counts of buckets and tensors, and bytes, each with its total."""

    phase: PushPhase
    bucket: int
    buckets: int
    tensors: int
    tensors_total: int
    bytes: int
    bytes_total: int


#: Called from the thread that pushes. What it raises aborts the push and reaches the caller of ``push``.
ProgressCallback = Callable[[PushProgress], None]


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server's part: its own seconds since ``begin``, and seconds during which it did not serve.

    ``mode``: how it carried the push out; a server that serves nothing anyway takes a staged push directly.
    ``instance_id``: which start of the server that was; ``weight_version``: what it serves since.
    """

    url: str
    fingerprint: str
    seconds: float
    pause_seconds: float
    bytes: int
    mode: UpdateMode = UpdateMode.DIRECT
    instance_id: str = ""
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class ExcludedServer:
    """A server that did not take part to the end, and why; ``state`` and what follows are as it said afterwards.

    ``weight_version``: what it serves if ``state`` is ``serving``, else what it served last. None where it did not
    answer.
    """

    url: str
    instance_id: str | None
    state: ServerState | None
    weight_version: str | None
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Where the trainer's time went. ``send`` runs beside ``gather`` and ``digest``, so that the sum exceeds the whole.

    ``check``: status, manifests, alignment. ``begin``: until all servers were open. ``gather``: reading and casting
    tensors into the buffer. ``digest``: hashing them. ``send``: announcing and sending buckets. ``wait``: the gathering
    side had nothing to do but wait for the sending side, or over shm for servers to be done with a buffer.
    ``prepare``: until several servers were all ready to commit. ``finish``: until all served again.
    """

    check: float = 0.0
    begin: float = 0.0
    gather: float = 0.0
    digest: float = 0.0
    send: float = 0.0
    wait: float = 0.0
    prepare: float = 0.0
    finish: float = 0.0


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push that all of ``servers`` committed. ``bytes`` are those of the weights, whatever the number of servers.

    ``excluded``: servers that do not serve it, under ``on_server_failure="exclude"``.
    """

    weight_version: str
    update_id: str
    bytes: int
    tensors: int
    buckets: int
    seconds: float
    transport: str
    servers: tuple[ServerReport, ...]
    phases: PhaseSeconds
    excluded: tuple[ExcludedServer, ...] = ()

    @property
    def pause_seconds(self) -> float:
        """For how long the slowest server did not serve."""
        return max((server.pause_seconds for server in self.servers), default=0.0)

    def __str__(self) -> str:
        rate = self.bytes / self.seconds / 1e6 if self.seconds else 0.0
        lines = [
            f"pushed {self.weight_version} in {self.seconds:.2f} s: {self.tensors} tensors, {self.bytes / 1e6:.1f} MB "
            f"in {self.buckets} {'bucket' if self.buckets == 1 else 'buckets'} over {self.transport} ({rate:.0f} MB/s)"
        ]
        if not self.servers:
            lines = [f"nothing to push: every server that answered serves {self.weight_version}"]
        lines += [
            f"  {server.url}: {server.mode.value}, not serving for {server.pause_seconds:.2f} s, "
            f"fingerprint {server.fingerprint}"
            for server in self.servers
        ]
        lines += [
            f"  {server.url}: EXCLUDED, {server.state.value if server.state is not None else 'not there'}: "
            f"{server.message} [{server.code.value}]"
            for server in self.excluded
        ]
        names = ("check", "begin", "gather", "digest", "send", "wait", "prepare", "finish")
        lines.append("  seconds: " + ", ".join(f"{name} {getattr(self.phases, name):.2f}" for name in names))
        return "\n".join(lines)


class ServedAnswers(list[FinishAnswer]):
    """What each server of ``urls`` serves after an update that it made by itself; a line for each, also at a prompt."""

    def __init__(self, urls: Iterable[str], answers: Iterable[FinishAnswer]) -> None:
        super().__init__(answers)
        self.urls = tuple(urls)

    def __str__(self) -> str:
        return "\n".join(
            f"{url} serves {answer.weight_version}: {answer.tensors} tensors, {answer.bytes / 1e6:.1f} MB in "
            f"{answer.seconds:.2f} s, not serving for {answer.pause_seconds:.2f} s, fingerprint {answer.fingerprint}"
            for url, answer in zip(self.urls, self, strict=True)
        )

    __repr__ = __str__
