/* What layers compute that keep a state of a fixed size: a short convolution over time, and the gated delta rule.

   A state is read in one slot and written in others, so a step that fails has changed nothing. Each row of a
   head's matrix goes its own way through the tokens, one after the other, whatever other rows, sequences and
   threads there are: the same bits however a text is cut into passes. */

#ifndef HETRUN_RECURRENT_H
#define HETRUN_RECURRENT_H

#include "vector_levels.h"

enum {
    MOST_TAPS = 64,
    MOST_ROW = 4096, /* floats of a row of a matrix */
    COLUMNS = 256, /* of a convolution that are gone through at once */
    TOKENS = 32,   /* whose keys and queries are made ready at once: they stay in the first cache, or nearly */
    TOGETHER = 16, /* rows of a matrix that are gone through at once: their sums are not waited for one by one */
    SHARES = 4     /* units of work for each thread, at least: some are slower than others */
};

#define IN_MEMORY(x) __asm__ volatile("" : "+m"(x))

enum { NO_SLOT = -1 };

/* The tokens of one sequence in a pass. */
struct sequence {
    int64_t first, end;
    int64_t read; /* the slot of the state before them; NO_SLOT: zeros */
};

/* What the layers have in common in one pass. */
struct pass {
    int64_t n;
    const struct sequence *sequences;
    const int64_t *write; /* for each token the slot that the state after it goes to, or NO_SLOT; of a last one a slot */
};

/* The convolution of one layer. */
struct convolution {
    const struct pass *pass;
    float *states; /* of each slot the last taps - 1 rows, `stride` floats from slot to slot */
    int64_t stride;
    const float *x;
    float *out;
    const float *kernel; /* of each column its taps */
    const float *bias;   /* of each column a number, or NULL */
    int64_t x_stride, out_stride, width, taps, silu, level;
};

/* The delta rule of one layer, or Mamba 2's: nothing is taken off v, keys and queries are as they are, and some
   of v is added to the result. */
struct delta {
    const struct pass *pass;
    float *states; /* of each slot the rows of all heads, filled up to whole vectors */
    int64_t stride;
    const float *x; /* q, k and v */
    const float *decay, *rate, *decays, *biases;
    const float *skips; /* of each head what of its v is added, or NULL */
    float *out;
    int64_t x_stride, decay_stride, rate_stride, out_stride;
    int64_t k_heads, v_heads, k_dim, v_dim, q_at, k_at, v_at, row, tiled, log, mamba, level;
    float *scratch;
    int64_t scratch_size; /* floats of each thread */
    int64_t slots;        /* threads that there is scratch memory for */
    int32_t *counters;    /* the next unit, and threads that are done */
    double eps;
};

/* Floats that a thread works in: for each of some tokens its key and its query, and four numbers. */
static inline int64_t scratch_floats(int64_t row) { return TOKENS * (2 * row + 4); }

/* Rows of a unit of work: of a head's matrix all, or some where there are many threads; for all tokens of a
   sequence. */
static inline int64_t unit_rows(const struct delta *d, int64_t nth) {
    int64_t parts = (SHARES * nth + d->pass->n * d->v_heads - 1) / (d->pass->n * d->v_heads);
    return at_least(1, (d->v_dim + TOGETHER * parts - 1) / (TOGETHER * parts)) * TOGETHER;
}

#endif
