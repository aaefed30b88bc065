"""How the allocators of a server on CPUs are set up: half of a push is moving bytes into memory that was just taken.

Read by the C library and by torch when a process starts, hence set in the environment that vLLM's processes inherit.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

#: One arena for all threads: what post-load processing frees on the thread that lands, the main thread had taken, and
#: each arena would keep its own. And huge pages for large tensors: fresh memory costs a fault for 2 MiB, not for 4 KiB.
_SETTINGS: Final = {"MALLOC_ARENA_MAX": "1", "THP_MEM_ALLOC_ENABLE": "1"}


def prefer_large_pages(environment: MutableMapping[str, str]) -> None:
    """Put the settings into ``environment``; what the user has set stays as it is."""
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)
