"""Chain hashes name content: equal exactly when everything the KV depends on is equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_driver import small_geometry

from remora.namespaces.hashing import chain_hashes, chain_root, kv_fingerprint, next_hash, sharing_domain
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
