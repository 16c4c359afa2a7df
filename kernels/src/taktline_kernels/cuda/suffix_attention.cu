// Attention in bf16 of many tokens over themselves and a text before them, heads of 128, on Hopper. Persistent blocks of
// 128 queries: the SHARE heads that read the same keys, of neighbouring tokens, so that odd token counts waste little. One
// warpgroup feeds keys and values through the bulk tensor copy engine, two have 64 queries each. While one tile's weights
// are made, the values of the tile before it are multiplied; the two warpgroups fill each other's gaps.
// Rows of 128 numbers lie in shared memory as two halves of 64, each TILE (or QUERIES) rows of 128 bytes.
// The largest logit known is renewed where a larger by 2^8 is met, so that sums are rarely scaled down.
// The host prepends hopper.cuh, wgmma_keys and wgmma_values.

#define WIDTH 128
#define QUERIES 128
#define TOKENS (QUERIES / SHARE)
#define HALF_BYTES (TILE * 128)
#define TILE_BYTES (2 * HALF_BYTES)
#define QUERY_HALF (QUERIES * 128)
#define QUERY_BYTES (2 * QUERY_HALF)
#define SLACK 8.0f
#define LOWEST -1e30f

DEVICE void copy_heads(u32 target, const TensorMap* map, int column, int head, int token, int lane, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(target),
      "l"(map), "r"(column), "r"(head), "r"(token), "r"(lane), "r"(bar)
      : "memory");
}
// Values are read across their rows: from one half to the other instead of from one number to the next.
DEVICE u64 value_descriptor(u32 address) { return descriptor(address) + ((u64)(HALF_BYTES / 16 - 1) << 16); }

