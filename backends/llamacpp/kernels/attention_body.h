/* The attention itself, in vectors of LANES floats. Included once for each set of instructions; names get
   its name through NAME. */

#define vf NAME(vf)
#define vi NAME(vi)

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

/* Rows of a table that are read soon: keys of the next block while values are added, values of a block while its
   keys are scored. They do not fit into the first cache beside others. Memory is asked for a few lines at a time:
   a core that asks for many at once waits. */
struct NAME(ahead) {
    const uint8_t *row;
    int64_t stride, bytes; /* from row to row, and what is read of each */
    int64_t rows, at;      /* how many are left; where in the first of them */
    int64_t some;          /* bytes that are asked for at a time */
};

INLINE void NAME(ask)(struct NAME(ahead) *soon) {
    for (int64_t bytes = soon->some; bytes > 0 && soon->rows; bytes -= 64) {
        __builtin_prefetch(soon->row + soon->at, 0, 2);
        soon->at += 64;
        if (soon->at < soon->bytes) continue;
        soon->at = 0;
        soon->row += soon->stride;
        soon->rows--;
    }
}

/* The products of n queries with the keys of a tile. */
INLINE void NAME(multiply)(const int n, const int type, float *scores, const float *queries,
                           const uint8_t *const *rows, int64_t width, struct NAME(ahead) *soon) {
    vf folded[QUERIES][TILE / 4];
    for (int key = 0; key < TILE; key += 4) {
        NAME(ask)(soon);
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

#if TURNS
/* Two vectors of keys times n queries: the part of the products that lanes l and l + 2 of `multiply` hold. */
INLINE void NAME(two_lanes)(const int n, vf out[QUERIES][2], const float *queries, const float *turned,
                            int64_t width, int l) {
    vf sums[2][QUERIES][2];
    for (int p = 0; p < 2; p++)
        for (int q = 0; q < n; q++) sums[p][q][0] = sums[p][q][1] = (vf){0};
    for (int64_t d = l; d < width; d += LANES)
        for (int p = 0; p < 2; p++) {
            const float *keys = turned + (d + 2 * p) * BATCH;
            vf a = NAME(load)(keys), b = NAME(load)(keys + LANES);
            for (int q = 0; q < n; q++) {
                vf x = NAME(all)(queries[q * width + d + 2 * p]);
                sums[p][q][0] += x * a;
                sums[p][q][1] += x * b;
            }
        }
    for (int q = 0; q < n; q++)
        for (int i = 0; i < 2; i++) out[q][i] = sums[0][q][i] + sums[1][q][i];
}

/* Four lanes of `multiply`. */
INLINE void NAME(four_lanes)(const int n, vf out[QUERIES][2], const float *queries, const float *turned,
                             int64_t width, int l) {
    vf odd[QUERIES][2];
    NAME(two_lanes)(n, out, queries, turned, width, l);
    NAME(two_lanes)(n, odd, queries, turned, width, l + 1);
    for (int q = 0; q < n; q++)
        for (int i = 0; i < 2; i++) out[q][i] += odd[q][i];
}

/* The products of n queries with two vectors of keys, which are turned: row d has number d of each key. They
   are added up in the order of `multiply`, `fold` and `put_sums`: a row has the same bits either way. */
INLINE void NAME(multiply_turned)(const int n, float *scores, const float *queries, const float *turned,
                                  int64_t width) {
    vf sums[QUERIES][2], more[QUERIES][2], last[QUERIES][2];
    NAME(four_lanes)(n, sums, queries, turned, width, 0);
    NAME(four_lanes)(n, more, queries, turned, width, 4);
    for (int q = 0; q < n; q++)
        for (int i = 0; i < 2; i++) sums[q][i] += more[q][i];
    NAME(four_lanes)(n, more, queries, turned, width, 8);
    NAME(four_lanes)(n, last, queries, turned, width, 12);
    for (int q = 0; q < n; q++)
        for (int i = 0; i < 2; i++) sums[q][i] += more[q][i] + last[q][i];
    for (int q = 0; q < n; q++)
        for (int i = 0; i < 2; i++) NAME(store)(scores + q * BLOCK + i * LANES, sums[q][i]);
}
#endif

/* Adds values a to b of a tile, weighted, to the results of n queries; `wide` vectors of columns from d on. */
INLINE void NAME(add_columns)(const int n, const int wide, const int type, float *results, const float *weights,
                              const uint8_t *const *rows, int64_t width, int64_t d, int64_t a, int64_t b,
                              struct NAME(ahead) *soon) {
    vf sums[ADDED][4];
    for (int q = 0; q < n; q++)
        for (int i = 0; i < wide; i++) sums[q][i] = NAME(load)(results + q * width + d + i * LANES);
    int64_t key = a;
    do { /* there is one; compilers that know it keep the sums in registers */
        NAME(ask)(soon);
        vf v[4];
        for (int i = 0; i < wide; i++) v[i] = NAME(read)(type, rows[key], d + i * LANES);
        for (int q = 0; q < n; q++) {
            vf weight = NAME(all)(weights[q * BLOCK + key]);
            for (int i = 0; i < wide; i++) sums[q][i] += weight * v[i];
        }
    } while (++key < b);
    for (int q = 0; q < n; q++)
        for (int i = 0; i < wide; i++) NAME(store)(results + q * width + d + i * LANES, sums[q][i]);
}

INLINE void NAME(add)(const int n, const int type, float *results, const float *weights,
                      const uint8_t *const *rows, int64_t width, int64_t a, int64_t b, struct NAME(ahead) *soon) {
    int64_t d = 0, wide = 4 * LANES;
    for (; d + wide <= width; d += wide)
        NAME(add_columns)(n, 4, type, results, weights, rows, width, d, a, b, soon);
    for (; d < width; d += LANES)
        NAME(add_columns)(n, 1, type, results, weights, rows, width, d, a, b, soon);
}

/* What a thread works with: the query rows of some heads of a sequence, and what has become of them. */
struct NAME(state) {
    int64_t count;  /* query rows of one head of keys: those of the sequence times those of the group */
    int64_t width;  /* of a row of floats */
    float *queries; /* already multiplied by the scale */
    float *results;
    float *scores; /* BLOCK for each, later the weights of the values */
    float *highest, *sums;
    float *tops, *kept; /* of a block: the new maximum, and what remains of earlier results */
    float *tile, *turned; /* rows as floats, and keys turned */
};

/* All queries with a tile of keys. */
INLINE void NAME(score_all)(const int type, const struct NAME(state) *t, const uint8_t *const *rows,
                            float *queries, float *scores, struct NAME(ahead) *soon) {
    int64_t q = 0, width = t->width;
    for (; q + QUERIES <= t->count; q += QUERIES)
        NAME(multiply)(QUERIES, type, scores + q * BLOCK, queries + q * width, rows, width, soon);
#if QUERIES == 4
    if (t->count - q == 3)
        NAME(multiply)(3, type, scores + q * BLOCK, queries + q * width, rows, width, soon);
    else if (t->count - q == 2)
        NAME(multiply)(2, type, scores + q * BLOCK, queries + q * width, rows, width, soon);
#endif
    if (t->count - q == 1) NAME(multiply)(1, type, scores + q * BLOCK, queries + q * width, rows, width, soon);
}

/* All queries' weights with values a to b of a tile. */
INLINE void NAME(add_all)(const int type, const struct NAME(state) *t, const uint8_t *const *rows,
                          float *results, const float *weights, int a, int b, struct NAME(ahead) *soon) {
    int64_t q = 0, width = t->width;
    for (; q + ADDED <= t->count; q += ADDED)
        NAME(add)(ADDED, type, results + q * width, weights + q * BLOCK, rows, width, a, b, soon);
    results += q * width;
    weights += q * BLOCK;
    switch (t->count - q) {
#if ADDED == 6
        case 5: NAME(add)(5, type, results, weights, rows, width, a, b, soon); break;
        case 4: NAME(add)(4, type, results, weights, rows, width, a, b, soon); break;
        case 3: NAME(add)(3, type, results, weights, rows, width, a, b, soon); break;
        case 2: NAME(add)(2, type, results, weights, rows, width, a, b, soon); break;
#endif
        case 1: NAME(add)(1, type, results, weights, rows, width, a, b, soon); break;
    }
}

static void NAME(score_floats)(const struct NAME(state) *t, const uint8_t *const *rows, float *queries,
                               float *scores, struct NAME(ahead) *soon) {
    NAME(score_all)(TYPE_F32, t, rows, queries, scores, soon);
}

static void NAME(score_halves)(const struct NAME(state) *t, const uint8_t *const *rows, float *queries,
                               float *scores, struct NAME(ahead) *soon) {
    NAME(score_all)(TYPE_F16, t, rows, queries, scores, soon);
}

static void NAME(add_floats)(const struct NAME(state) *t, const uint8_t *const *rows, float *results,
                             const float *weights, int a, int b, struct NAME(ahead) *soon) {
    NAME(add_all)(TYPE_F32, t, rows, results, weights, a, b, soon);
}

static void NAME(add_halves)(const struct NAME(state) *t, const uint8_t *const *rows, float *results,
                             const float *weights, int a, int b, struct NAME(ahead) *soon) {
    NAME(add_all)(TYPE_F16, t, rows, results, weights, a, b, soon);
}

/* Whether a table's numbers are used as they lie there: with few queries, halves are made floats as often as
   they are needed. */
static int NAME(direct)(const struct layer *a, const struct NAME(state) *t) {
    return t->width == a->head_dim && (a->type == TYPE_F32 || (a->type == TYPE_F16 && t->count < MANY));
}

/* Rows of a table made floats. */
static void NAME(unpack_tile)(const struct layer *a, const struct NAME(state) *t, const uint8_t **rows,
                              int from, int to) {
    for (int i = from; i < to; i++) {
        NAME(unpack)(t->tile + i * t->width, rows[i], a->type, a->head_dim, t->width);
        rows[i] = (const uint8_t *)(t->tile + i * t->width);
    }
}

/* Inlined: compilers drop calls of functions that do nothing but ask for memory. */
INLINE void NAME(fetch)(const uint8_t *row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* Whether lanes hold keys, and not the numbers of one: that saves most of the sums of lanes, and costs turning
   the keys of each batch once, for all queries. The heads of keys are taken one by one. */
static int NAME(turns)(const struct layer *a, const struct sequence *s) {
    int64_t count = s->rows * (a->heads / a->kv_heads);
    return TURNS && a->type == TYPE_F16 && a->head_dim % TILE == 0 && count >= MANY;
}

#if TURNS
/* All queries with a batch of keys. Meanwhile memory is asked for the rows of two tables that come next, a few
   at a time. */
static void NAME(score_turned)(const struct NAME(state) *t, const uint8_t *const rows[BATCH], float *scores,
                               const uint8_t *const next[2], const int64_t stride[2], int64_t bytes) {
    const float *query = t->queries;
    int64_t width = t->width, asked = 0;
    for (int64_t key = 0; key < BATCH; key += LANES)
        NAME(turn_halves)(t->turned + key, BATCH, rows + key, width);
    for (int64_t n = t->count; n > 0; n -= QUERIES, query += QUERIES * width, scores += QUERIES * BLOCK) {
        for (; asked < BATCH && asked * t->count < BATCH * (t->count - n + QUERIES); asked++)
            for (int i = 0; i < 2; i++) NAME(fetch)(next[i] + asked * stride[i], bytes);
        switch (at_most(n, QUERIES)) {
            case 1: NAME(multiply_turned)(1, scores, query, t->turned, width); break;
            case 2: NAME(multiply_turned)(2, scores, query, t->turned, width); break;
            case 3: NAME(multiply_turned)(3, scores, query, t->turned, width); break;
            default: NAME(multiply_turned)(QUERIES, scores, query, t->turned, width);
        }
    }
}
#endif

/* Scores of keys that a query row sees, a to b of the block, as they go into the softmax. */
static void NAME(mask)(float *scores, int from, int to, int a, int b, float cap) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int i = from; i < to; i += LANES) {
        vi seen = (vi)(lane + i >= a) & (vi)(lane + i < b);
        vf x = NAME(load)(scores + i);
        if (cap != 0) x = NAME(capped)(x, cap);
        NAME(store)(scores + i, NAME(choose)(seen, x, NAME(all)(-INFINITY)));
    }
}

/* Scores from to to of a block to weights of values, for all query rows; earlier results shrink when a higher
   score turns up. */
static void NAME(soften)(const struct NAME(state) *t, int64_t n, int from, int to) {
    for (int64_t q = 0; q < n; q++) {
        const float *scores = t->scores + q * BLOCK;
        vf most = NAME(all)(t->highest[q]);
        for (int i = from; i < to; i += LANES) most = NAME(greater)(NAME(load)(scores + i), most);
        t->tops[q] = NAME(greatest)(most);
    }
    for (int64_t q = 0; q < n; q += LANES) /* also a few beyond n, which are not used */
        NAME(store)(t->kept + q, NAME(power)(NAME(load)(t->highest + q) - NAME(load)(t->tops + q)));
    for (int64_t q = 0; q < n; q++) {
        float *scores = t->scores + q * BLOCK, *results = t->results + q * t->width, top = t->tops[q];
        if (top == -INFINITY) { /* it sees nothing so far */
            memset(scores, 0, BLOCK * sizeof(float));
            continue;
        }
        vf total = (vf){0};
        for (int i = from; i < to; i += LANES) {
            vf x = NAME(power)(NAME(load)(scores + i) - top);
            NAME(store)(scores + i, x);
            total += x;
        }
        float kept = t->kept[q];
        t->sums[q] = t->sums[q] * kept + NAME(sum)(total);
        if (t->highest[q] != top && t->highest[q] != -INFINITY)
            for (int64_t d = 0; d < t->width; d += LANES)
                NAME(store)(results + d, NAME(load)(results + d) * kept);
        t->highest[q] = top;
    }
}

/* The scores of one block. Rows of a tile that are not among keys lo to hi are replaced by one that is. */
static void NAME(score_block)(const struct layer *a, const struct NAME(state) *t, const uint8_t *keys,
                              const uint8_t *values, int64_t heads, int64_t lo, int64_t hi) {
    const uint8_t *rows[BATCH];
    struct NAME(ahead) soon = {values + lo * a->value_stride, a->value_stride, heads * a->head_bytes, hi - lo};
    soon.some = 4 * a->head_bytes / in_parts(t->count, QUERIES); /* with four keys of a head: four of its values */
    int64_t begin = lo / BLOCK * BLOCK;
    int direct = NAME(direct)(a, t), halves = direct && a->type == TYPE_F16;
    for (int64_t tile = lo / TILE * TILE; tile < hi; tile += TILE) {
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t i = 0; i < TILE; i++)
                rows[i] = keys + at_least(lo, at_most(hi - 1, tile + i)) * a->key_stride + h * a->head_bytes;
            if (!direct) NAME(unpack_tile)(a, t, rows, 0, TILE);
            (halves ? NAME(score_halves) : NAME(score_floats))(
                t, rows, t->queries + h * t->count * t->width,
                t->scores + h * t->count * BLOCK + tile - begin, &soon);
        }
    }
}

