// Attention in e4m3 over a text and thousands of tokens, heads of 128, on Hopper. Persistent blocks of 128 queries of one
// head: one warpgroup feeds keys and values through the bulk tensor copy engine, two have 64 queries each. While one
// tile's weights are made, the values of the tile before it are multiplied; the two warpgroups fill each other's gaps.
// Products leave a thread two neighbouring keys of every eight, and as an operand it must have four neighbouring ones of
// sixteen. So keys arrive in shared memory in another order within each sixteen (the tensor map has five dimensions for
// that): row 8 b + 2 t + d has key 4 t + 2 b + d. Values are multiplied in the order in which they lie.
// Weights are 2^6 for the largest logit known. That one is renewed where a larger by 2^2 is met, so that sums are rarely
// scaled down; weights never pass 2^8, under the 448 of e4m3.
// The host prepends hopper.cuh, wgmma_keys and wgmma_values.

#define WIDTH 128
#define QUERIES 128
#define TILE 128
#define TILE_BYTES (TILE * 128)
#define SHIFT 6.0f
#define SLACK 2.0f
#define LOWEST -1e30f

DEVICE u32 pack_four(float a, float b, float c, float d) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return (u32)low | (u32)high << 16;
}
DEVICE void copy_keys(u32 target, const TensorMap* map, int column, int sixteen, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %3, %4}], [%5];" ::"r"(target),
      "l"(map), "r"(column), "r"(0), "r"(sixteen), "r"(bar)
      : "memory");
}
DEVICE void copy_queries(u32 target, const TensorMap* map, int column, int row, int lane, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(lane), "r"(bar)
      : "memory");
}

// Weights of a tile in place of its logits, as the operand of the next product. True where the sums must be scaled down.
DEVICE bool weigh(float (&s)[64], u32 (&p)[16], Row& low, Row& high, float factor, int count, int t) {
  if (count < TILE) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if ((i >> 3) * 16 + 4 * t + 2 * (i >> 2 & 1) + (i & 1) >= count) s[i] = LOWEST;
  }
  const bool renew = renew_tops(s, low, high, factor, SLACK);
  weigh_rows(s, low, high, factor, SHIFT - low.top, SHIFT - high.top);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float* at = s + 16 * k;
    p[4 * k] = pack_four(at[0], at[1], at[4], at[5]), p[4 * k + 1] = pack_four(at[2], at[3], at[6], at[7]);
    p[4 * k + 2] = pack_four(at[8], at[9], at[12], at[13]), p[4 * k + 3] = pack_four(at[10], at[11], at[14], at[15]);
  }
  settle(p);
  return renew;
}

