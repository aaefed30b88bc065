"""Measure on this machine what the model takes as measured: control calls, rendezvous, copies, digests, Gloo.

``python -m benchmarks.scale.measure`` prints the constants; ``--write`` puts them into ``constants.json``. All on
loopback and on one thread: it speaks for this code on a CPU like this one, not for GPUs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from benchmarks.scale.constants import PATH
from weightpush_client.access import ControlToken, Tls
from weightpush_client.fleet import Fleet
from weightpush_client.http import ServerApi
from weightpush_client.loop import LoopThread
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.manifest import TensorSpec
from weightpush_protocol.messages import ManifestAnswer, StreamAnswer, StreamRequest
from weightpush_protocol.transports import keyed_store
from weightpush_protocol.transports.base import TransportConfig
from weightpush_protocol.transports.collective import CollectiveReceiver, CollectiveSender

_MIB: Final = 2**20
_ROUNDS: Final = 5
_BODY_BYTES: Final = 64 * _MIB
_TENSORS: Final = 20_000
_GROUPS: Final = (2, 4, 8, 16, 24)
_FORK: Final = multiprocessing.get_context("fork")


def best(work: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Return the seconds of the fastest of several runs, after one that does not count: others use this machine too."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


# bytes


def memory_rates() -> dict[str, float]:
    """Return bytes a second of a copy, of a digest, on one thread."""
    source = torch.randint(0, 256, (256 * _MIB,), dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "cpu_copy_bps": source.numel() / best(lambda: target.copy_(source)),
        "cpu_digest_bps": source.numel() / best(lambda: tensor_digest(source)),
    }


def _receive(config: TransportConfig, rank: int, buckets: int, nbytes: int) -> None:
    receiver = CollectiveReceiver(config, rank=rank)
    receiver.open(60.0)
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    for number in range(buckets):
        receiver.receive(number, buffer, 60.0)
    receiver.close()


def _workers(count: int, work: Callable[[int], None]) -> list[Any]:
    processes = [_FORK.Process(target=work, args=(rank,), daemon=True) for rank in range(1, count + 1)]
    for process in processes:
        process.start()
    return processes


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(60.0)
        if process.exitcode != 0:
            process.kill()
            raise RuntimeError(f"a worker of the measurement ended with {process.exitcode}")


def gloo_rate() -> float:
    """Return bytes a second of a Gloo broadcast to one worker on this machine."""
    buffer = torch.ones(_BODY_BYTES, dtype=torch.uint8)
    buckets = _ROUNDS + 1
    sender = CollectiveSender("gloo", host="127.0.0.1", world_size=2)
    processes = _workers(1, partial(_receive_one, sender.config, buckets))
    sender.open(60.0)
    times = []
    for number in range(buckets):
        start = time.perf_counter()
        sender.send(number, buffer, 60.0)
        times.append(time.perf_counter() - start)
    _end(processes)
    sender.close()
    return buffer.numel() / min(times[1:])


def _receive_one(config: TransportConfig, buckets: int, rank: int) -> None:
    _receive(config, rank, buckets, _BODY_BYTES)


def _join(config: TransportConfig, rank: int) -> None:
    _receive(config, rank, 0, 0)


# rendezvous


def rendezvous(workers: int) -> dict[str, float]:
    """Form a Gloo group with ``workers`` processes; return seconds, requests of the store, bytes of its frames."""
    counted = {"requests": 0, "bytes": 0, "largest": 0}
    lock = threading.Lock()
    answer, send = keyed_store._answer, keyed_store._send_frame

    def count_request(entries: Any, request: dict[str, Any]) -> dict[str, Any]:
        with lock:
            counted["requests"] += 1
        return answer(entries, request)

    def count_frame(connection: socket.socket, content: dict[str, Any]) -> None:
        size = len(json.dumps(content))
        with lock:
            counted["bytes"] += size
            counted["largest"] = max(counted["largest"], size)
        send(connection, content)

    sender = CollectiveSender("gloo", host="127.0.0.1", world_size=1 + workers)
    # Forked before the store has served anybody; they count nothing.
    processes = _workers(workers, partial(_join, sender.config))
    keyed_store._answer, keyed_store._send_frame = count_request, count_frame
    try:
        start = time.perf_counter()
        sender.open(120.0)
        seconds = time.perf_counter() - start
    finally:
        keyed_store._answer, keyed_store._send_frame = answer, send
        sender.close()
    _end(processes)
    return {"seconds": seconds, **counted}


# control calls


def _serve(ready: Connection, answer: bytes) -> None:
    """Answer every request on all loopback addresses of one port, from one process, until killed."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
    length = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

    def one(connection: socket.socket) -> None:
        data = b""
        while part := connection.recv(_MIB):
            data += part
            while b"\r\n\r\n" in data:
                header, _, body = data.partition(b"\r\n\r\n")
                found = length.search(header)
                left = int(found[1]) - len(body) if found else 0
                data = body[int(found[1]) :] if found and left <= 0 else b""
                while left > 0:
                    left -= len(connection.recv(min(left, _MIB)))
                connection.sendall(head + answer)

    listener = socket.create_server(("0.0.0.0", 0), backlog=1024)
    ready.send(listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=one, args=(connection,), daemon=True).start()


