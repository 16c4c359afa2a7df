// The blocks of a small diffusion transformer for one sequence of at most 64 tokens, heads of 64. The kernels overlap by
// programmatic dependent launch: a block's weights are in shared memory before it waits for its predecessor.
// Activations lie in panels: 32 columns of all 64 tokens, a token's 64 bytes in the 64-byte swizzle, so that one bulk copy brings
// what a product reads. The stream's mean is zero, as every layer that writes it was centred at load: its layer norm is a row's
// factor, which comes behind a product, from parts of the row's sum of squares, one a tile of the kernel that wrote it.
// The host prepends hopper.cuh and wgmma.

DEVICE float low_half(u32 v) { return __uint_as_float(v << 16); }
DEVICE float high_half(u32 v) { return __uint_as_float(v & 0xffff0000u); }
DEVICE uint4 load_l2(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE u32 load_l2_word(const void* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Weights are read once a step and must not push activations out of L2.
DEVICE void copy_weights(u32 target, const void* source, u32 bytes, u32 bar) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target),
               "l"(source), "r"(bytes), "r"(bar), "l"(policy)
               : "memory");
}
DEVICE void copy_bytes(u32 target, const void* source, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(source), "r"(bytes), "r"(bar)
               : "memory");
}
// A store into another block's shared memory that counts itself at a barrier there.
DEVICE u32 address_at(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
DEVICE void send(u32 target, float x, float y, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(target), "f"(x), "f"(y), "r"(bar) : "memory");
}
// The next kernel's blocks may start. Not before this one has asked for its input: their weights would go first.
DEVICE void release() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Where element (token, column) is.
DEVICE int place_of(int token, int column) { return ((column >> 5) * 64 + token) * 32 + ((column ^ (token << 2 & 24)) & 31); }

// ---------------------------------------------------------------------------------------------------------------------
// D[token, n] = A[token, k] W[n, k]. A block has COLUMNS columns and DEPTH of K; SPLIT blocks of a cluster share K, two warpgroups of
// a block its DEPTH. W lies in chunks of 64 columns with the 128-byte swizzle, laid out so by the host. A comes through shared memory
// where a block reads 96 KB of it; where it reads a part (mode 2) it is soonest in registers, eight columns a thread, and W has the
// columns of each 32 in their order: logical column 16 s + 8 h + 2 t + e is column 8 t + 4 s + 2 h + e.
// MODE 0: rows in their own order. 1: gelu, in panels. 2: added to the stream, which goes on times the next norm's multiplier, in panels.
#ifdef MODE
#define CHUNKS (DEPTH / 64)
#define WEIGHT_BYTES (COLUMNS * DEPTH * 2)
#define INPUT_BYTES (DEPTH * 128)
#define PIECES 4  // of the input, with a barrier each; a warpgroup has every other one
#define STEPS (DEPTH / 16 / PIECES)
#define OWN_PANELS (DEPTH / 64)  // of a warpgroup
#define GROUPS (COLUMNS / 16)  // groups of 8 columns that one warpgroup finishes
#define OCTETS (8 / SPLIT)     // groups of 8 rows that a block of a cluster finishes

DEVICE float gelu(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}
// 64 rows of 64 bytes in the 64-byte swizzle.
DEVICE u64 panel_descriptor(u32 address) { return (u64)((address & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)32 << 32) | ((u64)2 << 62); }

struct Arguments {
  const char* weights;   // [tile][slice][chunk][COLUMNS][64] bf16, swizzled
  const u16* input;      // 64 tokens in panels; bf16
  const float* squares;  // (PARTS, 64), modes 0 and 1
  const float* bias;     // per column
  u16* output;           // mode 0 (rows, columns); 1 panels; 2 the stream (64, columns), read and written
  u16* scaled;           // mode 2, panels
  float* squares_out;    // mode 2, (tiles, 64)
  const float* scale;    // mode 2, per column
  int rows;
  int columns;
  float width;           // of the stream
  float eps;
};

