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

from weightpush_protocol.state import ServerState
from weightpush_server.address import claim_address
from weightpush_server.config import ServerConfig
from weightpush_server.host_memory import keep_pages
from weightpush_server.options import OPEN_OPTION, OwnOptions, StartRefusedError, add_own_options, take_own_options
from weightpush_server.plugin import ENDPOINT_PLUGIN, GENERAL_PLUGIN
from weightpush_server.records import ControlRecord
from weightpush_server.rundir import VARIABLE, RunDirectory
from weightpush_server.shared_state import SharedState
from weightpush_server.tokens import TOKEN_VARIABLE, write_private

_MIDDLEWARE: Final = "weightpush_server.gate.WeightPushMiddleware"
_EXTENSION: Final = "weightpush_server.worker.WeightPushWorkerExtension"
_VLLM_EXTENSION: Final = "weightpush_server.compat.worker.VllmWorkerExtension"
#: Formats that read a checkpoint tensor by tensor, or none at all; only these can be recorded.
_INNER_FORMATS: Final = ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "dummy")


_EPILOG: Final = (
    "Takes every option of `vllm serve`. weightpush's own: --control-token-file, --control-token, --weight-version, "
    "--await-weights, --reload-root, --restart-on-failure and more; see `weightpush serve --help=weightpush`, or "
    "--help=all for everything."
)


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
    add_own_options(parser)
    args = parser.parse_args(list(argv))
    args.subparser = "serve"
    try:
        if args.model_tag is None and not any(word.startswith("--model") for word in argv):
            raise StartRefusedError("say which MODEL to serve: weightpush serve MODEL [options]")
        own = take_own_options(args)
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
    try:
        # After `prepare`, so that a restart in which the address is taken for a moment is tried again.
        held = claim_address(args.host, args.port, args.uds)
    except StartRefusedError as error:
        _exit(str(error), status=1)
    ServeSubcommand.cmd(args)
    del held  # Not before.


def _token_file(own: OwnOptions, directory: RunDirectory) -> Path | None:
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
            f"{OPEN_OPTION} on {args.uds or args.host or 'all addresses'}: anybody could replace the weights. Bind to "
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


def prepare(args: argparse.Namespace, own: OwnOptions, directory: RunDirectory) -> None:
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
        fleet_origins=own.fleet_origins,
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


def _exit(message: str, status: int = 2) -> NoReturn:
    print(f"weightpush serve: {message}", file=sys.stderr)
    raise SystemExit(status)
