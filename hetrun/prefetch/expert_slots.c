/* A cache of experts: those that are likely to be chosen again lie packed in slots, others are read when a router
   has chosen them, while the products of those that are there run.

   Reading is done by threads that do nothing else, into a few buffers, and what was read stays in its buffer until
   who multiplies has packed it into a slot. Which expert gives its slot up is decided then: the one whose choices
   count least. A choice counts 1, and half as much after some tokens. Of such sums only the logarithm is kept, as
   it would be at token 0: it changes with a choice, and never by itself, so they can be compared at any time.

   After how many tokens is a rule, and which rule is best depends on texts: if it is long, what is chosen often
   stays, if it is short, what was chosen last. So all rules are tried at all times, on some of the mixtures and
   without the weights, and the one decides that would have missed least lately.

   One mutex guards all of it; no thread reads or computes while holding it. */

#include "pages.h"

#include <math.h>

#include "expert_slots.h"

#define NONE (-1)
#define NEVER (-1e300) /* the worth of what was never chosen */
#define AT_ONCE 8      /* experts of slots that are given before others may have arrived */
#define SAMPLE 8       /* mixtures that rules are tried on */
#define FADING 0.9998  /* of a rule's misses, with each choice in those mixtures: half in 3,500 */
#define BETTER 0.98    /* a rule with as many misses, or fewer, takes the place of the one that decides */

enum { FREE, ASKED, THERE, FAILED }; /* what became of a buffer */

struct buffer {
    int64_t state, record, order; /* order: those that were asked for first are read first */
    int64_t begun, done;          /* extents */
    int hint;                     /* nothing has wanted it yet */
    int dropped;                  /* nothing will: it is free once its reads have ended */
    uint8_t *memory;
};

struct known {           /* of a record */
    int64_t slot, buffer; /* where it is, or NONE */
    int64_t visit;        /* the last one that wanted it */
    int64_t given;        /* in that visit: whether it was multiplied by */
};

struct trial {     /* of a rule */
    uint8_t *there; /* of each record, whether it would have a slot */
    int64_t used[MOST_KINDS]; /* slots of each kind */
    double missed;
};

struct slots {
    struct kind kind;
    int64_t records, sampled; /* how many there are of the kind, and in the mixtures that rules are tried on */
    int64_t *record; /* in each slot, or NONE */
    int64_t used;    /* slots from here on never held anything; those before may be free */
};

struct cache {
    struct expert_supply supply;
    struct cache_setup setup;
    struct source source;
    struct record *record;
    int64_t *first;
    struct slots *slots;
    struct known *known;
    int64_t *sample; /* the records of those mixtures */
    int64_t sampled; /* how many */
    double *worth;   /* by each rule, of each record */
    struct trial trial[RULES];
    int64_t rule; /* that decides */
    struct buffer *buffer;
    int64_t buffers; /* that have memory, of those that have addresses */
    void *map;
    size_t map_bytes;

    pthread_mutex_t mutex;
    pthread_cond_t room, arrived, still, turn; /* for readers, takers, a restart, dozers */
    pthread_t *threads;
    int64_t started, reading;
    int closing, stopped, failed, deaf; /* deaf: to hints */
    struct fault fault;

    int64_t visit, mixture, order, clock;
    int scans; /* whether the visit wants nearly all of its mixture */
    int64_t *hits, n_hits, *misses, n_misses; /* of the visit, what was not given yet */
    int64_t *wave, n_wave;                    /* given last, by their records */

    int32_t *trace; /* triples: the number of the pass, the record, whether it was in a slot */
    int64_t pass;
    int64_t busy_since;
    struct cache_counts counts;
};

int64_t hetrun_experts_version(void)
{
    return EXPERT_SLOTS_VERSION;
}

/* ---- what is worth how much; the mutex is held ---- */

static double *worth_by(const struct cache *c, int64_t rule)
{
    return c->worth + rule * c->setup.records;
}

static void choose(struct cache *c, int64_t record, int64_t rows)
{
    for (int64_t rule = 0; rule < RULES; rule++) {
        double half = c->setup.half_life[rule], passed = (double)c->clock / half;
        double *worth = &worth_by(c, rule)[record];
        *worth = half > 0 ? log2(exp2(*worth - passed) + (double)rows) + passed : (double)c->visit;
    }
}

