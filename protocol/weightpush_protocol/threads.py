"""Work on host memory by as many threads as torch may use in this process, where that pays for handing it out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeVar

import torch

_Items = TypeVar("_Items", bound=Sequence[object])
_Result = TypeVar("_Result")

#: Bytes that a thread must get at least: a tenth of a millisecond of hashing, where handing over takes a fifth of that.
_LEAST_BYTES: Final = 2 * 2**20
#: Whoever waited for the pool in a thread of the pool could wait for itself.
_this_thread = threading.local()


def in_threads(work: Callable[[_Items], _Result], items: _Items, *, nbytes: int) -> list[_Result]:
    """Return ``work`` of runs of ``items``, in order, each run in a thread of its own; of all at once if few.

    ``nbytes``: of host memory that all items together stand for; they should be of about one size. ``work`` should let
    other threads run while it works; where it calls this itself, it keeps to its own thread. The threads are those of
    ``OMP_NUM_THREADS``, which vLLM sets to the cores that a worker owns.
    """
    threads = min(torch.get_num_threads(), nbytes // _LEAST_BYTES, len(items))
    if threads < 2 or getattr(_this_thread, "is_one_of_them", False):
        return [work(items)]
    cuts = [len(items) * turn // threads for turn in range(threads + 1)]
    runs = [items[start:end] for start, end in pairwise(cuts)]
    return list(_pool().map(work, runs))


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "weightpush-hash", _join_them)


def _join_them() -> None:
    _this_thread.is_one_of_them = True


# A child process has no threads but the one that forked.
os.register_at_fork(after_in_child=_pool.cache_clear)
