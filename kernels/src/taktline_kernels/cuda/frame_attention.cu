// Attention of one frame's tokens over all frames so far on Hopper; queries and keys come turned. A persistent block works
// through (candidate, head) pairs: two warpgroups have 128 patch queries each, in two blocks of 64 whose products and
// exponentials alternate: while one block's softmax runs, the other's products do. A third warpgroup brings keys and values
// of 64 patches at a time through the bulk tensor copy engine, and attends for the two conditioning queries with the small
// matrix instructions: each of its warps has sixteen keys of every tile, keys as rows, queries as columns.
// The host prepends hopper.cuh and the wgmma_* functions.

#define PATCHES 256
#define WIDTH 64
#define OTHERS 2
#define TILE 64
#define TILE_BYTES (TILE * 128)
#define STAGE (2 * TILE_BYTES)
#define FRAME_TILES 4
#define AHEAD FRAME_TILES
#define QUERY_BYTES (PATCHES * 128)
#define FEW 16
#define FEW_BYTES (FEW * 128)
#define OUT_BYTES 2048  // of one warp: 16 rows
#define LOWEST -1e30f
#define SLACK 8.0f  // a weight is at most 2^8, which its bf16 rounds as finely as 1

#if EIGHT
typedef unsigned char Out;
DEVICE u16 pack_pair(float first, float second) {
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(second), "f"(first));
  return v;
}
#else
typedef u16 Out;
#endif
DEVICE uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
DEVICE void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE uint4 load_global(const u16* p) { return *reinterpret_cast<const uint4*>(p); }
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void load_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE u32 transposed(u32 x) {
  u32 v;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(x));
  return v;
}
DEVICE void small_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
// The highest of N / 2 scores of a row that this thread has.
template <int N>
DEVICE float highest(const float (&s)[N], int row) {
  float high = fmaxf(s[2 * row], s[2 * row + 1]);
#pragma unroll
  for (int i = 4; i < N; i += 4) high = fmaxf(high, fmaxf(s[i + 2 * row], s[i + 2 * row + 1]));
  return high;
}
// A block's softmax: weights p of N / 2 scores of each of two rows, 2^(scale (score - top)), added to the totals.
template <int N>
DEVICE void weigh(const float (&s)[N], u32 (&p)[N / 2], float scale, const float (&top)[2], float (&total)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float shift = top[r] * scale;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float x = exp2_fast(s[4 * i + 2 * r] * scale - shift), y = exp2_fast(s[4 * i + 2 * r + 1] * scale - shift);
      sum += x + y;
      p[2 * i + r] = pack_bf16(x, y);
    }
    total[r] += sum;
  }
}
// Before: renews what weights refer to only where a score is above it by more than `slack`, and the sums so far with it.
template <int N>
DEVICE void renew(const float (&s)[N], float (&o)[32], float scale, float slack, float (&top)[2], float (&total)[2]) {
  const float high[2] = {highest(s, 0), highest(s, 1)};
  if (__any_sync(~0u, high[0] > top[0] + slack || high[1] > top[1] + slack)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = fmaxf(quad_max(high[r]), top[r]), decay = exp2_fast((top[r] - next) * scale);
      top[r] = next, total[r] *= decay;
#pragma unroll
      for (int i = 0; i < 32; i += 4) o[i + 2 * r] *= decay, o[i + 2 * r + 1] *= decay;
    }
  }
}

