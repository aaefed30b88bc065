"""Giving a model its checkpoint layout back.

Where the checkpoint bytes of a weight are retained, it is opened on them. Where it still has storage of the right size,
it is opened there, at the offset where it lives now; otherwise on scratch storage, which is taken when the first bytes
for it arrive. Nothing but the model holds scratch storage once the update closes: post-load processing frees it by
replacing the tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.utils.weak import TensorWeakRef

from weightpush_server.reload.coverage import ByteRanges
from weightpush_server.reload.layout import Member, StorageGroup, data_less
from weightpush_server.reload.storage import Place, StorageRef, byte_range


def find_places(groups: list[StorageGroup]) -> list[Place | None]:
    """Return for each group where its tensors live now, or None where they cannot be opened in place.

    In place needs: every member is still there, all on one storage, as far apart and as long as recorded. Of two groups
    that would open on the same bytes (an output head that was tied after loading) the one that these bytes were
    recorded for takes them.
    """
    places = [find_place(group) for group in groups]
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


def find_place(group: StorageGroup) -> Place | None:
    """Return where the tensors of ``group`` live now, or None where they cannot be opened in place."""
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


def overlapping(groups: list[StorageGroup]) -> tuple[StorageGroup, StorageGroup] | None:
    """Return two groups whose tensors now share some of their bytes without lying on exactly the same, or None."""
    found = [(group, place) for group in groups if (place := find_place(group)) is not None and place.nbytes]
    found.sort(key=lambda item: _key(item[1]))
    for index, (group, place) in enumerate(found):
        for other, next_place in found[index + 1 :]:
            if not _overlap(place, next_place):
                break
            if not place.same(next_place):
                return group, other
    return None


class Opened:
    """A model that is being opened, group by group.

    Attributes:
        in_place: bytes opened on storage that was there.
        scratch: bytes for which there was none.
    """

    def __init__(self, groups: list[StorageGroup], places: list[Place | None], *, poison: bool) -> None:
        self._poison = poison
        self._places: dict[int, Place] = {}
        self._pending: dict[int, StorageGroup] = {}
        self._scratch: set[int] = set()
        self.in_place = self.scratch = 0
        for group, place in zip(groups, places, strict=True):
            if place is not None:
                self.in_place += group.nbytes
                self._open(group, place)
            else:
                self.scratch += group.nbytes
                self._pending[id(group)] = group
                self._scratch.add(id(group))

    def take(self, group: StorageGroup) -> Place:
        """Return where ``group`` is open; open it on scratch storage if it is not yet.

        Whoever keeps the place keeps the storage: drop it before the update closes.
        """
        pending = self._pending.pop(id(group), None)
        if pending is not None:
            self._open(pending, Place.new(pending.nbytes, pending.device))
        return self._places[id(group)]

    def take_all(self) -> None:
        """Open all groups: for loaders, of which nobody knows what they will touch, and for post-load processing."""
        for group in list(self._pending.values()):
            self.take(group)

    def is_scratch(self, group: StorageGroup) -> bool:
        """Whether ``group`` had no storage when the update began."""
        return id(group) in self._scratch

    def close(self, groups: Iterable[StorageGroup]) -> None:
        """Hold the storage of ``groups`` no longer; they cannot be taken any more."""
        for group in groups:
            del self._places[id(group)]

    def let_go(self) -> None:
        """Hold no storage any more; nothing can be taken after this."""
        self._places.clear()

    def _open(self, group: StorageGroup, place: Place) -> None:
        self._places[id(group)] = place
        with torch.inference_mode(False), torch.no_grad():
            open_group(group, place)
            if group.needed is not None and not len(group.needed):
                return  # Its bytes are those of the last update, and stay.
            if group.kept is not None:
                place.bytes().copy_(group.kept)
            if self._poison:
                _fill_with_poison(group, place)


def open_groups(
    groups: list[StorageGroup], *, poison: bool = False, partial: bool = False, without: Collection[int] = ()
) -> Opened:
    """Register every recorded tensor again, in its checkpoint layout; those without storage of their own when taken.

    Contents are undefined afterwards, except where the checkpoint does not bring a group completely: there the bytes
    of before post-load processing are put back. In a ``partial`` update groups whose bytes are still those of the last
    update keep them, and ``needed`` says so. ``poison`` fills what a push must write with NaN or extreme values. The
    groups at the indices ``without`` stay as they are, and cannot be taken.
    """
    places = [group.retained or found for group, found in zip(groups, find_places(groups), strict=True)]
    for index, (group, place) in enumerate(zip(groups, places, strict=True)):
        group.needed = ByteRanges() if index in without or (partial and is_intact(group, place)) else None
    chosen = [index for index in range(len(groups)) if index not in without]
    return Opened([groups[index] for index in chosen], [places[index] for index in chosen], poison=poison)


def is_intact(group: StorageGroup, place: Place | None) -> bool:
    """Whether ``place`` holds the bytes that post-load processing saw last. Reads them."""
    return place is not None and group.landed is not None and place.digest() == group.landed


def open_group(group: StorageGroup, place: Place) -> None:
    """Register the tensors of ``group`` on the bytes at ``place``."""
    for member in group.members:
        _open_member(member, place)
    group.storage = StorageRef(place.storage)


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


def _fill_with_poison(group: StorageGroup, place: Place) -> None:
    # All ones are NaN in every float format that travels; 0x80 repeated is far below any quantized weight in use.
    pattern = 0xFF if group.members[0].dtype.is_floating_point else 0x80
    raw = place.bytes()
    for start, end in group.required:
        raw[start:end].fill_(pattern)


def unwritten(group: StorageGroup, place: Place, written: ByteRanges) -> str | None:
    """Return the name of the member that holds the first byte which this update did not write but must, or None."""
    wanted = group.required if group.needed is None else group.needed
    return first_missing(group, wanted, written.within(place.start, place.end))


def first_missing(group: StorageGroup, wanted: ByteRanges, covered: ByteRanges) -> str | None:
    """Return the name of the member that holds the first byte of ``wanted`` that is not ``covered``, or None.

    Both are counted from the group's start.
    """
    missing = covered.first_missing(wanted)
    if missing is None:
        return None
    inside = (m.name for m in group.members if m.offset <= missing < m.offset + m.nbytes)
    return next(inside, group.name)
