// Overwrites whole blocks with zeros: before a block changes its tenant.
#include "common.cuh"

// Grid: (pieces, blocks). block_bytes is a multiple of 16, as is the address.
extern "C" __global__ void zero_blocks(uint8* data, const int* blocks, int64 block_bytes) {
  uint4* written = reinterpret_cast<uint4*>(data + blocks[blockIdx.y] * block_bytes);
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < block_bytes / 16; i += step)
    written[i] = make_uint4(0, 0, 0, 0);
}
