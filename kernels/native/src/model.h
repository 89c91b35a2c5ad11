// A decoder of the Llama family with packed weights, and the memory that its steps use. Level-independent.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "linear.h"
#include "packing.h"
#include "step_work.h"
#include "threads.h"

namespace remora {

// Tensors that are set one by one; those of a layer in this order.
enum class WeightKind : int32_t {
  embed, lm_head, final_norm, rope_inv_freq,
  input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, post_norm, gate_up, gate_up_bias, down, down_bias,
  count
};

// Memory for packed weights that somebody else owns; without an address a model has memory of its own.
struct WeightMemory {
  uint8_t* data = nullptr;
  int64_t bytes = 0;
  bool filled = false;  // read-only, with the weights of this very shape packed in it
};

class Model {
 public:
  // Throws std::bad_alloc; std::invalid_argument names what does not fit; std::length_error for too little memory.
  explicit Model(const Shape& shape, const WeightMemory& memory = {});
  // Bytes of memory that the weights of a shape need at most. Throws std::invalid_argument.
  static int64_t max_weight_bytes(const Shape& shape);

  // Packs a tensor on all threads; the caller may drop it afterwards. Throws std::invalid_argument.
  void set_weight(ThreadTeam& threads, WeightKind kind, int32_t layer, const Source& source);
  // The same for a linear layer of a model whose weights are int8 or int4; each layer may be either.
  void set_grouped(ThreadTeam& threads, WeightKind kind, int32_t layer, const GroupedSource& source);
  // In filled memory: the next linear layer of int8 or int4, in the order in which they were packed.
  void adopt_grouped(WeightKind kind, int32_t layer, Dtype dtype, bool minimum);
  // Throws std::invalid_argument naming the first weight that was never set; in filled memory that is rope_inv_freq or a
  // layer of int8 or int4, for all others lie there.
  void check_complete();
  // cos and sin for positions [0, count), grown by doubling.
  void extend_rope(int64_t count);
  EmbedTable embed_table() const;

  const Shape shape;
  std::vector<LayerWeights> layers;
  PackedLinear head;
  float* final_norm = nullptr;
  std::vector<float> rope_cos, rope_sin;  // [position][head_dim / 2]
  int64_t weight_bytes() const { return store_->used_bytes(); }

 private:
  bool expects(WeightKind kind) const;
  void check_place(WeightKind kind, int32_t layer) const;
  char& seen(WeightKind kind, int32_t layer);
  struct Grouped;
  Grouped find_grouped(WeightKind kind, int32_t layer);

  std::unique_ptr<WeightStore> store_;
  bool filled_;
  uint8_t* embed_rows_ = nullptr;  // [vocab_size][hidden_size], bf16 or fp32, unless embeds_from_head()
  Dtype embed_dtype_;
  std::vector<float> rope_inv_freq_;
  std::vector<char> set_;
};

// 64-byte aligned memory that grows and is never initialised.
class Buffer {
 public:
  ~Buffer();
  void reserve(int64_t bytes);  // throws std::bad_alloc; the content is lost when it grows
  uint8_t* bytes() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Where steps work (StepWork says on what); kept between steps.
struct Workspace {
  Buffer hidden, qkv, attended, inner, row_values, first, second, first_scale, second_scale, logits;
  AttentionPlan plan;
};

}  // namespace remora
