"""What remains of the checkpoint's bytes between updates, and how post-load processing is kept from spoiling it.

Processing reads a group's bytes and either leaves them where they are, or takes them away, or writes over them. Nobody
says which; a digest of before and after tells. What is left of the bytes decides what a partial update may leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from weightpush_server.config import StoragePolicy
from weightpush_server.reload.contract import Contract
from weightpush_server.reload.coverage import ByteRanges
from weightpush_server.reload.fingerprint import tensor_objects
from weightpush_server.reload.layout import ModelLayout, StorageGroup, on_meta
from weightpush_server.reload.opening import Opened, find_places, first_missing, is_intact, open_group
from weightpush_server.reload.seal import Seal
from weightpush_server.reload.storage import Place

#: Storages that processing reads, by ``id`` of their group. Whoever holds this keeps them alive.
Held = dict[int, Place]


def before_processing(layout: ModelLayout, opened: Opened, done: Collection[int] = frozenset()) -> Held:
    """Note what processing is about to read; under ``retain``, hold it, and hand out copies where it would be spoilt.

    Every group must be open, but for those at the indices ``done``, which are processed already.
    """
    held: Held = {}
    for index, (group, place) in enumerate(zip(layout.groups, find_places(layout.groups), strict=True)):
        if index in done:
            continue
        if place is None or (layout.policy is not StoragePolicy.RETAIN and opened.is_scratch(group)):
            # Nothing will be left of it.
            group.landed = None
            continue
        group.landed = place.digest()
        if layout.policy is not StoragePolicy.RETAIN:
            continue
        if group.overwritten:
            group.retained = place
            copy = Place.new(group.nbytes, group.device)
            with torch.inference_mode(False), torch.no_grad():
                copy.bytes().copy_(place.bytes())
                open_group(group, copy)
        else:
            held[id(group)] = place
    return held


def after_processing(layout: ModelLayout, held: Held) -> None:
    """Under ``retain``, see what became of the storages that processing read, and keep what must be kept."""
    if layout.policy is not StoragePolicy.RETAIN:
        return
    for group, now in zip(layout.groups, find_places(layout.groups), strict=True):
        if (read := held.get(id(group))) is None:
            continue
        if is_intact(group, read):
            # Where the model itself goes on holding the bytes, it need not be done twice.
            group.retained = None if now is not None and now.same(read) else read
        else:
            _spoilt(group)


def _spoilt(group: StorageGroup) -> None:
    group.overwritten = True
    group.retained = group.landed = None
    if group.shadow is not None:
        group.retained = Place(group.shadow.untyped_storage(), 0, group.nbytes)
        group.landed = group.retained.digest()


def hold_loaded(layout: ModelLayout, *, shadows: bool) -> None:
    """Note what the first processing is about to read, right after loading.

    ``shadows`` takes a copy of everything, for the self-check.
    """
    for group, place in zip(layout.groups, find_places(layout.groups), strict=True):
        if place is None:
            continue
        group.landed = place.digest()
        if shadows:
            group.shadow = place.bytes().clone()
        if layout.policy is StoragePolicy.RETAIN:
            layout.held[id(group)] = place


def settle(model: nn.Module, layout: ModelLayout) -> None:
    """Note what post-load processing made of the model. Call it once, right after the cold start."""
    layout.journal.close()
    layout.contract = layout.settled = Contract.of(model, pin_devices=layout.pin_devices)
    layout.note_owners(model)
    layout.absent = layout.on_meta & on_meta(tensor_objects(model))
    layout.on_meta -= layout.absent
    after_processing(layout, layout.held)
    layout.held = {}
    for group, place in zip(layout.groups, find_places(layout.groups), strict=True):
        group.moved = place is None or not _in_place(group, place)
        if place is None or group.moved:
            continue
        if group.kept is not None and torch.equal(place.bytes(), group.kept):
            group.kept = None
        if group.kept is None and is_intact(group, place):
            group.shadow = None
    # What neither loading nor processing writes is no business of a push: the runtime may exchange it at will
    # (rotary tables are cast at the first forward).
    layout.groups = [group for group in layout.groups if len(group.required) or group.kept is not None]
    layout.seal = Seal(layout)


def _in_place(group: StorageGroup, place: Place) -> bool:
    """Whether every member is still registered as the object and in the layout that was recorded, on its storage."""
    if place.storage._cdata != group.storage.id:
        return False
    for member in group.members:
        tensor = member.live()
        if tensor is None or any(slot.get() is not tensor for slot in member.slots):
            return False
        if (tensor.shape, tensor.stride(), tensor.dtype) != (member.shape, member.stride, member.dtype):
            return False
    return True


def first_lost(
    layout: ModelLayout, covers: Callable[[StorageGroup], ByteRanges], untouched: Collection[int] = frozenset()
) -> tuple[StorageGroup, str] | None:
    """Return the first group that an update leaves out, wholly or in part, though its bytes are gone; and the tensor.

    ``covers`` says which bytes the update will write to a group, counted from the group's start. ``untouched``: indices
    of groups whose modules it leaves alone; of these it needs no bytes that processing took away. Changes nothing.
    """
    for index, (group, found) in enumerate(zip(layout.groups, find_places(layout.groups), strict=True)):
        if index in untouched and group.moved:
            continue
        name = first_missing(group, group.required, covers(group))
        if name is not None and not is_intact(group, group.retained or found):
            return group, name
    return None
