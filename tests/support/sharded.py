"""What ranks of a trainer run in tests: they build a sharded model, change its weights, and push them."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.contract_server import TOKEN
from weightpush_client import PushReport, WeightPusher
from weightpush_client.sources import groups
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import Deadlines

#: Objects of this rank that outlive a call.
STATE: dict[str, Any] = {}


class Block(nn.Module):
    """Tensors of many shapes: none but the first divides evenly among two ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.odd = nn.Parameter(torch.zeros(5, 3))
        self.one = nn.Parameter(torch.zeros(1))
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) + self.odd.sum() + self.one


class Model(nn.Module):
    """Two blocks between an embedding and a head that is tied to it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def reference(step: int, width: int = 8) -> Model:
    """Return the whole model of ``step``, the same in every process."""
    model = Model(width)
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            generator = torch.Generator().manual_seed(1000 * step + number)
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        model.head.weight.copy_(model.embed.weight)
    return model


def expected(step: int, width: int = 8, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return what a server holds after the push of ``step``."""
    tensors = reference(step, width).state_dict()
    del tensors["head.weight"]
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def expected_specs(width: int = 8) -> list[TensorSpec]:
    """Return what a server expects."""
    return [TensorSpec.of(name, tensor) for name, tensor in expected(0, width).items()]


def packed(step: int) -> Any:
    """Return a transformers model with packed experts, the same in every process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from support.tiny import configurations

    entry = configurations()["qwen3_moe"]
    torch.manual_seed(step)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(entry["model_type"], **entry["config"]))


def adapted(step: int) -> Any:
    """Return `packed` with trained adapters and a trained head."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(packed(step), config)
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    return model


def fsdp2(model: nn.Module) -> nn.Module:
    """Shard over all ranks, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [module for module in model.modules() if type(module).__name__ in {"Block", "Qwen3MoeDecoderLayer"}]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2_after_forward(model: nn.Module) -> nn.Module:
    """As `fsdp2`, left as a forward pass leaves it: the root unit still gathered."""
    model = fsdp2(model)
    model(torch.zeros(1, 2, dtype=torch.int64))
    return model


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    """Shard with FSDP1, layer by layer."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **options
    )


def fsdp1_orig(model: nn.Module) -> nn.Module:
    """FSDP1 that keeps the parameters' own names, after a forward and a backward pass."""
    model = fsdp1(model, use_orig_params=True)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    return model


