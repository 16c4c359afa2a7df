// Attention of eight query heads over one cached key/value head of 256 on Hopper: a token's heads are rows of one product.
// A third warpgroup brings keys and values of KN positions at a time through the bulk tensor copy engine; two compute.
// WIDE: each has 64 rows of its own and sees every tile. Else both have the same 64 rows and every other tile, and SPLIT
// blocks of a cluster share the tiles; what they have found is joined at the end, in a fixed order.
// The products of a tile's keys run while the tile before is multiplied with its values, and the exponentials beside both.
// The host prepends hopper.cuh, wgmma (both operands in shared memory, KN columns) and wgmma_values (first in registers).

#define HEADS 8
#define WIDTH 256
#define ROWS 64
#define TOKENS (ROWS / HEADS)
#define QUERY_BYTES (ROWS * 512)
#define QUERIES (WIDE ? 2 : 1)
#define CHUNK_BYTES (KN * 128)  // 64 columns of a tile
#define TILE_BYTES (4 * CHUNK_BYTES)
#define STEP (WIDE ? 1 : 2)
#define LOWEST -1e30f
#define NOTHING -1e27f  // the maximum where no key is seen: far above a hidden key's scaled logit, whose weight is zero
#define HALF 64  // sums of a thread that are of one half of the columns

template <int PENDING, int N>
DEVICE void wgmma_done(float (&d)[N]) {
  wgmma_wait<PENDING>();
  settle(d);
}
// Values lie with their columns contiguous: the four chunks of 64 columns are CHUNK_BYTES apart.
DEVICE u64 value_descriptor(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(CHUNK_BYTES >> 4) << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}
DEVICE void copy_queries(u32 target, const TensorMap* map, int column, int token, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
      "l"(map), "r"(column), "r"(0), "r"(token), "r"(bar)
      : "memory");
}
DEVICE void group_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
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
#define ROW_BYTES (WIDTH * (int)sizeof(Out))

