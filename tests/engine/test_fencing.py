"""A lost lease: whatever was computed behind it stays inside (design §4.1)."""

from __future__ import annotations

PROMPT = "The remora travels with a ray."


def test_nothing_leaves_after_the_lease_is_lost(harness) -> None:
    one = harness()
    one.submit(PROMPT, max_tokens=50)
    one.step(4)
    num_deltas = len(one.deltas)
    one.pool.device.revoke(one.pool)
    one.submit("another")
    for _ in range(5):
        one.engine.step()
    assert len(one.deltas) == num_deltas
    assert len(one.fenced) == 1
    assert one.engine.stats().is_fenced


def test_a_lease_that_is_lost_during_a_step_lets_nothing_of_the_step_out(harness) -> None:
    one = harness()
    request_id = one.submit(PROMPT, max_tokens=4)
    while len(one.outputs[request_id, 0].token_ids) < 3:
        one.step(1)
    commands = []
    one.pool.deny = lambda command: commands.append(command)

    def lose_the_lease(history):
        if not one.fenced:
            one.pool.device.revoke(one.pool)
            commands.clear()

    one.model.decoder.trouble = lose_the_lease
    num_deltas = len(one.deltas)
    # The step would end the request: a publication, a release and a last delta.
    for _ in range(3):
        one.engine.step()
    assert len(one.deltas) == num_deltas
    assert commands == []
    assert one.engine.stats().is_fenced