extern "C" __global__ void __launch_bounds__(256) product(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 weights_full;
#if MODE < 2
  __shared__ __align__(8) u64 input_full[PIECES];
  __shared__ float factors[64];
  __shared__ __align__(16) float parts[16][64];
#else
  __shared__ float row_squares[COLUMNS / 8][8 * OCTETS];
  __shared__ __align__(8) u64 all_sent;
#endif
  const int thread = threadIdx.x, group = thread >> 7, local = thread & 127, warp = local >> 5, lane = thread & 31;
  const int g = lane >> 2, t = lane & 3;
  const int tile = blockIdx.x / SPLIT, slice = blockIdx.x % SPLIT;
  const u32 base = smem_address(shared);
  if (thread == 0) {
    barrier_init(smem_address(&weights_full), 1);
#if MODE < 2
    for (int i = 0; i < PIECES; ++i) barrier_init(smem_address(&input_full[i]), 1);
#else
    barrier_init(smem_address(&all_sent), 1);
    barrier_expect(smem_address(&all_sent), SPLIT * OCTETS * COLUMNS * 32);
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_expect(smem_address(&weights_full), WEIGHT_BYTES);
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
      copy_weights(base + chunk * (COLUMNS * 128), p.weights + (size_t)blockIdx.x * WEIGHT_BYTES + chunk * (COLUMNS * 128), COLUMNS * 128, smem_address(&weights_full));
  }
  // What no predecessor writes is read before waiting.
#if MODE < 2
  float2 bias[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) bias[i] = *reinterpret_cast<const float2*>(p.bias + tile * COLUMNS + (group * GROUPS + i) * 8 + 2 * t);
#else
  // A warp finishes 8 columns of 8 rows, or of several times 8.
  const int unit = thread >> 5, column = tile * COLUMNS + (unit % (COLUMNS / 8)) * 8 + 2 * t;
  const bool finishes = unit < COLUMNS / 8;
  const float2 bias = *reinterpret_cast<const float2*>(p.bias + column), scale = *reinterpret_cast<const float2*>(p.scale + column);
  // Relaxed: it says only that this block runs.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");

#if MODE < 2
  const u32 input = base + WEIGHT_BYTES;
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const u32 bytes = INPUT_BYTES / PIECES, bar = smem_address(&input_full[i]);
      barrier_expect(bar, bytes);
      copy_bytes(input + i * bytes, p.input + i * (bytes / 2), bytes, bar);
    }
  }
  // A fixed order of sums: some parts a thread here, 16 threads' sums after the product.
  uint4 squares[PARTS / 16];
#pragma unroll
  for (int i = 0; i < PARTS / 16; ++i) squares[i] = load_l2(p.squares + ((thread >> 4) + i * 16) * 64 + (thread & 15) * 4);
#else
  uint4 a[OWN_PANELS][2];
  const bool upper = warp * 16 + 8 < p.rows;
#pragma unroll
  for (int i = 0; i < OWN_PANELS; ++i) {
    const u16* source = p.input + place_of(warp * 16 + g, (slice * 2 + group) * (DEPTH / 2) + i * 32 + 8 * t);
    a[i][0] = load_l2(source);
    a[i][1] = upper ? load_l2(source + 256) : make_uint4(0, 0, 0, 0);
  }
  u32 old[OCTETS];
#pragma unroll
  for (int i = 0; i < OCTETS; ++i) {
    const int token = (slice * OCTETS + i) * 8 + g;
    old[i] = finishes && token < p.rows ? load_l2_word(p.output + (size_t)token * p.columns + column) : 0;
  }
#endif
  release();
  float d[COLUMNS / 2];
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) d[i] = 0.0f;
  barrier_wait(smem_address(&weights_full), 0);
#if MODE < 2
#pragma unroll
  for (int i = 0; i < PIECES / 2; ++i) {
    const int piece = 2 * i + group;
    barrier_wait(smem_address(&input_full[piece]), 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int at = piece * STEPS + step;  // of 16 columns
      wgmma(d, panel_descriptor(input + (at >> 1) * 4096 + (at & 1) * 32), descriptor(base + (at >> 2) * (COLUMNS * 128) + (at & 3) * 32), 1);
    }
    wgmma_commit();
  }
#else
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < OWN_PANELS; ++i) {
    const int panel = group * OWN_PANELS + i;
    const u64 desc = descriptor(base + (panel >> 1) * (COLUMNS * 128) + (panel & 1) * 64);
    const u32 first[4] = {a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y}, second[4] = {a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w};
    wgmma(d, first, desc, 1);
    wgmma(d, second, desc + 2, 1);
  }
  wgmma_commit();
#endif
  wgmma_wait<0>();
  settle(d);

