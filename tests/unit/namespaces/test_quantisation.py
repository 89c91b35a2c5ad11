"""Cached blocks are re-encoded into another precision, found by who had the tokens, and their old room is given up."""

from __future__ import annotations

from typing import Any

import pytest
from pool_driver import BLOCK_BYTES, Driver, prompt

from remora.namespaces.commands import Admitted, Publish, Refused, Seal
from remora.namespaces.effects import ReencodeBlocks
from remora.namespaces.geometry import KVPrecision
from remora.namespaces.hashing import converted_hash, following_hash, kv_fingerprint
from remora.namespaces.kept_chains import KeptChain, KeptMatch
from remora.namespaces.quantise_commands import KVFormat, Quantise, Quantised
from remora.platform.base.ids import BlockHash, LeaseId, NamespaceId

#: Blocks have twice the bytes of those in bf16.
WIDE: KVPrecision = ("fp32", "fp32")


class World:
    """A pool with a namespace whose KV is in WIDE, and will be in bf16."""

    def __init__(self, **options: Any) -> None:
        self.driver = Driver(**{"num_extents": 8, **options})
        self.driver.namespace("a")
        self.replica = self.driver.lease()
        self.replica.add_format(WIDE)

    def quantise(self, name: str = "a", **fields: Any) -> Quantised:
        answer = self.driver.apply(self.command(name, **fields))
        assert isinstance(answer, Quantised), answer
        return answer

    def command(self, name: str = "a", **fields: Any) -> Quantise:
        replica = self.replica
        wide = KVFormat(geometry=replica.geometry.with_precision(WIDE), fingerprint=replica.formats[WIDE][1])
        plain = KVFormat(geometry=replica.geometry, fingerprint=replica.fingerprint)
        return Quantise(
            **{
                "lease_id": LeaseId(""),
                "namespace_id": NamespaceId(name),
                "target": plain,
                "sources": (wide,),
                **fields,
            }
        )

    def kept(self, name: str, tokens: list[int]) -> tuple[KeptChain, ...]:
        hashes = self.replica.hashes(name, tokens, WIDE)
        return (KeptChain(fingerprint=self.replica.formats[WIDE][1], hashes=tuple(hashes)),)

    def admit(self, sequence: str, tokens: list[int], *, name: str = "a", kept: bool = True) -> Admitted:
        chains = self.kept(name, tokens) if kept else ()
        answer = self.replica.admit(sequence, name, tokens, kept=chains)
        assert isinstance(answer, Admitted), answer
        return answer


def test_cached_blocks_are_re_encoded_freed_and_found_by_who_had_their_tokens() -> None:
    world = World()
    tokens = prompt(6)
    world.replica.cache("one", "a", tokens, kv_precision=WIDE)
    answer = world.quantise()
    assert (answer.num_converted_blocks, answer.num_freed_blocks, answer.num_left_blocks) == (6, 6, 0)
    assert (answer.before_bytes, answer.after_bytes) == (6 * 2 * BLOCK_BYTES, 6 * BLOCK_BYTES)
    (effect,) = [each for each in world.driver.effects if isinstance(each, ReencodeBlocks)]
    assert len(effect.pairs) == 6
    assert (effect.source.kv_precision, effect.target.kv_precision) == (WIDE, ("bf16", "bf16"))
    found = world.admit("again", [*tokens, 1])
    assert found.num_cached_blocks == 6
    assert found.blocks[:6] == tuple(target for _, target in effect.pairs)
    assert world.admit("stranger", [*tokens, 1], kept=False).num_cached_blocks == 0
    assert (again := world.quantise()).num_converted_blocks == again.num_freed_blocks == 0


def test_names_of_converted_blocks_are_those_that_a_replica_gives_them() -> None:
    world = World()
    tokens = prompt(2)
    world.replica.cache("one", "a", tokens, kv_precision=WIDE)
    world.quantise()
    wide, plain = world.replica.formats[WIDE][1], world.replica.fingerprint
    first, second = world.replica.hashes("a", tokens, WIDE)
    name = converted_hash(None, first, wide, plain)
    match = world.admit("again", [*tokens, 1]).kept
    assert match is not None
    assert match.hashes == (name, converted_hash(name, second, wide, plain))
    assert match.stem == match.hashes[-1]


def test_what_is_computed_behind_converted_blocks_is_found_behind_them_only() -> None:
    world = World()
    tokens = prompt(4)
    world.replica.cache("one", "a", tokens[:8], kv_precision=WIDE)
    world.quantise()
    match = world.admit("two", tokens).kept
    assert match is not None
    plain = world.replica.hashes("a", tokens)
    names = [*match.hashes, *(following_hash(each, match.stem) for each in plain[2:])]
    seals = tuple(Seal(sequence_id="two", position=place, block_hash=name) for place, name in enumerate(names))  # type: ignore[arg-type]
    assert world.replica.call(Publish, seals=seals).num_sealed == 2
    world.replica.release("two")
    short = world.replica.admit("three", "a", [*tokens, 1], kept=world.kept("a", tokens[:8]))
    assert short.num_cached_blocks == 4
    assert world.admit("stranger", [*tokens, 1], kept=False).num_cached_blocks == 0


