// Attention of one chunk over K and V of integers with products of bytes (VPDPBUSD), 6 query rows at a time. Codes are
// multiplied as they are; scales meet the sums, which are exact: no order of theirs could change a bit.
//
//   scores[row][token] = Q · Kᵀ     Q as 16 bits: code + 2^15, its upper bytes and its lower bytes apart
//   out[row][dim]      = P · V      P, times the scales of V, as 15 bits
//
// Both have a scale for each row.
#include "attention_tile.h"
#if REMORA_VNNI
#include "attention_bytes_packing.h"
#include "encodings.h"
#endif

namespace remora::REMORA_LEVEL {

#if REMORA_VNNI
namespace {

// One call: `num_lines` lines of two blocks against rows whose upper and lower bytes lie `plane` bytes apart.
struct BytesTile {
  const uint8_t* rows;
  int64_t stride, plane;
  const uint8_t* lines;
  int64_t block_bytes, num_lines;
  int32_t* sums;  // [row][2 x 16 columns], sums_stride a row
  int64_t sums_stride;
  bool resume;  // adds to the sums
  Prefetch prefetch;
};

template <int ROWS>
void sum_bytes(const BytesTile& call) {
  vint upper[ROWS][2], lower[ROWS][2];
  repeat<ROWS * 2>([&](auto i) REMORA_LAMBDA {
    upper[i / 2][i % 2] = vint{};
    lower[i / 2][i % 2] = call.resume ? load_as<vint>(call.sums + i / 2 * call.sums_stride + i % 2 * LANES) : vint{};
  });
  RowPointers<ROWS> high(call.rows, call.stride), low(call.rows + call.plane, call.stride);
  Prefetch prefetch = call.prefetch;
  const uint8_t* line = call.lines;
  for (int64_t count = call.num_lines; count > 0; --count, line += LINE_BYTES) {
    __builtin_prefetch(prefetch.next, 0, 2), __builtin_prefetch(prefetch.next + prefetch.second, 0, 2);
    prefetch.next += prefetch.bytes_per_line;
    const vint first = load_as<vint>(line), second = load_as<vint>(line + call.block_bytes);
    repeat<ROWS>([&](auto r) REMORA_LAMBDA {
      const vint a = ByteProduct::activation(high.row(r)), b = ByteProduct::activation(low.row(r));
      upper[r][0] = ByteProduct::multiply_add(first, a, upper[r][0]);
      upper[r][1] = ByteProduct::multiply_add(second, a, upper[r][1]);
      lower[r][0] = ByteProduct::multiply_add(first, b, lower[r][0]);
      lower[r][1] = ByteProduct::multiply_add(second, b, lower[r][1]);
    });
    high.advance(4), low.advance(4);
  }
  repeat<ROWS * 2>([&](auto i) REMORA_LAMBDA {
    store_as(call.sums + i / 2 * call.sums_stride + i % 2 * LANES, (upper[i / 2][i % 2] << 8) + lower[i / 2][i % 2]);
  });
}

using Multiply = void (*)(const BytesTile&);
Multiply kernel_for(int rows) {
  static constexpr Multiply KERNELS[PASS_ROWS] = {sum_bytes<1>, sum_bytes<2>, sum_bytes<3>,
                                                  sum_bytes<4>, sum_bytes<5>, sum_bytes<6>};
  return KERNELS[rows - 1];
}

// The largest magnitude of floats; NaN where one is NaN.
struct Largest {
  vint bits = {};
  REMORA_INLINE_MEMBER void add(vfloat v) {
    const vint magnitude = (vint)abs(v);
    bits = magnitude > bits ? magnitude : bits;
  }
  REMORA_INLINE_MEMBER float value() const {
    const int32_t most = fold(bits, [](vint a, vint b) { return a > b ? a : b; });
    float result;
    __builtin_memcpy(&result, &most, 4);
    return result;
  }
};
REMORA_INLINE float inverse_of(float step) { return step > 0x1p-120f ? 1.0f / step : 0.0f; }

// The upper and the lower bytes of 16 codes of 16 bits.
REMORA_INLINE void store_codes(vint codes, uint8_t* upper, uint8_t* lower) {
  store_as(upper, __builtin_convertvector(codes >> 8, vcodes));
  store_as(lower, __builtin_convertvector(codes, vcodes));
}

// One chunk of a tile.
class Chunk {
 public:
  Chunk(const Tile& tile, int32_t chunk, Part part, const BytesScratch& scratch)
      : tile_(tile),
        index_(chunk),
        part_(part),
        scratch_(scratch),
        shapes_(tile),
        num_tokens_(tile.visible_in_chunk(chunk)),
        keys_(tile, tile.blocks, tile.blocks.k, chunk),
        values_(tile, tile.blocks, tile.blocks.v, chunk) {}

