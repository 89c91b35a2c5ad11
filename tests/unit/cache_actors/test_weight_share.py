"""Weights that the processes of a node use together, and their files on disk."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from remora.cache_actors.weight_cache import WeightCache
from remora.cache_actors.weight_share import WeightIndex, WeightShare
from remora.kernels.native.packed_weights import GroupedLayer, PackedManifest
from remora.kernels.native.weight_memory import HUGE_PAGE_BYTES, WeightMemory, shared_memory_is_fast
from remora.platform.base.errors import IntegrityError

#: Two huge pages, the second one partly used.
WEIGHTS = np.random.default_rng(5).integers(0, 256, HUGE_PAGE_BYTES + 12345, dtype=np.uint8)
MANIFEST = PackedManifest(
    num_bytes=len(WEIGHTS),
    tied_head=True,
    rope_inv_freq=(1.0, 0.25),
    grouped=(GroupedLayer(name="layers.0.qkv", precision="int4", has_minimum=True),),
)
#: Makes the weights, or finds them, says which, and keeps them until it is told to end.
_USER = """
import sys
from pathlib import Path
import numpy as np
from remora.cache_actors.weight_share import WeightShare
sys.path.append(sys.argv[2])
from test_weight_share import MANIFEST, WEIGHTS, make
with WeightShare(Path(sys.argv[1]), "c").locked("k") as index:
    found = index.find()
    made = found is None
    kept = make(index) if made else found.memory
assert np.array_equal(kept.bytes_view(len(WEIGHTS)), WEIGHTS)
print("made" if made else "found", flush=True)
sys.stdin.read()
"""


def make(index: WeightIndex) -> WeightMemory:
    draft = index.draft(2 * len(WEIGHTS))
    draft.memory.bytes_view(len(WEIGHTS))[:] = WEIGHTS
    index.publish(draft, MANIFEST)
    return draft.memory


@contextmanager
def user(directory: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Another process that has the weights; whether it made or found them."""
    with subprocess.Popen(
        [sys.executable, "-c", _USER, str(directory), str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def find(directory: Path) -> WeightMemory | None:
    with WeightShare(directory, "c").locked("k") as index:
        found = index.find()
    assert found is None or found.manifest == MANIFEST
    return None if found is None else found.memory


def test_weights_are_made_once_and_live_until_their_last_user_is_killed(tmp_path: Path) -> None:
    with user(tmp_path) as (first, maker):
        assert first == "made"
        with user(tmp_path) as (second, heir):
            assert second == "found"
            maker.send_signal(signal.SIGKILL)
            maker.wait()
            with user(tmp_path) as (third, _):
                assert third == "found", "of the second user, whose descriptor it is now"
            heir.send_signal(signal.SIGKILL)
            heir.wait()
    assert find(tmp_path) is None
    (index,) = tmp_path.iterdir()
    assert index.name == "c@k.weights"
    assert index.stat().st_size < 4096


def test_shared_weights_cannot_be_written_by_anybody(tmp_path: Path) -> None:
    with WeightShare(tmp_path, "c").locked("k") as index:
        memory = make(index)
    found = find(tmp_path)
    assert found is not None
    assert np.array_equal(found.bytes_view(len(WEIGHTS)), WEIGHTS)
    if shared_memory_is_fast():
        assert found.huge_page_bytes() == memory.huge_page_bytes() == 2 * HUGE_PAGE_BYTES
    maps = Path("/proc/self/maps").read_text()
    for each in (memory, found):
        assert re.search(rf"^{each.address:x}-[0-9a-f]+ r--s", maps, re.MULTILINE)
    (descriptor, *_) = [
        number for number in os.listdir("/proc/self/fd") if _target(number).startswith("/memfd:remora-weights")
    ]
    with pytest.raises(PermissionError):
        os.pwrite(int(descriptor), b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(int(descriptor), 0)
    assert fcntl.fcntl(int(descriptor), fcntl.F_GET_SEALS) == 0xF


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""


def test_whoever_comes_while_weights_are_made_waits_for_them(tmp_path: Path) -> None:
    found: list[WeightMemory | None] = []
    waiter = threading.Thread(target=lambda: found.append(find(tmp_path)))
    with WeightShare(tmp_path, "c").locked("k") as index:
        waiter.start()
        waiter.join(0.1)
        assert waiter.is_alive()
        kept = make(index)
    waiter.join(10)
    assert found[0] is not None
    assert found[0].address != kept.address


def test_an_index_of_somebody_else_or_without_sense_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "c@k.weights"
    path.write_bytes(b'{"manifest": {"num_by')
    path.chmod(0o600)
    assert find(tmp_path) is None, "written by a process that was killed"
    path.chmod(0o666)
    with pytest.raises(IntegrityError, match="not a file of this user alone"):
        find(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels"):
        find(tmp_path)


def keep(cache: WeightCache, key: str, weights: np.ndarray[tuple[int], np.dtype[np.uint8]] = WEIGHTS) -> bool:
    return cache.keep(key, MANIFEST, weights)


def read(cache: WeightCache, key: str) -> bool:
    cached = cache.find(key)
    if cached is None:
        return False
    assert cached.manifest == MANIFEST
    target = np.zeros(len(WEIGHTS), np.uint8)
    return cache.read(cached, target) and np.array_equal(target, WEIGHTS)


def test_a_file_of_packed_weights_is_read_as_it_was_written_or_removed(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 1 << 50, num_threads=2)
    assert not read(cache, "a")
    for damage in ("byte", "end", "key", "magic"):
        assert keep(cache, "a")
        path = tmp_path / "a.packed"
        assert path.stat().st_mode & 0o777 == 0o600
        assert read(cache, "a")
        data = bytearray(path.read_bytes())
        if damage == "byte":
            data[-7] ^= 1
        elif damage == "end":
            del data[-1]
        elif damage == "key":
            data[:] = data.replace(b'"key":"a"', b'"key":"b"')
        else:
            data[3] ^= 1
        path.write_bytes(data)
        assert not read(cache, "a"), damage
        assert not path.exists(), damage


def test_the_files_used_longest_ago_give_way_to_new_ones(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 3 * len(WEIGHTS))
    for number, key in enumerate(("a", "b")):
        assert keep(cache, key)
        os.utime(tmp_path / f"{key}.packed", (number, number))
    abandoned = tmp_path / "x.packed.1.partial"
    abandoned.write_bytes(b"")
    os.utime(abandoned, (0, 0))
    assert read(cache, "a"), "used again: now b is the older one"
    assert keep(cache, "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.packed", "c.packed"]
    assert not keep(WeightCache(tmp_path, 0), "d"), "nothing is kept"
    assert list(tmp_path.iterdir()) == []
