// The action expert at one row of the batch (at most 64 action tokens), as a chain of kernels that overlap by
// programmatic dependent launch: each block copies its weights into shared memory before it waits for its predecessor.
//
// Matrix products: D[token, n] = A[token, k] W[n, k]. A comes from registers, read straight from L2; W from shared
// memory as 64-column chunks with the 128-byte swizzle, laid out so by the host. Columns are permuted inside each block
// of 32 alike in A and W, so that a thread reads its A fragments 16 bytes at a time: logical column 16 s + 8 h + 2 t + e
// of a block is column 8 t + 4 s + 2 h + e. Activations lie in memory in fragment order (`fragment`), so that a warp's
// read is 512 contiguous bytes: row by row, the same reads ran at 13 bytes a cycle.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE float bf16_low(u32 v) { return __uint_as_float(v << 16); }
DEVICE float bf16_high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
DEVICE u32 pack_bf16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
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
DEVICE float4 load_l2_float4(const float* p) {
  uint4 v = load_l2(p);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
// Stores into another block's shared memory that count themselves at a barrier there. A cluster barrier that releases plain
// stores instead makes every thread wait until all that it ever wrote, read or asked for is settled in the whole GPU.
DEVICE u32 address_at(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
DEVICE void send(u32 target, u32 v, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(target), "r"(v), "r"(bar) : "memory");
}
DEVICE void send(u32 target, uint2 v, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1,%2}, [%3];" ::"r"(target), "r"(v.x), "r"(v.y), "r"(bar) : "memory");
}
DEVICE void send(u32 target, uint4 v, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar) : "memory");
}
// Weights are read once a step and must not push activations and the key/value cache out of L2: what a kernel writes in
// parts of a sector is otherwise read back through device memory.
DEVICE u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void bulk_copy(u32 target, const void* source, u32 bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target),
               "l"(source), "r"(bytes), "r"(bar), "l"(policy)
               : "memory");
}
DEVICE void copy_bytes(u32 target, const void* source, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(source), "r"(bytes), "r"(bar)
               : "memory");
}
// Where a product looks for element (token, column): [block of 32 columns][16 tokens][8 tokens][lane][8 columns].
DEVICE int fragment(int token, int column) {
  return ((((column >> 5) * 4 + (token >> 4)) * 2 + ((token >> 3) & 1)) * 32 + (token & 7) * 4 + ((column >> 3) & 3)) * 8 + (column & 7);
}
// Likewise for the attention's query rows, token * 8 + head: [16 rows][32 columns of each half][8 rows][lane][8 columns], where
// each 8 columns of the first half (`group` counts them) lie before their partners of the second, with which a rotation mixes them.
DEVICE int query_fragment(int token, int head, int group) {
  return ((((token >> 1) * 8 + (group >> 1)) * 2 + (token & 1)) * 32 + head * 4 + (group & 1) * 2) * 8;
}
// Two neighbouring groups of 8 columns of a row: of each, a thread of four has two numbers. The four write them as 32 contiguous
// bytes in one store, where halves of a sector would take L2 twice the work. All threads of a warp call it.
DEVICE void store_groups(u16* place, u32 low, u32 high, int t, bool valid) {
  const bool odd = t & 1;
  const u32 other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
  if (valid) *reinterpret_cast<uint2*>(place + (odd ? 8 : 0) + (t >> 1) * 4) = odd ? make_uint2(other, high) : make_uint2(low, other);
}
DEVICE float exp2_fast(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE float gelu(float x) {
  float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

// ---------------------------------------------------------------------------------------------------------------------
// Products. N columns a block (32 or 64), KB columns of K a block, SPLIT blocks of a cluster share K. A row's sum of squares
// comes in PARTS, of a tile's columns each.
// EPILOGUE 0: rotate queries and key, write q and the cache; 1: gelu(gate) * up; 2: gated residual add; 3 (pi0): the first
// layer's queries, keys and values straight from what action_time_mlp_out reads, by a product of both matrices, and that
// layer's output itself as the last 1024 columns: it starts the stream. The norm's factor is left to the attention. fp16.
#ifdef N
#if EPILOGUE == 3
#define OPERANDS "f32.f16.f16"
#define QKV_TILES 80
#else
#define OPERANDS "f32.bf16.bf16"
#endif
#define CHUNKS (KB / 64)
#define HALF_BLOCKS (KB / 64)          // blocks of 32 columns in one warpgroup's half of K
#define BATCH 2
#define BATCHES (HALF_BLOCKS / BATCH)
#define BUFFERS (BATCHES < 4 ? BATCHES : 4)  // batches of A in flight
#define WEIGHT_BYTES (N * KB * 2)
#define GROUPS (N / 16)                // groups of 8 columns that one warpgroup finishes
#define OWN_ROWS (64 / SPLIT)          // rows that a block of a cluster finishes
#define STRIDE 36                      // of groups of 32 lanes' parts, so that a row's lie in different banks

#if N == 64
#define ACC 32
DEVICE void wgmma(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 desc) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16." OPERANDS " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
        "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(desc));
}
#else
#define ACC 16
DEVICE void wgmma(float (&d)[16], u32 a0, u32 a1, u32 a2, u32 a3, u64 desc) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16." OPERANDS " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(desc));
}
#endif

