"""``GET /metrics``: vLLM's own series and ours, whichever API process is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightpush_protocol import PROTOCOL_VERSION
from weightpush_protocol.state import ServerState
from weightpush_protocol.status import CopyRole
from weightpush_server.observe import series
from weightpush_server.observe.series import BOUNDS, Series
from weightpush_server.observe.tally import Tally
from weightpush_server.public_status import build_status
from weightpush_server.shared_state import SharedState

if TYPE_CHECKING:
    from fastapi import FastAPI

_Values = dict[tuple[str, ...], float]
#: With the slash, vLLM's own page would answer, which lacks ours.
PATHS: Final = ("/metrics", "/metrics/")
_COUNTED: Final = (series.UPDATES, series.FAILURES, series.LEASE_LOSSES, series.BYTES, series.WORKER_SECONDS)
_DISTRIBUTIONS: Final = (series.UPDATE_SECONDS, series.PAUSE_SECONDS, series.PHASE_SECONDS)


class WeightPushCollector(Collector):
    """Reads all series from the shared file at each scrape; nothing is kept in the process.

    ``engine_dead``: whether vLLM has given its engine up, which the shared record does not know.
    """

    def __init__(self, shared: SharedState, engine_dead: Callable[[], bool]) -> None:
        self._shared = shared
        self._engine_dead = engine_dead

    def collect(self) -> Iterator[Metric]:
        """Yield every family of ``series.ALL``."""
        tally = self._shared.tally()
        for of, values in self._present(tally).items():
            yield _plain(of, values)
        for of in _COUNTED:
            yield _plain(of, {labels: tally.counter(of, labels) for labels in tally.labels(of)})
        for of in _DISTRIBUTIONS:
            yield _histogram(of, tally)

    def _present(self, tally: Tally) -> dict[Series, _Values]:
        control, workers = self._shared.control(), self._shared.worker_records()
        now = time.monotonic()
        state = ServerState.FAILED if self._engine_dead() else control.state
        refusals = self._shared.refusals()
        status = build_status(control, workers)
        running, update = status.update, control.update
        copies = {role: sum(copy.bytes for copy in status.copies if copy.role is role) for role in CopyRole}
        last = control.last_update
        spent = {each: tally.state_seconds(each, control.state, now) for each in ServerState}
        return {
            series.BUILD: {(own_version(), PROTOCOL_VERSION): 1.0},
            series.STATE: {(each.value,): float(each is state) for each in ServerState},
            series.SERVING: {(): float(state.serving)},
            series.STATE_SECONDS: {(each.value,): seconds for each, seconds in spent.items()},
            series.VERSION: {(control.weight_version,): 1.0},
            series.LAST_UPDATE: {(): last.finished_at.timestamp()} if last is not None else {},
            series.RUNNING_SECONDS: {(): now - update.started if update is not None else 0.0},
            series.RUNNING_BYTES: {
                ("expected",): running.bytes_total if running is not None else 0,
                ("done",): running.bytes_done if running is not None else 0,
            },
            series.REFUSALS: {(each.value,): refusals[each] for each in series.CLOSED},
            series.IN_FLIGHT: {(): self._shared.in_flight()},
            series.RELOAD_REFUSED: {(): float(any(worker.reload_refused is not None for worker in workers))},
            series.COPY_BYTES: {(role.value,): nbytes for role, nbytes in copies.items()},
        }


def own_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return version("weightpush")
    except PackageNotFoundError:  # Run from its sources.
        return "unknown"


def _plain(of: Series, values: _Values) -> Metric:
    make = CounterMetricFamily if of.kind is series.Kind.COUNTER else GaugeMetricFamily
    family = make(of.name, of.meaning, labels=list(of.labels))
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family


def _histogram(of: Series, tally: Tally) -> Metric:
    family = HistogramMetricFamily(of.name, of.meaning, labels=list(of.labels))
    for labels in tally.labels(of):
        found = tally.distribution(of, labels)
        bounds = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
        family.add_metric(list(labels), list(zip(bounds, accumulate(found.counts), strict=True)), found.total)
    return family


def add_metrics_route(app: FastAPI, shared: SharedState, engine_dead: Callable[[], bool]) -> None:
    """Answer ``GET /metrics`` before vLLM's own route does, with its series and ours.

    A collector in vLLM's registry would not do: with several API processes its route makes a registry at each scrape.
    """
    registry = CollectorRegistry()
    registry.register(WeightPushCollector(shared, engine_dead))

    def metrics(_: Request) -> Response:
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        page = generate_latest(get_prometheus_registry()) + generate_latest(registry)
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.router.routes[:0] = [Route(path, metrics, include_in_schema=False) for path in PATHS]
