// Products of thousands of rows with what follows them, on Hopper: out = after(x @ weight.T + bias). Persistent blocks of two
// computing warpgroups that take turns: each has tiles of its own, 128 outputs times BN rows, and while one finishes its tile
// the other's products run. A third brings operands through the bulk tensor copy engine. The product is transposed: weights
// are the rows of the matrix instruction, tokens its columns. AFTER says what follows: TURN turns queries and keys by their
// token's place, before they are rounded; GELU is that. The order of the weights within a tile lets a thread have partners
// (TURN: of every sixteen outputs even ones first) or four neighbours (GELU).
// Angles: elements 0..19 of a head turn by the frame, 20..39 by the patch's row, 40..59 by its column, 60..63 not at all.
// With EIGHT the operands are e4m3, the tokens in one unit, the weights with a scale a row that counts it, and GELU writes e4m3
// in one unit.
// The host prepends hopper.cuh and wgmma(), generated for BN.

#define TURN 0
#define GELU 1

#define PATCHES 256
#define GRID 16
#define WIDTH 64
#define WEIGHT_STAGE (128 * 128)
#define STAGE (WEIGHT_STAGE + BN * 128)
#define LINE 11  // pairs of a place's angles, so that eight places fall on different banks
#define COLUMNS_AT (GRID * LINE)
#define FRAME_AT (2 * GRID * LINE)
#define REST_AT (FRAME_AT + 10)
#define ANGLES (REST_AT + 1)

#if AFTER == GELU
// Times 2 half.
DEVICE float gelu(float x, float half) {
  float turned;
  asm("tanh.approx.f32 %0, %1;" : "=f"(turned) : "f"(x * (0.7978845608028654f + 0.035677408136300125f * x * x)));
  return half * x + half * x * turned;
}
DEVICE u32 pack_e4m3(float first, float second, float third, float fourth) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(second), "f"(first));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(fourth), "f"(third));
  return (u32)low | (u32)high << 16;
}
#endif

extern "C" __global__ void __launch_bounds__(384, 1)
    wide_product(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens, void* result, int rows, int token_tiles,
                 int weight_tiles, int blocks, const float* bias, const float* weight_scales,
#if AFTER == TURN
                 const float* angles, int turned_tiles, int boundary
#else
                 float inverse_unit
#endif
    ) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES], turn;
#if AFTER == TURN
  __shared__ float4 turns[ANGLES];  // of a pair: cosine and signed sine of its even element, then of its odd one
