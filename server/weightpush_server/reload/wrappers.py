"""Modules that were put around others after the cold start, and pass on what they wrap (adapters, for one)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from weightpush_server.reload.layout import ModelLayout


@contextmanager
def unwrapped(model: nn.Module, layout: ModelLayout) -> Iterator[None]:
    """For the length of the body, let no module but those of the cold start show a quantization method.

    A wrapper that forwards its misses looks like the layer that it wraps. Post-load processing would process the layer
    a second time through it, and register the result on the wrapper.
    """
    of_the_cold_start = {id(module) for _, module, _ in layout.quant_methods}
    wrappers = [
        module
        for module in model.modules()
        if id(module) not in of_the_cold_start and getattr(module, "quant_method", None) is not None
    ]
    for wrapper in wrappers:
        # Past __setattr__, which may forward as well.
        wrapper.__dict__["quant_method"] = None
    try:
        yield
    finally:
        for wrapper in wrappers:
            del wrapper.__dict__["quant_method"]
