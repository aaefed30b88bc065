"""Predict seconds of a push and of the pause it makes. Pure arithmetic; ``docs/scale.md`` tells it in words.

A push is: *check* (status and manifest of all servers), *rendezvous* (a group forms), *begin*, *stream* (buckets pass
through three stages: the trainer gathers and digests; the bytes travel; workers digest and land), *close* (post-load
processing and proof), *commit*. The slowest stage sets the pace of the stream. Control calls of all servers are made by
one process of the trainer. Requests that still run when the gate closes are not counted: they are the load's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from benchmarks.scale.constants import Constants
from benchmarks.scale.sites import Model, Site


class Transport(StrEnum):
    """Ways of the bytes. Those in ``BUILT`` exist; the others are what a larger fleet would need."""

    NCCL = "nccl"  #: one broadcast group of the trainer's rank 0 and all workers
    GLOO = "gloo"  #: the same on host memory over TCP; all processes connect to each other
    HTTP = "http"  #: every server gets all buckets as bodies
    SHM = "shm"  #: trainer and servers on one machine: buckets lie in memory that all map
    TREE = "tree"  #: machines hand buckets on to two others each, over all their network cards
    SLICES = "slices"  #: each trainer rank sends each worker only what that holds
    SLICES_TREE = "slices+tree"  #: the same to some servers, whose workers hand their slices on


BUILT: Final = frozenset({Transport.NCCL, Transport.GLOO, Transport.HTTP, Transport.SHM})
#: Children of each machine or worker in a tree.
FANOUT: Final = 2
#: The share of a GPU's memory that weights may take: the rest is for the KV cache.
WEIGHTS_SHARE: Final = 0.5
#: What a trainer keeps for each parameter: weights, gradients and Adam's state in mixed precision.
TRAINER_BYTES: Final = 16
_TRAINER_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class Protocol:
    """What control costs: ``TODAY`` and what a larger fleet needs.

    Attributes:
        announced: each bucket is announced to each server by a call of its own, before it is sent.
        manifest_read: every push reads the manifest of every server.
        group_kept: a group outlives its push.
    """

    announced: bool = True
    manifest_read: bool = True
    group_kept: bool = False


TODAY: Final = Protocol()
NEEDED: Final = Protocol(announced=False, manifest_read=False, group_kept=True)


@dataclass(frozen=True, slots=True)
class Job:
    """One push: ``trainer_ranks`` GPUs push ``model`` to ``servers`` of ``workers`` GPUs each."""

    model: Model
    servers: int
    site: Site
    transport: Transport
    workers: int
    trainer_ranks: int
    protocol: Protocol = TODAY
    bucket_bytes: int = 256 * 2**20

    @property
    def all_workers(self) -> int:
        """Workers of all servers."""
        return self.servers * self.workers

    @property
    def machines(self) -> int:
        """Machines of all servers, where a server has whole ones or shares one with others of its size."""
        return math.ceil(self.all_workers / self.site.gpus)

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return max(1, math.ceil(self.model.nbytes / self.bucket_bytes))

    @property
    def worker_bytes(self) -> float:
        """What one worker holds."""
        return self.model.nbytes / self.workers

    @property
    def one_machine(self) -> bool:
        """Whether everything is on the trainer's machine."""
        return self.transport is Transport.SHM or self.all_workers + self.trainer_ranks <= self.site.gpus


@dataclass(frozen=True, slots=True)
class Stages:
    """Bytes of the model that each stage of the stream gets through in a second, and what the slowest link allows."""

    trainer: float
    travel: float
    workers: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one push. ``pause`` is that of a direct update, ``staged_pause`` that of a staged one."""

    job: Job
    check: float
    rendezvous: float
    begin: float
    stream: float
    close: float
    commit: float
    pause: float
    staged_pause: float
    stages: Stages
    #: Part of the stream that is announcements.
    announcements: float
    #: Chance that a worker fails in the push.
    failure: float

    @property
    def push(self) -> float:
        """Call to report, direct mode."""
        return self.check + self.rendezvous + self.begin + self.stream + self.close + self.commit

    @property
    def control(self) -> float:
        """What the trainer's process spends on calls, whatever the bytes."""
        return self.check + self.begin + self.announcements + self.commit

    def parts(self) -> dict[str, float]:
        """Return what the push consists of, by name."""
        return {
            "control calls": self.control,
            "rendezvous": self.rendezvous,
            "bytes": self.stream - self.announcements,
            "post-load": self.close,
        }


