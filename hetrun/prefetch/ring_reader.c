/* Reads the pieces of a model from disk, round and round, a ring of slots ahead of who takes them.

   A lap is one pass through the schedule. Its pieces have numbers that go on from lap to lap; a piece has
   the slot of its number, and is read once the piece that had the slot before was released. Its memory is what
   was given back last: that is the most likely to lie in caches, which makes a virtual disk, whose host copies,
   a third faster. So where passes wait for the disk no more memory is gone round in than they need. Readers are
   threads that do nothing else, and never enter Python. They wrap into the next lap, but only as far as every
   pass goes: whether one wants the rest is known when it begins.

   One mutex guards all of it, but a thread that finds a piece there takes it without. No thread reads while
   it holds the mutex. */

#include "pages.h"

#define SMALL (4 * PAGE) /* reads of any position go through so much of the stack, if that is enough */

/* The state of a slot: the number of the piece that it is for, and what became of that. */
enum { EMPTY, COMING, THERE, TAKEN };
#define STATE(number, what) ((number) << 2 | (what))
#define NUMBER(state) ((state) >> 2)
#define WHAT(state) ((state) & 3)

struct slot {
    int64_t state;
    uint8_t *memory; /* while its piece is coming or there */
    int64_t bytes; /* that were read for its piece */
};

struct ring {
    struct supply supply;
    struct setup setup;
    struct source source;
    struct slot *slots;
    uint8_t **spare; /* memory of slots that have none; the last one was in use last */
    int64_t spares;
    uint8_t *bounce;
    void *map;
    size_t map_bytes;

    pthread_mutex_t mutex, bouncing;
    pthread_cond_t given, room, still; /* for takers, for readers, and to wait until no thread reads */
    pthread_t *threads;
    int64_t started;

    struct piece *schedule;
    int64_t pieces, always;
    int64_t base, length; /* of the begun lap: the number of its first piece, and how many pieces it has */
    int64_t taken;        /* of them */
    int64_t rows_missing; /* that could not be read for it: a pass without pieces has to know as well */
    int64_t claimed;      /* the number of the next piece that a reader takes */
    int64_t reading;      /* how many are being read */

    int paused, closing, failed;
    int halted; /* no taker gets anything until a restart */
    struct fault fault;

    int64_t waiters, stalled_since;
    struct counts counts;
};

int64_t hetrun_ring_version(void)
{
    return VERSION;
}

/* ---- what becomes of pieces; the mutex is held ---- */

static struct slot *slot_of(struct ring *ring, int64_t number)
{
    return &ring->slots[number % ring->setup.slots];
}

static void take_memory(struct ring *ring, struct slot *slot)
{
    slot->memory = ring->spare[--ring->spares];
}

static void give_memory(struct ring *ring, struct slot *slot)
{
    if (slot->memory)
        ring->spare[ring->spares++] = slot->memory;
    slot->memory = NULL;
}

static void halt(struct ring *ring)
{
    STORE(ring->halted, 1);
    STORE(ring->source.stopped, 1);
    pthread_cond_broadcast(&ring->given);
}

/* The first fault is the one that is told. A piece of the lap to come is no reason to end this one. */
static void fail(struct ring *ring, struct fault fault, int wanted_now)
{
    if (!ring->failed)
        ring->fault = fault;
    ring->failed = 1;
    if (wanted_now)
        halt(ring);
}

/* Read the piece of this number, which no other thread does; the mutex is free meanwhile. */
static void bring(struct ring *ring, int64_t number)
{
    struct slot *slot = slot_of(ring, number);
    int64_t rank = number - ring->base;
    struct piece piece = ring->schedule[rank < ring->length ? rank : rank - ring->length];
    struct fault fault;
    take_memory(ring, slot);
    STORE(slot->state, STATE(number, COMING));
    ring->reading++;
    int bad, ahead;
    do { /* what fails ahead of the pass that needs it is tried again if that has begun meanwhile */
        ahead = number >= ring->base + ring->length;
        pthread_mutex_unlock(&ring->mutex);
        slot->bytes = 0;
        bad = read_piece(&ring->source, &piece, slot->memory, &slot->bytes, &fault);
        pthread_mutex_lock(&ring->mutex);
    } while (bad && ahead && number < ring->base + ring->length && !ring->halted);
    ring->reading--;
    STORE(slot->state, STATE(number, bad ? EMPTY : THERE));
    if (bad) {
        give_memory(ring, slot);
        fail(ring, fault, number < ring->base + ring->length);
    }
    if (ring->waiters)
        pthread_cond_broadcast(&ring->given);
    if (!ring->reading)
        pthread_cond_broadcast(&ring->still);
}

