"""The picture of ``docs/scale.md``: seconds of a push against the number of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.scale.constants import Constants
from benchmarks.scale.model import BUILT, NEEDED, TODAY, Transport, job_for
from benchmarks.scale.report import try_predict
from benchmarks.scale.sites import MODELS, Site

#: The colours of Okabe and Ito, which also the colour-blind tell apart.
_COLOURS: Final = dict(
    zip(Transport, ("#0072b2", "#e69f00", "#cc79a7", "#999999", "#56b4e9", "#009e73", "#d55e00"), strict=True)
)
_SHOWN: Final = ("8B", "70B", "1T")
_SERVERS: Final = tuple(round(10 ** (step / 8)) for step in range(25))


def plot(path: Path, site: Site, constants: Constants) -> None:
    """Write the picture to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_SHOWN), figsize=(13, 4.4), sharey=True, layout="constrained")
    for axis, name in zip(axes, _SHOWN, strict=True):
        for transport in Transport:
            protocol = TODAY if transport in BUILT else NEEDED
            points = [
                (servers, prediction.push)
                for servers in _SERVERS
                if (
                    prediction := try_predict(
                        job_for(MODELS[name], servers, site, transport, protocol=protocol), constants
                    )
                )
            ]
            style = "-" if transport in BUILT else "--"
            if points:
                axis.plot(*zip(*points, strict=True), style, color=_COLOURS[transport], label=transport.value, lw=1.8)
        job = job_for(MODELS[name], 1, site, Transport.NCCL)
        axis.set(xscale="log", yscale="log", xlabel="servers", ylim=(0.1, 1e5))
        axis.set_title(f"{name}, {job.model.nbytes / 1e9:.4g} GB, {job.workers} GPU{'s' * (job.workers > 1)} a server")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds from call to report")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"Predicted push on {site.name}: as built (solid), and what is not built (dashed)")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
