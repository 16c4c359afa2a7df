/* Plain JPEGs to RGB in threads of their own, to the bits of libjpeg-turbo (accurate integer transform, triangle
   upsampling). Plain: baseline, one interleaved scan without restarts, YCbCr with 4:4:4, 4:2:2 or 4:2:0. Of any other
   file, and of a damaged one, it says no, and somebody else is to judge it.

   Sources of the arithmetic: ITU-T T.81 (syntax, F.2 entropy decoding), JFIF 1.02 (colours), C. Loeffler, A. Ligtenberg
   and G. Moschytz, ICASSP 1989 (transform), with the fixed-point precision of the Independent JPEG Group's library. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int32_t v8 __attribute__((vector_size(32)));
typedef int16_t h8 __attribute__((vector_size(16)));
typedef uint8_t b8 __attribute__((vector_size(8)));

enum { LOOK = 10, MOST_SIDE = 16384, MOST_THREADS = 64, COLUMN_LIMIT = 2896 };
/* COLUMN_LIMIT: sums of a column's coefficients beyond which 16 bits, in which the library calculates, may overflow. */

static const uint8_t ZIGZAG[80] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
                                   41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
                                   30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
                                   63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63};

typedef struct {
  int there;
  uint16_t look[1 << LOOK]; /* symbol and, from bit 8, code length; 0 where the code is longer, or none */
  int32_t quick[1 << LOOK]; /* of AC codes that come with their value: length, from bit 8 the run, from bit 16 the value */
  int32_t most[18], offset[17];
  uint8_t symbols[256];
} Codes;

typedef struct {
  int width, height, across, down; /* pixels; luma samples for one of chroma */
  int mcus, rows;                  /* in a row; of them */
  uint16_t quant[3][64];           /* natural order */
  Codes dc[3], ac[3];
  const uint8_t *scan, *end;
} Plan;

typedef struct {
  const uint8_t *data;
  int64_t size;
  uint8_t *out; /* height * width * 3 */
  int32_t width, height, split;
  atomic_int state; /* 0 open, 1 decoded, 2 refused */
  _Atomic(struct Room *) room;
} Job; /* `_Job` in jpeg_threads.py */

typedef struct Room { /* what one frame needs meanwhile */
  struct Room *next;
  Plan plan;
  size_t held;
  uint8_t *memory, *bits, *planes[3], *lines;
  int16_t *blocks;
  atomic_int read; /* rows of MCUs whose coefficients are there; -1 where the file is refused */
} Room;

/* ----- headers */

static int codes_of(Codes *c, const uint8_t *counts, const uint8_t *symbols, int number, int dc) {
  int code = 0, at = 0;
  for (int i = 0; i < number; i++)
    if (dc && symbols[i] > 15) return 0;
  memset(c, 0, sizeof *c);
  memcpy(c->symbols, symbols, number);
  for (int length = 1; length <= 16; length++) {
    c->offset[length] = at - code;
    for (int i = 0; i < counts[length - 1]; i++, code++, at++) {
      if (code >= (1 << length) - 1) return 0; /* none is all ones */
      for (int j = 0; length <= LOOK && j < 1 << (LOOK - length); j++)
        c->look[(code << (LOOK - length)) + j] = (uint16_t)(length << 8 | symbols[at]);
    }
    c->most[length] = counts[length - 1] ? code : 0; /* codes of this length are below it */
    code <<= 1;
  }
  for (int bits = 0; !dc && bits < 1 << LOOK; bits++) {
    int length = c->look[bits] >> 8, size = c->look[bits] & 15, run = c->look[bits] >> 4 & 15;
    if (!length || !size || length + size > LOOK) continue;
    int value = bits >> (LOOK - length - size) & ((1 << size) - 1);
    if (value < 1 << (size - 1)) value -= (1 << size) - 1;
    c->quick[bits] = (int32_t)((uint32_t)value << 16) | run << 8 | (length + size);
  }
  return c->there = 1;
}

