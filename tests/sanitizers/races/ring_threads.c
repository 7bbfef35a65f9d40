/* ring_reader.c: runners take the pieces of laps while readers bring others; a stop from elsewhere; rows that are
   read meanwhile; and questions of the owner. */

#include "threads.h"
#include "ring_reader.h"

struct ring;
struct ring *hetrun_ring_open(const struct setup *setup);
const struct supply *hetrun_ring_supply(struct ring *ring);
int hetrun_ring_follow(struct ring *ring, const struct piece *pieces, int64_t count, int64_t always);
int hetrun_ring_begin(struct ring *ring, int64_t wanted, int64_t without);
void hetrun_ring_stop(struct ring *ring);
void hetrun_ring_restart(struct ring *ring);
int hetrun_ring_fault(struct ring *ring, struct fault *fault);
void hetrun_ring_counts(struct ring *ring, struct counts *counts);
int hetrun_ring_fetch(struct ring *ring, const struct extent *wanted, void *out, struct fault *fault);
void hetrun_ring_close(struct ring *ring);

enum { PAGES = 64, MOST_PIECES = 12, SIZE = PAGES * PAGE };

static uint8_t content[SIZE];
static int failing; /* the disk, now and then */

static ssize_t from_memory(int fd, void *to, size_t bytes, off_t offset)
{
    static uint64_t state;
    (void)fd;
    if (__atomic_load_n(&failing, __ATOMIC_RELAXED) && __atomic_fetch_add(&state, 1, __ATOMIC_RELAXED) % 17 == 9)
        return 0;
    size_t some = offset >= SIZE ? 0 : bytes < (size_t)(SIZE - offset) ? bytes : (size_t)(SIZE - offset);
    memcpy(to, content + offset, some);
    return (ssize_t)some;
}

struct lap {
    const struct supply *supply;
    const struct piece *pieces;
    int64_t count;
    int came[MOST_THREADS];
    uint64_t seed;
};

static void take(void *tensor, int ith, int nth, void *data)
{
    struct lap *lap = data;
    uint8_t row[300];
    uint64_t state = lap->seed + (uint64_t)ith;
    (void)tensor;
    lap->came[ith] = 1;
    for (int64_t rank = ith; rank < lap->count; rank += nth) {
        const struct extent *e = &lap->pieces[rank].extents[0];
        const uint8_t *found = lap->supply->wait(lap->supply->ring, rank);
        if (!found) {
            lap->came[ith] = 0;
            return;
        }
        CHECK(!memcmp(found + e->to, content + e->offset, (size_t)e->bytes), "a piece has other bytes than its file");
        lap->supply->release(lap->supply->ring, rank);
        int64_t at = below(&state, SIZE - sizeof(row));
        if (!lap->supply->read(lap->supply->ring, 0, at, sizeof(row), row))
            CHECK(!memcmp(row, content + at, sizeof(row)), "a row has other bytes than its file");
    }
}

static void *stop_soon(void *ring)
{
    usleep(200);
    hetrun_ring_stop(ring);
    return NULL;
}

static void one_lap(uint64_t *state, struct ring *ring, const struct piece *pieces, int64_t count, int64_t always)
{
    struct lap lap = {hetrun_ring_supply(ring), pieces, below(state, 2) ? count : always, {0}, *state};
    struct task tasks[] = {{take, &lap}};
    struct counts counts;
    struct fault fault;
    int threads = 1 + (int)below(state, 3), stops = !below(state, 4), came = 1;
    pthread_t stopper;
    CHECK(!hetrun_ring_begin(ring, lap.count == count, 0), "a lap could not begin");
    if (stops) CHECK(!pthread_create(&stopper, NULL, stop_soon, ring), "no thread");
    run_graph(tasks, 1, threads);
    hetrun_ring_counts(ring, &counts);
    if (stops) pthread_join(stopper, NULL);
    for (int i = 0; i < threads; i++) came = came && lap.came[i];
    if (stops || !came || hetrun_ring_fault(ring, &fault))
        hetrun_ring_restart(ring);
    else
        CHECK(counts.missing == 0, "pieces are missing");
}

static void one(uint64_t *state, const char *folder)
{
    struct file file = {0, below(state, 2)};
    struct piece pieces[MOST_PIECES];
    int64_t count = below(state, MOST_PIECES + 1), always = below(state, (uint32_t)count + 1);
    int synchronous = !below(state, 4);
    (void)folder;
    for (int i = 0; i < SIZE && !content[SIZE - 2]; i++) content[i] = (uint8_t)(below(state, 255) + 1);
    memset(pieces, 0, sizeof(pieces));
    for (int64_t i = 0; i < count; i++) {
        int64_t offset = below(state, SIZE - 3 * PAGE);
        pieces[i].count = 1;
        pieces[i].extents[0] = (struct extent){0, offset, 1 + below(state, 2 * PAGE), 0, offset % PAGE};
    }
    __atomic_store_n(&failing, !below(state, 4), __ATOMIC_RELAXED);
    struct setup setup = {4 + below(state, 4), 4 * PAGE, synchronous ? 0 : 1 + below(state, 3), synchronous, 1, &file,
                          from_memory};
    struct ring *ring = hetrun_ring_open(&setup);
    CHECK(ring, "no ring");
    for (int i = 0; i < 3; i++) {
        CHECK(!hetrun_ring_follow(ring, pieces, count, always), "no schedule");
        for (int j = 0; j < 4; j++) one_lap(state, ring, pieces, count, always);
    }
    hetrun_ring_close(ring);
}

int main(int argc, char **argv) { return rounds(argc, argv, one); }
