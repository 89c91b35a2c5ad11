"""Steps through a pipeline against the whole model: the same bits, however cut and however many are in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from decoder_world import LLAMA, Float32, Int32, Memory, make_geometry, make_weights, random_tokens
from pipeline_world import NUM_BLOCKS, make_native, pipeline

from remora.deployments.pipeline.base import StepResult, TransportKind
from remora.kernels.base import (
    DecoderShape,
    KVMemory,
    StageDecoder,
    WeightPrecision,
    Weights,
    check_decoder_health,
)
from remora.kernels.batch import StepBatch
from remora.kernels.mover import mover_of
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.native.library import LIBRARY_VARIABLE
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError, StageLost

SHAPE = replace(LLAMA, num_layers=3)
TOKENS = random_tokens(SHAPE, 120)
SPLITS = [(1, 2), (1, 1, 1)]


@pytest.fixture(autouse=True)
def own_build(native_library: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, str(native_library(False)))


def make_batch() -> StepBatch:
    return StepBatch(max_tokens=128, max_sequences=8, max_blocks=8)


def steps_of_three() -> list[StepBatch]:
    """A prompt in two steps beside decoding sequences, then a step of decoding only; some without logits."""
    first, second, third = make_batch(), make_batch(), make_batch()
    first.add(TOKENS[:90], first_position=0, blocks=[3, 1, 7, 0, 9, 11], logits="none")
    first.add(TOKENS[90:93], first_position=0, blocks=[2], logits="all")
    second.add(TOKENS[93:94], first_position=3, blocks=[2])
    second.add(TOKENS[90:110], first_position=90, blocks=[3, 1, 7, 0, 9, 11, 13])
    second.add(TOKENS[:5], first_position=0, blocks=[20], logits="none")
    third.add(TOKENS[110:111], first_position=110, blocks=[3, 1, 7, 0, 9, 11, 13])
    third.add(TOKENS[94:95], first_position=4, blocks=[2])
    third.add(TOKENS[5:6], first_position=5, blocks=[20])
    return [first, second, third]


def whole_logits(weights: WeightPrecision) -> list[Float32]:
    shape = replace(SHAPE, weights=weights)
    geometry = make_geometry(shape, "bf16")
    decoder = NativeDecoder(shape, make_weights(shape), geometry, 2)
    memory: KVMemory = Memory(geometry, NUM_BLOCKS)
    return [decoder.forward(batch, memory).copy() for batch in steps_of_three()]


@pytest.mark.parametrize(
    ("weights", "split", "transport"),
    [
        *[(weights, split, "shared_memory") for weights in ("fp32", "bf16", "int8", "int4") for split in SPLITS],
        *[("fp32", split, "tcp") for split in SPLITS],
    ],
)
def test_logits_have_the_bits_of_the_whole_model_with_two_steps_in_flight(
    weights: WeightPrecision, split: tuple[int, ...], transport: TransportKind
) -> None:
    expected = whole_logits(weights)
    with pipeline(replace(SHAPE, weights=weights), split, num_decode_groups=2, transport=transport) as world:
        decoder, memory = world.decoder, world.memories[0]
        batch, (first, second, third) = make_batch(), steps_of_three()
        tickets = [decoder.submit(first, memory), decoder.submit(second, memory)]
        with pytest.raises(KernelError, match="2 steps are in flight"):
            decoder.submit(third, memory)
        results = [decoder.collect(tickets[0]).logits_RV]
        tickets.append(decoder.submit(third, memory))
        with pytest.raises(KernelError, match="not the oldest"):
            decoder.collect(tickets[2])
        results += [decoder.collect(ticket).logits_RV for ticket in tickets[1:]]
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.tobytes() == theirs.tobytes()
        # A prefix that all stages have, read again: rows do not change.
        batch.add(TOKENS[85:90], first_position=85, blocks=[3, 1, 7, 0, 9, 11], logits="all")
        assert np.isfinite(decoder.forward(batch, memory)).all()
        assert decoder.num_in_flight == 0


def test_times_of_every_stage_come_back_with_the_step() -> None:
    with pipeline(SHAPE, (1, 1, 1)) as world:
        decoder = world.decoder
        result: StepResult = decoder.collect(decoder.submit(steps_of_three()[0], world.memories[0]))
        assert [time.stage for time in result.times] == [0, 1, 2]
        assert {time.num_micro_batches for time in result.times} == {3}
        assert all(time.compute_s > 0 and time.start_unix_ns < time.end_unix_ns for time in result.times)
        assert [time.hop_bytes for time in result.times] == [0, 93 * 90 * 4, 93 * 90 * 4]
        assert result.times[0].start_unix_ns < result.times[1].start_unix_ns < result.times[2].start_unix_ns
        assert world.loops[1].stats().num_tokens == decoder.stage_stats().num_tokens == 93


def test_a_step_that_a_later_stage_cannot_compute_fails_and_the_others_go_on() -> None:
    class OneIsGone:
        def physical(self, stage: int, geometry: KVGeometry, logical_SB: Int32) -> Int32:
            return np.where(logical_SB == 20, 99, logical_SB) if stage == 1 else logical_SB

    expected = whole_logits("fp32")
    with pipeline(SHAPE, (1, 1, 1), tables=OneIsGone()) as world:
        decoder, memory = world.decoder, world.memories[0]
        first, second, _ = steps_of_three()
        tickets = [decoder.submit(first, memory), decoder.submit(second, memory)]
        assert decoder.collect(tickets[0]).logits_RV.tobytes() == expected[0].tobytes()
        with pytest.raises(KernelError, match="stage 1: block 99"):
            decoder.collect(tickets[1])
        again = make_batch()
        again.add(TOKENS[93:94], first_position=3, blocks=[2])
        assert decoder.forward(again, memory).tobytes() == expected[1][0].tobytes()
        wrong = make_batch()
        wrong.add([211], first_position=0, blocks=[0])
        with pytest.raises(KernelError, match="vocabulary"):
            decoder.submit(wrong, memory)
        assert decoder.num_in_flight == 0


def test_kv_that_a_later_stage_cannot_hold_marks_the_sequence() -> None:
    with pipeline(SHAPE, (1, 2)) as world:
        first, second, _ = steps_of_three()
        world.decoder.forward(first, world.memories[0])
        assert not first.not_finite_S.any()
        # Block 2 lies at 7 in stage 1. What its first layer reads there spoils what its second one is to store.
        world.memories[1].data.reshape(NUM_BLOCKS, -1)[7] = 0xFF
        world.decoder.forward(second, world.memories[0])
        assert second.not_finite_S[:3].tolist() == [1, 0, 0]


def test_steps_that_were_given_up_come_to_nothing_and_the_pipeline_can_be_emptied() -> None:
    expected = whole_logits("fp32")
    with pipeline(SHAPE, (1, 1, 1)) as world:
        decoder, memory = world.decoder, world.memories[0]
        first, second, _ = steps_of_three()
        decoder.submit(first, memory)
        decoder.abandon()
        ticket = decoder.submit(second, memory)
        assert decoder.collect(ticket).logits_RV.tobytes() == expected[1].tobytes()
        decoder.submit(first, memory)
        assert decoder.drain(10.0)
        assert decoder.num_in_flight == 0
        assert world.loops[1].stats().num_micro_batches == decoder.stage_stats().num_micro_batches


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_stage_that_ends_or_is_silent_is_noticed_by_every_call(transport: TransportKind) -> None:
    with pipeline(SHAPE, (1, 2), transport=transport) as world:
        ticket = world.decoder.submit(steps_of_three()[2], world.memories[0])
        world.decoder.collect(ticket)
        world.loops[0].stop()
        with pytest.raises(StageLost, match="closed"):
            world.decoder.collect(world.decoder.submit(steps_of_three()[2], world.memories[0]))
        with pytest.raises(StageLost):
            world.decoder.submit(steps_of_three()[0], world.memories[0])
    with pipeline(SHAPE, (1, 2), deadline_s=0.2, transport=transport) as world:
        world.loops[0]._gate = Stuck()  # type: ignore[assignment]
        with pytest.raises(StageLost, match="in time"):
            world.decoder.forward(steps_of_three()[2], world.memories[0])
        world.loops[0]._gate.go()  # type: ignore[attr-defined]


class Stuck:
    """A device whose turn does not come until `go`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.go = self._event.set

    def turn(self) -> Stuck:
        return self

    def __enter__(self) -> None:
        self._event.wait(10)

    def __exit__(self, *_: object) -> None:
        pass