// Sixteen keys of each of COUNT tiles, one warp's, for the conditioning queries, of which lanes with t = 0 have both: scores
// (keys g and g + 8) x (queries 2 t, 2 t + 1), sums (values) x (queries). `seen` of the keys count. Several tiles at once, as
// a warp alone waits for each of its products.
template <int COUNT>
DEVICE void attend_few(const u32 (&keys)[COUNT], const u32 (&values)[COUNT], const u32 (&query)[8], int seen, float scale, float (&top)[2], float (&total)[2],
                       float (&sum)[4][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, row = lane & 15, high_half = lane >> 4;
  float s[COUNT][4];
#pragma unroll
  for (int c = 0; c < COUNT; ++c) {
    float part[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      u32 a[4];
      load_matrices(a, keys[c] + row * 128 + (((2 * k + high_half) ^ (row & 7)) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) part[k][i] = 0.0f;
      small_product(part[k], a, query[2 * k], query[2 * k + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[c][i] = (part[0][i] + part[1][i]) + (part[2][i] + part[3][i]);
    if (COUNT == 1) {
      if (g >= seen) s[c][0] = s[c][1] = LOWEST;
      if (g + 8 >= seen) s[c][2] = s[c][3] = LOWEST;
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float high = top[j];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) high = fmaxf(high, fmaxf(s[c][j], s[c][2 + j]));
#pragma unroll
    for (int offset = 4; offset <= 16; offset *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, offset));
    const float decay = exp2_fast((top[j] - high) * scale);
    top[j] = high;
    total[j] *= decay;
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      s[c][j] = exp2_fast((s[c][j] - high) * scale), s[c][2 + j] = exp2_fast((s[c][2 + j] - high) * scale);
      total[j] += s[c][j] + s[c][2 + j];
    }
#pragma unroll
    for (int d = 0; d < 4; ++d) sum[d][j] *= decay, sum[d][2 + j] *= decay;
  }
#pragma unroll
  for (int c = 0; c < COUNT; ++c) {
    const u32 b0 = transposed(pack_bf16(s[c][0], s[c][1])), b1 = transposed(pack_bf16(s[c][2], s[c][3]));
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      // Rows of the transposed tile are dimensions: matrices (keys 0..7, 8..15) x (dimensions 16 d .. + 7, + 8 .. + 15).
      u32 a[4];
      const int key = (lane & 7) + (lane >> 4) * 8, unit = 2 * d + (lane >> 3 & 1);
      load_transposed(a, values[c] + key * 128 + ((unit ^ (key & 7)) << 4));
      small_product(sum[d], a, b0, b1);
    }
  }
}

// qkv: a tensor map of (frames * rows, 3 heads 64) in boxes of 64 x 64, and the same memory. out: (rows, heads 64), with
// EIGHT in e4m3 of the values times `inverse_unit`.
extern "C" __global__ void __launch_bounds__(384, 1) attend_frames(const __grid_constant__ TensorMap map, const u16* qkv, Out* out, int frames,
                                                                   int candidates, int heads, float scale, float inverse_unit) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES], few_full[2], few_empty[2], query_full[2], query_empty[2];
  __shared__ float parts[2][4][OTHERS][WIDTH + 2];
  const int group = threadIdx.x >> 7, local = threadIdx.x & 127, warp = local >> 5, lane = threadIdx.x & 31;
  const int rows = candidates * (PATCHES + OTHERS), stride = 3 * heads * WIDTH, items = candidates * heads, steps = FRAME_TILES * frames;
  const u32 base = smem_address(shared), queries = base + STAGES * STAGE, few = queries + 2 * QUERY_BYTES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&full[i]), 1);
      barrier_init(smem_address(&empty[i]), 12);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(smem_address(&few_full[i]), 4);
      barrier_init(smem_address(&few_empty[i]), 9);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(smem_address(&query_full[i]), 1);
      barrier_init(smem_address(&query_empty[i]), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = threadIdx.x; i < 4 * FEW_BYTES / 16; i += 384) store_shared(few + 16 * i, make_uint4(0, 0, 0, 0));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    const int unit = local & 7, seat = local >> 3, g = lane >> 2, t = lane & 3;
    const int mine = (items - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, total_steps = mine * steps;
    // Loads of step `step`: keys and values of 64 patches, before the first of an item its queries too.
    auto issue = [&](int step) {
      const int number = step / steps, inside = step % steps, item = blockIdx.x + number * gridDim.x;
      const int candidate = item / heads, column = item % heads * WIDTH, stage = step % STAGES;
      if (inside == 0) {
        const int buffer = number & 1;
        barrier_wait(smem_address(&query_empty[buffer]), (number >> 1 & 1) ^ 1);
        barrier_expect(smem_address(&query_full[buffer]), QUERY_BYTES);
        for (int i = 0; i < 4; ++i)
          copy_tile(queries + buffer * QUERY_BYTES + i * TILE_BYTES, &map, column, (frames - 1) * rows + candidate * PATCHES + i * TILE,
                    smem_address(&query_full[buffer]));
      }
      barrier_wait(smem_address(&empty[stage]), (step / STAGES & 1) ^ 1);
      const u32 bar = smem_address(&full[stage]), target = base + stage * STAGE;
      const int row = (inside >> 2) * rows + candidate * PATCHES + (inside & 3) * TILE;
      barrier_expect(bar, STAGE);
      copy_tile(target, &map, column + heads * WIDTH, row, bar);
      copy_tile(target + TILE_BYTES, &map, column + 2 * heads * WIDTH, row, bar);
    };
    // The conditioning keys of all frames of an item, one for each seat.
    auto bring_few = [&](int number) {
      const int item = blockIdx.x + number * gridDim.x, candidate = item / heads, head = item % heads, buffer = number & 1;
      const bool seated = seat < OTHERS * frames;
      uint4 key = make_uint4(0, 0, 0, 0), value = key;
      if (seated) {
        const size_t row = (size_t)(seat / OTHERS) * rows + candidates * PATCHES + candidate * OTHERS + seat % OTHERS;
        const u16* source = qkv + row * stride + head * WIDTH + 8 * unit;
        key = load_global(source + heads * WIDTH);
        value = load_global(source + 2 * heads * WIDTH);
      }
      barrier_wait(smem_address(&few_empty[buffer]), (number >> 1 & 1) ^ 1);
      if (seated) {
        const u32 target = few + buffer * 2 * FEW_BYTES + seat * 128 + ((unit ^ (seat & 7)) << 4);
        store_shared(target, key);
        store_shared(target + FEW_BYTES, value);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&few_full[buffer]));
    };
    if (local == 0)
      for (int step = 0; step < AHEAD && step < total_steps; ++step) issue(step);
    __syncwarp();
    int step = 0;
    if (mine > 0) bring_few(0);
    for (int number = 0; number < mine; ++number) {
      const int item = blockIdx.x + number * gridDim.x, candidate = item / heads, head = item % heads, buffer = number & 1;
      const size_t first_other = (size_t)candidates * PATCHES + candidate * OTHERS;
      const u16* column = qkv + head * WIDTH;
      u32 query[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u16* source = column + ((size_t)(frames - 1) * rows + first_other + g) * stride + 8 * i + 2 * t;
        query[i] = g < OTHERS ? *reinterpret_cast<const u32*>(source) : 0;
      }
      if (number + 1 < mine) bring_few(number + 1);
      float top[OTHERS] = {LOWEST, LOWEST}, total[OTHERS] = {0, 0}, sum[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = 0.0f;
      if (warp == (number & 3)) {
        barrier_wait(smem_address(&few_full[buffer]), number >> 1 & 1);
        const u32 keys[1] = {few + buffer * 2 * FEW_BYTES}, values[1] = {keys[0] + FEW_BYTES};
        attend_few<1>(keys, values, query, OTHERS * frames, scale, top, total, sum);
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&few_empty[buffer]));
      }
      for (int inside = 0; inside < steps; inside += FRAME_TILES, step += FRAME_TILES) {
        if (local == 0)
          for (int i = 0; i < FRAME_TILES; ++i)
            if (step + i + AHEAD < total_steps) issue(step + i + AHEAD);
        __syncwarp();
        const int stage = step % STAGES;  // and those behind it
        const u32 first = base + stage * STAGE + warp * 2048;
        u32 keys[FRAME_TILES], values[FRAME_TILES];
#pragma unroll
        for (int i = 0; i < FRAME_TILES; ++i) {
          keys[i] = first + i * STAGE, values[i] = keys[i] + TILE_BYTES;
          barrier_wait(smem_address(&full[stage + i]), step / STAGES & 1);
        }
        attend_few<FRAME_TILES>(keys, values, query, 16, scale, top, total, sum);
        __syncwarp();
        if (lane == 0)
          for (int i = 0; i < FRAME_TILES; ++i) barrier_arrive(smem_address(&empty[stage + i]));
      }
      // Each warp's part of both queries, then all four of them.
