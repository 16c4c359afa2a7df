/* One frame, from its file to its pixels, whole or in two halves that may run side by side. */

#include <stdatomic.h>

#include "headers.h"

#include "entropy.h"
#include "pixels.h"

typedef struct {
  const uint8_t *data;
  int64_t size;
  uint8_t *out; /* height * width * 3 */
  int32_t width, height;
  int32_t painters;  /* tasks beside the one that reads, for all behind the entropy decoding; 0: it does that, too */
  atomic_int state;  /* 0 open, 1 decoded, 2 refused */
  _Atomic(struct Room *) room;
  int64_t key;       /* another one for most other files */
  atomic_int left, bad; /* painters that have not ended; whether one has refused the file */
} Job; /* `_Job` in jpeg_threads.py */

typedef struct Room { /* what one frame needs meanwhile */
  struct Room *next;
  Plan plan;
  size_t held, line; /* bytes: of the memory; of each painter's own */
  uint8_t *memory, *bits, *planes[3], *lines;
  _Atomic uint8_t *transformed; /* of each row of MCUs whether its samples are there */
  int16_t *blocks;
  atomic_int read; /* rows of MCUs whose coefficients are there; -1 where the file is refused */
} Room;

static void line_of(Room *room, int line, uint8_t *own, uint8_t *out) {
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
    uint16_t *sums = (uint16_t *)own;
    uint8_t *full = own + 4 * (size_t)wide + 2 * (size_t)wide * k;
    for (size_t i = 0; i < n; i++) sums[i] = p->down == 2 ? (uint16_t)(3 * a[i] + b[i]) : a[i];
    doubled(sums, full, n, p->down == 2);
    c[k] = full;
  }
  coloured(y, c[0], c[1], out, (size_t)p->width);
}

static int furnish(Room *room, Job *job) {
  Plan *p = &room->plan;
  if (!plan_of(job->data, job->size, p, 0) || p->width != job->width || p->height != job->height) return 0;
  size_t mcu = (size_t)p->across * p->down + 2, wide = 8 * (size_t)p->mcus;
  size_t bits = (size_t)(p->end - p->scan) + 64, luma = wide * p->across * 8 * p->down * p->rows, chroma = wide * 8 * p->rows;
  size_t rows = job->painters ? (size_t)p->rows : 1, blocks = rows * p->mcus * mcu * 65;
  size_t lines = (8 * wide + 63) & ~(size_t)63, painters = job->painters ? (size_t)job->painters : 1;
  size_t need = bits + luma + 2 * chroma + 2 * blocks + painters * lines + p->rows + 7 * 64;
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
  room->lines = TAKE(painters * lines), room->line = lines;
  room->transformed = (_Atomic uint8_t *)TAKE((size_t)p->rows);
  memset((void *)room->transformed, 0, (size_t)p->rows);
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

/* Samples of a row of MCUs; zero where the file is refused. */
static int transform_row(Room *room, int row, const int16_t *blocks) {
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
  return !wild;
}

/* Pixels of a row of MCUs whose samples are there, as those of the row before are: all lines that do not need the next. */
static void paint_row(Room *room, int row, uint8_t *own, uint8_t *out) {
  Plan *p = &room->plan;
  int step = 8 * p->down, first = row ? row * step - (p->down == 2) : 0;
  int last = row + 1 == p->rows ? p->height : (row + 1) * step - (p->down == 2);
  for (int line = first; line < last && line < p->height; line++)
    line_of(room, line, own, out + (size_t)line * p->width * 3);
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
    else if (transform_row(room, row, begin)) paint_row(room, row, room->lines, out);
    else return 0;
  }
  int64_t left = 8 * (b.end - b.p) + b.left - 8 * (int64_t)b.over;
  return left >= 0 && left < 8; /* all of the scan, and no more */
}
