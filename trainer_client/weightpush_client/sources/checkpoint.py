"""A checkpoint directory as a source of weights: safetensors, sharded or not, read tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from weightpush_client.sources.base import rejected
from weightpush_protocol.checkpoint_files import CheckpointFiles, CheckpointFilesError, choose_files
from weightpush_protocol.dtypes import name_of_safetensors_code
from weightpush_protocol.manifest import TensorSpec


class CheckpointSource:
    """A directory with a safetensors checkpoint. All headers are read at once, the tensors when they are asked for.

    Raises:
        WeightPushError: ``weights_rejected``: no such directory, no safetensors file, a shard that is missing,
            truncated or outside the directory, an index that is corrupt or does not fit its shards.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        found: list[tuple[str, str]] = []
        self._specs: list[TensorSpec] = []
        chosen = _find_files(self._directory)
        for name in chosen.files:
            for spec in _read_header(self._directory / name):
                self._specs.append(spec)
                found.append((name, spec.name))
        try:
            chosen.check(found)
        except CheckpointFilesError as error:
            raise rejected(f"{self._directory}: {error}") from error
        self._file_of = {name: self._directory / file for file, name in found}

    ranks = 1

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and shape of every tensor: files in order of their names, each in its own order."""
        return list(self._specs)

    def identity(self, name: str) -> Hashable | None:
        """Return None: in a file, each name has bytes of its own."""
        return None

    def tensors(
        self, names: Sequence[str], sent: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of ``names``, in that order; one file is open at a time.

        Raises:
            WeightPushError: ``weights_rejected``: a file was changed or removed since its header was read.
        """
        position = 0
        while position < len(names):
            file = self._file_of[names[position]]
            try:
                with safe_open(file, framework="pt") as handle:
                    while position < len(names) and self._file_of[names[position]] == file:
                        yield names[position], handle.get_tensor(names[position])
                        position += 1
            except (OSError, SafetensorError) as error:
                raise rejected(f"cannot read tensor {names[position]!r} from {file}: {error}") from error

    def close(self) -> None:
        """Do nothing: a file is open only while one of its tensors is read."""


def _find_files(directory: Path) -> CheckpointFiles:
    if not directory.is_dir():
        raise rejected(f"{directory} is not a directory: give a local checkpoint (names of a hub are not fetched)")
    try:
        present = {entry.name for entry in directory.iterdir() if entry.is_file()}
        return choose_files(present, lambda name: (directory / name).read_bytes())
    except OSError as error:
        raise rejected(f"cannot read {directory}: {error}") from error
    except CheckpointFilesError as error:
        raise rejected(f"{directory}: {error}") from error


def _read_header(file: Path) -> Iterator[TensorSpec]:
    try:
        with safe_open(file, framework="pt") as handle:
            described = [
                (name, part.get_dtype(), tuple(part.get_shape()))
                for name in handle.keys()  # noqa: SIM118 - the handle is no mapping and cannot be iterated
                for part in (handle.get_slice(name),)
            ]
    except (OSError, SafetensorError) as error:
        raise rejected(f"cannot read {file}: {error}") from error
    for name, code, shape in described:
        try:
            yield TensorSpec(name=name, dtype=name_of_safetensors_code(code), shape=shape)
        except KeyError:
            raise rejected(f"tensor {name!r} of {file} has dtype {code}, which cannot be pushed") from None
        except ValidationError as error:
            reason = "; ".join(str(problem["msg"]) for problem in error.errors())
            raise rejected(f"tensor {name!r} of {file} cannot be pushed: {reason}") from error
