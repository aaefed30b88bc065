"""``weightpush serve``: vLLM's own OpenAI server, with our parts on its public hooks."""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
import uuid
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, NoReturn

from pydantic import TypeAdapter, ValidationError

from weightpush_protocol.messages import INITIAL_VERSION, WeightVersion
from weightpush_protocol.state import ServerState
from weightpush_server.config import DEFAULT_MAX_BUCKET_BYTES, ServerConfig, StoragePolicy
from weightpush_server.host_memory import keep_pages
from weightpush_server.plugin import ENDPOINT_PLUGIN, GENERAL_PLUGIN
from weightpush_server.records import ControlRecord
from weightpush_server.rundir import VARIABLE, RunDirectory
from weightpush_server.shared_state import SharedState
from weightpush_server.supervisor import AWAIT_OPTION, END_OPTION, RESTART_OPTION
from weightpush_server.tokens import TOKEN_VARIABLE, TokenFile, parse_tokens, write_private

_MIDDLEWARE: Final = "weightpush_server.gate.WeightPushMiddleware"
_EXTENSION: Final = "weightpush_server.worker.WeightPushWorkerExtension"
_VLLM_EXTENSION: Final = "weightpush_server.compat.worker.VllmWorkerExtension"
#: Formats that read a checkpoint tensor by tensor, or none at all; only these can be recorded.
_INNER_FORMATS: Final = ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "dummy")


_OPEN_OPTION: Final = "--compat-without-token"
_EPILOG: Final = (
    "Takes every option of `vllm serve`. weightpush's own: --control-token-file, --control-token, --weight-version, "
    "--await-weights, --reload-root, --restart-on-failure and more; see `weightpush serve --help=weightpush`, or "
    "--help=all for everything."
)


class StartRefusedError(Exception):
    """The server must not start like this; the message says what to change."""


def main(argv: Sequence[str]) -> None:
    """Run a server until it is stopped, below its supervisor.

    ``argv`` is what follows ``weightpush serve``: our own options and any of ``vllm serve``.
    """
    # vLLM takes seconds to import, and children that it spawns import this module again.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="weightpush serve", usage="%(prog)s MODEL [options]"))
    parser.epilog = _EPILOG
    _add_own_options(parser)
    args = parser.parse_args(list(argv))
    args.subparser = "serve"
    try:
        if args.model_tag is None and not any(word.startswith("--model") for word in argv):
            raise StartRefusedError("say which MODEL to serve: weightpush serve MODEL [options]")
        own = _take_own_options(args)
        if VARIABLE not in os.environ:
            raise StartRefusedError("this is the server's own process; start it with `weightpush serve`")
        check_startable(
            args,
            authenticated=own.token is not None or own.token_file is not None,
            open_routes=own.vllm_routes_open,
        )
    except StartRefusedError as error:
        _exit(str(error))
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    prepare(args, own, RunDirectory(Path(os.environ[VARIABLE])))
    ServeSubcommand.cmd(args)


