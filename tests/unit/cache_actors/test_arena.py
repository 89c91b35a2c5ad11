"""The arena file: allocation, ownership, adoption, budget (design §4.6, §4.10)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from remora.cache_actors import memory_budget
from remora.cache_actors.arena import Arena, ArenaView, OwnedElsewhere, data_offset, file_bytes, is_owned
from remora.cache_actors.arena_header import HEADER_BYTES, MAX_LEASES, ArenaHeader, ArenaIdentity
from remora.cache_actors.memory_budget import choose_place
from remora.cache_actors.stale_files import arena_path, cluster_files, journal_path, remove_stale, stale_files
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base import paths
from remora.platform.base.errors import ArenaError

KiB = 1024
MiB = 1024 * 1024


def identity(**changes: object) -> ArenaIdentity:
    base = ArenaIdentity(cluster_name="test", device_name="cpu0", boot_id="boot-1", data_bytes=256 * KiB, layout="v1")
    return msgspec.structs.replace(base, **changes)


def test_an_arena_is_fully_allocated_private_and_page_aligned(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a.arena", identity())
    status = os.stat(arena.path)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= file_bytes(256 * KiB), "a sparse file would die by SIGBUS later"
    assert arena.data.ctypes.data % 4096 == 0
    assert arena.data.shape == (256 * KiB,)
    assert not arena.data.any()
    assert list(tmp_path.iterdir()) == [arena.path], "no temporary file stays"


def test_large_arenas_start_on_a_huge_page() -> None:
    assert data_offset(1024 * MiB) % (2 * MiB) == 0
    assert data_offset(1024 * KiB) >= HEADER_BYTES


def test_two_mappings_see_each_others_bytes_and_words(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a.arena", identity())
    other = Arena.open(arena.path)
    other.data[1000:1010] = 7
    assert (arena.data[1000:1010] == 7).all()
    arena.header.set_generation(5, 41)
    assert other.header.may_emit(5, 41, arena.header.incarnation)
    arena.header.set_generation(5, 42)
    assert not other.header.may_emit(5, 41, arena.header.incarnation)
    arena.zero(1004, 3)
    assert other.data[1000:1010].tolist() == [7, 7, 7, 7, 0, 0, 0, 7, 7, 7]


def test_a_reader_sees_bytes_and_words_and_can_change_neither(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a.arena", identity())
    reader = Arena.open(arena.path, writable=False)
    arena.data[70:74] = 9
    assert reader.data[70:74].tolist() == [9] * 4
    assert reader.header.incarnation == arena.header.incarnation
    with pytest.raises(ValueError, match="read-only"):
        reader.data[0] = 1
    with pytest.raises(TypeError):
        reader.header.incarnation = 1
    reader.close()
    arena.close()


def test_words_do_not_touch_each_other_or_the_identity(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a.arena", identity())
    for slot in range(MAX_LEASES):
        arena.header.set_generation(slot, 10_000 + slot)
    arena.header.incarnation, arena.header.num_restarts, arena.header.effects_done = 1, 2, 3
    assert [arena.header.generation(slot) for slot in range(MAX_LEASES)] == list(range(10_000, 10_000 + MAX_LEASES))
    assert (arena.header.incarnation, arena.header.num_restarts, arena.header.effects_done) == (1, 2, 3)
    assert not arena.data.any()
    assert Arena.open(arena.path).header.identity == identity()
    for wrong in (-1, MAX_LEASES):
        with pytest.raises(ValueError, match="lease slot"):
            arena.header.set_generation(wrong, 1)


def test_a_view_has_the_shape_kernels_expect(tmp_path: Path) -> None:
    geometry = KVGeometry(groups=(LayerGroup(num_layers=2, num_kv_heads=1, head_dim=16),), block_tokens=16)
    view = ArenaView(Arena.create(tmp_path / "a.arena", identity()), geometry)
    assert view.geometry is geometry
    assert view.data.dtype == np.uint8


def test_an_arena_of_the_same_boot_and_sizes_is_adopted_with_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    arena = Arena.create(path, identity())
    arena.data[5] = 99
    incarnation = arena.header.incarnation
    arena.close()
    opened = Arena.adopt_or_create(path, identity())
    assert opened.outcome == "adopted"
    assert opened.arena.data[5] == 99
    assert opened.arena.header.incarnation == incarnation


@pytest.mark.parametrize(
    "change", [{"boot_id": "boot-2"}, {"cluster_name": "x"}, {"data_bytes": 128 * KiB}, {"layout": "v2"}]
)
def test_an_arena_that_differs_is_replaced_and_old_mappings_must_stop(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "a.arena"
    first = Arena.create(path, identity())
    incarnation = first.header.incarnation
    first.data[:] = 1
    first.close()
    old = Arena.open(path)
    opened = Arena.adopt_or_create(path, identity(**change))
    assert opened.outcome == "replaced"
    assert next(iter(change)) in opened.reason
    assert not opened.arena.data.any()
    assert opened.arena.header.incarnation not in (0, incarnation)
    assert not old.header.may_emit(0, 0, incarnation), "a process with the old mapping must notice"
    old.data[:] = 3
    assert not opened.arena.data.any(), "old mappings write to the old file only"


@pytest.mark.parametrize("damage", [b"", b"REMORAKV", b"x" * 20_000])
def test_a_file_that_is_no_arena_is_replaced(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "a.arena"
    path.write_bytes(damage)
    with pytest.raises(ArenaError):
        Arena.open(path)
    assert Arena.adopt_or_create(path, identity()).outcome == "replaced"


def test_any_flipped_bit_of_the_identity_is_noticed(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a.arena", identity())
    header = bytearray(arena.path.read_bytes()[:HEADER_BYTES])
    length = 20 + int.from_bytes(header[12:16], "little")
    for position in range(length):
        damaged = bytearray(header)
        damaged[position] ^= 1
        with pytest.raises(ArenaError):
            ArenaHeader(memoryview(damaged))


def test_one_living_owner_at_a_time_and_a_dead_one_is_succeeded(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    Arena.create(path, identity()).close()
    script = f"""
