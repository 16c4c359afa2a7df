// Attention of a short sequence with itself on Hopper, straight from the projection's rows: query and key heads are normed and
// rotated on their way in. A block has 16 * GROUPS queries of one head and all keys and values that they see in shared memory;
// a warp has 16 of the queries and every SPLITS-th tile of 16 keys, with weights that refer to its own largest logit, and the
// SPLITS answers of a query are joined at the end.
// A thread brings pieces `u` and `u + PAIRS` of a key's row, 16 bytes each: what a rotation turns into each other. Queries come as
// the operand of the product, where that is so by itself. Rows lie in shared memory with their pieces of 16 bytes in the order
// in which eight rows fall on different banks.
// D: width of a head, 64 or 128. TILES: of 16 keys that a warp has at most. NORM: the RMSNorm of each head; ROTATE; CAUSAL:
// a query sees keys up to its own; MASKED: keys are left out by `valid`.

typedef unsigned short u16;
typedef unsigned int u32;

#define DEVICE __device__ __forceinline__
#define THREADS (32 * GROUPS * SPLITS)
#define ROOM (16 * SPLITS * TILES)  // keys
#define ROW (D * 2)                 // bytes
#define UNITS (D / 8)
#define PAIRS (UNITS / 2)
#define STEPS (D / 16)
#define HALF (D / 2)
#define ITEMS ((ROOM * PAIRS + THREADS - 1) / THREADS)
#define LOWEST -1e30f

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
DEVICE u32 load1(const u16* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE uint4 load4(const u16* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE u32 place(u32 base, int row, int unit) { return base + row * ROW + (((unit & ~7) | ((unit ^ row) & 7)) << 4); }
DEVICE void store4(u32 address, const u32 (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two numbers of a row's first half and two of its second, normed and turned in place.
DEVICE void turn(u32& low, u32& high, float factor, float2 first, float2 second, float2 c, float2 s) {
  float a = low_of(low), b = high_of(low), x = low_of(high), y = high_of(high);
#if NORM
  a = a * factor * first.x, b = b * factor * first.y, x = x * factor * second.x, y = y * factor * second.y;
#endif
#if ROTATE
  low = pack_bf16(a * c.x - x * s.x, b * c.y - y * s.y);
  high = pack_bf16(x * c.x + a * s.x, y * c.y + b * s.y);
#else
  low = pack_bf16(a, b), high = pack_bf16(x, y);
#endif
}
DEVICE float square(u32 x) { return low_of(x) * low_of(x) + high_of(x) * high_of(x); }

// q: rows of `heads` heads of D, bf16, `stride` numbers from one token to the next; k and v likewise, of heads / share heads.
// out: (batch, tokens, heads, D). cos and sin: fp32 (table_rows, HALF), table_rows a multiple of tokens.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attend_rotated(const u16* q, const u16* k, const u16* v, u16* out, const float* cos, const float* sin, const float* q_weight, const float* k_weight,
                   const unsigned char* valid, int tokens, int heads, int share, int stride, int table_rows, float eps, float factor) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float tops[SPLITS][16 * GROUPS], totals[SPLITS][16 * GROUPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, group = warp % GROUPS, split = warp / GROUPS;
  const int first = blockIdx.x * 16 * GROUPS, head = blockIdx.y, row = first + group * 16 + g;
  const int count = CAUSAL ? min(tokens, first + 16 * GROUPS) : tokens, padded = (count + 15) & ~15;
  const u32 keys = smem_address(shared), values = keys + ROOM * ROW;
  const size_t before = (size_t)blockIdx.z * tokens;
  q += before * stride + head * D, k += before * stride + head / share * D, v += before * stride + head / share * D;
  const size_t turned = before % table_rows;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int u = threadIdx.x % PAIRS;
  float weights[2][8];
#if NORM
#pragma unroll
  for (int i = 0; i < 8; ++i) weights[0][i] = k_weight[u * 8 + i], weights[1][i] = k_weight[HALF + u * 8 + i];
#endif
  asm volatile("griddepcontrol.wait;" ::: "memory");

  uint4 low[ITEMS], high[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int key = (i * THREADS + threadIdx.x) / PAIRS;
    low[i] = high[i] = make_uint4(0, 0, 0, 0);
    if (key < count) low[i] = load4(k + (size_t)key * stride + u * 8), high[i] = load4(k + (size_t)key * stride + HALF + u * 8);
  }
  u32 a[STEPS][4];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int own = row + (e & 1) * 8;
      a[i][e] = own < tokens ? load1(q + (size_t)own * stride + i * 16 + (e >> 1) * 8 + 2 * t) : 0;
    }
  }
  for (int i = threadIdx.x; i < padded * UNITS; i += THREADS) {
    const int key = i / UNITS, unit = i % UNITS;
    const u32 target = place(values, key, unit);
    if (key < count)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(v + (size_t)key * stride + unit * 8) : "memory");
    else
      store4(target, {0, 0, 0, 0});
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  unsigned long long seen = 0;
#if MASKED
#pragma unroll
  for (int i = 0; i < TILES * 4; ++i) {
    const int key = (split + SPLITS * (i >> 2)) * 16 + (i >> 1 & 1) * 8 + 2 * t + (i & 1);
    if (key < count && valid[before + key] != 0) seen |= 1ull << i;
  }
#endif

#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int key = (i * THREADS + threadIdx.x) / PAIRS;
    u32 lows[4] = {low[i].x, low[i].y, low[i].z, low[i].w}, highs[4] = {high[i].x, high[i].y, high[i].z, high[i].w};
    float scale = 1.0f;
#if NORM
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += square(lows[j]) + square(highs[j]);
#pragma unroll
    for (int offset = 1; offset < PAIRS; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    scale = rsqrtf(sum / D + eps);
#endif
    if (key >= padded) continue;
#if ROTATE
    const float4* cosines = reinterpret_cast<const float4*>(cos + (turned + min(key, tokens - 1)) * HALF + u * 8);
    const float4* sines = reinterpret_cast<const float4*>(sin + (turned + min(key, tokens - 1)) * HALF + u * 8);
    const float4 c[2] = {cosines[0], cosines[1]}, s[2] = {sines[0], sines[1]};
#endif
#if NORM || ROTATE
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#if ROTATE
      const float4 cj = c[j >> 1], sj = s[j >> 1];
      const float2 cosine = j & 1 ? make_float2(cj.z, cj.w) : make_float2(cj.x, cj.y), sine = j & 1 ? make_float2(sj.z, sj.w) : make_float2(sj.x, sj.y);
#else
      const float2 cosine = make_float2(1.0f, 1.0f), sine = make_float2(0.0f, 0.0f);
#endif
      turn(lows[j], highs[j], scale, make_float2(weights[0][2 * j], weights[0][2 * j + 1]), make_float2(weights[1][2 * j], weights[1][2 * j + 1]), cosine, sine);
    }
#endif
    store4(place(keys, key, u), lows);
    store4(place(keys, key, u + PAIRS), highs);
  }
#if NORM || ROTATE
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scale = 1.0f;
#if NORM
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) sum += square(a[i][half]) + square(a[i][2 + half]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    scale = rsqrtf(sum / D + eps);
#endif
    const size_t own = (turned + min(row + half * 8, tokens - 1)) * HALF;
#pragma unroll
    for (int i = 0; i < STEPS / 2; ++i) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int column = i * 16 + part * 8 + 2 * t;
        float2 lower = make_float2(1.0f, 1.0f), upper = lower, cosine = lower, sine = make_float2(0.0f, 0.0f);
#if NORM
        lower = *reinterpret_cast<const float2*>(q_weight + column), upper = *reinterpret_cast<const float2*>(q_weight + HALF + column);
#endif
#if ROTATE
        cosine = *reinterpret_cast<const float2*>(cos + own + column), sine = *reinterpret_cast<const float2*>(sin + own + column);
#endif
        turn(a[i][2 * part + half], a[i + STEPS / 2][2 * part + half], scale, lower, upper, cosine, sine);
      }
    }
  }
