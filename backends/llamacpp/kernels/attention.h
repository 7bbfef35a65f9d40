/* Attention of a few query rows of each of several sequences, in one call for all of them.

   Work is cut by the positions of keys in their texts, never by the number of threads: softmax takes BLOCK
   keys at a time, and what came of a chunk of one or more blocks is put aside (a "partial"). Who finishes
   the last chunk of a head adds its partials up, in their order. So a row's result is the same bits
   whatever other rows, sequences and threads there are. */

#ifndef HETRUN_ATTENTION_H
#define HETRUN_ATTENTION_H

#include "vector_levels.h"

enum {
    TILE = 16,      /* keys that are made floats at once; rows of floats are padded to a multiple of it */
    BATCH = 32,     /* the same where keys are turned (see `turns`) */
    BLOCK = 128,    /* keys of one step of the softmax */
    FINE = 4096,    /* up to this position a chunk is one block, so that short texts keep all threads busy, */
    COARSE = 1024,  /* and after it this many keys, so that long texts have few partials */
    AT_ONCE = 64    /* query rows, of all heads of a unit of work, that scratch memory is meant for */
};

enum { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q8_0 = 8 }; /* as ggml numbers them */

/* One sequence of a pass. Python writes the first five before a run, hetrun_attention_plan the others. */
struct sequence {
    int64_t first;    /* the table's row of the first key that it sees */
    int64_t length;   /* how many keys */
    int64_t position; /* of the first key in the text */
    int64_t row;      /* its first query row */
    int64_t rows;
    int64_t chunks;
    int64_t chunks_before;   /* of the sequences before it */
    int64_t partials_before; /* rows times chunks of the sequences before it */
};

/* What layers that see equally far have in common in one pass. */
struct pass {
    int64_t n;
    struct sequence *sequences;
    const int64_t *ends; /* for each query row: how many of its sequence's keys lie before its end */
    int64_t window;      /* how many keys before its end each row sees; 0: all */
    int64_t chunks;      /* of all sequences; these two: by hetrun_attention_plan */
    int64_t partials;    /* rows times chunks, of all sequences */
    float *memory;       /* for the partials */
    int32_t *counters;   /* the next unit of work, threads that are done, then of each head its chunks done */
};

/* The attention of one layer. */
struct layer {
    const struct pass *pass;
    const uint8_t *keys, *values;
    int64_t key_stride, value_stride; /* bytes from row to row */
    int64_t head_bytes;               /* from head to head */
    int64_t type, head_dim, heads, kv_heads;
    const float *queries;
    float *out;
    int64_t query_stride, out_stride; /* floats from row to row */
    float *scratch;
    int64_t scratch_size; /* floats of each thread */
    int64_t slots;        /* threads that there is scratch memory for; more have nothing to do */
    int64_t level;
    double scale, softcap;
    const float *sinks; /* a score of each head that takes its share of the softmax; NULL: none */
};

/* How many parts of a size, or less, there are in all. */
static inline int64_t in_parts(int64_t all, int64_t size) { return (all + size - 1) / size; }

static inline int64_t padded(int64_t head_dim) { return (head_dim + TILE - 1) / TILE * TILE; }

/* Floats of one partial: the maximum, the sum, then what the values add up to. */
static inline int64_t partial_size(int64_t head_dim) { return TILE + padded(head_dim); }

/* A window is short, wherever it lies. */
static inline int64_t fine(int64_t window) { return window ? INT64_MAX / 2 : FINE; }

/* The first position of a chunk. */
static inline int64_t chunk_begin(int64_t chunk, int64_t window) {
    int64_t small = fine(window) / BLOCK;
    return chunk <= small ? chunk * BLOCK : fine(window) + (chunk - small) * COARSE;
}

/* The chunk that a position lies in. */
static inline int64_t chunk_at(int64_t position, int64_t window) {
    int64_t small = fine(window) / BLOCK;
    return position < fine(window) ? position / BLOCK : small + (position - fine(window)) / COARSE;
}

/* The position of the first key of a sequence's chunk; behind the last one, its end. */
static inline int64_t first_of(const struct sequence *s, int64_t chunk, int64_t window) {
    int64_t begin = chunk_begin(chunk_at(s->position, window) + chunk, window);
    return at_least(s->position, at_most(begin, s->position + s->length));
}

#endif
