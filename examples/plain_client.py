"""Push a safetensors checkpoint into a server on this host with sockets and httpx alone.

It uses neither weightpush nor torch: what it does stands in docs/protocol.md, and is all that another client needs.

    python examples/plain_client.py CHECKPOINT http://127.0.0.1:8000 --version v2                  # over shared memory
    python examples/plain_client.py CHECKPOINT http://127.0.0.1:8000 --version v2 --transport http

The control token comes from WEIGHTPUSH_CONTROL_TOKEN. Beside httpx it needs xxhash, for the digests.
"""

from __future__ import annotations

import argparse
import fcntl
import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import xxhash

PROTOCOL = "1.1"
BUCKET_BYTES = 16 * 2**20
CHUNK_BYTES = 128 * 2**10
WAIT_S = 60.0
#: What safetensors calls a dtype, what the manifest calls it, bytes of an element.
DTYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its name, what safetensors says of it, and its bytes, which are read when they are needed."""

    name: str
    entry: dict[str, Any]
    data: memoryview

    @property
    def spec(self) -> dict[str, Any]:
        """How a manifest describes it."""
        return {"name": self.name, "dtype": DTYPES[self.entry["dtype"]][0], "shape": self.entry["shape"]}

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.entry["dtype"]][1]


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files in ``folder`` by name."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (header_bytes,) = struct.unpack_from("<Q", whole)
        header = json.loads(bytes(whole[8 : 8 + header_bytes]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
            found[name] = Tensor(name, entry, whole[start:end])
    return found


def digest(data: memoryview) -> str:
    """XXH3-64, of large tensors that of the hashes of their chunks, seeded with the size."""
    if len(data) <= CHUNK_BYTES:
        return xxhash.xxh3_64_hexdigest(data)
    chunks = (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))
    return xxhash.xxh3_64_hexdigest(b"".join(map(xxhash.xxh3_64_digest, chunks)), seed=len(data))


def cut(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return the manifest's buckets: runs of tensors, in each of them wider dtypes first and without holes."""
    runs: list[list[int]] = []
    filled = 0
    for index, tensor in enumerate(tensors):
        if not runs or filled + len(tensor.data) > BUCKET_BYTES:
            runs.append([])
            filled = 0
        runs[-1].append(index)
        filled += len(tensor.data)
    buckets = []
    for run in runs:
        ordered = sorted(run, key=lambda index: -tensors[index].itemsize)
        offsets, end = [], 0
        for index in ordered:
            offsets.append(end)
            end += len(tensors[index].data)
        buckets.append({"tensors": ordered, "offsets": offsets, "nbytes": end})
    return buckets


class Server:
    """The HTTP calls of one update."""

    def __init__(self, url: str, token: str | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=f"{url.rstrip('/')}/reload", headers=headers, timeout=600, trust_env=False)
        self.update_id = uuid.uuid4().hex

    def get(self, route: str) -> Any:
        """Ask for ``route``; the status answers 503 while nothing is served."""
        answer = self._http.get(route)
        return self._read(answer) if answer.status_code != 503 else answer.json()

    def call(self, route: str, **fields: Any) -> Any:
        """Make one call of the update."""
        return self._read(self._http.post(route, json={"update_id": self.update_id, **fields}))

    def send_body(self, bucket: int, body: Iterator[bytes]) -> Any:
        """Send bucket number ``bucket`` as a request body."""
        return self._read(
            self._http.post("/stream", params={"update_id": self.update_id, "bucket": bucket}, content=body)
        )

    @staticmethod
    def _read(answer: httpx.Response) -> Any:
        if answer.is_error:
            error = answer.json().get("error", {})
            sys.exit(f"refused: {error.get('message', answer.text)} [{error.get('code', answer.status_code)}]")
        return answer.json()


