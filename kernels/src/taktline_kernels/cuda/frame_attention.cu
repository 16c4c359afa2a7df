// Attention of one frame's tokens over all frames so far, rotations included, on Hopper. A persistent block works through
// (candidate, head) pairs: two warpgroups have 128 patch queries each, in two blocks of 64 so that one's products run during
// the other's exponentials; a third feeds them. That one brings keys and values of 64 patches at a time through the bulk
// tensor copy engine, turns the keys in shared memory, and while it has them in registers, attends for the two
// conditioning queries, which would fill a thirty-second of a tile of their own.
// Keys and queries come as the projection wrote them. The host prepends hopper.cuh and the wgmma_* functions.
// Angles: elements 0..19 turn by the frame, 20..39 by the patch's row, 40..59 by its column, 60..63 not at all.

#define PATCHES 256
#define GRID 16
#define WIDTH 64
#define OTHERS 2
#define MAX_FRAMES 8
#define TILE 64
#define TILE_BYTES (TILE * 128)
#define STAGE (2 * TILE_BYTES)
#define AHEAD 3
#define QUERY_BYTES (PATCHES * 128)
#define FEW 16
#define FEW_BYTES (FEW * 128)
#define ANGLES 20
#define LINE 22  // of a table, so that eight lines fall on different banks
#define ROWS_AT (MAX_FRAMES * LINE)
#define COLUMNS_AT (ROWS_AT + GRID * LINE)
#define REST_AT (COLUMNS_AT + GRID * LINE)
#define TABLE_BYTES ((REST_AT + 4) * 8)
#define PART 10  // floats of a conditioning query's part: top, total, 8 values
#define LOWEST -1e30f

