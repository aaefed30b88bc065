"""For trainers that use vLLM's own weight-transfer engines: a client with a token, for one server or several, and a
source of any weights that a `WeightPusher` takes.

::

    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
    from weightpush_client.vllm import VllmSource, VllmSyncClient

    client = VllmSyncClient(["http://gpu-7:8000", "http://gpu-8:8000"])
    init = NCCLTrainerInitInfo(rank=0, master_address=me, master_port=51216, world_size=client.world_size)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(init, client=client, source=VllmSource(model))
    engine.send_weights()

The servers are started with ``weightpush serve --compat vllm``. Both classes have the shape that vLLM's engines ask for
and do not import vLLM. The other way round, a `WeightPusher` takes a source that was written for vLLM's engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import torch

from weightpush_client.access import ControlToken, Tls
from weightpush_client.report import PushError
from weightpush_client.sources import Weights, open_source
from weightpush_client.urls import normalise_urls
from weightpush_client.wrappers import without_wrappers
from weightpush_protocol.errors import ErrorCode

__all__ = ["ParamMeta", "VllmSource", "VllmSyncClient"]

#: What a server may take at most for a commit, a drain before it and some room, in seconds.
TIMEOUT_S: Final = 900.0
_CONNECT_S: Final = 10.0

_T = TypeVar("_T")


class VllmSyncClient:
    """The calls that vLLM's trainer engines make, to servers that were started with ``--compat vllm``.

    Several servers form one group with the trainer, which broadcasts to all of them at once: the engine sees one server
    with the workers of all. Every call is made to all servers at the same time and returns when all have answered.

    Args:
        urls: addresses of the servers.
        token, token_file, verify, client_cert: as for a `WeightPusher`.
        timeout_s: for each call, in seconds.

    Raises:
        PushError: from every call: the first server's refusal or silence, with its code and text. What the others did
            is not undone; a version is served by those that have it, as their status says.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        verify: bool | str | Path = True,
        client_cert: str | Path | tuple[str | Path, str | Path] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.urls = normalise_urls(urls)
        self._token = ControlToken(token, token_file)
        tls = Tls(verify, client_cert)
        context = tls.context if any(url.startswith("https") for url in self.urls) else False
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        # No connection is kept: the server closes idle ones, and none of these calls may be made twice.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(trust_env=False, verify=context, timeout=timeout, limits=limits)

    def close(self) -> None:
        """Close what is open. The servers stay in their group, see `shutdown_weight_transfer_engine`."""
        self._http.close()

    def __enter__(self) -> VllmSyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def world_size(self) -> int:
        """Number of ranks of the group: all workers of all servers, and the trainer that sends."""
        return 1 + sum(self._sizes())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let all workers join the trainer's group, those of each server behind those of the one before."""
        first = int(init_info["rank_offset"])
        sizes = self._sizes()
        offsets = {url: first + sum(sizes[:number]) for number, url in enumerate(self.urls)}
        self._post("init_weight_transfer_engine", lambda url: {"init_info": {**init_info, "rank_offset": offsets[url]}})

    def start_weight_update(self) -> None:
        """Begin an update; one that this trainer left open is given up."""
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let the servers take part in the broadcast of these tensors; returns when they have them."""
        self._post("update_weights", lambda _: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the servers check that a whole checkpoint has come, and serve it as ``weight_version``."""
        self._post("finish_weight_update", lambda _: {"weight_version": weight_version})

    def shutdown_weight_transfer_engine(self) -> None:
        """Let the servers leave the group."""
        self._post("shutdown_weight_transfer_engine")

    def _sizes(self) -> list[int]:
        return [int(answer["world_size"]) for answer in self._all(lambda url: self._call(url, "GET", "get_world_size"))]

    def _post(self, path: str, body: Callable[[str], dict[str, Any]] = lambda _: {}) -> None:
        self._all(lambda url: self._call(url, "POST", path, body(url)))

    def _all(self, call: Callable[[str], _T]) -> list[_T]:
        with ThreadPoolExecutor(len(self.urls)) as pool:
            calls = [pool.submit(call, url) for url in self.urls]
        return [done.result() for done in calls]

    def _call(self, url: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            used = self._token.value
            response = self._request(url, method, path, body)
            # Whoever was refused has done nothing yet, so this repeats nothing.
            if response.status_code == 401 and self._token.renewed(used):
                response = self._request(url, method, path, body)
        except httpx.HTTPError as error:
            message = f"{method} /{path} was not answered: {type(error).__name__}: {error}"
            raise PushError(ErrorCode.UNREACHABLE, message, server=url) from error
        if response.status_code != 200:
            raise _refusal(url, method, path, response)
        answer: dict[str, Any] = response.json()
        return answer

    def _request(self, url: str, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        token = self._token.value
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return self._http.request(method, f"{url}/{path}", json=body, headers=headers)


def _refusal(url: str, method: str, path: str, response: httpx.Response) -> PushError:
    """Return what a server says against a call: in vLLM's shape of errors, or, without the token, in ours."""
    try:
        error = response.json()["error"]
        kind = error["code"] if isinstance(error["code"], str) else error["type"]
        return PushError(ErrorCode(kind), str(error["message"]), server=url)
    except (ValueError, KeyError, TypeError):
        hint = "; was it started with --compat vllm?" if response.status_code in (404, 405, 503) else ""
        message = f"{method} /{path} was answered with HTTP {response.status_code}: {response.text[:200]!r}{hint}"
        return PushError(ErrorCode.PROTOCOL_ERROR, message, server=url)


class ParamMeta(NamedTuple):
    """Name, dtype and shape (elements per dimension) of one tensor, as vLLM's engines read them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class VllmSource:
    """Weights that a `WeightPusher` takes, as a source for vLLM's ``nccl`` and ``ipc`` engines: a module, whoever has
    wrapped, sharded or adapted it, a mapping, pairs or a directory.

    Tensors come under the names of the checkpoint, LoRA adapters merged. On a sharded trainer make one on every rank,
    as vLLM's engines ask for: each pass gathers, and all ranks must make it.
    """

    def __init__(self, weights: Weights) -> None:
        if isinstance(weights, Iterator):
            raise TypeError("an iterator can be read once only: give what it iterates over")
        self._weights = weights

    def metadata(self) -> list[ParamMeta]:
        """Return what iterating will yield, without gathering anything."""
        source = open_source(self._weights)
        try:
            return [ParamMeta(without_wrappers(spec.name), spec.torch_dtype, spec.shape) for spec in source.specs()]
        finally:
            source.close()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        source = open_source(self._weights)
        try:
            for name, tensor in source.tensors([spec.name for spec in source.specs()]):
                yield without_wrappers(name), tensor
        finally:
            source.close()

    def held_names(self) -> None:
        """Return None: every rank yields whole tensors."""
