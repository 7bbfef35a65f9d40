/* What pages.c works on; Python makes it (paging.py). Addresses and numbers of files are the process's own. */

#ifndef HETRUN_PAGES_H
#define HETRUN_PAGES_H

#include <stdint.h>

/* Neighbouring bytes of a file that are read by one product: a matrix. */
struct range {
    uintptr_t address;
    int64_t bytes, file, offset; /* where the same bytes lie in a file */
};

enum { OUT, WANTED, ASKED, IN, GOING };

/* What comes and goes together: the matrices of an expert, or one weight. */
struct unit {
    int64_t range, ranges;  /* the number of its first one, and how many it has */
    int64_t bytes;          /* of all its pages */
    int64_t every_pass;     /* whether every pass reads it */
    int64_t before, behind; /* its neighbours in the order in which units go; -1: none */
    int64_t state;
    int64_t visit; /* the last one that wanted it */
};

struct pool {
    struct unit *units;
    struct range *ranges;
    int64_t page;           /* bytes of one of the system's */
    int64_t room, resident; /* bytes that may be in memory, and those that are or come */
    int64_t first, last;    /* of the units that are in memory, in the order in which they go */
    int64_t *coming, *going; /* of the visit that is under way; room for every unit */
    int64_t n_coming, n_going;
    int64_t visits;
    int64_t asked_bytes, read_bytes; /* what products read so far, and what of it came from the file */
};

/* What the products behind a node read. */
struct visit {
    struct pool *pool;
    const int32_t *ids;         /* the experts that rows have chosen; NULL: all of one unit */
    int64_t rows, used, stride; /* of ids: numbers in each row, and from row to row */
    int64_t unit, units;        /* the first one, and how many there are to choose from */
    int64_t next;               /* a unit that is read behind this one; -1: none */
};

/* A node that waits for ranges [first, end) of each unit of a visit. */
struct bring {
    const struct visit *visit;
    int64_t first, end;
};

#endif
