// The C interface that library.py loads. Functions that can fail return null or -1 and leave a sentence in
// remora_last_error() of the same thread. Callers check sizes; pointers are trusted.
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "levels.h"

#define REMORA_EXPORT extern "C" __attribute__((visibility("default")))

using namespace remora;

namespace {

thread_local std::string last_error;

template <class Result, class Body>
Result guarded(Result failure, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return failure;
}

const LevelKernels& kernels_or_default(int32_t level) {
  if (level < 0) return default_kernels();
  const LevelKernels* kernels = kernels_of(static_cast<Level>(level));
  if (kernels == nullptr) throw std::invalid_argument("this machine or this build lacks the instruction-set level");
  return *kernels;
}

// Buffers of a single layer that is run outside a decoder.
struct LinearRun {
  const LevelKernels& kernels;
  PackedLinear packed;
  Source weights;
  GroupedSource grouped;
  ColumnOrder order;
  const float* x;
  int64_t num_rows;
  Activations activations;
  LinearOutput output;
};

void run_linear(void* context, Team& team) {
  LinearRun& run = *static_cast<LinearRun*>(context);
  if (is_quantised(run.packed.dtype)) pack_grouped(run.packed, run.order, run.grouped, team);
  else pack_linear(run.packed, run.order, run.weights, team);
  const Range rows = team.share(run.num_rows);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    run.kernels.encode_row(run.packed.dtype, run.x + row * run.packed.num_in, run.packed.num_in, run.activations, row);
  team.barrier();
  run.kernels.linear(team, run.packed, run.activations, run.num_rows, run.output);
}

}  // namespace

REMORA_EXPORT const char* remora_last_error() { return last_error.c_str(); }

// Changes whenever a signature or a struct does; library.py refuses another number.
REMORA_EXPORT int32_t remora_interface_version() { return 4; }

REMORA_EXPORT const char* remora_level_name(int32_t level) {
  return level < 0 || level >= NUM_LEVELS ? nullptr : level_name(static_cast<Level>(level));
}

REMORA_EXPORT int32_t remora_level_available(int32_t level) {
  return level >= 0 && level < NUM_LEVELS && kernels_of(static_cast<Level>(level)) != nullptr;
}

// The level that a decoder takes when none is named; -1 when REMORA_NATIVE_ISA asks for one that is not there.
REMORA_EXPORT int32_t remora_default_level() {
  return guarded(-1, [] { return static_cast<int32_t>(default_kernels().level); });
}

REMORA_EXPORT int32_t remora_packing_version() { return PACKING_VERSION; }

// Bytes that the packed weights of a shape take at most; -1 for a shape that is not served.
REMORA_EXPORT int64_t remora_max_weight_bytes(const Shape* shape) {
  return guarded(int64_t{-1}, [&] { return Model::max_weight_bytes(*shape); });
}

// level -1: the default. cores: num_threads - 1 core numbers for ranks 1 and up, -1 for any core. memory: null for
// memory of its own; else it outlives the decoder, `filled` says that weights of this shape are packed in it already.
REMORA_EXPORT Decoder* remora_decoder_create(const Shape* shape, int32_t level, int32_t num_threads,
                                             const int32_t* cores, uint8_t* memory, int64_t memory_bytes,
                                             int32_t filled) {
  return guarded(static_cast<Decoder*>(nullptr), [&] {
    if (num_threads < 1) throw std::invalid_argument("num_threads must be at least 1");
    const WeightMemory given{memory, memory_bytes, filled != 0};
    return new Decoder(*shape, kernels_or_default(level), num_threads, cores, given);
  });
}

REMORA_EXPORT void remora_decoder_destroy(Decoder* decoder) { delete decoder; }

REMORA_EXPORT int32_t remora_decoder_level(const Decoder* decoder) {
  return static_cast<int32_t>(decoder->kernels().level);
}

REMORA_EXPORT int64_t remora_decoder_weight_bytes(const Decoder* decoder) { return decoder->weight_bytes(); }

REMORA_EXPORT int32_t remora_decoder_set_weight(Decoder* decoder, int32_t kind, int32_t layer, const void* data,
                                                int32_t dtype, int64_t rows, int64_t columns) {
  return guarded(-1, [&] {
    decoder->set_weight(static_cast<WeightKind>(kind), layer, {data, static_cast<Dtype>(dtype), rows, columns});
    return 0;
  });
}

// An int8 or int4 linear layer: codes [rows][columns], fp16 scales and minimums (may be null) [rows][columns / 32].
REMORA_EXPORT int32_t remora_decoder_set_grouped(Decoder* decoder, int32_t kind, int32_t layer, const int8_t* codes,
                                                 const uint16_t* scales, const uint16_t* minimums, int32_t dtype,
                                                 int64_t rows, int64_t columns) {
  return guarded(-1, [&] {
    decoder->set_grouped(static_cast<WeightKind>(kind), layer,
                         {codes, scales, minimums, static_cast<Dtype>(dtype), rows, columns});
    return 0;
  });
}