static int is_sampled(const struct cache *c, int64_t mixture)
{
    int64_t step = (c->setup.mixtures + SAMPLE - 1) / SAMPLE;
    return mixture % step == step / 2;
}

/* What a rule would do: a slot that is free, or that of the least worth, goes to what was chosen. */
static void try_rule(struct cache *c, int64_t rule, int64_t record)
{
    struct trial *t = &c->trial[rule];
    int64_t kind = c->record[record].kind, worst = NONE;
    const struct slots *s = &c->slots[kind];
    const double *worth = worth_by(c, rule);
    t->missed *= FADING;
    if (t->there[record])
        return;
    t->missed += 1;
    t->there[record] = 1;
    if (++t->used[kind] * s->records <= s->kind.count * s->sampled)
        return;
    for (int64_t i = 0; i < c->sampled; i++) {
        int64_t other = c->sample[i];
        if (t->there[other] && other != record && c->record[other].kind == kind &&
            (worst == NONE || worth[other] < worth[worst]))
            worst = other;
    }
    if (worst != NONE)
        t->there[worst] = 0, t->used[kind]--;
}

static void try_rules(struct cache *c, int64_t record)
{
    int64_t best = c->rule;
    for (int64_t rule = 0; rule < RULES; rule++) {
        try_rule(c, rule, record);
        if (c->trial[rule].missed < c->trial[best].missed)
            best = rule;
    }
    if (c->trial[best].missed < BETTER * c->trial[c->rule].missed)
        c->rule = best;
}

/* Whether it must stay where it is: this visit wants it, and it was not multiplied by yet. */
static int is_due(const struct cache *c, const struct known *k)
{
    return k->visit == c->visit && !k->given;
}

/* A slot for a record: one that is free, or that of the least worth; NONE where all are due. */
static int64_t claim(struct cache *c, int64_t record)
{
    struct slots *s = &c->slots[c->record[record].kind];
    const double *worth = worth_by(c, c->rule);
    int64_t best = NONE;
    if (s->used < s->kind.count)
        return s->used++;
    for (int64_t i = 0; i < s->kind.count; i++) {
        int64_t there = s->record[i];
        if (there == NONE)
            return i;
        if (!is_due(c, &c->known[there]) && (best == NONE || worth[there] < worth[s->record[best]]))
            best = i;
    }
    if (best != NONE)
        c->known[s->record[best]].slot = NONE;
    return best;
}

/* ---- buffers; the mutex is held ---- */

static void free_buffer(struct cache *c, struct buffer *b)
{
    if (b->record != NONE)
        c->known[b->record].buffer = NONE;
    b->record = NONE;
    if (b->begun > b->done)
        b->dropped = 1; /* a thread reads to it */
    else
        b->state = FREE;
}

static void waste(struct cache *c, struct buffer *b)
{
    for (int64_t i = 0; i < b->begun; i++)
        c->counts.wasted_bytes += c->record[b->record].extents[i].bytes;
    free_buffer(c, b);
}

/* A free one; for what is wanted also that of the oldest hint that was not wanted yet. */
static struct buffer *find_buffer(struct cache *c, int hint)
{
    struct buffer *oldest = NULL;
    for (int64_t i = 0; i < c->buffers; i++) {
        struct buffer *b = &c->buffer[i];
        if (b->state == FREE)
            return b;
        if (b->hint && !b->dropped && b->begun == b->done && (!oldest || b->order < oldest->order))
            oldest = b;
    }
    if (oldest && !hint) {
        waste(c, oldest);
        return oldest;
    }
    return NULL;
}

static int ask_for(struct cache *c, int64_t record, int hint)
{
    struct buffer *b = find_buffer(c, hint);
    if (!b)
        return 0;
    *b = (struct buffer){ASKED, record, c->order++, 0, 0, hint, 0, b->memory};
    c->known[record].buffer = b - c->buffer;
    c->counts.hinted += hint;
    pthread_cond_broadcast(&c->room);
    return 1;
}

