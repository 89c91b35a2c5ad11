// What attention works on, as plain data that level files read: the items of a step, claimed by threads one by one, and
// one layer's call.
#pragma once
#include <cstdint>

namespace remora {

// Query rows of one kv head of a sequence are numbered (token, head in group): row = token * group + head.
struct AttentionItem {
  int32_t sequence, kv_head;
  int32_t first_row, num_rows;     // at most tile_rows
  int32_t first_chunk, end_chunk;  // chunks of ATTENTION_CHUNK positions that the item covers
  int32_t num_chunks;              // of the tile; more than end_chunk - first_chunk when the tile is split
  int32_t split;                   // which split tile, or -1 when the item covers all chunks of its tile
};

// Accesses to `cursors` and `done` are atomic.
struct AttentionWork {
  static constexpr int CURSOR_STRIDE = 16;  // each cursor has a cache line of its own

  const AttentionItem* items;
  int32_t num_items, tile_rows;
  int32_t* cursors;           // [num_layers * CURSOR_STRIDE] next item of a layer
  int32_t* done;              // [num_splits] finished chunks in the layer under way; the last finisher sets it to 0
  const int64_t* first_part;  // [num_splits] index of the part of chunk 0
  float* parts;               // results of single chunks of split tiles
  int64_t part_floats;        // tile_rows * (head_dim + 2)
};

struct AttentionCall {
  const float* q;    // [num_tokens][q_stride], rotated; query heads side by side
  int64_t q_stride;  // floats
  float* out;        // [num_tokens][out_stride]
  int64_t out_stride;
  float* lse;  // [num_tokens][num_heads], natural log; nullptr when not wanted
  int32_t layer, num_heads;
  float scale;  // multiplies q·k; positive
};

}  // namespace remora
