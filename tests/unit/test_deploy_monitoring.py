"""Rules and dashboard, as far as they can be checked without a server."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from support.promql import DASHBOARD, DEPLOY, RULES, dashboard, promtool, queries, rules
from weightpush_server.observe import series

PROMETHEUS = DEPLOY / "prometheus"
PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()


def test_promtool_takes_the_rules_and_the_configuration() -> None:
    for arguments in (("check", "rules", str(RULES)), ("check", "config", str(PROMETHEUS / "prometheus.yml"))):
        answer = promtool(*arguments)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert "SUCCESS" in answer.stdout


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    answer = promtool("test", "rules", "rules_test.yml", cwd=PROMETHEUS)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_alert_is_tested_and_explained() -> None:
    alerts = [rule["alert"] for rule in rules()]
    assert len(set(alerts)) == len(alerts)
    assert re.findall(r"^\| `(WeightPush\w+)` \|", PAGE, re.MULTILINE) == alerts
    tested: dict[str, set[bool]] = {}
    for test in yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]:
        for case in test["alert_rule_test"]:
            tested.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert {alert for alert, fires in tested.items() if True in fires} == set(alerts)
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_queries_name_only_series_that_exist() -> None:
    families = {each.name: each for each in series.ALL}
    used = set()
    for where, query in queries():
        for name in re.findall(r"\bweightpush_\w+", query):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            family = families.get(name) or families.get(base)
            assert family is not None, (where, name)
            assert (family.kind is series.Kind.HISTOGRAM) is (base != name), (where, name)
            used.add(family.name)
    assert used == set(families), f"no panel shows {set(families) - used}"


def test_counters_are_never_shown_as_they_stand() -> None:
    """They start anew with each server: only how they move says something."""
    for where, query in queries():
        for each in series.ALL:
            if each.kind is not series.Kind.GAUGE:
                for found in re.finditer(rf"(\w+\()?\b{each.name}(?:_bucket|_sum)?\b", query):
                    assert found.group(1) in ("increase(", "rate("), where


def test_the_dashboard_is_whole() -> None:
    board = dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    defined = {f"${variable['name']}" for variable in board["templating"]["list"]}
    builtin = {"$__range", "$__rate_interval", "$__all"}
    assert set(re.findall(r"\$(?:\w+)", DASHBOARD.read_text())) <= defined | builtin
    for panel in panels:
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("file", sorted((DEPLOY / "grafana/provisioning").glob("*/*.yml")), ids=lambda file: file.stem)
def test_provisioning_is_of_the_version_that_grafana_reads(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    assert content["apiVersion"] == 1
    assert content.keys() & {"providers", "datasources"}
