// Products of a diffusion transformer's blocks for one sequence of at most ROWS tokens, whose weight is cut in both directions,
// so that every processor has its share of it and reads no more of the tokens than that share needs. One thread feeds shared
// memory through the bulk tensor copy engine, one warpgroup computes: tokens are the rows of a tile, NC output channels its
// columns. The PEERS blocks of a cluster have a slice of the depth each, send each other their sums, and each finishes some.
// The weight's first STAGES blocks are read before the kernel before has ended. LATE: the next kernel starts, and reads its
// own, only when all of this one's are on their way: what a product waits for is not to queue behind what the next needs. HELD:
// only when all that was written before this kernel is there, so that the next may read it before it waits.
// MODE 0: gelu by tanh, or RELU; a block finishes every PEERS-th group of eight channels. 2: the residual add; a block finishes
// eight or sixteen rows of all channels, and leaves each row's sum and sum of squares. WIDE: the residual is fp32. 3: attention; a cluster has the queries of a
// head, or its queries, keys and values, a block finishes the attention of sixteen rows.
// NORMED > 0: the tokens are multiples of a layer norm's input, whose sums come in that many parts; the norm's own factor
// and mean come in behind the product.
// The host prepends hopper.cuh and wgmma(), generated for NC.

#define TOKEN_STAGE (ROWS * 128)
#define STAGE (TOKEN_STAGE + NC * 128)
#define GROUPS (NC / 8)
#define OWN ((GROUPS + PEERS - 1) / PEERS)
#define WARPS (ROWS / 16)
#if MODE == 3
#define HALVES 2
#define FINISHERS (ROWS / 16)
#define WIDTH 48                     // of a head
#define LINE 112                     // bytes of a key in shared memory: eight on different banks
#define SECTIONS (NC / WIDTH)        // 3: queries, keys and values of one head; 1: queries
#else
#define SECTIONS 1
#endif
#if MODE == 2
#define HALVES (PEERS == 8 ? 1 : 2)  // groups of eight rows that a block finishes
#define FINISHERS (ROWS / 8 / HALVES)
#define TURNS ((GROUPS + 3) / 4)     // groups of eight channels that a warp finishes
#endif

DEVICE float gelu(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}
// NaN stays NaN, which fmaxf would make 0: what is no number must not become an action.
DEVICE float relu(float x) {
  float v;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE void ask_for_tile(const TensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row) : "memory");
}
// Weights are read once a step and must not push activations out of L2.
DEVICE void copy_weights(u32 target, const TensorMap* weights, int tile, int block, int blocks, u32 bar) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#pragma unroll
  for (int i = 0; i < SECTIONS; ++i)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
            target + i * (NC / SECTIONS * 128)),
        "l"(weights), "r"(block * 64), "r"(i * (blocks * 64) + tile * (NC / SECTIONS)), "r"(bar), "l"(policy)
        : "memory");
}
// Stores into another block's shared memory that count themselves at a barrier there.
DEVICE u32 address_at(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
DEVICE void send(u32 target, float a, float b, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(target), "f"(a), "f"(b), "r"(bar) : "memory");
}
DEVICE void send(u32 target, float a, float b, float c, float d, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(target), "f"(a), "f"(b), "f"(c), "f"(d), "r"(bar)
               : "memory");
}

DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
struct Arguments {
  const u16* bias;       // 2
  u16* out;              // bf16: 0: (rows, channels); 2: the stream; 3: (rows, heads * WIDTH)
  const void* residual;  // 2: bf16, WIDE fp32 (rows, channels)
  u16* scaled;           // 2: stream * scale, or null
  const float* scale;    // 2: (channels), read where `scaled` is
  float2* sums_out;      // 2: (tiles, 64) of the new stream
  const float2* sums;    // NORMED: (NORMED, 64) of a norm's input
  const float* first;    // NORMED: (channels), what the mean is multiplied by
  const float* constant; // NORMED: (channels), what is added
  float width, eps;      // NORMED
  int share, rows, channels, blocks, skipped;  // skipped: the first rows, which have no tokens
  // 3: keys and values of a cross-attention, bf16 (keys, heads, WIDTH), k_token numbers from one key to the next; which are seen.
  int keys, k_token;
  const u16 *k, *v;
  const unsigned char* valid;
  float logit_scale;
};

