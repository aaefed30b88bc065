"""Every refusal by name: its code, its offender, and a model that is exactly as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CompilationConfig, CompilationMode, KVTransferConfig, LoRAConfig
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.utils import weights_already_processed

from support.toy import ROWS, WIDTH, Layer, Method, Started, checkpoint, cold_start, contents, differing
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.config import StoragePolicy
from weightpush_server.reload import check_awake, check_draft, check_reloadable
from weightpush_server.reload.contract import registered
from weightpush_server.reload.layout import LAYOUT_ATTRIBUTE


@pytest.fixture(scope="module")
def started() -> Started:
    return cold_start(checkpoint(1))


@pytest.fixture
def live(started: Started) -> Iterator[Started]:
    """The toy, to be left exactly as it is found."""
    objects, before = registered(started.model), contents(started.model)
    yield started
    assert differing(before, contents(started.model)) == []
    assert all(objects[name] is tensor for name, tensor in registered(started.model).items())
    assert not started.layout.is_open
    check_reloadable(started.model, started.vllm_config)


def _refused(live: Started, code: ErrorCode, offender: str | None, reason: str) -> None:
    """Both asking and beginning are refused, and neither changes the model."""
    objects, before = registered(live.model), contents(live.model)
    for ask in (lambda: check_reloadable(live.model, live.vllm_config), live.begin):
        with pytest.raises(WeightPushError, match=reason) as caught:
            ask()
        assert caught.value.code is code
        assert caught.value.details.get("offender") == offender
    assert all(objects[name] is tensor for name, tensor in registered(live.model).items())
    assert differing(before, contents(live.model)) == []


@pytest.mark.case("C95")
def test_online_quantization(live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(live.model.scaled.quant_method, "uses_meta_device", True)
        _refused(live, ErrorCode.ONLINE_QUANTIZATION, "scaled", "quantized while loading")


def test_no_layout_recorded(live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(live.model.__dict__, LAYOUT_ATTRIBUTE)
        _refused(live, ErrorCode.LAYOUT_UNKNOWN, None, "--load-format weightpush")


class _Preprocessed(nn.Module):
    """Weights that came from a cache, as they are after processing."""

    def __init__(self) -> None:
        super().__init__()
        method = Method()
        method.supports_pre_processed_weights = True
        self.layer = Layer(method)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.layer.weight.data.copy_(tensor)


def test_weights_in_runtime_layout() -> None:
    with weights_already_processed():
        live = cold_start({"layer.weight": torch.ones(ROWS, WIDTH)}, make=_Preprocessed)
    _refused(live, ErrorCode.RUNTIME_LAYOUT, "", "weight cache")


class _Backend(SleepModeBackend):
    """Frees nothing, but keeps vLLM's own account of the state, as its backends do."""

    def suspend(self, level: int = 1) -> None:
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RUNNING"


@pytest.mark.case("C102")
def test_asleep() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    worker = object.__new__(Worker)
    worker._sleep_mode_backend = None
    check_awake(worker)
    worker._sleep_mode_backend = _Backend()
    check_awake(worker)
    worker.sleep_mode_backend.suspend()
    with pytest.raises(WeightPushError, match="wake it up first") as caught:
        check_awake(worker)
    assert (caught.value.code, caught.value.http_status) == (ErrorCode.ASLEEP, 409)
    worker.sleep_mode_backend.resume()
    check_awake(worker)


