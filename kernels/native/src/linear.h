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
  float scale, scaled_sum;  // the sum of the group's values, as encoded
  int32_t offset;           // what weights that are read as code + 128 make too much, negative
};
// The second term of a group of int8 codes that stands out in its row: value = code * scale, added to the first.
struct Remainder {
  int32_t group;
  float scale;
  int32_t offset;
  int8_t codes[INPUT_GROUP];
};

// Floats beside a row of codes: a GroupScale for each group, the number of remainders, and room for them.
inline int64_t num_scales(int64_t num_in) {
  return num_groups(num_in) * static_cast<int64_t>((sizeof(GroupScale) + sizeof(Remainder)) / sizeof(float)) + 1;
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
