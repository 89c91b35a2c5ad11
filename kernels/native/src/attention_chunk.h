// What the kernels of attention_pairs.cpp and attention_bytes.cpp have in common: where the tokens of a chunk lie, how
// they are fetched ahead, and the exponential. Level file header.
#pragma once
#include "attention_kernels.h"
#include "attention_tile.h"
#include "micro_kernels.h"

namespace remora::REMORA_LEVEL {

constexpr int PANEL_TOKENS = PANEL_COLUMNS, GROUP_TOKENS = BLOCK_COLUMNS;

// K or V of a chunk.
class ChunkSide {
 public:
  ChunkSide(const Tile& tile, const HeadBlocks& blocks, const HeadSide& side, int32_t chunk)
      : blocks_(blocks),
        side_(side),
        block_tokens_(tile.block_tokens),
        first_column_(static_cast<int64_t>(chunk) * ATTENTION_CHUNK / tile.block_tokens) {}

  int64_t row_bytes() const { return side_.row_bytes; }
  const uint8_t* bytes_of(int token) const {
    return side_.rows + block_of(token) + token % block_tokens_ * side_.row_bytes;
  }
  const uint16_t* rows_of(int token) const { return reinterpret_cast<const uint16_t*>(bytes_of(token)); }
  const uint16_t* scales_of(int token) const {
    return reinterpret_cast<const uint16_t*>(side_.scales + block_of(token)) + token % block_tokens_ * side_.num_scales;
  }

  // What is in the cache anyway: kernels always fetch.
  Prefetch nothing() const { return {reinterpret_cast<const uint8_t*>(blocks_.table), 0, 0}; }

  // The rows of a panel, as far as they lie side by side, for a kernel of `lines` lines to fetch on its way: bursts of
  // prefetches would keep the loads beside them waiting.
  Prefetch prefetch(int token, int num_tokens, int64_t lines) const {
    if (token >= num_tokens) return nothing();
    const int64_t bytes = (block_tokens_ < PANEL_TOKENS ? GROUP_TOKENS : PANEL_TOKENS) * side_.row_bytes;
    const int64_t half = round_up((bytes + 1) / 2, LINE_BYTES);
    return {bytes_of(token), (half + lines - 1) / lines, half};
  }

 private:
  int64_t block_of(int token) const {
    return blocks_.table[first_column_ + token / block_tokens_] * blocks_.block_bytes;
  }

  const HeadBlocks& blocks_;
  const HeadSide& side_;
  const int block_tokens_;
  const int64_t first_column_;
};

// 2^x for x <= 0, relative error below 3e-6: the weights have 8 or 15 bits. NaN stays NaN.
REMORA_INLINE vfloat exp2_of_score(vfloat x) {
  const vfloat clamped = max(splat(-126.0f), x);
  const vfloat shifted = clamped + splat(12582912.0f);  // 1.5 * 2^23 rounds to an integer
  const vfloat r = clamped - (shifted - splat(12582912.0f));
  vfloat p = splat(9.570101066e-3f);
  p = fma(p, r, splat(5.591786025e-2f));
  p = fma(p, r, splat(2.402474485e-1f));
  p = fma(p, r, splat(6.931218147e-1f));
  p = fma(p, r, splat(9.999992614e-1f));
  return p * (vfloat)(((vint)shifted << 23) + 0x3f800000);
}

}  // namespace remora::REMORA_LEVEL
