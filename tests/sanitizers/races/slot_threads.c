/* expert_slots.c: one thread of a team asks for experts, all copy what came and meet, dozing where they wait long;
   readers bring others meanwhile, and now and then a stop comes from elsewhere. */

#include "threads.h"
#include "expert_slots.h"

struct cache;
struct cache *hetrun_experts_open(const struct cache_setup *setup);
const struct expert_supply *hetrun_experts_supply(struct cache *c);
void hetrun_experts_begin(struct cache *c, int64_t rows);
void hetrun_experts_listen(struct cache *c, int64_t on);
void hetrun_experts_stop(struct cache *c);
void hetrun_experts_restart(struct cache *c);
int hetrun_experts_fault(struct cache *c, struct fault *fault);
void hetrun_experts_counts(struct cache *c, struct cache_counts *counts);
void hetrun_experts_resize(struct cache *c, int64_t kind, int64_t count);
void hetrun_experts_widen(struct cache *c, int64_t count);
int64_t hetrun_experts_held(struct cache *c, int64_t kind);
void hetrun_experts_close(struct cache *c);

enum { MIXTURES = 3, EXPERTS = 16, MATRIX = 700, SLOT = MATRICES * MATRIX, ALL = MIXTURES * EXPERTS, WAVE = 4,
       BUFFERS = 6, SIZE = ALL * SLOT + PAGE, SPINS = 50 };

static uint8_t content[SIZE];
static int failing;

static ssize_t from_memory(int fd, void *to, size_t bytes, off_t offset)
{
    static uint64_t state;
    (void)fd;
    if (__atomic_load_n(&failing, __ATOMIC_RELAXED) && __atomic_fetch_add(&state, 1, __ATOMIC_RELAXED) % 29 == 9)
        return 0;
    size_t some = offset >= SIZE ? 0 : bytes < (size_t)(SIZE - offset) ? bytes : (size_t)(SIZE - offset);
    memcpy(to, content + offset, some);
    return (ssize_t)some;
}

/* What a mixture's node works with. */
struct mixture {
    const struct expert_supply *supply;
    int64_t number, given;
    int32_t experts[EXPERTS], rows[EXPERTS];
    int64_t count;
    struct expert wave[WAVE];
    int32_t arrived, turn, dozers;
};

static void meet(struct mixture *m, int nth)
{
    const int32_t turn = __atomic_load_n(&m->turn, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&m->arrived, 1, __ATOMIC_ACQ_REL) == nth) {
        m->arrived = 0;
        __atomic_store_n(&m->turn, turn + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&m->dozers, __ATOMIC_SEQ_CST)) m->supply->wake(m->supply->cache);
        return;
    }
    for (int i = 0; i < SPINS; i++)
        if (__atomic_load_n(&m->turn, __ATOMIC_ACQUIRE) != turn) return;
    m->supply->doze(m->supply->cache, &m->turn, turn, &m->dozers);
}

static void compute(void *tensor, int ith, int nth, void *data)
{
    struct mixture *m = data;
    (void)tensor;
    if (ith == 0) m->supply->want(m->supply->cache, m->number, m->experts, m->rows, m->count);
    for (;;) {
        if (ith == 0) m->given = m->supply->next(m->supply->cache, m->wave, WAVE);
        meet(m, nth);
        if (m->given <= 0) return;
        for (int64_t i = ith; i < m->given * MATRICES; i += nth) {
            const struct expert *e = &m->wave[i / MATRICES];
            uint8_t *slot = e->slot + i % MATRICES * MATRIX;
            if (e->stored[i % MATRICES]) memcpy(slot, e->stored[i % MATRICES], MATRIX);
        }
        meet(m, nth);
        if (ith == 0 && m->wave[m->given - 1].stored[0]) m->supply->packed(m->supply->cache);
        for (int64_t i = 0; i < m->given; i++) {
            int64_t record = m->number * EXPERTS + m->wave[i].number;
            CHECK(!memcmp(m->wave[i].slot, content + record * SLOT + 100, SLOT), "other bytes than the expert has");
        }
        meet(m, nth);
    }
}

