"""Which tensors have landed: as if every name were looked up, whatever was known from the update before."""

from __future__ import annotations

import gc
import random

import pytest

from weightpush_server.reload import landed
from weightpush_server.reload.landed import Apart, LandedNames

FIRST, SECOND, THIRD = frozenset("abc"), frozenset("def"), frozenset("gh")
ALL = dict.fromkeys("abcdefgh")


@pytest.fixture
def known() -> Apart:
    """As an update with three buckets leaves it."""
    apart = Apart()
    names = LandedNames(apart)
    for bucket in (FIRST, SECOND, THIRD):
        assert names.twice(bucket) is None
        names.add_all(bucket)
    assert names.missing(ALL, ()) == []
    return apart


def test_a_bucket_comes_twice(known: Apart) -> None:
    names = LandedNames(known)
    assert names.twice(SECOND) is None
    assert names.twice(SECOND) is None  # It was only looked at so far.
    names.add_all(SECOND)
    assert names.twice(SECOND) in SECOND
    assert names.twice(FIRST) is None
    names.add_all(FIRST)
    assert names.twice(FIRST) in FIRST
    assert len(names) == 6


def test_a_tensor_of_a_bucket_came_alone_before(known: Apart) -> None:
    names = LandedNames(known)
    names.add("e")
    assert "e" in names
    assert names.twice(FIRST) is None
    assert names.twice(SECOND) == "e"


def test_a_tensor_comes_alone_after_its_bucket(known: Apart) -> None:
    names = LandedNames(known)
    names.add_all(SECOND)
    assert "e" in names
    assert "a" not in names  # Though it was in the update before.
    assert "z" not in names


@pytest.mark.parametrize("before", [[], [FIRST], [THIRD], [FIRST, THIRD]], ids=len)
def test_buckets_that_are_cut_in_another_way_are_looked_at_name_by_name(
    known: Apart, before: list[frozenset[str]]
) -> None:
    names = LandedNames(known)
    for bucket in before:
        assert names.twice(bucket) is None
        names.add_all(bucket)
    other = frozenset("cd")
    assert names.twice(other) == ("c" if FIRST in before else None)
    if FIRST in before:
        other = frozenset("de")
        assert names.twice(other) is None
    names.add_all(other)
    assert names.twice(SECOND) in other
    assert names.twice(frozenset(other)) in other  # Equal, and another object.
    assert len(names) == len(names.names()) == sum(map(len, before)) + len(other)
    assert names.missing(ALL, ()) == sorted(set(ALL).difference(other, *before))


def test_other_buckets_take_the_place_of_those_of_the_update_before(known: Apart) -> None:
    other = [frozenset("abcd"), frozenset("efgh")]
    for _ in range(2):
        names = LandedNames(known)
        for bucket in other:
            assert names.twice(bucket) is None
            names.add_all(bucket)
        assert names.missing(ALL, ()) == []
        assert all(known.takes(bucket) for bucket in other)
    assert not known.takes(FIRST)


def test_what_is_missing_is_named_in_order(known: Apart) -> None:
    names = LandedNames(known)
    names.add_all(SECOND)
    names.add("b")
    names.add("head")  # Optional, and not expected.
    assert names.missing(ALL, {"head", "g"}) == ["a", "c", "h"]
    # As many as are expected, and one of them is another one.
    names = LandedNames(known)
    for bucket in (FIRST, SECOND):
        names.add_all(bucket)
    names.add("g")
    names.add("head")
    assert len(names) == len(ALL)
    assert names.missing(ALL, {"head"}) == ["h"]


def test_no_bucket_is_taken_for_one_that_is_gone() -> None:
    """Identities come back when objects are gone; those that are known stay."""
    apart = Apart()
    for turn in range(50):
        LandedNames(apart).add_all(frozenset({f"{turn}.a", f"{turn}.b"}))
        gc.collect()
    names = LandedNames(apart)
    for turn in range(50):
        assert names.twice(frozenset({f"{turn}.a", f"{turn}.b"})) is None
    assert len(names) == 0


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kept", [2, 4096])
def test_it_is_as_if_every_name_were_looked_up(seed: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landed, "_KEPT", kept)
    chooser = random.Random(seed)
    every = [f"t{number}" for number in range(12)]
    # Of several ways to cut the same tensors, of which one is used for some time.
    pools = [
        [frozenset(every[start : start + size]) for start in range(0, 12, size)]
        for size in (3, 3, chooser.randrange(1, 6))
    ]
    apart = Apart()
    for _ in range(12):
        names, plain = LandedNames(apart), set[str]()
        pool = chooser.choice(pools)
        for _ in range(10):
            bucket = chooser.choice(chooser.choice([pool, pool, chooser.choice(pools)]))
            if chooser.random() < 0.2:
                name = chooser.choice(every)
                assert (name in names) == (name in plain)
                if name not in plain:
                    names.add(name)
                    plain.add(name)
                continue
            twice = names.twice(bucket)
            assert (twice is None) == plain.isdisjoint(bucket)
            if twice is None:
                names.add_all(bucket)
                plain |= bucket
            else:
                assert twice in plain & bucket
            assert names.names() == plain
            assert len(names) == len(plain)
            optional = set(chooser.sample(every, 2))
            assert names.missing(dict.fromkeys(every), optional) == [
                name for name in every if name not in plain and name not in optional
            ]
