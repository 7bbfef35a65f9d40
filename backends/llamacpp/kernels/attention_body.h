/* The attention itself, in vectors of LANES floats. Included once for each set of instructions; names get
   its name through NAME. */

#define vf NAME(vf)
#define vi NAME(vi)

INLINE vf NAME(load)(const float *x) {
    vf v;
    memcpy(&v, x, sizeof(v));
    return v;
}

INLINE void NAME(store)(float *x, vf v) { memcpy(x, &v, sizeof(v)); }

INLINE vf NAME(all)(float x) { return x - (vf){0}; }

/* a where the mask is set, b elsewhere. */
INLINE vf NAME(choose)(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* e to the power of x, for x up to 88; 0 below -87. */
INLINE vf NAME(power)(vf x) {
    const float round = 12582912.0f; /* adding it leaves the nearest integer in the lowest bits */
    vf shifted = x * 1.44269504088896341f + round, n = shifted - round;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    y *= (vf)(((vi)shifted << 23) + (127 << 23));
    return (vf)((vi)y & ~(vi)(x < NAME(all)(-87.0f)));
}

INLINE float NAME(power_of_one)(float x) { return NAME(power)(NAME(all)(x))[0]; }

/* Scores between -cap and cap. */
INLINE vf NAME(capped)(vf score, float cap) {
    vf x = score * (2.0f / cap), limit = NAME(all)(40.0f);
    x = NAME(choose)((vi)(x > limit), limit, x);
    x = NAME(choose)((vi)(x < -limit), -limit, x);
    return cap - 2.0f * cap / (NAME(power)(x) + 1.0f);
}

/* One head of one row of a table as floats, zeros up to the padded width. */
INLINE void NAME(unpack)(float *out, const uint8_t *row, int64_t type, int64_t n, int64_t width) {
    int64_t i = 0;
    if (type == TYPE_F16) {
        const uint16_t *x = (const uint16_t *)row;
        for (; i + LANES <= n; i += LANES) NAME(store)(out + i, NAME(from_half)(x + i));
        for (; i < n; i++) out[i] = half_to_float(x[i]);
    } else if (type == TYPE_Q8_0) {
        for (; i < n; i += 32, row += 34) {
            uint16_t d;
            memcpy(&d, row, 2);
            float scale = half_to_float(d);
            for (int j = 0; j < 32; j += LANES)
                NAME(store)(out + i + j, NAME(from_bytes)((const int8_t *)row + 2 + j) * scale);
        }
    } else {
        memcpy(out, row, n * sizeof(float));
        i = n;
    }
    for (; i < width; i++) out[i] = 0;
}

/* LANES numbers of a row, from number d on. */
INLINE vf NAME(read)(const int type, const uint8_t *row, int64_t d) {
    if (type == TYPE_F16) return NAME(from_half)((const uint16_t *)row + d);
    return NAME(load)((const float *)row + d);
}

/* The products of n queries with the keys of a tile. */
INLINE void NAME(multiply)(const int n, const int type, float *scores, const float *queries,
                           const uint8_t *const rows[TILE], int64_t width) {
    vf folded[QUERIES][TILE / 4];
    for (int key = 0; key < TILE; key += 4) {
        vf sums[QUERIES][4];
        for (int q = 0; q < n; q++)
            for (int i = 0; i < 4; i++) sums[q][i] = (vf){0};
        for (int64_t d = 0; d < width; d += LANES) {
            vf k[4];
            for (int i = 0; i < 4; i++) k[i] = NAME(read)(type, rows[key + i], d);
            for (int q = 0; q < n; q++) {
                vf x = NAME(load)(queries + q * width + d);
                for (int i = 0; i < 4; i++) sums[q][i] += x * k[i];
            }
        }
        for (int q = 0; q < n; q++) folded[q][key / 4] = NAME(fold)(sums[q]);
    }
    for (int q = 0; q < n; q++) NAME(put_sums)(scores + q * BLOCK, folded[q]);
}

/* Adds values a to b of a tile, weighted, to the results of n queries; `wide` vectors of columns from d on. */
INLINE void NAME(add_columns)(const int n, const int wide, const int type, float *results, const float *weights,
                              const uint8_t *const rows[TILE], int64_t width, int64_t d, int a, int b) {
    vf sums[QUERIES][4];
    for (int q = 0; q < n; q++)
        for (int i = 0; i < wide; i++) sums[q][i] = NAME(load)(results + q * width + d + i * LANES);
    for (int key = a; key < b; key++) {
        vf v[4];
        for (int i = 0; i < wide; i++) v[i] = NAME(read)(type, rows[key], d + i * LANES);
        for (int q = 0; q < n; q++) {
            vf weight = NAME(all)(weights[q * BLOCK + key]);
            for (int i = 0; i < wide; i++) sums[q][i] += weight * v[i];
        }
    }
    for (int q = 0; q < n; q++)
        for (int i = 0; i < wide; i++) NAME(store)(results + q * width + d + i * LANES, sums[q][i]);
}

INLINE void NAME(add)(const int n, const int type, float *results, const float *weights,
                      const uint8_t *const rows[TILE], int64_t width, int a, int b) {
    int64_t d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES)
        NAME(add_columns)(n, 4, type, results, weights, rows, width, d, a, b);
    for (; d < width; d += LANES) NAME(add_columns)(n, 1, type, results, weights, rows, width, d, a, b);
}

