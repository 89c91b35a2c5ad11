// Moves stored K to other positions: one more rotation. Macros: HEAD_DIM, KV_TYPE.
#include "common.cuh"

namespace {

constexpr int HALF = HEAD_DIM / 2;

// One row of `spans`: slots first_slot:end_slot of a block move by `delta` positions, in all layers and heads.
struct Span {
  int block, first_slot, end_slot, delta;
};

}  // namespace

// Grid: (spans, layers, kv heads), any number of threads. No slot may be in two spans, and the blocks must not be
// shared. Computed in fp32, rounded once.
extern "C" __global__ void k_shift(const Span* spans, const float* inv_freq, uint8* data, int64 layer_stride,
                                   int64 block_stride, int64 head_stride) {
  const Span span = spans[blockIdx.x];
  const Place place{data, blockIdx.y * layer_stride, block_stride, 0, head_stride};
  KV_TYPE* head = place.head<KV_TYPE>(span.block, 0, blockIdx.z);
  for (int i = threadIdx.x; i < (span.end_slot - span.first_slot) * HALF; i += blockDim.x) {
    const int slot = span.first_slot + i / HALF, pair = i % HALF;
    float sine, cosine;
    sincosf(static_cast<float>(span.delta) * inv_freq[pair], &sine, &cosine);
    KV_TYPE* low = head + slot * HEAD_DIM + pair;
    const float a = to_float(low[0]), b = to_float(low[HALF]);
    low[0] = from_float<KV_TYPE>(fmaf(-b, sine, a * cosine));
    low[HALF] = from_float<KV_TYPE>(fmaf(a, sine, b * cosine));
  }
}
