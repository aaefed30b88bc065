"""Servers on a Ray cluster: `ServerFleet`.

::

    ray.init()
    with ServerFleet.launch("Qwen/Qwen3-0.6B", replicas=4, server_args={"tensor_parallel_size": 2}) as fleet:
        pusher = fleet.pusher()
        report = pusher.push(model, weight_version="step-1")

Imports ray when a fleet is launched. Each replica is an actor that runs `weightpush serve` on its node; see
`weightpush_client.replica`.
"""

from __future__ import annotations

import math
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from weightpush_client.pusher import WeightPusher
from weightpush_client.replica import Replica, ReplicaSettings, ReplicaState, ReplicaStatus
from weightpush_client.replica_options import (
    ServerArgs,
    actor_options,
    check_resources,
    default_resources,
    environment_of,
    taken_of,
    words_of,
)
from weightpush_protocol.errors import ErrorCode, WeightPushError

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

__all__ = ["ReplicaState", "ReplicaStatus", "ServerFleet"]

#: Seconds that an actor may take to answer before it counts as unreachable.
_ANSWER_S: Final = 10.0
_LOOK_S: Final = 0.5
#: Calls that an actor answers at the same time: whoever stops or kills must not keep others from asking.
_CALLS: Final = 16
_KILL_S: Final = 90.0
_TOKEN_BYTES: Final = 24


class _ReplicaActor:
    """What Ray runs: a `Replica` at the address of its node."""

    def __init__(self, settings: ReplicaSettings) -> None:
        ray = _ray()
        context = ray.get_runtime_context()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's property uses one that Ray deprecates.
            restarted = bool(context.was_current_actor_reconstructed)
        self._name = f"replica {settings.index}"
        self._replica = Replica(
            settings,
            host=ray.util.get_node_ip_address(),
            node_id=context.get_node_id(),
            # A server that was there before may have served newer weights than those on disk.
            restarted=restarted,
        )

    def __repr__(self) -> str:
        return self._name  # Ray puts it before each line of the server's log.

    def status(self, ask_server: bool) -> ReplicaStatus:
        return self._replica.status(ask_server)

    def kill_server(self) -> None:
        self._replica.kill_server()

    def stop(self, grace_s: float) -> bool:
        return self._replica.stop(grace_s)