/* What a thread works with: the query rows of some heads of a sequence, and what has become of them. */
struct NAME(state) {
    int64_t count;  /* query rows of one head of keys: those of the sequence times those of the group */
    int64_t width;  /* of a row of floats */
    float *queries; /* already multiplied by the scale */
    float *results;
    float *scores; /* BLOCK for each, later the weights of the values */
    float *highest, *sums;
    float *tile;
};

/* All queries with a tile of keys. */
INLINE void NAME(score_all)(const int type, const struct NAME(state) *t, const uint8_t *const rows[TILE],
                            float *queries, float *scores) {
    int64_t q = 0, width = t->width;
    for (; q + QUERIES <= t->count; q += QUERIES)
        NAME(multiply)(QUERIES, type, scores + q * BLOCK, queries + q * width, rows, width);
#if QUERIES == 4
    if (t->count - q == 3)
        NAME(multiply)(3, type, scores + q * BLOCK, queries + q * width, rows, width);
    else if (t->count - q == 2)
        NAME(multiply)(2, type, scores + q * BLOCK, queries + q * width, rows, width);
#endif
    if (t->count - q == 1) NAME(multiply)(1, type, scores + q * BLOCK, queries + q * width, rows, width);
}

/* All queries' weights with values a to b of a tile. */
INLINE void NAME(add_all)(const int type, const struct NAME(state) *t, const uint8_t *const rows[TILE],
                          float *results, const float *weights, int a, int b) {
    int64_t q = 0, width = t->width;
    for (; q + QUERIES <= t->count; q += QUERIES)
        NAME(add)(QUERIES, type, results + q * width, weights + q * BLOCK, rows, width, a, b);
#if QUERIES == 4
    if (t->count - q == 3)
        NAME(add)(3, type, results + q * width, weights + q * BLOCK, rows, width, a, b);
    else if (t->count - q == 2)
        NAME(add)(2, type, results + q * width, weights + q * BLOCK, rows, width, a, b);
#endif
    if (t->count - q == 1) NAME(add)(1, type, results + q * width, weights + q * BLOCK, rows, width, a, b);
}

static void NAME(score_floats)(const struct NAME(state) *t, const uint8_t *const rows[TILE], float *queries,
                               float *scores) {
    NAME(score_all)(TYPE_F32, t, rows, queries, scores);
}

static void NAME(score_halves)(const struct NAME(state) *t, const uint8_t *const rows[TILE], float *queries,
                               float *scores) {
    NAME(score_all)(TYPE_F16, t, rows, queries, scores);
}

static void NAME(add_floats)(const struct NAME(state) *t, const uint8_t *const rows[TILE], float *results,
                             const float *weights, int a, int b) {
    NAME(add_all)(TYPE_F32, t, rows, results, weights, a, b);
}

static void NAME(add_halves)(const struct NAME(state) *t, const uint8_t *const rows[TILE], float *results,
                             const float *weights, int a, int b) {
    NAME(add_all)(TYPE_F16, t, rows, results, weights, a, b);
}

/* Whether a table's numbers are used as they lie there: with few queries, halves are made floats as often as
   they are needed. */
static int NAME(direct)(const struct layer *a, const struct NAME(state) *t) {
    return t->width == a->head_dim && (a->type == TYPE_F32 || (a->type == TYPE_F16 && t->count <= QUERIES));
}

/* Rows of a table made floats. */
static void NAME(unpack_tile)(const struct layer *a, const struct NAME(state) *t, const uint8_t *rows[TILE],
                              int from, int to) {
    for (int i = from; i < to; i++) {
        NAME(unpack)(t->tile + i * t->width, rows[i], a->type, a->head_dim, t->width);
        rows[i] = (const uint8_t *)(t->tile + i * t->width);
    }
}

