"""One model: every way to bring new weights into its server, in turn, in the same live processes."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.memory import PeakWatch
from benchmarks.models import Model
from benchmarks.processes import BenchError, BenchServer, TrainerProcess
from benchmarks.rounds import Series, order

FLOOR: Final = "floor"
LAYERWISE: Final = "layerwise"
FILE: Final = "file"
PER_TENSOR: Final = "per-tensor"
#: A competitor that has failed so often is not asked any more.
_GIVE_UP_AFTER: Final = 2


@dataclass(frozen=True, slots=True)
class Way:
    """A way to get weights into the server; ``transport`` and ``mode`` are those of a push, or empty."""

    name: str
    transport: str = ""
    mode: str = ""

    @property
    def is_push(self) -> bool:
        """Whether it is one of ours."""
        return bool(self.transport)


def push_way(transport: str, mode: str) -> Way:
    """Return the way of a push."""
    return Way(f"{transport} {mode}", transport, mode)


#: What pushes are compared with.
OTHERS: Final = (FLOOR, LAYERWISE, FILE, PER_TENSOR)


def ways(transports: Sequence[str], modes: Sequence[str], others: Sequence[str]) -> list[Way]:
    """Return all competitors: pushes, and of the ``others`` the floor first."""
    pushes = [push_way(transport, mode) for transport in transports for mode in modes]
    chosen = [Way(name) for name in OTHERS if name in others]
    return [*chosen[:1], *pushes, *chosen[1:]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one way, in seconds; ``pause``: while nothing was served."""

    seconds: float
    pause: float
    parts: Mapping[str, float] = field(default_factory=dict)
    fingerprint: str | None = None
    largest_bucket: int | None = None


def push_parts(report: Mapping[str, Any], last: Mapping[str, Any], mode: str) -> dict[str, float]:
    """Split a push by what the trainer and the server say.

    ``transfer``: from the open gate of the data plane to the last landed byte (gathering, sending and, in direct mode,
    landing and the post-load processing of what has landed go on beside each other in it). ``control``: what is left of
    the whole when that, opening, the other post-load processing, proof and, in staged mode, landing are taken off:
    calls, rendezvous, pausing, resuming, caches.
    """
    phases, worker, steps = report["phases"], last["worker_seconds"], last["phase_seconds"]
    parts = {
        "gather": phases["gather"],
        "digest": phases["digest"],
        "send": phases["send"],
        "wait": phases["wait"],
        "receive": worker.get("receive", 0.0),
        "check": worker.get("digest", 0.0),
        "copy": worker.get("copy", 0.0),
        "land": worker.get("land", 0.0),
        "open": worker.get("open", 0.0),
        "PWAL": worker.get("postload", 0.0),
        "proof": worker.get("proof", 0.0),
        "transfer": steps.get("receiving", 0.0),
        "begin": phases["check"] + phases["begin"],
        "finish": phases["prepare"] + phases["finish"],
    }
    one_after_another = ["transfer", "open", "PWAL", "proof", *(["land"] if mode == "staged" else [])]
    parts |= {f"step {name}": seconds for name, seconds in steps.items()}
    beside = worker.get("postload_early", 0.0) if mode == "direct" else 0.0
    parts["control"] = max(0.0, report["seconds"] + beside - sum(parts[name] for name in one_after_another))
    return parts


