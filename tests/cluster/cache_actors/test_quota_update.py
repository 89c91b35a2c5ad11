"""A new configuration reaches pools that live on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from replica_probe import MakePool, config

from remora.cache_actors.pool_messages import PoolDescription
from remora.deployments.quota_update import update_quotas
from remora.platform.base.config import RemoraConfig, parse_config
from remora.platform.base.errors import ConfigError

pytestmark = pytest.mark.cluster


def new_config(description: PoolDescription, tmp_path: Path, **changes: object) -> RemoraConfig:
    """The pool's configuration with another guarantee for namespace a, one namespace more, and changes of it."""
    name = Path(description.binding.arena_path).name.split("-", 2)[2].partition("@")[0]
    data = config(name, tmp_path).model_dump(mode="json")
    data["namespaces"][0]["guaranteed"] = description.report.extent_bytes
    data["namespaces"].append({"name": "added", "model": "b", **changes})
    return parse_config(data)


async def test_a_living_pool_takes_new_quotas_and_namespaces(make_pool: MakePool, tmp_path: Path) -> None:
    pool = await make_pool()
    before: PoolDescription = await pool.describe.remote()
    await asyncio.to_thread(update_quotas, new_config(before, tmp_path))
    after: PoolDescription = await pool.describe.remote()
    quotas = {each.namespace_id: each.guaranteed_bytes for each in after.report.namespaces}
    assert quotas == {"a": before.report.extent_bytes, "b": 0, "c": 0, "added": 0}
    await pool.check_integrity.remote()


async def test_what_a_pool_refuses_is_told_with_its_name(make_pool: MakePool, tmp_path: Path) -> None:
    pool = await make_pool()
    before: PoolDescription = await pool.describe.remote()
    await asyncio.to_thread(update_quotas, new_config(before, tmp_path))
    with pytest.raises(ConfigError, match=r"namespaces\.added\.kv_replicas: 2 takes pools .* lives on with 1; "):
        await asyncio.to_thread(update_quotas, new_config(before, tmp_path, kv_replicas=2))
    with pytest.raises(ConfigError, match=r"pool cpu0-.*namespace added: .*cannot change"):
        await asyncio.to_thread(update_quotas, new_config(before, tmp_path, tenant="somebody"))
