/* Reads any bytes of files by the whole pages around them, as direct reads ask for, and starts the threads that
   do. Included by ring_reader.c and expert_slots.c, before all else: it says which functions the system has. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "ring_reader.h"

#define LOAD(what) __atomic_load_n(&(what), __ATOMIC_ACQUIRE)
#define STORE(what, value) __atomic_store_n(&(what), value, __ATOMIC_RELEASE)

#define HUGE_PAGE (2 << 20)

/* Nanoseconds since some moment. */
static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Start threads, as many as are wanted, and count them; 0, or why one could not be. */
static int start_threads(pthread_t *threads, int64_t *started, int64_t wanted, void *(*work)(void *), void *data)
{
    sigset_t all, before;
    int error = 0;
    sigfillset(&all); /* signals are for threads that know what to do about them */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (!error && *started < wanted) {
        error = pthread_create(&threads[*started], NULL, work, data);
        *started += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* The files, and what was read of them. */
struct source {
    struct file *files;
    reading *read;
    int64_t bytes, reads;
    int stopped; /* no thread waits any more for what cannot be read now */
};

/* At least `needed` bytes from the beginning of a page of the file to that of a page of memory; `total`
   counts what comes. 0, or -1 with the fault. */
static int read_pages(struct source *source, int64_t number, int64_t offset, int64_t needed, uint8_t *to,
                      int64_t *total, struct fault *fault)
{
    const struct file *file = &source->files[number];
    int64_t size = (needed + PAGE - 1) & -PAGE, got = 0;
    while (got < needed) {
        int64_t from = file->direct ? got & -PAGE : got;
        ssize_t more = source->read((int)file->fd, to + from, size - from, offset + from);
        int error = more < 0 ? errno : 0;
        if (error == EINTR)
            continue;
        if (error == EAGAIN && !LOAD(source->stopped)) {
            struct timespec moment = {0, 1000000};
            nanosleep(&moment, NULL);
            continue;
        }
        if (more > 0) {
            *total += more;
            __atomic_fetch_add(&source->bytes, more, __ATOMIC_RELAXED);
            __atomic_fetch_add(&source->reads, 1, __ATOMIC_RELAXED);
        }
        if (error || from + more <= got) { /* nothing new: the file ends here */
            *fault = (struct fault){error ? error : ENDED, number, offset + got};
            return -1;
        }
        got = from + more;
    }
#if defined(POSIX_FADV_DONTNEED)
    if (!file->direct)
        posix_fadvise((int)file->fd, offset, size, POSIX_FADV_DONTNEED);
#endif
    return 0;
}

/* The fault is about bytes that are wanted, not about those before them on their page. */
static int not_before(int64_t offset, struct fault *fault)
{
    if (fault->offset < offset)
        fault->offset = offset;
    return -1;
}

/* A piece, into its slot. */
static int read_piece(struct source *source, const struct piece *piece, uint8_t *memory, int64_t *total,
                      struct fault *fault)
{
    for (int64_t i = 0; i < piece->count; i++) {
        const struct extent *e = &piece->extents[i];
        int64_t skip = e->offset % PAGE;
        uint8_t *pages = memory + e->at;
        if (read_pages(source, e->file, e->offset - skip, skip + e->bytes, pages, total, fault))
            return not_before(e->offset, fault);
        if (e->to != e->at + skip)
            memmove(memory + e->to, pages + skip, e->bytes);
    }
    return 0;
}

/* Any bytes of a file, by `size` bytes of pages. */
static int read_through(struct source *source, uint8_t *pages, int64_t size, const struct extent *wanted,
                        uint8_t *out, int64_t *total, struct fault *fault)
{
    int64_t offset = wanted->offset, left = wanted->bytes;
    while (left) {
        int64_t skip = offset % PAGE, some = left < size - skip ? left : size - skip;
        if (read_pages(source, wanted->file, offset - skip, skip + some, pages, total, fault))
            return not_before(offset, fault);
        memcpy(out, pages + skip, some);
        offset += some, out += some, left -= some;
    }
    return 0;
}
