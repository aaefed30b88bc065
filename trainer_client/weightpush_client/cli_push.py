"""``weightpush push``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from weightpush_client.cli_common import (
    EXCLUDED_EXIT,
    CaFileOption,
    ClientCertOption,
    TokenFileOption,
    TokenOption,
    readable_errors,
    stderr,
    stdout,
)
from weightpush_client.policy import OnServerFailure
from weightpush_client.pusher import WeightPusher
from weightpush_client.report import ProgressCallback, PushProgress
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import DEFAULT_BUCKET_BYTES
from weightpush_protocol.messages import Deadlines, DigestKind, InFlight, UpdateMode

_DEADLINES = Deadlines()


def push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory with a safetensors checkpoint.")],
    url: Annotated[list[str], typer.Option("--url", "-u", metavar="URL", help="A server; repeat it for several.")],
    version: Annotated[
        str, typer.Option("--version", "-v", metavar="VERSION", help="Weight version to publish, e.g. step-100.")
    ],
    transport: Annotated[str, typer.Option(help="auto, nccl, shm (server on this host), gloo or http.")] = "auto",
    from_disk: Annotated[
        bool, typer.Option("--from-disk", help="The servers read DIR themselves, from below their --reload-root.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="With --from-disk: DIR is read here, too, and the servers must find the same in it."
        ),
    ] = False,
    mode: Annotated[
        UpdateMode | None,
        typer.Option(
            help="direct writes into the live model (default); staged keeps the old one serving meanwhile (default "
            "with --from-disk)."
        ),
    ] = None,
    in_flight: Annotated[InFlight, typer.Option("--in-flight", help="What becomes of running requests.")] = (
        InFlight.WAIT
    ),
    bucket_mb: Annotated[float, typer.Option("--bucket-mb", min=0.001, help="Size of a bucket in MiB.")] = (
        DEFAULT_BUCKET_BYTES / 2**20
    ),
    no_digest: Annotated[bool, typer.Option("--no-digest", help="Do not check tensors on arrival.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="DIR holds some of the tensors; the servers keep the others as they are.")
    ] = False,
    on_server_failure: Annotated[
        OnServerFailure,
        typer.Option(
            "--on-server-failure",
            help="When a server fails: abort commits nowhere, exclude commits on the others (exit code 3).",
        ),
    ] = OnServerFailure.ABORT,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    client_cert: ClientCertOption = None,
    data_host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Address of this machine that the servers shall use (nccl, gloo)."),
    ] = None,
    rendezvous_timeout: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Seconds for the data plane to come up.")
    ] = _DEADLINES.rendezvous_s,
    bucket_timeout: Annotated[float, typer.Option(min=0.001, max=3600, help="Seconds for one bucket.")] = (
        _DEADLINES.bucket_s
    ),
    drain_timeout: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Seconds that running requests may take to end.")
    ] = _DEADLINES.drain_s,
    commit_timeout: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Seconds for post-load processing and proof.")
    ] = _DEADLINES.commit_s,
    lease_timeout: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Seconds after which a silent trainer loses its update.")
    ] = _DEADLINES.lease_s,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no report.")] = False,
) -> None:
    """Push a checkpoint directory into one or more servers.

    \b
    weightpush push ./checkpoint --url localhost:8000 --version step-100
    weightpush push ./checkpoint --url http://gpu-1:8000 --url http://gpu-2:8000 --version step-100
    weightpush push /shared/step-100 --url localhost:8000 --version step-100 --from-disk

    All servers take the weights in one update, and none ever serves half of them. If the push fails, a server keeps
    its old weights where nothing was written yet; else it refuses requests until a push succeeds.

    Exit code 0 if all servers serve the new weights, 3 if some were excluded and the others do, 1 or 2 if none does.
    """
    with readable_errors():
        deadlines = Deadlines(
            rendezvous_s=rendezvous_timeout,
            bucket_s=bucket_timeout,
            drain_s=drain_timeout,
            commit_s=commit_timeout,
            lease_s=lease_timeout,
        )
        pusher = WeightPusher(
            url,
            token=token,
            token_file=token_file,
            transport=transport,
            mode=mode or UpdateMode.DIRECT,
            in_flight=in_flight,
            deadlines=deadlines,
            bucket_bytes=int(bucket_mb * 2**20),
            digest=DigestKind.NONE if no_digest else DigestKind.WP64,
            partial=partial,
            verify=True if ca_file is None else ca_file,
            client_cert=client_cert,
            data_host=data_host,
            on_server_failure=on_server_failure,
        )
        if from_disk:
            if partial:
                message = "--from-disk loads whole checkpoints: leave --partial out"
                raise WeightPushError(ErrorCode.INVALID_REQUEST, message)
            if on_server_failure is OnServerFailure.EXCLUDE:
                message = "--from-disk has every server load by itself: leave --on-server-failure out"
                raise WeightPushError(ErrorCode.INVALID_REQUEST, message)
            with pusher:
                _load(pusher, directory, version, mode or UpdateMode.STAGED, check=check, quiet=quiet)
            return
        with pusher, _progress_bar(quiet) as progress:
            report = pusher.push(directory, weight_version=version, progress=progress)
        if not quiet:
            stdout().print(str(report))
        if report.excluded:
            raise typer.Exit(EXCLUDED_EXIT)


def _load(pusher: WeightPusher, directory: Path, version: str, mode: UpdateMode, *, check: bool, quiet: bool) -> None:
    # The servers know nothing of where we are.
    path = os.path.abspath(directory)
    answers = pusher.push_from_disk(path, weight_version=version, mode=mode, weights=path if check else None)
    if not quiet:
        stdout().print(f"loaded from {path}\n{answers}")


@contextmanager
def _progress_bar(quiet: bool) -> Iterator[ProgressCallback | None]:
    console = stderr()
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description:>7}"),
        BarColumn(),
        DownloadColumn(binary_units=False),
        TransferSpeedColumn(),
        TextColumn("bucket {task.fields[bucket]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("check", total=None, bucket="-")

        def update(state: PushProgress) -> None:
            bar.update(
                task,
                description=state.phase.value,
                total=state.bytes_total or None,
                completed=state.bytes,
                bucket=f"{state.bucket}/{state.buckets}",
            )

        yield update