import sys, time
from pathlib import Path
from remora.cache_actors.arena import Arena
arena = Arena.adopt(Path({str(path)!r}), Arena.open(Path({str(path)!r})).header.identity)
print("owned", flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        assert is_owned(path)
        with pytest.raises(OwnedElsewhere):
            Arena.adopt_or_create(path, identity(), lock_timeout_s=0.05)
    finally:
        owner.kill()
    assert Arena.adopt_or_create(path, identity()).outcome == "adopted"
    owner.communicate()


def test_a_forked_child_has_no_mapping_that_outlives_its_parent(tmp_path: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from remora.cache_actors.arena import Arena
arena = Arena.open(Path({str(tmp_path / "a.arena")!r}))
pid = os.fork()
if pid == 0:
    os._exit(0 if "a.arena" not in open("/proc/self/maps").read() else 3)
assert "a.arena" in open("/proc/self/maps").read()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    Arena.create(tmp_path / "a.arena", identity())
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_ranges_outside_the_data_are_not_zeroed(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a.arena", identity())
    for offset, size in ((-1, 10), (256 * KiB - 5, 6), (256 * KiB, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            arena.zero(offset, size)


def test_a_file_system_that_is_full_is_an_error_that_names_the_limit_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    with pytest.raises(ArenaError, match="arena_bytes"):
        Arena.create(path, identity(data_bytes=1 << 50))
    assert list(tmp_path.iterdir()) == []


# ---- the budget ------------------------------------------------------------------------------------------------------


def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shm_free: int, disk_free: int, memory: int) -> str:
    shm, state = tmp_path / "shm", tmp_path / "state"
    shm.mkdir()
    monkeypatch.setattr(memory_budget, "free_bytes", lambda path: shm_free if path == shm else disk_free)
    monkeypatch.setattr(memory_budget, "available_memory_bytes", lambda: memory)
    return choose_place(
        100 * MiB,
        device_name="cpu0",
        shm_dir=shm,
        state_dir=state,
        object_store_bytes=128 * MiB,
        spare_bytes=20 * MiB,
    ).backing


def test_shared_memory_is_taken_when_rays_object_store_still_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place(tmp_path, monkeypatch, 248 * MiB, 0, 1 << 40) == "shm"


def test_too_small_shared_memory_falls_back_to_a_file_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert place(tmp_path, monkeypatch, 247 * MiB, 120 * MiB, 1 << 40) == "file"
    assert "--shm-size" in caplog.text
    assert "arena_bytes" in caplog.text


def test_when_nothing_fits_the_error_names_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArenaError, match=r"(?s)247 MiB free.*--shm-size.*119 MiB free"):
        place(tmp_path, monkeypatch, 247 * MiB, 119 * MiB, 1 << 40)


def test_an_arena_larger_than_memory_is_refused_before_the_kernel_kills_someone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArenaError, match=r"devices\.cpu0\.arena_bytes"):
        place(tmp_path, monkeypatch, 1 << 40, 1 << 40, 119 * MiB)


# ---- what was left behind --------------------------------------------------------------------------------------------


def test_stale_files_are_those_of_this_cluster_that_nobody_owns(tmp_path: Path) -> None:
    def make(cluster: str, pool: str) -> Arena:
        arena = Arena.create(arena_path(tmp_path, cluster, pool), identity(cluster_name=cluster))
        journal_path(arena.path).write_bytes(b"j")
        return arena

    owned, left, other = make("a", "cpu0-1"), make("a", "cpu0-2"), make("a-b", "cpu0-1")
    left.close()
    other.close()
    mapped = Arena.open(left.path)
    incarnation = mapped.header.incarnation
    assert stale_files("a", tmp_path) == sorted([left.path, journal_path(left.path)])
    assert remove_stale("a", tmp_path) == sorted([left.path, journal_path(left.path)])
    assert not mapped.header.may_emit(0, 0, incarnation)
    assert cluster_files("a", tmp_path) == sorted([owned.path, journal_path(owned.path)])
    assert len(cluster_files("a-b", tmp_path)) == 2
    assert paths.shared_memory_prefix("a-b").startswith(paths.shared_memory_prefix("a")) is False
