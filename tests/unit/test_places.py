"""Places in a bucket: what is worked out of them once says the same as the places themselves."""

from __future__ import annotations

import random

import pytest
import torch

from weightpush_protocol.digest import CHUNK_BYTES, raw_digests, tensor_digest
from weightpush_protocol.digest_text import texts
from weightpush_protocol.places import PlaceRun, Places


def test_places_are_a_tuple_of_pairs() -> None:
    pairs = ((0, 4), (4, 4), (8, 0), (9, 2))
    places = Places(iter(pairs))
    assert places == pairs
    assert hash(places) == hash(pairs)
    assert places.nbytes == 10
    assert places.runs
    assert places == pairs  # Whatever was worked out of them is no part of them.
    assert Places() == ()
    assert (Places().nbytes, Places().runs, Places().first_outside(0)) == (0, (), None)


def test_equally_large_neighbours_are_one_run() -> None:
    places = Places([(0, 4), (4, 4), (8, 4), (12, 2), (14, 2), (20, 2), (22, 0), (22, 0), (22, 2), (16, 2)])
    assert places.runs == (
        PlaceRun(0, 4, 3),
        PlaceRun(12, 2, 2),
        PlaceRun(20, 2, 1),
        PlaceRun(22, 0, 1),
        PlaceRun(22, 0, 1),
        PlaceRun(22, 2, 1),
        PlaceRun(16, 2, 1),
    )
    # Nobody who works on a run lets others wait for long.
    assert [run.times for run in Places((8 * at, 8) for at in range(2500)).runs] == [1024, 1024, 452]


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_same_places_in_the_same_order(seed: int) -> None:
    chooser = random.Random(seed)
    pairs, at = [], 0
    for _ in range(300):
        nbytes = chooser.choice([0, 3, 3, 3, 8])
        pairs.append((at, nbytes))
        at += nbytes + chooser.choice([0, 0, 0, 0, 1, 3])
    places = Places(pairs)
    found = [(run.start + run.nbytes * turn, run.nbytes) for run in places.runs for turn in range(run.times)]
    assert found == pairs
    assert places.nbytes == sum(nbytes for _, nbytes in pairs)


@pytest.mark.parametrize(
    ("pairs", "size", "wrong"),
    [
        ([(0, 4), (4, 4)], 8, None),
        ([(0, 4), (4, 4)], 7, (4, 4)),
        ([(9, 0), (0, 4)], 8, (9, 0)),
        ([(0, 4), (-1, 3)], 8, (-1, 3)),
        ([(0, 4), (5, -2)], 8, (5, -2)),
        ([(8, 1), (-1, 3)], 8, (8, 1)),
    ],
)
def test_the_first_place_outside_is_found(pairs: list[tuple[int, int]], size: int, wrong: object) -> None:
    assert Places(pairs).first_outside(size) == wrong


@pytest.mark.parametrize("nbytes", [1, 8, 4096, CHUNK_BYTES, CHUNK_BYTES + 8])
@pytest.mark.parametrize("gap", [0, 5])
def test_digests_of_many_alike_are_those_of_each(nbytes: int, gap: int) -> None:
    many = 2100 if nbytes < 4096 else 7
    pairs = [(3 + number * (nbytes + gap), nbytes) for number in range(many)]
    bucket = torch.randint(0, 256, (sum(pairs[-1]) + 2,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = [tensor_digest(bucket[offset : offset + size]) for offset, size in pairs]
    places = Places(pairs)
    for _ in range(2):
        assert texts(raw_digests(bucket, places)) == expected
    assert raw_digests(bucket, pairs) == raw_digests(bucket, places)
    bucket[pairs[-1][0]] ^= 1
    changed = texts(raw_digests(bucket, places))
    assert changed[:-1] == expected[:-1]
    assert changed[-1] != expected[-1]
