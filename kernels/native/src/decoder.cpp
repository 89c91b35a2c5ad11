#include "decoder.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace remora {
namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Rows of different ranks share no cache line.
int64_t row_stride(const Shape& shape) { return round_up(shape.hidden_size, 16); }

std::string text(int64_t number) { return std::to_string(number); }

}  // namespace

Decoder::Decoder(const Shape& shape, const LevelKernels& kernels, int num_threads, const int32_t* cores,
                 const WeightMemory& memory)
    : kernels_(kernels), model_(shape, memory), threads_(num_threads, cores) {}

void Decoder::set_weight(WeightKind kind, int32_t layer, const Source& source) {
  model_.set_weight(threads_, kind, layer, source);
}

void Decoder::set_grouped(WeightKind kind, int32_t layer, const GroupedSource& source) {
  model_.set_grouped(threads_, kind, layer, source);
}

void Decoder::adopt_grouped(WeightKind kind, int32_t layer, Dtype dtype, bool minimum) {
  model_.adopt_grouped(kind, layer, dtype, minimum);
}

void Decoder::finish() {
  model_.check_complete();
  complete_ = true;
}

void Decoder::check(const Step& step, const Arena& arena) const {
  const Shape& shape = model_.shape;
  require(complete_, "weights are missing");
  require(arena.num_layers == shape.num_layers && arena.num_kv_heads == shape.num_kv_heads &&
              arena.head_dim == shape.head_dim,
          "the KV geometry does not fit the model's layers, kv heads or head_dim");
  require(arena.block_tokens > 0 && arena.block_tokens % 16 == 0 && ATTENTION_CHUNK % arena.block_tokens == 0,
          "block_tokens must be a multiple of 16 that divides 512");
  require(arena.block_bytes >= kv_layer_bytes(arena) * arena.num_layers,
          "block_bytes is smaller than a block of this geometry");

  require(step.num_tokens > 0 && step.num_sequences > 0, "a step without tokens");
  require(step.num_logit_rows >= 0 && step.num_logit_rows <= step.num_tokens, "more logit rows than tokens");
  require(step.query_start[0] == 0 && step.query_start[step.num_sequences] == step.num_tokens,
          "query_start does not cover the tokens of the step");
  require((step.hidden == nullptr) == (shape.has_embedding != 0),
          "hidden states are for stages without an embedding, and only for those");
  for (int32_t t = 0; shape.has_embedding && t < step.num_tokens; ++t) {
    if (step.token_ids[t] < 0 || step.token_ids[t] >= shape.vocab_size)
      throw std::invalid_argument("token id " + text(step.token_ids[t]) + " lies outside a vocabulary of " +
                                  text(shape.vocab_size));
  }
  const int64_t num_blocks = arena.data_bytes / arena.block_bytes;
  for (int32_t s = 0; s < step.num_sequences; ++s) {
    const int32_t begin = step.query_start[s], end = step.query_start[s + 1], context = step.context_len[s];
    require(begin < end && context >= end - begin, "a sequence without rows, or with more rows than context");
    for (int32_t t = begin; t < end; ++t)
      require(step.positions[t] == context - end + t, "positions must ascend to the end of the context");
    const int32_t columns = (context + arena.block_tokens - 1) / arena.block_tokens;
    if (columns > step.table_stride)
      throw std::invalid_argument(text(context) + " tokens need " + text(columns) +
                                  " columns of the block table, which has " + text(step.table_stride));
    for (int32_t column = 0; column < columns; ++column) {
      const int32_t block = step.block_table[1LL * s * step.table_stride + column];
      if (block < 0 || block >= num_blocks)
        throw std::invalid_argument("block " + text(block) + " lies outside an arena of " + text(num_blocks) +
                                    " blocks");
    }
  }
  for (int32_t r = 0; r < step.num_logit_rows; ++r)
    require(step.logit_rows[r] >= 0 && step.logit_rows[r] < step.num_tokens, "a logit row outside the step");
}

void Decoder::reserve(const Step& step) {
  const Shape& shape = model_.shape;
  const int64_t rows = step.num_tokens;
  auto activation_bytes = [&](Dtype dtype, int64_t num_in) {
    return kernels_.activation_stride(dtype, num_in) * (rows + ACTIVATION_SPARE_ROWS);
  };
  space_.hidden.reserve(rows * shape.hidden_size * 4);
  space_.qkv.reserve(rows * shape.qkv_size() * 4);
  space_.attended.reserve(rows * shape.query_size() * 4);
  if (is_quantised(shape.weights)) space_.inner.reserve(rows * shape.intermediate_size * 4);
  space_.row_values.reserve(threads_.size() * row_stride(shape) * 4);
  space_.first.reserve(std::max({activation_bytes(shape.weights, shape.hidden_size),
                                 activation_bytes(shape.weights, shape.query_size()),
                                 activation_bytes(shape.head_weights, shape.hidden_size)}));
  space_.second.reserve(activation_bytes(shape.weights, shape.intermediate_size));
  const int64_t scale_rows_bytes = (rows + ACTIVATION_SPARE_ROWS) * 4;
  space_.first_scale.reserve(scale_rows_bytes * num_scales(std::max<int64_t>(shape.hidden_size, shape.query_size())));
  space_.second_scale.reserve(scale_rows_bytes * num_scales(shape.intermediate_size));
  if (shape.has_head) space_.logits.reserve(std::max<int64_t>(1, step.num_logit_rows) * shape.vocab_size * 4);
}

const float* Decoder::run(const Step& step, const Arena& arena) {
  check(step, arena);
  model_.extend_rope(*std::max_element(step.context_len, step.context_len + step.num_sequences));
  reserve(step);
  const AttentionWork& attention = space_.plan.prepare(step, arena, model_.shape.num_heads,
                                                       kernels_.attention_tile_rows(arena), threads_.size());
  const StepWork work{
      model_.shape,
      step,
      arena,
      attention,
      model_.layers.data(),
      model_.head,
      model_.final_norm,
      model_.embed_table(),
      model_.rope_cos.data(),
      model_.rope_sin.data(),
      space_.hidden.floats(),
      space_.qkv.floats(),
      space_.attended.floats(),
      space_.inner.floats(),
      space_.row_values.floats(),
      row_stride(model_.shape),
      space_.first.bytes(),
      space_.second.bytes(),
      space_.first_scale.floats(),
      space_.second_scale.floats(),
      space_.logits.floats(),
  };
  struct Job {
    const LevelKernels& kernels;
    const StepWork& work;
  } job{kernels_, work};
  threads_.run(
      [](void* context, Team& team) {
        const Job& own = *static_cast<Job*>(context);
        own.kernels.run_step(team, own.work);
      },
      &job);
  return model_.shape.has_head ? space_.logits.floats() : space_.hidden.floats();
}

}  // namespace remora
