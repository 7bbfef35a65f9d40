/* Products by the experts of a mixture: each takes the rows of activations that have chosen it. A row and one of
   its experts are a pair; pairs have numbers, row by row, and results lie in their order. */

#ifndef HETRUN_MIXTURE_H
#define HETRUN_MIXTURE_H

#include "sharing.h"

/* Who takes which rows: made of what the router chose, for all products of the mixture. */
struct routing {
    const int32_t *chosen;               /* the experts of each row */
    int64_t rows, used, stride, experts; /* `used` of each row; numbers of `chosen` from row to row */
    const uint8_t *left_out;             /* of each expert, whether others compute it; NULL: none */
    int32_t *first;                      /* of each expert, where its pairs begin, and where the last ones end */
    int32_t *row, *pair;                 /* rows and numbers of pairs by experts; those left out come last */
};

/* A product by the same matrices of all experts, one after the other in a weight. */
struct expert_products {
    struct product each; /* `counters`, and a row of each bias: as many for each expert */
    const struct routing *routing;
    int64_t bytes;   /* of an expert's matrix */
    int64_t by_pair; /* whether x has a row for each pair, or for each row */
    const struct expert_products *after; /* what follows it, by the same routing; NULL: something else */
};

INLINE int stays_here(const struct routing *r, int32_t expert) { return !r->left_out || !r->left_out[expert]; }

static void put_pair(const struct routing *r, int64_t row, int64_t k, int32_t at) {
    r->row[at] = (int32_t)row;
    r->pair[at] = (int32_t)(row * r->used + k);
}

/* By experts, and of one expert in the order of the rows. */
static void route(const struct routing *r) {
    int32_t *first = r->first, begin = 0;
    memset(first, 0, (size_t)(r->experts + 1) * sizeof(int32_t));
    for (int64_t row = 0; row < r->rows; row++)
        for (int64_t k = 0; k < r->used; k++) first[r->chosen[row * r->stride + k]]++;
    for (int64_t expert = 0; expert < r->experts; expert++) {
        int32_t count = stays_here(r, (int32_t)expert) ? first[expert] : 0;
        first[expert] = begin;
        begin += count;
    }
    first[r->experts] = begin;
    for (int64_t row = 0; row < r->rows; row++)
        for (int64_t k = 0; k < r->used; k++) {
            int32_t expert = r->chosen[row * r->stride + k];
            put_pair(r, row, k, stays_here(r, expert) ? first[expert]++ : begin++);
        }
    /* Each now begins where the one after it did. */
    for (int64_t expert = r->experts - 1; expert > 0; expert--) first[expert] = first[expert - 1];
    first[0] = 0;
}

/* The product of an expert's rows, but for its weights. */
static struct product product_of(const struct expert_products *m, int64_t expert) {
    const struct routing *r = m->routing;
    const int32_t first = r->first[expert];
    struct product p = m->each;
    p.n = r->first[expert + 1] - first;
    p.counters += expert * COUNTERS;
    p.from = (m->by_pair ? r->pair : r->row) + first;
    p.to = r->pair + first;
    if (p.bias) p.bias += expert * columns_out(&p);
    if (p.second_bias) p.second_bias += expert * columns_out(&p);
    return p;
}

/* The product by the next expert that has rows; returns whether there is one. */
static int next_expert(const struct expert_products *m, int64_t *expert, struct product *p) {
    const struct routing *r = m->routing;
    do {
        if (++*expert == r->experts) return 0;
    } while (r->first[*expert] == r->first[*expert + 1]);
    *p = product_of(m, *expert);
    p->weights += *expert * m->bytes;
    if (p->second) p->second += *expert * m->bytes;
    return 1;
}

/* What others compute is zero here. */
static void clear_left_out(const struct expert_products *m, int ith, int nth) {
    const struct routing *r = m->routing;
    const struct product *p = &m->each;
    int64_t first = r->first[r->experts], count = r->rows * r->used - first;
    for (int64_t i = first + count * ith / nth; i < first + count * (ith + 1) / nth; i++)
        memset(p->out + r->pair[i] * p->out_stride, 0, (size_t)columns_out(p) * sizeof(float));
}

#endif
