"""A reload of the toy equals a cold start, whatever post-load processing did to its layers; and what it costs."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import nn

from support.toy import (
    CPU,
    DTYPE,
    ROWS,
    WIDTH,
    Layer,
    Method,
    Started,
    Tensors,
    checkpoint,
    cold_start,
    contents,
    differing,
    land,
)
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.config import StoragePolicy
from weightpush_server.reload import finish_reload
from weightpush_server.reload.contexts import loading_context
from weightpush_server.reload.fingerprint import fingerprint, tensor_objects

SCRATCH, RETAIN = StoragePolicy.SCRATCH, StoragePolicy.RETAIN


def addresses(model: nn.Module) -> dict[str, int]:
    return {path: tensor.data_ptr() for path, tensor in tensor_objects(model) if tensor.numel()}


def oracle(tensors: Tensors, *, pin: bool = False) -> Started:
    return cold_start(tensors, self_check=False, pin=pin)


def assert_equal(found: Started, wanted: Started) -> None:
    assert differing(contents(found.model), contents(wanted.model)) == []
    assert torch.equal(found.model(), wanted.model())


def test_two_checkpoints_differ_everywhere() -> None:
    a, b = oracle(checkpoint(1)), oracle(checkpoint(2))
    changed = set(differing(contents(a.model), contents(b.model)))
    assert set(contents(a.model)) - changed == {"vanishing.weight"}  # It is empty.


@pytest.mark.case("C29", "C30", "C31", "C32", "C33", "C39", "C40", "C65", "C66")
@pytest.mark.parametrize("pin", [False, True], ids=["", "pinned"])
@pytest.mark.parametrize("planned", [False, True], ids=["loaders", "plan"])
@pytest.mark.parametrize("policy", [SCRATCH, RETAIN])
def test_a_reload_equals_a_cold_start(policy: StoragePolicy, planned: bool, pin: bool) -> None:
    a, b = checkpoint(1), checkpoint(2)
    live, cold = cold_start(a, policy=policy, pin=pin), {"a": oracle(a), "b": oracle(b)}
    before, bits = addresses(live.model), contents(live.model)
    objects = {name: parameter for name, parameter in live.model.named_parameters() if "." in name}
    if planned:
        assert live.plan(a).via_loader == {"decay.weight"}
    shuffled = dict(random.Random(0).sample(list(b.items()), len(b)))
    for tensors, buckets, wanted in (
        (b, 1, "b"),
        (a, len(a), "a"),
        (shuffled, 5, "b"),
        (b, 2, "b"),
        (a, 1, "a"),
        (a, 3, "a"),
    ):
        proof = live.push(tensors, planned=planned, buckets=buckets)
        assert_equal(live, cold[wanted])
        assert proof.fingerprint == fingerprint(cold[wanted].model)
        assert proof.bytes == sum(tensor.nbytes for tensor in tensors.values())
        if pin:
            assert addresses(live.model) == before
    assert differing(bits, contents(live.model)) == []
    assert live.model.head.weight is live.model.embed.weight
    assert live.model.conv.view.data_ptr() != live.model.conv.weight.data_ptr()
    # What processing leaves alone is the same object still, and has its loader.
    assert live.model.table.weight is objects["table.weight"]
    assert live.model.sentinel.weight.weight_loader is not None


def test_a_parameter_that_loading_makes_is_a_weight_like_any_other() -> None:
    a, b = checkpoint(1, bias=True), checkpoint(2, bias=True)
    live = cold_start(a)
    assert "head.bias" not in dict(oracle(checkpoint(1)).model.named_parameters())
    live.push(b)
    assert_equal(live, oracle(b))
    with pytest.raises(WeightPushError) as caught:
        live.push({name: tensor for name, tensor in b.items() if name != "head.bias"})
    assert caught.value.details["tensor"] == "head.bias"


def test_a_native_kernels_raw_pointer_stays_right_where_nothing_is_pinned() -> None:
    live = cold_start(checkpoint(1))
    for seed in (2, 3):
        live.push(checkpoint(seed))
        assert live.model.sentinel.kernel.address == live.model.sentinel.float_scale.data_ptr()


def test_a_weight_in_a_shared_buffer_does_not_write_over_its_neighbours() -> None:
    live = cold_start(checkpoint(1), pin=True)
    fused = live.model.fused
    session = live.begin()
    assert live.model.second.weight.untyped_storage()._cdata == fused.untyped_storage()._cdata
    land(session, {"second.weight": torch.full((ROWS, WIDTH), 3.0, dtype=DTYPE)})
    assert fused[:4].unique().tolist() == [7.0]
    assert fused[4 : 4 + ROWS * WIDTH].isnan().all()  # The poison of the first weight.
    assert fused[4 + ROWS * WIDTH :].unique().tolist() == [3.0]


def test_scratch_is_taken_late_and_freed() -> None:
    live = cold_start(checkpoint(2))
    layer = live.model.vanishing
    session = live.begin()
    assert layer.weight.numel() == 0
    land(session, checkpoint(1))
    (group,) = [group for group in live.layout.groups if group.name == "vanishing.weight"]
    assert layer.weight.shape == (ROWS, WIDTH)
    reference = group.storage
    finish_reload(session)
    gc.collect()
    assert layer.weight.numel() == 0
    assert not reference.alive


@pytest.mark.case("C4", "C38")
@pytest.mark.parametrize("policy", [SCRATCH, RETAIN])
@pytest.mark.parametrize("reached", ["begun", "half landed", "landed", "processing raised"])
def test_an_update_that_was_given_up_can_be_repeated(
    reached: str, policy: StoragePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = checkpoint(1), checkpoint(2)
    live = cold_start(a, policy=policy, pin=True)
    before = addresses(live.model)
    session = live.begin()
    if reached == "half landed":
        land(session, dict(list(b.items())[::2]))
    elif reached != "begun":
        land(session, b)
    if reached == "processing raised":

        def fail(layer: nn.Module) -> None:
            raise MemoryError("no room to pack")

        with monkeypatch.context() as patch:
            patch.setattr(live.model.transposed.quant_method, "process_weights_after_loading", fail)
            with pytest.raises(WeightPushError, match="MemoryError: no room to pack") as caught:
                finish_reload(session)
        assert caught.value.code is ErrorCode.PROOF_FAILED
    live.push(b, planned=True)
    assert_equal(live, oracle(b))
    assert addresses(live.model) == before
    with pytest.raises(WeightPushError) as caught:
        land(session, a)
    assert caught.value.code in (ErrorCode.STALE_UPDATE, ErrorCode.UPDATE_FAILED)


class _Draws(Method):
    """Makes an empty parameter without saying of which dtype: the default is the model's at cold start."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class _Empties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(_Draws())

    def load_weights(self, weights: object) -> None:
        for _, tensor in weights:  # type: ignore[attr-defined]  # an iterator of pairs
            self.layer.weight.data.copy_(tensor)