static int plan_of(const uint8_t *p, int64_t size, Plan *plan, int sizes_only) {
  const uint8_t *end = p + size;
  uint16_t quant[4][64];
  Codes *codes = NULL;
  int has_quant[4] = {0}, jfif = 0, which[3] = {0}, ids[3] = {0}, sof = 0, good = 0;
  if (size < 4 || p[0] != 0xFF || p[1] != 0xD8) return 0;
  if (!sizes_only && !(codes = calloc(4, sizeof *codes))) return 0;
  p += 2;
  for (;;) {
    if (end - p < 4 || p[0] != 0xFF) goto done;
    int marker = p[1], length = p[2] << 8 | p[3];
    const uint8_t *s = p + 4, *next = p + 2 + length;
    if (length < 2 || next > end) goto done;
    p = next;
    if (marker == 0xE0) {
      jfif |= length >= 16 && !memcmp(s, "JFIF", 5);
    } else if (marker == 0xEE || marker == 0xDD) {
      goto done; /* Adobe's colours; restarts */
    } else if (marker == 0xFE || (marker > 0xE0 && marker < 0xF0)) {
      continue;
    } else if (marker == 0xDB) {
      for (; s < next; s += 65) {
        if (next - s < 65 || s[0] > 3) goto done;
        for (int i = 0; i < 64; i++)
          if (!(quant[s[0]][ZIGZAG[i]] = s[1 + i])) goto done;
        has_quant[s[0]] = 1;
      }
    } else if (marker == 0xC4) {
      while (s < next) {
        int number = 0, id = s[0];
        if (next - s < 17 || (id & 0xEE)) goto done;
        for (int i = 1; i <= 16; i++) number += s[i];
        if (number > 256 || next - s < 17 + number) goto done;
        if (codes && !codes_of(&codes[(id >> 4) * 2 + (id & 1)], s + 1, s + 17, number, !(id >> 4))) goto done;
        s += 17 + number;
      }
    } else if (marker == 0xC0) {
      if (sof++ || length != 17 || s[0] != 8 || s[5] != 3) goto done;
      plan->height = s[1] << 8 | s[2], plan->width = s[3] << 8 | s[4];
      plan->across = s[7] >> 4, plan->down = s[7] & 15;
      for (int i = 0; i < 3; i++) {
        ids[i] = s[6 + 3 * i], which[i] = s[8 + 3 * i];
        if (which[i] > 3 || (i && s[7 + 3 * i] != 0x11)) goto done;
      }
      if (plan->across < 1 || plan->across > 2 || plan->down < 1 || plan->down > plan->across) goto done;
      if (plan->width < 8 || plan->height < 8 || plan->width > MOST_SIDE || plan->height > MOST_SIDE) goto done;
      if (ids[0] == ids[1] || ids[1] == ids[2] || ids[0] == ids[2]) goto done;
      plan->mcus = (plan->width + 8 * plan->across - 1) / (8 * plan->across);
      plan->rows = (plan->height + 8 * plan->down - 1) / (8 * plan->down);
    } else if (marker == 0xDA) {
      if (!sof || length != 12 || s[0] != 3 || s[7] != 0 || s[8] != 63 || s[9] != 0) goto done;
      if (!jfif && (ids[0] != 1 || ids[1] != 2 || ids[2] != 3)) goto done;
      for (int i = 0; i < 3; i++) {
        int dc = s[2 + 2 * i] >> 4, ac = s[2 + 2 * i] & 15;
        if (s[1 + 2 * i] != ids[i] || dc > 1 || ac > 1 || !has_quant[which[i]]) goto done;
        memcpy(plan->quant[i], quant[which[i]], sizeof quant[0]);
        if (!codes) continue;
        if (!codes[dc].there || !codes[2 + ac].there) goto done;
        plan->dc[i] = codes[dc], plan->ac[i] = codes[2 + ac];
      }
      plan->scan = next, plan->end = end;
      good = 1;
      goto done;
    } else {
      goto done;
    }
  }
done:
  free(codes);
  return good;
}

/* ----- entropy decoding: T.81, F.2.2 */

typedef struct {
  const uint8_t *p, *end;
  uint64_t bits; /* left-aligned */
  int left, over;
} Bits;

static inline void fill(Bits *b) {
  if (b->end - b->p >= 8) {
    uint64_t next;
    memcpy(&next, b->p, 8);
    b->bits |= __builtin_bswap64(next) >> b->left;
    b->p += (63 - b->left) >> 3;
    b->left |= 56;
    return;
  }
  while (b->left <= 56) {
    uint64_t byte = 0;
    if (b->p < b->end) byte = *b->p++;
    else b->over++;
    b->bits |= byte << (56 - b->left);
    b->left += 8;
  }
}

static inline int symbol_of(Bits *b, const Codes *c) {
  int entry = c->look[b->bits >> (64 - LOOK)];
  if (!entry) {
    int length = LOOK + 1;
    while (length <= 16 && (int)(b->bits >> (64 - length)) >= c->most[length]) length++;
    if (length > 16) return -1;
    entry = length << 8 | c->symbols[(c->offset[length] + (int)(b->bits >> (64 - length))) & 255];
  }
  b->bits <<= entry >> 8, b->left -= entry >> 8;
  return entry & 255;
}