extern "C" __global__ void __launch_bounds__(160, 2)
    few_tokens(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens, const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES], all_sent;
#if NORMED
  __shared__ float2 halves[2][64], norms[64];
#endif
#if MODE == 2
  __shared__ float2 row_sums[4][16];
#endif
#if MODE == 3
  __shared__ __align__(8) u64 keys_sent;
  __shared__ float tops[4][16], totals[4][16];
#endif
  const int tile = blockIdx.x / PEERS, rank = blockIdx.x % PEERS, share = p.share;
  const int first = rank * share;
#if MODE == 3
  const bool finishes = rank < FINISHERS;
#endif
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(smem_address(&full[i]), 1);
      barrier_init(smem_address(&empty[i]), 1);
    }
    if (PEERS > 1) {
      barrier_init(smem_address(&all_sent), 1);
#if MODE >= 2
      barrier_expect(smem_address(&all_sent), PEERS * GROUPS * HALVES * 256);
#else
      barrier_expect(smem_address(&all_sent), (PEERS - 1) * ((GROUPS - rank + PEERS - 1) / PEERS) * WARPS * 512);
#endif
    }
#if MODE == 3
    barrier_init(smem_address(&keys_sent), 1);
    barrier_expect(smem_address(&keys_sent), (FINISHERS - 1) * 16 * 2 * WIDTH * 2);
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if (!HELD && (!LATE || share <= STAGES)) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  const u32 base = smem_address(shared);

  if (threadIdx.x >= 128) {
    // Relaxed: it says only that this block runs and its barriers are there; a release would wait for all it wrote.
    if (PEERS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    if (threadIdx.x == 128) {
      asm volatile("prefetch.tensormap [%0];" ::"l"(&tokens) : "memory");
      const int ahead = min(share, STAGES);
      for (int i = 0; i < ahead; ++i) {
        barrier_expect(smem_address(&full[i]), STAGE);
        copy_weights(base + i * STAGE + TOKEN_STAGE, &weights, tile, first + i, p.blocks, smem_address(&full[i]));
      }
      for (int i = ahead; AHEAD && i < share; ++i) ask_for_tile(&weights, (first + i) * 64, tile * NC);
      asm volatile("griddepcontrol.wait;" ::: "memory");
      if (HELD) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      for (int i = 0; i < ahead; ++i) copy_tile(base + i * STAGE, &tokens, (first + i) * 64, -p.skipped, smem_address(&full[i]));
      int stage = 0;
      u32 parity = 0;
      for (int i = ahead; i < share; ++i) {
        barrier_wait(smem_address(&empty[stage]), parity);
        const u32 bar = smem_address(&full[stage]), target = base + stage * STAGE;
        barrier_expect(bar, STAGE);
        copy_weights(target + TOKEN_STAGE, &weights, tile, first + i, p.blocks, bar);
        copy_tile(target, &tokens, (first + i) * 64, -p.skipped, bar);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (LATE && i + 1 == share) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      }
    }
    __syncwarp();
    if (PEERS > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int channel = tile * NC + 2 * t;
  // Parameters are read before the kernel before has ended, what it writes behind that.
#if MODE == 2
  const bool finishes = rank < FINISHERS;
  u32 biases[TURNS];
#if WIDE
  float2 old[TURNS][HALVES];
#else
  u32 old[TURNS][HALVES];
#endif
  float2 scales[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int own = warp + 4 * i;
    biases[i] = 0, scales[i] = make_float2(0.0f, 0.0f);
    if (finishes && own < GROUPS) {
      if (p.bias) biases[i] = *reinterpret_cast<const u32*>(p.bias + channel + own * 8);
      if (p.scaled) scales[i] = *reinterpret_cast<const float2*>(p.scale + channel + own * 8);
    }
  }
#elif MODE == 3
  constexpr int OWNS = SECTIONS == 3 ? 9 : 6, TILES = SECTIONS == 3 ? 1 : 4;  // groups of channels; tiles of 16 keys that a warp has
  const auto group_of = [&](int i) { return i < 6 ? i : 6 + warp + 4 * (i - 6); };
  float2 firsts[OWNS], constants[OWNS];
  u32 seen = 0;
  if (finishes) {
#pragma unroll
    for (int i = 0; i < OWNS; ++i) {
      const int j = group_of(i), place = j / 6 * (p.blocks * 64) + tile * WIDTH + j % 6 * 8 + 2 * t;
      firsts[i] = *reinterpret_cast<const float2*>(p.first + place), constants[i] = *reinterpret_cast<const float2*>(p.constant + place);
    }
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) {
      const int own = (warp + i / 4 * 4) * 16 + (i >> 1 & 1) * 8 + 2 * t + (i & 1);
      if (SECTIONS == 3 ? own < p.rows : own < p.keys && p.valid[own] != 0) seen |= 1u << i;
    }
  }
  // Keys and values of a cross-attention were there before this chain of kernels began.
  if (SECTIONS == 1 && finishes) {
    for (int i = threadIdx.x; i < p.keys * 12; i += 128) {
      const int key = i / 12, piece = i % 12;
      const u16* source = (piece < 6 ? p.k : p.v) + (size_t)key * p.k_token + tile * WIDTH + (piece % 6) * 8;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(base + STAGES * STAGE + ((piece < 6 ? 0 : p.keys) + key) * LINE + (piece % 6) * 16), "l"(source) : "memory");
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  float2 firsts[OWN], constants[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int own = i * PEERS + rank;
    firsts[i] = constants[i] = make_float2(0.0f, 0.0f);
    if (own < GROUPS) {
      firsts[i] = *reinterpret_cast<const float2*>(p.first + channel + own * 8);
      constants[i] = *reinterpret_cast<const float2*>(p.constant + channel + own * 8);
    }
  }
#endif
  if (PEERS > 1 && APART) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#if NORMED
  {
    float2 sum = make_float2(0.0f, 0.0f), v[NORMED / 2];
    const float2* source = p.sums + (threadIdx.x >> 6) * (NORMED / 2) * 64 + (threadIdx.x & 63);
#pragma unroll
    for (int i = 0; i < NORMED / 2; ++i)
      asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v[i].x), "=f"(v[i].y) : "l"(source + i * 64) : "memory");
#pragma unroll
    for (int i = 0; i < NORMED / 2; ++i) sum.x += v[i].x, sum.y += v[i].y;
    halves[threadIdx.x >> 6][threadIdx.x & 63] = sum;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (threadIdx.x < 64) {
      const float2 a = halves[0][threadIdx.x], b = halves[1][threadIdx.x];
      const float mean = (a.x + b.x) / p.width, factor = rsqrtf(fmaxf((a.y + b.y) / p.width - mean * mean, 0.0f) + p.eps);
      norms[threadIdx.x] = make_float2(factor, -factor * mean);
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");
  }
#endif
#if MODE == 2
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int own = warp + 4 * i, token = (rank * HALVES + half) * 8 + g;
      const size_t place = (size_t)token * p.channels + channel + own * 8;
      const bool inside = finishes && own < GROUPS && token < p.rows;
#if WIDE
      old[i][half] = inside ? __ldcg(reinterpret_cast<const float2*>(static_cast<const float*>(p.residual) + place)) : make_float2(0.0f, 0.0f);
#else
      old[i][half] = 0;
      if (inside) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(old[i][half]) : "l"(static_cast<const u16*>(p.residual) + place) : "memory");
#endif
    }
  }
