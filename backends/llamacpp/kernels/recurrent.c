/* The library's functions, and the same code compiled for each set of instructions (recurrent_body.h). */

#include "recurrent.h"

#define NAME(x) x##_portable
#include "lanes_portable.h"
#include "vectors.h"
#include "recurrent_body.h"
#undef NAME

#if defined(__x86_64__)
BEGIN_TARGET("avx2,fma,f16c")
#define NAME(x) x##_avx2
#include "lanes_avx2.h"
#include "vectors.h"
#include "recurrent_body.h"
#undef NAME
END_TARGET

BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define NAME(x) x##_avx512
#include "lanes_avx512.h"
#include "vectors.h"
#include "recurrent_body.h"
#undef NAME
END_TARGET
#endif

/* Changes whenever the structures do: a library that was built from other sources is not used. */
int64_t hetrun_delta_layout(void) {
    return 1000000 * sizeof(struct sequence) + 1000 * sizeof(struct convolution) + sizeof(struct delta);
}

/* The best instructions that this CPU and its system have. */
int hetrun_delta_level(void) { return best_level(); }

/* Floats of scratch memory that a thread needs for rows of that many floats. */
int64_t hetrun_delta_scratch(int64_t row) { return scratch_floats(row); }

/* One thread's share of a layer: functions as ggml's custom nodes call them. */
void hetrun_convolve(void *node, int ith, int nth, void *convolution) {
    const struct convolution *c = convolution;
    (void)node;
#if defined(__x86_64__)
    if (c->level == LEVEL_AVX512) {
        convolve_avx512(c, ith, nth);
        return;
    }
    if (c->level == LEVEL_AVX2) {
        convolve_avx2(c, ith, nth);
        return;
    }
#endif
    convolve_portable(c, ith, nth);
}

void hetrun_delta(void *node, int ith, int nth, void *delta) {
    const struct delta *d = delta;
    (void)node;
#if defined(__x86_64__)
    if (d->level == LEVEL_AVX512) {
        remember_avx512(d, ith, nth);
        return;
    }
    if (d->level == LEVEL_AVX2) {
        remember_avx2(d, ith, nth);
        return;
    }
#endif
    remember_portable(d, ith, nth);
}
