// out[m, j] = gelu(x[m] . gate[j]) * (x[m] . up[j]) on Hopper: persistent blocks, one warpgroup feeding shared memory
// through the bulk tensor copy engine, two computing. The product is transposed: weights are the 256 rows of a tile (so
// gate and up of one output meet in one thread, their rows interleaved by eights), tokens its BN columns; BN is any
// multiple of 8, which wastes less on odd token counts than tiles of 128 tokens.
// The host prepends hopper.cuh and wgmma(), generated for BN.
// With EIGHT the operands are e4m3, each row with a scale: one step of 64 columns is 128 numbers then.

#define WEIGHT_STAGE (256 * 128)
#define TOKEN_STAGE (BN * 128)
#define STAGE (WEIGHT_STAGE + TOKEN_STAGE)

#ifndef SILU
#define SILU 0
#endif
DEVICE float gelu(float x) {  // or silu
  float u = SILU ? 0.5f * x : 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}
DEVICE void group_barrier(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// Tile order: `span` weight tiles at a time, token tiles outermost inside them, so that a wave of blocks shares both.
DEVICE void tile_of(int index, int token_tiles, int weight_tiles, int span, int& weight, int& token) {
  const int per = span * token_tiles, group = index / per, inside = index % per;
  const int width = min(span, weight_tiles - group * span);
  weight = group * span + inside % width;
  token = inside / width;
}

extern "C" __global__ void __launch_bounds__(384, 1) geglu_product(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens,
                                                                   const __grid_constant__ TensorMap out, int token_tiles, int weight_tiles,
                                                                   int blocks, int span
#if EIGHT
                                                                   ,
                                                                   const float* weight_scales, const float* token_scales, int rows
#endif
) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int group = threadIdx.x >> 7, tiles = token_tiles * weight_tiles;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&full[i]), 1);
      barrier_init(smem_address(&empty[i]), 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const u32 base = smem_address(shared);

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 256) {
      int stage = 0;
      u32 parity = 1;
      for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        int weight, token;
        tile_of(index, token_tiles, weight_tiles, span, weight, token);
        for (int block = 0; block < blocks; ++block) {
          barrier_wait(smem_address(&empty[stage]), parity);
          const u32 bar = smem_address(&full[stage]), target = base + stage * STAGE;
          barrier_expect(bar, STAGE);
          copy_tile(target, &weights, block * 64, weight * 256, bar);
          copy_tile(target + WEIGHT_STAGE, &tokens, block * 64, token * BN, bar);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int local = threadIdx.x & 127, warp = local >> 5, lane = local & 31;
    const u32 staging = base + STAGES * STAGE + group * (BN * 128);
    int stage = 0;
    u32 parity = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      int weight, token;
      tile_of(index, token_tiles, weight_tiles, span, weight, token);
      int previous = -1;
      // Sums that begin at zero and are settled before they are read: else ptxas waits after every product.
      float low[BN / 2], high[BN / 2];
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) low[i] = high[i] = 0.0f;
      for (int block = 0; block < blocks; ++block) {
        barrier_wait(smem_address(&full[stage]), parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u64 a = descriptor(base + stage * STAGE + group * 16384), b = descriptor(base + stage * STAGE + WEIGHT_STAGE);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma(low, a + 2 * k, b + 2 * k, 1);
          wgmma(high, a + 512 + 2 * k, b + 2 * k, 1);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (previous >= 0 && local == 0) barrier_arrive(smem_address(&empty[previous]));
        previous = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(low[i]), "+f"(high[i])::"memory");
      if (local == 0) {
        barrier_arrive(smem_address(&empty[previous]));
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      }
      group_barrier(1 + group);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* d = half ? high : low;
        const int unit = half * 4 + warp;
#if EIGHT
        const int gate = weight * 256 + group * 128 + half * 64 + warp * 16 + (lane >> 2);
        const float of_gate = weight_scales[gate], of_up = weight_scales[gate + 8];
#endif
#pragma unroll
        for (int i = 0; i < BN / 8; i += 4) {
          u32 r[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (i + j < BN / 8) {
              const int at = (i + j) * 4;
#if EIGHT
              const int place = token * BN + 8 * (i + j) + 2 * (lane & 3);
              const float by = token_scales[min(place, rows - 1)], next = token_scales[min(place + 1, rows - 1)];
              r[j] = pack_bf16(gelu(d[at] * (by * of_gate)) * (d[at + 2] * (by * of_up)), gelu(d[at + 1] * (next * of_gate)) * (d[at + 3] * (next * of_up)));
#else
              r[j] = pack_bf16(gelu(d[at]) * d[at + 2], gelu(d[at + 1]) * d[at + 3]);
#endif
            }
          }
          const int count = BN / 8 - i < 4 ? BN / 8 - i : 4;
          if (count == 4) {
            const int m = 8 * i + lane;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(staging + m * 128 + ((unit ^ (m & 7)) << 4)),
                         "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                         : "memory");
          } else {
#pragma unroll
            for (int j = 0; j < count; ++j) {
              const int m = 8 * (i + j) + (lane & 7);
              asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(staging + m * 128 + ((unit ^ (m & 7)) << 4)), "r"(r[j])
                           : "memory");
            }
          }
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      group_barrier(1 + group);
      if (local == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&out), "r"(weight * 128 + group * 64),
                     "r"(token * BN), "r"(staging)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
    if (local == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
