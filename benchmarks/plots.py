"""Plots of the results, light and readable without colours. matplotlib is imported when they are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

#: Okabe and Ito's colours, which the colour-blind can tell apart too.
_COLOURS: Final = {
    "transfer": "#0072B2",
    "land": "#56B4E9",
    "open": "#CC79A7",
    "PWAL": "#E69F00",
    "proof": "#009E73",
    "control": "#999999",
    "whole": "#D55E00",
}
_HATCHES: Final = {"PWAL": "//", "proof": "..", "control": "xx", "land": "\\\\"}


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all plots into ``folder``; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    files = []
    for key, model in found["models"].items():
        if "error" not in model:
            files.append(_bars(key, model, folder / f"{key}.png"))
    if any(found["growth"].values()):
        files.append(_growth(found["growth"], folder / "growth.png"))
    return files


def segments(name: str, way: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return what the bar of one way is made of, in the order of time."""
    parts = way["parts"]
    if "transfer" not in parts:
        return [("whole", way["median"])]
    names = ["transfer", "open", *(["land"] if name.endswith("staged") else []), "PWAL", "proof", "control"]
    return [(part, parts.get(part, 0.0)) for part in names]


def _bars(key: str, model: Mapping[str, Any], file: Path) -> Path:
    from matplotlib import pyplot

    shown = [(name, way) for name, way in model["ways"].items() if way["median"] is not None]
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(shown) + 1.6), layout="constrained")
    labelled: set[str] = set()
    # One slow way must not squeeze all others; its bar is cut and its number stands beside it.
    limit = 1.25 * max([way["median"] for name, way in shown if name != "per-tensor"], default=1.0)
    for row, (name, way) in enumerate(shown):
        left = 0.0
        for part, seconds in segments(name, way):
            label = None if part in labelled else ("other ways" if part == "whole" else part)
            labelled.add(part)
            axes.barh(
                row,
                seconds,
                left=left,
                color=_COLOURS[part],
                hatch=_HATCHES.get(part),
                edgecolor="white",
                linewidth=0.5,
                label=label,
            )
            left += seconds
        cut = way["median"] > limit
        axes.text(
            min(way["median"], limit) * (0.98 if cut else 1.0),
            row,
            f" {way['median']:.2f} s{' (cut)' if cut else ''}",
            va="center",
            ha="right" if cut else "left",
            fontsize=9,
        )
    floor = model["ways"].get("floor", {}).get("median")
    if floor is not None:
        axes.axvline(floor, color="black", linestyle=":", linewidth=1)
    axes.set_xlim(0, limit)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel("seconds, medians (dotted: memcpy floor)")
    axes.set_title(f"{key}: {model['tensors']} tensors, {model['bytes'] / 1e6:.0f} MB", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower right")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def _growth(growth: Mapping[str, Any], file: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    kinds = (
        ("bytes", "MB", 1e-6, False),
        ("tensors", "tensors, same bytes", 1.0, True),
        ("servers", "servers", 1.0, False),
    )
    for plot, (kind, label, scale, logarithmic) in zip(axes, kinds, strict=True):
        points = [point for point in growth[kind] if point["seconds"] is not None]
        across = [point[kind] * scale for point in points]
        _lines(plot, across, points)
        if logarithmic and across:
            plot.set_xscale("log")
        plot.set_xlabel(label)
        plot.set_ylim(bottom=0)
        plot.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("seconds, medians")
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def _lines(plot: Any, across: Sequence[float], points: Sequence[Mapping[str, Any]]) -> None:
    whole = [point["seconds"] for point in points]
    without = [point["seconds"] - point["parts"]["PWAL"] for point in points]
    plot.plot(across, whole, "o-", color=_COLOURS["whole"], label="whole push")
    plot.plot(across, without, "s--", color=_COLOURS["transfer"], label="without PWAL")
    plot.plot(across, [point["parts"]["land"] for point in points], "^:", color=_COLOURS["proof"], label="landing")
