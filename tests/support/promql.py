"""The queries of ``deploy/``, and what can be said about them without a Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.prometheus import Samples

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus/rules.yml"
DASHBOARD = DEPLOY / "grafana/dashboards/weightpush.json"
#: Labels that Prometheus itself adds.
TARGET_LABELS = {"job", "instance"}
_VARIABLES = {"$job": ".*", "$instance": ".*", "$window": "15m", "$__range": "15m", "$__rate_interval": "5m"}


def rules() -> list[dict[str, Any]]:
    """Return the rules, in order."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Yield where a query stands, and the query with variables filled in."""
    for rule in rules():
        # What an alert watches, with the threshold it has; on a healthy server most find nothing.
        yield f"rule {rule['alert']}", rule["expr"]
    board = dashboard()
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']} {target['refId']}", fill(target["expr"])
    for annotation in board["annotations"]["list"]:
        yield f"annotation {annotation['name']}", fill(annotation["expr"])


def fill(query: str) -> str:
    """Put values in the place of Grafana's variables."""
    for name, value in sorted(_VARIABLES.items(), reverse=True):
        query = query.replace(name, value)
    return query


def unresolved(query: str, samples: Samples) -> list[str]:
    """Return what a query asks for and no series has: names, label values, labels."""
    problems = []
    selectors = re.findall(r"\b(weightpush_\w+|vllm:\w+)(?:\{([^}]*)\})?", query)
    assert selectors, query
    known = set(TARGET_LABELS)
    for name, matchers in selectors:
        rows = [dict(labels) for found, labels in samples if found == name]
        if not rows:
            problems.append(f"no series {name}")
        known |= {label for row in rows for label in row}
        for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', matchers or ""):
            if label in TARGET_LABELS:
                continue
            if not any(label in row and (operator != "=" or row[label] == value) for row in rows):
                problems.append(f"no {label}{operator}{value!r} in {name}")
    for labels in re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", query):
        problems += [f"no label {label}" for label in labels.split(", ") if label not in known]
    return problems


def promtool(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; skips the test where there is none."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, cwd=cwd, timeout=120)


def evaluate(wanted: Sequence[str], pages: Sequence[Samples], folder: Path) -> dict[str, bool]:
    """Evaluate queries with Prometheus' own engine on pages that were read a minute apart; return which find any.

    promtool tells what it found only where something else was expected: so nothing is, and a query that it does not
    complain of has found nothing.
    """
    keys = sorted({key for page in pages for key in page}, key=str)
    lines = []
    for name, labels in keys:
        if not name.startswith(("weightpush_", "vllm:")):
            continue
        shown = {**dict(labels), "job": "fleet", "instance": "server:8000"}
        text = ", ".join(f"{label}={json.dumps(value)}" for label, value in shown.items())
        values = [f"{page[name, labels]:.6f}" if (name, labels) in page else "_" for page in pages]
        lines.append({"series": f"{name}{{{text}}}", "values": " ".join(values)})
    at = f"{len(pages) - 1}m"
    tests = [{"expr": query, "eval_time": at, "exp_samples": []} for query in wanted]
    file = folder / "queries.yml"
    file.write_text(
        json.dumps(
            {"rule_files": [], "tests": [{"interval": "1m", "input_series": lines, "promql_expr_test": tests}]},
        )
    )
    answer = promtool("test", "rules", str(file))
    text = answer.stdout + answer.stderr
    assert ", err: " not in text, text
    found = set(re.findall(r'expr: ("(?:[^"\\]|\\.)*"), time', text))
    return {query: json.dumps(query, ensure_ascii=False) in found for query in wanted}
