"""What breaks first: limits of the protocol and of machines, in the order in which they matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.scale.constants import Constants
from benchmarks.scale.model import BUILT, Job, Prediction, Transport
from weightpush_protocol.manifest import MAX_TENSORS
from weightpush_protocol.messages import Deadlines

#: A message of the rendezvous's store (``transports/keyed_store.py``).
_FRAME_BYTES: Final = 16 * 2**20
#: Slower pushes, longer pauses, and worse chances than these are worth a name.
SLOW_S: Final = 60.0
LONG_PAUSE_S: Final = 1.0
POOR_CHANCE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit that a job exceeds: ``stops`` it, or makes it slow."""

    name: str
    detail: str
    stops: bool


def limits(prediction: Prediction, constants: Constants) -> list[Limit]:
    """Return the limits that are exceeded; what stops the push comes first, then what takes most of it."""
    job = prediction.job
    found = _stops(prediction, constants) if job.transport in BUILT else []
    if prediction.push > SLOW_S:
        name, seconds = max(prediction.parts().items(), key=lambda part: part[1])
        found.append(Limit(name, f"{seconds:.3g} of {prediction.push:.3g} s", stops=False))
    if prediction.staged_pause > LONG_PAUSE_S:
        found.append(Limit("post-load pause", f"{prediction.staged_pause:.2g} s, staged", stops=False))
    if prediction.failure > POOR_CHANCE:
        found.append(Limit("failing GPUs", f"{prediction.failure:.1%} of pushes begin again", stops=False))
    return found


def _stops(prediction: Prediction, constants: Constants) -> list[Limit]:
    job, deadlines = prediction.job, Deadlines()
    found = []

    def stop(name: str, detail: str) -> None:
        found.append(Limit(name, detail, stops=True))

    if job.workers > job.site.gpus:
        stop("one machine", f"an engine of {job.workers} GPUs lies on several: refused at start")
    if job.model.tensors > MAX_TENSORS:
        stop("manifest", f"{job.model.tensors} tensors, {MAX_TENSORS} are taken")
    if job.transport is Transport.GLOO:
        frame = constants.gloo_bytes_per_pair * job.all_workers**2
        if frame > _FRAME_BYTES:
            stop("rendezvous message", f"{frame / 2**20:.3g} MiB, 16 are taken")
    if prediction.rendezvous > deadlines.rendezvous_s:
        stop("rendezvous", f"{prediction.rendezvous:.3g} s, rendezvous_s is {deadlines.rendezvous_s:g}")
    bucket = bucket_s(prediction)
    if bucket > deadlines.bucket_s:
        stop("bucket", f"{bucket:.3g} s each, bucket_s is {deadlines.bucket_s:g}")
    return found


def bucket_s(prediction: Prediction) -> float:
    """Return how long one bucket takes to all servers."""
    job = prediction.job
    return prediction.announcements / job.buckets + job.model.nbytes / job.buckets / prediction.stages.travel


def staged_fits(job: Job) -> bool:
    """Return whether the host memory of one machine holds the copy of a staged update."""
    return job.model.nbytes <= job.site.host_bytes
