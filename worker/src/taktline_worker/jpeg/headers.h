/* What a plain JPEG says before its pixels: sizes, tables and where the scan is. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LOOK = 10, MOST_SIDE = 16384, MOST_TABLES = 8 }; /* of Huffman codes: twice what a frame can use */

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
  int has_quant[4] = {0}, jfif = 0, which[3] = {0}, ids[3] = {0}, sof = 0, tables = 0, good = 0;
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
        if (++tables > MOST_TABLES || next - s < 17 || (id & 0xEE)) goto done;
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
