// y = x * weightsᵀ for any number of rows, with what follows it fused.
//
// Output (row, column) is one chain of multiply-adds over ascending k, in every variant of the kernel: how many rows
// run together, where their tiles begin and which rank computes a column never change a bit. Small numbers of rows are
// bound by reading the weights: each rank streams its panels once, prefetching ahead. Large numbers are bound by
// arithmetic: rows are cut so that their activations stay in the level-2 cache while panels pass by.
#pragma once
#include "packing.h"
#include "remora.h"
#include "threads.h"

namespace remora {

// Rows as the kernel of a level wants them beside weights of some precision; made by encode_row. Kernels read up to
// ACTIVATION_SPARE_ROWS rows beyond the last (and drop the results): the memory must be there.
struct Activations {
  uint8_t* data;
  int64_t stride;  // bytes
  float* scale;    // [rows][num_scales(num_in)], only where weights are int8 or int4: see linear_grouped.h
};
constexpr int64_t ACTIVATION_SPARE_ROWS = 32;

// Beside weights of int8 or int4, activations have codes in groups of INPUT_GROUP like them.
struct GroupScale {
  float scale, scale_low;  // the step of the codes; beside a RowScale in steps of the row, as 2^scale + 2^scale_low
  float scaled_sum;        // the sum of the group's values, as encoded; not read beside a RowScale
  int32_t offset;          // what weights that are read as code + 128 make too much, negative
};

// Where activations are int8: behind the scales of a row's groups, followed by the sums of the groups, int16 in pairs of
// groups, and the outliers.
struct RowScale {
  float step, sum_step;  // sum_step: that of the sums, in steps of the row
  int32_t num_outliers;
};
// A value that is multiplied by itself: its code is 0.
struct Outlier {
  int32_t input;
  float steps;
};
// No more than one value of so many is an outlier: encode_groups.cpp says why.
constexpr int64_t MOST_OUTLIERS = 5;

// Floats beside a row of codes.
inline int64_t num_scales(int64_t num_in) {
  const int64_t bytes = num_groups(num_in) * static_cast<int64_t>(sizeof(GroupScale)) +
                        static_cast<int64_t>(sizeof(RowScale)) + group_pairs(num_in) * 4 +
                        (num_in / MOST_OUTLIERS + 1) * static_cast<int64_t>(sizeof(Outlier));
  return bytes / static_cast<int64_t>(sizeof(float));
}

struct LinearOutput {
  enum class Kind {
    store,         // out[row][column] = y + bias
    add,           // out[row][column] += y + bias
    silu_store,    // out[row][unit] = SiLU(gate) * up, for weights packed in ColumnOrder::gate_up
    silu_encoded,  // the same into `encoded`; not for int8 and int4, whose groups need more columns than a panel has
  } kind;
  float* out;
  int64_t stride;  // floats
  Activations encoded;
  int64_t encoded_columns;  // padded_in of the layer that reads `encoded`
};

#if defined(REMORA_LEVEL)
namespace REMORA_LEVEL {

// Bytes from row to row: an odd number of cache lines, so that the rows of a tile do not share cache sets.
int64_t activation_stride(Dtype weights, int64_t num_in);

// Writes row `row` of `activations`: fp32 as it is, rounded to bf16, or as encode_groups has it (linear_grouped.h).
// Columns up to the padded width become zero.
void encode_row(Dtype weights, const float* x, int64_t num_in, const Activations& activations, int64_t row);

// Computes this rank's panels for rows [0, num_rows). All activations must be visible (barrier before).
void linear(Team& team, const PackedLinear& weights, const Activations& activations, int64_t num_rows,
            const LinearOutput& output);

}  // namespace REMORA_LEVEL
#endif

}  // namespace remora
