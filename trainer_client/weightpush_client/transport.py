"""Which transport carries a push to which server, and the trainer's ends of them."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args
from urllib.parse import urlsplit

import torch

from weightpush_client.policy import LOST_SERVERS
from weightpush_client.report import PushError
from weightpush_client.stream import Buffers
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import Manifest
from weightpush_protocol.status import Status
from weightpush_protocol.transports.base import Sender, TransportConfig, TransportName, check_available
from weightpush_protocol.transports.collective import CollectiveSender
from weightpush_protocol.transports.cuda_memory import gpu_id
from weightpush_protocol.transports.frames import largest_frame
from weightpush_protocol.transports.shared_memory import host_id
from weightpush_protocol.transports.shm_sender import ShmSender
from weightpush_protocol.transports.sockets import pick_host

#: What ``transport=`` may be.
TRANSPORTS: Final = ("auto", *get_args(TransportName))

#: Largest bucket over shared memory. Larger ones would only wait for one another, and fit no cache.
_SHARED_BUCKET_BYTES: Final = 8 * 2**20

_logger = logging.getLogger("weightpush")


@dataclass(frozen=True, slots=True)
class Link:
    """Servers that get their buckets the same way, at the same time.

    Attributes:
        places: of these servers among all that take part.
        configs: what each of them is told in ``begin``.
        server_of_rank: address of the server to which each worker belongs, from rank 1 on.
        sender: the trainer's end; None for ``http``.
    """

    name: str
    places: tuple[int, ...]
    configs: tuple[TransportConfig, ...]
    server_of_rank: tuple[str, ...] = ()
    sender: Sender | None = None

    def note_lost(self, error: WeightPushError) -> None:
        """Add to ``error`` the servers whose workers it names."""
        named: Any = error.details.get("missing_ranks") or [error.details.get("peer_rank")]
        ranks = [rank for rank in named if isinstance(rank, int) and 0 < rank <= len(self.server_of_rank)]
        if ranks:
            error.details.setdefault(LOST_SERVERS, sorted({self.server_of_rank[rank - 1] for rank in ranks}))


def choose_transport(
    wanted: str, status: Status, device: torch.device, *, gpu: str = "", without: Container[str] = ()
) -> str:
    """Return ``wanted``, or what ``auto`` means for weights on ``device`` and the workers of this server.

    ``gpu``: the identity of ``device`` (`gpu_id`). ``without``: what ``auto`` must not mean.
    """
    if wanted != "auto":
        return wanted

    def everywhere(name: str) -> bool:
        return bool(status.workers) and all(name in worker.transports for worker in status.workers)

    # NCCL refuses two processes on one GPU.
    apart = not any(gpu and worker.gpu == gpu for worker in status.workers)
    if device.type == "cuda" and everywhere("nccl") and apart:
        return "nccl"
    if "shm" not in without and everywhere("shm") and _share_host(status):
        return "shm"
    return "gloo" if everywhere("gloo") else "http"


def _share_host(status: Status) -> bool:
    # Both ends ask the kernel who they are. An address says little: behind it may be a proxy or another namespace.
    return bool(host_id()) and all(worker.host_id == host_id() for worker in status.workers)


class Transports:
    """The transports of one push, for weights on ``device``; ``wanted`` is one of `TRANSPORTS`.

    ``buffers`` are the pusher's; `links` takes memory from them where it is to be shared.
    """

    def __init__(self, wanted: str, device: torch.device, data_host: str | None, buffers: Buffers) -> None:
        self.device = device
        self._gpu = gpu_id(device)
        self._wanted = wanted
        self._data_host = data_host
        self._buffers = buffers
        #: Instances with which memory could not be shared after all.
        self._unshared: set[str] = set()

    def names(self, statuses: Sequence[Status]) -> list[str]:
        """Return the transport for each server."""
        return [
            choose_transport(
                self._wanted,
                status,
                self.device,
                gpu=self._gpu,
                without=("shm",) if status.instance_id in self._unshared else (),
            )
            for status in statuses
        ]

    @staticmethod
    def bucket_bytes(names: Sequence[str], limit: int) -> int:
        """Return how large buckets are cut for servers with these `names`, of at most ``limit`` bytes."""
        return min(limit, _SHARED_BUCKET_BYTES) if set(names) == {"shm"} else limit

    def links(
        self, names: Sequence[str], urls: Sequence[str], statuses: Sequence[Status], manifest: Manifest
    ) -> list[Link]:
        """Return one link for each of the transports ``names``, which are given for each server.

        Raises:
            WeightPushError: ``transport_unavailable``: one cannot run here.
        """
        links: list[Link] = []
        try:
            for name in dict.fromkeys(names):
                places = tuple(place for place, other in enumerate(names) if other == name)
                links.append(
                    self._make_link(
                        name, places, [urls[place] for place in places], [statuses[place] for place in places], manifest
                    )
                )
        except BaseException:
            close_links(links)
            raise
        return links

    def go_on_without(
        self, error: Exception, names: Sequence[str], urls: Sequence[str], statuses: Sequence[Status]
    ) -> bool:
        """Whether to begin again with other `names`: shared memory was ``auto``'s choice and could not be had."""
        if not isinstance(error, WeightPushError) or error.code is not ErrorCode.TRANSPORT_UNAVAILABLE:
            return False
        sharing = {
            url: status.instance_id for url, status, name in zip(urls, statuses, names, strict=True) if name == "shm"
        }
        if self._wanted != "auto" or not sharing:
            return False
        server = error.server if isinstance(error, PushError) else None
        _logger.warning("%s; the push goes on without shared memory", error.message)
        self._unshared.update([sharing[server]] if server in sharing else sharing.values())
        return True

    def _make_link(
        self,
        name: str,
        places: tuple[int, ...],
        urls: Sequence[str],
        statuses: Sequence[Status],
        manifest: Manifest,
    ) -> Link:
        if name == "http":
            return Link(name, places, tuple(TransportConfig(name="http") for _ in places))
        sender = self._make_sender(name, urls, statuses, manifest)
        configs = []
        server_of_rank: list[str] = []
        for url, status in zip(urls, statuses, strict=True):
            configs.append(sender.config.model_copy(update={"rank_offset": 1 + len(server_of_rank)}))
            server_of_rank += [url] * len(status.workers)
        return Link(name, places, tuple(configs), tuple(server_of_rank), sender)

    def _make_sender(self, name: str, urls: Sequence[str], statuses: Sequence[Status], manifest: Manifest) -> Sender:
        workers = [worker for status in statuses for worker in status.workers]
        world_size = 1 + len(workers)
        if name == "shm":
            check_available("shm", self.device)
            count = max(1, min(2, len(manifest.buckets)))
            # Elsewhere than on one GPU the bytes go through the host's memory.
            one_gpu = bool(self._gpu) and all(worker.gpu == self._gpu for worker in workers)
            memory = self._buffers.share(count, largest_frame(manifest.buckets), self.device if one_gpu else None)
            return ShmSender(memory, world_size=world_size)
        return CollectiveSender(
            "nccl" if name == "nccl" else "gloo",
            host=self._data_host or _host_for(urls),
            world_size=world_size,
            device=self.device,
        )


def workerless(names: Sequence[str], statuses: Sequence[Status]) -> dict[int, WeightPushError]:
    """Return the servers, by their place, whose transport needs to know their workers while they list none."""
    return {
        place: WeightPushError(
            ErrorCode.TRANSPORT_UNAVAILABLE,
            f"the server lists no workers, so {name} cannot reach them; use transport='http'",
            details={"transport": name},
        )
        for place, (name, status) in enumerate(zip(names, statuses, strict=True))
        if name != "http" and not status.workers
    }


def close_links(links: Sequence[Link]) -> None:
    """Free the trainer's ends."""
    for link in links:
        if link.sender is not None:
            link.sender.close()


def _host_for(urls: Sequence[str]) -> str:
    # One address has to do for all. The loopback one is of use only where every server is on this machine, while
    # an outward one is reachable from this machine as well.
    hosts = [pick_host(urlsplit(url).hostname or "") for url in urls]
    outward = [host for host in hosts if not (host.startswith("127.") or host in {"::1", "localhost"})]
    return (outward or hosts)[0]
