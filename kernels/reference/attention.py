"""Paged attention over an arena, and the merge of partial results by their log-sum-exp.

Shapes: T query rows of one sequence, Q query heads, H kv heads, G = Q / H, C positions, D head_dim.
"""

from __future__ import annotations

import torch

from remora.kernels.layout import K_SIDE, V_SIDE
from remora.kernels.reference.kv_view import KVView

#: Query rows whose scores are held at once: bounds memory at long prompts.
_ROWS_AT_ONCE = 256


def paged_attention(
    kv: torch.Tensor | KVView,
    *,
    layer: int,
    q_TQD: torch.Tensor,
    blocks: torch.Tensor,
    context_len: int,
    scale: float,
    first_position: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence whose last T tokens are the query rows; decode is T = 1, extend any T.

    Row t stands at position `context_len - T + t` and sees the positions from `first_position` up to its own. Returns
    out_TQD and lse_TQ (natural log) in fp32; a row that sees nothing has output 0 and LSE -inf. Slots beyond
    `context_len` are never read. `kv` is the arena as kv_NL2HBD, or its view.
    """
    block_tokens = kv.layout.block_tokens if isinstance(kv, KVView) else kv.shape[4]
    first_column = first_position // block_tokens
    last_column = -(-context_len // block_tokens)
    used = blocks[first_column:last_column]
    num_rows, num_heads, head_dim = q_TQD.shape
    num_kv_heads = kv.layout.num_kv_heads if isinstance(kv, KVView) else kv.shape[3]
    start = first_column * block_tokens

    def gather(side: int) -> torch.Tensor:
        rows_nHBD = kv.read(side, layer, used) if isinstance(kv, KVView) else kv[used, layer, side]
        per_head = rows_nHBD.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        return per_head[:, first_position - start : context_len - start].to(torch.float32)

    k_HCD, v_HCD = gather(K_SIDE), gather(V_SIDE)
    position_C = torch.arange(first_position, context_len)
    out = torch.empty(num_rows, num_heads, head_dim)
    lse = torch.empty(num_rows, num_heads)
    for row in range(0, num_rows, _ROWS_AT_ONCE):
        q_tile = q_TQD[row : row + _ROWS_AT_ONCE].to(torch.float32)
        count = len(q_tile)
        q_HGTD = q_tile.view(count, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = torch.matmul(q_HGTD, k_HCD[:, None].transpose(-1, -2)) * scale
        row_position = torch.arange(count) + (context_len - num_rows + row)
        hidden = position_C[None, :] > row_position[:, None]
        scores.masked_fill_(hidden, float("-inf"))
        lse_HGT = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse_HGT.masked_fill(lse_HGT == float("-inf"), 0.0)[..., None])
        tile_HGTD = torch.matmul(weights, v_HCD[:, None])
        out[row : row + count] = tile_HGTD.permute(2, 0, 1, 3).reshape(count, num_heads, head_dim)
        lse[row : row + count] = lse_HGT.permute(2, 0, 1).reshape(count, num_heads)
    return out, lse


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins attention over two disjoint sets of positions: the result and LSE over their union, in fp32."""
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    return out_a * torch.exp(lse_a - finite)[..., None] + out_b * torch.exp(lse_b - finite)[..., None], lse
