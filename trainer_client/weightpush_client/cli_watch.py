"""``weightpush watch``: a progress bar that follows ``GET /reload/events``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Final

import httpx
import typer
from pydantic import ValidationError
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from weightpush_client.cli_common import (
    FAILED_EXIT,
    CaFileOption,
    ClientCertOption,
    TokenFileOption,
    TokenOption,
    read_token,
    readable_errors,
    stdout,
    verify_of,
)
from weightpush_client.http import ServerApi
from weightpush_client.report import PushError
from weightpush_client.urls import normalise_url
from weightpush_protocol.errors import ErrorCode
from weightpush_protocol.status import Status

#: Tries to reconnect in a row, without an event in between, and the pause before each, in seconds.
_PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0)


def watch(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, e.g. localhost:8000.")],
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="End when the running update ends (or, where none runs, the next one): 0 if it was committed, else 1.",
        ),
    ] = False,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Follow a server's updates with a progress bar. Ends on Ctrl-C. Needs the control token.

    \b
    weightpush watch localhost:8000
    weightpush watch localhost:8000 --once && echo "new weights serve"

    Exit code 2 if the server cannot be reached.
    """
    with readable_errors():
        api = ServerApi(normalise_url(url), token=read_token(token, token_file), verify=verify_of(ca_file, client_cert))
        try:
            committed = asyncio.run(_watch(api, once=once))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
        if not committed:
            raise typer.Exit(FAILED_EXIT)


async def _watch(api: ServerApi, *, once: bool) -> bool:
    screen = _Screen()
    try:
        with screen.bar:
            async for status in _statuses(api):
                ended = screen.show(status)
                if once and ended is not None:
                    return ended
    finally:
        await api.close()
    return True


async def _statuses(api: ServerApi) -> AsyncIterator[Status]:
    """Yield every status that the server reports; reconnect where the stream breaks."""
    tries = 0
    while True:
        try:
            async for text in api.events():
                try:
                    status = Status.model_validate_json(text)
                except ValidationError as error:
                    raise PushError(
                        ErrorCode.PROTOCOL_ERROR,
                        f"an event is no status: {error.errors()[0]['msg']}",
                        server=api.url,
                    ) from None
                tries = 0
                yield status
            reason = "the server ended the stream"
        except PushError as error:
            if error.code is not ErrorCode.UNREACHABLE:
                raise
            reason = error.message
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}"
        if tries == len(_PAUSES_S):
            raise PushError(
                ErrorCode.UNREACHABLE, f"gave up after {tries} tries to reconnect: {reason}", server=api.url
            )
        await asyncio.sleep(_PAUSES_S[tries])
        tries += 1


class _Screen:
    """Turns statuses into a progress bar, and into one line for each thing that is worth a line."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=False),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=stdout(),
            transient=True,
        )
        self._task = self.bar.add_task("", total=None, visible=False)
        self._update_id: str | None = None
        self._shown = ""

    def show(self, status: Status) -> bool | None:
        """Show ``status``. Return how the update that was running ended, True if committed; None while none ended."""
        update = status.update
        ended = self._end(status) if self._update_id and (not update or update.update_id != self._update_id) else None
        if update is None:
            self._say(
                f"{status.state.value}: version {status.weight_version}"
                + ("" if status.serving else ", refuses requests")
            )
            self.bar.update(self._task, visible=False)
            return ended
        if update.update_id != self._update_id:
            self._update_id = update.update_id
            self._say(f"update {update.update_id}: {update.weight_version} over {update.transport}")
            self.bar.reset(self._task)
        self.bar.update(
            self._task,
            description=f"{update.weight_version} {update.phase.value}",
            total=update.bytes_total or None,
            completed=update.bytes_done,
            visible=True,
        )
        return ended

    def _end(self, status: Status) -> bool:
        update_id, self._update_id = self._update_id, None
        if (last := status.last_update) and last.update_id == update_id:
            self._say(
                f"committed {last.weight_version}: {last.bytes / 1e6:.1f} MB in {last.seconds:.2f} s, "
                f"not serving for {last.pause_seconds:.2f} s"
            )
            return True
        if (error := status.last_error) and error.update_id == update_id:
            self._say(f"failed: {error.message} [{error.code.value}]")
        else:
            self._say(f"update {update_id} ended; the server does not say how")
        return False

    def _say(self, line: str) -> None:
        if line != self._shown:
            self.bar.console.print(line)
        self._shown = line
