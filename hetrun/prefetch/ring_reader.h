/* What ring_reader.c and ring_buffer.py say to each other. All numbers are int64, so that both lay them out alike. */

#ifndef HETRUN_RINGS_H
#define HETRUN_RINGS_H

#include <stdint.h>
#include <sys/types.h>

#include "supply.h"

#define VERSION 2
#define PAGE 4096        /* of which positions, lengths and memory of direct reads are multiples */
#define BOUNCE (1 << 20) /* through which go longer reads of any position */
#define MOST_EXTENTS 4   /* of a piece */

struct file {
    int64_t fd;
    int64_t direct; /* else what was read is dropped from the system's cache */
};

/* Bytes of a file. The pages around them are read to `at` in the slot, and the first byte ends up at `to`:
   elsewhere only if it has to follow the last one that was read before. */
struct extent {
    int64_t file, offset, bytes, at, to;
};

struct piece {
    int64_t count;
    struct extent extents[MOST_EXTENTS];
};

typedef ssize_t reading(int fd, void *to, size_t bytes, off_t offset); /* as pread */

struct setup {
    int64_t slots, slot_bytes, threads;
    int64_t synchronous; /* nothing is read ahead: who waits for a piece reads it */
    int64_t files;
    const struct file *file;
    reading *read; /* NULL: pread */
};

enum { ENDED = 0, MISTAKE = -1 }; /* beside the numbers of the system's errors */

struct fault {
    int64_t error;
    int64_t file, offset; /* the byte that could not be read; of a mistake, the rank that was asked for */
};

struct counts {
    int64_t bytes, reads;            /* what the system gave, since the beginning */
    int64_t waited, stalled;         /* nanoseconds: of all threads together, and while any was waiting */
    int64_t lap_bytes;               /* read for what the lap has taken so far, whenever that was */
    int64_t lap_waited, lap_stalled; /* since the lap began */
    int64_t missing;                 /* pieces of the lap that were not released, rows that did not come */
};

#endif
