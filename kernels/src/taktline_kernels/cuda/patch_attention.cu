// Attention inside images of many tokens on Hopper, heads of 72, straight from the fused projection's rows. A block has 128
// queries of one head: two warpgroups of 64, whose queries stay in registers, and a third that brings keys and values of 128
// tokens at a time. While one tile's weights are made, the values of the tile before it are multiplied; the two warpgroups fill
// each other's gaps.
// A row of 72 numbers lies in shared memory as two halves of 64: logits take five products of depth 16, the last of them half
// of zeros, sums have nine groups of eight columns. Rows start at any 16 bytes, where the bulk tensor copy engine is slow: threads
// copy them in nine pieces.
// The largest logit known is renewed where a larger by 2^8 is met, so that sums are rarely scaled down.
// The host prepends hopper.cuh, wgmma_keys and wgmma_values.

#define WIDTH 72
#define PIECES 9  // of 16 bytes in a row
#define TILE 128
#define HALF_BYTES (TILE * 128)
#define TILE_BYTES (2 * HALF_BYTES)
#define SLACK 8.0f
#define LOWEST -1e30f

// The third warpgroup's copy of 128 rows: a thread has one piece of every fourteenth row.
DEVICE void copy_rows(u32 target, const u16* source, int stride) {
  const int local = threadIdx.x & 127, first = local / PIECES, piece = local - first * PIECES;
  if (first < 14) {
    source += first * stride + piece * 8;
    target += (piece >> 3) * HALF_BYTES;
#pragma unroll
    for (int i = 0; i < 10; ++i) {
      const int row = first + 14 * i;
      if (i < 9 || row < TILE)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + row * 128 + (((piece ^ row) & 7) << 4)), "l"(source + i * 14 * stride) : "memory");
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Values are read across their rows: from one half to the other instead of from one number to the next.
DEVICE u64 value_descriptor(u32 address) { return descriptor(address) + ((u64)(HALF_BYTES / 16 - 1) << 16); }
// Weights of a tile in place of its logits. True where the sums must be scaled down.
DEVICE bool weigh(float (&s)[TILE / 2], Row& low, Row& high, float factor) {
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

// q, k and v: (images, tokens, heads, 72) bf16 with a token's heads side by side, images and tokens at any multiple of 8; tokens a
// multiple of 128. out: likewise, contiguous.
extern "C" __global__ void __launch_bounds__(384, 1) attend_patches(const u16* q_rows, const u16* k_rows, const u16* v_rows, u16* out, int images, int tokens,
                                                                    int heads, int image_stride, int stride, float factor) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES], query_full, query_empty;
  const int group = threadIdx.x >> 7, blocks = tokens / TILE, items = images * heads * blocks, tiles = tokens / TILE;
  // Keys of all stages, then the queries, then values.
  const u32 base = smem_address(shared), query_base = base + STAGES * TILE_BYTES, value_base = query_base + TILE_BYTES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&key_full[i]), 128);
      barrier_init(smem_address(&value_full[i]), 128);
      barrier_init(smem_address(&key_empty[i]), 8);
      barrier_init(smem_address(&value_empty[i]), 8);
    }
    barrier_init(smem_address(&query_full), 128);
    barrier_init(smem_address(&query_empty), 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Columns 72 to 79 of queries and keys.
  for (int i = threadIdx.x; i < (STAGES + 1) * TILE; i += 384) {
    const int row = i % TILE;
    const u32 place = base + (i / TILE) * TILE_BYTES + HALF_BYTES + row * 128 + ((1 ^ (row & 7)) << 4);
    asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(place), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    int stage = 0, number = 0;
    u32 parity = 1, latest = 0, before = 0;  // barriers of what is still under way
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++number) {
      const int block = item % blocks, head = item / blocks % heads, image = item / (blocks * heads);
      const size_t first = (size_t)image * image_stride + head * WIDTH;
      // The queries, then keys and values of each tile.
#pragma unroll 1
      for (int load = -1; load < 2 * tiles; ++load) {
        const bool queries = load < 0, keys = !(load & 1);
        const u32 empty = smem_address(queries ? &query_empty : keys ? &key_empty[stage] : &value_empty[stage]);
        const u32 full = smem_address(queries ? &query_full : keys ? &key_full[stage] : &value_full[stage]);
        barrier_wait(empty, queries ? (number & 1) ^ 1 : parity);
        const u32 target = queries ? query_base : (keys ? base : value_base) + stage * TILE_BYTES;
        const u16* rows = queries ? q_rows : keys ? k_rows : v_rows;
        copy_rows(target, rows + first + (size_t)(queries ? block : load >> 1) * TILE * stride, stride);
        if (before) {
          asm volatile("cp.async.wait_group 2;" ::: "memory");
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          barrier_arrive(before);
        }
        before = latest, latest = full;
        if (!queries && !keys && ++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (before) barrier_arrive(before);
    if (latest) barrier_arrive(latest);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int local = threadIdx.x & 127, warp = local >> 5, thread = local & 31, t = thread & 3;
    int stage = 0, number = 0;
    u32 parity = 0;
    if (group == 1) pass_turn(1);
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++number) {
      const int block = item % blocks, head = item / blocks % heads, image = item / (blocks * heads);
      float s[TILE / 2], o[WIDTH / 2];
      u32 p[TILE / 4], q[5][4];
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) o[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < TILE / 2; ++i) s[i] = 0.0f;
      Row low = {LOWEST, 0.0f, 1.0f}, high = low;
      barrier_wait(smem_address(&query_full), number & 1);
      {
        const int row = group * 64 + warp * 16 + (thread & 15);
#pragma unroll
        for (int i = 0; i < 5; ++i) {
          const int unit = 2 * (i & 3) + (thread >> 4);
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                       : "=r"(q[i][0]), "=r"(q[i][1]), "=r"(q[i][2]), "=r"(q[i][3])
                       : "r"(query_base + (i >> 2) * HALF_BYTES + row * 128 + ((unit ^ (row & 7)) << 4))
                       : "memory");
        }
        __syncwarp();
        if (thread == 0) barrier_arrive(smem_address(&query_empty));
      }
      int value_stage = stage;
      u32 value_parity = parity;
      auto multiply_keys = [&]() {
        barrier_wait(smem_address(&key_full[stage]), parity);
        take_turn(group);
        settle(s);
        settle(o);
        settle(p);
#pragma unroll
        for (int i = 0; i < 5; ++i) settle(q[i]);
        wgmma_fence();
        const u64 k = descriptor(base + stage * TILE_BYTES);
#pragma unroll
        for (int i = 0; i < 5; ++i) wgmma_keys(s, q[i], k + (i >> 2) * (HALF_BYTES / 16) + 2 * (i & 3), i > 0);
        wgmma_commit();
      };
      auto multiply_values = [&]() {
        const u64 v = value_descriptor(value_base + value_stage * TILE_BYTES);
#pragma unroll
        for (int i = 0; i < TILE / 16; ++i) wgmma_values(o, p + 4 * i, v + 128 * i, 1);
        wgmma_commit();
      };
      auto leave_keys = [&]() {
        settle(s);
        __syncwarp();
        if (thread == 0) barrier_arrive(smem_address(&key_empty[stage]));
        if (++stage == STAGES) stage = 0, parity ^= 1;
      };
      multiply_keys();
      pass_turn(group);
      wgmma_wait<0>();
      leave_keys();
      weigh(s, low, high, factor);
      pack(s, p);
      barrier_wait(smem_address(&value_full[value_stage]), value_parity);
      for (int tile = 1; tile < tiles; ++tile) {
        multiply_keys();
        multiply_values();
        pass_turn(group);
        wgmma_wait<1>();
        leave_keys();
        const bool renew = weigh(s, low, high, factor);
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
          for (int i = 0; i < WIDTH / 2; i += 4) o[i] *= low.decay, o[i + 1] *= low.decay, o[i + 2] *= high.decay, o[i + 3] *= high.decay;
        }
        pack(s, p);
      }
      settle(o);
      settle(p);
      wgmma_fence();
      multiply_values();
      join_totals(low, high);
      wgmma_wait<0>();
      settle(o);
      __syncwarp();
      if (thread == 0) barrier_arrive(smem_address(&value_empty[value_stage]));
      const float by = 1.0f / low.total, other = 1.0f / high.total;
      u16* target = out + ((size_t)(image * tokens + block * TILE + group * 64 + warp * 16 + (thread >> 2)) * heads + head) * WIDTH + 2 * t;
#pragma unroll
      for (int i = 0; i < WIDTH / 8; ++i) {
        *reinterpret_cast<u32*>(target + 8 * i) = pack_bf16(o[4 * i] * by, o[4 * i + 1] * by);
        *reinterpret_cast<u32*>(target + (size_t)8 * heads * WIDTH + 8 * i) = pack_bf16(o[4 * i + 2] * other, o[4 * i + 3] * other);
      }
    }
  }
}