static void NAME(fetch)(const uint8_t *row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* Scores to weights of values, for one query row that sees keys a to b of the block; earlier results shrink
   when a higher score turns up. */
static void NAME(soften)(float *scores, float *highest, float *sum, float *results, int64_t width, int a, int b,
                         float cap) {
    const vf hidden = NAME(all)(-INFINITY);
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vf most = hidden;
    for (int i = 0; i < BLOCK; i += LANES) {
        vi seen = (vi)(lane + i >= a) & (vi)(lane + i < b);
        vf x = NAME(load)(scores + i);
        if (cap != 0) x = NAME(capped)(x, cap);
        x = NAME(choose)(seen, x, hidden);
        NAME(store)(scores + i, x);
        most = NAME(choose)((vi)(x > most), x, most);
    }
    float top = *highest;
    for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    if (top == -INFINITY) { /* it sees nothing so far */
        memset(scores, 0, BLOCK * sizeof(float));
        return;
    }
    vf total = (vf){0};
    for (int i = 0; i < BLOCK; i += LANES) {
        vf x = NAME(power)(NAME(load)(scores + i) - top);
        NAME(store)(scores + i, x);
        total += x;
    }
    float added = 0, kept = NAME(power_of_one)(*highest - top);
    for (int i = 0; i < LANES; i++) added += total[i];
    *sum = *sum * kept + added;
    *highest = top;
    if (kept != 1)
        for (int64_t d = 0; d < width; d += LANES) NAME(store)(results + d, NAME(load)(results + d) * kept);
}

/* Keys lo to hi of one block, by position. Rows of a tile that are not among them are replaced by one that
   is, and get no weight. */
static void NAME(block)(const struct layer *a, const struct sequence *s, const struct NAME(state) *t,
                        int64_t from, int64_t to, int64_t lo, int64_t hi) {
    const struct pass *p = a->pass;
    const uint8_t *rows[TILE];
    int64_t begin = lo / BLOCK * BLOCK, group = a->heads / a->kv_heads;
    int64_t before = s->first - s->position, fetched = (to - from) * a->head_bytes;
    int direct = NAME(direct)(a, t), halves = direct && a->type == TYPE_F16;
    const uint8_t *table = a->keys + before * a->key_stride + from * a->head_bytes;
    const uint8_t *other = a->values + before * a->value_stride + from * a->head_bytes;
    for (int64_t tile = lo / TILE * TILE; tile < hi; tile += TILE) {
        for (int64_t i = at_least(lo, tile); i < at_most(hi, tile + TILE); i++) {
            if (i + AHEAD < hi) NAME(fetch)(table + (i + AHEAD) * a->key_stride, fetched);
            NAME(fetch)(other + i * a->value_stride, fetched);
        }
        for (int64_t h = 0; h < to - from; h++) {
            for (int64_t i = 0; i < TILE; i++)
                rows[i] = table + at_least(lo, at_most(hi - 1, tile + i)) * a->key_stride + h * a->head_bytes;
            if (!direct) NAME(unpack_tile)(a, t, rows, 0, TILE);
            (halves ? NAME(score_halves) : NAME(score_floats))(
                t, rows, t->queries + h * t->count * t->width, t->scores + h * t->count * BLOCK + tile - begin);
        }
    }
    for (int64_t i = 0; i < (to - from) * t->count; i++) {
        int64_t end = s->position + p->ends[s->row + i % t->count / group];
        int64_t start = at_least(lo, p->window ? end - p->window : 0);
        NAME(soften)(t->scores + i * BLOCK, t->highest + i, t->sums + i, t->results + i * t->width, t->width,
                     (int)(start - begin), (int)(at_most(hi, end) - begin), (float)a->softcap);
    }
    for (int64_t tile = lo / TILE * TILE; tile < hi; tile += TILE) {
        int first = (int)(at_least(lo, tile) - tile), last = (int)(at_most(hi, tile + TILE) - tile);
        for (int64_t h = 0; h < to - from; h++) {
            for (int i = first; i < last; i++)
                rows[i] = other + (tile + i) * a->value_stride + h * a->head_bytes;
            if (!direct) NAME(unpack_tile)(a, t, rows, first, last);
            (halves ? NAME(add_halves) : NAME(add_floats))(
                t, rows, t->results + h * t->count * t->width,
                t->scores + h * t->count * BLOCK + tile - begin, first, last);
        }
    }
}

/* One chunk of a sequence for heads from to to: fills in their partials. */
static void NAME(unit)(const struct layer *a, const struct sequence *s, int64_t chunk, int64_t from, int64_t to,
                       float *scratch) {
    int64_t group = a->heads / a->kv_heads, width = padded(a->head_dim), size = partial_size(a->head_dim);
    int64_t window = a->pass->window, count = s->rows * group, all = (to - from) * count;
    struct NAME(state) t = {count, width, scratch, 0, 0, 0, 0, 0};
    t.results = t.queries + all * width;
    t.scores = t.results + all * width;
    t.tile = t.scores + all * BLOCK;
    t.highest = t.tile + TILE * width;
    t.sums = t.highest + all;
    for (int64_t i = 0; i < all; i++) {
        int64_t row = s->row + i % count / group, head = (from + i / count) * group + i % group;
        const float *query = a->queries + row * a->query_stride + head * a->head_dim;
        for (int64_t d = 0; d < width; d++)
            t.queries[i * width + d] = d < a->head_dim ? query[d] * (float)a->scale : 0;
        t.highest[i] = -INFINITY;
        t.sums[i] = 0;
    }
    memset(t.results, 0, all * width * sizeof(float));
    int64_t number = chunk_at(s->position, window) + chunk;
    int64_t begin = at_least(chunk_begin(number, window), s->position);
    int64_t end = at_most(chunk_begin(number + 1, window), s->position + s->length);
    for (int64_t lo = begin; lo < end; lo = (lo / BLOCK + 1) * BLOCK)
        NAME(block)(a, s, &t, from, to, lo, at_most(end, (lo / BLOCK + 1) * BLOCK));
    for (int64_t i = 0; i < all; i++) {
        int64_t row = i % count / group, head = (from + i / count) * group + i % group;
        float *partial = a->pass->memory + (s->partials_before * a->heads +
                                            (row * a->heads + head) * s->chunks + chunk) * size;
        partial[0] = t.highest[i];
        partial[1] = t.sums[i];
        memcpy(partial + TILE, t.results + i * width, width * sizeof(float));
    }
}

/* Adds up the partials of one head of keys, in the order of the text. */
static void NAME(merge)(const struct layer *a, const struct sequence *s, int64_t kv_head, float *sums) {
    int64_t group = a->heads / a->kv_heads, width = padded(a->head_dim), size = partial_size(a->head_dim);
    for (int64_t i = 0; i < s->rows * group; i++) {
        int64_t row = i / group, head = kv_head * group + i % group;
        const float *partials = a->pass->memory +
                                (s->partials_before * a->heads + (row * a->heads + head) * s->chunks) * size;
        float top = -INFINITY, total = 0;
        for (int64_t c = 0; c < s->chunks; c++) top = partials[c * size] > top ? partials[c * size] : top;
        memset(sums, 0, width * sizeof(float));
        for (int64_t c = 0; c < s->chunks; c++) {
            const float *partial = partials + c * size;
            float weight = NAME(power_of_one)(partial[0] - top);
            if (partial[0] == -INFINITY) continue; /* a chunk of which this row sees nothing */
            total += weight * partial[1];
            for (int64_t d = 0; d < width; d += LANES)
                NAME(store)(sums + d, NAME(load)(sums + d) + weight * NAME(load)(partial + TILE + d));
        }
        float *out = a->out + (s->row + row) * a->out_stride + head * a->head_dim;
        for (int64_t d = 0; d < a->head_dim; d++) out[d] = sums[d] / total;
    }
}

/* How many heads of keys a unit of work has: all of them read whole rows, which memory likes best; fewer
   give each thread a few units, and keep the scratch memory small. */
static int64_t NAME(heads_at_once)(const struct layer *a, const struct sequence *s, int nth) {
    int64_t many = a->pass->chunks * a->kv_heads / (6 * nth), room = AT_ONCE / (s->rows * (a->heads / a->kv_heads));
    return at_least(1, at_most(a->kv_heads, at_most(many, room)));
}

static void NAME(attend)(const struct layer *a, int ith, int nth) {
    const struct pass *p = a->pass;
    int32_t *next = p->counters, *finished = p->counters + 1, *done = p->counters + 2;
    float *scratch = a->scratch + ith * a->scratch_size;
    int64_t i = 0, before = 0; /* the sequence that the next unit is of, and the units before it */
    while (ith < a->slots) {
        int64_t unit = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED), at_once = 1, parts = 1;
        for (; i < p->n; i++) {
            at_once = NAME(heads_at_once)(a, &p->sequences[i], nth);
            parts = (a->kv_heads + at_once - 1) / at_once;
            if (unit < before + p->sequences[i].chunks * parts) break;
            before += p->sequences[i].chunks * parts;
        }
        if (i == p->n) break;
        const struct sequence *s = &p->sequences[i];
        int64_t chunk = (unit - before) / parts; /* upwards: memory is read ahead */
        int64_t from = (unit - before) % parts * at_once, to = at_most(from + at_once, a->kv_heads);
        NAME(unit)(a, s, chunk, from, to, scratch);
        for (int64_t h = from; h < to; h++) {
            int32_t *mine = done + i * a->kv_heads + h;
            if (__atomic_add_fetch(mine, 1, __ATOMIC_ACQ_REL) == s->chunks) {
                NAME(merge)(a, s, h, scratch);
                *mine = 0;
            }
        }
    }
    /* Nobody takes a unit any more once all are here: the counters are ready for the next layer. */
    if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) == nth) *next = *finished = 0;
}

#undef vf
#undef vi
