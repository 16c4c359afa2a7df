/* Coefficients to samples, and samples to RGB. Counts are size_t: an int, which may wrap, would keep the compiler from wide
   registers. */

typedef int32_t v8 __attribute__((vector_size(32)));
typedef int16_t h8 __attribute__((vector_size(16)));
typedef uint8_t b8 __attribute__((vector_size(8)));

enum { COLUMN_LIMIT = 2896 };
/* Of the sum of a column's coefficients: beyond it 16 bits, in which libjpeg-turbo calculates, may overflow. */

/* ----- inverse transform: 13 bits of fraction in the constants, 2 more between the passes */

#define FIX(x) ((int32_t)((x) * 8192 + 0.5))

static inline __attribute__((always_inline)) void pass(v8 r[8], int shift) {
  v8 z = (r[2] + r[6]) * FIX(0.541196100), e2 = z - r[6] * FIX(1.847759065), e3 = z + r[2] * FIX(0.765366865);
  v8 e0 = (r[0] + r[4]) << 13, e1 = (r[0] - r[4]) << 13;
  v8 t0 = e0 + e3, t3 = e0 - e3, t1 = e1 + e2, t2 = e1 - e2;
  v8 a = r[7], b = r[5], c = r[3], d = r[1];
  v8 z1 = a + d, z2 = b + c, z3 = a + c, z4 = b + d, z5 = (z3 + z4) * FIX(1.175875602);
  z1 *= -FIX(0.899976223), z2 *= -FIX(2.562915447);
  z3 = z5 - z3 * FIX(1.961570560), z4 = z5 - z4 * FIX(0.390180644);
  a = a * FIX(0.298631336) + z1 + z3, b = b * FIX(2.053119869) + z2 + z4;
  c = c * FIX(3.072711026) + z2 + z3, d = d * FIX(1.501321110) + z1 + z4;
  int32_t half = 1 << (shift - 1);
  t0 += half, t1 += half, t2 += half, t3 += half;
  r[0] = (t0 + d) >> shift, r[7] = (t0 - d) >> shift, r[1] = (t1 + c) >> shift, r[6] = (t1 - c) >> shift;
  r[2] = (t2 + b) >> shift, r[5] = (t2 - b) >> shift, r[3] = (t3 + a) >> shift, r[4] = (t3 - a) >> shift;
}

#ifdef __clang__
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (v8){__VA_ARGS__})
#endif

static inline __attribute__((always_inline)) void transpose(v8 r[8]) {
  v8 s[8], t[8];
  for (int i = 0; i < 4; i++) {
    s[2 * i] = MIX(r[2 * i], r[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    s[2 * i + 1] = MIX(r[2 * i], r[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      t[i + j] = MIX(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      t[i + j + 2] = MIX(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    r[i] = MIX(t[i], t[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = MIX(t[i], t[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

/* One block; nonzero where its coefficients are too large for 16 bits. */
static int transform(const int16_t *block, uint8_t *out, int stride) {
  v8 r[8], sums = {0};
  for (int i = 0; i < 8; i++) {
    h8 line;
    memcpy(&line, block + 8 * i, 16);
    r[i] = __builtin_convertvector(line, v8);
    sums += (r[i] ^ (r[i] >> 31)) - (r[i] >> 31);
  }
  sums = COLUMN_LIMIT - sums;
  int wild = 0;
  for (int i = 0; i < 8; i++) wild |= sums[i];
  pass(r, 11);
  transpose(r);
  pass(r, 18);
  transpose(r);
  for (int i = 0; i < 8; i++) {
    v8 x = r[i] + 128;
    x &= ~(x >> 31);
    v8 above = (v8)(x > 255);
    x = (x & ~above) | (above & 255);
    b8 line = __builtin_convertvector(x, b8);
    memcpy(out + i * stride, &line, 8);
  }
  return wild < 0;
}

static void flat(int mean, uint8_t *out, int stride) {
  int value = ((mean + 4) >> 3) + 128;
  value = value < 0 ? 0 : value > 255 ? 255 : value;
  for (int i = 0; i < 8; i++) memset(out + i * stride, value, 8);
}

/* ----- upsampling and colours */

static void doubled(const uint16_t *restrict in, uint8_t *restrict out, size_t n, int four) {
  /* Nearest sample 3/4, next one 1/4; `four`: values are of two rows already, and 16 times what they mean. */
  int shift = four ? 4 : 2, low = four ? 8 : 1, high = four ? 7 : 2;
  out[0] = (uint8_t)((in[0] * 4 + (four ? 8 : 0)) >> shift);
  for (size_t i = 0; i < n - 1; i++) {
    out[2 * i + 1] = (uint8_t)((in[i] * 3 + in[i + 1] + high) >> shift);
    out[2 * i + 2] = (uint8_t)((in[i + 1] * 3 + in[i] + low) >> shift);
  }
  out[2 * n - 1] = (uint8_t)((in[n - 1] * 4 + (four ? 7 : 0)) >> shift);
}

static void coloured(const uint8_t *restrict y, const uint8_t *restrict cb, const uint8_t *restrict cr,
                     uint8_t *restrict out, size_t n) {
  for (size_t i = 0; i < n; i++) {
    int b = cb[i] - 128, r = cr[i] - 128, l = y[i];
    int red = l + ((91881 * r + 32768) >> 16), blue = l + ((116130 * b + 32768) >> 16);
    int green = l + ((-22554 * b - 46802 * r + 32768) >> 16);
    red = red < 0 ? 0 : red > 255 ? 255 : red;
    green = green < 0 ? 0 : green > 255 ? 255 : green;
    blue = blue < 0 ? 0 : blue > 255 ? 255 : blue;
    out[3 * i] = (uint8_t)red, out[3 * i + 1] = (uint8_t)green, out[3 * i + 2] = (uint8_t)blue;
  }
}
