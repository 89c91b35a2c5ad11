"""Chain hashes name content: equal exactly when everything the KV depends on is equal."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_driver import small_geometry

from remora.namespaces.edits import Edits, chain_edits, derived, kept_end, recomputed
from remora.namespaces.hashing import (
    Derivation,
    chain_hashes,
    chain_root,
    edited_parent,
    kv_fingerprint,
    next_hash,
    sharing_domain,
)
from remora.platform.base.errors import InvalidRequest
from remora.platform.base.ids import NamespaceId

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
ROOT = chain_root(b"fingerprint", "namespace:a")


def test_a_hash_is_the_same_on_every_machine() -> None:
    assert chain_hashes(ROOT, [1, 2, 3, 4], 2) == [
        bytes.fromhex("c9b370cbcd1e238183c1b2c90a87fc44"),
        bytes.fromhex("9c7778a49a83ce0ec3ea39f6340777bd"),
    ]


@given(TOKENS, TOKENS)
def test_equal_hashes_mean_equal_prefixes(first: list[int], second: list[int]) -> None:
    pairs = zip(chain_hashes(ROOT, first, 2), chain_hashes(ROOT, second, 2), strict=False)
    for position, (one, other) in enumerate(pairs):
        end = 2 * (position + 1)
        assert (one == other) == (first[:end] == second[:end])


@given(TOKENS, st.integers(1, 5))
def test_the_chain_and_the_single_step_agree_and_partial_blocks_have_no_hash(tokens: list[int], size: int) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(tokens) - size + 1, size):
        parent = next_hash(parent, tokens[start : start + size])
        expected.append(parent)
    assert chain_hashes(ROOT, tokens, size) == expected


@given(st.tuples(*[st.binary(max_size=3)] * 2), st.tuples(*[st.binary(max_size=3)] * 2))
def test_fields_of_a_root_never_run_together(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> None:
    roots = [chain_root(fields[0], "d", fields[1]) for fields in (one, other)]
    assert (roots[0] == roots[1]) == (one == other)


def test_a_salt_and_a_domain_each_start_another_chain() -> None:
    roots = {ROOT, chain_root(b"fingerprint", "namespace:b"), chain_root(b"fingerprint", "namespace:a", salt=b"x")}
    assert len(roots) == 3


@given(st.lists(st.integers(0, 9), min_size=16, max_size=16), st.lists(st.integers(0, 15), min_size=1, max_size=3))
def test_blocks_from_an_edit_on_share_no_hash_with_the_plain_chain(tokens: list[int], positions: list[int]) -> None:
    edits = [(position, b"%d" % number) for number, position in enumerate(sorted(positions))]
    plain, edited = chain_hashes(ROOT, tokens, 4), chain_hashes(ROOT, tokens, 4, edits)
    first = edits[0][0] // 4
    assert edited[:first] == plain[:first]
    assert not set(edited[first:]) & set(plain)
    assert set(chain_hashes(ROOT, tokens, 4, [*edits, (15, b"more")])) != set(edited)


def test_a_fingerprint_depends_on_geometry_weights_tokenizer_and_adapter() -> None:
    one, two = small_geometry(1), small_geometry(2)
    assert len(
        {
            kv_fingerprint(one, "w", "t"),
            kv_fingerprint(two, "w", "t"),
            kv_fingerprint(one, "wt", ""),
            kv_fingerprint(one, "w", "u"),
            kv_fingerprint(one, "w", "t", b"a"),
        }
    ) == 5  # fmt: skip


def test_only_a_share_group_of_one_tenant_is_a_common_domain() -> None:
    a, b = NamespaceId("a"), NamespaceId("b")
    assert sharing_domain(a, "t", "g") == sharing_domain(b, "t", "g")
    assert len({sharing_domain(a, "t", ""), sharing_domain(b, "t", ""), sharing_domain(a, "t", "g")}) == 3
    assert sharing_domain(a, "t:1", "g") != sharing_domain(a, "t", "1:g")
    assert sharing_domain(a, "t", "g") != sharing_domain(a, "u", "g")


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_a_token_that_is_no_token_id_is_refused_by_name(token: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chain_hashes(ROOT, [token], 1)  # type: ignore[list-item]
    assert caught.value.field == "prompt"


def test_kv_that_was_taken_over_is_named_by_what_it_was_made_of_and_how() -> None:
    roots = {
        edited_parent(ROOT, Derivation(kind=kind, fingerprint=fingerprint).digest)
        for kind in ("adopted", "converted")
        for fingerprint in (b"a", b"b")
    }
    assert len({ROOT, *roots}) == 5


ADOPTED = Derivation(kind="adopted", fingerprint=b"other")


def names(tokens: list[int], edits: Edits) -> list[bytes]:
    return list(chain_hashes(ROOT, tokens, 4, chain_edits(edits)))


@given(st.lists(st.integers(0, 9), min_size=24, max_size=24), st.integers(0, 3), st.integers(1, 3))
def test_kv_taken_over_and_what_is_computed_behind_it_are_no_plain_content(
    tokens: list[int], first: int, count: int
) -> None:
    edits = derived((), ADOPTED, 4 * first, 4 * (first + count))
    found, plain = names(tokens, edits), names(tokens, ())
    assert found[:first] == plain[:first]
    assert not set(found[first:]) & set(plain)
    assert kept_end(edits) == 4 * (first + count)
    # More or less taken over: equal names as long as both are, and never behind the shorter one.
    longer = names(tokens, derived((), ADOPTED, 4 * first, 4 * (first + count + 1)))
    assert found[: first + count] == longer[: first + count]
    assert not set(found[first + count :]) & set(longer[first + count :])


def test_kv_taken_over_that_is_lost_is_computed_and_named_so_and_plain_when_all_is_lost() -> None:
    tokens = list(range(24))
    edits = derived((), ADOPTED, 4, 16)
    part = recomputed(edits, 8)
    assert names(tokens, part) == names(tokens, derived((), ADOPTED, 4, 8))
    assert kept_end(part) == 8
    assert recomputed(edits, 4) == recomputed(edits, 0) == ()
    # Tokens that are gone make another log: that its KV is new is remembered.
    assert recomputed((*edits, msgspec.structs.replace(edits[0], kind="removed")), 0) != ()
