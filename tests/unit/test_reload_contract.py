"""What an update must leave as it was; addresses are pinned on a device type of the caller's choice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server.reload.contract import Contract

PINNED = frozenset({"cpu"})


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].packed = [torch.zeros(4, 4)]
    return model


def _addresses(model: nn.Sequential) -> list[int]:
    return [*(tensor.data_ptr() for tensor in model.state_dict().values()), model[0].packed[0].data_ptr()]


def test_moved_tensors_are_written_back_wherever_they_are_held() -> None:
    model = _model()
    before = _addresses(model)
    contract = Contract.of(model, pin_devices=PINNED)
    model[0].weight = nn.Parameter(torch.full((2, 3), 5.0))
    model[0].bias.data = torch.full((2,), 6.0)
    model[0].packed[0] = torch.full((4, 4), 7.0)
    model[1].running_mean = torch.full((2,), 8.0)
    assert contract.write_back(model) == 4
    contract.check(model)
    assert _addresses(model) == before
    assert model[0].weight.unique().tolist() == [5.0]
    assert model[0].bias.unique().tolist() == [6.0]
    assert model[0].packed[0].unique().tolist() == [7.0]
    assert model[1].running_mean.unique().tolist() == [8.0]
    assert contract.write_back(model) == 0


def test_weights_that_change_places_are_both_written_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    before = [layer.weight.data_ptr() for layer in model]
    contract = Contract.of(model, pin_devices=PINNED)
    first, second = model[0].weight.detach().clone(), model[1].weight.detach().clone()
    model[0].weight, model[1].weight = model[1].weight, model[0].weight
    assert contract.write_back(model) == 2
    assert [layer.weight.data_ptr() for layer in model] == before
    assert torch.equal(model[0].weight, second)
    assert torch.equal(model[1].weight, first)


def test_nothing_is_pinned_on_a_cpu_by_default() -> None:
    model = _model()
    contract = Contract.of(model)
    moved = torch.full((4, 4), 7.0)
    model[0].packed[0] = moved
    assert contract.write_back(model) == 0
    contract.check(model)
    assert model[0].packed[0] is moved


def test_weights_that_were_tied_cannot_come_apart_at_one_address() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].alias = model[0].weight.data.view(3, 3)
    contract = Contract.of(model, pin_devices=PINNED)
    model[1].alias = torch.zeros(3, 3)
    with pytest.raises(WeightPushError, match=r"'1\.alias'.*shared its address with '0\.weight'") as caught:
        contract.write_back(model)
    assert caught.value.code is ErrorCode.PROOF_FAILED


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: setattr(model[0], "bias", None), "0.bias"),
        (lambda model: model[0].register_buffer("extra", torch.zeros(1)), "0.extra"),
        (lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(3, 2))), "0.weight"),
        (lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(3, 2).t())), "0.weight"),
        (lambda model: setattr(model[1], "running_var", torch.zeros(2, dtype=torch.float64)), "1.running_var"),
        (lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(2, 3, device="meta"))), "0.weight"),
    ],
)
def test_every_change_of_layout_is_named(change, name: str) -> None:  # type: ignore[no-untyped-def]  # lambdas
    model = _model()
    contract = Contract.of(model)
    contract.check(model)
    change(model)
    with pytest.raises(WeightPushError, match="not as before the update") as caught:
        contract.check(model)
    assert caught.value.code is ErrorCode.PROOF_FAILED
    assert caught.value.details["tensor"] == name


def test_a_tensor_may_also_be_as_after_the_cold_start() -> None:
    model = _model()
    settled = Contract.of(model)
    model[1].running_var = torch.zeros(2, dtype=torch.float64)
    contract = Contract.of(model)
    contract.check(model, settled=settled)
    model[1].running_var = torch.zeros(2)
    contract.check(model, settled=settled)
    model[1].running_var = torch.zeros(3)
    with pytest.raises(WeightPushError):
        contract.check(model, settled=settled)
