"""Tensors of the next push are held against those of the last one: every difference but their bytes is seen."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn

from weightpush_client.sources import looks
from weightpush_client.sources.looks import Looks


class Wrapped(torch.Tensor):
    """Of a class that may hold its values anywhere."""


@pytest.fixture(params=["guards", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "one by one":
        monkeypatch.setattr(looks, "_guards", lambda tensors: None)
    return str(request.param)


def tensors(fill: float = 0.0) -> list[torch.Tensor]:
    return [
        torch.full((4, 6), fill),
        nn.Parameter(torch.full((3, 5), fill)),
        torch.full((6, 4), fill, dtype=torch.bfloat16).t(),
        torch.tensor(fill),
        torch.full((2, 7), fill)[:, 1:],
        torch.empty(0, 3),
        torch.ones(8, dtype=torch.uint8),
    ]


def test_guards_are_there_and_see_what_they_must() -> None:
    assert looks.guards_can_be_relied_on()


@pytest.mark.usefixtures("way")
def test_other_bytes_at_other_places_look_the_same() -> None:
    first = Looks(tensors())
    assert first.match(tensors(1.0))
    with torch.inference_mode():
        assert first.match([tensor.clone() if tensor.is_contiguous() else tensor for tensor in tensors()[:1]]) is False
        assert first.match(tensors())
    with torch.no_grad():
        assert first.match(tensors())
    assert first.match(tensors())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 7),
        torch.zeros(24),
        torch.zeros(4, 6, 1),
        torch.zeros(6, 4).t(),
        torch.zeros(4, 12)[:, ::2],
        torch.zeros(6).expand(4, 6),
        torch.zeros(4, 6, dtype=torch.float64),
        torch.zeros(4, 6, dtype=torch.int32),
        torch.zeros(4, 6, dtype=torch.complex64).conj().imag,
        torch.zeros(4, 6, device="meta"),
        torch.zeros(4, 6).to_sparse(),
        torch.zeros(4, 6).as_subclass(Wrapped),
        None,
        "weights",
    ],
    ids=lambda other: f"{type(other).__name__} {getattr(other, 'shape', '')} {getattr(other, 'dtype', '')}",
)
def test_every_difference_is_seen(other: object) -> None:
    first = Looks(tensors())
    for changed in ([other, *tensors()[1:]], [*tensors()[:-1], other]):
        assert not first.match(changed)
    assert first.match(tensors())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [0, 6, 8])
def test_another_number_of_tensors_is_seen(count: int) -> None:
    assert not Looks(tensors()).match((tensors() * 2)[:count])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.unsqueeze_(0),
        lambda tensor: tensor.resize_(4, 5),
        lambda tensor: setattr(tensor, "data", torch.zeros(6, 4)),
        lambda tensor: setattr(tensor, "data", torch.zeros(4, 6, dtype=torch.float16)),
    ],
)
def test_the_same_object_may_have_changed_its_looks(change: Callable[[torch.Tensor], object]) -> None:
    kept = tensors()
    first = Looks(kept)
    assert first.match(kept)
    change(kept[0])
    assert not first.match(kept)


def test_what_guards_see_beyond_what_matters_does_not_matter(way: str) -> None:
    first, frozen = Looks(tensors()), tensors()
    frozen[0].requires_grad_()
    frozen[1].requires_grad_(False)
    frozen[3] = nn.Parameter(frozen[3])
    for _ in range(2):
        assert first.match(frozen)
        assert first.match(tensors())
    assert (first._guards is not None) is (way == "guards")


@pytest.mark.usefixtures("way")
def test_no_tensor_is_held() -> None:
    found = tensors()
    gone = [weakref.ref(tensor) for tensor in found]
    first = Looks(found)
    assert first.match(found)
    found.clear()
    gc.collect()
    assert [tensor() for tensor in gone] == [None] * len(gone)


@pytest.fixture
def untried() -> Iterator[None]:
    looks.guards_can_be_relied_on.cache_clear()
    yield
    looks.guards_can_be_relied_on.cache_clear()


class Blind:
    """Sees that a tensor is none, and nothing else; as guards would that were told too little."""

    def check(self, *others: object) -> bool:
        return all(isinstance(other, torch.Tensor) for other in others)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("made", [None, Blind()], ids=["missing", "blind"])
def test_guards_that_see_too_little_are_not_used(made: Blind | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(_: Sequence[torch.Tensor]) -> Blind | None:
        return made

    monkeypatch.setattr(looks, "_make_guards", make)
    first = Looks(tensors())
    assert not looks.guards_can_be_relied_on()
    assert first.match(tensors())
    assert not first.match([torch.zeros(4, 7), *tensors()[1:]])
