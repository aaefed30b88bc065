"""Which worker is which, over all engines of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def server_rank(vllm_config: VllmConfig, rank: int) -> int:
    """Return the position of a worker among all workers of its server: engine by engine, as on the data plane."""
    parallel = vllm_config.parallel_config
    return int(parallel.data_parallel_index) * int(parallel.world_size) + rank
