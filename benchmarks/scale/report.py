"""The tables of ``docs/scale.md``, as the program prints them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from benchmarks.scale.constants import Constants, origins
from benchmarks.scale.limits import limits, staged_fits
from benchmarks.scale.model import BUILT, NEEDED, TODAY, Job, Prediction, Protocol, Transport, job_for, predict
from benchmarks.scale.published import CASES, predicted_s
from benchmarks.scale.sites import MODELS, SERVERS, SITES, Model, Site

BUCKETS_MIB: Final = (64, 256, 1024, 4096)

_SECTION: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown whose columns are as wide as they need to be."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def text(line: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([text(lines[0]), rule, *map(text, lines[1:])]) + "\n"


def seconds_text(seconds: float) -> str:
    """Return seconds, or minutes or hours where they are many, with their unit."""
    if seconds < 10:
        return f"{seconds:.1f}"
    if seconds < 1000:
        return f"{seconds:.0f}"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.0f} h"


def try_predict(job: Job, constants: Constants) -> Prediction | None:
    """Return the prediction, or None where the transport cannot do the job at all."""
    try:
        return predict(job, constants)
    except ValueError:
        return None


def published_table(constants: Constants) -> str:
    """Predicted and published, side by side."""
    rows = []
    for case in CASES:
        predicted = predicted_s(case, constants)
        rows.append(
            (
                f"[{case.system}]({case.address})",
                case.what,
                f"{case.seconds:.3g}",
                f"{predicted:.3g}",
                f"{predicted / case.seconds:.2f}",
                str(case.share),
                case.why,
            )
        )
    return table(("system", "what", "published s", "predicted s", "ratio", "published is", "beside the links"), rows)


def push_table(site: Site, constants: Constants, transport: Transport, protocol: Protocol) -> str:
    """Seconds of a push, and of the pause of a staged one, for all models and fleets."""
    rows = []
    for model in MODELS.values():
        row = [model.name, f"{model.nbytes / 1e9:.4g}"]
        jobs = [job_for(model, servers, site, transport, protocol=protocol) for servers in SERVERS]
        predictions = [try_predict(job, constants) for job in jobs]
        row.append(str(jobs[0].workers))
        row += ["-" if each is None else seconds_text(each.push) for each in predictions]
        pauses = [each.staged_pause for each in predictions if each is not None]
        row.append(seconds_text(pauses[0]) if pauses else "-")
        rows.append(row)
    head = ["model", "GB", "GPUs a server", *map(_servers_text, SERVERS), "staged pause s"]
    return table(head, rows)


def transports_table(site: Site, constants: Constants, model: Model) -> str:
    """Seconds of a push of one model by each transport, with the control of today and with what is needed."""
    rows = []
    for transport in Transport:
        for name, protocol in (("today", TODAY), ("needed", NEEDED)):
            if transport not in BUILT and protocol is TODAY:
                continue
            jobs = [job_for(model, servers, site, transport, protocol=protocol) for servers in SERVERS]
            predictions = [try_predict(job, constants) for job in jobs]
            rows.append(
                (transport.value, name, *("-" if each is None else seconds_text(each.push) for each in predictions))
            )
    return table(("transport", "control", *map(_servers_text, SERVERS)), rows)


def limits_table(site: Site, constants: Constants, transport: Transport) -> str:
    """What stops a push, and what takes most of it, for each model and fleet."""
    rows = []
    for model in MODELS.values():
        row = [model.name]
        for servers in SERVERS:
            prediction = try_predict(job_for(model, servers, site, transport), constants)
            row.append("-" if prediction is None else _limits_text(prediction, constants))
        rows.append(row)
    return table(("model", *map(_servers_text, SERVERS)), rows)


def _limits_text(prediction: Prediction, constants: Constants) -> str:
    stops = [f"**{limit.name}**" for limit in limits(prediction, constants) if limit.stops]
    part, seconds = max(prediction.parts().items(), key=lambda each: each[1])
    return ", ".join([*stops, f"{part} {seconds / prediction.push:.0%}"])


def _servers_text(servers: int) -> str:
    return f"{servers} server{'s' * (servers > 1)}"


def buckets_table(site: Site, constants: Constants, model: Model) -> str:
    """Seconds of a push of one model with larger and smaller buckets, as built."""
    rows = []
    for mib in BUCKETS_MIB:
        jobs = [job_for(model, servers, site, Transport.NCCL, bucket_bytes=mib * 2**20) for servers in SERVERS]
        rows.append([f"{mib} MiB", *(seconds_text(predict(job, constants).push) for job in jobs)])
    return table(("buckets", *map(_servers_text, SERVERS)), rows)


def constants_table() -> str:
    """The constants, and where each comes from."""
    rows = [(f"`{each.name}`", f"{each.value:.3g}", each.kind, each.what, each.source) for each in origins()]
    return table(("constant", "value", "kind", "of what", "source"), rows)


def sites_table() -> str:
    """The fabrics, and where their rates come from."""
    rows = [
        (site.name, f"{site.nic_bps / 1e9:.4g}", str(site.nics), "RDMA" if site.rdma else "TCP", site.source)
        for site in SITES.values()
    ]
    return table(("fabric", "GB/s a card", "cards a machine", "by", "source"), rows)


def memory_table(site: Site) -> str:
    """What a staged update takes of a machine's host memory."""
    rows = [
        (
            model.name,
            f"{model.nbytes / 1e9:.4g}",
            f"{model.nbytes / site.host_bytes:.1%}",
            "yes" if staged_fits(job_for(model, 1, site, Transport.NCCL)) else "no",
            "yes" if 3 * model.nbytes <= site.host_bytes else "no",
        )
        for model in MODELS.values()
    ]
    return table(("model", "GB", "of 2 TB", "staged fits", "with --keep-previous"), rows)


def tables(constants: Constants) -> dict[str, str]:
    """Return the tables of ``docs/scale.md`` by name."""
    site = SITES["ib-400"]
    return {
        "published": published_table(constants),
        "push": push_table(site, constants, Transport.NCCL, TODAY),
        "needed": push_table(site, constants, Transport.SLICES_TREE, NEEDED),
        "transports": transports_table(site, constants, MODELS["70B"]),
        "limits": limits_table(site, constants, Transport.NCCL),
        "buckets": buckets_table(site, constants, MODELS["235B"]),
        "memory": memory_table(site),
        "sites": sites_table(),
        "constants": constants_table(),
    }


def fill(text: str, by_name: dict[str, str]) -> str:
    """Return ``text`` with each table put between its marks.

    Raises:
        KeyError: the text asks for a table that there is not.
    """
    return _SECTION.sub(lambda found: found[1] + by_name[found[2]] + found[3], text)
