#include "packing.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

namespace remora {
namespace {

constexpr int64_t HUGE_PAGE_BYTES = 2 << 20;

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

int64_t padded_columns(int64_t num_out, ColumnOrder order) {
  if (order == ColumnOrder::plain) return round_up(num_out, PANEL_COLUMNS);
  return 2 * round_up(num_out / 2, BLOCK_COLUMNS);
}

// Row of the source that packed column `column` holds, or -1 for padding.
int64_t source_row(int64_t column, int64_t num_out, ColumnOrder order) {
  if (order == ColumnOrder::plain) return column < num_out ? column : -1;
  const int64_t half = num_out / 2;
  const int64_t unit = column / PANEL_COLUMNS * BLOCK_COLUMNS + column % BLOCK_COLUMNS;
  if (unit >= half) return -1;
  return column % PANEL_COLUMNS < BLOCK_COLUMNS ? unit : half + unit;
}

}  // namespace

WeightStore::WeightStore(int64_t bytes) : bytes_(round_up(bytes, HUGE_PAGE_BYTES)) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes_ + HUGE_PAGE_BYTES), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t aligned = (address + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
  if (aligned > address) munmap(memory, aligned - address);
  const uintptr_t end = address + static_cast<uintptr_t>(bytes_ + HUGE_PAGE_BYTES);
  const uintptr_t used_end = aligned + static_cast<uintptr_t>(bytes_);
  if (end > used_end) munmap(reinterpret_cast<void*>(used_end), end - used_end);
  data_ = reinterpret_cast<uint8_t*>(aligned);
#if defined(MADV_HUGEPAGE)
  madvise(data_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);  // a hint: without huge pages it is slower, not wrong
#endif
}

WeightStore::~WeightStore() {
  if (owned_) munmap(data_, static_cast<size_t>(bytes_));
}

uint8_t* WeightStore::take(int64_t bytes) {
  if (used_ + round_up(bytes, 64) > bytes_) throw std::length_error("weight store is too small");
  uint8_t* result = data_ + used_;
  used_ += round_up(bytes, 64);
  return result;
}

int64_t packed_bytes(Dtype dtype, int64_t num_out, int64_t num_in, ColumnOrder order, bool bias) {
  const int64_t columns = padded_columns(num_out, order);
  const int64_t group_bytes = is_quantised(dtype) ? round_up(columns * num_groups(num_in) * 2, 64) +
                                                         round_up(columns * group_pairs(num_in) * 4, 64) +
                                                         round_up(columns * 4, 64)
                                                   : 0;
  return round_up(columns * round_up(num_in, k_unit(dtype)) * dtype_bits(dtype) / 8, 64) + group_bytes +
         (bias ? round_up(columns * 4, 64) : 0);
}

PackedLinear reserve_linear(WeightStore& store, Dtype dtype, int64_t num_out, int64_t num_in, ColumnOrder order,
                            bool bias, bool minimum) {
  PackedLinear packed;
  packed.dtype = dtype;
  packed.num_out = num_out;
  packed.num_in = num_in;
  packed.padded_out = padded_columns(num_out, order);
  packed.padded_in = round_up(num_in, k_unit(dtype));
  packed.data = store.take(packed.data_bytes());
  if (is_quantised(dtype)) {
    packed.scale = reinterpret_cast<uint16_t*>(store.take(packed.padded_out * num_groups(num_in) * 2));
    if (minimum) {
      packed.minimum = reinterpret_cast<int16_t*>(store.take(packed.padded_out * group_pairs(num_in) * 4));
      packed.minimum_step = reinterpret_cast<float*>(store.take(packed.padded_out * 4));
    }
  }
  if (bias) packed.bias = reinterpret_cast<float*>(store.take(packed.padded_out * 4));
  return packed;
}

void to_fp32(const Source& source, int64_t first, int64_t count, float* out) {
  if (source.dtype == Dtype::fp32) {
    std::memcpy(out, static_cast<const float*>(source.data) + first, static_cast<size_t>(count) * 4);
    return;
  }
  const uint16_t* values = static_cast<const uint16_t*>(source.data) + first;
  for (int64_t i = 0; i < count; ++i) out[i] = from_bf16(values[i]);
}

void copy_rows(const Source& source, Dtype dtype, uint8_t* out) {
  std::vector<float> row(static_cast<size_t>(source.columns));
  for (int64_t index = 0; index < source.rows; ++index) {
    to_fp32(source, index * source.columns, source.columns, row.data());
    uint8_t* target = out + index * source.columns * dtype_bytes(dtype);
    if (dtype == Dtype::fp32) {
      std::memcpy(target, row.data(), row.size() * 4);
    } else {
      auto* values = reinterpret_cast<uint16_t*>(target);
      for (int64_t k = 0; k < source.columns; ++k) values[k] = to_bf16(row[static_cast<size_t>(k)]);
    }
  }
}

