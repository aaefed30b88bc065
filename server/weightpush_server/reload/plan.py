"""Where each tensor of a manifest lands: a program of copies, or the model's own loaders.

Made from a trace, per rank, before anything is written, and kept: the next push of the same manifest runs no loader for
what the plan copies.
"""

from __future__ import annotations

import gc
import logging
import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn
from vllm.config import VllmConfig

from weightpush_protocol.manifest import NAMED_OFFENDERS, TensorSpec
from weightpush_server.reload.batch import Batch, Entries, make_batches
from weightpush_server.reload.contexts import loading_context
from weightpush_server.reload.coverage import ByteRanges, strided_ranges
from weightpush_server.reload.fingerprint import tensor_objects
from weightpush_server.reload.landed import Apart
from weightpush_server.reload.layout import ModelLayout
from weightpush_server.reload.program import Kind, Program, Step, View
from weightpush_server.reload.standins import stand_ins
from weightpush_server.reload.trace import AsksForValues, Recorded, Sources, Trace, watch

if TYPE_CHECKING:
    from weightpush_server.reload.modulewise import Units

logger = logging.getLogger(__name__)

#: How often loaders are run anew without a tensor at which they raised, and for how many seconds in all.
_MAX_RUNS: Final = 2 * NAMED_OFFENDERS + 1
_MAX_SECONDS: Final = 20.0
#: Manifests whose plans are kept.
_KEPT_PLANS: Final = 4
#: Buckets of a plan whose batches are kept: with those of a terabyte in 256 MiB none is worked out twice.
KEPT_BATCHES: Final = 4096


@dataclass(frozen=True)
class Plan:
    """How one manifest lands on one rank.

    Attributes:
        specs: the tensors that it is about, by name; those that the layout calls optional are not part of it.
        programs: tensors that land by copies. An empty program: the tensor lands nowhere on this rank.
        via_loader: tensors that the model's loaders must land.
        refused: tensors that the loaders raised at, with what they raised.
        copied: by group, the bytes that programs write, from the group's start.
        written: by group, the bytes that programs and loaders write, as far as that is known.
        writes: by name, what each tensor writes: pairs of group index and bytes.
        overlapping: tensors that write bytes which another one writes as well.
        complete: ``written`` is all; otherwise loaders write bytes that only landing will show.
    """

    specs: dict[str, TensorSpec]
    programs: dict[str, Program]
    via_loader: frozenset[str]
    refused: dict[str, str]
    copied: list[ByteRanges]
    written: list[ByteRanges]
    writes: dict[str, list[tuple[int, ByteRanges]]]
    overlapping: frozenset[str]
    complete: bool
    #: The answer of :meth:`remembered`, with what it is about.
    _answer: list[tuple[Sequence[TensorSpec], object, str]] = field(default_factory=list, compare=False)

    #: The answer of :meth:`units`.
    _units: list[Units] = field(default_factory=list, compare=False)
    #: Answers of :meth:`copies_all`.
    _copies_all: dict[int, tuple[ByteRanges, bool]] = field(default_factory=dict, compare=False)
    #: Names of the batches that landed last.
    apart: Apart = field(default_factory=Apart, compare=False)
    #: Answers of :meth:`batches`, with the buckets.
    _batches: dict[int, tuple[object, tuple[Batch, ...]]] = field(default_factory=dict, compare=False)

    def batches(self, bucket: object, entries: Entries) -> tuple[Batch, ...]:
        """Return how ``bucket``, which holds ``entries``, lands; worked out once for each such object."""
        known = self._batches.get(id(bucket))
        if known is None:
            while len(self._batches) >= KEPT_BATCHES:
                self._batches.pop(next(iter(self._batches)))
            known = self._batches[id(bucket)] = bucket, make_batches(self.programs, self.specs, entries)
        return known[1]

    def remembered(self, specs: Sequence[TensorSpec], key: object, work_out: Callable[[], str]) -> str:
        """Return what ``work_out`` says about ``specs`` and ``key``, which it is not asked twice for the same tuple."""
        for about, known_key, answer in self._answer:
            if about is specs and known_key == key:
                return answer
        answer = work_out()
        if isinstance(specs, tuple):
            self._answer[:] = [(specs, key, answer)]
        return answer

    def units(self, work_out: Callable[[], Units]) -> Units:
        """Return which modules can be closed one by one, as ``work_out`` says the first time."""
        if not self._units:
            self._units.append(work_out())
        return self._units[0]

    def copies_all(self, index: int, required: ByteRanges) -> bool:
        """Whether programs write every byte of group ``index`` that is ``required``; worked out once."""
        known = self._copies_all.get(index)
        if known is None or known[0] is not required:
            known = self._copies_all[index] = required, self.copied[index].first_missing(required) is None
        return known[1]

    def lands_nowhere(self, name: str) -> bool:
        """Whether no byte of ``name`` is needed on this rank."""
        program = self.programs.get(name)
        return program is not None and not program.steps

    def groups_of(self, name: str) -> tuple[int, ...]:
        """Return the groups that ``name`` writes, as far as that is known."""
        return tuple(sorted({index for index, _ in self.writes.get(name, ())}))


