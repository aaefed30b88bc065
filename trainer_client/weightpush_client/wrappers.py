"""Components that wrappers of modules leave in names; see `weightpush_client.names`."""

from __future__ import annotations

from typing import Final

#: Components that only wrappers have, anywhere in a path.
WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def without_wrappers(name: str) -> str:
    """Return ``name`` without the components that are surely a wrapper's, and without leading ``module``."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)