/* A prompt that has chosen nearly all of a mixture will do so in the next one, too. */
static void ask_for_next(struct cache *c)
{
    int64_t next = c->mixture + 1;
    for (int64_t i = c->first[next]; next < c->setup.mixtures && i < c->first[next + 1]; i++)
        if (c->known[i].slot == NONE && c->known[i].buffer == NONE && !ask_for(c, i, 1))
            return;
}

/* What this visit misses, as far as there are buffers. */
static void ask_for_more(struct cache *c)
{
    for (int64_t i = 0; i < c->n_misses; i++) {
        struct known *k = &c->known[c->misses[i]];
        if (k->buffer == NONE && !ask_for(c, c->misses[i], 0))
            return;
    }
    if (c->scans)
        ask_for_next(c);
}

/* What is read next: nothing for a hint while there is something that is wanted. */
static struct buffer *next_read(struct cache *c)
{
    struct buffer *best = NULL;
    for (int64_t i = 0; i < c->buffers; i++) {
        struct buffer *b = &c->buffer[i];
        if (b->state != ASKED || b->dropped || b->begun == c->record[b->record].count)
            continue;
        if (!best || b->hint < best->hint || (b->hint == best->hint && b->order < best->order))
            best = b;
    }
    return best;
}

/* Read one extent; the mutex is free meanwhile. */
static void bring(struct cache *c, struct buffer *b)
{
    const struct record *r = &c->record[b->record];
    struct piece piece = {1, {r->extents[b->begun]}};
    struct fault fault;
    int64_t got = 0, count = r->count;
    b->begun++;
    if (!c->reading++)
        c->busy_since = now();
    pthread_mutex_unlock(&c->mutex);
    int bad = read_piece(&c->source, &piece, b->memory, &got, &fault);
    pthread_mutex_lock(&c->mutex);
    if (!--c->reading) {
        c->counts.busy += now() - c->busy_since;
        pthread_cond_broadcast(&c->still);
    }
    b->done++;
    if (b->dropped) {
        if (b->begun == b->done)
            b->state = FREE, b->dropped = 0;
        ask_for_more(c);
    } else if (bad) {
        b->state = FAILED;
        if (!b->hint && !c->failed)
            c->failed = 1, c->fault = fault;
        if (b->hint)
            free_buffer(c, b); /* it is tried again if it is wanted */
    } else if (b->state == ASKED && b->done == count) {
        b->state = THERE;
    }
    pthread_cond_broadcast(&c->arrived);
}

static void *reader(void *data)
{
    struct cache *c = data;
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "hetrun-experts");
#endif
    pthread_mutex_lock(&c->mutex);
    while (!c->closing) {
        struct buffer *b = c->stopped ? NULL : next_read(c);
        if (b)
            bring(c, b);
        else
            pthread_cond_wait(&c->room, &c->mutex);
    }
    pthread_mutex_unlock(&c->mutex);
    return NULL;
}

/* ---- what who multiplies calls ---- */

static void write_down(struct cache *c, int64_t record)
{
    if (!c->setup.trace)
        return;
    int32_t *entry = c->trace + 3 * (c->counts.traced++ % c->setup.trace);
    entry[0] = (int32_t)c->pass;
    entry[1] = (int32_t)record;
    entry[2] = c->known[record].slot != NONE;
}

/* What hints brought for a mixture that has chosen now, and that it has not chosen. */
static void drop_hints(struct cache *c, int64_t mixture)
{
    for (int64_t i = 0; i < c->buffers; i++) {
        struct buffer *b = &c->buffer[i];
        if (b->state != FREE && b->hint && !b->dropped && b->record >= c->first[mixture] &&
            b->record < c->first[mixture + 1])
            waste(c, b);
    }
}

static void miss(struct cache *c, int64_t record)
{
    struct known *k = &c->known[record];
    c->misses[c->n_misses++] = record;
    c->counts.missed++;
    for (int64_t i = 0; i < c->record[record].count; i++) c->counts.missed_bytes += c->record[record].extents[i].bytes;
    if (k->buffer != NONE && c->buffer[k->buffer].hint) {
        c->buffer[k->buffer].hint = 0;
        c->counts.hits_of_hints++;
    }
}