  void run(const ChunkSide& later, int later_tokens) {
    // A single pass packs what it multiplies at once, and fetches what comes a phase later.
    const bool single = tile_.num_rows <= PASS_ROWS;
    const Prefetch nothing = keys_.nothing();
    for (int token = 0; token < num_tokens_ && !single; token += PANEL_TOKENS) pack_keys(token), pack_values(token);
    for (first_ = 0; first_ < tile_.num_rows; first_ += PASS_ROWS) {
      num_rows_ = tile_.num_rows - first_ < PASS_ROWS ? tile_.num_rows - first_ : PASS_ROWS;
      visible_ = tile_.visible_in_chunk(index_, first_ + num_rows_ - 1);
      multiply_ = kernel_for(num_rows_);
      for (int token = 0; token < visible_; token += PANEL_TOKENS) {
        if (single) pack_keys(token);
        score(token, single ? values_.prefetch(token, num_tokens_, shapes_.dims / 4) : nothing);
      }
      soften();
      for (int64_t scale = 0; scale < shapes_.value_scales; ++scale) {
        weigh(scale);
        for (int token = 0; single && token < visible_; token += PANEL_TOKENS) {
          if (scale == 0) pack_values(token);
          attend(scale, token, visible_ - token < PANEL_TOKENS ? visible_ : token + PANEL_TOKENS,
                 scale > 0 ? nothing : later.prefetch(token, later_tokens, 2 * shapes_.segments * PANEL_TOKENS / 4));
        }
        if (!single) attend(scale, 0, visible_, nothing);
        write(scale);
      }
      if (is_rotated(tile_.blocks.v.dtype))
        for (int row = first_; row < first_ + num_rows_; ++row)
          hadamard(part_.out + row * tile_.head_dim, tile_.head_dim);
    }
  }

 private:
  float* scores_of(int row, int64_t scale = 0) const {
    return scratch_.scores + (scale * PASS_ROWS + row) * SCORE_STRIDE;
  }

  void pack_keys(int token) const {
    pack_key_panel(keys_, tile_.blocks.k, token, num_tokens_, tile_.head_dim, shapes_, scratch_);
  }
  void pack_values(int token) const {
    pack_value_panel(values_, tile_.blocks.v, token, num_tokens_, tile_.head_dim, shapes_, scratch_);
  }

  void score(int token, Prefetch prefetch) const {
    const int64_t lines = shapes_.dims / shapes_.key_scales / 4, group_bytes = lines * LINE_BYTES;
    const uint8_t* panel = scratch_.keys + token * shapes_.dims;
    for (int64_t scale = 0; scale < shapes_.key_scales; ++scale, panel += 2 * group_bytes) {
      multiply_({scratch_.queries + first_ * 2 * shapes_.dims + scale * SEGMENT_DIMS, 2 * shapes_.dims, shapes_.dims,
                 panel, group_bytes, lines, reinterpret_cast<int32_t*>(scores_of(0, scale) + token), SCORE_STRIDE,
                 false, prefetch});
      prefetch.next += prefetch.bytes_per_line * lines;
    }
  }

