"""SIGKILL under a move: each who takes part in it, at each of its stages.

One kill hits five sessions at once, whose moves stand at the five stages: twenty-five cells for five restarts.
"""

from __future__ import annotations

import random
import time

import pytest
from tests.cluster.moves.conftest import STAGES, KillPlatform, Turn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

VICTIMS = ("source", "target", "pool", "registry", "router")


def check(platform: KillPlatform, victim: str, turns: list[Turn]) -> None:
    """One text whatever happened, and one answer to each move; sessions go on."""
    for turn in turns:
        turn.join()
    platform.recover()
    for turn in turns:
        if victim == "router":
            # Clients lose their connections; what was committed is there, and the turn can be sent again.
            assert platform.expected.startswith(turn.reading.text), turn.session_id
            assert turn.reading.done or platform.expected.startswith(platform.turn_again(turn.session_id))
        else:
            assert turn.reading.done, (turn.session_id, turn.reading.documents[-1:])
            assert turn.reading.text == platform.expected, turn.session_id
            assert turn.answer is not None
            assert turn.answer.status_code in (200, 409, 503), (turn.session_id, turn.answer.text)
        session = platform.get(f"/v1/sessions/{turn.session_id}")
        assert (session["num_turns"], session["busy"]) == (1, False), session
        platform.http.delete(f"/v1/sessions/{turn.session_id}").raise_for_status()


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_death_at_any_stage_of_a_move_costs_no_token_and_no_block(platform: KillPlatform, victim: str) -> None:
    source, target = platform.source_and_target()
    cells = {f"{victim}-{stage}": stage for stage in STAGES}
    for session_id, stage in cells.items():
        platform.stop_at(session_id, stage)
    turns = platform.turns_at(source, target, list(cells))
    for turn in turns:
        turn.move(target["id"])
    for session_id, stage in cells.items():
        platform.eventually(lambda at=(session_id, stage): platform.has_reached(*at), 30, what=f"{session_id} is there")
    platform.kill(victim, source, target)
    platform.lift_stops()
    check(platform, victim, turns)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_death_at_any_moment_of_a_move_costs_no_token_and_no_block(
    platform: KillPlatform, victim: str, number: int
) -> None:
    source, target = platform.source_and_target()
    turns = platform.turns_at(source, target, [f"{victim}-{number}-{index}" for index in range(3)])
    for turn in turns:
        turn.move(target["id"])
    time.sleep(random.Random(f"{victim} {number}").uniform(0, 0.6))
    platform.kill(victim, source, target)
    check(platform, victim, turns)
