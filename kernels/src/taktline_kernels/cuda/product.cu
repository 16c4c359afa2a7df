// Linear layers of some hundred rows on Hopper, one tile a block: one thread feeds shared memory through the bulk tensor
// copy engine, one or two warpgroups compute. The product is transposed: weights are the rows of a tile, tokens its
// columns. Before the kernel before has ended, the first stages of the weight are read, and the others asked for into L2.
// LATE: the next kernel starts, and reads its weight, only when all of this one's reads are on their way.
// GROUPS warpgroups share the tile's weights, 64 channels, and have BN tokens each (TOGETHER), or have 64 channels each of
// the same BN tokens.
// MODE 0: bias, and gelu by tanh where `activation` is 1. 1: silu(gate) * up, of 64 gates in the first warpgroup and their
// ups, the second half of the weight's rows, in the other. 2: sums
// of one part of the depth, fp32 (parts, rows, channels). 3: a causal convolution of four taps along the tokens and silu
// on the first `mixed` channels, which go to `thirds` (3, rows, mixed / 3); a tile has all tokens of a sequence.
// The host prepends hopper.cuh and wgmma(), generated for BN.

#define CHANNELS (TOGETHER ? 64 : 64 * GROUPS)
#define TOKENS (TOGETHER ? BN * GROUPS : BN)
#define WEIGHT_STAGE (CHANNELS * 128)
#define STAGE (WEIGHT_STAGE + TOKENS * 128)
#define COMPUTING (GROUPS * 128)

DEVICE float gelu(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}
DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
DEVICE float wide(u32 x) { return __uint_as_float(x << 16); }
DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(COMPUTING) : "memory"); }
DEVICE void copy_weights(u32 target, const TensorMap* weights, int column, int weight, int channels, u32 bar) {
  copy_tile(target, weights, column, weight * (MODE == 1 ? 64 : CHANNELS), bar);
  if (MODE == 1) copy_tile(target + 8192, weights, column, channels / 2 + weight * 64, bar);
}
DEVICE void ask_for_tile(const TensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row) : "memory");
}
DEVICE void ask_for_weights(const TensorMap* weights, int column, int weight, int channels) {
  ask_for_tile(weights, column, weight * (MODE == 1 ? 64 : CHANNELS));
  if (MODE == 1) ask_for_tile(weights, column, channels / 2 + weight * 64);
}
DEVICE void write_tile(const TensorMap* out, int column, int row, u32 staging) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(out), "r"(column), "r"(row), "r"(staging) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(COMPUTING + 32, MINIMUM)
    product(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens, const __grid_constant__ TensorMap out, const u16* bias,
            float* parts, const u16* taps, u16* thirds, int weight_tiles, int blocks, int share, int rows, int channels, int mixed, int activation) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int group = threadIdx.x >> 7;
  const int weight = blockIdx.x % weight_tiles, token = blockIdx.x / weight_tiles, part = blockIdx.y;
  const int first = part * share, count = min(share, blocks - first);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&full[i]), 1);
      barrier_init(smem_address(&empty[i]), GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if (!LATE || count <= STAGES) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  const u32 base = smem_address(shared);

  if (group == GROUPS) {
    if (threadIdx.x == COMPUTING) {
      const int ahead = min(count, STAGES);
      for (int i = 0; i < ahead; ++i) {
        barrier_expect(smem_address(&full[i]), STAGE);
        copy_weights(base + i * STAGE, &weights, (first + i) * 64, weight, channels, smem_address(&full[i]));
      }
      if (AHEAD && token == 0) {
        for (int i = ahead; i < count; ++i) ask_for_weights(&weights, (first + i) * 64, weight, channels);
      }
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (int i = 0; i < ahead; ++i) copy_tile(base + i * STAGE + WEIGHT_STAGE, &tokens, (first + i) * 64, token * TOKENS, smem_address(&full[i]));
      int stage = 0;
      u32 parity = 0;
      for (int i = ahead; i < count; ++i) {
        barrier_wait(smem_address(&empty[stage]), parity);
        const u32 bar = smem_address(&full[stage]), target = base + stage * STAGE;
        barrier_expect(bar, STAGE);
        copy_weights(target, &weights, (first + i) * 64, weight, channels, bar);
        copy_tile(target + WEIGHT_STAGE, &tokens, (first + i) * 64, token * TOKENS, bar);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (LATE && i + 1 == count) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      }
    }
    return;
  }
  const int local = threadIdx.x & 127, warp = local >> 5, lane = local & 31, g = lane >> 2, t = lane & 3;
  const int first_channel = weight * CHANNELS + (TOGETHER ? 0 : group * 64), channel = first_channel + warp * 16 + g;
  const int first_token = token * TOKENS + (TOGETHER ? group * BN : 0);
  float low = 0.0f, high = 0.0f;
  if (MODE == 0 && bias) {
    if (channel < channels) low = wide(bias[channel]);
    if (channel + 8 < channels) high = wide(bias[channel + 8]);
  }
  float d[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) d[i] = 0.0f;
  int stage = 0, previous = -1;
  u32 parity = 0;
  for (int block = 0; block < count; ++block) {
    barrier_wait(smem_address(&full[stage]), parity);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const u64 a = descriptor(base + stage * STAGE + (TOGETHER ? 0 : group * 8192));
    const u64 b = descriptor(base + stage * STAGE + WEIGHT_STAGE + (TOGETHER ? group * (BN * 128) : 0));
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma(d, a + 2 * k, b + 2 * k, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (previous >= 0 && local == 0) barrier_arrive(smem_address(&empty[previous]));
    previous = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#if MODE == 2
  float* target = parts + (size_t)part * rows * channels;
#pragma unroll
  for (int i = 0; i < BN / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = first_token + 8 * i + 2 * t + (e & 1), place = channel + (e >> 1) * 8;
      if (row < rows && place < channels) target[(size_t)row * channels + place] = d[4 * i + e];
    }
  }
#else
  // The tile goes out through the memory of the stages, which all have read by then.
  meet();
  const u32 staging = base + (MODE == 1 ? 0 : group * (BN * 128));
#if MODE == 1
  float* ups = reinterpret_cast<float*>(shared + BN * 128) + local;
  if (group == 1) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) ups[i * 128] = d[i];
  }
  meet();
  if (group == 1) return;