#endif
  float d[NC / 2];
#pragma unroll
  for (int i = 0; i < NC / 2; ++i) d[i] = 0.0f;
  int stage = 0, previous = -1;
  u32 parity = 0;
  for (int block = 0; block < share; ++block) {
    barrier_wait(smem_address(&full[stage]), parity);
    wgmma_fence();
    // Rows past the tokens are what lies behind them, and nothing reads the sums of those.
    const u64 a = descriptor(base + stage * STAGE), b = descriptor(base + stage * STAGE + TOKEN_STAGE);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma(d, a + 2 * k, b + 2 * k, 1);
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x == 0) barrier_arrive(smem_address(&empty[previous]));
    previous = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
  settle(d);
#if PEERS > 1
  if (!APART) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  const u32 received = base + (APART ? STAGES * STAGE : 0), bar = smem_address(&all_sent);
#endif
#if MODE == 3
  if (warp < WARPS) {
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
      send(address_at(received + ((rank * GROUPS + j) * 32 + lane) * 16, warp), d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3], address_at(bar, warp));
  }
  if (!finishes) return;
  barrier_wait(bar, 0);
  const float2 norm_low = norms[rank * 16 + g], norm_high = norms[rank * 16 + 8 + g];
  // A group of eight channels of this block's rows, bf16: rows g and g + 8.
  const auto finished = [&](int j, const float2& first_of, const float2& constant, u32& low, u32& high) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int peer = 0; peer < PEERS; ++peer) {
      float4 v;
      asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(received + ((peer * GROUPS + j) * 32 + lane) * 16) : "memory");
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    low = pack_bf16(sum.x * norm_low.x + norm_low.y * first_of.x + constant.x, sum.y * norm_low.x + norm_low.y * first_of.y + constant.y);
    high = pack_bf16(sum.z * norm_high.x + norm_high.y * first_of.x + constant.x, sum.w * norm_high.x + norm_high.y * first_of.y + constant.y);
  };
  u32 query[6][2];
