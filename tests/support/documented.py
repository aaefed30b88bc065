"""The commands of README and docs: where they stand, and what runs each of them.

A command runs in tests/integration/test_documented_commands.py as it stands there, with names of hosts, models and
directories exchanged for real ones; or something else runs it, or it cannot run here. ``how_tested`` knows which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for folder in ("docs", "deploy") for path in (ROOT / folder).rglob("*.md")),
)
#: What a fenced block may be. ``text`` is output.
LANGUAGES: Final = frozenset({"sh", "python", "yaml", "json", "text"})


@dataclass(frozen=True)
class Block:
    """A fenced block: ``line`` is that of its fence, ``text`` what stands in it."""

    page: str
    line: int
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Its shell commands: lines, joined where one goes on in the next; all of it where it is one script."""
        if re.search(r"^(for|if|while) ", self.text, re.MULTILINE):
            return [self.text]
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def blocks(language: str | None = None) -> list[Block]:
    """Return the fenced blocks of all pages, or those in one language."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append(Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]))
    return [block for block in found if language in (None, block.language)]


@dataclass(frozen=True)
class Rule:
    """What becomes of commands that ``pattern`` matches.

    ``tested_by``: the test file that runs it, or the like of it on this machine; ``program`` is what it must mention.
    ``reason``: why nothing can run it here.
    """

    pattern: str
    tested_by: str = ""
    program: str = ""
    reason: str = ""


HERE: Final = "tests/integration/test_documented_commands.py"

#: The first that fits counts.
RULES: Final = (
    # make
    Rule(r"make (test|test-fast|lint types|format)( |$)", reason="it is what runs this"),
    Rule(r"make demo\b", HERE),
    Rule(r"make rl\b", "tests/integration/test_rl_run.py", "grpo_ray.py"),
    Rule(r"make faults ARGS=.*--show-plan", HERE),
    Rule(r"make faults\b", "tests/integration/test_fault_campaign.py", "Campaign("),
    Rule(r"make matrix\b", "tests/integration/test_matrix.py", "matrix.run"),
    Rule(r"make bench\b", "tests/integration/test_bench.py", "benchmarks.run"),
    Rule(r"make test-trl\b", "tests/integration/test_trl.py", "run_recipe"),
    Rule(r"make test-long\b", "tests/integration/test_fault_campaign.py", "support.effort"),
    Rule(r"make lock\b", reason="it asks a package index for the newest versions"),
    # servers: their options are parsed by the server's own parser in tests/unit/test_documented.py
    Rule(r"weightpush serve --help", HERE),
    Rule(r"weightpush serve .*--restart-on-failure", "tests/integration/test_processes.py", "--restart-on-failure"),
    Rule(r"weightpush serve .*--fleet-origin", "tests/integration/test_page_server.py", "--fleet-origin"),
    Rule(r"weightpush serve .*--compat", "tests/integration/test_vllm_trainer.py", "--compat"),
    Rule(r"weightpush serve .*--await-weights", "tests/integration/test_processes.py", "--await-weights"),
    Rule(r"weightpush serve ", HERE),
    # TLS wants certificates
    Rule(r"weightpush push .* https://", "tests/unit/test_client_tls.py", "--client-cert"),
    Rule(r"weightpush ", HERE),
    # anything else
    Rule(r"pip install", reason="it is on no package index yet; tests/unit/test_package.py installs its wheel"),
    Rule(r"python -m hatchling build", "tests/unit/test_package.py", "hatchling"),
    Rule(r"python -m benchmarks\.(simulate_fleet --docs|scale\.measure)", reason="it writes into the repository"),
    Rule(r"python -m benchmarks\.simulate_fleet", HERE),
    Rule(r"ray (up|down|dashboard|job)\b", reason="it needs a cloud, or a cluster with a job server"),
    Rule(r"docker (build|compose)\b", reason="there is no Docker here; test_deploy_files.py checks its files"),
    Rule(r"kubectl kustomize", "tests/unit/test_deploy_files.py", "kustomize"),
    Rule(r"kubectl apply", reason="it needs a cluster; test_deploy_files.py checks its files"),
    Rule(r"(useradd|install|systemctl) ", reason="it changes the machine; test_deploy_files.py checks its files"),
    Rule(r"openssl rand -hex 24 > ", reason="it writes a token; test_deploy_files.py makes one of its own"),
    Rule(r"export WEIGHTPUSH_CONTROL_TOKEN=\$\(openssl", HERE),
    Rule(r"curl ", HERE),
    Rule(r"H=\"Authorization: ", HERE),
)


def rule_of(command: str) -> Rule:
    """Return the rule for ``command``. Raises ``LookupError``: nobody has said how it is tested."""
    for rule in RULES:
        if re.match(rule.pattern, command):
            return rule
    raise LookupError(f"{command!r} is documented, and no rule of tests/support/documented.py says what runs it")


def run_here() -> list[tuple[Block, str]]:
    """Return the commands that are run as they stand there."""
    return [
        (block, command) for block in blocks("sh") for command in block.commands if rule_of(command).tested_by == HERE
    ]


#: Python blocks, by page and a text in them: what runs them.
PYTHON: Final = (
    ("README.md", "for step in range(steps)", HERE),
    ("docs/usage.md", "for step in range(steps)", HERE),
    ("docs/integrations.md", "ask_servers_for_rollouts", HERE),
    ("docs/integrations.md", "VllmSyncClient", "tests/integration/test_vllm_trainer.py"),
    ("docs/integrations.md", "class PushedGeneration", "tests/integration/test_trl.py"),
    ("docs/integrations.md", "broadcast_to_vllm", "tests/unit/test_recipes.py"),
    ("docs/integrations.md", "class PushEngine", "tests/unit/test_recipes.py"),
    ("docs/trainers.md", "def names(name)", "tests/unit/test_documented.py"),
    ("docs/trainers.md", "on_server_failure=", HERE),
    ("docs/trainers.md", "process_group=", "tests/unit/test_sharded_push.py"),
    ("docs/security.md", "client_cert=", "tests/unit/test_client_tls.py"),
    ("docs/ray.md", "ServerFleet.launch(", "tests/integration/test_ray_fleet.py"),
    ("docs/ray.md", "class Trainer", "tests/integration/test_ray_fleet.py"),
)
