"""Whether a manifest may be pushed: judged by where its tensors land, before anything is written.

A manifest with the names of the cold start's checkpoint is taken. Any other one (packed experts instead of separate
ones, a fused projection) is taken if the model's own loaders know it and it writes the same bytes: every one that the
cold start wrote, none twice, none else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import nn
from vllm.config import VllmConfig

from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import (
    NAMED_OFFENDERS,
    ManifestProblem,
    ProblemKind,
    TensorSpec,
    compare_manifest,
    name_offenders,
    prefix_hint,
)
from weightpush_server.reload.coverage import ByteRanges, strided_ranges
from weightpush_server.reload.layout import ModelLayout, StorageGroup
from weightpush_server.reload.modulewise import groups_of, left_alone, plan_units
from weightpush_server.reload.opening import first_missing
from weightpush_server.reload.plan import Plan, PlanCache
from weightpush_server.reload.refusals import check_partial

#: Problems that no other layout explains.
_FINAL: Final = frozenset({ProblemKind.EMPTY, ProblemKind.DUPLICATE, ProblemKind.SHAPE, ProblemKind.DTYPE})
#: Exceptions by which loaders say that they know no such name; others are about the tensor.
_UNKNOWN_NAME: Final = ("KeyError", "AttributeError", "ValueError")


class Planner:
    """Makes and keeps the plans of one model, and says which manifests it takes."""

    def __init__(self, model: nn.Module, layout: ModelLayout, *, vllm_config: VllmConfig, device: torch.device) -> None:
        self._layout = layout
        self._vllm_config = vllm_config
        self._cache = PlanCache(model, layout, vllm_config=vllm_config, device=device)
        #: The list of tensors that was found to be the whole checkpoint last, and that checkpoint.
        self._whole: tuple[Sequence[TensorSpec], Sequence[TensorSpec] | None] | None = None

    def prepare(self) -> Plan | None:
        """Plan the checkpoint of the cold start; None if that is unknown.

        After dummy weights this is also how the layout learns which bytes a checkpoint writes.
        """
        if self._layout.checkpoint is None:
            return None
        plan = self.plan(self._layout.checkpoint)
        if self._layout.from_dummy and plan.complete:
            for group, written in zip(self._layout.groups, plan.written, strict=True):
                group.required = written
        return plan

    def plan(self, specs: Sequence[TensorSpec]) -> Plan:
        """Return the plan of an admitted manifest. The worker's main thread only, while no forward runs."""
        return self._cache.plan(specs)

    def tied(self) -> dict[str, str]:
        """Return the output head that a push may bring and the tensor of the checkpoint that it must equal, if any."""
        head, expected = self._layout.tied_head, self._expected()
        if head is None or not head.must_equal or expected is None:
            return {}
        weight = head.embedding.weight
        names = {
            name
            for name, pairs in expected.writes.items()
            for index, _ in pairs
            for member in self._layout.groups[index].members
            if any(slot.get() is weight for slot in member.slots)
        }
        return {head.spec.name: names.pop()} if len(names) == 1 else {}

    def admit(self, specs: Sequence[TensorSpec], *, partial: bool = False) -> Plan:
        """Return the plan for a push of ``specs``, or refuse it. Changes nothing.

        Raises:
            WeightPushError: MANIFEST_REJECTED, naming tensors that are unknown, missing, sent twice or of another
                shape or dtype; PARTIAL_REFUSED where a partial update leaves out what is not there any more.
        """
        problems = self._by_name(specs, partial=partial)
        kinds = {problem.kind for problem in problems}
        if kinds & _FINAL:
            raise rejected(problems)
        if kinds == {ProblemKind.MISSING}:
            problems = [problem for problem in problems if not self._is_idle(problem.name)]
            if problems:
                raise rejected(problems)
        elif kinds == {ProblemKind.UNKNOWN} and not partial:
            # All tensors of the checkpoint, and more.
            raise rejected(problems)
        plan = self.plan(specs)
        if kinds or self._layout.checkpoint is None:
            found = list(self._by_bytes(plan, partial=partial))
            if found:
                # Of a wholly different model the names say more than the first loaders that raised.
                raise rejected(problems if len(plan.refused) >= NAMED_OFFENDERS and problems else found)
        if partial:
            written = {id(group): bytes_ for group, bytes_ in zip(self._layout.groups, plan.written, strict=True)}
            units = plan_units(self._layout, plan, self._vllm_config)
            untouched = groups_of(left_alone(self._layout, units))
            check_partial(self._layout, lambda group: written[id(group)], untouched)
        return plan

    def _by_name(self, specs: Sequence[TensorSpec], *, partial: bool) -> list[ManifestProblem]:
        layout = self._layout
        if self._whole is not None and self._whole[0] is specs and self._whole[1] is layout.checkpoint:
            return []
        problems = compare_manifest(layout.checkpoint or (), specs, optional=layout.optional)
        if not problems and isinstance(specs, tuple):
            self._whole = specs, layout.checkpoint
        if layout.checkpoint is None:
            problems = [problem for problem in problems if problem.kind is not ProblemKind.UNKNOWN]
        if partial:
            problems = [problem for problem in problems if problem.kind is not ProblemKind.MISSING]
        return problems

    def _expected(self) -> Plan | None:
        return self.plan(self._layout.checkpoint) if self._layout.checkpoint is not None else None

    def _is_idle(self, name: str) -> bool:
        """Whether this rank needs no byte of a tensor of the cold start's checkpoint."""
        expected = self._expected()
        return expected is not None and expected.lands_nowhere(name)

    def _by_bytes(self, plan: Plan, *, partial: bool) -> Iterator[ManifestProblem]:
        """Yield every way in which the bytes that ``plan`` writes are not those that the cold start wrote."""
        expected = self._expected()
        recorded = {spec.name for spec in self._layout.checkpoint or ()}
        for name, spec in plan.specs.items():
            if name not in recorded:
                yield from self._foreign(plan, expected, spec)
        if not partial:
            yield from self._missing(plan, expected)

    def _foreign(self, plan: Plan, expected: Plan | None, spec: TensorSpec) -> Iterator[ManifestProblem]:
        """Judge a tensor of which the checkpoint has no namesake."""
        name, given = spec.name, f"{spec.dtype} {list(spec.shape)}"
        reason = plan.refused.get(name)
        if reason is not None:
            kind = ProblemKind.UNKNOWN if reason.startswith(_UNKNOWN_NAME) else ProblemKind.SHAPE
            yield ManifestProblem(kind=kind, name=name, given=f"{given}; the model's loader raised {reason[:200]}")
        elif name not in plan.writes:
            if not self._renames_idle(plan, spec):
                yield ManifestProblem(kind=ProblemKind.UNKNOWN, name=name, given=given)
        elif any(self._is_beyond(group, ranges) for group, ranges in plan.writes[name]):
            yield ManifestProblem(kind=ProblemKind.UNKNOWN, name=name, given=given)
        elif name in plan.overlapping:
            yield ManifestProblem(kind=ProblemKind.DUPLICATE, name=name, given=f"{given}, bytes of another tensor")
        elif wanted := self._other_dtypes(plan, expected, spec):
            yield ManifestProblem(kind=ProblemKind.DTYPE, name=name, expected=wanted, given=spec.dtype)

    def _renames_idle(self, plan: Plan, spec: TensorSpec) -> bool:
        """Whether a tensor that lands nowhere is one that the cold start had no use for either, with more before it.

        The tower of a vision-language model that is served for text alone, say: its names vary as those of the rest do.
        """
        tail = spec.name
        while tail:
            _, _, tail = tail.partition(".")
            known = next((listed for listed in self._layout.checkpoint or () if listed.name == tail), None)
            if known is not None:
                same = (known.dtype, known.shape) == (spec.dtype, spec.shape)
                return same and tail not in plan.specs and self._is_idle(tail)
        return False

    def _is_beyond(self, index: int, ranges: ByteRanges) -> bool:
        """Whether ``ranges`` reach where the cold start did not write."""
        return self._required(self._layout.groups[index]).first_missing(ranges) is not None

    def _other_dtypes(self, plan: Plan, expected: Plan | None, spec: TensorSpec) -> str | None:
        """Return the dtypes that would do for ``spec``, or None if its own does."""
        groups = set(plan.groups_of(spec.name))
        if expected is None:
            kinds = {self._layout.groups[index].members[0].dtype for index in groups}
            fits = all(dtype.is_floating_point == spec.torch_dtype.is_floating_point for dtype in kinds)
            return None if fits else " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in kinds))
        dtypes = {
            expected.specs[name].dtype
            for name, pairs in expected.writes.items()
            if any(index in groups for index, _ in pairs)
        }
        return None if spec.dtype in dtypes else " or ".join(sorted(dtypes))

    def _missing(self, plan: Plan, expected: Plan | None) -> Iterator[ManifestProblem]:
        """Yield what brings the bytes that ``plan`` does not write: by the checkpoint's names where they are known."""
        lacking: dict[int, str] = {}
        for index, group in enumerate(self._layout.groups):
            parameter = first_missing(group, self._required(group), plan.written[index])
            if parameter is not None:
                lacking[index] = parameter
        explained: set[int] = set()
        for name, pairs in expected.writes.items() if expected is not None else ():
            assert expected is not None
            hit = {
                index
                for index, ranges in pairs
                if index in lacking and plan.written[index].first_missing(ranges) is not None
            }
            if hit and name not in plan.specs:
                explained |= hit
                spec = expected.specs[name]
                yield ManifestProblem(kind=ProblemKind.MISSING, name=name, expected=f"{spec.dtype} {list(spec.shape)}")
        for index in lacking.keys() - explained:
            yield ManifestProblem(kind=ProblemKind.MISSING, name=lacking[index], expected="all bytes of this parameter")

    def _required(self, group: StorageGroup) -> ByteRanges:
        """Return the bytes that a complete push must write.

        After dummy weights without a checkpoint nobody knows which bytes a checkpoint brings. Then a push must write
        every byte of every parameter: a parameter that checkpoints may leave out makes such a model refuse.
        """
        if self._layout.checkpoint is not None or not self._layout.from_dummy:
            return group.required
        required = ByteRanges()
        for member in group.members:
            if any(slot.is_parameter for slot in member.slots):
                required.add(strided_ranges(member.offset, member.shape, member.stride, member.dtype.itemsize))
        return required


def rejected(problems: Sequence[ManifestProblem]) -> WeightPushError:
    named = name_offenders(problems)
    rest = f" and {len(problems) - len(named)} more" if len(problems) > len(named) else ""
    hint = prefix_hint(problems)
    rest += f". {hint[0].upper()}{hint[1:]}" if hint else ""
    return WeightPushError(
        ErrorCode.MANIFEST_REJECTED,
        "the pushed weights are not a checkpoint of this model: " + "; ".join(map(str, named)) + rest,
        details={"problems": [problem.model_dump(mode="json") for problem in named], "total": len(problems)},
    )