def control_costs(servers: int = 128) -> dict[str, float]:
    """Return processor seconds that the trainer's process spends on one announcement, and bytes a second of bodies."""
    progress = dict.fromkeys(("bucket", "tensors_done", "tensors_total", "bytes_done", "bytes_total"), 1)
    answer = StreamAnswer.model_validate({"update_id": "0" * 32, **progress}).model_dump_json().encode()
    parent, child = _FORK.Pipe()
    process = _FORK.Process(target=_serve, args=(child, answer), daemon=True)
    process.start()
    port = parent.recv()
    loop = LoopThread()
    apis = [
        ServerApi(f"http://127.0.{index // 250}.{1 + index % 250}:{port}", token=ControlToken(None), verify=Tls())
        for index in range(servers)
    ]
    fleet = Fleet(apis, loop)
    request = StreamRequest(update_id="0" * 32, epoch=1, bucket=0, call_id="1" * 32, digests={})
    try:
        rounds, used = 5, []
        for _ in range(rounds + 1):
            start = _own_seconds()
            fleet.call(lambda _, server: server.announce(request, 30.0))
            used.append((_own_seconds() - start) / servers)
        one = Fleet(apis[:1], loop)
        body = memoryview(bytes(_BODY_BYTES))

        def send() -> None:
            one.call(
                lambda _, server: server.send_body(update_id="0" * 32, epoch=1, bucket=0, parts=(body,), timeout_s=60.0)
            )

        rate = len(body) / best(send, 3)
    finally:
        fleet.call_to_the_end(lambda _, server: server.close())
        loop.stop()
        process.kill()
        process.join()
    return {"control_call_s": min(used[1:]), "http_body_bps": rate}


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def manifest_costs() -> dict[str, float]:
    """Return seconds a tensor of parsing a server's manifest, and of writing a digest into an announcement."""
    specs = [
        TensorSpec(
            name=f"model.layers.{index // 400}.mlp.experts.{index % 400}.up_proj.weight",
            dtype="bfloat16",
            shape=(64, 64),
        )
        for index in range(_TENSORS)
    ]
    text = ManifestAnswer(tensors=specs).model_dump_json().encode()
    digests = {spec.name: "0" * 16 for spec in specs}
    stream = StreamRequest(update_id="0" * 32, epoch=1, bucket=0, digests=digests)
    return {
        "manifest_parse_s": best(lambda: ManifestAnswer.model_validate_json(text), 3) / _TENSORS,
        "digests_write_s": best(stream.model_dump_json, 3) / _TENSORS,
    }


def measure() -> dict[str, float]:
    """Measure everything; returns the constants by name."""
    torch.set_num_threads(1)
    values = manifest_costs() | control_costs() | memory_rates()
    values["gloo_bps"] = gloo_rate()
    runs = {workers: rendezvous(workers) for workers in _GROUPS}
    for workers, run in runs.items():
        print(f"rendezvous of {workers} workers: " + ", ".join(f"{name} {value:.4g}" for name, value in run.items()))
    # All pairs of processes connect: requests are a sum of a linear and a quadratic part.
    few, many = _GROUPS[-3], _GROUPS[-1]
    each = {size: runs[size]["requests"] / size for size in (few, many)}
    values["gloo_requests_per_pair"] = (each[many] - each[few]) / (many - few)
    values["store_requests_per_worker"] = each[few] - few * values["gloo_requests_per_pair"]
    # The workers share this machine's cores with the store, so it is at most that.
    values["store_request_s"] = min(run["seconds"] / run["requests"] for run in (rendezvous(many) for _ in range(3)))
    values["gloo_bytes_per_pair"] = runs[many]["largest"] / many**2
    return values


def processor() -> str:
    """Return the name of this machine's processor."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the constants into constants.json")
    arguments = parser.parse_args()
    values = measure()
    where = (
        f"benchmarks/scale/measure.py on one core of {processor()} ({os.cpu_count()} cores), torch {torch.__version__}"
    )
    for name, value in values.items():
        print(f"{name:28} {value:.4g}")
    if arguments.write:
        content = json.loads(PATH.read_text(encoding="utf-8"))
        for name, value in values.items():
            content[name] = content.get(name, {}) | {
                "value": float(f"{value:.3g}"),
                "kind": "measured",
                "source": where,
            }
        PATH.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