#endif
#pragma unroll
  for (int i = 0; i < BN / 8; i += 4) {
    u32 r[4], s[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = (i + j) * 4;
#if MODE == 1
      const float v0 = silu(d[at]) * ups[at * 128], v1 = silu(d[at + 1]) * ups[(at + 1) * 128];
      const float v2 = silu(d[at + 2]) * ups[(at + 2) * 128], v3 = silu(d[at + 3]) * ups[(at + 3) * 128];
#else
      float v0 = d[at] + low, v1 = d[at + 1] + low, v2 = d[at + 2] + high, v3 = d[at + 3] + high;
      if (MODE == 0 && activation == 1) v0 = gelu(v0), v1 = gelu(v1), v2 = gelu(v2), v3 = gelu(v3);
#endif
      r[j] = pack_bf16(v0, v1), s[j] = pack_bf16(v2, v3);
    }
    const int m = 8 * i + lane, unit = 2 * warp;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(staging + m * 128 + (((unit + 1) ^ (m & 7)) << 4)), "r"(s[0]),
                 "r"(s[1]), "r"(s[2]), "r"(s[3])
                 : "memory");
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(staging + m * 128 + ((unit ^ (m & 7)) << 4)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
#if MODE == 3
  if (first_channel < mixed) {
    const int pair = threadIdx.x & 31, own = first_channel + 2 * pair, per = TOKENS / (COMPUTING / 32);
    float w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = wide(taps[4 * own + i]);
    meet();
    const int begin = (threadIdx.x >> 5) * per;
    float x[3][2];
    const auto read = [&](int m, float& even, float& odd) {
      u32 v = 0;
      if (m >= 0) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(base + m * 128 + (((pair >> 2) ^ (m & 7)) << 4) + (pair & 3) * 4) : "memory");
      even = wide(v & 0xffff), odd = __uint_as_float(v & 0xffff0000);
    };
#pragma unroll
    for (int i = 0; i < 3; ++i) read(begin - 3 + i, x[i][0], x[i][1]);
    const int third = mixed / 3;
    u16* target = thirds + ((size_t)(own / third) * rows + token * TOKENS) * third + own % third;
#pragma unroll 8
    for (int m = begin; m < begin + per; ++m) {
      float even, odd;
      read(m, even, odd);
      const float y0 = w[0] * x[0][0] + w[1] * x[1][0] + w[2] * x[2][0] + w[3] * even;
      const float y1 = w[4] * x[0][1] + w[5] * x[1][1] + w[6] * x[2][1] + w[7] * odd;
      if (token * TOKENS + m < rows) *reinterpret_cast<u32*>(target + (size_t)m * third) = pack_bf16(silu(y0), silu(y1));
      x[0][0] = x[1][0], x[1][0] = x[2][0], x[2][0] = even;
      x[0][1] = x[1][1], x[1][1] = x[2][1], x[2][1] = odd;
    }
    return;
  }
#endif
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#if MODE == 1
  asm volatile("bar.sync 2, 128;" ::: "memory");
  if (local == 0) write_tile(&out, weight * 64, first_token, staging);
#else
  meet();
  if (local == 0 && first_channel < channels) write_tile(&out, first_channel, first_token, staging);
#endif
#endif
}
