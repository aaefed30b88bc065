"""Run the matrix: ``python -m matrix.run [--models a,b] [--tp 2] [--policy retain] [--compile] [--transport shm]``.

Every model runs in a forked child, so that a crash is a row and not the end. Prints a table; a complete run with the
default options also writes ``docs/matrix.md``, one with ``--transport shm`` alone ``docs/matrix-shm.md``. The exit code
is 1 if a push did not end where a cold start does.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from support.engine import ENVIRONMENT

_ROOT = Path(__file__).resolve().parents[2]
_DOCS = _ROOT / "docs"
#: A model that takes longer is stuck, in seconds.
_LIMIT_S = 420
_FROM_PROCESS: Final = "from a trainer's process to the workers"
_WAYS: Final = {
    None: "in process",
    "shm": f"over shm {_FROM_PROCESS}",
    "gloo": f"over gloo {_FROM_PROCESS}",
    "http": "over http into real servers",
}
_TRANSPORT_HELP: Final = "push from a trainer's process (shm, gloo), or into real servers (http)"


def models() -> dict[str, dict[str, Any]]:
    """Return ``key -> {"model_type", "config"}``: the tiny models of the tests, and more architectures."""
    data = _ROOT / "tests" / "data"
    return {
        key: entry
        for name in ("tiny_models.json", "matrix_models.json")
        for key, entry in json.loads((data / name).read_text()).items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command."""
    known = models()
    parser = argparse.ArgumentParser(description="Compare pushes with cold starts, model by model.")
    parser.add_argument("--models", help=f"comma-separated, of: {', '.join(known)}")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--policy", default="scratch", help="storage policy: scratch, retain or strict")
    parser.add_argument("--compile", action="store_true", help="torch.compile (vLLM mode 2) instead of eager")
    parser.add_argument("--transport", choices=("shm", "gloo", "http"), help=_TRANSPORT_HELP)
    parser.add_argument("--no-layerwise", action="store_true", help="leave vLLM's own reload out")
    parser.add_argument("--checkpoints", type=Path, help="directory that keeps the tiny checkpoints")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument(
        "--out", type=Path, help="write the document here (default: matrix.md or matrix-shm.md, if complete)"
    )
    given = parser.parse_args(arguments)
    chosen = given.models.split(",") if given.models else list(known)
    unknown = [key for key in chosen if key not in known]
    if unknown:
        parser.error(f"no such models: {', '.join(unknown)}")

    _prepare(given.tp)
    # Imported once, here: the children are forked with it.
    from matrix.rows import Options

    # Transports are nothing to vLLM's own reload.
    layerwise = given.transport is None and not given.no_layerwise
    options = Options(given.tp, given.policy, given.compile, given.transport, layerwise)
    with tempfile.TemporaryDirectory() as temporary:
        root = given.checkpoints or Path(temporary)
        rows = []
        for key in chosen:
            rows.append(_row(key, known[key], root, options))
            print(_line(rows[-1]), flush=True)
    document = _document(rows, options)
    print("\n" + document)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))
    out = given.out or (_default_document(options) if not given.models else None)
    if out is not None:
        out.write_text(document)
    return 0 if all(row["right"] or row["unloadable"] for row in rows) else 1


