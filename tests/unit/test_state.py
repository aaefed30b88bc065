from __future__ import annotations

from itertools import product

import pytest

from weightpush_protocol.state import ORIGINS, TRANSITIONS, Event, IllegalTransitionError, ServerState, next_state

S, E = ServerState, Event
#: Every legal step, written out once more by hand: (state, event, origin) -> next.
LEGAL = {
    (S.SERVING, E.BEGIN_DIRECT): S.UPDATING,
    (S.SERVING, E.BEGIN_STAGED): S.STAGING,
    (S.FAILED, E.BEGIN_DIRECT): S.UPDATING,
    (S.AWAITING_WEIGHTS, E.BEGIN_DIRECT): S.UPDATING,
    (S.STAGING, E.LAND): S.UPDATING,
    (S.STAGING, E.FAIL_UNTOUCHED): S.SERVING,
    (S.UPDATING, E.COMMIT): S.SERVING,
    (S.UPDATING, E.FAIL_UNTOUCHED): "origin",
    (S.UPDATING, E.FAIL_WRITTEN): S.FAILED,
}
STARTS = [S.SERVING, S.FAILED, S.AWAITING_WEIGHTS]


@pytest.mark.parametrize("origin", STARTS)
@pytest.mark.parametrize(("state", "event"), list(product(S, E)))
def test_every_pair_of_state_and_event(state: ServerState, event: Event, origin: ServerState) -> None:
    expected = LEGAL.get((state, event))
    if expected is None:
        with pytest.raises(IllegalTransitionError, match=f"{event} is not allowed in {state}"):
            next_state(state, event, origin=origin)
    else:
        assert next_state(state, event, origin=origin) == (origin if expected == "origin" else expected)


@pytest.mark.parametrize("origin", sorted(set(S) - set(STARTS)))
def test_no_update_starts_from_a_running_update(origin: ServerState) -> None:
    with pytest.raises(IllegalTransitionError, match="cannot come from"):
        next_state(S.UPDATING, E.COMMIT, origin=origin)


def test_the_table_holds_nothing_else() -> None:
    assert set(TRANSITIONS) == set(LEGAL)
    assert set(STARTS) == ORIGINS


def test_only_complete_weights_serve() -> None:
    assert {state for state in S if state.serving} == {S.SERVING, S.STAGING}


def test_a_failed_or_empty_server_serves_only_after_a_commit() -> None:
    for start in (S.FAILED, S.AWAITING_WEIGHTS):
        reached = {start}
        frontier = [start]
        while frontier:
            state = frontier.pop()
            for event in E:
                if event is E.COMMIT or (state, event) not in TRANSITIONS:
                    continue
                after = next_state(state, event, origin=start)
                if after not in reached:
                    reached.add(after)
                    frontier.append(after)
        assert not any(state.serving for state in reached)


def test_written_weights_never_go_back_to_serving_without_a_commit() -> None:
    for origin in STARTS:
        assert not next_state(S.UPDATING, E.FAIL_WRITTEN, origin=origin).serving
