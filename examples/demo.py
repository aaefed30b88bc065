"""The main job, told step by step: ``make demo``.

Serves a tiny random model with vLLM on the CPU, pushes other weights into it from a trainer process, lets a push die
half-way, and repairs it. Every line is something that was just measured or answered, and the command under it shows it:
``python examples/demo.py --keep`` leaves the server up at the end, so that you can try them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import transformers

from tiny_model import CPU_ENVIRONMENT, QWEN3_CONFIG, make_tiny_checkpoint

FOLDER = Path(".demo")
PROMPT = "The answer is "
SERVE_OPTIONS = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", "--dtype", "bfloat16"]
SERVE_OPTIONS += ["--distributed-executor-backend", "uni"]
WEIGHTPUSH = [sys.executable, "-m", "weightpush_client"]

#: A trainer that dies in the middle of its push: what it does at bucket 3 is what a full disk or a preempted node does.
DYING_TRAINER = """
import os, sys
from weightpush_client import WeightPusher
from weightpush_protocol.messages import Deadlines

def die_at_bucket_3(progress):
    if progress.bucket == 3:
        os.kill(os.getpid(), 9)

with WeightPusher(sys.argv[1], transport="http", bucket_bytes=20_000, deadlines=Deadlines(lease_s=3)) as pusher:
    pusher.push(sys.argv[2], weight_version="step-3", progress=die_at_bucket_3)
