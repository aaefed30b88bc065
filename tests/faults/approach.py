"""Brings a push and its fault together: what is set up before, and waiting for the point where the fault strikes."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from faults.plan import CORRUPTIONS, SET_UP, Fault, Point
from faults.scene import TRAINER_S, Scene
from faults.trainers import LONG, SHORT, Job, Trainer

_HOLD_MS: Final = 400
_PATHS: Final = ("/reload/status", "/reload/manifest", "/reload/begin", "/reload/stream", "/reload/finish")
#: Faults after which a deadline, the lease above all, has to end the update.
_ENDED_BY_DEADLINES: Final = frozenset(
    {
        *(Fault.KILL_TRAINER, Fault.STOP_TRAINER, Fault.STOP_SERVER),
        *(Fault.CUT_CONTROL, Fault.DELAY_CONTROL, Fault.DROP_RESPONSE),
    }
)


def prepare(scene: Scene) -> Job:
    """Set up what has to be there before the push, and return the job of its trainer."""
    shot = scene.shot
    job = Job(
        scene.proxy.url,
        scene.directory,
        scene.version,
        scene.server.token,
        transport=shot.transport,
        mode=shot.mode,
        in_flight=shot.in_flight,
        bucket=int(shot.where * scene.buckets),
        deadlines=SHORT if shot.fault in _ENDED_BY_DEADLINES else LONG,
        corruption=shot.fault if shot.fault in CORRUPTIONS else None,
    )
    match shot.fault:
        case Fault.LANDING_ERROR:
            scene.server.set_faults(land_bucket=job.bucket, error="injected into landing")
        case Fault.PWAL_ERROR:  # Once: a staged push can be undone.
            key = ("close", "close_once")[shot.pick % 2]
            scene.server.set_faults(**{key: "injected into post-load processing"})
        case Fault.STAGING_FULL:
            scene.server.set_faults(staging_budget=shot.pick % 1000)
        case Fault.DISK_TRUNCATED:
            return replace(job, deed="disk", directory=_truncated(scene))
        case Fault.SLOW_LANDING:
            scene.server.set_faults(slow_land_ms=50 + shot.pick % 250)
        case Fault.WRONG_TOKEN:
            return replace(job, token="x" + (scene.server.token or ""))
        case Fault.DROP_RESPONSE:
            scene.proxy.drop_response(_PATHS[shot.pick % len(_PATHS)])
    if shot.fault not in SET_UP:
        if shot.point is Point.START:
            return replace(job, pause_at="check")
        if shot.point is Point.BUCKET:
            return replace(job, pause_at=f"stream:{int(shot.where * (scene.buckets + 1))}")
        scene.server.set_faults(hold={shot.point.value: _HOLD_MS})
    return job


def _truncated(scene: Scene) -> Path:
    """Make a copy of the checkpoint whose file ends too early."""
    directory = scene.folder / f"truncated-{scene.shot.number}"
    shutil.copytree(scene.directory, directory)
    file = directory / "model.safetensors"
    os.truncate(file, scene.shot.pick % file.stat().st_size)
    return directory


def reach(scene: Scene, trainer: Trainer) -> bool:
    """Wait until the trainer, or the server with its push, is where the fault strikes; ``False``: it ended before."""
    if trainer.job.pause_at is not None:
        return trainer.wait_paused(TRAINER_S)
    deadline = time.monotonic() + TRAINER_S
    with scene.server.client(timeout_s=10) as client:
        while not trainer.ended:
            update = client.get("/reload/status").json()["update"]
            if update is not None and update["weight_version"] == scene.version:
                if update["phase"] == scene.shot.point.value:
                    return True
                if _is_past(update["phase"], scene.shot.point, update["mode"]):
                    return True  # It was too short to be seen; strike here.
            if time.monotonic() > deadline:
                raise TimeoutError(f"the push did not get to {scene.shot.point.value}")
    return False


#: Phases of an update in their order.
_ORDER: Final = {
    "direct": ("checking", "rendezvous", "draining", "opening", "receiving", "landing", "closing"),
    "staged": ("checking", "rendezvous", "receiving", "draining", "opening", "landing", "closing"),
}
_TAIL: Final = ("resetting_caches", "publishing")


def _is_past(phase: str, point: Point, mode: str) -> bool:
    """Whether an update that is in ``phase`` has left ``point`` behind."""
    order = (*_ORDER[mode], *_TAIL)
    return order.index(phase) > order.index(point.value)
