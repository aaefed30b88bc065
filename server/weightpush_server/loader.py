"""The model loader behind ``--load-format weightpush``: loads as another format does, and records the layout.

Between loading and post-load processing lies the only moment at which a model's tensors look as the checkpoint's. The
base loader calls :meth:`WeightpushLoader.load_weights` right before processing, so the record is made at its end.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.dtypes import name_of_safetensors_code
from weightpush_protocol.manifest import TensorSpec
from weightpush_server.config import StoragePolicy
from weightpush_server.hostcopy import HostBudget, HostCopy
from weightpush_server.ranks import server_rank
from weightpush_server.reload.contract import PIN_DEVICES
from weightpush_server.reload.coverage import WriteLog, WriteRecorder
from weightpush_server.reload.layout import (
    SelfCheck,
    SelfCheckOutcome,
    find_layout,
    record_layout,
    registered_slots,
)
from weightpush_server.reload.refusals import quantized_online
from weightpush_server.reload.retention import hold_loaded, settle
from weightpush_server.reload.selfcheck import check_repeatable, has_room
from weightpush_server.reload.storage import storage_bytes

logger = logging.getLogger(__name__)

LOAD_FORMAT: Final = "weightpush"
#: Key of ``model_loader_extra_config`` that names the format to load by; the other keys are for that format.
INNER_FORMAT_KEY: Final = "weightpush_inner_format"

#: Keys of ``model_loader_extra_config`` for where updates write, and whether a model must show that it can be reloaded.
POLICY_KEY: Final = "weightpush_storage_policy"
SELF_CHECK_KEY: Final = "weightpush_self_check"

#: Keys for whether what is loaded is kept in host memory as well, and for how much of it in bytes.
KEEP_COPY_KEY: Final = "weightpush_keep_copy"
COPY_BUDGET_KEY: Final = "weightpush_copy_budget"
#: How often the start looks whether its copy still fits, in bytes of it.
_LOOK_BYTES: Final = 256 * 2**20

#: Formats that read vLLM's own state dict instead of a checkpoint: there is no checkpoint layout to record.
_WITHOUT_CHECKPOINT: Final = frozenset({"sharded_state", "runai_streamer_sharded"})
#: Dummy weights overwrite tensors that no checkpoint brings (scales with a default). Of tensors up to this many bytes
#: the value of before is kept, so that the first push can give it back.
_KEPT_BYTES: Final = 64 * 1024
#: A safetensors header beyond this size is damaged; the format allows no larger one.
_MAX_HEADER_BYTES: Final = 100_000_000


def register_loader() -> None:
    """Make ``--load-format weightpush`` known to vLLM. May be called any number of times in a process."""
    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not WeightpushLoader:
        model_loader.register_model_loader(LOAD_FORMAT)(WeightpushLoader)


class WeightpushLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM is not analysed, so its classes are Any
    """Loads by the format that ``model_loader_extra_config`` names, and records each model's layout.

    Raises:
        ValueError: the inner format is this one, reads no checkpoint, or processes weights by itself.
    """

    #: Types of devices on which no update may change an address.
    pin_devices: frozenset[str] = PIN_DEVICES

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        inner_format = str(extra.pop(INNER_FORMAT_KEY, "auto"))
        self._policy = StoragePolicy(extra.pop(POLICY_KEY, StoragePolicy.SCRATCH))
        self._self_check = bool(extra.pop(SELF_CHECK_KEY, True))
        self._keep_copy = bool(extra.pop(KEEP_COPY_KEY, False))
        self._copy_budget = HostBudget(extra.pop(COPY_BUDGET_KEY, None))
        self._is_target = True
        self._is_first = True
        if inner_format == LOAD_FORMAT or inner_format in _WITHOUT_CHECKPOINT:
            raise ValueError(
                f"load format {inner_format!r} cannot be used under {LOAD_FORMAT!r}: name one that reads a checkpoint"
            )
        inner_class = model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(inner_format, BaseModelLoader)
        if inner_class.load_model is not BaseModelLoader.load_model:
            raise ValueError(
                f"load format {inner_format!r} processes weights while loading them, so their checkpoint layout cannot "
                "be recorded; use another load format"
            )
        inner_config = dataclasses.replace(load_config, load_format=inner_format, model_loader_extra_config=extra)
        self._inner: BaseModelLoader = model_loader.get_model_loader(inner_config)
        self._is_dummy = inner_format == "dummy"

    def __getattr__(self, name: str) -> Any:
        # vLLM asks loaders for more than the base class lists (get_all_weights, counters), and with hasattr.
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of weights that other processes hold, as the inner loader counts them."""
        return int(self._inner.get_external_weight_memory(vllm_config))

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the checkpoint, as the inner loader does."""
        self._inner.download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load as the inner loader does, and record the layout where none is recorded yet.

        A later call (vLLM's own reload from disk) only loads: the model may be in another layout then.
        """
        if find_layout(model) is not None:
            self._inner.load_weights(model, model_config)
            return
        constructed = _small_storages(model) if self._is_dummy else None
        keeps = self._keep_copy and self._is_target and self._is_first
        heard = _Checkpoint(_GrowingCopy(self._copy_budget) if keeps else None)
        writes = WriteLog()
        with _listening(model, heard), WriteRecorder(writes):
            self._inner.load_weights(model, model_config)
        writes.forget_dead()
        checkpoint = heard.specs()
        if checkpoint is None and self._is_dummy:
            checkpoint = read_checkpoint_specs(Path(model_config.model))
        layout = record_layout(
            model,
            checkpoint,
            writes=writes,
            constructed=constructed,
            policy=self._policy if self._is_target else StoragePolicy.SCRATCH,
            pin_devices=self.pin_devices,
        )
        layout.digests = heard.digests
        layout.host_copy = heard.copy()
        # What is refused for its kind need not be tried.
        checked = self._self_check and self._is_target and not layout.preprocessed and quantized_online(model) is None
        shadows = checked and has_room(model, _device_of(model))
        if checked and not shadows:
            layout.self_check = SelfCheck(SelfCheckOutcome.SKIPPED)
            logger.warning("no self-check: there is not enough memory for a second copy of the weights")
        hold_loaded(layout, shadows=shadows)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Make, load and process a model as the base class does, and try whether that can be repeated.

        A model that fails the self-check is made anew, since the attempt spoilt it, and will refuse updates.
        """
        # Updates write the model that the server is named for. Drafts come through the same loader.
        self._is_target = model_config is vllm_config.model_config
        self._is_first = server_rank(vllm_config, vllm_config.parallel_config.rank) == 0
        registry = _LayerRegistry(vllm_config)
        model = self._make(vllm_config, model_config, prefix)
        layout = find_layout(model)
        if layout is None or not any(group.shadow is not None for group in layout.groups):
            return model
        device = _device_of(model)
        layout.self_check = check = check_repeatable(model, layout, vllm_config=vllm_config, device=device)
        if check.outcome is not SelfCheckOutcome.FAILED:
            return model
        logger.error("this model will refuse updates: %r: %s", check.offender, check.reason)
        del model, layout
        gc.collect()
        registry.restore()
        self._self_check = False
        model = self._make(vllm_config, model_config, prefix)
        layout = find_layout(model)
        assert layout is not None
        layout.self_check = check
        return model

    def _make(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str) -> nn.Module:
        model: nn.Module = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        layout = find_layout(model)
        if layout is not None and layout.settled is None:
            settle(model, layout)
        return model


class _LayerRegistry:
    """What the layers of a model write into vLLM's configuration when they are made, to be taken back."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._config = vllm_config.compilation_config
        self._layers = dict(self._config.static_forward_context)
        self._experts = list(self._config.static_all_moe_layers)

    def restore(self) -> None:
        """Forget the layers made since: each name may be taken once."""
        self._config.static_forward_context.clear()
        self._config.static_forward_context.update(self._layers)
        self._config.static_all_moe_layers[:] = self._experts