def test_nothing_leaves_a_stage_whose_lease_is_lost() -> None:
    with pipeline(SHAPE, (1, 2), may_write=lambda: False) as world, pytest.raises(StageLost, match="closed"):
        world.decoder.forward(steps_of_three()[2], world.memories[0])
    assert world.ends == ["the lease of stage 1 on its memory is lost"]


def test_what_moves_blocks_and_says_that_nothing_works_any_more_is_stage_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may be a GPU's."""

    class Lost:
        def mover(self, *given: object) -> object:
            return given

        def check_health(self) -> None:
            raise KernelError("lost")

    with pipeline(LLAMA, (1, 1)) as world:
        monkeypatch.setattr(world.decoder, "_decoder", Lost())
        memory = Memory(make_geometry(LLAMA), 1)
        assert mover_of(world.decoder, memory, None) == (memory, None)
        with pytest.raises(KernelError, match="lost"):
            check_decoder_health(world.decoder)


def test_a_stage_whose_decoder_can_compute_nothing_more_ends() -> None:
    class Broken:
        name = "broken"

        def forward_stage(self, *step: object) -> Float32:
            raise RuntimeError("an illegal memory access")

        def check_health(self) -> None:
            raise KernelError("the device is lost to this process")

    def make_broken(shape: DecoderShape, weights: Weights, geometry: KVGeometry) -> StageDecoder:
        return cast("StageDecoder", Broken())

    with pipeline(SHAPE, (1, 2), makers=[make_native, make_broken]) as world, pytest.raises(StageLost, match="closed"):
        world.decoder.forward(steps_of_three()[2], world.memories[0])
    assert world.ends == ["the device is lost to this process"]
