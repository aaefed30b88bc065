"""The options of ``weightpush serve`` that are ours, beside those of ``vllm serve``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from weightpush_protocol.messages import INITIAL_VERSION, WeightVersion
from weightpush_server.config import DEFAULT_MAX_BUCKET_BYTES, StoragePolicy
from weightpush_server.cross_origin import parse_origin
from weightpush_server.supervisor import AWAIT_OPTION, END_OPTION, RESTART_OPTION
from weightpush_server.tokens import TOKEN_VARIABLE, TokenFile, parse_tokens

OPEN_OPTION: Final = "--compat-without-token"


class StartRefusedError(Exception):
    """The server must not start like this; the message says what to change."""


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` know our options."""
    group = parser.add_argument_group("weightpush", "Pushing weights into this server.")
    group.add_argument(
        "--control-token",
        help=f"Token that calls under /reload must bring. Better in a file or in the environment ({TOKEN_VARIABLE}), "
        "since the command line is visible to every user of the machine. Required unless bound to loopback.",
    )
    group.add_argument(
        "--control-token-file",
        type=Path,
        help="File that holds the control token. Read again when it changes; may hold several tokens, one a line, so "
        "that the old one stays good during a rotation.",
    )
    group.add_argument(
        "--weight-version", default=INITIAL_VERSION, help="Label of the weights that the server starts with."
    )
    group.add_argument(
        "--max-bucket-mb",
        type=int,
        default=DEFAULT_MAX_BUCKET_BYTES // 2**20,
        help="Largest bucket that may come as a request body, in MiB.",
    )
    group.add_argument(
        "--storage-policy",
        type=StoragePolicy,
        choices=list(StoragePolicy),
        default=StoragePolicy.SCRATCH,
        help="Where an update writes weights that post-load processing took away: scratch (storage taken for the "
        "update, freed at its end), retain (storage kept between updates, which makes any partial update possible and "
        "costs up to the size of the weights), strict (refuse such a model).",
    )
    group.add_argument(
        "--self-check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Try at start whether the model's post-load processing can be repeated; refuse updates if not. Needs free "
        "memory of twice the weights for a moment, and is skipped where there is less.",
    )
    group.add_argument(
        "--keep-previous",
        action="store_true",
        help="Keep the checkpoint tensors of what is served, and of what was served before, in host memory, so that "
        "POST /reload/rollback can go back. During an update that takes three times the size of the checkpoint.",
    )
    group.add_argument(
        "--staging-budget-mb",
        type=float,
        metavar="MB",
        help="Most host memory that staged updates and kept copies may take together, in MiB. An update that does not "
        "fit is refused. By default what the host, or the container, has free, but for 1 GiB.",
    )
    group.add_argument(
        AWAIT_OPTION,
        action="store_true",
        help="Serve nothing until the first complete push or disk reload; with --load-format dummy nothing is read "
        "from disk at start.",
    )
    group.add_argument(
        "--reload-root",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="Directory below which POST /reload may load checkpoints. Repeat it for several; without one, POST "
        "/reload is refused.",
    )
    group.add_argument(
        "--fleet-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="Origin (http://HOST:PORT, as browsers reach it) of another server of the fleet, for the status page "
        "/reload/ui: its page may read this server's status, events and history, and this server's page may read "
        "its. Repeat it for several; give all servers the same list.",
    )
    group.add_argument(
        "--compat",
        choices=["vllm"],
        help="Serve other control routes as well. vllm: those of vLLM's own weight transfer (/update_weights, /pause, "
        "...), for trainers that were written for them; each of their updates goes through the same checks.",
    )
    group.add_argument(
        OPEN_OPTION,
        action="store_true",
        help="Let clients that send no token call the routes of --compat: everybody on this machine can replace the "
        "weights then. Only with --host 127.0.0.1.",
    )
    group.add_argument(
        RESTART_OPTION,
        type=int,
        metavar="N",
        help="Start the server again when it dies, up to N times (counted anew after ten minutes of health). It then "
        "awaits weights: the checkpoint that it was started on may be old.",
    )
    group.add_argument(
        END_OPTION,
        action="store_true",
        help="End at once when standard input, a pipe, closes, as it does when the program that started the server "
        "dies, however that happens.",
    )


class OwnOptions(argparse.Namespace):
    """Our options, as they were given; see their helps."""

    #: At most one of both: a token that came by option or environment, and the user's own file of tokens.
    token: str | None
    token_file: Path | None
    weight_version: str
    max_bucket_bytes: int
    storage_policy: StoragePolicy = StoragePolicy.SCRATCH
    self_check: bool = True
    keep_previous: bool = False
    staging_budget_bytes: int | None = None
    await_weights: bool = False
    reload_roots: tuple[Path, ...] = ()
    fleet_origins: tuple[str, ...] = ()
    vllm_routes: bool = False
    vllm_routes_open: bool = False


def take_own_options(args: argparse.Namespace) -> OwnOptions:
    """Remove our options from ``args``: vLLM logs and pickles what is left.

    Raises:
        StartRefusedError: one of them makes no sense, or not here.
    """
    token, token_file = find_token(vars(args).pop("control_token"), vars(args).pop("control_token_file"))
    own = OwnOptions(
        token=token,
        token_file=token_file,
        weight_version=_check_version(vars(args).pop("weight_version")),
        max_bucket_bytes=vars(args).pop("max_bucket_mb") * 2**20,
        storage_policy=vars(args).pop("storage_policy"),
        self_check=vars(args).pop("self_check"),
        keep_previous=vars(args).pop("keep_previous"),
        staging_budget_bytes=_bytes_of_mb(vars(args).pop("staging_budget_mb")),
        await_weights=vars(args).pop("await_weights"),
        reload_roots=tuple(_check_root(root) for root in vars(args).pop("reload_root")),
        fleet_origins=tuple(dict.fromkeys(_check_origin(text) for text in vars(args).pop("fleet_origin"))),
        vllm_routes=vars(args).pop("compat") == "vllm",
        vllm_routes_open=vars(args).pop("compat_without_token"),
    )
    if own.vllm_routes_open and not own.vllm_routes:
        raise StartRefusedError(f"{OPEN_OPTION} opens the routes of --compat vllm, which was not given")
    # The supervisor has taken them off the command line.
    for option, given in ((RESTART_OPTION, vars(args).pop("restart_on_failure")), (END_OPTION, args.end_with_stdin)):
        if given not in (None, False):
            raise StartRefusedError(f"{option} must stand on the command line, not in a configuration file")
    del args.end_with_stdin
    return own


def _check_root(root: Path) -> Path:
    try:
        resolved = root.resolve(strict=True)
    except OSError as error:
        raise StartRefusedError(f"--reload-root {root}: {error.strerror}") from None
    if not resolved.is_dir():
        raise StartRefusedError(f"--reload-root {root} is no directory")
    return resolved


def _check_origin(text: str) -> str:
    try:
        return parse_origin(text)
    except ValueError as error:
        raise StartRefusedError(f"--fleet-origin: {error}") from None


def _bytes_of_mb(budget: float | None) -> int | None:
    if budget is not None and budget <= 0:
        raise StartRefusedError(f"--staging-budget-mb {budget}: give a positive number of MiB")
    return None if budget is None else int(budget * 2**20)


def _check_version(version: str) -> str:
    try:
        return TypeAdapter(WeightVersion).validate_python(version)
    except ValidationError as error:
        raise StartRefusedError(f"--weight-version {version!r}: {error.errors()[0]['msg']}") from None


def find_token(token: str | None, file: Path | None) -> tuple[str | None, Path | None]:
    """Return the token that came by option or environment, or the file of tokens; neither where none is asked for.

    Raises:
        StartRefusedError: what came is no token, or a file that holds none.
    """
    if token is not None and file is not None:
        raise StartRefusedError("give --control-token or --control-token-file, not both")
    if file is not None:
        try:
            TokenFile(file)
        except OSError as error:
            raise StartRefusedError(f"--control-token-file {file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise StartRefusedError(f"--control-token-file {file}: {error}") from None
        return None, file.absolute()  # Links in it stay: a rotation may point one elsewhere.
    source = "--control-token" if token is not None else TOKEN_VARIABLE
    token = os.environ.get(TOKEN_VARIABLE) if token is None else token
    if token is None:
        return None, None
    try:
        parse_tokens(token)
    except ValueError as error:
        raise StartRefusedError(f"{source} is no control token: {error}") from None
    return token, None