def _prepare(tp: int) -> None:
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if tp > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(tp))
    # Worker processes of their own find the extension by name.
    paths = [str(_ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _row(key: str, entry: dict[str, Any], root: Path, options: Any) -> dict[str, Any]:
    """Return the row of one model; where it did not come to a push, whether plain vLLM runs it at all."""
    from matrix.rows import measure, measure_plain

    row = _in_child(measure, key, entry, root, options)
    if row["error"] is not None and not row["pushes"]:
        plain = _in_child(measure_plain, key, entry, root, options)
        if plain["unloadable"]:
            row = plain
    return row


def _in_child(work: Callable[..., None], key: str, entry: dict[str, Any], root: Path, options: Any) -> dict[str, Any]:
    """Do ``work`` in a forked child and return its row, as far as it got."""
    from matrix.rows import Row

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.setpgid(0, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LIMIT_S)
            with os.fdopen(writing, "w") as pipe:

                def report(row: Row) -> None:
                    print(json.dumps({**row.as_dict(), "right": row.right}), file=pipe, flush=True)

                work(key, entry, root, options, report)
            code = 0
        except BaseException:  # noqa: BLE001 - nothing may escape into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    row: dict[str, Any] = json.loads(lines[-1]) if lines else {**Row(key).as_dict(), "right": False}
    if os.WIFSIGNALED(status) and row["layerwise"] == "-":
        row["error"] = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        row["right"] = False
    row["model_type"] = entry["model_type"]
    return row


def _default_document(options: Any) -> Path | None:
    from matrix.rows import Options

    if options == Options():
        return _DOCS / "matrix.md"
    if options == Options(transport="shm", layerwise=False):
        return _DOCS / "matrix-shm.md"
    return None


def _line(row: dict[str, Any]) -> str:
    if row["unloadable"]:
        return f"{row['model']:>20}  plain vLLM does not run it: {row['error']}"
    outcome = "bit-exact" if row["right"] else f"WRONG {row['pushes']} {row['first_differing']} {row['error'] or ''}"
    return f"{row['model']:>20}  {outcome}; vLLM layerwise: {row['layerwise']} ({row['seconds']:.0f} s)"


def _document(rows: list[dict[str, Any]], options: Any) -> str:
    versions = ", ".join(f"{name} {_version(name)}" for name in ("vllm", "torch", "transformers"))
    how = [
        f"tensor parallel {options.tp}",
        f"storage policy {options.policy}",
        "torch.compile (mode 2)" if options.compile else "eager",
        _WAYS[options.transport],
    ]
    shown = [row for row in rows if not row["unloadable"]]
    right = sum(row["right"] for row in shown)
    lines = [
        "# Which models a push has been compared with a cold start on",
        "",
        f"{datetime.datetime.now(datetime.UTC).date()}, {versions}, CPU; {', '.join(how)}. Made by `make matrix`.",
        "",
        "Tiny models with random weights: a checkpoint B is pushed onto a live A, then A, then A again, and each",
        "time everything is compared with a cold start: every tensor that the model can reach (bits, dtype, shape,",
        "strides), the answer of every packed layer to noise, greedy tokens and logprobs. The columns B, A, A count",
        "what differs. *By plan* is the share of bytes that landed as planned copies, the rest by the model's own",
        "loaders; the middle push goes through loaders altogether. The last column is vLLM's own layerwise",
        "`reload_weights` on the same checkpoints, by the same comparison.",
        "",
        f"**{right} of {len(shown)} bit-exact.** vLLM's layerwise reload: {_layerwise_summary(shown)}.",
        "",
        "| model | type | tensors | packed layers | B | A | A | tokens | logprobs | by plan | vLLM layerwise |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in shown:
        differ = [str(push[1]) for push in row["pushes"]] + ["-"] * (3 - len(row["pushes"]))
        tokens, logprobs = (
            "equal" if row["pushes"] and all(push[part] for push in row["pushes"]) else "DIFFERENT" for part in (2, 3)
        )
        cells = [row["model"], row["model_type"], row["tensors"], row["probes"], *differ, tokens, logprobs]
        cells += [
            "-" if options.transport == "http" else f"{row['planned']:.0%}",
            row["layerwise"] if row["error"] is None else f"{row['error']}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    unloadable = [row for row in rows if row["unloadable"]]
    if unloadable:
        lines += ["", "Plain vLLM does not run these here, so nothing can be said about pushes:", ""]
        lines += [f"- {row['model']} ({row['model_type']}): {row['error'][:160]}" for row in unloadable]
    return "\n".join(lines) + "\n"


def _layerwise_summary(rows: list[dict[str, Any]]) -> str:
    outcomes = [row["layerwise"] for row in rows if row["layerwise"] != "-"]
    if not outcomes:
        return "not run"
    right = outcomes.count("right")
    wrong = sum(outcome.startswith("silently") for outcome in outcomes)
    crashed = sum(outcome.startswith(("raised", "ended")) for outcome in outcomes)
    return f"right on {right}, silently wrong on {wrong}, crashed on {crashed}"


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "?"


if __name__ == "__main__":
    sys.exit(main())