// One tile's weights: s becomes exp2 of the scaled logits against the new maximum, decay what that makes of the sums so far.
DEVICE void soften(float (&s)[KN / 2], float (&top)[2], float (&total)[2], float (&decay)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float high = LOWEST;
#pragma unroll
    for (int i = 0; i < KN / 2; i += 4) high = fmaxf(high, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
    high = fmaxf(top[r], fmaxf(high * scale_log2, NOTHING));
    decay[r] = exp2_fast(top[r] - high);
    top[r] = high;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KN / 2; i += 4) {
      s[i + 2 * r] = exp2_fast(fmaf(s[i + 2 * r], scale_log2, -high));
      s[i + 2 * r + 1] = exp2_fast(fmaf(s[i + 2 * r + 1], scale_log2, -high));
      sum += s[i + 2 * r] + s[i + 2 * r + 1];
    }
    total[r] = total[r] * decay[r] + sum;
  }
}
DEVICE void pack_weights(const float (&s)[KN / 2], u32 (&p)[KN / 4]) {
#pragma unroll
  for (int i = 0; i < KN / 4; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  settle(p);
}

// queries: a 3D map (tokens of all rows of the batch, HEADS, WIDTH); keys, values: maps of (batch * cache_rows, WIDTH) in
// boxes of KN x 64. out: (batch, tokens, HEADS, WIDTH) bf16, or with EIGHT e4m3 and a scale a token in `scales`.
extern "C" __global__ void __launch_bounds__(384, 1)
    attend_cached(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, Out* out,
                  float* scales, const int* lengths, int extra, int tokens, int cache_rows, float scale_log2, int first_alone) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 query_full, key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
  __shared__ float anchors[256];
#if !WIDE
  __shared__ float2 found[2][ROWS];  // maximum and sum of what a warpgroup has seen, then of what the block has
  __shared__ float largest[2][TOKENS];
#endif
  const int group = threadIdx.x >> 7, local = threadIdx.x & 127, warp = local >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int split = blockIdx.x % SPLIT, block = blockIdx.x / SPLIT, batch = blockIdx.y;
  const u32 base = smem_address(shared), key_ring = base + QUERIES * QUERY_BYTES, value_ring = key_ring + STAGES * TILE_BYTES;
  if (threadIdx.x == 0) {
    barrier_init(smem_address(&query_full), 1);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&key_full[i]), 1);
      barrier_init(smem_address(&value_full[i]), 1);
      barrier_init(smem_address(&key_empty[i]), WIDE ? 2 : 1);
      barrier_init(smem_address(&value_empty[i]), WIDE ? 2 : 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int count = lengths[batch] + extra, tiles = (count + KN - 1) / KN, share = (tiles + SPLIT - 1) / SPLIT, from = split * share;
  const int mine = max(0, min(tiles, from + share) - from);

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (local == 0) {
      const u32 bar = smem_address(&query_full);
      barrier_expect(bar, QUERIES * QUERY_BYTES);
      for (int i = 0; i < QUERIES; ++i)
        for (int c = 0; c < 4; ++c)
          copy_queries(base + i * QUERY_BYTES + c * (ROWS * 128), &queries, c * 64, batch * tokens + (block * QUERIES + i) * TOKENS, bar);
      int stage = 0;
      u32 parity = 1;
      for (int i = 0; i < mine; ++i) {
        const int row = batch * cache_rows + (from + i) * KN;
        barrier_wait(smem_address(&key_empty[stage]), parity);
        barrier_expect(smem_address(&key_full[stage]), TILE_BYTES);
        for (int c = 0; c < 4; ++c) copy_tile(key_ring + stage * TILE_BYTES + c * CHUNK_BYTES, &keys, c * 64, row, smem_address(&key_full[stage]));
        barrier_wait(smem_address(&value_empty[stage]), parity);
        barrier_expect(smem_address(&value_full[stage]), TILE_BYTES);
        for (int c = 0; c < 4; ++c) copy_tile(value_ring + stage * TILE_BYTES + c * CHUNK_BYTES, &values, c * 64, row, smem_address(&value_full[stage]));
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
#if SPLIT > 1
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int tile_of_rows = block * QUERIES + (WIDE ? group : 0), first = WIDE ? 0 : group;
  const u32 mine_of_queries = base + (WIDE ? group * QUERY_BYTES : 0);
  // Where the first token is alone, its heads end with its own key: rows 0 to 7 of the first tile.
  const bool alone = first_alone && tile_of_rows == 0;
  const int seen = alone ? count - extra + 1 : count;
  int limit[2] = {warp == 0 ? seen : count, count};
  float o[128], s[KN / 2], top[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f}, decay[2];
  u32 p[KN / 4];
  const u32 anchor = smem_address(&anchors[threadIdx.x]);
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] = 0.0f;

  auto multiply_keys = [&](int stage) {
    const u64 a = descriptor(mine_of_queries), b = descriptor(key_ring + stage * TILE_BYTES);
#pragma unroll
    for (int k = 0; k < 16; ++k) wgmma(s, a + (k >> 2) * (ROWS * 128 / 16) + (k & 3) * 2, b + (k >> 2) * (CHUNK_BYTES / 16) + (k & 3) * 2, k != 0);
    wgmma_commit();
  };
  auto multiply_values = [&](int stage) {
    const u64 b = value_descriptor(value_ring + stage * TILE_BYTES);
#pragma unroll
    for (int k = 0; k < KN / 16; ++k) wgmma_values(o, p + 4 * k, b + k * 128, 1);
    wgmma_commit();
  };
  auto hide = [&](int tile) {
    const int start = (from + tile) * KN;
    if (start + KN <= seen) return;
#pragma unroll
    for (int i = 0; i < KN / 2; ++i)
      if (start + (i >> 2) * 8 + 2 * t + (i & 1) >= limit[i >> 1 & 1]) s[i] = LOWEST;
  };

  barrier_wait(smem_address(&query_full), 0);
  if (first < mine) {
    int stage = first % STAGES;
    u32 parity = first / STAGES & 1;
    barrier_wait(smem_address(&key_full[stage]), parity);
    wgmma_fence();
    multiply_keys(stage);
    wgmma_done<0>(s);
    if (local == 0) barrier_arrive(smem_address(&key_empty[stage]));
    hide(first);
    soften(s, top, total, decay, scale_log2);
    pack_weights(s, p);
    for (int next = first + STEP; next < mine; next += STEP) {
      const int following = next % STAGES;
      const u32 turn = next / STAGES & 1;
      barrier_wait(smem_address(&key_full[following]), turn);
      wgmma_fence();
      multiply_keys(following);
      barrier_wait(smem_address(&value_full[stage]), parity);
      multiply_values(stage);
      wgmma_done<1>(s);
      if (local == 0) barrier_arrive(smem_address(&key_empty[following]));
      hide(next);
      soften(s, top, total, decay, scale_log2);
      // Nobody reads it: a store keeps ptxas from putting the exponentials behind the wait, where nothing overlaps them.
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(anchor), "f"(total[0] + total[1]) : "memory");
      wgmma_done<0>(o);
      if (local == 0) barrier_arrive(smem_address(&value_empty[stage]));
      pack_weights(s, p);
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i] *= decay[i >> 1 & 1];
      settle(o);
      stage = following, parity = turn;
    }
    barrier_wait(smem_address(&value_full[stage]), parity);
    wgmma_fence();
    multiply_values(stage);
    wgmma_done<0>(o);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
  }
  const int row = warp * 16 + g;
  // Rows of `out` that this tile has.
  const int rows_left = tokens * HEADS - tile_of_rows * ROWS;
  Out* target = out + ((size_t)batch * tokens * HEADS + (size_t)tile_of_rows * ROWS) * WIDTH;