#if MODE < 2
  {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < PARTS / 16; ++i)
      sum = make_float4(sum.x + __uint_as_float(squares[i].x), sum.y + __uint_as_float(squares[i].y), sum.z + __uint_as_float(squares[i].z),
                        sum.w + __uint_as_float(squares[i].w));
    *reinterpret_cast<float4*>(&parts[thread >> 4][(thread & 15) * 4]) = sum;
  }
#endif
  // The two warpgroups exchange halves, so that each finishes COLUMNS / 2 columns: group w those from w * COLUMNS / 2.
  __syncthreads();
#if MODE < 2
  if (thread < 64) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum += parts[i][thread];
    factors[thread] = rsqrtf(sum / p.width + p.eps);
  }
#endif
  float4* exchange = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    // Constant indices keep the accumulators in registers.
    exchange[((group ^ 1) * GROUPS + i) * 128 + local] = group == 0 ? make_float4(d[(GROUPS + i) * 4], d[(GROUPS + i) * 4 + 1], d[(GROUPS + i) * 4 + 2], d[(GROUPS + i) * 4 + 3])
                                                                    : make_float4(d[i * 4], d[i * 4 + 1], d[i * 4 + 2], d[i * 4 + 3]);
  }
  __syncthreads();
  float4 sums[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const float4 v = exchange[(group * GROUPS + i) * 128 + local];
    const float4 own = group == 1 ? make_float4(d[(GROUPS + i) * 4], d[(GROUPS + i) * 4 + 1], d[(GROUPS + i) * 4 + 2], d[(GROUPS + i) * 4 + 3])
                                  : make_float4(d[i * 4], d[i * 4 + 1], d[i * 4 + 2], d[i * 4 + 3]);
    sums[i] = make_float4(own.x + v.x, own.y + v.y, own.z + v.z, own.w + v.w);
  }
#if MODE < 2
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = warp * 16 + g + half * 8;
    if (token >= p.rows) continue;
    const float f = factors[token];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const int column = tile * COLUMNS + (group * GROUPS + i) * 8 + 2 * t;
      const float x = (half ? sums[i].z : sums[i].x) * f + bias[i].x, y = (half ? sums[i].w : sums[i].y) * f + bias[i].y;
#if MODE == 0
      *reinterpret_cast<u32*>(p.output + (size_t)token * p.columns + column) = pack_bf16(x, y);
#else
      *reinterpret_cast<u32*>(p.output + place_of(token, column)) = pack_bf16(gelu(x), gelu(y));
#endif
    }
  }
#else
  // Each block of the cluster finishes some rows of all its columns: the others push their parts of these into its shared
  // memory, past the weights, which it may still be reading: [block][8 rows][8 columns][lane].
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  float2* received = reinterpret_cast<float2*>(shared + WEIGHT_BYTES);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int octet = warp * 2 + half, owner = octet / OCTETS;
    const u32 bar = address_at(smem_address(&all_sent), owner);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const u32 target = smem_address(received + ((slice * OCTETS + octet % OCTETS) * (COLUMNS / 8) + group * GROUPS + i) * 32 + lane);
      send(address_at(target, owner), half ? sums[i].z : sums[i].x, half ? sums[i].w : sums[i].y, bar);
    }
  }
  barrier_wait(smem_address(&all_sent), 0);
  if (finishes) {
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
      const int token = (slice * OCTETS + i) * 8 + g;
      float x = bias.x, y = bias.y;
#pragma unroll
      for (int peer = 0; peer < SPLIT; ++peer) {
        const float2 v = received[((peer * OCTETS + i) * (COLUMNS / 8) + unit) * 32 + lane];
        x += v.x, y += v.y;
      }
      float square = 0.0f;
      if (token < p.rows) {
        const u32 fresh = pack_bf16(low_half(old[i]) + x, high_half(old[i]) + y);
        x = low_half(fresh), y = high_half(fresh);
        *reinterpret_cast<u32*>(p.output + (size_t)token * p.columns + column) = fresh;
        *reinterpret_cast<u32*>(p.scaled + place_of(token, column)) = pack_bf16(x * scale.x, y * scale.y);
        square = x * x + y * y;
      }
      square += __shfl_xor_sync(~0u, square, 1);
      square += __shfl_xor_sync(~0u, square, 2);
      if (t == 0) row_squares[unit][i * 8 + g] = square;
    }
  }
  __syncthreads();
  if (thread < 8 * OCTETS) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) square += row_squares[i][thread];
    p.squares_out[tile * 64 + slice * OCTETS * 8 + thread] = square;
  }
