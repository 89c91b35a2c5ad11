// K and V of integers in the order in which attention_bytes.cpp multiplies them, and the memory that it works in. Level
// file header.
//
// Lines have 16 columns of 4 bytes: 4 dims of 16 tokens of K, or 4 tokens of 16 dims of V.
#pragma once
#include "attention_chunk.h"
#include "linear_grouped.h"
#include "micro_grouped.h"

namespace remora::REMORA_LEVEL {
namespace {

constexpr int PASS_ROWS = 6;  // upper and lower bytes of each beside two lines: 24 sums
constexpr int SEGMENT_DIMS = 64;
constexpr int LARGEST_QUERY = 32767, QUERY_OFFSET_BITS = 15, LARGEST_WEIGHT = 32767;
static_assert(KV_INT4_GROUP == SEGMENT_DIMS, "a segment has one scale");
// Strides that do not share cache sets.
constexpr int64_t SCORE_STRIDE = ATTENTION_CHUNK + LANES, VALUE_LINES = ATTENTION_CHUNK / 4 + 1;
constexpr int64_t WEIGHT_STRIDE = 2 * ATTENTION_CHUNK + LINE_BYTES;

typedef int8_t vcodes __attribute__((vector_size(LANES), may_alias));

// What head_dim and the precisions of K and V make of a chunk. Dims are filled up with zeros to whole segments.
struct Shapes {
  explicit Shapes(const Tile& tile) : Shapes(tile.head_dim, tile.blocks.k.dtype, tile.blocks.v.dtype) {}
  Shapes(int64_t head_dim, Dtype k, Dtype v)
      : dims(round_up(head_dim, SEGMENT_DIMS)),
        segments(dims / SEGMENT_DIMS),
        key_scales(is_rotated(k) ? segments : 1),
        value_scales(is_rotated(v) ? segments : 1) {}

  int64_t dims, segments, key_scales, value_scales;  // scales of a token
};

// Rank-local memory of a tile.
struct BytesScratch {
  BytesScratch(uint8_t* memory, const Shapes& shapes) {
    const auto take = [&](int64_t count) {
      uint8_t* const part = memory + end;
      end += static_cast<size_t>(round_up(count, LINE_BYTES));
      return part;
    };
    const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
    keys = take(ATTENTION_CHUNK * shapes.dims);
    values = take(shapes.segments * 4 * VALUE_LINES * LINE_BYTES);
    weights = take(PASS_ROWS * WEIGHT_STRIDE);
    queries = take((MAX_TILE_ROWS + PASS_ROWS) * 2 * shapes.dims);
    codes = reinterpret_cast<int8_t*>(take(GROUP_TOKENS * shapes.dims));
    key_offsets = reinterpret_cast<int32_t*>(floats(shapes.key_scales * ATTENTION_CHUNK));
    key_scales = floats(shapes.key_scales * ATTENTION_CHUNK);
    value_scales = floats(shapes.value_scales * ATTENTION_CHUNK);
    scores = floats(shapes.key_scales * PASS_ROWS * SCORE_STRIDE);
    sums = reinterpret_cast<int32_t*>(floats(PASS_ROWS * shapes.dims));
    query_steps = floats(MAX_TILE_ROWS + PASS_ROWS);
  }

