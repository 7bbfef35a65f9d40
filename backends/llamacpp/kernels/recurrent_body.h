/* The work itself, in vectors of LANES floats. Included once for each set of instructions. */

#undef AT_ONCE
#define AT_ONCE (LANES == 16 ? 8 : 4) /* rows whose sums with a key and a query stay in registers */

#define vf NAME(vf)
#define vi NAME(vi)

/* e to the power of x, kept between e^-87 and e^88. */
INLINE vf NAME(bounded_power)(vf x) {
    const vf most = NAME(all)(88.0f), least = NAME(all)(-87.0f);
    x = NAME(choose)((vi)(x > most), most, x);
    return NAME(power)(NAME(choose)((vi)(x < least), least, x));
}

/* --- the convolution */

/* One row of `taps` ago up to now, for LANES columns. `before`: the state, the oldest row first. */
INLINE const float *NAME(row_of)(const struct convolution *c, const struct sequence *s, const float *before, int64_t at) {
    if (at >= s->first) return c->x + at * c->x_stride;
    return before ? before + (at - s->first + c->taps - 1) * c->width : NULL;
}

/* The state after a token: the last rows of x, and of the state before where there are too few. */
INLINE void NAME(keep_rows)(const struct convolution *c, const struct sequence *s, const float *before, int64_t token,
                            float *state, int64_t from, int64_t n) {
    for (int64_t i = 0; i < c->taps - 1; i++) {
        const float *row = NAME(row_of)(c, s, before, token - c->taps + 2 + i);
        float *kept = state + i * c->width + from;
        if (row)
            memcpy(kept, row + from, n * sizeof(float));
        else
            memset(kept, 0, n * sizeof(float));
    }
}

/* One row of results: n columns from `from` on, by rows of x of which missing ones are NULL. */
INLINE void NAME(convolve_row)(const struct convolution *c, const float *const *rows, float (*kernel)[COLUMNS],
                               const int64_t taps, const int silu, int64_t from, int64_t n, float *out) {
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        vf sum = c->bias ? NAME(load)(c->bias + from + j) : (vf){0};
        for (int64_t i = 0; i < taps; i++)
            if (rows[i]) sum += NAME(load)(rows[i] + from + j) * NAME(load)(kernel[i] + j);
        NAME(store)(out + from + j, silu ? sum / (NAME(bounded_power)(-sum) + 1.0f) : sum);
    }
    for (; j < n; j++) {
        vf sum = {0};
        if (c->bias) sum[0] = c->bias[from + j];
        for (int64_t i = 0; i < taps; i++)
            if (rows[i]) sum[0] += rows[i][from + j] * kernel[i][j];
        if (silu) sum /= NAME(bounded_power)(-sum) + 1.0f;
        out[from + j] = sum[0];
    }
}

/* The taps of n columns, so that those of neighbours lie side by side. */
INLINE void NAME(turn)(const float *x, float (*kernel)[COLUMNS], const int64_t taps, int64_t n) {
    int64_t j = 0;
    for (; j + 16 <= n; j += 16)
        for (int64_t i = 0; i < taps; i++)
            UNROLL for (int64_t l = 0; l < 16; l++) kernel[i][j + l] = x[(j + l) * taps + i];
    for (; j < n; j++)
        for (int64_t i = 0; i < taps; i++) kernel[i][j] = x[j * taps + i];
}

/* n columns from `from` on of all tokens of a sequence: so few that some rows of them stay in the first cache. */
static void NAME(convolve_columns)(const struct convolution *c, const struct sequence *s, const float *before,
                                   int64_t from, int64_t n) {
    float kernel[MOST_TAPS][COLUMNS];
    const float *rows[MOST_TAPS];
    if (c->taps == 4)
        NAME(turn)(c->kernel + from * 4, kernel, 4, n);
    else
        NAME(turn)(c->kernel + from * c->taps, kernel, c->taps, n);
    for (int64_t t = s->first; t < s->end; t++) {
        for (int64_t i = 0; i < c->taps; i++) rows[i] = NAME(row_of)(c, s, before, t - c->taps + 1 + i);
        float *out = c->out + t * c->out_stride;
        if (c->taps == 4 && c->silu && rows[0])
            NAME(convolve_row)(c, rows, kernel, 4, 1, from, n, out);
        else
            NAME(convolve_row)(c, rows, kernel, c->taps, c->silu != 0, from, n, out);
    }
}

