"""One row of the matrix: a model goes from A to B and back on a live engine, and cold starts say what is right."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory

from matrix.trainer import TrainerProcess
from support.engine import generate
from support.server import ServerProcess
from support.tiny import checkpoint
from weightpush_client import WeightPusher
from weightpush_server.loader import INNER_FORMAT_KEY, LOAD_FORMAT, POLICY_KEY, register_loader

Answers = tuple[list[list[int]], list[list[float]]]
#: Of each worker, the digests of all that can be seen of its model; and what the engine answers.
Look = tuple[list[dict[str, str]], Answers]
PROMPTS = ("weights", "0123456789", "x")


@dataclass(frozen=True)
class Options:
    """How the matrix is run.

    ``transport``: ``http`` pushes into real servers; ``shm`` and ``gloo`` from a trainer's process to the workers of
    the engine; None reads the checkpoint in the workers.
    """

    tp: int = 1
    policy: str = "scratch"
    compile: bool = False
    transport: str | None = None
    layerwise: bool = True


@dataclass
class Row:
    """What came of one model.

    ``pushes``: for each push its name, how many tensors and packed layers differ from the cold start, and whether
    tokens and logprobs are equal. ``planned``: share of bytes that landed by plan, over all ranks. ``layerwise``: what
    vLLM's own reload came to. ``error``: why there is no more to tell.
    ``unloadable``: plain vLLM, without any of our parts, does not run the model here either.
    """

    model: str
    tensors: int = 0
    probes: int = 0
    pushes: list[tuple[str, int, bool, bool]] = field(default_factory=list)
    first_differing: list[str] = field(default_factory=list)
    planned: float = 0.0
    layerwise: str = "-"
    error: str | None = None
    unloadable: bool = False
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether every push ended where the cold start did."""
        equal = all(differ == 0 and tokens and logprobs for _, differ, tokens, logprobs in self.pushes)
        return self.error is None and bool(self.pushes) and equal

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def measure(key: str, entry: dict[str, Any], root: Path, options: Options, report: Callable[[Row], None]) -> None:
    """Run one model; ``report`` gets the row whenever there is more of it, since vLLM may end this process."""
    row = Row(key)
    began = time.monotonic()
    try:
        directories = {label: checkpoint(key, seed, root, entry) for label, seed in (("A", 1), ("B", 2))}
        if options.transport == "http":
            _over_http(row, directories, options, root)
        else:
            _in_process(row, directories, options, report)
    except Exception as error:  # noqa: BLE001 - a model that cannot be run is a row
        row.error = _told(error)
    row.seconds = time.monotonic() - began
    report(row)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def measure_plain(key: str, entry: dict[str, Any], root: Path, options: Options, report: Callable[[Row], None]) -> None:
    """Start the model and let it answer without any of our parts: what fails here as well is not our fault."""
    row = Row(key)
    try:
        with running(checkpoint(key, 1, root, entry), options, load_format="auto") as llm:
            generate(SimpleNamespace(llm=llm))  # type: ignore[arg-type]  # all that it uses
    except Exception as error:  # noqa: BLE001 - that it raises is the result
        row.error, row.unloadable = _told(error), True
    report(row)


def _in_process(row: Row, directories: dict[str, Path], options: Options, report: Callable[[Row], None]) -> None:
    trainer = nullcontext() if options.transport is None else TrainerProcess(options.transport, options.tp)
    with trainer as process:
        cold_b = _push_and_compare(row, directories, options, report, process)
    if options.layerwise:
        row.layerwise = "ended the process"
        report(row)
        row.layerwise = _layerwise(directories, options, cold_b)


def _push_and_compare(
    row: Row,
    directories: dict[str, Path],
    options: Options,
    report: Callable[[Row], None],
    trainer: TrainerProcess | None,
) -> Look:
    """Push B, A and A again; return what a cold start on B looks like."""
    with running(directories["B"], options) as llm:
        cold = {"B": _look(llm)}
    with running(directories["A"], options) as llm:
        cold["A"] = _look(llm)
        states, answers = cold["A"]
        row.tensors = sum(not name.startswith("probe:") for state in states for name in state)
        row.probes = sum(name.startswith("probe:") for state in states for name in state)
        if answers[0] == cold["B"][1][0]:
            raise ValueError("A and B give the same answers, so nothing could be told apart")
        for name, planned in (("B", True), ("A", False), ("A again", True)):
            landed = _push(llm, directories[name[0]], planned, trainer)
            if planned:
                total = sum(rank["bytes"] for rank in landed)
                row.planned = 1 - sum(rank["by_loader"] for rank in landed) / total
            differing, tokens, logprobs = _compare(_look(llm), cold[name[0]])
            row.pushes.append((name, len(differing), tokens, logprobs))
            row.first_differing = row.first_differing or differing[:3]
            report(row)
    return cold["B"]