#endif
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();

  float s[TILES][2][4];
  float top_low = LOWEST, top_high = LOWEST;
  const int last = CAUSAL ? min(count, first + group * 16 + 16) : count;  // behind the last key that the warp's queries see
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int key = (split + SPLITS * i) * 16;
#pragma unroll
    for (int n = 0; n < 2; ++n) s[i][n][0] = s[i][n][1] = s[i][n][2] = s[i][n][3] = 0.0f;
    if (key >= last) continue;
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      u32 b0, b1, b2, b3;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
                   : "r"(place(keys, key + (lane & 7) + (lane >> 4) * 8, 2 * j + (lane >> 3 & 1)))
                   : "memory");
      mma(s[i][0], a[j], b0, b1);
      mma(s[i][1], a[j], b2, b3);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int own = key + n * 8 + 2 * t + e;
        const bool all = MASKED ? seen >> (i * 4 + n * 2 + e) & 1 : own < count;
        s[i][n][e] = all && (!CAUSAL || own <= row) ? s[i][n][e] * factor : LOWEST;
        s[i][n][2 + e] = all && (!CAUSAL || own <= row + 8) ? s[i][n][2 + e] * factor : LOWEST;
        top_low = fmaxf(top_low, s[i][n][e]), top_high = fmaxf(top_high, s[i][n][2 + e]);
      }
    }
  }
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    top_low = fmaxf(top_low, __shfl_xor_sync(~0u, top_low, offset)), top_high = fmaxf(top_high, __shfl_xor_sync(~0u, top_high, offset));
  }
  float o[UNITS][4], total_low = 0.0f, total_high = 0.0f;
