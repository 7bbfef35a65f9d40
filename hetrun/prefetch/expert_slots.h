/* What expert_slots.c and expert_cache.py say to each other. All numbers are of 8 bytes, so that both lay them out
   alike. */

#ifndef HETRUN_EXPERT_SLOTS_H
#define HETRUN_EXPERT_SLOTS_H

#include "expert_supply.h"
#include "ring_reader.h"

enum {
    EXPERT_SLOTS_VERSION = 1,
    RULES = 5,     /* that are tried, by which of the experts stay that are worth most */
    MOST_KINDS = 8
};

/* Where an expert lies in files, and in the buffer that it is read to. */
struct record {
    int64_t kind;  /* records of one kind are equally large once they are packed */
    int64_t count; /* of its extents: neighbours in a file are read together */
    struct extent extents[MATRICES];
    int64_t starts[MATRICES]; /* where the matrices begin in the buffer */
};

/* The slots of records of one kind: `most` have addresses, the first `count` of them memory. */
struct kind {
    uint8_t *memory;
    int64_t bytes; /* of a slot */
    int64_t count, most;
};

struct cache_setup {
    int64_t records, mixtures, kinds, buffers, buffer_bytes, threads, files, trace;
    const struct record *record;
    const int64_t *first; /* of each mixture, its first record */
    const struct kind *kind;
    const struct file *file;
    double half_life[RULES]; /* tokens after which a choice counts for half; 0: only the last one counts (LRU) */
    int64_t rule;            /* that decides at first */
    reading *read;    /* NULL: pread */
};

struct cache_counts {
    int64_t bytes, reads;          /* that the system gave */
    int64_t wanted, missed;        /* experts that passes asked for, and those that were in no slot */
    int64_t missed_bytes;          /* stored bytes of these */
    int64_t waited;                /* nanoseconds in which nothing could be computed */
    int64_t busy;                  /* nanoseconds in which something was read */
    int64_t hinted, hits_of_hints; /* experts that were read by hints, and those of them that were wanted then */
    int64_t wasted_bytes;          /* of the others */
    int64_t traced;                /* entries of the trace that were ever written */
};

#endif
