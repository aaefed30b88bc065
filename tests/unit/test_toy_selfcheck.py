"""The self-check finds models whose post-load processing cannot be repeated, and leaves them fit to serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.toy import (
    ROWS,
    WIDTH,
    Layer,
    Method,
    Toy,
    checkpoint,
    cold_start,
    configuration,
    contents,
    differing,
)
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_server import loader
from weightpush_server.config import StoragePolicy
from weightpush_server.reload import check_reloadable
from weightpush_server.reload.layout import SelfCheckOutcome
from weightpush_server.reload.memory import free_bytes

#: A guard where no journal looks: outside of the model.
_SEEN: set[int] = set()


class _GuardedOutside(Method):
    """Packs once in a process, whatever the layer."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if id(layer) not in _SEEN:
            _SEEN.add(id(layer))
            layer.weight = nn.Parameter(layer.weight.data.roll(1, dims=0), requires_grad=False)


class _RaisesTwice(Method):
    """Cannot be run again at all."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if id(layer) in _SEEN:
            raise RuntimeError("processed already")
        _SEEN.add(id(layer))


class _ChangesLayout(Method):
    """Keeps the bytes and changes the shape when run again."""

    def process_weights_after_loading(self, layer: Any) -> None:
        shape = (WIDTH, ROWS) if id(layer) in _SEEN else (ROWS, WIDTH)
        _SEEN.add(id(layer))
        layer.weight = nn.Parameter(layer.weight.data.view(shape), requires_grad=False)


def _with(method: type[Method]) -> Any:
    def make() -> nn.Module:
        model = Toy()
        model.prepacked = Layer(method())
        return model

    return make


@pytest.mark.parametrize("policy", list(StoragePolicy))
@pytest.mark.parametrize("pin", [False, True], ids=["", "pinned"])
def test_a_good_model_passes_and_is_as_before(policy: StoragePolicy, pin: bool) -> None:
    checked = cold_start(checkpoint(1), policy=policy, pin=pin)
    unchecked = cold_start(checkpoint(1), policy=policy, pin=pin, self_check=False)
    assert checked.layout.self_check.outcome is SelfCheckOutcome.PASSED
    assert unchecked.layout.self_check.outcome is SelfCheckOutcome.OFF
    assert differing(contents(checked.model), contents(unchecked.model)) == []
    assert torch.equal(checked.model(), unchecked.model())
    assert not checked.layout.is_open
    assert all(group.shadow is None for group in checked.layout.groups)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (_GuardedOutside, "changed it: it held bfloat16"),
        (_RaisesTwice, "RuntimeError: processed already"),
        (_ChangesLayout, r"expected torch.bfloat16 \[6, 8\]"),
    ],
)
def test_a_model_that_fails_serves_and_refuses_updates(
    method: type[Method], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    _SEEN.clear()
    config = configuration()
    live = cold_start(checkpoint(1), make=_with(method), vllm_config=config)
    with pytest.raises(WeightPushError, match=reason) as caught:
        check_reloadable(live.model)
    assert caught.value.code is ErrorCode.SELF_CHECK_FAILED
    if method is not _RaisesTwice:
        assert caught.value.details["offender"] == "prepacked.weight"
    assert "will refuse updates" in caplog.text
    # What it serves is the result of a first processing, not of the second one that the check tried.
    _SEEN.clear()
    wanted = cold_start(checkpoint(1), make=_with(method), self_check=False)
    assert differing(contents(live.model), contents(wanted.model)) == []
    assert list(config.compilation_config.static_forward_context.values()) == [live.model]


def test_without_memory_there_is_no_check(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(loader, "has_room", lambda model, device: False)
    live = cold_start(checkpoint(1))
    assert live.layout.self_check.outcome is SelfCheckOutcome.SKIPPED
    assert "not enough memory" in caplog.text
    live.push(checkpoint(2))


def test_free_memory_of_this_machine() -> None:
    assert 2**26 < free_bytes(torch.device("cpu")) < 2**50


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from weightpush_server.reload import memory

    for name, content in {
        "memory.max": "1000000\n",
        "memory.current": "900000\n",
        "memory.stat": "anon 500000\ninactive_file 300000\n",
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "meminfo").write_text("MemTotal: 5000 kB\nMemAvailable: 2000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUPS", ((tmp_path, "memory.max", "memory.current", "inactive_file"),))
    assert free_bytes(torch.device("cpu")) == 1_000_000 - 900_000 + 300_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(torch.device("cpu")) == 2_048_000