def _device_of(model: nn.Module) -> torch.device:
    """Return where ``model`` lives; a cold start puts all of it on one device."""
    return next((tensor.device for _, tensor in registered_slots(model) if not tensor.is_meta), torch.device("cpu"))


class _GrowingCopy:
    """A copy of tensors whose number nobody knows yet, as long as there is room for it."""

    def __init__(self, budget: HostBudget) -> None:
        self._budget = budget
        self._nbytes = 0
        self._allowed = 0
        self.copy: HostCopy | None = HostCopy()

    def add(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        """Take ``tensor`` in, or give the whole copy up."""
        if self.copy is None:
            return
        self._nbytes += spec.nbytes
        if self._nbytes > self._allowed:
            total = self._budget.total(self._nbytes - spec.nbytes)
            if self._nbytes > total:
                self.copy = None
                logger.warning("no copy of the weights of the start is kept: more than %d bytes do not fit", total)
                return
            self._allowed = min(total, self._nbytes + _LOOK_BYTES)
        self.copy.add(spec, tensor.contiguous().reshape(-1).view(torch.uint8))


class _Checkpoint:
    """What was heard of a checkpoint while it was loaded."""

    def __init__(self, growing: _GrowingCopy | None = None) -> None:
        self._growing = growing
        self._specs: dict[str, TensorSpec] = {}
        self._unspeakable: str | None = None
        parallel = model_parallel_is_initialized()
        self._ranks = get_tensor_model_parallel_world_size() if parallel else 1
        self._rank = get_tensor_model_parallel_rank() if parallel else 0
        #: Digests of this rank's share of the tensors: together the ranks read a checkpoint once more.
        self.digests: dict[str, str] = {}

    def listen(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass ``weights`` on and note them."""
        for name, tensor in weights:
            try:
                self._specs[name] = TensorSpec.of(name, tensor)
                if (len(self._specs) - 1) % self._ranks == self._rank:
                    # Outside the recorder of writes: it would look at every step of the digest.
                    with _disable_current_modes():
                        self.digests[name] = tensor_digest(tensor)
                if self._growing is not None:
                    with _disable_current_modes():
                        self._growing.add(self._specs[name], tensor)
            except ValueError as error:
                self._unspeakable = f"{name!r}: {error}"
            yield name, tensor

    def copy(self) -> HostCopy | None:
        """Return the copy of all tensors, if there is one."""
        copy = self._growing.copy if self._growing is not None else None
        if copy is None or self._unspeakable is not None or not copy.tensors:
            return None
        copy.digests = dict(self.digests)
        return copy

    def specs(self) -> tuple[TensorSpec, ...] | None:
        """Return the tensors in order; None if there were none, or one of them cannot travel."""
        if self._unspeakable is not None:
            logger.warning("this checkpoint cannot be pushed, so the model will refuse updates: %s", self._unspeakable)
            return None
        return tuple(self._specs.values()) or None


@contextmanager
def _listening(model: nn.Module, heard: _Checkpoint) -> Iterator[None]:
    """For the length of the body, let ``heard`` listen to what ``model.load_weights`` consumes."""
    load_weights: Callable[..., Any] | None = getattr(model, "load_weights", None)
    if load_weights is None:
        yield
        return
    before = model.__dict__.get("load_weights")

    def listening(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        return load_weights(heard.listen(weights), *args, **kwargs)

    model.__dict__["load_weights"] = listening
    try:
        yield
    finally:
        if before is None:
            del model.__dict__["load_weights"]
        else:
            model.__dict__["load_weights"] = before


def _small_storages(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return copies of the small storages that ``model`` registers, as uint8, by storage identity."""
    copies: dict[int, torch.Tensor] = {}
    for _, tensor in registered_slots(model):
        if not tensor.is_meta and tensor.untyped_storage().nbytes() <= _KEPT_BYTES:
            storage = tensor.untyped_storage()
            copies[storage._cdata] = storage_bytes(storage, 0, storage.nbytes()).clone()
    return copies


def read_checkpoint_specs(directory: Path) -> tuple[TensorSpec, ...] | None:
    """Return names, dtypes and shapes from the headers of the safetensors files in ``directory``, in file order.

    None where there is no such directory or file. Weights are not read.

    Raises:
        ValueError: a file is damaged, or holds a dtype that cannot travel.
    """
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    specs: dict[str, TensorSpec] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name == "__metadata__":
                continue
            try:
                dtype = name_of_safetensors_code(entry["dtype"])
            except KeyError:
                raise ValueError(f"{file.name}: tensor {name!r} has a dtype that cannot be pushed") from None
            specs[name] = TensorSpec(name=name, dtype=dtype, shape=tuple(entry["shape"]))
    return tuple(specs.values()) or None


def _read_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} is no safetensors file")
        try:
            header: dict[str, Any] = json.loads(stream.read(size))
        except ValueError as error:
            raise ValueError(f"{file.name}: damaged safetensors header: {error}") from error
    return header
