"""Blocks move while sequences use them: old places are kept for as long as somebody reads them, and no longer."""

from __future__ import annotations

import random

from pool_driver import BLOCK_BYTES, Driver, Replica, prompt, small_geometry
from test_compaction import compact

from remora.namespaces.commands import Admitted, Done, Granted, Relocate, Relocated, RelocateItem, Trim, Wait
from remora.namespaces.effects import CopyBlocks
from remora.namespaces.relocation import DEADLINE_S
from remora.platform.base.ids import LeaseId, NamespaceId


def scattered(*, sealed: bool = True, num_extents: int = 4, namespace: str = "a") -> tuple[Driver, Replica]:
    """A running sequence of 4 blocks in each of the extents of 16, which are else empty."""
    driver = Driver(num_extents=num_extents)
    driver.namespace(namespace)
    replica = driver.lease(relocates=True)
    for number in range(num_extents):
        if sealed:
            replica.run(f"run{number}", namespace, prompt(4, start=number))
        else:
            replica.admit(f"run{number}", namespace, prompt(4, start=number))
        replica.admit(f"drop{number}", namespace, prompt(12, start=50 + number))
    replica.release(*(f"drop{number}" for number in range(num_extents)))
    driver.effects.clear()
    return driver, replica


def told(replica: Replica) -> tuple[int, tuple[RelocateItem, ...]]:
    """The one event that the lease has not seen."""
    (event,) = replica.events()
    assert isinstance(event, Relocate)
    return event.event_no, event.items


def acknowledge(replica: Replica, event_no: int) -> None:
    assert isinstance(replica.call(Relocated, event_no=event_no), Done)


def test_sealed_blocks_are_copied_by_the_pool_and_their_old_places_kept_until_the_lease_has_switched() -> None:
    driver, replica = scattered()
    answer = compact(driver, "a")
    assert (answer.num_moved_blocks, answer.num_moving_blocks, answer.num_extents) == (12, 12, 4)
    event_no, items = told(replica)
    (copies,) = [effect for effect in driver.effects if isinstance(effect, CopyBlocks)]
    assert {(item.old_block, item.new_block) for item in items} == set(copies.pairs)
    assert not any(item.copy for item in items)
    hit = replica.admit("hit", "a", [*prompt(4, start=3), 1])
    assert set(hit.blocks[:4]) <= {target for _, target in copies.pairs}, "others get the new place at once"
    driver.restart()
    acknowledge(replica, event_no)
    assert (compact(driver, "a").num_extents, driver.state.describe().num_unleased_extents) == (2, 2)


def test_private_blocks_are_copied_by_their_lease_and_change_place_when_it_says_so() -> None:
    driver, replica = scattered(sealed=False)
    compact(driver, "a")
    event_no, items = told(replica)
    assert not [effect for effect in driver.effects if isinstance(effect, CopyBlocks)]
    assert all(item.copy for item in items)
    driver.restart()
    acknowledge(replica, event_no)
    assert compact(driver, "a").num_extents == 1
    tables = [sequence.blocks for sequence in driver.state._parts.running.sequences.values()]
    assert {block.index for table in tables for block in table} == set(range(16))


def test_a_private_block_that_is_sealed_and_shared_on_its_way_takes_the_others_along() -> None:
    driver, replica = scattered(sealed=False)
    other = driver.lease("lease-2", relocates=True)
    compact(driver, "a")
    event_no, items = told(replica)
    replica.publish("run3", "a", prompt(4, start=3))
    hit = other.admit("hit", "a", [*prompt(4, start=3), 1])
    moved = {item.old_block: item.new_block for item in items}
    acknowledge(replica, event_no)
    event_no, items = told(other)
    assert {item.old_block: item.new_block for item in items} == {old: moved[old] for old in hit.blocks[:4]}
    assert not any(item.copy for item in items)
    assert driver.state.describe().geometries[0].num_moving_blocks == 4
    acknowledge(other, event_no)
    assert driver.state.describe().geometries[0].num_moving_blocks == 0


def test_the_end_of_a_sequence_or_a_lease_ends_its_moves() -> None:
    driver, replica = scattered(sealed=False)
    compact(driver, "a")
    event_no, _ = told(replica)
    replica.release("run1", "run2", "run3")
    assert driver.report("a").used_bytes == 4 * BLOCK_BYTES
    acknowledge(replica, event_no)
    assert driver.state.describe().geometries[0].num_moving_blocks == 0
    driver, replica = scattered()
    compact(driver, "a")
    driver.lose(replica)
    assert driver.state.describe().geometries[0].num_moving_blocks == 0
    assert compact(driver, "a").num_extents == 1


