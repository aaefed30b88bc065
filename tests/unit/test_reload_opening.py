"""Opening modules after every kind of post-load processing: the checkpoint layout is back, and bytes lie apart."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from weightpush_server.reload.coverage import WriteLog, WriteRecorder
from weightpush_server.reload.layout import ModelLayout, StorageGroup, find_layout, record_layout
from weightpush_server.reload.opening import Opened, find_places, open_groups, overlapping, unwritten
from weightpush_server.reload.retention import settle
from weightpush_server.reload.storage import storage_id


class Layer(nn.Module):
    """A weight with a loader's attributes, a bias and a scale that no checkpoint brings."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 6), requires_grad=False)
        self.weight.output_dim = 0  # type: ignore[attr-defined]  # as vLLM's loaders need it
        self.bias = nn.Parameter(torch.empty(4), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)


def _load(model: nn.Module, value: float) -> WriteLog:
    log = WriteLog()
    with torch.no_grad(), WriteRecorder(log):
        for layer in model.modules():
            if isinstance(layer, Layer):
                layer.weight.data.copy_(torch.full((4, 6), value))
                layer.bias.data.copy_(torch.full((4,), value))
    return log


def _open_all(groups: list[StorageGroup], *, poison: bool = False) -> Opened:
    opened = open_groups(groups, poison=poison)
    opened.take_all()
    opened.let_go()
    return opened


def _recorded(count: int = 1) -> tuple[list[Layer], ModelLayout]:
    layers = [Layer() for _ in range(count)]
    model = nn.Sequential(*layers)
    return layers, record_layout(model, None, writes=_load(model, 1.0))


def _assert_in_checkpoint_layout(layer: Layer) -> None:
    assert layer.weight.shape == (4, 6)
    assert layer.weight.stride() == (6, 1)
    assert layer.weight.dtype == torch.float32
    assert layer.weight.output_dim == 0  # type: ignore[attr-defined]
    assert layer.bias.shape == (4,)
    assert layer.scale.item() == -1.0
    assert set(dict(layer.named_parameters())) == {"weight", "bias", "scale"}


def test_untouched_tensors_stay_where_they_are() -> None:
    (layer,), layout = _recorded()
    objects, addresses = list(layer.parameters()), [p.data_ptr() for p in layer.parameters()]
    opened = _open_all(layout.groups)
    assert opened.scratch == 0
    assert opened.in_place == 4 * 6 * 4 + 4 * 4 + 4
    assert all(now is before for now, before in zip(layer.parameters(), objects, strict=True))
    assert [p.data_ptr() for p in layer.parameters()] == addresses


def test_a_removed_weight_comes_back_with_its_attributes_on_storage_that_only_the_module_holds() -> None:
    (layer,), layout = _recorded()
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    layer.bias.data = layer.bias.data.double()
    del layer.scale
    layer.scale = 3.0  # type: ignore[assignment]  # processing may leave a number under a parameter's name
    opened = _open_all(layout.groups)
    assert opened.scratch == 4 * 6 * 4 + 4 * 4 + 4
    _assert_in_checkpoint_layout(layer)
    reference = layout.groups[0].storage
    assert reference.alive
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    gc.collect()
    assert not reference.alive


def test_scratch_storage_is_taken_when_it_is_asked_for() -> None:
    (layer,), layout = _recorded()
    packed = layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    weight, bias = layout.groups[:2]
    opened = open_groups(layout.groups)
    assert (opened.scratch, opened.is_scratch(weight), opened.is_scratch(bias)) == (96, True, False)
    assert layer.weight is packed
    place = opened.take(weight)
    _assert_in_checkpoint_layout(layer)
    assert place.storage.data_ptr() == layer.weight.data_ptr()
    assert opened.take(weight).same(place)
    assert opened.take(bias).storage.data_ptr() == layer.bias.data_ptr()


def test_weights_that_came_to_overlap_are_told_apart_from_tied_ones() -> None:
    layers, layout = _recorded(2)
    shared = torch.zeros(40)
    layers[0].weight.data = shared[:24].view(4, 6)
    layers[1].weight.data = shared[:24].view(4, 6)
    assert overlapping(layout.groups) is None
    layers[1].weight.data = shared[16:].view(4, 6)
    pair = overlapping(layout.groups)
    assert pair is not None
    assert [group.name for group in pair] == ["0.weight", "1.weight"]


@pytest.mark.parametrize("rounds", [1, 3])
def test_opening_again_without_closing(rounds: int) -> None:
    (layer,), layout = _recorded()
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    for _ in range(rounds):
        _open_all(layout.groups)
    _assert_in_checkpoint_layout(layer)
    assert _open_all(layout.groups).scratch == 0