def test_blocks_in_use_are_converted_for_those_behind_them_but_not_freed() -> None:
    world = World()
    tokens = prompt(6)
    world.replica.cache("one", "a", tokens, kv_precision=WIDE)
    running = world.replica.admit("two", "a", tokens[:13], kv_precision=WIDE)
    assert running.num_cached_blocks == 3
    answer = world.quantise()
    assert (answer.num_converted_blocks, answer.num_freed_blocks, answer.num_left_blocks) == (6, 3, 0)
    world.replica.release("two")
    again = world.quantise()
    assert (again.num_converted_blocks, again.num_freed_blocks) == (0, 3)


def test_a_round_reads_no_more_than_it_may_and_the_next_goes_on() -> None:
    world = World()
    for number in range(3):
        world.replica.cache(f"s{number}", "a", prompt(5, start=number), kv_precision=WIDE)
    counts = []
    while True:
        answer = world.quantise(max_bytes=2 * 2 * BLOCK_BYTES)
        if not answer.num_converted_blocks and not answer.num_freed_blocks:
            break
        counts.append(answer.num_converted_blocks)
    assert sum(counts) == 15
    assert max(counts) <= 2
    assert answer.num_left_blocks == 0
    for number in range(3):
        assert world.admit(f"t{number}", [*prompt(5, start=number), 1]).num_cached_blocks == 5


def test_nobody_loses_what_is_guaranteed_to_him_for_it() -> None:
    world = World(num_extents=3)
    world.driver.namespace("b", guaranteed=2 * 16 * BLOCK_BYTES)
    world.replica.cache("one", "a", prompt(8), kv_precision=WIDE)
    for number in range(2):
        world.replica.cache(f"b{number}", "b", prompt(15, start=10 + number))
    before = world.driver.report("b").cached_bytes
    world.quantise()
    assert world.driver.report("b").cached_bytes == before > 0


def test_a_full_pool_makes_room_by_the_namespace_s_own_cache() -> None:
    world = World(num_extents=3)
    for number in range(6):
        world.replica.cache(f"s{number}", "a", prompt(4, start=number), kv_precision=WIDE)
    assert world.driver.report("a").cached_bytes == 3 * 16 * BLOCK_BYTES
    for _ in range(20):
        world.quantise()
    found = [world.admit(f"t{number}", [*prompt(4, start=number), 1]).num_cached_blocks for number in range(6)]
    assert sum(found) >= 12, "most of it is there still"
    assert world.quantise().num_left_blocks == 0


def test_a_share_group_finds_what_one_of_it_had_converted() -> None:
    world = World()
    for name in ("x", "y"):
        world.driver.namespace(name, tenant="t", share_group="g")
    tokens = prompt(3)
    world.replica.cache("one", "x", tokens, kv_precision=WIDE)
    world.replica.cache("two", "y", prompt(3, start=2), kv_precision=WIDE)
    assert world.quantise("x").num_freed_blocks == 3, "blocks of the other stay"
    assert world.admit("three", [*tokens, 1], name="y").num_cached_blocks == 3
    assert world.admit("four", [*tokens, 1], name="a").num_cached_blocks == 0


@pytest.mark.parametrize("dies", ["whole", "torn"])
def test_a_pool_that_dies_in_the_middle_comes_back_with_all_of_a_round_or_nothing(dies: Any) -> None:
    world = World()
    for number in range(3):
        world.replica.cache(f"s{number}", "a", prompt(5, start=number), kv_precision=WIDE)
    world.driver.keep_journal()
    for _ in range(10):
        world.driver.dies_next = dies
        world.quantise(max_bytes=3 * 2 * BLOCK_BYTES)
    for number in range(3):
        assert world.admit(f"t{number}", [*prompt(5, start=number), 1]).num_cached_blocks == 5


def test_requests_that_make_no_sense_are_refused_and_change_nothing() -> None:
    world = World()
    world.replica.cache("one", "a", prompt(2), kv_precision=WIDE)
    before = world.driver.state.snapshot()
    target = world.command().target
    unknown = KVFormat(geometry=world.replica.geometry.with_precision(("int4", "int4")), fingerprint=b"f")
    for command, error in (
        (world.command("nobody"), "NotFound"),
        (world.command(target=unknown), "InvalidRequest"),
        (world.command(sources=(target,)), "InvalidRequest"),
    ):
        answer = world.driver.apply(command)
        assert isinstance(answer, Refused)
        assert answer.error == error
        assert world.driver.state.snapshot() == before


def test_a_match_says_which_chain_reaches_farthest_in_its_own_precision() -> None:
    world = World()
    tokens = prompt(5)
    world.replica.cache("one", "a", tokens, kv_precision=WIDE)
    fingerprint = kv_fingerprint(world.replica.geometry.with_precision(("int8", "int8")), "w", "tokenizer")
    nothing = KeptChain(fingerprint=fingerprint, hashes=(BlockHash(b"x" * 16),))
    answer = world.replica.admit("two", "a", [*tokens, 1], kept=(nothing, *world.kept("a", tokens)))
    assert answer.kept == KeptMatch(chain_no=1, num_source_blocks=5)
