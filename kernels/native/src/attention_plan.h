// Cuts the attention of a step into items. The cut decides who computes what and never how: results do not depend on
// it. Compiled once, not per level.
//
// Chunks that several sequences have in common, block by block, are attended once for the rows of all of them (a
// cascade); the rest of each sequence follows in items of its own, and merging puts both together in order.
#pragma once
#include <cstddef>
#include <vector>

#include "attention_work.h"
#include "remora.h"

namespace remora {

// Owned by whoever owns the team; prepared before the team runs, it serves all layers of the step, each once.
class AttentionPlan {
 public:
  // `tile_rows` is what the level's attention_tile_rows() says. The result is valid until the next call.
  const AttentionWork& prepare(const Step& step, const Arena& arena, int32_t num_heads, int32_t tile_rows,
                               int32_t num_threads);

 private:
  void order_sequences(const Step& step, int32_t chunk_columns);
  void add_shared_chunks(const Step& step);
  void add_own_chunks(const Step& step, int32_t num_threads);
  // Items of every kv head for rows_[first, end), in tiles.
  void add_tiles(int32_t sequence, int32_t first_row, int32_t end_row, int32_t first_chunk, int32_t end_chunk,
                 bool to_parts);
  void split(size_t index);  // into items of one chunk each
  void number_parts(const Step& step);

  int32_t group_ = 0, num_kv_heads_ = 0, tile_rows_ = 0;
  std::vector<int32_t> order_;      // sequences, those with common leading blocks side by side
  std::vector<int32_t> common_;     // [place in order_] chunks in common with the next one
  std::vector<int32_t> first_row_;  // [place in order_, and one more] in rows_
  std::vector<char> to_parts_;      // [sequence]
  std::vector<int32_t> rows_, visible_;
  std::vector<AttentionItem> items_;
  std::vector<int32_t> cursors_;
  std::vector<int64_t> first_part_;
  std::vector<float> parts_;
  AttentionWork work_{};
};

}  // namespace remora