DEVICE u64 descriptor(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}
DEVICE void load_batch(uint4 (&a)[BATCH][2], const u16* source, bool second) {
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    a[b][0] = load_l2(source + b * 2048);
    a[b][1] = second ? load_l2(source + b * 2048 + 256) : make_uint4(0, 0, 0, 0);
  }
}

struct Arguments {
  const char* weights;     // [group][slice][chunk][N][64] bf16, swizzled
  const u16* input;        // 64 tokens in fragment order, zeros past the last; bf16
  const float* squares;    // (PARTS, 64): parts of each token's sum of squares (epilogues 0, 1)
  const float* constants;  // per packed column: shift @ W (epilogues 0, 1)
  u16* output;             // fragments: 0: q, of a query; 1: hidden; 2: the residual stream, read and written
  u16* scaled;             // fragments: 2: stream * (1 + scale) for the next product, null where its matrix holds 1 + scale; 3: the stream
  float* squares_out;      // 2, 3: (tiles of the stream, 64)
  const float* gate;       // 2: (columns)
  const float* scale;      // 2: (columns), of the next norm
  u16* k_cache;            // 0: (positions, 256)
  u16* v_cache;
  const float* cosines;    // 0: (positions, 128)
  const float* sines;
  const int* length;       // 0: valid prefix
  int rows;
  float eps;
  int fresh;               // 2: the sum starts the stream instead of being added to it
};

extern "C" __global__ void __launch_bounds__(256, 2) product(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[2];
#if EPILOGUE < 2
  __shared__ float factors[64];
  __shared__ __align__(16) float parts[16][64];
  __shared__ __align__(8) float constants[N];
#elif EPILOGUE == 3
  __shared__ float row_squares[2][64];
  __shared__ __align__(8) float constants[N];
#else
  __shared__ __align__(8) u64 all_sent;
#endif
  const int thread = threadIdx.x, group = thread >> 7, local = thread & 127, warp = local >> 5, lane = thread & 31;
  const int g = lane >> 2, t = lane & 3;
  const int tile = blockIdx.x / SPLIT, slice = blockIdx.x % SPLIT;
  if (thread == 0) {
    barrier_init(smem_address(&barriers[0]), 1);
    barrier_init(smem_address(&barriers[1]), 1);
#if EPILOGUE == 2
    barrier_init(smem_address(&all_sent), 1);
    barrier_expect(smem_address(&all_sent), SPLIT * 2048);
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const char* source = p.weights + (size_t)blockIdx.x * WEIGHT_BYTES;
    const u64 policy = evict_first();
#if PAUSE > 0
    // These blocks start while the kernel before reads its input: those reads go first.
    for (const long long begin = clock64(); clock64() - begin < PAUSE;) {
    }
#endif
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 bar = smem_address(&barriers[half]);
      barrier_expect(bar, WEIGHT_BYTES / 2);
      for (int piece = 0; piece < CHUNKS / 2; ++piece) {
        u32 offset = half * (WEIGHT_BYTES / 2) + piece * (N * 128);
        bulk_copy(smem_address(shared) + offset, source + offset, N * 128, bar, policy);
      }
    }
  }
  launch_dependents();
  // Everything that no predecessor writes is read before waiting: a round trip to L2 costs as much as the product.
  const int row = warp * 16 + g;
  const bool first = row < p.rows, second = row + 8 < p.rows;
#if EPILOGUE == 0 || EPILOGUE == 3
  const int pair = tile * 2 + group, head = pair >> 4, column = (pair & 15) * 8 + 2 * t, start = *p.length;
  if (thread < N) constants[thread] = p.constants[tile * N + thread];
  float2 cosine[2], sine[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int position = start + min(row + half * 8, p.rows - 1);
    cosine[half] = *reinterpret_cast<const float2*>(p.cosines + position * 128 + column);
    sine[half] = *reinterpret_cast<const float2*>(p.sines + position * 128 + column);
  }
#elif EPILOGUE == 1
  if (thread < N) constants[thread] = p.constants[tile * N + thread];
#else
  // Each block of the cluster finishes OWN_ROWS rows of all its columns, two columns of one row a thread: a warp has whole
  // rows of the tile, whose stores are whole sectors and whose squares it adds alone.
  const int own_part = (thread >> 5) * (64 / N) + lane / (N / 2), own_column = lane % (N / 2) * 2;
  const int own_row = slice * OWN_ROWS + own_part, column = tile * N + own_column;
  const float2 gate = *reinterpret_cast<const float2*>(p.gate + column);
  const float2 scale = *reinterpret_cast<const float2*>(p.scale + column);
  // Relaxed: it says only that this block runs; a release would wait for the reads above.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  __syncthreads();
  wait_predecessor();

  const u16* source = p.input + ((slice * (KB / 32) + group * HALF_BLOCKS) * 4 + warp) * 512 + lane * 8;
  const bool upper = warp * 16 + 8 < p.rows;
  uint4 a[BUFFERS][BATCH][2];
#pragma unroll
  for (int i = 0; i < BUFFERS; ++i) load_batch(a[i], source + i * BATCH * 2048, upper);
