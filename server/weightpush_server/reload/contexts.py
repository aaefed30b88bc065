"""The surroundings in which vLLM loads and processes weights at cold start, made again for a push."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype


@contextmanager
def loading_context(vllm_config: VllmConfig, device: torch.device) -> Iterator[None]:
    """Run the body as a cold start would: no gradients, the model's dtype as default, its configuration.

    The dtype and the configuration are global to the process and are put back; the engine must be idle. Inference
    mode is left: tensors that are made under it refuse every later write from outside. A new thread starts on the
    first GPU, so the worker's is made current; a cold start sets no default device, hence neither does this.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(vllm_config.model_config.dtype),
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
    ):
        yield