#if TURNS
/* The same for one head, turned. `next`: the keys that come behind this block. */
static void NAME(score_block_turned)(const struct layer *a, const struct NAME(state) *t, const uint8_t *keys,
                                     const uint8_t *values, int64_t lo, int64_t hi, const uint8_t *next) {
    const uint8_t *rows[BATCH];
    const int64_t strides[2] = {a->key_stride, a->value_stride};
    for (int64_t batch = lo / BATCH * BATCH; batch < hi; batch += BATCH) {
        for (int64_t i = 0; i < BATCH; i++)
            rows[i] = keys + at_least(lo, at_most(hi - 1, batch + i)) * a->key_stride;
        const uint8_t *soon[2] = {batch + BATCH < hi ? keys + (batch + BATCH) * a->key_stride : next,
                                  values + batch * a->value_stride};
        NAME(score_turned)(t, rows, t->scores + batch - lo / BLOCK * BLOCK, soon, strides, a->head_bytes);
    }
}
#endif

/* Keys lo to hi of one block, by position. `next`: the keys that this thread takes after it; NULL: none. */
static void NAME(block)(const struct layer *a, const struct sequence *s, const struct NAME(state) *t,
                        int64_t from, int64_t to, int64_t lo, int64_t hi, const uint8_t *next) {
    const struct pass *p = a->pass;
    const uint8_t *rows[BATCH];
    int64_t begin = lo / BLOCK * BLOCK, group = a->heads / a->kv_heads, before = s->first - s->position;
    const uint8_t *keys = a->keys + before * a->key_stride + from * a->head_bytes;
    const uint8_t *values = a->values + before * a->value_stride + from * a->head_bytes;
    int direct = NAME(direct)(a, t), halves = direct && a->type == TYPE_F16, turned = NAME(turns)(a, s);
#if TURNS
    if (turned) NAME(score_block_turned)(a, t, keys, values, lo, hi, next);
#else
    (void)next;
#endif
    if (!turned) NAME(score_block)(a, t, keys, values, to - from, lo, hi);
    int first_score = (int)(lo - begin) / TILE * TILE, last_score = (int)(hi - begin + TILE - 1) / TILE * TILE;
    for (int64_t i = 0; i < (to - from) * t->count; i += group) {
        int64_t end = s->position + p->ends[s->row + i % t->count / group];
        int64_t start = at_least(lo, p->window ? end - p->window : 0) - begin;
        end = at_most(hi, end) - begin;
        if (start <= first_score && end >= last_score && a->softcap == 0) continue; /* as most blocks are */
        for (int64_t g = i; g < i + group; g++)
            NAME(mask)(t->scores + g * BLOCK, first_score, last_score, (int)start, (int)end, (float)a->softcap);
    }
    NAME(soften)(t, (to - from) * t->count, first_score, last_score);
    int64_t step = turned ? BATCH : TILE;
    struct NAME(ahead) soon = {next, a->key_stride, (to - from) * a->head_bytes, next && !turned ? hi - lo : 0};
    soon.some = a->head_bytes / (in_parts(t->count, ADDED) * in_parts(t->width, 4 * LANES));
    for (int64_t tile = lo / step * step; tile < hi; tile += step) {
        int first = (int)(at_least(lo, tile) - tile), last = (int)(at_most(hi, tile + step) - tile);
        for (int64_t h = 0; h < to - from; h++) {
            for (int i = first; i < last; i++)
                rows[i] = values + (tile + i) * a->value_stride + h * a->head_bytes;
            if (!direct) NAME(unpack_tile)(a, t, rows, first, last);
            (halves ? NAME(add_halves) : NAME(add_floats))(
                t, rows, t->results + h * t->count * t->width,
                t->scores + h * t->count * BLOCK + tile - begin, first, last, &soon);
        }
    }
}

