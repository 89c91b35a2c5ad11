"""Who runs and who comes in: budgets, priorities, fairness, no starvation."""

from __future__ import annotations

from engine_support import BLOCK_TOKENS, Harness, expected_greedy

from remora.deployments.engine.messages import LoadReport
from remora.namespaces.commands import Admit


def order_of_ends(one: Harness) -> list[str]:
    return [delta.request_id for delta in one.deltas if delta.finish_reason is not None]


def order_of_starts(one: Harness) -> list[str]:
    return [delta.request_id for delta in one.deltas if delta.first_token_index == 0 and delta.token_ids]


def test_no_step_exceeds_its_budget_or_its_places(harness) -> None:
    one = harness(num_blocks=300, max_step_tokens=20, max_num_seqs=4)
    for i in range(9):
        one.submit("x" * (7 * i + 1), max_tokens=9)
    one.finish()
    assert max(sum(step) for step in one.model.decoder.steps) <= 20
    assert max(len(step) for step in one.model.decoder.steps) <= 4


def test_running_sequences_go_on_each_step_while_a_long_prompt_is_computed(harness) -> None:
    one = harness(num_blocks=300, max_step_tokens=16)
    running = [one.submit(f"{i}", max_tokens=60) for i in range(4)]
    one.step(3)
    before = {request_id: len(one.outputs[request_id, 0].token_ids) for request_id in running}
    one.submit("x" * 200, max_tokens=2)
    one.step(1)
    one.step(10)
    for request_id in running:
        assert len(one.outputs[request_id, 0].token_ids) == before[request_id] + 11
    assert all(sum(step) == 16 for step in one.model.decoder.steps[-10:])
    one.finish()


def test_a_budget_smaller_than_the_number_of_sequences_starves_nobody(harness) -> None:
    one = harness(num_blocks=300, max_step_tokens=3, max_num_seqs=8)
    ids = [one.submit(f"{i}", max_tokens=60) for i in range(8)]
    one.step(120)
    assert all(30 <= len(one.outputs[request_id, 0].token_ids) < 60 for request_id in ids)
    one.finish()
    for i, request_id in enumerate(ids):
        assert one.outputs[request_id, 0].token_ids == expected_greedy(f"{i}", 60)


def test_a_newcomer_starts_while_the_running_ones_could_use_the_whole_budget(harness) -> None:
    one = harness(num_blocks=300, max_step_tokens=3, max_num_seqs=4)
    for i in range(3):
        one.submit(f"{i}", max_tokens=200)
    one.step(5)
    late = one.submit("late", max_tokens=5)
    one.step(8)
    assert one.outputs[late, 0].token_ids
    one.finish()


def test_a_higher_priority_is_admitted_first(harness) -> None:
    one = harness(max_num_seqs=1)
    low = [one.submit(f"low {i}", max_tokens=2) for i in range(3)]
    high = [one.submit(f"high {i}", max_tokens=2, priority=5) for i in range(2)]
    one.finish()
    assert order_of_ends(one) == [*high, *low]


def test_namespaces_are_served_by_their_weight_and_not_by_how_much_they_send(harness) -> None:
    one = harness(namespaces={"a": None, "b": None}, weights={"a": 1.0, "b": 3.0}, max_num_seqs=1, max_step_tokens=16)
    for i in range(120):
        one.submit(f"a{i:03d}" + "x" * 26, namespace="a", request_id=f"a{i}", max_tokens=1)
    for i in range(60):
        one.submit(f"b{i:03d}" + "x" * 26, namespace="b", request_id=f"b{i}", max_tokens=1)
    one.finish()
    first = order_of_starts(one)[:60]
    assert 38 <= sum(name.startswith("b") for name in first) <= 52


def test_a_namespace_that_was_idle_has_saved_nothing_up(harness) -> None:
    one = harness(namespaces={"a": None, "b": None}, max_num_seqs=2, max_step_tokens=17, num_blocks=200)
    one.submit("a stays active", namespace="a", request_id="long", max_tokens=400)
    for i in range(30):
        one.submit(f"a{i:03d}" + "x" * 26, namespace="a", request_id=f"early{i}", max_tokens=1)
    while one.outputs["early29", 0].finish_reason is None:
        one.step(1)
    for i in range(30):
        one.submit(f"c{i:03d}" + "y" * 26, namespace="a", request_id=f"a{i}", max_tokens=1)
        one.submit(f"b{i:03d}" + "x" * 26, namespace="b", request_id=f"b{i}", max_tokens=1)
    one.finish()
    first = order_of_starts(one)[31:61]
    assert 11 <= sum(name.startswith("b") for name in first) <= 19