def test_a_block_that_only_its_children_need_moves_at_once() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a")
    replica = driver.lease(relocates=True)
    for name in ("one", "two"):  # the twin of its first block makes the second keep an anchor
        replica.admit(name, "a", prompt(2))
        replica.admit(f"fill {name}", "a", prompt(14, start=5))
    replica.publish("one", "a", prompt(1))
    replica.publish("two", "a", prompt(2))
    replica.release("one", "fill one")
    compact(driver, "a")
    assert driver.state.describe().geometries[0].num_used_blocks >= 3
    driver.restart()


def test_who_does_not_acknowledge_in_time_is_overdue() -> None:
    driver, replica = scattered()
    compact(driver, "a")
    driver.tick(DEADLINE_S - 1)
    assert driver.state.overdue_leases(driver.now_s) == set()
    driver.tick(1)
    assert driver.state.overdue_leases(driver.now_s) == {replica.lease_id}
    event_no, _ = told(replica)
    acknowledge(replica, event_no)
    assert driver.state.overdue_leases(driver.now_s) == set()


def test_blocks_that_a_lease_uses_which_does_not_switch_stay_where_they_are() -> None:
    driver, replica = scattered()
    still = driver.lease("lease-2")
    still.admit("hit", "a", [*prompt(4, start=3), 1])
    compact(driver, "a")
    _, items = told(replica)
    assert {item.sequence_id for item in items} == {"run2"} or "run3" not in {item.sequence_id for item in items}
    assert still.events() == ()


def test_an_admission_waits_for_an_old_place_and_gets_it_when_it_is_free() -> None:
    driver, replica = scattered(num_extents=2)
    driver.namespace("b", model="m2")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    compact(driver, "a")
    event_no, _ = told(replica)
    assert isinstance(two.admit("s", "b", prompt(8)), Wait)
    acknowledge(replica, event_no)
    (event,) = two.events()
    assert isinstance(event, Granted)
    assert isinstance(replica.admit("more", "a", prompt(8, start=9)), Admitted)


def test_after_10_000_sequences_of_two_geometries_the_arena_is_packed_while_hundreds_run() -> None:
    source = random.Random(11)
    driver = Driver(num_extents=48, extent_bytes=32 * BLOCK_BYTES)
    driver.is_checked = False
    replicas = []
    for number in (1, 2):
        driver.namespace(f"n{number}", model=f"m{number}")
        geometry = small_geometry(number)
        replicas.append(driver.lease(f"lease-{number}", model=f"m{number}", geometry=geometry, relocates=True))
    running: list[tuple[Replica, str]] = []
    for count in range(10_000):
        number = source.randrange(2)
        replica, name = replicas[number], f"s{count}"
        tokens = prompt(source.randint(1, 12), start=source.randrange(4000))
        answer = replica.admit(name, f"n{number + 1}", tokens, more_blocks=source.randint(0, 2))
        if isinstance(answer, Admitted):
            replica.publish(name, f"n{number + 1}", tokens, start=answer.num_cached_blocks)
            running.append((replica, name))
        else:
            replica.release(name)
        while len(running) > 130 or (running and source.random() < 0.4):
            gone, name = running.pop(source.randrange(len(running)))
            gone.release(name)
        for each in replicas:
            for event in each.events():
                if isinstance(event, Relocate):
                    acknowledge(each, event.event_no)
    for replica, name in source.sample(running, 50):
        replica.release(name)
        running.remove((replica, name))
    for name in ("n1", "n2"):
        driver.apply(Trim(lease_id=LeaseId(""), namespace_id=NamespaceId(name), target_bytes=100 * BLOCK_BYTES))
    used, packed = footprint(driver)
    assert used > 1.25 * packed, "scattered before"
    for _ in range(40):
        answers = [compact(driver, name) for name in ("n1", "n2")]
        for each in replicas:
            for event in each.events():
                if isinstance(event, Relocate):
                    acknowledge(each, event.event_no)
        if not any(answer.num_moved_blocks or answer.num_moving_blocks for answer in answers):
            break
    driver.state.check_integrity()
    used, packed = footprint(driver)
    assert used <= 1.1 * packed
    assert len(running) > 50


def footprint(driver: Driver) -> tuple[int, int]:
    """Extents in use, and the fewest that could hold the blocks of each geometry."""
    report = driver.state.describe()
    packed = sum(-(-each.num_used_blocks // (32 * BLOCK_BYTES // each.block_bytes)) for each in report.geometries)
    return report.num_extents - report.num_unleased_extents, packed
