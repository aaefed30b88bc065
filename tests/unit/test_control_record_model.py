"""Any sequence of calls on the control record, against a model of a few lines that says what must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from unit.test_shared_state import make_update
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import InFlight, UpdateMode
from weightpush_protocol.state import IllegalTransitionError, Phase, ServerState
from weightpush_protocol.status import CopyRole, CopyStatus
from weightpush_server.public_status import build_status
from weightpush_server.records import ControlRecord, UpdateRecord

BUCKETS = 3
#: More than are remembered, so that one may come again when it is forgotten.
IDS = st.sampled_from("abcdefghijkl")
#: Few, as an update that is aborted ahead never begins.
ABORTED = st.sampled_from("ijkl")
CALLS = st.sampled_from([None, "x", "y"])
#: Update ids are remembered for so many updates.
REMEMBERED = 8


@dataclass
class Running:
    """What the model knows of the update that runs."""

    update_id: str
    epoch: int
    version: str
    origin: ServerState
    keep: bool
    staged: bool = False
    staging: bool = False
    receiving: bool = False
    closed: bool = False
    written: bool = False
    buckets: int = 0
    last_call: str | None = None


@dataclass
class Request:
    """A request that is being answered, and the version it was promised."""

    epoch: int
    version: str
    labels: set[str] = field(default_factory=set)


class ControlRecordMachine(RuleBasedStateMachine):
    """Drives the record as API processes do: each change is a transaction, and one that raises changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.record = ControlRecord(instance_id="i", weight_version="v0")
        self.state = ServerState.SERVING
        self.version = "v0"
        self.epoch = 0
        self.running: Running | None = None
        self.ended: list[tuple[str, bool]] = []
        self.aborted: set[str] = set()
        self.requests: list[Request] = []

    def change(self, work: Callable[[ControlRecord], object]) -> Exception | None:
        """Run ``work`` on a copy, through JSON as the shared file does; keep it unless it raises."""
        draft = ControlRecord.model_validate_json(self.record.model_dump_json())
        try:
            work(draft)
        except (WeightPushError, IllegalTransitionError, RuntimeError) as error:
            return error
        self.record = draft
        return None

    def expect(self, update_id: str, epoch: int | None, error: Exception | None) -> bool:
        """Check how a call for ``update_id`` ended so far; return whether it is for the update that runs."""
        if self.running is not None and self.running.update_id == update_id:
            if epoch is None or epoch == self.running.epoch:
                return True
            wanted = ErrorCode.STALE_UPDATE
        else:
            committed = dict(self.ended).get(update_id)
            wanted = ErrorCode.UPDATE_FAILED if committed is False else ErrorCode.STALE_UPDATE
        assert isinstance(error, WeightPushError)
        assert error.code is wanted
        return False

    @rule(update_id=IDS, keep=st.booleans(), staged=st.booleans())
    def begin(self, update_id: str, keep: bool, staged: bool) -> None:
        known = any(ended == update_id for ended, _ in self.ended)
        mine: list[bool] = []

        def make(record: ControlRecord) -> UpdateRecord:
            return make_update(
                update_id=update_id,
                epoch=record.epoch,
                request_digest=update_id,
                origin=record.state,
                weight_version=f"v{record.epoch}",
                mode=UpdateMode.STAGED if staged else UpdateMode.DIRECT,
                in_flight=InFlight.KEEP if keep else InFlight.WAIT,
                buckets_total=BUCKETS,
            )

        error = self.change(lambda record: mine.append(record.reserve(update_id, update_id, make)[0]))
        if known:
            assert isinstance(error, WeightPushError)
            assert error.code in (ErrorCode.STALE_UPDATE, ErrorCode.UPDATE_FAILED)
        elif update_id in self.aborted:
            assert isinstance(error, WeightPushError)
            assert error.code is ErrorCode.ABORTED
        elif self.running is not None and self.running.update_id == update_id:
            assert (error, mine) == (None, [False])
        elif self.running is not None:
            assert isinstance(error, WeightPushError)
            assert error.code is ErrorCode.UPDATE_IN_PROGRESS
        else:
            assert (error, mine) == (None, [True])
            self.epoch += 1
            self.running = Running(update_id, self.epoch, f"v{self.epoch}", self.state, keep, staged)

    @rule(update_id=ABORTED)
    def abort_ahead(self, update_id: str) -> None:
        assert self.change(lambda record: record.abort_ahead(update_id)) is None
        runs = self.running is not None and self.running.update_id == update_id
        if not runs and update_id not in dict(self.ended):
            self.aborted.add(update_id)

    @precondition(lambda self: self.running is not None and self.running.staged)
    @rule()
    def stage(self) -> None:
        def stage(record: ControlRecord) -> None:
            record.stage()
            record.active(self.running_id).enter(Phase.RECEIVING)

        error = self.change(stage)
        running = self.running
        assert running is not None
        if running.staging or running.closed or running.origin is not ServerState.SERVING:
            assert error is not None
            return
        assert error is None
        running.staging = running.receiving = True
        self.state = ServerState.STAGING

    @precondition(lambda self: self.running is None)
    @rule()
    def nothing_runs(self) -> None:
        error = WeightPushError(ErrorCode.ABORTED, "too late")
        assert self.change(ControlRecord.close_gate) is not None
        assert self.change(lambda record: record.commit(fingerprint="f" * 64)) is not None
        assert self.change(lambda record: record.fail(error)) is not None

    @precondition(lambda self: self.running is not None and not self.running.closed)
    @rule()
    def close_gate(self) -> None:
        assert self.change(lambda record: record.commit(fingerprint="f" * 64)) is not None  # Too early.
        assert self.change(ControlRecord.close_gate) is None
        assert self.change(ControlRecord.close_gate) is not None
        assert self.running is not None
        self.running.closed = True
        self.state = ServerState.UPDATING

    @precondition(lambda self: self.running is not None and self.running.closed and not self.running.written)
    @rule()
    def open_model(self) -> None:
        assert self.running is not None
        staging = self.running.staging

        def open_model(record: ControlRecord) -> None:
            update = record.active(self.running_id)
            update.enter(Phase.OPENING)
            update.written = True
            update.enter(Phase.LANDING if staging else Phase.RECEIVING)

        assert self.change(open_model) is None
        self.running.written, self.running.receiving = True, not staging

    @property
    def running_id(self) -> str:
        assert self.running is not None
        return self.running.update_id

    @rule(
        update_id=IDS,
        epoch=st.sampled_from([None, 0, 1, 2, 3]),
        bucket=st.integers(0, BUCKETS),
        call_id=CALLS,
        as_body=st.booleans(),
    )
    def stream(self, update_id: str, epoch: int | None, bucket: int, call_id: str | None, as_body: bool) -> None:
        self._stream(update_id, epoch, bucket, call_id, as_body)

    @precondition(lambda self: self.running is not None and self.running.written)
    @rule(bucket=st.integers(0, BUCKETS), call_id=CALLS)
    def stream_on(self, bucket: int, call_id: str | None) -> None:
        self._stream(self.running_id, None, bucket, call_id, False)

    def _stream(self, update_id: str, epoch: int | None, bucket: int, call_id: str | None, as_body: bool) -> None:
        fresh: list[bool] = []

        def stream(record: ControlRecord) -> None:
            fresh.append(record.active(update_id, epoch).take_bucket(bucket, call_id, as_body=as_body))

        error = self.change(stream)
        if not self.expect(update_id, epoch, error):
            return
        running = self.running
        assert running is not None
        if call_id is not None and call_id == running.last_call and bucket == running.buckets - 1:
            assert (error, fresh) == (None, [False])
        elif running.receiving and not as_body and bucket == running.buckets and bucket < BUCKETS:
            assert (error, fresh) == (None, [True])
            running.buckets += 1
            running.last_call = call_id
        else:
            assert isinstance(error, WeightPushError)
            assert error.code is ErrorCode.BUCKET_OUT_OF_ORDER

    @rule(update_id=IDS, epoch=st.sampled_from([None, 0, 1, 2, 3]))
    def look(self, update_id: str, epoch: int | None) -> None:
        found: list[UpdateRecord] = []
        error = self.change(lambda record: found.append(record.active(update_id, epoch)))
        if self.expect(update_id, epoch, error):
            assert error is None
            assert found[0].update_id == update_id

    @precondition(lambda self: self.running is not None and self.running.written)
    @rule()
    def commit(self) -> None:
        running = self.running
        assert running is not None
        assert self.change(lambda record: record.commit(fingerprint="f" * 64)) is None
        self.state, self.version = ServerState.SERVING, running.version
        self._end(committed=True)

    @precondition(lambda self: self.running is not None)
    @rule(
        details=st.dictionaries(st.text(max_size=5), st.text(max_size=3000), max_size=3),
        message=st.text(),
        kept=st.booleans(),
    )
    def fail(self, details: dict[str, str], message: str, kept: bool) -> None:
        copy = CopyStatus(role=CopyRole.SERVED, weight_version=self.version, bytes=1)
        undoing: list[UpdateRecord | None] = []

        def fail(record: ControlRecord) -> None:
            failed = record.fail(WeightPushError(ErrorCode.ABORTED, message * 50, details=dict(details)))
            if kept:
                undoing.append(record.begin_undoing(failed, copy))

        error = self.change(fail)
        running = self.running
        assert running is not None
        assert error is None
        self.state = ServerState.FAILED if running.written else running.origin
        assert self.record.last_error is not None
        assert self.record.last_error.update_id == running.update_id
        self._end(committed=False)
        if kept and running.staged and self.state is ServerState.FAILED:
            (begun,) = undoing
            assert begun is not None
            self.epoch += 1
            self.running = Running(begun.update_id, self.epoch, self.version, ServerState.FAILED, keep=False)
        else:
            assert undoing in ([], [None])

    def _end(self, *, committed: bool) -> None:
        assert self.running is not None
        self.ended = [*self.ended, (self.running.update_id, committed)][-REMEMBERED:]
        if committed and not self.running.keep:
            self.requests.clear()  # None lives through such an update.
        self.running = None

    @precondition(lambda self: self.record.gate_open)
    @rule()
    def request(self) -> None:
        self.requests.append(Request(self.record.committed_epoch, self.record.weight_version))

    @invariant()
    def state_and_version_are_those_of_the_model(self) -> None:
        record = self.record
        assert (record.state, record.weight_version, record.epoch) == (self.state, self.version, self.epoch)
        assert (record.update is None) == (self.running is None)
        assert record.gate_open == (self.state in (ServerState.SERVING, ServerState.STAGING))

    @invariant()
    def nothing_half_written_is_served(self) -> None:
        if self.running is not None and self.running.written:
            assert not self.record.gate_open

    @invariant()
    def an_answer_is_labelled_with_what_was_promised_or_kept_across(self) -> None:
        for request in self.requests:
            label = self.record.label(entered_epoch=request.epoch, entered_version=request.version)
            assert label.split(", ")[0] == request.version
            assert label == request.version or label.endswith(f", {self.version}")

    @invariant()
    def it_fits_its_place_in_the_shared_file(self) -> None:
        assert len(self.record.model_dump_json().encode()) < 250_000
        assert build_status(self.record, []).serving == self.record.gate_open


ControlRecordMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)
TestControlRecord = ControlRecordMachine.TestCase