  // Sums to weights 2^(score - maximum), zero where the row does not see, up to whole panels.
  void soften() const {
    vint lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    const int whole_panels = (visible_ + PANEL_TOKENS - 1) / PANEL_TOKENS * PANEL_TOKENS;
    for (int row = 0; row < num_rows_; ++row) {
      const int visible = tile_.visible_in_chunk(index_, first_ + row);
      float* const scores = scores_of(row);
      vfloat top = splat(-__builtin_inff());
      for (int token = 0; token < visible; token += LANES) {
        vfloat score = {};
        for (int64_t scale = 0; scale < shapes_.key_scales; ++scale) {
          const int64_t place = scale * ATTENTION_CHUNK + token;
          const vint sum = load_as<vint>(scores_of(row, scale) + token) - load_as<vint>(scratch_.key_offsets + place);
          score = fma(__builtin_convertvector(sum, vfloat), load(scratch_.key_scales + place), score);
        }
        store(scores + token, score);
        top = max(top, visible - token >= LANES ? score : lane < visible - token ? score : top);
      }
      const float factor = scratch_.query_steps[first_ + row] * tile_.scale_log2, maximum = max(top) * factor;
      const vfloat scale = splat(factor), shift = splat(-maximum);
      vfloat total = {};
      for (int token = 0; token < whole_panels; token += LANES) {
        vfloat weight = {};
        if (token < visible) weight = exp2_of_score(fma(load(scores + token), scale, shift));
        if (visible - token < LANES) weight = lane < visible - token ? weight : vfloat{};
        store(scores + token, weight);
        total += weight;
      }
      part_.maximum[first_ + row] = maximum;
      part_.sum[first_ + row] = remora::REMORA_LEVEL::sum(total);
    }
  }

  // Weights times a scale of V, as codes.
  void weigh(int64_t scale) {
    vint lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    const float* value_scales = scratch_.value_scales + scale * ATTENTION_CHUNK;
    if (first_ == 0 && scale == 0)
      for (int token = 0; token < num_tokens_; token += GROUP_TOKENS)
        widen_scales(values_, tile_.blocks.v, token, scratch_.value_scales);
    for (int row = 0; row < num_rows_; ++row) {
      const int visible = tile_.visible_in_chunk(index_, first_ + row);
      const float* weights = scores_of(row);
      uint8_t* const codes = scratch_.weights + row * WEIGHT_STRIDE;
      const auto scaled = [&](int token) REMORA_LAMBDA {
        const vfloat product = load(weights + token) * abs(load(value_scales + token));
        return visible - token >= LANES ? product : lane < visible - token ? product : vfloat{};
      };
      Largest largest;
      for (int token = 0; token < visible; token += LANES) largest.add(scaled(token));
      const float step = largest.value() / LARGEST_WEIGHT;
      const vfloat inverse = splat(inverse_of(step));
      for (int token = 0; token < visible_; token += LANES)
        store_codes(token < visible ? round_to_int(scaled(token) * inverse) : vint{}, codes + token,
                    codes + ATTENTION_CHUNK + token);
      value_steps_[row] = step;
    }
  }

  // Adds the tokens [token, end) to the sums, which the first call sets.
  void attend(int64_t scale, int token, int end, Prefetch prefetch) const {
    const int64_t block_bytes = VALUE_LINES * LINE_BYTES, lines = (end - token + 3) / 4;
    const int64_t first = shapes_.value_scales == 1 ? 0 : scale;
    const int64_t last = shapes_.value_scales == 1 ? shapes_.segments : scale + 1;
    for (int64_t pair = 2 * first; pair < 2 * last; ++pair) {
      multiply_({scratch_.weights + token, WEIGHT_STRIDE, ATTENTION_CHUNK,
                 scratch_.values + 2 * pair * block_bytes + token / 4 * LINE_BYTES, block_bytes, lines,
                 scratch_.sums + pair * PANEL_COLUMNS, shapes_.dims, token > 0, prefetch});
      prefetch.next += prefetch.bytes_per_line * lines;
    }
  }