#if EPILOGUE == 2
  const int at = fragment(own_row, column);
  u32 old = 0;
  if (!p.fresh && own_row < p.rows) old = load_l2_word(p.output + at);
#elif EPILOGUE < 2
  // A fixed order of sums: some parts a thread here, 16 threads' sums after the product.
  float4 square_parts[PARTS / 16];
#pragma unroll
  for (int i = 0; i < PARTS / 16; ++i) square_parts[i] = load_l2_float4(p.squares + ((thread >> 4) + i * 16) * 64 + (thread & 15) * 4);
#endif
  float d[ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) d[i] = 0.0f;
  barrier_wait(smem_address(&barriers[group]), 0);
  const u32 base = smem_address(shared) + group * (WEIGHT_BYTES / 2);
#pragma unroll
  for (int batch = 0; batch < BATCHES; ++batch) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int block = batch * BATCH + b;
      const uint4 lo = a[batch % BUFFERS][b][0], hi = a[batch % BUFFERS][b][1];
      const u64 desc = descriptor(base + (block >> 1) * (N * 128) + (block & 1) * 64);
      wgmma(d, lo.x, hi.x, lo.y, hi.y, desc);
      wgmma(d, lo.z, hi.z, lo.w, hi.w, desc + 2);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    // A buffer is filled again as soon as the products that read it are done.
    if (batch + BUFFERS < BATCHES) {
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      load_batch(a[batch % BUFFERS], source + (batch + BUFFERS) * BATCH * 2048, upper);
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");

#if EPILOGUE < 2
  {
    float4 sum = square_parts[0];
#pragma unroll
    for (int i = 1; i < PARTS / 16; ++i)
      sum = make_float4(sum.x + square_parts[i].x, sum.y + square_parts[i].y, sum.z + square_parts[i].z, sum.w + square_parts[i].w);
    *reinterpret_cast<float4*>(&parts[thread >> 4][(thread & 15) * 4]) = sum;
  }
#endif
  // The two warpgroups exchange halves, so that each finishes N / 2 columns: group w those from w * N / 2.
  __syncthreads();
#if EPILOGUE < 2
  if (thread < 64) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum += parts[i][thread];
    factors[thread] = rsqrtf(sum / 1024.0f + p.eps);
  }
#endif
  float4* exchange = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const int j = (group ^ 1) * GROUPS + i;
    // Constant indices keep the accumulators in registers.
    float4 v = group == 0 ? make_float4(d[(GROUPS + i) * 4], d[(GROUPS + i) * 4 + 1], d[(GROUPS + i) * 4 + 2], d[(GROUPS + i) * 4 + 3])
                          : make_float4(d[i * 4], d[i * 4 + 1], d[i * 4 + 2], d[i * 4 + 3]);
    exchange[j * 128 + local] = v;
  }
  __syncthreads();
  float4 sums[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    float4 v = exchange[(group * GROUPS + i) * 128 + local];
    float4 own = group == 1 ? make_float4(d[(GROUPS + i) * 4], d[(GROUPS + i) * 4 + 1], d[(GROUPS + i) * 4 + 2], d[(GROUPS + i) * 4 + 3])
                            : make_float4(d[i * 4], d[i * 4 + 1], d[i * 4 + 2], d[i * 4 + 3]);
    sums[i] = make_float4(own.x + v.x, own.y + v.y, own.z + v.z, own.w + v.w);
  }

#if EPILOGUE == 3
  if (tile >= QKV_TILES) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = row + half * 8, at = (tile - QKV_TILES) * N + group * 16;
      float square = 0.0f;
      u32 fresh[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 c = *reinterpret_cast<const float2*>(constants + group * 16 + i * 8 + 2 * t);
        fresh[i] = pack_bf16((half ? sums[i].z : sums[i].x) + c.x, (half ? sums[i].w : sums[i].y) + c.y);
        const float x0 = bf16_low(fresh[i]), x1 = bf16_high(fresh[i]);
        square += x0 * x0 + x1 * x1;
      }
      store_groups(p.scaled + fragment(token, at), fresh[0], fresh[1], t, token < p.rows);
      square += __shfl_xor_sync(0xffffffffu, square, 1);
      square += __shfl_xor_sync(0xffffffffu, square, 2);
      if (t == 0) row_squares[group][token] = square;
    }
    __syncthreads();
    if (thread < 64) p.squares_out[(tile - QKV_TILES) * 64 + thread] = row_squares[0][thread] + row_squares[1][thread];
    return;
  }