static inline int value_of(Bits *b, int size) { /* T.81, table F.1: the value of `size` bits, at least one */
  int value = (int)(b->bits >> (64 - size));
  b->bits <<= size, b->left -= size;
  return value < 1 << (size - 1) ? value - (1 << size) + 1 : value;
}

/* One block, dequantised, in natural order; 2 where it has more than its mean, 0 where it is none. */
static inline int block_of(Bits *b, const Codes *dc, const Codes *ac, const uint16_t *quant, int *last, int16_t *out) {
  int kind = 1, wild = 0, k = 1;
  memset(out, 0, 128);
  if (b->left < 48) fill(b);
  int size = symbol_of(b, dc);
  if (size < 0 || size > 11) return 0;
  if (size) *last += value_of(b, size);
  int value = *last * quant[0];
  if (value > 2047 || value < -2048) return 0;
  out[0] = (int16_t)value;
  while (k < 64) {
    if (b->left < 32) fill(b);
    int quick = ac->quick[b->bits >> (64 - LOOK)];
    if (quick) {
      b->bits <<= quick & 255, b->left -= quick & 255;
      k += quick >> 8 & 255;
      value = quick >> 16;
    } else {
      int symbol = symbol_of(b, ac);
      if (symbol < 0) return 0;
      size = symbol & 15;
      if (!size) {
        if (symbol != 0xF0) {
          if (symbol) return 0;
          break;
        }
        k += 16;
        continue;
      }
      if (size > 10) return 0;
      k += symbol >> 4;
      value = value_of(b, size);
    }
    int at = ZIGZAG[k++];
    value *= quant[at];
    wild |= (value + 4096) & ~8191;
    out[at] = (int16_t)value;
    kind = 2;
  }
  return k > 64 || wild ? 0 : kind;
}

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

/* ----- upsampling and colours. Counts are size_t: an int, which may wrap, would keep the compiler from wide registers. */

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

static void line_of(Room *room, int line, uint8_t *out) {
  Plan *p = &room->plan;
  int wide = 8 * p->mcus, high = (p->height + p->down - 1) / p->down;
  size_t n = (size_t)(p->width + p->across - 1) / p->across;
  const uint8_t *y = room->planes[0] + (size_t)line * wide * p->across, *c[2];
  for (int k = 0; k < 2; k++) {
    const uint8_t *plane = room->planes[1 + k];
    int near = line / p->down, far = near;
    c[k] = plane + (size_t)near * wide;
    if (p->across == 1) continue;
    if (p->down == 2) far += line & 1 ? 1 : -1;
    far = far < 0 ? 0 : far >= high ? high - 1 : far;
    const uint8_t *a = c[k], *b = plane + (size_t)far * wide;
    uint16_t *sums = (uint16_t *)room->lines;
    uint8_t *full = room->lines + 4 * (size_t)wide + 2 * (size_t)wide * k;
    for (size_t i = 0; i < n; i++) sums[i] = p->down == 2 ? (uint16_t)(3 * a[i] + b[i]) : a[i];
    doubled(sums, full, n, p->down == 2);
    c[k] = full;
  }
  coloured(y, c[0], c[1], out, (size_t)p->width);
}

/* ----- a frame */

static int furnish(Room *room, Job *job) {
  Plan *p = &room->plan;
  if (!plan_of(job->data, job->size, p, 0) || p->width != job->width || p->height != job->height) return 0;
  size_t mcu = (size_t)p->across * p->down + 2, wide = 8 * (size_t)p->mcus;
  size_t bits = (size_t)(p->end - p->scan) + 64, luma = wide * p->across * 8 * p->down * p->rows, chroma = wide * 8 * p->rows;
  size_t rows = job->split ? (size_t)p->rows : 1, blocks = rows * p->mcus * mcu * 65, lines = 8 * wide;
  size_t need = bits + luma + 2 * chroma + 2 * blocks + lines + 6 * 64;
  if (room->held < need) {
    free(room->memory);
    room->held = 0;
    if (!(room->memory = aligned_alloc(64, (need + 63) & ~(size_t)63))) return 0;
    room->held = need;
  }
  uint8_t *at = room->memory;
#define TAKE(n) (at += ((n) + 63) & ~(size_t)63, at - (((n) + 63) & ~(size_t)63))
  room->blocks = (int16_t *)TAKE(2 * blocks);
  room->planes[0] = TAKE(luma), room->planes[1] = TAKE(chroma), room->planes[2] = TAKE(chroma);
  room->lines = TAKE(lines);
  room->bits = TAKE(bits);
  return 1;
}

