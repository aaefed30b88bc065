"""The constants of the model: one data file that says of each what it is, and whether it was measured here."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

PATH: Final = Path(__file__).with_name("constants.json")
KINDS: Final = ("measured", "published", "assumed")


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds (``_s``), bytes a second (``_bps``), shares and counts; ``constants.json`` says of what."""

    manifest_parse_s: float
    digests_write_s: float
    control_call_s: float
    http_body_bps: float
    cpu_copy_bps: float
    cpu_digest_bps: float
    gloo_bps: float
    store_request_s: float
    store_requests_per_worker: float
    gloo_requests_per_pair: float
    gloo_bytes_per_pair: float
    server_fixed_s: float
    rdma_efficiency: float
    tcp_efficiency: float
    nvlink_efficiency: float
    pcie_efficiency: float
    gpu_digest_bps: float
    gpu_land_bps: float
    gpu_launch_s: float
    gpu_postload_bps: float
    nccl_base_s: float
    nccl_rank_s: float
    nccl_hop_s: float
    gpu_failures_per_s: float


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a constant comes from; ``kind`` is one of ``KINDS``."""

    name: str
    value: float
    kind: str
    what: str
    source: str


def origins(path: Path = PATH) -> list[Origin]:
    """Read the data file.

    Raises:
        ValueError: it lacks a constant, or holds one that the model does not know, or of an unknown kind.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    known = [field.name for field in fields(Constants)]
    if set(content) != set(known):
        raise ValueError(f"{path.name} differs from the model in {sorted(set(content) ^ set(known))}")
    found = [
        Origin(name, float(entry["value"]), entry["kind"], entry["what"], entry["source"])
        for name, entry in content.items()
    ]
    for origin in found:
        if origin.kind not in KINDS or origin.value <= 0:
            raise ValueError(
                f"{origin.name}: {origin.value} ({origin.kind}); expected a positive value, one of {KINDS}"
            )
    return found


def load(path: Path = PATH) -> Constants:
    """Return the constants of the data file. Raises as :func:`origins` does."""
    return Constants(**{origin.name: origin.value for origin in origins(path)})
