"""What a run recorded: a line per step, a plot, and whether it is what it must be."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

#: Steps at each end of a run whose rewards are averaged.
ENDS: Final = 5
MIN_STEPS: Final = 2 * ENDS
UNTRAINED_REWARD: Final = 0.15
LEARNT_REWARD: Final = 0.8
FLAT_REWARD: Final = 0.1
#: In float32, right after a push; one stale norm in one layer gives 2e-4 at its worst token.
GAP_MEAN: Final = 1e-5
GAP_MAX: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute difference between a server's and the trainer's log-probabilities of the same tokens.

    ``server``: its address. ``instance_id``: another one after each start.
    """

    server: str
    instance_id: str
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step: rollouts made by ``rollout_version``, then a training step, then a push of ``version``.

    ``push_seconds`` and ``pause_seconds`` are None where nothing was pushed. ``gaps`` were taken after the push, on
    every server that serves.
    """

    step: int
    rollout_version: str
    reward: float
    rollout_seconds: float
    train_seconds: float
    version: str
    push_seconds: float | None
    pause_seconds: float | None
    gaps: tuple[Gap, ...]
    asked_again: int = 0

    @property
    def gap_mean(self) -> float:
        """The largest of the servers' mean gaps."""
        return max((gap.mean for gap in self.gaps), default=float("nan"))

    @property
    def gap_max(self) -> float:
        """The largest gap of any token on any server."""
        return max((gap.max for gap in self.gaps), default=float("nan"))

    def __str__(self) -> str:
        def seconds(value: float | None) -> str:
            return f"{value:7.3f}" if value is not None else "      -"

        again = f", {self.asked_again} asked again" if self.asked_again else ""
        return (
            f"{self.step:4} {self.rollout_version:>9} {self.reward:7.3f} {self.rollout_seconds:8.2f} "
            f"{self.train_seconds:6.2f} {seconds(self.push_seconds)} {seconds(self.pause_seconds)} "
            f"{self.gap_mean:9.1e} {self.gap_max:9.1e}  {len(self.gaps)}{again}"
        )


HEADER: Final = "step  rollouts  reward  rollout  train    push   pause  gap mean   gap max  servers\n" + (
    "              by               s      s       s       s"
)


@dataclass(frozen=True, slots=True)
class Run:
    """All steps of a run, and how it was made.

    ``killed_at``: the step during which a server was killed, and None where none was.
    """

    steps: tuple[Step, ...]
    servers: int
    pushing: bool
    killed_at: int | None = None

    def complaints(self) -> list[str]:
        """Return what is not as it must be; empty where all is well."""
        found = self._reward_complaints()
        if self.pushing:
            found += self._gap_complaints()
        if self.killed_at is not None:
            found += self._kill_complaints(self.killed_at)
        return found

    def summary(self) -> str:
        """Return the run in one line."""
        first, last = self._ends()
        text = f"reward {first:.3f} in the first {ENDS} steps, {last:.3f} in the last {ENDS}"
        pushes = [step.push_seconds for step in self.steps if step.push_seconds is not None]
        pauses = [step.pause_seconds for step in self.steps if step.pause_seconds is not None]
        if not (pushes and pauses):
            return f"{text}; nothing was pushed"
        return (
            f"{text}; push {fmean(pushes):.3f} s (longest {max(pushes):.3f}), of which servers paused "
            f"{fmean(pauses):.3f} s (longest {max(pauses):.3f}); gap at most "
            f"{max(step.gap_mean for step in self.steps):.1e} on average, "
            f"{max(step.gap_max for step in self.steps):.1e} at one token"
        )

    def to_json(self) -> str:
        """Return everything that was recorded."""
        return json.dumps({**asdict(self), "complaints": self.complaints()}, indent=1)

    def _ends(self) -> tuple[float, float]:
        rewards = [step.reward for step in self.steps]
        return fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])

    def _reward_complaints(self) -> list[str]:
        if len(self.steps) < MIN_STEPS:
            return [f"{len(self.steps)} steps are too few to compare their ends: make at least {MIN_STEPS}"]
        first, last = self._ends()
        found = []
        if not first < UNTRAINED_REWARD:
            found.append(f"the reward of the first {ENDS} steps is {first:.3f}, expected below {UNTRAINED_REWARD}")
        if self.pushing and not last > LEARNT_REWARD:
            found.append(f"the reward of the last {ENDS} steps is {last:.3f}, expected above {LEARNT_REWARD}")
        if not self.pushing and not last < FLAT_REWARD:
            found.append(f"without pushing, the reward of the last {ENDS} steps is {last:.3f}, not below {FLAT_REWARD}")
        return found

    def _gap_complaints(self) -> list[str]:
        found = []
        for step in self.steps:
            wanted = 1 if self._may_miss_one(step) else self.servers
            if len(step.gaps) < wanted:
                found.append(
                    f"step {step.step}: {len(step.gaps)} of {self.servers} servers took the push and could be compared"
                )
            found += [
                f"step {step.step}: {gap.server} differs from the trainer by {gap.mean:.1e} on average and "
                f"{gap.max:.1e} at most, allowed are {GAP_MEAN:.0e} and {GAP_MAX:.0e}: it serves other weights"
                for gap in step.gaps
                if not (gap.mean < GAP_MEAN and gap.max < GAP_MAX)
            ]
        return found

    def _may_miss_one(self, step: Step) -> bool:
        return self.killed_at is not None and self.killed_at <= step.step <= len(self.steps) - ENDS

    def _kill_complaints(self, killed_at: int) -> list[str]:
        after = [len(step.gaps) for step in self.steps if step.step >= killed_at]
        if not after or min(after) >= self.servers:
            return [f"a server was killed at step {killed_at}, and yet all took every push"]
        return []


def plot(run: Run, path: Path) -> None:
    """Draw reward, seconds and gap by step as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = 3 if run.pushing else 2
    figure, panels = pyplot.subplots(rows, 1, sharex=True, figsize=(8, 2.7 * rows), layout="constrained")
    reward, gap = panels[0], panels[-1]
    numbers = [step.step for step in run.steps]
    reward.plot(numbers, [step.reward for step in run.steps], marker=".", label="mean reward")
    reward.set(ylabel="reward", ylim=(0, 1.02), title="pushed after each step" if run.pushing else "never pushed")
    if run.pushing:
        seconds = panels[1]
        seconds.plot(numbers, [step.push_seconds for step in run.steps], marker=".", label="push")
        seconds.plot(numbers, [step.pause_seconds for step in run.steps], marker=".", label="of which servers paused")
        seconds.set(ylabel="seconds")
        seconds.set_ylim(bottom=0)
    gap.plot(numbers, [step.gap_max for step in run.steps], marker=".", label="largest")
    gap.plot(numbers, [step.gap_mean for step in run.steps], marker=".", label="mean")
    gap.axhline(GAP_MAX, linestyle="--", color="grey", label="allowed: largest")
    gap.axhline(GAP_MEAN, linestyle=":", color="grey", label="allowed: mean")
    gap.set(ylabel="log-probability gap", yscale="log", xlabel="step")
    away = [step.step for step in run.steps if len(step.gaps) < run.servers]
    for axes in panels:
        if away:
            axes.axvspan(away[0] - 0.5, away[-1] + 0.5, alpha=0.15, color="grey", label="a server is away")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