#endif
#if EPILOGUE == 0 || EPILOGUE == 3
  {
    const float2 c0 = *reinterpret_cast<const float2*>(constants + group * 16 + 2 * t);
    const float2 c1 = *reinterpret_cast<const float2*>(constants + group * 16 + 8 + 2 * t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = row + half * 8;
      const bool valid = token < p.rows;
#if EPILOGUE == 3
      const float f = 1.0f;
#else
      const float f = factors[token];
#endif
      const float x0 = (half ? sums[0].z : sums[0].x) * f + c0.x, x1 = (half ? sums[0].w : sums[0].y) * f + c0.y;
      const float y0 = (half ? sums[1].z : sums[1].x) * f + c1.x, y1 = (half ? sums[1].w : sums[1].y) * f + c1.y;
      const int position = start + token;
      u32 low = pack_bf16(x0, x1), high = pack_bf16(y0, y1);
      if (head < 9) {
        const float2 c = cosine[half], s = sine[half];
        low = pack_bf16(x0 * c.x - y0 * s.x, x1 * c.y - y1 * s.y);
        high = pack_bf16(y0 * c.x + x0 * s.x, y1 * c.y + x1 * s.y);
      }
      if (head < 8) {
        store_groups(p.output + query_fragment(token, head, pair & 15), low, high, t, valid);
      } else if (valid) {
        u16* target = (head == 8 ? p.k_cache : p.v_cache) + (size_t)position * 256 + column;
        *reinterpret_cast<u32*>(target) = low;
        *reinterpret_cast<u32*>(target + 128) = high;
      }
    }
  }
#elif EPILOGUE == 1
  {
    u32 hidden[GROUPS / 2][2];
#pragma unroll
    for (int i = 0; i < GROUPS / 2; ++i) {
      const float2 c0 = *reinterpret_cast<const float2*>(constants + (group * (GROUPS / 2) + i) * 16 + 2 * t);
      const float2 c1 = *reinterpret_cast<const float2*>(constants + (group * (GROUPS / 2) + i) * 16 + 8 + 2 * t);
      const float4 gate = sums[2 * i], up = sums[2 * i + 1];
      const float f = factors[row], h = factors[row + 8];
      hidden[i][0] = pack_bf16(gelu(gate.x * f + c0.x) * (up.x * f + c1.x), gelu(gate.y * f + c0.y) * (up.y * f + c1.y));
      hidden[i][1] = pack_bf16(gelu(gate.z * h + c0.x) * (up.z * h + c1.x), gelu(gate.w * h + c0.y) * (up.w * h + c1.y));
    }
    store_groups(p.output + fragment(row, (tile * 2 + group) * 16), hidden[0][0], hidden[1][0], t, first);
    store_groups(p.output + fragment(row + 8, (tile * 2 + group) * 16), hidden[0][1], hidden[1][1], t, second);
  }
#else
  {
    // The others push their parts of this block's rows into its shared memory, past the weights, which it may still be
    // reading: [block][group of 8 columns][lane].
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#if SPLIT == 8
    float2* received = reinterpret_cast<float2*>(shared + WEIGHT_BYTES);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const u32 target = smem_address(received + (slice * (N / 8) + group * GROUPS + i) * STRIDE + lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 v = half ? make_float2(sums[i].z, sums[i].w) : make_float2(sums[i].x, sums[i].y);
        send(address_at(target, warp * 2 + half), make_uint2(__float_as_uint(v.x), __float_as_uint(v.y)), address_at(smem_address(&all_sent), warp * 2 + half));
      }
    }
#else
    float4* received = reinterpret_cast<float4*>(shared + WEIGHT_BYTES);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const u32 target = smem_address(received + (slice * (N / 8) + group * GROUPS + i) * STRIDE + lane);
      send(address_at(target, warp), make_uint4(__float_as_uint(sums[i].x), __float_as_uint(sums[i].y), __float_as_uint(sums[i].z), __float_as_uint(sums[i].w)),
           address_at(smem_address(&all_sent), warp));
    }
#endif
    barrier_wait(smem_address(&all_sent), 0);
    // What the senders' lanes have: in groups of 8 columns, the thread of a row and two columns; the second half's rows beside.
    const int from = (own_column >> 3) * STRIDE + (own_part & 7) * 4 + (lane & 3);
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int peer = 0; peer < SPLIT; ++peer) {
#if SPLIT == 8
      const float2 v = received[peer * (N / 8) * STRIDE + from];
#else
      const float2 v = reinterpret_cast<const float2*>(received)[(peer * (N / 8) * STRIDE + from) * 2 + (own_part >> 3)];
#endif
      sum.x += v.x, sum.y += v.y;
    }
    float square = 0.0f;
    if (own_row < p.rows) {
      const u32 fresh = pack_bf16(bf16_low(old) + gate.x * sum.x, bf16_high(old) + gate.y * sum.y);
      const float x0 = bf16_low(fresh), x1 = bf16_high(fresh);
      *reinterpret_cast<u32*>(p.output + at) = fresh;
      if (p.scaled) *reinterpret_cast<u32*>(p.scaled + at) = pack_bf16(x0 * (1.0f + scale.x), x1 * (1.0f + scale.y));
      square = x0 * x0 + x1 * x1;
    }
#pragma unroll
    for (int offset = 1; offset < N / 2; offset *= 2) square += __shfl_xor_sync(0xffffffffu, square, offset);
    if (lane % (N / 2) == 0) p.squares_out[tile * 64 + own_row] = square;
  }
#endif
}
#endif  // N

// ---------------------------------------------------------------------------------------------------------------------
// Attention of the action tokens: 32 query rows (token * 8 + head) and KEYS cached keys, a multiple of 16, a block; prefix keys are copied
// before waiting for the predecessor, which writes the suffix only.
#ifdef KEYS
#define ROWS 32
#define WINDOWS 8  // blocks of a cluster, each with KEYS keys

DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE u32 pack_fp16(float low, float high) {
  u32 v;
  low = fminf(fmaxf(low, -65504.0f), 65504.0f), high = fminf(fmaxf(high, -65504.0f), 65504.0f);
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
DEVICE void add_fp16(float& low, float& high, u32 v, float factor) {
  float x, y;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(x), "=f"(y) : "r"(v));
  low = fmaf(x, factor, low), high = fmaf(y, factor, high);
}
DEVICE void copy16(u32 target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0) : "memory");
}
// Swizzles of the 16-byte units of a 512-byte row: one for 16-byte fragment reads of both halves, one for transposed matrix reads.
DEVICE u32 key_offset(int row, int unit) { return row * 512 + ((unit ^ ((row & 1) << 2) ^ ((unit >> 4) << 1)) << 4); }
DEVICE u32 value_offset(int row, int unit) { return row * 512 + ((unit ^ (row & 7)) << 4); }

DEVICE void copy_rows(u32 keys, u32 values, const u16* k, const u16* v, int begin, int from, int to, int count) {
  // Rows from..to - 1 of this block's window; those at or past `count` become zeros.
  for (int index = threadIdx.x + from * 32; index < to * 32; index += 256) {
    const int row = index >> 5, unit = index & 31;
    const bool valid = begin + row < count;
    const size_t offset = (size_t)(valid ? begin + row : 0) * 256 + unit * 8;
    copy16(keys + key_offset(row, unit), k + offset, valid);
    copy16(values + value_offset(row, unit), v + offset, valid);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Eight warps: 16 rows and a quarter of the window's keys each, later 16 rows, all its keys and a quarter of the columns.
extern "C" __global__ void __launch_bounds__(256, 2) attend(const u16* q, const u16* k, const u16* v, u16* out, const int* length, int horizon,
                                                            int rows, float scale_log2, const char* ahead, int ahead_bytes, int first_alone
#ifdef FACTORS
                                                            ,
                                                            const float* squares, float eps
#endif
) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ float tops[4][ROWS], sums[4][ROWS];
  __shared__ __align__(8) u64 all_sent;
#ifdef FACTORS
  __shared__ float of_token[64];
#endif
  const u32 keys = smem_address(shared), values = keys + KEYS * 512;
  if (threadIdx.x == 0) {
    barrier_init(smem_address(&all_sent), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(smem_address(&all_sent), WINDOWS * (2048 + 128));
  }
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int row_group = warp & 1, quarter = warp >> 1;
  const int window = blockIdx.x % WINDOWS, block = blockIdx.x / WINDOWS, begin = window * KEYS;
  const int prefix = *length, count = prefix + horizon;
  int early = prefix - begin;
  early = early < 0 ? 0 : (early > KEYS ? KEYS : early);
  copy_rows(keys, values, k, v, begin, 0, early, prefix);
  // The gate and up weights do not fit in shared memory beside this kernel, so their block copies start when it ends,
  // together with the out projection's reads; from L2 they are soon over.
  if (threadIdx.x == 0) {
    for (int at = blockIdx.x * 16384; at < ahead_bytes; at += gridDim.x * 16384)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(ahead + at), "r"(16384) : "memory");
  }
  launch_dependents();
  wait_predecessor();
#ifdef FACTORS
  float square_parts[FACTORS];
  if (threadIdx.x < 64) {
#pragma unroll
    for (int i = 0; i < FACTORS; ++i) square_parts[i] = __uint_as_float(load_l2_word(squares + i * 64 + threadIdx.x));
  }
#endif
  // The block's queries, as they lie in memory, to where the other windows' parts come in the end.
  uint4* received = reinterpret_cast<uint4*>(shared + KEYS * 1024);              // [window][pair of tiles][lane]
  float2* received_heads = reinterpret_cast<float2*>(received + WINDOWS * 128);  // [window][16 rows]: top and sum
#pragma unroll
  for (int i = 0; i < 4; ++i) copy16(smem_address(received + threadIdx.x + i * 256), q + (size_t)block * 8192 + (threadIdx.x + i * 256) * 8, true);
  copy_rows(keys, values, k, v, begin, early, KEYS, count);
#ifdef FACTORS
  if (threadIdx.x < 64) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < FACTORS; ++i) sum += square_parts[i];
    of_token[threadIdx.x] = rsqrtf(sum / 1024.0f + eps);
  }
#endif
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();

  // A quarter has tiles of eight keys. Where they do not come out even, the last quarter's end is in the values, and hidden.
  constexpr int TILES = (KEYS / 8 + 3) / 4;
  const int own_keys = quarter * TILES * 8;
#define HAS(j) (KEYS % 32 == 0 || own_keys + (j) * 8 < KEYS)
  float s[TILES][4];
#pragma unroll
  for (int j = 0; j < TILES; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
  for (int b = 0; b < 8; ++b) {
    const uint4 low = received[(row_group * 16 + b * 2) * 32 + lane], high = received[(row_group * 16 + b * 2 + 1) * 32 + lane];
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const int key = own_keys + j * 8 + g;
      const uint4 w = *reinterpret_cast<const uint4*>(shared + key_offset(key, b * 2 + (t >> 1) + (t & 1) * 16));  // as the queries lie
      mma(s[j], low.x, high.x, low.y, high.y, w.x, w.y);
      mma(s[j], low.z, high.z, low.w, high.w, w.z, w.w);
    }
  }
