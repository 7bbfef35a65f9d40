/* attention.c: the attention of several layers after one another by several threads, which share chunks of keys. */

#include "threads.h"
#include "attention.h"

int hetrun_kernels_level(void);
int64_t hetrun_attention_plan(struct pass *p);
int64_t hetrun_attention_scratch(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim);
void hetrun_attend(void *node, int ith, int nth, void *layer);

enum { MOST_SEQUENCES = 3, LAYERS = 3 };

static float *floats(uint64_t *state, int64_t n)
{
    float *found = lines((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) found[i] = (float)below(state, 2001) / 1000 - 1;
    return found;
}

/* Sequences one after the other in the table of keys. Returns how many keys there are. */
static int64_t fill(uint64_t *state, struct pass *p, int64_t *ends, int64_t *rows)
{
    int64_t keys = 0;
    *rows = 0;
    for (int64_t i = 0; i < p->n; i++) {
        int64_t mine = 1 + below(state, 8), length = mine + below(state, 400);
        p->sequences[i] = (struct sequence){.first = keys, .length = length, .row = *rows, .rows = mine};
        for (int64_t r = 0; r < mine; r++) ends[*rows + r] = length - mine + r + 1;
        keys += length, *rows += mine;
    }
    return keys;
}

static void one(uint64_t *state, const char *folder)
{
    const int64_t kv_heads = 1 + below(state, 2), heads = kv_heads * (1 + below(state, 4)), dim = 1 + below(state, 80);
    const int64_t threads = 1 + below(state, MOST_THREADS), slots = 1 + below(state, (uint32_t)threads);
    struct sequence sequences[MOST_SEQUENCES];
    int64_t ends[MOST_SEQUENCES * 8], rows;
    struct pass pass = {.n = 1 + below(state, MOST_SEQUENCES), .sequences = sequences, .ends = ends,
                        .window = below(state, 2) ? 0 : 1 + below(state, 200)};
    int64_t keys = fill(state, &pass, ends, &rows), width = kv_heads * dim;
    pass.counters = lines((size_t)(2 + pass.n * kv_heads) * 4);
    pass.memory = lines((size_t)(hetrun_attention_plan(&pass) * heads * partial_size(dim)) * 4);
    float *k = floats(state, keys * width), *v = floats(state, keys * width), *q = floats(state, rows * heads * dim);
    float *out[LAYERS], *right = lines((size_t)(rows * heads * dim) * 4);
    int64_t size = hetrun_attention_scratch(8, heads, kv_heads, dim);
    struct layer layer = {.pass = &pass, .keys = (uint8_t *)k, .values = (uint8_t *)v, .key_stride = width * 4,
                          .value_stride = width * 4, .head_bytes = dim * 4, .type = TYPE_F32, .head_dim = dim,
                          .heads = heads, .kv_heads = kv_heads, .queries = q, .query_stride = heads * dim,
                          .out_stride = heads * dim, .scratch = lines((size_t)(size * slots) * 4),
                          .scratch_size = size, .slots = slots, .scale = 0.3, .softcap = below(state, 2) ? 0 : 30};
    for (layer.level = 0; layer.level <= hetrun_kernels_level(); layer.level++) {
        struct layer layers[LAYERS];
        struct task tasks[LAYERS];
        layer.out = right;
        hetrun_attend(NULL, 0, 1, &layer);
        for (int i = 0; i < LAYERS; i++) {
            layers[i] = layer;
            layers[i].out = out[i] = lines((size_t)(rows * heads * dim) * 4);
            tasks[i] = (struct task){hetrun_attend, &layers[i]};
        }
        run_graph(tasks, LAYERS, (int)threads);
        for (int i = 0; i < LAYERS; i++) {
            CHECK(!memcmp(out[i], right, (size_t)(rows * heads * dim) * 4), "threads make other bits than one");
            free(out[i]);
        }
    }
    (void)folder;
    free(pass.counters), free(pass.memory), free(k), free(v), free(q), free(right), free(layer.scratch);
}

int main(int argc, char **argv) { return rounds(argc, argv, one); }
