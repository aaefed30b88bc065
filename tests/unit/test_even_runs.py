"""Runs of evenly spaced copies: every place in one of them, and as few as there need be."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from weightpush_protocol.even_runs import even_runs


def test_gates_and_ups_that_alternate_are_two_runs() -> None:
    gates = [(200 * number, 300 * number) for number in range(10)]
    ups = [(200 * number + 100, 300 * number + 100) for number in range(10)]
    runs = list(even_runs([place for pair in zip(gates, ups, strict=True) for place in pair], (2, 2)))
    assert sorted(runs) == [gates, ups]


def test_distances_that_are_no_multiples_of_an_element_make_no_run() -> None:
    runs = sorted(even_runs([(0, 0), (3, 4), (6, 8)], (2, 2)))
    assert runs == [[(0, 0), (6, 8)], [(3, 4)]]


def test_a_source_that_goes_backwards_makes_no_run() -> None:
    assert sorted(map(len, even_runs([(40, 0), (20, 4), (0, 8)], (2, 2)))) == [1, 1, 1]


def test_one_source_may_be_read_again_and_again() -> None:
    assert list(even_runs([(8, 0), (8, 4), (8, 8)], (4, 4))) == [[(8, 0), (8, 4), (8, 8)]]


@pytest.mark.parametrize("seed", range(20))
def test_every_place_is_in_exactly_one_run_and_runs_are_even(seed: int) -> None:
    rng = random.Random(seed)
    places = list({(4 * rng.randrange(60), 4 * rng.randrange(60)) for _ in range(rng.randrange(1, 80))})
    runs = list(even_runs(places, (4, 4)))
    assert sorted(place for run in runs for place in run) == sorted(places)
    for run in runs:
        steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(run)}
        assert len(steps) <= 1
        assert all(source >= 0 and target > 0 for source, target in steps)