// Maps count two bytes as one number. queries: (lanes, rows, heads 128) in boxes of 64 rows; keys and text_keys: see above; values and text_values: (lanes
// kv_heads 128, tokens). room and slots: rows of a lane of the keys, multiples of 16. out: (lanes, rows, heads 128) bf16.
extern "C" __global__ void __launch_bounds__(384, 1)
    attend(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
           const __grid_constant__ TensorMap text_keys, const __grid_constant__ TensorMap text_values, const float* multipliers,
           const float* text_multipliers, const int* lengths, u16* out, int lanes, int rows, int tokens, int room, int slots, int heads, int kv_heads,
           float scale_log2) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES], query_full[2], query_empty[2];
  const int group = threadIdx.x >> 7, blocks = (rows + QUERIES - 1) / QUERIES, items = lanes * heads * blocks;
  const int own_tiles = (tokens + TILE - 1) / TILE, share = heads / kv_heads;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&key_full[i]), 1);
      barrier_init(smem_address(&value_full[i]), 1);
      barrier_init(smem_address(&key_empty[i]), 8);
      barrier_init(smem_address(&value_empty[i]), 8);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(smem_address(&query_full[i]), 1);
      barrier_init(smem_address(&query_empty[i]), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // Keys of all stages, then values, then two blocks of queries.
  const u32 base = smem_address(shared), value_base = base + STAGES * TILE_BYTES, query_base = value_base + STAGES * TILE_BYTES;

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      int stage = 0, number = 0;
      u32 parity = 1;
      for (int item = blockIdx.x; item < items; item += gridDim.x, ++number) {
        const int block = item % blocks, head = item / blocks % heads, lane = item / (blocks * heads), kv_head = head / share;
        const int text_tiles = (lengths[lane] + TILE - 1) / TILE, buffer = number & 1;
        barrier_wait(smem_address(&query_empty[buffer]), (number >> 1 & 1) ^ 1);
        barrier_expect(smem_address(&query_full[buffer]), QUERIES * 128);
        for (int half = 0; half < 2; ++half)
          copy_queries(query_base + buffer * (QUERIES * 128) + half * 8192, &queries, head * (WIDTH / 2), block * QUERIES + half * 64, lane,
                       smem_address(&query_full[buffer]));
#pragma unroll 1
        for (int tile = 0; tile < text_tiles + own_tiles; ++tile) {
          const bool text = tile < text_tiles;
          const int start = (text ? tile : tile - text_tiles) * TILE, first = lane * (text ? slots : room) + start;
          barrier_wait(smem_address(&key_empty[stage]), parity);
          barrier_expect(smem_address(&key_full[stage]), TILE_BYTES);
          copy_keys(base + stage * TILE_BYTES, text ? &text_keys : &keys, kv_head * (WIDTH / 2), first >> 4, smem_address(&key_full[stage]));
          barrier_wait(smem_address(&value_empty[stage]), parity);
          barrier_expect(smem_address(&value_full[stage]), TILE_BYTES);
          copy_tile(value_base + stage * TILE_BYTES, text ? &text_values : &values, start / 2, (lane * kv_heads + kv_head) * WIDTH,
                    smem_address(&value_full[stage]));
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int local = threadIdx.x & 127, warp = local >> 5, thread = local & 31, t = thread & 3;
    int stage = 0, number = 0;
    u32 parity = 0;
    if (group == 1) pass_turn(1);
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++number) {
      const int block = item % blocks, head = item / blocks % heads, lane = item / (blocks * heads), buffer = number & 1;
      const int length = lengths[lane], text_tiles = (length + TILE - 1) / TILE, tiles = text_tiles + own_tiles;
      const float of_v = multipliers[2], own_factor = scale_log2 / (multipliers[0] * multipliers[1]);
      const float text_factor = scale_log2 / (multipliers[0] * text_multipliers[2 * lane]), into_own = of_v / text_multipliers[2 * lane + 1];
      float s[64], o[64];
      u32 p[16], next[16];
#pragma unroll
      for (int i = 0; i < 64; ++i) o[i] = s[i] = 0.0f;
      Row low = {LOWEST, 0.0f, 1.0f}, high = low;
      const u64 q = descriptor(query_base + buffer * (QUERIES * 128) + group * 8192);
      barrier_wait(smem_address(&query_full[buffer]), number >> 1 & 1);
      int value_stage = stage;
      u32 value_parity = parity;
      auto multiply_keys = [&]() {
        barrier_wait(smem_address(&key_full[stage]), parity);
        take_turn(group);
        settle(s);
        settle(o);
        settle(p);
        wgmma_fence();
        const u64 k = descriptor(base + stage * TILE_BYTES);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_keys(s, q + 2 * i, k + 2 * i, i > 0);
        wgmma_commit();
      };
      auto leave_keys = [&](bool last) {
        settle(s);
        __syncwarp();
        if (thread == 0) {
          barrier_arrive(smem_address(&key_empty[stage]));
          if (last) barrier_arrive(smem_address(&query_empty[buffer]));
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
      };
      multiply_keys();
      pass_turn(group);
      wgmma_wait<0>();
      leave_keys(tiles == 1);
      weigh(s, p, low, high, text_factor, length, t);
      barrier_wait(smem_address(&value_full[value_stage]), value_parity);
      for (int tile = 1; tile < tiles; ++tile) {
        multiply_keys();
        const u64 v = descriptor(value_base + value_stage * TILE_BYTES);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_values(o, p + 4 * i, v + 2 * i, 1);
        wgmma_commit();
        pass_turn(group);
        wgmma_wait<1>();
        leave_keys(tile == tiles - 1);
        const bool text = tile < text_tiles;
        const bool renew = weigh(s, next, low, high, text ? text_factor : own_factor, text ? length - tile * TILE : tokens - (tile - text_tiles) * TILE, t);
        const int used = value_stage;
        if (++value_stage == STAGES) value_stage = 0, value_parity ^= 1;
        // A loop between the weights and the wait: ptxas would else put the weights behind it.
        barrier_wait(smem_address(&value_full[value_stage]), value_parity);
        wgmma_wait<0>();
        settle(o);
        settle(p);
        __syncwarp();
        if (thread == 0) barrier_arrive(smem_address(&value_empty[used]));
        if (renew || tile == text_tiles) {
          const float turn = tile == text_tiles ? into_own : 1.0f, by = renew ? low.decay * turn : turn, other = renew ? high.decay * turn : turn;
#pragma unroll
          for (int i = 0; i < 64; i += 4) o[i] *= by, o[i + 1] *= by, o[i + 2] *= other, o[i + 3] *= other;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) p[i] = next[i];
      }
      settle(o);
      settle(p);
      wgmma_fence();
      const u64 v = descriptor(value_base + value_stage * TILE_BYTES);
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_values(o, p + 4 * i, v + 2 * i, 1);
      wgmma_commit();
      wgmma_wait<0>();
      settle(o);
      __syncwarp();
      if (thread == 0) barrier_arrive(smem_address(&value_empty[value_stage]));
      join_totals(low, high);
      const float by = 1.0f / (low.total * of_v), other = 1.0f / (high.total * of_v);
      const int row = block * QUERIES + group * 64 + warp * 16 + (thread >> 2);
      u16* target = out + ((size_t)lane * rows + row) * (heads * WIDTH) + head * WIDTH + 2 * t;
      if (row < rows) {
#pragma unroll
        for (int i = 0; i < 16; ++i) *reinterpret_cast<u32*>(target + 8 * i) = pack_bf16(o[4 * i] * by, o[4 * i + 1] * by);
      }
      if (row + 8 < rows) {
        target += (size_t)8 * heads * WIDTH;
#pragma unroll
        for (int i = 0; i < 16; ++i) *reinterpret_cast<u32*>(target + 8 * i) = pack_bf16(o[4 * i + 2] * other, o[4 * i + 3] * other);
      }
    }
  }
}
