"""Running requests that are handed over between engines: the same text, and with a sound tail one token to compute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_support import BLOCK_TOKENS, FAKE_GEOMETRY, FINGERPRINT, FakeModel, Harness, Output, expected_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from remora.cache_actors.node_arenas import NodeArenas
from remora.deployments.engine.messages import FreezeOrder, GenerationRequest, Grammar, Handover, Resumption
from remora.namespaces.commands import Preempt
from remora.platform.base.errors import ArenaError
from remora.platform.base.ids import Epoch, ModelId, RequestId

PROMPT = [number % 250 for number in range(42)]


class Tails(NodeArenas):
    """Arenas in this process by their path; `is_gone` hides those of others."""

    def __init__(self, path: str, arenas: dict[str, NDArray[np.uint8]]) -> None:
        super().__init__("node", path, arenas[path])
        self.arenas = arenas
        self.is_gone = False

    def read(
        self, node_id: str, arena_path: str, blocks: Sequence[tuple[int, int]], block_bytes: int, source: Any = None
    ) -> Iterator[NDArray[np.uint8]]:
        if self.is_gone:
            raise ArenaError("it cannot be opened")
        return self._sound(self.arenas[arena_path], blocks, block_bytes)


class Pair:
    """A source and a target, in one pool or in two."""

    def __init__(self, num_pools: int, **target: Any) -> None:
        self.arenas: dict[str, NDArray[np.uint8]] = {}
        self.source = Harness()
        self.arenas["p"] = self.source.pool.device.data
        pool = None
        if num_pools == 1:
            pool = self.source.pool.device.attach(
                FAKE_GEOMETRY, model_id=ModelId("model"), fingerprint=FINGERPRINT, delivery="inline", seed=0
            )
        self.target = Harness(pool=pool, **target)
        self.arenas["q"] = self.target.pool.device.data
        path = "p" if num_pools == 1 else "q"
        self.source.engine._handovers._tails = Tails("p", self.arenas)
        self.tails = self.target.engine._handovers._tails = Tails(path, self.arenas)

    def stand_by(self, request: GenerationRequest) -> RequestId:
        """At the target, behind what the source has said."""
        given = tuple(self.source.outputs[request.request_id, 0].token_ids)
        standby = msgspec.structs.replace(
            request,
            request_id=RequestId(f"{request.request_id}~1"),
            epoch=Epoch(1),
            standby_of=Epoch(0),
            output_token_ids=(given,),
        )
        self.target.outputs[standby.request_id, 0] = Output(token_ids=list(given))
        self.target.engine.submit(standby)
        deadline_s = time.monotonic() + 20
        while not any(delta.is_ready for delta in self.target.deltas):
            assert time.monotonic() < deadline_s, "it is never ready"
            self.target.step()
            time.sleep(0.0005 if request.grammar else 0.0)  # compiled by a thread
        return standby.request_id

    def freeze(self, request_id: RequestId, num_known: int) -> Handover:
        self.source.engine.freeze(FreezeOrder(request_id=request_id, num_tokens=num_known))
        self.source.step(2)
        (handover,) = [delta.handover for delta in self.source.deltas if delta.handover is not None]
        return handover

    def begin(self, num_said: int, num_meanwhile: int, **sampling: Any) -> tuple[RequestId, RequestId, Handover]:
        """A request that stands still at the source, and a standby for it."""
        request = self.source.request(PROMPT, request_id="r", **{"max_tokens": 30, **sampling})
        self.source.submit(PROMPT, request_id="r", **{"max_tokens": 30, **sampling})
        while len(self.source.outputs["r", 0].token_ids) < num_said:
            self.source.step()
            time.sleep(0.0005 if request.grammar else 0.0)
        standby_id = self.stand_by(request)
        self.source.step(num_meanwhile)
        handover = self.freeze(request.request_id, len(PROMPT) + num_said - 1)
        return request.request_id, standby_id, handover

    def resume(self, standby_id: RequestId, handover: Handover) -> Any:
        said = self.source.outputs["r", 0]
        output = self.target.outputs[standby_id, 0]
        tokens = tuple(said.token_ids[len(output.token_ids) :])
        output.token_ids.extend(tokens)
        output.text = said.text
        self.target.model.decoder.steps.clear()
        self.target.engine.resume(Resumption(request_id=standby_id, token_ids=tokens, handover=handover))
        self.target.step()
        return output

    def end(self, request_id: RequestId) -> None:
        self.source.cancel(request_id)
        self.source.step(2)
        self.target.finish()
        for each in (self.source, self.target):
            assert each.num_referenced_blocks == 0
            each.close()


@pytest.mark.parametrize("num_pools", [1, 2])
@pytest.mark.parametrize(("num_said", "num_meanwhile"), [(3, 0), (3, 1), (3, 6), (7, 4), (2, 5)])
def test_a_request_goes_on_with_one_token_to_compute(num_pools: int, num_said: int, num_meanwhile: int) -> None:
    pair = Pair(num_pools)
    request_id, standby_id, handover = pair.begin(num_said, num_meanwhile)
    assert len(pair.source.outputs["r", 0].token_ids) == num_said + num_meanwhile, "it stands still"
    output = pair.resume(standby_id, handover)
    assert pair.target.model.decoder.steps == [[1]]
    pair.end(request_id)
    assert output.token_ids == expected_greedy(PROMPT, 30)
    assert pair.target.engine.stats().num_copied_tokens == num_meanwhile


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 5},
        {"stop": ("qqqzz",)},
        {"repetition_penalty": 1.3, "temperature": 0.7, "seed": 3},
        {"grammar": Grammar(kind="json_object"), "max_tokens": 24},
    ],
)
def test_what_lies_beside_the_kv_goes_on_too(sampling: dict[str, Any]) -> None:
    alone = Harness()
    expected = alone.run(PROMPT, **{"max_tokens": 30, **sampling})
    pair = Pair(1)
    request_id, standby_id, handover = pair.begin(4, 3, **sampling)
    output = pair.resume(standby_id, handover)
    pair.end(request_id)
    assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    alone.close()


FAULTS = st.sampled_from(
    ["none", "flipped", "overwritten", "gone", "other tokens", "other weights", "preempted", "source preempted",
     "source ended", "standby cancelled", "no arena"]
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    fault=FAULTS, num_pools=st.sampled_from([1, 2]), num_said=st.integers(1, 9), num_meanwhile=st.integers(0, 17),
    which=st.integers(0, 3),
)  # fmt: skip
def test_a_tail_that_is_not_what_it_should_be_is_computed(
    fault: str, num_pools: int, num_said: int, num_meanwhile: int, which: int
) -> None:
    pair = Pair(num_pools)
    request_id, standby_id, handover = pair.begin(num_said, num_meanwhile)
    blocks = [each.block for each in handover.blocks]
    size = FAKE_GEOMETRY.block_bytes
    match fault:
        case "flipped" if blocks:
            block = blocks[which % len(blocks)]
            # A bit of another slot than any that is read: the checksum alone tells.
            pair.arenas["p"][(block + 1) * size - 1] ^= 1
        case "overwritten" if num_pools == 2:
            for block in blocks:
                pair.arenas["p"][block * size : (block + 1) * size] = 7
        case "gone":
            pair.tails.is_gone = True
        case "other tokens":
            handover = msgspec.structs.replace(handover, tokens_hash=bytes(32))
        case "other weights":
            handover = msgspec.structs.replace(handover, fingerprint=b"others")
        case "no arena":
            pair.target.engine._handovers._tails = None
        case "preempted":
            (sequence,) = pair.target.engine._book.live[standby_id].sequences
            assert sequence.sequence_id is not None
            pair.target.engine._on_event(Preempt(event_no=0, sequence_id=sequence.sequence_id, reason="test"))
            pair.target.engine._read_inbox()
        case "source preempted":
            (sequence,) = pair.source.engine._book.live[request_id].sequences
            assert sequence.sequence_id is not None
            pair.source.engine._on_event(Preempt(event_no=0, sequence_id=sequence.sequence_id, reason="test"))
            pair.source.step(3)
        case "source ended":
            pair.source.cancel(request_id)
            pair.source.step(2)
        case "standby cancelled":
            pair.target.cancel(standby_id)
            pair.target.step()
    output = pair.resume(standby_id, handover)
    pair.end(request_id)
    if fault == "flipped" and blocks and num_meanwhile <= BLOCK_TOKENS:
        assert pair.target.engine.stats().num_damaged_blocks == 1
    if fault != "standby cancelled":
        assert output.token_ids == expected_greedy(PROMPT, 30)


def test_what_has_ended_or_is_not_there_is_ignored() -> None:
    harness = Harness(model=FakeModel())
    handover = Handover(num_tokens=1, tokens_hash=b"", fingerprint=b"", node_id="", arena_path="")
    harness.engine.freeze(FreezeOrder(request_id=RequestId("none"), num_tokens=BLOCK_TOKENS))
    harness.engine.resume(Resumption(request_id=RequestId("none"), token_ids=(1,), handover=handover))
    assert harness.run(PROMPT).token_ids == expected_greedy(PROMPT, 8)
    harness.engine.resume(Resumption(request_id=RequestId("r1"), token_ids=(1,), handover=handover))
    harness.step(2)
    harness.close()