void hetrun_experts_want(void *data, int64_t mixture, const int32_t *experts, const int32_t *rows, int64_t count)
{
    struct cache *c = data;
    pthread_mutex_lock(&c->mutex);
    c->visit++;
    c->mixture = mixture;
    c->scans = 4 * count >= 3 * (c->first[mixture + 1] - c->first[mixture]);
    c->n_hits = c->n_misses = c->n_wave = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t record = c->first[mixture] + experts[i];
        struct known *k = &c->known[record];
        k->visit = c->visit;
        k->given = 0;
        choose(c, record, rows[i]);
        if (is_sampled(c, mixture))
            try_rules(c, record);
        write_down(c, record);
        c->counts.wanted++;
        if (k->slot != NONE)
            c->hits[c->n_hits++] = record;
        else
            miss(c, record);
    }
    drop_hints(c, mixture);
    ask_for_more(c);
    pthread_mutex_unlock(&c->mutex);
}

void hetrun_experts_hint(void *data, int64_t mixture, const int32_t *experts, int64_t count)
{
    struct cache *c = data;
    pthread_mutex_lock(&c->mutex);
    for (int64_t i = 0; i < count && !c->deaf; i++) {
        int64_t record = c->first[mixture] + experts[i];
        if (c->known[record].slot == NONE && c->known[record].buffer == NONE && !ask_for(c, record, 1))
            break;
    }
    pthread_mutex_unlock(&c->mutex);
}

static void give(struct cache *c, int64_t record, struct expert *out)
{
    struct known *k = &c->known[record];
    const struct slots *s = &c->slots[c->record[record].kind];
    out->number = record - c->first[c->mixture];
    out->slot = s->kind.memory + k->slot * s->kind.bytes;
    for (int i = 0; i < MATRICES; i++)
        out->stored[i] = k->buffer == NONE ? NULL : c->buffer[k->buffer].memory + c->record[record].starts[i];
    c->wave[c->n_wave++] = record;
}

/* Those that have arrived, each with a slot. */
static int64_t give_arrived(struct cache *c, struct expert *out, int64_t most)
{
    int64_t n = 0, left = 0;
    for (int64_t i = 0; i < c->n_misses; i++) {
        int64_t record = c->misses[i], slot = NONE;
        struct known *k = &c->known[record];
        if (n < most && k->buffer != NONE && c->buffer[k->buffer].state == THERE)
            slot = claim(c, record);
        if (slot == NONE) {
            c->misses[left++] = record;
            continue;
        }
        k->slot = slot;
        c->slots[c->record[record].kind].record[slot] = record;
        give(c, record, &out[n++]);
    }
    c->n_misses = left;
    return n;
}

static int64_t wait_for_some(struct cache *c, struct expert *out, int64_t most)
{
    int64_t n = 0, began = 0;
    while (c->n_misses && !c->failed && !c->stopped) {
        if ((n = give_arrived(c, out, most)))
            break;
        ask_for_more(c);
        began = began ? began : now();
        pthread_cond_wait(&c->arrived, &c->mutex);
    }
    if (began)
        c->counts.waited += now() - began;
    return n ? n : c->n_misses ? -1 : 0;
}

int64_t hetrun_experts_next(void *data, struct expert *out, int64_t most)
{
    struct cache *c = data;
    int64_t n = 0;
    pthread_mutex_lock(&c->mutex);
    for (int64_t i = 0; i < c->n_wave; i++) c->known[c->wave[i]].given = 1;
    c->n_wave = 0;
    if (!c->failed && !c->stopped)
        n = give_arrived(c, out, most); /* first: the disk needs their buffers */
    for (int64_t some = n ? 0 : AT_ONCE; c->n_hits && n < most && n < some;) give(c, c->hits[--c->n_hits], &out[n++]);
    if (!n)
        n = wait_for_some(c, out, most);
    pthread_mutex_unlock(&c->mutex);
    return n;
}

void hetrun_experts_packed(void *data)
{
    struct cache *c = data;
    pthread_mutex_lock(&c->mutex);
    for (int64_t i = 0; i < c->n_wave; i++) {
        struct known *k = &c->known[c->wave[i]];
        if (k->buffer != NONE)
            free_buffer(c, &c->buffer[k->buffer]);
    }
    ask_for_more(c);
    pthread_mutex_unlock(&c->mutex);
}

