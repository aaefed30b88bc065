"""Post-load processing is taken back, whatever guard or cache it left behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weightpush_server.reload.journal import AttributeJournal


class Kernel:
    def __init__(self) -> None:
        self.packed: torch.Tensor | None = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.packed = layer.weight * 2


class Method:
    """Processes once, as vLLM's MoE methods do: a kernel that exists is not made again."""

    def __init__(self) -> None:
        self.kernel: Kernel | None = None
        self.scheme = Kernel()
        self.runs = 0

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.runs += 1
        self.scheme.process_weights_after_loading(layer)
        if self.kernel is None:
            self.kernel = Kernel()
            self.kernel.process_weights_after_loading(layer)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.quant_method = Method()
        self.scale: Any = torch.ones(1)
        self.kept = object()

    def process(self) -> None:
        if getattr(self, "_already_processed", False):
            return
        self._already_processed = True
        self.scale = float(self.scale)
        self.quant_method.process_weights_after_loading(self)


def test_processing_runs_again_as_if_for_the_first_time() -> None:
    layer = Layer()
    model = nn.Sequential(layer)
    kept, scale = layer.kept, layer.scale
    journal = AttributeJournal(model)
    layer.process()
    journal.close()
    model.eval()
    for value in (3.0, 5.0):
        with torch.no_grad():
            layer.weight.fill_(value)
        journal.undo()
        assert not hasattr(layer, "_already_processed")
        assert layer.scale is scale
        assert layer.quant_method.kernel is None
        layer.process()
        assert layer.quant_method.runs == 1
        kernel = layer.quant_method.kernel
        assert kernel is not None
        assert kernel.packed is not None
        assert kernel.packed.tolist() == [2 * value] * 2
        assert layer.quant_method.scheme.packed is not None
        assert layer.quant_method.scheme.packed.tolist() == [2 * value] * 2
    assert layer.kept is kept
    assert not layer.training
    assert {key for _, key in journal.changed()} == {"_already_processed", "scale", "kernel", "runs", "packed"}


def test_undo_after_processing_stopped_half_way() -> None:
    layer = Layer()
    journal = AttributeJournal(nn.Sequential(layer))
    layer.process()
    journal.close()
    journal.undo()
    layer._already_processed = True
    journal.undo()
    layer.process()
    assert layer.quant_method.kernel is not None


def test_containers_get_their_elements_back() -> None:
    layer = Layer()
    before = torch.ones(3)
    layer.packed = {"first": before}
    layer.order = [1]
    layer.seen = {"a"}
    journal = AttributeJournal(nn.Sequential(layer))
    packed, order, seen = layer.packed, layer.order, layer.seen
    for _ in range(2):
        layer.packed["first"] = torch.zeros(3)
        layer.packed["second"] = torch.zeros(3)
        layer.order.append(2)
        layer.seen.add("b")
        journal.close()
        journal.undo()
        assert layer.packed is packed
        assert list(packed) == ["first"]
        assert packed["first"] is before
        assert (order, seen) == ([1], {"a"})
