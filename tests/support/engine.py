"""A vLLM engine in the test's own process, its model open to inspection, and what a cold start of it looks like."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.transformers.base import Base

from weightpush_protocol.manifest import TensorSpec, layout_bucket
from weightpush_server.loader import INNER_FORMAT_KEY, LOAD_FORMAT, POLICY_KEY, SELF_CHECK_KEY, register_loader
from weightpush_server.reload import Planner, ReloadProof, ReloadSession, finish_reload, start_reload
from weightpush_server.reload.fingerprint import reachable_tensors
from weightpush_server.reload.layout import find_layout
from weightpush_server.reload.plan import Plan, make_plan

#: What an engine in the test's own process needs. Not set here: servers that other tests start must not inherit it.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "weightpush",
    "VLLM_NO_USAGE_STATS": "1",
}

PROMPTS = ("Hello, world", "0123456789", "The quick brown fox jumps over the lazy dog")
CPU = torch.device("cpu")

Tensors = list[tuple[str, torch.Tensor]]


@dataclass
class Engine:
    """An engine and its insides."""

    llm: LLM
    model: nn.Module
    vllm_config: VllmConfig


@contextmanager
def engine_environment() -> Iterator[None]:
    """Set what an engine in the test's own process needs, and put everything back."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@contextmanager
