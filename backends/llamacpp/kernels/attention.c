/* The library's functions, and the same code compiled for each set of instructions (each_level.h). */

#include "attention.h"

#define BODY "attention_body.h"
#include "each_level.h"

/* Changes whenever the structures do: a library that was built from other sources is not used. */
int64_t hetrun_kernels_layout(void) {
    return 1000000 * sizeof(struct sequence) + 1000 * sizeof(struct pass) + sizeof(struct layer);
}

/* The best instructions that this CPU and its system have. */
int hetrun_kernels_level(void) { return best_level(); }

/* Cut the work of a pass. Returns how many partials there will be, of each query head. */
int64_t hetrun_attention_plan(struct pass *p) {
    p->chunks = p->partials = 0;
    for (int64_t i = 0; i < p->n; i++) {
        struct sequence *s = &p->sequences[i];
        s->chunks = chunk_at(s->position + s->length - 1, p->window) - chunk_at(s->position, p->window) + 1;
        s->chunks_before = p->chunks;
        s->partials_before = p->partials;
        p->chunks += s->chunks;
        p->partials += s->chunks * s->rows;
    }
    return p->partials;
}

/* Floats of scratch memory that a thread needs for sequences of up to `rows` query rows. */
int64_t hetrun_attention_scratch(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim) {
    int64_t queries = at_least(rows * (heads / kv_heads), AT_ONCE);
    return queries * (2 * padded(head_dim) + BLOCK) + 4 * padded(queries) + 2 * BATCH * padded(head_dim);
}

/* One thread's share of a layer: a function as ggml's custom nodes call it. */
void hetrun_attend(void *node, int ith, int nth, void *layer) {
    const struct layer *a = layer;
    (void)node;
    AT_LEVEL(a->level, attend, a, ith, nth);
}
