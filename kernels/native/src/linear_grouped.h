// Linear layers with int8 or int4 weights in groups of INPUT_GROUP inputs, and the codes of their activations. Called by
// linear.cpp alone. Level header.
//
// Where VPDPBUSD multiplies bytes, activations are int8 with a scale for each group. Seven bits are too few for the groups
// that hold the outliers of a row: those have a second term of eight bits more, the remainders, which are multiplied row by
// row behind the rest. Elsewhere products are made of 16-bit pairs, and activations are int16: that costs nothing then. On
// AMX, whose int8 tiles would have to be emptied after each group, the weights are widened to bf16 panel by panel.
#pragma once
#include "linear.h"

namespace remora::REMORA_LEVEL {

// Behind the scales of a row's groups.
struct Remainders {
  int32_t* count;
  Remainder* terms;
};
static inline Remainders remainders_of(float* scales, int64_t groups) {
  auto* count = reinterpret_cast<int32_t*>(reinterpret_cast<GroupScale*>(scales) + groups);
  return {count, reinterpret_cast<Remainder*>(count + 1)};
}

// A row as the encoding of the level has it. A group with a NaN or an infinity gets the scale NaN. Columns up to the
// padded width are left alone.
void encode_groups(const float* x, int64_t num_in, uint8_t* out, float* scales);

// This rank's panels of linear(), for every output kind but silu_encoded.
void linear_grouped(const PackedLinear& weights, const Activations& activations, int64_t num_rows,
                    const LinearOutput& output, Range panels);

// A panel as bf16 weights in the order of packing.h: 2 * PANEL_COLUMNS * padded_in bytes.
void widen_panel(const PackedLinear& weights, int64_t panel, uint8_t* out);

}  // namespace remora::REMORA_LEVEL
