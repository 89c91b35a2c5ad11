"""A replica without an engine, Ray or a model: says one token per step and choice, on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from remora.deployments.engine.messages import (
    FeedMessage,
    FinishReason,
    FreezeOrder,
    GenerationRequest,
    Handover,
    LoadReport,
    Resumption,
    TokenDelta,
    TokenLogprob,
)
from remora.deployments.feed import FeedHub
from remora.deployments.model_card import ModelCard, NamespaceCard
from remora.namespaces.geometry import KVGeometry, KVPrecision, LayerGroup
from remora.namespaces.quantise_commands import KVFormat, Quantise
from remora.platform.base.errors import RemoraError, ReplicaLeaving, Unavailable
from remora.platform.base.ids import LeaseId, ModelId, NamespaceId, PoolId, ReplicaId, RequestId, RouterId


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
        #: Serve does not list it any more: no call reaches it, and its feed goes on.
        self.leaving = False
        self.running: dict[RequestId, tuple[GenerationRequest, list[list[int] | None]]] = {}
        #: Of those: attempts that wait for their resumption, and those that were stopped.
        self.standing_by: set[RequestId] = set()
        self.stopped: set[RequestId] = set()
        #: A freeze comes in the middle of a step, whose token is said before what is handed over.
        self.is_in_step = False
        self.resumptions: list[Resumption] = []
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[RequestId] = []
        self.num_submit_calls = 0
        self.wanted_traces: list[str] = []
        #: What it says it has found in the cache.
        self.num_cached_tokens = 4
        self.waiting_tokens = self.parked_tokens = 0
        #: Of those, what it says has come from the other pool, if it was told of one.
        self.num_copied_tokens = self.num_converted_tokens = 0
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
            load=self.load,
            card_no=lambda: self.card_no,
            heartbeat_s=heartbeat_s,
        )

    def load(self) -> LoadReport:
        """What runs, and what the test says that waits."""
        running = sum(len(request.prompt_token_ids) for request, _ in self.running.values())
        waiting = self.waiting_tokens + self.parked_tokens
        return LoadReport(load_tokens=running + waiting, waiting_tokens=waiting, parked_tokens=self.parked_tokens)

    def _drop(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def _check(self) -> None:
        if not self.alive:
            raise Unavailable(f"{self.replica_id} is dead")

    def _check_listed(self) -> None:
        self._check()
        if self.leaving:
            raise ReplicaLeaving(f"{self.replica_id} is not listed")

    # ---- ReplicaLink ---------------------------------------------------------------------------------------------

    async def describe(self) -> ModelCard:
        self._check_listed()
        return ModelCard(
            replica_id=self.replica_id,
            model_id=self.model_id,
            pool_id=self.pool_id,
            pool_actor_name=f"pool-{self.pool_id}",
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
        self._check_listed()
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
            elif request.standby_of is not None:
                self.standing_by.add(request.request_id)

    async def freeze(self, orders: Sequence[FreezeOrder]) -> None:
        self._check_listed()
        for order in orders:
            if order.request_id not in self.running:
                continue
            request, choices = self.running[order.request_id]
            if self.is_in_step:
                self._advance(request, choices)
                if order.request_id not in self.running:
                    continue
            self.stopped.add(order.request_id)
            handover = Handover(
                num_tokens=order.num_tokens, tokens_hash=b"", fingerprint=b"", node_id="n", arena_path=self.pool_id
            )
            self.hub.emit(request.router_id, (self._word(request, len(choices[0] or ()), handover=handover),))

    async def resume(self, resumptions: Sequence[Resumption]) -> None:
        self._check_listed()
        for resumption in resumptions:
            self.resumptions.append(resumption)
            if resumption.request_id in self.standing_by:
                self.standing_by.remove(resumption.request_id)
                choice = self.running[resumption.request_id][1][0]
                assert choice is not None
                choice.extend(resumption.token_ids)

    async def keep_alive(self, router_id: RouterId, wanted_traces: Sequence[str] = ()) -> None:
        self._check_listed()
        self.wanted_traces += wanted_traces
        self.hub.hear(router_id)

    async def cancel(self, request_ids: Sequence[RequestId]) -> None:
        self._check_listed()
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

    async def quantise_command(self, namespace_id: NamespaceId) -> Quantise:
        """From bf16, which it has besides, into what it was prepared for last."""
        self._check()
        geometry = KVGeometry(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16),), block_tokens=4)
        target = dict(self.prepared).get(namespace_id, geometry.kv_precision)
        formats = [
            KVFormat(geometry=geometry.with_precision(each), fingerprint="/".join(each).encode())
            for each in (target, geometry.kv_precision)
        ]
        sources = tuple(each for each in formats[1:] if each != formats[0])
        return Quantise(lease_id=LeaseId(""), namespace_id=namespace_id, target=formats[0], sources=sources)

    async def stats(self) -> dict[str, Any]:
        self._check()
        histogram = {"bounds": [0.1, 1.0], "counts": [1, 2, 3], "sum": 9.5}
        zeros = dict.fromkeys(
            ("num_waiting", "num_parked", "load_tokens", "num_requests", "num_steps", "num_failed_steps",
             "num_preemptions", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_published_blocks",
             "num_copied_tokens", "num_converted_tokens", "num_damaged_blocks", "turn_s"),
            0,
        )  # fmt: skip
        return {
            **zeros,
            "num_running": len(self.running),
            "is_fenced": False,
            "num_finished": {"stop": 4},
            "stages": (),
            **dict.fromkeys(
                ("step_s", "step_overhead_s", "turn_wait_s", "time_to_first_token_s", "inter_token_s"), histogram
            ),
        }

    # ---- commands of the test --------------------------------------------------------------------------------------

    async def step(self, count: int = 1) -> None:
        """One token for every choice of every request; a choice ends at max_tokens."""
        for _ in range(count):
            for request, choices in list(self.running.values()):
                if request.request_id in self.standing_by:
                    self.hub.emit(request.router_id, (self._word(request, len(choices[0] or ()), is_ready=True),))
                    continue
                if request.request_id not in self.stopped:
                    self._advance(request, choices)
            await asyncio.sleep(0.005)

    def _advance(self, request: GenerationRequest, choices: list[list[int] | None]) -> None:
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
            num_copied_tokens=self.num_copied_tokens if is_first and request.kv_source is not None else 0,
            num_converted_tokens=self.num_converted_tokens if is_first and request.kv_source is not None else 0,
        )  # fmt: skip

    def _word(self, request: GenerationRequest, position: int, **word: Any) -> TokenDelta:
        return TokenDelta(
            request_id=request.request_id, choice_index=0, epoch=request.epoch, first_token_index=position,
            token_ids=(), text="", **word,
        )  # fmt: skip

    def kill(self) -> None:
        """As SIGKILL: every call fails, feeds break."""
        self.alive = False
        self.hub.close_all()
        self.running.clear()