def fsdp1_compiled_checkpointed(model: nn.Module) -> nn.Module:
    """FSDP1 around layers with activation checkpointing, all inside torch.compile's wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for number, layer in enumerate(model.layers):  # type: ignore[arg-type] - an nn.ModuleList
        model.layers[number] = checkpoint_wrapper(layer)  # type: ignore[index] - an nn.ModuleList
    return torch.compile(fsdp1(model))  # type: ignore[return-value] - a module


def ddp(model: nn.Module) -> nn.Module:
    """Replicate."""
    return nn.parallel.DistributedDataParallel(model)


def ddp_compiled_inside(model: nn.Module) -> nn.Module:
    """Replicate, with compiled layers in the middle of the path."""
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type] - an nn.ModuleList
        model.layers[number] = torch.compile(layer)  # type: ignore[index] - an nn.ModuleList
    return nn.parallel.DistributedDataParallel(model)


def two_dimensional(model: nn.Module) -> nn.Module:
    """Tensor parallelism over two ranks and FSDP2 over the two pairs of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:  # type: ignore[union-attr] - an nn.ModuleList
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def hybrid(model: nn.Module) -> nn.Module:
    """FSDP2 that shards over pairs of ranks and replicates the pairs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model


def zero3(model: nn.Module) -> nn.Module:
    """Partition with DeepSpeed, as its engine does for training."""
    size = str(dist.get_world_size())
    rank = str(dist.get_rank())
    os.environ.update(DS_ACCELERATOR="cpu", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_SIZE=size)
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def zero3_stand_in(model: nn.Module) -> nn.Module:
    """Partition as DeepSpeed's documentation says, for machines without it: what the source asks of it and no more."""

    class GatheredParameters:
        def __init__(self, params: list[Any], modifier_rank: int | None) -> None:
            assert modifier_rank is None
            (self.parameter,) = params

        def __enter__(self) -> None:
            parts = [torch.empty_like(self.parameter.ds_tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, self.parameter.ds_tensor)
            whole = torch.cat(parts)[: self.parameter.ds_shape.numel()]
            self.parameter.data = whole.view(self.parameter.ds_shape)

        def __exit__(self, *_: object) -> None:
            self.parameter.data = torch.empty(0)

    sys.modules["deepspeed"] = SimpleNamespace(  # type: ignore[assignment] - a stand-in
        zero=SimpleNamespace(GatheredParameters=GatheredParameters)
    )
    parameter: Any
    for number, parameter in enumerate(model.parameters()):
        size = -(-parameter.numel() // dist.get_world_size())
        padded = torch.zeros(size * dist.get_world_size())
        padded[: parameter.numel()] = parameter.detach().flatten()
        parameter.ds_id, parameter.ds_shape = number, parameter.shape
        parameter.ds_process_group = dist.group.WORLD
        parameter.ds_tensor = padded[size * dist.get_rank() :][:size].clone()
        parameter.data = torch.empty(0)
    return model


def make_pusher(rank: int, url: str | Sequence[str], options: Mapping[str, Any], token: str = TOKEN) -> None:
    """Make this rank's pusher, for the calls to come."""
    if "deadlines" in options:
        options = {**options, "deadlines": Deadlines(**options["deadlines"])}
    STATE["pusher"] = WeightPusher(url, token=token, process_group=dist.group.WORLD, **options)


def push(
    rank: int,
    wrap: Callable[[nn.Module], nn.Module],
    step: int,
    slow_rank: int = -1,
    delay_s: float = 0.0,
    build: Callable[[int], nn.Module] = reference,
) -> PushReport:
    """Push the model of ``step`` as ``wrap`` shards it; ``slow_rank`` gathers its third tensor late."""
    model = wrap(build(step))
    try:
        with _delayed(delay_s if rank == slow_rank else 0.0):
            report: PushReport = STATE["pusher"].push(model, weight_version=f"step-{step}")
    finally:
        if isinstance(sys.modules.get("deepspeed"), SimpleNamespace):
            del sys.modules["deepspeed"]
    return report


def catch_up(rank: int, wrap: Callable[[nn.Module], nn.Module], step: int) -> PushReport:
    """Bring the servers that are behind to the model of ``step``."""
    report: PushReport = STATE["pusher"].catch_up(wrap(reference(step)))
    return report


def push_in_the_background(rank: int) -> None:
    """Ask for what a sharded pusher does not do."""
    STATE["pusher"].push_async(reference(0), weight_version="step-0")


def push_unlike(rank: int, step: int) -> PushReport:
    """Push, but rank 1 has a model of another width."""
    model = fsdp2(reference(step, 8 if rank == 0 else 16))
    report: PushReport = STATE["pusher"].push(model, weight_version=f"step-{step}")
    return report


def push_raising(rank: int, step: int, raising: int) -> PushReport:
    """Push, but on one rank a part changes between the announcement and the gathering."""
    model = fsdp2(reference(step))
    with _broken() if rank == raising else _delayed(0):
        report: PushReport = STATE["pusher"].push(model, weight_version=f"step-{step}")
    return report


def push_alone(rank: int, url: str, ranks: int) -> PushReport:
    """Push sharded weights as a group of ``ranks`` ranks; with none where it is 0."""
    group = dist.new_group([rank], use_local_synchronization=True) if ranks else None
    with WeightPusher(url, token=TOKEN, transport="http", process_group=group) as pusher:
        return pusher.push(fsdp2(reference(1)), weight_version="alone")


def push_late(rank: int, step: int, seconds: float) -> PushReport:
    """Push, but rank 1 comes late."""
    model = fsdp2(reference(step))
    if rank == 1:
        time.sleep(seconds)
    report: PushReport = STATE["pusher"].push(model, weight_version=f"step-{step}")
    return report


def push_absent(rank: int, step: int) -> PushReport | None:
    """Push, but rank 1 never calls it."""
    model = fsdp2(reference(step))
    if rank == 1:
        return None
    report: PushReport = STATE["pusher"].push(model, weight_version=f"step-{step}")
    return report


def push_measured(rank: int, tensors: int, rows: int, bucket_bytes: int, url: str) -> dict[str, float]:
    """Push a large sharded model twice; return the bytes of this rank's shard and those that the second push took.

    The first brings in what every process needs once (connections, threads, code).
    """
    model = nn.ParameterDict({f"w{number:03}": nn.Parameter(torch.ones(rows, 1024)) for number in range(tensors)})
    sharded = fsdp2_plain(model)
    del model
    with WeightPusher(url, token=TOKEN, process_group=dist.group.WORLD, bucket_bytes=bucket_bytes) as pusher:
        pusher.push(sharded, weight_version="warm")
        # What the first one kept is part of what the second takes.
        pusher._buffers.drop()
        ctypes.CDLL(None).malloc_trim(0)
        before = _resident("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        pusher.push(sharded, weight_version="measured")
        rise = _resident("VmHWM") - before
    return {"shard": tensors * rows * 1024 * 4 / dist.get_world_size(), "rise": rise}


def fsdp2_plain(model: nn.Module) -> nn.Module:
    """Shard as one unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _resident(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


@contextmanager
def _delayed(seconds: float) -> Iterator[None]:
    if not seconds:
        yield
        return
    gather, count = groups.ShardedTensor.gather, 0

    @functools.wraps(gather)
    def slow(self: Any, dtype: torch.dtype | None = None) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            time.sleep(seconds)
        return gather(self, dtype)

    groups.ShardedTensor.gather = slow  # type: ignore[method-assign] - for one push
    try:
        yield
    finally:
        groups.ShardedTensor.gather = gather  # type: ignore[method-assign] - as it was


@contextmanager
def _broken() -> Iterator[None]:
    check, count = groups.ShardedTensor.check, 0

    def changed(self: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            self._local_shape = (99,)
        check(self)

    groups.ShardedTensor.check = changed  # type: ignore[method-assign] - for one push
    try:
        yield
    finally:
        groups.ShardedTensor.check = check  # type: ignore[method-assign] - as it was


def pid(rank: int) -> int:
    """Return the process of this rank."""
    return os.getpid()


def shorten_deadline(rank: int, seconds: float) -> None:
    """Have this rank give up the others after ``seconds``."""
    STATE["pusher"]._lockstep._ranks.wait_s = seconds
