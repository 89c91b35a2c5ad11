// A model, the threads that run it and the memory of its steps: what a decoder handle of the C interface stands for.
#pragma once
#include "levels.h"
#include "model.h"
#include "remora.h"
#include "threads.h"

namespace remora {

class Decoder {
 public:
  // Throws like Model; std::system_error (no more threads).
  Decoder(const Shape& shape, const LevelKernels& kernels, int num_threads, const int32_t* cores,
          const WeightMemory& memory);

  void set_weight(WeightKind kind, int32_t layer, const Source& source);
  void set_grouped(WeightKind kind, int32_t layer, const GroupedSource& source);
  void adopt_grouped(WeightKind kind, int32_t layer, Dtype dtype, bool minimum);
  void finish();  // all weights are there; throws std::invalid_argument

  // Logits [num_logit_rows][vocab_size], or, without a head, the residual stream [num_tokens][hidden_size]; valid
  // until the next step. Throws std::invalid_argument, before anything is written, for a step or an arena that does
  // not fit.
  const float* run(const Step& step, const Arena& arena);

  const LevelKernels& kernels() const { return kernels_; }
  int64_t weight_bytes() const { return model_.weight_bytes(); }

 private:
  void check(const Step& step, const Arena& arena) const;
  void reserve(const Step& step);

  const LevelKernels& kernels_;
  Model model_;
  ThreadTeam threads_;
  Workspace space_;
  bool complete_ = false;
};

}  // namespace remora