#ifdef FACTORS
  // Queries, and the keys and values of the action tokens, lack the factor of the norm before their product.
  const float scale0 = scale_log2 * of_token[min(block * 4 + row_group * 2, 63)], scale1 = scale_log2 * of_token[min(block * 4 + row_group * 2 + 1, 63)];
  float of_key[TILES][2];
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = begin + own_keys + j * 8 + 2 * t + e - prefix;
      of_key[j][e] = token < 0 ? 1.0f : of_token[min(token, 63)];
      s[j][e] *= of_key[j][e], s[j][2 + e] *= of_key[j][e];
    }
  }
#else
  const float scale0 = scale_log2, scale1 = scale_log2;
#endif
  // Keys past the end, in the last windows only: no maximum comes from them, and their weights are zero.
  const int left = min(count - begin, KEYS) - own_keys;
  if (left < TILES * 8) {
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (j * 8 + 2 * t + e >= left) s[j][e] = s[j][2 + e] = -1e30f;
      }
    }
  }
  // The first token, where it is alone, ends with its own key; its heads are rows 0 to 7 of the first block.
  const bool alone = first_alone && block == 0 && row_group == 0;
  const int seen = prefix + 1 - begin - own_keys;
  if (alone) {
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (j * 8 + 2 * t + e >= seen) s[j][e] = -1e30f;
      }
    }
  }
  float top0 = s[0][0], top1 = s[0][2];
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    top0 = fmaxf(top0, fmaxf(s[j][0], s[j][1]));
    top1 = fmaxf(top1, fmaxf(s[j][2], s[j][3]));
  }
  top0 = fmaxf(top0, __shfl_xor_sync(0xffffffffu, top0, 1));
  top0 = fmaxf(top0, __shfl_xor_sync(0xffffffffu, top0, 2)) * scale0;
  top1 = fmaxf(top1, __shfl_xor_sync(0xffffffffu, top1, 1));
  top1 = fmaxf(top1, __shfl_xor_sync(0xffffffffu, top1, 2)) * scale1;
  const int own = row_group * 16 + g;
  if (t == 0) tops[quarter][own] = top0, tops[quarter][own + 8] = top1;
  __syncthreads();
  // The queries have been read: the other windows may send their parts.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  // All of the window's keys use one maximum, so that their weights can be multiplied with the values together.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    top0 = fmaxf(top0, tops[i][own]);
    top1 = fmaxf(top1, tops[i][own + 8]);
  }
  float total0 = 0.0f, total1 = 0.0f;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      s[j][e] = exp2_fast(fmaf(s[j][e], scale0, -top0));
      s[j][2 + e] = exp2_fast(fmaf(s[j][2 + e], scale1, -top1));
    }
  }
  if (left < TILES * 8) {
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (j * 8 + 2 * t + e >= left) s[j][e] = s[j][2 + e] = 0.0f;
      }
    }
  }
  if (alone) {
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (j * 8 + 2 * t + e >= seen) s[j][e] = 0.0f;
      }
    }
  }
  // The weights go to where the keys were: all have been read. 16 more bytes a row keep the banks apart.
  constexpr int STRIDE = KEYS / 2 + 4;
  u32* weights = reinterpret_cast<u32*>(shared);
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    total0 += s[j][0] + s[j][1];
    total1 += s[j][2] + s[j][3];
    if (!HAS(j)) continue;
#ifdef FACTORS
    s[j][0] *= of_key[j][0], s[j][1] *= of_key[j][1], s[j][2] *= of_key[j][0], s[j][3] *= of_key[j][1];
