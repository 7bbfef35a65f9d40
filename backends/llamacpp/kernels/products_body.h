/* The products themselves, in vectors of LANES rows of a weight. Included once for each set of instructions;
   names get its name through NAME.

   Every number is made by the same operations in the same order, whatever LANES is: nothing here may be left
   to a compiler that joins a multiplication and an addition on some machines (see setup.py). */

#define vf NAME(vf)
#define vi NAME(vi)
#define vu NAME(vu)

typedef uint16_t NAME(vh) __attribute__((vector_size(2 * LANES)));

INLINE vf NAME(load)(const float *x) {
    vf v;
    memcpy(&v, x, sizeof(v));
    return v;
}

INLINE void NAME(store)(float *x, vf v) { memcpy(x, &v, sizeof(v)); }

/* The first `count` of LANES floats; nothing is read behind them. */
INLINE vf NAME(load_some)(const float *x, int64_t count) {
    float some[LANES] = {0};
    if (count >= LANES) return NAME(load)(x);
    for (int64_t i = 0; i < count; i++) some[i] = x[i];
    return NAME(load)(some);
}

INLINE void NAME(store_some)(float *x, vf v, int64_t count) {
    if (count >= LANES) {
        NAME(store)(x, v);
        return;
    }
    for (int64_t i = 0; i < count; i++) x[i] = v[i];
}

INLINE vf NAME(all)(float x) { return x - (vf){0}; }

INLINE vi NAME(ints)(int32_t x) { return x + (vi){0}; }

INLINE vf NAME(floats)(vi x) { return __builtin_convertvector(x, vf); }

