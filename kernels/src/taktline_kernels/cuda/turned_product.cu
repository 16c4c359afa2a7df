// out = x @ weight.T + bias for queries, keys and values of a frame's tokens, queries and keys turned by their place before
// they are rounded, on Hopper. The loop is geglu.cu's: persistent blocks, one warpgroup feeding shared memory through the
// bulk tensor copy engine, two computing; the product is transposed, weights are the 256 rows of a tile (four heads),
// tokens its BN columns. The weights of every sixteen outputs lie even ones first, so that partners meet in one thread.
// Angles: elements 0..19 of a head turn by the frame, 20..39 by the patch's row, 40..59 by its column, 60..63 not at all.
// The host prepends hopper.cuh and wgmma(), generated for BN.

#define PATCHES 256
#define GRID 16
#define WIDTH 64
#define WEIGHT_STAGE (256 * 128)
#define TOKEN_STAGE (BN * 128)
#define STAGE (WEIGHT_STAGE + TOKEN_STAGE)
#define LINE 11  // pairs of a place's angles, so that eight places fall on different banks
#define COLUMNS_AT (GRID * LINE)
#define FRAME_AT (2 * GRID * LINE)
#define REST_AT (FRAME_AT + 10)
#define ANGLES (REST_AT + 1)

// Tile order: `span` weight tiles at a time, token tiles outermost inside them, so that a wave of blocks shares both.
DEVICE void tile_of(int index, int token_tiles, int weight_tiles, int span, int& weight, int& token) {
  const int per = span * token_tiles, group = index / per, inside = index % per;
  const int width = min(span, weight_tiles - group * span);
  weight = group * span + inside % width;
  token = inside / width;
}

extern "C" __global__ void __launch_bounds__(384, 1) turned_product(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens,
                                                                   u32* out, int rows, int token_tiles, int weight_tiles,
                                                                   int blocks, int span, int turned_tiles, int boundary, const float* angles,
                                                                   const float* bias
) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  __shared__ float4 turns[ANGLES];  // of a pair: cosine and signed sine of its even element, then of its odd one
  const int group = threadIdx.x >> 7, tiles = token_tiles * weight_tiles;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&full[i]), 1);
      barrier_init(smem_address(&empty[i]), 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
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
      }
      // A thread's pair of every head, and how a token's place leads to its angles.
      const int pair = 8 * warp + (lane >> 2), shift = pair >= 10 && pair < 20 ? 4 : 0, mask = pair >= 10 && pair < 30 && weight < turned_tiles ? 15 : 0;
      const float4* line = turns + (weight >= turned_tiles || pair >= 30 ? REST_AT
                                    : pair < 10                          ? FRAME_AT + pair
                                    : pair < 20                          ? pair - 10
                                                                         : COLUMNS_AT + pair - 20);
      const int words = weight_tiles * 128;  // of a row of the result
      u32* target = out + (size_t)token * BN * words + weight * 128 + group * 64 + pair;
      const int channel = weight * 256 + group * 128 + 2 * pair;
      const float2 added[2] = {*reinterpret_cast<const float2*>(bias + channel), *reinterpret_cast<const float2*>(bias + channel + 64)};
#pragma unroll
      for (int i = 0; i < BN / 8; ++i) {
        const int m = 8 * i + 2 * (lane & 3), row = token * BN + m;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float4 turn = line[((row + j < boundary ? row + j : 0) >> shift & mask) * LINE];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float* d = half ? high : low;
            const float even = d[4 * i + j] + added[half].x, odd = d[4 * i + 2 + j] + added[half].y;
            if (row + j < rows) target[(m + j) * words + half * 32] = pack_bf16(even * turn.x + odd * turn.y, odd * turn.z + even * turn.w);
          }
        }
        asm volatile("" ::: "memory");  // else the angles of all tokens are loaded first, into registers that are not there
      }
    }
  }
}
