/* Products by weights of which only a part is in memory: pieces of the others come from a supply (supply.h)
   while the pass runs. Each thread packs the next few groups of rows into memory of its own, where they stay
   in its cache, and multiplies by them there: the bits are those of a weight that is in memory. */

#ifndef HETRUN_PARTIAL_H
#define HETRUN_PARTIAL_H

#include "supply.h"

enum { UNIT_BYTES = 256 << 10 }; /* of packed weights that a thread works on at once, if a group is no larger */

/* Neighbouring groups of columns of `out`, and where their rows come from: of each half, if there is a gate. */
struct piece {
    int64_t first, groups;
    int64_t starts[2]; /* where the rows begin in the memory of the piece */
};

/* One weight. */
struct partial {
    const struct supply *supply;
    int64_t streamed; /* pieces that come from the supply now; 0: the whole weight is in memory */
    int64_t pieces;
    const struct piece *piece;
    const int32_t *rank; /* of each piece in the supply; -1: it is in memory */
    int32_t *taken;      /* units of each piece that were packed; zeros between two products */
};

#endif
