/* Coefficients of a scan's blocks: ITU-T T.81, F.2.2. */

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
