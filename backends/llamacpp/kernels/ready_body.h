/* Products by weights that are unpacked first: once for a run of rows of activations, some blocks at a time, so
   that neither they nor the activations leave the first cache. Sums wait in memory, and are made in the same
   order. Included by products_body.h.

   All types go this way if there are several rows, but for those that few rows, or with some instructions any
   number, are multiplied by as they lie there (MANY, WORTH_UNPACKING). What is unpacked looks the same for several
   types. */

/* A block of all rows of a group. */
struct NAME(ready) {
    uint8_t words[8][64];
    float scale[ROWS], other[ROWS], low[ROWS], other_low[ROWS];
} __attribute__((aligned(64)));

INLINE void NAME(unpack_part)(const int type, const uint8_t *step, const int part, struct NAME(ready) *out) {
    const int blocks = blocks_of(type), first_cache = asks_for_first_cache(type);
    const int run = READY / blocks * (int)step_bytes(form_of(type)); /* while these are multiplied, the next come */
    const uint8_t *own = step + part * LANES * 2, *words = step + head(form_of(type)) + part * LANES * 4;
    struct NAME(factors) f = NAME(factors_of)(type, own, words);
    UNROLLED for (int b = 0; b < blocks; b++, out++) {
        NAME(ask)(type, first_cache, run, step + part * 64, b, blocks);
        NAME(factors_at)(type, &f, own, words, b);
        UNROLLED for (int k = 0; k < 8; k++) {
            vu w = NAME(word)(type, words, b, k);
            memcpy(out->words[k] + part * LANES * 4, &w, sizeof(w));
        }
        NAME(store)(out->scale + part * LANES, f.scale);
        if (by_halves(type)) NAME(store)(out->other + part * LANES, f.other);
        if (has_low(type) || has_lows(type)) NAME(store)(out->low + part * LANES, f.low);
        if (has_lows(type)) NAME(store)(out->other_low + part * LANES, f.other_low);
    }
}

/* Some steps of a group. */
INLINE void NAME(unpack_steps)(const int type, const uint8_t *weights, int64_t blocks, struct NAME(ready) *out) {
    const int each = blocks_of(type);
    for (; blocks > 0; blocks -= each, weights += step_bytes(form_of(type)), out += each)
        for (int part = 0; part < 16 / LANES; part++) NAME(unpack_part)(type, weights, part, out);
}

#define TYPES_READY(EACH) TYPES_UNPACKED(EACH) MORE_TYPES_READY(EACH)
#define KINDS_READY(EACH) EACH(Q5_0) EACH(Q8_0) EACH(Q2_K) EACH(Q3_K) EACH(Q5_K) MORE_KINDS_READY(EACH)

