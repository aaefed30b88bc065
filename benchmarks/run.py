"""Run the benchmark: ``python -m benchmarks.run`` (or ``make bench ARGS="..."``), about ten minutes.

Prints a table; a complete run with the default options also writes ``docs/benchmarks/``. ``--quick`` is a smoke test
with tiny models: its numbers say nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.compare import OTHERS, Comparison, tell, ways
from benchmarks.growth import Growth
from benchmarks.machine import describe
from benchmarks.models import (
    COMPARED,
    COUNTS,
    FLEET,
    FLEET_SIZES,
    PARTED,
    PARTS,
    SIZES,
    TINY_COMPARED,
    Model,
)
from benchmarks.plots import draw
from benchmarks.processes import BenchError, TrainerProcess
from benchmarks.report import document

_OUT: Final = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
_RAM_DISK: Final = Path("/dev/shm")
_TRANSPORTS: Final = "http,gloo,shm"
_MODES: Final = "direct,staged"
_GROWTH: Final = "bytes,tensors,servers,parts"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command; the exit code is 1 if a push failed, whatever the numbers are."""
    given = _parse(arguments)
    told = list(sys.argv[1:] if arguments is None else arguments)
    began = time.monotonic()
    # Ended from outside, it still ends its processes and leaves nothing in the RAM disk.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found: dict[str, Any] = {"machine": describe([shlex.quote(word) for word in told])}
    found |= {"quick": given.quick, "rounds": given.rounds, "models": {}}
    found["growth"] = {kind: [] for kind in _GROWTH.split(",")}
    given.out.mkdir(parents=True, exist_ok=True)
    log = given.log or Path(tempfile.gettempdir()) / "weightpush-bench.log"
    tell(f"what the processes say goes to {log}")
    # Files in a RAM disk cost no disk; they are gone at the end, whatever happens.
    with tempfile.TemporaryDirectory(prefix="weightpush-bench-", dir=_RAM_DISK) as temporary:
        folder = Path(temporary)
        models = _models(given)
        stages = len(models) + bool(given.growth)
        for number, model in enumerate(models, 1):
            until = began + 60 * given.minutes * number / stages
            found["models"][model.key] = _compare(model, given, folder, log, until)
        if given.growth:
            # The last series needs its start-up, too.
            found["growth"] |= _grow(given, folder, log, began + 60 * given.minutes)
    found["minutes"] = (time.monotonic() - began) / 60
    (given.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    text = document(found)
    (given.out / "README.md").write_text(text)
    draw(found, given.out)
    print(text)
    tell(f"{found['minutes']:.1f} minutes; written to {given.out}")
    return 1 if failed_pushes(found) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what a push costs, and what the other ways cost.")
    parser.add_argument("--quick", action="store_true", help="tiny models, two rounds, no growth: a smoke test")
    parser.add_argument("--models", help=f"comma-separated, of: {', '.join(model.key for model in COMPARED)}")
    parser.add_argument("--transports", default=_TRANSPORTS, help=f"comma-separated (default {_TRANSPORTS})")
    parser.add_argument("--modes", default=_MODES, help=f"comma-separated (default {_MODES})")
    parser.add_argument("--others", default=",".join(OTHERS), help=f"comma-separated (default {','.join(OTHERS)})")
    parser.add_argument("--rounds", type=int, help="timed rounds after the warm-up (default 5, quick 1)")
    parser.add_argument("--minutes", type=float, default=12.0, help="begin no more rounds after so long (default 12)")
    parser.add_argument("--bucket-mb", type=float, help="size of a bucket in MiB (default: the library's own)")
    parser.add_argument("--storage-policy", default="scratch", help="the servers' (default scratch)")
    parser.add_argument("--growth", default=None, help=f"comma-separated, or none (default {_GROWTH}, quick none)")
    parser.add_argument("--no-profile", action="store_true", help="leave the profiles of pushes out")
    parser.add_argument("--out", type=Path, help="folder for results (default docs/benchmarks, quick: a temporary one)")
    parser.add_argument("--log", type=Path, help="file for what trainers and servers print")
    given = parser.parse_args(arguments)
    given.rounds = given.rounds or (1 if given.quick else 5)
    growth = given.growth or ("none" if given.quick else _GROWTH)
    given.growth = [] if growth == "none" else growth.split(",")
    for name in given.growth:
        if name not in _GROWTH.split(","):
            parser.error(f"no such growth: {name}; there are {_GROWTH}")
    given.out = given.out or (Path(tempfile.mkdtemp(prefix="weightpush-bench-")) if given.quick else _OUT)
    chosen = given.models.split(",") if given.models else [model.key for model in COMPARED]
    for key in chosen:
        if key not in {model.key for model in COMPARED}:
            parser.error(f"no such model: {key}")
    given.models = chosen
    return given


def _models(given: argparse.Namespace) -> list[Model]:
    return [model for model in (TINY_COMPARED if given.quick else COMPARED) if model.key in given.models]


def _compare(model: Model, given: argparse.Namespace, folder: Path, log: Path, until: float) -> dict[str, Any]:
    tell(f"{model.key}: {model.what}")
    own = folder / model.key
    own.mkdir()
    profile = None if given.no_profile else given.out / f"profile-{model.key}.txt"
    bucket_bytes = None if given.bucket_mb is None else int(given.bucket_mb * 2**20)
    try:
        with TrainerProcess(log) as trainer:
            comparison = Comparison(
                model,
                trainer,
                own,
                log,
                bucket_bytes=bucket_bytes,
                server_arguments=[f"--storage-policy={given.storage_policy}"],
                tell=tell,
            )
            competitors = ways(given.transports.split(","), given.modes.split(","), given.others.split(","))
            return comparison.run(competitors, rounds=given.rounds, until=until, profile=profile)
    except BenchError as error:
        tell(f"{model.key}: FAILED: {error}")
        return {"what": model.what, "error": str(error)}


def _grow(given: argparse.Namespace, folder: Path, log: Path, until: float) -> dict[str, list[dict[str, Any]]]:
    growth = Growth(folder, log, rounds=given.rounds, until=until, tell=tell)
    kinds: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "bytes": lambda: growth.over_models(SIZES),
        "tensors": lambda: growth.over_models(COUNTS),
        "servers": lambda: growth.over_servers(FLEET, FLEET_SIZES),
        "parts": lambda: growth.over_parts(PARTED, PARTS),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in given.growth:
        try:
            found[kind] = kinds[kind]()
        except BenchError as error:
            tell(f"growth with {kind}: FAILED: {error}")
            found[kind] = []
    return found


def failed_pushes(found: dict[str, Any]) -> list[str]:
    """Name every push that failed in the results ``found``; a competitor that fails is reported, and no fault here."""
    failed = []
    for key, model in found["models"].items():
        if "error" in model:
            failed.append(key)
            continue
        failed += [f"{key}: {name}" for name, way in model["ways"].items() if name not in OTHERS and way["errors"]]
    for kind, points in found["growth"].items():
        failed += [f"growth with {kind}" for point in points if point["errors"]]
    return failed


if __name__ == "__main__":
    sys.exit(main())
