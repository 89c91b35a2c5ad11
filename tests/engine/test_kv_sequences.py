"""llama.cpp's operations on sequences with a real decoder: forks are exact, shifts are rotations, nobody else moves."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_llama import LLAMA_GEOMETRY, random_weights, tiny_llama

from remora.cache_actors.kv_sequences import KVSequences
from remora.cache_actors.local_pool import LocalPool
from remora.kernels.batch import StepBatch
from remora.kernels.layout import K_SIDE, BlockLayout
from remora.kernels.mover import KVMover
from remora.kernels.reference.rope import rope_tables, rotate
from remora.namespaces.commands import Admit, Admitted, Publish, Release, Seal
from remora.namespaces.hashing import chain_hashes, chain_root
from remora.namespaces.sequence_commands import Edited
from remora.platform.base.errors import Conflict, InvalidRequest, OverQuota
from remora.platform.base.ids import BlockHash, LeaseId, NamespaceId, SequenceId

BLOCK_TOKENS = LLAMA_GEOMETRY.block_tokens
ROOT = chain_root(b"local", "namespace:ns")


class Caller:
    """Computes sequences through a decoder and edits them; blocking."""

    def __init__(self, num_blocks: int = 24) -> None:
        self.decoder = tiny_llama("reference").decoder
        self.pool = LocalPool.alone(LLAMA_GEOMETRY, num_blocks=num_blocks, namespaces={"ns": None})
        inv_freq = random_weights()["rope_inv_freq"].numpy()
        self.operations = KVSequences(self.pool.ask, KVMover(self.pool.memory, inv_freq))
        self.tables: dict[str, list[int]] = {}
        self.batch = StepBatch(max_tokens=256, max_sequences=1, max_blocks=32)

    def do(self, work: Any) -> Any:
        return asyncio.run(work)

    def begin(self, name: str, tokens: list[int], more: int = 2) -> int:
        """Admits, computes and publishes; returns the cached tokens."""
        count = -(-len(tokens) // BLOCK_TOKENS) + more
        hashes = tuple(chain_hashes(ROOT, tokens, BLOCK_TOKENS))
        admitted = self.do(
            self.pool.ask(
                Admit(
                    lease_id=LeaseId(""), sequence_id=SequenceId(name), namespace_id=NamespaceId("ns"), hashes=hashes,
                    num_tokens=len(tokens), num_blocks=count, max_blocks=count,
                )
            )
        )  # fmt: skip
        assert isinstance(admitted, Admitted)
        self.tables[name] = list(admitted.blocks)
        num_cached = admitted.num_cached_blocks * BLOCK_TOKENS
        self.compute(name, tokens[num_cached:], first=num_cached)
        self.publish(name, hashes)
        return num_cached

    def publish(self, name: str, hashes: tuple[BlockHash, ...], start: int = 0) -> Any:
        seals = tuple(
            Seal(sequence_id=SequenceId(name), position=place, block_hash=hashes[place])
            for place in range(start, len(hashes))
        )
        return self.do(self.pool.ask(Publish(lease_id=LeaseId(""), seals=seals)))

    def compute(self, name: str, tokens: list[int], *, first: int) -> NDArray[np.float32]:
        self.batch.clear()
        self.batch.add(tokens, first_position=first, blocks=self.tables[name])
        return self.decoder.forward(self.batch, self.pool.memory)[0].copy()

    def greedy(self, name: str, tokens: list[int], count: int) -> list[int]:
        """Goes on behind tokens whose last one is not computed yet."""
        log = list(tokens)
        for _ in range(count):
            log.append(int(self.compute(name, log[-1:], first=len(log) - 1).argmax()))
        return log[len(tokens) :]

    def edited(self, source: str, target: str, answer: Edited) -> Edited:
        self.tables[target] = self.tables[source][: answer.num_kept_blocks] + list(answer.blocks)
        return answer

    def kv(self, name: str, num_tokens: int) -> torch.Tensor:
        """kv_L2HTD of a sequence."""
        view = BlockLayout(LLAMA_GEOMETRY).torch_view(self.pool.memory.data)
        whole = torch.cat([view[block] for block in self.tables[name]], dim=3)
        return whole[:, :, :, :num_tokens].clone()


@pytest.fixture
def caller() -> Caller:
    return Caller()


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def cold(tokens: list[int], count: int) -> list[int]:
    alone = Caller()
    alone.begin("cold", tokens[:-1])
    return alone.greedy("cold", tokens, count)


def test_forks_diverge_and_each_says_what_a_cold_run_of_its_history_says(caller: Caller) -> None:
    history = tokens_of(53)
    caller.begin("trunk", history)
    forks = {}
    for seed in range(3):
        name = f"fork-{seed}"
        answer = caller.do(caller.operations.seq_cp("trunk", name, num_tokens=53))
        caller.edited("trunk", name, answer)
        assert len(answer.moves) == 1, "only the partial block is copied"
        forks[name] = history + tokens_of(1, seed + 10)
    said = {name: caller.greedy(name, tokens, 10) for name, tokens in forks.items()}
    for name, tokens in forks.items():
        assert said[name] == cold(tokens, 10)
    assert caller.greedy("trunk", [*history, 7], 10) == cold([*history, 7], 10)


def test_what_is_removed_from_the_middle_is_gone_and_the_rest_is_rotated(caller: Caller) -> None:
    history = tokens_of(70)
    caller.begin("a", history)
    before = caller.kv("a", 70)
    caller.edited("a", "a", caller.do(caller.operations.seq_rm("a", 10, 33, close_gap=True, num_tokens=70)))
    after = caller.kv("a", 47)
    assert torch.equal(after[:, :, :, :10], before[:, :, :, :10])
    assert torch.equal(after[:, 1, :, 10:], before[:, 1, :, 33:70])
    k_MHD = before[:, K_SIDE, :, 33:70].reshape(1, -1, 16)
    turned = rotate(k_MHD, *rope_tables(torch.tensor([-23]), random_weights()["rope_inv_freq"]))
    assert torch.allclose(after[:, K_SIDE, :, 10:].reshape(1, -1, 16), turned, atol=1e-5)
    assert caller.do(caller.operations.seq_pos_max("a")) == 46
    assert caller.do(caller.operations.seq_pos_min("a")) == 0


def test_case_03_chunks_kept_from_between_removed_ones_are_near_a_cold_run(caller: Caller) -> None:
    """Cached a b c d e f g h j, wanted a b e f h j: both removals refer to the positions of their own time."""
    letters = {letter: tokens_of(4, ord(letter)) for letter in "abcdefghj"}
    cached = [token for letter in "abcdefghj" for token in letters[letter]]
    wanted = [token for letter in "abefhj" for token in letters[letter]]
    caller.begin("s", cached)
    for start, end, length in ((8, 16, 36), (16, 20, 28)):
        removal = caller.operations.seq_rm("s", start, end, close_gap=True, num_tokens=length)
        caller.edited("s", "s", caller.do(removal))
    assert caller.do(caller.operations.seq_pos_max("s")) == len(wanted) - 1
    fresh = Caller()
    fresh.begin("s", wanted)
    # The first layer's V depends on the token alone, and its K on token and position.
    assert torch.allclose(caller.kv("s", 24)[0], fresh.kv("s", 24)[0], atol=1e-5)


def test_a_shift_moves_one_sequence_and_no_other(caller: Caller) -> None:
    history = tokens_of(64)
    caller.begin("a", history)
    assert caller.begin("b", history) == 48
    before = caller.kv("b", 64)
    caller.edited("a", "a", caller.do(caller.operations.seq_add("a", 20, delta=5, num_tokens=64)))
    assert torch.equal(caller.kv("b", 64), before)
    assert not torch.equal(caller.kv("a", 64)[:, K_SIDE], before[:, K_SIDE])
    assert caller.do(caller.operations.seq_pos_max("a")) == 68


def test_a_stranger_with_the_tokens_of_an_edited_sequence_finds_none_of_its_kv(caller: Caller) -> None:
    history = tokens_of(70)
    caller.begin("a", history)
    caller.edited("a", "a", caller.do(caller.operations.seq_rm("a", 5, 20, close_gap=True, num_tokens=70)))
    visible = history[:5] + history[20:]
    edits = [(5, b"what the edit was")]
    assert caller.publish("a", tuple(chain_hashes(ROOT, visible, BLOCK_TOKENS, edits))).num_sealed == 3
    caller.do(caller.pool.ask(Release(lease_id=LeaseId(""), sequence_ids=(SequenceId("a"),))))
    assert caller.begin("stranger", visible) == 0
    assert caller.begin("the old history", history) == 64


def test_keep_and_clear_end_the_other_sequences(caller: Caller) -> None:
    for name in "abc":
        caller.begin(name, tokens_of(20, ord(name)), more=0)
    assert caller.do(caller.operations.seq_keep("b")) == 2
    assert caller.do(caller.operations.clear()).num_sequences == 1
    assert caller.do(caller.operations.clear(data=True)).num_blocks == 3
    view = BlockLayout(LLAMA_GEOMETRY).torch_view(caller.pool.memory.data)
    assert not view[[caller.tables[name][0] for name in "abc"]].any()
    assert caller.begin("a2", tokens_of(20, ord("a"))) == 0


def test_what_cannot_be_done_raises_and_changes_no_byte(caller: Caller) -> None:
    caller.begin("a", tokens_of(64), more=17)
    before = caller.pool.memory.data.copy()
    with pytest.raises(Conflict):
        caller.do(caller.operations.seq_cp("a", "a"))
    with pytest.raises(InvalidRequest):
        caller.do(caller.operations.seq_add("a", 20, delta=-5, num_tokens=64))
    with pytest.raises(OverQuota):  # the sequence has 21 of 24 blocks
        caller.do(caller.operations.seq_rm("a", 1, 2, close_gap=True, num_tokens=64))
    assert np.array_equal(caller.pool.memory.data, before)
    assert caller.do(caller.operations.seq_pos_max("a")) == 63
