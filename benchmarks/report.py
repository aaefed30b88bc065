"""``docs/benchmarks/README.md``, made from the numbers. No I/O."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.rounds import ratio
from benchmarks.verdicts import Verdict, growth_verdicts, memory_verdicts, speed_verdicts

_NAMES: Final = {
    "floor": "memcpy floor",
    "layerwise": "vLLM layerwise, from memory",
    "file": "files in a RAM disk, then vLLM",
    "per-tensor": "one call and broadcast a tensor",
}
_PARTS: Final = (
    "gather",
    "digest",
    "send",
    "receive",
    "check",
    "copy",
    "land",
    "transfer",
    "open",
    "PWAL",
    "proof",
    "control",
)


def document(found: Mapping[str, Any]) -> str:
    """Return the whole document."""
    models, growth = found["models"], found["growth"]
    speed, memory, grown = speed_verdicts(models), memory_verdicts(models), growth_verdicts(growth)
    sections = [
        _head(found),
        _must_reach([*speed, *grown, *memory]),
        *[_model(key, model) for key, model in models.items()],
        _growth(growth),
        _how(),
    ]
    return "\n".join(sections)


def _head(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    quick = "\n**A smoke test with tiny models: these numbers say nothing.**\n" if found["quick"] else ""
    paragraphs = [
        f"Made by `{machine['command']}`, {machine['at']}, in {found['minutes']:.0f} minutes; do not edit. The numbers "
        "are in [results.json](results.json).",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}; {versions}. "
        f"Load average at the start: {machine['load_at_start']}. One thread a process; the trainer on core "
        f"{machine['trainer_core']}, the server, all its processes, on core {machine['server_core']}. Medians of "
        f"{found['rounds']} rounds after a warm-up, in which all ways take turns in the same live processes"
        f"{_fewer(found)}.",
    ]
    wrapped = "\n\n".join(textwrap.fill(text, 120, break_on_hyphens=False) for text in paragraphs)
    return f"# What a push costs\n\n{wrapped}\n{quick}"


def _fewer(found: Mapping[str, Any]) -> str:
    """Say where there was no time for all rounds."""
    models = {key: model["rounds"] for key, model in found["models"].items() if "error" not in model}
    points = [point for points in found["growth"].values() for point in points if point["rounds"]]
    models |= {"growth": min(len(point["rounds"]) for point in points)} if points else {}
    fewer = [f"{key} {rounds}" for key, rounds in models.items() if rounds < found["rounds"]]
    return f" (time was up earlier: {', '.join(fewer)} rounds)" if fewer else ""


def _must_reach(verdicts: Sequence[Verdict]) -> str:
    lines = ["## What must be reached", "", "| | must be | is | |", "|---|---|---|---|"]
    for verdict in verdicts:
        sign = "≤" if verdict.most else "≥"
        said = {True: "reached", False: "**missed**", None: "not measured"}[verdict.reached]
        value = "-" if verdict.value is None else _amount(verdict.value, verdict.unit)
        lines.append(f"| {verdict.claim} | {sign} {_amount(verdict.target, verdict.unit)} | {value} | {said} |")
    known = [verdict for verdict in verdicts if verdict.reached is not None]
    reached = sum(verdict.reached is True for verdict in known)
    lines += ["", f"{reached} of {len(known)} reached."]
    missed = [verdict for verdict in known if not verdict.reached]
    if missed:
        lines[-1] += " Where not, the parts below and the profiles (`profile-*.txt`) show what the time goes into."
    return "\n".join(lines) + "\n"


def _amount(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.2f} x"
    return f"{value:.0f} {unit}" if unit in {"%", "ms"} else f"{value:.2f} {unit}"


def _name(way: str) -> str:
    return _NAMES.get(way) or f"push over {way.replace(' ', ', ')}"


def _model(key: str, model: Mapping[str, Any]) -> str:
    if "error" in model:
        return f"## {key}\n\nNot measured: {model['error']}\n"
    ways = model["ways"]
    rounds = {name: way["rounds"] for name, way in ways.items()}
    lines = [
        f"## {key}: {model['what']}",
        "",
        f"{model['tensors']} tensors, {model['bytes'] / 1e6:.0f} MB. Seconds from the call to the new weights being",
        "served; *pause*: of these, without service. The last four columns say how many times longer that is than the",
        "floor, and how many times faster than the three other ways.",
        "",
        "| | seconds | pause | / floor | layerwise / it | files / it | per tensor / it |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, way in ways.items():
        if way["median"] is None:
            why = way["errors"][0].splitlines()[0][:200] if way["errors"] else "not run"
            lines.append(f"| {_name(name)} | failed: {why} | | | | | |")
            continue
        cells = [f"{way['median']:.3f}", f"{way['pause']:.3f}" if way["pause"] else "-"]
        cells.append(_times(ratio(rounds[name], rounds.get("floor", {}))))
        for other in ("layerwise", "file", "per-tensor"):
            cells.append("-" if other == name else _times(ratio(rounds.get(other, {}), rounds[name])))
        note = " (some rounds failed)" if way["errors"] else ""
        lines.append(f"| {_name(name)}{note} | " + " | ".join(cells) + " |")
    equal = "All pushes ended with the same fingerprint" if model["fingerprints_equal"] else "**FINGERPRINTS DIFFER**"
    lines += ["", f"{equal}. ![{key}]({key}.png)", "", *_parts(ways), *_memory(model)]
    first = model.get("first_push")
    if first:
        lines += [
            f"The very first push to this server took {first['seconds']:.3f} s, of which begin {first['begin']:.3f} s.",
            "",
        ]
    return "\n".join(lines)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _parts(ways: Mapping[str, Any]) -> list[str]:
    shown = {name: way["parts"] for name, way in ways.items() if "transfer" in way["parts"]}
    lines = [
        "Where the seconds of a push go. *gather*, *digest*, *send*: the trainer. *receive* (waiting included),",
        "*check* (digests), *copy* (to host memory), *land*: the worker, beside the trainer and each other.",
        "*transfer*: all of these together, as the clock has it (without landing where that comes later). Then, one",
        "after another: *open*, *PWAL* (vLLM's post-load processing), *proof*. *control*: the rest of the push, which",
        "is calls, rendezvous, pausing, resuming and caches.",
        "",
        "| push over | " + " | ".join(_PARTS) + " |",
        "|---|" + "---|" * len(_PARTS),
    ]
    for name, parts in shown.items():
        lines.append(f"| {name} | " + " | ".join(f"{parts.get(part, 0.0):.3f}" for part in _PARTS) + " |")
    return [*lines, ""]


def _memory(model: Mapping[str, Any]) -> list[str]:
    lines = [
        "Memory that each takes at its peak, beside what both sides held before, in MB, private and shared. The",
        f"largest module is {model['largest_module_bytes'] / 1e6:.0f} MB, the weights are "
        f"{model['bytes'] / 1e6:.0f} MB.",
        "",
        "| | trainer | server | largest bucket |",
        "|---|---|---|---|",
    ]
    for name, peak in model["memory"].items():
        bucket = f"{peak['bucket_bytes'] / 1e6:.0f}" if peak["bucket_bytes"] else "-"
        extra = f"{peak['trainer_extra'] / 1e6:.0f} | {peak['server_extra'] / 1e6:.0f}"
        lines.append(f"| {_name(name)} | {extra} | {bucket} |")
    return [*lines, ""]


def _growth(growth: Mapping[str, Any]) -> str:
    lines = ["## Growth", ""]
    if not any(growth.values()):
        return "\n".join([*lines, "Not measured.", ""])
    lines += [
        "Pushes over shm, direct. Each model has a server of its own; the rounds go round among them. Several servers",
        "share one core here, so that what they do beside each other elsewhere comes one after another. The last rows",
        "are partial pushes of the widest dense model: only the modules that they touch are processed.",
        "",
        "![growth](growth.png)",
        "",
        "| | tensors | MB | seconds | without PWAL | land | PWAL | control |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in (*growth["bytes"], *growth["tensors"], *growth["servers"], *growth["parts"]):
        what = point.get("what") or f"{point['servers']} server{'s' if point['servers'] > 1 else ''}"
        row = f"| {what} | {point['tensors']} | {point['bytes'] / 1e6:.0f} | "
        if point["seconds"] is None:
            lines.append(row + "failed: " + "; ".join(point["errors"])[:200].splitlines()[0] + " | | | | |")
            continue
        parts = point["parts"]
        seconds = [point["seconds"], point["seconds"] - parts["PWAL"], parts["land"], parts["PWAL"], parts["control"]]
        lines.append(row + " | ".join(f"{value:.3f}" for value in seconds) + " |")
    return "\n".join([*lines, ""])


def _how() -> str:
    return """## How it was measured

- *memcpy floor*: `copy_` of the same tensors, one by one, from memory to memory, in the server's worker process.
- *push over …*: `WeightPusher.push(model)` of a transformers module in a trainer process, the second and later pushes
  of one pusher; the weights are not those that the server was started on.
- *vLLM layerwise, from memory*: `reload_weights` from an iterator over tensors that lie in the worker's own memory; the
  way there is not counted. Timed in the worker, as the floor.
- *files in a RAM disk*: `save_pretrained` in the trainer, `reload_weights` from the directory in the worker.
- *one call and broadcast a tensor*: for each tensor a POST, answered at once, and a Gloo broadcast from trainer to
  worker, which hands it to `load_weights` between vLLM's own beginning and end of a layerwise reload; the whole of it.
- None of the other ways checks that what arrived is what was sent, nor keeps requests from half-updated weights; and
  vLLM's layerwise reload is wrong on some models ([matrix.md](../matrix.md)). Their times are taken as they are.
- *Memory* is looked at in rounds of their own, every 5 ms, with fresh buffers.
"""
