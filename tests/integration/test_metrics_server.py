"""Series, log lines and routes of a real server."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from integration.conftest import TOKEN, Checkpoints
from integration.test_security import failed
from support.prometheus import Samples, scrape, value
from support.promql import evaluate, queries, unresolved
from support.server import ServerProcess
from weightpush_client import WeightPusher
from weightpush_server.observe import series


def moved(before: Samples, after: Samples, name: str, **labels: str) -> float:
    return value(after, name, **labels) - value(before, name, **labels)


def push(server: ServerProcess, checkpoints: Checkpoints, label: str, **options: object) -> None:
    directory = {"A": checkpoints.a, "B": checkpoints.b}[label]
    with WeightPusher(server.url, token=TOKEN, **options) as pusher:  # type: ignore[arg-type] # options vary
        pusher.push(directory, weight_version=label)


def lines(text: str) -> list[dict[str, str]]:
    """Return the fields of our lines in a log, quoted values as they stand."""
    found = []
    for row in text.splitlines():
        at = row.find("event=weightpush.")
        if at >= 0:
            found.append(dict(re.findall(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|\S+)', row[at:])))
    return found


def test_a_push_moves_the_series_and_says_one_line_a_phase(server: ServerProcess, checkpoints: Checkpoints) -> None:
    before, said = scrape(server.url), len(server.log.read_text())
    push(server, checkpoints, "B", transport="gloo", bucket_bytes=40_000)
    push(server, checkpoints, "A", transport="http", mode="staged")
    after = scrape(server.url)
    assert set(before) <= set(after) | {key for key in before if key[0] == "weightpush_weight_version_info"}
    last = server.status()["last_update"]
    for mode, transport in (("direct", "gloo"), ("staged", "http")):
        assert moved(before, after, "weightpush_updates_total", mode=mode, outcome="committed") == 1
        assert moved(before, after, "weightpush_update_bytes_total", transport=transport) == last["bytes"]
        assert moved(before, after, "weightpush_pause_seconds_count", mode=mode) == 1
        assert 0 < moved(before, after, "weightpush_pause_seconds_sum", mode=mode) <= 60
    assert moved(before, after, "weightpush_state_seconds_total", state="updating") > 0
    assert moved(before, after, "weightpush_state_seconds_total", state="staging") > 0
    assert moved(before, after, "weightpush_phase_seconds_count", phase="receiving") == 2
    assert moved(before, after, "weightpush_worker_seconds_total", part="land") > 0
    assert value(after, "weightpush_weight_version_info", weight_version="A") == 1
    assert value(after, "weightpush_serving") == 1
    assert value(after, "weightpush_running_update_seconds") == 0
    # vLLM's own are where they were.
    assert any(name.startswith("vllm:") for name, _ in after)
    assert any(name.startswith("http_requests") for name, _ in after)

    told = lines(server.log.read_text()[said:])
    ours = [row for row in told if row["update_id"] == last["update_id"]]
    assert [row["event"] for row in ours] == [
        "weightpush.update_began",
        *["weightpush.update_phase"] * len(last["phase_seconds"]),
        "weightpush.update_committed",
    ]
    phases = {row["phase"]: float(row["seconds"]) for row in ours if "phase" in row}
    assert list(phases) == list(last["phase_seconds"])
    assert phases == pytest.approx(last["phase_seconds"], rel=1e-4, abs=1e-5)
    assert (ours[-1]["weight_version"], ours[-1]["state"], ours[-1]["bytes"]) == ("A", "serving", str(last["bytes"]))
    assert float(ours[-1]["pause_seconds"]) == pytest.approx(last["pause_seconds"], rel=1e-4)


def test_a_failed_server_says_so_and_counts_whom_it_refuses(server: ServerProcess, checkpoints: Checkpoints) -> None:
    before, said = scrape(server.url), len(server.log.read_text())
    with failed(server, checkpoints):
        for _ in range(3):
            assert server.complete().status_code == 503
        after = scrape(server.url)
    assert value(after, "weightpush_state", state="failed") == 1
    assert value(after, "weightpush_serving") == 0
    assert moved(before, after, "weightpush_gate_refusals_total", state="failed") == 3
    assert moved(before, after, "weightpush_updates_total", mode="direct", outcome="failed") == 1
    aborted = value(before, "weightpush_update_failures_total", 0, code="aborted")
    assert value(after, "weightpush_update_failures_total", code="aborted") == aborted + 1
    assert moved(before, after, "weightpush_pause_seconds_count", mode="direct") == 0
    (row,) = [row for row in lines(server.log.read_text()[said:]) if row["event"] == "weightpush.update_failed"]
    assert (row["code"], row["outcome"], row["state"]) == ("aborted", "failed", "failed")
    assert row["reason"].startswith('"aborted')
    push(server, checkpoints, "A", transport="http")
    assert value(scrape(server.url), "weightpush_serving") == 1


def test_every_path_of_the_page_has_every_series(server: ServerProcess) -> None:
    pages = [httpx.get(f"{server.url}{path}", trust_env=False) for path in ("/metrics", "/metrics/")]
    for page in pages:
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/plain")
        for each in series.ALL:
            assert f"# TYPE {each.name} {each.kind.value}\n" in page.text
        assert TOKEN not in page.text
    families = [re.findall(r"^# TYPE (\S+)", page.text, re.MULTILINE) for page in pages]
    assert families[0] == families[1]
    assert len(set(families[0])) == len(families[0])


def test_every_query_of_dashboard_and_rules_resolves_on_a_live_server(
    server: ServerProcess, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Its pages over two pushes, a failure and a repair are what Prometheus would have read, a minute apart."""
    pages = [scrape(server.url)]
    push(server, checkpoints, "B", transport="gloo")
    server.answer()
    pages.append(scrape(server.url))
    with failed(server, checkpoints):
        assert server.complete().status_code == 503
        pages.append(scrape(server.url))
    push(server, checkpoints, "B", transport="http")
    push(server, checkpoints, "A", transport="http", mode="staged")
    pages.append(scrape(server.url))
    problems = {where: bad for where, query in queries() if (bad := unresolved(query, pages[-1]))}
    assert not problems
    shown = {where: query for where, query in queries() if not where.startswith("rule ")}
    found = evaluate(list(shown.values()), pages, tmp_path)
    assert [where for where, query in shown.items() if not found[query]] == []
