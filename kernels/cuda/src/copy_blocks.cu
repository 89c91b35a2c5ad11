// Copies whole blocks: inside an arena, into a staging buffer, and out of one.
#include "common.cuh"

// Grid: (pieces, blocks). Block sources[i] of `from` goes to block targets[i] of `to`; null means block i (a staging
// buffer). No target may be a source. block_bytes is a multiple of 16, as are both addresses.
extern "C" __global__ void copy_blocks(const uint8* from, const int* sources, uint8* to, const int* targets,
                                       int64 block_bytes) {
  const int64 source = sources == nullptr ? blockIdx.y : sources[blockIdx.y];
  const int64 target = targets == nullptr ? blockIdx.y : targets[blockIdx.y];
  const uint4* read = reinterpret_cast<const uint4*>(from + source * block_bytes);
  uint4* written = reinterpret_cast<uint4*>(to + target * block_bytes);
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < block_bytes / 16; i += step)
    written[i] = read[i];
}
