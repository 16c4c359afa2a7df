/* What a row of π0.5 needs between its checks and the GPU, in few instructions: a request passes each of them once, and
   cold. `native_rows.py` says what each function is, and tests hold it to the statement in Python. */

#define _GNU_SOURCE
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct Prompts { /* `_Prompts` in native_rows.py */
  const void *low, *scale; /* (dims), float or double */
  const int64_t *ids;      /* of the numbers -1 to 255, one behind the other, and then of the end */
  int32_t first[259];      /* where each of them begins in `ids`, the end's begin and its end */
  int32_t dims, width, budget, rule, single;
} Prompts;

enum { DEVIATION, ADDED, SPAN }; /* of `Normaliser.forward`: MEAN_STD, and a range as openpi and as LeRobot has it */

static double normalised(const Prompts *p, int at, double value) {
  if (p->single) {
    float x = (float)value, low = ((const float *)p->low)[at], scale = ((const float *)p->scale)[at];
    if (p->rule == DEVIATION) return (x - low) / scale;
    if (p->rule == ADDED) return (x - low) / scale * 2.0f - 1.0f;
    return 2.0f * (x - low) / scale - 1.0f;
  }
  double low = ((const double *)p->low)[at], scale = ((const double *)p->scale)[at];
  if (p->rule == DEVIATION) return (value - low) / scale;
  if (p->rule == ADDED) return (value - low) / scale * 2.0 - 1.0;
  return 2.0 * (value - low) / scale - 1.0;
}

/* The number of the bin, 256 of which divide [-1, 1): -1 below, 255 above. */
static int bin_of(double x) {
  int bin = x < -1 ? -1 : x >= 1 ? 255 : (int)((x + 1) * 128);
  while (bin >= 0 && bin / 128.0 - 1 > x) bin--;
  while (bin < 255 && (bin + 1) / 128.0 - 1 <= x) bin++;
  return bin;
}

/* Ids of the prompt whose words' ids are `head`; how many they are, or 0 where the state or their number is no ordinary
   one. `state` has 4 or 8 bytes a number. */
int taktline_pi_prompt(const Prompts *p, const void *state, int bytes, const int64_t *head, int heads, int64_t *out) {
  int count = heads, end = p->first[258] - p->first[257];
  if (heads + end > p->budget) return 0;
  memcpy(out, head, sizeof *out * (size_t)heads);
  for (int i = 0; i < p->width; i++) {
    double x = 0;
    if (i < p->dims) {
      x = bytes == 4 ? (double)((const float *)state)[i] : ((const double *)state)[i];
      if (!isfinite((float)x)) return 0;
      x = normalised(p, i, x);
      if (!isfinite((float)x)) return 0;
    }
    int number = bin_of(x) + 1, ids = p->first[number + 1] - p->first[number];
    if (count + ids + end > p->budget) return 0;
    for (int k = 0; k < ids; k++) out[count++] = p->ids[p->first[number] + k];
  }
  memcpy(out + count, p->ids + p->first[257], sizeof *out * (size_t)end);
  return count + end;
}

typedef struct Copy {
  void *to;
  const void *from;
  size_t bytes;
} Copy;

typedef struct Launch { /* `_Launch` in native_rows.py; the functions are CUDA's runtime's */
  int (*copy)(void *, const void *, size_t, int, void *);
  int (*record)(void *, void *);
  int (*launch)(void *, void *);
  void *event, *stream;
  void *const *graphs;
  int32_t count, copies;
  Copy copy_of[];
} Launch;

/* Copies to the device, an event and graphs, behind one another on a stream; CUDA's error, 0 for none. */
int taktline_launch(const Launch *l) {
  enum { TO_DEVICE = 1 };
  int error = 0;
  for (int i = 0; i < l->copies && !error; i++)
    error = l->copy(l->copy_of[i].to, l->copy_of[i].from, l->copy_of[i].bytes, TO_DEVICE, l->stream);
  if (!error) error = l->record(l->event, l->stream);
  for (int i = 0; i < l->count && !error; i++) error = l->launch(l->graphs[i], l->stream);
  return error;
}
