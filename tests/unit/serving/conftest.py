"""Routers and their HTTP face on fake replicas."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

sys.path.insert(0, str(Path(__file__).parent))

from fake_replica import FakeReplica, token_of

from remora.cache_actors.session_registry import SessionRegistry
from remora.deployments.cluster_traces import ClusterTraces, LocalTraces, NodeTraces
from remora.deployments.engine.messages import GenerationRequest
from remora.deployments.listed import Listed
from remora.deployments.model_states import ModelStates
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.deployments.router import RouterCore
from remora.deployments.session_turns import SessionTurns
from remora.platform.base.config import RemoraConfig, parse_config
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import ModelId, ReplicaId, RouterId
from remora.platform.base.span_file import traces_dir
from remora.platform.base.sql_state_store import SqlStateStore
from remora.platform.base.state_store import default_database_url
from remora.platform.http.app import create_app
from remora.platform.http.http_stats import HttpStats
from remora.platform.http.router_metrics import OneRouter
from remora.platform.http.running_moves import OwnMoves
from remora.platform.http.services import Services, Tokenizers


class Cluster:
    """A router and the replicas it can see."""

    def __init__(self, config: RemoraConfig) -> None:
        self.replicas: dict[ReplicaId, FakeReplica] = {}
        #: What Serve is asked to do about sleeping models; it does nothing by itself.
        self.woken: list[ModelId] = []
        self.put_to_sleep: list[ModelId] = []
        self.core = RouterCore(config, self.replicas.__getitem__, router_id=RouterId("router-1"), wake=self.wake)

    async def wake(self, model_id: ModelId) -> bool:
        self.woken.append(model_id)
        return self.woken.count(model_id) == 1

    async def sleep(self, model_id: ModelId) -> None:
        self.put_to_sleep.append(model_id)

    async def count_replicas(self) -> dict[str, int]:
        return dict.fromkeys(self.woken, 1)

    async def add(self, *replicas: FakeReplica) -> None:
        """Lists replicas and waits until the router is connected to those alive."""
        for replica in replicas:
            self.replicas[replica.replica_id] = replica
        self.publish()
        await self.settle(
            lambda: all(
                connection.connected or not self.replicas[connection.replica_id].alive
                for connection in self.core.fleet.connections()
            )
        )

    def remove(self, replica: FakeReplica) -> None:
        del self.replicas[replica.replica_id]
        self.publish()

    def publish(self, *, draining: Sequence[ReplicaId] = ()) -> None:
        self.core.update_replicas(
            {key: Listed(replica.model_id, "node-1", key not in draining) for key, replica in self.replicas.items()}
        )

    async def settle(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Waits until the condition holds; fails the test if it does not."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture
def make_replica() -> Callable[..., FakeReplica]:
    return FakeReplica


@pytest.fixture
def expected_token() -> Callable[[GenerationRequest, int, int], int]:
    return token_of


@pytest.fixture
def config() -> RemoraConfig:
    return parse_config(
        {
            "http": {"queue_timeout_s": 1.0, "max_body_bytes": 20_000},
            "models": [{"name": "tiny", "source": "unused"}, {"name": "other", "source": "unused"}],
            "namespaces": [
                {"name": "chat", "model": "tiny", "guaranteed": "1MiB"},
                {"name": "batch/team-a", "model": "tiny", "max_sessions": 3},
            ],
        }
    )


@pytest.fixture
async def cluster(config: RemoraConfig) -> Any:
    made = Cluster(config)
    yield made
    made.core.check_integrity()
    await made.core.stop()
    made.core.check_integrity()
    assert made.core.num_open == 0


def byte_tokenizer() -> ChatTokenizer:
    """One token per byte, id = byte; 256 ends an answer. Its template writes `role: content` lines."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    alphabet = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<end>"])
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return ChatTokenizer(tokenizer, chat_template=template, eos_token_ids=(256,))


class _NoPools:
    #: Whether every block that is looked for is found.
    has_blocks = True

    async def find_blocks(self, namespace_id: str, fingerprint: bytes, hashes: Any) -> dict[str, int]:
        self.looked_up = (namespace_id, tuple(hashes))
        return {"pool": len(hashes)} if self.has_blocks else {}

    async def reports(self) -> dict[str, Any]:
        return {}

    async def set_quota(self, namespace_id: str, change: Any, kv_precision: Any = None) -> None:
        raise Unavailable("no pool")

    async def trim(self, namespace_id: str, target_bytes: int | None) -> Any:
        raise Unavailable("no pool")

    async def compact(self, namespace_id: str) -> Any:
        raise Unavailable("no pool")


class Server:
    """The HTTP face on a real socket in the test's own loop, on one fake replica that steps by itself."""

    def __init__(self, cluster: Cluster, replica: FakeReplica, state_dir: Path) -> None:
        self.sessions = SessionRegistry(
            lambda: SqlStateStore(default_database_url(state_dir, "unit")), cluster_id="unit", expire_every_s=0.05
        )
        self.turns = SessionTurns(self.sessions)
        self.cluster = cluster
        self.core = cluster.core
        self.replica = replica
        self.nodes: dict[str, NodeTraces] = {}
        self.pools = _NoPools()
        self.step_s = 0.002
        self.paused = False
        tokenizers = Tokenizers(self.core.catalog.models, lambda _: byte_tokenizer())
        stats = HttpStats(self.core.stats.registry)
        services = Services(
            config=self.core.config,
            core=self.core,
            tokenizers=tokenizers,
            pools=self.pools,
            routers=OneRouter(self.core.stats.registry),
            stats=stats,
            turns=self.turns,
            running_moves=OwnMoves(self.core),
            traces=ClusterTraces(
                "node-a",
                LocalTraces(traces_dir(state_dir)),
                list_nodes=self.list_nodes,
                connect=lambda node: self.nodes[node],
            ),
            states=ModelStates(self.core, cluster.count_replicas),
            sleep=cluster.sleep,
        )
        server_config = uvicorn.Config(create_app(services), host="127.0.0.1", port=0, log_config=None, lifespan="off")
        self._server = uvicorn.Server(server_config)
        self._tasks: list[asyncio.Task[None]] = []
        self.url = ""

    async def list_nodes(self) -> set[str]:
        return set(self.nodes)

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._server.serve()), asyncio.create_task(self._step())]
        await self.cluster.settle(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def _step(self) -> None:
        while True:
            if not self.paused:
                await self.replica.step()
            await asyncio.sleep(self.step_s)

    async def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.turns.stop()
        await self.sessions.close()
        self.sessions.check_integrity()
        assert self.turns.num_open == 0
        for limits in self._server.config.app.state.access.limits.values():
            limits.check_integrity()
            assert limits.num_running == 0

    def value(self, name: str, **labels: str) -> float:
        """One sample of the router's own metrics."""
        return self.core.stats.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def server(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Server]:
    replica = FakeReplica("a")
    await cluster.add(replica)
    made = Server(cluster, replica, tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        yield client


@pytest.fixture
async def openai_client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client