#pragma unroll
  for (int j = 0; j < 6; ++j) finished(j, firsts[j], constants[j], query[j][0], query[j][1]);
  const int count = SECTIONS == 3 ? ROWS : p.keys;
  const u32 key_rows = base + (SECTIONS == 3 ? PEERS * GROUPS * 512 : STAGES * STAGE), value_rows = key_rows + count * LINE;
#if NC > 48
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int j = 6 + warp + 4 * i;
    u32 low, high;
    finished(j, firsts[6 + i], constants[6 + i], low, high);
    const u32 at = (j < 12 ? key_rows : value_rows) + (rank * 16 + g) * LINE + j % 6 * 16 + t * 4;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(low) : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + 8 * LINE), "r"(high) : "memory");
  }
  asm volatile("bar.sync 1, 128;" ::: "memory");
  // These rows' keys and values go to the blocks that have the others.
  for (int i = threadIdx.x; i < 16 * 12; i += 128) {
    const int piece = i % 12;
    const u32 at = (piece < 6 ? key_rows : value_rows) + (rank * 16 + i / 12) * LINE + piece % 6 * 16;
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
#pragma unroll
    for (int peer = 0; peer < FINISHERS; ++peer)
      if (peer != rank) send(address_at(at, peer), v.x, v.y, v.z, v.w, address_at(smem_address(&keys_sent), peer));
  }
  barrier_wait(smem_address(&keys_sent), 0);
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("bar.sync 1, 128;" ::: "memory");
#endif
  float s[TILES][2][4];
  float top_low = -1e30f, top_high = -1e30f;
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int key = (warp + 4 * i) * 16;
#pragma unroll
    for (int n = 0; n < 2; ++n) s[i][n][0] = s[i][n][1] = s[i][n][2] = s[i][n][3] = 0.0f;
    if (key >= count) continue;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      u32 b0, b1, b2, b3;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
                   : "r"(key_rows + (key + (lane & 7) + (lane >> 4) * 8) * LINE + k * 32 + (lane >> 3 & 1) * 16)
                   : "memory");
      mma(s[i][0], query[2 * k][0], query[2 * k][1], query[2 * k + 1][0], query[2 * k + 1][1], b0, b1);
      mma(s[i][1], query[2 * k][0], query[2 * k][1], query[2 * k + 1][0], query[2 * k + 1][1], b2, b3);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool own = seen >> (i * 4 + n * 2 + e) & 1;
        s[i][n][e] = own ? s[i][n][e] * p.logit_scale : -1e30f;
        s[i][n][2 + e] = own ? s[i][n][2 + e] * p.logit_scale : -1e30f;
        top_low = fmaxf(top_low, s[i][n][e]), top_high = fmaxf(top_high, s[i][n][2 + e]);
      }
    }
  }
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    top_low = fmaxf(top_low, __shfl_xor_sync(~0u, top_low, offset)), top_high = fmaxf(top_high, __shfl_xor_sync(~0u, top_high, offset));
  }
  if (t == 0) tops[warp][g] = top_low, tops[warp][g + 8] = top_high;
  asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) top_low = fmaxf(top_low, tops[i][g]), top_high = fmaxf(top_high, tops[i][g + 8]);
  float o[6][4], total_low = 0.0f, total_high = 0.0f;
