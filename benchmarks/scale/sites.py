"""Machines, fabrics and models that the predictions are for. Rates are bytes a second in one direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_GBIT: Final = 1e9 / 8

#: A system description of MLPerf: 8 GPUs of 141 GB, NVLink 900 GB/s (both directions), PCIe Gen5 x16 (504 GB/s for all
#: eight), 2 TB of host memory.
MACHINE_SOURCE: Final = (
    "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed/NVIDIA/systems/"
    "H200-SXM-141GBx8_TRT_MaxQ.json"
)
NIC_SOURCE: Final = "https://docs.nvidia.com/networking/display/ConnectX7VPI/Introduction"


@dataclass(frozen=True, slots=True)
class Site:
    """One kind of machine on one fabric; ``nics`` of ``nic_bps`` each belong to a machine."""

    name: str
    nic_bps: float
    nics: int
    rdma: bool
    source: str
    gpus: int = 8
    gpu_bytes: float = 141e9
    nvlink_bps: float = 450e9
    pcie_bps: float = 63e9
    host_bytes: float = 2e12


@dataclass(frozen=True, slots=True)
class Model:
    """Weights as they are served."""

    name: str
    parameters: float
    bytes_per_parameter: float
    tensors: int

    @property
    def nbytes(self) -> float:
        """Size of the weights in bytes."""
        return self.parameters * self.bytes_per_parameter


SITES: Final = {
    site.name: site
    for site in (
        Site("ib-400", 400 * _GBIT, 8, True, f"{NIC_SOURCE} (NDR 400 Gb/s, one for each GPU)"),
        Site("ib-200", 200 * _GBIT, 8, True, f"{NIC_SOURCE} (NDR200 200 Gb/s, one for each GPU)"),
        Site("roce-100", 100 * _GBIT, 2, True, f"{NIC_SOURCE} (100GbE, two for each machine, RoCE)"),
        Site("eth-100", 100 * _GBIT, 1, False, f"{NIC_SOURCE} (100GbE, one for each machine, TCP)"),
        Site("eth-25", 25 * _GBIT, 1, False, f"{NIC_SOURCE} (25GbE, one for each machine, TCP)"),
    )
}

#: Tensor counts are those of checkpoints of that size: Qwen2.5-0.5B, Llama-3.1-8B and 70B, Qwen3-235B-A22B, Kimi-K2
#: (FP8: each expert's weight has a scale).
MODELS: Final = {
    model.name: model
    for model in (
        Model("0.5B", 0.5e9, 2, 290),
        Model("8B", 8e9, 2, 291),
        Model("70B", 70e9, 2, 723),
        Model("235B", 235e9, 2, 36_945),
        Model("1T", 1e12, 1.026, 140_000),
    )
}

SERVERS: Final = (1, 4, 16, 64, 256, 1000)