def test_a_parameter_that_was_never_recorded(live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged = nn.Module()
    exchanged.weight = nn.Parameter(torch.zeros(ROWS, WIDTH), requires_grad=False)
    with monkeypatch.context() as patch:
        patch.setitem(live.model._modules, "table", exchanged)
        _refused(live, ErrorCode.UNRECORDED_PARAMETER, "table.weight", "registered after the cold start")


def test_a_wrapped_layer_keeps_its_record(live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """As LoRA wraps layers after the start: other names, the same modules."""
    wrapper = nn.Module()
    wrapper.base_layer = live.model.table
    wrapper.adapter = nn.Parameter(torch.zeros(2), requires_grad=False)
    with monkeypatch.context() as patch:
        patch.setitem(live.model._modules, "table", wrapper)
        check_reloadable(live.model)


class _Overlapping(nn.Module):
    """Two parameters that share their middle, both loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        data = torch.empty(12)
        self.layer.left = nn.Parameter(data[:8], requires_grad=False)
        self.layer.right = nn.Parameter(data[4:], requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            getattr(self.layer, name).data.copy_(tensor)


def test_storages_that_overlap_without_being_one_tensor() -> None:
    live = cold_start({"left": torch.ones(8), "right": torch.zeros(8)}, make=_Overlapping)
    _refused(live, ErrorCode.OVERLAPPING_STORAGE, "layer.left", r"'layer\.right'")


def test_storages_that_came_to_overlap() -> None:
    live = cold_start(checkpoint(1))
    buffer = torch.zeros(2 * ROWS * WIDTH, dtype=torch.bfloat16)
    live.model.table.weight.data = buffer[: ROWS * WIDTH].view(ROWS, WIDTH)
    live.model.shared.one.data = buffer[WIDTH : WIDTH + ROWS * WIDTH].view(ROWS, WIDTH)
    with pytest.raises(WeightPushError, match=r"'shared\.one'") as caught:
        check_reloadable(live.model)
    assert caught.value.code is ErrorCode.OVERLAPPING_STORAGE
    assert caught.value.details["offender"] == "table.weight"


class _Columns(nn.Module):
    """Two parameters whose bytes lie between each other's: nothing is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        data = torch.empty(4, 6)
        self.layer.left = nn.Parameter(data[:, :3], requires_grad=False)
        self.layer.right = nn.Parameter(data[:, 3:], requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            getattr(self.layer, name).data.copy_(tensor)


def test_interleaved_storages_are_no_overlap() -> None:
    live = cold_start({"left": torch.ones(4, 3), "right": torch.zeros(4, 3)}, make=_Columns)
    live.push({"left": torch.full((4, 3), 2.0), "right": torch.full((4, 3), 3.0)})
    assert live.model.layer.left.unique().tolist() == [2.0]
    assert live.model.layer.right.unique().tolist() == [3.0]


class _Single(nn.Module):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        method = Method()
        method.process_weights_after_loading = change
        self.layer = Layer(method)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.layer.weight.data.copy_(tensor)


def _replace(data: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.weight = nn.Parameter(data(layer.weight.data), requires_grad=False)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _replace(lambda weight: torch.empty(0)),
        _replace(lambda weight: weight[:3].clone()),
        _replace(torch.Tensor.float),
    ],
    ids=["gone", "too small", "of another size"],
)
def test_storage_that_is_gone_or_has_another_size_under_strict(change: Callable[[Any], None]) -> None:
    live = cold_start(
        {"layer.weight": torch.ones(ROWS, WIDTH).bfloat16()}, make=lambda: _Single(change), policy=StoragePolicy.STRICT
    )
    _refused(live, ErrorCode.STORAGE_UNAVAILABLE, "layer.weight", "--storage-policy strict")


@pytest.mark.parametrize(
    "change",
    [lambda layer: None, _replace(torch.Tensor.t), _replace(torch.Tensor.clone)],
    ids=["untouched", "transposed", "moved"],
)
def test_storage_of_the_right_size_will_do_under_strict(change: Callable[[Any], None]) -> None:
    live = cold_start(
        {"layer.weight": torch.ones(ROWS, WIDTH).bfloat16()}, make=lambda: _Single(change), policy=StoragePolicy.STRICT
    )
    live.push({"layer.weight": torch.full((ROWS, WIDTH), 5.0).bfloat16()})
    assert live.model.layer.weight.unique().tolist() == [5.0]


@pytest.mark.parametrize(("option", "mode"), [("max_autotune", 3), ("freezing", 2)])
def test_frozen_weights(option: str, mode: int, live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = CompilationConfig(mode=CompilationMode(mode), inductor_compile_config={option: True})
    with monkeypatch.context() as patch:
        patch.setattr(live.vllm_config, "compilation_config", frozen)
        _refused(live, ErrorCode.FROZEN_WEIGHTS, "", option)
        patch.setattr(frozen, "mode", CompilationMode.NONE)
        check_reloadable(live.model, live.vllm_config)


class _Experts(FusedMoEMethodBase):
    """A method of experts, by its class."""

    def __init__(self) -> None:
        """Needs no configuration to be told apart."""

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Layers make their own."""

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """There is none."""

    def apply(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


def test_lora_with_moe(live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(live.vllm_config, "lora_config", LoRAConfig(max_lora_rank=8, max_loras=1))
        check_reloadable(live.model, live.vllm_config)
        patch.setattr(live.model.scaled, "quant_method", _Experts())
        recorded = [(path, module, type(module.quant_method)) for path, module, _ in live.layout.quant_methods]
        patch.setattr(live.layout, "quant_methods", recorded)
        _refused(live, ErrorCode.LORA_WITH_MOE, "scaled", "--enable-lora")


@pytest.mark.case("C88")
def test_a_kv_connector_that_cannot_be_emptied(live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        example = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
        patch.setattr(live.vllm_config, "kv_transfer_config", example)
        _refused(live, ErrorCode.KV_CONNECTOR, "", "ExampleConnector")
        offloading = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
        patch.setattr(live.vllm_config, "kv_transfer_config", offloading)
        check_reloadable(live.model, live.vllm_config)


def _head(method: Any) -> Any:
    head: Any = object.__new__(ParallelLMHead)
    nn.Module.__init__(head)
    head.quant_method = method
    head.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    return head


def test_a_draft_that_shares_a_quantized_head() -> None:
    target, draft = nn.Module(), nn.Module()
    target.lm_head = draft.lm_head = _head(Method())
    with pytest.raises(WeightPushError, match="the target's own") as caught:
        check_draft(target, draft)
    assert caught.value.code is ErrorCode.DRAFT_SHARES_HEAD
    assert caught.value.details["offender"] == "lm_head"
    draft.lm_head = _head(Method())
    check_draft(target, draft)
    draft.lm_head.weight = target.lm_head.weight
    with pytest.raises(WeightPushError):
        check_draft(target, draft)
    target.lm_head = draft.lm_head = _head(UnquantizedEmbeddingMethod())
    check_draft(target, draft)
    check_draft(target, None)
    check_draft(target, SimpleNamespace())


def test_an_exchanged_quantization_method(live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(live.model.first, "quant_method", object())
        _refused(live, ErrorCode.RELOAD_REFUSED, "first", "was Method and is object now")


def test_a_weight_without_storage(live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(live.model.table._parameters, "weight", nn.Parameter(torch.empty(ROWS, WIDTH, device="meta")))
        with pytest.raises(WeightPushError, match="meta device") as caught:
            check_reloadable(live.model)
        assert caught.value.code is ErrorCode.RELOAD_REFUSED
        assert caught.value.details["offender"] == "table.weight"


def test_a_checkpoint_of_which_nothing_is_known(live: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(live.layout, "checkpoint", None)
        _refused(live, ErrorCode.LAYOUT_UNKNOWN, None, "dummy weights")
        check_reloadable(live.model, live.vllm_config, planned=True)
