"""What a model's loaders do with the tensors of a manifest, watched on tensors without data.

Sources and stand-ins lie on the meta device, so an operator costs microseconds whatever its size, and whose bytes flow
where shows in the storages that operators read and write. A tensor that loaders only move (views, casting copies,
concatenation, contiguous copies) is *copied*; one that they compute with is *opaque*, and stays with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from weightpush_protocol.manifest import TensorSpec
from weightpush_server.reload.program import Buffer, Kind, Step, View
from weightpush_server.reload.standins import StandIns
from weightpush_server.reload.storage import StorageRef, storage_id

#: Operators that make a new tensor with the elements of their input, in their order or another.
_COPIES: Final = frozenset({"aten::clone", "aten::_to_copy", "aten::_reshape_copy", "aten::contiguous"})
_BLANKS: Final = frozenset({"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"})
_CONSTANTS: Final = {
    "aten::zeros": 0.0,
    "aten::zeros_like": 0.0,
    "aten::new_zeros": 0.0,
    "aten::ones": 1.0,
    "aten::ones_like": 1.0,
    "aten::new_ones": 1.0,
}
#: Operators whose result, or its shape, depends on values.
_ASKS_FOR_VALUES: Final = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::is_nonzero",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
    }
)


class AsksForValues(Exception):
    """A loader wants to know a value of the tensors at ``sources``, and there is none."""

    def __init__(self, operator: str, sources: set[int]) -> None:
        super().__init__(f"{operator} needs values")
        self.sources = sources


@dataclass(eq=False)
class Tracked:
    """A storage that takes part.

    Attributes:
        buffer: which one it is.
        nbytes: its size.
        sources: whose bytes flowed into it.
        opaque: its content is more than a rearrangement of these.
        reference: keeps the storage's identity from being given out again.
    """

    buffer: Buffer
    nbytes: int
    reference: StorageRef
    sources: set[int] = field(default_factory=set)
    opaque: bool = False


@dataclass(frozen=True)
class Recorded:
    """A step, the storages it writes and reads (None: a fill), and the source whose turn it was."""

    step: Step
    target: Tracked
    origin: Tracked | None
    turn: int | None


@dataclass(frozen=True)
class OpaqueWrite:
    """A loader wrote something to a group that is no copy of a source."""

    target: View
    sources: set[int]


@dataclass
class Trace:
    """What was seen.

    Attributes:
        steps: copies and fills, in order.
        opaque: other writes to groups whose extent is known.
        by_loader: sources that only the loaders can land.
        transformed: groups that loaders read, or changed in place.
        replaced: groups of which a loader exchanged a tensor.
        unattributed: something was written while no source was being loaded.
    """

    steps: list[Recorded] = field(default_factory=list)
    opaque: list[OpaqueWrite] = field(default_factory=list)
    by_loader: set[int] = field(default_factory=set)
    transformed: set[int] = field(default_factory=set)
    replaced: set[int] = field(default_factory=set)
    unattributed: bool = False


class Sources:
    """The tensors of a manifest without data, and which of them is being loaded."""

    def __init__(self, specs: Sequence[TensorSpec], left_out: set[int]) -> None:
        self.turn: int | None = None
        self._specs = specs
        self.tensors = {
            index: torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta")
            for index, spec in enumerate(specs)
            if index not in left_out
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, tensor in self.tensors.items():
            self.turn = index
            yield self._specs[index].name, tensor
        self.turn = None


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While entered, follows the elements of ``sources`` and keeps every operator off real tensors.

    What loaders make for themselves (constants, index tables) is computed; what they would write to any other tensor
    that has storage is not written, and counts as a transformation.
    """

    def __init__(self, sources: Sources, standing_in: StandIns) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.trace = Trace()
        self._sources = sources
        self._tracked: dict[int, Tracked] = {}
        self._own: dict[int, StorageRef] = {}
        self._temporaries = 0
        for index, tensor in sources.tensors.items():
            self._track(tensor.untyped_storage(), Buffer(Kind.SOURCE, index)).sources.add(index)
        for index, storage in enumerate(standing_in.storages):
            self._track(storage, Buffer(Kind.GROUP, index))

    def find(self, tensor: torch.Tensor) -> Tracked | None:
        """Return what is known of the storage under ``tensor``."""
        return self._tracked.get(storage_id(tensor))

    def note_kept(self, tensors: Iterator[torch.Tensor]) -> None:
        """After loading: sources that the model holds on to, by adopting or stashing them, are not copied anywhere."""
        for tensor in tensors:
            tracked = self.find(tensor) if tensor.layout == torch.strided else None
            if tracked is not None and tracked.buffer.kind is not Kind.GROUP:
                self.trace.by_loader |= tracked.sources

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = _operator(func)
        if operator.is_view:
            return func(*args, **kwargs)  # Another look at the same storage, whatever that is.
        name = operator.name
        inputs = _tensors(args)
        if kwargs:
            inputs += _tensors(kwargs.values())
        if name in _ASKS_FOR_VALUES and any(tensor.is_meta for tensor in inputs):
            self._read(inputs)
            sources = self._sources_of(inputs) or self._turn()
            # Noted as well, in case the loader catches what is raised and goes on.
            self._by_loader(sources | self._turn())
            raise AsksForValues(name, sources)
        if operator.writes and (written := _written(operator, args, kwargs)):
            return self._write(func, args, kwargs, inputs, written)
        result = self._compute(func, args, kwargs, inputs)
        self._note_made(name, args, inputs, result)
        return result

    # Operators that make tensors or views

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
        if any(tensor.is_meta for tensor in inputs):
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("meta")}
            if any(not tensor.is_meta and tensor.dim() for tensor in inputs):
                args, kwargs = tree_map(_to_meta, (args, kwargs))
        return func(*args, **kwargs)

    def _note_made(self, name: str, args: Any, inputs: list[torch.Tensor], result: Any) -> None:
        for made in _tensors((result,)):
            if made.layout != torch.strided or self.find(made) is not None:
                continue
            known = {storage_id(tensor) for tensor in inputs if tensor.layout == torch.strided}
            if storage_id(made) in known:
                continue  # A view of a tensor that takes no part.
            dense = [tensor for tensor in inputs if tensor.layout == torch.strided]
            tracked = [found for tensor in dense if (found := self.find(tensor)) is not None]
            if not made.is_meta:
                self._own[storage_id(made)] = StorageRef(made.untyped_storage())
                continue
            fresh = self._track(made.untyped_storage(), Buffer(Kind.TEMPORARY, self._temporaries))
            self._temporaries += 1
            if name in _COPIES and len(tracked) == 1 and tracked[0].buffer.kind is not Kind.GROUP:
                self._copy(made, fresh, inputs[0], tracked[0])
            elif name in ("aten::cat", "aten::stack"):
                self._concatenate(name, made, fresh, args)
            elif name in _CONSTANTS:
                self._record(Step(View.of(fresh.buffer, made), None, _CONSTANTS[name]), fresh, None)
            elif name not in _BLANKS:
                self._read(inputs)
                fresh.opaque = True
                fresh.sources |= self._sources_of(inputs)

    def _concatenate(self, name: str, made: torch.Tensor, fresh: Tracked, args: Any) -> None:
        dim = args[1] if len(args) > 1 else 0
        start = 0
        for part in args[0]:
            if name == "aten::stack":
                piece = made.select(dim, start)
                start += 1
            elif part.numel() == 0:
                continue  # cat takes an empty vector beside tensors of any shape.
            else:
                piece = made.narrow(dim, start, part.shape[dim])
                start += part.shape[dim]
            self._copy(piece, fresh, part, self.find(part))

    # Operators that write

    def _write(
        self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor], written: list[torch.Tensor]
    ) -> Any:
        name = func._schema.name
        # What is written is read as well, but for operators that overwrite.
        overwrites = name in ("aten::copy_", "aten::fill_", "aten::zero_")
        read = [tensor for tensor in inputs if not (overwrites and tensor is args[0])]
        if any(not tensor.is_meta for tensor in written):
            return self._write_real(func, args, kwargs, read, written)
        (args_, kwargs_) = (args, kwargs) if name == "aten::copy_" else tree_map(_to_meta, (args, kwargs))
        result = func(*args_, **kwargs_)
        if name == "aten::copy_":
            self._note_copy(args[0], args[1])
        elif overwrites and (value := _fill_value(name, args)) is not None:
            tracked = self.find(args[0])
            if tracked is not None:
                self._fill(args[0], tracked, value)
        else:
            self._read(read)
            for tensor in written:
                self._transform(tensor, self.find(tensor), self._sources_of(read))
        return result

    def _write_real(
        self, func: Any, args: Any, kwargs: dict[str, Any], read: list[torch.Tensor], written: list[torch.Tensor]
    ) -> Any:
        own = all(storage_id(tensor) in self._own for tensor in written)
        if own and all(not tensor.is_meta and self.find(tensor) is None for tensor in read):
            return func(*args, **kwargs)
        # Either without data to write, or into a live tensor: done on paper only.
        self._read(read)
        sources = self._sources_of(read)
        if own:
            for tensor in written:
                tracked = self.find(tensor) or self._track(
                    tensor.untyped_storage(), Buffer(Kind.TEMPORARY, self._temporaries)
                )
                self._temporaries += 1
                tracked.opaque = True
                tracked.sources |= sources
        else:
            self._by_loader(sources or self._turn())
        return written[0] if len(written) == 1 else tuple(written)

    def _note_copy(self, target: torch.Tensor, origin: torch.Tensor) -> None:
        tracked = self.find(target)
        if tracked is not None:
            self._copy(target, tracked, origin.expand(target.shape), self.find(origin))

    def _copy(self, target: torch.Tensor, tracked: Tracked, origin: torch.Tensor, source: Tracked | None) -> None:
        """Note that ``origin`` is copied onto ``target``, whose storage is ``tracked``."""
        known = source is not None and not source.opaque and source.buffer.kind is not Kind.GROUP
        if tracked.buffer.kind is Kind.SOURCE or source is None or not known:
            self._read([origin])
            self._transform(target, tracked, set(source.sources) if source is not None else set(), overwrites=True)
            return
        step = Step(View.of(tracked.buffer, target), View.of(source.buffer, origin.expand(target.shape)))
        self._record(step, tracked, source)
        if tracked.buffer.kind is Kind.TEMPORARY:
            tracked.sources |= source.sources

    def _fill(self, target: torch.Tensor, tracked: Tracked, value: float) -> None:
        if tracked.buffer.kind is Kind.SOURCE:
            self._transform(target, tracked, set())
        else:
            self._record(Step(View.of(tracked.buffer, target), None, value), tracked, None)

    def _record(self, step: Step, target: Tracked, origin: Tracked | None) -> None:
        turn = self._sources.turn
        if turn is None and target.buffer.kind is Kind.GROUP and origin is None:
            self.trace.unattributed = True
        self.trace.steps.append(Recorded(step, target, origin, turn))

    def _transform(
        self, tensor: torch.Tensor, tracked: Tracked | None, sources: set[int], *, overwrites: bool = False
    ) -> None:
        """Note that ``tensor`` gets a content that is no copy of a source."""
        if tracked is None:
            return
        kind, index = tracked.buffer
        if kind is Kind.GROUP:
            who = sources or self._turn()
            self._by_loader(who)
            if overwrites:
                self.trace.opaque.append(OpaqueWrite(View.of(tracked.buffer, tensor), who))
            else:
                self.trace.transformed.add(index)
        else:
            if kind is Kind.SOURCE:
                self._by_loader({index})
            tracked.opaque = True
            tracked.sources |= sources

    # Whose bytes

    def _track(self, storage: torch.UntypedStorage, buffer: Buffer) -> Tracked:
        tracked = Tracked(buffer, storage.nbytes(), StorageRef(storage))
        self._tracked[tracked.reference.id] = tracked
        return tracked

    def _turn(self) -> set[int]:
        return set() if self._sources.turn is None else {self._sources.turn}

    def _by_loader(self, sources: set[int]) -> None:
        self.trace.by_loader |= sources
        self.trace.unattributed |= not sources

    def _sources_of(self, tensors: list[torch.Tensor]) -> set[int]:
        found = (self.find(tensor) for tensor in tensors if tensor.layout == torch.strided)
        return {source for tracked in found if tracked is not None for source in tracked.sources}

    def _read(self, tensors: list[torch.Tensor]) -> None:
        """Note that values of ``tensors`` are computed with. What landed in a group is part of the result then."""
        for tensor in tensors:
            tracked = self.find(tensor) if tensor.layout == torch.strided else None
            if tracked is not None and tracked.buffer.kind is Kind.GROUP:
                self.trace.transformed.add(tracked.buffer.number)


