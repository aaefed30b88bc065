"""The campaign's report: what is counted, and that a violation shows."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from faults.checks import Violation, Wrong
from faults.plan import Choice, Fault, plan
from faults.report import COLUMNS, EventLog, Finding, Report


def make_report() -> Report:
    shot = plan(1, Choice(pushes=1))[0]
    report = Report(seed=9)
    killed = replace(shot, fault=Fault.KILL_TRAINER)
    report.add(killed, end="failed", struck=True, repaired=True, seconds=2.5)
    report.add(killed, end="committed", struck=False, repaired=False, seconds=0.5)
    report.add(replace(shot, fault=Fault.KILL_API), end="restarted", struck=True, repaired=False, seconds=4.0)
    report.answers.update(complete=10, refused=3)
    return report


def cells(report: Report, fault: str) -> dict[str, str]:
    (row,) = (row for row in report.rows() if row[0] == fault)
    return dict(zip(COLUMNS, row, strict=True))


def test_shots_are_counted_by_fault_and_end() -> None:
    report = make_report()
    killed = cells(report, "kill_trainer")
    assert (killed["runs"], killed["struck"], killed["failed"], killed["committed"]) == ("2", "1", "1", "1")
    assert (killed["repaired"], killed["slowest s"], killed["mixed"]) == ("1", "2.5", "0")
    assert cells(report, "kill_api")["restarted"] == "1"
    assert (report.shots, report.restarts) == (3, 1)
    whole = cells(report, "all")
    assert (whole["runs"], whole["restarted"], whole["slowest s"], whole["hang"]) == ("3", "1", "4.0", "0")
    assert "10 complete, 3 refused" in report.markdown()


def test_a_violation_is_in_the_table_the_text_and_the_json(tmp_path: Path) -> None:
    report = make_report()
    log = EventLog(tmp_path / "events")
    log.note("strike", what="SIGKILL")
    for kind in (Wrong.MIXED, Wrong.LEFTOVER):
        report.findings.append(Finding(Violation(kind, "half [old]", 17), Fault.KILL_API, log.recent()))
    log.close()
    assert (cells(report, "kill_api")["mixed"], cells(report, "kill_api")["other"]) == ("1", "1")
    assert (cells(report, "all")["mixed"], cells(report, "kill_trainer")["mixed"]) == ("1", "0")
    shown = io.StringIO()
    report.show(Console(file=shown, width=180))
    assert "push 17 (--seed 9, kill_api): mixed: half [old]" in shown.getvalue()
    assert '"what": "SIGKILL"' in shown.getvalue()
    finding = json.loads(json.dumps(report.as_json()))["findings"][0]
    assert finding["violation"] == {"kind": "mixed", "text": "half [old]", "shot": 17}
    assert '"what": "SIGKILL"' in (tmp_path / "events").read_text()