void pack_linear(const PackedLinear& packed, ColumnOrder order, const Source& weights, const Team& team) {
  const int64_t k_group = 4 / dtype_bytes(packed.dtype);  // consecutive k of one column lie together in 4 bytes
  const int64_t block_bytes = BLOCK_COLUMNS * packed.padded_in * dtype_bytes(packed.dtype);
  std::vector<float> row(static_cast<size_t>(packed.padded_in), 0.0f);
  const Range columns = team.share(packed.padded_out, PANEL_COLUMNS);
  for (int64_t column = columns.begin; column < columns.end; ++column) {
    const int64_t from = source_row(column, packed.num_out, order);
    if (from < 0) std::memset(row.data(), 0, row.size() * 4);
    else to_fp32(weights, from * packed.num_in, packed.num_in, row.data());
    uint8_t* block = packed.data + column / BLOCK_COLUMNS * block_bytes;
    const int64_t lane = column % BLOCK_COLUMNS;
    auto place = [&](int64_t k) { return (k / k_group * BLOCK_COLUMNS + lane) * k_group + k % k_group; };
    if (packed.dtype == Dtype::fp32) {
      auto* out = reinterpret_cast<float*>(block);
      for (int64_t k = 0; k < packed.padded_in; ++k) out[place(k)] = row[static_cast<size_t>(k)];
    } else {
      auto* out = reinterpret_cast<uint16_t*>(block);
      for (int64_t k = 0; k < packed.padded_in; ++k) out[place(k)] = to_bf16(row[static_cast<size_t>(k)]);
    }
  }
}

namespace {

float from_fp16(uint16_t x) {
  const float magnitude = std::ldexp(static_cast<float>(x & 0x3ff) + (x & 0x7c00 ? 1024.0f : 0.0f),
                                     std::max(x >> 10 & 31, 1) - 25);
  return x & 0x8000 ? -magnitude : magnitude;
}

// The minimums of one column, null: zeros.
void pack_minimums(const PackedLinear& packed, int64_t column, const uint16_t* minimums) {
  const int64_t groups = num_groups(packed.num_in), pairs = group_pairs(packed.num_in);
  float largest = 0;
  for (int64_t group = 0; group < groups && minimums != nullptr; ++group)
    largest = std::max(largest, std::abs(from_fp16(minimums[group])));
  int exponent = 0;
  std::frexp(largest, &exponent);
  // 15 bits and a sign, of which an fp16 value fills 11: the largest code is 32752.
  const float step = std::ldexp(1.0f, exponent - 15);
  packed.minimum_step[column] = step;
  int16_t* out = packed.minimum + (column / PANEL_COLUMNS * pairs * PANEL_COLUMNS + column % PANEL_COLUMNS) * 2;
  for (int64_t group = 0; group < 2 * pairs; ++group) {
    const bool is_there = group < groups && minimums != nullptr;
    const float code = is_there ? std::nearbyint(from_fp16(minimums[group]) / step) : 0.0f;
    out[group / 2 * PANEL_COLUMNS * 2 + group % 2] = static_cast<int16_t>(code);
  }
}

}  // namespace

void pack_grouped(const PackedLinear& packed, ColumnOrder order, const GroupedSource& weights, const Team& team) {
  const int64_t bits = dtype_bits(packed.dtype), per_cell = 32 / bits, groups = num_groups(packed.num_in);
  const int64_t block_bytes = BLOCK_COLUMNS * packed.padded_in * bits / 8;
  const uint32_t shift = packed.dtype == Dtype::int8 ? 0x80808080u : 0;
  const Range columns = team.share(packed.padded_out, PANEL_COLUMNS);
  for (int64_t column = columns.begin; column < columns.end; ++column) {
    const int64_t from = source_row(column, packed.num_out, order);
    const int8_t* codes = from < 0 ? nullptr : weights.codes + from * packed.num_in;
    uint8_t* block = packed.data + column / BLOCK_COLUMNS * block_bytes;
    auto* cells = reinterpret_cast<uint32_t*>(block) + column % BLOCK_COLUMNS;
    for (int64_t cell = 0; cell < packed.padded_in / per_cell; ++cell) {
      uint32_t value = 0;
      for (int64_t i = 0; i < per_cell && from >= 0; ++i) {
        const int64_t k = cell * per_cell + i;
        const uint32_t code = k < packed.num_in ? static_cast<uint32_t>(codes[k]) & ((1u << bits) - 1) : 0;
        value |= code << (8 * (i % 4) + 4 * (i / 4));
      }
      cells[cell * BLOCK_COLUMNS] = value ^ shift;
    }
    const int64_t place = column / PANEL_COLUMNS * PANEL_COLUMNS * groups + column % PANEL_COLUMNS;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = place + group * PANEL_COLUMNS;
      packed.scale[at] = from < 0 ? 0 : weights.scales[from * groups + group];
    }
    if (packed.minimum != nullptr)
      pack_minimums(packed, column, from < 0 ? nullptr : weights.minimums + from * groups);
  }
}

void pack_bias(const PackedLinear& packed, ColumnOrder order, const Source& bias) {
  std::vector<float> values(static_cast<size_t>(packed.num_out));
  to_fp32(bias, 0, packed.num_out, values.data());
  for (int64_t column = 0; column < packed.padded_out; ++column) {
    const int64_t from = source_row(column, packed.num_out, order);
    packed.bias[column] = from < 0 ? 0.0f : values[static_cast<size_t>(from)];
  }
}

void unpack_row(const PackedLinear& packed, int64_t index, float* out) {
  const int64_t k_group = 4 / dtype_bytes(packed.dtype);
  const uint8_t* block =
      packed.data + index / BLOCK_COLUMNS * BLOCK_COLUMNS * packed.padded_in * dtype_bytes(packed.dtype);
  const int64_t lane = index % BLOCK_COLUMNS;
  for (int64_t k = 0; k < packed.num_in; ++k) {
    const int64_t place = (k / k_group * BLOCK_COLUMNS + lane) * k_group + k % k_group;
    if (packed.dtype == Dtype::fp32) out[k] = reinterpret_cast<const float*>(block)[place];
    else out[k] = from_bf16(reinterpret_cast<const uint16_t*>(block)[place]);
  }
}

}  // namespace remora