class ServerFleet:
    """Replicas of one server on a Ray cluster. Made by `launch`; may be sent to other actors and tasks.

    Replicas come back by themselves: a server that dies is started again by its actor, an actor that dies (or whose
    node does) by Ray. They then await weights, and the next push, or `WeightPusher.catch_up`, brings them.

    No server outlives its actor, however that ends, and no actor the job that launched the fleet.
    """

    def __init__(self, replicas: list[ActorHandle[Any]], token: str, placement: PlacementGroup | None) -> None:
        self._replicas = replicas
        self._token = token
        #: Made for this fleet, and removed with it.
        self._placement = placement

    @classmethod
    def launch(
        cls,
        model: str,
        *,
        replicas: int = 1,
        server_args: ServerArgs = (),
        resources_per_replica: Mapping[str, float] | None = None,
        placement: Literal["spread", "pack"] | PlacementGroup = "spread",
        token: str | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 1200.0,
    ) -> ServerFleet:
        """Start ``replicas`` servers of ``model``; return when all of them are up.

        Args:
            model: name or path, as every node sees it.
            server_args: what follows ``weightpush serve MODEL``: words, or a mapping such as
                ``{"tensor_parallel_size": 2}``.
            resources_per_replica: what Ray reserves for each, e.g. ``{"CPU": 4, "GPU": 2}``. Where it is None: one CPU,
                and on a cluster with GPUs one for each rank that ``server_args`` ask for; with a placement group, the
                whole bundle.
            placement: ``spread`` over the nodes, ``pack`` on few, or a placement group of your own: replica *i* takes
                its bundle *i*.
            token: control token of all replicas; generated where it is None.
            env: variables to add to the environment of the servers. Ray sets those that name accelerators.
            start_timeout_s: seconds until all must be up, from the reservation of resources to loaded models.

        Raises:
            WeightPushError: ``invalid_request``: an argument is wrong, or Ray is not initialised. ``launch_failed``: a
                replica did not get its resources or its server did not come up; it says which, with the end of the
                server's log, and nothing is left running.
        """
        ray = _ray()
        if not ray.is_initialized():
            raise _invalid("Ray is not initialised: call ray.init() first")
        if replicas < 1:
            raise _invalid(f"replicas must be at least 1, got {replicas}")
        check_resources(resources_per_replica)
        words = words_of(server_args)
        environment, token = environment_of(env, token)
        token = secrets.token_hex(_TOKEN_BYTES) if token is None else token
        settings = ReplicaSettings(0, str(model), words, environment, token)
        deadline = time.monotonic() + start_timeout_s
        fleet = cls([], token, None)
        try:
            if isinstance(placement, str):
                wanted = resources_per_replica or default_resources(words, ray.cluster_resources().get("GPU", 0.0))
                group, taken = fleet._reserve(dict(wanted), replicas, placement), [wanted] * replicas
            else:
                group, taken = placement, taken_of(placement.bundle_specs, resources_per_replica, replicas)
            _wait_for_room(group, taken, deadline - time.monotonic())
            for index, resources in enumerate(taken):
                fleet._replicas.append(_start(replace(settings, index=index), group, actor_options(resources)))
            fleet.wait_up(timeout_s=deadline - time.monotonic())
        except BaseException:
            fleet.shutdown(grace_s=0.0)
            raise
        return fleet

    def __len__(self) -> int:
        return len(self._replicas)

    def __repr__(self) -> str:
        return f"<ServerFleet of {len(self)} replicas>"

    def __enter__(self) -> ServerFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def token(self) -> str:
        """Control token of all replicas."""
        return self._token

    def urls(self) -> list[str]:
        """Return the address of each replica whose server is up, whether it serves or awaits weights."""
        return [status.url for status in self._statuses() if status.state is ReplicaState.UP and status.url]

    def status(self) -> list[ReplicaStatus]:
        """Return how each replica is, with the status of its server where that answers."""
        return self._statuses(ask_server=True)

    def pusher(self, **options: Any) -> WeightPusher:
        """Return a pusher to whatever replicas are up when it pushes; ``options`` are those of `WeightPusher`.

        A replica that fails is excluded from the push, unless ``on_server_failure`` says otherwise.
        """
        return WeightPusher(self._present, token=self._token, **{"on_server_failure": "exclude", **options})

    def wait_up(self, timeout_s: float = 1200.0) -> list[ReplicaStatus]:
        """Wait until the servers of all replicas are up, whether they serve or await weights; return how they are.

        Raises:
            WeightPushError: ``launch_failed``: one gave up, or is not up in time; it says which.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(_LOOK_S, deadline - time.monotonic())
            statuses = self._statuses(timeout_s=min(_ANSWER_S, left_s))
            if all(status.state is ReplicaState.UP for status in statuses):
                return statuses
            given_up = [status for status in statuses if status.state is ReplicaState.GAVE_UP]
            if given_up or time.monotonic() > deadline:
                late = given_up or [status for status in statuses if status.state is not ReplicaState.UP]
                raise _launch_failed(late, None if given_up else timeout_s)
            time.sleep(_LOOK_S)

    def kill(self, index: int) -> None:
        """Kill the server of a replica with SIGKILL, for drills; its actor starts it again, and it awaits weights.

        Raises:
            WeightPushError: ``unreachable``: its actor does not answer.
            IndexError: there is no such replica.
        """
        (result,) = self._ask("kill_server", only=[index], timeout_s=_KILL_S)
        if isinstance(result, Exception):
            raise WeightPushError(ErrorCode.UNREACHABLE, f"replica {index} cannot be told: {_brief(result)}")

    def shutdown(self, grace_s: float = 10.0) -> None:
        """End all servers, after ``grace_s`` seconds by force, and give their resources back. May be called again."""
        ray = _ray()
        if ray.is_initialized():
            try:
                # Those that do not answer, or were never placed, are not waited for: a server ends with its actor.
                known = [status.index for status in self._statuses() if status.state is not ReplicaState.UNREACHABLE]
                self._ask("stop", grace_s, timeout_s=grace_s + _KILL_S, only=known)
            finally:  # Also for whoever presses Ctrl-C a second time.
                for actor in self._replicas:
                    ray.kill(actor)
                if self._placement is not None:
                    ray.util.remove_placement_group(self._placement)
        self._replicas, self._placement = [], None

    def _present(self) -> list[str]:
        """Return the addresses for a pusher, which needs one at least."""
        statuses = self._statuses()
        urls = [status.url for status in statuses if status.state is ReplicaState.UP and status.url]
        if not urls:
            states = "; ".join(map(str, statuses)) or "it was shut down"
            raise WeightPushError(ErrorCode.UNREACHABLE, f"no replica of the fleet is up: {states}")
        return urls

    def _reserve(self, wanted: dict[str, float], count: int, strategy: str) -> PlacementGroup:
        """Ask for a placement group with a bundle for each replica."""
        ray = _ray()
        if strategy not in ("spread", "pack"):
            raise _invalid(f"placement {strategy!r} is neither 'spread' nor 'pack' nor a placement group")
        try:
            group: PlacementGroup = ray.util.placement_group([wanted] * count, strategy=strategy.upper())
        except ValueError as error:
            raise _invalid(f"resources_per_replica {wanted}: {error}") from error
        self._placement = group
        return group

    def _statuses(self, ask_server: bool = False, timeout_s: float = _ANSWER_S) -> list[ReplicaStatus]:
        results = self._ask("status", ask_server, timeout_s=timeout_s)
        return [_status(index, result) for index, result in enumerate(results)]

    def _ask(self, method: str, *arguments: Any, timeout_s: float, only: list[int] | None = None) -> list[Any]:
        """Call all replicas at the same time; an exception takes the place of a result."""
        ray = _ray()
        asked = self._replicas if only is None else [self._replicas[index] for index in only]
        calls = [getattr(actor, method).remote(*arguments) for actor in asked]
        if not calls:
            return []
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        results: list[Any] = []
        for call in calls:
            try:
                if call not in answered:
                    raise TimeoutError(f"its actor did not answer within {timeout_s:g} s")
                results.append(ray.get(call))
            except Exception as error:  # noqa: BLE001 - becomes this replica's result
                results.append(error)
        return results


def _wait_for_room(group: PlacementGroup, taken: Sequence[Mapping[str, float]], timeout_s: float) -> None:
    ray = _ray()
    if not group.wait(math.ceil(max(0.0, timeout_s))):
        raise WeightPushError(
            ErrorCode.LAUNCH_FAILED,
            f"no room within {timeout_s:.0f} s for {_named(range(len(taken)))} of {_amounts(taken[0])} each: the "
            f"cluster has {_amounts(ray.cluster_resources())}, of which {_amounts(ray.available_resources())} are "
            "free; ask for fewer replicas or smaller resources_per_replica, or add nodes",
        )


def _start(settings: ReplicaSettings, group: PlacementGroup, options: dict[str, Any]) -> ActorHandle[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=settings.index)
    options = {**options, "max_restarts": -1, "max_concurrency": _CALLS, "scheduling_strategy": place}
    handle: ActorHandle[Any] = _ray().remote(_ReplicaActor).options(**options).remote(settings)
    return handle


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise _invalid("Ray is not installed: pip install 'weightpush[ray]'") from None
    return ray


def _status(index: int, result: Any) -> ReplicaStatus:
    """Return what a replica said; where it failed to, say why and whether it may come back."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    if isinstance(result, ReplicaStatus):
        return result
    # Ray starts an actor again when it dies, but not one that could not be made.
    dead = isinstance(result, ActorDiedError) and not isinstance(result, ActorUnavailableError)
    return ReplicaStatus(index, ReplicaState.GAVE_UP if dead else ReplicaState.UNREACHABLE, reason=_brief(result))


def _launch_failed(late: list[ReplicaStatus], timeout_s: float | None) -> WeightPushError:
    when = "" if timeout_s is None else f" within {timeout_s:.0f} s"
    first = late[0]
    others = f" ({_named([status.index for status in late[1:]])} neither)" if late[1:] else ""
    log = f"\n--- the end of its log ---\n{first.log}" if first.log else ""
    return WeightPushError(
        ErrorCode.LAUNCH_FAILED,
        f"replica {first.index} is not up{when}{others}: {first}{log}",
        details={"replicas": [str(status) for status in late]},
    )


def _named(indices: Any) -> str:
    numbers = list(indices)
    return f"replica{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _amounts(resources: Mapping[str, float]) -> str:
    """Return resources in words, without those that Ray makes for each node."""
    own = ("node:", "object_store")
    shown = {name: amount for name, amount in resources.items() if "_group_" not in name and not name.startswith(own)}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing"


def _brief(error: Exception) -> str:
    """Return the last line of an error that says something: Ray's hold whole tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _invalid(message: str) -> WeightPushError:
    return WeightPushError(ErrorCode.INVALID_REQUEST, message)
