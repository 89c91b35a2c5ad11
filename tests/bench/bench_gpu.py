"""What the CUDA kernels reach on a card, against the ceilings measured on the same card. `make bench-gpu`.

Bytes are those that must move at least once; FLOP are 4 · rows · positions · head_dim a head. Ceilings: a copy of
device memory by the driver, and a large bf16 product by cuBLAS. Block-major against layer-major decides the layout on
GPUs (at most 3 % slower at batch 64 with 8k context). Decode is measured in bf16 and over K and V of integers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from remora.kernels.batch import StepBatch
from remora.kernels.cuda import operations
from remora.kernels.cuda.attention import DeviceStep, paged_attention, upload_step
from remora.kernels.cuda.attention_plan import plan_attention
from remora.kernels.cuda.device import Device
from remora.kernels.cuda.place import Place, block_major, layer_major
from remora.kernels.layout import BlockLayout
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision
from remora.platform.base.errors import KernelError

#: Precisions of K and V that decode is measured in besides bf16.
_INTEGERS: tuple[tuple[Precision, Precision], ...] = (("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
#: Seconds that one call takes on the device.
Timer = Callable[[Callable[[], None]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    num_sequences: int = 64
    context_len: int = 8192
    prefill_rows: int = 2048
    num_layers: int = 8
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_tokens: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    bytes_per_s: float
    flop_per_s: float


class GpuBench:
    """An arena of random KV with shuffled blocks, and a line of figures per operation."""

    def __init__(self, device: Device, timer: Timer, sizes: Sizes, ceilings: Ceilings, data: Any) -> None:
        """`data`: at least `num_arena_bytes(sizes)` of device memory with finite bf16 values.

        They serve every precision: scales are bf16 too, and integers are any bytes.
        """
        self.device, self.timer, self.sizes, self.ceilings, self.data = device, timer, sizes, ceilings, data
        self.layout = layout_of(sizes)
        self.num_blocks = sizes.num_sequences * sizes.context_len // sizes.block_tokens
        order = np.random.default_rng(1).permutation(self.num_blocks).astype(np.int32)
        self.table_SB = order.reshape(sizes.num_sequences, -1)

    def _line(self, name: str, seconds: float, *, num_bytes: float, flop: float = 0.0) -> str:
        text = f"{name:<34}{seconds * 1e6:10.1f} us  {num_bytes / seconds / 1e9:8.0f} GB/s"
        text += f" ({num_bytes / seconds / self.ceilings.bytes_per_s:6.1%})"
        if flop:
            text += f"  {flop / seconds / 1e12:8.2f} TFLOP/s ({flop / seconds / self.ceilings.flop_per_s:6.1%})"
        return text

    def _attention(self, batch: StepBatch, layout: BlockLayout, places: list[Place]) -> float:
        """Seconds for one layer; all layers are run, so that no cache holds what is read."""
        sizes = self.sizes
        group = sizes.num_heads // sizes.num_kv_heads
        plan = plan_attention(
            batch,
            group=group,
            num_kv_heads=sizes.num_kv_heads,
            block_tokens=sizes.block_tokens,
            num_processors=self.device.num_processors,
        )
        step: DeviceStep = upload_step(self.device, batch, plan, layout, self.data, sizes.num_heads)
        shape = (batch.num_tokens, sizes.num_heads, sizes.head_dim)
        q = self.device.upload(np.full(shape, 0x3F80, np.uint16))  # ones
        out, lse = self.device.empty(shape, np.uint16), self.device.empty(shape[:2], np.float32)

        def all_layers() -> None:
            for place in places:
                paged_attention(
                    self.device,
                    step,
                    q_TQD=q,
                    out_TQD=out,
                    lse_TQ=lse,
                    data=self.data,
                    layout=layout,
                    place=place,
                    scale=sizes.head_dim**-0.5,
                )

        return self.timer(all_layers) / len(places)

    def _places(self, layout: BlockLayout, by_layer: bool = False) -> list[Place]:
        layers = range(self.sizes.num_layers)
        if by_layer:
            return [layer_major(layout, layer, self.num_blocks) for layer in layers]
        return [block_major(layout, layer) for layer in layers]

    def decode(self) -> list[str]:
        """One row a sequence at full context: in both layouts, and block-major over integers."""
        sizes = self.sizes
        batch = StepBatch(
            max_tokens=sizes.num_sequences, max_sequences=sizes.num_sequences, max_blocks=self.table_SB.shape[1]
        )
        for row in range(sizes.num_sequences):
            batch.add([0], first_position=sizes.context_len - 1, blocks=self.table_SB[row])
        positions = sizes.num_sequences * sizes.context_len
        flop = 4.0 * positions * sizes.num_heads * sizes.head_dim

        def line(name: str, seconds: float, layout: BlockLayout) -> str:
            num_bytes = positions * layout.geometry.groups[0].token_bytes() / sizes.num_layers
            return self._line(name, seconds, num_bytes=num_bytes, flop=flop)

        layout = self.layout
        by_block = self._attention(batch, layout, self._places(layout))
        by_layer = self._attention(batch, layout, self._places(layout, by_layer=True))
        lines = [
            line("decode, block-major", by_block, layout),
            line("decode, layer-major", by_layer, layout),
            f"block-major takes {by_block / by_layer - 1:+.1%} of layer-major's time",
        ]
        for k, v in _INTEGERS:
            layout = layout_of(sizes, k, v)
            lines.append(line(f"decode, {k} K, {v} V", self._attention(batch, layout, self._places(layout)), layout))
        return lines

    def prefill(self) -> list[str]:
        """The last rows of one prompt."""
        sizes = self.sizes
        rows, context_len = min(sizes.prefill_rows, sizes.context_len), sizes.context_len
        batch = StepBatch(max_tokens=rows, max_sequences=1, max_blocks=self.table_SB.shape[1])
        batch.add([0] * rows, first_position=context_len - rows, blocks=self.table_SB[0])
        seen = rows * (context_len - rows) + rows * (rows + 1) // 2
        return [
            self._line(
                f"prefill, {rows} rows",
                self._attention(batch, self.layout, self._places(self.layout)),
                num_bytes=context_len * sizes.num_kv_heads * sizes.head_dim * 2 * 2,
                flop=4.0 * seen * sizes.num_heads * sizes.head_dim,
            )
        ]

    def blocks(self) -> list[str]:
        """Whole blocks: copied, summed, zeroed (last: it ends the data)."""
        half = self.num_blocks // 2
        sources, targets = (np.arange(start, start + half, dtype=np.int32) for start in (0, half))
        moved = half * self.layout.block_bytes
        device, layout, data = self.device, self.layout, self.data
        return [
            self._line(
                "copy_blocks",
                self.timer(lambda: operations.copy_blocks(device, layout, data, sources, targets)),
                num_bytes=2 * moved,
            ),
            self._line(
                "checksum",
                self.timer(lambda: void(operations.block_checksums(device, layout, data, sources.tolist()))),
                num_bytes=moved,
            ),
            self._line(
                "zero_blocks",
                self.timer(lambda: operations.zero_blocks(device, layout, data, sources)),
                num_bytes=moved,
            ),
        ]


def void(_: object) -> None:
    """Drops a result."""


def layout_of(sizes: Sizes, k: Precision = "bf16", v: Precision = "bf16") -> BlockLayout:
    group = LayerGroup(
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        k_precision=k,
        v_precision=v,
    )
    return BlockLayout(KVGeometry(groups=(group,), block_tokens=sizes.block_tokens))


def num_arena_bytes(sizes: Sizes) -> int:
    return sizes.num_sequences * sizes.context_len // sizes.block_tokens * layout_of(sizes).block_bytes


def measured_ceilings(cupy: Any, timer: Timer) -> Ceilings:
    """A copy of 1 GiB by the driver, and a product of two bf16 matrices of 8192 x 8192 by cuBLAS."""
    import torch

    source, target = cupy.empty(1 << 30, cupy.uint8), cupy.empty(1 << 30, cupy.uint8)
    copy_s = timer(lambda: cupy.copyto(target, source))
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
        product_s = timer(lambda: void(a @ b))
    return Ceilings(bytes_per_s=2 * source.nbytes / copy_s, flop_per_s=2.0 * size**3 / product_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=Sizes().num_layers, help="of the arena: 2.1 GB each")
    sizes = Sizes(num_layers=parser.parse_args().layers)
    try:
        import cupy

        from remora.kernels.cuda.module import CupyDevice

        device = CupyDevice()
    except (ImportError, KernelError) as error:
        sys.exit(f"bench-gpu needs a card and CuPy (GPU=1 make bench-gpu): {error}")

    def timer(call: Callable[[], None]) -> float:
        call()  # compiles, loads
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        times = []
        for _ in range(10):
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
        return float(np.median(times))

    ceilings = measured_ceilings(cupy, timer)
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    print(
        f"{name}: {ceilings.bytes_per_s / 1e9:.0f} GB/s copied, {ceilings.flop_per_s / 1e12:.0f} TFLOP/s bf16 product"
    )
    print(sizes)
    values = cupy.random.standard_normal(num_arena_bytes(sizes) // 2, dtype=cupy.float32)
    data = (values.view(cupy.uint32) >> 16).astype(cupy.uint16).view(cupy.uint8)  # float32 cut to bf16
    del values
    bench = GpuBench(device, timer, sizes, ceilings, data)
    for part in (bench.decode, bench.prefill, bench.blocks):
        print("\n".join(part()), flush=True)
    del bench, data
    cupy.get_default_memory_pool().free_all_blocks()
    from gpu_decoder import decoder_lines

    from remora.kernels.cuda.card import CardRuntime

    print("\n".join(decoder_lines(CardRuntime())))


if __name__ == "__main__":
    main()
