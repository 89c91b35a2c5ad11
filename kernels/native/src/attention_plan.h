// Cuts the attention of a step into items. The cut decides who computes what and never how: results do not depend on
// it. Compiled once, not per level.
#pragma once
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
  int64_t split_large_tiles(int32_t num_threads);  // returns the number of parts

  std::vector<AttentionItem> items_, whole_tiles_;
  std::vector<int32_t> cursors_, done_;
  std::vector<int64_t> first_part_;
  std::vector<float> parts_;
  AttentionWork work_{};
};

}  // namespace remora
