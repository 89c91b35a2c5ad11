"""Where blocks lie, who had them before, and how extents change hands."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pool_driver import BLOCK_BYTES, Driver, prompt, small_geometry

from remora.namespaces.commands import Admitted
from remora.namespaces.effects import ZeroBlocks
from remora.namespaces.extents import ExtentMap, block_span, first_run


@given(st.integers(0, 50), st.integers(1, 10_000), st.integers(1, 3000))
def test_a_span_holds_exactly_the_blocks_that_lie_wholly_inside(index: int, extent: int, block: int) -> None:
    first, count = block_span(index, extent, block)
    start, end = index * extent, (index + 1) * extent
    inside = [i for i in range(start // block, end // block + 2) if start <= i * block and (i + 1) * block <= end]
    assert inside == list(range(first, first + count))


@given(st.integers(0, 2**24 - 1), st.integers(1, 24))
def test_a_run_is_the_lowest_one_that_is_long_enough(mask: int, length: int) -> None:
    pattern = (1 << length) - 1
    expected = next((bit for bit in range(24) if mask >> bit & pattern == pattern), -1)
    assert first_run(mask, length) == expected


def test_several_blocks_are_one_run_in_the_fullest_extent_that_has_one() -> None:
    driver = Driver(num_extents=2)  # 16 blocks each
    driver.namespace("a")
    replica = driver.lease()
    replica.admit("s1", "a", prompt(10))
    replica.admit("s2", "a", prompt(10, start=1))
    blocks = replica.admit("s3", "a", prompt(5, start=2)).blocks
    assert blocks == tuple(range(10, 15))
    assert replica.admit("s4", "a", prompt(1, start=3)).blocks == (15,), "the fullest extent is filled up"


def test_an_empty_extent_goes_to_the_geometry_that_needs_it() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a", model="m1")
    driver.namespace("b", model="m2")
    one = driver.lease("lease-1", model="m1")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    one.admit("s", "a", prompt(32))
    one.release("s")
    assert driver.state.describe().geometries[0].num_empty_extents == 2
    assert isinstance(two.admit("s", "b", prompt(16)), Admitted)
    assert [g.num_extents for g in driver.state.describe().geometries] == [0, 2]


def test_a_geometry_shrinks_by_its_emptiest_extent_with_all_descendants_of_what_lies_there() -> None:
    driver = Driver(num_extents=3)
    driver.namespace("a", model="m1")
    driver.namespace("b", model="m2")
    one = driver.lease("lease-1", model="m1")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    one.cache("full", "a", prompt(14, start=1))
    one.run("pin", "a", prompt(16, start=2))
    one.cache("few", "a", prompt(5, start=3))
    assert isinstance(two.admit("s", "b", prompt(8)), Admitted)
    assert driver.report("a").evicted_blocks == {"extent": 5}
    one.release("pin")
    assert one.run("again", "a", [*prompt(14, start=1), 1]).num_cached_blocks == 14


def zeroed(driver: Driver) -> list[int]:
    return [block for effect in driver.effects if isinstance(effect, ZeroBlocks) for block in effect.blocks]


def test_a_block_is_zeroed_exactly_when_it_comes_to_another_sharing_domain() -> None:
    driver = Driver(num_extents=1)
    driver.namespace("a", tenant="t", share_group="g")
    driver.namespace("a2", tenant="t", share_group="g")
    driver.namespace("b", tenant="t")
    replica = driver.lease()
    blocks = replica.admit("s1", "a", prompt(4)).blocks
    replica.release("s1")
    assert replica.admit("s2", "a2", prompt(4, start=1)).blocks == blocks
    assert zeroed(driver) == [], "fresh memory and the own group's need nothing"
    replica.release("s2")
    assert replica.admit("s3", "b", prompt(4, start=2)).blocks == blocks
    assert zeroed(driver) == list(blocks)
    replica.release("s3")
    replica.admit("s4", "b", prompt(4, start=3))
    assert zeroed(driver) == list(blocks)


def test_an_extent_that_changes_geometry_is_zeroed_where_another_domain_may_have_written() -> None:
    driver = Driver(num_extents=1)
    driver.namespace("a", model="m1")
    driver.namespace("b", model="m2")
    driver.namespace("a2", model="m2", tenant="t", share_group="g")
    one = driver.lease("lease-1", model="m1")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    one.admit("s1", "a", prompt(2))
    one.release("s1")
    driver.restart()
    blocks = two.admit("s2", "b", prompt(8)).blocks
    assert zeroed(driver) == list(blocks)
    two.release("s2")
    two.admit("s3", "b", prompt(8, start=1))
    assert zeroed(driver) == list(blocks), "its own content stays"
    two.release("s3")
    more = one.admit("s4", "a", prompt(16)).blocks
    assert zeroed(driver)[len(blocks) :] == list(more)


def test_domains_of_an_extent_survive_a_second_change_of_geometry() -> None:
    driver = Driver(num_extents=1)
    for name, model in (("a", "m1"), ("b", "m2"), ("c", "m1")):
        driver.namespace(name, model=model)
    one = driver.lease("lease-1", model="m1")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    one.admit("s1", "a", prompt(16))
    one.release("s1")
    two.admit("s2", "b", prompt(1))  # touches the first two blocks of geometry one only
    two.release("s2")
    driver.effects.clear()
    blocks = one.admit("s3", "a", prompt(16, start=1)).blocks
    assert set(zeroed(driver)) >= {0, 1}
    one.release("s3")
    driver.effects.clear()
    one.admit("s4", "c", prompt(16, start=2))
    assert zeroed(driver) == list(blocks)


def test_bytes_beyond_the_last_whole_extent_stay_unused() -> None:
    extents = ExtentMap(3 * 16 * BLOCK_BYTES - 1, 16 * BLOCK_BYTES)
    assert len(extents.extents) == 2
