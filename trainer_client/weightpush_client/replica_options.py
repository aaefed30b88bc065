"""What a replica of a fleet is started with: words of the command line, environment, resources. No I/O here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from weightpush_client.urls import TOKEN_ENV
from weightpush_protocol.errors import ErrorCode, WeightPushError

#: What follows ``weightpush serve MODEL``, as words or as ``{option: value}``.
ServerArgs = Sequence[str] | Mapping[str, Any]

#: Options that the fleet sets itself, or cannot work with; what to do instead.
_RESERVED: Final = {
    "--host": "a replica is bound to the address of its node",
    "--port": "a replica takes a free port of its node",
    "--uds": "a replica is bound to the address of its node",
    "--control-token": "give token= to ServerFleet.launch",
    "--control-token-file": "give token= to ServerFleet.launch",
    "--restart-on-failure": "a replica starts its server again by itself",
    "--end-with-stdin": "a replica sets it",
    "--model": "it is the first argument of ServerFleet.launch",
    "--ssl-certfile": "a fleet talks plain http; put servers with TLS up yourself, and push to their addresses",
    "--ssl-keyfile": "a fleet talks plain http; put servers with TLS up yourself, and push to their addresses",
}
#: How Ray tells an actor which accelerators it has.
_ACCELERATORS: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "NEURON_RT_VISIBLE_CORES",
    "ONEAPI_DEVICE_SELECTOR",
    "TPU_VISIBLE_CHIPS",
)
_SIZES: Final = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
_SHORT: Final = {"-tp": _SIZES[0], "-pp": _SIZES[1], "-dp": _SIZES[2]}


def words_of(server_args: ServerArgs) -> tuple[str, ...]:
    """Return ``server_args`` as words of a command line.

    In a mapping, ``{"tensor_parallel_size": 2}`` is ``--tensor-parallel-size 2``; True is the bare option, False its
    ``--no-`` form, None leaves it out, a sequence is several values, a mapping is JSON. Options that are given several
    times (``--reload-root``) need the sequence of words.

    Raises:
        WeightPushError: ``invalid_request``: a single string, or an option that the fleet sets itself.
    """
    if isinstance(server_args, str):
        raise _invalid(f"server_args is one string: give a sequence of words, as in {server_args.split()!r}")
    words: list[str] = []
    if isinstance(server_args, Mapping):
        for name, value in server_args.items():
            words += _words(name, value)
    else:
        words = [str(word) for word in server_args]
    for word in words:
        option = _option(word)
        if option in _RESERVED:
            raise _invalid(f"server_args holds {option}: {_RESERVED[option]}")
    return tuple(words)


def _words(name: str, value: Any) -> list[str]:
    option = name if name.startswith("-") else f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if isinstance(value, Mapping):
        return [option, json.dumps(value)]
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return [option, str(value)]
    return [option, *map(str, value)]


def _option(word: str) -> str:
    """Return the name of an option in its usual form; vLLM takes underscores for hyphens."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("-") else ""


def workers_of(words: Sequence[str]) -> int:
    """Return the number of vLLM ranks that a command line asks for: tensor times pipeline times data parallel."""
    sizes = dict.fromkeys(_SIZES, 1)
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        option = _option(word)
        option = _SHORT.get(option, option)
        value = word.partition("=")[2] or following
        if option in sizes and value.isdecimal():
            sizes[option] = int(value)
    total = 1
    for size in sizes.values():
        total *= size
    return total


def environment_of(env: Mapping[str, str] | None, token: str | None) -> tuple[dict[str, str], str | None]:
    """Return the variables to add to a server's environment, and the control token, given by argument or among them.

    Raises:
        WeightPushError: ``invalid_request``: no text, a token in both, or a variable that Ray sets.
    """
    added = dict(env or {})
    for name, value in added.items():
        if not isinstance(value, str):
            raise _invalid(f"env[{name!r}] is no string but {type(value).__name__}")
        if name in _ACCELERATORS:
            raise _invalid(f"env holds {name}, which Ray sets for each replica: give resources_per_replica instead")
    other = added.pop(TOKEN_ENV, None)
    if token is not None and other is not None:
        raise _invalid(f"give the control token as token= or as env[{TOKEN_ENV!r}], not both")
    return added, token if token is not None else other


def default_resources(words: Sequence[str], gpus_in_cluster: float) -> dict[str, float]:
    """Return what a replica takes where nobody says: a CPU, and a GPU for each rank where the cluster has any."""
    resources: dict[str, float] = {"CPU": 1}
    if gpus_in_cluster:
        resources["GPU"] = workers_of(words)
    return resources


def check_resources(resources: Mapping[str, float] | None) -> None:
    """Refuse amounts that Ray would take for a placement and never give.

    Raises:
        WeightPushError: ``invalid_request``: an amount is negative, no number, or all are zero.
    """
    for name, amount in (resources or {}).items():
        if not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise _invalid(f"resources_per_replica[{name!r}] must be a number from 0 on, got {amount!r}")
    if resources is not None and not any(resources.values()):
        raise _invalid("resources_per_replica holds nothing: leave it out for the default")


def taken_of(
    bundles: Sequence[Mapping[str, float]], wanted: Mapping[str, float] | None, replicas: int
) -> list[Mapping[str, float]]:
    """Return what each replica takes of its bundle in a placement group: what is wanted, or the whole of it.

    Raises:
        WeightPushError: ``invalid_request``: a replica has no bundle, or one that is too small: its actor would wait
            for ever.
    """
    if len(bundles) < replicas:
        raise _invalid(
            f"replica {len(bundles)} has no bundle: the placement group has {len(bundles)} for {replicas} replicas"
        )
    for index, bundle in enumerate(bundles[:replicas]):
        for name, amount in (wanted or {}).items():
            if amount > bundle.get(name, 0.0):
                raise _invalid(
                    f"resources_per_replica asks for {name} {amount:g}, and bundle {index} of the placement group has "
                    f"{bundle.get(name, 0.0):g}"
                )
    return [wanted or bundle for bundle in bundles[:replicas]]


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return ``resources``, in the names of a placement group's bundle, as options of a Ray actor."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    others = {name: amount for name, amount in resources.items() if name not in named}
    options |= {named[name]: amount for name, amount in resources.items() if name in named}
    return {**options, "resources": others} if others else options


def _invalid(message: str) -> WeightPushError:
    return WeightPushError(ErrorCode.INVALID_REQUEST, message)
