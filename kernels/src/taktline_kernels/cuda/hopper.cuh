// What kernels on Hopper's bulk tensor copy engine and matrix instructions share: barriers in shared memory, copies of
// tiles, descriptors of tiles in the 128-byte swizzle. The host puts it before the matrix instructions that it generates.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__

struct __align__(64) TensorMap {
  char bytes[128];
};

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
DEVICE void copy_tile(u32 target, const TensorMap* map, int column, int row, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(bar)
      : "memory");
}
DEVICE u64 descriptor(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}
DEVICE u32 pack_bf16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// The sum of all lanes of a warp, for each of them.
DEVICE float all_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
DEVICE float exp2_fast(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving what makes d past the products that read it.
template <int N>
DEVICE void settle(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
DEVICE void settle(u32 (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// What two warpgroups of attention share. They issue their products in turn, so that one's weights are made while the
// other's products run.
DEVICE void take_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
DEVICE void pass_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }

// A query: the largest logit that its weights refer to, the sum of its weights, what sums of before are to be multiplied by.
struct Row {
  float top, total, decay;
};
// Renews `top` of both rows where a logit of either (s times factor) is larger by `slack`, for all of the warp. True where it did.
template <int N>
DEVICE bool renew_tops(const float (&s)[N], Row& low, Row& high, float factor, float slack) {
  float first = fmaxf(s[0], s[1]), second = fmaxf(s[2], s[3]);
#pragma unroll
  for (int i = 4; i < N; i += 4) first = fmaxf(first, fmaxf(s[i], s[i + 1])), second = fmaxf(second, fmaxf(s[i + 2], s[i + 3]));
  first = fmaxf(first, __shfl_xor_sync(~0u, first, 1)), second = fmaxf(second, __shfl_xor_sync(~0u, second, 1));
  first = fmaxf(first, __shfl_xor_sync(~0u, first, 2)) * factor, second = fmaxf(second, __shfl_xor_sync(~0u, second, 2)) * factor;
  const bool renew = __any_sync(~0u, first > low.top + slack || second > high.top + slack);
  if (renew) {
    first = fmaxf(first, low.top), second = fmaxf(second, high.top);
    low.decay = exp2_fast(low.top - first), high.decay = exp2_fast(high.top - second);
    low.top = first, high.top = second;
    low.total *= low.decay, high.total *= high.decay;
  }
  return renew;
}
// Weights 2^(factor s + by) in place of the logits, those of the other row with `other`, added to the totals.
template <int N>
DEVICE void weigh_rows(float (&s)[N], Row& low, Row& high, float factor, float by, float other) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    s[i] = exp2_fast(s[i] * factor + by), s[i + 1] = exp2_fast(s[i + 1] * factor + by);
    s[i + 2] = exp2_fast(s[i + 2] * factor + other), s[i + 3] = exp2_fast(s[i + 3] * factor + other);
    low.total += s[i] + s[i + 1], high.total += s[i + 2] + s[i + 3];
  }
}
// The totals of the four threads that share a row.
DEVICE void join_totals(Row& low, Row& high) {
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    low.total += __shfl_xor_sync(~0u, low.total, offset);
    high.total += __shfl_xor_sync(~0u, high.total, offset);
  }
}
