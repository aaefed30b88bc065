"""The surroundings in which vLLM loads and processes weights at cold start, made again for a push."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype

from weightpush_protocol.errors import ErrorCode, WeightPushError


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


@contextmanager
def telling_of_processing(what: str = "") -> Iterator[None]:
    """Give what post-load processing raises in the body, of the module ``what`` or of all, a code of the contract.

    Raises:
        WeightPushError: PROOF_FAILED.
    """
    try:
        yield
    except Exception as error:
        subject = f"post-load processing of {what!r}" if what else "post-load processing"
        raise WeightPushError(
            ErrorCode.PROOF_FAILED,
            f"{subject} raised {type(error).__name__}: {error}. Push again, or restart the server",
            details={"module": what, "exception": type(error).__name__, "error": str(error)},
        ) from error


def unproven(name: str, reason: str) -> WeightPushError:
    """Return the error that says why ``name``, a tensor or module, is not proven."""
    return WeightPushError(
        ErrorCode.PROOF_FAILED, f"{name!r} could not be proven right: {reason}", details={"tensor": name}
    )