#pragma unroll
      for (int j = 0; j < OTHERS; ++j) {
#pragma unroll
        for (int offset = 4; offset <= 16; offset *= 2) total[j] += __shfl_xor_sync(~0u, total[j], offset);
        if (t == 0) {
          float* part = parts[buffer][warp][j];
#pragma unroll
          for (int d = 0; d < 4; ++d) part[16 * d + g] = sum[d][j], part[16 * d + 8 + g] = sum[d][2 + j];
          if (g == 0) part[WIDTH] = top[j], part[WIDTH + 1] = total[j];
        }
      }
      asm volatile("bar.sync 1, 128;" ::: "memory");
      {
        const int j = local >> 6, d = local & 63;
        float high = LOWEST, all = 0.0f, value = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) high = fmaxf(high, parts[buffer][i][j][WIDTH]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float share = exp2_fast((parts[buffer][i][j][WIDTH] - high) * scale);
          all += share * parts[buffer][i][j][WIDTH + 1];
          value += share * parts[buffer][i][j][d];
        }
        value *= inverse_unit / all;
        Out* target = out + (first_other + j) * (heads * WIDTH) + head * WIDTH + d;
#if EIGHT
        *target = (Out)(pack_pair(value, value) & 0xff);
#else
        *target = (Out)(pack_bf16(value, value) & 0xffff);