#define UNPACK(name)                                                                                          \
    static void NAME(unpack_##name)(const uint8_t *weights, int64_t blocks, struct NAME(ready) *out) {        \
        NAME(unpack_steps)(TYPE_##name, weights, blocks, out);                                                \
    }
TYPES_READY(UNPACK)
#undef UNPACK

static void NAME(unpack)(int64_t type, const uint8_t *weights, int64_t blocks, struct NAME(ready) *out) {
#define UNPACK(name)                                                                                          \
    case TYPE_##name: NAME(unpack_##name)(weights, blocks, out); break;
    switch (type) { TYPES_READY(UNPACK) }
#undef UNPACK
}

/* Where sums wait: of each row of activations, a vector for each part. With SUMS_STAY they do so in registers. */
INLINE vf *NAME(sum_at)(vf *sums, const int t, const int part) { return sums + t * (16 / LANES) + part; }

/* Some parts of a block, each LANES rows, times n rows of activations. */
INLINE void NAME(add_ready)(const int type, const int n, const int parts, const struct NAME(ready) *w,
                            const int from, const struct rounded *x, vf *sums) {
    vi dots[AT_A_TIME][BATCH];
    UNROLLED for (int p = 0; p < parts; p++)
        UNROLLED for (int t = 0; t < n; t++) dots[p][t] = NAME(begin)(type, x[t].start[0]);
    UNROLLED for (int k = 0; k < 8; k++) {
        READ_WORD_LATER();
        vu v[AT_A_TIME];
        UNROLLED for (int p = 0; p < parts; p++)
            memcpy(v + p, w->words[k] + (from + p) * LANES * 4, sizeof(vu));
        UNROLLED for (int t = 0; t < n; t++)
            UNROLLED for (int p = 0; p < parts; p++)
                dots[p][t] = NAME(add)(type, dots[p][t], v[p], x[t].x, k);
    }
    UNROLLED for (int p = 0; p < parts; p++) {
        READ_WORD_LATER();
        struct NAME(factors) f = {.scale = NAME(load)(w->scale + (from + p) * LANES),
                                  .low = NAME(load)(w->low + (from + p) * LANES)};
        UNROLLED for (int t = 0; t < n; t++) {
            vf *sum = NAME(sum_at)(sums, t, from + p);
            *sum = NAME(with_block)(type, *sum, NAME(end)(type, dots[p][t], x[t].start[0]), &f, x + t);
        }
    }
}

/* Half a block of one part. */
INLINE void NAME(dot_ready)(const int type, const int n, const struct NAME(ready) *w, const int part,
                            const int half, vi *dots, const struct rounded *x) {
    UNROLLED for (int t = 0; t < n; t++)
        dots[t] = NAME(ints)(by_halves(type) ? start_of_half(type, x + t, half) : half ? 0 : x[t].start[0]);
    UNROLLED for (int k = 4 * half; k < 4 * half + 4; k += ROOM(type)) {
        READ_WORD_LATER();
        vu v[4];
        UNROLLED for (int i = 0; i < 4; i++)
            if (i < ROOM(type)) memcpy(v + i, w->words[k + i] + part * LANES * 4, sizeof(vu));
        UNROLLED for (int t = 0; t < n; t++) dots[t] = NAME(add_words)(type, dots[t], v, x[t].x, k, ROOM(type));
    }
}

/* The same for types that have scales for halves of a block, or whose sums have no room for a whole one. */
INLINE void NAME(add_ready_halves)(const int type, const int n, const struct NAME(ready) *w, const int part,
                                   const struct rounded *x, vf *sums) {
    vi dots[BATCH], others[BATCH];
    struct NAME(factors) f = {0};
    NAME(dot_ready)(type, n, w, part, 0, dots, x);
    NAME(dot_ready)(type, n, w, part, 1, others, x);
    READ_WORD_LATER();
    f.scale = NAME(load)(w->scale + part * LANES), f.low = NAME(load)(w->low + part * LANES);
    if (by_halves(type)) f.other = NAME(load)(w->other + part * LANES);
    if (has_lows(type)) f.other_low = NAME(load)(w->other_low + part * LANES);
    UNROLLED for (int t = 0; t < n; t++) {
        vf *sum = NAME(sum_at)(sums, t, part);
        *sum = by_halves(type) ? NAME(with_halves)(type, *sum, dots[t], others[t], &f, x + t)
                               : NAME(with_block)(type, *sum, dots[t] + others[t], &f, x + t);
    }
}

INLINE void NAME(multiply_ready)(const int type, const int n, int64_t blocks, const struct NAME(ready) *w,
                                 const struct rounded *x, vf *waiting) {
#if SUMS_STAY
    vf sums[BATCH * (16 / LANES)];
    UNROLLED for (int t = 0; t < n; t++) sums[t] = waiting[t];
#else
    vf *sums = waiting;
#endif
    for (int64_t b = 0; b < blocks; b++, w++, x += n) {
        if (by_halves(type) || NEEDS_HALVES(type))
            UNROLLED for (int part = 0; part < 16 / LANES; part++)
                NAME(add_ready_halves)(type, n, w, part, x, sums);
        else
            UNROLLED for (int part = 0; part < 16 / LANES; part += AT_A_TIME)
                NAME(add_ready)(type, n, AT_A_TIME, w, part, x, sums);
    }
#if SUMS_STAY
    UNROLLED for (int t = 0; t < n; t++) waiting[t] = sums[t];
#endif
}

INLINE void NAME(multiply_ready_some)(const int type, int64_t n, int64_t blocks, const struct NAME(ready) *w,
                                      const struct rounded *x, vf *sums) {
#if SMALL
    NAME(multiply_ready)(type, (int)n, blocks, w, x, sums);
#else
    switch (n) {
        case 1: NAME(multiply_ready)(type, 1, blocks, w, x, sums); break;
        case 2: NAME(multiply_ready)(type, 2, blocks, w, x, sums); break;
        case 3: NAME(multiply_ready)(type, 3, blocks, w, x, sums); break;
        case 4: NAME(multiply_ready)(type, 4, blocks, w, x, sums); break;
#if BATCH == 8
        case 5: NAME(multiply_ready)(type, 5, blocks, w, x, sums); break;
        case 6: NAME(multiply_ready)(type, 6, blocks, w, x, sums); break;
        case 7: NAME(multiply_ready)(type, 7, blocks, w, x, sums); break;
        case 8: NAME(multiply_ready)(type, 8, blocks, w, x, sums); break;
#endif
    }
#endif
}

#define READY_KIND(name)                                                                                      \
    static void NAME(ready_##name)(int64_t n, int64_t blocks, const struct NAME(ready) *w,                    \
                                   const struct rounded *x, vf *sums) {                                       \
        NAME(multiply_ready_some)(TYPE_##name, n, blocks, w, x, sums);                                        \
    }
KINDS_READY(READY_KIND)
#undef READY_KIND

static void NAME(multiply_blocks)(int64_t type, int64_t n, int64_t blocks, const struct NAME(ready) *w,
                                  const struct rounded *x, vf *sums) {
#define READY_KIND(name)                                                                                      \
    case TYPE_##name: NAME(ready_##name)(n, blocks, w, x, sums); break;
    switch (unpacked_like(type)) { KINDS_READY(READY_KIND) }
#undef READY_KIND
}

#undef KINDS_READY
#undef TYPES_READY

/* A group of rows times n rows of activations: sums[n][ROWS]. */
static void NAME(multiply_unpacked)(int64_t type, int64_t n, vf *sums, const uint8_t *weights,
                                    const struct rounded *x, int64_t cols) {
    const int64_t all = cols / BLOCK, run = READY / blocks_of(type) * step_bytes(form_of(type));
    struct NAME(ready) ready[READY];
    memset(sums, 0, (size_t)n * ROWS * sizeof(float));
    for (int64_t b = 0; b < all; b += READY, weights += run) {
        int64_t blocks = at_most(READY, all - b);
        NAME(unpack)(type, weights, blocks, ready);
        for (int64_t t = 0; t < n; t += BATCH) {
            int64_t some = at_most(BATCH, n - t);
            NAME(multiply_blocks)(type, some, blocks, ready, x + t * all + b * some,
                                  sums + t * (16 / LANES));
        }
    }
}

/* Of n rows those that weights are unpacked for: of types that can do without, some whole batches. */
INLINE int64_t NAME(unpacked_rows)(int64_t type, int64_t n) {
    if (!as_it_lies(type)) return n > 1 + TWO_AS_ONE ? n : 0;
    int64_t whole = n / BATCH * BATCH;
    return WORTH_UNPACKING(type) && whole >= MANY ? whole : 0;
}

/* A group of columns of `out` for rows of activations from `first` on, as far as weights are unpacked for them. */
static int64_t NAME(group_unpacked)(const struct product *p, struct NAME(rows) rows, int64_t group,
                                    int64_t first, int64_t end, const struct rounded *x) {
    vf results[2][RUN * ROWS / LANES];
    int64_t all = NAME(unpacked_rows)(p->type, end - first);
    for (int64_t t = 0; t < all; t += RUN) {
        int64_t n = at_most(RUN, all - t);
        const struct rounded *mine = x + t * (p->cols / BLOCK);
        NAME(multiply_unpacked)(p->type, n, results[0], rows.first, mine, p->cols);
        if (rows.second) NAME(multiply_unpacked)(p->type, n, results[1], rows.second, mine, p->cols);
        NAME(finish)(p, first + t, n, group * ROWS, (const float *)results[0],
                     (const float *)results[1]);
    }
    return all;
}
