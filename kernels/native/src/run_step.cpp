#include "run_step.h"

#include <cstring>

#include "attention.h"
#include "kv_store.h"
#include "linear.h"
#include "rows.h"

namespace remora::REMORA_LEVEL {
namespace {

// Pieces of a linear layer for each rank: what is left for one rank alone at the end is at most a piece.
constexpr int64_t PIECES_PER_RANK = 16;
// Up to so many rows a layer is bound by reading its weights, and what is fetched ahead should be the rank's own.
constexpr int64_t STREAMED_ROWS = 2;

// One rank's walk through the layers. What a rank writes by rows it reads by the same rows without a barrier; linear
// layers read all rows and write columns, so a barrier stands before and after each.
class StepRun {
 public:
  StepRun(Team& team, const StepWork& work)
      : team_(team),
        work_(work),
        shape_(work.shape),
        num_tokens_(work.step.num_tokens),
        own_rows_(team.share(num_tokens_)),
        own_row_values_(work.row_values + team.rank * work.row_stride) {}

  void run() {
    for (int64_t t = own_rows_.begin; t < own_rows_.end; ++t) begin_row(t);
    for (int32_t index = 0; index < shape_.num_layers; ++index) {
      const LayerWeights& layer = work_.layers[index];
      attend(layer, index);
      feed_forward(layer);
    }
    if (shape_.has_head) write_logits();
  }

 private:
  void begin_row(int64_t row) {
    if (shape_.has_embedding) return embed_row(work_.embed, work_.step.token_ids[row], hidden(row));
    std::memcpy(hidden(row), work_.step.hidden + row * shape_.hidden_size,
                static_cast<size_t>(shape_.hidden_size) * sizeof(float));
  }
  float* hidden(int64_t row) const { return work_.hidden + row * shape_.hidden_size; }

  Activations first(Dtype dtype, int64_t num_in) const {
    return {work_.first, activation_stride(dtype, num_in), work_.first_scale};
  }
  Activations second(Dtype dtype, int64_t num_in) const {
    return {work_.second, activation_stride(dtype, num_in), work_.second_scale};
  }

  void norm_row(int64_t from, const float* weight, Dtype dtype, int64_t to) {
    rms_norm_row(hidden(from), weight, shape_.hidden_size, shape_.rms_norm_eps, own_row_values_);
    encode_row(dtype, own_row_values_, shape_.hidden_size, first(dtype, shape_.hidden_size), to);
  }
  void norm_rows(const float* weight) {
    for (int64_t t = own_rows_.begin; t < own_rows_.end; ++t) norm_row(t, weight, shape_.weights, t);
    team_.barrier();
  }
  void encode_rows(const float* values, int64_t num_in, const Activations& target) {
    for (int64_t t = own_rows_.begin; t < own_rows_.end; ++t)
      encode_row(shape_.weights, values + t * num_in, num_in, target, t);
    team_.barrier();
  }

  void divide_linear(const PackedLinear& weights, const Activations& input, int64_t num_rows,
                     const LinearOutput& output) {
    if (team_.size == 1 || num_rows <= STREAMED_ROWS) {
      linear(team_, weights, input, num_rows, output);
      return team_.barrier();
    }
    const int64_t panels = weights.padded_out / PANEL_COLUMNS, most = PIECES_PER_RANK * team_.size;
    const int64_t pieces = panels < most ? panels : most;
    team_.divide(pieces, [&](int64_t piece) {
      Team part{static_cast<int>(piece), static_cast<int>(pieces), nullptr, team_.own_scratch, nullptr};
      linear(part, weights, input, num_rows, output);
    });
    team_.barrier();
  }
  void apply(const PackedLinear& weights, const Activations& input, LinearOutput::Kind kind, float* out,
             int64_t stride) {
    divide_linear(weights, input, num_tokens_, {kind, out, stride, {}, 0});
  }
  void add_to_hidden(const PackedLinear& weights, const Activations& input) {
    apply(weights, input, LinearOutput::Kind::add, hidden(0), shape_.hidden_size);
  }

  void attend(const LayerWeights& layer, int32_t index) {
    const int64_t query_size = shape_.query_size(), kv_size = shape_.kv_size(), qkv_size = shape_.qkv_size();
    float* qkv = work_.qkv;
    float* attended = work_.attended;
    norm_rows(layer.input_norm);
    apply(layer.qkv, first(shape_.weights, shape_.hidden_size), LinearOutput::Kind::store, qkv, qkv_size);
    for (int64_t t = own_rows_.begin; t < own_rows_.end; ++t) rotate_row(layer, t, qkv + t * qkv_size);
    store_kv(team_, work_.step, work_.arena, index, qkv + query_size, qkv_size, qkv + query_size + kv_size, qkv_size);
    team_.barrier();
    const AttentionCall call{qkv,     qkv_size, attended,         query_size,
                             nullptr, index,    shape_.num_heads, shape_.attention_scale};
    attention(team_, work_.step, work_.arena, call, work_.attention);
    team_.barrier();
    merge_attention(team_, work_.step, work_.arena, call, work_.attention);
    const Activations input = first(shape_.weights, query_size);
    encode_rows(attended, query_size, input);
    add_to_hidden(layer.o, input);
  }

  void rotate_row(const LayerWeights& layer, int64_t row, float* qkv) {
    const int64_t head_dim = shape_.head_dim, offset = work_.step.positions[row] * (head_dim / 2);
    for (int32_t head = 0; head < shape_.num_heads + shape_.num_kv_heads; ++head) {
      float* values = qkv + head * head_dim;
      if (shape_.qk_norm) {
        const float* weight = head < shape_.num_heads ? layer.q_norm : layer.k_norm;
        rms_norm_row(values, weight, head_dim, shape_.rms_norm_eps, values);
      }
      rope_head(values, work_.rope_cos + offset, work_.rope_sin + offset, head_dim);
    }
  }

  void feed_forward(const LayerWeights& layer) {
    const int64_t inner_size = shape_.intermediate_size;
    const Activations input = first(shape_.weights, shape_.hidden_size), inner = second(shape_.weights, inner_size);
    norm_rows(layer.post_norm);
    if (is_quantised(shape_.weights)) {
      float* values = work_.inner;
      apply(layer.gate_up, input, LinearOutput::Kind::silu_store, values, inner_size);
      encode_rows(values, inner_size, inner);
    } else {
      divide_linear(layer.gate_up, input, num_tokens_,
                    {LinearOutput::Kind::silu_encoded, nullptr, 0, inner, layer.down.padded_in});
    }
    add_to_hidden(layer.down, inner);
  }

  void write_logits() {
    const int64_t num_rows = work_.step.num_logit_rows;
    const Dtype dtype = work_.head.dtype;
    const Range rows = team_.share(num_rows);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      norm_row(work_.step.logit_rows[r], work_.final_norm, dtype, r);
    team_.barrier();
    divide_linear(work_.head, first(dtype, shape_.hidden_size), num_rows,
                  {LinearOutput::Kind::store, work_.logits, shape_.vocab_size, {}, 0});
  }

  Team& team_;
  const StepWork& work_;
  const Shape& shape_;
  const int64_t num_tokens_;
  const Range own_rows_;
  float* own_row_values_;
};

}  // namespace

void run_step(Team& team, const StepWork& work) { StepRun(team, work).run(); }

}  // namespace remora::REMORA_LEVEL
