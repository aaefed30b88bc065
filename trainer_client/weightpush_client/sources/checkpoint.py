"""A checkpoint directory as a source of weights: safetensors, sharded or not, read tensor by tensor."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from weightpush_client.sources.base import rejected
from weightpush_protocol.dtypes import name_of_safetensors_code
from weightpush_protocol.manifest import TensorSpec

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


class CheckpointSource:
    """A directory with a safetensors checkpoint. All headers are read at once, the tensors when they are asked for.

    Raises:
        WeightPushError: ``weights_rejected``: no such directory, no safetensors file, a shard that is missing,
            truncated or outside the directory, an index that is corrupt or does not fit its shards.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._file_of: dict[str, Path] = {}
        self._specs: list[TensorSpec] = []
        files, index = _find_files(self._directory)
        for file in files:
            for spec in _read_header(file):
                if spec.name in self._file_of:
                    raise rejected(
                        f"tensor {spec.name!r} lies in two files of {self._directory}: "
                        f"{self._file_of[spec.name].name} and {file.name}"
                    )
                self._file_of[spec.name] = file
                self._specs.append(spec)
        for name, file_name in (index or {}).items():
            if name not in self._file_of or self._file_of[name].name != file_name:
                raise rejected(f"the index of {self._directory} puts tensor {name!r} into {file_name}, which lacks it")

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


def _find_files(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    if not directory.is_dir():
        raise rejected(f"{directory} is not a directory: give a local checkpoint (names of a hub are not fetched)")
    index = directory / _INDEX
    if not index.exists():
        index = next(iter(sorted(directory.glob("*.safetensors.index.json"))), index)
    if index.exists():
        weight_map = _read_index(index)
        files = [directory / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise rejected(f"{directory} lacks {', '.join(missing)}, which {index.name} names")
        return files, weight_map
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE], None
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise rejected(f"{directory} holds no .safetensors file (pickled .bin and .pt files are not read)")
    _check_shards_complete(directory, files)
    return files, None


def _read_index(index: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise rejected(f"cannot read the index {index}: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise rejected(f"the index {index} has no weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_file_name(file_name):
            raise rejected(f"the index {index} puts {name!r} into {file_name!r}, expected the name of a file beside it")
    return weight_map


def _is_plain_file_name(name: str) -> bool:
    return name not in {"", ".", ".."} and not set(name) & {"/", "\\", "\0"}


def _check_shards_complete(directory: Path, files: Sequence[Path]) -> None:
    # Without an index only the shards' own names say how many there are.
    present = {file.name for file in files}
    for file in files:
        if found := _SHARD.fullmatch(file.name):
            stem, number, total = found.groups()
            wanted = [f"{stem}-{i:0{len(number)}d}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
            missing = [name for name in wanted if name not in present]
            if missing:
                raise rejected(f"{directory} lacks {', '.join(missing[:5])}: shards of {file.name}")


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