def test_of_equally_served_the_longest_known_prefix_goes_first(harness) -> None:
    one = harness(max_num_seqs=1)
    one.run("known prefix that is cached", max_tokens=1)
    blocker = one.submit("blocker", max_tokens=3)
    one.step(1)
    others = [one.submit(f"{i} unknown prompt", max_tokens=1) for i in range(3)]
    hit = one.submit("known prefix that is cached too", max_tokens=1)
    one.finish()
    assert order_of_ends(one)[1:] == [blocker, hit, *others]


def test_a_known_prefix_wins_only_within_the_bounds_of_fairness(harness) -> None:
    one = harness(namespaces={"a": None, "b": None}, max_num_seqs=1, max_step_tokens=4, num_blocks=256)
    one.run("known prefix that is cached", namespace="a", max_tokens=1)
    one.submit("blocker", namespace="a", max_tokens=3)
    one.step(1)
    for i in range(60):
        one.submit(f"known prefix that is cached {i}", namespace="a", max_tokens=1)
    unknown = one.submit("unknown prompt", namespace="b", max_tokens=1)
    one.finish()
    assert 2 <= order_of_ends(one).index(unknown) <= 12


def test_a_request_is_not_passed_over_for_ever(harness) -> None:
    one = harness(max_num_seqs=1, num_blocks=256)
    one.run("known prefix that is cached", max_tokens=1)
    one.submit("blocker", max_tokens=3)
    one.step(1)
    unlucky = one.submit("0 unknown prompt", max_tokens=1)
    for i in range(60):
        one.submit(f"known prefix that is cached {i}", max_tokens=1)
    one.finish()
    assert order_of_ends(one).index(unlucky) <= 20


def test_nobody_is_admitted_in_the_step_after_a_preemption(harness) -> None:
    one = harness(num_blocks=16, max_num_seqs=4)
    for i in range(6):
        one.submit(f"prompt {i:04d}", max_tokens=24)
    commands: list[str] = []
    one.pool.deny = lambda command: commands.append(type(command).__name__)
    num_checked = 0
    has_preempted = False
    while not one.is_done:
        commands.clear()
        before = one.engine.stats().num_preemptions
        one.step(1)
        if has_preempted:
            num_checked += 1
            assert "Admit" not in commands
        has_preempted = one.engine.stats().num_preemptions > before
    assert num_checked > 0


def test_a_preempted_sequence_comes_back_before_newcomers(harness) -> None:
    one = harness(num_blocks=16, max_num_seqs=4)
    first = [one.submit(f"prompt {i:04d}", max_tokens=24) for i in range(3)]
    while not one.engine.stats().num_preemptions:
        one.step(1)
    late = one.submit("z" * 30, max_tokens=2)
    admits = []
    one.pool.deny = lambda command: admits.append(command.num_tokens) if isinstance(command, Admit) else None
    one.finish()
    assert admits[0] != 30
    assert one.outputs[late, 0].token_ids == expected_greedy("z" * 30, 2)
    for i, request_id in enumerate(first):
        assert one.outputs[request_id, 0].token_ids == expected_greedy(f"prompt {i:04d}", 24)


def test_a_running_sequence_holds_one_block_more_than_it_needs_and_never_more_than_it_can(harness) -> None:
    one = harness(num_reserve_blocks=1)
    one.submit("x" * 10, max_tokens=30)
    one.step(2)
    for _ in range(20):
        one.step(1)
        sequence = one.engine._scheduler.running[0]
        needed = -(-sequence.num_tokens // BLOCK_TOKENS)
        assert needed <= sequence.num_blocks <= min(needed + 1, 10)
    one.finish()


def test_one_of_a_namespace_waits_at_the_pool_and_it_is_the_most_urgent(harness) -> None:
    one = harness(num_blocks=16)
    first = one.submit("a" * 40, max_tokens=20)
    one.step(2)
    others = [one.submit(f"{i}" * 40, max_tokens=3) for i in range(3)]
    one.step(3)
    assert (one.engine.stats().num_parked, one.engine.stats().num_waiting) == (1, 3)
    urgent = one.submit("u" * 40, max_tokens=3, priority=1)
    one.step(3)
    assert (one.engine.stats().num_parked, one.engine.stats().num_waiting) == (1, 4)
    (running,) = one.engine._scheduler.running
    assert one.engine.load() == LoadReport(load_tokens=160 + running.num_tokens, waiting_tokens=160, parked_tokens=40)
    one.finish()
    assert one.engine.load() == LoadReport()
    assert order_of_ends(one) == [first, urgent, *others]


def test_requests_that_the_pool_parked_all_at_once_keep_their_order(harness) -> None:
    one = harness(num_blocks=16, delivery="manual")
    ids = [one.submit(f"{i}" * 40, max_tokens=3) for i in range(6)]
    one.step(1)  # all are asked for before the first answer comes
    one.finish()
    assert order_of_ends(one) == ids
