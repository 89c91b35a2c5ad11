"""Sealing: what becomes findable, what stays private, and the order of things."""

from __future__ import annotations

from pool_driver import BLOCK_BYTES, Driver, Replica, prompt

from remora.namespaces.commands import Publish, Refused, Seal


def setup() -> tuple[Driver, Replica]:
    driver = Driver()
    driver.namespace("a")
    return driver, driver.lease()


def seal(name: str, position: int, block_hash: bytes) -> Seal:
    return Seal(sequence_id=name, position=position, block_hash=block_hash)  # type: ignore[arg-type]


def test_a_hash_that_is_indexed_leaves_the_second_block_private_and_release_frees_it() -> None:
    driver, replica = setup()
    replica.admit("s1", "a", prompt(2))
    replica.admit("s2", "a", prompt(2))
    assert replica.publish("s1", "a", prompt(2)).num_sealed == 2
    answer = replica.publish("s2", "a", prompt(2))
    assert (answer.num_sealed, answer.num_duplicate) == (0, 2)
    replica.release("s2")
    assert driver.report("a").used_bytes == 2 * BLOCK_BYTES
    replica.release("s1")
    assert (driver.report("a").used_bytes, driver.report("a").cached_bytes) == (0, 2 * BLOCK_BYTES)


def test_a_sealed_block_behind_private_twins_keeps_the_indexed_twins_referenced() -> None:
    driver, replica = setup()
    replica.admit("s1", "a", prompt(2))
    replica.admit("s2", "a", prompt(3))
    replica.publish("s1", "a", prompt(2))
    assert replica.publish("s2", "a", prompt(3)).num_sealed == 1
    replica.release("s1")
    assert driver.report("a").cached_bytes == 0, "the parents of a referenced block cannot be evicted"
    replica.release("s2")
    assert driver.report("a").cached_bytes == 3 * BLOCK_BYTES
    assert replica.run("s3", "a", [*prompt(3), 1]).num_cached_blocks == 3


def test_a_twin_that_was_evicted_meanwhile_leaves_no_gap_in_the_chain() -> None:
    driver = Driver(num_extents=1)
    driver.namespace("a")
    replica = driver.lease()
    replica.admit("s1", "a", prompt(2))
    replica.admit("s2", "a", prompt(3))
    replica.publish("s1", "a", prompt(2))
    replica.publish("s2", "a", prompt(2))
    replica.release("s1")
    replica.run("flood", "a", prompt(13, start=5))  # evicts the twins
    assert replica.publish("s2", "a", prompt(3), start=2).num_sealed == 1
    replica.release("flood", "s2")
    assert replica.run("s3", "a", [*prompt(3), 1]).num_cached_blocks == 3


def test_publishing_again_is_harmless_and_out_of_order_is_refused_as_a_whole() -> None:
    driver, replica = setup()
    hashes = replica.hashes("a", prompt(3))
    replica.admit("s1", "a", prompt(3))
    replica.publish("s1", "a", prompt(2))
    assert replica.publish("s1", "a", prompt(2)).num_duplicate == 2
    for seals in (
        [seal("s1", 2, hashes[2]), seal("s1", 4, b"x" * 16)],
        [seal("s1", 0, hashes[1])],
        [seal("s1", 2, b"x" * 16)],
        [seal("s1", 2, hashes[2]), seal("s1", 3, b"x" * 16)],
        [seal("nobody", 0, hashes[0])],
    ):
        assert isinstance(replica.call(Publish, seals=tuple(seals)), Refused)
    assert replica.publish("s1", "a", prompt(3), start=2).num_sealed == 1
    assert driver.report("a").used_bytes == 3 * BLOCK_BYTES


def test_a_hash_cannot_be_put_behind_another_parent() -> None:
    driver, replica = setup()
    replica.run("s1", "a", prompt(3, start=1))
    replica.admit("s2", "a", [1], more_blocks=3)
    stolen = replica.hashes("a", prompt(3, start=1))[1]
    answer = replica.call(Publish, seals=(seal("s2", 0, b"y" * 16), seal("s2", 1, stolen)))
    assert isinstance(answer, Refused)
    answer = replica.call(Publish, seals=(seal("s2", 0, b"y" * 16), seal("s2", 1, b"z" * 16)))
    assert answer.num_sealed == 2
    replica.admit("s3", "a", [2], more_blocks=3)
    replica.admit("s4", "a", [3], more_blocks=3)
    both = (seal("s3", 0, b"p" * 16), seal("s3", 1, b"q" * 16), seal("s4", 0, b"q" * 16))
    assert isinstance(replica.call(Publish, seals=both), Refused)
    driver.state.check_integrity()
