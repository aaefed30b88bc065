"""Closing an update module by module: once all of a module's weights have landed, it is processed at once.

Its scratch storage then goes to the next module, in memory that is mapped and warm, instead of that of a whole model
being taken, touched for the first time and given back at each push. The order of processing differs from a cold
start's, so this is done only where it can be told that the order does not matter; all else waits for the end.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import nn
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


@dataclass(frozen=True)
class Unit:
    """A module that can be processed as soon as its weights are there.

    Attributes:
        path: the module's name.
        module: it has the quantization method.
        groups: indices of the storage groups that are its weights, and nobody else's.
        tensors: how many tensors of the manifest write them.
        owners: ``id`` of the objects of the journal that its processing changes.
    """

    path: str
    module: nn.Module
    groups: tuple[int, ...]
    tensors: int
    owners: frozenset[int]


class Units:
    """All units of a plan, in the model's order, and what they wait for."""

    def __init__(self, units: Iterable[Unit] = (), waits_for: Iterable[Iterable[str]] = ()) -> None:
        self.all = tuple(units)
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
            while len(self._brought) >= KEPT_BATCHES:
                self._brought.pop(next(iter(self._brought)))
            self._brought[id(names)] = names, answer
        return answer


def find_units(layout: ModelLayout, plan: Plan) -> Units:
    """Return the modules that a complete update by ``plan`` may close one by one, in the model's order.

    None at all unless every method of the model is known to process its own module only, every tensor lands by copies
    (loaders look at what they like), and no address is pinned. Of the modules these stay for the end: embeddings and
    output heads, which are compared and tied before anything is processed; modules that share weights, have other
    modules with weights below them, or weights that the checkpoint does not bring completely; and modules that
    processing leaves as they are, of which nothing is to be gained.
    """
    if not _is_fit(layout, plan):
        return Units()
    groups_of: defaultdict[int, list[int]] = defaultdict(list)
    unfit: set[int] = set()
    for index, group in enumerate(layout.groups):
        holders = {id(slot.module) for member in group.members for slot in member.slots}
        for holder in holders:
            groups_of[holder].append(index)
        if len(holders) != 1 or not _is_plain(group) or not plan.copies_all(index, group.required):
            unfit |= holders
    writers: defaultdict[int, set[str]] = defaultdict(set)
    for name in plan.writes:
        for index in plan.groups_of(name):
            writers[index].add(name)
    with_methods = {id(module) for _, module, _ in layout.quant_methods}
    found: list[tuple[Unit, frozenset[str]]] = []
    for path, module, _ in layout.quant_methods:
        groups = groups_of.get(id(module), [])
        below = [id(child) for child in module.modules() if child is not module]
        if (
            id(module) in unfit
            or isinstance(module, VocabParallelEmbedding)
            or any(child in with_methods or child in groups_of for child in below)
            or not any(layout.groups[index].moved for index in groups)
        ):
            continue
        names = frozenset[str]().union(*(writers[index] for index in groups))
        owners = layout.journal.among(owners_below(module))
        found.append((Unit(path, module, tuple(groups), len(names), owners), names))
    shared = _shared(unit for unit, _ in found)
    fit = [(unit, names) for unit, names in found if names and not unit.owners & shared]
    return Units((unit for unit, _ in fit), (names for _, names in fit))


def _is_fit(layout: ModelLayout, plan: Plan) -> bool:
    return (
        # Retained storage is there already, and is looked at before and after.
        layout.policy is not StoragePolicy.RETAIN
        and plan.complete
        and not plan.via_loader
        and not plan.refused
        and all(recorded in _LOCAL for _, _, recorded in layout.quant_methods)
        and all(group.device.type == "cpu" and "cpu" not in layout.pin_devices for group in layout.groups)
        and not layout.journal.changed_containers
    )


def _is_plain(group: StorageGroup) -> bool:
    """Whether the checkpoint brings all of ``group``, and modules register all of its tensors."""
    return group.kept is None and all(
        member.slots and not any(slot.is_attribute for slot in member.slots) for member in group.members
    )


def _shared(units: Iterable[Unit]) -> set[int]:
    """Return the owners that more than one unit would change."""
    seen: set[int] = set()
    shared: set[int] = set()
    for unit in units:
        shared |= unit.owners & seen
        seen |= unit.owners
    return shared


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
