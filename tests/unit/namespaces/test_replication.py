"""What is to be copied to other nodes: counted, bounded, found again by routers; and memory for copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_driver import BLOCK_BYTES, Driver, Replica, prompt, small_geometry

from remora.deployments.placement import Candidate, place
from remora.namespaces.chains import Chain, Link
from remora.namespaces.commands import Admit, Admitted, OverQuota, Wait
from remora.namespaces.rendezvous import affinity_key
from remora.namespaces.replication import Backlog, Pace, ReplicationReport, backup_of
from remora.platform.base.ids import BlockHash, ModelId, NamespaceId, PoolId, ReplicaId, SequenceId

NS = NamespaceId("ns")


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def link(parent: int | None, namespace: NamespaceId = NS) -> Link:
    return Link(namespace, None if parent is None else block(parent), 100)


def grown(backlog: Backlog, first: int, count: int, now_s: float = 0.0) -> None:
    """A chain of blocks `first` .. `first + count`."""
    for number in range(first, first + count):
        backlog.add(block(number), link(None if number == first else number - 1), now_s)
        backlog.check_integrity()


def test_a_chain_that_grows_is_one_entry_as_old_as_its_first_missing_block() -> None:
    backlog = Backlog([NS])
    grown(backlog, 10, 4, now_s=1.0)
    backlog.add(block(14), link(13), 5.0)
    assert len(backlog) == 1
    assert backlog.report(6.0) == {NS: ReplicationReport(lag_blocks=5, lag_bytes=500, lag_s=5.0)}


def test_what_is_copied_leaves_the_backlog_and_what_came_meanwhile_stays() -> None:
    backlog = Backlog([NS])
    grown(backlog, 10, 4, now_s=1.0)
    pending = backlog.next()
    assert pending is not None
    tip = pending.tip
    backlog.copied(pending, tip, num_copied=3, num_missing=1, now_s=2.0)
    assert backlog.report(2.0)[NS] == ReplicationReport(
        lag_blocks=1, lag_bytes=100, lag_s=1.0, copied_blocks=3, copied_bytes=300
    )
    backlog.add(block(14), link(13), 2.5)
    backlog.copied(pending, tip, num_copied=1, num_missing=0, now_s=3.0)
    report = backlog.report(3.0)[NS]
    assert (report.lag_blocks, report.lag_s, report.copied_blocks) == (1, 0.0, 4), "the block that came meanwhile"
    backlog.copied(pending, pending.tip, num_copied=1, num_missing=0, now_s=4.0)
    assert len(backlog) == 0
    backlog.check_integrity()


def test_only_namespaces_with_copies_count_and_the_oldest_chains_are_given_up() -> None:
    backlog = Backlog([NS], max_chains=3)
    backlog.add(block(1), link(None, NamespaceId("other")), 0.0)
    assert len(backlog) == 0
    for first in range(10, 60, 10):
        grown(backlog, first, 2)
    assert len(backlog) == 3
    assert backlog.report(0.0)[NS].dropped_blocks == 2 * 2
    gone = backlog.next()
    assert gone is not None
    backlog.forget(gone)
    assert backlog.report(0.0)[NS] == ReplicationReport(lag_blocks=4, lag_bytes=400, dropped_blocks=4)


def test_the_pace_is_that_of_the_rate_however_it_is_spent() -> None:
    pace = Pace(1000.0)
    assert pace.wait_s(0.0) == 0.0
    pace.spend(500, 0.0)
    pace.spend(500, 0.0)
    assert pace.wait_s(0.0) == pytest.approx(1.0)
    assert pace.wait_s(2.0) == 0.0
    pace.spend(100, 10.0)
    assert pace.wait_s(10.0) == pytest.approx(0.1), "idle time is not saved up"


@given(
    st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=2, max_size=6),
    st.lists(st.integers(0, 2**64), min_size=4, max_size=9),
    st.data(),
)
def test_routers_prefer_the_backup_once_the_pool_is_gone(
    pools: set[str], chain: list[int], data: st.DataObject
) -> None:
    """Whatever the request's prompt goes on with, from its fourth block on."""
    gone = data.draw(st.sampled_from(sorted(pools)))
    others = [PoolId(each) for each in sorted(pools - {gone})]
    hashes = tuple(block(number) for number in chain)
    backup = backup_of(Chain(NS, ModelId("m"), small_geometry(), b"f", hashes), others)
    candidates = [Candidate(replica_id=ReplicaId(f"r-{each}"), pool_id=each, load_tokens=0) for each in others]
    choice = place(affinity_key(NS, hashes[:4]), candidates, 10)
    assert choice.replica_id == f"r-{backup}"
    assert backup_of(Chain(NS, ModelId("m"), small_geometry(), b"f", hashes), []) is None


