"""A trainer process that tests kill: ``python -m support.trainer URL DIR VERSION TRANSPORT PAUSE_AT``.

It pushes a checkpoint in small buckets. Where the progress says ``PAUSE_AT`` (``stream:0`` is after ``begin``,
``stream:2`` between buckets, ``finish`` before ``finish``; ``none`` is never) it prints ``paused`` and sleeps for ever.
The lease of the update is ``LEASE_S`` seconds, its mode ``MODE``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from weightpush_client import PushProgress, WeightPusher
from weightpush_protocol.messages import Deadlines

BUCKET_BYTES = 40_000


def start(
    url: str,
    directory: Path,
    version: str,
    *,
    transport: str,
    pause_at: str,
    token: str | None,
    lease_s: float,
    mode: str = "direct",
) -> subprocess.Popen[str]:
    """Start a trainer process; with ``pause_at`` it has reached that point when this returns."""
    tests = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "LEASE_S": str(lease_s), "MODE": mode, "PYTHONPATH": str(tests)}
    if token is not None:
        environment["WEIGHTPUSH_CONTROL_TOKEN"] = token
    command = [sys.executable, "-m", "support.trainer", url, str(directory), version, transport, pause_at]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if pause_at != "none":
        assert process.stdout is not None
        line = process.stdout.readline()
        if line.strip() != "paused":
            process.kill()
            raise RuntimeError(f"the trainer did not get to {pause_at}: {line}{process.communicate()}")
    return process


def main() -> None:
    """Push, or sleep on the way."""
    url, directory, version, transport, pause_at = sys.argv[1:]

    def pause(progress: PushProgress) -> None:
        if pause_at in (progress.phase.value, f"{progress.phase.value}:{progress.bucket}"):
            print("paused", flush=True)
            time.sleep(3600)

    deadlines = Deadlines(lease_s=float(os.environ["LEASE_S"]), bucket_s=20)
    mode = os.environ["MODE"]
    with WeightPusher(url, transport=transport, mode=mode, bucket_bytes=BUCKET_BYTES, deadlines=deadlines) as pusher:
        print(pusher.push(directory, weight_version=version, progress=pause), flush=True)


if __name__ == "__main__":
    main()
