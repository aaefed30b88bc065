"""The tiny models of tests and examples: what a swapped or a stale tensor would show in must differ."""

from __future__ import annotations

import itertools

import torch

from support.tiny import tiny_model


def randomized(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # Vectors keep what they were made with as their mean.
    model = torch.nn.ModuleDict(
        {f"{kind}_{number}": torch.nn.Linear(8, 8) for kind in ("gate", "up", "embed") for number in range(20)}
    )
    tiny_model().randomize(model, seed)
    return dict(model.state_dict())


def test_no_two_tensors_of_one_shape_are_alike() -> None:
    for (one, left), (other, right) in itertools.combinations(randomized(1).items(), 2):
        assert left.shape != right.shape or not torch.equal(left, right), (one, other)


def test_every_tensor_differs_from_one_seed_to_the_next_and_only_then() -> None:
    first, again, second = randomized(1), randomized(1), randomized(2)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert not torch.equal(tensor, second[name]), name
