/* How fast memory can be read: threads that begin together, and several ways to read a block.

   Which way is fastest depends on what the processor fetches ahead by itself, and differs between memory and a
   cache: vectors of 64 bytes one after the other may be slower than of 32, or than in two places at once. So
   to know the most that memory gives, all of them have to be tried. */

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

enum {
    KEPT = 4,        /* registers that collect what was read */
    PATIENCE = 4096  /* looks at the gate before the core is offered to others */
};

/* Changes whenever a function's arguments do: a library that was built from other sources is not used. */
int64_t hetrun_reading_version(void) { return 1; }

#if defined(__x86_64__)
#define FOR(FEATURES) __attribute__((target(FEATURES)))
#else
#define FOR(FEATURES)
#endif

/* Reads a block with vectors of WIDTH bytes, in PLACES that are equally far apart, STEP bytes in each in turn. */
#define WAY(NAME, FEATURES, WIDTH, PLACES, STEP)                                                      \
    FOR(FEATURES) static int64_t NAME(const char *block, int64_t bytes) {                             \
        typedef int64_t vector __attribute__((vector_size(WIDTH), may_alias));                        \
        vector seen[KEPT] = {{0}};                                                                    \
        int64_t part = bytes / (PLACES) / (STEP) * (STEP), found = 0;                                 \
        for (int64_t i = 0; i < part; i += STEP)                                                      \
            for (int p = 0; p < PLACES; p++)                                                          \
                for (int j = 0; j < STEP; j += WIDTH)                                                 \
                    seen[(p * (STEP / WIDTH) + j / WIDTH) % KEPT] |=                                  \
                        *(const vector *)(block + p * part + i + j);                                  \
        for (int k = 0; k < KEPT; k++)                                                                \
            for (int j = 0; j < WIDTH / 8; j++) found |= seen[k][j];                                  \
        return found;                                                                                 \
    }

WAY(plain, "sse2", 16, 1, 64)
WAY(plain_two, "sse2", 16, 2, 64)
WAY(plain_four, "sse2", 16, 4, 64)
#if defined(__x86_64__)
WAY(avx2, "avx2", 32, 1, 128)
WAY(avx2_two, "avx2", 32, 2, 128)
WAY(avx512_two, "avx512f", 64, 2, 64)
WAY(avx512_four, "avx512f", 64, 4, 128)
#endif

typedef int64_t (*way)(const char *, int64_t);

/* One of the ways that this processor has; NULL: there are fewer. */
static way nth(int64_t n) {
    static const way everywhere[] = {plain, plain_two, plain_four};
    if (n < 3) return everywhere[n];
#if defined(__x86_64__)
    static const way x86[] = {avx2, avx2_two, avx512_two, avx512_four};
    int64_t more = __builtin_cpu_supports("avx512f") ? 4 : __builtin_cpu_supports("avx2") ? 2 : 0;
    if (n - 3 < more) return x86[n - 3];
#endif
    return 0;
}

int64_t hetrun_reading_ways(void) {
    int64_t n = 0;
    while (nth(n)) n++;
    return n;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* No thread goes on until `all` have arrived. A thread that waits does not sleep: waking up takes longer than
   some of what is measured. */
static void together(_Atomic int64_t *arrived, int64_t all) {
    atomic_fetch_add(arrived, 1);
    for (int64_t looks = 1; atomic_load(arrived) < all; looks++)
        if (looks % PATIENCE == 0) sched_yield();
}

static _Atomic int64_t sink; /* what was read goes somewhere, so that it is read */

/* One thread's part of some rounds: in each it reads its block `times` times. When each began and ended, in
   seconds, goes to `begins` and `ends`. `arrived` is shared by the threads and 0 at first. */
void hetrun_read(int64_t n, const char *block, int64_t bytes, int64_t times, int64_t threads, int64_t rounds,
                 _Atomic int64_t *arrived, double *begins, double *ends) {
    way read = nth(n);
    for (int64_t round = 0; round < rounds; round++) {
        int64_t found = 0;
        together(arrived, threads * (round + 1));
        begins[round] = now();
        for (int64_t t = 0; t < times; t++) found |= read(block, bytes);
        ends[round] = now();
        atomic_fetch_or(&sink, found);
    }
}