# ---- links and chains of a real pool ---------------------------------------------------------------------------------


@pytest.fixture
def driver() -> Driver:
    made = Driver(num_extents=2)
    made.namespace("ns")
    made.namespace("other")
    return made


def test_a_chain_is_found_by_its_last_block_until_that_is_evicted(driver: Driver) -> None:
    replica = driver.lease()
    replica.cache("one", "ns", prompt(5))
    hashes = replica.hashes("ns", prompt(5))
    chain = driver.state.find_chain(hashes[3])
    assert chain == Chain(NS, ModelId("m"), replica.geometry, replica.fingerprint, tuple(hashes[:4]))
    assert driver.state.find_link(hashes[0]) == Link(NS, None, BLOCK_BYTES)
    assert driver.state.find_link(hashes[4]) == Link(NS, hashes[3], BLOCK_BYTES)
    replica.run("all", "other", prompt(32, start=7))
    assert driver.state.find_chain(hashes[4]) is None
    assert driver.state.find_link(hashes[4]) is None


# ---- memory for copies -----------------------------------------------------------------------------------------------


def admit_copy(replica: Replica, name: str, tokens: list[int], namespace: str = "ns", priority: int = 0) -> object:
    count = len(tokens) // replica.geometry.block_tokens
    return replica.call(
        Admit,
        sequence_id=SequenceId(name),
        namespace_id=NamespaceId(namespace),
        hashes=tuple(replica.hashes(namespace, tokens)),
        num_tokens=len(tokens),
        num_blocks=count,
        max_blocks=count,
        priority=priority,
        background=True,
    )


def test_a_copy_takes_cached_memory_and_is_found_like_computed_blocks(driver: Driver) -> None:
    replica, backup = driver.lease(), driver.lease("backup")
    replica.cache("old", "ns", prompt(30, start=3))
    assert isinstance(admit_copy(backup, "copy", prompt(8)), Admitted)
    backup.publish("copy", "ns", prompt(8))
    backup.release("copy")
    assert driver.report("ns").cached_bytes == 32 * BLOCK_BYTES
    assert replica.run("found", "ns", [*prompt(8), 1]).num_cached_blocks == 8
    report = driver.report("ns")
    assert (report.num_admitted, report.lookup_tokens) == (2, 30 * 4 + 33), "copies are in no statistics"


def test_a_copy_neither_waits_nor_has_anybody_give_way(driver: Driver) -> None:
    replica, backup = driver.lease(), driver.lease("backup")
    replica.run("busy", "ns", prompt(30, start=3))
    assert isinstance(admit_copy(backup, "one", prompt(4)), OverQuota)
    assert not replica.events()
    assert driver.report("ns").num_waiting == 0
    waiting = replica.admit("waits", "ns", prompt(4, start=4))
    assert isinstance(waiting, Wait)
    assert isinstance(admit_copy(backup, "two", prompt(2)), OverQuota), "two blocks are free, but somebody waits"
    driver.restart()
    replica.release("waits", "busy")
    assert isinstance(admit_copy(backup, "three", prompt(4)), Admitted)


def test_a_copy_is_worth_less_than_what_was_used_here_and_takes_nothing_from_that(driver: Driver) -> None:
    replica, backup = driver.lease(), driver.lease("backup")
    replica.cache("used", "ns", prompt(3))
    assert isinstance(admit_copy(backup, "copy", prompt(5), priority=-1), Admitted)
    backup.publish("copy", "ns", prompt(5), start=3)
    backup.release("copy")
    blocks = driver.state._parts.index.find(replica.fingerprint, 1, replica.hashes("ns", prompt(5)))
    assert [each.level for each in blocks] == [0, 0, 0, -1, -1]


def test_a_copy_stays_within_its_namespaces_limit() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("ns", limit=8 * BLOCK_BYTES)
    backup = driver.lease("backup")
    assert isinstance(admit_copy(backup, "large", prompt(9)), OverQuota)
    for start in range(4):
        name = f"c{start}"
        assert isinstance(admit_copy(backup, name, prompt(5, start=start)), Admitted)
        backup.publish(name, "ns", prompt(5, start=start))
        backup.release(name)
    assert driver.report("ns").cached_bytes <= 8 * BLOCK_BYTES
