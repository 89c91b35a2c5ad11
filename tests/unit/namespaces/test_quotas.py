"""Guarantees, limits, borrowing, revocation."""

from __future__ import annotations

import pytest
from pool_driver import BLOCK_BYTES, Driver, Replica, prompt, small_geometry

from remora.namespaces.commands import Admitted, AttachRefused, Denied, Granted, OverQuota, Preempt, QuotaSet, Wait

EXTENT = 16 * BLOCK_BYTES


def two_namespaces(*, a: int, b: int, num_extents: int = 2, **weights: float) -> tuple[Driver, Replica]:
    """Namespaces a and b of one model with guarantees in blocks."""
    driver = Driver(num_extents=num_extents)
    driver.namespace("a", guaranteed=a * BLOCK_BYTES, weight=weights.get("weight_a", 1.0))
    driver.namespace("b", guaranteed=b * BLOCK_BYTES, weight=weights.get("weight_b", 1.0))
    return driver, driver.lease()


def held(driver: Driver, name: str) -> int:
    report = driver.report(name)
    return (report.used_bytes + report.cached_bytes) // BLOCK_BYTES


def test_idle_memory_is_borrowed_up_to_the_limit() -> None:
    driver, replica = two_namespaces(a=8, b=8)
    replica.run("s", "b", prompt(32))
    assert driver.report("b").borrowed_bytes == 24 * BLOCK_BYTES


def test_a_namespace_below_its_guarantee_revokes_borrowed_cached_blocks() -> None:
    driver, replica = two_namespaces(a=20, b=8)
    replica.cache("s", "b", prompt(32))
    assert isinstance(replica.admit("t", "a", prompt(20, start=1)), Admitted)
    assert held(driver, "b") == 12
    assert driver.report("b").evicted_blocks == {"borrowed": 20}


def test_cached_blocks_within_a_guarantee_are_never_taken_for_borrowing() -> None:
    driver, replica = two_namespaces(a=20, b=8)
    replica.cache("s", "a", prompt(20))
    replica.run("t", "b", prompt(12, start=1))
    answer = replica.admit("u", "b", prompt(1, start=2))
    assert isinstance(answer, Wait), "it can have one of its own blocks later"
    assert held(driver, "a") == 20
    never = replica.admit("v", "b", prompt(13, start=3))
    assert isinstance(never, Wait), "the line is not left"
    replica.release("t")
    granted, denied = replica.events()
    assert isinstance(granted, Granted)
    assert isinstance(denied, Denied)
    assert "guaranteed to other namespaces" in denied.over_quota.reason
    assert held(driver, "a") == 20


def test_what_is_guaranteed_to_others_and_held_by_them_is_over_quota_at_once() -> None:
    _driver, replica = two_namespaces(a=20, b=8)
    replica.cache("s", "a", prompt(20))
    assert isinstance(replica.admit("t", "b", prompt(13, start=1)), OverQuota)
    assert isinstance(replica.admit("u", "b", prompt(12, start=1)), Admitted)


def test_an_extent_with_guaranteed_cache_in_it_is_not_cleared_for_a_borrower_of_another_geometry() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a", guaranteed=8 * BLOCK_BYTES)
    driver.namespace("b")
    driver.namespace("c", model="m2")
    one = driver.lease("lease-1")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    one.cache("s", "a", prompt(8))
    one.run("t", "b", prompt(8, start=1))
    one.run("pin", "b", prompt(16, start=2))
    one.release("t")
    assert isinstance(two.admit("u", "c", prompt(1)), Wait)
    assert (held(driver, "a"), held(driver, "b")) == (8, 24)
    one.release("pin")
    assert isinstance(two.events()[0], Granted)
    assert held(driver, "a") == 8


def test_a_full_cache_of_its_own_is_reused_by_a_namespace_within_its_guarantee() -> None:
    driver, replica = two_namespaces(a=16, b=16)
    replica.cache("s", "a", prompt(16))
    replica.cache("t", "b", prompt(16, start=1))
    assert isinstance(replica.admit("u", "a", prompt(16, start=2)), Admitted)
    assert (held(driver, "a"), held(driver, "b")) == (16, 16)


