"""On a card: the comparisons that tests/kernels/cuda makes by emulation, and what only a card can show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_tests import all_of, emulated_tests

from remora.cache_actors.arena_header import ArenaIdentity
from remora.cache_actors.cuda_arena import CudaArena
from remora.kernels.attention_backends import CANDIDATES, AttentionNeed, choose_attention
from remora.kernels.cuda.attention import paged_attention, parts_scratch, with_plan
from remora.kernels.cuda.attention_plan import plan_decode_graph
from remora.kernels.cuda.module import CupyDevice
from remora.kernels.cuda.place import block_major
from remora.platform.base.errors import KernelError

pytestmark = pytest.mark.gpu


_attention = emulated_tests("test_cuda_attention")
_operations = emulated_tests("test_cuda_operations")
_quantised = emulated_tests("test_cuda_quantised")
for _module in (_attention, _operations, _quantised):
    globals().update(all_of(_module))


def _decode(device: CupyDevice, world: Any, rows: list[tuple[int, int, int]], max_context_len: int) -> Any:
    """What a graph captures: arrays with fixed addresses, and the function that launches on them."""
    batch = world.batch(rows)
    num_heads = world.layout.num_kv_heads * world.group
    plan = plan_decode_graph(num_sequences=len(rows), max_context_len=max_context_len, group=world.group)
    data = device.upload(world.data)
    positions, tables = device.upload(batch.positions_T[: len(rows)]), device.upload(batch.block_table_SB[: len(rows)])
    parts = parts_scratch(device, plan.num_parts, world.layout, num_heads)
    step = with_plan(device, plan, positions, tables, parts)
    q = device.upload(np.concatenate([world.queries[index][first:end] for index, first, end in rows]))
    out, lse = device.empty(q.shape, np.float32), device.empty(q.shape[:2], np.float32)

    def launch() -> None:
        paged_attention(
            device,
            step,
            q_TQD=q,
            out_TQD=out,
            lse_TQ=lse,
            data=data,
            layout=world.layout,
            place=block_major(world.layout, 1),
            scale=world.scale,
        )

    return step, q, out, launch


@pytest.mark.parametrize("precision", ["bf16", "int8/int4", "int4/int8"])
def test_a_captured_decode_step_is_replayed_for_other_positions_with_the_same_bits(
    device: CupyDevice, precision: str
) -> None:
    import cupy

    world = _attention.World([1100, 513, 40], precision=precision)
    rows = [(0, 1000, 1001), (1, 500, 501), (2, 30, 31)]
    step, q, out, launch = _decode(device, world, rows, 2048)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch()  # compiles and loads, which a capture must not
        stream.synchronize()
        stream.begin_capture()
        launch()
        graph = stream.end_capture()
    later = [(0, 1099, 1100), (1, 512, 513), (2, 39, 40)]
    batch = world.batch(later)
    with stream:
        step.positions_T.set(batch.positions_T[: batch.num_tokens])
        step.block_table_SB.set(batch.block_table_SB[: batch.num_sequences])
        q.set(np.concatenate([world.queries[index][first:end] for index, first, end in later]))
        graph.launch(stream)
        stream.synchronize()
    expected = np.concatenate([result.out_TQD for result in world.run(device, later)])
    assert device.download(out).tobytes() == expected.tobytes()


_CHILD = """
import sys
import numpy as np
from pathlib import Path
from remora.cache_actors.cuda_arena import CudaArena
from remora.kernels.cuda.module import CupyDevice
from remora.kernels.cuda import operations
from remora.kernels.layout import BlockLayout
from remora.namespaces.geometry import KVGeometry, LayerGroup
arena = CudaArena.open_ipc(Path(sys.argv[1]), bytes.fromhex(sys.argv[2]))
layout = BlockLayout(KVGeometry(groups=(LayerGroup(num_layers=2, num_kv_heads=2, head_dim=64),), block_tokens=16))
device = CupyDevice(Path(sys.argv[3]))
operations.copy_blocks(device, layout, arena.data, np.array([1], np.int32), np.array([3], np.int32))
print(*operations.block_checksums(device, layout, arena.data, [0, 1, 2, 3]))
arena.close()
"""


def test_two_processes_work_on_one_arena(device: CupyDevice, tmp_path: Path) -> None:
    import cupy

    layout, data = _operations.make_arena(4)
    identity = ArenaIdentity(cluster_name="gpu-test", device_name="gpu0", boot_id="b", data_bytes=len(data), layout="")
    arena = CudaArena.create(tmp_path / "arena", identity)
    try:
        arena.data.set(data)
        cupy.cuda.runtime.deviceSynchronize()
        arguments = [str(arena.path), arena.ipc_handle().hex(), str(tmp_path / "cubins")]
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=False, timeout=240
        )
        assert child.returncode == 0, child.stderr
        expected = data.reshape(4, -1).copy()
        expected[3] = expected[1]
        assert (device.download(arena.data).reshape(4, -1) == expected).all()
        ours = _operations.operations.block_checksums(device, layout, arena.data, [0, 1, 2, 3])
        assert child.stdout.split() == [str(checksum) for checksum in ours]
    finally:
        arena.unlink()
        arena.close()


@pytest.mark.parametrize("name", list(CANDIDATES))
def test_an_attention_that_is_there_reproduces_the_reference(device: CupyDevice, name: str) -> None:
    layout, _ = _operations.make_arena(head_dim=128)
    need = AttentionNeed(layout=layout, num_heads=8, scale=128**-0.5)
    reason = ""
    try:
        assert choose_attention(need, device, torch_device="cuda", prefer=name).name
    except KernelError as error:
        reason = str(error)
    # A wrong result is a fault here, though the choice would pass over it.
    assert "off the reference" not in reason
    if reason:
        assert name != "cuda", reason
        pytest.skip(f"needs {name}: {reason}")


def test_torch_tensors_are_taken_where_they_lie(device: CupyDevice) -> None:
    x = torch.randn(3, 577, device="cuda")
    out = torch.empty_like(x)
    _operations.operations.rms_norm(device, x_TI=x, weight_I=torch.ones(577, device="cuda"), eps=1e-5, out_TI=out)
    torch.cuda.synchronize()
    assert torch.allclose(out, torch.nn.functional.rms_norm(x, (577,), eps=1e-5), atol=1e-5)
    with pytest.raises(KernelError, match="contiguous"):
        device.address(x.t())