"""


class DemoError(Exception):
    """The story did not go as it should; the message says where."""


class Story:
    """Numbers the steps and prints them."""

    def __init__(self) -> None:
        self._step = 0
        self._started = time.monotonic()

    def tell(self, text: str, command: str | None = None) -> None:
        """Print one step, and the command that shows it."""
        self._step += 1
        print(f"{self._step:2}. {text}", flush=True)
        if command is not None:
            print(f"      $ {command}", flush=True)

    def end(self) -> None:
        """Print the last line."""
        print(f"\nThe whole story took {time.monotonic() - self._started:.0f} s. Next: README.md, then docs/.")


def expect(condition: bool, what: str) -> None:
    """Stop the story where it is not true."""
    if not condition:
        raise DemoError(what)


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One ``weightpush serve`` process group."""

    def __init__(self, model: Path, name: str) -> None:
        self.model = model
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = FOLDER / f"{name}.log"
        command = [*WEIGHTPUSH, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *SERVE_OPTIONS]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **CPU_ENVIRONMENT},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 180) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            expect(self.process.poll() is None, f"the server ended by itself; see {self.log}")
            with contextlib.suppress(httpx.HTTPError):
                if self.status().status_code == 200:
                    return
            time.sleep(0.25)
        raise DemoError(f"the server was not up after {timeout_s:.0f} s; see {self.log}")

    def stop(self) -> None:
        """End the process group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)

    def status(self) -> httpx.Response:
        """Return the answer of ``GET /reload/status``."""
        return httpx.get(f"{self.url}/reload/status", trust_env=False, timeout=10)

    def generate(self) -> httpx.Response:
        """Ask for twelve greedy tokens."""
        body = {"model": str(self.model), "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, trust_env=False, timeout=60)

    def answer(self) -> tuple[str, str]:
        """Return a greedy answer and the weight version that computed it."""
        response = self.generate()
        response.raise_for_status()
        return response.json()["choices"][0]["text"], response.headers["X-Weight-Version"]


@contextlib.contextmanager
def servers(*described: tuple[Path, str]) -> Iterator[list[Server]]:
    """Start servers side by side and end them whatever happens."""
    started: list[Server] = []
    try:
        started += [Server(model, name) for model, name in described]
        yield started
    finally:
        for server in started:
            server.stop()


def push(server: Server, weights: Path, version: str) -> str:
    """Run ``weightpush push`` as a process of its own and return its last line but one: what it reports."""
    command = [*WEIGHTPUSH, "push", str(weights), "--url", server.url, "--version", version, "--transport", "gloo"]
    pushed = subprocess.run(command, capture_output=True, text=True, check=False)
    expect(pushed.returncode == 0, f"the push failed:\n{pushed.stdout}{pushed.stderr}")
    return next(line for line in pushed.stdout.splitlines() if line.startswith("pushed"))


def wait_for_failure(server: Server) -> dict[str, Any]:
    """Wait until the lease of the dead trainer is over."""
    deadline = time.monotonic() + 30
    while (status := server.status().json())["state"] != "failed":
        expect(time.monotonic() < deadline, f"the server is still {status['state']}")
        time.sleep(0.1)
    return dict(status)


def run(*, keep: bool) -> None:
    """Tell the story; ``keep`` the server at its end until Ctrl-C."""
    story = Story()
    print("weightpush: a trainer pushes fresh weights into a live vLLM server\n")
    shutil.rmtree(FOLDER, ignore_errors=True)
    old, new = FOLDER / "weights-1", FOLDER / "weights-2"
    for seed, directory in enumerate((old, new), start=1):
        make_tiny_checkpoint(directory, config=QWEN3_CONFIG, model_type="qwen3", seed=seed)
    story.tell(f"Made two random checkpoints of one tiny Qwen3: {old} and {new}.")

    print("   (vLLM starts twice now, which takes a minute or two.)", flush=True)
    started = time.monotonic()
    with servers((old, "server"), (new, "server-on-new-weights")) as (server, reference):
        server.wait()
        port = server.url.rpartition(":")[2]
        status_command = f"curl -i localhost:{port}/reload/status"
        body = f'{{"model": "{old}", "prompt": "{PROMPT}", "max_tokens": 12, "temperature": 0, "ignore_eos": true}}'
        generate_command = f"curl -i localhost:{port}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
        story.tell(
            f"Serving {old} after {time.monotonic() - started:.0f} s: HTTP {server.status().status_code}, "
            f"state {server.status().json()['state']}.",
            f"weightpush serve {old} --host 127.0.0.1 --port {port}",
        )
        first, version = server.answer()
        story.tell(f"{PROMPT!r} is answered {first!r}, X-Weight-Version: {version}.", generate_command)
        reference.wait()
        cold, _ = reference.answer()
        cold_fingerprint = reference.status().json()["fingerprint"]
        reference.stop()
        expect(cold != first, "both checkpoints give one answer")
        story.tell(f"A second server, started on {new}, answers {cold!r}. That is what a push must lead to.")

        report = push(server, new, "step-2")
        story.tell(
            f"A trainer process {report.rstrip('.')}.",
            f"weightpush push {new} --url localhost:{port} --version step-2 --transport gloo",
        )
        after, version = server.answer()
        expect((after, version) == (cold, "step-2"), f"after the push: {after!r} of {version}, expected {cold!r}")
        story.tell(f"The same server now answers {after!r}, X-Weight-Version: {version}: the cold start's answer.")
        proof = server.status().json()
        expect(proof["fingerprint"] == cold_fingerprint, "the pushed model differs from the cold start")
        story.tell(
            f"Proof: {proof['last_update']['tensors']} tensors landed and were checked; the fingerprint of the whole "
            f"model, {proof['fingerprint'][:16]}..., is that of the cold start. The gate was closed for "
            f"{proof['last_update']['pause_seconds']:.2f} s.",
            status_command,
        )

        dead = subprocess.run([sys.executable, "-c", DYING_TRAINER, server.url, str(old)], check=False)
        expect(dead.returncode == -signal.SIGKILL, f"the dying trainer ended with {dead.returncode}")
        refused = server.generate()
        during = server.status()
        landed = during.json()["update"] or {"buckets_done": 0, "buckets_total": 0}
        story.tell(
            f"Another trainer is killed in mid-push, {landed['buckets_done']} of {landed['buckets_total']} buckets "
            f"in. Generation answers {refused.status_code}, Retry-After: {refused.headers.get('Retry-After')}.",
            generate_command,
        )
        expect((refused.status_code, during.status_code) == (503, 503), "a half-written model was served")
        failed = wait_for_failure(server)
        story.tell(
            f"Its lease is lost: HTTP {server.status().status_code}, state {failed['state']} "
            f"({failed['last_error']['code']}: {failed['last_error']['message']}).",
            status_command,
        )
        expect(server.generate().status_code == 503, "a half-written model was served")

        push(server, old, "step-3")
        repaired, version = server.answer()
        expect((repaired, version) == (first, "step-3"), f"after the repair: {repaired!r} of {version}")
        story.tell(
            f"The next complete push repairs it, without a restart: {repaired!r}, X-Weight-Version: {version}.",
            f"weightpush push {old} --url localhost:{port} --version step-3 --transport gloo",
        )
        story.end()
        if keep:
            print(f"The server stays up at {server.url}; end it with Ctrl-C.", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.process.wait()


def main() -> int:
    """Run the demo; 0 if every step went as it should."""
    parser = argparse.ArgumentParser(description="Push weights into a live vLLM server, step by step.")
    parser.add_argument("--keep", action="store_true", help="leave the server up at the end")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    try:
        run(keep=arguments.keep)
    except DemoError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
