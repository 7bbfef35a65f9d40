/* How C code gets weights that come from disk while a pass runs. A runner takes the pieces of a pass by their
   ranks, in about that order; every piece that was given is released exactly once, by its last reader, and
   is not asked for again after that. */

#ifndef HETRUN_SUPPLY_H
#define HETRUN_SUPPLY_H

#include <stdint.h>

struct supply {
    void *ring;
    /* The memory that holds a piece, once it is there; NULL: it will not come (stopped, or reading failed).
       May be called by several threads, also for the same piece. */
    const uint8_t *(*wait)(void *ring, int64_t rank);
    /* The piece is not read any more: its memory may be used for another. */
    void (*release)(void *ring, int64_t rank);
    /* Bytes of a file, read now; 0, or -1 as when `wait` gives NULL. */
    int (*read)(void *ring, int64_t file, int64_t offset, int64_t bytes, void *out);
};

#endif