def watch(
    load_weights: Callable[..., Any], sources: Sources, standing_in: StandIns, kept: Callable[[], Iterator[Any]]
) -> Trace:
    """Run ``load_weights`` on ``sources`` and return what it did. ``kept`` yields all tensors that the model reaches.

    Raises whatever the loaders raise, and :class:`AsksForValues`; ``sources.turn`` says then what was being loaded.
    """
    tracer = Tracer(sources, standing_in)
    with tracer:
        load_weights(iter(sources))
    tracer.note_kept(kept())
    tracer.trace.replaced = set(standing_in.replaced())
    return tracer.trace


class _Operator(NamedTuple):
    """Name of an operator; position and name of each argument that it writes; whether it only makes views."""

    name: str
    writes: tuple[tuple[int, str], ...]
    is_view: bool


@cache
def _operator(func: Any) -> _Operator:
    schema = func._schema
    writes = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if schema.is_mutable and argument.alias_info is not None and argument.alias_info.is_write
    ]
    views = [result.alias_info is not None and not result.alias_info.is_write for result in schema.returns]
    return _Operator(schema.name, tuple(writes), is_view=bool(views) and all(views) and not schema.is_mutable)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments or results of an operator: these hold nothing deeper than lists of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def _written(operator: _Operator, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes, as its schema says."""
    return _tensors(args[position] if position < len(args) else kwargs.get(name) for position, name in operator.writes)


def _fill_value(name: str, args: Any) -> float | None:
    if name == "aten::zero_":
        return 0.0
    value = args[1] if len(args) > 1 else None
    if isinstance(value, torch.Tensor):
        return float(value) if not value.is_meta and value.dim() == 0 and not value.is_complex() else None
    return value if isinstance(value, (bool, int, float)) else None


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_meta and value.dim():
        return value.to("meta")
    return value