#pragma unroll
  for (int n = 0; n < 6; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int key = (warp + 4 * i) * 16;
    if (key >= count) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[i][n][e] = exp2_fast(s[i][n][e] - top_low), s[i][n][2 + e] = exp2_fast(s[i][n][2 + e] - top_high);
        total_low += s[i][n][e], total_high += s[i][n][2 + e];
      }
    }
    const u32 a0 = pack_bf16(s[i][0][0], s[i][0][1]), a1 = pack_bf16(s[i][0][2], s[i][0][3]), a2 = pack_bf16(s[i][1][0], s[i][1][1]), a3 = pack_bf16(s[i][1][2], s[i][1][3]);
#pragma unroll
    for (int n = 0; n < 6; n += 2) {
      u32 b0, b1, b2, b3;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
                   : "r"(value_rows + (key + (lane & 15)) * LINE + n * 16 + (lane >> 4) * 16)
                   : "memory");
      mma(o[n], a0, a1, a2, a3, b0, b1);
      mma(o[n + 1], a0, a1, a2, a3, b2, b3);
    }
  }
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    total_low += __shfl_xor_sync(~0u, total_low, offset), total_high += __shfl_xor_sync(~0u, total_high, offset);
  }
  if (t == 0) totals[warp][g] = total_low, totals[warp][g + 8] = total_high;
  // What the peers sent has been read by all: each warp read it before the last barrier.
  const u32 outs = received;
#pragma unroll
  for (int n = 0; n < 6; ++n)
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(outs + ((warp * 6 + n) * 32 + lane) * 16), "f"(o[n][0]), "f"(o[n][1]), "f"(o[n][2]), "f"(o[n][3]) : "memory");
  asm volatile("bar.sync 1, 128;" ::: "memory");
  const float inverse_low = __fdividef(1.0f, (totals[0][g] + totals[1][g]) + (totals[2][g] + totals[3][g]));
  const float inverse_high = __fdividef(1.0f, (totals[0][g + 8] + totals[1][g + 8]) + (totals[2][g + 8] + totals[3][g + 8]));
  for (int n = warp; n < 6; n += 4) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 v;
      asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(outs + ((i * 6 + n) * 32 + lane) * 16) : "memory");
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const int token = rank * 16 + g;
    u16* target = p.out + (size_t)token * (p.blocks * 64) + tile * WIDTH + n * 8 + 2 * t;
    if (token < p.rows) *reinterpret_cast<u32*>(target) = pack_bf16(sum.x * inverse_low, sum.y * inverse_low);
    if (token + 8 < p.rows) *reinterpret_cast<u32*>(target + 8 * (size_t)(p.blocks * 64)) = pack_bf16(sum.z * inverse_high, sum.w * inverse_high);
  }
#elif MODE == 2
  // [peer][group of channels][lane], where the stages were or behind them.
  if (warp < WARPS) {
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
#if HALVES == 1
      const u32 target = received + ((rank * GROUPS + j) * 32 + lane) * 8;
      send(address_at(target, 2 * warp), d[4 * j], d[4 * j + 1], address_at(bar, 2 * warp));
      send(address_at(target, 2 * warp + 1), d[4 * j + 2], d[4 * j + 3], address_at(bar, 2 * warp + 1));
#else
      send(address_at(received + ((rank * GROUPS + j) * 32 + lane) * 16, warp), d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3], address_at(bar, warp));
#endif
    }
  }
  if (!finishes) return;
  barrier_wait(bar, 0);
  float2 own_sums[HALVES];
#pragma unroll
  for (int half = 0; half < HALVES; ++half) own_sums[half] = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int own = warp + 4 * i;
    if (own >= GROUPS) continue;
    float sum[2 * HALVES];
#pragma unroll
    for (int e = 0; e < 2 * HALVES; ++e) sum[e] = 0.0f;