#if WIDE
#define COLUMNS 32  // groups of eight columns that a thread finishes
#define FIRST_COLUMN 0
  float(&done)[128] = o;
  const float inverse[2] = {__fdividef(1.0f, total[0]), __fdividef(1.0f, total[1])};
#else
#define COLUMNS 16
#define FIRST_COLUMN (group * 16)
  // The warpgroups give each other the sums of the half of the columns that the other finishes.
  if (t == 0) {
    found[group][row] = make_float2(top[0], total[0]);
    found[group][row + 8] = make_float2(top[1], total[1]);
  }
  group_barrier(3, 256);
  float4* given = reinterpret_cast<float4*>(shared + QUERY_BYTES);  // where the keys were: [16][256 threads]
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    given[j * 256 + threadIdx.x] = group == 0 ? make_float4(o[HALF + 4 * j], o[HALF + 4 * j + 1], o[HALF + 4 * j + 2], o[HALF + 4 * j + 3])
                                              : make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
  }
  group_barrier(3, 256);
  float done[HALF], inverse[2], own[2], its[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float2 other = found[group ^ 1][row + 8 * r];
    const float high = fmaxf(top[r], other.x);
    own[r] = exp2_fast(top[r] - high), its[r] = exp2_fast(other.x - high);
    // The same order of sums in both warpgroups.
    total[r] = group == 0 ? total[r] * own[r] + other.y * its[r] : other.y * its[r] + total[r] * own[r];
    top[r] = high;
    inverse[r] = __fdividef(1.0f, total[r]);
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float4 v = given[j * 256 + (threadIdx.x ^ 128)];
    done[4 * j] = (group == 0 ? o[4 * j] : o[HALF + 4 * j]) * own[0] + v.x * its[0];
    done[4 * j + 1] = (group == 0 ? o[4 * j + 1] : o[HALF + 4 * j + 1]) * own[0] + v.y * its[0];
    done[4 * j + 2] = (group == 0 ? o[4 * j + 2] : o[HALF + 4 * j + 2]) * own[1] + v.z * its[1];
    done[4 * j + 3] = (group == 0 ? o[4 * j + 3] : o[HALF + 4 * j + 3]) * own[1] + v.w * its[1];
  }
#endif

#if SPLIT > 1
  // Each block of the cluster finishes some groups of eight columns.
  group_barrier(3, 256);
  float4* parts = given;  // all have been read
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) parts[j * 256 + threadIdx.x] = make_float4(done[4 * j], done[4 * j + 1], done[4 * j + 2], done[4 * j + 3]);
  if (group == 0 && t == 0) {
    found[0][row] = make_float2(top[0], total[0]);
    found[0][row + 8] = make_float2(top[1], total[1]);
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  float factor[2][SPLIT];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float high = LOWEST, sum = 0.0f;
    float2 of[SPLIT];
#pragma unroll
    for (int peer = 0; peer < SPLIT; ++peer) {
      u32 remote;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(&found[0][row + 8 * r])), "r"(peer));
      asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(of[peer].x), "=f"(of[peer].y) : "r"(remote) : "memory");
      high = fmaxf(high, of[peer].x);
    }
