"""Hashing by several threads: the same result, in order, and none of them where that does not pay."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from weightpush_protocol import threads
from weightpush_protocol.digest import CHUNK_BYTES, raw_digests, tensor_digest
from weightpush_protocol.threads import in_threads

LARGE = 2**30


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that may use three threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    threads._pool.cache_clear()
    yield
    threads._pool.cache_clear()


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 100])
def test_every_item_is_in_one_run_and_in_order(count: int) -> None:
    # A barrier: the runs are worked on at the same time, or this never ends.
    together = threading.Barrier(min(count, 3) or 1)

    def work(items: Sequence[int]) -> tuple[Sequence[int], str]:
        together.wait(60)
        return list(items), threading.current_thread().name

    results = in_threads(work, range(count), nbytes=LARGE)
    assert [item for run, _ in results for item in run] == list(range(count))
    assert len(results) == (min(count, 3) or 1)
    assert all(name.startswith("weightpush-hash") for _, name in results) is (count >= 2)


@pytest.mark.usefixtures("three")
def test_little_work_stays_with_the_caller() -> None:
    for nbytes, runs in ((0, 1), (4 * 2**20 - 1, 1), (4 * 2**20, 2), (6 * 2**20, 3), (LARGE, 3)):
        assert len(in_threads(len, range(100), nbytes=nbytes)) == runs


def test_a_process_with_one_thread_gets_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert in_threads(lambda items: threading.current_thread(), range(9), nbytes=LARGE) == [threading.current_thread()]


@pytest.mark.usefixtures("three")
def test_what_a_thread_raises_reaches_the_caller() -> None:
    def work(items: Sequence[int]) -> int:
        return 1 // min(items)

    with pytest.raises(ZeroDivisionError):
        in_threads(work, range(9), nbytes=LARGE)


@pytest.mark.usefixtures("three")
def test_work_that_is_handed_out_hands_nothing_out() -> None:
    def outer(items: Sequence[int]) -> list[list[int]]:
        return in_threads(list, items, nbytes=LARGE)

    assert in_threads(outer, range(9), nbytes=LARGE) == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]]


def test_digests_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, three: None) -> None:
    data = torch.randint(0, 256, (90 * CHUNK_BYTES + 5,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    places = [(3, 7), (16, 80 * CHUNK_BYTES + 1), (0, 0), (81 * CHUNK_BYTES, 9 * CHUNK_BYTES + 5)]
    places += [(place * 44 * CHUNK_BYTES, 44 * CHUNK_BYTES) for place in (0, 1)]
    many = (tensor_digest(data), tensor_digest(data[1:].view(2, -1).t()[1:]), raw_digests(data, places))
    assert threads._pool.cache_info().currsize == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert many == (tensor_digest(data), tensor_digest(data[1:].view(2, -1).t()[1:]), raw_digests(data, places))


@pytest.mark.usefixtures("three")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_makes_threads_of_its_own() -> None:
    data = torch.ones(90 * CHUNK_BYTES, dtype=torch.uint8)
    expected = tensor_digest(data)
    child = os.fork()
    if not child:
        os._exit(0 if tensor_digest(data) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