void hetrun_experts_doze(void *data, const int32_t *turn, int32_t before, int32_t *dozers)
{
    struct cache *c = data;
    pthread_mutex_lock(&c->mutex);
    __atomic_add_fetch(dozers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(turn, __ATOMIC_SEQ_CST) == before) pthread_cond_wait(&c->turn, &c->mutex);
    __atomic_sub_fetch(dozers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&c->mutex);
}

void hetrun_experts_wake(void *data)
{
    struct cache *c = data;
    pthread_mutex_lock(&c->mutex);
    pthread_cond_broadcast(&c->turn);
    pthread_mutex_unlock(&c->mutex);
}

/* ---- what the owner does, all but `stop` from one thread ---- */

/* A pass of `rows` rows begins. */
void hetrun_experts_begin(struct cache *c, int64_t rows)
{
    pthread_mutex_lock(&c->mutex);
    c->pass++;
    c->clock += rows;
    pthread_mutex_unlock(&c->mutex);
}

/* Whether hints are followed. */
void hetrun_experts_listen(struct cache *c, int64_t on)
{
    pthread_mutex_lock(&c->mutex);
    c->deaf = !on;
    pthread_mutex_unlock(&c->mutex);
}

void hetrun_experts_stop(struct cache *c)
{
    pthread_mutex_lock(&c->mutex);
    STORE(c->stopped, 1);
    STORE(c->source.stopped, 1);
    pthread_cond_broadcast(&c->arrived);
    pthread_mutex_unlock(&c->mutex);
}

/* Forget what was asked for; nothing computes any more. What is in slots is good, but for those that were given
   and not packed. */
void hetrun_experts_restart(struct cache *c)
{
    pthread_mutex_lock(&c->mutex);
    STORE(c->stopped, 1);
    STORE(c->source.stopped, 1);
    while (c->reading) pthread_cond_wait(&c->still, &c->mutex);
    for (int64_t i = 0; i < c->buffers; i++) {
        struct buffer *b = &c->buffer[i];
        struct known *k = b->record == NONE ? NULL : &c->known[b->record];
        if (k && k->slot != NONE) {
            c->slots[c->record[b->record].kind].record[k->slot] = NONE;
            k->slot = NONE;
        }
        if (k)
            k->buffer = NONE;
        *b = (struct buffer){FREE, NONE, 0, 0, 0, 0, 0, b->memory};
    }
    c->visit++;
    c->n_hits = c->n_misses = c->n_wave = 0;
    c->failed = c->scans = 0;
    STORE(c->stopped, 0);
    STORE(c->source.stopped, 0);
    pthread_mutex_unlock(&c->mutex);
}

int hetrun_experts_fault(struct cache *c, struct fault *fault)
{
    pthread_mutex_lock(&c->mutex);
    int failed = c->failed;
    *fault = c->fault;
    pthread_mutex_unlock(&c->mutex);
    return failed;
}

void hetrun_experts_counts(struct cache *c, struct cache_counts *counts)
{
    pthread_mutex_lock(&c->mutex);
    *counts = c->counts;
    counts->bytes = LOAD(c->source.bytes);
    counts->reads = LOAD(c->source.reads);
    pthread_mutex_unlock(&c->mutex);
}

/* Whole pages of some memory, from one byte to another. */
static void give_back(uint8_t *memory, int64_t from, int64_t end)
{
    int64_t page = sysconf(_SC_PAGESIZE);
    from = (from + page - 1) / page * page, end = (end + page - 1) / page * page;
    if (end > from)
        madvise(memory + from, (size_t)(end - from), MADV_DONTNEED);
}

