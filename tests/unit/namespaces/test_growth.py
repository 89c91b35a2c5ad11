"""Extend never waits; when memory is short, somebody has to go, and it is the right one."""

from __future__ import annotations

from pool_driver import BLOCK_BYTES, Driver, Replica, prompt, small_geometry

from remora.namespaces.commands import Admitted, Granted, Preempt, Wait
from remora.namespaces.sequence_commands import Edited, SequenceRemove, Settle


def preempted(replica: Replica) -> list[str]:
    return [event.sequence_id for event in replica.events() if isinstance(event, Preempt)]


def setup(num_extents: int = 1, **quota: int) -> tuple[Driver, Replica]:
    driver = Driver(num_extents=num_extents)
    driver.namespace("a", **quota)
    return driver, driver.lease()


def test_a_running_sequence_gets_blocks_at_its_end() -> None:
    driver, replica = setup()
    first = replica.run("s", "a", prompt(2))
    answer = replica.extend("s", num_blocks=2)
    (grant,) = answer.grants
    assert len(grant.blocks) == 2
    assert not set(grant.blocks) & set(first.blocks)
    assert driver.report("a").used_bytes == 4 * BLOCK_BYTES
    assert replica.publish("s", "a", prompt(3), start=2).num_sealed == 1


def test_cached_blocks_go_before_anybody_is_preempted() -> None:
    _, replica = setup()
    replica.cache("old", "a", prompt(8))
    replica.run("s", "a", prompt(8, start=1))
    assert replica.extend("s", num_blocks=8).refused == ()
    assert preempted(replica) == []


def test_case_21_the_most_recently_admitted_goes_and_the_survivor_is_served_first() -> None:
    _, replica = setup()
    replica.run("s1", "a", prompt(8))
    replica.run("s2", "a", prompt(8, start=1))
    assert isinstance(replica.admit("s3", "a", prompt(4, start=2)), Wait)
    answer = replica.extend("s1")
    assert (answer.refused, answer.preempted) == (("s1",), ())
    assert preempted(replica) == ["s2"]
    assert replica.extend("s1").refused == ("s1",)
    assert preempted(replica) == [], "nobody else is sent away while one is leaving"
    replica.release("s2")
    assert replica.events() == (), "the extension comes before those that wait"
    assert replica.extend("s1").refused == ()
    (event,) = replica.events()
    assert isinstance(event, Granted)
    assert event.admitted.sequence_id == "s3"


def test_a_refused_extension_of_an_empty_sequence_comes_first_although_nothing_is_referenced() -> None:
    _, replica = setup()
    replica.run("s1", "a", prompt(2))
    assert isinstance(replica.call(SequenceRemove, sequence_id="s1", start=0, end=-1, num_tokens=8), Edited)
    replica.call(Settle, sequence_ids=("s1",))
    replica.run("s2", "a", prompt(16, start=1))
    assert replica.extend("s1").refused == ("s1",)
    assert isinstance(replica.admit("s3", "a", prompt(16, start=2)), Wait)
    replica.release("s2")
    assert [type(event) for event in replica.events()] == [Preempt]
    assert len(replica.extend("s1").grants) == 1
    replica.release("s1")
    assert [type(event) for event in replica.events()] == [Granted]


def test_a_sequence_that_is_last_in_rank_is_its_own_victim() -> None:
    _, replica = setup()
    replica.run("s1", "a", prompt(8))
    replica.run("s2", "a", prompt(8, start=1))
    answer = replica.extend("s2")
    assert (answer.refused, answer.preempted) == (("s2",), ("s2",))
    assert preempted(replica) == ["s2"]
    assert replica.extend("s1").refused == ("s1",)
    replica.release("s2")
    assert replica.extend("s1").refused == ()


def test_lower_priority_goes_first() -> None:
    _, replica = setup()
    replica.run("low", "a", prompt(8), priority=-1)
    replica.run("high", "a", prompt(8, start=1), priority=1)
    replica.extend("high")
    assert preempted(replica) == ["low"]


def test_a_borrower_goes_for_a_guarantee_but_never_the_other_way_round() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a", guaranteed=16 * BLOCK_BYTES)
    driver.namespace("b")
    replica = driver.lease()
    replica.run("b1", "b", prompt(16), priority=1)
    replica.run("a1", "a", prompt(15, start=1), priority=-1)
    replica.run("b2", "b", prompt(1, start=2))
    assert replica.extend("b1").preempted == ()
    assert preempted(replica) == ["b2"], "a1 has a lower priority, but is within its guarantee"
    replica.release("b2")
    assert replica.extend("a1").refused == ()
    assert replica.extend("b1").preempted == ("b1",), "the only other one is within its guarantee"
    assert preempted(replica) == ["b1"]