#endif
}
#endif  // MODE

// ---------------------------------------------------------------------------------------------------------------------
// Attention, a block for 16 queries of a head. Its warps share the KEYS keys; what they have found is joined at the end.
#ifdef KEYS
#define HEAD 64
#define OWN_KEYS (KEYS / 4)

DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE u32 unit_at(u32 base, int row, int unit) { return base + row * 128 + ((unit ^ (row & 7)) << 4); }
template <int THREADS>
DEVICE void copy_rows(u32 target, const u16* source, int stride, int count) {
  for (int i = threadIdx.x; i < KEYS * 8; i += THREADS) {
    const int row = i >> 3, unit = i & 7;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(unit_at(target, row, unit)), "l"(source + (size_t)min(row, count - 1) * stride + unit * 8),
                 "r"(row < count ? 16 : 0)
                 : "memory");
  }
}
// A warp's share of the keys, from `own` on: weights s, and of rows g and g + 8 the largest logit and the sum of weights.
template <int SHARE>
DEVICE void weigh_keys(float (&s)[SHARE / 8][4], float (&top)[2], float (&total)[2], const u32 (&q)[4][4], u32 keys, int own, u32 seen, float scale_log2) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < SHARE / 8; ++j) {
    s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 b[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                   : "r"(unit_at(keys, own + 8 * j + (lane & 7), 4 * i + (lane >> 3)))
                   : "memory");
      mma(s[j], q[2 * i], b[0], b[1]);
      mma(s[j], q[2 * i + 1], b[2], b[3]);
    }
  }
  top[0] = top[1] = -1e30f, total[0] = total[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < SHARE / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[j][e] = seen >> (2 * j + (e & 1)) & 1 ? s[j][e] * scale_log2 : -1e30f;
      top[e >> 1] = fmaxf(top[e >> 1], s[j][e]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
  }
#pragma unroll
  for (int j = 0; j < SHARE / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[j][e] = exp2_fast(s[j][e] - top[e >> 1]);
      total[e >> 1] += s[j][e];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
  }
}
// Their values' sums (16 queries, 64) in rows of 66 floats.
template <int SHARE>
DEVICE void add_values(const float (&s)[SHARE / 8][4], u32 values, int own, float* sums) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float o[HEAD / 8][4];
#pragma unroll
  for (int i = 0; i < HEAD / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
#pragma unroll
  for (int j = 0; j < SHARE / 16; ++j) {
    const u32 p[4] = {pack_bf16(s[2 * j][0], s[2 * j][1]), pack_bf16(s[2 * j][2], s[2 * j][3]), pack_bf16(s[2 * j + 1][0], s[2 * j + 1][1]),
                      pack_bf16(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
    for (int i = 0; i < HEAD / 16; ++i) {
      u32 b[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                   : "r"(unit_at(values, own + 16 * j + (lane & 15), 2 * i + (lane >> 4)))
                   : "memory");
      mma(o[2 * i], p, b[0], b[1]);
      mma(o[2 * i + 1], p, b[2], b[3]);
    }
  }
#if KEYS * 128 < 64 * 66 * 4 && !defined(ASK)
  __syncthreads();  // the sums reach into the values
#endif
#pragma unroll
  for (int i = 0; i < HEAD / 8; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) *reinterpret_cast<float2*>(sums + (g + 8 * r) * 66 + 8 * i + 2 * t) = make_float2(o[i][2 * r], o[i][2 * r + 1]);
  }
}
// COUNT columns from `column` on of a query's answer, of what all warps have found.
template <int WARPS, int COUNT>
DEVICE void join_parts(const float2 (&found)[WARPS][16], const float* sums, int row, int column, u16* out, int token, int head, int tokens) {
  float most = -1e30f, all = 0.0f, share[WARPS], x[COUNT];
#pragma unroll
  for (int w = 0; w < WARPS; ++w) most = fmaxf(most, found[w][row].x);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) share[w] = exp2_fast(found[w][row].x - most), all += share[w] * found[w][row].y;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] = 0.0f;
  const float inverse = __fdividef(1.0f, all);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      const float2 y = *reinterpret_cast<const float2*>(sums + (w * 16 + row) * 66 + column + i);
      x[i] = fmaf(y.x, share[w], x[i]), x[i + 1] = fmaf(y.y, share[w], x[i + 1]);
    }
  }
  if (token < tokens) {
    u32* target = reinterpret_cast<u32*>(out + place_of(token, head * HEAD + column));
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) target[i / 2] = pack_bf16(x[i] * inverse, x[i + 1] * inverse);
  }
}