static void NAME(convolve)(const struct convolution *c, int64_t ith, int64_t nth) {
    const int64_t lines = (c->width + 15) / 16, each = (lines + nth - 1) / nth * 16;
    const int64_t from = ith * each, to = at_most(from + each, c->width);
    if (from >= to) return;
    for (int64_t i = 0; i < c->pass->n; i++) {
        const struct sequence *s = &c->pass->sequences[i];
        const float *before = s->read == NO_SLOT ? NULL : c->states + s->read * c->stride;
        for (int64_t at = from; at < to; at += COLUMNS)
            NAME(convolve_columns)(c, s, before, at, at_most(COLUMNS, to - at));
        for (int64_t t = s->first; t < s->end; t++)
            if (c->pass->write[t] != NO_SLOT)
                NAME(keep_rows)(c, s, before, t, c->states + c->pass->write[t] * c->stride, from, to - from);
    }
}

/* --- the delta rule */

/* A token as all rows of a head see it. */
struct NAME(token) {
    const float *k, *q;
    float g, beta, kq; /* what is left of the state, how much is learnt, k times q */
    float taken, skip; /* how much of what is known is taken off v, and of v is in the result */
};

INLINE float NAME(total)(vf x) {
    float lanes[LANES], sum = 0;
    memcpy(lanes, &x, sizeof(lanes));
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

/* A row of k_dim floats divided by its length, zeros behind it. */
INLINE void NAME(normed)(const struct delta *d, const float *x, float scale, float *out) {
    memcpy(out, x, d->k_dim * sizeof(float));
    memset(out + d->k_dim, 0, (d->row - d->k_dim) * sizeof(float));
    if (d->mamba) return;
    vf squares = {0};
    for (int64_t j = 0; j < d->row; j += LANES) squares += NAME(load)(out + j) * NAME(load)(out + j);
    scale /= sqrtf(NAME(total)(squares) + (float)d->eps);
    for (int64_t j = 0; j < d->row; j += LANES) NAME(store)(out + j, NAME(load)(out + j) * scale);
}

/* log(1 + e^x) */
static inline float NAME(softplus)(float x) { return x > 20 ? x : log1pf(expf(x)); }

static void NAME(prepare)(const struct delta *d, int64_t head, int64_t token, float *memory, struct NAME(token) *t) {
    const int64_t of = d->tiled ? head % d->k_heads : head / (d->v_heads / d->k_heads);
    const float *row = d->x + token * d->x_stride + of * d->k_dim, *q = row + d->q_at, *k = row + d->k_at;
    float *key = memory, *query = memory + d->row;
    NAME(normed)(d, k, 1.0f, key);
    NAME(normed)(d, q, 1.0f / sqrtf((float)d->k_dim), query);
    vf both = {0};
    for (int64_t j = 0; j < d->row; j += LANES) both += NAME(load)(key + j) * NAME(load)(query + j);
    const float decay = d->log ? -expf(d->decays[head]) : d->decays[head];
    const float x = d->decay[token * d->decay_stride + head] + d->biases[head];
    t->k = key;
    t->q = query;
    t->kq = NAME(total)(both);
    t->g = expf(decay * NAME(softplus)(x));
    const float rate = d->rate[token * d->rate_stride + head];
    t->beta = d->mamba ? NAME(softplus)(rate + d->biases[head]) : 1.0f / (1.0f + expf(-rate));
    t->taken = d->mamba ? 0.0f : t->g;
    t->skip = d->skips ? d->skips[head] : 0.0f;
}

typedef float NAME(four) __attribute__((vector_size(16)));

/* Four sums of vectors. */
INLINE NAME(four) NAME(sums)(const vf x[4]) {
    vf folded = NAME(fold)(x);
    NAME(four) parts[LANES / 4];
    memcpy(parts, &folded, sizeof(folded));
    for (int i = 1; i < LANES / 4; i++) parts[0] += parts[i];
    return parts[0];
}

/* Sums of AT_ONCE rows from `first` on, of n vectors each, times a token's key and its query. */
INLINE void NAME(dots)(const vf *s, const int64_t n, const int first, const struct NAME(token) *t, NAME(four) *known,
                       NAME(four) *answer) {
    vf by_key[AT_ONCE] = {0}, by_query[AT_ONCE] = {0};
    for (int64_t j = 0; j < n; j++) {
        vf k = NAME(load)(t->k + j * LANES), q = NAME(load)(t->q + j * LANES);
        UNROLL for (int r = 0; r < AT_ONCE; r++) {
            by_key[r] += s[(first + r) * n + j] * k;
            by_query[r] += s[(first + r) * n + j] * q;
        }
    }
    UNROLL for (int r = 0; r < AT_ONCE; r += 4) {
        known[(first + r) / 4] = NAME(sums)(by_key + r);
        answer[(first + r) / 4] = NAME(sums)(by_query + r);
    }
}

/* `n` vectors of TOGETHER rows through some tokens: s is their state. `v` and `out`: of the first token. */
INLINE void NAME(go_through)(const struct delta *d, const int64_t n, vf *s, const struct NAME(token) *tokens,
                             int64_t count, const float *v, float *out) {
    for (int64_t i = 0; i < count; i++, v += d->x_stride, out += d->out_stride) {
        const struct NAME(token) *t = &tokens[i];
        NAME(four) known[TOGETHER / 4], answer[TOGETHER / 4];
        UNROLL for (int first = 0; first < TOGETHER; first += AT_ONCE) NAME(dots)(s, n, first, t, known, answer);
        float learnt[TOGETHER];
        UNROLL for (int r = 0; r < TOGETHER; r += 4) {
            NAME(four) right;
            memcpy(&right, v + r, sizeof(right));
            NAME(four) missing = (right - known[r / 4] * t->taken) * t->beta;
            answer[r / 4] = answer[r / 4] * t->g + missing * t->kq + right * t->skip;
            memcpy(out + r, &answer[r / 4], sizeof(right));
            memcpy(learnt + r, &missing, sizeof(missing));
        }
        IN_MEMORY(learnt); /* from there it comes in all lanes at once; out of a register it would take shuffles */
        for (int64_t j = 0; j < n; j++) {
            vf k = NAME(load)(t->k + j * LANES);
            UNROLL for (int r = 0; r < TOGETHER; r++)
                s[r * n + j] = s[r * n + j] * t->g + NAME(all)(learnt[r]) * k;
        }
    }
}

/* The same, for the usual widths with a constant. */
static void NAME(go)(const struct delta *d, vf *s, const struct NAME(token) *tokens, int64_t count, const float *v,
                     float *out) {
    if (d->row == 128)
        NAME(go_through)(d, 128 / LANES, s, tokens, count, v, out);
    else
        NAME(go_through)(d, d->row / LANES, s, tokens, count, v, out);
}

/* Past the caches, where nothing reads it before they have all held other things: the line need not be read. */
INLINE void NAME(put)(float *to, vf x, int past) {
#if defined(__x86_64__)
    if (past && (uintptr_t)to % sizeof(vf) == 0) {
#if LANES == 16
        _mm512_stream_ps(to, (__m512)x);
#elif LANES == 8
        _mm256_stream_ps(to, (__m256)x);
#else
        _mm_stream_ps(to, (__m128)x);
#endif
        return;
    }
#endif
    NAME(store)(to, x);
}

/* TOGETHER rows of a head from `row` on, of which only `real` are there, through tokens from `first` on. */
static void NAME(rows_through)(const struct delta *d, const float *from, float *to, int64_t head, int64_t row,
                               int64_t real, const struct NAME(token) *tokens, int64_t first, int64_t count,
                               int is_last) {
    vf s[TOGETHER * MOST_ROW / LANES];
    const int64_t n = d->row / LANES, at = (head * d->v_dim + row) * d->row, column = head * d->v_dim + row;
    const float *v = d->x + first * d->x_stride + d->v_at + column;
    float *out = d->out + first * d->out_stride + column;
    for (int64_t r = 0; r < TOGETHER; r++)
        for (int64_t j = 0; j < n; j++)
            s[r * n + j] = from && r < real ? NAME(load)(from + at + r * d->row + j * LANES) : NAME(all)(0);
    int64_t done = 0;
    while (done < count) {
        int64_t end = done;
        while (end < count - 1 && d->pass->write[first + end] == NO_SLOT) end++;
        end++;
        if (real == TOGETHER) {
            NAME(go)(d, s, tokens + done, end - done, v + done * d->x_stride, out + done * d->out_stride);
        } else {
            for (int64_t i = done; i < end; i++) { /* no columns of others are read or written */
                float some[TOGETHER] = {0}, result[TOGETHER];
                memcpy(some, v + i * d->x_stride, real * sizeof(float));
                NAME(go)(d, s, tokens + i, 1, some, result);
                memcpy(out + i * d->out_stride, result, real * sizeof(float));
            }
        }
        int64_t slot = d->pass->write[first + end - 1];
        float *state = slot == NO_SLOT ? to : d->states + slot * d->stride;
        if (slot != NO_SLOT || end == count)
            for (int64_t r = 0; r < real; r++)
                for (int64_t j = 0; j < n; j++) NAME(put)(state + at + r * d->row + j * LANES, s[r * n + j], is_last);
        done = end;
    }
}

/* Rows of a head from `from` to `to`, through all tokens of a sequence. */
static void NAME(unit)(const struct delta *d, const struct sequence *s, int64_t head, int64_t from, int64_t to,
                       float *memory) {
    const float *before = s->read == NO_SLOT ? NULL : d->states + s->read * d->stride;
    float *last = d->states + d->pass->write[s->end - 1] * d->stride;
    struct NAME(token) tokens[TOKENS];
    for (int64_t first = s->first; first < s->end; first += TOKENS) {
        const int64_t count = at_most(TOKENS, s->end - first);
        for (int64_t i = 0; i < count; i++)
            NAME(prepare)(d, head, first + i, memory + 2 * d->row * i, &tokens[i]);
        for (int64_t row = from; row < to; row += TOGETHER)
            NAME(rows_through)(d, before, last, head, row, at_most(TOGETHER, to - row), tokens, first, count,
                               first + count == s->end);
        before = d->pass->write[first + count - 1] == NO_SLOT
                     ? last
                     : d->states + d->pass->write[first + count - 1] * d->stride;
    }
}

static void NAME(remember)(const struct delta *d, int64_t ith, int64_t nth) {
    const int64_t rows = unit_rows(d, nth), each = (d->v_dim + rows - 1) / rows;
    const int64_t of_sequence = d->v_heads * each, units = d->pass->n * of_sequence;
    if (ith < d->slots) {
        for (;;) {
            int64_t i = __atomic_fetch_add(d->counters, 1, __ATOMIC_RELAXED);
            if (i >= units) break;
            const int64_t part = i % each, head = i / each % d->v_heads;
            NAME(unit)(d, &d->pass->sequences[i / of_sequence], head, part * rows,
                       at_most((part + 1) * rows, d->v_dim), d->scratch + ith * d->scratch_size);
        }
    }
#if defined(__x86_64__)
    _mm_sfence(); /* what went past the caches is there for all threads now */
#endif
    /* No thread takes a unit any more once all are here: the counters are ready for the next call. */
    if (__atomic_add_fetch(d->counters + 1, 1, __ATOMIC_ACQ_REL) == nth) memset(d->counters, 0, 2 * sizeof(int32_t));
}

#undef vf
#undef vi
