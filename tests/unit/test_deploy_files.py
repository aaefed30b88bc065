"""What deploy/ holds fits together, and fits the server: options parse, paths and ports exist, nothing runs as root."""

from __future__ import annotations

import fnmatch
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from support.deployment import (
    DEPLOY,
    ROOT,
    USER,
    Dockerfile,
    compose,
    container,
    kubernetes,
    of_kind,
    stateful_set,
    unit,
    unit_command,
    unit_environment,
)
from weightpush_server.supervisor import read_options

IMAGES = {path.name.removesuffix(".Dockerfile"): path for path in (DEPLOY / "docker").glob("*.Dockerfile")}
PORT = 8000


@pytest.fixture(scope="module")
def parse() -> Any:
    """Return a function that parses the arguments of ``weightpush serve`` as it does itself."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from weightpush_server.options import add_own_options

    parser = make_arg_parser(FlexibleArgumentParser())
    add_own_options(parser)

    def parsed(words: Sequence[str]) -> Any:
        restarts, rest = read_options(list(words))
        arguments = parser.parse_args(rest)
        arguments.restarts = restarts
        return arguments

    return parsed


@pytest.fixture(scope="module")
def push_steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("push_steps", DEPLOY / "docker" / "push_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# images


def test_there_is_an_image_for_each_side() -> None:
    assert set(IMAGES) == {"server", "server-cpu", "trainer"}


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_images_do_not_run_as_root(name: str) -> None:
    image = Dockerfile.read(IMAGES[name])
    assert image.last["USER"].split("\n")[-1] == f"{USER}:{USER}"
    assert f"useradd --uid {USER}" in image.last["RUN"]
    assert "HOME=/home/weightpush" in image.last["ENV"]


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_images_are_built_from_what_is_there_and_pinned(name: str) -> None:
    image = Dockerfile.read(IMAGES[name])
    for base in image.bases:
        assert ":" in base, base
        assert not base.endswith(":latest")
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for path in let_in:
        assert (ROOT / path).exists(), path
    for copied in image.copies:
        if copied != ".":
            assert (ROOT / copied).exists()
            assert any(copied == path or copied.startswith(f"{path}/") for path in let_in), copied
    # What `pip install .` reads.
    assert {"pyproject.toml", "README.md", "LICENSE", "protocol", "server", "trainer_client"} <= set(let_in)
    assert patterns[1] == "*"
    for secret in ("deploy/kubernetes/control-token", ".git/config", ".venv/bin/python", "deploy/compose.yaml"):
        assert not any(secret == path or secret.startswith(f"{path}/") for path in let_in), secret


@pytest.mark.parametrize("name", ["server", "server-cpu"])
def test_a_server_image_listens_where_it_says_and_asks_itself_there(name: str, parse: Any) -> None:
    image = Dockerfile.read(IMAGES[name])
    entry = image.command("ENTRYPOINT")
    assert entry[:2] == ["weightpush", "serve"]
    options = parse([*entry[2:], "model"])
    assert (options.host, options.port, options.model_tag) == ("0.0.0.0", PORT, "model")
    assert image.last["EXPOSE"] == str(PORT)
    assert f"http://127.0.0.1:{PORT}/reload/status" in image.health_check[-1]
    compile(image.health_check[-1], "health check", "exec")


def test_the_image_of_vllm_is_one_that_fits() -> None:
    (extras,) = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("server = ")]
    assert "vllm>=0.32,<0.34" in extras
    assert Dockerfile.read(IMAGES["server"]).bases[-1].rpartition(":")[2] in ("v0.32.0", "v0.33.0")


# compose


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_names_only_what_exists(name: str) -> None:
    base, document = compose(), compose(name)
    services = set(base["services"])
    assert set(document["services"]) <= services
    for service in filter(None, document["services"].values()):
        if "build" in service:
            file = service["build"]["dockerfile"]
            assert (ROOT / file).exists()
        for dependency in service.get("depends_on") or ():
            assert dependency in services
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in base["volumes"] or source.startswith("$") or (DEPLOY / source).exists(), volume
        for secret in service.get("secrets", ()):
            assert secret["source"] in base["secrets"]


def test_compose_runs_nothing_as_root_and_opens_nothing_to_others() -> None:
    for name, service in compose()["services"].items():
        if "build" in service:
            image = Dockerfile.read(ROOT / service["build"]["dockerfile"])
            user = service.get("user", image.last["USER"].split("\n")[-1])
        else:
            user = service["user"]
            assert ":v" in service["image"] or service["image"].rpartition(":")[2][0].isdigit(), name
        assert user.split(":")[0] not in ("0", "root"), name
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (name, port)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_commands_of_compose_are_understood(name: str, parse: Any, push_steps: ModuleType) -> None:
    document = compose(name)
    options = parse(document["services"]["server"]["command"])
    (secret,) = compose()["services"]["server"]["secrets"]
    assert str(options.control_token_file) == f"/run/secrets/{secret['target']}"
    assert options.restarts == 5
    script, *words = document["services"]["trainer"]["command"]
    assert script.endswith("/push_steps.py")
    trainer = push_steps.read_options(words)
    assert trainer.url == [f"http://server:{PORT}"]
    assert trainer.token_file == options.control_token_file
    assert str(trainer.checkpoint) == options.model_tag
    assert str(USER) == secret["uid"]
    assert secret["mode"] == 0o400


def test_what_is_watched_is_what_runs() -> None:
    services = compose()["services"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"server:{PORT}"]
    for file in prometheus["rule_files"]:
        assert (DEPLOY / "prometheus" / file).exists()
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == f"http://prometheus:{services['prometheus']['ports'][0].rpartition(':')[2]}"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/weightpush.yml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"


# kubernetes


def test_the_servers_run_without_rights() -> None:
    pod = stateful_set()["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == USER
    assert pod["automountServiceAccountToken"] is False
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_servers_options_are_understood_and_their_files_are_there(parse: Any) -> None:
    options = parse(container()["args"])
    assert options.await_weights
    assert options.restarts == 5
    volumes = {volume["name"]: volume for volume in stateful_set()["spec"]["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    folder, name = options.control_token_file.parent, options.control_token_file.name
    secret = volumes[mounts[str(folder)]]["secret"]
    assert secret["defaultMode"] == 0o440
    (made,) = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["secretGenerator"]
    assert (made["name"], made["files"]) == (secret["secretName"], [name])
    # With a root that cannot be written to, these must be.
    home = Dockerfile.read(IMAGES["server"]).last["ENV"].partition("HOME=")[2]
    assert {home, "/tmp", "/dev/shm"} <= set(mounts)


def test_probes_and_services_lead_to_the_server() -> None:
    (port,) = container()["ports"]
    assert port == {"name": "http", "containerPort": PORT}
    paths = {name: container()[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert paths["startup"]["path"] == paths["liveness"]["path"] == "/health"
    assert paths["readiness"]["path"] == "/reload/status"
    assert {probe["port"] for probe in paths.values()} == {"http"}
    labels = stateful_set()["spec"]["template"]["metadata"]["labels"]
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind("Service")}
    headless = services.pop(stateful_set()["spec"]["serviceName"])
    (clients,) = services.values()
    for service in (headless, clients):
        assert service["selector"].items() <= labels.items()
        assert service["ports"][0]["targetPort"] == "http"
    # A server that is not ready is the one that needs a push; a model client must never get there.
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert "publishNotReadyAddresses" not in clients
    assert stateful_set()["spec"]["podManagementPolicy"] == "Parallel"
    assert stateful_set()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 60


def test_selectors_meet_the_servers() -> None:
    labels = stateful_set()["spec"]["template"]["metadata"]["labels"]
    selectors = [
        stateful_set()["spec"]["selector"],
        *(budget["spec"]["selector"] for budget in of_kind("PodDisruptionBudget")),
    ]
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind("NetworkPolicy")}
    selectors.append(policies["weightpush-server"]["podSelector"])
    for selector in selectors:
        assert selector["matchLabels"].items() <= labels.items()
    assert not policies["weightpush-trainer"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_network_lets_through_what_docs_say() -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind("NetworkPolicy")}
    control, data = policies["weightpush-server"]["ingress"]
    assert control["ports"] == [{"protocol": "TCP", "port": PORT}]
    # Linux chooses ports from here, unless somebody has told it otherwise.
    free = {"protocol": "TCP", "port": 32768, "endPort": 60999}
    assert data["ports"] == [free]
    assert policies["weightpush-trainer"]["ingress"][0]["ports"] == [free]
    assert [rule["ports"] for rule in policies["weightpush-server"]["egress"]].count([free]) == 1


def test_kustomization_lists_every_file() -> None:
    listed = set(yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"])
    assert listed == {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    for document in kubernetes():
        assert {"apiVersion", "kind", "metadata"} <= set(document)


def kustomized(folder: Path, token: str | None) -> subprocess.CompletedProcess[str]:
    copy = folder / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", copy, ignore=shutil.ignore_patterns("control-token"))
    if token is not None:
        (copy / "control-token").write_text(token)
    return subprocess.run(["kubectl", "kustomize", copy], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_it_once_there_is_a_token(tmp_path: Path) -> None:
    missing = kustomized(tmp_path / "without", None)
    assert missing.returncode != 0
    assert "control-token" in missing.stderr
    built = kustomized(tmp_path / "with", "a-token")
    assert built.returncode == 0, built.stderr
    objects = list(yaml.safe_load_all(built.stdout))
    assert {document["metadata"].get("namespace", "weightpush") for document in objects} == {"weightpush"}
    names = [document["metadata"]["name"] for document in objects if document["kind"] == "Secret"]
    assert names == ["weightpush-control-token"]
    (servers,) = [document for document in objects if document["kind"] == "StatefulSet"]
    image = servers["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "registry.example.com/weightpush-server:0.1.0"


def test_the_schemas_of_kubernetes_allow_every_object() -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: 22 MB of schemas"
    )
    for document in kubernetes():
        for version in ("1.31", validator.latest_version()):
            validator.validate(document, version, strict=True)


# systemd


def test_the_units_command_is_understood(parse: Any) -> None:
    program, *words = unit_command()
    assert (program, words[0]) == ("/opt/weightpush/bin/weightpush", "serve")
    options = parse(words[1:])
    assert (options.model_tag, options.port) == (unit_environment()["MODEL"], PORT)
    assert options.await_weights
    assert options.restarts == 5
    assert options.control_token_file is not None
    settings = unit()
    assert settings["User"] == ["weightpush"]
    assert int(settings["TimeoutStopSec"][0]) > 60
    assert settings["KillMode"] == ["mixed"]
    assert settings["EnvironmentFile"] == ["/etc/weightpush/server.env"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "weightpush.service").read_text()
    file = tmp_path / "weightpush.service"
    # It looks whether the program exists.
    file.write_text(text.replace("/opt/weightpush/bin/weightpush", sys.executable))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", file],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (found.returncode, [line for line in found.stderr.splitlines() if "weightpush" in line]) == (0, []), (
        found.stderr
    )
    file.write_text(text.replace("KillMode=mixed", "KillMode=some").replace("Restart=on-failure", "Restrat=on-failure"))
    wrong = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, timeout=300)
    assert "Restrat" in wrong.stderr  # It does look.


def test_nothing_of_deploy_is_forgotten_here() -> None:
    known = ("docker/*", "kubernetes/*", "systemd/*", "prometheus/*", "grafana/*", "ray/*", "compose*.yaml")
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.name != "control-token" and "__pycache__" not in path.parts:
            assert any(fnmatch.fnmatch(str(path.relative_to(DEPLOY)), pattern) for pattern in known), path
