// Attention inside each image: 256 tokens, heads of 72, straight from the fused projection's rows. A block has one head of
// one image and ROWS of its queries; a warp has 16 of them and half of the keys, and the halves are joined at the end. 72
// is four and a half times 16: the last half is a product of depth 8, so nothing is padded. Rows of 144 bytes fall on
// different banks by themselves.

typedef unsigned short u16;
typedef unsigned int u32;

#define DEVICE __device__ __forceinline__
#define TOKENS 256
#define WIDTH 72
#define UNITS 9  // of 16 bytes in a row
#define CHUNK 128  // keys of a warp
#define THREADS (ROWS * 4)

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u32 pack_bf16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
DEVICE float exp2_fast(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE void load4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void load4_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void multiply16(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void multiply8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}
DEVICE void copy_rows(u32 target, const u16* source, int rows, int stride) {
  for (int i = threadIdx.x; i < rows * UNITS; i += THREADS) {
    const int row = i / UNITS, unit = i % UNITS;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + i * 16), "l"(source + (size_t)row * stride + unit * 8) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// qkv: (images, 256, 3, heads, 72) bf16; out: (images, 256, heads, 72) bf16.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_images(const u16* qkv, u16* out, int heads, float scale_log2) {
  extern __shared__ __align__(128) char shared[];
  const int half_of_keys = threadIdx.x / (THREADS / 2), local = threadIdx.x % (THREADS / 2), warp = local >> 5;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = half_of_keys * CHUNK;
  const int part = blockIdx.x % (TOKENS / ROWS), head = blockIdx.x / (TOKENS / ROWS) % heads, image = blockIdx.x / (TOKENS / ROWS) / heads;
  const int stride = 3 * heads * WIDTH;
  const u16* source = qkv + (size_t)image * TOKENS * stride + head * WIDTH;
  const u32 queries = smem_address(shared), keys = queries + ROWS * 144, values = keys + TOKENS * 144;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  copy_rows(queries, source + (size_t)part * ROWS * stride, ROWS, stride);
  copy_rows(keys, source + heads * WIDTH, TOKENS, stride);
  copy_rows(values, source + 2 * heads * WIDTH, TOKENS, stride);
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();

  u32 a[5][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) load4(a[i], queries + (warp * 16 + (lane & 15)) * 144 + (2 * i + (lane >> 4)) * 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(a[4][0]), "=r"(a[4][1]) : "r"(queries + (warp * 16 + (lane & 15)) * 144 + 128) : "memory");
  float o[UNITS][4], total0 = 0.0f, total1 = 0.0f;
#pragma unroll
  for (int i = 0; i < UNITS; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
  float s[CHUNK / 8][4];
#pragma unroll
  for (int block = 0; block < CHUNK / 32; ++block) {
    u32 last[4];
    load4(last, keys + (first + block * 32 + lane) * 144 + 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int tile = block * 4 + i;
      float(&d)[4] = s[tile];
      d[0] = d[1] = d[2] = d[3] = 0.0f;
      u32 low[4], high[4];
      const u32 row = keys + (first + tile * 8 + (lane & 7)) * 144 + (lane >> 3) * 16;
      load4(low, row);
      load4(high, row + 64);
      multiply16(d, a[0], low[0], low[1]);
      multiply16(d, a[1], low[2], low[3]);
      multiply16(d, a[2], high[0], high[1]);
      multiply16(d, a[3], high[2], high[3]);
      multiply8(d, a[4][0], a[4][1], last[i]);
    }
  }
  float top0 = s[0][0], top1 = s[0][2];
#pragma unroll
  for (int i = 0; i < CHUNK / 8; ++i) {
    top0 = fmaxf(top0, fmaxf(s[i][0], s[i][1]));
    top1 = fmaxf(top1, fmaxf(s[i][2], s[i][3]));
  }
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    top0 = fmaxf(top0, __shfl_xor_sync(0xffffffffu, top0, offset));
    top1 = fmaxf(top1, __shfl_xor_sync(0xffffffffu, top1, offset));
  }
  top0 *= scale_log2, top1 *= scale_log2;
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
#pragma unroll
  for (int step = 0; step < CHUNK / 16; ++step) {
    u32 p[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&d)[4] = s[2 * step + half];
      const float x0 = exp2_fast(fmaf(d[0], scale_log2, -top0)), x1 = exp2_fast(fmaf(d[1], scale_log2, -top0));
      const float y0 = exp2_fast(fmaf(d[2], scale_log2, -top1)), y1 = exp2_fast(fmaf(d[3], scale_log2, -top1));
      total0 += x0 + x1, total1 += y0 + y1;
      p[2 * half] = pack_bf16(x0, x1), p[2 * half + 1] = pack_bf16(y0, y1);
    }
    const u32 row = values + (first + step * 16 + (lane & 15)) * 144;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      u32 b[4];
      load4_transposed(b, row + (2 * pair + (lane >> 4)) * 16);
      multiply16(o[2 * pair], p, b[0], b[1]);
      multiply16(o[2 * pair + 1], p, b[2], b[3]);
    }
    u32 b0, b1;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(row + 128) : "memory");
    multiply16(o[8], p, b0, b1);
  }
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    total0 += __shfl_xor_sync(0xffffffffu, total0, offset);
    total1 += __shfl_xor_sync(0xffffffffu, total1, offset);
  }
  // The second half of the keys leaves its sums where the queries and keys were: all have been read.
  float* other = reinterpret_cast<float*>(shared) + local;
  constexpr int STEP = THREADS / 2;
  if (half_of_keys == 1) {
    other[0] = top0, other[STEP] = top1, other[2 * STEP] = total0, other[3 * STEP] = total1;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) other[(4 + i * 4 + e) * STEP] = o[i][e];
    }
  }
  __syncthreads();
  if (half_of_keys == 1) return;
  const float most0 = fmaxf(top0, other[0]), most1 = fmaxf(top1, other[STEP]);
  const float own0 = exp2_fast(top0 - most0), own1 = exp2_fast(top1 - most1);
  const float its0 = exp2_fast(other[0] - most0), its1 = exp2_fast(other[STEP] - most1);
  const float inverse0 = __fdividef(1.0f, total0 * own0 + other[2 * STEP] * its0);
  const float inverse1 = __fdividef(1.0f, total1 * own1 + other[3 * STEP] * its1);
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) o[i][e] = o[i][e] * (e < 2 ? own0 : own1) + other[(4 + i * 4 + e) * STEP] * (e < 2 ? its0 : its1);
  }
  u16* target = out + ((size_t)image * TOKENS + part * ROWS + warp * 16 + g) * heads * WIDTH + head * WIDTH + 2 * t;
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    *reinterpret_cast<u32*>(target + i * 8) = pack_bf16(o[i][0] * inverse0, o[i][1] * inverse0);
    *reinterpret_cast<u32*>(target + (size_t)8 * heads * WIDTH + i * 8) = pack_bf16(o[i][2] * inverse1, o[i][3] * inverse1);
  }
}
