/* Products of quantised weights with a few rows of floats, or with many, in one call.

   A weight is kept in groups of ROWS rows. In a group the blocks of all its rows lie side by side, block by
   block along the columns, so that one vector holds four columns of each row, and a lane stays with its row
   from the first column to the last. The activations are rounded to 8 bits, 32 columns at a time (one scale
   each), and four of them are broadcast to all lanes. A row's sum is made in one lane in the order of the
   columns: its bits depend neither on how many rows of activations there are, nor on threads, nor on which
   instructions were used.

   Where results shall be exact, what rounding left of a row is rounded once more, with scales of its own. It
   becomes a row of its own, the next one, and both results are added up in the end. */

#ifndef HETRUN_PRODUCTS_H
#define HETRUN_PRODUCTS_H

#include <stdint.h>

#include "partial.h"

enum {
    ROWS = 16,      /* of a weight in one group */
    AT_ONCE = 8,    /* rows of activations that a group of weights is unpacked for at once */
    TILE_ROWS = 16, /* of activations that AMX's tiles take at once */
    BLOCK = 32      /* columns that activations have one scale for */
};

enum { LEVEL_PORTABLE, LEVEL_AVX2, LEVEL_AVX_VNNI, LEVEL_AVX512_VNNI, LEVEL_AMX_INT8, LEVEL_DOTPROD };
enum { /* as ggml numbers them */
    TYPE_F16 = 1,
    TYPE_Q4_0 = 2,
    TYPE_Q4_1 = 3,
    TYPE_Q5_0 = 6,
    TYPE_Q5_1 = 7,
    TYPE_Q8_0 = 8,
    TYPE_Q2_K = 10,
    TYPE_Q3_K = 11,
    TYPE_Q4_K = 12,
    TYPE_Q5_K = 13,
    TYPE_Q6_K = 14,
    TYPE_IQ4_NL = 20,
    TYPE_IQ4_XS = 23,
    TYPE_BF16 = 30,
    TYPE_MXFP4 = 39,
    TYPE_Q2_0 = 42
};
enum { PLAIN = 0, SWIGLU = 1, GEGLU = 2, GEGLU_ERF = 3, CLAMPED = 4 }; /* what becomes of the results */

/* One product and what is fused with it. Python writes it once; x, out and residual lie where ggml put them. */
struct product {
    const uint8_t *weights; /* as hetrun_products_pack made them */
    int64_t type, rows, cols;
    const float *x;
    float *out;
    int64_t n;                    /* rows of x and of out */
    int64_t x_stride, out_stride; /* floats from row to row */
    const float *gain;            /* each row of x becomes x / rms(x) * gain first; NULL: it stays */
    double eps;
    const float *bias;     /* one for each row of the weight; NULL: none */
    const float *residual; /* added to the results; NULL: none */
    int64_t residual_stride;
    int64_t activation; /* not PLAIN: out has rows / 2 columns, activation(row r) * row (r + rows / 2); CLAMPED: as
                           gpt-oss has it */
    uint8_t *scratch;
    int64_t scratch_size; /* bytes of each thread */
    int64_t slots;        /* threads that there is scratch memory for; more have nothing to do */
    int32_t *counters; /* zero before the first call: the next unit of work, threads that are done, and of what
                          is done before a partial weight is multiplied by: the next tile, tiles that are done */
    int64_t level;
    const struct product *next; /* what is computed after this, if known: memory is asked for its beginning */
    const struct partial *partial; /* a weight that is not always in memory as a whole; NULL: it is */
    uint8_t *shared;               /* memory for all rows of x, if they are more than one tile */
    const uint8_t *second;         /* rows of the second half of the weight, if they lie elsewhere; or NULL */
    const int32_t *from, *to;      /* rows of x and of out by their numbers; NULL: one after the other */
    const float *second_bias;      /* of the second half, if it lies elsewhere; or NULL */
    int64_t exact; /* 1: activations have 16 bits: what 8 of them leave of a row is one more row of 8 bits */
};

/* Some rows of a packed weight as floats: what an embedding looks up. */
struct lookup {
    const uint8_t *weights;
    int64_t type, rows, cols;
    const int32_t *ids;
    float *out;
    int64_t n, out_stride;
    int64_t level;
    const struct partial *partial; /* as in a product: rows are read from a file as long as pieces are missing */
    const struct supply *supply;   /* not NULL: where they are read */
    int64_t file, offset;
};

#endif
