"""What ``weightpush serve`` refuses before it loads anything, and how it hangs its parts on vLLM's hooks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightpush_protocol.state import ServerState
from weightpush_server import app, options
from weightpush_server.config import TOKEN_VARIABLE, ServerConfig, StoragePolicy
from weightpush_server.rundir import RunDirectory
from weightpush_server.shared_state import SharedState


def arguments(**changes: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {
        "host": "127.0.0.1",
        "uds": None,
        "headless": False,
        "data_parallel_rank": None,
        "data_parallel_start_rank": None,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "data_parallel_multi_port_external_lb": False,
        "worker_extension_cls": "",
        "load_format": "auto",
        "middleware": ["user.Middleware"],
        "model_loader_extra_config": '{"enable_multithread_load": true}',
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
    }
    return argparse.Namespace(**{**defaults, **changes})


def test_our_options_are_read_and_taken_away() -> None:
    parser = argparse.ArgumentParser()
    options.add_own_options(parser)

    def read(*words: str) -> tuple[options.OwnOptions, argparse.Namespace]:
        args = parser.parse_args(words)
        return options.take_own_options(args), args

    own, left = read()
    assert (own.storage_policy, own.self_check) == (StoragePolicy.SCRATCH, True)
    assert vars(left) == {}
    own, _ = read("--storage-policy", "retain", "--no-self-check")
    assert (own.storage_policy, own.self_check) == (StoragePolicy.RETAIN, False)
    assert (own.await_weights, own.reload_roots) == (False, ())
    with pytest.raises(SystemExit):
        read("--storage-policy", "none")


def test_reload_roots_are_directories_that_exist(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    options.add_own_options(parser)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    file = tmp_path / "file"
    file.touch()
    own = options.take_own_options(
        parser.parse_args(["--reload-root", str(link), "--reload-root", "/", "--await-weights"])
    )
    assert (own.await_weights, own.reload_roots) == (True, (tmp_path.resolve(), Path("/")))
    for root, why in ((file, "is no directory"), (tmp_path / "missing", "No such file")):
        with pytest.raises(options.StartRefusedError, match=why):
            options.take_own_options(parser.parse_args(["--reload-root", str(root)]))


def test_origins_of_the_fleet_are_exact_and_each_counts_once() -> None:
    parser = argparse.ArgumentParser()
    options.add_own_options(parser)
    words = ["--fleet-origin", "http://GPU-2:8000/", "--fleet-origin", "http://gpu-2:8000"]
    own = options.take_own_options(parser.parse_args([*words, "--fleet-origin", "https://gpu-3"]))
    assert own.fleet_origins == ("http://gpu-2:8000", "https://gpu-3")
    for origin in ("*", "gpu-2:8000", "http://gpu-2/page"):
        with pytest.raises(options.StartRefusedError, match=r"--fleet-origin: .* is no origin"):
            options.take_own_options(parser.parse_args(["--fleet-origin", origin]))


@pytest.mark.parametrize("words", [["--restart-on-failure", "3"], ["--end-with-stdin"]])
def test_what_is_the_supervisors_must_have_been_taken_out(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    options.add_own_options(parser)
    with pytest.raises(options.StartRefusedError, match="must stand on the command line"):
        options.take_own_options(parser.parse_args(words))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_token(host: str) -> None:
    app.check_startable(arguments(host=host), authenticated=False)


@pytest.mark.case("C24")
@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "10.0.0.7", "myhost", "localhost.example"])
def test_any_other_address_needs_a_token(host: str | None) -> None:
    with pytest.raises(options.StartRefusedError, match="without a control token"):
        app.check_startable(arguments(host=host), authenticated=False)
    app.check_startable(arguments(host=host), authenticated=True)


@pytest.mark.case("C25")
def test_the_development_routes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with pytest.raises(options.StartRefusedError, match="VLLM_SERVER_DEV_MODE"):
        app.check_startable(arguments(), authenticated=True)


@pytest.mark.parametrize(
    "change",
    [
        {"grpc": True},
        {"grpc_port": 5},
        {"headless": True},
        {"data_parallel_rank": 0},
        {"data_parallel_external_lb": True},
        {"data_parallel_hybrid_lb": True},
        {"data_parallel_multi_port_external_lb": True},
        {"nnodes": 2},
        {"worker_extension_cls": "my.Extension"},
        {"load_format": "tensorizer"},
    ],
    ids=str,
)
def test_what_would_bypass_us_is_refused(change: dict[str, Any]) -> None:
    (option,) = change
    with pytest.raises(options.StartRefusedError, match=option.replace("_", "-")):
        app.check_startable(arguments(**change), authenticated=True)


def test_the_token_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert options.find_token(None, None) == (None, None)
    monkeypatch.setenv(TOKEN_VARIABLE, "from-environment")
    assert options.find_token(None, None) == ("from-environment", None)
    assert options.find_token(None, file) == (None, file)
    assert options.find_token("from-flag", None) == ("from-flag", None)
    monkeypatch.chdir(tmp_path)
    assert options.find_token(None, Path("token")) == (None, file)
    with pytest.raises(options.StartRefusedError, match="not both"):
        options.find_token("a", file)
    with pytest.raises(options.StartRefusedError, match="cannot be read"):
        options.find_token(None, tmp_path / "missing")
    for bad in ("", "two words", "tab\there", "ümlaut"):
        with pytest.raises(options.StartRefusedError, match="--control-token is no control token") as refused:
            options.find_token(bad, None)
        assert not bad or bad not in str(refused.value)
        file.write_text(bad)
        with pytest.raises(options.StartRefusedError, match="--control-token-file"):
            options.find_token(None, file)


@pytest.fixture
def directory() -> Iterator[RunDirectory]:
    made = RunDirectory.create()
    yield made
    made.remove()


def test_hooks_are_set_and_the_users_own_kept(monkeypatch: pytest.MonkeyPatch, directory: RunDirectory) -> None:
    with monkeypatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("WEIGHTPUSH_") or name == "VLLM_PLUGINS":
                patch.delenv(name)
        patch.setattr(os, "environ", os.environ.copy())
        args = arguments()
        own = options.OwnOptions(
            token="secret",
            token_file=None,
            weight_version="v0",
            max_bucket_bytes=2**20,
            storage_policy=StoragePolicy.RETAIN,
            self_check=False,
            await_weights=True,
            reload_roots=(Path("/models"),),
            fleet_origins=("http://gpu-2:8000",),
            keep_previous=True,
            staging_budget_bytes=3 * 2**20,
        )
        app.prepare(args, own, directory)
        config = ServerConfig.from_environment()
        plugins = os.environ["VLLM_PLUGINS"].split(",")
        # What children inherit names a file, not its content.
        assert "secret" not in os.environ.values()
    assert args.middleware == ["user.Middleware", app._MIDDLEWARE]
    assert args.load_format == "weightpush"
    assert args.model_loader_extra_config == {
        "enable_multithread_load": True,
        "weightpush_inner_format": "auto",
        "weightpush_storage_policy": "retain",
        "weightpush_self_check": False,
        "weightpush_keep_copy": True,
        "weightpush_copy_budget": 3 * 2**20,
    }
    assert (config.storage_policy, config.self_check) == (StoragePolicy.RETAIN, False)
    assert (config.await_weights, config.reload_roots) == (True, (Path("/models"),))
    assert config.fleet_origins == ("http://gpu-2:8000",)
    assert (config.keep_previous, config.staging_budget_bytes) == (True, 3 * 2**20)
    assert {"weightpush", "weightpush_http"} <= set(plugins)
    assert config.token_file is not None
    assert config.token_file.read_text() == "secret\n"
    assert os.stat(config.token_file).st_mode & 0o777 == 0o600
    assert "secret" not in repr(config)
    shared = SharedState(config.state_file)
    assert shared.workers == 6
    assert shared.control().weight_version == "v0"
    assert shared.control().state is ServerState.AWAITING_WEIGHTS
    assert os.stat(config.state_file.parent).st_mode & 0o777 == 0o700


def test_named_plugins_stay_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine,weightpush")
    assert app._plugin_names() == ["mine", "weightpush", "weightpush_http"]


def test_routes_of_vllm_are_asked_for_and_may_stand_open_on_loopback_alone() -> None:
    parser = argparse.ArgumentParser()
    options.add_own_options(parser)

    def read(*words: str) -> options.OwnOptions:
        return options.take_own_options(parser.parse_args(words))

    own = read()
    assert (own.vllm_routes, own.vllm_routes_open) == (False, False)
    own = read("--compat", "vllm", "--compat-without-token")
    assert (own.vllm_routes, own.vllm_routes_open) == (True, True)
    with pytest.raises(options.StartRefusedError, match="--compat vllm"):
        read("--compat-without-token")
    app.check_startable(arguments(), authenticated=True, open_routes=True)
    for where in ({"host": "0.0.0.0"}, {"host": None}, {"host": "gpu-7"}, {"uds": "/run/vllm.sock"}):
        with pytest.raises(options.StartRefusedError, match="--compat-without-token"):
            app.check_startable(arguments(**where), authenticated=True, open_routes=True)