/* Where the partials of a query row and head lie, one behind the other. */
static float *NAME(partials)(const struct layer *a, const struct sequence *s, int64_t row, int64_t head) {
    return a->pass->memory +
           (s->partials_before * a->heads + (row * a->heads + head) * s->chunks) * partial_size(a->head_dim);
}

/* One head of the key at a position. */
INLINE const uint8_t *NAME(key)(const struct layer *a, const struct sequence *s, int64_t position,
                                int64_t head) {
    return a->keys + (s->first - s->position + position) * a->key_stride + head * a->head_bytes;
}

/* One chunk of a sequence for heads from to to: fills in their partials. `next`: as in `block`. */
static void NAME(piece)(const struct layer *a, const struct sequence *s, int64_t chunk, int64_t from, int64_t to,
                        float *scratch, const uint8_t *next) {
    int64_t group = a->heads / a->kv_heads, width = padded(a->head_dim), size = partial_size(a->head_dim);
    int64_t window = a->pass->window, count = s->rows * group, all = (to - from) * count;
    int64_t each = padded(all);
    struct NAME(state) t = {.count = count, .width = width, .queries = scratch};
    t.results = t.queries + all * width;
    t.scores = t.results + all * width;
    t.tile = t.scores + all * BLOCK;
    t.turned = t.tile + BATCH * width;
    t.highest = t.turned + BATCH * width;
    t.sums = t.highest + each;
    t.tops = t.sums + each;
    t.kept = t.tops + each;
    float *query = t.queries;
    for (int64_t h = from; h < to; h++)
        for (int64_t row = s->row; row < s->row + s->rows; row++)
            for (int64_t head = h * group; head < (h + 1) * group; head++, query += width) {
                const float *x = a->queries + row * a->query_stride + head * a->head_dim;
                for (int64_t d = 0; d < a->head_dim; d++) query[d] = x[d] * (float)a->scale;
                for (int64_t d = a->head_dim; d < width; d++) query[d] = 0;
            }
    for (int64_t i = 0; i < each; i++) {
        t.highest[i] = t.tops[i] = -INFINITY;
        t.sums[i] = 0;
    }
    memset(t.results, 0, all * width * sizeof(float));
    int64_t begin = first_of(s, chunk, window), end = first_of(s, chunk + 1, window);
    for (int64_t lo = begin, hi; lo < end; lo = hi) {
        hi = at_most(end, (lo / BLOCK + 1) * BLOCK);
        NAME(block)(a, s, &t, from, to, lo, hi, hi < end ? NAME(key)(a, s, hi, from) : next);
    }
    for (int64_t h = from, i = 0; h < to; h++)
        for (int64_t row = 0; row < s->rows; row++)
            for (int64_t head = h * group; head < (h + 1) * group; head++, i++) {
                float *partial = NAME(partials)(a, s, row, head) + chunk * size;
                partial[0] = t.highest[i];
                partial[1] = t.sums[i];
                for (int64_t d = 0; d < width; d += LANES)
                    NAME(store)(partial + TILE + d, NAME(load)(t.results + i * width + d));
            }
}