def workers_for(model: Model, site: Site) -> int:
    """Return the GPUs of one server: the smallest power of two whose memory holds the weights in ``WEIGHTS_SHARE``."""
    return _power_of_two(model.nbytes / (WEIGHTS_SHARE * site.gpu_bytes))


def trainer_ranks_for(model: Model, site: Site) -> int:
    """Return the GPUs of a trainer: the smallest power of two that holds weights, gradients and optimizer."""
    return _power_of_two(model.parameters * TRAINER_BYTES / (_TRAINER_SHARE * site.gpu_bytes))


def job_for(
    model: Model,
    servers: int,
    site: Site,
    transport: Transport,
    *,
    protocol: Protocol = TODAY,
    bucket_bytes: int = 256 * 2**20,
) -> Job:
    """Return the job with as many GPUs on both sides as the model needs."""
    return Job(
        model,
        servers,
        site,
        transport,
        workers_for(model, site),
        trainer_ranks_for(model, site),
        protocol,
        bucket_bytes,
    )


def _power_of_two(count: float) -> int:
    return 1 << max(0, math.ceil(math.log2(count))) if count > 1 else 1


def nic_payload_bps(site: Site, constants: Constants) -> float:
    """Return what one network card carries of payload."""
    return site.nic_bps * (constants.rdma_efficiency if site.rdma else constants.tcp_efficiency)


