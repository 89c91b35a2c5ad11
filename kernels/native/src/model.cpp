#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace remora {
namespace {

constexpr int64_t FIRST_ROPE_POSITIONS = 1024;
constexpr const char* KIND_NAMES[] = {
    "embed",  "lm_head", "final_norm", "rope_inv_freq", "input_norm", "qkv",          "qkv_bias", "q_norm",
    "k_norm", "o",       "o_bias",     "post_norm",     "gate_up",    "gate_up_bias", "down",     "down_bias",
};
constexpr auto NUM_KINDS = static_cast<size_t>(WeightKind::count);
static_assert(sizeof KIND_NAMES / sizeof *KIND_NAMES == NUM_KINDS);

bool of_layer(WeightKind kind) { return kind >= WeightKind::input_norm; }

std::string name_of(WeightKind kind, int32_t layer) {
  const std::string name = KIND_NAMES[static_cast<size_t>(kind)];
  return of_layer(kind) ? "layers." + std::to_string(layer) + "." + name : name;
}

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void check_shape(const Shape& shape) {
  const int32_t sizes[] = {shape.num_layers,   shape.hidden_size, shape.intermediate_size, shape.num_heads,
                           shape.num_kv_heads, shape.head_dim,    shape.vocab_size};
  require(*std::min_element(std::begin(sizes), std::end(sizes)) > 0, "every size of the shape must be positive");
  require(shape.num_heads % shape.num_kv_heads == 0,
          std::to_string(shape.num_heads) + " query heads are no multiple of " + std::to_string(shape.num_kv_heads) +
              " kv heads");
  require(shape.head_dim % 16 == 0 && shape.head_dim <= 256,
          "head_dim " + std::to_string(shape.head_dim) + " is not served: multiples of 16 up to 256 are");
}

float* take_floats(WeightStore& store, int64_t count) { return reinterpret_cast<float*>(store.take(count * 4)); }

struct LinearSize {
  int64_t num_out, num_in;
  ColumnOrder order;
  bool bias;
};

LinearSize qkv_of(const Shape& s) { return {s.qkv_size(), s.hidden_size, ColumnOrder::plain, s.qkv_bias != 0}; }
LinearSize o_of(const Shape& s) { return {s.hidden_size, s.query_size(), ColumnOrder::plain, s.output_bias != 0}; }
LinearSize gate_up_of(const Shape& s) {
  return {2LL * s.intermediate_size, s.hidden_size, ColumnOrder::gate_up, s.mlp_bias != 0};
}
LinearSize down_of(const Shape& s) {
  return {s.hidden_size, s.intermediate_size, ColumnOrder::plain, s.mlp_bias != 0};
}

LinearSize head_of(const Shape& s) { return {s.vocab_size, s.hidden_size, ColumnOrder::plain, false}; }

// An upper bound: where int4 was asked for, some layers may have to be int8.
int64_t bytes_of(Dtype dtype, const LinearSize& size) {
  if (dtype == Dtype::int4) dtype = Dtype::int8;
  return packed_bytes(dtype, size.num_out, size.num_in, size.order, size.bias);
}
PackedLinear reserve_linear(WeightStore& store, Dtype dtype, const LinearSize& size, bool minimum) {
  return reserve_linear(store, dtype, size.num_out, size.num_in, size.order, size.bias, minimum);
}

Dtype embed_dtype(const Shape& shape) { return shape.weights == Dtype::fp32 ? Dtype::fp32 : Dtype::bf16; }

// Rows of the embedding, where it is not read from the head.
int64_t embed_bytes(const Shape& shape) {
  if (shape.embeds_from_head() || !shape.has_embedding) return 0;
  return 1LL * shape.vocab_size * shape.hidden_size * dtype_bytes(embed_dtype(shape));
}

// The norms of a layer.
int64_t vector_bytes(const Shape& shape) {
  return 2 * round_up(shape.hidden_size * 4LL, 64) + 2 * round_up(shape.head_dim * 4LL, 64);
}

}  // namespace

