"""Which files of a directory make up a safetensors checkpoint, and whether index and files fit. Pure: no I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_SHARD: Final = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
#: How many names an error shows, and how much of one that a file holds.
_SHOWN_NAMES: Final = 5
_SHOWN_CHARACTERS: Final = 200


class CheckpointFilesError(ValueError):
    """The files are not one complete checkpoint. The text says why and belongs behind the directory's name."""


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one checkpoint, in the order in which they are read.

    ``weight_map``: tensor to file, as the index has it; ``None`` where there is no index.
    """

    files: tuple[str, ...]
    index: str | None = None
    weight_map: Mapping[str, str] | None = None

    def check(self, tensors: Iterable[tuple[str, str]]) -> None:
        """Compare what the files hold, as pairs of file and tensor name, with each other and with the index.

        Raises:
            CheckpointFilesError: a tensor lies in two files, is not where the index puts it, or not in the index.
        """
        file_of: dict[str, str] = {}
        for file, name in tensors:
            if name in file_of:
                raise CheckpointFilesError(f"tensor {_shown(name)} lies in two files: {file_of[name]} and {file}")
            file_of[name] = file
        if self.weight_map is None:
            return
        for name, file in self.weight_map.items():
            if file_of.get(name) != file:
                raise CheckpointFilesError(f"{self.index} puts tensor {_shown(name)} into {file}, which lacks it")
        for name, file in file_of.items():
            if name not in self.weight_map:
                raise CheckpointFilesError(f"tensor {_shown(name)} lies in {file}, but is not in {self.index}")


def choose_files(present: Collection[str], read_index: Callable[[str], bytes]) -> CheckpointFiles:
    """Choose among the names of a directory's files as vLLM does: by the index, else the single file, else all shards.

    ``read_index`` returns the content of the file of that name.

    Raises:
        CheckpointFilesError: no safetensors file, shards that are missing or not in the index, a damaged index.
        OSError: what ``read_index`` raises.
    """
    indices = sorted(name for name in present if name.endswith(_INDEX_SUFFIX))
    if indices:
        index = INDEX if INDEX in indices else indices[0]
        weight_map = _parse_index(index, read_index(index))
        files = tuple(sorted(set(weight_map.values())))
        missing = [file for file in files if file not in present]
        if missing:
            raise CheckpointFilesError(f"lacks {_listed(missing)}, which {index} names")
        _check_strangers(index, files, present)
        return CheckpointFiles(files, index, weight_map)
    if _SINGLE in present:
        return CheckpointFiles((_SINGLE,))
    files = tuple(sorted(name for name in present if name.endswith(_SUFFIX)))
    if not files:
        raise CheckpointFilesError(f"holds no {_SUFFIX} file (pickled .bin and .pt files are not read)")
    _check_shards_complete(files)
    return CheckpointFiles(files)


def _parse_index(index: str, data: bytes) -> dict[str, str]:
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        where = f" at byte {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise CheckpointFilesError(f"cannot read the index {index}: it is not JSON{where}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointFilesError(f"the index {index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_file_name(file):
            raise CheckpointFilesError(
                f"the index {index} puts {_shown(name)} into {_shown(file)}, expected the name of a file beside it"
            )
    return weight_map


def _is_plain_file_name(name: str) -> bool:
    return name not in {"", ".", ".."} and not set(name) & {"/", "\\", "\0"}


def _check_strangers(index: str, files: Collection[str], present: Collection[str]) -> None:
    """Refuse shards that the index does not know: what an earlier save left, or a later one has begun to write."""
    stems = {found[1] for file in files if (found := _SHARD.fullmatch(file))}
    strangers = [
        name
        for name in sorted(present)
        if name not in files and (found := _SHARD.fullmatch(name)) and found[1] in stems
    ]
    if strangers:
        raise CheckpointFilesError(f"holds {_listed(strangers)}, which {index} does not name: remove what is stale")


def _check_shards_complete(files: Collection[str]) -> None:
    # Without an index only the shards' own names say how many there are.
    present = set(files)
    for file in files:
        if found := _SHARD.fullmatch(file):
            stem, number, total = found.groups()
            # One more than there are files: a name that promises billions must not make us list them.
            wanted = (f"{stem}-{i + 1:0{len(number)}d}-of-{total}{_SUFFIX}" for i in range(int(total)))
            missing = [name for name in islice(wanted, len(present) + 1) if name not in present]
            if missing:
                raise CheckpointFilesError(f"lacks {_listed(missing)}: shards of {file}")


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def _shown(value: object) -> str:
    """Quote what a file holds, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