class SharedMemory:
    """Two buffers that the workers map, and the socket over which they are told what lies there."""

    def __init__(self, workers: int, buffer_bytes: int) -> None:
        self.workers = workers
        self.buffer_bytes = -(-buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.name, self.key = f"weightpush-{secrets.token_hex(16)}", secrets.token_hex(32)
        self.file = os.memfd_create("buckets", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.file, 0o600)
        os.ftruncate(self.file, 2 * self.buffer_bytes)
        self.memory = mmap.mmap(self.file, 2 * self.buffer_bytes)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0{self.name}")
        self.listener.listen()
        self.listener.settimeout(WAIT_S)
        self.links: list[socket.socket] = []

    @property
    def config(self) -> dict[str, Any]:
        """The ``transport`` of ``begin``."""
        return {
            "name": "shm",
            "socket": self.name,
            "key": self.key,
            "buffers": 2,
            "buffer_bytes": self.buffer_bytes,
            "world_size": 1 + self.workers,
        }

    def meet(self) -> None:
        """Let every worker in; call it while ``begin`` is pending."""
        while len(self.links) < self.workers:
            link, _ = self.listener.accept()
            link.settimeout(WAIT_S)
            hello = link.recv(4096)
            # "H", the worker's rank, and the key.
            if hello[:1] == b"H" and hmac.compare_digest(hello[5:], self.key.encode()):
                socket.send_fds(link, [b"M"], [self.file])
                self.links.append(link)
        for link in self.links:
            self._hear(link, b"J")
        for link in self.links:
            link.send(b"G")

    def send(self, number: int, tensors: Sequence[Tensor], bucket: dict[str, Any]) -> None:
        """Write a frame into the buffer of bucket ``number``, and tell the workers."""
        if number >= 2:
            for link in self.links:
                self._hear(link, b"D" + struct.pack("<I", number - 2))
        start = number % 2 * self.buffer_bytes
        for index, offset in zip(bucket["tensors"], bucket["offsets"], strict=True):
            data = tensors[index].data
            self.memory[start + offset : start + offset + len(data)] = data
        digests = b"".join(bytes.fromhex(digest(tensors[index].data)) for index in bucket["tensors"])
        behind = start + -(-bucket["nbytes"] // 8) * 8
        self.memory[behind : behind + len(digests)] = digests
        for link in self.links:
            link.send(b"B" + struct.pack("<IIQ", number, number % 2, behind + len(digests) - start))

    @staticmethod
    def _hear(link: socket.socket, expected: bytes) -> None:
        message = link.recv(4096)
        if message != expected:
            # "E", a code and the reason; nothing at all: its process is gone.
            sys.exit(f"a worker gave up: {message[1:].replace(bytes(1), b': ').decode(errors='replace')}")


def push_over_shared_memory(server: Server, tensors: Sequence[Tensor], begin: dict[str, Any], workers: int) -> None:
    """Let the workers read from memory that they share with this process."""
    buckets = begin["manifest"]["buckets"]
    memory = SharedMemory(workers, max(bucket["nbytes"] + 8 + 8 * len(bucket["tensors"]) for bucket in buckets))
    meeting = threading.Thread(target=memory.meet, daemon=True)
    meeting.start()
    server.call("/begin", transport=memory.config, **begin)
    meeting.join()
    server.call("/stream", bucket=0, count=len(buckets))
    for number, bucket in enumerate(buckets):
        memory.send(number, tensors, bucket)


def push_over_http(server: Server, tensors: Sequence[Tensor], begin: dict[str, Any]) -> None:
    """Send each bucket as a request body, which is a safetensors file."""
    server.call("/begin", transport={"name": "http"}, **begin)
    for number, bucket in enumerate(begin["manifest"]["buckets"]):
        chosen = [tensors[index] for index in bucket["tensors"]]
        header: dict[str, Any] = {"__metadata__": {"bucket": str(number)}}
        for tensor, offset in zip(chosen, bucket["offsets"], strict=True):
            header["__metadata__"][f"digest:{tensor.name}"] = digest(tensor.data)
            header[tensor.name] = {**tensor.entry, "data_offsets": [offset, offset + len(tensor.data)]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        server.send_body(number, iter([struct.pack("<Q", len(text)) + text, *(bytes(t.data) for t in chosen)]))


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(description="Push a checkpoint with sockets and httpx alone.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("url")
    parser.add_argument("--version", required=True)
    parser.add_argument("--transport", choices=["shm", "http"], default="shm")
    given = parser.parse_args()

    server = Server(given.url, os.environ.get("WEIGHTPUSH_CONTROL_TOKEN"))
    status = server.get("/status")
    held = read_checkpoint(given.checkpoint)
    expected = server.get("/manifest")["tensors"]
    if missing := [tensor["name"] for tensor in expected if tensor["name"] not in held]:
        sys.exit(f"{given.checkpoint} lacks {missing[0]} ({len(missing)} of {len(expected)} missing)")
    tensors = [held[tensor["name"]] for tensor in expected]
    manifest = {"tensors": [tensor.spec for tensor in tensors], "buckets": cut(tensors)}
    begin = {"weight_version": given.version, "protocol": PROTOCOL, "manifest": manifest}
    try:
        if given.transport == "shm":
            push_over_shared_memory(server, tensors, begin, len(status["workers"]))
        else:
            push_over_http(server, tensors, begin)
        done = server.call("/finish")
    except BaseException as error:
        with suppress(SystemExit, httpx.HTTPError):  # It has ended already, or is gone: why it failed tells more.
            server.call("/abort", reason=f"the trainer gave up: {type(error).__name__}")
        raise
    print(f"{done['weight_version']}: {done['tensors']} tensors, {done['bytes']} bytes, {done['seconds']:.2f} s")


if __name__ == "__main__":
    main()