def _push(llm: Any, directory: Path, planned: bool, trainer: TrainerProcess | None) -> list[dict[str, int]]:
    """Push a checkpoint; return what each worker says of how it landed."""
    ask = llm.collective_rpc
    if trainer is None:
        return ask("matrix_push", args=(str(directory), planned))  # type: ignore[no-any-return] # as the worker says
    return trainer.push(
        directory,
        begin=lambda begin: ask("matrix_begin", args=(begin, planned)),
        announce=lambda number, digests: ask("matrix_expect", args=(number, digests)),
        end=lambda: ask("matrix_finish"),
    )


def _layerwise(directories: dict[str, Path], options: Options, cold: Look) -> str:
    try:
        with running(directories["A"], options, load_format="auto") as llm:
            llm.collective_rpc("matrix_layerwise", args=(str(directories["B"]),))
            differing, tokens, _ = _compare(_look(llm), cold)
    except Exception as error:  # noqa: BLE001 - that it raises is the result
        return f"raised {type(error).__name__}"
    if not differing and tokens:
        return "right"
    return f"silently wrong ({len(differing)} differ, answers {'equal' if tokens else 'differ'})"


@contextmanager
def running(directory: Path, options: Options, *, load_format: str = LOAD_FORMAT) -> Iterator[Any]:
    """Run an engine, as a cold start on ``directory``."""
    register_loader()
    extra = {INNER_FORMAT_KEY: "auto", POLICY_KEY: options.policy} if load_format == LOAD_FORMAT else {}
    how = {"compilation_config": {"mode": 2}} if options.compile else {"enforce_eager": True}
    llm = LLM(
        str(directory),
        load_format=load_format,
        model_loader_extra_config=extra,
        worker_extension_cls="matrix.worker.MatrixExtension",
        tensor_parallel_size=options.tp,
        distributed_executor_backend="mp" if options.tp > 1 else "uni",
        max_model_len=128,
        max_num_seqs=4,
        num_gpu_blocks_override=32,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **how,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def _look(llm: Any) -> Look:
    # Answers first: some models only settle at their first forward.
    answers = generate(SimpleNamespace(llm=llm))  # type: ignore[arg-type]  # all that it uses
    return llm.collective_rpc("matrix_state"), answers


def _compare(found: Look, wanted: Look) -> tuple[list[str], bool, bool]:
    differing = [
        f"{name} (rank {rank})" if len(found[0]) > 1 else name
        for rank, (mine, theirs) in enumerate(zip(found[0], wanted[0], strict=True))
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    return differing, found[1][0] == wanted[1][0], found[1][1] == wanted[1][1]


def _over_http(row: Row, directories: dict[str, Path], options: Options, root: Path) -> None:
    """Push into a real server over a transport, and compare its fingerprint and answers with a cold server's."""
    assert options.transport is not None
    arguments = ["--storage-policy", options.policy, "--tensor-parallel-size", str(options.tp)]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if options.tp > 1 else {}

    def server(label: str) -> ServerProcess:
        executor = "mp" if options.tp > 1 else "uni"
        return ServerProcess(directories[label], arguments, environment=environment, folder=root, executor=executor)

    def look(running: ServerProcess) -> tuple[list[str], str]:
        answers = [running.answer(prompt) for prompt in PROMPTS]
        return answers, running.status()["fingerprint"]

    with server("B") as other:
        cold_b = look(other)
    with server("A") as live, WeightPusher(live.url, transport=options.transport, bucket_bytes=40_000) as pusher:
        cold = {"A": look(live), "B": cold_b}
        if cold["A"][0] == cold["B"][0]:
            raise ValueError("A and B give the same answers, so nothing could be told apart")
        for number, name in enumerate(("B", "A", "A again")):
            report = pusher.push(directories[name[0]], weight_version=f"v{number}")
            row.tensors = report.tensors
            answers, fingerprint = look(live)
            wanted = cold[name[0]]
            row.pushes.append((name, int(fingerprint != wanted[1]), answers == wanted[0], True))
