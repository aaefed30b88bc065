"""Whether a server serves what it should: memory against the last commit, the last commit against a checkpoint.

Post-load processing packs weights away, so a live model cannot be compared with a checkpoint tensor by tensor. Two
comparisons that are exact take its place. What *landed* is known: the digest of every checkpoint tensor, taken when it
arrived (or was read, at cold start). And what processing made of it is known: the print of every reachable tensor at
the commit. Where the checkpoint's digests are those that landed, and the prints are still those of the commit, the
server serves that checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import BaseModel, Field
from torch import nn

from weightpush_protocol.manifest import NAMED_OFFENDERS, TensorSpec, compare_manifest
from weightpush_protocol.messages import VerifyAnswer, VerifyDifference, VerifyRequest
from weightpush_server.reload.contexts import unproven
from weightpush_server.reload.fingerprint import TensorPrint, combine_prints, tensor_prints
from weightpush_server.reload.layout import ModelLayout, find_layout


class WorkerReport(BaseModel):
    """What one worker found. ``recorded`` has bit *i* set where the digest of the request's tensor *i* is known here.

    At most ``NAMED_OFFENDERS`` of ``changed``, ``differing`` and ``converted`` are listed; the totals count all.
    """

    rank: int
    weight_version: str
    committed: str
    now: str
    tensors: int
    changed: list[VerifyDifference] = Field(default_factory=list)
    changed_total: int = 0
    converted: list[str] = Field(default_factory=list)
    differing: list[VerifyDifference] = Field(default_factory=list)
    differing_total: int = 0
    recorded: str = "0"
    unseen_bytes: int = 0


@dataclass(frozen=True)
class _Landed:
    """Checkpoint tensors that the served weights were made of, and the digests that are known here."""

    #: What they are; by name only where somebody asks.
    given: Collection[TensorSpec]
    digests: Mapping[str, str]

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors by name."""
        return {spec.name: spec for spec in self.given}


