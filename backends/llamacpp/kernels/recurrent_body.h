/* The work itself, in vectors of LANES floats. Included once for each set of instructions. */

#define vf NAME(vf)
#define vi NAME(vi)

INLINE vf NAME(load)(const float *x) {
    vf v;
    memcpy(&v, x, sizeof(v));
    return v;
}

INLINE void NAME(store)(float *x, vf v) { memcpy(x, &v, sizeof(v)); }

INLINE vf NAME(all)(float x) { return x - (vf){0}; }

/* e to the power of x, kept between e^-87 and e^88. */
INLINE vf NAME(power)(vf x) {
    const vf most = NAME(all)(88.0f), least = NAME(all)(-87.0f);
    const float round = 12582912.0f; /* adding it leaves the nearest integer in the lowest bits */
    vi above = (vi)(x > most), below = (vi)(x < least);
    x = (vf)((above & (vi)most) | (~above & (vi)x));
    x = (vf)((below & (vi)least) | (~below & (vi)x));
    vf shifted = x * 1.44269504088896341f + round, n = shifted - round;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return y * (vf)(((vi)shifted << 23) + (127 << 23));
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

/* Columns from `from`, LANES at once, of all tokens of a sequence. */
INLINE void NAME(convolve_columns)(const struct convolution *c, const struct sequence *s, const float *before,
                                   int64_t from, int64_t n) {
    enum { MOST_TAPS = 64 };
    float taps[MOST_TAPS][LANES];
    for (int64_t i = 0; i < c->taps; i++)
        for (int64_t j = 0; j < LANES; j++) taps[i][j] = j < n ? c->kernel[(from + j) * c->taps + i] : 0;
    for (int64_t t = s->first; t < s->end; t++) {
        vf sum = {0};
        for (int64_t i = 0; i < c->taps; i++) {
            const float *row = NAME(row_of)(c, s, before, t - c->taps + 1 + i);
            if (!row) continue;
            vf x = {0};
            if (n == LANES)
                x = NAME(load)(row + from);
            else
                memcpy(&x, row + from, n * sizeof(float));
            sum += x * NAME(load)(taps[i]);
        }
        sum /= NAME(power)(-sum) + 1.0f;
        float *out = c->out + t * c->out_stride + from;
        if (n == LANES)
            NAME(store)(out, sum);
        else
            memcpy(out, &sum, n * sizeof(float));
    }
}

static void NAME(convolve)(const struct convolution *c, int64_t ith, int64_t nth) {
    const int64_t lines = (c->width + 15) / 16, each = (lines + nth - 1) / nth * 16;
    const int64_t from = ith * each, to = at_most(from + each, c->width);
    if (from >= to) return;
    for (int64_t i = 0; i < c->pass->n; i++) {
        const struct sequence *s = &c->pass->sequences[i];
        const float *before = s->read == NO_SLOT ? NULL : c->states + s->read * c->stride;
        int64_t at = from;
        for (; at + LANES <= to; at += LANES) NAME(convolve_columns)(c, s, before, at, LANES);
        if (at < to) NAME(convolve_columns)(c, s, before, at, to - at);
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
};

INLINE float NAME(total)(vf x) {
    float lanes[LANES], sum = 0;
    memcpy(lanes, &x, sizeof(lanes));
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

INLINE float NAME(power_of_one)(float x) { return NAME(power)(NAME(all)(x))[0]; }

/* A row of k_dim floats divided by its length, zeros behind it. */
INLINE void NAME(normed)(const struct delta *d, const float *x, float scale, float *out) {
    memcpy(out, x, d->k_dim * sizeof(float));
    memset(out + d->k_dim, 0, (d->row - d->k_dim) * sizeof(float));
    vf squares = {0};
    for (int64_t j = 0; j < d->row; j += LANES) squares += NAME(load)(out + j) * NAME(load)(out + j);
    scale /= sqrtf(NAME(total)(squares) + (float)d->eps);
    for (int64_t j = 0; j < d->row; j += LANES) NAME(store)(out + j, NAME(load)(out + j) * scale);
}

/* log(1 + e^x) */
static inline float NAME(softplus)(float x) { return x > 20 ? x : log1pf(expf(x)); }

static void NAME(prepare)(const struct delta *d, int64_t head, int64_t token, float *memory, struct NAME(token) *t) {
    const int64_t of = d->tiled ? head % d->k_heads : head / (d->v_heads / d->k_heads);
    const float *q = d->x + token * d->x_stride + of * d->k_dim, *k = q + d->k_heads * d->k_dim;
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
    t->beta = 1.0f / (1.0f + expf(-d->rate[token * d->rate_stride + head]));
}

/* Four sums of vectors. */
INLINE void NAME(sums)(const vf x[4], float out[4]) {
    typedef float quarter __attribute__((vector_size(16)));
    vf folded = NAME(fold)(x);
    quarter parts[LANES / 4];
    memcpy(parts, &folded, sizeof(folded));
    for (int i = 1; i < LANES / 4; i++) parts[0] += parts[i];
    memcpy(out, parts, sizeof(parts[0]));
}

/* `n` vectors of TOGETHER rows through some tokens: s is their state. `v` and `out`: of the first token. */
INLINE void NAME(go_through)(const struct delta *d, const int64_t n, vf *s, const struct NAME(token) *tokens,
                             int64_t count, const float *v, float *out) {
    for (int64_t i = 0; i < count; i++, v += d->x_stride, out += d->out_stride) {
        const struct NAME(token) *t = &tokens[i];
        vf by_key[TOGETHER] = {0}, by_query[TOGETHER] = {0};
        for (int64_t j = 0; j < n; j++) {
            vf k = NAME(load)(t->k + j * LANES), q = NAME(load)(t->q + j * LANES);
            UNROLL for (int r = 0; r < TOGETHER; r++) {
                by_key[r] += s[r * n + j] * k;
                by_query[r] += s[r * n + j] * q;
            }
        }
        float known[TOGETHER], answer[TOGETHER];
        NAME(sums)(by_key, known);
        NAME(sums)(by_query, answer);
        vf learnt[TOGETHER];
        UNROLL for (int r = 0; r < TOGETHER; r++) {
            float missing = t->beta * (v[r] - t->g * known[r]);
            out[r] = t->g * answer[r] + missing * t->kq;
            learnt[r] = NAME(all)(missing);
        }
        for (int64_t j = 0; j < n; j++) {
            vf k = NAME(load)(t->k + j * LANES);
            UNROLL for (int r = 0; r < TOGETHER; r++) s[r * n + j] = s[r * n + j] * t->g + learnt[r] * k;
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

/* TOGETHER rows of a head from `row` on, of which only `real` are there, through tokens from `first` on. */
static void NAME(rows_through)(const struct delta *d, const float *from, float *to, int64_t head, int64_t row,
                               int64_t real, const struct NAME(token) *tokens, int64_t first, int64_t count) {
    enum { MOST = 4096 };
    vf s[TOGETHER * MOST / LANES];
    const int64_t n = d->row / LANES, at = (head * d->v_dim + row) * d->row, column = head * d->v_dim + row;
    const float *v = d->x + first * d->x_stride + 2 * d->k_heads * d->k_dim + column;
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
                for (int64_t j = 0; j < n; j++) NAME(store)(state + at + r * d->row + j * LANES, s[r * n + j]);
        done = end;
    }
    /* The next tokens go on from there. */
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
            NAME(rows_through)(d, before, last, head, row, at_most(TOGETHER, to - row), tokens, first, count);
        before = d->pass->write[first + count - 1] == NO_SLOT
                     ? last
                     : d->states + d->pass->write[first + count - 1] * d->stride;
    }
}

static void NAME(remember)(const struct delta *d, int64_t ith, int64_t nth) {
    const int64_t each = units_of_head(d), of_sequence = d->v_heads * each, units = d->pass->n * of_sequence;
    if (ith < d->slots) {
        for (;;) {
            int64_t i = __atomic_fetch_add(d->counters, 1, __ATOMIC_RELAXED);
            if (i >= units) break;
            const int64_t part = i % each, head = i / each % d->v_heads;
            NAME(unit)(d, &d->pass->sequences[i / of_sequence], head, part * UNIT_ROWS,
                       at_most((part + 1) * UNIT_ROWS, d->v_dim), d->scratch + ith * d->scratch_size);
        }
    }
    /* Nobody takes a unit any more once all are here: the counters are ready for the next call. */
    if (__atomic_add_fetch(d->counters + 1, 1, __ATOMIC_ACQ_REL) == nth) memset(d->counters, 0, 2 * sizeof(int32_t));
}

#undef vf
#undef vi
