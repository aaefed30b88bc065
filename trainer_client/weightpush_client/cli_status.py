"""``weightpush status`` and ``weightpush abort``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from weightpush_client.catch_up import version_line
from weightpush_client.cli_common import (
    FAILED_EXIT,
    UNREACHABLE_EXIT,
    CaFileOption,
    ClientCertOption,
    TokenFileOption,
    TokenOption,
    read_token,
    readable_errors,
    stdout,
    verify_of,
)
from weightpush_client.membership import connected
from weightpush_client.report import PushError
from weightpush_client.urls import normalise_url, normalise_urls
from weightpush_protocol.errors import WeightPushError
from weightpush_protocol.messages import AbortRequest
from weightpush_protocol.status import Status, UpdateStatus


def status(
    url: Annotated[list[str], typer.Argument(metavar="URL...", help="Servers, e.g. localhost:8000.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array, one object a server.")] = False,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Show what servers serve, and whether they do. No token needed.

    \b
    weightpush status localhost:8000
    weightpush status http://gpu-1:8000 http://gpu-2:8000 --json

    Exit code 0 if all serve, 1 if one does not, 2 if one cannot be reached.
    """
    with readable_errors():
        urls = normalise_urls(url)
        with connected(urls, read_token(token, token_file), verify_of(ca_file, client_cert)) as fleet:
            results = fleet.call_to_the_end(lambda _, server: server.status())
        answers: list[Status | PushError] = []
        for result in results:
            if not isinstance(result, Status | PushError):
                raise result
            answers.append(result)
        if as_json:
            stdout().print(json.dumps([_as_json(*pair) for pair in zip(urls, results, strict=True)], indent=2))
        else:
            stdout().print(_table(urls, results))
            stdout().print(version_line(list(zip(urls, answers, strict=True))))
            for line in _remarks(urls, results):
                stdout().print(line)
        if any(isinstance(result, Exception) for result in results):
            raise typer.Exit(UNREACHABLE_EXIT)
        if not all(isinstance(result, Status) and result.serving for result in results):
            raise typer.Exit(FAILED_EXIT)


def abort(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, e.g. localhost:8000.")],
    reason: Annotated[str, typer.Option(help="Why; the trainer and the status show it.")] = (
        "aborted from the command line"
    ),
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """End the update that runs on a server.

    \b
    weightpush abort localhost:8000 --reason "wrong checkpoint"

    Before its first write the server goes on with its old weights; after it, it refuses requests until a push succeeds.
    """
    with (
        readable_errors(),
        connected((normalise_url(url),), read_token(token, token_file), verify_of(ca_file, client_cert)) as fleet,
    ):
        update = fleet.call(lambda _, server: server.status())[0].update
        if update is None:
            stdout().print("no update runs; nothing to abort")
            return
        request = AbortRequest(update_id=update.update_id, epoch=update.epoch, reason=reason[:1000])
        after = fleet.call(lambda _, server: server.abort(request))[0]
        stdout().print(f"aborted update {update.update_id}; the server is {after.state.value}")


def _as_json(url: str, result: Status | Exception) -> dict[str, Any]:
    if isinstance(result, Status):
        return {"url": url, "status": result.model_dump(mode="json")}
    if isinstance(result, WeightPushError):
        return {"url": url, **result.body().model_dump(mode="json")}
    raise result


def _table(urls: Sequence[str], results: Sequence[Status | Exception]) -> Table:
    table = Table(Column("server", overflow="fold"), "serving", "state", "version", "workers", "update", "last push")
    for url, result in zip(urls, results, strict=True):
        if isinstance(result, Status):
            last = result.last_update
            table.add_row(
                url,
                "yes" if result.serving else "no",
                result.state.value,
                result.weight_version if result.serving else f"(was {result.weight_version})",
                str(len(result.workers)),
                _describe(result.update),
                f"{last.bytes / 1e6:.1f} MB in {last.seconds:.2f} s" if last else "-",
            )
        else:
            table.add_row(url, "?", "no answer", "", "", "", "")
    return table


def _describe(update: UpdateStatus | None) -> str:
    if update is None:
        return "-"
    share = 100 * update.bytes_done // update.bytes_total if update.bytes_total else 0
    return f"{update.weight_version}: {update.phase.value} {share} %"


def _remarks(urls: Sequence[str], results: Sequence[Status | Exception]) -> Iterator[str]:
    for url, result in zip(urls, results, strict=True):
        if isinstance(result, WeightPushError):
            yield f"{url}: {result.message} [{result.code.value}]"
        elif isinstance(result, Status) and result.last_error:
            error = result.last_error
            what = "the last push failed and changed nothing" if result.serving else "needs a complete push"
            yield f"{url}: {what} ({error.at:%Y-%m-%d %H:%M:%S} UTC): {error.message} [{error.code.value}]"
        if isinstance(result, Status):
            for copy in result.copies:
                yield f"{url}: keeps a copy of {copy.weight_version} ({copy.role.value}, {copy.bytes / 1e6:.1f} MB)"
            for worker in result.workers:
                if (refused := worker.reload_refused) is not None:
                    yield f"{url}: worker {worker.rank} takes no updates: {refused.message} [{refused.code.value}]"
