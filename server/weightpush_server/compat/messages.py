"""Bodies of vLLM's weight-transfer routes, as far as they matter here. Fields that are not known are ignored."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from weightpush_protocol.manifest import MAX_BYTES, MAX_TENSORS, TensorSpec
from weightpush_protocol.messages import InFlight, WeightVersion

#: Length of an ``ncclUniqueId``, in bytes.
UNIQUE_ID_BYTES: Final = 128
_MAX_WORLD: Final = 2**16


class _Body(BaseModel):
    # Other releases of vLLM send more. A validation error must not print what it was about: ids admit to the group.
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class InitInfo(_Body):
    """Where the trainer waits for the workers, and how it will cut what it sends.

    Either ``master_address`` and ``master_port``, where a TCPStore of the trainer listens, or ``nccl_unique_id_b64``.
    The worker of rank ``r`` in its server has rank ``rank_offset + r`` of ``world_size``; the trainer sends as rank 0.
    ``packed``: tensors come in chunks, see ``packing``; else each by itself.
    """

    master_address: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._:%\[\]-]+$")] | None = (
        None
    )
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    nccl_unique_id_b64: Annotated[str, Field(max_length=2 * UNIQUE_ID_BYTES)] | None = None
    rank_offset: Annotated[int, Field(ge=1, le=_MAX_WORLD)]
    world_size: Annotated[int, Field(ge=2, le=_MAX_WORLD)]
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)] = 2**30
    packed_num_buffers: PositiveInt = 2

    @field_validator("nccl_unique_id_b64")
    @classmethod
    def _is_an_id(cls, value: str | None) -> str | None:
        try:
            wrong = value is not None and len(base64.b64decode(value, validate=True)) != UNIQUE_ID_BYTES
        except binascii.Error:
            wrong = True
        if wrong:
            raise ValueError(f"expected standard base64 of {UNIQUE_ID_BYTES} bytes")
        return value

    @model_validator(mode="after")
    def _one_way_to_meet(self) -> Self:
        by_address = self.master_address is not None and self.master_port is not None
        if by_address == (self.nccl_unique_id_b64 is not None):
            raise ValueError("give master_address and master_port, or nccl_unique_id_b64")
        return self

    @property
    def unique_id(self) -> bytes | None:
        """The NCCL id that came with the call; ``None`` where the trainer's store has it."""
        return None if self.nccl_unique_id_b64 is None else base64.b64decode(self.nccl_unique_id_b64)


class InitRequest(_Body):
    """``POST /init_weight_transfer_engine``."""

    init_info: InitInfo


class UpdateInfo(_Body):
    """The tensors that one ``/update_weights`` brings, in the order in which they are sent.

    Three lists of one length; empty ones stand for those of the call before.
    """

    names: Annotated[list[str], Field(max_length=MAX_TENSORS)]
    dtype_names: Annotated[list[str], Field(max_length=MAX_TENSORS)]
    shapes: Annotated[list[list[NonNegativeInt]], Field(max_length=MAX_TENSORS)]

    @model_validator(mode="before")
    @classmethod
    def _comes_by_broadcast(cls, value: Any) -> Any:
        if isinstance(value, dict) and any(key.startswith("ipc_handles") for key in value):
            raise ValueError("CUDA IPC handles are not taken here: let the trainer use vLLM's 'nccl' backend")
        return value

    @model_validator(mode="after")
    def _describes_tensors(self) -> Self:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"names, dtype_names and shapes differ in length: {len(self.names)}, {len(self.dtype_names)}, "
                f"{len(self.shapes)}"
            )
        _ = self.specs  # What cannot be described has no size, and could not even be received to be thrown away.
        return self

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, in order."""
        return tuple(
            TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
            for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True)
        )


class UpdateRequest(_Body):
    """``POST /update_weights``. A list has one entry for each worker; of a broadcast all get the same."""

    update_info: UpdateInfo | Annotated[list[UpdateInfo], Field(min_length=1, max_length=_MAX_WORLD)]

    @model_validator(mode="after")
    def _is_one_broadcast(self) -> Self:
        infos = self.update_info
        if isinstance(infos, list) and any(info != infos[0] for info in infos[1:]):
            raise ValueError("the workers are told of different tensors, which one broadcast cannot bring")
        return self

    @property
    def info(self) -> UpdateInfo:
        """What all workers receive."""
        return self.update_info[0] if isinstance(self.update_info, list) else self.update_info


class StartRequest(_Body):
    """``POST /start_weight_update``. ``is_checkpoint_format`` came with vLLM 0.22 to 0.27."""

    is_checkpoint_format: bool = True


class FinishRequest(_Body):
    """``POST /finish_weight_update``. Without a version the update gets one of its own."""

    weight_version: WeightVersion | None = None


class VersionRequest(_Body):
    """``POST /update_weight_version``."""

    new_version: WeightVersion


class PauseQuery(_Body):
    """Query of ``POST /pause``. ``clear_cache`` is ignored: an update empties every cache, and a pause needs none."""

    mode: InFlight = InFlight.ABORT


class CacheQuery(_Body):
    """Query of ``POST /reset_prefix_cache``."""

    reset_running_requests: bool = False
    reset_external: bool = False


class WorldQuery(_Body):
    """Query of ``GET /get_world_size``."""

    include_dp: bool = True