class ServedModel:
    """One worker's memory of the weights that it serves. Belongs to the worker's main thread."""

    def __init__(self, model: nn.Module) -> None:
        """Remember what the cold start made of ``model``. Reads all weights once."""
        layout = find_layout(model)
        checkpoint = layout.checkpoint if layout is not None else None
        digests = dict(layout.digests) if layout is not None else {}
        self._landed = _Landed(checkpoint or (), digests)
        self._prints = tensor_prints(model)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights that were committed last, 64 hex digits."""
        return combine_prints(self._prints)

    def commit(
        self,
        prints: Mapping[str, TensorPrint],
        specs: Collection[TensorSpec],
        digests: Mapping[str, str],
        *,
        partial: bool = False,
    ) -> None:
        """Remember a committed update: its prints, the tensors that it brought, and their digests as far as known.

        ``partial``: the tensors that it did not bring are those of before. Neither ``specs`` nor ``digests`` may change
        later.
        """
        self._prints = dict(prints)
        if not partial:
            self._landed = _Landed(specs, digests)
            return
        new = {spec.name: spec for spec in specs}
        kept = {name: digest for name, digest in self._landed.digests.items() if name not in new}
        self._landed = _Landed(tuple({**self._landed.specs, **new}.values()), {**kept, **digests})

    def check_untouched(self, prints: Mapping[str, TensorPrint], modules: Collection[str]) -> None:
        """Check that ``modules``, which a partial update has left alone, hold what was committed before it.

        Raises:
            WeightPushError: ``proof_failed``, naming the first tensor that does not.
        """
        names = frozenset(modules)
        if not names:
            return
        now, before = (_below(names, found) for found in (prints, self._prints))
        for path in before.keys() | now.keys():
            if before.get(path) != now.get(path):
                reason = f"the update left it alone, and it was {before.get(path)} and is {now.get(path)}"
                raise unproven(path, reason)

    def report(self, model: nn.Module, request: VerifyRequest, *, rank: int, weight_version: str) -> WorkerReport:
        """Look at ``model`` as it is now and compare. Reads all weights once; the engine must be between two steps."""
        now = tensor_prints(model)
        converted = _converted(self._prints, now)
        changed = list(_changes(self._prints, now, converted, rank))
        layout = find_layout(model)
        differing = list(self._differences(request, layout, rank)) if request.tensors else []
        recorded = sum(1 << index for index, spec in enumerate(request.tensors) if self._is_recorded(spec, layout))
        return WorkerReport(
            rank=rank,
            weight_version=weight_version,
            committed=self.fingerprint,
            # What the runtime converted counts as what it was, so that equal fingerprints mean intact weights.
            now=combine_prints(
                {path: self._prints.get(path, found) for path, found in now.items()} if not changed else now
            ),
            tensors=len(now),
            changed=changed[:NAMED_OFFENDERS],
            changed_total=len(changed),
            converted=converted[:NAMED_OFFENDERS],
            differing=differing[:NAMED_OFFENDERS],
            differing_total=len(differing),
            recorded=f"{recorded:x}",
            unseen_bytes=_unseen_bytes(layout),
        )

    def _differences(self, request: VerifyRequest, layout: ModelLayout | None, rank: int) -> Iterator[VerifyDifference]:
        optional = layout.optional if layout is not None else {}
        problems = compare_manifest(tuple(self._landed.specs.values()), request.tensors, optional=optional)
        for problem in problems:
            yield VerifyDifference(
                # Seen from the checkpoint: what it has and the server lacks is expected, not given.
                kind=problem.kind.value,
                name=problem.name,
                expected=problem.given,
                given=problem.expected,
                worker_rank=rank,
            )
        wrong = {problem.name for problem in problems}
        for spec in request.tensors:
            offered = request.digests.get(spec.name)
            if spec.name in wrong or offered is None:
                continue
            landed = self._digest_of(spec, offered, layout)
            if landed is not None and landed != offered:
                yield VerifyDifference(kind="digest", name=spec.name, expected=offered, given=landed, worker_rank=rank)

    def _digest_of(self, spec: TensorSpec, offered: str, layout: ModelLayout | None) -> str | None:
        """Return the digest that landed under this name, or stands for it; None where none is known."""
        if spec.name in self._landed.specs or layout is None or spec.name not in layout.optional:
            return self._landed.digests.get(spec.name)
        # A tied head did not land itself: the embedding did, or a cold start ignores the head.
        head = layout.tied_head
        if head is None or not head.must_equal:
            return offered
        twins = [
            self._landed.digests[name]
            for name, landed in self._landed.specs.items()
            if (landed.shape, landed.dtype) == (spec.shape, spec.dtype) and name in self._landed.digests
        ]
        return offered if offered in twins else next(iter(twins), None)

    def _is_recorded(self, spec: TensorSpec, layout: ModelLayout | None) -> bool:
        return self._digest_of(spec, "", layout) is not None


def _below(modules: frozenset[str], prints: Mapping[str, TensorPrint]) -> dict[str, TensorPrint]:
    """Return the prints of what lies in one of ``modules``."""
    return {path: found for path, found in prints.items() if any(above in modules for above in _above(path))}


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _converted(committed: Mapping[str, TensorPrint], now: Mapping[str, TensorPrint]) -> list[str]:
    """Return the paths that the runtime itself made since the commit, or cast: tables and workspaces, no parameter."""
    return [
        path
        for path, found in now.items()
        if not found.is_parameter and (path not in committed or committed[path].dtype != found.dtype)
    ]


def _changes(
    committed: Mapping[str, TensorPrint], now: Mapping[str, TensorPrint], converted: Sequence[str], rank: int
) -> Iterator[VerifyDifference]:
    excused = set(converted)
    for path, before in committed.items():
        found = now.get(path)
        if found is None:
            yield VerifyDifference(kind="vanished", name=path, expected=str(before), worker_rank=rank)
        elif path not in excused and str(found) != str(before):
            yield VerifyDifference(kind="changed", name=path, expected=str(before), given=str(found), worker_rank=rank)
    for path in now.keys() - committed.keys() - excused:
        yield VerifyDifference(kind="changed", name=path, given=str(now[path]), worker_rank=rank)


def _unseen_bytes(layout: ModelLayout | None) -> int:
    """Return the bytes of weights whose tensors are empty now: native handles have packed them."""
    if layout is None:
        return 0
    unseen = 0
    for group in layout.groups:
        held = group.registered()
        if held and all(tensor is not None and tensor.numel() == 0 for tensor in held):
            unseen += group.nbytes
    return unseen


def combine_reports(
    reports: Sequence[WorkerReport], request: VerifyRequest, *, committed: str, now: str
) -> VerifyAnswer:
    """Return one answer for a server. ``committed`` and ``now`` are the fingerprints of all workers together."""
    recorded = 0
    for report in reports:
        recorded |= int(report.recorded, 16)
    # Differences that every worker sees are told once, with the first that saw them.
    differing = {(item.kind, item.name): item for report in reversed(reports) for item in report.differing}
    named = {item.name for item in differing.values()}
    unrecorded = [
        VerifyDifference(kind="unrecorded", name=spec.name)
        for index, spec in enumerate(request.tensors)
        if not recorded >> index & 1 and spec.name not in named
    ]
    # In the order of the checkpoint; what it lacks comes last.
    order = {spec.name: index for index, spec in enumerate(request.tensors)}
    found = sorted(differing.values(), key=lambda item: (order.get(item.name, len(order)), item.name))
    total = max(max(report.differing_total for report in reports), len(differing)) + len(unrecorded)
    changed = [item for report in reports for item in report.changed]
    changed_total = sum(report.changed_total for report in reports)
    return VerifyAnswer(
        equal=changed_total == 0 and total == 0,
        intact=changed_total == 0,
        weight_version=reports[0].weight_version,
        fingerprint_committed=committed,
        fingerprint_now=now,
        tensors=sum(report.tensors for report in reports),
        changed=changed[:NAMED_OFFENDERS],
        changed_total=changed_total,
        converted=list(dict.fromkeys(path for report in reports for path in report.converted))[:NAMED_OFFENDERS],
        compared=len(request.tensors),
        differing=[*found, *unrecorded][:NAMED_OFFENDERS],
        differing_total=total,
        unseen_bytes=sum(report.unseen_bytes for report in reports),
    )