def classes_put_back() -> Iterator[None]:
    """Give transformers its own classes back: vLLM's transformers backend decorates them in place, and for good."""
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}
    decorate = Base._decorate_cls_for_torch_compile

    def recorded(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
        decorate(self, cls, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Base, "_decorate_cls_for_torch_compile", recorded)
        yield
    for cls, (bases, attributes) in before.items():
        cls.__bases__ = bases
        for name in [name for name, value in vars(cls).items() if attributes.get(name) is not value]:
            if name in attributes:
                setattr(cls, name, attributes[name])
            else:
                delattr(cls, name)


@contextmanager
def engine(
    checkpoint: Path, *, inner_format: str = "auto", policy: str = "scratch", self_check: bool = True, **options: Any
) -> Iterator[Engine]:
    """Run an engine on ``checkpoint`` in this process; one at a time, since they share vLLM's process groups."""
    assert not model_parallel_is_initialized(), "another engine runs in this process"
    register_loader()
    with classes_put_back():
        yield from _engine(checkpoint, inner_format=inner_format, policy=policy, self_check=self_check, **options)


def _engine(checkpoint: Path, *, inner_format: str, policy: str, self_check: bool, **options: Any) -> Iterator[Engine]:
    llm = LLM(
        str(checkpoint),
        load_format=LOAD_FORMAT,
        model_loader_extra_config={INNER_FORMAT_KEY: inner_format, POLICY_KEY: policy, SELF_CHECK_KEY: self_check},
        **{
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 32,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            **options,
        },
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    try:
        yield Engine(llm, worker.model_runner.get_model(), worker.vllm_config)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm, worker
        cleanup_dist_env_and_memory()
        gc.collect()


def read(checkpoint: Path) -> Tensors:
    """Return the tensors of a checkpoint directory in name order."""
    return sorted(load_file(checkpoint / "model.safetensors").items())


def push(
    engine: Engine,
    tensors: Tensors,
    *,
    cuts: Iterable[Tensors] | None = None,
    poison: bool = True,
    planned: bool = True,
    partial: bool = False,
) -> ReloadProof:
    """Push ``tensors`` in one bucket, or in the buckets of ``cuts``, landing in a second thread as a worker does.

    Along a plan, as a worker does; not ``planned``: by the model's own loaders.
    """
    layout = find_layout(engine.model)
    assert layout is not None
    plan = (
        make_plan(engine.model, layout, specs(tensors), vllm_config=engine.vllm_config, device=CPU) if planned else None
    )
    session = start_reload(
        engine.model, vllm_config=engine.vllm_config, device=CPU, poison=poison, plan=plan, partial=partial
    )
    with ThreadPoolExecutor(1) as receiver:
        for bucket in [tensors] if cuts is None else cuts:
            receiver.submit(land, session, bucket).result()
    return finish_reload(session)


def land(session: ReloadSession, bucket: Tensors) -> None:
    """Land one bucket from a buffer that is overwritten right afterwards, as a receiver's is.

    Along a plan it lands as a bucket, else tensor by tensor.
    """
    if session.plan is not None and bucket:
        listed = specs(bucket)
        layout = layout_bucket(range(len(bucket)), listed)
        raw = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
        entries = [(listed[index], offset) for index, offset in zip(layout.tensors, layout.offsets, strict=True)]
        for (spec, offset), index in zip(entries, layout.tensors, strict=True):
            raw[offset : offset + spec.nbytes] = _bits(bucket[index][1])
        session.land_bucket(raw, layout, entries, check_wanted=lambda: None)
        raw.fill_(0xFF)
        return
    buffer = [(name, tensor.clone()) for name, tensor in bucket]
    session.land(iter(buffer))
    for _, tensor in buffer:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def specs(tensors: Tensors) -> list[TensorSpec]:
    """Return what a manifest says of ``tensors``."""
    return [TensorSpec.of(name, tensor) for name, tensor in tensors]


def planner(live: Engine) -> Planner:
    """Return what judges manifests in a worker that serves this model."""
    layout = find_layout(live.model)
    assert layout is not None
    return Planner(live.model, layout, vllm_config=live.vllm_config, device=CPU)


def push_by(live: Engine, plan: Plan, tensors: Tensors) -> str:
    """Push along ``plan`` and return how each tensor landed."""
    session = start_reload(live.model, vllm_config=live.vllm_config, device=CPU, poison=True, plan=plan)
    for start in range(3):
        land(session, tensors[start::3])
    ways = session.ways(specs(tensors))
    finish_reload(session)
    return ways


@dataclass
class Snapshot:
    """All that can be seen of a model: tensors by path, answers of packed layers, greedy tokens and logprobs."""

    tensors: dict[str, torch.Tensor]
    probes: dict[str, torch.Tensor]
    tokens: list[list[int]]
    logprobs: list[list[float]]

    def differing(self, other: Snapshot) -> list[str]:
        """Name every tensor and probe that is not bit-equal in ``other``."""
        mine, theirs = {**self.tensors, **self.probes}, {**other.tensors, **other.probes}
        return sorted(
            name
            for name in mine.keys() | theirs.keys()
            if name not in mine or name not in theirs or not bit_equal(mine[name], theirs[name])
        )


def bit_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare dtype, shape, strides and bits."""
    same = (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
    if first.is_meta or second.is_meta:  # A tower that vLLM left out has no bits.
        return same and first.is_meta and second.is_meta
    return same and torch.equal(_bits(first), _bits(second))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def snapshot(engine: Engine) -> Snapshot:
    """Look at everything."""
    tokens, logprobs = generate(engine)
    return Snapshot(
        tensors={name: tensor.detach().clone() for name, tensor in reachable_tensors(engine.model)},
        probes=dict(probe_layers(engine.model)),
        tokens=tokens,
        logprobs=logprobs,
    )


def generate(engine: Engine, max_tokens: int = 12) -> tuple[list[list[int]], list[list[float]]]:
    """Return greedy tokens and their logprobs for the prompts."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=1, ignore_eos=True)
    outputs = engine.llm.generate(list(PROMPTS), sampling, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return (
        [list(completion.token_ids) for completion in completions],
        [
            [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            for completion in completions
        ],
    )


@torch.inference_mode()
def probe_layers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the answer of every linear layer and head to fixed noise: it shows what native handles have packed."""
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)):
            continue
        if getattr(module, "cpu_linear", None) is None:
            continue
        width = getattr(module, "input_size_per_partition", None) or module.input_size
        noise = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
        bias = getattr(module, "bias", None)
        yield f"probe:{path}", method.apply(module, noise.to(module.params_dtype), bias).clone()
