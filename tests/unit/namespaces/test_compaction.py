"""Blocks move together, in few extents, and nothing is lost on the way."""

from __future__ import annotations

import random

from pool_driver import BLOCK_BYTES, Driver, Replica, prompt, small_geometry

from remora.namespaces.commands import Admitted, Compact, Compacted, Refused, Trim, Trimmed
from remora.namespaces.effects import CopyBlocks
from remora.platform.base.ids import LeaseId, NamespaceId


def compact(driver: Driver, name: str, max_blocks: int = 256) -> Compacted:
    answer = driver.apply(Compact(lease_id=LeaseId(""), namespace_id=NamespaceId(name), max_blocks=max_blocks))
    assert isinstance(answer, Compacted), answer
    return answer


def trim(driver: Driver, name: str, target_bytes: int) -> Trimmed:
    answer = driver.apply(Trim(lease_id=LeaseId(""), namespace_id=NamespaceId(name), target_bytes=target_bytes))
    assert isinstance(answer, Trimmed), answer
    return answer


def scattered() -> tuple[Driver, Replica]:
    """Four extents of 16 blocks with 4 cached blocks of one prompt each."""
    driver = Driver(num_extents=4)
    driver.namespace("a")
    replica = driver.lease()
    for number in range(4):
        replica.run(f"keep{number}", "a", prompt(4, start=number))
        replica.admit(f"drop{number}", "a", prompt(12, start=50 + number))
    replica.release(*(f"drop{number}" for number in range(4)))
    replica.release(*(f"keep{number}" for number in range(4)))
    return driver, replica


def test_cached_blocks_of_four_extents_go_into_one_and_are_found_there() -> None:
    driver, replica = scattered()
    answer = compact(driver, "a")
    assert (answer.num_moved_blocks, answer.num_released_extents, answer.num_extents) == (12, 3, 1)
    assert driver.state.describe().num_unleased_extents == 3
    for number in range(4):
        hit = replica.admit(f"again{number}", "a", [*prompt(4, start=number), 1])
        assert hit.num_cached_blocks == 4
        assert all(block < 16 for block in hit.blocks[:4])


def test_a_round_moves_about_as_much_as_it_may() -> None:
    driver, _ = scattered()
    assert [compact(driver, "a", max_blocks=1).num_moved_blocks for _ in range(4)] == [4, 4, 4, 0]


def test_a_moved_block_is_copied_whole_before_its_place_is_zeroed_for_somebody_else() -> None:
    driver, replica = scattered()
    driver.namespace("b")
    driver.effects.clear()
    compact(driver, "a")
    copies = [effect for effect in driver.effects if isinstance(effect, CopyBlocks)]
    sources = [source for effect in copies for source, _ in effect.pairs]
    blocks = replica.admit("s", "b", prompt(48, start=9)).blocks
    assert set(sources) <= set(blocks)
    zeroed = driver.effects[-1].blocks  # type: ignore[union-attr]
    assert set(sources) <= set(zeroed)


def test_what_is_evicted_next_does_not_depend_on_where_it_lies() -> None:
    for policy in ("lru", "s3fifo", "arc", "value"):
        orders = []
        for compacted in (False, True):
            driver = Driver(num_extents=4, eviction=policy)
            driver.namespace("a")
            replica = driver.lease()
            for number in (3, 1, 4, 2, 0):
                replica.cache(f"s{number}", "a", prompt(4 + number, start=number))
            replica.cache("again", "a", [*prompt(5, start=1), 1])
            if compacted:
                compact(driver, "a")
                driver.restart()
            found = []
            for number in range(8):
                replica.run(f"fill{number}", "a", prompt(6, start=60 + number))
                kept = driver.state._parts.book.namespaces[NamespaceId("a")].holdings[replica.geometry.geometry_id]
                found.append(sorted(str(block.block_hash) for block in kept.policy.blocks()))
            orders.append(found)
        assert orders[0] == orders[1]


def test_trimming_gives_up_the_cache_down_to_a_size_and_the_empty_extents() -> None:
    driver, replica = scattered()
    replica.run("runs", "a", prompt(2, start=8))
    answer = trim(driver, "a", 6 * BLOCK_BYTES)
    assert answer.trimmed_bytes == 12 * BLOCK_BYTES
    report = driver.report("a")
    assert (report.used_bytes, report.cached_bytes) == (2 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    assert trim(driver, "a", 0).trimmed_bytes == 4 * BLOCK_BYTES
    assert driver.report("a").used_bytes == 2 * BLOCK_BYTES, "what runs stays"
    assert driver.state.describe().geometries[0].num_extents == 1


def test_trimming_a_parent_leaves_what_its_children_are_guaranteed() -> None:
    driver = Driver()
    driver.namespace("a", guaranteed=8 * BLOCK_BYTES)
    driver.namespace("a/b", guaranteed=8 * BLOCK_BYTES)
    replica = driver.lease()
    replica.cache("s", "a/b", prompt(10))
    replica.cache("t", "a", prompt(10, start=1))
    assert trim(driver, "a", 0).trimmed_bytes == 12 * BLOCK_BYTES
    assert trim(driver, "a/b", 0).trimmed_bytes == 8 * BLOCK_BYTES


def test_an_unknown_namespace_is_not_found() -> None:
    driver, _ = scattered()
    for command in (
        Compact(lease_id=LeaseId(""), namespace_id=NamespaceId("x")),
        Trim(lease_id=LeaseId(""), namespace_id=NamespaceId("x"), target_bytes=0),
    ):
        answer = driver.apply(command)
        assert isinstance(answer, Refused)
        assert answer.error == "NotFound"


def test_guaranteed_cache_that_is_scattered_moves_together_for_another_geometry() -> None:
    driver = Driver(num_extents=4)
    driver.namespace("a", model="m1", guaranteed=16 * BLOCK_BYTES)
    driver.namespace("b", model="m2")
    one = driver.lease("lease-1", model="m1")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    source = random.Random(1)
    for number in range(4):
        one.run(f"keep{number}", "a", prompt(4, start=number))
        one.admit(f"drop{number}", "a", prompt(12, start=50 + number))
    names = [f"{kind}{number}" for kind in ("keep", "drop") for number in range(4)]
    source.shuffle(names)
    one.release(*names)
    assert isinstance(two.admit("s", "b", prompt(24)), Admitted), "three of four extents, though it only borrows"
    assert driver.report("a").cached_bytes == 16 * BLOCK_BYTES
