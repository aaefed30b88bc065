"""What verify calls a change, what it excuses, and how the reports of several workers become one answer."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import VerifyAnswer, VerifyRequest
from weightpush_server.reload.fingerprint import tensor_prints
from weightpush_server.verify import ServedModel, WorkerReport, combine_reports

WEIGHTS = {f"layer.{index}": torch.full((4, 4), float(index)) for index in range(4)}


class Model(nn.Module):
    """A weight, and a table that the runtime may cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).view(4, 4))
        self.register_buffer("table", torch.ones(3))


def request(weights: dict[str, torch.Tensor]) -> VerifyRequest:
    return VerifyRequest(
        tensors=tuple(TensorSpec.of(name, tensor) for name, tensor in weights.items()),
        digests={name: tensor_digest(tensor) for name, tensor in weights.items()},
    )


def served(model: Model, *, known: set[str] | None = None) -> ServedModel:
    """Serve ``WEIGHTS``; ``known`` names those whose digests this worker has."""
    it = ServedModel(model)
    commit = request(WEIGHTS)
    digests = {name: digest for name, digest in commit.digests.items() if known is None or name in known}
    it.commit(tensor_prints(model), commit.tensors, digests)
    return it


def report(it: ServedModel, model: Model, asked: VerifyRequest | None = None, rank: int = 0) -> WorkerReport:
    return it.report(model, asked or VerifyRequest(), rank=rank, weight_version="v")


def answer(asked: VerifyRequest, *reports: WorkerReport) -> VerifyAnswer:
    return combine_reports(reports, asked, committed="c", now="n")


def test_nothing_changed() -> None:
    model = Model()
    found = report(served(model), model, request(WEIGHTS))
    assert (found.changed, found.differing, found.converted) == ([], [], [])
    assert found.committed == found.now
    assert answer(request(WEIGHTS), found).equal


@pytest.mark.parametrize("write", ["bit", "replace", "cast", "delete"])
def test_a_changed_weight_is_named(write: str) -> None:
    model = Model()
    it = served(model)
    if write == "bit":
        model.weight.data.view(torch.int32)[1, 2] ^= 1
    elif write == "replace":
        model.weight = nn.Parameter(torch.zeros(4, 4))
    elif write == "cast":
        model.weight = nn.Parameter(model.weight.bfloat16())
    else:
        del model.weight
    found = report(it, model)
    assert [(item.name, item.kind) for item in found.changed] == [
        ("weight", "vanished" if write == "delete" else "changed")
    ]
    assert found.now != found.committed
    assert not answer(VerifyRequest(), found).intact


def test_a_table_that_the_runtime_casts_or_makes_is_no_fault() -> None:
    model = Model()
    it = served(model)
    model.table = model.table.bfloat16()
    model.workspace = torch.empty(7)
    found = report(it, model)
    assert found.changed == []
    assert sorted(found.converted) == ["table", "workspace"]
    model.table.data[0] = 5
    assert report(served(model), model).changed == []
    it = served(model)
    model.table[1] = 7
    assert [item.name for item in report(it, model).changed] == ["table"], "but a write into one is"


def test_the_first_tensors_that_differ_are_named_in_order() -> None:
    model = Model()
    other = {name: tensor + (index >= 2) for index, (name, tensor) in enumerate(WEIGHTS.items())}
    found = report(served(model), model, request(other))
    assert [(item.kind, item.name) for item in found.differing] == [("digest", "layer.2"), ("digest", "layer.3")]
    first = found.differing[0]
    assert (first.expected, first.given) == (tensor_digest(other["layer.2"]), tensor_digest(WEIGHTS["layer.2"]))
    short = {"extra": torch.ones(1), **{name: WEIGHTS[name] for name in ("layer.0", "layer.1", "layer.3")}}
    problems = answer(request(short), report(served(model), model, request(short))).differing
    assert [(item.kind, item.name) for item in problems] == [("unknown", "extra"), ("missing", "layer.2")]


def test_what_no_worker_recorded_is_not_called_equal() -> None:
    model = Model()
    asked = request(WEIGHTS)
    halves = [served(model, known={"layer.0", "layer.2"}), served(model, known={"layer.1"})]
    found = answer(asked, *(report(half, model, asked, rank) for rank, half in enumerate(halves)))
    assert [(item.kind, item.name) for item in found.differing] == [("unrecorded", "layer.3")]
    assert (found.equal, found.intact) == (False, True)
    halves[1] = served(model, known={"layer.1", "layer.3"})
    assert answer(asked, *(report(half, model, asked) for half in halves)).equal


def test_one_worker_with_another_digest_is_enough() -> None:
    model = Model()
    asked = request(WEIGHTS)
    wrong = ServedModel(model)
    wrong.commit(tensor_prints(model), asked.tensors, {**asked.digests, "layer.1": "0" * 16})
    found = answer(asked, report(served(model), model, asked), report(wrong, model, asked, 1))
    assert [(item.name, item.worker_rank) for item in found.differing] == [("layer.1", 1)]


def test_a_partial_commit_keeps_what_it_does_not_bring() -> None:
    model = Model()
    it = served(model)
    part = request({"layer.1": torch.zeros(4, 4)})
    it.commit(tensor_prints(model), part.tensors, part.digests, partial=True)
    assert answer(request(WEIGHTS), report(it, model, request(WEIGHTS))).differing_total == 1
    now = request({**WEIGHTS, "layer.1": torch.zeros(4, 4)})
    assert answer(now, report(it, model, now)).equal
    it.commit(tensor_prints(model), part.tensors, {}, partial=True)
    unknown = answer(now, report(it, model, now))
    assert [(item.kind, item.name) for item in unknown.differing] == [("unrecorded", "layer.1")]


def test_a_tensor_without_a_digest_is_refused() -> None:
    with pytest.raises(ValidationError, match="has no digest"):
        VerifyRequest(tensors=request(WEIGHTS).tensors)