#endif
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    const int t = lane & 3;
    const float slack = SLACK / scale;
    int step = 0, number = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++number) {
      const int candidate = item / heads, head = item % heads, buffer = number & 1;
      const u32 own = queries + buffer * QUERY_BYTES + group * 2 * TILE_BYTES;
      const u64 q = descriptor(own);
      float o[2][32], top[2][2], total[2][2];
      barrier_wait(smem_address(&query_full[buffer]), number >> 1 & 1);
      barrier_wait(smem_address(&few_full[buffer]), number >> 1 & 1);
      {
        // The conditioning keys: OTHERS * frames of the tile's sixteen.
        float c[2][8];
        u32 w[2][4];
        const u64 k = descriptor(few + buffer * 2 * FEW_BYTES), v = descriptor(few + buffer * 2 * FEW_BYTES + FEW_BYTES);
        wgmma_fence();
#pragma unroll
        for (int b = 0; b < 2; ++b) {
#pragma unroll
          for (int i = 0; i < 4; ++i) wgmma_few(c[b], q + 512 * b + 2 * i, k + 2 * i, i);
          wgmma_commit();
        }
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          wgmma_wait<1>();
          settle(c[b]);
#pragma unroll
          for (int i = 0; i < 8; ++i)
            if ((i >> 2) * 8 + 2 * t + (i & 1) >= OTHERS * frames) c[b][i] = LOWEST;
#pragma unroll
          for (int r = 0; r < 2; ++r) top[b][r] = quad_max(highest(c[b], r)), total[b][r] = 0.0f;
          weigh(c[b], w[b], scale, top[b], total[b]);
          settle(w[b]);
          wgmma_fence();
          wgmma_values(o[b], w[b], v, 0);
          wgmma_commit();
        }
        wgmma_wait<0>();
        settle(o[0]);
        settle(o[1]);
        if (lane == 0) barrier_arrive(smem_address(&few_empty[buffer]));
      }
      for (int frame = 0; frame < frames; ++frame) {
        float s[2][32];
        u32 p[2][16];
        // A frame's four tiles never wrap around the stages.
        const int stage = step % STAGES;
        const u32 parity = step / STAGES & 1, fulls = smem_address(&full[stage]), empties = smem_address(&empty[stage]);
        const u64 k = descriptor(base + stage * STAGE), v = k + TILE_BYTES / 16;
        step += FRAME_TILES;
        barrier_wait(fulls, parity);
        {
          wgmma_fence();
#pragma unroll
          for (int b = 0; b < 2; ++b) {
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_keys(s[b], q + 512 * b + 2 * i, k + 2 * i, i);
            wgmma_commit();
          }
        }
#pragma unroll
        for (int tile = 0; tile < FRAME_TILES; ++tile) {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            // All but the other block's newest group: this one's scores are there, and its sums are whole.
            wgmma_wait<1>();
            settle(s[b]);
            settle(o[b]);
            if (b == 1 && tile > 0 && lane == 0) barrier_arrive(empties + 8 * (tile - 1));
            renew(s[b], o[b], scale, slack, top[b], total[b]);
            weigh(s[b], p[b], scale, top[b], total[b]);
            if (b == 0 && tile < FRAME_TILES - 1) barrier_wait(fulls + 8 * (tile + 1), parity);
            settle(o[b]);
            settle(p[b]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_values(o[b], p[b] + 4 * i, v + tile * (STAGE / 16) + 128 * i, 1);
            if (tile < FRAME_TILES - 1) {
#pragma unroll
              for (int i = 0; i < 4; ++i) wgmma_keys(s[b], q + 512 * b + 2 * i, k + (tile + 1) * (STAGE / 16) + 2 * i, i);
            }
            wgmma_commit();
          }
        }
        wgmma_wait<0>();
        settle(o[0]);
        settle(o[1]);
        if (lane == 0) barrier_arrive(empties + 8 * (FRAME_TILES - 1));
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float all = total[b][r];
          all += __shfl_xor_sync(~0u, all, 1);
          all += __shfl_xor_sync(~0u, all, 2);
          inverse[r] = inverse_unit / all;
        }
        const size_t row = (size_t)candidate * PATCHES + (group * 2 + b) * 64 + warp * 16;
        const u32 staging = own + b * TILE_BYTES + warp * OUT_BYTES;  // where its own queries were
