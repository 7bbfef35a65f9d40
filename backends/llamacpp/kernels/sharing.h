/* How threads share a product: by a weight that is in memory, and by one of which only a part is. */

#ifndef HETRUN_SHARING_H
#define HETRUN_SHARING_H

#include "packing.h"

enum {
    TILE_BYTES = 256 << 10,     /* of activations that are gone through for each group of weights */
    FLOAT_TILE_BYTES = 2 << 20, /* the same of floats, ... */
    FLOAT_TILE_ROWS = 64,       /* ... of which there are no more than this many rows */
    AMX_TILE_BYTES = 1 << 20,   /* the same for CPUs with AMX: their second caches are large */
    AMX_UNIT_BYTES = 512 << 10, /* and as UNIT_BYTES */
    BEGINNING = 4096,           /* bytes of the next product that a thread asks memory for */
    LEAST_TAKEN = 72 << 10,     /* of a weight, for a single row: memory has to begin anew with each take */
    COUNTERS = 4                /* of a product */
};

/* 32 columns of a row of activations. */
struct rounded {
    int8_t x[BLOCK];
    float scale;
    float sum;        /* of what x stands for */
    int32_t start[2]; /* what dot products begin with: types by halves have one for each, others one. Of Q2_K: the
                         sums of the halves of x */
};

INLINE const float *row_of_x(const struct product *p, int64_t row) {
    return p->x + (p->from ? p->from[row] : row) * p->x_stride;
}

/* Rows that a row of activations becomes, and how many there are of all. */
INLINE int64_t digits_of(const struct product *p) { return p->exact && !of_floats(p->type) ? 2 : 1; }

INLINE int64_t kept_rows(const struct product *p) { return p->n * digits_of(p); }

/* Rows of the weight for a column of the results. */
INLINE int64_t halves_of(const struct product *p) { return p->activation == PLAIN ? 1 : 2; }

/* Columns of the results. */
INLINE int64_t columns_out(const struct product *p) { return p->activation == PLAIN ? p->rows : p->rows / 2; }

/* What a thread does: units from `from` to `to`. A unit is a group of columns of `out` for a tile of rows. */
struct work {
    int64_t tile, groups, units; /* rows of a tile; groups of one tile; units of all tiles */
    int64_t workers, fixed;      /* threads that take part, and units that each takes at first */
    int64_t least;               /* units of the takes that follow */
    int64_t mine, from, to;
};

INLINE int64_t in_whole(int64_t x, int64_t parts) { return (x + parts - 1) / parts * parts; }

/* Rows of activations that a group of weights is unpacked for at once. */
INLINE int64_t at_once(int64_t level) { return level == LEVEL_AMX_INT8 ? TILE_ROWS : AT_ONCE; }

/* What n rows of activations take as weights of a type are multiplied by them. */
INLINE int64_t kept_bytes(int64_t type, int64_t n, int64_t cols) {
    int64_t block = of_floats(type) ? BLOCK * sizeof(float) : sizeof(struct rounded);
    return n * (cols / BLOCK) * block;
}

/* Where row n of some begins. */
INLINE struct rounded *rows_behind(const struct product *p, const struct rounded *x, int64_t n) {
    return (struct rounded *)((uintptr_t)x + (uintptr_t)kept_bytes(p->type, n, p->cols));
}

/* Rows of activations that a thread has memory for. */
static int64_t most_rows(int64_t level, int64_t type, int64_t cols) {
    int64_t bytes = level == LEVEL_AMX_INT8 ? AMX_TILE_BYTES : TILE_BYTES;
    if (of_floats(type)) bytes = at_most(FLOAT_TILE_BYTES, kept_bytes(type, FLOAT_TILE_ROWS, cols));
    return at_least(1, bytes / kept_bytes(type, at_once(level), cols)) * at_once(level);
}

/* Rows in each part, if n are cut into parts of at most `most`: they are about equally large. */
static int64_t part_rows(int64_t level, int64_t n, int64_t most) {
    int64_t parts = at_least(1, (n + most - 1) / most);
    return at_least(at_once(level), in_whole((n + parts - 1) / parts, at_once(level)));
}

/* Rows that are gone through together. */
static int64_t tile_rows(const struct product *p) {
    return part_rows(p->level, kept_rows(p), most_rows(p->level, p->type, p->cols));
}

static struct work work_of(const struct product *p, int ith, int nth) {
    struct work w = {.tile = tile_rows(p), .groups = (columns_out(p) + ROWS - 1) / ROWS};
    w.units = (kept_rows(p) + w.tile - 1) / w.tile * w.groups;
    w.workers = at_least(1, at_most(nth, p->slots));
    w.fixed = w.units * 3 / (4 * w.workers); /* the rest goes to the fast threads */
    w.least = p->n == 1 ? at_least(1, LEAST_TAKEN / (halves_of(p) * group_bytes(p->type, p->cols))) : 1;
    w.mine = ith < w.workers ? ith : -1;
    w.from = w.to = 0;
    return w;
}

