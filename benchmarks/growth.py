"""How the time of a push grows: with bytes, tensors, servers, and the part of the model that is pushed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compare import push_parts, push_way
from benchmarks.models import Model
from benchmarks.processes import BenchError, BenchServer, TrainerProcess, stop_all
from benchmarks.rounds import Series, order


class Growth:
    """Pushes over shm, direct, from new trainers to new servers; ``folder`` lies on a RAM disk.

    No round begins after ``until``, a moment of the monotonic clock, but for the first of each series.
    """

    def __init__(self, folder: Path, log: Path, *, rounds: int, until: float, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._log = log
        self._rounds = rounds
        self._until = until
        self._tell = tell

    def over_models(self, models: Sequence[Model]) -> list[dict[str, Any]]:
        """Push each of ``models`` to a server of its own, all servers up at once and taking turns; return points."""
        with ExitStack() as stack:
            trainers = [stack.enter_context(TrainerProcess(self._log)) for _ in models]
            servers: list[BenchServer] = []
            stack.callback(stop_all, servers)
            facts = []
            for model, trainer in zip(models, trainers, strict=True):
                directory = self._folder / model.key
                trainer.do("make", **asdict(model), directory=str(directory))
                facts.append(trainer.do("change"))
                servers.append(BenchServer(directory, self._log))
            series = [Series() for _ in models]
            up = [self._up(server, found) for server, found in zip(servers, series, strict=True)]
            for model in models:
                shutil.rmtree(self._folder / model.key)  # It was read; its memory is needed.
            for number in self._numbers():
                for place in order(range(len(models)), max(number, 0)):
                    if up[place]:
                        up[place] = self._push(trainers[place], [servers[place]], number, series[place])
        points = [
            {"key": model.key, "what": model.what, "tensors": fact["tensors"], "bytes": fact["bytes"], **_point(found)}
            for model, fact, found in zip(models, facts, series, strict=True)
        ]
        self._say("growth", points)
        return points

    def over_servers(self, model: Model, counts: Sequence[int]) -> list[dict[str, Any]]:
        """Push ``model`` to 1, 2, ... servers at once, all on one core; return points."""
        found, pushed = self._one_model(model, [(count, None) for count in counts])
        points = [
            {"servers": count, **fact, **_point(series)}
            for count, fact, series in zip(counts, pushed, found, strict=True)
        ]
        self._say("servers", points)
        return points

    def over_parts(self, model: Model, parts: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
        """Push the tensors of ``model`` whose names begin as ``parts`` say, partially, to one server; return points."""
        found, pushed = self._one_model(model, [(1, list(prefixes)) for prefixes in parts.values()])
        points = [
            {"key": what, "what": what, **fact, **_point(series)}
            for what, fact, series in zip(parts, pushed, found, strict=True)
        ]
        self._say("parts", points)
        return points

    def _one_model(
        self, model: Model, turns: Sequence[tuple[int, list[str] | None]]
    ) -> tuple[list[Series], list[dict[str, Any]]]:
        """Let ``turns`` alternate: pushes to so many servers, of the tensors that begin so, or of all of them.

        Returns for each turn its times, and the tensors and bytes that it pushes.
        """
        with ExitStack() as stack:
            trainer = stack.enter_context(TrainerProcess(self._log))
            servers: list[BenchServer] = []
            stack.callback(stop_all, servers)
            directory = self._folder / "one"
            trainer.do("make", **asdict(model), directory=str(directory))
            trainer.do("change")
            pushed = [trainer.do("size", prefixes=prefixes) for _, prefixes in turns]
            servers += [BenchServer(directory, self._log) for _ in range(max(count for count, _ in turns))]
            series = [Series() for _ in turns]
            up = all([self._up(server, series[-1]) for server in servers])
            for number in self._numbers():
                for place in order(range(len(turns)), max(number, 0)):
                    count, prefixes = turns[place]
                    if up:
                        up = self._push(trainer, servers[:count], number, series[place], prefixes)
            shutil.rmtree(directory)
        return series, pushed

    def _numbers(self) -> Iterator[int]:
        """Yield the numbers of the rounds: -1 warms up, and none but the first begins when time is up."""
        yield -1
        for number in range(self._rounds):
            if number and time.monotonic() > self._until:
                self._tell(f"growth: time is up after {number} of {self._rounds} rounds")
                return
            yield number

    def _up(self, server: BenchServer, found: Series) -> bool:
        try:
            server.wait()
        except BenchError as error:
            found.errors.append(str(error))
            return False
        return True

    def _push(
        self,
        trainer: TrainerProcess,
        servers: Sequence[BenchServer],
        number: int,
        found: Series,
        prefixes: list[str] | None = None,
    ) -> bool:
        way = push_way("shm", "direct")
        try:
            report = trainer.do(
                "push",
                urls=[server.url for server in servers],
                transport=way.transport,
                mode=way.mode,
                whole=False,
                prefixes=prefixes,
            )
        except BenchError as error:
            found.errors.append(str(error))
            return False
        if number >= 0:
            # Where there are several, the parts are those of the first.
            parts = push_parts(report, servers[0].status()["last_update"], way.mode)
            found.add(number, report["seconds"], pause=report["pause_seconds"], parts=parts)
        return True

    def _say(self, what: str, points: Sequence[dict[str, Any]]) -> None:
        for point in points:
            seconds = "failed" if point["seconds"] is None else f"{point['seconds']:.3f} s"
            name = point.get("key") or f"{point['servers']} servers"
            self._tell(f"{what}: {name}, {point['tensors']} tensors, {point['bytes'] / 1e6:.0f} MB: {seconds}")


def _point(found: Series) -> dict[str, Any]:
    known = found.as_dict()
    return {"seconds": known["median"], **{name: known[name] for name in ("pause", "parts", "rounds", "errors")}}