def test_between_borrowers_the_one_that_borrows_most_for_its_weight_gives() -> None:
    driver = Driver(num_extents=2)
    for name, weight in (("a", 1.0), ("b", 3.0), ("c", 1.0)):
        driver.namespace(name, weight=weight)
    replica = driver.lease()
    replica.cache("s", "a", prompt(16))
    replica.cache("t", "b", prompt(16, start=1))
    replica.run("u", "c", prompt(8, start=2))
    assert (held(driver, "a"), held(driver, "b"), held(driver, "c")) == (8, 16, 8)


def test_the_limit_counts_cached_blocks_and_makes_room_by_evicting_them() -> None:
    driver, replica = two_namespaces(a=0, b=0)
    driver.quota("a", limit=10 * BLOCK_BYTES)
    replica.cache("s", "a", prompt(8))
    replica.run("t", "a", prompt(6, start=1))
    assert held(driver, "a") == 10
    assert driver.report("a").evicted_blocks == {"limit": 4}
    assert isinstance(replica.admit("u", "a", prompt(5, start=2)), Wait)
    assert isinstance(replica.admit("v", "b", prompt(20, start=3)), Admitted), "a limit stops only its own namespace"


def test_lowering_a_limit_revokes_cached_blocks_at_once() -> None:
    driver, replica = two_namespaces(a=0, b=0)
    replica.cache("s", "a", prompt(8))
    replica.run("t", "a", prompt(4, start=1))
    answer = driver.quota("a", limit=6 * BLOCK_BYTES)
    assert isinstance(answer, QuotaSet)
    assert answer.revoked_bytes == 6 * BLOCK_BYTES
    assert held(driver, "a") == 6
    assert driver.quota("a", limit=2 * BLOCK_BYTES).revoked_bytes == 2 * BLOCK_BYTES
    assert held(driver, "a") == 4, "what is referenced stays"
    replica.release("t")
    assert held(driver, "a") == 2, "and counts against the limit as soon as it is cache"


def test_lowering_a_limit_below_a_parked_request_denies_it() -> None:
    driver, replica = two_namespaces(a=0, b=0)
    replica.run("s", "b", prompt(30))
    assert isinstance(replica.admit("t", "a", prompt(10, start=1)), Wait)
    driver.quota("a", limit=9 * BLOCK_BYTES)
    (event,) = replica.events()
    assert isinstance(event, Denied)


def test_lowering_a_limit_below_what_runs_preempts_the_most_recent_of_the_lowest_priority() -> None:
    driver, replica = two_namespaces(a=0, b=0)
    replica.run("first", "a", prompt(6))
    replica.run("urgent", "a", prompt(6, start=1), priority=1)
    replica.run("last", "a", prompt(6, start=2))
    replica.run("other", "b", prompt(6, start=3))
    driver.quota("a", limit=12 * BLOCK_BYTES)
    assert [event.sequence_id for event in replica.events() if isinstance(event, Preempt)] == ["last"]
    driver.quota("a", limit=11 * BLOCK_BYTES)
    assert [event.sequence_id for event in replica.events() if isinstance(event, Preempt)] == ["first"]
    replica.release("first", "last")
    assert held(driver, "a") == 11, "what they left as cache counts against the limit too"
    assert driver.report("b").num_preempted == 0


def test_a_running_sequence_within_a_guarantee_stays_although_its_namespace_borrows_with_its_cache() -> None:
    driver, replica = two_namespaces(a=8, b=16)
    driver.namespace("c")
    replica.cache("cached", "a", prompt(8))
    replica.run("runs", "a", prompt(8, start=1))
    replica.run("borrows", "c", prompt(12, start=2))
    assert isinstance(replica.admit("s", "b", prompt(16, start=3)), Wait)
    (event,) = replica.events()
    assert isinstance(event, Preempt)
    assert event.sequence_id == "borrows"


