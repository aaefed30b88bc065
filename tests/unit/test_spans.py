"""Spans of ended updates, against OpenTelemetry's own exporters and a receiver on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from support.otlp import Collector, GrpcCollector
from unit.test_shared_state import make_update
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.state import Phase, ServerState
from weightpush_server.observe.happenings import Outcome, PhaseEnded, UpdateEnded
from weightpush_server.observe.spans import SpanWriter, endpoint_of, span_of

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PHASES = {"checking": 0.5, "rendezvous": 1.0, "draining": 0.25, "receiving": 2.0, "closing": 0.125, "publishing": 0.125}


def committed(**changes: Any) -> UpdateEnded:
    update = make_update(update_id="u1", started_at=STARTED, phase=Phase.PUBLISHING)
    fields: dict[str, Any] = {
        "outcome": Outcome.COMMITTED,
        "state": ServerState.SERVING,
        "seconds": 4.0,
        "pause_seconds": 2.5,
        "phase_seconds": PHASES,
        "worker_seconds": {"land": 0.75},
        "fingerprint": "f",
    }
    return UpdateEnded(update, **{**fields, **changes})


def broken() -> UpdateEnded:
    update = make_update(started_at=STARTED, phase=Phase.RECEIVING)
    error = WeightPushError(ErrorCode.LEASE_LOST, "the trainer was silent").body().error
    phases = {"checking": 0.5, "receiving": 9.0}
    return UpdateEnded(update, Outcome.FAILED, ServerState.FAILED, 9.5, None, phases, error=error)


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def test_an_update_is_a_span_and_its_phases_are_spans_below_it_one_after_the_other() -> None:
    exporter = InMemorySpanExporter()
    writer = SpanWriter(exporter)
    writer.tell(committed())
    assert writer.flush(60)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans.pop("weightpush.update")
    assert root.parent is None
    start = int(STARTED.timestamp() * 1e9)
    assert (root.start_time, root.end_time) == (start, start + 4 * 10**9)
    assert list(spans) == [f"weightpush.{phase}" for phase in PHASES]
    at = start
    for name, span in spans.items():
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.context.trace_id == root.context.trace_id
        assert span.start_time == at
        at += int(PHASES[name.removeprefix("weightpush.")] * 1e9)
        assert span.end_time == at
    assert at == root.end_time
    attributes = dict(root.attributes or {})
    assert attributes["weightpush.update_id"] == "u1"
    assert attributes["weightpush.weight_version"] == "v1"
    assert attributes["weightpush.bytes"] == 12
    assert attributes["weightpush.pause_seconds"] == 2.5
    assert attributes["weightpush.outcome"] == "committed"
    assert attributes["weightpush.worker_seconds.land"] == 0.75
    assert root.status.status_code is StatusCode.UNSET
    assert root.resource.attributes["service.name"] == "weightpush"


def test_two_updates_are_two_traces_and_a_failure_is_an_error_where_it_happened() -> None:
    exporter = InMemorySpanExporter()
    writer = SpanWriter(exporter)
    writer.tell(broken())
    writer.tell(committed())
    assert writer.flush(60)
    spans = exporter.get_finished_spans()
    assert len({span.context.trace_id for span in spans}) == 2
    failed = [span for span in spans if span.status.status_code is StatusCode.ERROR]
    assert [span.name for span in failed] == ["weightpush.receiving", "weightpush.update"]
    assert failed[1].status.description == "lease_lost: the trainer was silent"
    assert dict(failed[1].attributes or {})["weightpush.error_code"] == "lease_lost"
    assert "weightpush.pause_seconds" not in dict(failed[1].attributes or {})


def test_phases_alone_make_no_spans() -> None:
    writer = SpanWriter(InMemorySpanExporter())
    writer.tell(PhaseEnded(make_update(), Phase.CHECKING, 1.0))
    assert writer._thread is None


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "http://c:4317"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t"}, "http://t"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "True"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "console,otlp"}, "http://c"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m"}, None),
    ],
)
def test_the_environment_decides(environment: dict[str, str], endpoint: str | None) -> None:
    assert endpoint_of(environment) == endpoint


def test_without_a_collector_there_is_no_thread() -> None:
    writer = SpanWriter()
    writer.tell(committed())
    assert writer.flush(60)
    assert writer._thread is None


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def test_a_collector_on_a_socket_gets_them_as_the_environment_says(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=rl", "OTEL_SERVICE_NAME": "policy-server"}
    for name, value in {**collector.environment(), **more}.items():
        monkeypatch.setenv(name, value)
    writer = SpanWriter()
    writer.tell(committed())
    assert writer.flush(60)
    assert sorted(span.name for span in collector.spans()) == sorted(
        ["weightpush.update", *(f"weightpush.{phase}" for phase in PHASES)]
    )
    assert {headers["path"] for headers in collector.headers} == {"/v1/traces"}
    assert {headers["x-tenant"] for headers in collector.headers} == {"rl"}
    resource = collector.requests[0].resource_spans[0].resource
    assert {a.key: a.value.string_value for a in resource.attributes}["service.name"] == "policy-server"


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_grpc_is_the_default_and_an_address_alone_is_one_without_tls(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's --otlp-traces-endpoint may be either."""
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    with GrpcCollector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{scheme}{collector.address}")
        writer = SpanWriter()
        writer.tell(committed())
        assert writer.flush(60)
        assert len(collector.spans()) == 1 + len(PHASES)


def test_a_collector_that_is_away_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    writer = SpanWriter()
    writer.tell(committed())
    assert writer.flush(60)
    assert not writer._gave_up


class Hanging(SpanExporter):
    def __init__(self) -> None:
        self.answer = threading.Event()
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.answer.wait(60)
        self.spans += len(spans)
        return SpanExportResult.SUCCESS


def test_a_collector_that_hangs_holds_nobody_up_and_fills_no_memory() -> None:
    exporter = Hanging()
    writer = SpanWriter(exporter)
    for _ in range(1000):
        writer.tell(committed())
    assert writer._waiting.qsize() <= 100
    assert not writer.flush(0.1)
    exporter.answer.set()
    assert writer.flush(60)
    assert 0 < exporter.spans <= 102 * (1 + len(PHASES))


def test_a_protocol_that_does_not_exist_is_said_once(
    monkeypatch: pytest.MonkeyPatch, server_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    writer = SpanWriter()
    writer.tell(committed())
    assert writer.flush(60)
    writer.tell(committed())
    assert writer.flush(60)
    (record,) = [record for record in server_log.records if record.name == "vllm.weightpush"]
    assert "'http/json'" in record.message
    assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL" in record.message


def test_times_of_a_span_never_run_backwards() -> None:
    """Clocks differ: phases may add up to more than the whole."""
    span = span_of(committed(seconds=1.0))
    assert span.end_ns == max(child.end_ns for child in span.children)
