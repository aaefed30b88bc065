"""The checkpoint layout of a model: what its tensors looked like when loading was done and post-load processing had
not begun. Recorded once, at cold start; every push starts by giving the model this layout back.

Tensors are recorded in *groups* of those that share bytes (a convolution weight and the buffer that views it), since
they must keep sharing them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from weightpush_protocol.manifest import TensorSpec
from weightpush_server.reload.contract import Contract
from weightpush_server.reload.coverage import ByteRanges, WriteLog
from weightpush_server.reload.fingerprint import LAYOUT_ATTRIBUTE, tensor_objects
from weightpush_server.reload.journal import AttributeJournal
from weightpush_server.reload.storage import StorageRef, byte_range, extent, storage_bytes, storage_id
from weightpush_server.reload.tying import TiedHead, find_tied_head


@dataclass(frozen=True)
class Slot:
    """A place where a module registers a tensor."""

    module: nn.Module
    path: str
    name: str
    is_parameter: bool

    @property
    def full_name(self) -> str:
        """The tensor's name as ``named_parameters`` gives it."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def get(self) -> torch.Tensor | None:
        """Return what the module holds here now."""
        return self._tables[0].get(self.name)

    def set(self, tensor: torch.Tensor) -> None:
        """Register ``tensor`` here, also where processing left something of another kind under this name."""
        ours, others = self._tables
        self.module.__dict__.pop(self.name, None)
        others.pop(self.name, None)
        ours[self.name] = tensor

    @property
    def _tables(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The module's table for this kind of tensor, and the one for the other kind."""
        tables: tuple[dict[str, Any], dict[str, Any]] = (self.module._parameters, self.module._buffers)
        return tables if self.is_parameter else tables[::-1]


def data_less(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same class, dtype, device and attributes (``weight_loader`` and others), without data."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    twin: torch.Tensor = torch.Tensor._make_subclass(type(tensor), empty, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin


@dataclass
class Member:
    """One tensor object of the checkpoint layout; ``offset`` counts bytes from the start of its group.

    ``slots`` is empty for a tensor that a module holds as a plain attribute.
    """

    name: str
    template: torch.Tensor
    live: TensorWeakRef
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    slots: list[Slot]

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the end of the last element."""
        return extent(self.shape, self.stride, self.dtype.itemsize)


@dataclass
class StorageGroup:
    """Tensors that share bytes.

    ``required`` are the bytes (from the group's start) that a push must write, because the cold start did. ``kept``
    holds the group's bytes of before post-load processing, where the checkpoint does not bring all of them.
    """

    members: list[Member]
    nbytes: int
    device: torch.device
    storage: StorageRef
    required: ByteRanges
    kept: torch.Tensor | None

    @property
    def name(self) -> str:
        """The first member's name."""
        return self.members[0].name


@dataclass
class ModelLayout:
    """What a push must know about a model.

    Attributes:
        checkpoint: tensors of the checkpoint that the model was loaded from, in order; None if that is unknown.
        optional: tensors that a push may bring or leave out, because a cold start ignores them.
        groups: the recorded tensors that a push has to do with.
        journal: what processing changed beside tensors.
        quant_methods: path, module and type of each quantization method.
        tied_head: how the output head is tied to the embedding, if it is.
        from_dummy: the first complete push has yet to show which bytes a checkpoint writes.
        settled: what the model looked like after the cold start; None until post-load processing was seen.
        contract: what it looked like before the last update.
        is_open: an update was begun and not finished.
        updates: number of updates begun so far.
        on_meta: paths of tensors that had no storage when they were recorded, and got some since.
        absent: paths of tensors that never had storage: parts of the architecture that this server leaves out.
    """

    checkpoint: tuple[TensorSpec, ...] | None
    optional: dict[str, TensorSpec]
    groups: list[StorageGroup]
    journal: AttributeJournal
    quant_methods: list[tuple[str, nn.Module, type]]
    tied_head: TiedHead | None
    from_dummy: bool = False
    settled: Contract | None = None
    contract: Contract | None = None
    is_open: bool = False
    updates: int = 0
    on_meta: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()

    def settle(self, model: nn.Module) -> None:
        """Note what post-load processing made of the model. Call it once, right after the cold start."""
        self.journal.close()
        self.contract = self.settled = Contract.of(model)
        self.absent = self.on_meta & on_meta(model)
        self.on_meta -= self.absent
        for group in self.groups:
            if group.kept is not None and _untouched(group):
                group.kept = None
        # What neither loading nor processing writes is no business of a push: the runtime may exchange it at will
        # (rotary tables are cast at the first forward).
        self.groups = [group for group in self.groups if len(group.required) or group.kept is not None]


def record_layout(
    model: nn.Module,
    checkpoint: tuple[TensorSpec, ...] | None,
    *,
    writes: WriteLog | None = None,
    constructed: dict[int, torch.Tensor] | None = None,
) -> ModelLayout:
    """Record the layout of ``model``: call it when its weights are loaded and not yet processed.

    Args:
        model: the loaded model; its layout is kept with it.
        checkpoint: the tensors that were loaded, None if unknown.
        writes: what loading wrote. Without it no byte counts as loaded, and a copy of all is kept.
        constructed: for dummy weights, bytes of small tensors of before they were filled, by storage identity.

    Returns the layout; call :meth:`ModelLayout.settle` on it after post-load processing.
    """
    tied_head = find_tied_head(model, checkpoint)
    layout = ModelLayout(
        checkpoint=checkpoint,
        optional={tied_head.spec.name: tied_head.spec} if tied_head is not None else {},
        groups=_record_groups(model, writes or WriteLog(), constructed),
        journal=AttributeJournal(model),
        quant_methods=[
            (path, module, type(module.quant_method))
            for path, module in model.named_modules()
            if getattr(module, "quant_method", None) is not None
        ],
        tied_head=tied_head,
        from_dummy=constructed is not None,
        on_meta=on_meta(model),
    )
    # The layout lives and dies with its model: a table keyed by models would be kept alive by its own values.
    model.__dict__[LAYOUT_ATTRIBUTE] = layout
    return layout


def find_layout(model: nn.Module) -> ModelLayout | None:
    """Return the layout recorded for this very model, or None."""
    layout: ModelLayout | None = model.__dict__.get(LAYOUT_ATTRIBUTE)
    return layout


def on_meta(model: nn.Module) -> frozenset[str]:
    """Return the paths of all reachable tensors without storage."""
    return frozenset(path for path, tensor in tensor_objects(model) if tensor.is_meta)


def registered_slots(model: nn.Module) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Yield every place where a module of ``model`` registers a tensor, and the tensor; shared ones repeatedly."""
    for path, module in model.named_modules():
        for held, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in held.items():
                if tensor is not None:
                    yield Slot(module, path, name, is_parameter), tensor


def _record_groups(
    model: nn.Module, writes: WriteLog, constructed: dict[int, torch.Tensor] | None
) -> list[StorageGroup]:
    slots: defaultdict[int, list[Slot]] = defaultdict(list)
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for slot, tensor in registered_slots(model):
        slots[id(tensor)].append(slot)
        tensors.setdefault(id(tensor), (slot.full_name, tensor))
    storages = {storage_id(tensor) for _, tensor in tensors.values() if not tensor.is_meta}
    # A plain attribute matters where it views a registered tensor: it must go on doing so.
    for path, tensor in tensor_objects(model):
        if not tensor.is_meta and tensor.layout == torch.strided and storage_id(tensor) in storages:
            tensors.setdefault(id(tensor), (path, tensor))
    by_storage: defaultdict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in tensors.values():
        if not tensor.is_meta:
            by_storage[storage_id(tensor)].append((name, tensor))
    return [
        _record_group(group, slots, writes, constructed)
        for shared in by_storage.values()
        for group in _overlapping(shared)
    ]


def _overlapping(tensors: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Split tensors of one storage into sets that share bytes."""
    groups: list[list[tuple[str, torch.Tensor]]] = []
    end = -1
    for name, tensor in sorted(tensors, key=lambda item: byte_range(item[1])):
        start, stop = byte_range(tensor)
        if start < end:
            groups[-1].append((name, tensor))
        else:
            groups.append([(name, tensor)])
        end = max(end, stop)
    return groups


def _record_group(
    tensors: list[tuple[str, torch.Tensor]],
    slots: dict[int, list[Slot]],
    writes: WriteLog,
    constructed: dict[int, torch.Tensor] | None,
) -> StorageGroup:
    start = min(byte_range(tensor)[0] for _, tensor in tensors)
    end = max(byte_range(tensor)[1] for _, tensor in tensors)
    storage = tensors[0][1].untyped_storage()
    required = writes.ranges(storage).within(start, end)
    kept: torch.Tensor | None = None
    if constructed is not None and storage._cdata in constructed:
        # What dummy weights covered up can be given back, so a push need not bring it.
        kept, required = constructed[storage._cdata][start:end].clone(), ByteRanges()
    elif len(required) < end - start:
        kept = storage_bytes(storage, start, end).clone()
    return StorageGroup(
        members=[
            Member(
                name=name,
                template=data_less(tensor),
                live=TensorWeakRef(tensor),
                shape=tensor.shape,
                stride=tensor.stride(),
                dtype=tensor.dtype,
                offset=byte_range(tensor)[0] - start,
                slots=slots.get(id(tensor), []),
            )
            for name, tensor in tensors
        ],
        nbytes=end - start,
        device=tensors[0][1].device,
        storage=StorageRef(storage),
        required=required,
        kept=kept,
    )


def _untouched(group: StorageGroup) -> bool:
    """Whether processing left every member registered, in place, and with the bytes of before."""
    for member in group.members:
        tensor = member.live()
        if tensor is None or any(slot.get() is not tensor for slot in member.slots):
            return False
        same = (tensor.shape, tensor.stride(), tensor.dtype) == (member.shape, member.stride, member.dtype)
        if not same or storage_id(tensor) != group.storage.id:
            return False
        start = byte_range(tensor)[0] - member.offset
    storage = tensor.untyped_storage()
    return group.kept is not None and torch.equal(storage_bytes(storage, start, start + group.nbytes), group.kept)