/* The scan without its stuffed zeros; where it ends, or NULL where it does not end as it should. */
static uint8_t *unstuffed(const Plan *p, uint8_t *out) {
  const uint8_t *s = p->scan;
  for (;;) {
    const uint8_t *stop = memchr(s, 0xFF, (size_t)(p->end - s));
    if (!stop || p->end - stop < 2) return NULL;
    memcpy(out, s, (size_t)(stop - s));
    out += stop - s;
    if (stop[1] == 0xD9) return out;
    if (stop[1]) return NULL;
    *out++ = 0xFF;
    s = stop + 2;
  }
}

/* A row of MCUs, as far as the next row is not needed; zero where the file is refused. */
static int show(Room *room, int row, const int16_t *blocks, uint8_t *out) {
  int wild = 0;
  Plan *p = &room->plan;
  int wide = 8 * p->mcus, luma = wide * p->across, step = 8 * p->down;
  for (int m = 0; m < p->mcus; m++)
    for (int c = 0; c < 3; c++)
      for (int k = 0; k < (c ? 1 : p->across * p->down); k++, blocks += 65) {
        int stride = c ? wide : luma;
        size_t x = c ? 8 * (size_t)m : 8 * ((size_t)m * p->across + k % p->across);
        size_t y = c ? 8 * (size_t)row : (size_t)row * step + 8 * (size_t)(k / p->across);
        uint8_t *to = room->planes[c] + y * stride + x;
        if (blocks[64] == 2) wild |= transform(blocks, to, stride);
        else flat(blocks[0], to, stride);
      }
  int first = row ? row * step - (p->down == 2) : 0;
  int last = row + 1 == p->rows ? p->height : (row + 1) * step - (p->down == 2);
  for (int line = first; line < last && line < p->height; line++) line_of(room, line, out + (size_t)line * p->width * 3);
  return !wild;
}

static int read_frame(Room *room, int split, uint8_t *out) {
  Plan *p = &room->plan;
  uint8_t *end = unstuffed(p, room->bits);
  int last[3] = {0};
  if (!end) return 0;
  memset(end, 0, 16);
  Bits b = {room->bits, end, 0, 0, 0};
  size_t per_row = (size_t)p->mcus * (p->across * p->down + 2) * 65;
  for (int row = 0; row < p->rows; row++) {
    int16_t *to = room->blocks + (split ? row * per_row : 0), *begin = to;
    for (int m = 0; m < p->mcus; m++)
      for (int c = 0; c < 3; c++)
        for (int k = 0; k < (c ? 1 : p->across * p->down); k++, to += 65) {
          int kind = block_of(&b, &p->dc[c], &p->ac[c], p->quant[c], &last[c], to);
          if (!kind || b.over > 64) return 0;
          to[64] = (int16_t)kind;
        }
    if (split) atomic_store_explicit(&room->read, row + 1, memory_order_release);
    else if (!show(room, row, begin, out)) return 0;
  }
  int64_t left = 8 * (b.end - b.p) + b.left - 8 * (int64_t)b.over;
  return left >= 0 && left < 8; /* all of the scan, and no more */
}

/* ----- threads */

typedef struct Task {
  Job *job;
  int shows; /* the second half of a frame that is split: everything behind the entropy decoding */
} Task;

static struct {
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  Task *tasks;
  size_t begin, end, room; /* a ring */
  Room *free;
  int threads, idle, waiting;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0, NULL, 0, 0, 0};

