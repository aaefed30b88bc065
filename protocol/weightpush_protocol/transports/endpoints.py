"""A worker's end of whatever transport `begin` names."""

from __future__ import annotations

import torch

from weightpush_protocol.transports.base import Receiver, TransportConfig
from weightpush_protocol.transports.collective import CollectiveReceiver
from weightpush_protocol.transports.shm_receiver import ShmReceiver


def make_receiver(config: TransportConfig, *, rank: int, device: torch.device | str = "cpu") -> Receiver:
    """Return the receiver of worker ``rank`` (from 1) for ``config``; ``device`` is where buckets lie for ``nccl``.

    Raises:
        ValueError: ``http`` has no receiver; or ``rank`` is outside the group.
        WeightPushError: ``transport_unavailable``.
    """
    if config.name == "shm":
        return ShmReceiver(config, rank=rank)
    return CollectiveReceiver(config, rank=rank, device=device)