/* One chunk of a sequence for heads from to to, together or one by one. `next`: as above. */
static void NAME(unit)(const struct layer *a, const struct sequence *s, int64_t chunk, int64_t from, int64_t to,
                       float *scratch, const uint8_t *next) {
    int64_t begin = first_of(s, chunk, a->pass->window), end = first_of(s, chunk + 1, a->pass->window);
    if (NAME(turns)(a, s))
        for (int64_t h = from; h < to; h++)
            NAME(piece)(a, s, chunk, h, h + 1, scratch,
                        h + 1 < to ? NAME(key)(a, s, begin, h + 1) : NAME(key)(a, s, end, from));
    else
        NAME(piece)(a, s, chunk, from, to, scratch, next);
}

/* Adds up the partials of one head of keys, in the order of the text. */
static void NAME(merge)(const struct layer *a, const struct sequence *s, int64_t kv_head, float *sums) {
    int64_t group = a->heads / a->kv_heads, width = padded(a->head_dim), size = partial_size(a->head_dim);
    for (int64_t i = 0; i < s->rows * group; i++) {
        int64_t row = i / group, head = kv_head * group + i % group;
        const float *partials = NAME(partials)(a, s, row, head);
        float top = a->sinks ? a->sinks[head] : -INFINITY, total = 0;
        for (int64_t c = 0; c < s->chunks; c++) top = partials[c * size] > top ? partials[c * size] : top;
        if (a->sinks) total = NAME(power_of_one)(a->sinks[head] - top);
        for (int64_t d = 0; d < width; d += LANES) NAME(store)(sums + d, (vf){0});
        for (int64_t c = 0; c < s->chunks; c += LANES) {
            int64_t n = at_most(LANES, s->chunks - c);
            const float *some = partials + c * size;
            vf weights = NAME(all)(-INFINITY), shares = (vf){0};
            for (int64_t k = 0; k < n; k++) {
                weights[k] = some[k * size];
                shares[k] = some[k * size + 1];
            }
            weights = NAME(power)(weights - top); /* 0 where this row sees nothing of a chunk */
            shares *= weights; /* not in the sum below: compilers would fuse both in some of its steps only */
            float weight[LANES], share[LANES];
            NAME(store)(weight, weights);
            NAME(store)(share, shares);
            for (int64_t k = 0; k < n; k++) total += share[k];
            for (int64_t d = 0; d < width; d += LANES) {
                vf x = NAME(load)(sums + d);
                for (int64_t k = 0; k < n; k++) x += weight[k] * NAME(load)(some + k * size + TILE + d);
                NAME(store)(sums + d, x);
            }
        }
        float *out = a->out + (s->row + row) * a->out_stride + head * a->head_dim;
        for (int64_t d = 0; d < a->head_dim; d++) out[d] = sums[d] / total;
    }
}

