"""Rendezvous hashing with bounded load."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.placement import LOAD_BOUND, Candidate, place
from remora.namespaces.rendezvous import affinity_key
from remora.platform.base.ids import BlockHash, NamespaceId, PoolId, ReplicaId

NAMESPACE = NamespaceId("chat")


def candidate(name: str, pool: str, load: int = 0) -> Candidate:
    return Candidate(replica_id=ReplicaId(name), pool_id=PoolId(pool), load_tokens=load)


def key(number: int) -> bytes:
    return affinity_key(NAMESPACE, [BlockHash(number.to_bytes(16, "big"))])


def test_one_replica_takes_everything() -> None:
    assert place(key(1), [candidate("a", "p", 10**9)], 10) == ("a", "only", None)


def test_equal_prefixes_go_to_the_same_pool_and_different_ones_spread() -> None:
    candidates = [candidate(f"r{i}", f"p{i}") for i in range(4)]
    chosen = [place(key(number), candidates, 0).replica_id for number in range(400)]
    assert chosen == [place(key(number), list(reversed(candidates)), 0).replica_id for number in range(400)]
    assert all(60 < count < 140 for count in Counter(chosen).values())


def test_a_pool_that_leaves_moves_only_its_own_prefixes() -> None:
    candidates = [candidate(f"r{i}", f"p{i}") for i in range(4)]
    for number in range(200):
        before = place(key(number), candidates, 0).replica_id
        after = place(key(number), candidates[:3], 0).replica_id
        assert after == before or before == "r3"


def test_replicas_of_one_pool_share_the_load_because_they_share_the_blocks() -> None:
    candidates = [candidate("a", "p", 500), candidate("b", "p", 100), candidate("c", "p", 300)]
    assert place(key(1), candidates, 10) == ("b", "prefix", None)


def test_a_loaded_pool_gives_way() -> None:
    favourite = place(key(1), [candidate("a", "p"), candidate("b", "q")], 10).replica_id
    loads = {"a": 0, "b": 0, favourite: 1000}
    candidates = [candidate("a", "p", loads["a"]), candidate("b", "q", loads["b"])]
    choice = place(key(1), candidates, 10)
    assert choice.replica_id != favourite
    assert (choice.reason, choice.home) == ("load", favourite), "its pool may have the blocks"


def test_the_pool_that_has_most_of_the_prompt_goes_before_the_one_that_the_key_prefers() -> None:
    candidates = [candidate(f"r{i}", f"p{i}") for i in range(4)]
    for number in range(20):
        assert place(key(number), candidates, 10, overlap={PoolId("p1"): 3, PoolId("p2"): 9}) == ("r2", "prefix", None)
    equal = {PoolId(f"p{i}"): 3 for i in range(4)}
    assert place(key(7), candidates, 10, overlap=equal) == place(key(7), candidates, 10)
    assert place(key(7), candidates, 10, ReplicaId("r3"), {PoolId("p2"): 9}) == ("r3", "owner", None)
    loaded = [candidate("r1", "p1", 9000), candidate("r2", "p2", 10)]
    assert place(key(7), loaded, 10, overlap={PoolId("p1"): 9}) == ("r2", "load", "r1")


def test_pools_in_which_requests_wait_for_memory_come_last() -> None:
    full = Candidate(replica_id=ReplicaId("a"), pool_id=PoolId("p"), load_tokens=0, lacks_memory=True)
    for number in range(20):
        assert place(key(number), [full, candidate("b", "q")], 10, overlap={PoolId("p"): 9}).replica_id == "b"
    assert place(key(1), [full, candidate("b", "q", 9000)], 10) == ("a", "load", "b")
    assert place(key(1), [full, candidate("b", "q")], 10, ReplicaId("a")) == ("a", "owner", None)


def test_namespaces_do_not_share_a_key() -> None:
    hashes = [BlockHash(b"x" * 16)]
    assert affinity_key(NamespaceId("a"), hashes) != affinity_key(NamespaceId("b"), hashes)
    assert affinity_key(NamespaceId("a"), []) != affinity_key(NamespaceId("b"), [])


def test_turns_of_a_conversation_have_one_key() -> None:
    hashes = [BlockHash(bytes([i]) * 16) for i in range(9)]
    assert affinity_key(NAMESPACE, hashes) == affinity_key(NAMESPACE, hashes[:4])


@given(
    loads=st.lists(st.integers(0, 10_000), min_size=2, max_size=8),
    pools=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    tokens=st.integers(1, 5_000),
    number=st.integers(0, 1000),
    overlaps=st.dictionaries(st.integers(0, 3).map(lambda i: PoolId(f"p{i}")), st.integers(0, 99)),
)
def test_no_replica_is_loaded_beyond_the_bound_while_another_has_room(
    loads: list[int], pools: list[int], tokens: int, number: int, overlaps: dict[PoolId, int]
) -> None:
    candidates = [candidate(f"r{i}", f"p{pools[i]}", load) for i, load in enumerate(loads)]
    chosen = place(key(number), candidates, tokens, overlap=overlaps).replica_id
    after = next(each.load_tokens for each in candidates if each.replica_id == chosen) + tokens
    mean = (sum(loads) + tokens) / len(loads)
    assert after <= max(LOAD_BOUND * mean, tokens) or after == min(loads) + tokens
