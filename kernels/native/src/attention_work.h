// What attention works on, as plain data that level files read: the items of a step, claimed by threads one by one, and
// one layer's call.
#pragma once
#include <cstdint>

namespace remora {

// Some query rows of one kv head against some chunks of ATTENTION_CHUNK positions. Rows are numbered (token, head in
// group): row = token * group + head in group. The rows of an item may be those of several sequences: then these have
// the blocks of its chunks in common, and every row sees all of them.
struct AttentionItem {
  int32_t sequence, kv_head;       // whose row of the block table is read
  int32_t first_row, num_rows;     // in AttentionWork::rows; at most tile_rows
  int32_t first_chunk, end_chunk;
  int32_t to_parts;                // the result of each chunk goes to `parts`; else these chunks are all there are
  int64_t cost;                    // about proportional to the time that it takes
};

struct AttentionWork {
  static constexpr int CURSOR_STRIDE = 16;  // each cursor has a cache line of its own
  static constexpr int PART_SPARE = 16;     // floats behind the values of a part: maximum, sum, and up to a cache line

  const AttentionItem* items;
  int32_t num_items, tile_rows;
  const int32_t* rows;        // [num_tokens * group]; of a tile they ascend in what they see
  int32_t* cursors;           // [num_layers * CURSOR_STRIDE] next item of a layer; accesses are atomic
  const int64_t* first_part;  // [num_tokens] part of the token's chunk 0, in parts of all heads; -1: written whole
  float* parts;               // [part][num_heads][head_dim + PART_SPARE]
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