#ifndef ASK
// Of the tokens to themselves. q: (tokens, heads 64) in rows `q_stride` apart; keys and values likewise. out: in panels.
extern "C" __global__ void __launch_bounds__(128) attend(const u16* q, const u16* k, const u16* v, u16* out, int tokens, int q_stride, int stride, float scale_log2) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ float2 found[4][16];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.x >> 2, first = (blockIdx.x & 3) * 16, own = warp * OWN_KEYS;
  const u32 keys = smem_address(shared), values = keys + KEYS * 128;
  u32 seen = 0;  // a bit a key of this thread's columns
#pragma unroll
  for (int j = 0; j < OWN_KEYS / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (own + 8 * j + 2 * t + e < tokens) seen |= 1u << (2 * j + e);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  copy_rows<128>(keys, k + head * HEAD, stride, tokens);
  asm volatile("cp.async.commit_group;" ::: "memory");
  copy_rows<128>(values, v + head * HEAD, stride, tokens);
  asm volatile("cp.async.commit_group;" ::: "memory");
  u32 a[4][4];
  const u16* source = q + (size_t)(first + g) * q_stride + head * HEAD + 2 * t;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool low = first + g < tokens, high = first + g + 8 < tokens;
    a[i][0] = low ? load_l2_word(source + 16 * i) : 0;
    a[i][1] = high ? load_l2_word(source + 16 * i + 8 * q_stride) : 0;
    a[i][2] = low ? load_l2_word(source + 16 * i + 8) : 0;
    a[i][3] = high ? load_l2_word(source + 16 * i + 8 + 8 * q_stride) : 0;
  }
  release();
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  float s[OWN_KEYS / 8][4], top[2], total[2];
  weigh_keys<OWN_KEYS>(s, top, total, a, keys, own, seen, scale_log2);
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (t == 0) found[warp][g + 8 * r] = make_float2(top[r], total[r]);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  // Sums go where the keys were, which all have read.
  float* sums = reinterpret_cast<float*>(shared);
  add_values<OWN_KEYS>(s, values, own, sums + warp * 16 * 66);
  __syncthreads();
  const int row = threadIdx.x >> 3;
  join_parts<4, 8>(found, sums, row, (threadIdx.x & 7) * 8, out, first + row, head, tokens);
}
#endif  // ASK

#ifdef ASK
// The queries of 16 tokens of a head, from the stream, and their attention to keys that were there before: a block has the
// head's rows of the query matrix in shared memory before it waits. Eight warps share the depth of the product, then the keys.
#define TOKENS 16
#define WARPS 8
#define EIGHTH (KEYS / WARPS)
#define PANELS (DEPTH / 32)  // of 32 columns
#define MATRIX_BYTES (HEAD * DEPTH * 2)
#define PART (TOKENS * 66)  // floats of a warp's 16 x 64, rows of 66

