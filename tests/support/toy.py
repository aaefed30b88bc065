"""A small model that has every hazard of reloading on purpose, loaded and processed by vLLM's own code.

One layer a hazard; each says which. The model is real: vLLM's loader makes it, fills it through ``load_weights``, and
runs ``process_weights_after_loading`` on it, so a reload is tested against a cold start without an engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm.config import DeviceConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from weightpush_server.config import StoragePolicy
from weightpush_server.loader import INNER_FORMAT_KEY, LOAD_FORMAT, POLICY_KEY, SELF_CHECK_KEY, WeightpushLoader
from weightpush_server.reload import ReloadProof, ReloadSession, finish_reload, start_reload
from weightpush_server.reload.fingerprint import reachable_tensors
from weightpush_server.reload.layout import ModelLayout, find_layout
from weightpush_server.reload.plan import Plan, make_plan

Tensors = dict[str, torch.Tensor]

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
WIDTH, ROWS, PADDED_ROWS = 8, 6, 8


class Method(QuantizeMethodBase):
    """A quantization method that does nothing."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Layers make their own."""

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Nothing is computed with these layers but what :meth:`Toy.forward` does."""
        raise NotImplementedError


class Layer(nn.Module):
    """A weight of ``shape`` that the checkpoint brings, with the attributes by which vLLM loads it."""

    def __init__(self, method: Method, *shape: int, dtype: torch.dtype = DTYPE) -> None:
        super().__init__()
        self.quant_method = method
        self.weight = _parameter(torch.empty(shape or (ROWS, WIDTH), dtype=dtype))
        self.weight.weight_loader = load_shard
        self.weight.output_dim = 0


def _parameter(data: torch.Tensor) -> Any:
    return nn.Parameter(data, requires_grad=False)


def load_shard(parameter: Any, loaded: torch.Tensor) -> None:
    """A loader as vLLM's: found on the parameter object, needs an attribute of it, writes to its data."""
    dimension = parameter.output_dim
    parameter.data.narrow(dimension, 0, loaded.shape[dimension]).copy_(loaded)


class Vanishing(Method):
    """The weight moves into a closure and leaves an empty parameter without attributes, of the default dtype."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.data.t().contiguous() + 1
        layer.run = lambda: packed
        layer.weight = _parameter(torch.empty(0))


class Prepacking(Method):
    """Same shape, same dtype, other bytes; skipped where a kernel exists. Packing twice is wrong, not packing too."""

    def __init__(self) -> None:
        self.kernel: Any = None

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.kernel is not None:
            return
        layer.weight = _parameter(layer.weight.data.roll(1, dims=0).clone())
        self.kernel = SimpleNamespace()


class GuardedInside(Method):
    """A guard that is no attribute of its own, but an entry of one."""

    def __init__(self) -> None:
        self.done: dict[str, bool] = {}

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.done.get("packed"):
            return
        layer.weight = _parameter(layer.weight.data.roll(1, dims=1).clone())
        self.done["packed"] = True


class Transposing(Method):
    """Another layout of the same storage."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = _parameter(layer.weight.data.t())


class Widening(Method):
    """A bias that becomes float32, under its name, as another object: its storage is too small afterwards."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data = layer.weight.data.float()


class Scaling(Method):
    """Writes over what it reads, and consumes the scale that it does so by."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data.mul_(layer.scale.data)
        layer.factor = float(layer.scale)
        del layer.scale


class Sentinel(Method):
    """Reads a scale that no checkpoint brings (-1: none), and a kernel keeps its address."""

    def process_weights_after_loading(self, layer: Any) -> None:
        scale = float(layer.k_scale)
        layer.k_scale_value = 1.0 if scale < 0 else scale
        del layer.k_scale
        layer.float_scale = layer.weight.data.float().amax().reshape(1)
        layer.kernel = SimpleNamespace(address=layer.float_scale.data_ptr())


class Packing(Method):
    """Keeps the weight and packs a copy of it (embeddings, output heads; also where the weight is another layer's)."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.data.t().contiguous() * 2


class Convolution(Method):
    """Packs its weight, but the runtime reads a buffer that views the storage of before."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = _parameter(layer.weight.data.flip(0).contiguous())


