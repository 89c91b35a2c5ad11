"""KV of another model or precision that a session brings: used as it is, named for what it is, and lost well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_support import BLOCK_TOKENS, FAKE_GEOMETRY, FakeDecoder, FakeModel, Harness, Output, history_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_kv_loads import Source

from remora.cache_actors.block_loader import ThreadedLoader
from remora.cache_actors.port import KVSource, OtherChain
from remora.kernels.base import KVMemory
from remora.kernels.batch import StepBatch
from remora.namespaces.commands import Trim
from remora.namespaces.edits import ContextPlan, Edits, derived
from remora.namespaces.hashing import Derivation
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import LeaseId, NamespaceId, PoolId

PROMPT = [number % 250 for number in range(83)]
NUM_FULL = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
MARK = 1000
ADOPTED = Derivation(kind="adopted", fingerprint=b"model a")
NARROW = ("int8", "fp32")


class Marking(FakeDecoder):
    """Its KV shows that it was its own: what it says depends on whose KV it reads."""

    def forward(self, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        batch.token_ids_T += MARK
        try:
            return super().forward(batch, memory)
        finally:
            batch.token_ids_T -= MARK


def expected(num_taken: int, count: int = 8, prompt: list[int] = PROMPT, start: int = 0) -> list[int]:
    """What the second model says behind KV [start, num_taken) of the first and its own of the rest."""
    ids, kv = list(prompt), [token + MARK for token in prompt]
    kv[start:num_taken] = prompt[start:num_taken]
    for _ in range(count):
        ids.append(int(history_logits(np.array(kv, np.int32)).argmax()))
        kv.append(ids[-1] + MARK)
    return ids[len(prompt) :]


class Models:
    """Two models with a pool each; the second takes over what the first has, two blocks at a time."""

    def __init__(self, **second: Any) -> None:
        self.first = Harness(fingerprint=b"model a", namespaces={"a": None})
        self.source = Source(self.first.pool.device)
        loader = ThreadedLoader(lambda _: self.source, piece_bytes=2 * FAKE_GEOMETRY.block_bytes)
        model = FakeModel(decoder=Marking())
        self.second = Harness(
            model=model, fingerprint=b"model b", namespaces={"b": None}, loader=loader, num_extents=8, **second
        )
        self.second.takes = {ADOPTED: FAKE_GEOMETRY}

    def other(self, *, first: int = 0, derivation: Derivation = ADOPTED, num_tokens: int = NUM_FULL) -> KVSource:
        """What the first model has of the prompt."""
        chain = OtherChain(
            derivation=derivation,
            namespace_id=NamespaceId("a"),
            hashes=self.first.hashes("a", PROMPT[:num_tokens]),
            first=first // BLOCK_TOKENS,
        )
        return KVSource(pool_id=PoolId("first"), actor_name="pool-first", other=chain)

    def run(self, edits: Edits, source: KVSource | None = None, prompt: list[int] = PROMPT, **options: Any) -> Output:
        context = ContextPlan(edits=edits) if edits else None
        request_id = self.second.submit(prompt, namespace="b", context=context, source=source, **options)
        self.second.step_until(lambda: self.second.is_done)
        return self.second.outputs[request_id, 0]

    def forget(self) -> None:
        """The second model's pool loses everything."""
        device = self.second.pool.device
        device.apply(Trim(lease_id=LeaseId(""), namespace_id=NamespaceId("b"), target_bytes=0))

    def close(self) -> None:
        # A load that was given up lets its blocks go from its own thread.
        self.second.step_until(lambda: not self.first.pool.device.state.needs_time)
        for each in (self.first, self.second):
            each.pool.device.state.check_integrity()
            assert each.num_referenced_blocks == 0
            each.close()


@pytest.fixture
def models() -> Iterator[Models]:
    made = Models()
    made.first.run(PROMPT, namespace="a")
    yield made
    made.source.spoil = lambda first, into_NB: None
    made.close()


TAKEN = derived((), ADOPTED, 0, NUM_FULL)