/* Between passes: `count` slots of a kind have memory. What is worth most stays, and moves where needed. */
void hetrun_experts_resize(struct cache *c, int64_t kind, int64_t count)
{
    pthread_mutex_lock(&c->mutex);
    struct slots *s = &c->slots[kind];
    const double *worth = worth_by(c, c->rule);
    int64_t before = s->kind.count;
    if (count > s->kind.most)
        count = s->kind.most;
    for (int64_t i = count; i < before && i < s->used; i++) {
        int64_t record = s->record[i], to = NONE;
        if (record == NONE)
            continue;
        for (int64_t j = 0; j < count; j++) {
            int64_t there = s->record[j];
            if (there == NONE) {
                to = j;
                break;
            }
            if (worth[there] < worth[to == NONE ? record : s->record[to]])
                to = j;
        }
        s->record[i] = NONE;
        c->known[record].slot = to;
        if (to == NONE)
            continue;
        if (s->record[to] != NONE)
            c->known[s->record[to]].slot = NONE;
        memcpy(s->kind.memory + to * s->kind.bytes, s->kind.memory + i * s->kind.bytes, (size_t)s->kind.bytes);
        s->record[to] = record;
    }
    s->kind.count = count;
    if (s->used > count)
        s->used = count;
    give_back(s->kind.memory, count * s->kind.bytes, before * s->kind.bytes);
    pthread_mutex_unlock(&c->mutex);
}

/* Give up what was read or asked for in all buffers from there on, and wait for reads that are under way. */
static void empty_from(struct cache *c, int64_t count)
{
    for (int64_t i = count; i < c->setup.buffers; i++) {
        struct buffer *b = &c->buffer[i];
        if (b->state != FREE && !b->dropped)
            waste(c, b);
        while (b->state != FREE) pthread_cond_wait(&c->arrived, &c->mutex);
    }
}

/* Between passes: how many buffers have memory from now on. */
void hetrun_experts_widen(struct cache *c, int64_t count)
{
    pthread_mutex_lock(&c->mutex);
    int64_t before = c->buffers, each = c->setup.buffer_bytes;
    c->buffers = count;
    empty_from(c, c->buffers);
    give_back(c->buffer->memory, c->buffers * each, before * each);
    if (c->buffers > before) /* there before others count what is left */
        memset(c->buffer->memory + before * each, 0, (size_t)((c->buffers - before) * each));
    pthread_mutex_unlock(&c->mutex);
}

/* Slots of a kind that were ever written, and have memory. */
int64_t hetrun_experts_held(struct cache *c, int64_t kind)
{
    pthread_mutex_lock(&c->mutex);
    int64_t used = c->slots[kind].used;
    pthread_mutex_unlock(&c->mutex);
    return used;
}

/* What each record is worth by the rule that decides, for the owner to read between passes. */
const double *hetrun_experts_worth(struct cache *c)
{
    return worth_by(c, c->rule);
}

/* The tokens after which choices count for half now. */
double hetrun_experts_half_life(struct cache *c)
{
    return c->setup.half_life[c->rule];
}

const int32_t *hetrun_experts_trace(struct cache *c)
{
    return c->trace;
}

const struct expert_supply *hetrun_experts_supply(struct cache *c)
{
    return &c->supply;
}

void hetrun_experts_close(struct cache *c)
{
    pthread_mutex_lock(&c->mutex);
    c->closing = 1;
    STORE(c->source.stopped, 1);
    pthread_cond_broadcast(&c->room);
    pthread_mutex_unlock(&c->mutex);
    for (int64_t i = 0; i < c->started; i++) pthread_join(c->threads[i], NULL);
    if (c->map)
        munmap(c->map, c->map_bytes);
    for (int64_t i = 0; c->slots && i < c->setup.kinds; i++) free(c->slots[i].record);
    free(c->record), free(c->first), free(c->slots), free(c->known), free(c->worth), free(c->buffer);
    for (int64_t i = 0; i < RULES; i++) free(c->trial[i].there);
    free(c->sample);
    free(c->threads), free(c->hits), free(c->misses), free(c->wave), free(c->trace), free(c->source.files);
    free(c);
}

/* ---- how it begins ---- */

static void *copied(const void *from, int64_t count, size_t size)
{
    void *to = malloc((size_t)(count + 1) * size);
    if (to && count)
        memcpy(to, from, (size_t)count * size);
    return to;
}