// In filled memory, instead of remora_decoder_set_grouped and in the same order.
REMORA_EXPORT int32_t remora_decoder_adopt_grouped(Decoder* decoder, int32_t kind, int32_t layer, int32_t dtype,
                                                   int32_t minimum) {
  return guarded(-1, [&] {
    decoder->adopt_grouped(static_cast<WeightKind>(kind), layer, static_cast<Dtype>(dtype), minimum != 0);
    return 0;
  });
}

REMORA_EXPORT int32_t remora_decoder_finish(Decoder* decoder) {
  return guarded(-1, [&] {
    decoder->finish();
    return 0;
  });
}

// What Decoder::run returns, valid until the next call with this decoder.
REMORA_EXPORT const float* remora_decoder_run(Decoder* decoder, const Step* step, const Arena* arena) {
  return guarded(static_cast<const float*>(nullptr), [&] { return decoder->run(*step, *arena); });
}

// Weights are fp32, or, where precision is int8 or int4, codes with fp16 scales and minimums like those of a decoder.
// out[rows][num_out] = x[rows][num_in] · weightsᵀ + bias; with `silu`, out[rows][num_out / 2] = SiLU(gate) * up.
REMORA_EXPORT int32_t remora_linear(int32_t level, int32_t num_threads, const float* x, int64_t num_rows,
                                    const void* weights, const uint16_t* scales, const uint16_t* minimums,
                                    int32_t precision, int64_t num_out, int64_t num_in, const float* bias,
                                    int32_t silu, float* out) {
  return guarded(-1, [&] {
    const LevelKernels& kernels = kernels_or_default(level);
    const auto dtype = static_cast<Dtype>(precision);
    const ColumnOrder order = silu ? ColumnOrder::gate_up : ColumnOrder::plain;
    WeightStore store(packed_bytes(dtype, num_out, num_in, order, bias != nullptr));
    Buffer rows, row_scales;
    const int64_t stride = kernels.activation_stride(dtype, num_in);
    rows.reserve(stride * (num_rows + ACTIVATION_SPARE_ROWS));
    row_scales.reserve((num_rows + ACTIVATION_SPARE_ROWS) * num_scales(num_in) * 4);
    ThreadTeam threads(num_threads, nullptr);
    LinearRun run{kernels,
                  reserve_linear(store, dtype, num_out, num_in, order, bias != nullptr, minimums != nullptr),
                  {weights, Dtype::fp32, num_out, num_in},
                  {static_cast<const int8_t*>(weights), scales, minimums, dtype, num_out, num_in},
                  order,
                  x,
                  num_rows,
                  {rows.bytes(), stride, row_scales.floats()},
                  {silu ? LinearOutput::Kind::silu_store : LinearOutput::Kind::store, out, silu ? num_out / 2 : num_out,
                   {}, 0}};
    if (bias != nullptr) pack_bias(run.packed, order, {bias, Dtype::fp32, 1, num_out});
    threads.run(run_linear, &run);
    return 0;
  });
}

REMORA_EXPORT int32_t remora_rms_norm(int32_t level, const float* x, const float* weight, int64_t rows, int64_t count,
                                      float eps, float* out) {
  return guarded(-1, [&] {
    const LevelKernels& kernels = kernels_or_default(level);
    for (int64_t row = 0; row < rows; ++row)
      kernels.rms_norm_row(x + row * count, weight, count, eps, out + row * count);
    return 0;
  });
}

// heads[rows][head_dim] in place; cos and sin [rows][head_dim / 2].
REMORA_EXPORT int32_t remora_rope(int32_t level, float* heads, const float* cos, const float* sin, int64_t rows,
                                  int64_t head_dim) {
  return guarded(-1, [&] {
    const LevelKernels& kernels = kernels_or_default(level);
    for (int64_t row = 0; row < rows; ++row)
      kernels.rope_head(heads + row * head_dim, cos + row * head_dim / 2, sin + row * head_dim / 2, head_dim);
    return 0;
  });
}

// out[count] = exp((x - maximum) * factor); piece_sums holds a sum for every 256 of it.
REMORA_EXPORT int32_t remora_weigh_row(int32_t level, const float* x, int64_t count, float maximum, float factor,
                                       float* out, float* piece_sums) {
  return guarded(-1, [&] {
    kernels_or_default(level).weigh_row(x, count, maximum, factor, out, piece_sums);
    return 0;
  });
}

// index[row] of the first maximum, or -1 for a row with a NaN; log_sum_exp may be null.
REMORA_EXPORT int32_t remora_argmax_rows(int32_t level, const float* x, int64_t rows, int64_t count, int32_t* index,
                                         float* maximum, float* log_sum_exp) {
  return guarded(-1, [&] {
    const LevelKernels& kernels = kernels_or_default(level);
    for (int64_t row = 0; row < rows; ++row) {
      index[row] = kernels.argmax_row(x + row * count, count, maximum + row);
      if (log_sum_exp != nullptr) log_sum_exp[row] = kernels.log_sum_exp_row(x + row * count, count);
    }
    return 0;
  });
}