@dataclass
class _Runs:
    """What was learned by running the loaders, again without the tensors that they cannot be watched with."""

    left_out: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)
    trace: Trace | None = None


def make_plan(
    model: nn.Module,
    layout: ModelLayout,
    specs: Sequence[TensorSpec],
    *,
    vllm_config: VllmConfig,
    device: torch.device,
) -> Plan:
    """Run the loaders of ``model`` on tensors without data, and note what they do with each. Changes nothing.

    Call it on the worker's main thread while no forward runs; the model may serve before and after. Names in ``specs``
    are unique. Where loaders cannot be watched (they branch on values, or write in a way that cannot be attributed),
    the tensors concerned stay with them; at worst all do.
    """
    recorded = {spec.name for spec in layout.checkpoint or ()}
    sought = [spec for spec in specs if spec.name not in layout.optional]
    began = time.perf_counter()
    runs = _Runs()
    with _without_collection():
        with loading_context(vllm_config, device):
            for _ in range(_MAX_RUNS):
                if _run(model, layout, sought, recorded, runs) or time.perf_counter() - began > _MAX_SECONDS:
                    break
        plan = _build(layout, sought, runs)
    if recorded <= plan.specs.keys() | layout.optional.keys() and not layout.from_dummy and not _covers(plan, layout):
        # The cold start wrote more than this shows, so it is not to be relied upon.
        logger.warning("the plan of the checkpoint does not explain its landing; the model's loaders land everything")
        plan = _by_loaders(layout, sought, plan.refused)
    logger.debug(
        "planned %d tensors in %.3f s: %d by copy, %d by loaders, %d refused",
        len(sought),
        time.perf_counter() - began,
        len(plan.programs),
        len(plan.via_loader),
        len(plan.refused),
    )
    return plan


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the garbage collector from going through vLLM's heap again and again while many small objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(model: nn.Module, layout: ModelLayout, specs: Sequence[TensorSpec], recorded: set[str], runs: _Runs) -> bool:
    """Run the loaders once; return whether there is nothing left to try."""
    sources = Sources(specs, runs.left_out | runs.refused.keys())

    def kept() -> Iterator[torch.Tensor]:
        return (tensor for _, tensor in tensor_objects(model))

    try:
        with stand_ins(model, layout) as standing_in:
            load_weights = cast(Callable[..., Any], model.load_weights)
            runs.trace = watch(load_weights, sources, standing_in, kept)
    except AsksForValues as error:
        offenders = error.sources
    except Exception as error:  # noqa: BLE001 - loaders raise anything, and it concerns one tensor of the manifest
        offenders = set() if sources.turn is None else {sources.turn}
        foreign = {index for index in offenders if specs[index].name not in recorded}
        if recorded and foreign:
            runs.refused.update((index, f"{type(error).__name__}: {error}") for index in foreign)
            return len(runs.refused) >= NAMED_OFFENDERS
    else:
        return True
    if not offenders:
        return True
    # The cold start loaded such tensors, so the loaders get them. Those of the other layers behave alike.
    kinds = {_kind(specs[index].name) for index in offenders}
    runs.left_out |= {index for index, spec in enumerate(specs) if _kind(spec.name) in kinds}
    return False


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _build(layout: ModelLayout, specs: Sequence[TensorSpec], runs: _Runs) -> Plan:
    groups = len(layout.groups)
    refused = {specs[index].name: reason for index, reason in runs.refused.items()}
    trace = runs.trace
    if trace is None or trace.unattributed:
        return _by_loaders(layout, specs, refused)
    writes = _writes(trace)
    overlapping = _overlapping(writes)
    by_loader = _closed(trace, writes) | overlapping
    steps = _steps_of(trace)
    programs: dict[str, Program] = {}
    copied = [ByteRanges() for _ in range(groups)]
    written = [ByteRanges() for _ in range(groups)]
    for group in trace.replaced:
        # The loader makes a tensor of its own there; what it writes shows when it has landed.
        written[group].add_pair(0, layout.groups[group].nbytes)
    for index, spec in enumerate(specs):
        taken = index in by_loader or index in runs.left_out
        for group, ranges in writes.get(index, ()):
            written[group].add(ranges.merged())
            if not taken:
                copied[group].add(ranges.merged())
        if not taken and index not in runs.refused:
            programs[spec.name] = _program(steps.get(index, []))
    return Plan(
        specs={spec.name: spec for spec in specs},
        programs=programs,
        via_loader=frozenset(spec.name for spec in specs if spec.name not in programs and spec.name not in refused),
        refused=refused,
        copied=copied,
        written=written,
        writes={specs[index].name: pairs for index, pairs in writes.items()},
        overlapping=frozenset(specs[index].name for index in overlapping),
        complete=not runs.left_out,
    )