static int find_buffers(struct cache *c)
{
    const struct cache_setup *s = &c->setup;
    c->buffer = calloc((size_t)s->buffers, sizeof *c->buffer);
    c->map_bytes = (size_t)(s->buffers * s->buffer_bytes + HUGE_PAGE);
    c->map = mmap(NULL, c->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (c->map == MAP_FAILED)
        c->map = NULL;
    if (!c->buffer || !c->map)
        return ENOMEM;
    uint8_t *memory = (uint8_t *)(((uintptr_t)c->map + HUGE_PAGE - 1) & -(uintptr_t)HUGE_PAGE);
#if defined(MADV_HUGEPAGE)
    madvise(memory, (size_t)(s->buffers * s->buffer_bytes), MADV_HUGEPAGE);
#endif
    for (int64_t i = 0; i < s->buffers; i++)
        c->buffer[i] = (struct buffer){FREE, NONE, 0, 0, 0, 0, 0, memory + i * s->buffer_bytes};
    return 0;
}

static int find_slots(struct cache *c)
{
    c->slots = calloc((size_t)c->setup.kinds, sizeof *c->slots);
    for (int64_t i = 0; c->slots && i < c->setup.kinds; i++) {
        struct slots *s = &c->slots[i];
        s->kind = c->setup.kind[i];
        s->record = malloc((size_t)(s->kind.most + 1) * sizeof *s->record);
        for (int64_t j = 0; s->record && j < s->kind.most; j++) s->record[j] = NONE;
        if (!s->record)
            return ENOMEM;
    }
    return c->slots ? 0 : ENOMEM;
}

static int find_tables(struct cache *c)
{
    const struct cache_setup *s = &c->setup;
    size_t records = (size_t)s->records + 1;
    c->record = copied(s->record, s->records, sizeof *c->record);
    c->first = copied(s->first, s->mixtures + 1, sizeof *c->first);
    c->source.files = copied(s->file, s->files, sizeof *c->source.files);
    c->known = malloc(records * sizeof *c->known);
    c->worth = malloc(records * RULES * sizeof *c->worth);
    c->hits = malloc(records * sizeof *c->hits);
    c->misses = malloc(records * sizeof *c->misses);
    c->wave = malloc(records * sizeof *c->wave);
    c->threads = calloc((size_t)s->threads + 1, sizeof *c->threads);
    c->trace = calloc((size_t)s->trace + 1, 3 * sizeof *c->trace);
    if (!c->record || !c->first || !c->source.files || !c->known || !c->worth || !c->hits || !c->misses ||
        !c->wave || !c->threads || !c->trace)
        return ENOMEM;
    for (int64_t i = 0; i < s->records; i++) {
        c->known[i] = (struct known){NONE, NONE, 0, 0};
    }
    for (int64_t i = 0; i < s->records * RULES; i++) c->worth[i] = NEVER;
    return 0;
}

/* For trying rules. */
static int find_trials(struct cache *c)
{
    c->rule = c->setup.rule;
    c->sample = malloc((size_t)(c->setup.records + 1) * sizeof *c->sample);
    if (!c->sample)
        return ENOMEM;
    for (int64_t i = 0; i < RULES; i++)
        if (!(c->trial[i].there = calloc((size_t)c->setup.records + 1, 1)))
            return ENOMEM;
    for (int64_t mixture = 0; mixture < c->setup.mixtures; mixture++)
        for (int64_t i = c->first[mixture]; i < c->first[mixture + 1]; i++) {
            struct slots *s = &c->slots[c->record[i].kind];
            s->records++;
            if (is_sampled(c, mixture))
                s->sampled++, c->sample[c->sampled++] = i;
        }
    return 0;
}

/* NULL with errno. */
struct cache *hetrun_experts_open(const struct cache_setup *setup)
{
    struct cache *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->supply = (struct expert_supply){c, hetrun_experts_want, hetrun_experts_hint, hetrun_experts_next,
                                       hetrun_experts_packed, hetrun_experts_doze, hetrun_experts_wake};
    c->setup = *setup;
    c->source.read = setup->read ? setup->read : pread;
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->room, NULL);
    pthread_cond_init(&c->arrived, NULL);
    pthread_cond_init(&c->still, NULL);
    pthread_cond_init(&c->turn, NULL);
    int error = find_tables(c);
    if (!error)
        error = find_slots(c);
    if (!error)
        error = find_trials(c);
    if (!error)
        error = find_buffers(c);
    if (!error)
        error = start_threads(c->threads, &c->started, c->setup.threads, reader, c);
    if (!error)
        return c;
    hetrun_experts_close(c);
    errno = error;
    return NULL;
}
