/* Which pages of mapped weights are in memory, within a limit.

   A kernel's own paging does this badly: at each fault it reads what lies around, or one page, waits for it, and
   does not know what will be needed next. Here a visit says which weights its products are about to read: the
   experts that rows have chosen, or one whole weight. What is not there is asked for at once, all of it, in
   portions that a disk takes side by side, while pages of what is needed least are given back; then each
   thread of ggml's waits for its share. It starts no threads. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "pages.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum { PORTION = 128 << 10 }; /* larger ones were slower, and smaller ones not faster */

int64_t hetrun_pages_layout(void) {
    return 1000000000 * sizeof(struct pool) + 1000000 * sizeof(struct unit) + 10000 * sizeof(struct range) +
           100 * sizeof(struct visit) + sizeof(struct bring);
}

/* --- the order in which units go */

static void unlink_unit(struct pool *p, int64_t i) {
    struct unit *u = &p->units[i];
    *(u->before < 0 ? &p->first : &p->units[u->before].behind) = u->behind;
    *(u->behind < 0 ? &p->last : &p->units[u->behind].before) = u->before;
    u->before = u->behind = -1;
}

/* What every pass needs goes first: of a circle that does not fit, the part that was just used is needed last.
   Of experts those go first that were not chosen for longest. */
static void link_unit(struct pool *p, int64_t i) {
    struct unit *u = &p->units[i];
    if (u->every_pass) {
        u->before = -1, u->behind = p->first;
        *(p->first < 0 ? &p->last : &p->units[p->first].before) = i;
        p->first = i;
    } else {
        u->behind = -1, u->before = p->last;
        *(p->last < 0 ? &p->first : &p->units[p->last].behind) = i;
        p->last = i;
    }
}

/* --- pages */

static uintptr_t page_of(const struct pool *p, uintptr_t address) { return address & ~(uintptr_t)(p->page - 1); }

static void give_back(struct pool *p, struct unit *u) {
    for (int64_t r = u->range; r < u->range + u->ranges; r++) {
        const struct range *a = &p->ranges[r];
        /* Neighbours keep the pages that they share. */
        uintptr_t from = page_of(p, a->address + p->page - 1), end = page_of(p, a->address + a->bytes);
        if (from >= end)
            continue;
        madvise((void *)from, end - from, MADV_DONTNEED);
#ifdef POSIX_FADV_DONTNEED
        posix_fadvise((int)a->file, a->offset + (int64_t)(from - a->address), end - from, POSIX_FADV_DONTNEED);
#endif
    }
    __atomic_store_n(&u->state, OUT, __ATOMIC_RELAXED);
}

/* Starts reading, and does not wait for it. */
static void ask_for(struct pool *p, struct unit *u) {
#ifdef POSIX_FADV_WILLNEED
    for (int64_t r = u->range; r < u->range + u->ranges; r++) {
        const struct range *a = &p->ranges[r];
        for (int64_t at = 0; at < a->bytes; at += PORTION) {
            int64_t n = a->bytes - at < PORTION ? a->bytes - at : PORTION;
            posix_fadvise((int)a->file, a->offset + at, n, POSIX_FADV_WILLNEED);
        }
    }
#endif
    __atomic_store_n(&u->state, ASKED, __ATOMIC_RELAXED);
}

/* Until it is there. A file that was cut fails here; then reading it calls the guard (sigbus.c). */
static void wait_for(const struct pool *p, const struct range *a) {
    uintptr_t from = page_of(p, a->address), end = a->address + a->bytes;
    if (!madvise((void *)from, end - from, MADV_POPULATE_READ))
        return;
    for (; from < end; from += p->page) /* a kernel before 5.14 */
        (void)*(const volatile uint8_t *)from;
}

/* Whether the system took pages away: a look at one of them, another one each time. */
static int still_there(const struct pool *p, const struct unit *u) {
    const struct range *a = &p->ranges[u->range + p->visits % u->ranges];
    uintptr_t page = page_of(p, a->address + (uintptr_t)(p->visits * 7919 * p->page % a->bytes));
    unsigned char there = 1;
    return mincore((void *)page, 1, &there) || (there & 1);
}