/* a where the mask is set, b elsewhere. */
INLINE vf NAME(choose)(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

INLINE vf NAME(absolute)(vf x) { return (vf)((vi)x & INT32_MAX); }

/* The sum of sixteen floats, in an order that does not depend on LANES. */
INLINE float NAME(sum_of_16)(const vf x[16 / LANES]) {
    float lanes[16];
    memcpy(lanes, x, sizeof(lanes));
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

/* What becomes of the results */

/* e to the power of x, kept between e^-87 and e^88. */
INLINE vf NAME(power)(vf x) {
    vf most = NAME(all)(88.0f), least = NAME(all)(-87.0f), round = NAME(all)(WHOLE);
    x = NAME(choose)((vi)(x > most), most, x);
    x = NAME(choose)((vi)(x < least), least, x);
    vf shifted = NAME(fused)(x, NAME(all)(1.44269504088896341f), round), n = shifted - round;
    vf r = NAME(fused)(n, NAME(all)(-0.693359375f), x), y = NAME(all)(1.9875691500e-4f);
    r = NAME(fused)(n, NAME(all)(2.12194440e-4f), r);
    y = NAME(fused)(y, r, NAME(all)(1.3981999507e-3f));
    y = NAME(fused)(y, r, NAME(all)(8.3334519073e-3f));
    y = NAME(fused)(y, r, NAME(all)(4.1665795894e-2f));
    y = NAME(fused)(y, r, NAME(all)(1.6666665459e-1f));
    y = NAME(fused)(y, r, NAME(all)(5.0000001201e-1f));
    y = NAME(fused)(y, r * r, r) + 1.0f;
    return y * (vf)(((vi)shifted << 23) + (127 << 23));
}

/* x where steep is large, 0 where it is far below zero. */
INLINE vf NAME(gated)(vf x, vf steep) { return x / (NAME(power)(-steep) + 1.0f); }

/* x times the share of a normal distribution below it. The tail is Abramowitz and Stegun's 7.1.26. */
INLINE vf NAME(gelu_erf)(vf x) {
    vf z = NAME(absolute)(x) * 0.70710678118654752f;
    vf t = 1.0f / NAME(fused)(z, NAME(all)(0.3275911f), NAME(all)(1.0f));
    vf y = NAME(all)(1.061405429f);
    y = NAME(fused)(y, t, NAME(all)(-1.453152027f));
    y = NAME(fused)(y, t, NAME(all)(1.421413741f));
    y = NAME(fused)(y, t, NAME(all)(-0.284496736f));
    y = NAME(fused)(y, t, NAME(all)(0.254829592f));
    vf tail = y * t * NAME(power)(-(z * z)) * 0.5f;
    return x * NAME(choose)((vi)(x < NAME(all)(0)), tail, 1.0f - tail);
}

INLINE vf NAME(activated)(int64_t activation, vf x) {
    if (activation == SWIGLU) return NAME(gated)(x, x);
    if (activation == GEGLU_ERF) return NAME(gelu_erf)(x);
    /* half of 1 + tanh(y) is 1 / (1 + e^-2y) */
    vf y = NAME(fused)(x * x, NAME(all)(0.044715f), NAME(all)(1.0f)) * (x * 0.79788456080286536f);
    return NAME(gated)(x, y + y);
}

INLINE vf NAME(between)(vf x, float least, float most) {
    x = NAME(choose)((vi)(x < NAME(all)(least)), NAME(all)(least), x);
    return NAME(choose)((vi)(x > NAME(all)(most)), NAME(all)(most), x);
}

/* What becomes of a row of the first half and one of the second. */
INLINE vf NAME(opened)(int64_t activation, vf x, vf z) {
    if (activation != CLAMPED) return NAME(activated)(activation, x) * z;
    x = NAME(between)(x, -INFINITY, CLAMP);
    return NAME(gated)(x, x * CLAMP_STEEPNESS) * (NAME(between)(z, -CLAMP, CLAMP) + 1.0f);
}

/* The result of a row for LANES columns: of all its digits. */
INLINE vf NAME(result)(const float *results, const int64_t digits) {
    vf y = NAME(load)(results);
    return digits == 1 ? y : y + NAME(load)(results + ROWS);
}

/* Results of n rows of 8 bits from `first` on, for ROWS columns of `out` from `column` on: bias, activation and
   residual. `gated`: those of the second half of the weight, if there is an activation. */
static void NAME(finish)(const struct product *p, int64_t first, int64_t n, int64_t column, const float *results,
                         const float *gated) {
    const int64_t width = columns_out(p), digits = digits_of(p), step = digits * ROWS;
    const float *second_bias = p->second_bias || !p->bias ? p->second_bias : p->bias + width;
    for (int64_t t = first / digits; t < (first + n) / digits; t++, results += step, gated += gated ? step : 0) {
        int64_t row = p->to ? p->to[t] : t;
        for (int64_t i = 0; i < ROWS && column + i < width; i += LANES) {
            int64_t at = column + i, count = width - at;
            vf y = NAME(result)(results + i, digits);
            if (p->bias) y += NAME(load_some)(p->bias + at, count);
            if (p->activation != PLAIN) {
                vf z = NAME(result)(gated + i, digits);
                if (second_bias) z += NAME(load_some)(second_bias + at, count);
                y = NAME(opened)(p->activation, y, z);
            }
            if (p->residual) y += NAME(load_some)(p->residual + t * p->residual_stride + at, count);
            NAME(store_some)(p->out + row * p->out_stride + at, y, count);
        }
    }
}

/* Activations to 8 bits */

/* What rounding leaves of x: `shifted` is x in parts of the scale, and WHOLE. Joined, or it would be nothing but
   what the product is rounded by. */
INLINE vf NAME(left)(vf x, vf shifted, float scale) {
    return NAME(fused)(NAME(all)(-scale), shifted - WHOLE, x);
}

/* What makes a row's mean square 1. */
static float NAME(inverse_rms)(const float *x, int64_t n, double eps) {
    vf sums[16 / LANES] = {0};
    for (int64_t i = 0; i < n; i += 16)
        for (int k = 0; k < 16 / LANES; k++) {
            vf v = NAME(load)(x + i + k * LANES);
            sums[k] = NAME(fused)(v, v, sums[k]);
        }
    return 1.0f / sqrtf(NAME(sum_of_16)(sums) / (float)n + (float)eps);
}

/* 32 columns, and what is left of them. Numbers are rounded by adding one that leaves nothing behind the point.
   NaN and infinity are no special case: as whole numbers their bits are greater than those of others, they make
   the scale NaN or infinite, and with it the results. */
INLINE void NAME(round_block)(struct rounded *out, vf x[BLOCK / LANES], const int type) {
    vi most = (vi)NAME(absolute)(x[0]);
    for (int i = 1; i < BLOCK / LANES; i++) most = NAME(greater)((vi)NAME(absolute)(x[i]), most);
    float top = bits_as_float(NAME(greatest)(most)), inverse = top > LEAST ? 127.0f / top : 0;
    int32_t sums[2], offset = offset_of(type);
    out->scale = top <= LEAST ? 0 : top / 127.0f;
    for (int half = 0; half < 2; half++) {
        vi sum = {0};
        for (int i = half * 16 / LANES; i < (half + 1) * 16 / LANES; i++) {
            vf shifted = x[i] * inverse + WHOLE;
            NAME(put_bytes)(out->x + i * LANES, (vi)shifted);
            sum += ((vi)shifted << 24) >> 24; /* what the byte says, whatever x was */
            x[i] = NAME(left)(x[i], shifted, out->scale);
        }
        sums[half] = NAME(total)(sum);
    }
    int32_t all = sums[0] + sums[1];
    out->sum = out->scale * (float)all;
    /* Q2_K, whose weights are not too large by anything, needs the sums themselves. */
    if (has_lows(type)) offset = -1;
    out->start[0] = -offset * (by_halves(type) ? sums[0] : all);
    out->start[1] = -offset * sums[1];
}

/* One row of activations, digit by digit; its blocks are `step` apart. */
static void NAME(round_row)(const struct product *p, int64_t row, struct rounded *out, int64_t step) {
    const float *x = row_of_x(p, row);
    float factor = p->gain ? NAME(inverse_rms)(x, p->cols, p->eps) : 1;
    for (int64_t c = 0; c < p->cols; c += BLOCK, out += step) {
        vf v[BLOCK / LANES];
        for (int i = 0; i < BLOCK / LANES; i++) {
            v[i] = NAME(load)(x + c + i * LANES);
            if (p->gain) v[i] = v[i] * factor * NAME(load)(p->gain + c + i * LANES);
        }
        NAME(round_block)(out, v, (int)p->type);
        if (p->exact) NAME(round_block)(out + 1, v, (int)p->type);
    }
}

#include "types_body.h"

/* Products */

/* Rows of a weight that are gone through side by side: LANES of one group or of two, all by the same activations,
   which are then broadcast once for all of them. */
enum { NAME(most_vectors) = 4 };

struct NAME(side) {
    const uint8_t *step, *words; /* where halves and words of its rows begin */
    const uint8_t *asked;        /* the first line that it asks memory for */
};

/* Which word comes k-th: where the same line holds two of a block, one after the other, so that it is read once.
   Whole numbers are added up, so any order makes the same bits. */
INLINE int NAME(word_order)(const int type, const int k) {
    const struct form f = form_of(type);
    return f.block == 32 && f.words < 8 ? k % 2 * 4 + k / 2 : k;
}

/* Blocks whose words lie in the same lines: they are gone through together, if there is room for their sums. */
INLINE int NAME(neighbours)(const int type, const int n) {
    return n == 1 && type == TYPE_Q4_K && LANES == 16 ? 2 : 1;
}

/* Dot products of some words of `near` neighbouring blocks: [block][vector][row of activations]. */
INLINE void NAME(dots_of)(const int type, const int n, const int vectors, const int near, const int b,
                          const int from, const int to, vi dots[2][NAME(most_vectors)][BATCH],
                          const struct NAME(side) *w, const struct rounded *x) {
    const int some = ADDED_AT_ONCE(type), halves = by_halves(type);
    const int twos = some == 1 && NAME(word_order)(type, 1) != 1;
    READ_LATER(n > 4);
    UNROLLED for (int q = 0; q < near; q++)
        UNROLLED for (int i = 0; i < vectors; i++)
            UNROLLED for (int t = 0; t < n; t++) {
                const struct rounded *mine = x + q * n + t;
                dots[q][i][t] = NAME(begin)(type, halves ? start_of_half(type, mine, from / 4) : mine->start[0]);
            }
    UNROLLED for (int k = from; k < to; k += some) {
        const int at = twos ? NAME(word_order)(type, k) : k;
        if (!twos || k % 2 == 0) READ_WORD_LATER();
        UNROLLED for (int q = 0; q < near; q++)
            UNROLLED for (int i = 0; i < vectors; i++) {
                vu words[4];
                UNROLLED for (int j = 0; j < some; j++) words[j] = NAME(word)(type, w[i].words, b + q, at + j);
                UNROLLED for (int t = 0; t < n; t++)
                    dots[q][i][t] = some == 1 ? NAME(add)(type, dots[q][i][t], words[0], x[q * n + t].x, at)
                                              : NAME(add_words)(type, dots[q][i][t], words, x[q * n + t].x, at, some);
            }
    }
    UNROLLED for (int q = 0; q < near; q++)
        UNROLLED for (int i = 0; i < vectors; i++)
            UNROLLED for (int t = 0; t < n; t++) {
                const struct rounded *mine = x + q * n + t;
                int32_t start = halves ? start_of_half(type, mine, from / 4) : mine->start[0];
                dots[q][i][t] = NAME(end)(type, dots[q][i][t], start);
            }
}

/* A sum and what both halves of a block add to it. */
INLINE vf NAME(with_halves)(const int type, vf sum, vi dot, vi other, const struct NAME(factors) *f,
                            const struct rounded *x) {
    vf both = NAME(fused)(NAME(floats)(other), f->other, NAME(floats)(dot) * f->scale);
    if (has_lows(type)) {
        both = NAME(fused)(NAME(floats)(NAME(ints)(x->start[0])), f->low, both);
        both = NAME(fused)(NAME(floats)(NAME(ints)(x->start[1])), f->other_low, both);
    }
    return NAME(fused)(both, NAME(all)(x->scale), sum);
}

/* A sum and what a block adds to it that has one scale. */
INLINE vf NAME(with_block)(const int type, vf sum, vi dot, const struct NAME(factors) *f,
                           const struct rounded *x) {
    sum = NAME(fused)(NAME(floats)(dot), f->scale * x->scale, sum);
    return has_low(type) ? NAME(fused)(f->low, NAME(all)(x->sum), sum) : sum;
}

/* Some neighbouring blocks of a step. */
INLINE void NAME(add_blocks)(const int type, const int n, const int vectors, const int near, const int b,
                             vf sums[][BATCH], const struct NAME(side) *w, const struct rounded *x,
                             struct NAME(factors) *f) {
    vi dots[2][NAME(most_vectors)][BATCH], others[2][NAME(most_vectors)][BATCH];
    NAME(dots_of)(type, n, vectors, near, b, 0, by_halves(type) ? 4 : 8, dots, w, x);
    if (by_halves(type)) NAME(dots_of)(type, n, vectors, near, b, 4, 8, others, w, x);
    UNROLLED for (int q = 0; q < near; q++)
        UNROLLED for (int i = 0; i < vectors; i++) {
            NAME(factors_at)(type, f + i, w[i].step, w[i].words, b + q);
            UNROLLED for (int t = 0; t < n; t++)
                sums[i][t] = by_halves(type)
                    ? NAME(with_halves)(type, sums[i][t], dots[q][i][t], others[q][i][t], f + i, x + q * n + t)
                    : NAME(with_block)(type, sums[i][t], dots[q][i][t], f + i, x + q * n + t);
        }
}

/* Asks memory for some of what lies ahead of a step, with block b of `blocks`: a little at a time. Parts of a
   step take turns with its lines: `mine` is the first that falls to this one. */
INLINE void NAME(ask)(const int type, const int first_cache, const int ahead, const uint8_t *mine, const int b,
                      const int blocks) {
    const int turns = 16 / LANES, lines = ((int)step_bytes(form_of(type)) / 64 + turns - 1) / turns;
    UNROLLED for (int i = lines * b / blocks; i < lines * (b + 1) / blocks; i++)
        ask(first_cache, ahead, mine + 64 * turns * i);
}

/* A step of some vectors of rows times n rows of activations. */
INLINE void NAME(step)(const int type, const int n, const int vectors, vf sums[][BATCH],
                       const struct NAME(side) *w, const struct rounded *x) {
    const int blocks = blocks_of(type), near = NAME(neighbours)(type, n), first_cache = asks_for_first_cache(type);
    const int ahead = form_of(type).block == 256 ? AHEAD(type, n) : 3072;
    struct NAME(factors) f[NAME(most_vectors)];
    UNROLLED for (int i = 0; i < vectors; i++) f[i] = NAME(factors_of)(type, w[i].step, w[i].words);
    UNROLLED for (int b = 0; b < blocks; b += near) {
        UNROLLED for (int q = 0; q < near; q++)
            UNROLLED for (int i = 0; i < vectors; i++)
                NAME(ask)(type, first_cache, ahead, w[i].asked, b + q, blocks);
        NAME(add_blocks)(type, n, vectors, near, b, sums, w, x + b * n, f);
    }
}

/* Where LANES rows of a step lie. */
INLINE struct NAME(side) NAME(side_of)(const int type, const uint8_t *step, const int part) {
    return (struct NAME(side)){step + part * LANES * 2, step + head(form_of(type)) + part * LANES * 4,
                               step + part * 64};
}

/* The same for vectors of one or two groups from `first` on. */
INLINE void NAME(step_from)(const int type, const int n, const int vectors, const int first, vf sums[][BATCH],
                            const uint8_t *weights, const uint8_t *others, const struct rounded *x) {
    const int parts = 16 / LANES;
    struct NAME(side) w[NAME(most_vectors)];
    READ_LATER(1);
    UNROLLED for (int i = 0; i < vectors; i++)
        w[i] = NAME(side_of)(type, first + i < parts ? weights : others, (first + i) % parts);
    NAME(step)(type, n, vectors, sums, w, x);
}

/* One or two groups of rows times n rows of activations: out[n][ROWS] of each, one behind the other. Memory
   gives more when it is read in two places at once. */
INLINE void NAME(multiply)(const int type, const int n, const int groups, float *out, const uint8_t *weights,
                           const uint8_t *others, const struct rounded *x, int64_t cols) {
    const struct form f = form_of(type);
    const int64_t columns = f.block * f.blocks, bytes = step_bytes(f);
    const int parts = 16 / LANES, all = groups * parts, vectors = all < TOGETHER(type, n) ? all : TOGETHER(type, n);
    vf sums[2 * 16 / LANES][BATCH];
    UNROLLED for (int i = 0; i < all; i++)
        UNROLLED for (int t = 0; t < n; t++) sums[i][t] = (vf){0};
    for (int64_t c = 0; c < cols; c += columns, weights += bytes, others += bytes, x += columns / BLOCK * n)
        if (LANES == 16 || f.block == 32)
            UNROLLED for (int i = 0; i < all; i += vectors)
                NAME(step_from)(type, n, vectors, i, sums + i, weights, others, x);
        else
            for (int i = 0; i < all; i += vectors)
                NAME(step_from)(type, n, vectors, i, sums + i, weights, others, x);
    UNROLLED for (int g = 0; g < groups; g++)
        UNROLLED for (int t = 0; t < n; t++)
            UNROLLED for (int part = 0; part < parts; part++)
                NAME(store)(out + (g * BATCH + t) * ROWS + part * LANES, sums[g * parts + part][t]);
}

/* One group of rows, or two. */
INLINE void NAME(multiply_some)(const int type, int64_t n, float *out, const uint8_t *weights,
                                const uint8_t *others, const struct rounded *x, int64_t cols) {
#if !SMALL
    if (n == 1 && others) {
        NAME(multiply)(type, 1, 2, out, weights, others, x, cols);
        return;
    }
#if TWO_AS_ONE
    if (n == 2 && others) {
        NAME(multiply)(type, 2, 2, out, weights, others, x, cols);
        return;
    }
#endif
#endif
    for (int g = 0; g < (others ? 2 : 1); g++, weights = others, out += BATCH * ROWS) {
#if SMALL
        NAME(multiply)(type, (int)n, 1, out, weights, weights, x, cols);
#else
        if (n == 1) NAME(multiply)(type, 1, 1, out, weights, weights, x, cols);
        if (n == 2 && (TWO_AS_ONE || as_it_lies(type)))
            NAME(multiply)(type, 2, 1, out, weights, weights, x, cols);
        if (!as_it_lies(type)) continue; /* it was unpacked for more of them */
        switch (n) {
            case 3: NAME(multiply)(type, 3, 1, out, weights, weights, x, cols); break;
            case 4: NAME(multiply)(type, 4, 1, out, weights, weights, x, cols); break;
#if BATCH == 8
            case 5: NAME(multiply)(type, 5, 1, out, weights, weights, x, cols); break;
            case 6: NAME(multiply)(type, 6, 1, out, weights, weights, x, cols); break;
            case 7: NAME(multiply)(type, 7, 1, out, weights, weights, x, cols); break;
            case 8: NAME(multiply)(type, 8, 1, out, weights, weights, x, cols); break;
#endif
        }
#endif
    }
}

#define MULTIPLY(name)                                                                                        \
    static void NAME(multiply_##name)(int64_t n, float *out, const uint8_t *weights, const uint8_t *others,   \
                                      const struct rounded *x, int64_t cols) {                                \
        NAME(multiply_some)(TYPE_##name, n, out, weights, others, x, cols);                                   \
    }
ALL_TYPES(MULTIPLY)
#undef MULTIPLY

static multiplier *NAME(multiplier_of)(int64_t type) {
#define MULTIPLIER(name)                                                                                      \
    case TYPE_##name: return NAME(multiply_##name);
    switch (type) { ALL_TYPES(MULTIPLIER) }
#undef MULTIPLIER
    return NULL; /* no such weight can be packed */
}

#if TILES
#include "tiles_amx.h"
#endif

/* Where the rows of a group of columns of `out` lie in a weight that is in memory: of each half, if there is a
   gate; else NULL for the second. */
struct NAME(rows) {
    const uint8_t *first, *second;
};

#include "floats_body.h"

/* Rows of activations from `first` to `end`, BATCH together: blocks of the same columns lie side by side. */
static void NAME(round_tile)(const struct product *p, int64_t first, int64_t end, struct rounded *out) {
    int64_t blocks = p->cols / BLOCK, t = first;
    if (of_floats(p->type)) {
        NAME(keep_tile)(p, first, end, (float *)out);
        return;
    }
#if TILES
    t += NAME(round_by_tiles)(p, first, end, out);
#endif
    const int64_t digits = digits_of(p);
    for (; t < end; t += BATCH) {
        int64_t n = at_most(BATCH, end - t);
        for (int64_t i = 0; i < n; i += digits)
            NAME(round_row)(p, (t + i) / digits, out + (t - first) * blocks + i, n);
    }
}

INLINE struct NAME(rows) NAME(rows_of)(const struct product *p, int64_t group) {
    int64_t bytes = group_bytes(p->type, p->cols);
    const uint8_t *first = p->weights + group * bytes, *second = p->second;
    if (p->activation == PLAIN) return (struct NAME(rows)){first, NULL};
    return (struct NAME(rows)){first, (second ? second : p->weights + columns_out(p) / ROWS * bytes) + group * bytes};
}

#include "ready_body.h"

/* A group of columns of `out`, for rows of activations from `first` to `end`. `also`: another one, whose rows are
   the second ones, if there is no activation; the same one: none. */
static void NAME(group)(const struct product *p, multiplier *multiply, struct NAME(rows) rows, int64_t group,
                        int64_t also, int64_t first, int64_t end, const struct rounded *x) {
    float results[2 * BATCH * ROWS], *others = results + BATCH * ROWS;
    int64_t t = first;
    if (of_floats(p->type)) {
        NAME(group_of_floats)(p, rows, group, also, first, end, (const float *)x);
        return;
    }
#if TILES
    t += NAME(group_by_tiles)(p, rows.first, rows.second, group, first, end, x);
#endif
    t += NAME(group_unpacked)(p, rows, group, t, end, x + (t - first) * (p->cols / BLOCK));
    for (; t < end; t += BATCH) {
        int64_t n = at_most(BATCH, end - t);
        multiply(n, results, rows.first, rows.second, x + (t - first) * (p->cols / BLOCK), p->cols);
        NAME(finish)(p, t, n, group * ROWS, results, others);
        if (also != group) NAME(finish)(p, t, n, also * ROWS, others, NULL);
    }
}

/* What a thread takes, for a single row of activations, or its two digits: both halves of it at once. Before the
   last groups of it the next ones are taken, so that memory has begun to send them. */
static void NAME(single_row)(const struct product *p, multiplier *multiply, struct work *w, const struct rounded *x) {
    for (int more = 1; more;) {
        const int64_t from = w->from, to = w->to, half = p->activation == PLAIN ? (to - from) / 2 : 0;
        const int64_t pairs = from + half, alone = from + 2 * half;
        for (int64_t i = from; i < pairs; i++) {
            if (i + 1 == pairs && alone == to) more = take_soon(p, w);
            struct NAME(rows) rows = {NAME(rows_of)(p, i).first, NAME(rows_of)(p, i + half).first};
            NAME(group)(p, multiply, rows, i, i + half, 0, kept_rows(p), x);
        }
        for (int64_t i = alone; i < to; i++) {
            if (i + 1 == to) more = take_soon(p, w);
            NAME(group)(p, multiply, NAME(rows_of)(p, i), i, i, 0, kept_rows(p), x);
        }
    }
}

#include "packing_body.h"
#include "partial_body.h"

static void NAME(product)(const struct product *p, int ith, int nth) {
    if (p->partial && p->partial->streamed) {
        NAME(partial_product)(p, ith, nth);
        return;
    }
    const int64_t n = kept_rows(p);
    struct work w = work_of(p, ith, nth);
    multiplier *multiply = NAME(multiplier_of)(p->type);
    struct rounded *x = (struct rounded *)(p->scratch + ith * p->scratch_size);
    if ((n == 1 || (TWO_AS_ONE && p->n == 1)) && take(p, &w)) {
        NAME(round_tile)(p, 0, n, x);
        NAME(single_row)(p, multiply, &w, x);
    }
    for (int64_t tile = -1; take(p, &w);) {
        for (int64_t unit = w.from; unit < w.to; unit++) {
            int64_t first = unit / w.groups * w.tile, end = at_most(first + w.tile, n);
            if (unit / w.groups != tile) NAME(round_tile)(p, first, end, x);
            tile = unit / w.groups;
            int64_t group = unit % w.groups;
            NAME(group)(p, multiply, NAME(rows_of)(p, group), group, group, first, end, x);
        }
    }
    if (p->next) fetch_beginning(p->next, ith, nth);
    done(p, nth);
}

#undef vf
#undef vi
#undef vu

/* What dots_*.h says of these instructions. */
#undef LANES
#undef BATCH
#undef SMALL
#undef FLOATS
#undef FLOAT_SUMS
#undef UNROLLED
#undef MANY
#undef WORTH_UNPACKING
#undef MORE_TYPES_READY
#undef MORE_KINDS_READY
#undef AT_A_TIME
#undef TOGETHER
#undef ADDED_AT_ONCE
#undef AHEAD
#undef FAR
#undef TWO_AS_ONE
#undef ROOM
#undef NEEDS_HALVES
#undef SUMS_STAY
#undef READ_LATER
#undef READ_WORD_LATER