/* The next units of a thread: first those that are always its own, then smaller and smaller takes of what is
   left. Returns whether there are any. */
static int take(const struct product *p, struct work *w) {
    if (w->mine < 0) return 0;
    if (w->to == 0 && w->fixed) {
        w->from = w->mine * w->fixed;
        w->to = w->from + w->fixed;
        return 1;
    }
    int64_t before = w->fixed * w->workers, size;
    int32_t taken = __atomic_load_n(p->counters, __ATOMIC_RELAXED);
    do {
        int64_t left = w->units - before - taken;
        if (left <= 0) return 0;
        size = at_least(w->least, left / (2 * w->workers));
        if (w->least > 1) size -= size % 2; /* two are gone through at once */
        size = at_most(size, left);
    } while (!__atomic_compare_exchange_n(p->counters, &taken, taken + (int32_t)size, 1, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    w->from = before + taken;
    w->to = w->from + size;
    return 1;
}

/* No thread takes a unit once all are here: the counters are ready for the next call. */
static void done(const struct product *p, int nth) {
    if (__atomic_add_fetch(p->counters + 1, 1, __ATOMIC_ACQ_REL) == nth) memset(p->counters, 0, COUNTERS * 4);
}

/* Inlined: compilers drop calls of functions that do nothing but ask for memory. */
INLINE void fetch(const uint8_t *x, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(x + i, 0, 2);
}

/* Asks memory for what groups of columns from `from` to `to` begin with. A single row goes through both halves of
   them at once, and where there is a gate all go through both halves of the weight. */
static void fetch_groups(const struct product *p, int64_t from, int64_t to) {
    const int64_t groups = (columns_out(p) + ROWS - 1) / ROWS, bytes = group_bytes(p->type, p->cols);
    const uint8_t *first = p->weights + from * bytes, *second = first;
    if (p->activation != PLAIN)
        second = (p->second ? p->second : p->weights + groups * bytes) + from * bytes;
    else if (p->n == 1)
        second += (to - from) / 2 * bytes;
    const int64_t some = at_most(bytes, second == first ? BEGINNING : BEGINNING / 2);
    fetch(first, some);
    if (second != first) fetch(second, some);
}

/* The same for what this thread begins with in the next product, while it waits for the others. */
static void fetch_beginning(const struct product *p, int ith, int nth) {
    struct work w = work_of(p, ith, nth);
    if (w.mine < 0) return;
    int64_t from = w.mine * w.fixed % w.groups;
    fetch_groups(p, from, at_most(from + w.fixed, w.groups));
}

/* As `take`; memory is asked for the beginning of what was taken. */
static int take_soon(const struct product *p, struct work *w) {
    if (!take(p, w)) return 0;
    fetch_groups(p, w->from, w->to);
    return 1;
}

/* Work by a partial weight */

struct unit {
    int64_t piece, first, groups; /* of columns of `out` */
};

/* Where a thread is: units before its piece, and the piece. */
struct cursor {
    int64_t before, piece;
};

/* Groups of a unit: as many as a thread packs at once. */
INLINE int64_t groups_at_once(int64_t level, int64_t type, int64_t cols, int64_t halves) {
    int64_t bytes = level == LEVEL_AMX_INT8 ? AMX_UNIT_BYTES : UNIT_BYTES;
    return at_least(1, bytes / (group_bytes(type, cols) * halves));
}

INLINE int64_t unit_groups(const struct product *p) {
    return groups_at_once(p->level, p->type, p->cols, halves_of(p));
}

/* Bytes of the rows of activations that a thread has for itself, in whole lines. */
static int64_t own_rows_bytes(int64_t level, int64_t type, int64_t n, int64_t cols) {
    int64_t rows = in_whole(at_most(n, most_rows(level, type, cols)), at_once(level));
    return in_whole(kept_bytes(type, rows, cols), 64);
}

/* Rows that are rounded at once for a partial weight. If that is not all of them, threads share the work. Does
   not depend on the level, apart from whole batches. */
static int64_t shared_rows(int64_t level, int64_t type, int64_t n, int64_t cols) {
    return part_rows(level, n, most_rows(LEVEL_PORTABLE, type, cols));
}

/* The next unit that no thread has taken; returns whether there is one. */
static int next_unit(const struct product *p, struct cursor *at, struct unit *unit) {
    const struct partial *w = p->partial;
    int64_t each = unit_groups(p), number = __atomic_fetch_add(p->counters, 1, __ATOMIC_RELAXED);
    for (; at->piece < w->pieces; at->piece++) {
        const struct piece *piece = w->piece + at->piece;
        int64_t units = (piece->groups + each - 1) / each, i = number - at->before;
        if (i < units) {
            int64_t first = piece->first + i * each;
            *unit = (struct unit){at->piece, first, at_most(each, piece->first + piece->groups - first)};
            return 1;
        }
        at->before += units;
    }
    return 0;
}

#endif