def _by_loaders(layout: ModelLayout, specs: Sequence[TensorSpec], refused: dict[str, str]) -> Plan:
    """Return the plan that knows nothing: the model's loaders land every tensor."""
    return Plan(
        specs={spec.name: spec for spec in specs},
        programs={},
        via_loader=frozenset(spec.name for spec in specs if spec.name not in refused),
        refused=refused,
        copied=[ByteRanges() for _ in layout.groups],
        written=[ByteRanges() for _ in layout.groups],
        writes={},
        overlapping=frozenset(),
        complete=False,
    )


def _covers(plan: Plan, layout: ModelLayout) -> bool:
    """Whether everything that the cold start wrote is written, as far as that can be known."""
    if not plan.complete:
        return True
    pairs = zip(layout.groups, plan.written, strict=True)
    return all(written.first_missing(group.required) is None for group, written in pairs)


def _owners(recorded: Recorded) -> set[int]:
    """Return the sources that a step belongs to."""
    if recorded.origin is not None and recorded.origin.sources:
        return recorded.origin.sources
    if recorded.target.sources and recorded.target.buffer.kind is Kind.TEMPORARY:
        return recorded.target.sources
    return set() if recorded.turn is None else {recorded.turn}


def _writes(trace: Trace) -> dict[int, list[tuple[int, ByteRanges]]]:
    """Return by source what it writes: pairs of group index and bytes."""
    found: defaultdict[int, defaultdict[int, ByteRanges]] = defaultdict(lambda: defaultdict(ByteRanges))
    pairs = [(recorded.step.target, _owners(recorded)) for recorded in trace.steps]
    for target, sources in pairs + [(write.target, write.sources) for write in trace.opaque]:
        if target.buffer.kind is not Kind.GROUP:
            continue
        for source in sources:
            _add(found[source][target.buffer.number], target)
    return {source: list(groups.items()) for source, groups in found.items()}


def _add(ranges: ByteRanges, view: View) -> None:
    if prod(view.shape) * view.dtype.itemsize == view.end - view.offset:
        ranges.add_pair(view.offset, view.end)
    else:
        ranges.add(strided_ranges(view.offset, view.shape, view.stride, view.dtype.itemsize))