#if EIGHT
        const int g = lane >> 2;
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int line = g + 8 * r, piece = (i >> 1) ^ (line >> 1 & 3);
            const u16 pair = pack_pair(o[b][4 * i + 2 * r] * inverse[r], o[b][4 * i + 2 * r + 1] * inverse[r]);
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(staging + line * 64 + piece * 16 + (i & 1) * 8 + 2 * t), "h"(pair) : "memory");
          }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int line = i * 8 + (lane >> 2), piece = lane & 3;
          const uint4 value = load_shared(staging + line * 64 + ((piece ^ (line >> 1 & 3)) << 4));
          *reinterpret_cast<uint4*>(out + (row + line) * (heads * WIDTH) + head * WIDTH + 16 * piece) = value;
        }
#else
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const int line = lane & 15, unit = i + (lane >> 4);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(staging + line * 128 + ((unit ^ (line & 7)) << 4)),
                       "r"(pack_bf16(o[b][4 * i] * inverse[0], o[b][4 * i + 1] * inverse[0])),
                       "r"(pack_bf16(o[b][4 * i + 2] * inverse[1], o[b][4 * i + 3] * inverse[1])),
                       "r"(pack_bf16(o[b][4 * i + 4] * inverse[0], o[b][4 * i + 5] * inverse[0])),
                       "r"(pack_bf16(o[b][4 * i + 6] * inverse[1], o[b][4 * i + 7] * inverse[1]))
                       : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int line = i * 4 + (lane >> 3), unit = lane & 7;
          const uint4 value = load_shared(staging + line * 128 + ((unit ^ (line & 7)) << 4));
          *reinterpret_cast<uint4*>(out + (row + line) * (heads * WIDTH) + head * WIDTH + 8 * unit) = value;
        }
#endif
      }
      // What was read and written here must be over before the copy engine writes here again.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&query_empty[buffer]));
    }
  }
}