def tree(**guaranteed: int) -> tuple[Driver, Replica]:
    """Namespaces `x` with children `x/a` and `x/b`, and `y` beside them, in 32 blocks; guarantees in blocks."""
    driver = Driver(num_extents=2)
    for name, key in (("x", "x"), ("x/a", "a"), ("x/b", "b"), ("y", "y")):
        driver.namespace(name, guaranteed=guaranteed.get(key, 0) * BLOCK_BYTES)
    return driver, driver.lease()


def test_guarantees_of_children_are_parts_of_their_parents() -> None:
    driver, _ = tree(x=16, a=8, y=16)
    assert driver.quota("x/b", guaranteed=9 * BLOCK_BYTES).error == "ConfigError"
    assert driver.quota("x", guaranteed=7 * BLOCK_BYTES).error == "ConfigError"
    assert driver.quota("x/c", model="other").error == "ConfigError"
    assert isinstance(driver.quota("x/b", guaranteed=8 * BLOCK_BYTES), QuotaSet)


def test_what_a_parents_guarantee_leaves_over_protects_whoever_of_the_tree_holds_it() -> None:
    driver, replica = tree(x=16, a=4, y=16)
    replica.cache("s", "x/b", prompt(16))
    replica.cache("t", "y", prompt(16, start=1))
    assert isinstance(replica.admit("u", "y", prompt(17, start=2)), OverQuota), "nobody outside can take it"
    assert held(driver, "x/b") == 16
    assert isinstance(replica.admit("v", "x/a", prompt(4, start=3)), Admitted), "a brother within his guarantee can"
    assert (held(driver, "x/a"), held(driver, "x/b")) == (4, 12)


def test_a_tree_within_its_guarantee_preempts_borrowers_outside_but_not_its_own_members() -> None:
    driver, replica = tree(x=16, y=0)
    replica.run("brother", "x/b", prompt(8))
    replica.run("borrower", "y", prompt(24, start=1))
    assert isinstance(replica.admit("s", "x/a", prompt(8, start=2)), Wait)
    assert [event.sequence_id for event in replica.events() if isinstance(event, Preempt)] == ["borrower"]
    replica.release("borrower")
    assert [type(event) for event in replica.events()] == [Granted]
    assert driver.report("x/b").num_preempted == 0


def test_the_limit_of_a_parent_holds_for_all_below_it() -> None:
    driver, replica = tree(x=8, a=8)
    driver.quota("x", guaranteed=8 * BLOCK_BYTES, limit=16 * BLOCK_BYTES)
    replica.run("b", "x/b", prompt(12))
    assert isinstance(replica.admit("c", "x/b", prompt(5, start=1)), Wait)
    assert isinstance(replica.admit("d", "x/b", prompt(17, start=2)), OverQuota)
    assert isinstance(replica.admit("a", "x/a", prompt(6, start=3)), Wait)
    assert [event.sequence_id for event in replica.events() if isinstance(event, Preempt)] == ["b"]
    replica.release("b")
    granted = [event.admitted.sequence_id for event in replica.events() if isinstance(event, Granted)]
    assert granted == ["a", "c"]
    assert driver.report("x").used_bytes == 0
    assert sum(held(driver, name) for name in ("x", "x/a", "x/b")) <= 16


def test_a_parent_that_comes_after_its_children_takes_them_in() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("x/a", guaranteed=4 * BLOCK_BYTES)
    replica = driver.lease()
    replica.run("s", "x/a", prompt(6))
    driver.namespace("x", guaranteed=4 * BLOCK_BYTES, limit=8 * BLOCK_BYTES)
    assert isinstance(replica.admit("t", "x", prompt(3, start=1)), Wait)
    driver.restart()
    replica.release("s")
    assert isinstance(replica.events()[-1], Granted)


