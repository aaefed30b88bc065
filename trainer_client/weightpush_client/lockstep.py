"""Several ranks, one push: rank 0 talks to the servers, and tells the others what to gather and how it ended.

All ranks make the same call. Rank 0 leads, the others follow: before each bucket it announces what it will gather, all
say whether they can, and only then all enter the collective. So no rank runs ahead, and a failure anywhere ends the
push everywhere, with its reason, before the next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

import torch
import torch.distributed as dist

from weightpush_client.ranks import Kind, Message, Ranks
from weightpush_client.report import ExcludedServer, PhaseSeconds, PushError, PushReport, ServerReport
from weightpush_client.sources import PieceSource, WeightSource
from weightpush_client.sources.base import rejected
from weightpush_client.sources.pieces import Step
from weightpush_protocol.errors import ErrorBody, ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import Deadlines, UpdateMode
from weightpush_protocol.state import ServerState

# What the calls of a push may take beside its deadlines: status, manifest, planning.
_CALLS_S: Final = 120.0
# How long a rank tries to tell the others that one of them was lost.
_FAREWELL_S: Final = 5.0


class Lockstep:
    """The ranks of ``group``, which must be the same on all of them. Made on all ranks alike.

    A rank that the others wait for longer than the deadlines of a push allow is given up.
    """

    def __init__(self, group: dist.ProcessGroup, deadlines: Deadlines) -> None:
        wait_s = _CALLS_S + deadlines.rendezvous_s + deadlines.drain_s + 2 * deadlines.bucket_s + 3 * deadlines.commit_s
        self._ranks = Ranks(group, wait_s)
        self._over = False

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the servers."""
        return self._ranks.rank == 0

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self._ranks.close()

    def push(
        self, open_source: Callable[[], WeightSource], push: Callable[[WeightSource], PushReport], chunk_bytes: int
    ) -> PushReport:
        """Take part in one push, and return its report on every rank.

        ``open_source`` is called on all ranks, ``push`` on rank 0 alone. About ``chunk_bytes`` are gathered between two
        messages.

        Raises:
            PushError: why the push failed, on every rank the same; ``trainer_rank_lost`` where a rank was lost.
            BaseException: whatever ``open_source`` or ``push`` raise on this rank.
        """
        return self._lead(open_source, push, chunk_bytes) if self.leads else self._follow(open_source)

    def again(self) -> None:
        """Keep the other ranks waiting while rank 0 begins again.

        Raises:
            PushError: one of them failed, or was lost.
        """
        self._tell(Kind.AGAIN)

    def _lead(
        self, open_source: Callable[[], WeightSource], push: Callable[[WeightSource], PushReport], chunk_bytes: int
    ) -> PushReport:
        self._over = False
        source: WeightSource | None = None
        try:
            source = open_source()
            specs: list[tuple[str, str, tuple[int, ...]]] = []
            if source.ranks > 1 and isinstance(source, PieceSource):
                self._refuse_others(source)
                specs = _plain(source)
                source.lead(self._announce, chunk_bytes)
            self._tell(Kind.SPECS, specs)
            report = push(source)
            source.close()
        except BaseException as error:
            # First what was announced, for the others are gathering it; then the reason.
            if source is not None:
                with suppress(Exception):
                    source.close()
            if not self._over:
                self._say_failed(error)
            raise
        # It is committed, whatever has become of the other ranks.
        with suppress(WeightPushError):
            self._ranks.exchange(Kind.DONE, asdict(report))
        return report

    def _follow(self, open_source: Callable[[], WeightSource]) -> PushReport:
        source: WeightSource | None = None
        failure: BaseException | None = None
        try:
            source = open_source()
        except BaseException as error:  # noqa: BLE001 - told to the other ranks first, then raised
            failure = error
        announced: list[Step] = []
        while True:
            if failure is None:
                message = self._ranks.exchange(Kind.FOLLOW)
            else:
                self._say_failed(failure)
                raise failure
            if message.kind is Kind.FAILED:
                raise _error(message)
            if message.kind is Kind.DONE:
                return _report(message.body)
            try:
                if message.kind is Kind.SPECS and message.body:
                    _compare(_plain(source), message.body)
                elif message.kind is Kind.ANNOUNCE:
                    announced = [Step(piece, dtype and getattr(torch, dtype)) for piece, dtype in message.body]
                    _pieces(source).check(announced)
                elif message.kind is Kind.GATHER:
                    _pieces(source).take_part(announced)
            except BaseException as error:  # noqa: BLE001 - told to the other ranks first, then raised
                failure = error

    def _say_failed(self, error: BaseException) -> None:
        # Who was lost in a collective will hardly answer here.
        lost = isinstance(error, WeightPushError) and error.code is ErrorCode.TRAINER_RANK_LOST
        with suppress(WeightPushError):
            self._ranks.exchange(Kind.FAILED, _describe(error), wait_s=_FAREWELL_S if lost else None)

    def _refuse_others(self, source: WeightSource) -> None:
        size = self._ranks.size
        if source.ranks > size:
            raise rejected(
                f"the weights are sharded over {source.ranks} ranks, and the pusher's process_group has {size}: give "
                "it the group of all ranks that hold a part"
            )

    def _announce(self, steps: Sequence[Step]) -> None:
        names = [(step.piece, None if step.dtype is None else str(step.dtype).removeprefix("torch.")) for step in steps]
        self._tell(Kind.ANNOUNCE, names)
        self._tell(Kind.GATHER)

    def _tell(self, kind: Kind, body: Any = None) -> None:
        try:
            message = self._ranks.exchange(kind, body)
        except PushError:
            self._over = True
            raise
        if message.kind is Kind.FAILED:
            self._over = True  # All ranks know.
            raise _error(message)


