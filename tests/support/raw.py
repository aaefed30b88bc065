"""A client that follows the wire contract by hand, and can break it at any step."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from support.server import ServerProcess
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.manifest import Manifest, TensorSpec, build_manifest
from weightpush_protocol.transports.http import digests_to_metadata, encode_header


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint directory with one file."""
    return load_file(directory / "model.safetensors")


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the raw bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of an answer."""
    error: dict[str, Any] = response.json()["error"]
    return error


class RawUpdate:
    """One update over the http transport."""

    def __init__(
        self, server: ServerProcess, tensors: Mapping[str, torch.Tensor], *, version: str, bucket_bytes: int = 40_000
    ) -> None:
        self.tensors = dict(tensors)
        self.version = version
        self.update_id = uuid.uuid4().hex
        self.client = server.client()
        weakref.finalize(self, self.client.close)
        self.manifest: Manifest = build_manifest(
            (TensorSpec.of(name, tensor) for name, tensor in tensors.items()), bucket_bytes
        )

    def begin(self, **changes: Any) -> httpx.Response:
        """Send ``begin``; ``changes`` replace fields of the body."""
        body: dict[str, Any] = {
            "update_id": self.update_id,
            "weight_version": self.version,
            "manifest": self.manifest.model_dump(mode="json"),
            "transport": {"name": "http"},
        }
        return self.client.post("/reload/begin", json={**body, **changes})

    def body(self, number: int, *, digests: Mapping[str, str] | None = None) -> bytes:
        """Return the body of bucket ``number``."""
        entries = self.manifest.bucket_tensors(number)
        if digests is None:
            digests = {spec.name: tensor_digest(self.tensors[spec.name]) for spec, _ in entries}
        header = encode_header(entries, digests_to_metadata(number, digests))
        return header + b"".join(as_bytes(self.tensors[spec.name]) for spec, _ in entries)

    def stream(self, number: int, content: bytes | None = None, **query: Any) -> httpx.Response:
        """Send bucket ``number``."""
        return self.client.post(
            "/reload/stream",
            params={"update_id": self.update_id, "bucket": number, **query},
            content=self.body(number) if content is None else content,
            headers={"Content-Type": "application/octet-stream"},
        )

    def stream_all(self, numbers: Sequence[int] | None = None) -> None:
        """Send buckets, all by default, each with success."""
        for number in range(len(self.manifest.buckets)) if numbers is None else numbers:
            self.stream(number).raise_for_status()

    def keep(self, epoch: int | None = None) -> httpx.Response:
        """Send ``keep``."""
        return self.client.post("/reload/keep", json={"update_id": self.update_id, "epoch": epoch})

    def prepare(self) -> httpx.Response:
        """Send ``prepare``."""
        return self.client.post("/reload/prepare", json={"update_id": self.update_id})

    def finish(self) -> httpx.Response:
        """Send ``finish``."""
        return self.client.post("/reload/finish", json={"update_id": self.update_id})

    def abort(self, reason: str = "test") -> httpx.Response:
        """Send ``abort``."""
        return self.client.post("/reload/abort", json={"update_id": self.update_id, "reason": reason})