#if EIGHT
typedef unsigned char Out;
DEVICE void store_pair(Out* target, float first, float second) {
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(second), "f"(first));
  *reinterpret_cast<u16*>(target) = v;
}
#else
typedef u16 Out;
DEVICE void store_pair(Out* target, float first, float second) { *reinterpret_cast<u32*>(target) = pack_bf16(first, second); }
#endif
DEVICE float low_half(u32 v) { return __uint_as_float(v << 16); }
DEVICE float high_half(u32 v) { return __uint_as_float(v & 0xffff0000u); }
DEVICE float exp2_fast(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
DEVICE void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE float4 load_angles(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}
DEVICE uint4 load_global(const u16* p) { return *reinterpret_cast<const uint4*>(p); }
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Keeps the compiler from moving what makes d past the products that read it.
template <int N>
DEVICE void settle(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
DEVICE void settle(u32 (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
// Waits until all but the last PENDING groups are done, whose sums d is.
template <int PENDING, int N>
DEVICE void wgmma_done(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  settle(d);
}
// Where the angles of elements (e, e + 1) of a patch lie: cosine and signed sine of each.
DEVICE u32 angle_at(int e, int frame, int row, int column) {
  const int at = e < 20 ? frame * LINE + e : e < 40 ? ROWS_AT + row * LINE + e - 20 : e < 60 ? COLUMNS_AT + column * LINE + e - 40 : REST_AT + e - 60;
  return 8 * at;
}
DEVICE u32 turned(u32 pair, float4 angle, float& even, float& odd) {
  const float x = low_half(pair), y = high_half(pair);
  even = x * angle.x + y * angle.y;
  odd = y * angle.z + x * angle.w;
  return pack_bf16(even, odd);
}

// One step of a conditioning query's softmax over the COUNT keys of this thread's eight lanes.
template <int COUNT>
DEVICE void take_keys(const float (&score)[COUNT], float scale, float& top, float& total, float (&weight)[COUNT], float& decay) {
  float high = top;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) high = fmaxf(high, score[i]);
  decay = exp2_fast((top - high) * scale);
  total *= decay;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    weight[i] = exp2_fast((score[i] - high) * scale);
    total += weight[i];
  }
  top = high;
}
DEVICE float over_units(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  x += __shfl_xor_sync(~0u, x, 2);
  return x + __shfl_xor_sync(~0u, x, 4);
}
DEVICE float dot8(const uint4& q, const float (&k)[8]) {
  return low_half(q.x) * k[0] + high_half(q.x) * k[1] + low_half(q.y) * k[2] + high_half(q.y) * k[3] + low_half(q.z) * k[4] + high_half(q.z) * k[5] +
         low_half(q.w) * k[6] + high_half(q.w) * k[7];
}
DEVICE void add8(float (&sum)[8], float weight, const uint4& v) {
  sum[0] += weight * low_half(v.x), sum[1] += weight * high_half(v.x);
  sum[2] += weight * low_half(v.y), sum[3] += weight * high_half(v.y);
  sum[4] += weight * low_half(v.z), sum[5] += weight * high_half(v.z);
  sum[6] += weight * low_half(v.w), sum[7] += weight * high_half(v.w);
}
// Turns the eight elements of unit u of one token. Conditioning tokens turn by the frame alone: row and column 0 have no angle.
DEVICE uint4 turn_unit(uint4 x, u32 table, int unit, int frame, int row, int column, float (&wide)[8]) {
  u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = turned(word[i], load_angles(table + angle_at(8 * unit + 2 * i, frame, row, column)), wide[2 * i], wide[2 * i + 1]);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// qkv: a tensor map of (frames * rows, 3 heads 64) in boxes of 64 x 64, and the same memory. angles: (frames, 2, PATCHES, 64)
// fp32, cosines and signed sines of the patches. out: (rows, heads 64), with EIGHT in e4m3 of the values times `inverse_unit`.
extern "C" __global__ void __launch_bounds__(384, 1) attend_frames(const __grid_constant__ TensorMap map, const u16* qkv, const float* angles, Out* out,
                                                                   int frames, int candidates, int heads, float scale, float inverse_unit) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 full[STAGES], ready[STAGES], empty[STAGES], few_full[2], few_empty[2], query_full, query_empty;
  __shared__ __align__(16) float parts[2][4][OTHERS][8][PART];
  const int group = threadIdx.x >> 7, local = threadIdx.x & 127, warp = local >> 5, lane = threadIdx.x & 31;
  const int rows = candidates * (PATCHES + OTHERS), stride = 3 * heads * WIDTH, items = candidates * heads, steps = 4 * frames;
  const u32 base = smem_address(shared), queries = base + STAGES * STAGE, few = queries + QUERY_BYTES, table = few + 4 * FEW_BYTES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&full[i]), 1);
      barrier_init(smem_address(&ready[i]), 4);
      barrier_init(smem_address(&empty[i]), 12);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(smem_address(&few_full[i]), 4);
      barrier_init(smem_address(&few_empty[i]), 8);
    }
    barrier_init(smem_address(&query_full), 1);
    barrier_init(smem_address(&query_empty), 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  float2* place = reinterpret_cast<float2*>(shared + STAGES * STAGE + QUERY_BYTES + 4 * FEW_BYTES);
  for (int i = threadIdx.x; i < (MAX_FRAMES + 2 * GRID) * ANGLES; i += 384) {
    const int line = i / ANGLES, e = i % ANGLES;
    const int frame = line < frames ? line : 0, patch = line < MAX_FRAMES ? 0 : line < MAX_FRAMES + GRID ? (line - MAX_FRAMES) * GRID : line - MAX_FRAMES - GRID;
    const int element = e + (line < MAX_FRAMES ? 0 : line < MAX_FRAMES + GRID ? 20 : 40);
    const float* source = angles + ((size_t)(line < MAX_FRAMES ? frame : 0) * 2 * PATCHES + patch) * WIDTH + element;
    place[line * LINE + e] = make_float2(source[0], source[PATCHES * WIDTH]);
  }
  if (threadIdx.x < 4) place[REST_AT + threadIdx.x] = make_float2(1.0f, 0.0f);
  for (int i = threadIdx.x; i < 4 * FEW_BYTES / 16; i += 384) store_shared(few + 16 * i, make_uint4(0, 0, 0, 0));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    const int unit = local & 7, seat = local >> 3;
    const int mine = (items - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, total_steps = mine * steps;
    // Loads of step `step`: keys and values of 64 patches, before the first of an item its queries too.
    auto issue = [&](int step) {
      const int number = step / steps, inside = step % steps, item = blockIdx.x + number * gridDim.x;
      const int candidate = item / heads, column = item % heads * WIDTH, stage = step % STAGES;
      if (inside == 0) {
        barrier_wait(smem_address(&query_empty), (number & 1) ^ 1);
        barrier_expect(smem_address(&query_full), QUERY_BYTES);
        for (int i = 0; i < 4; ++i)
          copy_tile(queries + i * TILE_BYTES, &map, column, (frames - 1) * rows + candidate * PATCHES + i * TILE, smem_address(&query_full));
      }
      barrier_wait(smem_address(&empty[stage]), (step / STAGES & 1) ^ 1);
      const u32 bar = smem_address(&full[stage]), target = base + stage * STAGE;
      const int row = (inside >> 2) * rows + candidate * PATCHES + (inside & 3) * TILE;
      barrier_expect(bar, STAGE);
      copy_tile(target, &map, column + heads * WIDTH, row, bar);
      copy_tile(target + TILE_BYTES, &map, column + 2 * heads * WIDTH, row, bar);
    };
    if (local == 0)
      for (int step = 0; step < AHEAD && step < total_steps; ++step) issue(step);
    int step = 0;
    for (int number = 0; number < mine; ++number) {
      const int item = blockIdx.x + number * gridDim.x, candidate = item / heads, head = item % heads, buffer = number & 1;
      const size_t first_other = (size_t)candidates * PATCHES + candidate * OTHERS;
      const u16* column = qkv + head * WIDTH + 8 * unit;
      float wide[8];
      uint4 query[OTHERS];
#pragma unroll
      for (int i = 0; i < OTHERS; ++i)
        query[i] = turn_unit(load_global(column + ((size_t)(frames - 1) * rows + first_other + i) * stride), table, unit, frames - 1, 0, 0, wide);
      float top[OTHERS], total[OTHERS], sum[OTHERS][8];
      {
        // The conditioning keys of all frames, one for each seat.
        const bool seated = seat < OTHERS * frames;
        uint4 key = make_uint4(0, 0, 0, 0), value = key;
        if (seated) {
          const u16* source = column + ((size_t)(seat / OTHERS) * rows + first_other + seat % OTHERS) * stride;
          key = load_global(source + heads * WIDTH);
          value = load_global(source + 2 * heads * WIDTH);
        }
        key = turn_unit(key, table, unit, seat / OTHERS, 0, 0, wide);
        barrier_wait(smem_address(&few_empty[buffer]), (number >> 1 & 1) ^ 1);
        if (seated) {
          const u32 target = few + buffer * 2 * FEW_BYTES + seat * 128 + ((unit ^ (seat & 7)) << 4);
          store_shared(target, key);
          store_shared(target + FEW_BYTES, value);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&few_full[buffer]));
#pragma unroll
        for (int i = 0; i < OTHERS; ++i) {
          const float score = over_units(dot8(query[i], wide));
          top[i] = seated ? score : LOWEST;
          total[i] = seated ? 1.0f : 0.0f;
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[i][j] = 0.0f;
          add8(sum[i], 1.0f, value);
        }
      }
      for (int inside = 0; inside < steps; ++inside, ++step) {
        if (local == 0 && step + AHEAD < total_steps) issue(step + AHEAD);
        __syncwarp();
        const int stage = step % STAGES;
        const u32 keys = base + stage * STAGE + seat * 128 + ((unit ^ (seat & 7)) << 4);
        barrier_wait(smem_address(&full[stage]), step / STAGES & 1);
        float score[OTHERS][4], weight[OTHERS][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Key 16 i + seat of the tile: its column in the image is the seat, its row 4 (tile of the frame) + i.
          store_shared(keys + i * 2048, turn_unit(load_shared(keys + i * 2048), table, unit, inside >> 2, (inside & 3) * 4 + i, seat, wide));
#pragma unroll
          for (int j = 0; j < OTHERS; ++j) score[j][i] = over_units(dot8(query[j], wide));
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&ready[stage]));
#pragma unroll
        for (int j = 0; j < OTHERS; ++j) {
          float decay;
          take_keys(score[j], scale, top[j], total[j], weight[j], decay);
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[j][i] *= decay;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 value = load_shared(keys + TILE_BYTES + i * 2048);
#pragma unroll
          for (int j = 0; j < OTHERS; ++j) add8(sum[j], weight[j][i], value);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&empty[stage]));
      }
      // Sixteen seats' parts of each conditioning query become one: four in a warp, then the warps'.
