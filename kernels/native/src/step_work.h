// What a step needs, as plain data: level files read it.
#pragma once
#include "attention_work.h"
#include "packing.h"
#include "remora.h"

namespace remora {

// kernels.base.DecoderShape as the library.py struct passes it.
struct Shape {
  int32_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size;
  int32_t qk_norm, qkv_bias, output_bias, mlp_bias, tied_head;
  int32_t has_embedding, has_head;  // a stage of a pipeline may lack either
  Dtype weights, head_weights;
  float rms_norm_eps, attention_scale, rope_attention_factor;

  int64_t query_size() const { return static_cast<int64_t>(num_heads) * head_dim; }
  int64_t kv_size() const { return static_cast<int64_t>(num_kv_heads) * head_dim; }
  int64_t qkv_size() const { return query_size() + 2 * kv_size(); }
  // The embedding of a tied model is read from the packed head.
  bool embeds_from_head() const { return tied_head != 0; }
};

struct LayerWeights {
  float *input_norm, *post_norm, *q_norm, *k_norm;
  PackedLinear qkv, o, gate_up, down;
};

// Rows of fp32 or bf16; without rows of its own, those of the packed head.
struct EmbedTable {
  Source rows;
  const PackedLinear* head;
};
void embed_row(const EmbedTable& table, int32_t token_id, float* out);

// Shapes: T tokens, R logit rows. Activations have ACTIVATION_SPARE_ROWS more.
struct StepWork {
  const Shape& shape;
  const Step& step;
  const Arena& arena;
  const AttentionWork& attention;

  const LayerWeights* layers;
  const PackedLinear& head;
  const float* final_norm;
  EmbedTable embed;
  const float *rope_cos, *rope_sin;  // [position][head_dim / 2]

  float* hidden;                       // [T][hidden_size] the residual stream
  float *qkv, *attended, *inner;       // [T][qkv_size], [T][query_size], [T][intermediate_size] (int8 and int4 only)
  float* row_values;                   // [rank][row_stride] one normed row
  int64_t row_stride;                  // floats
  uint8_t *first, *second;             // activations as the linear layers read them
  float *first_scale, *second_scale;
  float* logits;                       // [R][vocab_size]
};

}  // namespace remora
