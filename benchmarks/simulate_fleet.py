"""Predict pushes for fleets and models that this machine cannot hold. See docs/scale.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from benchmarks.scale.constants import load
from benchmarks.scale.limits import limits
from benchmarks.scale.model import NEEDED, TODAY, Transport, job_for, predict
from benchmarks.scale.plot import plot
from benchmarks.scale.published import CASES, predicted_s
from benchmarks.scale.report import fill, limits_table, published_table, push_table, tables, transports_table
from benchmarks.scale.sites import MODELS, SITES

_DOCS: Final = Path(__file__).resolve().parents[1] / "docs"


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", choices=SITES, default="ib-400", help="the fabric (default: %(default)s)")
    parser.add_argument("--transport", choices=[each.value for each in Transport], default="nccl")
    parser.add_argument("--needed", action="store_true", help="with the control calls that a larger fleet needs")
    parser.add_argument("--model", choices=MODELS, help="one push in detail; with --servers")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--docs", action="store_true", help="write the tables and the picture of docs/scale.md")
    given = parser.parse_args(arguments)

    constants, site, transport = load(), SITES[given.site], Transport(given.transport)
    protocol = NEEDED if given.needed else TODAY
    if given.docs:
        page = _DOCS / "scale.md"
        page.write_text(fill(page.read_text(encoding="utf-8"), tables(constants)), encoding="utf-8")
        plot(_DOCS / "images" / "scale.png", site, constants)
    elif given.model is not None:
        job = job_for(
            MODELS[given.model],
            given.servers,
            site,
            transport,
            protocol=protocol,
            bucket_bytes=given.bucket_mb * 2**20,
        )
        try:
            prediction = predict(job, constants)
        except ValueError as error:
            parser.error(str(error))
        print(f"{job.model.name} to {job.servers} servers of {job.workers} GPUs, {job.trainer_ranks} trainer ranks")
        print(f"push {prediction.push:.3g} s, pause {prediction.pause:.3g} s, staged {prediction.staged_pause:.3g} s")
        for name, seconds in prediction.parts().items():
            print(f"  {name:14} {seconds:9.3g} s")
        for limit in limits(prediction, constants):
            print(f"  {'stops' if limit.stops else 'slow '}: {limit.name}: {limit.detail}")
    else:
        print(f"Seconds of a push over {transport} on {site.name}\n{push_table(site, constants, transport, protocol)}")
        print(f"A push of 70B by each transport\n{transports_table(site, constants, MODELS['70B'])}")
        print(f"What breaks\n{limits_table(site, constants, transport)}")
        print(f"Held against what others published\n{published_table(constants)}")
    return int(any(not _within(predicted_s(case, constants) / case.seconds, case.share.factors) for case in CASES))


def _within(ratio: float, factors: tuple[float, float]) -> bool:
    return factors[0] <= ratio <= factors[1]


if __name__ == "__main__":
    sys.exit(main())