static inline void rest(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static Room *take_room(void) {
  pthread_mutex_lock(&pool.lock);
  Room *room = pool.free;
  if (room) pool.free = room->next;
  pthread_mutex_unlock(&pool.lock);
  return room ? room : calloc(1, sizeof *room);
}

static void end_job(Job *job, Room *room, int good) {
  pthread_mutex_lock(&pool.lock);
  if (room) room->next = pool.free, pool.free = room;
  atomic_store_explicit(&job->state, good ? 1 : 2, memory_order_release);
  if (pool.waiting) pthread_cond_broadcast(&pool.done);
  pthread_mutex_unlock(&pool.lock);
}

static void read_job(Job *job) {
  int split = job->split;
  Room *room = take_room();
  if (room) atomic_store(&room->read, 0);
  int good = room && furnish(room, job);
  if (!good || !split) {
    if (good) good = read_frame(room, 0, job->out);
    if (!split) {
      end_job(job, room, good);
      return;
    }
    if (room) atomic_store(&room->read, -1);
    atomic_store(&job->room, room ? room : (Room *)-1);
    return;
  }
  atomic_store(&job->room, room);
  good = read_frame(room, 1, job->out);
  atomic_store(&room->read, good ? room->plan.rows + 1 : -1);
}

static void show_job(Job *job) {
  Room *room;
  while (!(room = atomic_load(&job->room))) rest();
  if (room == (Room *)-1) {
    end_job(job, NULL, 0);
    return;
  }
  size_t per_row = 0;
  int good = 1;
  for (int row = 0;;) {
    int read = atomic_load_explicit(&room->read, memory_order_acquire);
    if (read > 0 && !per_row) per_row = (size_t)room->plan.mcus * (room->plan.across * room->plan.down + 2) * 65;
    if (read < 0 || (read && row == room->plan.rows && read > row)) {
      end_job(job, room, good && read > 0);
      return;
    }
    if (row < read && row < room->plan.rows) {
      good &= show(room, row, room->blocks + row * per_row, job->out);
      row++;
    } else {
      rest();
    }
  }
}

static void *thread(void *unused) {
  (void)unused;
  pthread_mutex_lock(&pool.lock);
  for (;;) {
    while (pool.begin == pool.end) {
      pool.idle++;
      pthread_cond_wait(&pool.work, &pool.lock);
      pool.idle--;
    }
    Task task = pool.tasks[pool.begin++ % pool.room];
    pthread_mutex_unlock(&pool.lock);
    if (task.shows) show_job(task.job);
    else read_job(task.job);
    pthread_mutex_lock(&pool.lock);
  }
  return NULL;
}

/* Threads of the pool, at least so many from now on; how many there are. */
int taktline_jpeg_threads(int wanted) {
  pthread_mutex_lock(&pool.lock);
  while (pool.threads < wanted && pool.threads < MOST_THREADS) {
    pthread_t one;
    if (pthread_create(&one, NULL, thread, NULL)) break;
    pthread_detach(one);
    pool.threads++;
  }
  int threads = pool.threads;
  pthread_mutex_unlock(&pool.lock);
  return threads;
}

/* 1 for headers of a plain JPEG, whose height and width these are. */
int taktline_jpeg_size(const uint8_t *data, int64_t size, int32_t *height, int32_t *width) {
  Plan plan;
  if (!plan_of(data, size, &plan, 1)) return 0;
  *height = plan.height, *width = plan.width;
  return 1;
}

/* Begins to decode; the jobs, their data and their memory must stay until each one's state says that it has ended.
   Frames are cut in two, for two threads each, where there are threads enough. Not to be called without threads. */
void taktline_jpeg_begin(Job *jobs, int count) {
  pthread_mutex_lock(&pool.lock);
  size_t there = pool.end - pool.begin, most = there + 2 * (size_t)count;
  int split = pool.threads >= 4 && 2 * count <= pool.idle;
  if (most > pool.room) {
    size_t room = 2 * most;
    Task *tasks = malloc(room * sizeof *tasks);
    if (!tasks) {
      for (int i = 0; i < count; i++) atomic_store(&jobs[i].state, 2);
      pthread_mutex_unlock(&pool.lock);
      return;
    }
    for (size_t i = 0; i < there; i++) tasks[i] = pool.tasks[(pool.begin + i) % pool.room];
    free(pool.tasks);
    pool.tasks = tasks, pool.room = room, pool.begin = 0, pool.end = there;
  }
  for (int shows = 0; shows <= split; shows++)
    for (int i = 0; i < count; i++) {
      jobs[i].split = split;
      pool.tasks[pool.end++ % pool.room] = (Task){&jobs[i], shows};
    }
  pthread_cond_broadcast(&pool.work);
  pthread_mutex_unlock(&pool.lock);
}

static int64_t now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* Waits for a job to end, awake for so many microseconds at first; its state. */
int taktline_jpeg_wait(Job *job, int awake_us) {
  int64_t until = now_us() + awake_us;
  int state;
  while (!(state = atomic_load_explicit(&job->state, memory_order_acquire)) && now_us() < until)
    for (int i = 0; i < 32; i++) rest();
  if (state) return state;
  pthread_mutex_lock(&pool.lock);
  pool.waiting++;
  while (!(state = atomic_load(&job->state))) pthread_cond_wait(&pool.done, &pool.lock);
  pool.waiting--;
  pthread_mutex_unlock(&pool.lock);
  return state;
}