#endif
  const int group = threadIdx.x >> 7;
  const int tiles = token_tiles * weight_tiles;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&full[i]), 1);
      barrier_init(smem_address(&empty[i]), 1);
    }
    barrier_init(smem_address(&turn), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
#if AFTER == TURN
  for (int i = threadIdx.x; i < ANGLES; i += 384) {
    const int kind = i < COLUMNS_AT ? 0 : i < FRAME_AT ? 1 : i < REST_AT ? 2 : 3;
    const int inside = i - (kind == 0 ? 0 : kind == 1 ? COLUMNS_AT : FRAME_AT), place = kind < 2 ? inside / LINE : 0, pair = kind < 2 ? inside % LINE : inside;
    if (kind == 3 || pair == 10)
      turns[i] = make_float4(1.0f, 0.0f, 1.0f, 0.0f);
    else {
      const float* cosine = angles + (kind == 0 ? place * GRID : place) * WIDTH + (kind == 0 ? 20 : kind == 1 ? 40 : 0) + 2 * pair;
      turns[i] = make_float4(cosine[0], cosine[PATCHES * WIDTH], cosine[1], cosine[PATCHES * WIDTH + 1]);
    }
  }
#endif
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
        const int token = index / weight_tiles, weight = index % weight_tiles;
        for (int block = 0; block < blocks; ++block) {
          barrier_wait(smem_address(&empty[stage]), parity);
          const u32 bar = smem_address(&full[stage]), target = base + stage * STAGE;
          barrier_expect(bar, STAGE);
          copy_tile(target, &weights, block * 64, weight * 128, bar);
          copy_tile(target + WEIGHT_STAGE, &tokens, block * 64, token * BN, bar);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int local = threadIdx.x & 127, warp = local >> 5, lane = local & 31, g = lane >> 2, t = lane & 3;
    for (int number = group;; number += 2) {
      const int index = blockIdx.x + number * gridDim.x;
      if (index >= tiles) break;
      const int token = index / weight_tiles, weight = index % weight_tiles;
      int stage = number * blocks % STAGES, previous = -1;
      u32 parity = number * blocks / STAGES & 1;
      // Sums that begin at zero and are settled before they are read: else ptxas waits after every product.
      float low[BN / 2], high[BN / 2];
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) low[i] = high[i] = 0.0f;
      // A stage's barrier tells one filling from the next by a parity: who waits for it must have seen the one before.
      if (number > 0) barrier_wait(smem_address(&turn), (number - 1) & 1);
      for (int block = 0; block < blocks; ++block) {
        barrier_wait(smem_address(&full[stage]), parity);
        wgmma_fence();
        const u64 a = descriptor(base + stage * STAGE), b = descriptor(base + stage * STAGE + WEIGHT_STAGE);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma(low, a + 2 * k, b + 2 * k, 1);
          wgmma(high, a + 512 + 2 * k, b + 2 * k, 1);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (previous >= 0 && local == 0) barrier_arrive(smem_address(&empty[previous]));
        previous = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if (local == 0) barrier_arrive(smem_address(&turn));
      wgmma_wait<0>();
      settle(low);
      settle(high);
      if (local == 0) barrier_arrive(smem_address(&empty[previous]));
#if AFTER == TURN
      // A thread's pair of both heads, and how a token's place leads to its angles.
      const int pair = 8 * warp + g, shift = pair >= 10 && pair < 20 ? 4 : 0, mask = pair >= 10 && pair < 30 && weight < turned_tiles ? 15 : 0;
      const float4* line = turns + (weight >= turned_tiles || pair >= 30 ? REST_AT
                                    : pair < 10                          ? FRAME_AT + pair
                                    : pair < 20                          ? pair - 10
                                                                         : COLUMNS_AT + pair - 20);
      const int words = weight_tiles * 64;  // of a row of the result
      u32* target = (u32*)result + (size_t)token * BN * words + weight * 64 + pair;
      const int channel = weight * 128 + 2 * pair;
      const float2 added[2] = {*reinterpret_cast<const float2*>(bias + channel), *reinterpret_cast<const float2*>(bias + channel + 64)};
#if EIGHT
      const float2 scale[2] = {*reinterpret_cast<const float2*>(weight_scales + channel), *reinterpret_cast<const float2*>(weight_scales + channel + 64)};
#endif
#pragma unroll
      for (int i = 0; i < BN / 8; ++i) {
        const int m = 8 * i + 2 * t, row = token * BN + m;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float4 turn = line[((row + j < boundary ? row + j : 0) >> shift & mask) * LINE];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float* d = half ? high : low;
            float even = d[4 * i + j], odd = d[4 * i + 2 + j];
#if EIGHT
            even *= scale[half].x, odd *= scale[half].y;
#endif
            even += added[half].x, odd += added[half].y;
            if (row + j < rows) target[(m + j) * words + half * 32] = pack_bf16(even * turn.x + odd * turn.y, odd * turn.z + even * turn.w);
          }
        }
        asm volatile("" ::: "memory");  // else the angles of all tokens are loaded first, into registers that are not there
      }
#else
      const int channel = weight * 128 + 32 * warp + 4 * g, width = weight_tiles * 128;
      const float4 added = *reinterpret_cast<const float4*>(bias + channel);
      const float half = 0.5f * inverse_unit;
#if EIGHT
      const float4 scale = *reinterpret_cast<const float4*>(weight_scales + channel);
#endif
#pragma unroll
      for (int i = 0; i < BN / 8; ++i) {
        const int row = token * BN + 8 * i + 2 * t;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x[4] = {low[4 * i + j], low[4 * i + 2 + j], high[4 * i + j], high[4 * i + 2 + j]};
#if EIGHT
          x[0] *= scale.x, x[1] *= scale.y, x[2] *= scale.z, x[3] *= scale.w;
#endif
          x[0] = gelu(x[0] + added.x, half), x[1] = gelu(x[1] + added.y, half), x[2] = gelu(x[2] + added.z, half), x[3] = gelu(x[3] + added.w, half);
          const size_t place = (size_t)(row + j) * width + channel;
#if EIGHT
          const u32 packed = pack_e4m3(x[0], x[1], x[2], x[3]);
          if (row + j < rows) *reinterpret_cast<u32*>((char*)result + place) = packed;
#else
          const uint2 packed = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
          if (row + j < rows) *reinterpret_cast<uint2*>((u16*)result + place) = packed;
#endif
        }
        asm volatile("" ::: "memory");
      }
#endif
    }
  }
}