class NoMethod:
    """Has the name of a method and is none: its layer guards itself from the start."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raise AssertionError("this is no quantization method, so nothing may process it")


class Toy(nn.Module):
    """The model. A checkpoint may bring ``head.bias``; the parameter is born when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.vanishing = Layer(Vanishing())
        self.prepacked = Layer(Prepacking())
        self.guarded = Layer(GuardedInside())
        self.transposed = Layer(Transposing())
        self.widened = Layer(Widening(), WIDTH)
        self.scaled = Layer(Scaling())
        self.scaled.scale = _parameter(torch.empty((), dtype=torch.float32))
        self.sentinel = Layer(Sentinel())
        self.sentinel.k_scale = _parameter(torch.tensor(-1.0))
        self.first = Layer(Method())
        self.second = Layer(Method())
        self.embed = Layer(Packing(), PADDED_ROWS, WIDTH)
        self.head = Layer(Packing(), PADDED_ROWS, WIDTH)
        self.head.weight = self.embed.weight
        self.conv = Layer(Convolution(), 4, 1, 3)
        self.conv.register_buffer("view", self.conv.weight.data.view(4, 3), persistent=False)
        self.table = nn.Module()
        self.table.weight = _parameter(torch.empty(ROWS, WIDTH))
        self.decay = nn.Module()
        self.decay.weight = _parameter(torch.empty(WIDTH, dtype=torch.float32))
        self.shared = nn.Module()
        halves = torch.empty(2, ROWS, WIDTH)
        self.shared.one, self.shared.two = _parameter(halves[0]), _parameter(halves[1])
        self.plain = nn.Module()
        self.plain.table = torch.empty(ROWS)
        self.runner = nn.Module()
        self.runner._already_called_process_weights_after_loading = True
        self.runner.quant_method = NoMethod()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load as vLLM's models do: by loaders where a parameter has one, else by writing past them."""
        loaded = set()
        for name, tensor in weights:
            loaded.add(name)
            path, _, key = name.rpartition(".")
            module: Any = self.get_submodule(path)
            if name == "head.bias" and getattr(module, "bias", None) is None:
                module.bias = _parameter(torch.empty_like(tensor, device=self.table.weight.device))
            if name == "embed.weight":
                module.weight.data[:ROWS].copy_(tensor)
                module.weight.data[ROWS:].fill_(0)
            elif name == "decay.weight":
                module.weight.copy_(-torch.exp(tensor))
            elif name == "plain.table":
                module.table.copy_(tensor)
            elif isinstance(module, Layer) and key == "weight":
                module.weight.weight_loader(module.weight, tensor)
            else:
                getattr(module, key).copy_(tensor)
        return loaded

    def process_weights_after_loading(self) -> None:
        """The model's own hook: a tensor derived from a child, and two weights moved into one buffer."""
        self.derived = self.table.weight.data.sum(0) * 2
        size = self.first.weight.numel()
        fused = torch.cat([torch.full((4,), 7.0), self.first.weight.flatten(), self.second.weight.flatten()])
        self.first.weight.data = fused[4 : 4 + size].view(ROWS, WIDTH)
        self.second.weight.data = fused[4 + size :].view(ROWS, WIDTH)
        self.fused = fused

    def forward(self) -> torch.Tensor:
        """Compute something with everything that the runtime would read."""
        parts = [
            self.vanishing.run(),
            self.prepacked.weight,
            self.guarded.weight,
            self.transposed.weight,
            self.widened.weight,
            self.scaled.weight,
            torch.tensor([self.scaled.factor, self.sentinel.k_scale_value]),
            self.sentinel.float_scale,
            self.first.weight,
            self.second.weight,
            self.fused,
            self.embed.weight,
            self.embed.packed,
            self.head.weight,
            self.head.packed,
            self.conv.weight,
            self.conv.view,
            self.table.weight,
            self.decay.weight,
            self.shared.one,
            self.shared.two,
            self.plain.table,
            self.derived,
        ]
        return torch.cat([part.detach().flatten().double() for part in parts])


def checkpoint(seed: int, *, bias: bool = False) -> Tensors:
    """Return random tensors as a trainer has them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    squares = "vanishing prepacked guarded transposed scaled sentinel first second embed table"
    return {
        **{f"{name}.weight": random(ROWS, WIDTH) for name in squares.split()},
        "widened.weight": random(WIDTH),
        "scaled.scale": random(dtype=torch.float32),
        "conv.weight": random(4, 1, 3),
        "decay.weight": random(WIDTH, dtype=torch.float32),
        "shared.one": random(ROWS, WIDTH),
        "shared.two": random(ROWS, WIDTH),
        "plain.table": random(ROWS),
        **({"head.bias": random(PADDED_ROWS)} if bias else {}),
    }


class _Inner(BaseModelLoader):  # type: ignore[misc]  # vLLM is not analysed, so its classes are Any
    """Reads the tensors that its configuration holds."""

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Hand the tensors to the model."""
        model.load_weights(iter(self.load_config.model_loader_extra_config["tensors"].items()))


