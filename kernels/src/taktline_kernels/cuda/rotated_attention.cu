// Attention inside images of TOKENS tokens on Hopper, heads of 64, straight from the projection's rows: queries and keys are
// rotated on their way in. A block has 16 * GROUPS queries of one head and all its keys and values in shared memory; a warp has
// 16 of the queries and every SPLITS-th tile of 16 keys, with weights that refer to its own largest logit, and the SPLITS
// answers of a query are joined at the end.
// A thread brings pieces `u` and `u + PAIRS` of a row, 16 bytes each: what a rotation turns into each other. Rows lie in shared
// memory with their pieces in the order in which eight rows fall on different banks: the keys, the queries, the values.

typedef unsigned short u16;
typedef unsigned int u32;

#define DEVICE __device__ __forceinline__
#define THREADS (32 * GROUPS * SPLITS)
#define TILES (TOKENS / 16 / SPLITS)  // of 16 keys that a warp has
#define WIDTH 64
#define ROW (WIDTH * 2)               // bytes
#define UNITS (WIDTH / 8)
#define PAIRS (UNITS / 2)
#define STEPS (WIDTH / 16)
#define HALF (WIDTH / 2)
#define QUERIES (16 * GROUPS)
#define ITEMS ((TOKENS + QUERIES) * PAIRS / THREADS)

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u32 pack_bf16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
DEVICE float low_of(u32 x) { return __uint_as_float(x << 16); }
DEVICE float high_of(u32 x) { return __uint_as_float(x & 0xffff0000u); }
DEVICE float exp2_fast(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
// What the kernel before wrote is read past the first cache.
DEVICE void load4(u32 (&v)[4], const u16* p) {
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
DEVICE void load8(float (&v)[8], const float* p) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
DEVICE u32 place(u32 base, int row, int unit) { return base + row * ROW + ((unit ^ (row & 7)) << 4); }
DEVICE void store4(u32 address, const u32 (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two numbers of a row's first half and two of its second, turned in place.
DEVICE void turn(u32& low, u32& high, const float* c, const float* s) {
  const float a = low_of(low), b = high_of(low), x = low_of(high), y = high_of(high);
  low = pack_bf16(a * c[0] - x * s[0], b * c[1] - y * s[1]);
  high = pack_bf16(x * c[0] + a * s[0], y * c[1] + b * s[1]);
}

// q, k and v: rows of `heads` heads, bf16, `stride` numbers from one token to the next. out: (images, TOKENS, heads, WIDTH).
// cos and sin: fp32 (TOKENS, HALF); they were there before the kernel before began.
extern "C" __global__ void __maxnreg__(REGISTERS)
    attend_rotated(const u16* q, const u16* k, const u16* v, u16* out, const float* cos, const float* sin, int heads, int stride, float factor) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float tops[SPLITS][QUERIES], totals[SPLITS][QUERIES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, group = warp % GROUPS, split = warp / GROUPS;
  const int first = blockIdx.x * QUERIES, head = blockIdx.y, u = threadIdx.x % PAIRS;
  const u32 keys = smem_address(shared), queries = keys + TOKENS * ROW, values = queries + QUERIES * ROW;
  const size_t before = (size_t)blockIdx.z * TOKENS;
  q += before * stride + head * WIDTH, k += before * stride + head * WIDTH, v += before * stride + head * WIDTH;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Rows of a thread: keys, behind them queries.
  const auto row_of = [&](int i) { return (i * THREADS + (int)threadIdx.x) / PAIRS; };
  const auto token_of = [&](int at) { return at < TOKENS ? at : first + at - TOKENS; };
  float c[ITEMS][8], s[ITEMS][8];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int at = token_of(row_of(i)) * HALF + u * 8;
    load8(c[i], cos + at), load8(s[i], sin + at);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  u32 low[ITEMS][4], high[ITEMS][4];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int at = row_of(i);
    const u16* source = (at < TOKENS ? k : q) + (size_t)token_of(at) * stride + u * 8;
    load4(low[i], source), load4(high[i], source + HALF);
  }
#pragma unroll
  for (int i = 0; i < TOKENS * UNITS / THREADS; ++i) {
    const int at = i * THREADS + threadIdx.x, key = at / UNITS, unit = at % UNITS;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place(values, key, unit)), "l"(v + (size_t)key * stride + unit * 8) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) turn(low[i][j], high[i][j], &c[i][2 * j], &s[i][2 * j]);
    store4(place(keys, row_of(i), u), low[i]);
    store4(place(keys, row_of(i), u + PAIRS), high[i]);
  }
  __syncthreads();

  u32 a[STEPS][4];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3])
                 : "r"(place(queries, group * 16 + (lane & 15), 2 * i + (lane >> 4)))
                 : "memory");
  }
  float logits[TILES][2][4];
  float top_low = -1e30f, top_high = -1e30f;
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int key = (split + SPLITS * i) * 16;
#pragma unroll
    for (int n = 0; n < 2; ++n) logits[i][n][0] = logits[i][n][1] = logits[i][n][2] = logits[i][n][3] = 0.0f;
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      u32 b0, b1, b2, b3;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
                   : "r"(place(keys, key + (lane & 7) + (lane >> 4) * 8, 2 * j + (lane >> 3 & 1)))
                   : "memory");
      mma(logits[i][0], a[j], b0, b1);
      mma(logits[i][1], a[j], b2, b3);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      top_low = fmaxf(top_low, fmaxf(logits[i][n][0], logits[i][n][1]));
      top_high = fmaxf(top_high, fmaxf(logits[i][n][2], logits[i][n][3]));
    }
  }
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    top_low = fmaxf(top_low, __shfl_xor_sync(~0u, top_low, offset)), top_high = fmaxf(top_high, __shfl_xor_sync(~0u, top_high, offset));
  }
  top_low *= factor, top_high *= factor;
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  float o[UNITS][4], total_low = 0.0f, total_high = 0.0f;
#pragma unroll
  for (int n = 0; n < UNITS; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int key = (split + SPLITS * i) * 16;
    u32 p[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float w0 = exp2_fast(logits[i][n][0] * factor - top_low), w1 = exp2_fast(logits[i][n][1] * factor - top_low);
      const float w2 = exp2_fast(logits[i][n][2] * factor - top_high), w3 = exp2_fast(logits[i][n][3] * factor - top_high);
      total_low += w0 + w1, total_high += w2 + w3;
      p[2 * n] = pack_bf16(w0, w1), p[2 * n + 1] = pack_bf16(w2, w3);
    }
#pragma unroll
    for (int n = 0; n < UNITS; n += 2) {
      u32 b0, b1, b2, b3;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
                   : "r"(place(values, key + (lane & 15), n + (lane >> 4)))
                   : "memory");
      mma(o[n], p, b0, b1);
      mma(o[n + 1], p, b2, b3);
    }
  }
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    total_low += __shfl_xor_sync(~0u, total_low, offset), total_high += __shfl_xor_sync(~0u, total_high, offset);
  }
  if (t == 0) {
    tops[split][group * 16 + g] = top_low, tops[split][group * 16 + 8 + g] = top_high;
    totals[split][group * 16 + g] = total_low, totals[split][group * 16 + 8 + g] = total_high;
  }
  // Nobody reads keys any more: the answers go where they were.
