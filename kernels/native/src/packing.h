// Weights of a linear layer in the order in which every level's kernel reads them.
//
// Output columns come in panels of 32, two blocks of 16. Inside a block, k ascends:
//   fp32  [block][k][16]            bf16  [block][k / 2][16][2]            int8  [block][k / 4][16][4]
// The bf16 and int8 orders are those of AMX tiles (16 rows of 64 bytes), of VDPBF16PS and of VPDPBUSD alike.
// N is padded to whole panels and K to K_UNIT values with zeros.
#pragma once
#include "remora.h"
#include "threads.h"

namespace remora {

constexpr int64_t BLOCK_COLUMNS = 16, PANEL_COLUMNS = 32;

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

inline int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : dtype == Dtype::bf16 ? 2 : 1; }
inline int64_t k_unit(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : dtype == Dtype::bf16 ? 32 : 64; }

// Inputs that share a scale when activations are int8. One scale for a whole row costs SmolLM2 its accuracy: a few large
// values leave the others two or three bits (docs/benchmarks.md).
constexpr int64_t INT8_GROUP = 64;
inline int64_t num_scales(int64_t num_in) { return round_up(num_in, INT8_GROUP) / INT8_GROUP; }

struct PackedLinear {
  Dtype dtype = Dtype::bf16;
  int64_t num_out = 0, num_in = 0;        // as in the model
  int64_t padded_out = 0, padded_in = 0;  // as packed
  uint8_t* data = nullptr;                // 64-byte aligned
  float* scale = nullptr;                 // [padded_out], int8 only: value = integer * scale
  // int8 only: sums over the k of a group, for levels with unsigned activations: [panel][num_scales(num_in)][32].
  int32_t* column_sum = nullptr;
  float* bias = nullptr;                  // [padded_out] or null

  int64_t panel_bytes() const { return PANEL_COLUMNS * padded_in * dtype_bytes(dtype); }
  int64_t data_bytes() const { return padded_out * padded_in * dtype_bytes(dtype); }
};

// A matrix as the caller holds it: row-major [rows, columns] of fp32 or bf16.
struct Source {
  const void* data;
  Dtype dtype;
  int64_t rows, columns;
};

// How output columns are laid out: as they come, or, for a [gate; up] matrix, a block of 16 gate columns followed by
// the block of their 16 up columns, so that one panel holds what SiLU(gate) * up needs.
enum class ColumnOrder { plain, gate_up };

// Memory for all packed weights of a model: one mapping in huge pages, filled in order, freed as a whole.
class WeightStore {
 public:
  explicit WeightStore(int64_t bytes);  // throws std::bad_alloc
  ~WeightStore();
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;

  uint8_t* take(int64_t bytes);  // 64-byte aligned; throws std::length_error beyond the size given
  int64_t used_bytes() const { return used_; }

 private:
  uint8_t* data_;
  int64_t bytes_, used_ = 0;
};

// Bytes that a layer of this size takes from the store, scales and bias included.
int64_t packed_bytes(Dtype dtype, int64_t num_out, int64_t num_in, ColumnOrder order, bool bias);

PackedLinear reserve_linear(WeightStore& store, Dtype dtype, int64_t num_out, int64_t num_in, ColumnOrder order,
                            bool bias);

// Fills this rank's share of the panels. int8 weights are symmetric per output column.
void pack_linear(const PackedLinear& packed, ColumnOrder order, const Source& weights, const Team& team);
void pack_bias(const PackedLinear& packed, ColumnOrder order, const Source& bias);

// Row `index` of the [num_out, num_in] matrix back as fp32 (the embedding of a tied head; plain order only).
void unpack_row(const PackedLinear& packed, int64_t index, float* out);

// Values [first, first + count) as fp32; all rows as `dtype` (fp32 or bf16), row-major.
void to_fp32(const Source& source, int64_t first, int64_t count, float* out);
void copy_rows(const Source& source, Dtype dtype, uint8_t* out);

}  // namespace remora
