"""Closing an update module by module: once all of a module's weights have landed, it is processed at once; and a module
of which a partial update brings nothing is not processed at all.

The former's scratch storage then goes to the next module, in memory that is mapped and warm, instead of that of a whole
model being taken, touched for the first time and given back at each push; the latter's weights need not even be at
hand. The order of processing differs from a cold start's, so this is done only where it can be told that the order does
not matter; all else waits for the end.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from weightpush_server.config import StoragePolicy
from weightpush_server.reload.contexts import telling_of_processing, unproven
from weightpush_server.reload.journal import owners_below
from weightpush_server.reload.layout import ModelLayout, StorageGroup
from weightpush_server.reload.opening import Opened, find_place
from weightpush_server.reload.plan import KEPT_BATCHES, Plan

#: Methods whose processing looks at nothing but the module that it is given, in vLLM 0.32 and 0.33. Exactly these
#: classes: a subclass may do anything.
_LOCAL: Final = frozenset({UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod})
#: Batches for which is known what they bring; a bucket may have several.
_KEPT_ANSWERS: Final = 16 * KEPT_BATCHES


@dataclass(frozen=True)
class Unit:
    """A module that can be processed for itself: as soon as its weights are there, or not at all.

    Attributes:
        path: the module's name.
        module: it has the quantization method.
        groups: indices of the storage groups that are its weights, and nobody else's (embeddings may share theirs).
        tensors: how many tensors of the manifest write them.
        owners: ``id`` of the objects of the journal that its processing changes.
    """

    path: str
    module: nn.Module
    groups: tuple[int, ...]
    tensors: int
    owners: frozenset[int]


class Units:
    """All units of a plan, in the model's order.

    Attributes:
        all: those that can be closed early; ``waits_for`` says by name what each waits for.
        untouched: those of which the plan writes nothing. A complete update may have to process them all the same.
    """

    def __init__(
        self,
        units: Iterable[Unit] = (),
        waits_for: Iterable[Iterable[str]] = (),
        *,
        untouched: Iterable[Unit] = (),
    ) -> None:
        self.all = tuple(units)
        self.untouched = tuple(untouched)
        self._of_name: defaultdict[str, list[int]] = defaultdict(list)
        for index, names in enumerate(waits_for):
            for name in names:
                self._of_name[name].append(index)
        #: Answers of :meth:`brought_by` for buckets, whose names are the same objects at each push.
        self._brought: dict[int, tuple[frozenset[str], tuple[tuple[int, int], ...]]] = {}

    def brought_by(self, names: Collection[str]) -> tuple[tuple[int, int], ...]:
        """Return the units that ``names`` write to, by index, each with the number of names that do."""
        known = self._brought.get(id(names))
        if known is not None and known[0] is names:
            return known[1]
        counts = Counter(index for name in names for index in self._of_name.get(name, ()))
        answer = tuple(sorted(counts.items()))
        if isinstance(names, frozenset):
            while len(self._brought) >= _KEPT_ANSWERS:
                self._brought.pop(next(iter(self._brought)))
            self._brought[id(names)] = names, answer
        return answer


def plan_units(layout: ModelLayout, plan: Plan | None, vllm_config: VllmConfig) -> Units:
    """Return the units of an update by ``plan``; none without one, with adapters, or before the first real weights."""
    if plan is None or layout.from_dummy or vllm_config.lora_config is not None:
        return Units()
    return plan.units(functools.partial(find_units, layout, plan))


def find_units(layout: ModelLayout, plan: Plan) -> Units:
    """Return the modules that an update by ``plan`` may close one by one or leave alone, in the model's order.

    None at all unless every method of the model is known to process its own module only, and every tensor lands by
    copies (loaders look at what they like). Of the modules these are no units: those that share weights, and those that
    have other modules with weights below them.

    Closed early are those that the plan writes completely, unless addresses are pinned or storage is retained. The
    rest waits for the end: embeddings and output heads, which are compared and tied before anything is processed, and
    modules that processing leaves as they are, of which nothing is to be gained.
    """
    if not _is_fit(layout, plan):
        return Units()
    local = list(_local_modules(layout))
    writers: defaultdict[int, set[str]] = defaultdict(set)
    for name in plan.writes:
        for index in plan.groups_of(name):
            writers[index].add(name)
    early = _may_close_early(layout)
    found: list[tuple[Unit, frozenset[str]]] = []
    untouched: list[Unit] = []
    for unit in local:
        names = frozenset[str]().union(*(writers[index] for index in unit.groups))
        groups = [layout.groups[index] for index in unit.groups]
        if not names:
            untouched.append(unit)
        elif (
            early
            and not isinstance(unit.module, VocabParallelEmbedding)
            and any(group.moved for group in groups)
            and all(group.kept is None for group in groups)
            and all(plan.copies_all(index, layout.groups[index].required) for index in unit.groups)
        ):
            found.append((replace(unit, tensors=len(names)), names))
    if layout.has_hook:
        untouched = []
    embeddings = {path for path, module, _ in layout.quant_methods if isinstance(module, VocabParallelEmbedding)}
    if not embeddings <= {unit.path for unit in untouched}:
        # A head that is as it was may have to be tied to an embedding that is not.
        untouched = [unit for unit in untouched if unit.path not in embeddings]
    return Units((unit for unit, _ in found), (names for _, names in found), untouched=untouched)


def _is_fit(layout: ModelLayout, plan: Plan) -> bool:
    return (
        plan.complete
        and not plan.via_loader
        and not plan.refused
        and all(recorded in _LOCAL for _, _, recorded in layout.quant_methods)
        and not layout.journal.changed_containers
    )


def _may_close_early(layout: ModelLayout) -> bool:
    return (
        # Retained storage is there already, and is looked at before and after.
        layout.policy is not StoragePolicy.RETAIN
        and all(group.device.type == "cpu" and "cpu" not in layout.pin_devices for group in layout.groups)
    )


def _local_modules(layout: ModelLayout) -> Iterator[Unit]:
    """Yield the modules with weights that nothing but their own method has to do with; embeddings may share theirs."""
    held: defaultdict[int, list[int]] = defaultdict(list)
    entangled: set[int] = set()
    embeddings = {id(module) for _, module, _ in layout.quant_methods if isinstance(module, VocabParallelEmbedding)}
    for index, group in enumerate(layout.groups):
        holders = {id(slot.module) for member in group.members for slot in member.slots}
        for holder in holders:
            held[holder].append(index)
        if not _is_registered(group) or not (len(holders) == 1 or holders <= embeddings):
            entangled |= holders
    with_methods = {id(module) for _, module, _ in layout.quant_methods}
    found: list[Unit] = []
    for path, module, _ in layout.quant_methods:
        below = [id(child) for child in module.modules() if child is not module]
        if id(module) in entangled or any(child in with_methods or child in held for child in below):
            continue
        if groups := held.get(id(module)):
            owners = layout.journal.among(owners_below(module))
            found.append(Unit(path, module, tuple(groups), 0, owners))
    shared = _shared(found)
    yield from (unit for unit in found if not _own(unit) & shared)


def _is_registered(group: StorageGroup) -> bool:
    """Whether modules register all tensors of ``group``."""
    return all(member.slots and not any(slot.is_attribute for slot in member.slots) for member in group.members)


def _own(unit: Unit) -> frozenset[int]:
    """Return ``id`` of what only this unit may have: what its processing changes, and its method."""
    return unit.owners | {id(unit.module.quant_method)}


def _shared(units: Iterable[Unit]) -> set[int]:
    """Return what more than one unit has."""
    seen: set[int] = set()
    shared: set[int] = set()
    for unit in units:
        shared |= _own(unit) & seen
        seen |= _own(unit)
    return shared


def left_alone(layout: ModelLayout, units: Units) -> tuple[Unit, ...]:
    """Return the units that a partial update can leave alone: those untouched that are as processing left them."""
    return layout.seal.intact(layout, units.untouched) if layout.seal is not None and units.untouched else ()


def groups_of(units: Iterable[Unit]) -> frozenset[int]:
    """Return the indices of the groups of ``units``."""
    return frozenset(index for unit in units for index in unit.groups)


def owners_of(units: Iterable[Unit]) -> set[int]:
    """Return the ``id`` of all objects of the journal that the processing of ``units`` changes."""
    return {owner for unit in units for owner in unit.owners}


@contextmanager
def not_again(closed: Collection[Unit]) -> Iterator[None]:
    """For the length of the body, let the methods of modules that are ``closed`` have nothing to process."""
    key = "process_weights_after_loading"
    methods: list[Any] = [unit.module.quant_method for unit in closed]
    before = [method.__dict__.get(key) for method in methods]
    for method in methods:
        # On the object, whose class stays the same: other modules' processing asks for it.
        method.__dict__[key] = lambda layer: None
    try:
        yield
    finally:
        for method, own in zip(methods, before, strict=True):
            if own is None:
                del method.__dict__[key]
            else:
                method.__dict__[key] = own


class ModuleCloser:
    """Closes the units of one update as they become complete.

    ``forget`` makes the session let go of the storage of groups. ``seconds``: what closing took so far.
    """

    def __init__(
        self,
        layout: ModelLayout,
        opened: Opened,
        units: Units,
        *,
        forget: Callable[[Collection[int]], None],
        check: Callable[[nn.Module], None],
    ) -> None:
        self._layout = layout
        self._opened = opened
        self._forget = forget
        self._check = check
        self._units = units
        self._missing = [unit.tensors for unit in units.all]
        self.closed: list[Unit] = []
        self.groups: set[int] = set()
        self.seconds = 0.0

    def landed(self, names: Collection[str]) -> None:
        """Note that ``names``, each of which comes once, have landed wholly; close what they complete.

        Call it within ``loading_context``.

        Raises:
            WeightPushError: PROOF_FAILED, if a module's weights are not where they landed, or its processing raised.
        """
        for index, tensors in self._units.brought_by(names):
            self._missing[index] -= tensors
            if not self._missing[index]:
                began = time.perf_counter()
                self._close(self._units.all[index])
                self.seconds += time.perf_counter() - began

    def _close(self, unit: Unit) -> None:
        self._prove(unit)
        # From here on nobody holds the storages but the module, and processing frees what it replaces.
        self._forget(unit.groups)
        self._opened.close(self._layout.groups[index] for index in unit.groups)
        self._layout.journal.undo(only=unit.owners)
        module: Any = unit.module
        with telling_of_processing(unit.path):
            module.quant_method.process_weights_after_loading(module)
            if hasattr(module, "update_param_tp_status"):
                module.update_param_tp_status()
        self.groups.update(unit.groups)
        self.closed.append(unit)

    def _prove(self, unit: Unit) -> None:
        """Check that the weights of ``unit``, all of which are written, are what its processing will read."""
        for index in unit.groups:
            group = self._layout.groups[index]
            place = self._opened.take(group)
            found = find_place(group)
            if found is None or not found.same(place):
                raise unproven(group.name, "something else took its place while it landed")
            # What processing takes away cannot be left out of a later update.
            group.landed = None if group.moved else place.digest()
        self._check(unit.module)
