"""A trainer in a process of its own, as far as it concerns the data plane: gather, digest, announce, send.

``python -m matrix.trainer TRANSPORT WORKERS``. It reads a checkpoint directory from each line of its input and pushes
that checkpoint; what it writes, one JSON object a line, are the calls that a trainer makes over HTTP: ``begin``, then
an announcement for each bucket, then ``end``. Each of these is answered with an empty line: the workers expect the
bucket, or have landed all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from weightpush_client.align import Outgoing
from weightpush_client.sources import open_source
from weightpush_client.stream import BucketStream, Buffers
from weightpush_protocol.digest_text import texts
from weightpush_protocol.manifest import build_manifest
from weightpush_protocol.messages import BeginRequest
from weightpush_protocol.transports.base import LendingSender, Sender
from weightpush_protocol.transports.collective import CollectiveSender
from weightpush_protocol.transports.frames import frame_bytes, largest_frame, write_digests
from weightpush_protocol.transports.shm_sender import ShmSender

_BUCKET_BYTES: Final = 40_000
_WAIT_S: Final = 60.0

T = TypeVar("T")


class TrainerProcess:
    """Starts the process, and carries its calls to the workers. A context manager."""

    def __init__(self, transport: str, workers: int) -> None:
        command = [sys.executable, "-m", "matrix.trainer", transport, str(workers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def push(
        self,
        directory: Path,
        *,
        begin: Callable[[str], object],
        announce: Callable[[int, dict[str, str]], object],
        end: Callable[[], T],
    ) -> T:
        """Push the checkpoint in ``directory``; return what ``end`` does, which waits until all has landed.

        Raises:
            RuntimeError: it ended before.
        """
        self._say(str(directory))
        for message in self._messages():
            if "begin" in message:
                begin(message["begin"])
            elif "bucket" in message:
                announce(message["bucket"], message["digests"])
                self._say("")
            else:
                result = end()
                self._say("")
                return result
        raise RuntimeError(f"the trainer's process ended with code {self._process.wait()}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)


# The process


def _tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _push(directory: str, transport: str, workers: int, buffers: Buffers) -> None:
    source = open_source(Path(directory))
    outgoing = [Outgoing(held=spec, sent=spec) for spec in source.specs()]
    manifest = build_manifest((item.sent for item in outgoing), _BUCKET_BYTES)
    sender: Sender
    if transport == "shm":
        sender = ShmSender(buffers.share(2, largest_frame(manifest.buckets)), world_size=1 + workers)
    else:
        sender = CollectiveSender("gloo", host="127.0.0.1", world_size=1 + workers)

    frames: dict[int, torch.Tensor] = {}

    def lend(number: int) -> torch.Tensor:
        assert isinstance(sender, LendingSender)
        bucket = manifest.buckets[number]
        frames[number] = sender.lend(frame_bytes(bucket.nbytes, len(bucket.tensors)), _WAIT_S)
        return frames[number][: bucket.nbytes]

    def deliver(number: int, buffer: torch.Tensor, digests: bytes) -> None:
        frame = frames.pop(number, None)
        named = dict(zip(manifest.table(number).names, texts(digests), strict=True)) if frame is None else {}
        _tell(bucket=number, digests=named)
        sys.stdin.readline()
        if frame is not None:
            write_digests(frame, buffer.numel(), digests)
        sender.send(number, buffer if frame is None else frame, _WAIT_S)

    begin = BeginRequest(weight_version=directory, manifest=manifest, transport=sender.config)
    _tell(begin=begin.model_dump_json())
    try:
        sender.open(_WAIT_S)
        BucketStream(
            source,
            outgoing,
            manifest,
            deliver=deliver,
            interrupt=sender.abort,
            delivered=lambda _: None,
            digest=begin.digest,
            device=torch.device("cpu"),
            buffers=buffers,
            lend=lend if isinstance(sender, LendingSender) else None,
        ).run()
        _tell(end=True)
        sys.stdin.readline()
    finally:
        sender.close()


def main() -> None:
    """Push what is asked for until there is no more input."""
    transport, workers = sys.argv[1], int(sys.argv[2])
    buffers = Buffers()
    for line in sys.stdin:
        _push(line.strip(), transport, workers, buffers)


if __name__ == "__main__":
    main()
