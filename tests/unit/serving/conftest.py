"""A replica without an engine, Ray or a model: says one token per step and choice, on command."""

from __future__ import annotations

import asyncio
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

from remora.cache_actors.session_registry import SessionRegistry
from remora.deployments.cluster_traces import ClusterTraces, LocalTraces, NodeTraces
from remora.deployments.engine.messages import FeedMessage, FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from remora.deployments.feed import FeedHub
from remora.deployments.listed import Listed
from remora.deployments.model_card import ModelCard, NamespaceCard
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.deployments.router import RouterCore
from remora.deployments.session_turns import SessionTurns
from remora.namespaces.geometry import KVPrecision
from remora.platform.base.config import RemoraConfig, parse_config
from remora.platform.base.errors import RemoraError, Unavailable
from remora.platform.base.ids import ModelId, NamespaceId, PoolId, ReplicaId, RequestId, RouterId
from remora.platform.base.span_file import traces_dir
from remora.platform.base.state_store import SqlStateStore, default_database_url
from remora.platform.http.app import create_app
from remora.platform.http.http_stats import HttpStats
from remora.platform.http.router_metrics import OneRouter
from remora.platform.http.running_moves import OwnMoves
from remora.platform.http.services import Services, Tokenizers


def token_of(request: GenerationRequest, choice_index: int, position: int) -> int:
    """Deterministic in (prompt, seed, choice, position), as the engine's tokens are: lower-case letters."""
    seed = request.sampling.seed or 0
    return 97 + (sum(request.prompt_token_ids) + 7 * choice_index + 3 * position + seed) % 26


