"""Whether what was measured is what must be reached. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.rounds import deviation_from_line, ratio, spread

_PUSH: Final = "shm direct"
_STAGED: Final = "shm staged"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim: the value that was measured against the value that must be reached; None where it was not measured.

    ``most``: the value must be at most ``target``, else at least.
    """

    claim: str
    unit: str
    target: float
    value: float | None
    most: bool = True

    @property
    def reached(self) -> bool | None:
        """Whether it is reached; None where it was not measured."""
        if self.value is None:
            return None
        # As it is printed: two buckets have their digests behind them, and end with a page.
        shown = round(self.value, 2)
        return shown <= self.target if self.most else shown >= self.target


def _rounds(way: Mapping[str, Any] | None) -> dict[str, float]:
    return dict(way["rounds"]) if way is not None else {}


def _against(model: Mapping[str, Any], one: str, other: str) -> float | None:
    """Return how many times faster ``other`` is than ``one``."""
    return ratio(_rounds(model["ways"].get(one)), _rounds(model["ways"].get(other)))


def _parts(model: Mapping[str, Any], way: str) -> Mapping[str, float] | None:
    found = model["ways"].get(way)
    return found["parts"] if found is not None and found["median"] is not None else None


def _measured(models: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(key, model) for key, model in models.items() if "error" not in model]


def speed_verdicts(models: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Judge times, on each model."""
    found = []
    for key, model in _measured(models):
        floor, push = model["ways"].get("floor"), model["ways"].get(_PUSH)
        parts = _parts(model, _PUSH)
        landing = beside = over = None
        if parts is not None and push is not None and floor is not None and floor["median"] is not None:
            landing = parts["land"] / floor["median"]
            beside = (push["median"] - parts["PWAL"]) / floor["median"]
        found += [
            Verdict(f"{key}: landing by plan, against the memcpy floor", "x", 1.15, landing),
            Verdict(f"{key}: push over shm without PWAL, against the floor", "x", 2.0, beside),
        ]
        faster = {"dense": 1.5, "moe": 3.0}.get(key)
        if faster is not None:
            value = _against(model, "layerwise", _PUSH)
            claim = f"{key}: push over shm, faster than vLLM's layerwise reload from memory"
            found.append(Verdict(claim, "x", faster, value, most=False))
        if key == "moe":
            for other, least in (("file", 4.0), ("per-tensor", 10.0)):
                claim = f"{key}: push over shm, faster than the {other} way"
                found.append(Verdict(claim, "x", least, _against(model, other, _PUSH), most=False))
        staged = _parts(model, _STAGED)
        if staged is not None:
            over = 1000 * (model["ways"][_STAGED]["pause"] - staged["land"] - staged["PWAL"])
        found.append(Verdict(f"{key}: staged pause beyond landing and PWAL", "ms", 100.0, over))
    return found


def memory_verdicts(models: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Judge peaks: the trainer in buckets, the server beside what it may hold."""
    found = []
    for key, model in _measured(models):
        for way, peak in model["memory"].items():
            bucket = peak["bucket_bytes"]
            if not bucket:
                continue  # None of ours.
            found.append(Verdict(f"{key}, {way}: trainer", "buckets", 2.0, peak["trainer_extra"] / bucket))
            allowed = 2 * bucket + model["largest_module_bytes"]
            claim = f"{key}, {way}: server, in two buckets and the largest module"
            if way.endswith("staged"):
                allowed = model["bytes"]
                claim = f"{key}, {way}: server, in copies of the weights"
            found.append(Verdict(claim, "x", 1.0, peak["server_extra"] / allowed))
    return found


def growth_verdicts(growth: Mapping[str, Any]) -> list[Verdict]:
    """Judge growth with bytes and with the number of tensors."""
    found = []
    sizes = [point for point in growth.get("bytes", []) if point["seconds"] is not None]
    line = None
    if len(sizes) >= 3:
        line = 100 * deviation_from_line([(point["bytes"], point["seconds"]) for point in sizes])
    found.append(Verdict("time against bytes: the worst distance from a straight line", "%", 20.0, line))
    counts = [point for point in growth.get("tensors", []) if point["seconds"] is not None]
    for name, value in (
        ("whole push", [point["seconds"] for point in counts]),
        ("without PWAL", [point["seconds"] - point["parts"]["PWAL"] for point in counts]),
    ):
        flat = spread(value) if len(value) > 1 else None
        found.append(Verdict(f"time against the number of tensors, {name}: slowest over fastest", "x", 1.2, flat))
    return found
