"""Memory that steps take on a device besides weights and KV: a bound, so that it can be set aside."""

from __future__ import annotations

from remora.kernels.base import DecoderShape
from remora.kernels.cuda.attention_plan import MAX_PARTS

#: What torch's allocator and the libraries keep for themselves.
_LIBRARY_BYTES = 256 * 1024 * 1024
_FP32_BYTES = 4


def workspace_bytes(shape: DecoderShape, *, max_step_tokens: int, max_num_seqs: int) -> int:
    """Of the largest step, launched or captured, everything counted in fp32: activations of one layer at a time, parts
    of split attention, logits as they are multiplied, in fp32 and where captured steps leave them."""
    heads = shape.num_attention_heads
    per_token = 5 * shape.hidden_size + 3 * heads * shape.head_dim + 2 * shape.num_kv_heads * shape.head_dim
    per_token += 4 * shape.intermediate_size
    parts = MAX_PARTS * heads * (shape.head_dim + 2)
    logits = 4 * min(max_num_seqs, max_step_tokens) * shape.vocab_size if shape.has_head else 0
    # Captured steps have room of their own, which they share.
    values = 2 * (max_step_tokens * per_token + parts + logits)
    return values * _FP32_BYTES + _LIBRARY_BYTES
