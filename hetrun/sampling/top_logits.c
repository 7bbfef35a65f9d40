/* The k greatest of a row of logits, and the token drawn from them: one pass over the row, and a look at the few
   places that matter.

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
    AHEAD = 512,   /* values that memory is asked for ahead: another core wrote half of them a moment ago */
    MOST = 128     /* values that may be asked for */
};

enum { NOTHING = -1 }; /* there is something in the row that others must explain */

/* Changes whenever a function's arguments do: a library that was built from other sources is not used. */
int64_t hetrun_greatest_version(void) { return 2; }

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
        __builtin_prefetch(x + i + AHEAD);
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

/* Where the k greatest of n values are, equals by ascending place, none at -infinity. 0: one is no number. */
static int find(struct ranking *found, const float *x, int64_t n) {
    float maxima[BLOCKS];
    int64_t width = BLOCK * ((n + BLOCKS * BLOCK - 1) / (BLOCKS * BLOCK)), blocks = (n + width - 1) / width;
    int strange = 0;
    for (int64_t b = 0; b < blocks; b++)
        maxima[b] = greatest(x + b * width, at_most(width, n - b * width), &strange);
    if (strange) return 0;
    float least = bound(maxima, blocks, found->k);
    for (int64_t b = 0; b < blocks; b++) {
        if (maxima[b] < least) continue;
        for (int64_t i = b * width; i < at_most(n, (b + 1) * width); i++)
            if (x[i] >= least) offer(found, x[i], i);
    }
    return 1;
}

/* The k greatest of n values and their places; returns how many there are. */
int64_t hetrun_greatest(const float *x, int64_t n, int64_t k, int64_t *places, float *values) {
    struct ranking found = {.k = k};
    if (!find(&found, x, n)) return NOTHING;
    memcpy(places, found.places, found.n * sizeof(*places));
    memcpy(values, found.values, found.n * sizeof(*values));
    return found.n;
}

/* What Usual.draw in fast_path.py takes of the k greatest, step by step: sums are added up in the same order, so it
   is the same token. */
int64_t hetrun_draw(const float *x, int64_t n, int64_t k, double p, double min_p, double temperature, double u) {
    struct ranking found = {.k = k};
    double ends[MOST], total = 0;
    if (!find(&found, x, n) || !found.n || found.values[0] == INFINITY) return NOTHING;
    double peak = found.values[0];
    int64_t kept = found.n, place = 0;
    if (p < 1) {
        for (int64_t i = 0; i < kept; i++) ends[i] = total += exp(found.values[i] - peak);
        double bar = p * total;
        for (kept = 1; ends[kept - 1] < bar;) kept++;
    }
    if (min_p > 0)
        for (double least = peak + log(min_p); found.values[kept - 1] < least;) kept--;
    total = 0;
    for (int64_t i = 0; i < kept; i++) ends[i] = total += exp((found.values[i] - peak) / temperature);
    double point = u * total;
    if (point >= total) /* by rounding: the last that has a width */
        while (ends[place] < total) place++;
    else
        while (ends[place] <= point) place++;
    return found.places[place];
}
