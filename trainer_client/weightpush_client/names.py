"""Names of tensors as wrappers spell them, brought back to the names of the checkpoint.

Training code wraps modules, and each wrapper leaves a component in the names of ``state_dict()``:

================================ ====================================================
``_orig_mod``                    ``torch.compile``, anywhere in the path
``_fsdp_wrapped_module``         FSDP, anywhere
``_checkpoint_wrapped_module``   activation checkpointing, anywhere
``module``                       DDP and DataParallel: leading; elsewhere only where the server knows the rest
``base_model.model``             PEFT: leading, only where the server knows the rest
``base_layer``                   PEFT, anywhere, only where the server knows the rest
================================ ====================================================

A name that the server knows is never changed. Adapters (``lora_A``...) keep theirs, and the server refuses them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final

_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def checkpoint_name(name: str, known: Container[str]) -> str:
    """Return the first spelling of ``name`` that is in ``known``, else ``name`` without what is surely a wrapper."""
    for spelling in _spellings(name):
        if spelling in known:
            return spelling
    return _without_sure_wrappers(name)


def _spellings(name: str) -> Iterator[str]:
    yield name
    bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    yield bare
    yield _without_sure_wrappers(name)
    parts = [part for part in bare.split(".") if part != "module"]
    yield ".".join(parts)
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    yield ".".join(part for part in parts if part != "base_layer")


def _without_sure_wrappers(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)
