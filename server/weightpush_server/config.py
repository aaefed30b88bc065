"""Settings of a weightpush server. The parent process puts them into the environment; every child reads them there."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from weightpush_protocol.messages import INITIAL_VERSION
from weightpush_server.rundir import VARIABLE, RunDirectory
from weightpush_server.tokens import TOKEN_VARIABLE, forget_environment

_TOKEN_FILE: Final = "WEIGHTPUSH_TOKEN_FILE"
_WEIGHT_VERSION: Final = "WEIGHTPUSH_WEIGHT_VERSION"
_MAX_BUCKET_BYTES: Final = "WEIGHTPUSH_MAX_BUCKET_BYTES"
_MAX_MANIFEST_BYTES: Final = "WEIGHTPUSH_MAX_MANIFEST_BYTES"
_STORAGE_POLICY: Final = "WEIGHTPUSH_STORAGE_POLICY"
_SELF_CHECK: Final = "WEIGHTPUSH_SELF_CHECK"
_KEEP_PREVIOUS: Final = "WEIGHTPUSH_KEEP_PREVIOUS"
_STAGING_BUDGET: Final = "WEIGHTPUSH_STAGING_BUDGET"
_AWAIT_WEIGHTS: Final = "WEIGHTPUSH_AWAIT_WEIGHTS"
_RELOAD_ROOTS: Final = "WEIGHTPUSH_RELOAD_ROOTS"
_FLEET_ORIGINS: Final = "WEIGHTPUSH_FLEET_ORIGINS"
_VLLM_ROUTES: Final = "WEIGHTPUSH_VLLM_ROUTES"
_VLLM_ROUTES_OPEN: Final = "WEIGHTPUSH_VLLM_ROUTES_OPEN"

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

    #: See `weightpush_server.rundir`.
    run_directory: Path
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
    #: Keep the checkpoint tensors of what is served, and of what was served before, in host memory.
    keep_previous: bool = False
    #: Most bytes of host memory that staged updates and kept copies may take; ``None``: what is free.
    staging_budget_bytes: int | None = None
    #: Serve nothing before the first complete update.
    await_weights: bool = False
    #: Resolved directories below which checkpoints may be loaded from disk.
    reload_roots: tuple[Path, ...] = ()
    #: Other servers: their status pages may read this one, and this one's page may read them.
    fleet_origins: tuple[str, ...] = ()
    #: Serve vLLM's own weight-transfer routes, see `weightpush_server.compat`.
    vllm_routes: bool = False
    #: Let clients that send no token call those; only on loopback.
    vllm_routes_open: bool = False

    @property
    def state_file(self) -> Path:
        """The file of the shared record."""
        return RunDirectory(self.run_directory).state_file

    @property
    def spool_dir(self) -> Path:
        """Directory of request bodies."""
        return RunDirectory(self.run_directory).spool

    def to_environment(self) -> None:
        """Hand the settings on to this process's children."""
        os.environ[VARIABLE] = str(self.run_directory)
        os.environ[_WEIGHT_VERSION] = self.weight_version
        os.environ[_MAX_BUCKET_BYTES] = str(self.max_bucket_bytes)
        os.environ[_MAX_MANIFEST_BYTES] = str(self.max_manifest_bytes)
        os.environ[_STORAGE_POLICY] = self.storage_policy.value
        os.environ[_SELF_CHECK] = str(int(self.self_check))
        forget_environment(TOKEN_VARIABLE)
        os.environ[_TOKEN_FILE] = str(self.token_file or "")
        os.environ[_KEEP_PREVIOUS] = str(int(self.keep_previous))
        os.environ[_STAGING_BUDGET] = "" if self.staging_budget_bytes is None else str(self.staging_budget_bytes)
        os.environ[_AWAIT_WEIGHTS] = str(int(self.await_weights))
        os.environ[_VLLM_ROUTES] = str(int(self.vllm_routes))
        os.environ[_VLLM_ROUTES_OPEN] = str(int(self.vllm_routes_open))
        os.environ[_RELOAD_ROOTS] = json.dumps([str(root) for root in self.reload_roots])
        os.environ[_FLEET_ORIGINS] = json.dumps(self.fleet_origins)

    @classmethod
    def from_environment(cls) -> ServerConfig:
        """Read the settings in a child.

        Raises:
            RuntimeError: the process was not started by ``weightpush serve``.
        """
        if VARIABLE not in os.environ or _WEIGHT_VERSION not in os.environ:
            raise RuntimeError("start the server with `weightpush serve`: its shared state is not set up")
        return cls(
            run_directory=Path(os.environ[VARIABLE]),
            weight_version=os.environ[_WEIGHT_VERSION],
            token_file=Path(os.environ[_TOKEN_FILE]) if os.environ[_TOKEN_FILE] else None,
            max_bucket_bytes=int(os.environ[_MAX_BUCKET_BYTES]),
            max_manifest_bytes=int(os.environ[_MAX_MANIFEST_BYTES]),
            storage_policy=StoragePolicy(os.environ[_STORAGE_POLICY]),
            self_check=os.environ[_SELF_CHECK] == "1",
            keep_previous=os.environ[_KEEP_PREVIOUS] == "1",
            staging_budget_bytes=int(os.environ[_STAGING_BUDGET]) if os.environ[_STAGING_BUDGET] else None,
            await_weights=os.environ[_AWAIT_WEIGHTS] == "1",
            reload_roots=tuple(Path(root) for root in json.loads(os.environ[_RELOAD_ROOTS])),
            fleet_origins=tuple(json.loads(os.environ[_FLEET_ORIGINS])),
            vllm_routes=os.environ[_VLLM_ROUTES] == "1",
            vllm_routes_open=os.environ[_VLLM_ROUTES_OPEN] == "1",
        )