class _Loader(WeightpushLoader):
    make: Callable[[], nn.Module] = Toy

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Make the toy instead of what a configuration names."""
        model = type(self).make()
        vllm_config.compilation_config.static_forward_context[f"{prefix}layer"] = model
        return model


class Started:
    """A toy after its cold start."""

    def __init__(self, model: Any, vllm_config: VllmConfig) -> None:
        self.model = model
        self.vllm_config = vllm_config

    @property
    def layout(self) -> ModelLayout:
        """What was recorded."""
        layout = find_layout(self.model)
        assert layout is not None
        return layout

    def begin(self, *, plan: Plan | None = None, partial: bool = False, poison: bool = True) -> ReloadSession:
        """Open the model."""
        return start_reload(
            self.model, vllm_config=self.vllm_config, device=CPU, plan=plan, partial=partial, poison=poison
        )

    def plan(self, tensors: Tensors) -> Plan:
        """Plan a push of ``tensors``."""
        from weightpush_protocol.manifest import TensorSpec

        specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
        return make_plan(self.model, self.layout, specs, vllm_config=self.vllm_config, device=CPU)

    def push(self, tensors: Tensors, *, planned: bool = False, partial: bool = False, buckets: int = 1) -> ReloadProof:
        """Push ``tensors`` from the opening to the proof, each bucket from a buffer that is overwritten afterwards."""
        session = self.begin(plan=self.plan(tensors) if planned else None, partial=partial)
        for start in range(buckets):
            land(session, dict(list(tensors.items())[start::buckets]))
        return finish_reload(session)


def land(session: ReloadSession, tensors: Tensors) -> None:
    """Land one bucket from a buffer that is overwritten right afterwards, as a receiver's is."""
    buffer = {name: tensor.clone() for name, tensor in tensors.items()}
    session.land(iter(buffer.items()))
    for tensor in buffer.values():
        tensor.fill_(float("nan"))


def cold_start(
    tensors: Tensors,
    *,
    policy: StoragePolicy = StoragePolicy.SCRATCH,
    self_check: bool = True,
    pin: bool = False,
    make: Callable[[], nn.Module] = Toy,
    vllm_config: VllmConfig | None = None,
) -> Started:
    """Start a toy on ``tensors`` through vLLM's loader and ours. ``pin``: no CPU address may change, as on CUDA."""
    vllm_config = vllm_config or configuration()
    with _inner_format():
        loader = _Loader(
            LoadConfig(
                load_format=LOAD_FORMAT,
                model_loader_extra_config={
                    INNER_FORMAT_KEY: "toy",
                    POLICY_KEY: policy.value,
                    SELF_CHECK_KEY: self_check,
                    "tensors": tensors,
                },
            )
        )
    if pin:
        loader.pin_devices = frozenset({"cpu"})
    type(loader).make = staticmethod(make)
    # vLLM's CPU worker does the first, too: there is no accelerator whose cache could be emptied. And with vLLM
    # imported a full collection takes longer than everything else here.
    with torch.no_grad(), patch.object(torch.accelerator, "empty_cache"), patch.object(gc, "collect"):
        model = loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
    return Started(model, vllm_config)


def configuration(**changes: Any) -> VllmConfig:
    """Return a vLLM configuration with only as much of a model in it as loading needs."""
    config = VllmConfig(device_config=DeviceConfig("cpu"), **changes)
    config.model_config = SimpleNamespace(
        dtype=DTYPE, word_embeddings_untied_by_checkpoint=False, quantization=None, model="toy"
    )
    return config


@contextmanager
def _inner_format() -> Iterator[None]:
    table = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    table["toy"] = _Inner
    try:
        yield
    finally:
        del table["toy"]


def contents(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of everything that the model reaches, by path."""
    return {path: tensor.detach().clone() for path, tensor in reachable_tensors(model)}


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Name what is not equal in dtype, shape, strides and bits."""
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first or name not in second or not _bit_equal(first[name], second[name])
    )


def _bit_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    same = (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
    return same and torch.equal(
        first.contiguous().flatten().view(torch.uint8), second.contiguous().flatten().view(torch.uint8)
    )
