"""`remora bench batch` on a small model: its times belong to the tokens that it says."""

from __future__ import annotations

import types
from typing import Any

import pytest
from tiny_llama import LLAMA_GEOMETRY, tiny_llama

from remora.platform.base.errors import RemoraError
from remora.platform.cli.batch_load import BatchCase, run_batch


@pytest.fixture(scope="module")
def model() -> Any:
    tiny = tiny_llama("reference")
    return types.SimpleNamespace(
        **{name: getattr(tiny, name) for name in ("decoder", "vocab_size", "tokenizer", "name", "eos_token_ids")},
        max_model_len=tiny.max_model_len,
        rope_inv_freq=tiny.rope_inv_freq,
        geometry=LLAMA_GEOMETRY,
        fingerprint=b"tiny",
    )


@pytest.mark.parametrize("shared", [False, True])
def test_every_sequence_gets_its_tokens(model: Any, shared: bool) -> None:
    case = BatchCase(prompt_tokens=20, output_tokens=6, num_sequences=3, shared_prompt=shared)
    assert case.num_kv_tokens == (20 if shared else 60) + 18
    times = run_batch(model, case, max_step_tokens=16)
    assert times.prompt_s > 0
    assert times.output_s > 0
    # All have at least one token when the first part ends, and those that were ready first have more.
    assert 0 < times.output_tokens <= 3 * 5


def test_a_batch_that_the_engine_refuses_says_so(model: Any) -> None:
    with pytest.raises(RemoraError):
        run_batch(model, BatchCase(prompt_tokens=model.max_model_len + 1, output_tokens=4, num_sequences=1))