class FakeReplica:
    """The replica's side of ReplicaLink, on the real FeedHub."""

    def __init__(self, name: str, model: str = "tiny", pool: str = "pool-a", *, heartbeat_s: float = 0.05) -> None:
        self.replica_id = ReplicaId(name)
        self.model_id = ModelId(model)
        self.pool_id = PoolId(pool)
        self.alive = True
        self.frozen = False
        self.draining = False
        self.running: dict[RequestId, tuple[GenerationRequest, list[list[int] | None]]] = {}
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[RequestId] = []
        self.num_submit_calls = 0
        self.wanted_traces: list[str] = []
        #: What it says it has found in the cache.
        self.num_cached_tokens = 4
        self.drop_next_delta = False
        #: Answers a request with this error instead of tokens.
        self.error: dict[str, Any] | None = None
        #: Of namespaces with a precision of their own; `card_no` counts changes.
        self.namespaces: dict[NamespaceId, NamespaceCard] = {}
        self.card_no = 0
        #: Precisions that it was asked to be ready for, and why it cannot.
        self.prepared: list[tuple[str, KVPrecision]] = []
        self.precision_error: RemoraError | None = None
        self.hub = FeedHub(
            self.replica_id,
            on_abandoned=self._drop,
            load_tokens=self.load_tokens,
            card_no=lambda: self.card_no,
            heartbeat_s=heartbeat_s,
        )

    def load_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request, _ in self.running.values())

    def _drop(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def _check(self) -> None:
        if not self.alive:
            raise Unavailable(f"{self.replica_id} is dead")

    # ---- ReplicaLink ---------------------------------------------------------------------------------------------

    async def describe(self) -> ModelCard:
        self._check()
        return ModelCard(
            replica_id=self.replica_id,
            model_id=self.model_id,
            pool_id=self.pool_id,
            fingerprint=b"f" * 32,
            block_tokens=4,
            block_bytes=256,
            max_model_len=200,
            vocab_size=257,
            max_num_seqs=8,
            decoder="fake",
            weights="fp32",
            pid=1,
            namespaces=dict(self.namespaces),
            card_no=self.card_no,
        )

    async def feed(self, router_id: RouterId) -> AsyncIterator[FeedMessage]:
        self._check()
        async for message in self.hub.messages(router_id):
            while self.frozen:
                await asyncio.sleep(0.01)
            yield message
        self._check()

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._check()
        self.num_submit_calls += 1
        for request in requests:
            self.hub.take(request)
            self.submitted.append(request)
            resumed = request.output_token_ids or ((),) * request.num_choices
            self.running[request.request_id] = (request, [list(ids) for ids in resumed])
            if self.error is not None:
                delta = TokenDelta(
                    request_id=request.request_id, choice_index=0, epoch=request.epoch, first_token_index=0,
                    token_ids=(), text="", finish_reason="error", **self.error,
                )  # fmt: skip
                del self.running[request.request_id]
                self.hub.emit(request.router_id, (delta,))

    async def keep_alive(self, router_id: RouterId, wanted_traces: Sequence[str] = ()) -> None:
        self._check()
        self.wanted_traces += wanted_traces
        self.hub.hear(router_id)

    async def cancel(self, request_ids: Sequence[RequestId]) -> None:
        self._check()
        self.cancelled.extend(request_ids)
        for request_id in request_ids:
            self.hub.drop(request_id)
            self.running.pop(request_id, None)

    async def drain(self, draining: bool) -> None:
        self._check()
        self.draining = draining

    async def prepare_precision(self, namespace_id: NamespaceId, kv_precision: KVPrecision) -> None:
        self._check()
        if self.precision_error is not None:
            raise self.precision_error
        self.prepared.append((namespace_id, kv_precision))

    async def refresh_namespaces(self) -> None:
        """As if the pool had said what it was prepared for."""
        self._check()
        for namespace_id, kv_precision in self.prepared:
            fingerprint = "/".join(kv_precision).encode()
            self.namespaces[namespace_id] = NamespaceCard(fingerprint=fingerprint, block_bytes=128)
        self.card_no += 1
        self.hub.wake_all()

    async def stats(self) -> dict[str, Any]:
        self._check()
        histogram = {"bounds": [0.1, 1.0], "counts": [1, 2, 3], "sum": 9.5}
        zeros = dict.fromkeys(
            ("num_waiting", "num_parked", "load_tokens", "num_requests", "num_steps", "num_failed_steps",
             "num_preemptions", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_published_blocks"),
            0,
        )  # fmt: skip
        return {
            **zeros,
            "num_running": len(self.running),
            "is_fenced": False,
            "num_finished": {"stop": 4},
            **dict.fromkeys(
                ("step_s", "step_overhead_s", "turn_wait_s", "time_to_first_token_s", "inter_token_s"), histogram
            ),
        }

    # ---- commands of the test --------------------------------------------------------------------------------------

    async def step(self, count: int = 1) -> None:
        """One token for every choice of every request; a choice ends at max_tokens."""
        for _ in range(count):
            for request, choices in list(self.running.values()):
                deltas = []
                for index, ids in enumerate(choices):
                    if ids is None:
                        continue
                    position = len(ids)
                    token = token_of(request, index, position)
                    ids.append(token)
                    reason: FinishReason | None = "length" if len(ids) >= request.sampling.max_tokens else None
                    if reason is not None:
                        choices[index] = None
                    if self.drop_next_delta:
                        self.drop_next_delta = False
                        continue
                    deltas.append(self._delta(request, index, position, token, reason))
                if all(ids is None for ids in choices):
                    del self.running[request.request_id]
                self.hub.emit(request.router_id, tuple(deltas))
            await asyncio.sleep(0.005)

    def _delta(
        self, request: GenerationRequest, index: int, position: int, token: int, reason: FinishReason | None
    ) -> TokenDelta:
        logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
        if request.sampling.logprobs is not None:
            entry = [TokenLogprob(token_id=token, logprob=-0.5)]
            entry += [TokenLogprob(token_id=98 + i, logprob=-1.0 - i) for i in range(request.sampling.logprobs)]
            logprobs = (tuple(entry),)
        is_first = index == 0 and position == len((request.output_token_ids or ((),))[0])
        return TokenDelta(
            request_id=request.request_id, choice_index=index, epoch=request.epoch, first_token_index=position,
            token_ids=(token,), text=chr(token), logprobs=logprobs, finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens if is_first else None,
        )  # fmt: skip

    def kill(self) -> None:
        """As SIGKILL: every call fails, feeds break."""
        self.alive = False
        self.hub.close_all()
        self.running.clear()


class Cluster:
    """A router and the replicas it can see."""

    def __init__(self, config: RemoraConfig) -> None:
        self.replicas: dict[ReplicaId, FakeReplica] = {}
        self.core = RouterCore(config, self.replicas.__getitem__, router_id=RouterId("router-1"))

    async def add(self, *replicas: FakeReplica) -> None:
        """Lists replicas and waits until the router is connected to those alive."""
        for replica in replicas:
            self.replicas[replica.replica_id] = replica
        self.publish()
        await self.settle(
            lambda: all(
                connection.connected or not self.replicas[connection.replica_id].alive
                for connection in self.core.connections()
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
        #: Other nodes with traces.
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