  // Sums of the dims that share a scale of V to values, in their order.
  void write(int64_t scale) const {
    const int dim = tile_.head_dim;
    const int64_t first = shapes_.value_scales == 1 ? 0 : scale * SEGMENT_DIMS;
    const int64_t end = shapes_.value_scales == 1 || first + SEGMENT_DIMS > dim ? dim : first + SEGMENT_DIMS;
    for (int row = 0; row < num_rows_; ++row) {
      const vfloat step = splat(value_steps_[row]);
      float* const out = part_.out + (first_ + row) * dim;
      for (int64_t segment = first; segment < end; segment += SEGMENT_DIMS)
        for (int line = 0; line < 4; ++line) {
          const int32_t* sums = scratch_.sums + row * shapes_.dims + segment + line * LANES;
          float lanes[LANES];
          store(lanes, __builtin_convertvector(load_as<vint>(sums), vfloat) * step);
          for (int i = 0; i < 4 && segment + 16 * i < end; ++i)
            __builtin_memcpy(out + segment + 16 * i + 4 * line, lanes + 4 * i, 16);
        }
    }
  }

  const Tile& tile_;
  const int32_t index_;
  const Part part_;
  const BytesScratch& scratch_;
  const Shapes shapes_;
  const int num_tokens_;
  const ChunkSide keys_, values_;
  // Of the pass under way.
  int first_ = 0, num_rows_ = 0, visible_ = 0;
  Multiply multiply_ = nullptr;
  float value_steps_[PASS_ROWS];
};

}  // namespace

bool has_bytes() { return true; }

size_t bytes_scratch_bytes(const Arena& arena) {
  return BytesScratch(nullptr, Shapes(arena.head_dim, arena.k_dtype, arena.v_dtype)).end;
}

void bytes_prepare_tile(const Tile& tile, uint8_t* memory) {
  const Shapes shapes(tile);
  const BytesScratch scratch(memory, shapes);
  float q[MAX_HEAD_DIM] = {};
  for (int row = 0; row < tile.num_rows; ++row) {
    __builtin_memcpy(q, tile.q + row * tile.head_dim, sizeof(float) * static_cast<size_t>(tile.head_dim));
    if (is_rotated(tile.blocks.k.dtype)) hadamard(q, tile.head_dim);
    Largest largest;
    for (int64_t d = 0; d < shapes.dims; d += LANES) largest.add(load(q + d));
    const float most = largest.value(), step = (most - most == 0 ? most : __builtin_nanf("")) / LARGEST_QUERY;
    const vfloat inverse = splat(inverse_of(step));
    uint8_t* const codes = scratch.queries + row * 2 * shapes.dims;
    for (int64_t d = 0; d < shapes.dims; d += LANES)
      store_codes(round_to_int(load(q + d) * inverse) + (1 << QUERY_OFFSET_BITS), codes + d, codes + shapes.dims + d);
    scratch.query_steps[row] = step;
  }
}

void bytes_chunk(const Tile& tile, int32_t chunk, const Ahead& ahead, Part part, uint8_t* memory) {
  const BytesScratch scratch(memory, Shapes(tile));
  const HeadBlocks& next = ahead.blocks != nullptr ? *ahead.blocks : tile.blocks;
  Chunk(tile, chunk, part, scratch).run(ChunkSide(tile, next, next.k, ahead.chunk), ahead.num_tokens);
}

#else  // other levels never call these

bool has_bytes() { return false; }
size_t bytes_scratch_bytes(const Arena&) { return 0; }
void bytes_prepare_tile(const Tile&, uint8_t*) {}
void bytes_chunk(const Tile&, int32_t, const Ahead&, Part, uint8_t*) {}

#endif

}  // namespace remora::REMORA_LEVEL
