"""Which transport carries a push, and the trainer's end of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import torch

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.messages import Status
from weightpush_protocol.transports.base import Sender, TransportConfig
from weightpush_protocol.transports.collective import CollectiveSender
from weightpush_protocol.transports.sockets import pick_host

#: What ``transport=`` may be.
TRANSPORTS: Final = ("auto", "nccl", "gloo", "http")


def choose_transport(wanted: str, statuses: Sequence[Status], device: torch.device) -> str:
    """Return ``wanted``, or what ``auto`` means for weights on ``device`` and the workers of these servers."""
    if wanted != "auto":
        return wanted
    workers = [status.workers for status in statuses]
    if not all(workers):
        return "http"

    def everywhere(name: str) -> bool:
        return all(name in worker.transports for group in workers for worker in group)

    if device.type == "cuda" and everywhere("nccl"):
        return "nccl"
    return "gloo" if everywhere("gloo") else "http"


def make_sender(
    name: str, urls: Sequence[str], statuses: Sequence[Status], *, device: torch.device, data_host: str | None
) -> tuple[Sender | None, list[TransportConfig]]:
    """Return the trainer's end of the transport (None for ``http``), and the configuration for each server.

    Raises:
        WeightPushError: ``transport_unavailable``: it cannot run here, or a server lists no workers.
    """
    if name == "http":
        return None, [TransportConfig(name="http") for _ in urls]
    for url, status in zip(urls, statuses, strict=True):
        if not status.workers:
            raise WeightPushError(
                ErrorCode.TRANSPORT_UNAVAILABLE,
                f"{url} lists no workers, so {name} cannot reach them; use transport='http'",
            )
    sender = CollectiveSender(
        "nccl" if name == "nccl" else "gloo",
        host=data_host or _host_for(urls),
        world_size=1 + sum(len(status.workers) for status in statuses),
        device=device,
    )
    configs = []
    rank = 1
    for status in statuses:
        configs.append(sender.config.model_copy(update={"rank_offset": rank}))
        rank += len(status.workers)
    return sender, configs


def _host_for(urls: Sequence[str]) -> str:
    # One address has to do for all. The loopback one is of use only where every server is on this machine, while
    # an outward one is reachable from this machine as well.
    hosts = [pick_host(urlsplit(url).hostname or "") for url in urls]
    outward = [host for host in hosts if not (host.startswith("127.") or host in {"::1", "localhost"})]
    return (outward or hosts)[0]