def test_a_guarantee_gets_borrowed_memory_back_that_is_in_use() -> None:
    driver, replica = two_namespaces(a=16, b=0)
    other = driver.lease("lease-2")
    replica.run("b1", "b", prompt(12))
    replica.run("b2", "b", prompt(16, start=1))
    assert isinstance(other.admit("a1", "a", prompt(16, start=2)), Wait)
    (event,) = replica.events()
    assert isinstance(event, Preempt)
    assert event.sequence_id == "b2", "the most recently admitted borrower goes"
    assert other.events() == ()
    replica.release("b2")
    (granted,) = other.events()
    assert isinstance(granted, Granted)
    assert held(driver, "a") == 16


def test_a_guarantee_passes_borrowers_that_wait() -> None:
    _driver, replica = two_namespaces(a=8, b=0)
    replica.run("b1", "b", prompt(20))
    assert isinstance(replica.admit("b2", "b", prompt(20, start=1)), Wait)
    assert isinstance(replica.admit("b3", "b", prompt(1, start=2)), Wait)
    assert isinstance(replica.admit("a1", "a", prompt(8, start=3)), Admitted)


@pytest.mark.parametrize(
    ("quota", "error"),
    [
        ({"guaranteed": 9, "limit": 8}, "ConfigError"),
        ({"guaranteed": -1}, "ConfigError"),
        ({"weight": 0.0}, "ConfigError"),
        ({"weight": float("nan")}, "ConfigError"),
        ({"model": "other"}, "Conflict"),
        ({"tenant": "t"}, "Conflict"),
        ({"share_group": "g"}, "Conflict"),
        ({"guaranteed": 3 * EXTENT, "limit": 3 * EXTENT}, "ConfigError"),
    ],
)
def test_a_wrong_quota_is_refused_and_changes_nothing(quota: dict[str, object], error: str) -> None:
    driver, _ = two_namespaces(a=4, b=4)
    before = driver.state.describe()
    answer = driver.quota("a", **quota)  # type: ignore[arg-type]
    assert answer.error == error
    assert driver.state.describe() == before


def test_guarantees_of_several_geometries_must_fit_in_whole_extents() -> None:
    driver = Driver(num_extents=2, extent_bytes=32 * BLOCK_BYTES)
    half = 16 * BLOCK_BYTES
    driver.namespace("a", guaranteed=half, model="m1")
    driver.namespace("b", guaranteed=half, model="m2")
    driver.namespace("c", guaranteed=half, model="m3")
    driver.lease("lease-1", model="m1")
    driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    answer = Replica(driver, "lease-3", model="m3", geometry=small_geometry(3)).attached
    assert isinstance(answer, AttachRefused)
    assert "need 3 extents" in answer.reason
    driver.lease("lease-4", model="m3", geometry=small_geometry(2))


def test_guarantees_that_fill_the_arena_are_accepted_and_each_is_reachable() -> None:
    driver = Driver(num_extents=3, extent_bytes=40 * BLOCK_BYTES)  # 13 or 12 whole blocks of 768 bytes an extent
    half = driver.data_bytes // 2
    driver.namespace("a", guaranteed=half)
    driver.namespace("b", guaranteed=half)
    geometry = small_geometry(3)
    replica = driver.lease(geometry=geometry)
    reports = {name: driver.state._parts.book.namespaces[name].guaranteed_bytes for name in ("a", "b")}
    blocks = {name: size // geometry.block_bytes for name, size in reports.items()}
    assert sum(blocks.values()) >= 3 * 12
    replica.cache("flood", "a", prompt(sum(blocks.values())))
    replica.run("s", "b", prompt(blocks["b"], start=1))
    replica.run("t", "a", prompt(blocks["a"], start=2))


def test_evictions_of_one_namespace_do_not_show_in_another() -> None:
    driver, replica = two_namespaces(a=16, b=0)
    replica.cache("s", "b", prompt(32))
    replica.run("t", "a", prompt(16, start=1))
    assert driver.report("a").evicted_blocks == {}
    assert driver.report("a").lookup_tokens == 64
    assert driver.report("b").lookup_tokens == 128
