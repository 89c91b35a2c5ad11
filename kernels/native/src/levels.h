// The kernels of one instruction-set level as a table of functions, and the choice of a level.
#pragma once
#include "attention_work.h"
#include "linear.h"
#include "step_work.h"
#include "remora.h"

namespace remora {

struct LevelKernels {
  Level level;
  int64_t (*activation_stride)(Dtype weights, int64_t num_in);
  int32_t (*attention_tile_rows)(const Arena& arena);
  void (*run_step)(Team& team, const StepWork& work);
  void (*encode_row)(Dtype weights, const float* x, int64_t num_in, const Activations& activations, int64_t row);
  void (*linear)(Team& team, const PackedLinear& weights, const Activations& activations, int64_t num_rows,
                 const LinearOutput& output);
  void (*rms_norm_row)(const float* x, const float* weight, int64_t count, float eps, float* out);
  void (*rope_head)(float* head, const float* cos, const float* sin, int64_t head_dim);
  int32_t (*argmax_row)(const float* x, int64_t count, float* maximum);
  float (*log_sum_exp_row)(const float* x, int64_t count);
  void (*weigh_row)(const float* x, int64_t count, float maximum, float factor, float* out, float* piece_sums);
  void (*store_kv)(Team& team, const Step& step, const Arena& arena, int32_t layer, const float* k, int64_t k_stride,
                   const float* v, int64_t v_stride);
  void (*reencode_blocks)(Team& team, const Arena& from, const Arena& to, const int32_t* sources,
                          const int32_t* targets, int64_t count);
  void (*attention)(Team& team, const Step& step, const Arena& arena, const AttentionCall& call,
                    const AttentionWork& work);
  void (*merge_attention)(Team& team, const Step& step, const Arena& arena, const AttentionCall& call,
                          const AttentionWork& work);
};

constexpr int NUM_LEVELS = 5;
const char* level_name(Level level);

// The kernels of a level, or null when this library or this processor lacks it.
const LevelKernels* kernels_of(Level level);

// The best level that is available, or the one that REMORA_NATIVE_ISA names. Throws std::invalid_argument when the
// variable names a level that is unknown or not available.
const LevelKernels& default_kernels();

}  // namespace remora
