"""Carries a shot out: starts its trainer, brings both to the point where the fault strikes, and strikes."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import httpx
import psutil

from faults import resources
from faults.approach import prepare, reach
from faults.checks import Outcome, Wrong
from faults.plan import CORRUPTIONS, SERVER_KILLS, Fault, Point
from faults.scene import END_S, TRAINER_S, Scene
from faults.trainers import SHORT, Trainer


def play(scene: Scene) -> Outcome | None:
    """Carry the shot out and return how its trainer ended (None: killed).

    Raises:
        TimeoutError: something hangs; the message says what.
    """
    shot = scene.shot
    job = prepare(scene)
    trainer = Trainer(job)
    scene.log.note("trainer", version=job.version, transport=job.transport, pause_at=job.pause_at)
    try:
        outcome = _HANDLERS.get(shot.fault, _watch)(scene, trainer)
        scene.log.note("outcome", struck=scene.struck, outcome=outcome)
        return outcome
    finally:
        trainer.close()
        scene.proxy.heal()
        scene.server.set_faults()


def _watch(scene: Scene, trainer: Trainer) -> Outcome | None:
    """For faults that were set up before."""
    outcome = trainer.result(TRAINER_S)
    happens_by_itself = scene.shot.fault not in CORRUPTIONS and scene.shot.fault is not Fault.DROP_RESPONSE
    scene.struck = trainer.struck or bool(scene.proxy.struck) or happens_by_itself
    if scene.shot.fault is Fault.STAGING_FULL and not scene.before["serving"]:
        scene.struck = False  # Nothing is served, so a staged push is carried out as a direct one.
    return outcome


def _after(scene: Scene, trainer: Trainer) -> None:
    """Let a while pass, during which the trainer goes on."""
    if scene.shot.after_ms:
        trainer.go()
        time.sleep(scene.shot.after_ms / 1000)


def _kill_trainer(scene: Scene, trainer: Trainer) -> Outcome | None:
    if reach(scene, trainer):
        _after(scene, trainer)
        scene.strike("SIGKILL to the trainer")
        trainer.kill()
    return trainer.result(TRAINER_S)


def _stop_trainer(scene: Scene, trainer: Trainer) -> Outcome | None:
    """It sleeps until its update is lost and another trainer has pushed, and comes back to life."""
    if not reach(scene, trainer):
        return trainer.result(TRAINER_S)
    _after(scene, trainer)
    scene.strike("SIGSTOP to the trainer")
    trainer.stop()
    if scene.shot.point is Point.START and not scene.shot.after_ms:
        time.sleep(SHORT.lease_s / 4)
        trainer.resume()
        trainer.go()
        return trainer.result(TRAINER_S)
    scene.at_rest = scene.rest()
    ended = {scene.version, scene.at_rest["weight_version"]}
    if not scene.repair():
        scene.blame(Wrong.REPAIR, "no push works while a stopped trainer lies there")
    before = scene.server.status()
    trainer.resume()
    trainer.go()
    outcome = trainer.result(TRAINER_S)
    after = scene.rest()
    if (after["state"], after["weight_version"]) != (before["state"], before["weight_version"]) and not (
        outcome is not None and outcome.ok and after["weight_version"] in ended
    ):
        text = f"a late trainer moved the server from {before['state']} {before['weight_version']} to {after['state']}"
        scene.blame(Wrong.STATE, f"{text} {after['weight_version']}")
    return outcome


def _stop_server(scene: Scene, trainer: Trainer) -> Outcome | None:
    if not reach(scene, trainer):
        return trainer.result(TRAINER_S)
    _after(scene, trainer)
    stopped = resources.processes(scene.server.pid)
    scene.strike(f"SIGSTOP to {len(stopped)} processes of the server")
    try:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        trainer.go()
        if scene.shot.pick % 10 == 0:
            return trainer.result(TRAINER_S)  # Until its own deadlines end it.
        time.sleep(0.2 + scene.shot.pick % 3000 / 1000)
    finally:
        for process in reversed(stopped):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        scene.strike("SIGCONT to the server")
    return trainer.result(TRAINER_S)


def _cut_control(scene: Scene, trainer: Trainer) -> Outcome | None:
    if reach(scene, trainer):
        _after(scene, trainer)
        refuse = scene.shot.pick % 2 == 0
        scene.strike(f"control connections reset, {'new ones refused' if refuse else 'new ones welcome'}")
        scene.proxy.cut(refuse=refuse)
        trainer.go()
    return trainer.result(TRAINER_S)


def _delay_control(scene: Scene, trainer: Trainer) -> Outcome | None:
    if reach(scene, trainer):
        seconds = 0.05 + scene.shot.pick % 250 / 1000
        scene.strike(f"control connection delayed by {seconds:.2f} s a chunk")
        scene.proxy.delay(seconds)
        trainer.go()
    return trainer.result(TRAINER_S)


def _running(client: httpx.Client) -> dict[str, Any] | None:
    update: dict[str, Any] | None = client.get("/reload/status").json()["update"]
    return update


def _stale_epoch(scene: Scene, trainer: Trainer) -> Outcome | None:
    if not reach(scene, trainer):
        return trainer.result(TRAINER_S)
    with scene.server.client() as client:
        running = _running(client)
        if running is not None:
            scene.strike("calls of older updates")
            older = {"update_id": running["update_id"], "epoch": running["epoch"] - 1}
            unknown = {"update_id": uuid.uuid4().hex}
            for names in (older, unknown):
                calls = {"stream": {**names, "bucket": 0}, "prepare": names, "finish": names, "abort": names}
                for path, body in calls.items():
                    answer = client.post(f"/reload/{path}", json=body)
                    if answer.status_code != 409 or answer.json()["error"]["code"] != "stale_update":
                        text = f"a stale {path} was answered {answer.status_code} {answer.text[:200]}"
                        scene.blame(Wrong.OUTCOME, text)
    trainer.go()
    return trainer.result(TRAINER_S)


def _second_trainer(scene: Scene, trainer: Trainer) -> Outcome | None:
    if reach(scene, trainer):
        scene.strike("a second trainer")
        job = replace(trainer.job, url=scene.server.url, version=f"{scene.version}-second", pause_at=None)
        second = Trainer(job)
        try:
            outcome = second.result(TRAINER_S)
        finally:
            second.close()
        scene.log.note("second", outcome=outcome)
        if outcome is not None and outcome.ok:  # The first one was through already.
            trainer.result(TRAINER_S)
            scene.committed.add(scene.version)
            scene.version = job.version
            return outcome
        if outcome is None or outcome.code != "update_in_progress":
            scene.blame(Wrong.OUTCOME, f"a second trainer was told {outcome}")
        trainer.go()
    return trainer.result(TRAINER_S)


def _abort(scene: Scene, trainer: Trainer) -> Outcome | None:
    if not reach(scene, trainer):
        return trainer.result(TRAINER_S)
    _after(scene, trainer)
    with scene.server.client() as client:
        running = _running(client)
        if running is not None and running["weight_version"] == scene.version:
            scene.strike(f"abort while {running['phase']}")
            body = {"update_id": running["update_id"], "reason": "campaign"}
            for _ in range(1 + scene.shot.pick % 2):
                answer = client.post("/reload/abort", json=body)
                if answer.status_code not in (200, 409):
                    scene.blame(Wrong.OUTCOME, f"abort was answered {answer.status_code} {answer.text[:200]}")
    trainer.go()
    return trainer.result(TRAINER_S)


def _kill_server(scene: Scene, trainer: Trainer) -> Outcome | None:
    if not reach(scene, trainer):
        return trainer.result(TRAINER_S)
    _after(scene, trainer)
    known = resources.processes(scene.server.pid)
    wanted = scene.shot.fault.value.removeprefix("kill_")
    victim = resources.find(scene.server.pid, wanted)
    scene.traffic.expect_losses()
    scene.strike(f"SIGKILL to the {wanted} {victim.pid}")
    scene.killed = True
    victim.kill()
    trainer.go()
    left = resources.left_of(known, END_S)
    if left:
        names = ", ".join(f"{process.pid} {resources.role(process)}" for process in left)
        scene.blame(Wrong.LEFTOVER, f"{END_S:g} s after its {wanted} was killed, the server still has {names}")
        for process in left:
            process.kill()
    return trainer.result(TRAINER_S)


def _roll_back(scene: Scene, trainer: Trainer) -> Outcome | None:
    """The push goes well, but its weights turn out bad."""
    outcome = trainer.result(TRAINER_S)
    if outcome is None or not outcome.ok:
        return outcome
    scene.committed.add(scene.version)
    scene.strike("rollback")
    second = Trainer(replace(trainer.job, url=scene.server.url, deed="rollback"))
    try:
        told = second.result(TRAINER_S)
    finally:
        second.close()
    scene.log.note("rollback", outcome=told)
    if told is not None and told.ok:
        scene.version = scene.before["weight_version"]
    elif scene.keeps or told is None or told.code != "no_copy":
        scene.blame(Wrong.OUTCOME, f"a rollback was told {told}")
    return outcome


_HANDLERS: Final[dict[Fault, Callable[[Scene, Trainer], Outcome | None]]] = {
    Fault.KILL_TRAINER: _kill_trainer,
    Fault.STOP_TRAINER: _stop_trainer,
    Fault.STOP_SERVER: _stop_server,
    Fault.CUT_CONTROL: _cut_control,
    Fault.DELAY_CONTROL: _delay_control,
    Fault.STALE_EPOCH: _stale_epoch,
    Fault.SECOND_TRAINER: _second_trainer,
    Fault.ABORT: _abort,
    Fault.ROLL_BACK: _roll_back,
    **dict.fromkeys(SERVER_KILLS, _kill_server),
}