def _add_own_options(parser: argparse.ArgumentParser) -> None:
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
        "--compat",
        choices=["vllm"],
        help="Serve other control routes as well. vllm: those of vLLM's own weight transfer (/update_weights, /pause, "
        "...), for trainers that were written for them; each of their updates goes through the same checks.",
    )
    group.add_argument(
        _OPEN_OPTION,
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


class _OwnOptions(argparse.Namespace):
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
    vllm_routes: bool = False
    vllm_routes_open: bool = False


def _take_own_options(args: argparse.Namespace) -> _OwnOptions:
    """Remove our options from ``args``: vLLM logs and pickles what is left."""
    token, token_file = _find_token(vars(args).pop("control_token"), vars(args).pop("control_token_file"))
    own = _OwnOptions(
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
        vllm_routes=vars(args).pop("compat") == "vllm",
        vllm_routes_open=vars(args).pop("compat_without_token"),
    )
    if own.vllm_routes_open and not own.vllm_routes:
        raise StartRefusedError(f"{_OPEN_OPTION} opens the routes of --compat vllm, which was not given")
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


def _bytes_of_mb(budget: float | None) -> int | None:
    if budget is not None and budget <= 0:
        raise StartRefusedError(f"--staging-budget-mb {budget}: give a positive number of MiB")
    return None if budget is None else int(budget * 2**20)


def _check_version(version: str) -> str:
    try:
        return TypeAdapter(WeightVersion).validate_python(version)
    except ValidationError as error:
        raise StartRefusedError(f"--weight-version {version!r}: {error.errors()[0]['msg']}") from None


def _find_token(token: str | None, file: Path | None) -> tuple[str | None, Path | None]:
    """Return the token that came by option or environment, or the file of tokens; neither where none is asked for."""
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


def _token_file(own: _OwnOptions, directory: RunDirectory) -> Path | None:
    """Return where children find the control tokens. The environment would show one to whatever they start."""
    if own.token is None:
        return own.token_file
    file = directory.path / "control-token"
    write_private(file, own.token)
    return file


def is_loopback(host: str | None) -> bool:
    """Whether a server bound to ``host`` can only be reached from its own machine."""
    if host is None or host == "":
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_startable(args: argparse.Namespace, *, authenticated: bool, open_routes: bool = False) -> None:
    """Refuse what would let a request pass us by, or what we cannot record.

    ``authenticated``: the control routes ask for a token. ``open_routes``: but those of vLLM do not.

    Raises:
        StartRefusedError: with what to change.
    """
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        raise StartRefusedError(
            "VLLM_SERVER_DEV_MODE is set: its routes (/collective_rpc, /resume, /update_weights, ...) change the model "
            "and open the engine without credentials and behind the gate. Unset it"
        )
    if not authenticated and not args.uds and not is_loopback(args.host):
        raise StartRefusedError(
            f"bound to {args.host or 'all addresses'} without a control token: anybody could replace the weights. Give "
            f"--control-token-file FILE (or {TOKEN_VARIABLE}), or bind to loopback with --host 127.0.0.1"
        )
    if open_routes and (args.uds or not is_loopback(args.host)):
        raise StartRefusedError(
            f"{_OPEN_OPTION} on {args.uds or args.host or 'all addresses'}: anybody could replace the weights. Bind to "
            "loopback with --host 127.0.0.1, or let the clients send the token (as a password, in ~/.netrc, say)"
        )
    bypasses = {
        "--grpc": getattr(args, "grpc", False),
        "--grpc-port": getattr(args, "grpc_port", None) is not None,
        "--headless": args.headless,
        "VLLM_USE_RUST_FRONTEND": os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
        "--data-parallel-rank": args.data_parallel_rank is not None,
        "--data-parallel-external-lb": args.data_parallel_external_lb,
        "--data-parallel-hybrid-lb": args.data_parallel_hybrid_lb or args.data_parallel_start_rank is not None,
        "--data-parallel-multi-port-external-lb": args.data_parallel_multi_port_external_lb,
        "--nnodes": getattr(args, "nnodes", 1) != 1,
        "--enable-elastic-ep": getattr(args, "enable_elastic_ep", False),
    }
    for option, given in bypasses.items():
        if given:
            raise StartRefusedError(
                f"{option} is not supported: requests would pass the gate by, or workers would live out of its reach"
            )
    if args.worker_extension_cls:
        raise StartRefusedError(
            f"--worker-extension-cls {args.worker_extension_cls}: vLLM takes one worker extension, and that is ours"
        )
    if args.load_format not in _INNER_FORMATS:
        raise StartRefusedError(
            f"--load-format {args.load_format} cannot be reloaded; use one of {', '.join(_INNER_FORMATS)}"
        )


def count_workers(args: argparse.Namespace) -> int:
    """Return the number of vLLM ranks that ``args`` asks for, over all engines."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size")
    total = 1
    for size in sizes:
        total *= getattr(args, size, None) or 1
    return total


def prepare(args: argparse.Namespace, own: _OwnOptions, directory: RunDirectory) -> None:
    """Make the shared state in ``directory`` and hang our parts on vLLM's hooks."""
    config = ServerConfig(
        run_directory=directory.path,
        weight_version=own.weight_version,
        token_file=_token_file(own, directory),
        max_bucket_bytes=own.max_bucket_bytes,
        storage_policy=own.storage_policy,
        self_check=own.self_check,
        keep_previous=own.keep_previous,
        staging_budget_bytes=own.staging_budget_bytes,
        await_weights=own.await_weights,
        reload_roots=own.reload_roots,
        vllm_routes=own.vllm_routes,
        vllm_routes_open=own.vllm_routes_open,
    )
    SharedState.create(
        config.state_file,
        workers=count_workers(args),
        control=ControlRecord(
            instance_id=uuid.uuid4().hex,
            state=ServerState.AWAITING_WEIGHTS if own.await_weights else ServerState.SERVING,
            has_served=not own.await_weights,
            weight_version=own.weight_version,
        ),
    )
    config.to_environment()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_pages(os.environ)
    os.environ["VLLM_PLUGINS"] = ",".join(_plugin_names())
    args.worker_extension_cls = _VLLM_EXTENSION if config.vllm_routes else _EXTENSION
    # vLLM puts the last one outermost.
    args.middleware = [*args.middleware, _MIDDLEWARE]
    args.model_loader_extra_config = {
        **_as_dict(args.model_loader_extra_config),
        # Layouts are made, and their policy is kept, where vLLM builds its loaders: these travel with its own settings.
        "weightpush_inner_format": args.load_format,
        "weightpush_storage_policy": config.storage_policy.value,
        "weightpush_self_check": config.self_check,
        "weightpush_keep_copy": config.keep_previous,
        "weightpush_copy_budget": config.staging_budget_bytes,
    }
    args.load_format = "weightpush"


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        import json

        value = json.loads(value)
    return dict(value or {})


def _plugin_names() -> list[str]:
    """Return what ``VLLM_PLUGINS`` must say so that ours are loaded and no other is lost.

    Once it is set, it filters every group, and it is the only way in for endpoint plugins.
    """
    present = os.environ.get("VLLM_PLUGINS")
    if present is not None:
        names = [name for name in present.split(",") if name]
    else:
        # Unset means all, endpoint plugins excepted.
        groups = [group for group in entry_points().groups if group.startswith("vllm.")]
        names = [
            point.name for group in groups if group != "vllm.endpoint_plugins" for point in entry_points(group=group)
        ]
    return list(dict.fromkeys([*names, GENERAL_PLUGIN, ENDPOINT_PLUGIN]))


def _exit(message: str) -> NoReturn:
    print(f"weightpush serve: {message}", file=sys.stderr)
    raise SystemExit(2)
