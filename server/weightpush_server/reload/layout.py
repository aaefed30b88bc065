"""The checkpoint layout of a model: what its tensors looked like when loading was done and post-load processing had
not begun. Recorded once, at cold start; every push starts by giving the model this layout back.

Tensors are recorded in *groups* of those that share bytes (a convolution weight and the buffer that views it), since
they must keep sharing them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef
from vllm.model_executor.utils import is_weights_pre_processed

from weightpush_protocol.manifest import TensorSpec
from weightpush_server.config import StoragePolicy
from weightpush_server.reload.contract import PIN_DEVICES, Contract
from weightpush_server.reload.coverage import ByteRanges, WriteLog
from weightpush_server.reload.fingerprint import LAYOUT_ATTRIBUTE, tensor_objects
from weightpush_server.reload.journal import AttributeJournal
from weightpush_server.reload.seal import Seal
from weightpush_server.reload.storage import Place, StorageRef, byte_range, extent, storage_bytes, storage_id
from weightpush_server.reload.tying import TiedHead, find_tied_head

if TYPE_CHECKING:
    from weightpush_server.hostcopy import HostCopy


@dataclass(frozen=True)
class Slot:
    """A place where a module holds a tensor: registers it, or has it as a plain attribute."""

    module: nn.Module
    path: str
    name: str
    is_parameter: bool
    is_attribute: bool = False

    @property
    def full_name(self) -> str:
        """The tensor's name as ``named_parameters`` gives it."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def get(self) -> torch.Tensor | None:
        """Return what the module holds here now."""
        return self._tables[0].get(self.name)

    def set(self, tensor: torch.Tensor) -> None:
        """Register ``tensor`` here, also where processing left something of another kind under this name."""
        ours, *others = self._tables
        for table in others:
            table.pop(self.name, None)
        ours[self.name] = tensor

    @property
    def _tables(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The module's table for this kind of tensor, and those for the other kinds."""
        registered: tuple[dict[str, Any], dict[str, Any]] = (self.module._parameters, self.module._buffers)
        if self.is_attribute:
            return vars(self.module), *registered
        return (*(registered if self.is_parameter else registered[::-1]), vars(self.module))


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

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the first to the end of the last element."""
        return extent(self.shape, self.stride, self.dtype.itemsize)


@dataclass
class StorageGroup:
    """Tensors that share bytes. All ranges are counted from the group's start.

    Attributes:
        members: the tensors.
        nbytes: from the first byte of any to the last.
        device: where they live.
        storage: the storage that they were opened on last.
        required: bytes that a complete push must write, because the cold start did.
        kept: bytes of before post-load processing, where the checkpoint does not bring all of them.
        needed: bytes that the running update must write; None for all that are required.
        landed: digest of the bytes when post-load processing last saw them; None if they are unknown.
        retained: where the bytes are kept in checkpoint layout (policy ``retain``); None where the model itself holds
            them, or nobody does.
        overwritten: processing writes into what it reads: under ``retain`` it gets a copy.
        moved: processing put something else in the place of its tensors.
        shadow: a copy of the bytes for the self-check, between recording and its end.
    """

    members: list[Member]
    nbytes: int
    device: torch.device
    storage: StorageRef
    required: ByteRanges
    kept: torch.Tensor | None
    needed: ByteRanges | None = None
    landed: str | None = None
    retained: Place | None = None
    overwritten: bool = False
    moved: bool = False
    shadow: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The first member's name."""
        return self.members[0].name

    def registered(self) -> list[torch.Tensor | None]:
        """Return what modules hold now in all places of its members."""
        return [slot.get() for member in self.members for slot in member.slots]


class SelfCheckOutcome(StrEnum):
    """What became of the self-check. ``skipped``: there was no memory for it."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    OFF = "off"


@dataclass(frozen=True)
class SelfCheck:
    """Whether post-load processing of this model can be repeated: of a failure, the first tensor and the reason."""

    outcome: SelfCheckOutcome
    offender: str = ""
    reason: str = ""


@dataclass
class ModelLayout:
    """What a push must know about a model.

    Attributes:
        checkpoint: tensors of the checkpoint that the model was loaded from, in order; None if that is unknown.
        optional: tensors that a push may bring or leave out, because a cold start ignores them.
        groups: the recorded tensors that a push has to do with.
        journal: what processing changed beside tensors.
        quant_methods: path, module and type of each quantization method.
        has_hook: the model as a whole takes part in processing, and may change any module.
        tied_head: how the output head is tied to the embedding, if it is.
        from_dummy: the first complete push has yet to show which bytes a checkpoint writes.
        settled: what the model looked like after the cold start; None until post-load processing was seen.
        contract: what it looked like before the last update.
        is_open: an update was begun and not finished.
        updates: number of updates begun so far.
        on_meta: paths of tensors that had no storage when they were recorded, and got some since.
        absent: paths of tensors that never had storage: parts of the architecture that this server leaves out.
        host_copy: the checkpoint tensors that were loaded, where this worker keeps them.
        digests: of the checkpoint tensors that were loaded, as far as this rank took them.
        policy: where updates write what processing took away.
        owners: modules that registered a parameter under this name, when it was recorded or after processing.
        preprocessed: the weights came in runtime layout, so no checkpoint layout was ever seen.
        pin_devices: types of devices on which no address may change.
        self_check: whether processing was seen to be repeatable.
        seal: what processing left behind last; None before the cold start has ended.
        held: under ``retain``, while the cold start processes: what it reads, by ``id`` of the group.
    """

    checkpoint: tuple[TensorSpec, ...] | None
    optional: dict[str, TensorSpec]
    groups: list[StorageGroup]
    journal: AttributeJournal
    quant_methods: list[tuple[str, nn.Module, type]]
    tied_head: TiedHead | None
    has_hook: bool = False
    from_dummy: bool = False
    settled: Contract | None = None
    contract: Contract | None = None
    is_open: bool = False
    updates: int = 0
    on_meta: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    digests: dict[str, str] = field(default_factory=dict)
    host_copy: HostCopy | None = None
    policy: StoragePolicy = StoragePolicy.SCRATCH
    owners: dict[str, list[nn.Module]] = field(default_factory=dict)
    preprocessed: bool = False
    pin_devices: frozenset[str] = PIN_DEVICES
    self_check: SelfCheck = field(default_factory=lambda: SelfCheck(SelfCheckOutcome.OFF))
    seal: Seal | None = None
    held: dict[int, Place] = field(default_factory=dict)

    def note_owners(self, model: nn.Module) -> None:
        """Note which modules register which parameters now."""
        for slot, _ in registered_slots(model):
            owners = self.owners.setdefault(slot.full_name, [])
            if slot.is_parameter and all(owner is not slot.module for owner in owners):
                owners.append(slot.module)


def record_layout(
    model: nn.Module,
    checkpoint: tuple[TensorSpec, ...] | None,
    *,
    writes: WriteLog | None = None,
    constructed: dict[int, torch.Tensor] | None = None,
    policy: StoragePolicy = StoragePolicy.SCRATCH,
    pin_devices: frozenset[str] = PIN_DEVICES,
) -> ModelLayout:
    """Record the layout of ``model``: call it when its weights are loaded and not yet processed.

    Args:
        model: the loaded model; its layout is kept with it.
        checkpoint: the tensors that were loaded, None if unknown.
        writes: what loading wrote. Without it no byte counts as loaded, and a copy of all is kept.
        constructed: for dummy weights, bytes of small tensors of before they were filled, by storage identity.
        policy: where updates are to write what processing takes away.
        pin_devices: types of devices on which updates must not change an address.

    Returns the layout; call ``retention.settle`` after post-load processing.
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
        has_hook=hasattr(model, "process_weights_after_loading"),
        from_dummy=constructed is not None,
        on_meta=on_meta(tensor_objects(model)),
        policy=policy,
        preprocessed=is_weights_pre_processed(),
        pin_devices=pin_devices,
    )
    layout.note_owners(model)
    # The layout lives and dies with its model: a table keyed by models would be kept alive by its own values.
    model.__dict__[LAYOUT_ATTRIBUTE] = layout
    return layout


def find_layout(model: nn.Module) -> ModelLayout | None:
    """Return the layout recorded for this very model, or None."""
    layout: ModelLayout | None = model.__dict__.get(LAYOUT_ATTRIBUTE)
    return layout


def on_meta(objects: Iterable[tuple[str, torch.Tensor]]) -> frozenset[str]:
    """Return the paths of those of ``objects``, all reachable tensors, that have no storage."""
    return frozenset(path for path, tensor in objects if tensor.is_meta)


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
    # A plain attribute that was loaded is a weight like any other.
    for path, module in model.named_modules():
        for name, tensor in vars(module).items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or storage_id(tensor) in storages:
                continue
            if len(writes.ranges(tensor.untyped_storage())):
                slot = Slot(module, path, name, is_parameter=False, is_attribute=True)
                slots[id(tensor)].append(slot)
                tensors.setdefault(id(tensor), (slot.full_name, tensor))
    # Any other matters where it views a registered tensor: it must go on doing so.
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