/* Whether the next piece may be read ahead of time. */
static int claimable(struct ring *ring)
{
    if (ring->paused || ring->halted || ring->failed || ring->closing)
        return 0;
    if (ring->claimed - ring->base >= ring->length + ring->always)
        return 0;
    int64_t what = WHAT(slot_of(ring, ring->claimed)->state);
    return what == EMPTY || what == TAKEN;
}

static void *reader(void *data)
{
    struct ring *ring = data;
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "hetrun-reader");
#endif
    pthread_mutex_lock(&ring->mutex);
    while (!ring->closing)
        if (claimable(ring)) {
            int64_t number = ring->claimed++;
            if (claimable(ring)) /* the slot behind may have been released before this one */
                pthread_cond_signal(&ring->room);
            bring(ring, number);
        } else {
            pthread_cond_wait(&ring->room, &ring->mutex);
        }
    pthread_mutex_unlock(&ring->mutex);
    return NULL;
}

/* ---- what runners do ---- */

/* Whether who waits for this piece has to read it: nothing comes by itself, and its slot is free. */
static int own_work(struct ring *ring, int64_t number)
{
    int64_t state = slot_of(ring, number)->state, before = number - ring->setup.slots;
    if (!ring->setup.synchronous || state == STATE(number, COMING))
        return 0;
    return before < ring->base || state == STATE(before, TAKEN);
}

/* Wait until the piece is there; whether it is. */
static int wait_for(struct ring *ring, int64_t rank)
{
    int64_t number = ring->base + rank;
    struct slot *slot = slot_of(ring, rank < 0 ? 0 : number);
    while (!ring->halted) {
        if (rank < 0 || rank >= ring->length || slot->state == STATE(number, TAKEN) ||
            NUMBER(slot->state) > number)
            fail(ring, (struct fault){MISTAKE, 0, rank}, 1);
        else if (slot->state == STATE(number, THERE))
            return 1;
        else if (own_work(ring, number))
            bring(ring, number);
        else
            pthread_cond_wait(&ring->given, &ring->mutex);
    }
    return 0;
}

const uint8_t *hetrun_ring_wait(void *data, int64_t rank)
{
    struct ring *ring = data;
    int64_t number = ring->base + rank;
    struct slot *slot = slot_of(ring, rank < 0 ? 0 : number);
    if (rank >= 0 && rank < ring->length && LOAD(slot->state) == STATE(number, THERE) && !LOAD(ring->halted))
        return slot->memory;
    pthread_mutex_lock(&ring->mutex);
    int64_t began = now();
    if (!ring->waiters++)
        ring->stalled_since = began;
    int there = wait_for(ring, rank);
    int64_t end = now();
    ring->counts.waited += end - began;
    ring->counts.lap_waited += end - began;
    if (!--ring->waiters) {
        ring->counts.stalled += end - ring->stalled_since;
        ring->counts.lap_stalled += end - ring->stalled_since;
        pthread_cond_broadcast(&ring->still);
    }
    pthread_mutex_unlock(&ring->mutex);
    return there ? slot->memory : NULL;
}

void hetrun_ring_release(void *data, int64_t rank)
{
    struct ring *ring = data;
    pthread_mutex_lock(&ring->mutex);
    int64_t number = ring->base + rank;
    struct slot *slot = slot_of(ring, rank < 0 ? 0 : number);
    if (rank >= 0 && rank < ring->length && slot->state == STATE(number, THERE)) { /* else of a lap that is over */
        STORE(slot->state, STATE(number, TAKEN));
        give_memory(ring, slot);
        ring->taken++;
        ring->counts.lap_bytes += slot->bytes;
        pthread_cond_signal(&ring->room);
        if (ring->setup.synchronous)
            pthread_cond_broadcast(&ring->given);
    }
    pthread_mutex_unlock(&ring->mutex);
}

static int read_range(struct ring *ring, const struct extent *wanted, void *out, int64_t *total,
                      struct fault *fault)
{
    if (wanted->bytes <= SMALL - PAGE) {
        uint8_t stack[SMALL + PAGE];
        uint8_t *pages = (uint8_t *)(((uintptr_t)stack + PAGE - 1) & -(uintptr_t)PAGE);
        return read_through(&ring->source, pages, SMALL, wanted, out, total, fault);
    }
    pthread_mutex_lock(&ring->bouncing);
    int bad = read_through(&ring->source, ring->bounce, BOUNCE, wanted, out, total, fault);
    pthread_mutex_unlock(&ring->bouncing);
    return bad;
}

