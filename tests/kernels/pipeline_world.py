"""A pipeline whose stages are threads of this process, each with a private arena: everything but the processes."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from decoder_world import Int32, Memory, make_geometry, make_weights

from remora.cache_actors.port import OpenGate
from remora.cache_actors.process_watch import process_identity
from remora.deployments.pipeline.base import StageTables, TransportKind
from remora.deployments.pipeline.hops import HopPlace, open_receiver, open_sender, result_room_bytes
from remora.deployments.pipeline.pipeline_decoder import PipelineDecoder, PipelineLimits
from remora.deployments.pipeline.stage_loop import StageLoop
from remora.kernels.base import DecoderShape, KVMemory, StageDecoder, Weights
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.stages import StagePart, StageWeights
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError, StageLost

NUM_BLOCKS = 24


#: Of a stage.
Maker = Callable[[DecoderShape, Weights, KVGeometry], StageDecoder]


def make_native(shape: DecoderShape, weights: Weights, geometry: KVGeometry) -> StageDecoder:
    return NativeDecoder(shape, weights, geometry, 1)


class ShiftedTables:
    """Every stage has the block in another place."""

    def physical(self, stage: int, geometry: KVGeometry, logical_SB: Int32) -> Int32:
        return ((logical_SB + 5 * stage) % NUM_BLOCKS).astype(np.int32)


class PipelineWorld:
    """`decoder` is stage 0's side, `memory` its arena, `loops` are the other stages."""

    def __init__(
        self,
        shape: DecoderShape,
        split: tuple[int, ...],
        directory: Path,
        *,
        transport: TransportKind = "shared_memory",
        tables: StageTables | None = None,
        may_write: Callable[[], bool] = lambda: True,
        weights: Weights | None = None,
        memories: Sequence[KVMemory] | None = None,
        makers: Sequence[Maker] | None = None,
        **limits: float,
    ) -> None:
        geometry, weights = make_geometry(shape, "bf16"), weights or make_weights(shape)
        parts = [StagePart(split=split, stage=stage) for stage in range(len(split))]
        self.limits = PipelineLimits(
            num_stages=len(split),
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            max_num_seqs=8,
            max_step_tokens=128,
            **{"max_blocks": 8, "max_micro_tokens": 32, "deadline_s": 20.0, **limits},  # type: ignore[arg-type]
        )
        self.memories = memories or [Memory(part.geometry_of(geometry), NUM_BLOCKS) for part in parts]
        decoders = [
            make(part.shape_of(shape), StageWeights(weights, part), memory.geometry)
            for make, part, memory in zip(makers or [make_native] * len(parts), parts, self.memories, strict=True)
        ]
        me, place = process_identity(), HopPlace(directory, "test-", "127.0.0.1")
        ends = [
            open_receiver(transport, self.limits, from_stage=stage, peer=me, place=place) for stage in range(len(split))
        ]
        receivers = [receiver for receiver, _ in ends]
        senders = [open_sender(address) for _, address in ends]
        self.loops = [
            StageLoop(
                decoder=decoders[stage],
                part=parts[stage],
                memory=self.memories[stage],
                gate=OpenGate(),
                receiver=receivers[stage - 1],
                sender=senders[stage],
                batch=self.limits.make_batch(),
                may_write=may_write,
            )
            for stage in range(1, len(split))
        ]
        self.decoder = PipelineDecoder(
            decoders[0],
            self.memories[0].geometry,
            limits=self.limits,
            gate=OpenGate(),
            tables=tables or ShiftedTables(),
            sender=senders[0],
            receiver=receivers[-1],
            result_room_bytes=result_room_bytes(receivers[-1], self.limits),
        )
        self.ends: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(loop,)) for loop in self.loops]
        for thread in self._threads:
            thread.start()

    def _run(self, loop: StageLoop) -> None:
        try:
            self.ends.append(loop.run())
        except (StageLost, KernelError) as lost:
            self.ends.append(str(lost))

    def close(self) -> None:
        self.decoder.check_integrity()
        self.decoder.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@contextmanager
def pipeline(shape: DecoderShape, split: tuple[int, ...], **options: object) -> Iterator[PipelineWorld]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        world = PipelineWorld(shape, split, Path(directory), **options)  # type: ignore[arg-type]
        try:
            yield world
        finally:
            world.close()