#pragma unroll
    for (int peer = 0; peer < SPLIT; ++peer) {
      factor[r][peer] = exp2_fast(of[peer].x - high);
      sum += factor[r][peer] * of[peer].y;
    }
#pragma unroll
    for (int peer = 0; peer < SPLIT; ++peer) factor[r][peer] = __fdividef(factor[r][peer], sum);
  }
#pragma unroll
  for (int i = 0; i < COLUMNS / SPLIT; ++i) {
    const int j = split * (COLUMNS / SPLIT) + i;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int peer = 0; peer < SPLIT; ++peer) {
      u32 remote;
      float4 v;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(parts + j * 256 + threadIdx.x)), "r"(peer));
      asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote) : "memory");
      sum.x = fmaf(v.x, factor[0][peer], sum.x), sum.y = fmaf(v.y, factor[0][peer], sum.y);
      sum.z = fmaf(v.z, factor[1][peer], sum.z), sum.w = fmaf(v.w, factor[1][peer], sum.w);
    }
    const int column = (FIRST_COLUMN + j) * 8 + 2 * t;
    if (row < rows_left) *reinterpret_cast<u32*>(target + (size_t)row * WIDTH + column) = pack_bf16(sum.x, sum.y);
    if (row + 8 < rows_left) *reinterpret_cast<u32*>(target + (size_t)(row + 8) * WIDTH + column) = pack_bf16(sum.z, sum.w);
  }
  // No block ends while another reads its parts.
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
#if EIGHT
  // The heads of a token are the eight rows g of a warp.
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) most = fmaxf(most, fmaxf(fabsf(done[4 * j + 2 * r]), fabsf(done[4 * j + 2 * r + 1])));
    most *= inverse[r];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
#if !WIDE
    if (lane == 0) largest[group][warp * 2 + r] = most;
#endif
    factor[r] = most;
  }
#if !WIDE
  group_barrier(3, 256);
#pragma unroll
  for (int r = 0; r < 2; ++r) factor[r] = fmaxf(largest[0][warp * 2 + r], largest[1][warp * 2 + r]);
#endif
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    factor[r] = fmaxf(factor[r], 1e-30f);
    if (lane == 0 && (WIDE || group == 0) && (warp * 2 + r) * HEADS < rows_left)
      scales[(size_t)batch * tokens + tile_of_rows * TOKENS + warp * 2 + r] = factor[r] / 448.0f;
    factor[r] = __fdividef(448.0f, factor[r]) * inverse[r];
  }
#endif
  // Through shared memory, where the queries were, so that whole lines are written.
  group_barrier(WIDE ? 1 + group : 3, WIDE ? 128 : 256);
  const u32 staging = mine_of_queries;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + 8 * r, byte = ((FIRST_COLUMN + j) * 8 + 2 * t) * (int)sizeof(Out);
      const u32 address = staging + at * ROW_BYTES + (((byte >> 4) ^ (at & 7)) << 4) + (byte & 15);
#if EIGHT
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(pack_pair(done[4 * j + 2 * r] * factor[r], done[4 * j + 2 * r + 1] * factor[r])) : "memory");
#else
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(pack_bf16(done[4 * j + 2 * r] * inverse[r], done[4 * j + 2 * r + 1] * inverse[r])) : "memory");
#endif
    }
  }
  group_barrier(WIDE ? 1 + group : 3, WIDE ? 128 : 256);
  constexpr int UNITS = ROW_BYTES / 16, THREADS = WIDE ? 128 : 256;
#pragma unroll
  for (int i = (WIDE ? local : threadIdx.x); i < ROWS * UNITS; i += THREADS) {
    const int at = i / UNITS, unit = i % UNITS;
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(staging + at * ROW_BYTES + ((unit ^ (at & 7)) << 4)) : "memory");
    if (at < rows_left) *reinterpret_cast<uint4*>(reinterpret_cast<char*>(target) + (size_t)at * ROW_BYTES + unit * 16) = v;
  }
#endif
}