int hetrun_ring_read(void *data, int64_t file, int64_t offset, int64_t bytes, void *out)
{
    struct ring *ring = data;
    struct extent wanted = {file, offset, bytes, 0, 0};
    struct fault fault;
    int64_t total = 0;
    int stopped = LOAD(ring->halted), bad = stopped || read_range(ring, &wanted, out, &total, &fault);
    pthread_mutex_lock(&ring->mutex);
    ring->counts.lap_bytes += total;
    ring->rows_missing += bad;
    if (bad && !stopped)
        fail(ring, fault, 1);
    pthread_mutex_unlock(&ring->mutex);
    return bad ? -1 : 0;
}

/* ---- what the owner does, all but `stop` from one thread ---- */

/* Waits until no thread reads and, if halted, until none waits either. */
static void settle(struct ring *ring)
{
    ring->paused = 1;
    while (ring->reading || (ring->halted && ring->waiters))
        pthread_cond_wait(&ring->still, &ring->mutex);
    ring->paused = 0;
}

/* Between laps: keep what was read ahead of the first pieces, `kept` of them, and drop the rest. */
static void drop_behind(struct ring *ring, int64_t kept)
{
    if (ring->claimed - ring->base <= kept && !ring->failed)
        return;
    settle(ring);
    if (ring->failed)
        kept = 0;
    for (int64_t number = ring->base + kept; number < ring->claimed; number++) {
        slot_of(ring, number)->state = STATE(number, EMPTY);
        give_memory(ring, slot_of(ring, number));
    }
    if (ring->claimed > ring->base + kept)
        ring->claimed = ring->base + kept;
    ring->failed = 0;
}

/* Whether everything of the lap was taken; then no lap is begun any more. */
static int finish(struct ring *ring)
{
    if (ring->taken != ring->length)
        return 0;
    ring->base += ring->length;
    ring->length = ring->taken = ring->rows_missing = 0;
    return 1;
}

/* What comes from disk from the next lap on; 0, or a number of the system's errors. */
int hetrun_ring_follow(struct ring *ring, const struct piece *pieces, int64_t count, int64_t always)
{
    struct piece *schedule = malloc((count + 1) * sizeof *schedule);
    if (!schedule)
        return ENOMEM;
    if (count)
        memcpy(schedule, pieces, count * sizeof *schedule);
    pthread_mutex_lock(&ring->mutex);
    int finished = finish(ring);
    if (finished) {
        int64_t same = 0, most = always < ring->always ? always : ring->always;
        while (same < most && !memcmp(&schedule[same], &ring->schedule[same], sizeof *schedule))
            same++;
        drop_behind(ring, same);
        struct piece *old = ring->schedule;
        ring->schedule = schedule, schedule = old;
        ring->pieces = count, ring->always = always;
        pthread_cond_broadcast(&ring->room);
    }
    pthread_mutex_unlock(&ring->mutex);
    free(schedule);
    return finished ? 0 : EBUSY;
}

/* A lap begins, with the pieces that not every pass takes, but for the last of them, or with none of these; 0,
   or EBUSY while one goes on. */
int hetrun_ring_begin(struct ring *ring, int64_t wanted, int64_t without)
{
    pthread_mutex_lock(&ring->mutex);
    int finished = finish(ring);
    if (finished) {
        if (ring->failed && !ring->halted)
            drop_behind(ring, 0); /* what failed ahead of time is tried again */
        ring->length = wanted ? ring->pieces - without : ring->always;
        if (ring->setup.synchronous)
            ring->claimed = ring->base + ring->length;
        ring->counts.lap_bytes = ring->counts.lap_waited = ring->counts.lap_stalled = 0;
        pthread_cond_broadcast(&ring->room);
    }
    pthread_mutex_unlock(&ring->mutex);
    return finished ? 0 : EBUSY;
}

void hetrun_ring_stop(struct ring *ring)
{
    pthread_mutex_lock(&ring->mutex);
    halt(ring);
    pthread_mutex_unlock(&ring->mutex);
}

/* Forget the lap, whatever became of it; no runner is at work any more. */
void hetrun_ring_restart(struct ring *ring)
{
    pthread_mutex_lock(&ring->mutex);
    STORE(ring->halted, 1);
    STORE(ring->source.stopped, 1);
    pthread_cond_broadcast(&ring->given);
    settle(ring);
    for (int64_t i = 0; i < ring->setup.slots; i++) {
        ring->slots[i].state = STATE(0, EMPTY);
        give_memory(ring, &ring->slots[i]);
    }
    ring->base = ring->claimed;
    ring->length = ring->taken = ring->rows_missing = 0;
    ring->failed = 0;
    STORE(ring->halted, 0);
    STORE(ring->source.stopped, 0);
    pthread_cond_broadcast(&ring->room);
    pthread_mutex_unlock(&ring->mutex);
}

