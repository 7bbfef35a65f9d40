/* products.c: nodes of a graph by several threads, that is products with all that is fused with them, of whole
   weights and of such whose pieces are missing, by experts, and rows as floats. All threads make the bits of one. */

#include "threads.h"
#include "products.h"
#define PAUSE() ((void)0)
#include "mixture.h"

int hetrun_products_runs(int level);
int64_t hetrun_products_packed(int64_t type, int64_t rows, int64_t cols);
void hetrun_products_pack(int64_t type, int64_t rows, int64_t cols, const uint8_t *stored, uint8_t *packed,
                          int64_t level);
int64_t hetrun_products_scratch(int64_t type, int64_t n, int64_t cols);
int64_t hetrun_products_unit(int64_t type, int64_t cols, int64_t halves);
int64_t hetrun_products_shared(int64_t type, int64_t n, int64_t cols);
void hetrun_product(void *node, int ith, int nth, void *product);
void hetrun_lookup(void *node, int ith, int nth, void *lookup);
void hetrun_route(void *node, int ith, int nth, void *routing);
void hetrun_expert_products(void *node, int ith, int nth, void *products);

enum { MOST_PIECES = 16, EXPERTS = 5, IDS = 6 };

static const int64_t types[] = {TYPE_F16, TYPE_BF16, TYPE_Q4_0, TYPE_Q4_1, TYPE_Q5_0, TYPE_Q5_1, TYPE_Q8_0, TYPE_Q2_K,
                                TYPE_Q3_K, TYPE_Q4_K, TYPE_Q5_K, TYPE_Q6_K, TYPE_IQ4_NL, TYPE_IQ4_XS, TYPE_MXFP4, TYPE_Q2_0};

