"""Collectors of OpenTelemetry spans on a socket of this process."""

from __future__ import annotations

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Collector:
    """Takes OTLP over HTTP; keeps what came, with the headers it came with."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.headers.append({**dict(self.headers), "path": self.path})
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def spans(self) -> list[Any]:
        """Return all spans that came."""
        return spans_in(self.requests)

    def environment(self) -> dict[str, str]:
        """Return what a process needs to send its spans here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class GrpcCollector(TraceServiceServicer):  # type: ignore[misc] # generated code is not typed
    """Takes OTLP over gRPC, without TLS, at ``address``."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self._server = grpc.server(ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        """Take some spans."""
        self.requests.append(request)
        return ExportTraceServiceResponse()

    def spans(self) -> list[Any]:
        """Return all spans that came."""
        return spans_in(self.requests)

    def __enter__(self) -> GrpcCollector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(10)


def spans_in(requests: list[ExportTraceServiceRequest]) -> list[Any]:
    """Return the spans of all requests, in order."""
    return [
        span
        for request in list(requests)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
