/* recurrent.c: convolutions and delta rules of several sequences by several threads. */

#include "threads.h"
#include "recurrent.h"

int hetrun_delta_level(void);
int64_t hetrun_delta_scratch(int64_t row);
void hetrun_convolve(void *node, int ith, int nth, void *convolution);
void hetrun_delta(void *node, int ith, int nth, void *delta);

enum { SEQUENCES = 2, MOST_TOKENS = 40, LANES = 16 };

static float *floats(uint64_t *state, int64_t n)
{
    float *found = lines((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) found[i] = (float)below(state, 2001) / 1000 - 1;
    return found;
}

/* What a node writes: results, and states that begin as zeros. */
struct result {
    float *out, *states;
    size_t out_bytes, state_bytes;
};

static struct result result_of(int64_t out, int64_t states)
{
    return (struct result){lines((size_t)out * 4), lines((size_t)states * 4), (size_t)out * 4, (size_t)states * 4};
}

static void compare(struct result found, struct result right)
{
    CHECK(!memcmp(found.out, right.out, right.out_bytes), "threads make other bits than one");
    CHECK(!memcmp(found.states, right.states, right.state_bytes), "threads leave other states than one");
    free(found.out), free(found.states), free(right.out), free(right.states);
}

static void convolve(uint64_t *state, const struct pass *pass, int64_t tokens, int64_t level, int threads)
{
    const int64_t taps = 2 + below(state, 5), width = 1 + below(state, 300), stride = (taps - 1) * width;
    float *x = floats(state, tokens * width), *kernel = floats(state, width * taps), *bias = floats(state, width);
    struct result right = result_of(tokens * width, SEQUENCES * stride);
    struct result found = result_of(tokens * width, SEQUENCES * stride);
    struct convolution c = {.pass = pass, .states = right.states, .stride = stride, .x = x, .out = right.out,
                            .kernel = kernel, .bias = below(state, 2) ? bias : NULL, .x_stride = width,
                            .out_stride = width, .width = width, .taps = taps, .silu = below(state, 2), .level = level};
    struct task tasks[] = {{hetrun_convolve, &c}};
    run_graph(tasks, 1, 1);
    c.out = found.out, c.states = found.states;
    run_graph(tasks, 1, threads);
    compare(found, right);
    free(x), free(kernel), free(bias);
}

static void remember(uint64_t *state, const struct pass *pass, int64_t tokens, int64_t level, int threads)
{
    const int64_t k_heads = 1 + below(state, 2), v_heads = k_heads * (1 + below(state, 2)), k = 1 + below(state, 40);
    const int64_t v = 1 + below(state, 40), row = (k + LANES - 1) / LANES * LANES, stride = v_heads * v * row;
    const int64_t width = 2 * k_heads * k + v_heads * v, out = tokens * v_heads * v;
    float *x = floats(state, tokens * width), *decay = floats(state, tokens * v_heads);
    float *rate = floats(state, tokens * v_heads), *decays = floats(state, v_heads), *biases = floats(state, v_heads);
    int32_t *counters = lines(2 * 4);
    struct result right = result_of(out, SEQUENCES * stride), found = result_of(out, SEQUENCES * stride);
    struct delta d = {.pass = pass, .states = right.states, .stride = stride, .x = x, .decay = decay, .rate = rate,
                      .decays = decays, .biases = biases, .out = right.out, .x_stride = width,
                      .decay_stride = v_heads, .rate_stride = v_heads, .out_stride = v_heads * v,
                      .k_heads = k_heads, .v_heads = v_heads, .k_dim = k, .v_dim = v, .k_at = k_heads * k,
                      .v_at = 2 * k_heads * k, .row = row, .tiled = below(state, 2), .log = 1, .level = level,
                      .scratch_size = hetrun_delta_scratch(row), .slots = threads, .counters = counters, .eps = 1e-6};
    d.scratch = lines((size_t)(d.scratch_size * threads) * 4);
    struct task tasks[] = {{hetrun_delta, &d}};
    run_graph(tasks, 1, 1);
    d.out = found.out, d.states = found.states;
    run_graph(tasks, 1, threads);
    CHECK(!counters[0] && !counters[1], "counters are not ready for the next layer");
    compare(found, right);
    free(x), free(decay), free(rate), free(decays), free(biases), free(counters), free(d.scratch);
}

static void one(uint64_t *state, const char *folder)
{
    struct sequence sequences[SEQUENCES];
    int64_t write[SEQUENCES * MOST_TOKENS], tokens = 0;
    (void)folder;
    for (int64_t i = 0; i < SEQUENCES; i++) {
        int64_t end = tokens + 1 + below(state, MOST_TOKENS);
        sequences[i] = (struct sequence){tokens, end, below(state, 2) ? i : NO_SLOT};
        for (; tokens < end; tokens++) write[tokens] = tokens + 1 == end ? i : NO_SLOT;
    }
    struct pass pass = {SEQUENCES, sequences, write};
    for (int64_t level = 0; level <= hetrun_delta_level(); level++) {
        int threads = 1 + (int)below(state, MOST_THREADS);
        convolve(state, &pass, tokens, level, threads);
        remember(state, &pass, tokens, level, threads);
    }
}

int main(int argc, char **argv) { return rounds(argc, argv, one); }
