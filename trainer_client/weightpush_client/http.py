"""One server's HTTP contract: typed calls, bounded in time, with errors that are always a `PushError`.

Only what cannot do harm twice is tried again: a refused connection always (nothing was sent), a connection that broke
before the answer for idempotent calls. A call that took too long is never repeated.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from weightpush_client.access import ControlToken, Tls, explain_tls
from weightpush_client.report import PushError
from weightpush_client.urls import is_loopback
from weightpush_protocol import PROTOCOL_VERSION, limits
from weightpush_protocol.errors import ErrorBody, ErrorCode, ErrorDetail
from weightpush_protocol.messages import (
    AbortRequest,
    BeginAnswer,
    BeginCall,
    Deadlines,
    DiskReloadRequest,
    FinishAnswer,
    FinishRequest,
    KeepAnswer,
    KeepRequest,
    ManifestAnswer,
    PrepareAnswer,
    PrepareRequest,
    RollbackRequest,
    StreamAnswer,
    StreamRequest,
    UpdateMode,
    VerifyAnswer,
    VerifyRequest,
)
from weightpush_protocol.status import Status
from weightpush_protocol.versions import READING, mismatch

#: What an answer may take beyond the server's own deadlines, in seconds.
SLACK_S: Final = 10.0
STATUS_S: Final = 10.0
MANIFEST_S: Final = 60.0
#: Reading all weights once, at a few GB/s on a slow machine.
VERIFY_S: Final = 600.0
ABORT_S: Final = 5.0
#: A stream of events that says nothing for so long is taken for broken, in seconds.
SILENCE_S: Final = 30.0

# uvicorn closes idle connections after 5 s: give them up before it does.
_KEEPALIVE_S = 3.0
#: Whoever is there accepts at once, however busy; a host that is gone must not hold up the others.
_CONNECT_S = 4.0
_BACKOFF_S = (0.05, 0.4)
_CHUNK_BYTES = 2**20
_MAX_ANSWER_BYTES = 256 * 2**20
_MAX_REFUSAL_BYTES = 2**20
_QUOTED_CHARACTERS = 500
_PROXY_STATUS = frozenset({502, 503, 504})
_HINTS: Final = dict.fromkeys((404, 405), "; is it a weightpush server (`weightpush serve`)?")

#: What every client asks for first.
_FIRST_PATH: Final = "/reload/status"
_CLOSED_HINTS: Final = {
    False: "; does this port speak TLS? Then write https://",
    True: "; does the server want a client certificate that it trusts (client_cert=, --client-cert)?",
}
_logger = logging.getLogger("weightpush")
#: Servers that were warned of already.
_warned: set[str] = set()

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class ServerApi:
    """The ``/reload`` routes of one server. Belongs to one event loop.

    ``trust_env``: use the proxies that the environment names. A call that is refused for its token is sent once more
    if the token's file holds another one by now. Redirects are not followed: they could carry the token elsewhere.
    """

    def __init__(self, url: str, *, token: ControlToken, trust_env: bool = False, verify: Tls) -> None:
        self.url = url
        self._token = token
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "weightpush"}
        # A plain connection needs no certificates.
        context = verify.context if trust_env or url.startswith("https") else False
        if token.value is not None:
            _warn_if_readable(url)

        def client(keepalive: int) -> httpx.AsyncClient:
            limits = httpx.Limits(max_keepalive_connections=keepalive, keepalive_expiry=_KEEPALIVE_S)
            return httpx.AsyncClient(
                base_url=url, headers=headers, limits=limits, trust_env=trust_env, verify=context, timeout=None
            )

        self._client = client(4)
        # A body cannot be sent twice, so it never travels on a connection that the server may be closing.
        self._body_client = client(0)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
        await self._body_client.aclose()

    async def status(self, timeout_s: float | None = None) -> Status:
        """Return the status, whether the server serves or not; within ``STATUS_S`` seconds where none are given."""
        status = await self._call("GET", "/reload/status", Status, timeout_s or STATUS_S, accept_503=True)
        self._check_version(status, READING)
        return status

    async def ready_to_push(self) -> Status:
        """Return the status of a server that speaks a version in which weights can be pushed to it.

        Raises:
            PushError: ``protocol_mismatch``: it does not.
        """
        status = await self.status()
        self._check_version(status, PROTOCOL_VERSION)
        return status

    def _check_version(self, status: Status, needed: str) -> None:
        if mismatch(client=needed, server=status.protocol):
            raise self._error(
                ErrorCode.PROTOCOL_MISMATCH, mismatch(client=PROTOCOL_VERSION, server=status.protocol) or ""
            )

    async def manifest(self) -> ManifestAnswer:
        """Return the checkpoint that this server expects."""
        return await self._call("GET", "/reload/manifest", ManifestAnswer, MANIFEST_S)

    async def verify(self, request: VerifyRequest) -> VerifyAnswer:
        """Ask whether the server holds what was committed, and whether that is the checkpoint of ``request``."""
        return await self._call("POST", "/reload/verify", VerifyAnswer, VERIFY_S, body=request)

    async def begin(self, request: BeginCall) -> BeginAnswer:
        """Open an update; the answer comes when the model is open."""
        timeout_s = limits.begin_s(request.deadlines) + SLACK_S
        return await self._call("POST", "/reload/begin", BeginAnswer, timeout_s, body=request)

    async def announce(self, request: StreamRequest, timeout_s: float) -> StreamAnswer:
        """Announce a bucket that comes over the collective transport."""
        return await self._call("POST", "/reload/stream", StreamAnswer, timeout_s, body=request)

    async def send_body(
        self, *, update_id: str, epoch: int, bucket: int, parts: tuple[bytes | memoryview, ...], timeout_s: float
    ) -> StreamAnswer:
        """Post a bucket as a body made of ``parts``, and return when it has landed. Never sent twice."""

        async def chunks() -> AsyncIterator[bytes]:
            for part in parts:
                view = memoryview(part)
                for start in range(0, len(view), _CHUNK_BYTES):
                    yield bytes(view[start : start + _CHUNK_BYTES])

        return await self._call(
            "POST",
            "/reload/stream",
            StreamAnswer,
            timeout_s,
            params={"update_id": update_id, "epoch": str(epoch), "bucket": str(bucket)},
            stream=chunks,
            length=sum(len(part) for part in parts),
        )

    async def keep(self, request: KeepRequest, timeout_s: float) -> KeepAnswer:
        """Renew the update's lease."""
        return await self._call("POST", "/reload/keep", KeepAnswer, timeout_s, body=request)

    async def prepare(self, request: PrepareRequest, deadlines: Deadlines, mode: UpdateMode) -> PrepareAnswer:
        """Take the update as far as it goes without committing it."""
        timeout_s = limits.prepare_s(deadlines, mode) + SLACK_S
        return await self._call("POST", "/reload/prepare", PrepareAnswer, timeout_s, body=request)

    async def finish(self, request: FinishRequest, deadlines: Deadlines, mode: UpdateMode) -> FinishAnswer:
        """Commit the update; the answer comes when the new weights serve."""
        timeout_s = limits.finish_s(deadlines, mode) + SLACK_S
        return await self._call("POST", "/reload/finish", FinishAnswer, timeout_s, body=request)

    async def rollback(self, request: RollbackRequest) -> FinishAnswer:
        """Let the server go back to the weights of which it keeps a copy; the answer comes when they serve."""
        timeout_s = limits.rollback_s(request.deadlines) + SLACK_S
        return await self._call("POST", "/reload/rollback", FinishAnswer, timeout_s, body=request)

    async def load(self, request: DiskReloadRequest) -> FinishAnswer:
        """Let the server load a checkpoint from its own disk; the answer comes when the new weights serve."""
        timeout_s = limits.load_s(request.deadlines) + SLACK_S
        return await self._call("POST", "/reload", FinishAnswer, timeout_s, body=request)

    async def abort(self, request: AbortRequest) -> Status:
        """End the update; harmless where it has ended already."""
        return await self._call("POST", "/reload/abort", Status, ABORT_S, body=request, accept_503=True)

    async def events(self) -> AsyncIterator[str]:
        """Yield the data of every ``status`` event, until the server ends the stream.

        Raises:
            PushError: the server refused, or cannot be reached.
            httpx.HTTPError: the stream broke, or was silent for ``SILENCE_S`` seconds.
        """

        async def connect() -> httpx.Response:
            headers = {"Accept": "text/event-stream", **self._credentials()}
            request = self._client.build_request("GET", "/reload/events", headers=headers)
            request.extensions["timeout"] = {"connect": _CONNECT_S, "read": SILENCE_S}
            return await self._client.send(request, stream=True)

        used = self._token.value
        try:
            response = await connect()
            if response.status_code == 401 and self._token.renewed(used):
                await response.aclose()
                response = await connect()
        except (httpx.HTTPError, ssl.SSLError) as error:
            raise self._broken("GET", "/reload/events", error) from error
        try:
            if response.status_code != 200:
                text = b""
                async for chunk in response.aiter_raw():
                    text = (text + chunk)[:_MAX_REFUSAL_BYTES]
                raise self._refusal("GET", "/reload/events", response.status_code, text)
            async for data in _event_data(response.aiter_lines(), "status"):
                yield data
        finally:
            await response.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        answer: type[AnswerT],
        timeout_s: float,
        *,
        body: BaseModel | None = None,
        params: dict[str, str] | None = None,
        stream: Callable[[], AsyncIterator[bytes]] | None = None,
        length: int = 0,
        accept_503: bool = False,
    ) -> AnswerT:
        client = self._client if stream is None else self._body_client

        def request() -> httpx.Request:
            if stream is not None:
                headers = {"Content-Type": "application/octet-stream", "Content-Length": str(length)}
                headers |= self._credentials()
                return client.build_request(method, path, params=params, content=stream(), headers=headers)
            content = None if body is None else body.model_dump_json().encode()
            headers = {} if body is None else {"Content-Type": "application/json"}
            return client.build_request(method, path, content=content, headers=headers | self._credentials())

        try:
            # One limit over all attempts and every byte of the answer, however slowly it drips in.
            async with asyncio.timeout(timeout_s):
                used = self._token.value
                status, text = await self._attempts(client, request, idempotent=stream is None)
                # Whoever was refused has done nothing yet, so this repeats nothing.
                if status == 401 and self._token.renewed(used):
                    status, text = await self._attempts(client, request, idempotent=stream is None)
        except TimeoutError:
            raise self._error(ErrorCode.UNREACHABLE, f"no answer to {method} {path} within {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
            raise self._broken(method, path, error) from error
        return self._parse(method, path, answer, status, text, accept_503=accept_503)

    def _credentials(self) -> dict[str, str]:
        token = self._token.value
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    async def _attempts(
        self, client: httpx.AsyncClient, request: Callable[[], httpx.Request], *, idempotent: bool
    ) -> tuple[int, bytes]:
        for pause in _BACKOFF_S:
            try:
                return await self._attempt(client, request())
            except httpx.ConnectError as error:
                if explain_tls(error, self.url) is not None:
                    raise
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                if not idempotent:
                    raise
            await asyncio.sleep(pause)
        return await self._attempt(client, request())

    async def _attempt(self, client: httpx.AsyncClient, request: httpx.Request) -> tuple[int, bytes]:
        request.extensions["timeout"] = {"connect": _CONNECT_S}
        response = await client.send(request, stream=True)
        try:
            text = bytearray()
            async for chunk in response.aiter_raw():
                text += chunk
                if len(text) > _MAX_ANSWER_BYTES:
                    raise self._error(ErrorCode.PROTOCOL_ERROR, f"the answer exceeds {_MAX_ANSWER_BYTES} bytes")
            return response.status_code, bytes(text)
        finally:
            await response.aclose()

    def _parse(
        self, method: str, path: str, answer: type[AnswerT], status: int, text: bytes, *, accept_503: bool
    ) -> AnswerT:
        if status == 200 or (accept_503 and status == 503):
            try:
                return answer.model_validate_json(text)
            except ValidationError as error:
                if status == 200:
                    raise self._error(
                        ErrorCode.PROTOCOL_ERROR,
                        f"the answer to {method} {path} is not of this protocol: {error.errors()[0]['msg']} "
                        f"in {_quote(text)}",
                    ) from None
        raise self._refusal(method, path, status, text)

    def _refusal(self, method: str, path: str, status: int, text: bytes) -> PushError:
        try:
            detail = ErrorBody.model_validate_json(text).error
        except ValidationError:
            code = ErrorCode.UNREACHABLE if status in _PROXY_STATUS else ErrorCode.PROTOCOL_ERROR
            hint = _HINTS.get(status, "")
            if 300 <= status < 400:
                hint = "; redirects are not followed, since the token would go along: give the server's own address"
            return self._error(
                code, f"{method} {path} was answered {status} without a reason of the server: {_quote(text)}{hint}"
            )
        if detail.code is ErrorCode.UPDATE_FAILED:
            detail = _cause_of(detail)
        return PushError(
            detail.code,
            detail.message,
            server=self.url,
            details=detail.details,
            update_id=detail.update_id,
            state=detail.state,
        )

    def _broken(self, method: str, path: str, error: Exception) -> PushError:
        reason = _reason(error)
        if (explained := explain_tls(error, self.url)) is not None:
            return self._error(ErrorCode.UNREACHABLE, f"cannot connect: {explained}")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
            return self._error(ErrorCode.UNREACHABLE, f"cannot connect ({reason}); is the server up?")
        disconnected = isinstance(error, httpx.NetworkError) or "disconnected" in str(error)
        code = ErrorCode.UNREACHABLE if disconnected else ErrorCode.PROTOCOL_ERROR
        if path == _FIRST_PATH and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
            # All that a client sees of a TLS alert, where it sees one at all.
            reason += _CLOSED_HINTS[self.url.startswith("https")]
        return self._error(code, f"{method} {path} got no answer: {reason}")

    def _error(self, code: ErrorCode, message: str) -> PushError:
        return PushError(code, message, server=self.url)


def _reason(error: BaseException) -> str:
    """Return what the operating system said, below the layers that wrapped it; else what the error itself says."""
    below: BaseException | None = error
    for _ in range(10):
        if isinstance(below, OSError) and below.strerror:
            return f"{type(below).__name__}: {below.strerror}"
        below = below and (below.__cause__ or below.__context__)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _event_data(lines: AsyncIterator[str], wanted: str) -> AsyncIterator[str]:
    """Yield the data of server-sent events of kind ``wanted``."""
    kind, data = "message", list[str]()
    async for line in lines:
        if not line:
            if data and kind == wanted:
                yield "\n".join(data)
            kind, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "data":
            data.append(value)


def _cause_of(failed: ErrorDetail) -> ErrorDetail:
    """Return why an update had failed before the call that was refused for it."""
    try:
        cause = ErrorDetail.model_validate(failed.details.get("cause"))
    except ValidationError:
        return failed
    return cause.model_copy(update={"update_id": failed.update_id, "state": failed.state})


def _warn_if_readable(url: str) -> None:
    if url.startswith("http:") and not is_loopback(url) and url not in _warned:
        _warned.add(url)
        _logger.warning(
            "the control token goes to %s unencrypted: whoever can read the network can replace the weights; start the "
            "server with --ssl-certfile and --ssl-keyfile and write https://, or keep to a trusted network",
            url,
        )


def _quote(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace")[:_QUOTED_CHARACTERS])