/* --- what a visit changes */

/* A visit may have been left half way, by a cancellation. */
static void settle(struct pool *p) {
    for (int64_t i = 0; i < p->n_going; i++)
        if (p->units[p->going[i]].state == GOING)
            give_back(p, &p->units[p->going[i]]);
    for (int64_t i = 0; i < p->n_coming; i++) {
        struct unit *u = &p->units[p->coming[i]];
        if (u->state == WANTED) {
            u->state = OUT;
            p->resident -= u->bytes;
            unlink_unit(p, p->coming[i]);
        }
    }
    p->n_going = p->n_coming = 0;
}

/* Name units that will go, none of this visit, until there is room for `bytes` more bytes. */
static void make_room(struct pool *p, int64_t bytes) {
    for (int64_t i = p->first; i >= 0 && p->resident + bytes > p->room;) {
        struct unit *u = &p->units[i];
        int64_t behind = u->behind;
        if (u->visit != p->visits) {
            unlink_unit(p, i);
            u->state = GOING;
            p->resident -= u->bytes;
            p->going[p->n_going++] = i;
        }
        i = behind;
    }
}

/* One unit of this visit; `now`: its products are next. */
static void want(struct pool *p, int64_t i, int now) {
    struct unit *u = &p->units[i];
    if (u->visit == p->visits)
        return;
    u->visit = p->visits;
    p->asked_bytes += now ? u->bytes : 0;
    if (u->state != OUT)
        unlink_unit(p, i);
    if (u->state == IN && now && !still_there(p, u)) {
        u->state = OUT;
        p->resident -= u->bytes;
    }
    link_unit(p, i);
    if (u->state == OUT) {
        u->state = WANTED;
        p->resident += u->bytes;
        p->read_bytes += u->bytes;
    }
    if (u->state != IN)
        p->coming[p->n_coming++] = i;
}

/* Which units the products behind this node read; one thread. A node of ggml's. */
void hetrun_pages_visit(void *node, int ith, int nth, void *data) {
    struct visit *v = data;
    struct pool *p = v->pool;
    (void)node, (void)nth;
    if (ith)
        return;
    settle(p);
    p->visits++;
    if (!v->ids) {
        want(p, v->unit, 1);
        /* Early: it is read while this one is multiplied by. */
        if (v->next >= 0 && p->units[v->next].bytes + p->units[v->unit].bytes <= p->room)
            want(p, v->next, 0);
    } else {
        for (int64_t row = 0; row < v->rows; row++)
            for (int64_t k = 0; k < v->used; k++) {
                int64_t expert = v->ids[row * v->stride + k];
                if (expert >= 0 && expert < v->units)
                    want(p, v->unit + expert, 1);
            }
    }
    make_room(p, 0);
}

/* All threads: what goes is given back and what comes is asked for, in turn, so that both together stay within
   the limit; then they wait for some ranges of each unit. Later nodes wait for the others. */
void hetrun_pages_bring(void *node, int ith, int nth, void *data) {
    const struct bring *b = data;
    struct pool *p = b->visit->pool;
    (void)node;
    if (!b->first)
        for (int64_t i = ith; i < p->n_going || i < p->n_coming; i += nth) {
            if (i < p->n_going && p->units[p->going[i]].state == GOING)
                give_back(p, &p->units[p->going[i]]);
            if (i < p->n_coming && p->units[p->coming[i]].state == WANTED)
                ask_for(p, &p->units[p->coming[i]]);
        }
    for (int64_t i = ith; i < p->n_coming; i += nth) {
        struct unit *u = &p->units[p->coming[i]];
        if (!b->visit->ids && p->coming[i] != b->visit->unit)
            continue; /* its turn comes */
        for (int64_t r = b->first; r < b->end && r < u->ranges; r++)
            wait_for(p, &p->ranges[u->range + r]);
        if (b->end >= u->ranges)
            __atomic_store_n(&u->state, IN, __ATOMIC_RELAXED);
    }
}

/* Between passes: give back what is over the limit. */
void hetrun_pages_trim(struct pool *p) {
    settle(p);
    p->visits++;
    make_room(p, 0);
    settle(p);
}
