"""The loop: rollouts from the servers, a step of the trainer, a push, and a look at what the servers now compute."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import ray
import transformers

from grpo.report import ENDS, HEADER, Gap, Run, Step
from grpo.rollouts import Refused, Rollout, Rollouts
from grpo.task import ANSWER_TOKENS, make_model, make_prompts, probe_tokens, save_model
from grpo.trainer import Trainer
from tiny_model import CPU_ENVIRONMENT
from weightpush_client import PushReport
from weightpush_client.ray import ServerFleet

PROMPTS: Final = 32
ANSWERS: Final = 8
#: How long a killed server may take to be up again.
BACK_S: Final = 300.0

#: vLLM on a few CPU cores, as quickly as it starts. float32, so that servers and trainer can be compared exactly.
SERVER_OPTIONS: Final = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "128")
CPU_OPTIONS: Final = ("--distributed-executor-backend", "uni")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line chooses; ``kill_server_at`` is a step, or None."""

    steps: int
    seed: int
    servers: int
    transport: str
    mode: str
    pushing: bool
    kill_server_at: int | None


def train(settings: Settings, folder: Path, tell: Callable[[str], None] = print) -> Run:
    """Start servers and trainer under Ray, learn, end everything.

    Args:
        folder: where the checkpoint that the servers start on is written; all of them must see it.

    Raises:
        RolloutError: no server answered, or one answered with the wrong weights.
        WeightPushError: the servers did not start, none of them took a push, or a killed one stayed away.
    """
    transformers.utils.logging.disable_progress_bar()
    save_model(make_model(settings.seed), folder)
    started = time.monotonic()
    # One CPU for each server and one for the trainer, by Ray's count: they may share cores.
    ray.init(
        "local",
        num_cpus=settings.servers + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        fleet = ServerFleet.launch(
            str(folder),
            replicas=settings.servers,
            server_args=[*SERVER_OPTIONS, *CPU_OPTIONS],
            env=CPU_ENVIRONMENT,
        )
        with fleet, Rollouts(str(folder)) as rollouts:
            took = time.monotonic() - started
            tell(f"servers up after {took:.0f} s: {', '.join(fleet.urls())}")
            return _Loop(settings, fleet, rollouts, tell).run()
    finally:
        ray.shutdown()


class _Loop:
    def __init__(self, settings: Settings, fleet: ServerFleet, rollouts: Rollouts, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._fleet = fleet
        self._rollouts = rollouts
        self._tell = tell
        self._rng = random.Random(settings.seed)
        self._probes = probe_tokens()
        self._trainer: Any = (
            ray.remote(Trainer)
            .options(num_cpus=1)
            .remote(fleet, seed=settings.seed, answers=ANSWERS, transport=settings.transport, mode=settings.mode)
        )
        #: Address and instance of the servers that committed the last push: only they are asked for rollouts.
        self._serving: dict[str, str] = {}
        self._version = ""

    def run(self) -> Run:
        """Run all steps."""
        self._push("step-0")
        self._tell(HEADER)
        steps = []
        for number in range(1, self._settings.steps + 1):
            if self._settings.kill_server_at is not None and number == self._settings.steps - ENDS + 1:
                self._wait_until_all_are_back()
            steps.append(step := self._step(number))
            self._tell(str(step))
        return Run(tuple(steps), self._settings.servers, self._settings.pushing, self._settings.kill_server_at)

    def _step(self, number: int) -> Step:
        rollout_version, asked_before = self._version, self._rollouts.asked_again
        started = time.monotonic()
        rollouts = self._collect(kill=number == self._settings.kill_server_at)
        rolled_out = time.monotonic()
        reward = ray.get(self._trainer.train.remote(rollouts))
        trained = time.monotonic()
        report = self._push(f"step-{number}") if self._settings.pushing else None
        return Step(
            step=number,
            rollout_version=rollout_version,
            reward=reward,
            rollout_seconds=rolled_out - started,
            train_seconds=trained - rolled_out,
            version=self._version,
            push_seconds=None if report is None else report.seconds,
            pause_seconds=None if report is None else report.pause_seconds,
            gaps=self._gaps(),
            asked_again=self._rollouts.asked_again - asked_before,
        )

    def _collect(self, *, kill: bool) -> list[Rollout]:
        prompts = make_prompts(PROMPTS, self._rng)

        def collect() -> list[Rollout]:
            return self._rollouts.collect(
                list(self._serving), prompts, answers=ANSWERS, tokens=ANSWER_TOKENS, version=self._version
            )

        if not kill:
            return collect()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(collect)
            self._fleet.kill(self._settings.servers - 1)
            self._tell(f"     server {self._settings.servers - 1} was killed")
            return running.result()

    def _push(self, version: str) -> PushReport:
        report: PushReport = ray.get(self._trainer.push.remote(version))
        serving = {server.url: server.instance_id for server in report.servers}
        for url in sorted(self._serving.keys() - serving.keys()):
            self._tell(f"     {url} did not take {version}: the others go on")
        if self._serving:
            for url in sorted(serving.keys() - self._serving.keys()):
                self._tell(f"     {url} was taken back and serves {version}")
        self._serving, self._version = serving, version
        return report

    def _gaps(self) -> tuple[Gap, ...]:
        ours = ray.get(self._trainer.logprobs.remote(self._probes))
        gaps = []
        for server, instance_id in self._serving.items():
            try:
                theirs = self._rollouts.prompt_logprobs(server, self._probes, version=self._version)
            except Refused as error:
                self._tell(f"     {server} cannot be compared: {error}")
                continue
            differences = [
                abs(one - other) for a, b in zip(ours, theirs, strict=True) for one, other in zip(a, b, strict=True)
            ]
            gaps.append(Gap(server, instance_id, fmean(differences), max(differences)))
        return tuple(gaps)

    def _wait_until_all_are_back(self) -> None:
        started = time.monotonic()
        self._fleet.wait_up(timeout_s=BACK_S)
        waited = time.monotonic() - started
        self._tell(f"     waited {waited:.0f} s for the killed server, so that the last {ENDS} steps are made with it")