#endif
    weights[own * STRIDE + quarter * TILES * 4 + j * 4 + t] = pack_bf16(s[j][0], s[j][1]);
    weights[(own + 8) * STRIDE + quarter * TILES * 4 + j * 4 + t] = pack_bf16(s[j][2], s[j][3]);
  }
  total0 += __shfl_xor_sync(0xffffffffu, total0, 1);
  total0 += __shfl_xor_sync(0xffffffffu, total0, 2);
  total1 += __shfl_xor_sync(0xffffffffu, total1, 1);
  total1 += __shfl_xor_sync(0xffffffffu, total1, 2);
  if (t == 0) sums[quarter][own] = total0, sums[quarter][own + 8] = total1;
  __syncthreads();
  total0 = (sums[0][own] + sums[1][own]) + (sums[2][own] + sums[3][own]);
  total1 = (sums[0][own + 8] + sums[1][own + 8]) + (sums[2][own + 8] + sums[3][own + 8]);

  float o[8][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    const u32* at = weights + own * STRIDE + step * 8 + t;
    const u32 a0 = at[0], a1 = at[8 * STRIDE], a2 = at[4], a3 = at[8 * STRIDE + 4];
    const int key = step * 16 + (lane & 15);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      u32 b0, b1, b2, b3;
      const u32 address = values + value_offset(key, quarter * 8 + pair * 2 + (lane >> 4));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3) : "r"(address) : "memory");
      mma(o[pair * 2], a0, a1, a2, a3, b0, b1);
      mma(o[pair * 2 + 1], a0, a1, a2, a3, b2, b3);
    }
  }

  // The cluster's blocks are the windows of one 32-row block. Each finishes 16 rows by 64 columns, a warp's share; the
  // others push their parts there, divided by their own sum and as fp16: what this costs is bytes, and fp16 rounds less
  // than the bf16 result.
  const float inverse0 = total0 > 0.0f ? __fdividef(1.0f, total0) : 0.0f, inverse1 = total1 > 0.0f ? __fdividef(1.0f, total1) : 0.0f;
  const int finisher = row_group * 4 + quarter;
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const float* low = o[pair * 2];
    const float* high = o[pair * 2 + 1];
    send(address_at(smem_address(received + (window * 4 + pair) * 32 + lane), finisher),
         make_uint4(pack_fp16(low[0] * inverse0, low[1] * inverse0), pack_fp16(high[0] * inverse0, high[1] * inverse0), pack_fp16(low[2] * inverse1, low[3] * inverse1),
                    pack_fp16(high[2] * inverse1, high[3] * inverse1)),
         address_at(smem_address(&all_sent), finisher));
  }
  if (t < 2)
    send(address_at(smem_address(received_heads + window * 16 + t * 8 + g), finisher), make_uint2(__float_as_uint(t ? top1 : top0), __float_as_uint(t ? total1 : total0)),
         address_at(smem_address(&all_sent), finisher));
  barrier_wait(smem_address(&all_sent), 0);
  // A warp finishes two tiles of eight columns of a token.
  const int pair = warp & 3, half = warp >> 2;
  float factors[WINDOWS];
  float top = -3e38f, total = 0.0f;
#pragma unroll
  for (int peer = 0; peer < WINDOWS; ++peer) top = fmaxf(top, received_heads[peer * 16 + half * 8 + g].x);
#pragma unroll
  for (int peer = 0; peer < WINDOWS; ++peer) {
    const float2 v = received_heads[peer * 16 + half * 8 + g];
    factors[peer] = v.y * exp2_fast(v.x - top);
    total += factors[peer];
  }
#pragma unroll
  for (int peer = 0; peer < WINDOWS; ++peer) factors[peer] = __fdividef(factors[peer], total);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int peer = 0; peer < WINDOWS; ++peer) {
    const uint2 v = reinterpret_cast<const uint2*>(received)[((peer * 4 + pair) * 32 + lane) * 2 + half];
    add_fp16(sum[0], sum[1], v.x, factors[peer]);
    add_fp16(sum[2], sum[3], v.y, factors[peer]);
  }
  const int row = block * ROWS + (window >> 2) * 16 + half * 8 + g, column = (window & 3) * 64 + pair * 16;
  store_groups(out + fragment(row >> 3, (row & 7) * 256 + column), pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), t, row < rows);
}
#endif  // KEYS

// ---------------------------------------------------------------------------------------------------------------------
// Between two steps, a cluster of two blocks a token, each with half of the width: final norm, action_out_proj, Euler update,
// action_in_proj, and then HEAD 1: scaling for the first layer; HEAD 2 (pi0): silu, left in bf16 parts for a product with
// action_time_mlp_out; HEAD 3 (pi0): silu in fp16 for EPILOGUE 3. Width 1024, 32 action dimensions, fp32; both weights as (32, 1024).
#ifdef HEAD
DEVICE float block_sum(float value, float* scratch) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += scratch[i];
  return sum;
}