/* How many heads of keys a unit of work has: all of them read whole rows, which memory likes best; fewer
   give each thread a few units, and keep the scratch memory small. Where there are more rows of queries it is not
   memory that bounds. */
static int64_t NAME(heads_at_once)(const struct layer *a, const struct sequence *s, int nth) {
    int64_t units = (s->rows == 1 ? 3 : 6) * nth, count = s->rows * (a->heads / a->kv_heads);
    int64_t fair = a->pass->chunks * a->kv_heads / units, room = NAME(turns)(a, s) ? a->kv_heads : AT_ONCE / count;
    int64_t most = at_least(1, at_most(a->kv_heads, at_most(fair, room)));
    return in_parts(a->kv_heads, in_parts(a->kv_heads, most)); /* parts are about equally large */
}

/* What a thread has taken: heads from to to of a chunk. No sequence: nothing is left. */
struct NAME(taken) {
    const struct sequence *s;
    int64_t chunk, from, to;
};

/* The next unit that no thread has taken. `i` and `before`: the sequence of this thread's last one, and the
   units before it. */
static struct NAME(taken) NAME(take)(const struct layer *a, int nth, int64_t *i, int64_t *before) {
    const struct pass *p = a->pass;
    const int64_t unit = __atomic_fetch_add(p->counters, 1, __ATOMIC_RELAXED);
    for (; *i < p->n; ++*i) {
        const struct sequence *s = &p->sequences[*i];
        int64_t at_once = NAME(heads_at_once)(a, s, nth), parts = in_parts(a->kv_heads, at_once);
        int64_t mine = unit - *before, from = mine % parts * at_once;
        if (mine < s->chunks * parts) /* chunks upwards: memory is read ahead */
            return (struct NAME(taken)){s, mine / parts, from, at_most(from + at_once, a->kv_heads)};
        *before += s->chunks * parts;
    }
    return (struct NAME(taken)){0};
}

