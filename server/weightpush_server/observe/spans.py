"""OpenTelemetry spans: one for each update and one for each of its phases, made from the record when it has ended.

Only where the user's environment names a collector (``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``..._TRACES_ENDPOINT``; vLLM's
``--otlp-traces-endpoint`` sets the latter). Everything of OpenTelemetry is imported then, in a thread of its own.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from weightpush_server.log import logger
from weightpush_server.observe.happenings import Happening, UpdateEnded

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NS: Final = 1_000_000_000
#: How long the end of a process may wait for a collector, in seconds.
_FLUSH_S: Final = 2.0
#: Updates whose spans wait for a slow collector; later ones get none until it has caught up.
_MOST_WAITING: Final = 100

Attributes = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Span:
    """One span to be: times in nanoseconds since 1970, ``error`` if it failed, ``children`` below it."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    error: str | None = None
    children: tuple[Span, ...] = ()


def span_of(end: UpdateEnded) -> Span:
    """Return the span of an update that has ended, with its phases, one after the other, below it."""
    update = end.update
    start_ns = int(update.started_at.timestamp() * _NS)
    error = f"{end.error.code.value}: {end.error.message}" if end.error is not None else None
    phases = []
    at_ns = start_ns
    for phase, seconds in end.phase_seconds.items():
        until_ns = at_ns + int(seconds * _NS)
        broke = error if phase == update.phase.value else None
        phases.append(Span(f"weightpush.{phase}", at_ns, until_ns, {}, broke))
        at_ns = until_ns
    return Span(
        "weightpush.update",
        start_ns,
        max(at_ns, start_ns + int(end.seconds * _NS)),
        _describe(end),
        error,
        tuple(phases),
    )


def _describe(end: UpdateEnded) -> Attributes:
    update = end.update
    attributes: Attributes = {
        "update_id": update.update_id,
        "epoch": update.epoch,
        "weight_version": update.weight_version,
        "mode": update.mode.value,
        "transport": update.transport,
        "in_flight": update.in_flight.value,
        "tensors": update.tensors_total,
        "bytes": update.bytes_total,
        "outcome": end.outcome.value,
        "state": end.state.value,
    }
    if end.pause_seconds is not None:
        attributes["pause_seconds"] = end.pause_seconds
    if end.error is not None:
        attributes["error_code"] = end.error.code.value
    attributes |= {f"worker_seconds.{part}": seconds for part, seconds in end.worker_seconds.items()}
    return {f"weightpush.{name}": value for name, value in attributes.items()}


def endpoint_of(environment: Mapping[str, str]) -> str | None:
    """Return the collector that an environment names for traces; ``None`` if it names none, or wants no traces."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if "otlp" not in environment.get("OTEL_TRACES_EXPORTER", "otlp"):
        return None
    return next((environment[name] for name in _ENDPOINTS if environment.get(name)), None)


def make_exporter(environment: Mapping[str, str]) -> SpanExporter:
    """Return OpenTelemetry's own exporter for the protocol that the environment says, ``grpc`` unless it does.

    Endpoint, headers, certificates and timeouts it reads from the environment itself.

    Raises:
        ValueError: the protocol is neither ``grpc`` nor ``http/protobuf``.
        ImportError: the exporter is not installed.
    """
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "grpc")
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        # An address without a scheme says nothing of TLS; vLLM's own spans go there without.
        bare = "://" not in (endpoint_of(environment) or "://")
        return GrpcExporter(insecure=True) if bare else GrpcExporter()
    raise ValueError(f"{protocol!r} in {_PROTOCOLS[0]} or {_PROTOCOLS[1]} is neither 'grpc' nor 'http/protobuf'")


class SpanWriter:
    """Sends the spans of ended updates from a thread of its own; what cannot be sent is lost, with a warning."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """``exporter``: used instead of the one that the environment names."""
        self._exporter = exporter
        self._gave_up = False
        self._waiting: SimpleQueue[UpdateEnded | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, happening: Happening) -> None:
        """Send the spans of an update if this is its end and somebody wants them. Returns at once."""
        if not isinstance(happening, UpdateEnded) or self._gave_up or self._waiting.qsize() >= _MOST_WAITING:
            return
        if self._exporter is None and endpoint_of(os.environ) is None:
            return
        if self._thread is None:
            # A daemon: a collector that does not answer must not hold up the end of the process.
            self._thread = threading.Thread(target=self._run, name="weightpush-spans", daemon=True)
            self._thread.start()
            atexit.register(self.flush)
        self._waiting.put(happening)

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait until all spans are sent, or given up; ``False`` if that takes longer than ``timeout_s``."""
        if self._thread is None:
            return True
        sent = threading.Event()
        self._waiting.put(sent)
        return sent.wait(timeout_s)

    def _run(self) -> None:
        provider: TracerProvider | None = None
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
            elif not self._gave_up:
                try:
                    provider = provider or self._make_provider()
                    _emit(provider, span_of(item))
                    provider.force_flush()  # All spans of an update in one request, and none of them waits.
                except Exception as error:  # noqa: BLE001 - an update must not fail for a span, and nobody waits here
                    self._gave_up = True
                    logger.warning("no OpenTelemetry spans are sent: %s: %s", type(error).__name__, error)

    def _make_provider(self) -> TracerProvider:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = os.environ.get("OTEL_SERVICE_NAME") or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {"service.name": "weightpush"})
        # One of our own: the global one is the application's, and vLLM's where it traces requests.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(self._exporter or make_exporter(os.environ)))
        return provider


def _emit(provider: TracerProvider, span: Span) -> None:
    from opentelemetry import trace
    from opentelemetry.context import Context

    tracer = provider.get_tracer("weightpush")

    def emit(span: Span, parent: trace.Span | None) -> None:
        context = trace.set_span_in_context(parent) if parent is not None else Context()
        made = tracer.start_span(span.name, context=context, start_time=span.start_ns, attributes=span.attributes)
        if span.error is not None:
            made.set_status(trace.StatusCode.ERROR, span.error)
        for child in span.children:
            emit(child, made)
        made.end(end_time=span.end_ns)

    emit(span, None)
