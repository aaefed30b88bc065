"""What others have published, and what the model says about the same bytes on the same links; nothing is fitted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from benchmarks.scale.constants import Constants
from benchmarks.scale.model import NEEDED, Job, Transport, stream_s
from benchmarks.scale.sites import SITES, Model, Site

#: H800: NVLink of 160 GB/s in one direction (https://arxiv.org/abs/2412.19437).
_H800: Final = Site("h800", 50e9, 8, True, "https://arxiv.org/abs/2412.19437", gpu_bytes=80e9, nvlink_bps=160e9)
_GH200: Final = Site("gh200", 25e9, 4, True, "https://github.com/verl-project/verl/issues/7167", gpus=4)
_IB: Final = SITES["ib-400"]
_LMSYS: Final = "https://lmsys.org/blog/2026-04-29-p2p-update"


class Share(StrEnum):
    """What of a published time the links explain, and so what prediction / published must lie between."""

    LINKS = "bytes alone"
    MOSTLY = "bytes, gathering and loading"
    LITTLE = "mostly other work"

    @property
    def factors(self) -> tuple[float, float]:
        """The least and the most that prediction / published may be."""
        least = {Share.LINKS: 0.8, Share.MOSTLY: 0.33, Share.LITTLE: 0.05}
        return least[self], 1.25


_NO_DIGEST_BPS: Final = 1e18


@dataclass(frozen=True, slots=True)
class Published:
    """One published result: ``seconds`` for ``nbytes`` to ``servers`` of ``workers`` GPUs from ``ranks`` trainer ranks.

    ``share`` says what of it the model speaks about; ``why``, what else there is.
    """

    system: str
    what: str
    address: str
    seconds: float
    model: Model
    servers: int
    workers: int
    ranks: int
    site: Site
    transport: Transport
    share: Share
    why: str

    def job(self) -> Job:
        """Return what the model is asked."""
        return Job(
            self.model, self.servers, self.site, self.transport, self.workers, self.ranks, NEEDED, bucket_bytes=2**30
        )


def predicted_s(case: Published, constants: Constants) -> float:
    """Return the seconds of the stream alone, without digests: what is published is the transfer, checked by nobody."""
    unchecked = replace(constants, gpu_digest_bps=_NO_DIGEST_BPS, cpu_digest_bps=_NO_DIGEST_BPS)
    return stream_s(case.job(), unchecked)


def _bf16(name: str, billions: float, tensors: int) -> Model:
    return Model(name, billions * 1e9, 2, tensors)


_QWEN30: Final = _bf16("Qwen3-30B-A3B", 30.5, 18_867)
_AIR: Final = _bf16("GLM-4.5-Air", 107, 17_000)
_QWEN235: Final = _bf16("Qwen3-235B-A22B", 235, 36_945)
_GLM5: Final = _bf16("GLM-5", 744, 60_000)
_KIMI: Final = Model("Kimi-K2 FP8", 1e12, 1.026, 140_000)

_FUNNEL: Final = "one rank's card sends all; beside it they gather, load tensor by tensor, and lock ranks out"

CASES: Final = (
    Published(
        "verl, NCCL broadcast",
        "100 GB over one card of a GH200 machine, 25 GB/s",
        "https://github.com/verl-project/verl/issues/7167",
        4.0,
        _bf16("100 GB", 50, 1000),
        1,
        4,
        4,
        _GH200,
        Transport.NCCL,
        Share.LINKS,
        "the raw broadcast",
    ),
    Published(
        "prime-rl, RDMA pulls",
        "GLM-5.2, 64 to 32 H200: 82.5 GB into each, RDMA only",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/3341",
        1.864,
        Model("GLM-5.2", 82.501e9 * 32, 1, 60_000),
        1,
        32,
        64,
        _IB,
        Transport.SLICES,
        Share.LINKS,
        "with loading behind it 2.84, with pausing 8.6",
    ),
    Published(
        "miles, NCCL broadcast",
        "GLM-4.5-Air, 32 to 32 H100",
        _LMSYS,
        5.00,
        _AIR,
        4,
        8,
        32,
        _IB,
        Transport.NCCL,
        Share.MOSTLY,
        _FUNNEL,
    ),
    Published(
        "miles, NCCL broadcast",
        "Qwen3-235B-A22B, 64 to 64 H100",
        _LMSYS,
        10.75,
        _QWEN235,
        2,
        32,
        64,
        _IB,
        Transport.NCCL,
        Share.MOSTLY,
        _FUNNEL,
    ),
    Published(
        "miles, NCCL broadcast",
        "GLM-5, 128 to 128 H100",
        _LMSYS,
        58.3,
        _GLM5,
        2,
        64,
        128,
        _IB,
        Transport.NCCL,
        Share.MOSTLY,
        _FUNNEL,
    ),
    Published(
        "miles, NCCL broadcast",
        "Kimi-K2 FP8, 256 to 256 H100",
        _LMSYS,
        53.3,
        _KIMI,
        8,
        32,
        256,
        _IB,
        Transport.NCCL,
        Share.MOSTLY,
        _FUNNEL,
    ),
    Published(
        "verl, NCCL broadcast",
        "27B bf16, 8 to 8 GPUs over EFA",
        "https://github.com/verl-project/verl/pull/7263",
        3.01,
        _bf16("27B", 27, 1000),
        1,
        8,
        8,
        _IB,
        Transport.NCCL,
        Share.MOSTLY,
        "FSDP gathers before each bucket",
    ),
    Published(
        "vLLM, RDMA pulls",
        "Qwen3-235B-A22B, 8 to 8 H100",
        "https://github.com/vllm-project/vllm/pull/43375",
        3.25,
        _QWEN235,
        1,
        8,
        8,
        _IB,
        Transport.SLICES,
        Share.MOSTLY,
        "gathering and loading around each pull",
    ),
    Published(
        "checkpoint-engine, broadcast",
        "Qwen3-235B-A22B, both sides on 8 H800",
        "https://github.com/MoonshotAI/checkpoint-engine",
        6.22,
        _QWEN235,
        1,
        7,
        1,
        _H800,
        Transport.NCCL,
        Share.MOSTLY,
        "copies from host memory and loads, in turn with the broadcast",
    ),
    Published(
        "open-instruct, Gloo",
        "8B bf16",
        "https://github.com/vllm-project/vllm/issues/5723",
        5.5,
        _bf16("8B", 8, 291),
        1,
        1,
        8,
        SITES["eth-100"],
        Transport.GLOO,
        Share.MOSTLY,
        "our Gloo on their bytes; their machines are not told",
    ),
    Published(
        "checkpoint-engine, broadcast",
        "Kimi-K2 FP8, both sides on 256 H20",
        "https://github.com/MoonshotAI/checkpoint-engine",
        16.04,
        _KIMI,
        16,
        16,
        256,
        _IB,
        Transport.TREE,
        Share.LITTLE,
        "14.4 s with 16 GPUs too: it is not the links",
    ),
    Published(
        "miles, RDMA writes",
        "Kimi-K2 FP8, 256 to 256 H100",
        _LMSYS,
        7.23,
        _KIMI,
        8,
        32,
        256,
        _IB,
        Transport.SLICES,
        Share.LITTLE,
        "gathers first, and loads into a copy in host memory",
    ),
)
