/* A mixture whose experts are not all in memory (expert_supply.h), as one node: in waves, and while products run
   other experts come from disk. */

#ifndef HETRUN_CACHED_MIXTURE_H
#define HETRUN_CACHED_MIXTURE_H

#include "expert_supply.h"
#include "mixture.h"

enum {
    WAVE = 32,    /* experts that are multiplied by before results of the first go through its last matrix */
    SPINS = 4000, /* looks before a thread that waits for others lies down: some 40 microseconds */
    PARTS = 4     /* that a matrix is packed in, so that all threads have some of it */
};

struct cached_mixture {
    struct expert_products inner, last; /* by gate and up, and by down; their weights are set for each expert */
    const struct expert_supply *supply;
    int64_t mixture;          /* its number there */
    int64_t starts[MATRICES]; /* where the packed matrices begin in a slot */
    int32_t *experts, *rows;  /* memory for what is wanted: a number for each expert */
    int64_t given;            /* the wave: how many, ... */
    struct expert wave[WAVE]; /* ... and which */
    int32_t packing;          /* the next part to pack */
    int32_t arrived, turn, dozers; /* of a barrier; zeros before the first call */
};

/* What is likely to be wanted next. */
struct expert_hint {
    const struct expert_supply *supply;
    int64_t mixture;
    const int32_t *chosen;
    int64_t rows, used, stride; /* as in a routing */
};

void hetrun_product(void *node, int ith, int nth, void *product);
void hetrun_products_pack(int64_t type, int64_t rows, int64_t cols, const uint8_t *stored, uint8_t *packed,
                          int64_t level);

/* All threads are here before one goes on. */
static void meet(struct cached_mixture *m, int nth) {
    const int32_t turn = __atomic_load_n(&m->turn, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&m->arrived, 1, __ATOMIC_ACQ_REL) == nth) {
        m->arrived = 0;
        __atomic_store_n(&m->turn, turn + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&m->dozers, __ATOMIC_SEQ_CST)) m->supply->wake(m->supply->cache);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&m->turn, __ATOMIC_ACQUIRE) != turn) return;
        PAUSE();
    }
    m->supply->doze(m->supply->cache, &m->turn, turn, &m->dozers);
}

/* What the router chose, expert by expert. */
static void want_chosen(struct cached_mixture *m) {
    const struct routing *r = m->inner.routing;
    int64_t n = 0;
    for (int64_t expert = 0; expert < r->experts; expert++) {
        int32_t rows = r->first[expert + 1] - r->first[expert];
        if (!rows) continue;
        m->experts[n] = (int32_t)expert;
        m->rows[n++] = rows;
    }
    m->supply->want(m->supply->cache, m->mixture, m->experts, m->rows, n);
}

/* Which part of what is packed next, of all matrices of a wave; returns whether there is one. */
static int next_part(struct cached_mixture *m, int64_t *expert, int64_t *matrix, int64_t *part) {
    int32_t i = __atomic_fetch_add(&m->packing, 1, __ATOMIC_RELAXED);
    *part = i % PARTS, *matrix = i / PARTS % MATRICES, *expert = i / (PARTS * MATRICES);
    return *expert < m->given;
}

/* Groups of rows of the matrices that came as they are stored. */
static void pack_wave(struct cached_mixture *m) {
    int64_t expert, matrix, part;
    while (next_part(m, &expert, &matrix, &part)) {
        const struct expert *e = &m->wave[expert];
        const struct product *p = matrix < 2 ? &m->inner.each : &m->last.each;
        const int64_t rows = columns_out(p), groups = (rows + ROWS - 1) / ROWS;
        const int64_t from = groups * part / PARTS, to = groups * (part + 1) / PARTS;
        if (!e->stored[matrix] || from == to) continue;
        hetrun_products_pack(p->type, at_most(to * ROWS, rows) - from * ROWS, p->cols,
                             e->stored[matrix] + from * ROWS * stored_row_bytes(p->type, p->cols),
                             e->slot + m->starts[matrix] + from * group_bytes(p->type, p->cols), p->level);
    }
}

/* Each expert of the wave, by the matrices that begin there in its slot; `second`: of up, or 0. */
static void multiply_wave(const struct cached_mixture *m, const struct expert_products *by, int64_t first,
                          int64_t second, void *node, int ith, int nth) {
    for (int64_t i = 0; i < m->given; i++) {
        uint8_t *slot = m->wave[i].slot;
        struct product p = product_of(by, m->wave[i].number);
        p.weights = slot + first;
        p.second = second ? slot + second : NULL;
        hetrun_product(node, ith, nth, &p);
    }
}

/* One wave; the thread with number 0 says who is in it. */
static int next_wave(struct cached_mixture *m, void *node, int ith, int nth) {
    if (ith == 0) {
        m->given = m->supply->next(m->supply->cache, m->wave, WAVE);
        m->packing = 0;
    }
    meet(m, nth);
    if (m->given <= 0) return 0;
    if (m->wave[m->given - 1].stored[0]) { /* those in slots come by themselves */
        pack_wave(m);
        meet(m, nth);
        if (ith == 0) m->supply->packed(m->supply->cache);
    }
    multiply_wave(m, &m->inner, m->starts[0], m->starts[1], node, ith, nth);
    meet(m, nth);
    multiply_wave(m, &m->last, m->starts[2], 0, node, ith, nth);
    meet(m, nth);
    return 1;
}

#endif
