"""Giving a model its checkpoint layout back.

Where a weight still has storage of the right size, it is opened there, at the offset where it lives now; otherwise on
new storage. Nothing but the model holds the new storage: post-load processing frees it by replacing the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from weightpush_server.reload.coverage import ByteRanges
from weightpush_server.reload.layout import Member, StorageGroup, data_less
from weightpush_server.reload.storage import StorageRef, byte_range, storage_bytes


@dataclass(frozen=True)
class Place:
    """Where a group's bytes lie now: ``start`` counts bytes from the start of ``storage``."""

    storage: torch.UntypedStorage
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """Byte after the last one."""
        return self.start + self.nbytes

    def bytes(self) -> torch.Tensor:
        """Return a uint8 view."""
        return storage_bytes(self.storage, self.start, self.end)


def find_places(groups: list[StorageGroup]) -> list[Place | None]:
    """Return for each group where its tensors live now, or None where they cannot be opened in place.

    In place needs: every member is still there, all on one storage, as far apart and as long as recorded. Of two groups
    that would open on the same bytes (an output head that was tied after loading) the one that these bytes were
    recorded for takes them.
    """
    places = [_find_place(group) for group in groups]
    order = sorted(
        (index for index, place in enumerate(places) if place is not None and place.nbytes),
        key=lambda index: _key(places[index]),
    )
    winner: int | None = None
    for index in order:
        if winner is None or not _overlap(places[winner], places[index]):
            winner = index
        elif _owns(groups[index], places[index]) and not _owns(groups[winner], places[winner]):
            places[winner] = None
            winner = index
        else:
            places[index] = None
    return places


def _key(place: Place | None) -> tuple[int, int]:
    assert place is not None
    return place.storage._cdata, place.start


def _overlap(first: Place | None, second: Place | None) -> bool:
    assert first is not None
    assert second is not None
    return first.storage._cdata == second.storage._cdata and second.start < first.end


def _owns(group: StorageGroup, place: Place | None) -> bool:
    return place is not None and group.storage.alive and group.storage.id == place.storage._cdata


def _current(member: Member) -> torch.Tensor | None:
    """Return the tensor that stands for ``member`` now, or None if there is none or its slots disagree."""
    if not member.slots:
        alive: torch.Tensor | None = member.live()
        return alive
    tensor = member.slots[0].get()
    return tensor if all(slot.get() is tensor for slot in member.slots) else None


def _find_place(group: StorageGroup) -> Place | None:
    storage: torch.UntypedStorage | None = None
    start: int | None = None
    for member in group.members:
        tensor = _current(member)
        if tensor is None:
            if member.slots:
                return None
            continue
        if tensor.is_meta or tensor.is_inference() or tensor.layout != torch.strided or tensor.device != group.device:
            return None
        first, last = byte_range(tensor)
        if last - first != member.nbytes:
            return None
        if storage is None:
            storage, start = tensor.untyped_storage(), first - member.offset
        elif storage._cdata != tensor.untyped_storage()._cdata or start != first - member.offset:
            return None
    if storage is None or start is None or start < 0 or start + group.nbytes > storage.nbytes():
        return None
    aligned = all((start + member.offset) % member.dtype.itemsize == 0 for member in group.members)
    return Place(storage, start, group.nbytes) if aligned else None


@dataclass(frozen=True)
class Opened:
    """How a model was opened. Bytes."""

    in_place: int
    scratch: int


def open_groups(groups: list[StorageGroup], *, poison: bool = False) -> Opened:
    """Register every recorded tensor again, in its checkpoint layout.

    Contents are undefined afterwards, except where the checkpoint does not bring a group completely: there the bytes
    of before post-load processing are put back. ``poison`` fills what a push must write with NaN or extreme values.
    """
    places = find_places(groups)
    scratch = 0
    with torch.no_grad():
        for group, found in zip(groups, places, strict=True):
            place = found or _new_place(group)
            scratch += group.nbytes if found is None else 0
            for member in group.members:
                _open_member(member, place)
            group.storage = StorageRef(place.storage)
            if group.kept is not None:
                place.bytes().copy_(group.kept)
            if poison:
                _poison(group, place)
    return Opened(in_place=sum(group.nbytes for group in groups) - scratch, scratch=scratch)


def _new_place(group: StorageGroup) -> Place:
    storage = torch.empty(group.nbytes, dtype=torch.uint8, device=group.device).untyped_storage()
    return Place(storage, 0, group.nbytes)


def _open_member(member: Member, place: Place) -> None:
    tensor = member.live()
    if tensor is None:
        if not member.slots:
            return
        # The object that loading filled is gone, and with it the attributes that loaders need: take its twin.
        tensor = data_less(member.template)
        member.live = TensorWeakRef(tensor)
    view = torch.empty(0, dtype=member.dtype, device=place.storage.device)
    offset = (place.start + member.offset) // member.dtype.itemsize
    tensor.data = view.set_(place.storage, offset, member.shape, member.stride)
    for slot in member.slots:
        slot.set(tensor)


def _poison(group: StorageGroup, place: Place) -> None:
    # All ones are NaN in every float format that travels; 0x80 repeated is far below any quantized weight in use.
    pattern = 0xFF if group.members[0].dtype.is_floating_point else 0x80
    raw = place.bytes()
    for start, end in group.required:
        raw[start:end].fill_(pattern)


def unwritten(group: StorageGroup, place: Place, written: ByteRanges) -> str | None:
    """Return the name of the member that holds the first required byte which was not written, or None."""
    missing = written.within(place.start, place.end).first_missing(group.required)
    if missing is None:
        return None
    for member in group.members:
        if member.offset <= missing < member.offset + member.nbytes:
            return member.name
    return group.name
