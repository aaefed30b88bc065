"""How the allocators of a server on CPUs are set up: half of a push is moving bytes into memory that was just taken.

Read by the C library and by torch when a process starts, hence set in the environment that vLLM's processes inherit.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

_SETTINGS: Final = {
    # What post-load processing frees on the thread that lands, the main thread had taken: arenas of their own would
    # each keep their share.
    "MALLOC_ARENA_MAX": "1",
    # torch asks for huge pages for large tensors: fresh memory costs a fault for 2 MiB, not for 4 KiB.
    "THP_MEM_ALLOC_ENABLE": "1",
}


def keep_pages(environment: MutableMapping[str, str]) -> None:
    """Put the settings into ``environment``; what the user has set stays as it is."""
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)