int64_t Model::max_weight_bytes(const Shape& shape) {
  check_shape(shape);
  const int64_t layer_bytes = vector_bytes(shape) + bytes_of(shape.weights, qkv_of(shape)) +
                              bytes_of(shape.weights, o_of(shape)) + bytes_of(shape.weights, gate_up_of(shape)) +
                              bytes_of(shape.weights, down_of(shape));
  return layer_bytes * shape.num_layers + vector_bytes(shape) +
         (shape.has_head ? bytes_of(shape.head_weights, head_of(shape)) : 0) + round_up(embed_bytes(shape), 64);
}

Model::Model(const Shape& s, const WeightMemory& memory)
    : shape(s), filled_(memory.filled), embed_dtype_(embed_dtype(s)) {
  const int64_t bytes = max_weight_bytes(shape);
  store_ = memory.data == nullptr ? std::make_unique<WeightStore>(bytes)
                                  : std::make_unique<WeightStore>(memory.data, memory.bytes);
  // Layers of int8 or int4 are reserved when they are set: only then is it known which of both they are.
  const auto reserve = [&](Dtype dtype, const LinearSize& size) {
    return is_quantised(dtype) ? PackedLinear{} : reserve_linear(*store_, dtype, size, false);
  };
  for (int32_t index = 0; index < shape.num_layers; ++index) {
    LayerWeights layer{};
    layer.input_norm = take_floats(*store_, shape.hidden_size);
    layer.qkv = reserve(shape.weights, qkv_of(shape));
    if (shape.qk_norm) {
      layer.q_norm = take_floats(*store_, shape.head_dim);
      layer.k_norm = take_floats(*store_, shape.head_dim);
    }
    layer.o = reserve(shape.weights, o_of(shape));
    layer.post_norm = take_floats(*store_, shape.hidden_size);
    layer.gate_up = reserve(shape.weights, gate_up_of(shape));
    layer.down = reserve(shape.weights, down_of(shape));
    layers.push_back(layer);
  }
  if (shape.has_head) {
    final_norm = take_floats(*store_, shape.hidden_size);
    head = reserve(shape.head_weights, head_of(shape));
  }
  if (const int64_t rows_bytes = embed_bytes(shape); rows_bytes > 0) embed_rows_ = store_->take(rows_bytes);
  set_.assign(NUM_KINDS * static_cast<size_t>(shape.num_layers), 0);
}

bool Model::expects(WeightKind kind) const {
  switch (kind) {
    case WeightKind::embed: return shape.has_embedding != 0;
    case WeightKind::lm_head: return shape.has_head != 0 && shape.tied_head == 0;
    case WeightKind::final_norm: return shape.has_head != 0;
    case WeightKind::qkv_bias: return shape.qkv_bias != 0;
    case WeightKind::q_norm:
    case WeightKind::k_norm: return shape.qk_norm != 0;
    case WeightKind::o_bias: return shape.output_bias != 0;
    case WeightKind::gate_up_bias:
    case WeightKind::down_bias: return shape.mlp_bias != 0;
    default: return true;
  }
}

void Model::check_place(WeightKind kind, int32_t layer) const {
  require(kind >= WeightKind::embed && kind < WeightKind::count && expects(kind), "a weight that the shape has not");
  require(!of_layer(kind) || (layer >= 0 && layer < shape.num_layers), "no such layer");
}