#pragma unroll
      for (int j = 0; j < OTHERS; ++j) {
#pragma unroll
        for (int offset = 8; offset <= 16; offset *= 2) {
          const float other = __shfl_xor_sync(~0u, top[j], offset), high = fmaxf(top[j], other);
          const float own_share = exp2_fast((top[j] - high) * scale), share = exp2_fast((other - high) * scale);
          total[j] = total[j] * own_share + __shfl_xor_sync(~0u, total[j], offset) * share;
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[j][i] = sum[j][i] * own_share + __shfl_xor_sync(~0u, sum[j][i], offset) * share;
          top[j] = high;
        }
        if (lane < 8) {
          float* part = parts[buffer][warp][j][unit];
          part[0] = top[j], part[1] = total[j];
#pragma unroll
          for (int i = 0; i < 8; ++i) part[2 + i] = sum[j][i];
        }
      }
      asm volatile("bar.sync 1, 128;" ::: "memory");
      if (local < OTHERS * 8) {
        const int j = local >> 3;
        float high = LOWEST, all = 0.0f;
        for (int i = 0; i < 4; ++i) high = fmaxf(high, parts[buffer][i][j][unit][0]);
        for (int i = 0; i < 8; ++i) wide[i] = 0.0f;
        for (int k = 0; k < 4; ++k) {
          const float* part = parts[buffer][k][j][unit];
          const float share = exp2_fast((part[0] - high) * scale);
          all += share * part[1];
#pragma unroll
          for (int i = 0; i < 8; ++i) wide[i] += share * part[2 + i];
        }
        const float inverse = inverse_unit / all;
        Out* target = out + (first_other + j) * (heads * WIDTH) + head * WIDTH + 8 * unit;
#pragma unroll
        for (int i = 0; i < 8; i += 2) store_pair(target + i, wide[i] * inverse, wide[i + 1] * inverse);
      }
      __syncwarp();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    const int g = lane >> 2, t = lane & 3;
    int step = 0, number = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++number) {
      const int candidate = item / heads, head = item % heads, buffer = number & 1;
      u32 q[2][16];
      barrier_wait(smem_address(&query_full), number & 1);
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int row = lane & 15, unit = 2 * k + (lane >> 4);
          const u32 address = queries + (group * 2 + b) * TILE_BYTES + (warp * 16 + row) * 128 + ((unit ^ (row & 7)) << 4);
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                       : "=r"(q[b][4 * k]), "=r"(q[b][4 * k + 1]), "=r"(q[b][4 * k + 2]), "=r"(q[b][4 * k + 3])
                       : "r"(address)
                       : "memory");
        }
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&query_empty));
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float even, odd;
          const int e = (i >> 2) * 16 + (i >> 1 & 1) * 8 + 2 * t;
          q[b][i] = turned(q[b][i], load_angles(table + angle_at(e, frames - 1, (group * 2 + b) * 4 + warp, g + (i & 1) * 8)), even, odd);
        }
      settle(q[0]);
      settle(q[1]);
      float o[2][32], top[2][2], total[2][2];
      barrier_wait(smem_address(&few_full[buffer]), number >> 1 & 1);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        // The conditioning keys: OTHERS * frames of the tile's sixteen.
        float s[8];
        const u64 k = descriptor(few + buffer * 2 * FEW_BYTES), v = descriptor(few + buffer * 2 * FEW_BYTES + FEW_BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_few(s, q[b] + 4 * i, k + 2 * i, i);
        wgmma_commit();
        wgmma_done<0>(s);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if ((i >> 2) * 8 + 2 * t + (i & 1) >= OTHERS * frames) s[i] = LOWEST;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float high = fmaxf(fmaxf(s[2 * r], s[2 * r + 1]), fmaxf(s[2 * r + 4], s[2 * r + 5]));
          high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
          high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
#pragma unroll
          for (int i = 0; i < 8; i += 4) s[2 * r + i] = exp2_fast((s[2 * r + i] - high) * scale), s[2 * r + i + 1] = exp2_fast((s[2 * r + i + 1] - high) * scale);
          top[b][r] = high;
          total[b][r] = (s[2 * r] + s[2 * r + 1]) + (s[2 * r + 4] + s[2 * r + 5]);
        }
        u32 p[4] = {pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]), pack_bf16(s[6], s[7])};
        settle(p);
        wgmma_fence();
        wgmma_values(o[b], p, v, 0);
        wgmma_commit();
        wgmma_done<0>(o[b]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&few_empty[buffer]));
      for (int inside = 0; inside < steps; ++inside, ++step) {
        const int stage = step % STAGES;
        float s[2][32];
        u32 p[2][16];
        barrier_wait(smem_address(&ready[stage]), step / STAGES & 1);
        barrier_wait(smem_address(&full[stage]), step / STAGES & 1);
        const u64 k = descriptor(base + stage * STAGE), v = descriptor(base + stage * STAGE + TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int b = 0; b < 2; ++b) {
#pragma unroll
          for (int i = 0; i < 4; ++i) wgmma_keys(s[b], q[b] + 4 * i, k + 2 * i, i);
          wgmma_commit();
        }
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          wgmma_done<1>(s[b]);
          float decay[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float high = top[b][r], sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 32; i += 4) high = fmaxf(high, fmaxf(s[b][i + 2 * r], s[b][i + 2 * r + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            const float shift = high * scale;
            decay[r] = exp2_fast(top[b][r] * scale - shift);
            top[b][r] = high;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const float x = exp2_fast(s[b][4 * i + 2 * r] * scale - shift), y = exp2_fast(s[b][4 * i + 2 * r + 1] * scale - shift);
              sum += x + y;
              p[b][2 * i + r] = pack_bf16(x, y);
            }
            total[b][r] = total[b][r] * decay[r] + sum;
          }
#pragma unroll
          for (int i = 0; i < 32; ++i) o[b][i] *= decay[i >> 1 & 1];
          settle(o[b]);
          settle(p[b]);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i) wgmma_values(o[b], p[b] + 4 * i, v + 128 * i, 1);
          wgmma_commit();
        }
        wgmma_done<0>(o[0]);
        wgmma_done<0>(o[1]);
        if (lane == 0) barrier_arrive(smem_address(&empty[stage]));
      }
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float all = total[b][r];
          all += __shfl_xor_sync(~0u, all, 1);
          all += __shfl_xor_sync(~0u, all, 2);
          const float inverse = inverse_unit / all;
          const size_t row = (size_t)candidate * PATCHES + (group * 2 + b) * 64 + warp * 16 + g + 8 * r;
          Out* target = out + row * (heads * WIDTH) + head * WIDTH + 2 * t;
#pragma unroll
          for (int i = 0; i < 8; ++i) store_pair(target + 8 * i, o[b][4 * i + 2 * r] * inverse, o[b][4 * i + 2 * r + 1] * inverse);
        }
    }
  }
}
