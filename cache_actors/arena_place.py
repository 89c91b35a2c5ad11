"""Finding or making the arena of a pool: its own from before a crash, an orphan of an earlier session, or a new one."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal, NamedTuple

from remora.cache_actors.arena import Arena, MappedArena, OwnedElsewhere, condemn, file_bytes
from remora.cache_actors.cuda_arena import CudaArena
from remora.cache_actors.memory_budget import Place, choose_place
from remora.cache_actors.pool_settings import PoolSettings
from remora.cache_actors.stale_files import arena_path, cluster_files, journal_path
from remora.platform.base.errors import ArenaError

logger = logging.getLogger(__name__)


class PlacedArena(NamedTuple):
    """An arena and where it came from."""

    arena: MappedArena
    backing: Literal["shm", "file", "cuda"]
    #: adopted: its bytes and journal are those of a predecessor. replaced: something was there that did not fit.
    outcome: Literal["created", "adopted", "replaced"]
    #: Adopted from an earlier session of the cluster: the configuration may have changed since.
    is_orphan: bool


def find_arena(settings: PoolSettings) -> PlacedArena | None:
    """Adopts an arena with its journal, or returns None. What cannot be adopted is removed and logged.

    Raises ArenaError when another living process owns this pool's arena.
    """
    if settings.device.kind == "cuda":
        return None
    for directory, backing in ((settings.shm_dir, "shm"), (settings.state_dir, "file")):
        own = arena_path(directory, settings.cluster_name, settings.pool_id)
        for path in (own, *_orphans(settings, directory, own)):
            arena = _adopt(path, settings, is_own=path == own)
            if arena is None:
                continue
            if path != own:
                # The journal first: without its journal an arena under its own name would count as damaged.
                os.replace(journal_path(path), journal_path(own))
                os.replace(path, own)
                arena.path = own
            return PlacedArena(arena, "shm" if backing == "shm" else "file", "adopted", path != own)
    return None


def make_arena(settings: PoolSettings) -> PlacedArena:
    """A new arena, in the best place that has room. Raises ArenaError saying which limit to raise."""
    device = settings.device
    if device.kind == "cuda":
        path = arena_path(settings.shm_dir, settings.cluster_name, settings.pool_id)
        return PlacedArena(CudaArena.create(path, settings.identity()), "cuda", "created", False)
    place: Place = choose_place(
        file_bytes(int(device.arena_bytes)),
        device_name=device.name,
        shm_dir=settings.shm_dir,
        state_dir=settings.state_dir,
        object_store_bytes=settings.object_store_bytes,
        spare_bytes=settings.journal_spare_bytes(),
    )
    path = arena_path(place.directory, settings.cluster_name, settings.pool_id)
    opened = Arena.adopt_or_create(path, settings.identity())
    if opened.outcome == "adopted":  # the caller found no use for it before
        raise ArenaError(f"{path}: appeared while the pool was starting")
    return PlacedArena(opened.arena, place.backing, opened.outcome, False)


def map_arena(path: Path, ipc_handle: bytes) -> MappedArena:
    """The arena of a running pool of this node; a GPU's has a handle. Raises ArenaError when it cannot be mapped."""
    return CudaArena.open_ipc(path, ipc_handle) if ipc_handle else Arena.open(path)


def remove_arena(arena: MappedArena) -> None:
    """Gives an arena up with its journal, for good; processes that still map it must stop."""
    journal_path(arena.path).unlink(missing_ok=True)
    arena.unlink()
    arena.close()


def _orphans(settings: PoolSettings, directory: Path, own: Path) -> list[Path]:
    """Arenas of this device from other Ray sessions; those of this session belong to pools of other nodes."""
    found = []
    for path in cluster_files(settings.cluster_name, directory):
        device_name, *node_and_session = path.stem.rpartition("@")[2].rsplit("-", 2)
        is_ours = path.suffix == ".arena" and device_name == settings.device.name
        if is_ours and path != own and node_and_session[-1:] != [settings.session]:
            found.append(path)
    return found


def _adopt(path: Path, settings: PoolSettings, *, is_own: bool) -> Arena | None:
    try:
        arena = Arena.adopt(path, settings.identity(), lock_timeout_s=10.0 if is_own else 0.0)
    except FileNotFoundError:
        return None
    except OwnedElsewhere:
        if is_own:
            raise
        return None
    except ArenaError as error:
        logger.warning("removing a stale arena: %s", error)
        condemn(path)
        path.unlink(missing_ok=True)
        journal_path(path).unlink(missing_ok=True)
        return None
    if not journal_path(path).exists():
        logger.warning("%s has no journal: removing it", path)
        remove_arena(arena)
        return None
    return arena
