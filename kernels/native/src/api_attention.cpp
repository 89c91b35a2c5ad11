// The C interface to storing K/V, to re-encoding blocks and to attention alone, outside a decoder. Callers check sizes
// and block indices; pointers are trusted. All return -1 when the level is not available or memory runs out, else 0.
#include <exception>

#include "attention_plan.h"
#include "levels.h"
#include "threads.h"

#define REMORA_EXPORT extern "C" __attribute__((visibility("default")))

using namespace remora;

namespace {

struct AttentionRun {
  const LevelKernels& kernels;
  const Step& step;
  const Arena& arena;
  int32_t first_layer, num_layers;
  AttentionCall call;
  const AttentionWork* work;
  const float *k, *v;
};

struct ReencodeRun {
  const LevelKernels& kernels;
  const Arena &from, &to;
  const int32_t *sources, *targets;
  int64_t count;
};

void run_reencode(void* context, Team& team) {
  const ReencodeRun& run = *static_cast<ReencodeRun*>(context);
  run.kernels.reencode_blocks(team, run.from, run.to, run.sources, run.targets, run.count);
}

void run_attention(void* context, Team& team) {
  const AttentionRun& run = *static_cast<AttentionRun*>(context);
  AttentionCall call = run.call;
  for (int32_t layer = run.first_layer; layer < run.first_layer + run.num_layers; ++layer) {
    call.layer = layer;
    run.kernels.attention(team, run.step, run.arena, call, *run.work);
    team.barrier();
    run.kernels.merge_attention(team, run.step, run.arena, call, *run.work);
    team.barrier();
  }
}

void run_store(void* context, Team& team) {
  const AttentionRun& run = *static_cast<AttentionRun*>(context);
  const int64_t stride = static_cast<int64_t>(run.arena.num_kv_heads) * run.arena.head_dim;
  run.kernels.store_kv(team, run.step, run.arena, run.first_layer, run.k, stride, run.v, stride);
}

}  // namespace

// k and v [num_tokens][num_kv_heads * head_dim].
REMORA_EXPORT int32_t remora_store_kv(int32_t level, int32_t num_threads, const Step* step, const Arena* arena,
                                      int32_t layer, const float* k, const float* v) {
  const LevelKernels* kernels = kernels_of(static_cast<Level>(level));
  if (kernels == nullptr) return -1;
  try {
    ThreadTeam threads(num_threads, nullptr);
    AttentionRun run{*kernels, *step, *arena, layer, 1, {}, nullptr, k, v};
    threads.run(run_store, &run);
  } catch (const std::exception&) {
    return -1;
  }
  return 0;
}

// Blocks sources[i] of `from` to blocks targets[i] of `to`, in the precisions of `to`.
REMORA_EXPORT int32_t remora_reencode_blocks(int32_t level, int32_t num_threads, const Arena* from, const Arena* to,
                                             const int32_t* sources, const int32_t* targets, int64_t count) {
  const LevelKernels* kernels = kernels_of(static_cast<Level>(level));
  if (kernels == nullptr) return -1;
  try {
    ThreadTeam threads(num_threads, nullptr);
    ReencodeRun run{*kernels, *from, *to, sources, targets, count};
    threads.run(run_reencode, &run);
  } catch (const std::exception&) {
    return -1;
  }
  return 0;
}

// Attention of `num_layers` layers from `first_layer` on with the same queries q [num_tokens][num_heads * head_dim],
// `repeats` times; out like q and lse [num_tokens][num_heads] (may be null) are those of the last layer.
REMORA_EXPORT int32_t remora_attention(int32_t level, int32_t num_threads, const Step* step, const Arena* arena,
                                       int32_t first_layer, int32_t num_layers, int32_t repeats, int32_t num_heads,
                                       float scale, const float* q, float* out, float* lse) {
  const LevelKernels* kernels = kernels_of(static_cast<Level>(level));
  if (kernels == nullptr) return -1;
  try {
    ThreadTeam threads(num_threads, nullptr);
    AttentionPlan plan;
    const int64_t stride = static_cast<int64_t>(num_heads) * arena->head_dim;
    for (int32_t repeat = 0; repeat < repeats; ++repeat) {
      const AttentionWork& work =
          plan.prepare(*step, *arena, num_heads, kernels->attention_tile_rows(*arena), num_threads);
      AttentionRun run{*kernels, *step, *arena, first_layer, num_layers,
                       {q, stride, out, stride, lse, first_layer, num_heads, scale}, &work, nullptr, nullptr};
      threads.run(run_attention, &run);
    }
  } catch (const std::exception&) {
    return -1;
  }
  return 0;
}
