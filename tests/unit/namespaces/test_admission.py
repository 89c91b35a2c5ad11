"""Prefix matching, references, isolation."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from pool_driver import BLOCK_BYTES, BLOCK_TOKENS, Driver, Replica, prompt, small_geometry

from remora.namespaces.commands import Admitted, Granted, OverQuota, Refused, Wait
from remora.platform.base.ids import NamespaceId


def one_namespace(**config: int) -> tuple[Driver, Replica]:
    driver = Driver(**config)
    driver.namespace("a")
    return driver, driver.lease()


def test_a_second_sequence_shares_the_sealed_prefix_and_owns_the_rest() -> None:
    driver, replica = one_namespace()
    first = replica.run("s1", "a", prompt(3.5))
    second = replica.run("s2", "a", prompt(3.5))
    assert (first.num_cached_blocks, second.num_cached_blocks) == (0, 3)
    assert second.blocks[:3] == first.blocks[:3]
    assert second.blocks[3] not in first.blocks
    assert driver.report("a").used_bytes == 5 * BLOCK_BYTES


def test_case_01_the_block_with_the_last_prompt_token_is_never_matched() -> None:
    _, replica = one_namespace()
    replica.cache("long", "a", prompt(3))
    assert replica.run("equal", "a", prompt(3)).num_cached_blocks == 2
    assert replica.run("prefix", "a", prompt(2)).num_cached_blocks == 1
    assert replica.run("one more", "a", [*prompt(3), 7]).num_cached_blocks == 3
    assert replica.run("single", "a", [1]).num_cached_blocks == 0


def test_case_08_cached_tokens_count_once_for_each_sequence_and_never_exceed_the_prompt() -> None:
    driver, replica = one_namespace(num_extents=4)
    for name in ("n1", "n2", "n3", "n4"):
        assert replica.admit(name, "a", prompt(2.5)).num_cached_blocks == 0
    report = driver.report("a")
    assert (report.lookup_tokens, report.hit_tokens) == (40, 0)
    replica.publish("n1", "a", prompt(2.5))
    replica.run("later", "a", prompt(2.5))
    report = driver.report("a")
    assert (report.lookup_tokens, report.hit_tokens) == (50, 8)


def test_case_15_a_matched_block_is_referenced_before_memory_for_others_is_found() -> None:
    _driver, replica = one_namespace(num_extents=1)  # 16 blocks
    replica.cache("old", "a", prompt(4, start=1))
    replica.run("busy", "a", prompt(11, start=2))
    # 1 free block, 4 cached; the request matches 4 and needs 2: evicting what it matched must not be the way out.
    waiting = replica.admit("hit", "a", [*prompt(4, start=1), *prompt(2, start=3)])
    assert isinstance(waiting, Wait)
    fits = replica.admit("fits", "a", [*prompt(4, start=1), 9])
    assert isinstance(fits, Wait), "nobody overtakes in the same namespace"
    replica.release("busy")
    granted = [event.admitted for event in replica.events() if isinstance(event, Granted)]
    assert [grant.num_cached_blocks for grant in granted] == [4, 4]
    assert granted[0].blocks[:4] == granted[1].blocks[:4]
    assert not set(granted[0].blocks[4:]) & set(granted[1].blocks[4:])


def test_case_16_what_a_lookup_promised_stays_until_it_is_released() -> None:
    driver, replica = one_namespace(num_extents=1)
    replica.cache("old", "a", prompt(4, start=1))
    hit = replica.run("hit", "a", [*prompt(4, start=1), 5])
    assert hit.num_cached_blocks == 4
    assert isinstance(replica.admit("flood", "a", prompt(11, start=2)), Admitted)
    assert isinstance(replica.admit("drop", "a", prompt(1, start=3)), Wait)
    again = driver.lease("lease-2")
    assert isinstance(again.admit("same", "a", [*prompt(4, start=1), 6]), Wait)
    replica.release("flood")
    (event,) = again.events()
    assert isinstance(event, Granted)
    assert event.admitted.blocks[:4] == hit.blocks[:4]


def test_case_14_a_hash_of_another_model_or_tenant_never_hits() -> None:
    driver = Driver(num_extents=4)
    driver.namespace("a")
    driver.namespace("b")
    driver.namespace("c", model="other")
    replica = driver.lease("lease-1")
    other = driver.lease("lease-2", model="other", weights="other")
    stolen = replica.hashes("a", prompt(3))
    replica.run("s1", "a", prompt(3))
    assert replica.admit("s2", "b", prompt(3), hashes=stolen).num_cached_blocks == 0
    assert other.admit("s3", "c", prompt(3), hashes=stolen).num_cached_blocks == 0
    assert replica.admit("s4", "a", prompt(3), hashes=stolen).num_cached_blocks == 2
    for name in ("b", "c"):
        assert driver.report(name).hit_tokens == 0


def test_namespaces_of_a_share_group_share_blocks_charged_to_the_first_holder() -> None:
    driver = Driver()
    for name in ("a", "b"):
        driver.namespace(name, tenant="t", share_group="g")
    driver.namespace("c", tenant="u", share_group="g")
    replica = driver.lease()
    replica.run("s1", "a", prompt(3))
    assert replica.run("s2", "b", prompt(3)).num_cached_blocks == 2
    assert replica.run("s3", "c", prompt(3)).num_cached_blocks == 0
    used = [driver.report(name).used_bytes // BLOCK_BYTES for name in "abc"]
    assert used == [3, 1, 3]
    replica.release("s1", "s2", "s3")
    cached = [driver.report(name).cached_bytes // BLOCK_BYTES for name in "abc"]
    assert cached == [3, 0, 3]


def test_replicas_with_other_weights_do_not_share_although_their_geometry_is_equal() -> None:
    driver = Driver()
    driver.namespace("a")
    one, two = driver.lease("lease-1", weights="w"), driver.lease("lease-2", weights="w2")
    one.run("s", "a", prompt(3))
    assert two.run("s", "a", prompt(3)).num_cached_blocks == 0
    assert driver.lease("lease-3", weights="w").run("s", "a", prompt(3)).num_cached_blocks == 2


def test_a_hash_published_by_one_model_is_a_miss_for_another_with_the_same_geometry_and_namespace() -> None:
    driver = Driver()
    driver.namespace("a")
    one, two = driver.lease("lease-1", weights="w"), driver.lease("lease-2", weights="w2")
    one.run("s", "a", prompt(3))
    stolen = one.hashes("a", prompt(3))
    assert two.admit("s", "a", prompt(3), hashes=stolen).num_cached_blocks == 0


def test_in_a_share_group_a_parent_outlives_the_child_of_another_namespace() -> None:
    driver = Driver(num_extents=1)
    driver.namespace("a", tenant="t", share_group="g")
    driver.namespace("b", tenant="t", share_group="g", guaranteed=16 * BLOCK_BYTES)
    replica = driver.lease()
    replica.run("s1", "a", prompt(4))
    replica.run("s2", "b", prompt(8))
    replica.release("s2", "s1")
    replica.run("s3", "b", prompt(9, start=3))
    assert driver.report("a").evicted_blocks == {"borrowed": 1}, "a shrinks by what b lost"
    assert driver.report("a").cached_bytes == 3 * BLOCK_BYTES
    assert driver.report("b").cached_bytes == 4 * BLOCK_BYTES
    assert replica.run("s4", "b", [*prompt(8)[:24], 1]).num_cached_blocks == 6


def test_three_geometries_live_in_one_arena_without_overlap() -> None:
    driver = Driver(num_extents=6, extent_bytes=8192)
    ranges: list[tuple[int, int]] = []
    for number, layers in enumerate((1, 2, 3)):
        driver.namespace(f"n{number}", model=f"m{number}")
        replica = driver.lease(f"lease-{number}", model=f"m{number}", geometry=small_geometry(layers))
        size = small_geometry(layers).block_bytes
        blocks = replica.run("s", f"n{number}", prompt(12)).blocks
        ranges += [(block * size, (block + 1) * size) for block in blocks]
    ranges.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert ranges[-1][1] <= driver.data_bytes


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_blocks": 1}, "InvalidRequest"),
        ({"num_tokens": 0}, "InvalidRequest"),
        ({"max_blocks": 2}, "InvalidRequest"),
        ({"hashes": (b"x" * 16,) * 4}, "InvalidRequest"),
        ({"namespace_id": "nobody"}, "NotFound"),
        ({"namespace_id": "foreign"}, "InvalidRequest"),
        ({"sequence_id": "used"}, "Conflict"),
    ],
)
def test_a_broken_admission_is_refused_and_changes_nothing(change: dict[str, object], error: str) -> None:
    driver, replica = one_namespace()
    driver.namespace("foreign", model="other")
    replica.run("used", "a", prompt(1))
    before = driver.state.describe().namespaces
    assert isinstance(replica.admit("probe", "a", prompt(3)), Admitted)
    replica.release("probe")
    good = msgspec.structs.replace(replica.last)
    assert good is not None
    replica.call_no += 1
    bad = msgspec.structs.replace(_admit(replica, "s", prompt(3)), call_no=replica.call_no, **change)
    answer = driver.apply(bad)
    assert isinstance(answer, Refused)
    assert answer.error == error
    after = driver.state.describe().namespaces
    assert [n.used_bytes for n in after] == [n.used_bytes for n in before]
    assert isinstance(replica.admit("s", "a", prompt(3)), Admitted), "the lease goes on with its next call"


def _admit(replica: Replica, name: str, tokens: list[int]):  # type: ignore[no-untyped-def]
    from remora.namespaces.commands import Admit

    num_blocks = len(tokens) // BLOCK_TOKENS
    return Admit(
        lease_id=replica.lease_id,
        sequence_id=name,
        namespace_id="a",
        hashes=tuple(replica.hashes("a", tokens)),
        num_tokens=len(tokens),
        num_blocks=num_blocks,
        max_blocks=num_blocks,
    )


def test_a_request_that_can_never_fit_is_over_quota_at_once_with_both_numbers() -> None:
    driver, replica = one_namespace(num_extents=2)
    driver.quota("a", limit=8 * BLOCK_BYTES)
    answer = replica.admit("s", "a", prompt(2), max_blocks=9)
    assert isinstance(answer, OverQuota)
    assert (answer.needed_bytes, answer.limit_bytes) == (9 * BLOCK_BYTES, 8 * BLOCK_BYTES)
    driver.quota("a", limit=1 << 40)
    assert isinstance(replica.admit("t", "a", prompt(2), max_blocks=33), OverQuota)
    assert isinstance(replica.admit("u", "a", prompt(2), max_blocks=32), Admitted)


def test_an_eviction_takes_the_least_recently_used_leaf_and_never_a_parent_first() -> None:
    driver, replica = one_namespace(num_extents=1)  # 16 blocks
    driver.quota("a", limit=1 << 40)
    replica.cache("one", "a", prompt(6, start=1))
    replica.cache("two", "a", prompt(6, start=2))
    replica.cache("one again", "a", [*prompt(6, start=1), 0])
    replica.run("new", "a", prompt(7, start=3))  # 4 are free: 3 tails of "two" go
    assert driver.report("a").evicted_blocks == {"own": 3}
    assert replica.run("three", "a", [*prompt(6, start=2)][: 3 * BLOCK_TOKENS + 1]).num_cached_blocks == 3
    assert driver.report("a").evicted_blocks == {"own": 4}


def test_after_any_release_the_oldest_cached_block_is_a_leaf() -> None:
    driver, replica = one_namespace()
    for number, length in enumerate((5, 3, 7, 2)):
        replica.run(f"s{number}", "a", [*prompt(2), *prompt(length, start=number)])
    for number in (2, 0, 3, 1):
        replica.release(f"s{number}")
        (holding,) = driver.state._parts.book.holdings()
        oldest = holding.policy.first()
        assert oldest is not None
        assert not oldest.children


def test_an_evicted_chain_is_never_matched_past_the_gap() -> None:
    _driver, replica = one_namespace(num_extents=1)
    replica.cache("one", "a", prompt(8, start=1))
    replica.run("flood", "a", prompt(12, start=2))
    replica.release("flood")
    assert replica.run("back", "a", [*prompt(8, start=1), 1]).num_cached_blocks == 4


def test_case_10_a_sequence_comes_back_although_free_blocks_are_not_contiguous() -> None:
    driver = Driver(num_extents=1)
    driver.namespace("a")
    replica = driver.lease()
    tables: dict[str, list[int]] = {}
    for name in ("s1", "s2", "s3"):
        tables[name] = list(replica.run(name, "a", prompt(1, start=int(name[1]))).blocks)
    for _ in range(4):  # interleaved
        for name in ("s1", "s2", "s3"):
            tables[name] += replica.extend(name).grants[0].blocks
    replica.release("s2")
    admitted = replica.run("again", "a", prompt(6, start=4))
    assert sorted(admitted.blocks) != list(range(min(admitted.blocks), min(admitted.blocks) + 6))
    assert not {*admitted.blocks} & {*tables["s1"], *tables["s3"]}


def test_case_17_a_namespace_holds_no_more_than_its_limit_the_oldest_goes_and_what_is_larger_is_refused() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a", limit=10 * BLOCK_BYTES)
    replica = driver.lease()
    for number in range(3):
        replica.cache(f"s{number}", "a", prompt(4, start=number))
        assert driver.report("a").cached_bytes <= 10 * BLOCK_BYTES
    matched = [
        driver.state.find_blocks(NamespaceId("a"), replica.fingerprint, replica.hashes("a", prompt(4, start=number)))
        for number in range(3)
    ]
    assert matched == [2, 4, 4], "of the oldest only its beginning is left"
    assert isinstance(replica.admit("large", "a", prompt(12, start=9)), OverQuota)
    assert driver.report("a").cached_bytes == 10 * BLOCK_BYTES