// Sums of 32 values over the lanes of a warp: at each exchange a lane keeps half of them, in the end that of its own number.
template <int OFFSET>
DEVICE void exchange_halves(float (&v)[32], int lane) {
  const bool upper = lane & OFFSET;
#pragma unroll
  for (int i = 0; i < OFFSET; ++i) {
    const float kept = upper ? v[i + OFFSET] : v[i], given = upper ? v[i] : v[i + OFFSET];
    v[i] = kept + __shfl_xor_sync(0xffffffffu, given, OFFSET);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) head(
    u16* stream, u16* scaled, float* squares, float* actions, const float* final_scale, const float* final_shift, const float* first_scale,
    const float* in_weight, const float* in_bias, const float* out_weight, const float* out_bias, float dt, float eps, int has_out, int has_in, int before, int ahead, u16* timed,
    const float* target, const float* influence, float tau, float guidance) {
  extern __shared__ __align__(128) char shared[];  // out_weight, then in_weight: (32, 512) of each
  __shared__ __align__(8) u64 barriers[3];
  __shared__ float scratch[8], parts[8][32], halves[2][32], fresh[32];
  const int rank = blockIdx.x & 1, row = blockIdx.x >> 1, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int column = rank * 512 + thread * 2;
  // What no predecessor writes is here before it ends.
  if (thread == 0) {
    barrier_init(smem_address(&barriers[0]), 1);
    barrier_init(smem_address(&barriers[1]), 1);
    barrier_init(smem_address(&barriers[2]), 1);
    barrier_expect(smem_address(&barriers[2]), 128);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (int i = 0; i < 2; ++i) {
      if (!(i ? has_in : has_out)) continue;
      const u32 bar = smem_address(&barriers[i]);
      barrier_expect(bar, 65536);
      const float* source = (i ? in_weight : out_weight) + rank * 512;
      for (int d = 0; d < 32; ++d) copy_bytes(smem_address(shared) + i * 65536 + d * 2048, source + d * 1024, 2048, bar);
    }
  }
  const float2 scale_out = *reinterpret_cast<const float2*>(final_scale + column), shift_out = *reinterpret_cast<const float2*>(final_shift + column);
  const float2 scale_in = *reinterpret_cast<const float2*>(first_scale + column), bias = *reinterpret_cast<const float2*>(in_bias + column);
  const float offset = out_bias[lane];
  if (has_out) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  launch_dependents();
  __syncthreads();
  wait_predecessor();
  const float old = __uint_as_float(load_l2_word(actions + row * 32 + lane));
  if (has_out) {
    const u16* source = stream + fragment(row + before, thread * 4);
    const u32 low = load_l2_word(source), high = load_l2_word(source + 2), own = load_l2_word(stream + fragment(row + before, column));
    const float x0 = bf16_low(low), x1 = bf16_high(low), x2 = bf16_low(high), x3 = bf16_high(high);
    const float factor = rsqrtf(block_sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, scratch) / 1024.0f + eps);
    const u32 normed = pack_bf16(bf16_low(own) * factor * (1.0f + scale_out.x) + shift_out.x, bf16_high(own) * factor * (1.0f + scale_out.y) + shift_out.y);
    const float y0 = bf16_low(normed), y1 = bf16_high(normed);
    barrier_wait(smem_address(&barriers[0]), 0);
    float v[32];
#pragma unroll
    for (int d = 0; d < 32; ++d) {
      const float2 w = *reinterpret_cast<const float2*>(shared + d * 2048 + thread * 8);
      v[d] = w.x * y0 + w.y * y1;
    }
    exchange_halves<16>(v, lane);
    exchange_halves<8>(v, lane);
    exchange_halves<4>(v, lane);
    exchange_halves<2>(v, lane);
    exchange_halves<1>(v, lane);
    parts[warp][lane] = v[0];
    __syncthreads();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (warp == 0) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += parts[i][lane];
      halves[rank][lane] = sum;
      send(address_at(smem_address(&halves[rank][lane]), rank ^ 1), __float_as_uint(sum), address_at(smem_address(&barriers[2]), rank ^ 1));
    }
    if (warp == 0) {
      barrier_wait(smem_address(&barriers[2]), 0);
      float velocity = offset + halves[0][lane] + halves[1][lane];
      if (target) velocity -= guidance * ((target[row * 32 + lane] - (old - tau * velocity)) * influence[row]);
      const float next = old + dt * velocity;
      if (rank == 0) actions[row * 32 + lane] = next;
      fresh[lane] = next;
    }
  } else if (warp == 0) {
    fresh[lane] = old;
  }
  __syncthreads();
  if (!has_in) return;
  barrier_wait(smem_address(&barriers[1]), 0);
  float y[2] = {bias.x, bias.y};
#pragma unroll
  for (int d = 0; d < 32; ++d) {
    const float2 w = *reinterpret_cast<const float2*>(shared + 65536 + d * 2048 + thread * 8);
    y[0] = fmaf(w.x, fresh[d], y[0]), y[1] = fmaf(w.y, fresh[d], y[1]);
  }
#if HEAD == 3
  const float a = fminf(y[0] / (1.0f + __expf(-y[0])), 65504.0f), b = fminf(y[1] / (1.0f + __expf(-y[1])), 65504.0f);
  u32 halves_of_fp32;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves_of_fp32) : "f"(b), "f"(a));
  *reinterpret_cast<u32*>(timed + fragment(row, column)) = halves_of_fp32;
#elif HEAD == 2
  // Both parts of silu(y), and the first once more: against both parts of the weight, all but the product of the small
  // parts is there, which is less than fp32 rounds.
  const float a = y[0] / (1.0f + __expf(-y[0])), b = y[1] / (1.0f + __expf(-y[1]));
  const u32 large = pack_bf16(a, b), small = pack_bf16(a - bf16_low(large), b - bf16_high(large));
  *reinterpret_cast<u32*>(timed + fragment(row + ahead, column)) = large;
  *reinterpret_cast<u32*>(timed + fragment(row + ahead, 1024 + column)) = large;
  *reinterpret_cast<u32*>(timed + fragment(row + ahead, 2048 + column)) = small;
#else
  const u32 rounded = pack_bf16(y[0], y[1]);
  const float x0 = bf16_low(rounded), x1 = bf16_high(rounded);
  *reinterpret_cast<u32*>(stream + fragment(row, column)) = rounded;
  if (scaled) *reinterpret_cast<u32*>(scaled + fragment(row, column)) = pack_bf16(x0 * (1.0f + scale_in.x), x1 * (1.0f + scale_in.y));
  const float sum = block_sum(x0 * x0 + x1 * x1, scratch);
  if (thread == 0) squares[rank * 64 + row] = sum;
  if (rank == 0 && thread > 1 && thread < 16) squares[thread * 64 + row] = 0.0f;
#endif
}
#endif  // HEAD