#pragma unroll
  for (int n = 0; n < UNITS; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int key = (split + SPLITS * i) * 16;
    if (key >= last) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[i][n][e] = exp2_fast(s[i][n][e] - top_low), s[i][n][2 + e] = exp2_fast(s[i][n][2 + e] - top_high);
        total_low += s[i][n][e], total_high += s[i][n][2 + e];
      }
    }
    const u32 p[4] = {pack_bf16(s[i][0][0], s[i][0][1]), pack_bf16(s[i][0][2], s[i][0][3]), pack_bf16(s[i][1][0], s[i][1][1]), pack_bf16(s[i][1][2], s[i][1][3])};
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
  __syncthreads();  // Nobody reads keys and values any more: the answers go where they were.
#pragma unroll
  for (int n = 0; n < UNITS; ++n)
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(keys + (((split * GROUPS + group) * UNITS + n) * 32 + lane) * 16), "f"(o[n][0]), "f"(o[n][1]), "f"(o[n][2]), "f"(o[n][3])
                 : "memory");
  __syncthreads();
  float shares[2][SPLITS];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = group * 16 + half * 8 + g;
    float top = LOWEST, total = 0.0f;
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) top = fmaxf(top, tops[i][own]);
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) shares[half][i] = exp2_fast(tops[i][own] - top), total += shares[half][i] * totals[i][own];
    const float inverse = __fdividef(1.0f, total);
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) shares[half][i] *= inverse;
  }
  constexpr int OWN = (UNITS + SPLITS - 1) / SPLITS;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int n = split * OWN + i;
    if (n >= UNITS) continue;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int j = 0; j < SPLITS; ++j) {
      float4 x;
      asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(keys + (((j * GROUPS + group) * UNITS + n) * 32 + lane) * 16) : "memory");
      sum.x += x.x * shares[0][j], sum.y += x.y * shares[0][j], sum.z += x.z * shares[1][j], sum.w += x.w * shares[1][j];
    }
    u16* target = out + ((before + row) * heads + head) * D + n * 8 + 2 * t;
    if (row < tokens) *reinterpret_cast<u32*>(target) = pack_bf16(sum.x, sum.y);
    if (row + 8 < tokens) *reinterpret_cast<u32*>(target + (size_t)8 * heads * D) = pack_bf16(sum.z, sum.w);
  }
}
