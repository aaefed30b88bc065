"""Writing received tensors into an opened model, and keeping account of what was written.

What the plan knows how to copy is copied; the rest goes through the model's own loaders, watched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

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
)
from weightpush_server.reload.batch import Batch, Entries
from weightpush_server.reload.contexts import loading_context, unproven
from weightpush_server.reload.coverage import ByteRanges, WriteLog, WriteRecorder
from weightpush_server.reload.landed import Apart, LandedNames
from weightpush_server.reload.layout import ModelLayout
from weightpush_server.reload.modulewise import ModuleCloser, Unit, Units, groups_of
from weightpush_server.reload.opening import Opened, find_places, unwritten
from weightpush_server.reload.plan import Plan
from weightpush_server.reload.program import Replayer, strided
from weightpush_server.reload.storage import Place
from weightpush_server.stored import view_tensor
from weightpush_server.ways import Way


class ReloadSession:
    """One update of one model, from the opening to the proof.

    ``land`` may be called from another thread than the one that opened the model, one call at a time, with the engine
    idle. After an error the session is over: the model stays open, and only a new, complete one repairs it.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        *,
        vllm_config: VllmConfig,
        device: torch.device,
        opened: Opened,
        poisoned: bool,
        partial: bool = False,
        plan: Plan | None = None,
        units: Units | None = None,
        untouched: Collection[Unit] = (),
    ) -> None:
        assert plan is not None or layout.checkpoint is not None
        self.model = model
        self.layout = layout
        self.vllm_config = vllm_config
        self.device = device
        self.opened = opened
        self.poisoned = poisoned
        self.partial = partial
        self.nbytes = 0
        self.plan = plan
        self._expected = plan.specs if plan is not None else {spec.name: spec for spec in layout.checkpoint or ()}
        self._replayer = Replayer(lambda index: opened.take(layout.groups[index]))
        #: Processes modules whose weights have all landed, where that need not wait for the others.
        self.closer = ModuleCloser(
            layout, opened, units or Units(), forget=self._replayer.forget, check=self._check_poison
        )
        #: Modules that a partial update leaves as they are.
        self.untouched = tuple(untouched)
        self._landed = LandedNames(plan.apart if plan is not None else Apart())
        self._writes = WriteLog()
        self._head_digest: str | None = None
        self._error: WeightPushError | None = None
        layout.updates += 1
        self._number = layout.updates

    def _check_current(self) -> None:
        if self._error is not None:
            raise self._error
        if self._number != self.layout.updates:
            raise WeightPushError(ErrorCode.STALE_UPDATE, "a later update of this model has begun; this one is over")

    def _fail(self, error: WeightPushError) -> None:
        # A copy: the frames in the traceback of the original hold received tensors, and so the receiver's buffers.
        self._error = WeightPushError.from_detail(error.body().error)

    @contextmanager
    def _failing(self, what: str, at: _Current | None = None) -> Iterator[_Current]:
        """Let what is raised in the body end the session; say that ``what`` raised it, and at which tensor."""
        at = at or _Current()
        try:
            yield at
        except WeightPushError as error:
            self._fail(error)
            raise
        except Exception as error:
            failure = _failed(at.name, f"{what} raised {type(error).__name__}: {error}", error)
            self._fail(failure)
            raise failure from error

    def seal(self) -> None:
        """End the session: from here on the model is not in checkpoint layout, and nothing may land or finish twice."""
        self._error = WeightPushError(ErrorCode.UPDATE_FAILED, "this update has been closed; begin another one")
        # Post-load processing frees what it replaces, if nobody else holds it.
        self._replayer.close()

    @property
    def landed(self) -> LandedNames:
        """The tensors that have landed."""
        return self._landed

    def land(self, tensors: Iterable[tuple[str, torch.Tensor]], *, read_only: bool = False) -> None:
        """Write checkpoint tensors into the model. The tensors may be reused once this returns.

        ``read_only``: nobody may write to the tensors. The model's own loaders, who might, get copies.

        Raises:
            WeightPushError: LANDING_FAILED, naming the tensor that was being loaded: it is unknown, came twice, has
                another shape or dtype than the checkpoint, or the model's loader raised. The session is over then.
                STALE_UPDATE where a later session of this model took over.
        """
        self._check_current()
        left: list[tuple[str, torch.Tensor]] = []
        with self._failing("copying it") as at, loading_context(self.vllm_config, self.device):
            for name, tensor in tensors:
                at.name = name
                if self.accept(name, tensor) and not self._replay(name, tensor):
                    left.append((name, tensor))
                else:
                    self.closer.landed((name,))
        if left:
            self._load(left, read_only)

    def land_bucket(
        self,
        buffer: torch.Tensor,
        bucket: object,
        entries: Entries,
        *,
        check_wanted: Callable[[], None],
        read_only: bool = False,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the tensors of a planned bucket into the model, as :meth:`land` does, with far fewer copies.

        ``buffer`` holds the bucket's bytes (uint8), laid out as ``entries`` say. ``bucket`` stands for that layout: an
        object that is the same whenever the layout is. ``check_wanted`` raises when nobody wants the rest any more; it
        is called before every copy. ``let_go`` is called when the last copy was made, and before the modules that it
        completes are processed.

        Raises:
            WeightPushError: see :meth:`land`; what ``check_wanted`` raises.
        """
        self._check_current()
        batches: tuple[Batch, ...] = (Batch(frozenset(), 0, (), tuple(entries)),)
        if self.plan is not None and buffer.device.type == self.device.type:
            batches = self.plan.batches(bucket, entries)
        for batch in batches:
            self._move(batch, buffer, check_wanted)
            rest = _wanted(batch.rest, check_wanted)
            self.land(((spec.name, view_tensor(buffer, offset, spec)) for spec, offset in rest), read_only=read_only)
            if batch is batches[-1]:
                let_go()
            with self._failing("processing"), loading_context(self.vllm_config, self.device):
                self.closer.landed(batch.names)

    def _move(self, batch: Batch, buffer: torch.Tensor, check_wanted: Callable[[], None]) -> None:
        with self._failing("copying it") as at, loading_context(self.vllm_config, self.device):
            twice = self._landed.twice(batch.names)
            if twice is not None:
                raise _failed(twice, "it arrived twice")
            storage, start = buffer.untyped_storage(), int(buffer.storage_offset())
            for at.name, source, target in batch.moves:
                check_wanted()
                view = strided(storage, source.dtype, start + source.offset, source.shape, source.stride)
                self._replayer.move(view, target)
            self._landed.add_all(batch.names)
            self.nbytes += batch.nbytes

    def _replay(self, name: str, tensor: torch.Tensor) -> bool:
        """Copy ``tensor`` to its places; return False where the model's loaders have to."""
        program = self.plan.programs.get(name) if self.plan is not None else None
        if program is None:
            return False
        self._replayer.run(program, tensor.contiguous())
        return True

    def _load(self, tensors: list[tuple[str, torch.Tensor]], read_only: bool) -> None:
        stream = _Stream(tensors, read_only)
        with self._failing("the model's loader", stream):
            # Nobody knows what else a loader looks at.
            self.opened.take_all()
            with loading_context(self.vllm_config, self.device), WriteRecorder(self._writes):
                cast(Callable[..., Any], self.model.load_weights)(iter(stream))
                self._own_storage({tensor.untyped_storage()._cdata for _, tensor in tensors})
        self._writes.forget_dead()

    def accept(self, name: str, tensor: torch.Tensor) -> bool:
        """Check one tensor against the checkpoint and count it; return whether the model is to have it.

        Raises:
            WeightPushError: LANDING_FAILED, see :meth:`land`.
        """
        if name in self._landed:
            raise _failed(name, "it arrived twice")
        optional = self.layout.optional.get(name)
        expected = optional or self._expected.get(name)
        if expected is None:
            raise _failed(name, "the checkpoint that this model was loaded from has no tensor of that name")
        if tensor.shape != expected.shape or tensor.dtype is not expected.torch_dtype:
            _require_same(expected, tensor)
        self._landed.add(name)
        self.nbytes += tensor.nbytes
        if optional is None:
            return True
        head = self.layout.tied_head
        if head is not None and head.must_equal:
            self._head_digest = head.offered_digest(tensor)
        return False

    def _own_storage(self, received: set[int]) -> None:
        """Give weights that a loader made out of a received tensor, instead of copying it, storage of their own."""
        for group in self.layout.groups:
            for member in group.members:
                for slot in member.slots:
                    tensor = slot.get()
                    if tensor is not None and not tensor.is_meta and tensor.untyped_storage()._cdata in received:
                        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)

    def prove_landed(self) -> None:
        """Check that everything a cold start writes has been written.

        Raises:
            WeightPushError: PROOF_FAILED, naming the first tensor or weight that is missing, or the first weight with
                poison left in it; STALE_UPDATE where a later session took over; or the error that ended this session.
        """
        self._check_current()
        self._prove_names()
        self.opened.take_all()
        places = find_places(self.layout.groups)
        done = self.closer.groups | groups_of(self.untouched)
        for index, (group, place) in enumerate(zip(self.layout.groups, places, strict=True)):
            if not len(group.required) or index in done:
                continue
            if place is None or (len(self._copied(index)) and not place.same(self.opened.take(group))):
                raise unproven(group.name, "the model's loader replaced it by something of another layout")
            if group.needed is None and self.plan is not None and self.plan.copies_all(index, group.required):
                continue  # Every name of the plan has landed by now, so every program has run.
            name = unwritten(group, place, self._written(index, place))
            if name is not None:
                raise unproven(name, "not all of it was written, although every tensor of the checkpoint arrived")
        self._check_poison(self.model)
        head = self.layout.tied_head
        if head is not None and self._head_digest not in (None, head.landed_digest()):
            raise unproven(
                head.spec.name,
                "it differs from the embedding that this model's output head is tied to; push equal tensors, or start "
                "the server on a checkpoint that holds both",
            )

    def _copied(self, index: int) -> ByteRanges:
        return self.plan.copied[index] if self.plan is not None else ByteRanges()

    def _written(self, index: int, place: Place) -> ByteRanges:
        """Return what was written to group ``index`` at ``place``, in bytes from the start of its storage."""
        copied = self._copied(index)
        written = ByteRanges()
        written.add(self._writes.ranges(place.storage).merged())
        # Every name of the plan has landed by now, so every program has run.
        written.add(copied.merged() + place.start)
        return written

    def ways(self, specs: Iterable[TensorSpec]) -> str:
        """Return how each tensor lands on this rank, one letter a tensor; see :class:`~weightpush_server.ways.Way`."""
        groups = self.layout.groups
        scratch = {index for index, group in enumerate(groups) if self.opened.is_scratch(group)}
        return _ways(self.layout, self.plan, specs, scratch)

    def _prove_names(self) -> None:
        if self.partial and self.plan is None:
            return  # Bytes alone count; what may be left out was decided when the model was opened.
        missing = self._landed.missing(self._expected, self.layout.optional)
        if missing:
            problems = [
                ManifestProblem(kind=ProblemKind.MISSING, name=name).model_dump(mode="json")
                for name in missing[:NAMED_OFFENDERS]
            ]
            raise WeightPushError(
                ErrorCode.PROOF_FAILED,
                f"tensor {missing[0]!r} never arrived ({len(missing)} of {len(self._expected)} missing). "
                "Push the complete checkpoint",
                details={"tensor": missing[0], "missing": len(missing), "problems": problems},
            )

    def _check_poison(self, module: nn.Module) -> None:
        """Look for poison in the weights of ``module``, if there was any."""
        for name, tensor in module.named_parameters() if self.poisoned else ():
            if tensor.is_floating_point() and tensor.float().isnan().any():
                raise unproven(name, "it holds NaN after a landing onto NaN")

    def learn_required(self) -> None:
        """After dummy weights: what this complete push wrote is what every later one must write."""
        for index, (group, place) in enumerate(zip(self.layout.groups, find_places(self.layout.groups), strict=True)):
            if place is None:
                continue
            group.required = self._written(index, place).within(place.start, place.end)
            if len(group.required) == group.nbytes:
                group.kept = None
        if self.layout.checkpoint is None:
            self.layout.checkpoint = tuple(self._expected.values())
        self.layout.from_dummy = False


