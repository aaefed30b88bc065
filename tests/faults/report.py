"""What a run tells: every event, and a table of faults and outcomes."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from faults.checks import Violation, Wrong
from faults.plan import Fault, Shot

_AROUND: Final = 40
_ENDS: Final = ("runs", "struck", "kept", "failed", "committed", "repaired", "restarted")
_NAMED: Final = (Wrong.MIXED, Wrong.MISLABELLED, Wrong.HANG)
COLUMNS: Final = ("fault", *_ENDS, "slowest s", *(kind.value for kind in _NAMED), "other")


class EventLog:
    """The last events, with their time since the start of the run, and all of them in a file if one is given."""

    def __init__(self, file: Path | None) -> None:
        self._started = time.monotonic()
        self._recent: deque[str] = deque(maxlen=_AROUND)
        self._file = file.open("w") if file is not None else None

    def note(self, what: str, /, **details: Any) -> None:
        """Add an event."""
        event = {"t": round(time.monotonic() - self._started, 3), "event": what, **details}
        line = json.dumps(event, default=str)
        self._recent.append(line)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()

    def recent(self) -> list[str]:
        """Return the last events, oldest first."""
        return list(self._recent)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


@dataclass
class Line:
    """All shots of one fault. ``slowest``: seconds from the fault to a server at rest, of the slowest."""

    counts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0


@dataclass(frozen=True)
class Finding:
    """A violation with the fault of its shot and the events before it."""

    violation: Violation
    fault: Fault
    events: list[str]


@dataclass
class Report:
    """The outcome of a run. A shot ends ``kept`` (old version), ``failed``, ``committed`` or ``restarted``."""

    seed: int
    lines: dict[Fault, Line] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    shots: int = 0
    restarts: int = 0
    seconds: float = 0.0

    def add(self, shot: Shot, *, end: str, struck: bool, repaired: bool, seconds: float) -> None:
        """Book a shot."""
        line = self.lines.setdefault(shot.fault, Line())
        line.counts.update({"runs": 1, end: 1, "struck": int(struck), "repaired": int(repaired)})
        line.slowest = max(line.slowest, seconds)
        self.shots += 1
        self.restarts += end == "restarted"

    def rows(self) -> list[list[str]]:
        """Return the table's cells: a row for each fault, and the sum of all at the end; zeros stay blank but in the
        columns of what must be zero.
        """
        found = Counter((finding.fault, finding.violation.kind) for finding in self.findings)
        rows = [_row(fault, self.lines[fault], found) for fault in Fault if fault in self.lines]
        whole = Line(slowest=max((line.slowest for line in self.lines.values()), default=0.0))
        for line in self.lines.values():
            whole.counts.update(line.counts)
        return [*rows, _row(None, whole, found)]

    def table(self) -> Table:
        """Return faults and outcomes for a terminal."""
        table = Table(title=f"{self.shots} pushes, seed {self.seed}, {self.seconds:.0f} s")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "fault" else "right", no_wrap=True)
        *rows, whole = self.rows()
        for row in rows:
            table.add_row(*row)
        table.add_section()
        table.add_row(*whole)
        return table

    def markdown(self) -> str:
        """Return the same table for a document, and the traffic below it."""
        lines = [_cells(COLUMNS), _cells(["---", *["--:"] * (len(COLUMNS) - 1)]), *map(_cells, self.rows())]
        return "\n".join([*lines, "", self.traffic()])

    def traffic(self) -> str:
        """Say what the clients got."""
        told = ", ".join(f"{count} {name}" for name, count in sorted(self.answers.items()))
        return f"Answers: {told}. Restarts of the server: {self.restarts}."

    def show(self, console: Console) -> None:
        """Print the table, the traffic and every violation."""
        console.print(self.table())
        console.print(self.traffic(), highlight=False)
        for finding in self.findings:
            wrong = finding.violation
            where = f"push {wrong.shot} (--seed {self.seed}, {finding.fault.value})"
            console.print(f"{where}: {wrong.kind.value}: {wrong.text}", highlight=False, markup=False)
            for event in finding.events:
                console.print(f"    {event}", highlight=False, markup=False)

    def as_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "seed": self.seed,
            "shots": self.shots,
            "restarts": self.restarts,
            "seconds": round(self.seconds, 1),
            "answers": dict(self.answers),
            "faults": {
                fault.value: {**line.counts, "slowest_s": round(line.slowest, 3)} for fault, line in self.lines.items()
            },
            "findings": [asdict(finding) for finding in self.findings],
        }


def _row(fault: Fault | None, line: Line, found: Counter[tuple[Fault, Wrong]]) -> list[str]:
    def wrong(*kinds: Wrong) -> str:
        return str(sum(n for (where, kind), n in found.items() if kind in kinds and fault in (None, where)))

    return [
        fault.value if fault is not None else "all",
        *(str(line.counts[name] or "") for name in _ENDS),
        f"{line.slowest:.1f}",
        *(wrong(kind) for kind in _NAMED),
        wrong(*(kind for kind in Wrong if kind not in _NAMED)),
    ]


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