def _closed(trace: Trace, writes: dict[int, list[tuple[int, ByteRanges]]]) -> set[int]:
    """Return the sources that loaders must land, with those whose bytes they mix with them."""
    by_loader = set(trace.by_loader)
    for recorded in trace.steps:
        involved = _owners(recorded)
        opaque = recorded.target.opaque or (recorded.origin is not None and recorded.origin.opaque)
        # A constant that two sources use is written in the turn of one of them only.
        constant = recorded.origin is not None and not recorded.origin.sources
        in_group = recorded.target.buffer.kind is Kind.GROUP
        if len(involved) > 1 or (in_group and (opaque or constant)):
            by_loader |= involved
    tainted = trace.transformed | trace.replaced
    by_loader |= {source for source, pairs in writes.items() if any(group in tainted for group, _ in pairs)}
    return by_loader


def _overlapping(writes: dict[int, list[tuple[int, ByteRanges]]]) -> set[int]:
    """Return the sources that write bytes which another source writes as well: their order counts."""
    by_group: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for source, pairs in writes.items():
        for group, ranges in pairs:
            by_group[group].append((source, ranges.merged()))
    found: set[int] = set()
    for parts in by_group.values():
        runs = torch.cat([part for _, part in parts])
        owners = torch.tensor([source for source, part in parts for _ in range(part.shape[0])], device="cpu")
        order = runs[:, 0].argsort()
        starts, ends = runs[order].unbind(1)
        # Ranges of one source are disjoint, so a range that meets an earlier or a later one meets another source's.
        meets = torch.zeros(len(order), dtype=torch.bool, device="cpu")
        meets[1:] |= starts[1:] < ends.cummax(0).values[:-1]
        meets[:-1] |= ends[:-1] > starts[1:]
        found.update(owners[order][meets].tolist())
    return found


def _steps_of(trace: Trace) -> dict[int, list[Recorded]]:
    found: defaultdict[int, list[Recorded]] = defaultdict(list)
    for recorded in trace.steps:
        for source in _owners(recorded):
            found[source].append(recorded)
    return found


def _program(recorded: list[Recorded]) -> Program:
    """Keep what leads to a group, in order."""
    kept: list[Step] = []
    temporaries: dict[int, int] = {}
    needed: set[int] = set()
    for item in reversed(recorded):
        target, source = item.step.target, item.step.source
        if 0 in target.shape:
            continue
        if target.buffer.kind is Kind.TEMPORARY:
            if target.buffer.number not in needed:
                continue
            temporaries[target.buffer.number] = item.target.nbytes
        if source is not None and source.buffer.kind is Kind.TEMPORARY:
            needed.add(source.buffer.number)
            temporaries.setdefault(source.buffer.number, item.origin.nbytes if item.origin is not None else 0)
        kept.append(item.step)
    groups = {step.target.buffer.number for step in kept if step.target.buffer.kind is Kind.GROUP}
    return Program(tuple(kept[::-1]), temporaries, tuple(sorted(groups)))


class PlanCache:
    """The plans of one model for the last few manifests. Buckets play no part, nor does the order of tensors."""

    def __init__(self, model: nn.Module, layout: ModelLayout, *, vllm_config: VllmConfig, device: torch.device) -> None:
        self._model = model
        self._layout = layout
        self._vllm_config = vllm_config
        self._device = device
        self._plans: OrderedDict[frozenset[tuple[str, str, tuple[int, ...]]], Plan] = OrderedDict()
        #: Plans of tuples of tensors that were seen before, and that will come again where a manifest is known.
        self._recent: list[tuple[Sequence[TensorSpec], Plan]] = []

    def plan(self, specs: Sequence[TensorSpec]) -> Plan:
        """Return the plan for ``specs``, made now if there is none; see :func:`make_plan`."""
        for recent, plan in self._recent:
            if recent is specs:
                return plan
        key = frozenset((spec.name, spec.dtype, spec.shape) for spec in specs)
        found = self._plans.get(key)
        if found is None:
            found = make_plan(self._model, self._layout, specs, vllm_config=self._vllm_config, device=self._device)
        self._plans[key] = found
        self._plans.move_to_end(key)
        while len(self._plans) > _KEPT_PLANS:
            self._plans.popitem(last=False)
        if isinstance(specs, tuple):  # What can change must be looked at.
            self._recent = [*self._recent[1 - _KEPT_PLANS :], (specs, found)]
        return found