def test_a_session_goes_on_behind_the_other_models_kv_and_finds_it_again(models: Models) -> None:
    output = models.run(TAKEN, models.other())
    assert output.token_ids == expected(NUM_FULL) != expected(0)
    assert (output.num_copied_tokens, output.num_cached_tokens, output.context) == (NUM_FULL, NUM_FULL, None)
    again = models.run(TAKEN)
    assert (again.token_ids, again.num_copied_tokens, again.num_cached_tokens) == (output.token_ids, 0, NUM_FULL)
    log = [*PROMPT, *output.token_ids]
    longer = models.run(TAKEN, prompt=log)
    assert longer.num_cached_tokens == (len(log) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, "and what was computed behind"
    assert models.source.num_holds == 1


def test_strangers_of_the_model_get_a_miss_and_what_is_right(models: Models) -> None:
    models.run(TAKEN, models.other())
    stranger = models.run(())
    assert (stranger.num_cached_tokens, stranger.token_ids) == (0, expected(0))
    assert models.run(TAKEN).num_cached_tokens == NUM_FULL, "nor do they take the session's place"
    elsewhere = derived((), Derivation(kind="adopted", fingerprint=b"model c"), 0, NUM_FULL)
    assert models.run(elsewhere).num_cached_tokens == NUM_FULL, "plain, because nothing of model c was there"


def test_its_own_kv_comes_first_and_the_others_goes_on_behind_it(models: Models) -> None:
    models.run((), prompt=PROMPT[:41])
    output = models.run(derived((), ADOPTED, 40, NUM_FULL), models.other(first=40))
    assert output.token_ids == expected(NUM_FULL, start=40)
    assert (output.num_cached_tokens, output.num_copied_tokens) == (NUM_FULL, NUM_FULL - 40)


def test_kv_is_not_taken_over_when_its_own_before_it_has_gone(models: Models) -> None:
    output = models.run(derived((), ADOPTED, 40, NUM_FULL), models.other(first=40))
    assert (output.token_ids, output.num_copied_tokens) == (expected(0), 0)
    assert output.context is not None
    assert output.context.edits == (), "all of it is plain"


def test_what_the_model_does_not_take_is_computed(models: Models) -> None:
    models.second.takes = {}
    output = models.run(TAKEN, models.other())
    assert (output.token_ids, models.source.num_holds) == (expected(0), 0)


def test_kv_that_was_taken_over_and_is_lost_is_computed_and_plain(models: Models) -> None:
    models.run(TAKEN, models.other())
    models.forget()
    output = models.run(TAKEN)
    assert output.token_ids == expected(0)
    assert output.context is not None
    assert output.context.edits == ()
    assert models.run(()).num_cached_tokens == NUM_FULL


def test_kv_of_another_precision_comes_converted(models: Models) -> None:
    geometry = FAKE_GEOMETRY.with_precision(NARROW)  # type: ignore[arg-type]
    narrow = Harness(geometry=geometry, fingerprint=b"model b narrow", namespaces={"a": None})
    narrow.run(PROMPT, namespace="a")
    models.source.device = narrow.pool.device
    converted = Derivation(kind="converted", fingerprint=b"model b narrow")
    models.second.takes = {converted: geometry}
    chain = OtherChain(
        derivation=converted,
        namespace_id=NamespaceId("a"),
        hashes=narrow.hashes("a", PROMPT[:NUM_FULL]),
        first=0,
    )
    source = KVSource(pool_id=PoolId("narrow"), actor_name="pool-narrow", other=chain)
    output = models.run(derived((), converted, 0, NUM_FULL), source)
    assert output.token_ids == expected(NUM_FULL)
    assert (output.num_converted_tokens, output.num_copied_tokens, output.num_cached_tokens) == (NUM_FULL, 0, NUM_FULL)
    narrow.close()


@settings(max_examples=40, deadline=None)
@given(
    fault=st.sampled_from(["none", "dead", "raises", "flips", "cancel", "short"]),
    at=st.integers(0, 12),
    num_tokens=st.integers(1, 83),
)
def test_deaths_on_the_way_leave_tokens_of_whatever_kv_came_and_names_that_say_so(
    fault: str, at: int, num_tokens: int
) -> None:
    models = Models()
    models.first.run(PROMPT[: 4 * at + 1] if fault == "short" else PROMPT, namespace="a")
    prompt = PROMPT[:num_tokens]
    end = (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def spoil(first: int, into_NB: NDArray[np.uint8]) -> None:
        if first < at or fault not in ("raises", "flips", "cancel"):
            return
        if fault == "raises":
            raise Unavailable("gone")
        if fault == "flips":
            into_NB[-1, at] ^= 0x80
        else:
            models.second.cancel("r")

    models.source.is_dead = fault == "dead"
    models.source.spoil = spoil
    edits = derived((), ADOPTED, 0, end) if end else ()
    output = models.run(edits, models.other(num_tokens=end), prompt, request_id="r", max_tokens=6)
    if output.finish_reason != "abort":
        taken = output.num_copied_tokens
        assert output.token_ids == expected(taken, 6, prompt)
        left = edits if output.context is None else output.context.edits
        assert left == (derived((), ADOPTED, 0, taken) if taken else ())
        again = models.run(left, None, prompt, max_tokens=6)
        assert (again.token_ids, again.num_cached_tokens, again.context) == (output.token_ids, end, None)
    models.source.spoil = lambda first, into_NB: None
    models.close()