static void *stop_soon(void *cache)
{
    usleep(300);
    hetrun_experts_stop(cache);
    return NULL;
}

static void choose(uint64_t *state, struct mixture *m, struct cache *cache, int64_t number)
{
    uint32_t some = 1 + below(state, EXPERTS);
    *m = (struct mixture){.supply = hetrun_experts_supply(cache), .number = number};
    for (int32_t i = 0; i < EXPERTS; i++)
        if (below(state, EXPERTS) < some) m->experts[m->count] = i, m->rows[m->count++] = 1 + (int32_t)below(state, 3);
}

static void pass(uint64_t *state, struct cache *cache)
{
    struct mixture mixtures[MIXTURES];
    struct task tasks[MIXTURES];
    struct fault fault;
    struct cache_counts counts;
    pthread_t stopper;
    int stops = !below(state, 6);
    hetrun_experts_begin(cache, 1 + below(state, 3));
    for (int i = 0; i < MIXTURES; i++) {
        choose(state, &mixtures[i], cache, i);
        tasks[i] = (struct task){compute, &mixtures[i]};
    }
    if (stops) CHECK(!pthread_create(&stopper, NULL, stop_soon, cache), "no thread");
    mixtures[0].supply->hint(cache, 1, mixtures[1].experts, mixtures[1].count);
    run_graph(tasks, MIXTURES, 1 + (int)below(state, MOST_THREADS));
    hetrun_experts_counts(cache, &counts);
    if (stops) pthread_join(stopper, NULL);
    int failed = hetrun_experts_fault(cache, &fault);
    CHECK(mixtures[MIXTURES - 1].given == 0 || stops || failed, "experts did not come");
    if (failed || stops) hetrun_experts_restart(cache);
}

static void fill(uint64_t *state, struct record *record)
{
    for (int i = 0; i < SIZE && !content[SIZE - 2]; i++) content[i] = (uint8_t)(below(state, 255) + 1);
    for (int64_t i = 0; i < ALL; i++) {
        int64_t at = i * SLOT + 100, skip = at % PAGE;
        record[i] = (struct record){.count = 1, .extents = {{0, at, SLOT, 0, skip}}};
        for (int64_t k = 0; k < MATRICES; k++) record[i].starts[k] = skip + k * MATRIX;
    }
}

static void one(uint64_t *state, const char *folder)
{
    static struct record record[ALL];
    static const int64_t first[] = {0, EXPERTS, 2 * EXPERTS, ALL};
    struct file file = {0, below(state, 2)};
    struct kind kind = {lines(ALL * SLOT), SLOT, 0, ALL};
    (void)folder;
    fill(state, record);
    __atomic_store_n(&failing, !below(state, 4), __ATOMIC_RELAXED);
    struct cache_setup setup = {ALL, MIXTURES, 1, BUFFERS, 3 * PAGE, 1 + below(state, 3), 1, 1000, record, first, &kind,
                                &file, {0, 16, 64, 256, 1024}, 2, from_memory};
    struct cache *cache = hetrun_experts_open(&setup);
    CHECK(cache, "no cache");
    hetrun_experts_widen(cache, 1 + below(state, BUFFERS)); /* it begins without */
    for (int i = 0; i < 8; i++) {
        hetrun_experts_resize(cache, 0, 1 + below(state, ALL));
        if (!below(state, 3)) hetrun_experts_widen(cache, 1 + below(state, BUFFERS));
        hetrun_experts_listen(cache, below(state, 4) > 0);
        for (int j = 0; j < 3; j++) pass(state, cache);
        CHECK(hetrun_experts_held(cache, 0) <= ALL, "more slots are held than there are");
    }
    hetrun_experts_close(cache);
    free(kind.memory);
}

int main(int argc, char **argv) { return rounds(argc, argv, one); }
