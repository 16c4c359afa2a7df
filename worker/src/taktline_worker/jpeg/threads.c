/* Plain JPEGs to RGB in threads of their own, to the bits of libjpeg-turbo (accurate integer transform, triangle
   upsampling). Plain: baseline, one interleaved scan without restarts, YCbCr with 4:4:4, 4:2:2 or 4:2:0. Of any other
   file, and of a damaged one, it says no, and somebody else is to judge it.

   Sources of the arithmetic: ITU-T T.81 (syntax, F.2 entropy decoding), JFIF 1.02 (colours), C. Loeffler, A. Ligtenberg
   and G. Moschytz, ICASSP 1989 (transform), with the fixed-point precision of the Independent JPEG Group's library. */

#define _GNU_SOURCE
#include <pthread.h>
#include <time.h>

#include "frame.h"

enum { MOST_THREADS = 64, MOST_KEPT = 16 << 20 }; /* bytes of a room that waits for its next frame */

typedef struct Task {
  Job *job;
  int painter; /* which one of a frame's, from 1; 0 reads it */
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
  uint8_t *large = NULL;
  if (room && room->held > MOST_KEPT) large = room->memory, room->memory = NULL, room->held = 0;
  pthread_mutex_lock(&pool.lock);
  if (room) room->next = pool.free, pool.free = room;
  atomic_store_explicit(&job->state, good ? 1 : 2, memory_order_release);
  if (pool.waiting) pthread_cond_broadcast(&pool.done);
  pthread_mutex_unlock(&pool.lock);
  free(large); /* now: it takes longer than a small frame */
}

static void read_job(Job *job) {
  int apart = job->painters;
  Room *room = take_room();
  if (room) atomic_store(&room->read, 0);
  int good = room && furnish(room, job);
  if (!apart || !good) {
    if (good) good = read_frame(room, 0, job->out);
    if (!apart) {
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

/* Whether so many rows of MCUs have been read, once they have; not those of a file that is refused. */
static int have_been_read(Room *room, int rows) {
  int read;
  while ((read = atomic_load_explicit(&room->read, memory_order_acquire)) >= 0 && read < rows) rest();
  return read >= 0;
}

/* The same of the samples of one row, which another painter makes. */
static int is_transformed(Room *room, int row) {
  while (!atomic_load_explicit(&room->transformed[row], memory_order_acquire)) {
    if (atomic_load(&room->read) < 0) return 0;
    rest();
  }
  return 1;
}

/* One row of so many as there are painters. All tasks of a frame run at once, or will: they wait for one another. */
static void paint_job(Job *job, int painter) {
  Room *room;
  int painters = job->painters, good = 0;
  while (!(room = atomic_load(&job->room))) rest();
  if (room == (Room *)-1) {
    room = NULL;
  } else {
    Plan *p = &room->plan;
    size_t per_row = (size_t)p->mcus * (p->across * p->down + 2) * 65;
    int row = painter - 1;
    for (; row < p->rows && have_been_read(room, row + 1); row += painters) {
      if (!transform_row(room, row, room->blocks + row * per_row)) atomic_store(&job->bad, 1);
      atomic_store_explicit(&room->transformed[row], 1, memory_order_release);
      if (row && !is_transformed(room, row - 1)) break;
      paint_row(room, row, room->lines + room->line * (size_t)(painter - 1), job->out);
    }
    good = row >= p->rows && have_been_read(room, p->rows + 1);
  }
  if (!good) atomic_store(&job->bad, 1);
  if (atomic_fetch_sub(&job->left, 1) == 1) end_job(job, room, !atomic_load(&job->bad));
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
    if (task.painter) paint_job(task.job, task.painter);
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

/* The interpreter's own, as its stable interface has them (PEP 384, 3.11): asking it by name costs it ten functions. */
typedef struct {
  void *at, *object;
  ssize_t size, itemsize;
  int readonly, dimensions;
  char *format;
  ssize_t *shape, *strides, *suboffsets;
  void *internal;
} Py_buffer;
extern int PyObject_GetBuffer(void *object, Py_buffer *buffer, int flags);
extern void PyBuffer_Release(Py_buffer *buffer);
extern void *PyTuple_GetItem(void *tuple, ssize_t at);
extern void PyErr_Clear(void);

/* Where files are, a tuple of what has its bytes in a row; what has not is refused. They must stay. */
static void find(void *files, Job *jobs, int count) {
  Py_buffer buffer;
  for (int i = 0; i < count; i++)
    if (PyObject_GetBuffer(PyTuple_GetItem(files, i), &buffer, 0)) {
      PyErr_Clear();
      atomic_store(&jobs[i].state, 2);
    } else {
      jobs[i].data = buffer.at, jobs[i].size = buffer.size;
      PyBuffer_Release(&buffer);
    }
}

static int64_t key_of(const uint8_t *data, int64_t size) { /* FNV-1a of the size and 64 bytes at each end */
  uint64_t key = (0xcbf29ce484222325 ^ (uint64_t)size) * 0x100000001b3;
  for (int64_t i = 0; i < size; i = i == 63 && size > 128 ? size - 64 : i + 1) key = (key ^ data[i]) * 0x100000001b3;
  return (int64_t)key;
}

/* Heights and widths by the headers of plain JPEGs; what is none is refused. */
void taktline_jpeg_sizes(void *files, Job *jobs, int count) {
  Plan plan;
  find(files, jobs, count);
  for (int i = 0; i < count; i++) {
    if (atomic_load(&jobs[i].state)) continue;
    jobs[i].key = key_of(jobs[i].data, jobs[i].size);
    int plain = plan_of(jobs[i].data, jobs[i].size, &plan, 1);
    if (plain) jobs[i].height = plan.height, jobs[i].width = plan.width;
    else atomic_store(&jobs[i].state, 2);
  }
}

/* Begins to decode what is open; the jobs, their data and their memory must stay until each one's state says that it has
   ended. Where threads enough have nothing to do, each frame is cut into reading and painting, and a large one's painting,
   which takes longer than its reading then, in two. Not to be called without threads. */
void taktline_jpeg_begin(Job *jobs, int count) {
  enum { LARGE = 1 << 17, MOST_PAINTERS = 2 };
  pthread_mutex_lock(&pool.lock);
  size_t there = pool.end - pool.begin, most = there + (1 + MOST_PAINTERS) * (size_t)count;
  int painters = pool.threads < 4 || 2 * count > pool.idle ? 0 : 3 * count > pool.idle ? 1 : MOST_PAINTERS;
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
  for (int painter = 0; painter <= painters; painter++)
    for (int i = 0; i < count; i++) {
      if (atomic_load(&jobs[i].state)) continue;
      if (!painter) {
        int large = (int64_t)jobs[i].width * jobs[i].height > LARGE;
        jobs[i].painters = painters > 1 && !large ? 1 : painters;
        atomic_store(&jobs[i].left, jobs[i].painters);
      }
      if (painter > jobs[i].painters) continue;
      pool.tasks[pool.end++ % pool.room] = (Task){&jobs[i], painter};
    }
  pthread_cond_broadcast(&pool.work); /* a few too many: to wake some by themselves takes as long for each as for all */
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