/* Each thread takes a unit before it begins the one before that, so that memory is asked for what will be read. */
static void NAME(attend)(const struct layer *a, int ith, int nth) {
    const struct pass *p = a->pass;
    int32_t *next = p->counters, *finished = p->counters + 1, *done = p->counters + 2;
    float *scratch = a->scratch + ith * a->scratch_size;
    int64_t i = 0, before = 0;
    struct NAME(taken) now = {0}, then;
    if (ith < a->slots) now = NAME(take)(a, nth, &i, &before);
    for (; now.s; now = then) {
        then = NAME(take)(a, nth, &i, &before);
        const uint8_t *soon = NULL;
        if (then.s) soon = NAME(key)(a, then.s, first_of(then.s, then.chunk, p->window), then.from);
        NAME(unit)(a, now.s, now.chunk, now.from, now.to, scratch, soon);
        for (int64_t h = now.from; h < now.to; h++) {
            int32_t *mine = done + (now.s - p->sequences) * a->kv_heads + h;
            if (__atomic_add_fetch(mine, 1, __ATOMIC_ACQ_REL) == now.s->chunks) {
                NAME(merge)(a, now.s, h, scratch);
                *mine = 0;
            }
        }
    }
    /* No thread takes a unit once all are here: the counters are ready for the next layer. */
    if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) == nth) *next = *finished = 0;
}

#undef vf
#undef vi