// Weights of a tile in place of its logits. True where the sums must be scaled down.
DEVICE bool weigh(float (&s)[TILE / 2], Row& low, Row& high, float factor, int count, int t) {
  if (count < TILE) {
#pragma unroll
    for (int i = 0; i < TILE / 2; ++i)
      if ((i >> 2) * 8 + 2 * t + (i & 1) >= count) s[i] = LOWEST;
  }
  const bool renew = renew_tops(s, low, high, factor, SLACK);
  weigh_rows(s, low, high, factor, -low.top, -high.top);
  settle(s);
  return renew;
}
// The weights as the operand of the next product.
DEVICE void pack(const float (&s)[TILE / 2], u32 (&p)[TILE / 4]) {
#pragma unroll
  for (int i = 0; i < TILE / 4; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  settle(p);
}

// queries: (lanes, rows, heads, 128); keys and values: (lanes, tokens, kv_heads, 128), those of the text likewise, of which
// `lengths` are valid. out: (lanes, rows, heads, 128) bf16.
extern "C" __global__ void __launch_bounds__(384, 1)
    attend(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
           const __grid_constant__ TensorMap text_keys, const __grid_constant__ TensorMap text_values, const int* lengths, u16* out, int lanes,
           int rows, int tokens, int kv_heads, float factor) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES], query_full[2], query_empty[2];
  const int group = threadIdx.x >> 7, blocks = (rows + TOKENS - 1) / TOKENS, items = lanes * kv_heads * blocks;
  const int own_tiles = (tokens + TILE - 1) / TILE;
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 256) {
      int stage = 0, number = 0;
      u32 parity = 1;
      for (int item = blockIdx.x; item < items; item += gridDim.x, ++number) {
        const int block = item % blocks, kv_head = item / blocks % kv_heads, lane = item / (blocks * kv_heads);
        const int text_tiles = (lengths[lane] + TILE - 1) / TILE, buffer = number & 1;
        barrier_wait(smem_address(&query_empty[buffer]), (number >> 1 & 1) ^ 1);
        barrier_expect(smem_address(&query_full[buffer]), QUERY_BYTES);
        for (int half = 0; half < 2; ++half)
          copy_heads(query_base + buffer * QUERY_BYTES + half * QUERY_HALF, &queries, half * 64, kv_head * SHARE, block * TOKENS, lane,
                     smem_address(&query_full[buffer]));
#pragma unroll 1
        for (int tile = 0; tile < text_tiles + own_tiles; ++tile) {
          const bool text = tile < text_tiles;
          const int start = (text ? tile : tile - text_tiles) * TILE;
          const TensorMap *of_keys = text ? &text_keys : &keys, *of_values = text ? &text_values : &values;
          barrier_wait(smem_address(&key_empty[stage]), parity);
          barrier_expect(smem_address(&key_full[stage]), TILE_BYTES);
          for (int half = 0; half < 2; ++half)
            copy_heads(base + stage * TILE_BYTES + half * HALF_BYTES, of_keys, half * 64, kv_head, start, lane, smem_address(&key_full[stage]));
          barrier_wait(smem_address(&value_empty[stage]), parity);
          barrier_expect(smem_address(&value_full[stage]), TILE_BYTES);
          for (int half = 0; half < 2; ++half)
            copy_heads(value_base + stage * TILE_BYTES + half * HALF_BYTES, of_values, half * 64, kv_head, start, lane,
                       smem_address(&value_full[stage]));
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int local = threadIdx.x & 127, warp = local >> 5, thread = local & 31, t = thread & 3;
    int stage = 0, number = 0;
    u32 parity = 0;
    if (group == 1) pass_turn(1);
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++number) {
      const int block = item % blocks, kv_head = item / blocks % kv_heads, lane = item / (blocks * kv_heads), buffer = number & 1;
      const int length = lengths[lane], text_tiles = (length + TILE - 1) / TILE, tiles = text_tiles + own_tiles;
      float s[TILE / 2], o[64];
      u32 p[TILE / 4];
#pragma unroll
      for (int i = 0; i < 64; ++i) o[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < TILE / 2; ++i) s[i] = 0.0f;
      Row low = {LOWEST, 0.0f, 1.0f}, high = low;
      const u64 q = descriptor(query_base + buffer * QUERY_BYTES + group * 8192);
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
        for (int i = 0; i < 8; ++i)
          wgmma_keys(s, q + (i >> 2) * (QUERY_HALF / 16) + 2 * (i & 3), k + (i >> 2) * (HALF_BYTES / 16) + 2 * (i & 3), i > 0);
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
      auto count_of = [&](int tile) { return tile < text_tiles ? length - tile * TILE : tokens - (tile - text_tiles) * TILE; };
      multiply_keys();
      pass_turn(group);
      wgmma_wait<0>();
      leave_keys(tiles == 1);
      weigh(s, low, high, factor, count_of(0), t);
      pack(s, p);
      barrier_wait(smem_address(&value_full[value_stage]), value_parity);
      for (int tile = 1; tile < tiles; ++tile) {
        multiply_keys();
        const u64 v = value_descriptor(value_base + value_stage * TILE_BYTES);
#pragma unroll
        for (int i = 0; i < TILE / 16; ++i) wgmma_values(o, p + 4 * i, v + 128 * i, 1);
        wgmma_commit();
        pass_turn(group);
        wgmma_wait<1>();
        leave_keys(tile == tiles - 1);
        const bool renew = weigh(s, low, high, factor, count_of(tile), t);
        const int used = value_stage;
        if (++value_stage == STAGES) value_stage = 0, value_parity ^= 1;
        // A loop between the weights and the wait: ptxas would else put the weights behind it.
        barrier_wait(smem_address(&value_full[value_stage]), value_parity);
        wgmma_wait<0>();
        settle(o);
        settle(p);
        __syncwarp();
        if (thread == 0) barrier_arrive(smem_address(&value_empty[used]));
        if (renew) {
#pragma unroll
          for (int i = 0; i < 64; i += 4) o[i] *= low.decay, o[i + 1] *= low.decay, o[i + 2] *= high.decay, o[i + 3] *= high.decay;
        }
        pack(s, p);
      }
      settle(o);
      settle(p);
      wgmma_fence();
      const u64 v = value_descriptor(value_base + value_stage * TILE_BYTES);
#pragma unroll
      for (int i = 0; i < TILE / 16; ++i) wgmma_values(o, p + 4 * i, v + 128 * i, 1);
      wgmma_commit();
      join_totals(low, high);
      wgmma_wait<0>();
      settle(o);
      __syncwarp();
      if (thread == 0) barrier_arrive(smem_address(&value_empty[value_stage]));
      const float by = 1.0f / low.total, other = 1.0f / high.total;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = group * 64 + warp * 16 + half * 8 + (thread >> 2), token = block * TOKENS + row / SHARE;
        const float scale = half ? other : by;
        u16* target = out + (((size_t)lane * rows + token) * (kv_heads * SHARE) + kv_head * SHARE + row % SHARE) * WIDTH + 2 * t;
        if (token < rows) {
#pragma unroll
          for (int i = 0; i < 16; ++i) *reinterpret_cast<u32*>(target + 8 * i) = pack_bf16(o[4 * i + 2 * half] * scale, o[4 * i + 2 * half + 1] * scale);
        }
      }
    }
  }
}
