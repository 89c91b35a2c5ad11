"""Cuts the attention of a step into items for the blocks of a grid, on the host.

The cut decides which block computes what, never how: results do not depend on it (src/paged_attention.cu).
Shapes: T tokens of the step, S sequences, I items, E entries of row lists, P tokens whose chunks are merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from remora.kernels.batch import StepBatch

Int32 = NDArray[np.int32]

#: Positions whose scores are reduced together: CHUNK of paged_attention.cu.
CHUNK_TOKENS = 512
TILE_ROWS = (2, 4, 8, 16)
_MAX_TILE_ROWS = TILE_ROWS[-1]
#: A common prefix is worth a group from so many query rows on: fewer leave a tile half empty.
_MIN_GROUP_ROWS = 16
#: Parts of split tokens that are held at once, at most: bounds memory in long prompts.
MAX_PARTS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Arrays that paged_attention and merge_chunks read; see Item there for the columns of items."""

    items_I8: Int32
    row_token_E: Int32
    #: First part slot of each token; only read for split tokens.
    part_index_T: Int32
    split_tokens_P: Int32
    num_parts: int
    tile_rows: int
    num_groups: int


@dataclass(slots=True)
class _Cut:
    group: int
    tile_rows: int
    items: list[tuple[int, ...]] = field(default_factory=list)
    row_tokens: list[int] = field(default_factory=list)

    def add(self, tokens: Iterable[int], table_row: int, first_chunk: int, end_chunks: list[int], split: bool) -> None:
        """Items for these tokens; `end_chunks[i]` is where token i's chunks end. Split: one item a chunk."""
        first_row = len(self.row_tokens) * self.group
        self.row_tokens.extend(tokens)
        num_rows = len(end_chunks) * self.group
        for row in range(0, num_rows, self.tile_rows):
            count = min(self.tile_rows, num_rows - row)
            end = max(end_chunks[row // self.group : (row + count - 1) // self.group + 1])
            step = 1 if split else end - first_chunk
            for chunk in range(first_chunk, end, max(1, step)):
                self.items.append((table_row, first_row + row, count, chunk, chunk + step, int(split), 0, 0))


def tile_rows_for(num_rows: int) -> int:
    """The smallest tile that holds so many rows, or the largest there is."""
    return next((size for size in TILE_ROWS if size >= num_rows), _MAX_TILE_ROWS)


def _num_chunks(num_positions: int) -> int:
    return -(-num_positions // CHUNK_TOKENS)


def prefix_groups(batch: StepBatch, group: int, block_tokens: int) -> list[tuple[list[int], int]]:
    """Sequences that share at least one chunk of leading blocks, with the number of whole chunks they share."""
    columns = CHUNK_TOKENS // block_tokens
    candidates: dict[bytes, list[int]] = {}
    for row in range(batch.num_sequences):
        num_rows = int(batch.query_start_S[row + 1] - batch.query_start_S[row])
        if num_rows * group <= _MAX_TILE_ROWS and batch.context_len_S[row] - num_rows >= CHUNK_TOKENS:
            candidates.setdefault(batch.block_table_SB[row, :columns].tobytes(), []).append(row)
    groups = []
    for members in candidates.values():
        num_rows = sum(int(batch.query_start_S[row + 1] - batch.query_start_S[row]) for row in members)
        if len(members) < 2 or num_rows * group < _MIN_GROUP_ROWS:
            continue
        shared = min(
            int(batch.context_len_S[row] - (batch.query_start_S[row + 1] - batch.query_start_S[row])) // CHUNK_TOKENS
            for row in members
        )
        tables = batch.block_table_SB[members, : shared * columns]
        differing = np.flatnonzero((tables != tables[0]).any(axis=0))
        if differing.size:
            shared = int(differing[0]) // columns
        groups.append((members, shared))
    return groups


def plan_attention(
    batch: StepBatch,
    *,
    group: int,
    num_kv_heads: int,
    block_tokens: int,
    num_processors: int,
    group_prefixes: bool = True,
) -> AttentionPlan:
    """Tiles of query rows; split into chunks where there are too few tiles to keep the device busy; one pass over a
    common prefix for all that share it. `group` is query heads per kv head."""
    starts = batch.query_start_S
    sequence_rows = [int(starts[row + 1] - starts[row]) * group for row in range(batch.num_sequences)]
    groups = prefix_groups(batch, group, block_tokens) if group_prefixes else []
    tile_rows = tile_rows_for(max([0, *sequence_rows, *([_MAX_TILE_ROWS] if groups else [])]))
    num_tiles = sum(-(-rows // tile_rows) for rows in sequence_rows)
    is_idle = num_tiles * num_kv_heads < 2 * num_processors
    own_first_chunk: dict[int, int] = {}
    cut = _Cut(group, tile_rows)
    for members, shared in groups:
        members_tokens = [token for row in members for token in range(starts[row], starts[row + 1])]
        cut.add(members_tokens, members[0], 0, [shared] * len(members_tokens), True)
        own_first_chunk.update(dict.fromkeys(members, shared))
    part_index = np.zeros(batch.num_tokens, np.int32)
    split_tokens: list[int] = []
    num_parts = 0
    for row in range(batch.num_sequences):
        tokens = range(int(starts[row]), int(starts[row + 1]))
        end_chunks = [_num_chunks(int(position) + 1) for position in batch.positions_T[tokens.start : tokens.stop]]
        wanted = sum(end_chunks)
        split = row in own_first_chunk or (is_idle and end_chunks[-1] > 1 and num_parts + wanted <= MAX_PARTS)
        if split:
            split_tokens.extend(tokens)
            for token, count in zip(tokens, end_chunks, strict=True):
                part_index[token] = num_parts
                num_parts += count
        cut.add(tokens, row, own_first_chunk.get(row, 0), end_chunks, split)
    # Long items first: what starts last should be short.
    items = np.array(sorted(cut.items, key=lambda item: item[3] - item[4]), np.int32).reshape(-1, 8)
    return AttentionPlan(
        items_I8=items,
        row_token_E=np.array(cut.row_tokens, np.int32),
        part_index_T=part_index,
        split_tokens_P=np.array(split_tokens, np.int32),
        num_parts=num_parts,
        tile_rows=tile_rows,
        num_groups=len(groups),
    )


def plan_decode_graph(*, num_sequences: int, max_context_len: int, group: int) -> AttentionPlan:
    """A plan for one row a sequence that holds whatever the positions are, up to `max_context_len`: for CUDA graphs.

    Row s of the step is sequence s. Items of chunks that a row does not see end at once.
    """
    max_chunks = _num_chunks(max_context_len)
    tile_rows = tile_rows_for(group)
    items = [
        (row, row * group + first, min(tile_rows, group - first), chunk, chunk + 1, 1, 0, 0)
        for chunk in range(max_chunks)
        for row in range(num_sequences)
        for first in range(0, group, tile_rows)
    ]
    rows = np.arange(num_sequences, dtype=np.int32)
    return AttentionPlan(
        items_I8=np.array(items, np.int32).reshape(-1, 8),
        row_token_E=rows,
        part_index_T=rows * np.int32(max_chunks),
        split_tokens_P=rows,
        num_parts=num_sequences * max_chunks,
        tile_rows=tile_rows,
        num_groups=0,
    )