def foresee_ways(layout: ModelLayout, plan: Plan, specs: Sequence[TensorSpec]) -> str:
    """Return the letters that :meth:`ReloadSession.ways` will give, before the model is opened."""
    places = zip(layout.groups, find_places(layout.groups), strict=True)
    scratch = {index for index, (group, place) in enumerate(places) if (group.retained or place) is None}
    return plan.remembered(specs, frozenset(scratch), lambda: _ways(layout, plan, specs, scratch))


def _ways(layout: ModelLayout, plan: Plan | None, specs: Iterable[TensorSpec], scratch: Container[int]) -> str:
    def way(name: str) -> Way:
        if name in layout.optional:
            return Way.NOWHERE
        program = plan.programs.get(name) if plan is not None else None
        if program is None:
            return Way.LOADER
        if not program.steps:
            return Way.NOWHERE
        return Way.SCRATCH if any(index in scratch for index in program.groups) else Way.IN_PLACE

    return "".join(way(spec.name) for spec in specs)


def _wanted(entries: Entries, check_wanted: Callable[[], None]) -> Iterator[tuple[TensorSpec, int]]:
    for entry in entries:
        check_wanted()
        yield entry


class _Current:
    """The name of the tensor that is being landed."""

    name: str | None = None


class _Stream(_Current):
    """The tensors as the model's loaders read them."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]], read_only: bool) -> None:
        self._tensors = tensors
        self._read_only = read_only

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors:
            self.name = name
            yield name, tensor.clone() if self._read_only else tensor


def _require_same(expected: TensorSpec, tensor: torch.Tensor) -> None:
    try:
        given = TensorSpec.of(expected.name, tensor)
    except ValueError as error:
        raise _failed(expected.name, str(error), error) from error
    problems = compare_manifest([expected], [given])
    if problems:
        raise _failed(expected.name, f"expected {problems[0].expected}, given {problems[0].given}")


def _failed(name: str | None, reason: str, cause: BaseException | None = None) -> WeightPushError:
    subject = f"tensor {name!r}" if name is not None else "the first tensor"
    return WeightPushError(
        ErrorCode.LANDING_FAILED,
        f"{subject} could not be loaded: {reason}. Push a complete checkpoint to repair the model",
        details={
            "tensor": name,
            "exception": type(cause).__name__ if cause is not None else None,
            "error": str(cause) if cause is not None else reason,
        },
    )
