"""A sampling profiler of the own process: all threads, one stack every few milliseconds, without any extension.

A tracing profiler makes each of thousands of small calls dearer and so finds what it brought along. This one looks at
the stacks from a thread of its own; while native code holds the interpreter's lock it sees nothing, and books that
time to the line that is running when it sees again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

_EVERY_S: Final = 0.002
_DEEPEST: Final = 60


class StackSampler:
    """Between ``start`` and ``stop`` it collects stacks, weighted with the time since the last look."""

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s = every_s
        self._stacks: Counter[tuple[str, ...]] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stack-sampler", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        self._thread.join()

    def folded(self) -> str:
        """Return one line a stack, as flame graph tools read it: frames from the outside in, then microseconds."""
        lines = (f"{';'.join(stack)} {weight}" for stack, weight in sorted(self._stacks.items()))
        return "".join(f"{line}\n" for line in lines)

    def _run(self) -> None:
        own = threading.get_ident()
        last = time.perf_counter()
        while not self._stopping.wait(self._every_s):
            now = time.perf_counter()
            weight = round((now - last) * 1e6)
            last = now
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != own:
                    self._stacks[(names.get(ident, "?"), *_frames(frame))] += weight


_running: StackSampler | None = None


def profile(file: str | None) -> None:
    """Begin to look at this process; with ``file``, end it and write what was seen as `StackSampler.folded` has it."""
    global _running
    if _running is not None:
        _running.stop()
        if file is not None:
            Path(file).write_text(_running.folded())
    _running = None
    if file is None:
        _running = StackSampler()
        _running.start()


def _frames(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None and len(found) < _DEEPEST:
        code = frame.f_code
        found.append(f"{Path(code.co_filename).name}:{code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


def hottest(folded: str, *, idle: tuple[str, ...], rows: int = 30) -> str:
    """Return a table of the functions that took most time: by themselves, and with what they called.

    Stacks whose innermost function is one of ``idle`` (waiting for others) are left out.
    """
    alone: Counter[str] = Counter()
    with_callees: Counter[str] = Counter()
    total = 0
    for line in folded.splitlines():
        stack, _, weight = line.rpartition(" ")
        _, *frames = stack.split(";")
        if not frames or frames[-1].endswith(idle):
            continue
        total += int(weight)
        alone[frames[-1]] += int(weight)
        for frame in set(frames):
            with_callees[frame] += int(weight)
    lines = [f"{total / 1e6:.3f} s seen at work", "", "   alone  with callees  function"]
    ranked = sorted(with_callees, key=lambda frame: (-alone[frame], -with_callees[frame]))
    for frame in ranked[:rows]:
        lines.append(f"{alone[frame] / 1e6:7.3f} s {with_callees[frame] / 1e6:11.3f} s  {frame}")
    return "\n".join(lines) + "\n"