void Model::set_weight(ThreadTeam& threads, WeightKind kind, int32_t layer_index, const Source& source) {
  check_place(kind, layer_index);
  const std::string name = name_of(kind, layer_index);
  require(!filled_ || kind == WeightKind::rope_inv_freq, "weight " + name + " is packed already");

  auto expect = [&](int64_t rows, int64_t columns) {
    require(source.rows == rows && source.columns == columns,
            "weight " + name + " has " + std::to_string(source.rows) + " x " + std::to_string(source.columns) +
                " values, not " + std::to_string(rows) + " x " + std::to_string(columns));
  };
  auto fill_vector = [&](float* target, int64_t count) {
    expect(1, count);
    to_fp32(source, 0, count, target);
  };
  auto fill_linear = [&](const PackedLinear& packed, ColumnOrder order) {
    require(packed.data != nullptr, "weight " + name + " must be given as int8 or int4");
    expect(packed.num_out, packed.num_in);
    struct Job {
      const PackedLinear& packed;
      ColumnOrder order;
      const Source& source;
    } job{packed, order, source};
    threads.run(
        [](void* context, Team& team) {
          const Job& work = *static_cast<Job*>(context);
          pack_linear(work.packed, work.order, work.source, team);
        },
        &job);
  };
  auto fill_bias = [&](const PackedLinear& packed, ColumnOrder order) {
    expect(1, packed.num_out);
    require(packed.bias != nullptr, "weight " + name + " must follow the weight that it is added to");
    pack_bias(packed, order, source);
  };

  LayerWeights* layer = of_layer(kind) ? &layers[static_cast<size_t>(layer_index)] : nullptr;
  switch (kind) {
    case WeightKind::embed:
      expect(shape.vocab_size, shape.hidden_size);
      if (shape.tied_head) fill_linear(head, ColumnOrder::plain);
      if (embed_rows_ != nullptr) copy_rows(source, embed_dtype_, embed_rows_);
      break;
    case WeightKind::lm_head: fill_linear(head, ColumnOrder::plain); break;
    case WeightKind::final_norm: fill_vector(final_norm, shape.hidden_size); break;
    case WeightKind::rope_inv_freq:
      rope_inv_freq_.resize(static_cast<size_t>(shape.head_dim / 2));
      fill_vector(rope_inv_freq_.data(), shape.head_dim / 2);
      rope_cos.clear();
      rope_sin.clear();
      extend_rope(FIRST_ROPE_POSITIONS);
      break;
    case WeightKind::input_norm: fill_vector(layer->input_norm, shape.hidden_size); break;
    case WeightKind::post_norm: fill_vector(layer->post_norm, shape.hidden_size); break;
    case WeightKind::q_norm: fill_vector(layer->q_norm, shape.head_dim); break;
    case WeightKind::k_norm: fill_vector(layer->k_norm, shape.head_dim); break;
    case WeightKind::qkv: fill_linear(layer->qkv, ColumnOrder::plain); break;
    case WeightKind::qkv_bias: fill_bias(layer->qkv, ColumnOrder::plain); break;
    case WeightKind::o: fill_linear(layer->o, ColumnOrder::plain); break;
    case WeightKind::o_bias: fill_bias(layer->o, ColumnOrder::plain); break;
    case WeightKind::gate_up: fill_linear(layer->gate_up, ColumnOrder::gate_up); break;
    case WeightKind::gate_up_bias: fill_bias(layer->gate_up, ColumnOrder::gate_up); break;
    case WeightKind::down: fill_linear(layer->down, ColumnOrder::plain); break;
    case WeightKind::down_bias: fill_bias(layer->down, ColumnOrder::plain); break;
    case WeightKind::count: break;
  }
  seen(kind, layer_index) = true;
}

struct Model::Grouped {
  PackedLinear& packed;
  LinearSize size;
};

Model::Grouped Model::find_grouped(WeightKind kind, int32_t layer_index) {
  check_place(kind, layer_index);
  const std::string name = name_of(kind, layer_index);
  require(is_quantised(shape.weights), "weight " + name + " cannot be int8 or int4");
  LayerWeights* layer = of_layer(kind) ? &layers[static_cast<size_t>(layer_index)] : nullptr;
  auto found = [&](PackedLinear& packed, const LinearSize& size) -> Grouped {
    require(packed.data == nullptr, "weight " + name + " is set twice");
    return {packed, size};
  };
  switch (kind) {
    case WeightKind::lm_head: return found(head, head_of(shape));
    case WeightKind::qkv: return found(layer->qkv, qkv_of(shape));
    case WeightKind::o: return found(layer->o, o_of(shape));
    case WeightKind::gate_up: return found(layer->gate_up, gate_up_of(shape));
    case WeightKind::down: return found(layer->down, down_of(shape));
    default: throw std::invalid_argument("weight " + name + " cannot be int8 or int4");
  }
}

void Model::adopt_grouped(WeightKind kind, int32_t layer, Dtype dtype, bool minimum) {
  require(filled_ && is_quantised(dtype), "no packed int8 or int4 layers to adopt");
  const Grouped grouped = find_grouped(kind, layer);
  grouped.packed = reserve_linear(*store_, dtype, grouped.size, minimum);
  seen(kind, layer) = true;
}