/* Whether something failed, and what. */
int hetrun_ring_fault(struct ring *ring, struct fault *fault)
{
    pthread_mutex_lock(&ring->mutex);
    int failed = ring->failed;
    *fault = ring->fault;
    pthread_mutex_unlock(&ring->mutex);
    return failed;
}

void hetrun_ring_counts(struct ring *ring, struct counts *counts)
{
    pthread_mutex_lock(&ring->mutex);
    *counts = ring->counts;
    counts->bytes = LOAD(ring->source.bytes);
    counts->reads = LOAD(ring->source.reads);
    counts->missing = ring->length - ring->taken + ring->rows_missing;
    pthread_mutex_unlock(&ring->mutex);
}

/* Bytes of a file for the owner: a fault is his, and no reason to end a lap. 0, or -1. */
int hetrun_ring_fetch(struct ring *ring, const struct extent *wanted, void *out, struct fault *fault)
{
    int64_t total = 0;
    return read_range(ring, wanted, out, &total, fault);
}

const struct supply *hetrun_ring_supply(struct ring *ring)
{
    return &ring->supply;
}

/* No runner is at work any more. */
void hetrun_ring_close(struct ring *ring)
{
    pthread_mutex_lock(&ring->mutex);
    ring->closing = 1;
    halt(ring);
    pthread_cond_broadcast(&ring->room);
    settle(ring);
    pthread_mutex_unlock(&ring->mutex);
    for (int64_t i = 0; i < ring->started; i++)
        pthread_join(ring->threads[i], NULL);
    if (ring->map)
        munmap(ring->map, ring->map_bytes);
    free(ring->schedule);
    free(ring->threads);
    free(ring->slots);
    free(ring->spare);
    free(ring->source.files);
    free(ring);
}

/* ---- how it begins ---- */

static int find_memory(struct ring *ring)
{
    const struct setup *setup = &ring->setup;
    ring->source.files = malloc((setup->files + 1) * sizeof *ring->source.files);
    ring->slots = calloc(setup->slots, sizeof *ring->slots);
    ring->spare = calloc(setup->slots, sizeof *ring->spare);
    ring->threads = calloc(setup->threads + 1, sizeof *ring->threads);
    ring->map_bytes = setup->slots * setup->slot_bytes + BOUNCE + HUGE_PAGE;
    ring->map = mmap(NULL, ring->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ring->map == MAP_FAILED)
        ring->map = NULL;
    if (!ring->source.files || !ring->slots || !ring->spare || !ring->threads || !ring->map)
        return ENOMEM;
    uint8_t *memory = (uint8_t *)(((uintptr_t)ring->map + HUGE_PAGE - 1) & -(uintptr_t)HUGE_PAGE);
#if defined(MADV_HUGEPAGE)
    madvise(memory, setup->slots * setup->slot_bytes, MADV_HUGEPAGE);
#endif
    memset(memory, 0, setup->slots * setup->slot_bytes + BOUNCE); /* there before others count what is left */
    for (int64_t i = 0; i < setup->slots; i++)
        ring->spare[ring->spares++] = memory + i * setup->slot_bytes;
    ring->bounce = memory + setup->slots * setup->slot_bytes;
    memcpy(ring->source.files, setup->file, setup->files * sizeof *setup->file);
    return 0;
}

/* A ring with nothing in its schedule; NULL with errno. */
struct ring *hetrun_ring_open(const struct setup *setup)
{
    struct ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return NULL;
    ring->supply = (struct supply){ring, hetrun_ring_wait, hetrun_ring_release, hetrun_ring_read};
    ring->setup = *setup;
    ring->source.read = setup->read ? setup->read : pread;
    pthread_mutex_init(&ring->mutex, NULL);
    pthread_mutex_init(&ring->bouncing, NULL);
    pthread_cond_init(&ring->given, NULL);
    pthread_cond_init(&ring->room, NULL);
    pthread_cond_init(&ring->still, NULL);
    int error = find_memory(ring);
    if (!error && !setup->synchronous)
        error = start_threads(ring->threads, &ring->started, ring->setup.threads, reader, ring);
    if (!error)
        return ring;
    hetrun_ring_close(ring);
    errno = error;
    return NULL;
}