def test_who_borrows_most_for_its_weight_gives_first() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a", weight=3.0)
    driver.namespace("b")
    replica = driver.lease()
    replica.run("b1", "b", prompt(7))
    replica.run("b2", "b", prompt(7, start=1))
    replica.run("a1", "a", prompt(9, start=2))
    replica.run("a2", "a", prompt(9, start=3))
    assert replica.extend("a1").preempted == ()
    assert preempted(replica) == ["b2"], "a2 came last, but a uses less for its weight"


def test_a_single_large_sequence_is_not_sent_away_for_those_who_have_many() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a")
    driver.namespace("b")
    replica = driver.lease()
    for number in range(3):
        replica.run(f"a{number}", "a", prompt(4, start=number))
    replica.run("large", "b", prompt(20, start=9))
    assert replica.extend("a0").preempted == ()
    assert preempted(replica) == ["a2"], "b uses more, but would use nothing without it"


def test_what_is_leaving_already_counts_as_gone_when_turns_are_taken() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a")
    driver.namespace("b")
    replica = driver.lease()
    for number, (name, size) in enumerate((("a", 6), ("a", 5), ("b", 8), ("b", 7), ("b", 6))):
        replica.run(f"{name}{number}", name, prompt(size, start=number))
    replica.extend("a0", num_blocks=6)
    assert preempted(replica) == ["b4"], "b had 21 blocks, a 11"
    replica.extend("a0", num_blocks=12)
    assert preempted(replica) == ["b3"], "without b4 it has 15"
    assert replica.extend("a0", num_blocks=16).refused == ("a0",)
    assert preempted(replica) == ["a1"], "then 8"


def test_at_its_limit_a_namespace_preempts_only_its_own() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a", limit=8 * BLOCK_BYTES)
    driver.namespace("b")
    replica = driver.lease()
    replica.run("a1", "a", prompt(4))
    replica.run("a2", "a", prompt(4, start=1))
    replica.run("b1", "b", prompt(4, start=2))
    assert replica.extend("a1").refused == ("a1",)
    assert preempted(replica) == ["a2"]


def test_shared_blocks_do_not_count_as_memory_that_a_victim_frees() -> None:
    _, replica = setup()
    replica.run("s1", "a", prompt(8))
    replica.run("s3", "a", [*prompt(8), 2, *prompt(6, start=4)])
    replica.run("s2", "a", [*prompt(8), 1])
    answer = replica.extend("s1", num_blocks=2)
    assert answer.refused == ("s1",)
    assert preempted(replica) == ["s2", "s3"], "s2 alone frees only the one block it does not share"


def test_a_victim_of_another_geometry_is_chosen_only_when_its_extent_comes_free() -> None:
    driver = Driver(num_extents=2, extent_bytes=16 * BLOCK_BYTES)
    driver.namespace("a", guaranteed=16 * BLOCK_BYTES)
    driver.namespace("b", model="m2")
    one = driver.lease("lease-1")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    two.run("b1", "b", prompt(4))
    one.run("a1", "a", prompt(15))
    assert one.extend("a1").refused == ()
    two.run("b2", "b", prompt(2, start=2))
    answer = one.extend("a1")
    assert (answer.refused, answer.preempted) == (("a1",), ("a1",)), "beyond its guarantee it is a borrower as well"
    assert preempted(two) == []


def test_items_of_one_extension_are_answered_one_by_one() -> None:
    _, replica = setup()
    replica.run("s1", "a", prompt(7))
    replica.run("s2", "a", prompt(8, start=1))
    answer = replica.extend("s1", "s2")
    assert [grant.sequence_id for grant in answer.grants] == ["s1"]
    assert (answer.refused, answer.preempted) == (("s2",), ("s2",))


def test_growing_to_the_limit_alone_ends_in_giving_up_not_in_a_loop() -> None:
    _driver, replica = setup(limit=4 * BLOCK_BYTES)
    replica.run("s", "a", prompt(4))
    assert replica.extend("s").preempted == ("s",)
    replica.release("s")
    assert isinstance(replica.admit("t", "a", [*prompt(3), 1]), Admitted)