// weights: [head][chunk of 64][64][64] bf16, swizzled, with the columns of each 32 in the order that registers need. stream: 64 tokens in panels. squares: (16, 64).
extern "C" __global__ void __launch_bounds__(256) ask(const char* weights, const u16* stream, const float* squares, const float* bias, const u16* k, const u16* v,
                                                      const unsigned char* valid, u16* out, int tokens, int count, int stride, int early, float width, float eps,
                                                      float scale_log2) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 weights_full;
  __shared__ float2 found[WARPS][TOKENS];
  __shared__ float square_parts[16][TOKENS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.x >> 2, first = (blockIdx.x & 3) * TOKENS, own = warp * EIGHTH;
  const u32 matrix = smem_address(shared), keys = matrix + MATRIX_BYTES, values = keys + KEYS * 128;
  if (threadIdx.x == 0) {
    barrier_init(smem_address(&weights_full), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_expect(smem_address(&weights_full), MATRIX_BYTES);
    for (int chunk = 0; chunk < DEPTH / 64; ++chunk)
      copy_weights(matrix + chunk * 8192, weights + (size_t)head * MATRIX_BYTES + chunk * 8192, 8192, smem_address(&weights_full));
  }
  if (!early) asm volatile("griddepcontrol.wait;" ::: "memory");
  copy_rows<256>(keys, k + head * HEAD, stride, count);
  asm volatile("cp.async.commit_group;" ::: "memory");
  copy_rows<256>(values, v + head * HEAD, stride, count);
  asm volatile("cp.async.commit_group;" ::: "memory");
  u32 seen = 0;  // a bit a key of this thread's columns
#pragma unroll
  for (int j = 0; j < EIGHTH / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = own + 8 * j + 2 * t + e;
      if (key < count && valid[key]) seen |= 1u << (2 * j + e);
    }
  }
  const int row = threadIdx.x >> 4, column = (threadIdx.x & 15) * 4;  // what this thread finishes
  const float4 added = *reinterpret_cast<const float4*>(bias + head * HEAD + column);
  __syncthreads();
  if (early) asm volatile("griddepcontrol.wait;" ::: "memory");

  uint4 a[PANELS / WARPS][2];
#pragma unroll
  for (int i = 0; i < PANELS / WARPS; ++i) {
    const u16* source = stream + place_of(first + g, (warp * (PANELS / WARPS) + i) * 32 + 8 * t);
    a[i][0] = load_l2(source), a[i][1] = load_l2(source + 256);
  }
  square_parts[row][threadIdx.x & 15] = __uint_as_float(load_l2_word(squares + row * 64 + first + (threadIdx.x & 15)));
  release();
  float d[HEAD / 8][4];
#pragma unroll
  for (int j = 0; j < HEAD / 8; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
  barrier_wait(smem_address(&weights_full), 0);
#pragma unroll
  for (int i = 0; i < PANELS / WARPS; ++i) {
    const int panel = warp * (PANELS / WARPS) + i;
    const u32 low[4] = {a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y}, high[4] = {a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w};
#pragma unroll
    for (int j = 0; j < HEAD / 8; ++j) {
      u32 b[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                   : "r"(unit_at(matrix + (panel >> 1) * 8192, 8 * j + (lane & 7), (panel & 1) * 4 + (lane >> 3)))
                   : "memory");
      mma(d[j], low, b[0], b[1]);
      mma(d[j], high, b[2], b[3]);
    }
  }
  __syncthreads();
  // Where the matrix was: the warps' parts, the queries, and in the end the warps' sums.
  float* parts = reinterpret_cast<float*>(shared);
  const u32 asked = matrix + WARPS * PART * 4 / 1024 * 1024 + 1024;
  float* sums = reinterpret_cast<float*>(shared + WARPS * PART * 4 / 1024 * 1024 + 4096);
#pragma unroll
  for (int j = 0; j < HEAD / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) *reinterpret_cast<float2*>(parts + warp * PART + (g + 8 * r) * 66 + 8 * j + 2 * t) = make_float2(d[j][2 * r], d[j][2 * r + 1]);
  }
  __syncthreads();
  {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) square += square_parts[i][row];
    const float f = rsqrtf(square / width + eps);
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float2 y = *reinterpret_cast<const float2*>(parts + w * PART + row * 66 + column), z = *reinterpret_cast<const float2*>(parts + w * PART + row * 66 + column + 2);
      x[0] += y.x, x[1] += y.y, x[2] += z.x, x[3] += z.y;
    }
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(unit_at(asked, row, column >> 3) + (column & 4) * 2), "r"(pack_bf16(x[0] * f + added.x, x[1] * f + added.y)),
                 "r"(pack_bf16(x[2] * f + added.z, x[3] * f + added.w))
                 : "memory");
  }
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  u32 q[HEAD / 16][4];
#pragma unroll
  for (int i = 0; i < HEAD / 16; ++i)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q[i][0]), "=r"(q[i][1]), "=r"(q[i][2]), "=r"(q[i][3])
                 : "r"(unit_at(asked, lane & 15, 2 * i + (lane >> 4)))
                 : "memory");
  float s[EIGHTH / 8][4], top[2], total[2];
  weigh_keys<EIGHTH>(s, top, total, q, keys, own, seen, scale_log2);
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (t == 0) found[warp][g + 8 * r] = make_float2(top[r], total[r]);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  add_values<EIGHTH>(s, values, own, sums + warp * PART);
  __syncthreads();
  join_parts<WARPS, 4>(found, sums, row, column, out, first + row, head, tokens);
}
#endif  // ASK
#endif  // KEYS
