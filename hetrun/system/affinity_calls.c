/* Puts the threads of a team on CPUs: each thread of it calls hetrun_sit once. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define VERSION 1

struct seats {
    int (*number)(void);  /* which thread of its team the caller is, from 0 */
    const uint64_t *masks; /* of CPUs, one behind the other */
    int64_t words;         /* in each */
    int64_t count;         /* masks: more threads begin again at the first */
    int64_t refused;       /* how many threads the system did not put where they should be */
};

int64_t hetrun_seats_version(void)
{
    return VERSION;
}

/* The calling thread only: it takes the mask of its number. */
void hetrun_sit(void *data)
{
    struct seats *seats = data;
#if defined(__linux__) && defined(SYS_sched_setaffinity)
    int64_t at = seats->number ? seats->number() % seats->count : 0;
    if (!syscall(SYS_sched_setaffinity, 0, seats->words * sizeof(uint64_t), seats->masks + at * seats->words))
        return;
#endif
    __atomic_fetch_add(&seats->refused, 1, __ATOMIC_RELAXED);
}
