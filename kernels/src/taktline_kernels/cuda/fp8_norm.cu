// Layer norm, without weight and bias, of a world model's bf16 residual stream into e4m3, on Hopper: a warp has a row of 1,024
// numbers, 32 of them a lane, and reads its next row ahead. `offset` is added to all rows, and the result counted in one unit.
// The host prepends hopper.cuh.

#define WIDTH 1024
#define CHUNKS 4  // of eight neighbours of a lane

DEVICE u32 pack_e4m3(const float* x, float by) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1] * by), "f"(x[0] * by));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3] * by), "f"(x[2] * by));
  return (u32)low | (u32)high << 16;
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS) fp8_norm(const u16* stream, const float* offset, unsigned char* out, int rows, float eps, float inverse_unit) {
  __shared__ float4 offsets[2 * CHUNKS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, stride = gridDim.x * 4;
#pragma unroll
  for (int i = 2 * warp; i < 2 * warp + 2; ++i) offsets[i][lane] = *reinterpret_cast<const float4*>(offset + 256 * (i >> 1) + 8 * lane + 4 * (i & 1));
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  uint4 ahead[CHUNKS];
  auto read = [&](int row) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) ahead[c] = *reinterpret_cast<const uint4*>(stream + (size_t)row * WIDTH + 8 * lane + 256 * c);
  };
  int row = blockIdx.x * 4 + warp;
  if (row < rows) read(row);
  for (; row < rows; row += stride) {
    float x[32], part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const u32 words[4] = {ahead[c].x, ahead[c].y, ahead[c].z, ahead[c].w};
      const float4 more[2] = {offsets[2 * c][lane], offsets[2 * c + 1][lane]};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 by = more[i >> 1];
        x[8 * c + 2 * i] = __uint_as_float(words[i] << 16) + (i & 1 ? by.z : by.x);
        x[8 * c + 2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u) + (i & 1 ? by.w : by.y);
        part[i] += x[8 * c + 2 * i] + x[8 * c + 2 * i + 1];
      }
    }
    if (row + stride < rows) read(row + stride);
    const float mean = all_sum((part[0] + part[1]) + (part[2] + part[3])) * (1.0f / WIDTH);
    float squares[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      x[i] -= mean;
      asm volatile("" : "+f"(x[i]));  // else it is computed again where it is read again
      squares[i & 3] += x[i] * x[i];
    }
    const float spread = rsqrtf(all_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) * (1.0f / WIDTH) + eps) * inverse_unit;
    unsigned char* target = out + (size_t)row * WIDTH + 8 * lane;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) *reinterpret_cast<uint2*>(target + 256 * c) = make_uint2(pack_e4m3(x + 8 * c, spread), pack_e4m3(x + 8 * c + 4, spread));
  }
}
