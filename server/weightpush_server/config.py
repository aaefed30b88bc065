"""Settings of a weightpush server. The parent process puts them into the environment; every child reads them there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from weightpush_protocol.messages import INITIAL_VERSION
from weightpush_server.tokens import forget_environment

#: The control token, where the user gives it that way. Never handed on: children read a file.
TOKEN_VARIABLE: Final = "WEIGHTPUSH_CONTROL_TOKEN"
_TOKEN_FILE: Final = "WEIGHTPUSH_TOKEN_FILE"
_STATE_FILE: Final = "WEIGHTPUSH_STATE_FILE"
_WEIGHT_VERSION: Final = "WEIGHTPUSH_WEIGHT_VERSION"
_SPOOL_DIR: Final = "WEIGHTPUSH_SPOOL_DIR"
_MAX_BUCKET_BYTES: Final = "WEIGHTPUSH_MAX_BUCKET_BYTES"
_MAX_MANIFEST_BYTES: Final = "WEIGHTPUSH_MAX_MANIFEST_BYTES"
_STORAGE_POLICY: Final = "WEIGHTPUSH_STORAGE_POLICY"
_SELF_CHECK: Final = "WEIGHTPUSH_SELF_CHECK"

DEFAULT_MAX_BUCKET_BYTES: Final = 8 * 2**30
DEFAULT_MAX_MANIFEST_BYTES: Final = 128 * 2**20


class StoragePolicy(StrEnum):
    """Where an update writes a weight that post-load processing took away or converted.

    ``scratch``: to storage that is taken for the update and freed at its end. ``retain``: to storage that is kept
    between updates, so that an update may bring any part of the checkpoint. ``strict``: such a model is refused.
    """

    SCRATCH = "scratch"
    RETAIN = "retain"
    STRICT = "strict"


@dataclass(frozen=True)
class ServerConfig:
    """What the processes of one server agree on before it starts."""

    state_file: Path
    spool_dir: Path
    weight_version: str = INITIAL_VERSION
    #: Holds the control tokens. ``None``: none is asked for; only on loopback.
    token_file: Path | None = None
    #: Largest body of one bucket, in bytes.
    max_bucket_bytes: int = DEFAULT_MAX_BUCKET_BYTES
    #: Largest JSON body, in bytes; a manifest of 20,000 tensors needs about 3 MB.
    max_manifest_bytes: int = DEFAULT_MAX_MANIFEST_BYTES
    #: Handed on to the loader, which keeps it with each model's layout.
    storage_policy: StoragePolicy = StoragePolicy.SCRATCH
    #: Whether a model must show after its start that its post-load processing can be repeated.
    self_check: bool = True

    def to_environment(self) -> None:
        """Hand the settings on to this process's children."""
        os.environ[_STATE_FILE] = str(self.state_file)
        os.environ[_SPOOL_DIR] = str(self.spool_dir)
        os.environ[_WEIGHT_VERSION] = self.weight_version
        os.environ[_MAX_BUCKET_BYTES] = str(self.max_bucket_bytes)
        os.environ[_MAX_MANIFEST_BYTES] = str(self.max_manifest_bytes)
        os.environ[_STORAGE_POLICY] = self.storage_policy.value
        os.environ[_SELF_CHECK] = str(int(self.self_check))
        forget_environment(TOKEN_VARIABLE)
        os.environ[_TOKEN_FILE] = str(self.token_file or "")

    @classmethod
    def from_environment(cls) -> ServerConfig:
        """Read the settings in a child.

        Raises:
            RuntimeError: the process was not started by ``weightpush serve``.
        """
        if _STATE_FILE not in os.environ:
            raise RuntimeError("start the server with `weightpush serve`: its shared state is not set up")
        return cls(
            state_file=Path(os.environ[_STATE_FILE]),
            spool_dir=Path(os.environ[_SPOOL_DIR]),
            weight_version=os.environ[_WEIGHT_VERSION],
            token_file=Path(os.environ[_TOKEN_FILE]) if os.environ[_TOKEN_FILE] else None,
            max_bucket_bytes=int(os.environ[_MAX_BUCKET_BYTES]),
            max_manifest_bytes=int(os.environ[_MAX_MANIFEST_BYTES]),
            storage_policy=StoragePolicy(os.environ[_STORAGE_POLICY]),
            self_check=os.environ[_SELF_CHECK] == "1",
        )