def test_a_repacked_weight_of_the_same_size_is_opened_on_its_own_storage() -> None:
    (layer,), layout = _recorded()
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous().t(), requires_grad=False)
    address = layer.weight.data_ptr()
    assert _open_all(layout.groups).scratch == 0
    _assert_in_checkpoint_layout(layer)
    assert layer.weight.data_ptr() == address


def test_fused_weights_are_opened_at_their_present_offset() -> None:
    layers, layout = _recorded(2)
    fused = torch.full((3, 4, 6), 9.0)
    for index, layer in enumerate(layers):
        layer.weight = nn.Parameter(fused[index + 1], requires_grad=False)
    _open_all(layout.groups)
    for index, layer in enumerate(layers):
        _assert_in_checkpoint_layout(layer)
        assert storage_id(layer.weight) == storage_id(fused)
        layer.weight.data.fill_(index)
    assert fused[0].unique().tolist() == [9.0]
    assert fused[1].unique().tolist() == [0.0]
    assert fused[2].unique().tolist() == [1.0]


@pytest.mark.parametrize("as_buffer", [True, False])
def test_tensors_that_shared_bytes_share_them_again(as_buffer: bool) -> None:
    layer = Layer()
    model = nn.Sequential(layer)
    view = layer.weight.data.view(6, 4)
    if as_buffer:
        layer.register_buffer("view", view, persistent=False)
    else:
        layer.view = view
    layout = record_layout(model, None, writes=_load(model, 1.0))
    layer.weight.data = layer.weight.data.clone()
    _open_all(layout.groups)
    layer.weight.data.fill_(5.0)
    held = layer.view
    assert isinstance(held, torch.Tensor)
    assert held.shape == (6, 4)
    assert held.unique().tolist() == [5.0]


def test_a_weight_tied_after_loading_gets_bytes_of_its_own() -> None:
    (embedding, head), layout = _recorded(2)
    head.weight = embedding.weight
    address = embedding.weight.data_ptr()
    _open_all(layout.groups)
    assert head.weight is not embedding.weight
    assert embedding.weight.data_ptr() == address
    embedding.weight.data.fill_(1.0)
    head.weight.data.fill_(2.0)
    assert embedding.weight.unique().tolist() == [1.0]
    _assert_in_checkpoint_layout(head)


def test_a_weight_tied_before_loading_stays_tied() -> None:
    layers = [Layer(), Layer()]
    layers[1].weight = layers[0].weight
    model = nn.Sequential(*layers)
    layout = record_layout(model, None, writes=_load(model, 1.0))
    for layer in layers:
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    _open_all(layout.groups)
    assert layers[0].weight is layers[1].weight
    _assert_in_checkpoint_layout(layers[0])


def test_only_what_a_checkpoint_brings_is_poisoned_and_the_rest_is_restored() -> None:
    (layer,), layout = _recorded()
    layer.scale.data.fill_(44.0)
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    _open_all(layout.groups, poison=True)
    assert layer.weight.isnan().all()
    assert layer.bias.isnan().all()
    assert layer.scale.item() == -1.0


def test_a_partly_written_weight_is_named() -> None:
    (layer,), layout = _recorded()
    _open_all(layout.groups)
    log = WriteLog()
    with torch.no_grad(), WriteRecorder(log):
        layer.bias.data.fill_(1.0)
        layer.weight.data[:, :5].fill_(1.0)
    missing = [
        unwritten(group, place, log.ranges(place.storage))
        for group, place in zip(layout.groups, find_places(layout.groups), strict=True)
        if place is not None
    ]
    assert missing == ["0.weight", None, None]
    with torch.no_grad(), WriteRecorder(log):
        layer.weight.data[:, 5:].fill_(1.0)
    places = find_places(layout.groups)
    assert places[0] is not None
    assert unwritten(layout.groups[0], places[0], log.ranges(places[0].storage)) is None


def test_kept_bytes_are_dropped_where_processing_changed_nothing() -> None:
    layers, layout = _recorded(2)
    assert [group.name for group in layout.groups if group.kept is not None] == ["0.scale", "1.scale"]
    layers[1].scale.data.fill_(3.0)
    settle(nn.Sequential(*layers), layout)
    assert [group.name for group in layout.groups if group.kept is not None] == ["1.scale"]


def test_what_neither_loading_nor_processing_writes_is_left_to_the_runtime() -> None:
    (layer,), layout = _recorded()
    settle(nn.Sequential(layer), layout)
    exchanged = nn.Parameter(torch.tensor(8.0, dtype=torch.bfloat16), requires_grad=False)
    layer.scale = exchanged
    _open_all(layout.groups, poison=True)
    assert layer.scale is exchanged
    assert layer.scale.item() == 8.0


def test_each_model_has_its_own_record() -> None:
    first, second = Layer(), Layer()
    layouts = [record_layout(model, None, writes=_load(model, 1.0)) for model in (first, second)]
    assert [find_layout(first), find_layout(second), find_layout(nn.Sequential(first))] == [*layouts, None]
