"""Does a transformers model give its own logits when its attention is paged? Asked of every model before it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remora.deployments.models.refusals import refuse
from remora.deployments.models.transformers_decoder import ATTENTION_NAME, TransformersDecoder
from remora.kernels.batch import StepBatch
from remora.namespaces.geometry import KVGeometry

_NUM_TOKENS, _CUT = 12, 7
#: Relative error (norm of the difference by norm of the logits); what a wrong mask or position gives is far above.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class _PrivateMemory:
    data: NDArray[np.uint8]
    geometry: KVGeometry


def check_paged_logits(name: str, model: Any, geometry: KVGeometry, *, num_threads: int) -> None:
    """Runs a prompt in two chunks beside another sequence and compares with the model's own attention.

    `geometry` in fp32, so that only the model's own precision is between the two. Raises ModelError by name when the
    logits differ: the architecture then keeps state or takes positions from somewhere that steps cannot reach.
    """
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    tokens = np.random.default_rng(0).integers(1, vocab_size, _NUM_TOKENS).astype(np.int32)
    paged = _paged_logits(TransformersDecoder(model, geometry, num_threads), geometry, tokens)
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.from_numpy(tokens).long()[None]
            plain = model(input_ids=ids, use_cache=False).logits[0].to(torch.float32).numpy()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    error = float(np.linalg.norm(paged - plain) / max(float(np.linalg.norm(plain)), 1e-30))
    if not error <= _TOLERANCE[model.dtype]:
        refuse(
            name,
            str(model.config.model_type),
            f"with paged attention its logits are off by {error:.1%}; it depends on more than tokens, positions, KV.",
        )


def _paged_logits(decoder: TransformersDecoder, geometry: KVGeometry, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    columns = -(-_NUM_TOKENS // geometry.block_tokens)
    memory = _PrivateMemory(np.zeros(2 * columns * geometry.block_bytes, np.uint8), geometry)
    batch = StepBatch(max_tokens=2 * _NUM_TOKENS, max_sequences=2, max_blocks=columns)
    own, other = list(range(columns, 2 * columns)), list(range(columns))
    batch.add(tokens[::-1][:5], first_position=0, blocks=other, logits="none")
    batch.add(tokens[:_CUT], first_position=0, blocks=own, logits="all")
    first = decoder.forward(batch, memory).copy()
    batch.clear()
    batch.add(tokens[_CUT:], first_position=_CUT, blocks=own, logits="all")
    batch.add(tokens[:1], first_position=5, blocks=other, logits="none")
    return np.concatenate([first, decoder.forward(batch, memory)])