#pragma unroll
  for (int n = 0; n < UNITS; ++n)
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(keys + (((split * GROUPS + group) * UNITS + n) * 32 + lane) * 16), "f"(o[n][0]), "f"(o[n][1]), "f"(o[n][2]), "f"(o[n][3])
                 : "memory");
  __syncthreads();
  float shares[2][SPLITS];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = group * 16 + half * 8 + g;
    float top = -1e30f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) top = fmaxf(top, tops[i][own]);
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) shares[half][i] = exp2_fast(tops[i][own] - top), total += shares[half][i] * totals[i][own];
    const float inverse = __fdividef(1.0f, total);
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) shares[half][i] *= inverse;
  }
#pragma unroll
  for (int i = 0; i < UNITS / SPLITS; ++i) {
    const int n = split * (UNITS / SPLITS) + i;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int j = 0; j < SPLITS; ++j) {
      float4 x;
      asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(keys + (((j * GROUPS + group) * UNITS + n) * 32 + lane) * 16) : "memory");
      sum.x += x.x * shares[0][j], sum.y += x.y * shares[0][j], sum.z += x.z * shares[1][j], sum.w += x.w * shares[1][j];
    }
    u16* target = out + ((before + first + group * 16 + g) * heads + head) * WIDTH + n * 8 + 2 * t;
    *reinterpret_cast<u32*>(target) = pack_bf16(sum.x, sum.y);
    *reinterpret_cast<u32*>(target + (size_t)8 * heads * WIDTH) = pack_bf16(sum.z, sum.w);
  }
}