  size_t end = 0;
  uint8_t *keys, *values;  // [panel][scale][16-token group][4 dims], [segment][16 dims][4 tokens]: lines
  uint8_t *weights;        // [row][upper, lower][token], WEIGHT_STRIDE bytes a row
  uint8_t *queries;        // [row][upper, lower][dim]
  int8_t* codes;           // [16 tokens][dim]
  int32_t* key_offsets;    // [scale][token] what the 2^15 in Q's codes adds
  float *key_scales, *value_scales;  // [scale][token]
  float* scores;           // [scale of K][row][SCORE_STRIDE]: sums as int32, in plane 0 then scores, then weights
  int32_t* sums;           // [row][dim]
  float* query_steps;      // [row]
};

// A group of int4 codes, or of int5 codes if FIVE, of which `count` are in use; negated where `negates`.
template <bool FIVE>
REMORA_INLINE void unpack_group(const uint8_t* nibbles, const uint8_t* fifth_bits, int count, bool negates,
                                int8_t* codes) {
  constexpr int OFFSET = FIVE ? 16 : 8;
  uint64_t word = 0;
  if (FIVE) __builtin_memcpy(&word, fifth_bits, sizeof word);
#if !REMORA_EMULATE
  if (count == SEGMENT_DIMS) {
    const __m256i packed = load_as<__m256i>(nibbles);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(packed), _mm256_srli_epi16(packed, 4), 1);
    __m512i group = _mm512_and_si512(both, _mm512_set1_epi8(15));
    group = _mm512_sub_epi8(_mm512_mask_add_epi8(group, word, group, _mm512_set1_epi8(16)), _mm512_set1_epi8(OFFSET));
    return store_as(codes, _mm512_mask_sub_epi8(group, negates ? ~0ull : 0, _mm512_setzero_si512(), group));
  }
#endif
  unpack_nibbles<OFFSET>(nibbles, count, codes);
  for (int i = 0; i < count; ++i) {
    const int code = codes[i] + 16 * ((word >> i & 1) != 0);
    codes[i] = static_cast<int8_t>(negates ? -code : code);
  }
}

// One row's bytes as codes, zeros up to whole segments; where `negates`, codes are for the magnitude of their scale.
void unpack_row(const HeadSide& side, const uint8_t* row, const uint16_t* scales, int head_dim, bool negates,
                int8_t* codes) {
  const int dims = static_cast<int>(round_up(head_dim, SEGMENT_DIMS));
  __builtin_memset(codes + head_dim, 0, static_cast<size_t>(dims - head_dim));
  if (side.dtype == Dtype::int8) return (void)__builtin_memcpy(codes, row, static_cast<size_t>(head_dim));
  const bool five = side.dtype == Dtype::int5;
  const uint8_t* fifth_bits = row + head_dim / 2;
  for (int start = 0; start < head_dim; start += SEGMENT_DIMS, row += SEGMENT_DIMS / 2, ++scales) {
    const int count = head_dim - start < SEGMENT_DIMS ? head_dim - start : SEGMENT_DIMS;
    const bool negative = negates && *scales >= 0x8000;
    if (five) unpack_group<true>(row, fifth_bits + start / 8, count, negative, codes + start);
    else unpack_group<false>(row, nullptr, count, negative, codes + start);
  }
}

// Codes of 16 tokens: where they lie, or in scratch.
struct CodeRows {
  CodeRows(const ChunkSide& chunk, const HeadSide& side, int token, int head_dim, bool negates,
           const BytesScratch& scratch)
      : first(reinterpret_cast<const int8_t*>(chunk.bytes_of(token))), stride(side.row_bytes) {
    const int64_t dims = round_up(head_dim, SEGMENT_DIMS);
    if (side.dtype == Dtype::int8 && dims == head_dim) return;
    const uint8_t* row = chunk.bytes_of(token);
    const uint16_t* scales = chunk.scales_of(token);
    for (int i = 0; i < GROUP_TOKENS; ++i, row += side.row_bytes, scales += side.num_scales)
      unpack_row(side, row, scales, head_dim, negates, scratch.codes + i * dims);
    first = scratch.codes, stride = dims;
  }
  const int8_t* first;
  int64_t stride;
};

// Scales of 16 tokens, in rows of a chunk.
void widen_scales(const ChunkSide& chunk, const HeadSide& side, int token, float* out) {
  const uint16_t* scales = chunk.scales_of(token);
  if (side.num_scales == 1) return store(out + token, load_bf16(scales));
  for (int64_t s = 0; s < side.num_scales; ++s)
    for (int i = 0; i < GROUP_TOKENS; ++i)
      out[s * ATTENTION_CHUNK + token + i] = from_bf16(scales[i * side.num_scales + s]);
}

// Four rows of 64 bytes to lines that each have four of every sixteen: column 4 * i + j of line l is dim
// 16 * i + 4 * l + j.
REMORA_INLINE void interleave(const int8_t* const* rows, int64_t block_bytes, uint8_t* target) {
#if REMORA_EMULATE
  for (int line = 0; line < 4; ++line)
    for (int column = 0; column < 16; ++column)
      for (int i = 0; i < 4; ++i)
        target[line * block_bytes + column * 4 + i] =
            static_cast<uint8_t>(rows[i][column / 4 * 16 + line * 4 + column % 4]);
#else
  const __m512i a = load_as<__m512i>(rows[0]), b = load_as<__m512i>(rows[1]);
  const __m512i c = load_as<__m512i>(rows[2]), d = load_as<__m512i>(rows[3]);
  const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
  store_as(target, _mm512_unpacklo_epi16(ab_low, cd_low));
  store_as(target + block_bytes, _mm512_unpackhi_epi16(ab_low, cd_low));
  store_as(target + 2 * block_bytes, _mm512_unpacklo_epi16(ab_high, cd_high));
  store_as(target + 3 * block_bytes, _mm512_unpackhi_epi16(ab_high, cd_high));
#endif
}

// The next two groups of 16 tokens of K, with their scales and offsets; those behind num_tokens are left out.
void pack_key_panel(const ChunkSide& chunk, const HeadSide& side, int token, int num_tokens, int head_dim,
                    const Shapes& shapes, const BytesScratch& scratch) {
  const int64_t group_bytes = GROUP_TOKENS * shapes.dims / shapes.key_scales;
  for (int64_t group = 0; group < 2 && token < num_tokens; ++group, token += GROUP_TOKENS) {
    const CodeRows rows(chunk, side, token, head_dim, false, scratch);
    uint8_t* const panel = scratch.keys + token / PANEL_TOKENS * PANEL_TOKENS * shapes.dims;
    vint total = {};
    for (int64_t segment = 0; segment < shapes.segments; ++segment) {
      vuint lines[16];
      for (int i = 0; i < 16; ++i) lines[i] = load_as<vuint>(rows.first + i * rows.stride + segment * SEGMENT_DIMS);
      transpose(lines);
      const int64_t scale = shapes.key_scales == 1 ? 0 : segment;
      uint8_t* target = panel + (2 * scale + group) * group_bytes + (segment - scale) * 16 * LINE_BYTES;
      for (int i = 0; i < 16; ++i, target += LINE_BYTES) {
        store_as(target, lines[i]);
        total = ByteProduct::multiply_add((vint)lines[i], splat_int(0x01010101), total);
      }
      store_as(scratch.key_offsets + scale * ATTENTION_CHUNK + token, total << QUERY_OFFSET_BITS);
      if (shapes.key_scales > 1) total = vint{};
    }
    widen_scales(chunk, side, token, scratch.key_scales);
  }
}

// The same of V.
void pack_value_panel(const ChunkSide& chunk, const HeadSide& side, int token, int num_tokens, int head_dim,
                      const Shapes& shapes, const BytesScratch& scratch) {
  for (const int end = token + PANEL_TOKENS; token < end && token < num_tokens; token += GROUP_TOKENS) {
    const CodeRows rows(chunk, side, token, head_dim, true, scratch);
    for (int64_t segment = 0; segment < shapes.segments; ++segment)
      for (int i = 0; i < GROUP_TOKENS; i += 4) {
        const int8_t* four[4];
        for (int j = 0; j < 4; ++j) four[j] = rows.first + (i + j) * rows.stride + segment * SEGMENT_DIMS;
        interleave(four, VALUE_LINES * LINE_BYTES,
                   scratch.values + (segment * 4 * VALUE_LINES + (token + i) / 4) * LINE_BYTES);
      }
  }
}

}  // namespace
}  // namespace remora::REMORA_LEVEL
