"""Counters and series, from a shared file that several processes write."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from support.prometheus import Samples, parse, value
from unit.test_shared_state import make_update
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import UpdateMode
from weightpush_protocol.state import Phase, ServerState
from weightpush_protocol.status import CopyRole, CopyStatus
from weightpush_server.observe import series
from weightpush_server.observe.exposition import WeightPushCollector
from weightpush_server.observe.tally import Distribution, Tally
from weightpush_server.records import ControlRecord, WorkerRecord
from weightpush_server.shared_state import SharedState

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shared(tmp_path: Path) -> SharedState:
    control = ControlRecord(instance_id="i", weight_version="v0")
    return SharedState.create(tmp_path / "state", workers=1, control=control)


def scrape(shared: SharedState, *, engine_dead: bool = False) -> Samples:
    """Return what Prometheus would read."""
    registry = CollectorRegistry()
    registry.register(WeightPushCollector(shared, lambda: engine_dead))
    return parse(generate_latest(registry).decode())


def begin(shared: SharedState, **changes: object) -> None:
    with shared.transaction() as control:
        update_id = f"u{control.epoch + 1}"
        control.reserve(
            update_id,
            "d",
            lambda now: make_update(**{"update_id": update_id, "epoch": now.epoch, "origin": now.state, **changes}),
        )


def push(shared: SharedState, *, seconds: float = 0.0, **changes: object) -> None:
    """A whole direct update whose gate was closed for ``seconds``."""
    begin(shared, **changes)
    with shared.transaction() as control:
        assert control.update is not None
        control.update.enter(Phase.DRAINING)
        control.close_gate()
    with shared.transaction() as control:
        assert control.update is not None
        assert control.update.gate_closed is not None
        control.update.gate_closed -= seconds
        control.update.started -= seconds
        control.update.worker_seconds = {"land": 0.25, "postload": 0.5}
        control.commit(fingerprint="f")


def fail(shared: SharedState, code: ErrorCode, *, written: bool = False) -> None:
    if written:
        with shared.transaction() as control:
            assert control.update is not None
            control.close_gate()
            control.update.written = True
    with shared.transaction() as control:
        control.fail(WeightPushError(code, "it broke"))


def test_every_series_is_there_before_anything_happened(shared: SharedState) -> None:
    registry = CollectorRegistry()
    registry.register(WeightPushCollector(shared, lambda: False))
    page = generate_latest(registry).decode()
    for each in series.ALL:
        name = each.name.removesuffix("_total") + ("_total" if each.kind is series.Kind.COUNTER else "")
        assert f"# TYPE {name} {each.kind.value}" in page
        assert f"# HELP {name} {each.meaning}" in page
    samples = scrape(shared)
    assert value(samples, "weightpush_state", state="serving") == 1
    assert sum(number for (name, _), number in samples.items() if name == "weightpush_state") == 1
    assert value(samples, "weightpush_updates_total", mode="staged", outcome="failed") == 0
    assert value(samples, "weightpush_pause_seconds_bucket", mode="direct", le="+Inf") == 0
    assert value(samples, "weightpush_weight_version_info", weight_version="v0") == 1
    assert not [name for name, _ in samples if name == "weightpush_last_update_timestamp_seconds"]


def test_names_are_as_prometheus_wants_them() -> None:
    assert len({each.name for each in series.ALL}) == len(series.ALL)
    for each in series.ALL:
        assert re.fullmatch(r"weightpush_[a-z_]+", each.name)
        assert each.name.endswith("_total") is (each.kind is series.Kind.COUNTER)
        unit = each.name.removesuffix("_total").rpartition("_")[2]
        if each.kind is series.Kind.HISTOGRAM:
            assert unit == "seconds"
        assert not {"minutes", "ms", "milliseconds", "mb", "kb", "percent"} & set(each.name.split("_"))


def test_committed_updates_are_counted_with_bytes_seconds_and_pauses(shared: SharedState) -> None:
    before = time.time()
    for seconds in (0.02, 3.0, 700.0):
        push(shared, seconds=seconds)
    samples = scrape(shared)
    assert value(samples, "weightpush_updates_total", mode="direct", outcome="committed") == 3
    assert value(samples, "weightpush_update_bytes_total", transport="gloo") == 36
    assert value(samples, "weightpush_update_bytes_total", transport="shm") == 0
    for name in ("weightpush_pause_seconds", "weightpush_update_seconds"):
        assert value(samples, f"{name}_count", mode="direct") == 3
        assert value(samples, f"{name}_sum", mode="direct") == pytest.approx(703.02, abs=1)
        buckets = {le: value(samples, f"{name}_bucket", mode="direct", le=le) for le in ("0.01", "1", "5", "300")}
        assert buckets == {"0.01": 0, "1": 1, "5": 2, "300": 2}
        assert value(samples, f"{name}_bucket", mode="direct", le="+Inf") == 3
    assert value(samples, "weightpush_worker_seconds_total", part="postload") == 1.5
    assert value(samples, "weightpush_phase_seconds_count", phase="checking") == 3
    assert value(samples, "weightpush_phase_seconds_count", phase="draining") == 3
    assert value(samples, "weightpush_phase_seconds_count", phase="closing") == 0
    assert before - 1 <= value(samples, "weightpush_last_update_timestamp_seconds") <= time.time() + 1


def test_failures_count_once_by_code_and_by_what_they_left(shared: SharedState) -> None:
    begin(shared)
    fail(shared, ErrorCode.MANIFEST_REJECTED)
    begin(shared)
    fail(shared, ErrorCode.LEASE_LOST, written=True)
    samples = scrape(shared)
    assert value(samples, "weightpush_updates_total", mode="direct", outcome="untouched") == 1
    assert value(samples, "weightpush_updates_total", mode="direct", outcome="failed") == 1
    assert value(samples, "weightpush_update_failures_total", code="manifest_rejected") == 1
    assert value(samples, "weightpush_update_failures_total", code="lease_lost") == 1
    assert value(samples, "weightpush_lease_losses_total") == 1
    assert value(samples, "weightpush_state", state="failed") == 1
    assert value(samples, "weightpush_serving") == 0
    assert value(samples, "weightpush_pause_seconds_count", mode="direct") == 0  # It has not ended.
    assert value(samples, "weightpush_update_bytes_total", transport="gloo") == 0


def test_only_the_version_in_force_is_shown(shared: SharedState) -> None:
    for number in range(5):
        push(shared, weight_version=f'step-"{number}"\\')
    versions = [dict(labels) for name, labels in scrape(shared) if name == "weightpush_weight_version_info"]
    assert versions == [{"weight_version": 'step-"4"\\'}]


def test_time_in_a_state_goes_on_while_the_server_is_in_it(
    shared: SharedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    now += 100
    begin(shared, started=now)
    with shared.transaction() as control:
        control.close_gate()
    now += 7
    samples = scrape(shared)
    assert value(samples, "weightpush_state_seconds_total", state="updating") == pytest.approx(7)
    assert value(samples, "weightpush_running_update_seconds") == pytest.approx(7)
    with shared.transaction() as control:
        control.commit(fingerprint="f")
    now += 50
    samples = scrape(shared)
    assert value(samples, "weightpush_state_seconds_total", state="updating") == pytest.approx(7)
    assert value(samples, "weightpush_state_seconds_total", state="serving") == pytest.approx(150, abs=5)
    assert value(samples, "weightpush_running_update_seconds") == 0


def test_progress_of_the_running_update_and_what_the_workers_say(shared: SharedState) -> None:
    refused = WeightPushError(ErrorCode.SELF_CHECK_FAILED, "no").body().error
    worker = WorkerRecord(rank=0, pid=1, device="cpu", weight_version="v0", epoch=1, bytes_done=8)
    worker.copies = [CopyStatus(role=CopyRole.SERVED, weight_version="v0", bytes=40)]
    shared.write_worker(worker.model_copy(update={"reload_refused": refused}))
    begin(shared)
    shared.set_in_flight(shared.claim_counter(), 3)
    samples = scrape(shared)
    assert value(samples, "weightpush_running_update_bytes", kind="expected") == 12
    assert value(samples, "weightpush_running_update_bytes", kind="done") == 8
    assert value(samples, "weightpush_requests_in_flight") == 3
    assert value(samples, "weightpush_reload_refused") == 1
    assert value(samples, "weightpush_copy_bytes", role="served") == 40
    assert value(samples, "weightpush_copy_bytes", role="previous") == 0


def test_a_dead_engine_is_failed_whatever_the_record_says(shared: SharedState) -> None:
    samples = scrape(shared, engine_dead=True)
    assert value(samples, "weightpush_state", state="failed") == 1
    assert value(samples, "weightpush_state", state="serving") == 0
    assert value(samples, "weightpush_serving") == 0


def test_refusals_add_up_over_processes_by_state(shared: SharedState) -> None:
    first, other = shared.claim_counter(), SharedState(shared.path)
    second = other.claim_counter()
    for _ in range(3):
        shared.count_refusal(first, ServerState.UPDATING)
    other.count_refusal(second, ServerState.FAILED)
    other.count_refusal(second, ServerState.SERVING)  # The gate opened between refusing and counting.
    samples = scrape(shared)
    counts = {state: value(samples, "weightpush_gate_refusals_total", state=state.value) for state in series.CLOSED}
    assert counts == {ServerState.UPDATING: 4, ServerState.FAILED: 1, ServerState.AWAITING_WEIGHTS: 0}
    assert shared.in_flight() == 0
    assert shared.control().weight_version == "v0"


def _push_many(path: Path, times: int) -> None:
    shared = SharedState(path)
    for _ in range(times):
        while True:
            try:
                begin(shared)
                break
            except WeightPushError:  # The other process has one running.
                time.sleep(0.0005)
        with shared.transaction() as control:
            control.close_gate()
        with shared.transaction() as control:
            control.commit(fingerprint="f")


def test_no_update_of_any_process_is_lost_or_counted_twice(shared: SharedState) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_push_many, args=(shared.path, 25)) for _ in range(3)]
    for process in processes:
        process.start()
    seen = 0.0
    while any(process.is_alive() for process in processes):
        count = shared.tally().counter(series.UPDATES, ("direct", "committed"))
        assert count >= seen
        seen = count
    for process in processes:
        process.join()
        assert process.exitcode == 0
    samples = scrape(shared)
    assert value(samples, "weightpush_updates_total", mode="direct", outcome="committed") == 75
    assert value(samples, "weightpush_update_bytes_total", transport="gloo") == 75 * 12
    assert value(samples, "weightpush_phase_seconds_count", phase="checking") == 75


def test_a_tally_of_everything_fits_its_place(shared: SharedState) -> None:
    tally = Tally()
    for each in (series.UPDATES, series.BYTES, series.WORKER_SECONDS, series.STATE_SECONDS):
        for labels in each.known():
            tally.add(each, labels, 123456789012.345678)
    for code in ErrorCode:
        tally.add(series.FAILURES, (code.value,), 1e15)
    for each in (series.PHASE_SECONDS, series.UPDATE_SECONDS, series.PAUSE_SECONDS):
        for labels in each.known():
            distribution = Distribution(counts=[10**12] * (len(series.BOUNDS) + 1), total=1234567890123.456)
            tally.histograms.setdefault(each.name, {})["|".join(labels)] = distribution
    assert len(tally.model_dump_json()) < shared._tally.capacity / 2


def test_bounds_are_upper_bounds() -> None:
    distribution = Distribution()
    for seconds in (0.0, 0.01, 0.0100001, 300.0, 300.1):
        distribution.observe(seconds)
    assert (distribution.counts[0], distribution.counts[1]) == (2, 1)
    assert distribution.counts[-2:] == [1, 1]


def test_the_page_for_users_lists_every_series_with_its_labels() -> None:
    rows = dict(
        re.findall(r"^\| `(weightpush_[a-z_]+)` \| (.*)$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    )
    assert list(rows) == [each.name for each in series.ALL]
    for each in series.ALL:
        kind, labels, _ = rows[each.name].split(" | ", 2)
        assert kind == each.kind.value
        assert re.findall(r"`([a-z_]+)`", labels) == list(each.labels)
    for mode in UpdateMode:
        assert mode.value in json.dumps(rows)
