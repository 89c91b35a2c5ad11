"""One model's engine in this process, without Ray and HTTP: its caller makes the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from remora.cache_actors.local_pool import LocalPool
from remora.cache_actors.port import OpenGate
from remora.deployments.engine.base import EngineConfig, EngineNamespace
from remora.deployments.engine.engine import Engine
from remora.deployments.engine.messages import GenerationRequest, SamplingParams, TokenDelta
from remora.deployments.models.loaded_model import LoadedModel
from remora.namespaces.hashing import chain_hashes, chain_root, sharing_domain
from remora.platform.base.clock import SystemClock
from remora.platform.base.errors import RemoraError
from remora.platform.base.ids import ModelId, NamespaceId, RequestId, RouterId

_NAMESPACE = NamespaceId("bench")
#: Steps that compute nothing for so long mean that the engine cannot go on.
_STALL_S = 60.0


class LoneEngine:
    """Greedy, end of text ignored. `on_deltas` is told of each step's deltas within `step`."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_step_tokens: int,
        prompt_share: float = 1.0,
        on_deltas: Callable[[Sequence[TokenDelta]], None],
    ) -> None:
        self._model = model
        self._on_deltas = on_deltas
        pool = LocalPool.alone(
            model.geometry, num_blocks=num_blocks, namespaces={_NAMESPACE: None}, fingerprint=model.fingerprint
        )
        self._root = root = chain_root(model.fingerprint, sharing_domain(_NAMESPACE, "", ""))
        self._engine = Engine(
            model,
            pool.memory,
            pool,
            OpenGate(),
            SystemClock(),
            lambda _router_id, deltas: self._hear(deltas),
            find_namespace=lambda _: EngineNamespace(root=root),
            config=EngineConfig(max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens, prompt_share=prompt_share),
        )
        self._failure: str | None = None
        self._last_s = time.perf_counter()

    def submit(self, name: str, token_ids: tuple[int, ...], max_tokens: int) -> None:
        self._engine.submit(
            GenerationRequest(
                request_id=RequestId(name),
                router_id=RouterId("bench"),
                model_id=ModelId(self._model.name),
                namespace_id=_NAMESPACE,
                prompt_token_ids=token_ids,
                block_hashes=tuple(chain_hashes(self._root, token_ids, self._model.geometry.block_tokens)),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            )
        )

    def step(self) -> None:
        """Raises RemoraError when a sequence ended early, or nothing has been computed for long."""
        if self._engine.step():
            self._last_s = time.perf_counter()
        elif time.perf_counter() - self._last_s > _STALL_S:
            raise RemoraError(f"the engine computes nothing: {self._engine.stats()}")
        if self._failure is not None:
            raise RemoraError(self._failure)

    def close(self) -> None:
        self._engine.stop()

    def _hear(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason in ("error", "abort"):
                reason = delta.error_message or delta.finish_reason
                self._failure = self._failure or f"{delta.request_id} ended early: {reason}"
        self._on_deltas(deltas)
