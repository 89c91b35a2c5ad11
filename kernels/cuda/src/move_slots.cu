// Copies tokens to other slots, their K rotated to other positions by one more rotation. In place it is a shift of K.
// Macros: HEAD_DIM (multiple of 16), K_FORMAT, V_FORMAT (of kv_codec.cuh).
#include "common.cuh"
#include "kv_codec.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int HALF = HEAD_DIM / 2;

// One row of `moves`: num_tokens slots from source_slot on go to target_slot on, `delta` positions further.
struct Move {
  int source_block, source_slot, target_block, target_slot, num_tokens, delta;
};

// A row as it is, with its scales.
template <class Format>
__device__ __forceinline__ void copy_row(HeadRows<Format> from, int from_slot, HeadRows<Format> to, int to_slot) {
  const int lane = threadIdx.x % 32;
  const uint32* read = reinterpret_cast<const uint32*>(from.row(from_slot));
  uint32* written = reinterpret_cast<uint32*>(to.row(to_slot));
  for (int i = lane; i < Format::ROW_BYTES / 4; i += 32) written[i] = read[i];
  if constexpr (Format::NUM_SCALES > 0)
    if (lane < Format::NUM_SCALES) to.scales(to_slot)[lane] = from.scales(from_slot)[lane];
}

// K of one token behind one more rotation: computed in fp32, rounded or quantised once.
__device__ __forceinline__ void turn_row(HeadRows<K_FORMAT> from, int from_slot, HeadRows<K_FORMAT> to, int to_slot,
                                         int delta, const float* inv_freq, float* row) {
  decode_row(from, from_slot, row);
  for (int pair = threadIdx.x % 32; pair < HALF; pair += 32) {
    float sine, cosine;
    sincosf(static_cast<float>(delta) * inv_freq[pair], &sine, &cosine);
    const float a = row[pair], b = row[pair + HALF];
    row[pair] = fmaf(-b, sine, a * cosine);
    row[pair + HALF] = fmaf(a, sine, b * cosine);
  }
  encode_row(row, to, to_slot);
}

}  // namespace

// Grid: (moves, layers, 2 * kv heads: K's, then V's), THREADS threads. No target may be a source, but of its own move
// and slot, and blocks that change must not be shared.
extern "C" __global__ void __launch_bounds__(THREADS)
    move_slots(const Move* moves, const float* inv_freq, uint8* data, int64 layer_stride, int64 block_stride,
               int64 side_stride, int64 k_head_stride, int64 v_head_stride, int block_tokens) {
  __shared__ __align__(16) float rows[WARPS][HEAD_DIM];
  const Move move = moves[blockIdx.x];
  const Place place{data, blockIdx.y * layer_stride, block_stride, side_stride, k_head_stride, v_head_stride};
  const int num_kv_heads = gridDim.z / 2, side = blockIdx.z / num_kv_heads, head = blockIdx.z % num_kv_heads;
  const bool stays = move.source_block == move.target_block && move.source_slot == move.target_slot;
  if (stays && (side == 1 || move.delta == 0)) return;
  uint8* from = place.head(move.source_block, side, head);
  uint8* to = place.head(move.target_block, side, head);
  for (int i = threadIdx.x / 32; i < move.num_tokens; i += WARPS) {
    const int from_slot = move.source_slot + i, to_slot = move.target_slot + i;
    if (side == 1) {
      copy_row<V_FORMAT>({from, block_tokens}, from_slot, {to, block_tokens}, to_slot);
    } else if (move.delta == 0) {
      copy_row<K_FORMAT>({from, block_tokens}, from_slot, {to, block_tokens}, to_slot);
    } else {
      turn_row({from, block_tokens}, from_slot, {to, block_tokens}, to_slot, move.delta, inv_freq,
               rows[threadIdx.x / 32]);
    }
  }
}
