/* The k greatest of a row of logits, in one pass over the row and a look at the few places that matter.

   Of at least k groups, k have a maximum that is no less than the k-th greatest maximum, so the k-th greatest
   of all values is no less either. What is below need not be looked at, and hardly anything else is above. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum {
    BLOCK = 64,    /* values that share one maximum, in rows of up to BLOCK * BLOCKS; of longer rows more */
    BLOCKS = 4096,
    SPARE = 3,     /* groups of blocks for each value that is asked for: more find fewer values to look at */
    MOST = 128     /* values that may be asked for */
};

enum { NOT_A_NUMBER = -1 };

/* Changes whenever a function's arguments do: a library that was built from other sources is not used. */
int64_t hetrun_greatest_version(void) { return 1; }

static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* The greatest so far, in descending order. */
struct ranking {
    int64_t k, n;
    float values[MOST];
    int64_t places[MOST];
};

/* Takes one more if it is among them; it comes from behind those that are as great. Nothing is -infinity. */
static void offer(struct ranking *r, float value, int64_t place) {
    if (!(value > (r->n < r->k ? -INFINITY : r->values[r->k - 1]))) return;
    int64_t i = r->n < r->k ? r->n++ : r->k - 1;
    for (; i > 0 && r->values[i - 1] < value; i--) {
        r->values[i] = r->values[i - 1];
        r->places[i] = r->places[i - 1];
    }
    r->values[i] = value;
    r->places[i] = place;
}

/* The greatest of some values; `strange` becomes true if one is not a number. */
static float greatest(const float *x, int64_t n, int *strange) {
    float most = -INFINITY;
    int64_t i = 0;
#if defined(__x86_64__)
    __m128 top = _mm_set1_ps(-INFINITY), other = top, odd = _mm_setzero_ps();
    for (; i + 8 <= n; i += 8) {
        __m128 a = _mm_loadu_ps(x + i), b = _mm_loadu_ps(x + i + 4);
        top = _mm_max_ps(top, a);
        other = _mm_max_ps(other, b);
        odd = _mm_or_ps(odd, _mm_cmpunord_ps(a, b));
    }
    float tops[4];
    _mm_storeu_ps(tops, _mm_max_ps(top, other));
    for (int j = 0; j < 4; j++) most = tops[j] > most ? tops[j] : most;
    *strange |= _mm_movemask_ps(odd);
#endif
    for (; i < n; i++) {
        most = x[i] > most ? x[i] : most;
        *strange |= x[i] != x[i];
    }
    return most;
}

/* A bound that k of n maxima reach: the k-th greatest of groups of them. */
static float bound(const float *maxima, int64_t n, int64_t k) {
    struct ranking found = {.k = k};
    int64_t width = n / (SPARE * k) > 1 ? n / (SPARE * k) : 1;
    for (int64_t i = 0; i < n; i += width) {
        float most = -INFINITY;
        for (int64_t j = i; j < at_most(n, i + width); j++) most = maxima[j] > most ? maxima[j] : most;
        offer(&found, most, i);
    }
    return found.n == k ? found.values[k - 1] : -INFINITY;
}

/* Where the k greatest of n values are, equals by ascending place, and what they are; none at -infinity.
   Returns how many there are. */
int64_t hetrun_greatest(const float *x, int64_t n, int64_t k, int64_t *places, float *values) {
    float maxima[BLOCKS];
    struct ranking found = {.k = k};
    int64_t width = BLOCK * ((n + BLOCKS * BLOCK - 1) / (BLOCKS * BLOCK)), blocks = (n + width - 1) / width;
    int strange = 0;
    for (int64_t b = 0; b < blocks; b++)
        maxima[b] = greatest(x + b * width, at_most(width, n - b * width), &strange);
    if (strange) return NOT_A_NUMBER;
    float least = bound(maxima, blocks, k);
    for (int64_t b = 0; b < blocks; b++) {
        if (maxima[b] < least) continue;
        for (int64_t i = b * width; i < at_most(n, (b + 1) * width); i++)
            if (x[i] >= least) offer(&found, x[i], i);
    }
    memcpy(places, found.places, found.n * sizeof(*places));
    memcpy(values, found.values, found.n * sizeof(*values));
    return found.n;
}