class Comparison:
    """Measures ``model`` in ``folder``, which lies on a RAM disk. Use ``run`` once."""

    def __init__(
        self,
        model: Model,
        trainer: TrainerProcess,
        folder: Path,
        log: Path,
        *,
        bucket_bytes: int | None,
        server_arguments: Sequence[str],
        tell: Callable[[str], None],
    ) -> None:
        self._model = model
        self._trainer = trainer
        self._folder = folder
        self._log = log
        self._bucket_bytes = bucket_bytes
        self._server_arguments = server_arguments
        self._tell = tell
        self._server: BenchServer | None = None
        self._facts: dict[str, Any] = {}
        self._fingerprints: set[str] = set()

    def run(self, competitors: Sequence[Way], *, rounds: int, until: float, profile: Path | None) -> dict[str, Any]:
        """Measure all; return what was found, for JSON. No round begins after ``until``, but for the first.

        Raises:
            BenchError: the server does not start.
        """
        series = {way.name: Series() for way in competitors}
        peaks: dict[str, Any] = {}
        self._trainer.do("make", **asdict(self._model), directory=str(self._folder / "old"))
        started = time.perf_counter()
        try:
            self._start()
            start_seconds = time.perf_counter() - started
            self._facts |= self._trainer.do("change")
            self._trainer.do("save", directory=str(self._folder / "new"))
            self._facts |= self._call("bench_load", str(self._folder / "new")) | self._call("bench_units")
            shutil.rmtree(self._folder / "old")
            first = self._memory_round(competitors, series, peaks)
            for way in competitors:
                if way.is_push:  # The others were warmed up by the round for memory, and keep nothing.
                    self._attempt(way, series[way.name])
            done = 0
            for number in range(rounds):
                if number and time.monotonic() > until:
                    self._tell(f"{self._model.key}: time is up after {number} of {rounds} rounds")
                    break
                done += 1
                for way in order(competitors, number):
                    self._round(way, number, series[way.name])
                self._tell(f"{self._model.key}: round {number + 1} of {rounds}: " + _brief(series, number))
            if profile is not None:
                self._profile(profile)
        finally:
            self._trainer.do("close")
            if self._server is not None:
                self._server.stop()
            shutil.rmtree(self._folder, ignore_errors=True)
        return {
            "what": self._model.what,
            "rounds": done,
            **{key: self._facts[key] for key in ("tensors", "bytes", "largest_module_bytes")},
            "start_seconds": start_seconds,
            "first_push": first,
            "fingerprints_equal": len(self._fingerprints) == 1,
            "ways": {name: found.as_dict() for name, found in series.items()},
            "memory": peaks,
        }

    # Rounds

    def _memory_round(
        self, competitors: Sequence[Way], series: Mapping[str, Series], peaks: dict[str, Any]
    ) -> dict[str, float] | None:
        """Run each way once with an eye on memory; return the parts of the very first push."""
        first: dict[str, float] | None = None
        for way in competitors:
            if way.name == FLOOR:
                self._attempt(way, series[way.name])
                continue
            # Buffers that a pusher keeps between pushes shall count.
            self._trainer.do("close")
            assert self._server is not None
            watch = PeakWatch(self._trainer.pid, self._server.processes())
            with watch:
                sample = self._attempt(way, series[way.name], progress=True)
            if sample is None:
                continue
            peaks[way.name] = {**asdict(watch.peak), "bucket_bytes": sample.largest_bucket}
            if way.is_push and first is None:
                first = {"seconds": sample.seconds, **sample.parts}
        return first

    def _round(self, way: Way, number: int, found: Series) -> None:
        sample = self._attempt(way, found)
        if sample is not None:
            found.add(number, sample.seconds, pause=sample.pause, parts=sample.parts)

    def _attempt(self, way: Way, found: Series, *, progress: bool = False) -> Sample | None:
        """Run ``way`` once; where it fails say so, and see to it that the next one finds a server."""
        if len(found.errors) >= _GIVE_UP_AFTER:
            return None
        try:
            return self._push(way, progress=progress) if way.is_push else self._sample(way)
        except BenchError as error:
            found.errors.append(str(error))
            self._tell(f"{self._model.key}: {way.name} FAILED: {error}")
            self._repair(way)
            return None

    def _repair(self, way: Way) -> None:
        assert self._server is not None
        if self._server.alive:
            return
        try:
            if self._server.process_alive:
                self._push(push_way("http", "direct"))  # A complete push brings a failed server back.
                return
        except BenchError as error:
            self._tell(f"{self._model.key}: {error}")
        self._tell(f"{self._model.key}: the server is started again after {way.name}")
        self._server.stop()
        self._start("new")  # The checkpoint that is left.
        self._call("bench_load", str(self._folder / "new"))

    def _start(self, checkpoint: str = "old") -> None:
        self._server = BenchServer(self._folder / checkpoint, self._log, self._server_arguments)
        self._server.wait()

    def _call(self, method: str, *args: Any) -> Any:
        assert self._server is not None
        return self._server.call(method, *args)

    # Ways

    def _sample(self, way: Way) -> Sample:
        if way.name == FLOOR:
            return Sample(self._call("bench_floor"), 0.0)
        if way.name == LAYERWISE:
            seconds = self._call("bench_layerwise")
            return Sample(seconds, seconds)
        if way.name == PER_TENSOR:
            seconds = self._trainer.do("per_tensor", url=self._url)["seconds"]
            return Sample(seconds, seconds)
        directory = self._folder / "file"
        try:
            saved = self._trainer.do("save", directory=str(directory))["seconds"]
            loaded = self._call("bench_reload_path", str(directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return Sample(saved + loaded, loaded, {"save": saved, "load": loaded})

    def _push(self, way: Way, *, progress: bool = False) -> Sample:
        assert self._server is not None
        sizes = {} if self._bucket_bytes is None else {"bucket_bytes": self._bucket_bytes}
        report = self._trainer.do(
            "push", urls=[self._url], transport=way.transport, mode=way.mode, progress=progress, **sizes
        )
        last = self._server.status()["last_update"]
        self._fingerprints |= set(report["fingerprints"])
        return Sample(
            report["seconds"],
            report["pause_seconds"],
            push_parts(report, last, way.mode),
            report["fingerprints"][0],
            report["largest_bucket"],
        )

    @property
    def _url(self) -> str:
        assert self._server is not None
        return self._server.url

    def _profile(self, file: Path) -> None:
        """Look at both sides during pushes over the fastest transport; write what they spent their time on."""
        from benchmarks.profile_text import profile_text

        raw = {side: self._folder / f"{side}.folded" for side in ("trainer", "server", "worker")}
        way = push_way("shm", "direct")
        samples = []
        try:
            self._look(None, None, None)
            samples = [self._push(way) for _ in range(3)]
            self._look(*map(str, raw.values()))
        except BenchError as error:
            self._tell(f"{self._model.key}: no profile: {error}")
            return
        folded = {side: path.read_text() for side, path in raw.items()}
        file.write_text(profile_text(self._model.what, self._facts, [asdict(sample) for sample in samples], folded))
        for side, text in folded.items():
            file.with_name(f"{file.stem}-{side}.folded").write_text(text)

    def _look(self, trainer: str | None, server: str | None, worker: str | None) -> None:
        """Begin to look at all sides; or end it and have them write to these files."""
        assert self._server is not None
        self._trainer.do("profile", file=trainer)
        self._server.profile(server)
        self._call("bench_profile", worker)


def _brief(series: Mapping[str, Series], number: int) -> str:
    return ", ".join(f"{name} {found.seconds[number]:.2f}" for name, found in series.items() if number in found.seconds)


def tell(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)
