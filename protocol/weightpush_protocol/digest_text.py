"""Digests of many tensors as one run of bytes, eight for each, and by name as text where somebody asks for them.

A push has as many digests as tensors. They are taken, sent and compared a bucket at a time, so that none of it costs a
step of Python for every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

DIGEST_BYTES: Final = 8
_DIGITS: Final = 2 * DIGEST_BYTES


def texts(raw: bytes) -> list[str]:
    """Return the digests in ``raw``, 16 hexadecimal digits each."""
    text = raw.hex()
    return [text[at : at + _DIGITS] for at in range(0, len(text), _DIGITS)]


def raw_of(digests: Sequence[str]) -> bytes:
    """Return ``digests``, 16 hexadecimal digits each, as bytes. Raises ``ValueError`` where one is something else."""
    if any(len(digest) != _DIGITS for digest in digests):
        raise ValueError("a digest has 16 hexadecimal digits")
    return bytes.fromhex("".join(digests))


class TensorDigests(Mapping[str, str]):
    """Digests by name of tensor, which come in runs; text is made of them when somebody looks."""

    def __init__(self) -> None:
        self._runs: list[tuple[Sequence[str], bytes]] = []
        self._known: dict[str, str] = {}

    def add(self, names: Sequence[str], raw: bytes) -> None:
        """Take in the digests of ``names``, eight bytes each, in the same order."""
        self._runs.append((names, raw))

    def _all(self) -> dict[str, str]:
        while self._runs:
            names, raw = self._runs.pop(0)
            self._known.update(zip(names, texts(raw), strict=True))
        return self._known

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __bool__(self) -> bool:
        return bool(self._runs or self._known)