/* Small numbers of either sign. */
static float *floats(uint64_t *state, int64_t n)
{
    float *found = lines((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) found[i] = (float)below(state, 2001) / 1000 - 1;
    return found;
}

/* A weight whose scales are halves of a usual size. */
struct weight {
    int64_t type, rows, cols;
    uint8_t *stored, *packed;
};

static struct weight weight_of(uint64_t *state, int64_t type, int64_t rows, int64_t cols, int64_t level)
{
    int64_t bytes = rows * stored_row_bytes(type, cols);
    struct weight w = {type, rows, cols, lines((size_t)bytes), lines((size_t)hetrun_products_packed(type, rows, cols))};
    for (int64_t i = 0; i < bytes; i++) w.stored[i] = (uint8_t)below(state, 0x3c); /* no exponent is a large one */
    hetrun_products_pack(type, rows, cols, w.stored, w.packed, level);
    return w;
}

/* A supply whose pieces lie in memory. */
static const uint8_t *wait_for(void *ring, int64_t rank) { return ((const uint8_t **)ring)[rank]; }
static int32_t released[MOST_PIECES];
static void release(void *ring, int64_t rank)
{
    (void)ring;
    __atomic_add_fetch(&released[rank], 1, __ATOMIC_RELAXED);
}

static void whole_and_partial(uint64_t *state, int64_t type, int64_t level)
{
    const int64_t step = form_of(type).block * form_of(type).blocks, cols = step * (1 + below(state, 3));
    const int64_t n = below(state, 5) ? 1 + below(state, 9) : 40 + below(state, 90), groups = 1 + below(state, 6);
    const int64_t rows = groups * ROWS - below(state, 8), threads = 1 + below(state, MOST_THREADS);
    struct weight w = weight_of(state, type, rows, cols, level);
    float *x = floats(state, n * cols), *out = lines((size_t)(n * rows) * 4), *right = lines((size_t)(n * rows) * 4);
    float *bias = floats(state, rows), *gain = floats(state, cols);
    int64_t size = hetrun_products_scratch(type, 2 * n, cols) + hetrun_products_unit(type, cols, 1);
    int32_t *counters = lines(COUNTERS * 4), taken[MOST_PIECES] = {0}, rank[MOST_PIECES];
    struct piece piece[MOST_PIECES] = {{0}};
    const uint8_t *memory[MOST_PIECES];
    struct product p = {.weights = w.packed, .type = type, .rows = rows, .cols = cols, .x = x, .out = right, .n = n,
                        .x_stride = cols, .out_stride = rows, .bias = bias, .gain = below(state, 2) ? gain : NULL,
                        .eps = 1e-5, .scratch = lines((size_t)(size * threads)), .scratch_size = size,
                        .slots = threads, .counters = counters, .level = level, .exact = !below(state, 4)};
    p.shared = lines((size_t)hetrun_products_shared(type, 2 * n, cols));
    hetrun_product(NULL, 0, 1, &p);
    p.out = out;
    struct supply supply = {memory, wait_for, release, NULL};
    struct partial partial = {&supply, 0, groups, piece, rank, taken};
    for (int64_t i = 0; i < groups; i++) {
        piece[i] = (struct piece){i, 1, {0, 0}};
        rank[i] = below(state, 3) ? (int32_t)partial.streamed++ : -1;
        if (rank[i] >= 0) memory[rank[i]] = w.stored + i * ROWS * stored_row_bytes(type, cols);
    }
    memset(released, 0, sizeof(released));
    struct product by_pieces = p;
    by_pieces.partial = &partial;
    p.next = &by_pieces;
    struct task tasks[] = {{hetrun_product, &p}, {hetrun_product, &by_pieces}, {hetrun_product, &p}};
    run_graph(tasks, 3, (int)threads);
    CHECK(!memcmp(out, right, (size_t)(n * rows) * 4), "threads make other bits than one");
    memset(out, 0, (size_t)(n * rows) * 4);
    run_graph(tasks + 1, 1, (int)threads);
    CHECK(!memcmp(out, right, (size_t)(n * rows) * 4), "pieces make other bits than the whole weight");
    for (int64_t i = 0; i < partial.streamed; i++) CHECK(released[i] == 2, "a piece was not released once each time");
    CHECK(!counters[0] && !counters[1], "counters are not ready for the next call");
    free(w.stored), free(w.packed), free(x), free(out), free(right), free(bias), free(gain), free(counters);
    free(p.scratch), free(p.shared);
}

static void experts(uint64_t *state, int64_t type, int64_t level)
{
    const int64_t step = form_of(type).block * form_of(type).blocks, cols = step * (1 + below(state, 2));
    const int64_t n = 1 + below(state, 20), used = 1 + below(state, 3), width = ROWS * (1 + below(state, 3));
    const int64_t threads = 1 + below(state, MOST_THREADS), pairs = n * used;
    struct weight w = weight_of(state, type, width * EXPERTS, cols, level);
    int32_t *chosen = lines((size_t)pairs * 4), *first = lines((EXPERTS + 1) * 4), *row = lines((size_t)pairs * 4);
    int32_t *pair = lines((size_t)pairs * 4), *counters = lines(EXPERTS * COUNTERS * 4);
    uint8_t left_out[EXPERTS] = {0};
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0, begin = below(state, EXPERTS); k < used; k++)
            chosen[i * used + k] = (int32_t)((begin + k) % EXPERTS);
    left_out[below(state, EXPERTS)] = 1;
    struct routing routing = {chosen, n, used, used, EXPERTS, below(state, 2) ? left_out : NULL, first, row, pair};
    float *x = floats(state, n * cols), *right = lines((size_t)(pairs * width) * 4);
    float *out = lines((size_t)(pairs * width) * 4);
    int64_t size = hetrun_products_scratch(type, n, cols);
    struct expert_products each = {
        .each = {.weights = w.packed, .type = type, .rows = width, .cols = cols, .x = x, .out = right, .n = n,
                 .x_stride = cols, .out_stride = width, .scratch = lines((size_t)(size * threads)),
                 .scratch_size = size, .slots = threads, .counters = counters, .level = level},
        .routing = &routing, .bytes = hetrun_products_packed(type, width, cols)};
    struct task tasks[] = {{hetrun_route, &routing}, {hetrun_expert_products, &each}};
    run_graph(tasks, 2, 1);
    each.each.out = out;
    run_graph(tasks, 2, (int)threads);
    CHECK(!memcmp(out, right, (size_t)(pairs * width) * 4), "threads make other bits than one");
    int32_t ids[IDS];
    float *looked = lines((size_t)(IDS * cols) * 4), *once = lines((size_t)(IDS * cols) * 4);
    for (int i = 0; i < IDS; i++) ids[i] = (int32_t)below(state, (uint32_t)w.rows);
    struct lookup l = {.weights = w.packed, .type = type, .rows = w.rows, .cols = cols, .ids = ids, .out = once,
                       .n = IDS, .out_stride = cols};
    hetrun_lookup(NULL, 0, 1, &l);
    l.out = looked;
    struct task rows[] = {{hetrun_lookup, &l}};
    run_graph(rows, 1, (int)threads);
    CHECK(!memcmp(looked, once, (size_t)(IDS * cols) * 4), "threads make other bits than one");
    free(w.stored), free(w.packed), free(chosen), free(first), free(row), free(pair), free(counters), free(x);
    free(right), free(out), free(each.each.scratch), free(looked), free(once);
}

static void one(uint64_t *state, const char *folder)
{
    int64_t type = types[below(state, sizeof(types) / sizeof(*types))];
    (void)folder, (void)fetch_beginning, (void)work_of, (void)take_soon, (void)next_unit, (void)route;
    (void)next_expert, (void)clear_left_out, (void)shared_rows, (void)own_rows_bytes;
    for (int level = LEVEL_DOTPROD; level >= 0; level--)
        if (hetrun_products_runs(level)) {
            whole_and_partial(state, type, level);
            experts(state, type, level);
        }
}

int main(int argc, char **argv) { return rounds(argc, argv, one); }
