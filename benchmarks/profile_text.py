"""The text of a profile of a push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.profiler import hottest

#: Functions in which a thread waits for somebody else.
_IDLE: Final = (
    ".wait",
    ".select",
    ".poll",
    ".accept",
    ":wait",
    "._wait_for_tstate_lock",
    "._next_job",
    ":_worker",
    "GarbageCollectorThread.run",
    "StackSampler._run",
    "trainer.py:main",
    ".process_input_sockets",
    ".process_output_sockets",
    "Queue.get",
    "runners.py:Runner.run",
)


def profile_text(
    what: str, facts: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], folded: Mapping[str, str]
) -> str:
    """Return the profile of the pushes ``samples``: the functions of all sides that took most time."""
    seconds = ", ".join(f"{sample['seconds']:.3f}" for sample in samples)
    lines = [
        f"{len(samples)} pushes over shm, direct: {what}, {facts['tensors']} tensors, {facts['bytes'] / 1e6:.0f} MB.",
        f"Seconds: {seconds} (sampling included). Stacks were taken every 2 ms; threads that wait are left out.",
        "Functions are named file:function; times are over all pushes together.",
        "",
        "parts of the last push, in seconds: "
        + ", ".join(f"{name} {value:.3f}" for name, value in samples[-1]["parts"].items()),
        "",
    ]
    for side, text in folded.items():
        lines += [f"== {side} ==", "", hottest(text, idle=_IDLE)]
    return "\n".join(lines)
