// Writes K or V of blocks anew in another precision, always into other blocks.
// Macros: HEAD_DIM (multiple of 16), FROM, TO (formats of kv_codec.cuh).
#include "common.cuh"
#include "kv_codec.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;

constexpr bool is_same(...) { return false; }
template <class T>
constexpr bool is_same(T*, T*) {
  return true;
}

}  // namespace

// Grid: (blocks, layers, kv heads), THREADS threads; a warp does a token at a time. Offsets and strides, in bytes, are
// those of the side (K or V) in each memory; rows of equal formats are copied as they are.
extern "C" __global__ void __launch_bounds__(THREADS)
    reencode_blocks(uint8* from, const int* sources, int64 from_offset, int64 from_block, int64 from_layer,
                    int64 from_head, uint8* to, const int* targets, int64 to_offset, int64 to_block, int64 to_layer,
                    int64 to_head, int block_tokens) {
  const int64 layer = blockIdx.y, head = blockIdx.z;
  uint8* read = from + from_offset + sources[blockIdx.x] * from_block + layer * from_layer + head * from_head;
  uint8* written = to + to_offset + targets[blockIdx.x] * to_block + layer * to_layer + head * to_head;
  if constexpr (is_same(static_cast<FROM*>(nullptr), static_cast<TO*>(nullptr))) {
    const int num_words = block_tokens * (FROM::ROW_BYTES + 2 * FROM::NUM_SCALES) / 4;
    for (int i = threadIdx.x; i < num_words; i += THREADS)
      reinterpret_cast<uint32*>(written)[i] = reinterpret_cast<const uint32*>(read)[i];
  } else {
    __shared__ __align__(16) float rows[WARPS][HEAD_DIM];
    float* row = rows[threadIdx.x / 32];
    for (int slot = threadIdx.x / 32; slot < block_tokens; slot += WARPS) {
      decode_row<FROM>({read, block_tokens}, slot, row);
      encode_row<TO>(row, {written, block_tokens}, slot);
    }
  }
}