def test_what_processing_makes_has_the_models_dtype() -> None:
    weight = {"layer.weight": torch.ones(ROWS, WIDTH, dtype=DTYPE)}
    live = cold_start(weight, make=_Empties)
    assert live.model.layer.weight.dtype is DTYPE
    live.push(weight)
    assert live.model.layer.weight.dtype is DTYPE
    with loading_context(live.vllm_config, CPU):
        assert torch.get_default_dtype() is DTYPE
    assert torch.get_default_dtype() is torch.float32


def test_a_layer_that_guards_itself_from_the_start_stays_guarded() -> None:
    live = cold_start(checkpoint(1))
    live.push(checkpoint(2))
    assert live.model.runner._already_called_process_weights_after_loading is True


@pytest.mark.case("C10", "C65")
@pytest.mark.parametrize("policy", [SCRATCH, RETAIN])
@pytest.mark.parametrize("name", sorted(checkpoint(1)))
def test_a_complete_update_that_misses_any_tensor_fails(name: str, policy: StoragePolicy) -> None:
    live = cold_start(checkpoint(1), policy=policy, self_check=False)
    session = live.begin()
    land(session, {key: tensor for key, tensor in checkpoint(2).items() if key != name})
    with pytest.raises(WeightPushError) as caught:
        finish_reload(session)
    assert caught.value.code is ErrorCode.PROOF_FAILED
    assert caught.value.details["tensor"] == name