void Model::set_grouped(ThreadTeam& threads, WeightKind kind, int32_t layer_index, const GroupedSource& source) {
  const auto [packed, size] = find_grouped(kind, layer_index);
  const std::string name = name_of(kind, layer_index);
  require(!filled_, "weight " + name + " is packed already");
  require(is_quantised(source.dtype), "weight " + name + " cannot be int8 or int4");
  require(source.rows == size.num_out && source.columns == size.num_in,
          "weight " + name + " has " + std::to_string(source.rows) + " x " + std::to_string(source.columns) +
              " values, not " + std::to_string(size.num_out) + " x " + std::to_string(size.num_in));
  packed = reserve_linear(*store_, source.dtype, size, source.minimums != nullptr);
  struct Job {
    const PackedLinear& packed;
    ColumnOrder order;
    const GroupedSource& source;
  } job{packed, size.order, source};
  threads.run(
      [](void* context, Team& team) {
        const Job& work = *static_cast<Job*>(context);
        pack_grouped(work.packed, work.order, work.source, team);
      },
      &job);
  seen(kind, layer_index) = true;
}

char& Model::seen(WeightKind kind, int32_t layer) {
  const auto index = static_cast<size_t>(of_layer(kind) ? layer : 0);
  return set_[index * NUM_KINDS + static_cast<size_t>(kind)];
}

void Model::check_complete() {
  const auto needs_setting = [&](WeightKind kind) {
    if (!filled_ || kind == WeightKind::rope_inv_freq) return true;
    return is_quantised(shape.weights) && (kind == WeightKind::lm_head || kind == WeightKind::qkv ||
                                           kind == WeightKind::o || kind == WeightKind::gate_up ||
                                           kind == WeightKind::down);
  };
  for (size_t kind = 0; kind < NUM_KINDS; ++kind) {
    const auto weight = static_cast<WeightKind>(kind);
    if (!needs_setting(weight)) continue;
    for (int32_t layer = 0; layer < (of_layer(weight) ? shape.num_layers : 1); ++layer)
      require(!expects(weight) || seen(weight, layer), "weight " + name_of(weight, layer) + " is missing");
  }
}

void Model::extend_rope(int64_t count) {
  const int64_t half = shape.head_dim / 2;
  const auto have = static_cast<int64_t>(rope_cos.size()) / half;
  if (count <= have) return;
  const int64_t wanted = std::max(count, 2 * have);
  rope_cos.resize(static_cast<size_t>(wanted * half));
  rope_sin.resize(static_cast<size_t>(wanted * half));
  for (int64_t position = have; position < wanted; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      // The angle is rounded to fp32 as Hugging Face rounds it: at position 8,000 that is 2e-4 of a turn.
      const double angle = static_cast<float>(position) * rope_inv_freq_[static_cast<size_t>(i)];
      const auto place = static_cast<size_t>(position * half + i);
      rope_cos[place] = static_cast<float>(std::cos(angle)) * shape.rope_attention_factor;
      rope_sin[place] = static_cast<float>(std::sin(angle)) * shape.rope_attention_factor;
    }
  }
}

EmbedTable Model::embed_table() const {
  return {{embed_rows_, embed_dtype_, shape.vocab_size, shape.hidden_size}, &head};
}

void embed_row(const EmbedTable& table, int32_t token_id, float* out) {
  if (table.rows.data == nullptr) return unpack_row(*table.head, token_id, out);
  to_fp32(table.rows, token_id * table.rows.columns, table.rows.columns, out);
}

Buffer::~Buffer() { std::free(data_); }

void Buffer::reserve(int64_t bytes) {
  if (bytes <= bytes_) return;
  std::free(data_);
  bytes_ = 0;
  const int64_t rounded = round_up(bytes + bytes / 4, 4096);
  data_ = static_cast<uint8_t*>(std::aligned_alloc(4096, static_cast<size_t>(rounded)));
  if (data_ == nullptr) throw std::bad_alloc();
  bytes_ = rounded;
}

}  // namespace remora
