"""A source made of groups: what is gathered together is read together, one piece after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from weightpush_client.sources.base import rejected
from weightpush_client.sources.groups import Group
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec


class Gathered:
    """The whole tensors of one piece while it is open, and what was made of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[Hashable, Mapping[str, torch.Tensor]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def once(self, key: Hashable, make: Callable[[], Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        """Return what ``make`` returned the first time that it was asked for under ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class LeafView(NamedTuple):
    """Elements of the gathered tensor ``leaf``, if that is contiguous; ``offset`` counts from its first."""

    leaf: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One tensor that a source yields: ``compute`` makes it of the gathered tensors ``leaves``.

    ``leaf`` is set where it is exactly the gathered tensor of that name, ``view`` where it should hold elements of one,
    in another order or fewer of them.
    """

    spec: TensorSpec
    leaves: frozenset[str]
    compute: Callable[[Gathered], torch.Tensor]
    leaf: str | None = None
    view: LeafView | None = None

    @classmethod
    def of(cls, spec: TensorSpec) -> Node:
        """Return a gathered tensor as it is."""
        return cls(spec, frozenset({spec.name}), lambda gathered: gathered[spec.name], spec.name)

    def renamed(self, name: str) -> Node:
        """Return the same tensor under another name."""
        spec = TensorSpec(name=name, dtype=self.spec.dtype, shape=self.spec.shape)
        return Node(spec, self.leaves, self.compute, self.leaf, self.view)


@dataclass(frozen=True, slots=True)
class Step:
    """One piece to gather, and the dtype in which its tensor may come; None for that which it has."""

    piece: int
    dtype: torch.dtype | None = None


#: Called before the pieces of ``steps`` are gathered: gets all ranks to gather them too.
Announce: TypeAlias = Callable[[Sequence[Step]], None]


class PieceSource:
    """Yields ``nodes``, each made of tensors of ``groups``; all gathered tensors as they are where ``nodes`` is None.

    Groups that share a node are gathered together, and those that no node needs are not gathered at all. The order is
    that of the nodes, but for those of one piece, which come together where the first one stands.

    Raises:
        WeightPushError: ``weights_rejected``: two nodes have one name.
    """

    def __init__(self, groups: Sequence[Group], nodes: Iterable[Node] | None = None) -> None:
        self._groups = groups
        self._group_of = {spec.name: number for number, group in enumerate(groups) for spec in group.specs}
        self._nodes: dict[str, Node] = {}
        for node in self._all_nodes() if nodes is None else nodes:
            if node.spec.name in self._nodes:
                raise rejected(f"the source names tensor {node.spec.name!r} twice", node.spec.name)
            self._nodes[node.spec.name] = node
        self._pieces, self._piece_of = self._cut()
        self._announce: Announce | None = None
        self._chunk_bytes = 0
        self._owed: deque[Step] = deque()
        self._open = ExitStack()

    @property
    def groups(self) -> Sequence[Group]:
        """What is gathered."""
        return self._groups

    def node(self, name: str) -> Node:
        """Return what ``name`` is made of."""
        return self._nodes[name]

    @property
    def device(self) -> torch.device:
        """Device of the largest gathered tensor."""
        largest: tuple[int, torch.device] = (-1, torch.device("cpu"))
        for group in self._used_groups():
            size = max(spec.nbytes for spec in group.specs)
            if size > largest[0]:
                largest = (size, group.device)
        return largest[1]

    @property
    def ranks(self) -> int:
        """How many processes must read together."""
        return max((group.ranks for group in self._used_groups()), default=1)

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and shape of every tensor, in the order of the source."""
        order = sorted(self._nodes, key=self._piece_of.__getitem__)  # Stable.
        return [self._nodes[name].spec for name in order]

    def identity(self, name: str) -> Hashable | None:
        """Return what tells tied weights: None for tensors that are computed."""
        leaf = self._nodes[name].leaf
        return None if leaf is None else self._groups[self._group_of[leaf]].identity(leaf)

    def tensors(
        self, names: Sequence[str], sent: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of ``names``, in that order, gathering piece by piece."""
        visits: list[tuple[Step, list[str]]] = []
        for name in names:
            piece = self._piece_of[name]
            if not visits or visits[-1][0].piece != piece:
                visits.append((Step(piece, self._cast_early(name, sent or {})), []))
            visits[-1][1].append(name)
        for chunk in self._chunks(visits):
            if self._announce is not None:
                self._announce([step for step, _ in chunk])
            self._owed = deque(step for step, _ in chunk)
            for _, wanted in chunk:
                gathered = self._gather_next()
                for name in wanted:
                    yield name, self._nodes[name].compute(gathered)
                del gathered
                self._open.close()

    def lead(self, announce: Announce, chunk_bytes: int) -> None:
        """Have `tensors` call ``announce`` before it gathers the next pieces, at most ``chunk_bytes`` at a time."""
        self._announce = announce
        self._chunk_bytes = chunk_bytes

    def check(self, steps: Sequence[Step]) -> None:
        """Look whether this process can take part in gathering ``steps``.

        Raises:
            WeightPushError: ``weights_rejected``: it no longer holds what it held when the source was made.
        """
        for step in steps:
            for group in self._pieces[step.piece]:
                group.check()

    def take_part(self, steps: Sequence[Step]) -> None:
        """Gather ``steps`` because another rank needs them."""
        self._owed = deque(steps)
        while self._owed:
            self._gather_next()
            self._open.close()

    def close(self) -> None:
        """Release what is gathered; gather what was announced and is not yet gathered, since other ranks do too."""
        self._open.close()
        self.take_part(list(self._owed))

    def _all_nodes(self) -> Iterator[Node]:
        return (Node.of(spec) for group in self._groups for spec in group.specs)

    def _used_groups(self) -> Iterator[Group]:
        return (group for piece in self._pieces for group in piece)

    def _cut(self) -> tuple[list[list[Group]], dict[str, int]]:
        """Join groups that share a node; return the pieces, and the piece of each node."""
        joined = list(range(len(self._groups)))

        def root(number: int) -> int:
            while joined[number] != number:
                joined[number] = joined[joined[number]]
                number = joined[number]
            return number

        for node in self._nodes.values():
            first, *others = {root(self._group_of[leaf]) for leaf in node.leaves}
            for other in others:
                joined[other] = first
        piece_of_root: dict[int, int] = {}
        piece_of: dict[str, int] = {}
        for name, node in self._nodes.items():
            joint = root(self._group_of[next(iter(node.leaves))])
            piece_of[name] = piece_of_root.setdefault(joint, len(piece_of_root))
        pieces: list[list[Group]] = [[] for _ in piece_of_root]
        for number, group in enumerate(self._groups):
            if (joint := root(number)) in piece_of_root:
                pieces[piece_of_root[joint]].append(group)
        return pieces, piece_of

    def _cast_early(self, name: str, sent: Mapping[str, torch.dtype]) -> torch.dtype | None:
        piece = self._pieces[self._piece_of[name]]
        plain = self._nodes[name].leaf is not None and len(piece) == 1 and len(piece[0].specs) == 1
        return sent.get(name) if plain else None

    def _chunks(self, visits: Sequence[tuple[Step, list[str]]]) -> Iterator[Sequence[tuple[Step, list[str]]]]:
        if self._announce is None:
            yield from ([visit] for visit in visits)
            return
        chunk: list[tuple[Step, list[str]]] = []
        size = 0
        for visit in visits:
            nbytes = sum(spec.nbytes for group in self._pieces[visit[0].piece] for spec in group.specs)
            if chunk and size + nbytes > self._chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(visit)
            size += nbytes
        if chunk:
            yield chunk

    def _gather_next(self) -> Gathered:
        step = self._owed.popleft()
        tensors: dict[str, torch.Tensor] = {}
        try:
            for group in self._pieces[step.piece]:
                tensors |= self._open.enter_context(group.gather(step.dtype))
        except BaseException as error:
            # The ranks are no longer in step: to gather on would wait for somebody who does not come.
            self._owed.clear()
            with suppress(Exception):
                self._open.close()
            if group.ranks > 1 and isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise WeightPushError(
                    ErrorCode.TRAINER_RANK_LOST,
                    f"{group.specs[0].name!r} could not be gathered from {group.ranks} ranks: {error}",
                    details={"tensor": group.specs[0].name},
                ) from error
            raise
        return Gathered(tensors)
