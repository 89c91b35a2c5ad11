// Weights of a linear layer in the order in which every level's kernel reads them.
//
// Output columns come in panels of 32, two blocks of 16. Inside a block, k ascends:
//   fp32  [block][k][16]            bf16  [block][k / 2][16][2]            int8  [block][k / 4][16][4]
//   int4  [block][k / 8][16][4 bytes]
// The bf16 order is that of AMX tiles (16 rows of 64 bytes) and of VDPBF16PS, the int8 order that of VPDPBUSD, which takes
// weights without sign: int8 codes are stored as code + 128. Of eight
// int4 of a column the first four are the lower halves of the 4 bytes, the others the upper ones. int8 and int4 have a
// scale, and maybe a minimum, for every column and INPUT_GROUP inputs: weight = code * scale + minimum, with codes
// -128..127 or 0..15. Minimums are 16-bit codes in a step of their column, a power of two, so that VPDPWSSD multiplies those
// of two groups at once: exact but for minimums that are sixteen times smaller than the largest of the column.
// N is padded to whole panels and K to K_UNIT values with zeros.
#pragma once
#include "remora.h"
#include "threads.h"

namespace remora {

// Packed weights are kept on disk and mapped by other processes. Whoever changes what bytes a model is packed into, here
// or in kernels/grouped.py, counts this up, so that older ones are packed anew. tests/kernels/test_packed_weights.py
// fails when it is forgotten.
constexpr int32_t PACKING_VERSION = 3;

constexpr int64_t BLOCK_COLUMNS = 16, PANEL_COLUMNS = 32;

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

inline int64_t dtype_bits(Dtype dtype) {
  return dtype == Dtype::fp32 ? 32 : dtype == Dtype::bf16 ? 16 : dtype == Dtype::int8 ? 8 : 4;
}
inline int64_t dtype_bytes(Dtype dtype) { return dtype_bits(dtype) / 8; }  // not for int4
inline int64_t k_unit(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 32; }

// Inputs that share a scale where weights are int8 or int4: a block of GGUF's Q8_0, Q4_0 and Q4_1.
constexpr int64_t INPUT_GROUP = 32;
inline int64_t num_groups(int64_t num_in) { return round_up(num_in, INPUT_GROUP) / INPUT_GROUP; }
inline int64_t group_pairs(int64_t num_in) { return (num_groups(num_in) + 1) / 2; }

struct PackedLinear {
  Dtype dtype = Dtype::bf16;
  int64_t num_out = 0, num_in = 0;        // as in the model
  int64_t padded_out = 0, padded_in = 0;  // as packed
  uint8_t* data = nullptr;                // 64-byte aligned
  // int8 and int4 only. fp16: [panel][num_groups(num_in)][32].
  uint16_t* scale = nullptr;
  // [panel][group_pairs(num_in)][32][2], and [padded_out]. Null: all are 0.
  int16_t* minimum = nullptr;
  float* minimum_step = nullptr;
  float* bias = nullptr;                  // [padded_out] or null

  int64_t panel_bytes() const { return PANEL_COLUMNS * padded_in * dtype_bits(dtype) / 8; }
  int64_t data_bytes() const { return padded_out * padded_in * dtype_bits(dtype) / 8; }
};

// A matrix as the caller holds it: row-major [rows, columns] of fp32 or bf16.
struct Source {
  const void* data;
  Dtype dtype;
  int64_t rows, columns;
};

// int8 or int4 weights as the caller holds them: a byte for each code, fp16 for each group of a row.
struct GroupedSource {
  const int8_t* codes;                // [rows][columns]
  const uint16_t *scales, *minimums;  // [rows][num_groups(columns)]; minimums may be null
  Dtype dtype;
  int64_t rows, columns;
};

// How output columns are laid out: as they come, or, for a [gate; up] matrix, a block of 16 gate columns followed by
// the block of their 16 up columns, so that one panel holds what SiLU(gate) * up needs.
enum class ColumnOrder { plain, gate_up };

// Memory for all packed weights of a model: one mapping in huge pages, filled in order, freed as a whole; or memory of
// the caller's, which stays the caller's.
class WeightStore {
 public:
  explicit WeightStore(int64_t bytes);  // throws std::bad_alloc
  WeightStore(uint8_t* memory, int64_t bytes) : data_(memory), bytes_(bytes), owned_(false) {}
  ~WeightStore();
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;

  uint8_t* take(int64_t bytes);  // 64-byte aligned; throws std::length_error beyond the size given
  int64_t used_bytes() const { return used_; }

 private:
  uint8_t* data_;
  int64_t bytes_, used_ = 0;
  bool owned_ = true;
};

// Bytes that a layer of this size takes from the store at most, scales, minimums and bias included.
int64_t packed_bytes(Dtype dtype, int64_t num_out, int64_t num_in, ColumnOrder order, bool bias);

PackedLinear reserve_linear(WeightStore& store, Dtype dtype, int64_t num_out, int64_t num_in, ColumnOrder order,
                            bool bias, bool minimum);

// Fills this rank's share of the panels.
void pack_linear(const PackedLinear& packed, ColumnOrder order, const Source& weights, const Team& team);
void pack_grouped(const PackedLinear& packed, ColumnOrder order, const GroupedSource& weights, const Team& team);
void pack_bias(const PackedLinear& packed, ColumnOrder order, const Source& bias);

// Row `index` of the [num_out, num_in] matrix back as fp32 (the embedding of a tied head; plain order only).
void unpack_row(const PackedLinear& packed, int64_t index, float* out);

// Values [first, first + count) as fp32; all rows as `dtype` (fp32 or bf16), row-major.
void to_fp32(const Source& source, int64_t first, int64_t count, float* out);
void copy_rows(const Source& source, Dtype dtype, uint8_t* out);

}  // namespace remora
