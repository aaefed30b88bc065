"""Several ranks, one push: rank 0 talks to the servers, and tells the others what to gather and how it ended.

All ranks make the same call. Rank 0 leads, the others follow: before each bucket it announces what it will gather, all
say whether they can, and only then all enter the collective. So no rank runs ahead, and a failure anywhere ends the
push everywhere, with its reason, before the next collective.

The ranks talk over a Gloo group of their own, so that nothing here gets between the trainer's collectives, and with
deadlines of their own. A message is a header (kind, number of bytes) from every rank, then the bytes of one: of the
lowest rank that failed, else of rank 0. They are JSON, never pickle.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final

import torch
import torch.distributed as dist

from weightpush_client.report import PhaseSeconds, PushError, PushReport, ServerReport
from weightpush_client.sources import PieceSource, WeightSource
from weightpush_client.sources.base import rejected
from weightpush_client.sources.pieces import Step
from weightpush_protocol.errors import ErrorBody, ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import Deadlines

# What the calls of a push may take beside its deadlines: status, manifest, planning.
_CALLS_S: Final = 120.0


class _Kind(IntEnum):
    FOLLOW = 0  # Of a rank that is ready for whatever rank 0 says.
    SPECS = 1
    ANNOUNCE = 2
    GATHER = 3
    DONE = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class _Message:
    kind: _Kind
    rank: int
    body: Any


class Lockstep:
    """The ranks of ``group``, which must be the same on all of them. Made on all ranks alike.

    A rank that the others wait for longer than the deadlines of a push allow is given up.
    """

    def __init__(self, group: dist.ProcessGroup, deadlines: Deadlines) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.wait_s = _CALLS_S + (
            deadlines.rendezvous_s + deadlines.drain_s + 2 * deadlines.bucket_s + 2 * deadlines.commit_s
        )
        self._control: dist.ProcessGroup | None = None
        self._over = False

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the servers."""
        return self.rank == 0

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
        if self._control is None:
            self._control = self._connect()
        return self._lead(open_source, push, chunk_bytes) if self.leads else self._follow(open_source)

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
            self._tell(_Kind.SPECS, specs)
            report = push(source)
            source.close()
        except BaseException as error:
            # First what was announced, for the others are gathering it; then the reason.
            if source is not None:
                with suppress(Exception):
                    source.close()
            if not self._over:
                with suppress(WeightPushError):
                    self._exchange(_Kind.FAILED, _describe(error, self.rank))
            raise
        # It is committed, whatever has become of the other ranks.
        with suppress(WeightPushError):
            self._exchange(_Kind.DONE, asdict(report))
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
                message = self._exchange(_Kind.FOLLOW)
            else:
                with suppress(WeightPushError):
                    self._exchange(_Kind.FAILED, _describe(failure, self.rank))
                raise failure
            if message.kind is _Kind.FAILED:
                raise _error(message)
            if message.kind is _Kind.DONE:
                return _report(message.body)
            try:
                if message.kind is _Kind.SPECS and message.body:
                    _compare(_plain(source), message.body)
                elif message.kind is _Kind.ANNOUNCE:
                    announced = [Step(piece, dtype and getattr(torch, dtype)) for piece, dtype in message.body]
                    _pieces(source).check(announced)
                elif message.kind is _Kind.GATHER:
                    _pieces(source).take_part(announced)
            except BaseException as error:  # noqa: BLE001 - told to the other ranks first, then raised
                failure = error

    def _refuse_others(self, source: WeightSource) -> None:
        if source.ranks > self.size:
            raise rejected(
                f"the weights are sharded over {source.ranks} ranks, and the pusher's process_group has {self.size}: "
                "give it the group of all ranks that hold a part"
            )

    def _announce(self, steps: Sequence[Step]) -> None:
        names = [(step.piece, None if step.dtype is None else str(step.dtype).removeprefix("torch.")) for step in steps]
        self._tell(_Kind.ANNOUNCE, names)
        self._tell(_Kind.GATHER)

    def _tell(self, kind: _Kind, body: Any = None) -> None:
        message = self._exchange(kind, body)
        if message.kind is _Kind.FAILED:
            self._over = True  # All ranks know.
            raise _error(message)

    def _exchange(self, kind: _Kind, body: Any = None) -> _Message:
        """Say ``kind`` and hear what all ranks hear; every rank calls this the same number of times."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = [torch.zeros(2, dtype=torch.int64) for _ in range(self.size)]
        try:
            self._wait(
                dist.all_gather(headers, torch.tensor([kind, len(data)]), group=self._control, async_op=True), kind
            )
            said = [(_Kind(int(header[0])), int(header[1])) for header in headers]
            failed = [rank for rank, (other, _) in enumerate(said) if other is _Kind.FAILED]
            # Once it is committed, no failure of another rank undoes it.
            speaker = failed[0] if failed and said[0][0] is not _Kind.DONE else 0
            spoken, size = said[speaker]
            text = torch.zeros(size, dtype=torch.uint8)
            if size:
                if speaker == self.rank:
                    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                self._wait(dist.broadcast(text, group=self._control, group_src=speaker, async_op=True), kind)
        except RuntimeError as error:
            self._control = None  # It cannot be used again; the next push makes a new one.
            self._over = True
            raise PushError(
                ErrorCode.TRAINER_RANK_LOST,
                f"rank {self.rank} of {self.size} lost the trainer's other ranks: one of them ended, did not push, or "
                f"kept the others waiting for {self.wait_s:g} s: {error}",
            ) from error
        return _Message(spoken, speaker, json.loads(bytes(text.tolist())) if size else None)

    def _wait(self, work: Any, kind: _Kind) -> None:
        pause = 0.0005
        # Waiting inside Gloo could not be interrupted by Ctrl-C.
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        work.wait()

    def _connect(self) -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(self._group)
        try:
            control: dist.ProcessGroup = dist.new_group(
                ranks, backend="gloo", timeout=timedelta(seconds=self.wait_s), use_local_synchronization=True
            )
        except RuntimeError as error:
            raise PushError(
                ErrorCode.TRAINER_RANK_LOST,
                f"rank {self.rank} cannot reach the other {self.size - 1} ranks of the trainer over Gloo: {error}",
            ) from error
        return control


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


def _describe(error: BaseException, rank: int) -> dict[str, Any]:
    if not isinstance(error, WeightPushError):
        error = WeightPushError(ErrorCode.ABORTED, f"the trainer gave up: {type(error).__name__}: {error}"[:2000])
    return {"body": error.body().model_dump(mode="json"), "server": getattr(error, "server", None)}


def _error(message: _Message) -> PushError:
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
    servers = tuple(ServerReport(**server) for server in body.pop("servers"))
    return PushReport(**{**body, "servers": servers, "phases": PhaseSeconds(**body["phases"])})