def travel_bps(job: Job, constants: Constants) -> float:
    """Return bytes of the model a second that reach all workers, by the slowest link that they pass."""
    site = job.site
    nic = nic_payload_bps(site, constants)
    into_worker = nic * min(1.0, site.nics / min(site.gpus, job.all_workers))
    out_of_rank = nic * min(1.0, site.nics / min(site.gpus, job.trainer_ranks))
    machine = nic * site.nics
    nvlink = site.nvlink_bps * constants.nvlink_efficiency
    pcie = site.pcie_bps * constants.pcie_efficiency
    match job.transport:
        case Transport.NCCL:
            # One rank sends, by the card that is nearest to it; all others hand on what they get.
            return nvlink if job.one_machine else min(nic, nvlink)
        case Transport.GLOO:
            # A binomial tree: the trainer sends as many copies as it has levels.
            copies = max(1, math.ceil(math.log2(1 + job.all_workers)))
            return min(constants.gloo_bps, math.inf if job.one_machine else nic) / copies
        case Transport.HTTP:
            return min(constants.http_body_bps, math.inf if job.one_machine else nic) / job.servers
        case Transport.SHM:
            # Nothing travels: the trainer writes where the workers read.
            return pcie
        case Transport.TREE:
            copies = min(FANOUT, job.machines)
            return min(machine, nvlink) / copies
        case Transport.SLICES:
            # Each worker's card takes in what it holds; the trainer's cards send what all hold.
            return min(into_worker * job.workers, out_of_rank * job.trainer_ranks / job.servers)
        case Transport.SLICES_TREE:
            roots = min(job.servers, max(1, job.trainer_ranks // job.workers))
            copies = min(FANOUT, math.ceil(job.servers / roots))
            return min(into_worker * job.workers, out_of_rank * job.trainer_ranks / roots) / copies


def _gather_bps(job: Job, constants: Constants) -> float:
    site = job.site
    if job.trainer_ranks == 1:
        return math.inf
    if job.trainer_ranks <= site.gpus:
        return site.nvlink_bps * constants.nvlink_efficiency
    # What the other machines hold comes in by the card of one rank, or by all cards of the machine that sends.
    return nic_payload_bps(site, constants) * (site.nics if job.transport is Transport.TREE else 1)


def stages(job: Job, constants: Constants) -> Stages:
    """Return how fast each stage of the stream is."""
    site = job.site
    pcie = site.pcie_bps * constants.pcie_efficiency
    on_host = job.transport in {Transport.GLOO, Transport.HTTP, Transport.SHM}
    if job.transport in {Transport.SLICES, Transport.SLICES_TREE}:
        # Every rank digests what it has; nobody gathers.
        trainer = constants.gpu_digest_bps * job.trainer_ranks
        digested = job.worker_bytes
    else:
        seconds = 1 / _gather_bps(job, constants)
        seconds += 1 / pcie + 1 / constants.cpu_digest_bps if on_host else 1 / constants.gpu_digest_bps
        trainer = 1 / seconds
        digested = job.model.nbytes
    digest = constants.cpu_digest_bps if on_host else constants.gpu_digest_bps
    land = job.worker_bytes / (pcie if on_host else constants.gpu_land_bps)
    launches = job.model.tensors / job.workers * constants.gpu_launch_s
    workers = job.model.nbytes / (digested / digest + land + launches)
    return Stages(trainer, travel_bps(job, constants), workers)


def first_bytes_s(job: Job, constants: Constants) -> float:
    """Return how long the first bytes of a bucket take to the last worker."""
    bucket = min(job.bucket_bytes, job.model.nbytes)
    match job.transport:
        case Transport.NCCL:
            return job.all_workers * constants.nccl_hop_s
        case Transport.TREE:
            return math.log2(1 + job.machines) * bucket / travel_bps(job, constants)
        case Transport.SLICES_TREE:
            return math.log2(1 + job.servers) * bucket / travel_bps(job, constants)
        case _:
            return 0.0


def rendezvous_s(job: Job, constants: Constants) -> float:
    """Return how long a group takes to form."""
    if job.protocol.group_kept:
        return 0.0
    workers = job.all_workers
    meeting = workers * constants.store_requests_per_worker * constants.store_request_s
    if job.transport is Transport.GLOO:
        return meeting + workers**2 * constants.gloo_requests_per_pair * constants.store_request_s
    if job.transport is Transport.NCCL:
        return meeting + constants.nccl_base_s + workers * constants.nccl_rank_s
    return 0.0


def stream_s(job: Job, constants: Constants, announce: float = 0.0) -> float:
    """Return seconds from the first tensor gathered to the last one landed; each bucket is announced first."""
    stage = stages(job, constants)
    bucket = job.model.nbytes / job.buckets
    gathered, sent, landed = bucket / stage.trainer, announce + bucket / stage.travel, bucket / stage.workers
    if job.transport is Transport.HTTP:
        # A body is answered when it has landed.
        sent, landed = sent + landed, 0.0
    pace = max(gathered, sent, landed)
    return gathered + sent + landed + (job.buckets - 1) * pace + first_bytes_s(job, constants)


def predict(job: Job, constants: Constants) -> Prediction:
    """Predict one push.

    Raises:
        ValueError: the job has no servers or no bytes, or ``shm`` between machines.
    """
    _check(job)
    model, servers, protocol = job.model, job.servers, job.protocol
    call = constants.control_call_s
    check = servers * call
    if protocol.manifest_read:
        check += servers * (call + model.tensors * constants.manifest_parse_s)
    begin = servers * call + constants.server_fixed_s

    announce = 0.0
    # What is not built yet would be announced in its own stream.
    if protocol.announced and job.transport in BUILT:
        announce = servers * (call + model.tensors / job.buckets * constants.digests_write_s)
    stream = stream_s(job, constants, announce)

    close = (
        job.worker_bytes * (1 / constants.gpu_postload_bps + 1 / constants.gpu_digest_bps) + constants.server_fixed_s
    )
    commit = 2 * servers * call if servers > 1 else call
    from_host = max(
        job.worker_bytes / (job.site.pcie_bps * constants.pcie_efficiency),
        model.tensors / job.workers * constants.gpu_launch_s,
    )
    push = check + rendezvous_s(job, constants) + begin + stream + close + commit
    return Prediction(
        job,
        check=check,
        rendezvous=rendezvous_s(job, constants),
        begin=begin,
        stream=stream,
        close=close,
        commit=commit,
        pause=stream + close + commit,
        staged_pause=from_host + close,
        stages=stages(job, constants),
        announcements=announce * job.buckets,
        failure=-math.expm1(-constants.gpu_failures_per_s * job.all_workers * push),
    )


def _check(job: Job) -> None:
    if min(job.servers, job.workers, job.trainer_ranks, job.model.nbytes, job.bucket_bytes) <= 0:
        raise ValueError(f"a push has servers, workers, ranks and bytes, got {job}")
    if job.transport is Transport.SHM and job.all_workers > job.site.gpus:
        raise ValueError(f"shm needs all workers on one machine of {job.site.gpus} GPUs, got {job.all_workers}")


def floor_s(job: Job, constants: Constants) -> float:
    """Return the least that links alone allow: no push is faster."""
    return job.model.nbytes / travel_bps(job, constants)
