"""One run: a server under traffic, one push with a fault after the other, and every check after each."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from faults import inject, resources
from faults.checks import (
    Outcome,
    Usage,
    Violation,
    Wrong,
    check_answer,
    check_flat,
    check_memory,
    check_outcome,
    check_state,
    letter,
)
from faults.plan import Shot
from faults.proxy import Proxy
from faults.report import EventLog, Finding, Report
from faults.scene import TRAINER_S, Scene
from faults.traffic import MAX_TOKENS, Traffic
from faults.trainers import BUCKET_BYTES, Job, Trainer
from support.raw import RawUpdate, read_tensors
from support.server import ServerProcess
from support.tiny import PROMPTS

TOKEN: Final = "fault-campaign-token-0123456789"


@dataclass(frozen=True)
class Topology:
    """Of what processes a server is made. ``keeps``: copies of what it serves, for a rollback."""

    arguments: tuple[str, ...]
    executor: str
    keeps: bool


#: Servers take turns: one API process with the worker in the engine; two API processes, an engine and a worker.
TOPOLOGIES: Final = (
    Topology(("--api-server-count", "1", "--keep-previous"), "uni", keeps=True),
    Topology(("--api-server-count", "2"), "mp", keeps=False),
)
_BUSY_S: Final = 15.0


def cold_answers(directory: Path, folder: Path) -> dict[str, str]:
    """Return what a server that is started on ``directory`` answers to ``PROMPTS``."""
    with ServerProcess(directory, folder=folder) as server:
        return {prompt: server.answer(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS}


@dataclass
class Campaign:
    """``directories`` and ``pure``: letter → checkpoint, and letter → prompt → the answer of its cold start."""

    seed: int
    shots: Sequence[Shot]
    directories: Mapping[str, Path]
    pure: Mapping[str, Mapping[str, str]]
    folder: Path
    log: EventLog
    #: Serves ``A`` from its start; the next topology takes over at every restart, and half-way through the run.
    first_topology: int = 0
    switch_half_way: bool = True
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.report = Report(self.seed)
        self._known: set[str] = set()
        self._samples: list[Usage] = []
        self._fingerprints: dict[str, str] = {}
        self._root = Path(os.path.commonpath([self.folder, *self.directories.values()]))
        self._starts = 0
        self._pushes = 0

    def run(self) -> Report:
        """Carry all shots out. Violations do not end the run: they are in the report."""
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            self._server = self._start_server()
            stack.callback(lambda: self._server.stop())
            self._buckets = self._count_buckets()
            self._proxy = Proxy(self._server.port)
            stack.callback(self._proxy.close)
            self._traffic = Traffic(self._server, PROMPTS)
            stack.callback(self._traffic.close)
            for index, shot in enumerate(self.shots):
                if self.switch_half_way and index and index == len(self.shots) // 2:
                    self._restart(shot)
                self._carry_out(shot)
            self._check_life(self.shots[-1])
        self.report.answers = self._traffic.counts
        self.report.seconds = time.monotonic() - started
        return self.report

    # Servers

    def _start_server(self) -> ServerProcess:
        self._topology = TOPOLOGIES[(self.first_topology + self._starts) % len(TOPOLOGIES)]
        version = f"A-start{self._starts}"
        self._starts += 1
        server = ServerProcess(
            self.directories["A"],
            [*self._topology.arguments, "--weight-version", version, "--reload-root", str(self._root)],
            folder=self.folder,
            token=TOKEN,
            executor=self._topology.executor,
        )
        self.log.note("start server", port=server.port, topology=self._topology)
        try:
            server.start().wait_ready()
        except BaseException:
            server.stop()
            raise
        self._known.add(version)
        self._samples, self._fingerprints = [], {}
        return server

    def _restart(self, shot: Shot) -> None:
        self._traffic.expect_losses()
        known = resources.processes(self._server.pid)
        self._server.stop()
        if left := resources.left_of(known, 10):
            self._blame(shot, Violation(Wrong.LEFTOVER, f"the server was stopped, and {left} are left", shot.number))
        with self._traffic.quiet():
            self._check_life(shot)
            self._server = self._start_server()
            self._traffic.moved_to(self._server)
            self._proxy.upstream = self._server.port

    def _count_buckets(self) -> int:
        tensors = read_tensors(self.directories["A"])
        return len(RawUpdate(self._server, tensors, version="none", bucket_bytes=BUCKET_BYTES).manifest.buckets)

    # Shots

    def _carry_out(self, shot: Shot) -> None:
        before = self._server.status()
        target = "B" if letter(before["weight_version"]) == "A" else "A"
        self.log.note("shot", **shot.as_json(), serving=before["weight_version"], state=before["state"])
        scene = Scene(
            self._server,
            self._proxy,
            self._traffic,
            self.log,
            shot,
            before,
            self._topology.keeps,
            self.folder,
            f"{target}-{shot.number}",
            self.directories[target],
            self._buckets,
            repair=lambda: self._push(shot, "push", "A"),
        )
        end, repaired = "hung", False
        try:
            outcome = inject.play(scene)
            end = self._judge(scene, before, outcome)
            seconds = time.monotonic() - scene.struck_at
            if end == "restarted":
                self._restart(shot)
            elif end == "failed" and shot.repair != "none":
                repaired = self._repair(shot)
            self._look_around(shot)
        except (TimeoutError, psutil.Error, OSError) as error:
            seconds = time.monotonic() - scene.struck_at
            tail = self._server.tail(20)
            self._blame(shot, Violation(Wrong.HANG, f"{type(error).__name__}: {error}; server: {tail}", shot.number))
            self._restart(shot)
        for violation in scene.wrong:
            self._blame(shot, violation)
        self.report.add(shot, end=end, struck=scene.struck, repaired=repaired, seconds=seconds)
        self.log.note("end", end=end, repaired=repaired, seconds=round(seconds, 2))

    def _judge(self, scene: Scene, before: Mapping[str, Any], outcome: Outcome | None) -> str:
        """Check outcome and state; return what became of the push."""
        self._known |= scene.committed
        if scene.killed:
            scene.wrong += check_outcome(scene.shot, outcome, None, scene.version, struck=True)
            if outcome is not None and outcome.ok:
                self._known.add(scene.version)
            return "restarted"
        status = scene.at_rest or scene.rest()
        self._learn(status)
        scene.wrong += check_state(scene.shot, before, status, scene.version, struck=scene.struck, keeps=scene.keeps)
        scene.wrong += check_outcome(scene.shot, outcome, status, scene.version, struck=scene.struck)
        if status["weight_version"] == scene.version:
            return "committed"
        return "kept" if status["state"] == "serving" else "failed"

    def _repair(self, shot: Shot) -> bool:
        """A failed server takes the next complete push, reload or, where it keeps copies, rollback."""
        deed = "push" if shot.repair == "rollback" and not self._topology.keeps else shot.repair
        if self._push(shot, deed, "AB"[shot.pick % 2]):
            return True
        self._blame(shot, Violation(Wrong.REPAIR, f"the next complete {deed} did not go through", shot.number))
        self._restart(shot)
        return False

    def _push(self, shot: Shot, deed: str, target: str) -> bool:
        """Push, reload or roll back without a fault. A worker may be busy with the last copy of before for a moment."""
        deadline = time.monotonic() + _BUSY_S
        while True:
            self._pushes += 1
            version = f"{target}-r{self._pushes}"
            job = Job(self._server.url, self.directories[target], version, TOKEN, shot.transport, deed)
            trainer = Trainer(job)
            try:
                outcome = trainer.result(TRAINER_S)
            finally:
                trainer.close()
            self.log.note(deed, version=version, outcome=outcome)
            if outcome is not None and outcome.ok:
                self._known.add(version)
                return True
            if outcome is None or outcome.code != "update_in_progress" or time.monotonic() > deadline:
                return False
            time.sleep(0.2)

    # Checks

    def _learn(self, status: Mapping[str, Any]) -> None:
        self._known |= {status["weight_version"], status["previous_version"] or status["weight_version"]}

    def _look_around(self, shot: Shot) -> None:
        """Check what clients were told, that the server answers, and what it holds."""
        with self._traffic.quiet():
            status = self._server.status()
            self._learn(status)
            self._check_answers(shot)
            if status["state"] == "serving":
                text = self._server.answer(PROMPTS[0], max_tokens=MAX_TOKENS)
                if text != self.pure[letter(status["weight_version"])][PROMPTS[0]]:
                    found = f"{status['weight_version']} answers {text!r} at rest"
                    self._blame(shot, Violation(Wrong.MIXED, found, shot.number))
                self._check_memory(shot, status)
            sample = resources.settled_usage(self._server.pid)
        self._samples.append(sample)
        self.log.note("usage", **vars(sample))

    def _check_memory(self, shot: Shot, status: Mapping[str, Any]) -> None:
        with self._server.client() as client:
            verified = client.post("/reload/verify", json={}).raise_for_status().json()
        version, fingerprint = status["weight_version"], status["fingerprint"]
        for violation in check_memory(version, fingerprint, verified, self._fingerprints, shot.number):
            self._blame(shot, violation)

    def _check_answers(self, shot: Shot) -> None:
        answers, troubles = self._traffic.take()
        for answer in answers:
            if violation := check_answer(answer, self.pure, self._known, shot.number):
                self._blame(shot, violation)
        for trouble in troubles:
            self._blame(shot, Violation(Wrong.REQUEST, trouble, shot.number))

    def _check_life(self, shot: Shot) -> None:
        """Look for leaks over the life of a server, at its end."""
        self._check_answers(shot)
        for violation in check_flat(self._samples, shot.number):
            self._blame(shot, violation)

    def _blame(self, shot: Shot, violation: Violation) -> None:
        self.log.note("VIOLATION", kind=violation.kind.value, text=violation.text)
        self.report.findings.append(Finding(violation, shot.fault, self.log.recent()))


@contextlib.contextmanager
def event_log(file: Path | None) -> Iterator[EventLog]:
    """Lend an event log."""
    log = EventLog(file)
    try:
        yield log
    finally:
        log.close()