#pragma unroll
    for (int peer = 0; peer < PEERS; ++peer) {
      const float* at = reinterpret_cast<const float*>(shared + (received - base)) + ((peer * GROUPS + own) * 32 + lane) * 2 * HALVES;
#pragma unroll
      for (int e = 0; e < 2 * HALVES; ++e) sum[e] += at[e];
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int token = (rank * HALVES + half) * 8 + g;
      if (token >= p.rows) continue;
#if WIDE
      const float2 before = old[i][half];
#else
      const float2 before = make_float2(__uint_as_float(old[i][half] << 16), __uint_as_float(old[i][half] & 0xffff0000u));
#endif
      const float x = sum[2 * half] + __uint_as_float(biases[i] << 16) + before.x;
      const float y = sum[2 * half + 1] + __uint_as_float(biases[i] & 0xffff0000u) + before.y;
      const u32 fresh = pack_bf16(x, y);
      const float low = __uint_as_float(fresh << 16), high = __uint_as_float(fresh & 0xffff0000u);
      const size_t place = (size_t)token * p.channels + channel + own * 8;
      *reinterpret_cast<u32*>(p.out + place) = fresh;
      if (p.scaled) *reinterpret_cast<u32*>(p.scaled + place) = pack_bf16(low * scales[i].x, high * scales[i].y);
      own_sums[half].x += low + high, own_sums[half].y += low * low + high * high;
    }
  }
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
#pragma unroll
    for (int offset = 1; offset <= 2; offset *= 2) {
      own_sums[half].x += __shfl_xor_sync(~0u, own_sums[half].x, offset);
      own_sums[half].y += __shfl_xor_sync(~0u, own_sums[half].y, offset);
    }
    if (t == 0) row_sums[warp][half * 8 + g] = own_sums[half];
  }
  asm volatile("bar.sync 1, 128;" ::: "memory");
  if (threadIdx.x < 8 * HALVES) {
    const float2 a = row_sums[0][threadIdx.x], b = row_sums[1][threadIdx.x], c = row_sums[2][threadIdx.x], e = row_sums[3][threadIdx.x];
    p.sums_out[tile * 64 + rank * HALVES * 8 + threadIdx.x] = make_float2((a.x + b.x) + (c.x + e.x), (a.y + b.y) + (c.y + e.y));
  }
#else
  float sums[OWN][4];
#if PEERS > 1
  // [peer][own group][warp][lane], where the stages were or behind them.
  if (warp < WARPS) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int peer = 0; peer < PEERS; ++peer) {
        const int j = i * PEERS + peer;
        if (j < GROUPS && peer != rank) {
          const int from = rank < peer ? rank : rank - 1;
          send(address_at(received + (((from * OWN + i) * WARPS + warp) * 32 + lane) * 16, peer), d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3],
               address_at(bar, peer));
        }
      }
    }
  }
  barrier_wait(bar, 0);
  if (warp >= WARPS) return;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
#pragma unroll
    for (int peer = 0; peer < PEERS; ++peer) {
      const int j = i * PEERS + peer < GROUPS ? i * PEERS + peer : 0;
      float4 v = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
      if (peer != rank) {
        const int from = peer < rank ? peer : peer - 1;
        const u32 at = received + (((from * OWN + i) * WARPS + warp) * 32 + lane) * 16;
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
      }
      sums[i][0] += v.x, sums[i][1] += v.y, sums[i][2] += v.z, sums[i][3] += v.w;
    }
  }
#else
  if (warp >= WARPS) return;
#pragma unroll
  for (int i = 0; i < OWN; ++i) sums[i][0] = d[4 * i], sums[i][1] = d[4 * i + 1], sums[i][2] = d[4 * i + 2], sums[i][3] = d[4 * i + 3];
#endif
  const int row = warp * 16 + g;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int own = i * PEERS + rank;
    if (own >= GROUPS) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = row + half * 8;
      if (token >= p.rows) continue;
      const float x = sums[i][2 * half], y = sums[i][2 * half + 1];
      const size_t place = (size_t)token * p.channels + channel + own * 8;
      const float2 norm = norms[token];
      const float v = x * norm.x + norm.y * firsts[i].x + constants[i].x, w = y * norm.x + norm.y * firsts[i].y + constants[i].y;
      *reinterpret_cast<u32*>(p.out + place) = RELU ? pack_bf16(relu(v), relu(w)) : pack_bf16(gelu(v), gelu(w));
    }
  }
#endif
}
