// Linear layers with int8 or int4 weights in groups of INPUT_GROUP inputs, and the codes of their activations. Called by
// linear.cpp alone. Level header.
//
// Where VPDPBUSD multiplies bytes, activations are int8. Only multiplications are scarce beside it: so the step of a group
// is the row's times two powers of two added, by which the scale of its weights is shifted, not multiplied. Seven bits
// are too few for groups with values far above the others of the row: such outliers are taken out and multiplied one by
// one behind the rest, in fp32. The sums of groups, by which minimums of weights are multiplied, are 16-bit codes.
// Elsewhere products are made of 16-bit pairs, and activations are int16: that costs nothing then. On AMX, whose int8
// tiles would have to be emptied after each group, the weights are widened to bf16 panel by panel.
#pragma once
#include "linear.h"

namespace remora::REMORA_LEVEL {

// What stands behind the scales of a row's groups.
struct RowParts {
  RowScale* row;
  int16_t* sums;  // [group_pairs(num_in)][2]
  Outlier* outliers;
};
static inline RowParts parts_of(float* scales, int64_t groups) {
  auto* row = reinterpret_cast<RowScale*>(reinterpret_cast<GroupScale*>(scales) + groups);
  auto* sums = reinterpret_cast<int16_t*>(row + 1);
  return {row, sums, reinterpret_cast<Outlier*>(sums + (groups + 1) / 2 * 2)};
}

// A row as the encoding of the level has it. A NaN or an infinity makes the step of its group, or of the row, NaN. Columns
// up to the padded width are left alone.
void encode_groups(const float* x, int64_t num_in, uint8_t* out, float* scales);

// This rank's panels of linear(), for every output kind but silu_encoded.
void linear_grouped(const PackedLinear& weights, const Activations& activations, int64_t num_rows,
                    const LinearOutput& output, Range panels);

// A panel as bf16 weights in the order of packing.h: 2 * PANEL_COLUMNS * padded_in bytes.
void widen_panel(const PackedLinear& weights, int64_t panel, uint8_t* out);

}  // namespace remora::REMORA_LEVEL