def _pieces(source: WeightSource | None) -> PieceSource:
    if not isinstance(source, PieceSource):
        raise rejected(f"rank 0 pushes sharded weights, and this rank was given a {type(source).__name__}")
    return source


def _plain(source: WeightSource | None) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(spec.name, spec.dtype, spec.shape) for spec in _pieces(source).specs()]


def _compare(ours: Sequence[tuple[str, str, tuple[int, ...]]], theirs: Sequence[Sequence[Any]]) -> None:
    """Look whether this rank holds what rank 0 does; `PieceSource` numbers its pieces by it."""
    for number in range(max(len(ours), len(theirs))):
        mine = _spec(ours[number]) if number < len(ours) else None
        first = _spec(theirs[number]) if number < len(theirs) else None
        if mine != first:
            raise rejected(
                f"tensor {number + 1} is {_named(mine)} here and {_named(first)} on rank 0: all ranks must push the "
                "same model",
                (mine or first or TensorSpec(name="?", dtype="uint8", shape=())).name,
            )


def _spec(plain: Sequence[Any]) -> TensorSpec:
    name, dtype, shape = plain
    return TensorSpec(name=name, dtype=dtype, shape=tuple(shape))


def _named(spec: TensorSpec | None) -> str:
    return "missing" if spec is None else f"{spec.name!r} {spec.dtype} {list(spec.shape)}"


def _describe(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, WeightPushError):
        error = WeightPushError(ErrorCode.ABORTED, f"the trainer gave up: {type(error).__name__}: {error}"[:2000])
    return {"body": error.body().model_dump(mode="json"), "server": getattr(error, "server", None)}


def _error(message: Message) -> PushError:
    detail = ErrorBody.model_validate(message.body["body"]).error
    return PushError(
        detail.code,
        detail.message if message.rank == 0 else f"rank {message.rank}: {detail.message}",
        server=message.body["server"],
        details={**detail.details, "rank": message.rank},
        update_id=detail.update_id,
        state=detail.state,
    )


def _report(body: dict[str, Any]) -> PushReport:
    servers = tuple(ServerReport(**{**server, "mode": UpdateMode(server["mode"])}) for server in body["servers"])
    excluded = tuple(
        ExcludedServer(
            **{
                **server,
                "state": None if server["state"] is None else ServerState(server["state"]),
                "code": ErrorCode(server["code"]),
            }
        )
        for server in body["excluded"]
    )
    return PushReport(**{**body, "servers": servers, "excluded": excluded, "phases": PhaseSeconds(**body["phases"])})
