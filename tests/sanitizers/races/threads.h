/* What the programs have in common: random numbers, a team of threads with a barrier between nodes, and checks. */

#ifndef HETRUN_RACES_THREADS_H
#define HETRUN_RACES_THREADS_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 4 };

#define CHECK(true, what)                                                              \
    do {                                                                               \
        if (!(true)) {                                                                 \
            fprintf(stderr, "%s:%d: ours is not right: %s\n", __FILE__, __LINE__, what); \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

/* A number from 0 to below `end`, of a generator of the thread's own. */
static inline uint32_t below(uint64_t *state, uint32_t end)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % end);
}

static inline double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef void node(void *tensor, int ith, int nth, void *data);

struct task {
    node *run;
    void *data;
};

/* Nodes of a graph, one after the other; no thread begins one before all are done with the one before. */
struct team {
    const struct task *tasks;
    int count, threads;
    pthread_barrier_t barrier;
};

struct member {
    struct team *team;
    int number;
};

static void *work(void *data)
{
    struct member *m = data;
    for (int i = 0; i < m->team->count; i++) {
        m->team->tasks[i].run(NULL, m->number, m->team->threads, m->team->tasks[i].data);
        pthread_barrier_wait(&m->team->barrier);
    }
    return NULL;
}

static inline void run_graph(const struct task *tasks, int count, int threads)
{
    struct team team = {.tasks = tasks, .count = count, .threads = threads};
    struct member members[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    pthread_barrier_init(&team.barrier, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) members[i] = (struct member){&team, i};
    for (int i = 1; i < threads; i++) CHECK(!pthread_create(&started[i], NULL, work, &members[i]), "no thread");
    work(&members[0]);
    for (int i = 1; i < threads; i++) pthread_join(started[i], NULL);
    pthread_barrier_destroy(&team.barrier);
}

/* Memory of exactly this size at the beginning of a line. */
static inline void *lines(size_t size)
{
    void *found = NULL;
    CHECK(!posix_memalign(&found, 64, size ? size : 1), "no memory");
    memset(found, 0, size);
    return found;
}

/* Calls `round` with ever new numbers for some seconds, and says how often. */
static inline int rounds(int argc, char **argv, void (*one)(uint64_t *state, const char *folder))
{
    double end = seconds_now() + (argc > 1 ? atof(argv[1]) : 1);
    uint64_t state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    const char *folder = argc > 3 ? argv[3] : "/tmp";
    long done = 0;
    do one(&state, folder), done++;
    while (seconds_now() < end);
    printf("rounds %ld\n", done);
    return 0;
}

#endif
