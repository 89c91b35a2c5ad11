"""Readers from outside: what they hold neither goes nor moves, for a bounded time, and nothing else is different."""

from __future__ import annotations

from typing import Any

import pytest
from pool_driver import BLOCK_BYTES, Driver, Replica, prompt, small_geometry
from test_compaction import compact
from test_relocation import acknowledge, scattered, told

from remora.namespaces.commands import Admitted, Attached, OverQuota, Release, Wait
from remora.namespaces.hold_commands import MAX_HOLD_S, Held, Hold, Unheld, Unhold
from remora.namespaces.holds import MAX_HOLDS
from remora.platform.base.ids import HoldId, LeaseId, NamespaceId, SequenceId


def hold(replica: Replica, name: str, tokens: list[int], *, seconds: float = 10.0, **fields: Any) -> Held:
    command = Hold(
        lease_id=LeaseId(""),
        hold_id=HoldId(name),
        hashes=tuple(replica.hashes("ns", tokens)),
        hold_s=seconds,
        **{"fingerprint": replica.fingerprint, "namespace_id": NamespaceId("ns"), **fields},
    )
    answer = replica.driver.apply(command)
    assert isinstance(answer, Held)
    return answer


def unhold(driver: Driver, *names: str) -> int:
    answer = driver.apply(Unhold(lease_id=LeaseId(""), hold_ids=tuple(HoldId(name) for name in names)))
    assert isinstance(answer, Unheld)
    return answer.num_ended


@pytest.fixture
def driver() -> Driver:
    made = Driver(num_extents=2)
    made.namespace("ns")
    return made


def test_a_held_prefix_outlives_a_request_for_all_memory(driver: Driver) -> None:
    replica = driver.lease()
    replica.cache("one", "ns", prompt(8))
    held = hold(replica, "h", prompt(10))
    assert len(held.blocks) == 8
    assert held.block_bytes == BLOCK_BYTES
    assert isinstance(replica.admit("all", "ns", prompt(32, start=2)), Wait), "all but eight blocks are there"
    assert isinstance(replica.admit("twenty", "ns", prompt(20, start=3)), Wait), "behind it in the line"
    assert unhold(driver, "h") == 1
    assert [type(event).__name__ for event in replica.events()] == ["Granted"]
    assert hold(replica, "again", prompt(8)).blocks == (), "evicted at last"


def test_a_hold_ends_by_itself_and_never_lasts_longer_than_it_may(driver: Driver) -> None:
    replica = driver.lease()
    replica.cache("one", "ns", prompt(8))
    assert hold(replica, "short", prompt(8), seconds=2.0).until_s == 2.0
    assert hold(replica, "long", prompt(8), seconds=1e9).until_s == MAX_HOLD_S
    assert driver.report("ns").used_bytes == 8 * BLOCK_BYTES
    driver.tick(2.0)
    assert driver.report("ns").used_bytes == 8 * BLOCK_BYTES
    assert driver.state.needs_time
    driver.tick(MAX_HOLD_S)
    assert driver.report("ns").used_bytes == 0
    assert not driver.state.needs_time
    assert unhold(driver, "short", "long") == 0


def test_who_waits_for_memory_gets_it_when_the_next_reader_finds_that_a_hold_ran_out(driver: Driver) -> None:
    replica = driver.lease()
    replica.cache("one", "ns", prompt(8))
    hold(replica, "lost", prompt(8), seconds=2.0)
    assert isinstance(replica.admit("all", "ns", prompt(32, start=2)), Wait)
    driver.now_s += 3.0
    assert hold(replica, "next", prompt(8, start=5)).blocks == ()
    assert [type(event).__name__ for event in replica.events()] == ["Granted"]


def test_a_repeated_hold_gets_the_same_answer_also_from_a_pool_that_came_back(driver: Driver) -> None:
    replica = driver.lease()
    replica.cache("one", "ns", prompt(8))
    first = hold(replica, "h", prompt(8))
    driver.now_s += 1
    driver.restart()
    assert hold(replica, "h", prompt(8)) == first
    assert unhold(driver, "h") == 1
    assert driver.report("ns").used_bytes == 0


def test_a_hold_finds_nothing_of_other_content_or_another_namespace(driver: Driver) -> None:
    driver.namespace("other")
    replica = driver.lease()
    replica.cache("one", "ns", prompt(8))
    assert hold(replica, "a", prompt(8), fingerprint=b"other weights").blocks == ()
    assert hold(replica, "b", prompt(8), namespace_id=NamespaceId("other")).blocks == ()
    assert hold(replica, "c", prompt(8), namespace_id=NamespaceId("nowhere")).blocks == ()
    assert driver.report("ns").used_bytes == 0


def test_more_readers_than_a_pool_allows_find_nothing(driver: Driver) -> None:
    replica = driver.lease()
    replica.cache("one", "ns", prompt(1))
    driver.is_checked = False
    found = [hold(replica, f"h{number}", prompt(1)).blocks for number in range(MAX_HOLDS + 1)]
    assert all(found[:-1])
    assert found[-1] == ()
    driver.tick(10.0)
    assert hold(replica, "later", prompt(1)).blocks


def test_a_block_that_is_sealed_on_its_move_is_not_held_before_it_is_there() -> None:
    driver, mover = scattered(sealed=False, namespace="ns")
    compact(driver, "ns")
    event_no, items = told(mover)
    mover.publish("run3", "ns", prompt(4, start=3))
    assert hold(mover, "early", prompt(4, start=3)).blocks == ()
    acknowledge(mover, event_no)
    held = hold(mover, "late", prompt(4, start=3))
    assert set(held.blocks) <= {item.new_block for item in items}
    assert len(held.blocks) == 4


def test_held_blocks_stay_where_they_are_when_others_are_moved_together() -> None:
    driver, mover = scattered(namespace="ns")
    held = hold(mover, "h", prompt(4, start=3))
    compact(driver, "ns")
    _, items = told(mover)
    assert items
    assert not {item.old_block for item in items} & set(held.blocks)


def test_a_hold_does_not_keep_a_lease_or_another_geometry_from_working(driver: Driver) -> None:
    replica = driver.lease()
    replica.cache("one", "ns", prompt(4))
    hold(replica, "h", prompt(4))
    driver.lose(replica)
    wide = Replica(driver, "wide", geometry=small_geometry(num_layers=2), weights="wide")
    assert isinstance(wide.attached, Attached)
    answer = wide.admit("w", "ns", prompt(8, start=7))
    assert isinstance(answer, Admitted | Wait | OverQuota)
    wide.call(Release, sequence_ids=(SequenceId("w"),))
    assert unhold(driver, "h") == 1
