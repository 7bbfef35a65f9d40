/* The library's functions, and the same code compiled for each set of instructions (each_level.h). */

#include "recurrent.h"

#define BODY "recurrent_body.h"
#include "each_level.h"

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
    AT_LEVEL(c->level, convolve, c, ith, nth);
}

void hetrun_delta(void *node, int ith, int nth, void *delta) {
    const struct delta *d = delta;
    (void)node;
    AT_LEVEL(d->level, remember, d, ith, nth);
}
