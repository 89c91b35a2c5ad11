"""An engine over a real pool state with private memory, and a model that shows every mistake in a block table.

The fake decoder keeps each token's id in its KV slot and computes logits from the ids it reads back through the block
table: a wrong block, a lost prefix or a slot that was never computed changes the output.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from remora.cache_actors.local_delivery import Delivery
from remora.cache_actors.local_pool import LocalPool
from remora.cache_actors.port import BlockLoader, KVSource, OpenGate, TailBlocks
from remora.deployments.engine.base import EngineConfig, EngineNamespace, KVSibling
from remora.deployments.engine.engine import Engine
from remora.deployments.engine.messages import GenerationRequest, Grammar, SamplingParams, TokenDelta
from remora.deployments.models.token_pieces import byte_alphabet
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.kernels.base import Decoder, KVMemory
from remora.kernels.batch import StepBatch
from remora.kernels.layout import V_SIDE, BlockLayout
from remora.namespaces.edits import ContextOutcome, ContextPlan
from remora.namespaces.geometry import KVGeometry, KVPrecision, LayerGroup
from remora.namespaces.hashing import Derivation, chain_hashes, chain_root, sharing_domain
from remora.platform.base.clock import Clock, ManualClock
from remora.platform.base.errors import KernelError, NotFound
from remora.platform.base.ids import BlockHash, ModelId, NamespaceId, RequestId, RouterId

EOS = 256
VOCAB = 258
BLOCK_TOKENS = 4
FAKE_GEOMETRY = KVGeometry(
    groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=8, k_precision="fp32", v_precision="fp32"),),
    block_tokens=BLOCK_TOKENS,
)
FINGERPRINT = b"fingerprint of the fake"
#: What steps hold must not depend on how long they take here: prompts get one block or, as here, all that is left.
SETTINGS = {"debug": True, "publish_interval_s": 0.0, "extend_retry_s": 0.0, "prompt_share": 1.0}


@cache
def byte_tokenizer() -> ChatTokenizer:
    """Tokens 0..255 are bytes, 256 is <eos>, 257 <other>; both special."""
    by_byte = {byte: character for character, byte in byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocab={by_byte[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<other>", special=True)])
    return ChatTokenizer(tokenizer, special_tokens={"eos_token": "<eos>"}, eos_token_ids=[EOS])


def history_logits(history: NDArray[np.int32], vocab_size: int = VOCAB) -> NDArray[np.float32]:
    """A fixed function of all tokens up to a position; ends are unlikely."""
    digest = blake2b(np.ascontiguousarray(history, np.int32).tobytes(), digest_size=8).digest()
    logits = np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 2, vocab_size).astype(np.float32)
    logits[EOS:] = -30.0
    return logits


class FakeDecoder:
    """kernels.base.Decoder; `script` replaces the logits function, `trouble` may raise or change them."""

    name = "fake"
    batch_invariant = True

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Whatever has V in fp32."""

    def __init__(self) -> None:
        self.logits_of: Callable[[NDArray[np.int32]], NDArray[np.float32]] = history_logits
        #: Called with the history of each row; may raise.
        self.trouble: Callable[[NDArray[np.int32]], None] = lambda history: None
        #: Whether the last token of a history has K or V that is not finite.
        self.is_bad: Callable[[NDArray[np.int32]], bool] = lambda history: False
        #: Rows of each sequence, for every step.
        self.steps: list[list[int]] = []

    def forward(self, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        geometry = memory.geometry
        slots = memory.data[: len(memory.data) // geometry.block_bytes * geometry.block_bytes]
        # The first value of each token's V, in fp32: what moves with the token and is not rotated.
        first = BlockLayout(geometry).offset_bytes(block=0, layer=0, side=V_SIDE) // 4
        slots_BT = slots.reshape(-1, geometry.block_bytes).view(np.int32)[:, first::8][:, : geometry.block_tokens]
        self.steps.append(np.diff(batch.query_start_S[: batch.num_sequences + 1]).tolist())
        wanted = set(batch.logit_rows_R[: batch.num_logit_rows].tolist())
        out, written = [], set()
        for s in range(batch.num_sequences):
            start, end = batch.query_start_S[s], batch.query_start_S[s + 1]
            positions = batch.positions_T[start:end]
            context_len = int(batch.context_len_S[s])
            if positions.tolist() != list(range(context_len - (end - start), context_len)):
                raise KernelError("positions do not end at the context's end")
            blocks = batch.block_table_SB[s, : -(-context_len // geometry.block_tokens)]
            for position, token_id in zip(positions.tolist(), batch.token_ids_T[start:end].tolist(), strict=True):
                block, slot = int(blocks[position // geometry.block_tokens]), position % geometry.block_tokens
                if (block, slot) in written:
                    raise KernelError("two sequences write the same slot")
                written.add((block, slot))
                slots_BT[block, slot] = token_id
            history = slots_BT[blocks].reshape(-1)[:context_len].copy()
            batch.not_finite_S[s] = any(self.is_bad(history[: position + 1]) for position in positions)
            for row in range(start, end):
                self.trouble(history[: positions[row - start] + 1])
                if row in wanted:
                    out.append(self.logits_of(history[: positions[row - start] + 1]))
        return np.stack(out) if out else np.empty((0, VOCAB), np.float32)


@dataclass
class FakeModel:
    name: str = "fake"
    decoder: Decoder = field(default_factory=FakeDecoder)
    tokenizer: ChatTokenizer = field(default_factory=byte_tokenizer)
    max_model_len: int = 512
    eos_token_ids: tuple[int, ...] = (EOS,)
    vocab_size: int = VOCAB
    rope_inv_freq: NDArray[np.float32] | None = field(default_factory=lambda: np.ones(4, np.float32))


@dataclass
class Output:
    """What a client saw of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_message: str | None = None
    retry_after_s: float | None = None
    num_cached_tokens: int | None = None
    num_copied_tokens: int = 0
    num_converted_tokens: int = 0
    context: ContextOutcome | None = None


class Harness:
    """An engine, its pool, and a client that checks what it receives."""

    def __init__(
        self,
        *,
        model: Any = None,
        geometry: KVGeometry = FAKE_GEOMETRY,
        num_blocks: int = 64,
        num_extents: int = 1,
        namespaces: Mapping[str, int | None] | None = None,
        weights: Mapping[str, float] | None = None,
        precisions: Mapping[str, KVPrecision] | None = None,
        delivery: Delivery = "inline",
        seed: int = 0,
        clock: Clock | None = None,
        loader: BlockLoader | None = None,
        own_pool: KVSource | None = None,
        tails: TailBlocks | None = None,
        pool: LocalPool | None = None,
        fingerprint: bytes = FINGERPRINT,
        **config: Any,
    ) -> None:
        self.model = model if model is not None else FakeModel()
        self.geometry = geometry
        self.clock = clock if clock is not None else ManualClock(100.0)
        self.namespaces = dict(namespaces if namespaces is not None else {"ns": None})
        self.pool = pool or LocalPool.alone(
            geometry,
            num_blocks=num_blocks,
            namespaces=self.namespaces,
            fingerprint=fingerprint,
            clock=self.clock,
            delivery=delivery,
            seed=seed,
            num_extents=num_extents,
        )
        self._fingerprint = fingerprint
        #: What its namespaces take over.
        self.takes: dict[Derivation, KVGeometry] = {}
        self.weights = dict(weights or {})
        #: Of namespaces that have their own; may change at any time.
        self.precisions = dict(precisions or {})
        self._memories: dict[KVPrecision, KVMemory] = {}
        #: In which the pool may have KV of sessions, besides the one that their namespace has now.
        self.siblings: list[KVPrecision | None] = []
        self.outputs: dict[tuple[str, int], Output] = {}
        self.deltas: list[TokenDelta] = []
        self.fenced: list[str] = []
        self._ids = itertools.count(1)
        self.engine = Engine(
            self.model,
            self.pool.memory,
            self.pool,
            OpenGate(),
            self.clock,
            self._receive,
            find_namespace=self._find_namespace,
            config=EngineConfig(**{**SETTINGS, **config}),
            on_fenced=self.fenced.append,
            loader=loader,
            own_pool=own_pool,
            tails=tails,
        )

    def root(self, namespace: str) -> Any:
        return self.root_in(namespace, self.precisions.get(namespace))

    def root_in(self, namespace: str, precision: KVPrecision | None) -> Any:
        return chain_root(self.fingerprint_in(precision), sharing_domain(NamespaceId(namespace), "", ""))

    def fingerprint(self, namespace: str) -> bytes:
        return self.fingerprint_in(self.precisions.get(namespace))

    def fingerprint_in(self, precision: KVPrecision | None) -> bytes:
        return self._fingerprint if precision is None else self._fingerprint + "/".join(precision).encode()

    def _memory(self, namespace: str) -> KVMemory | None:
        precision = self.precisions.get(namespace)
        if precision is None:
            return None
        if precision not in self._memories:
            geometry = self.geometry.with_precision(precision)
            self._memories[precision] = self.pool.add_format(geometry, self.fingerprint(namespace))
        return self._memories[precision]

    def _find_namespace(self, namespace_id: NamespaceId) -> EngineNamespace:
        if namespace_id not in self.namespaces:
            raise NotFound(f"no namespace {namespace_id}")
        return EngineNamespace(
            root=self.root(namespace_id),
            fingerprint=self.fingerprint(namespace_id),
            weight=self.weights.get(namespace_id, 1.0),
            memory=self._memory(namespace_id),
            takes=self.takes,
            siblings=tuple(
                KVSibling(
                    geometry=self.geometry if each is None else self.geometry.with_precision(each),
                    fingerprint=self.fingerprint_in(each),
                    root=self.root_in(namespace_id, each),
                )
                for each in self.siblings
                if each != self.precisions.get(namespace_id)
            ),
        )

    def _receive(self, router_id: RouterId, deltas: tuple[TokenDelta, ...]) -> None:
        for delta in deltas:
            self.deltas.append(delta)
            output = self.outputs.setdefault((delta.request_id, delta.choice_index), Output())
            assert output.finish_reason is None, "a delta behind the end"
            assert delta.first_token_index == len(output.token_ids), "a gap or a repeat"
            assert not delta.logprobs or len(delta.logprobs) == len(delta.token_ids)
            delta.text.encode()
            output.token_ids.extend(delta.token_ids)
            output.logprobs.extend(delta.logprobs)
            output.text += delta.text
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            output.error, output.error_message = delta.error, delta.error_message
            output.retry_after_s = delta.retry_after_s
            output.context = delta.context
            if delta.num_cached_tokens is not None:
                assert output.num_cached_tokens is None, "cached tokens are reported once"
                output.num_cached_tokens = delta.num_cached_tokens
                output.num_copied_tokens = delta.num_copied_tokens
                output.num_converted_tokens = delta.num_converted_tokens

    # ---- a client

    def request(
        self,
        prompt: str | list[int],
        *,
        request_id: str | None = None,
        namespace: str = "ns",
        n: int = 1,
        grammar: Grammar | None = None,
        priority: int = 0,
        timeout_s: float = 60.0,
        given: tuple[tuple[int, ...], ...] = (),
        context: ContextPlan | None = None,
        source: KVSource | None = None,
        kept: int = 0,
        **sampling: Any,
    ) -> GenerationRequest:
        token_ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        return GenerationRequest(
            request_id=RequestId(request_id or f"r{next(self._ids)}"),
            router_id=RouterId("router"),
            model_id=ModelId("model"),
            namespace_id=NamespaceId(namespace),
            prompt_token_ids=tuple(token_ids),
            block_hashes=() if context else self.hashes(namespace, token_ids),
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
            num_choices=n,
            grammar=grammar,
            priority=priority,
            queue_timeout_s=timeout_s,
            output_token_ids=given,
            context=context,
            kv_source=source,
            num_kept_tokens=kept,
        )

    def hashes(self, namespace: str, token_ids: list[int]) -> tuple[BlockHash, ...]:
        return tuple(chain_hashes(self.root(namespace), token_ids, self.geometry.block_tokens))

    def submit(self, prompt: str | list[int], **options: Any) -> str:
        request = self.request(prompt, **options)
        for choice_index in range(max(1, request.num_choices)):
            given = request.output_token_ids[choice_index] if choice_index < len(request.output_token_ids) else ()
            self.outputs[request.request_id, choice_index] = Output(token_ids=list(given))
        self.engine.submit(request)
        return request.request_id

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(RequestId(request_id))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.check_integrity()
            self.pool.device.state.check_integrity()

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Steps, and lets threads beside the engine come to their turn."""
        deadline_s = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline_s
            self.step()
            time.sleep(0.0005)

    @property
    def is_done(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs.values())

    def finish(self, max_steps: int = 3000) -> dict[tuple[str, int], Output]:
        """Steps until every choice has ended."""
        for _ in range(max_steps):
            if self.is_done:
                return self.outputs
            self.step()
            self.pool.deliver_answers()
            self.pool.deliver_events()
        raise AssertionError(f"not done after {max_steps} steps: {self.engine.stats()}")

    def run(self, prompt: str | list[int], **options: Any) -> Output:
        """One request, alone in the engine from here on."""
        request_id = self.submit(prompt, **options)
        self.finish()
        return self.outputs[request_id, 0]

    def settle(self) -> None:
        """Lets answers arrive that are still on their way, and the engine read them."""
        for _ in range(20):
            time.sleep(0.002 if self.pool.has_threads else 0.0)
            self.engine.step()

    @property
    def num_referenced_blocks(self) -> int:
        return self.pool.device.state.describe().num_referenced_blocks

    def close(self) -> None:
        self.engine.stop()
        self.pool.close()


def expected_greedy(prompt: str | list[int], count: int) -> list[int]:
    """What the fake model says, computed without an engine."""
    history = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    first = len(history)
    for _ in range(count):
        history.append(int(history_logits(np.array(history, np.int32)).argmax()))
    return history[first:]


def rolled(prompt: list[int], count: int, *, limit: int, keep: int) -> tuple[list[int], list[int]]:
    """What the fake model says with a context that rolls, and what is left of the context; without an engine."""
    context, waiting, said = [], list(prompt), []
    while len(said) < count:
        if len(context) == limit:
            del context[keep : keep + max(1, (limit - keep) // 2)]
        context.append(waiting.pop(0))
        if not waiting:
            waiting.append(int(history_logits(np.array(context, np.int32)).argmax()))
            said.append(waiting[0])
    return said, context
