// Layer norm of a world model's residual stream on Hopper: a warp has a row of 1,024 numbers, 32 of them a lane, and goes on to
// further rows with the norm's weight and bias in registers. The stream is in 24 bits, an upper half and a byte; what
// sub-layers have added comes in UPDATES tensors of bf16 and an offset. With KEEP the sum is stored, again in 24 bits, rounded to
// nearest. The host prepends hopper.cuh.

typedef unsigned char u8;
#define WIDTH 1024
#define CHUNKS 4  // of eight neighbours of a lane

DEVICE u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// One of a pair of 24-bit numbers, of whose bytes `low` has the last.
DEVICE float joined(u32 pair, u32 low, int odd, int byte) { return __uint_as_float(__byte_perm(pair, low, (odd ? 0x3200 : 0x1000) | (4 + byte) << 4) & 0xffffff00u); }
DEVICE float lower_bf16(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float upper_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

extern "C" __global__ void __launch_bounds__(128, 3)
    frame_norm(const u16* upper, const u8* lower, u16* kept_upper, u8* kept_lower, const u16* update, const u16* second, const float* offset, const float* weight,
               const float* bias, u16* out, int rows, float eps) {
  __shared__ float4 offsets[2 * CHUNKS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int i = 2 * warp; i < 2 * warp + 2; ++i) offsets[i][lane] = *reinterpret_cast<const float4*>(offset + 256 * (i >> 1) + 8 * lane + 4 * (i & 1));
  float w[32], b[32];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int column = 256 * (i >> 1) + 8 * lane + 4 * (i & 1);
    const float4 ws = *reinterpret_cast<const float4*>(weight + column), bs = *reinterpret_cast<const float4*>(bias + column);
    w[4 * i] = ws.x, w[4 * i + 1] = ws.y, w[4 * i + 2] = ws.z, w[4 * i + 3] = ws.w;
    b[4 * i] = bs.x, b[4 * i + 1] = bs.y, b[4 * i + 2] = bs.z, b[4 * i + 3] = bs.w;
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int row = blockIdx.x * 4 + warp; row < rows; row += gridDim.x * 4) {
    const size_t place = (size_t)row * WIDTH + 8 * lane;
    uint4 high[CHUNKS], first[CHUNKS];
    uint2 low[CHUNKS];
#if UPDATES == 2
    uint4 further[CHUNKS];
#endif
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      high[c] = *reinterpret_cast<const uint4*>(upper + place + 256 * c);
      low[c] = *reinterpret_cast<const uint2*>(lower + place + 256 * c);
      first[c] = *reinterpret_cast<const uint4*>(update + place + 256 * c);
#if UPDATES == 2
      further[c] = *reinterpret_cast<const uint4*>(second + place + 256 * c);
#endif
    }
    float x[32], part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 more = offsets[2 * c + half][lane];
        const u32 bytes = half ? low[c].y : low[c].x;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 pair = word_of(high[c], 2 * half + i), added = word_of(first[c], 2 * half + i);
          float even = joined(pair, bytes, 0, 2 * i) + lower_bf16(added), odd = joined(pair, bytes, 1, 2 * i + 1) + upper_bf16(added);
#if UPDATES == 2
          const u32 then = word_of(further[c], 2 * half + i);
          even += lower_bf16(then), odd += upper_bf16(then);
#endif
          even += i ? more.z : more.x, odd += i ? more.w : more.y;
          const int at = 8 * c + 4 * half + 2 * i;
          x[at] = even, x[at + 1] = odd;
          part[2 * i] += even, part[2 * i + 1] += odd;
        }
      }
    const float sum = all_sum((part[0] + part[1]) + (part[2] + part[3]));
#if KEEP
    // An infinity or NaN, which rounding would make a number, makes the sum one.
    auto keep = [&](bool finite) {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        u32 bits[8], halves[4], bytes[2];
#pragma unroll
        for (int i = 0; i < 8; ++i) bits[i] = __float_as_uint(x[8 * c + i]) + (finite || isfinite(x[8 * c + i]) ? 128 : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) halves[i] = __byte_perm(bits[2 * i], bits[2 * i + 1], 0x7632);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          bytes[i] = __byte_perm(__byte_perm(bits[4 * i], bits[4 * i + 1], 0x0051), __byte_perm(bits[4 * i + 2], bits[4 * i + 3], 0x0051), 0x5410);
        *reinterpret_cast<uint4*>(kept_upper + place + 256 * c) = make_uint4(halves[0], halves[1], halves[2], halves[3]);
        *reinterpret_cast<uint2*>(kept_lower + place + 256 * c) = make_uint2(bytes[0], bytes[1]);
      }
    };
    if (fabsf(sum) < __int_as_float(0x7f800000))
      keep(true);
    else
      keep(false);
#endif
    const float mean = sum * (1.0f / WIDTH);
    float squares[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      x[i] -= mean;
      asm volatile("" : "+f"(x[i]));  // else it is computed again where it is read again
      squares[i & 3] += x[i] * x[i];
    }
    const float spread = rsqrtf(all_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) * (1.0f / WIDTH) + eps);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      x[i] = x[i] * spread * w[i] + b[i];
      asm volatile("" : "+f"(x[i]));
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const float* y = x + 8 * c;
      *reinterpret_cast<uint4*>(out + place + 256 * c) =
          make_uint4(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]), pack_bf16(y[6], y[7]));
    }
  }
}
