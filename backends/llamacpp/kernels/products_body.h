/* The products themselves, in vectors of LANES rows of a weight. Included once for each set of instructions;
   names get its name through NAME.

   Every number is made by the same operations in the same order, whatever LANES is: nothing here may be left
   to a compiler that joins a multiplication and an addition on some machines (see setup.py). */

#define vf NAME(vf)
#define vi NAME(vi)
#define vu NAME(vu)

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

/* Results of n rows of activations from `first` on, for ROWS columns of `out` from `column` on: bias,
   activation and residual. `gated`: those of the second half of the weight, if there is an activation. */
static void NAME(finish)(const struct product *p, int64_t first, int64_t n, int64_t column, const float *results,
                         const float *gated) {
    int64_t width = columns_out(p);
    for (int64_t t = 0; t < n; t++)
        for (int64_t i = 0; i < ROWS && column + i < width; i += LANES) {
            int64_t at = column + i, count = width - at;
            vf y = NAME(load)(results + t * ROWS + i);
            if (p->bias) y += NAME(load_some)(p->bias + at, count);
            if (p->activation != PLAIN) {
                vf z = NAME(load)(gated + t * ROWS + i);
                if (p->bias) z += NAME(load_some)(p->bias + width + at, count);
                y = NAME(activated)(p->activation, y) * z;
            }
            if (p->residual)
                y += NAME(load_some)(p->residual + (first + t) * p->residual_stride + at, count);
            NAME(store_some)(p->out + (first + t) * p->out_stride + at, y, count);
        }
}

/* Activations to 8 bits */

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

/* 32 columns. Numbers are rounded by adding one that leaves nothing behind the point. NaN and infinity are no
   special case: as whole numbers their bits are greater than those of others, they make the scale NaN or
   infinite, and with it the results. */
INLINE void NAME(round_block)(struct rounded *out, const vf x[BLOCK / LANES], const int type) {
    vi most = (vi)NAME(absolute)(x[0]);
    for (int i = 1; i < BLOCK / LANES; i++) most = NAME(greater)((vi)NAME(absolute)(x[i]), most);
    float top = bits_as_float(NAME(greatest)(most)), inverse = top > LEAST ? 127.0f / top : 0;
    int32_t sums[2], offset = offset_of(type);
    for (int half = 0; half < 2; half++) {
        vi sum = {0};
        for (int i = half * 16 / LANES; i < (half + 1) * 16 / LANES; i++) {
            vi whole = (vi)(x[i] * inverse + WHOLE);
            NAME(put_bytes)(out->x + i * LANES, whole);
            sum += (whole << 24) >> 24; /* what the byte says, whatever x was */
        }
        sums[half] = NAME(total)(sum);
    }
    int32_t all = sums[0] + sums[1];
    out->scale = top <= LEAST ? 0 : top / 127.0f;
    out->sum = out->scale * (float)all;
    out->start[0] = -offset * (type == TYPE_Q6_K ? sums[0] : all);
    out->start[1] = -offset * sums[1];
}

/* One row of activations; its blocks are `step` apart. */
static void NAME(round_row)(const struct product *p, int64_t row, struct rounded *out, int64_t step) {
    const float *x = p->x + row * p->x_stride;
    float factor = p->gain ? NAME(inverse_rms)(x, p->cols, p->eps) : 1;
    for (int64_t c = 0; c < p->cols; c += BLOCK, out += step) {
        vf v[BLOCK / LANES];
        for (int i = 0; i < BLOCK / LANES; i++) {
            v[i] = NAME(load)(x + c + i * LANES);
            if (p->gain) v[i] = v[i] * factor * NAME(load)(p->gain + c + i * LANES);
        }
        NAME(round_block)(out, v, (int)p->type);
    }
}

/* Weights */

INLINE vu NAME(line)(const uint8_t *words, int i) {
    vu v;
    memcpy(&v, words + 64 * i, sizeof(v));
    return v;
}

INLINE vu NAME(nibbles)(vu x, const int high) {
#if defined(__aarch64__) /* it shifts bytes */
    if (high) return (vu)vshrq_n_u8((uint8x16_t)x, 4);
#endif
    return (high ? x >> 4 : x) & 0x0f0f0f0f;
}

/* Four columns of LANES rows as bytes: word k of block b of a step. */
INLINE vu NAME(word)(const int type, const uint8_t *words, const int b, const int k) {
    if (type == TYPE_Q4_0 || type == TYPE_Q4_1) return NAME(nibbles)(NAME(line)(words, 4 * b + k % 4), k / 4);
    if (type == TYPE_Q8_0) return NAME(line)(words, 8 * b + k);
    if (type == TYPE_Q4_K) return NAME(nibbles)(NAME(line)(words, 3 + b / 2 * 8 + k), b % 2);
    /* Q6_K: 128 columns have 16 words of nibbles, two runs of 32 columns in each, and 8 of pairs of bits. */
    const int run = b % 4;
    vu low = NAME(nibbles)(NAME(line)(words, line_of(type, b / 4 * 16 + run % 2 * 8 + k)), run / 2);
    vu high = NAME(line)(words, line_of(type, 32 + b / 4 * 8 + k));
    high = run < 2 ? high << (4 - 2 * run) : high >> (2 * run - 4);
    return low | (high & 0x30303030);
}

/* 32 columns that have one scale. `low`: what is added to each weight behind that; NULL: nothing. */
INLINE void NAME(add_block)(const int type, const int n, const int b, vf *sums, const uint8_t *words,
                            const struct rounded *x, vf scale, const vf *low) {
    vi dots[BATCH];
    READ_LATER(n > 4);
    UNROLLED for (int t = 0; t < n; t++) dots[t] = NAME(begin)(type, x[t].start[0]);
    UNROLLED for (int k = 0; k < 8; k++) {
        READ_WORD_LATER();
        vu w = NAME(word)(type, words, b, k);
        UNROLLED for (int t = 0; t < n; t++) dots[t] = NAME(add)(type, dots[t], w, x[t].x, k);
    }
    UNROLLED for (int t = 0; t < n; t++) {
        vf dot = NAME(floats)(NAME(end)(type, dots[t], x[t].start[0]));
        sums[t] = NAME(fused)(dot, scale * x[t].scale, sums[t]);
        if (low) sums[t] = NAME(fused)(*low, NAME(all)(x[t].sum), sums[t]);
    }
}

/* Half of 32 columns that have a scale for 16. */
INLINE void NAME(dot_half)(const int type, const int n, const int b, const int half, vi *dots,
                           const uint8_t *words, const struct rounded *x) {
    READ_LATER(n > 4);
    UNROLLED for (int t = 0; t < n; t++) dots[t] = NAME(begin)(type, x[t].start[half]);
    UNROLLED for (int k = 4 * half; k < 4 * half + 4; k++) {
        READ_WORD_LATER();
        vu w = NAME(word)(type, words, b, k);
        UNROLLED for (int t = 0; t < n; t++) dots[t] = NAME(add)(type, dots[t], w, x[t].x, k);
    }
    UNROLLED for (int t = 0; t < n; t++) dots[t] = NAME(end)(type, dots[t], x[t].start[half]);
}

INLINE void NAME(add_halves)(const int type, const int n, const int b, vf *sums, const uint8_t *words,
                             const struct rounded *x, vf scale, vf other_scale) {
    vi dots[BATCH], others[BATCH];
    NAME(dot_half)(type, n, b, 0, dots, words, x);
    NAME(dot_half)(type, n, b, 1, others, words, x);
    UNROLLED for (int t = 0; t < n; t++) {
        vf sum = NAME(fused)(NAME(floats)(others[t]), other_scale, NAME(floats)(dots[t]) * scale);
        sums[t] = NAME(fused)(sum, NAME(all)(x[t].scale), sums[t]);
    }
}

/* Byte i of each lane. */
INLINE vf NAME(byte)(vu x, const int i) { return NAME(floats)((vi)((x >> (8 * i)) & 255)); }

INLINE vf NAME(signed_byte)(vu x, const int i) { return NAME(floats)((vi)(x << (24 - 8 * i)) >> 24); }

/* Asks memory for some of what lies ahead of a step, with block b of so many: a little at a time. Parts of a
   step take turns with its lines: `mine` is the first that falls to this one. */
INLINE void NAME(ask)(const int type, const uint8_t *mine, const int b, const int blocks) {
    const int turns = 16 / LANES, lines = ((int)step_bytes(form_of(type)) / 64 + turns - 1) / turns;
    UNROLLED for (int i = lines * b / blocks; i < lines * (b + 1) / blocks; i++)
        ask(type, mine + 64 * turns * i);
}

/* What a part of a step multiplies the dot products of its blocks by, and what it adds. */
struct NAME(factors) {
    vf scale, other, low;     /* of a block; of its second half; what is added to each weight */
    vf scales, minimum;       /* of K types: of all blocks */
    vu bytes[2], minima[2];   /* six bits each */
};

INLINE struct NAME(factors) NAME(factors_of)(const int type, const uint8_t *step, const uint8_t *words) {
    struct NAME(factors) f = {0};
    if (type == TYPE_Q4_K || type == TYPE_Q6_K) f.scales = NAME(from_half)(step);
    if (type != TYPE_Q4_K) return f;
    /* Words 0 and 1 hold scales and minima of the first four blocks and the upper bits of the others, word 2 the
       others' lower bits. */
    f.minimum = -NAME(from_half)(step + 32);
    vu first = NAME(line)(words, 0), second = NAME(line)(words, 1), lower = NAME(line)(words, 2);
    f.bytes[0] = first & 0x3f3f3f3f;
    f.bytes[1] = (lower & 0x0f0f0f0f) | ((first >> 2) & 0x30303030);
    f.minima[0] = second & 0x3f3f3f3f;
    f.minima[1] = ((lower >> 4) & 0x0f0f0f0f) | ((second >> 2) & 0x30303030);
    return f;
}

/* The same of block b. */
INLINE void NAME(factors_at)(const int type, struct NAME(factors) *f, const uint8_t *step, const uint8_t *words,
                             const int b) {
    if (type == TYPE_Q4_K) {
        f->low = f->minimum * NAME(byte)(f->minima[b / 4], b % 4);
        f->scale = f->scales * NAME(byte)(f->bytes[b / 4], b % 4);
    } else if (type == TYPE_Q6_K) {
        vu scales = NAME(line)(words, line_of(TYPE_Q6_K, 48 + b / 2));
        f->scale = f->scales * NAME(signed_byte)(scales, 2 * b % 4);
        f->other = f->scales * NAME(signed_byte)(scales, 2 * b % 4 + 1);
    } else {
        f->scale = NAME(from_half)(step + 32 * b);
        if (type == TYPE_Q4_1) f->low = NAME(from_half)(step + 64 + 32 * b);
    }
}

/* A part of a step times n rows of activations. */
INLINE void NAME(part)(const int type, const int n, vf *sums, const uint8_t *step, const uint8_t *words,
                       const struct rounded *x, const uint8_t *mine) {
    const int blocks = blocks_of(type);
    struct NAME(factors) f = NAME(factors_of)(type, step, words);
    UNROLLED for (int b = 0; b < blocks; b++) {
        NAME(ask)(type, mine, b, blocks);
        NAME(factors_at)(type, &f, step, words, b);
        if (type == TYPE_Q6_K)
            NAME(add_halves)(type, n, b, sums, words, x + b * n, f.scale, f.other);
        else
            NAME(add_block)(type, n, b, sums, words, x + b * n, f.scale, has_low(type) ? &f.low : NULL);
    }
}

/* One step of a group of rows. */
INLINE void NAME(step)(const int type, const int n, vf sums[16 / LANES][BATCH], const uint8_t *weights,
                       const struct rounded *x) {
    const struct form f = form_of(type);
    for (int part = 0; part < 16 / LANES; part++) {
        READ_LATER(1);
        const uint8_t *step = weights + part * LANES * 2, *words = weights + head(f) + part * LANES * 4;
        const uint8_t *mine = weights + part * 64;
        NAME(part)(type, n, sums[part], step, words, x, mine);
    }
}

/* One or two groups of rows times n rows of activations: out[n][ROWS] of each, one behind the other. Memory
   gives more when it is read in two places at once. */
INLINE void NAME(multiply)(const int type, const int n, const int groups, float *out, const uint8_t *weights,
                           const uint8_t *others, const struct rounded *x, int64_t cols) {
    const struct form f = form_of(type);
    const int64_t columns = f.block * f.blocks, bytes = step_bytes(f);
    vf sums[2][16 / LANES][BATCH];
    for (int g = 0; g < groups; g++)
        for (int part = 0; part < 16 / LANES; part++)
            UNROLLED for (int t = 0; t < n; t++) sums[g][part][t] = (vf){0};
    for (int64_t c = 0; c < cols; c += columns, weights += bytes, others += bytes, x += columns / BLOCK * n) {
        NAME(step)(type, n, sums[0], weights, x);
        if (groups == 2) NAME(step)(type, n, sums[1], others, x);
    }
    for (int g = 0; g < groups; g++)
        for (int t = 0; t < n; t++)
            for (int part = 0; part < 16 / LANES; part++)
                NAME(store)(out + (g * BATCH + t) * ROWS + part * LANES, sums[g][part][t]);
}

/* One group of rows, or two. */
INLINE void NAME(multiply_some)(const int type, int64_t n, float *out, const uint8_t *weights,
                                const uint8_t *others, const struct rounded *x, int64_t cols) {
#if !SMALL
    if (n == 1 && others) {
        NAME(multiply)(type, 1, 2, out, weights, others, x, cols);
        return;
    }
#endif
    for (int g = 0; g < (others ? 2 : 1); g++, weights = others, out += BATCH * ROWS) {
#if SMALL
        NAME(multiply)(type, (int)n, 1, out, weights, weights, x, cols);
#else
        switch (n) {
            case 1: NAME(multiply)(type, 1, 1, out, weights, weights, x, cols); break;
            case 2: NAME(multiply)(type, 2, 1, out, weights, weights, x, cols); break;
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

#define MULTIPLY(name, type)                                                                                  \
    static void NAME(name)(int64_t n, float *out, const uint8_t *weights, const uint8_t *others,              \
                           const struct rounded *x, int64_t cols) {                                           \
        NAME(multiply_some)(type, n, out, weights, others, x, cols);                                          \
    }
MULTIPLY(multiply_q4_0, TYPE_Q4_0)
MULTIPLY(multiply_q4_1, TYPE_Q4_1)
MULTIPLY(multiply_q8_0, TYPE_Q8_0)
MULTIPLY(multiply_q4_k, TYPE_Q4_K)
MULTIPLY(multiply_q6_k, TYPE_Q6_K)
#undef MULTIPLY

static multiplier *NAME(multiplier_of)(int64_t type) {
    switch (type) {
        case TYPE_Q4_0: return NAME(multiply_q4_0);
        case TYPE_Q4_1: return NAME(multiply_q4_1);
        case TYPE_Q8_0: return NAME(multiply_q8_0);
        case TYPE_Q4_K: return NAME(multiply_q4_k);
        default: return NAME(multiply_q6_k);
    }
}

#if TILES
#include "tiles_amx.h"
#endif

/* Rows of activations from `first` to `end`, BATCH together: blocks of the same columns lie side by side. */
static void NAME(round_tile)(const struct product *p, int64_t first, int64_t end, struct rounded *out) {
    int64_t blocks = p->cols / BLOCK, t = first;
#if TILES
    t += NAME(round_by_tiles)(p, first, end, out);
#endif
    for (; t < end; t += BATCH) {
        int64_t n = at_most(BATCH, end - t);
        for (int64_t i = 0; i < n; i++) NAME(round_row)(p, t + i, out + (t - first) * blocks + i, n);
    }
}

/* Where the rows of a group of columns of `out` lie in a weight that is in memory: of each half, if there is a
   gate; else NULL for the second. */
struct NAME(rows) {
    const uint8_t *first, *second;
};

INLINE struct NAME(rows) NAME(rows_of)(const struct product *p, int64_t group) {
    int64_t bytes = group_bytes(p->type, p->cols);
    const uint8_t *first = p->weights + group * bytes;
    return (struct NAME(rows)){first, p->activation == PLAIN ? NULL : first + columns_out(p) / ROWS * bytes};
}

#if MANY
/* Many rows of activations: weights are unpacked once for all of a run, some blocks at a time, so that neither
   they nor the activations leave the first cache. Sums wait in memory, and are made in the same order. */

/* A block of all rows of a group. */
struct NAME(ready) {
    uint8_t words[8][64];
    float scale[ROWS], other[ROWS], low[ROWS];
};

INLINE void NAME(prepare)(const int type, const uint8_t *step, struct NAME(ready) *out) {
    const int blocks = blocks_of(type);
    for (int part = 0; part < 16 / LANES; part++) {
        const uint8_t *own = step + part * LANES * 2, *words = step + head(form_of(type)) + part * LANES * 4;
        struct NAME(factors) f = NAME(factors_of)(type, own, words);
        UNROLLED for (int b = 0; b < blocks; b++) {
            NAME(ask)(type, step + part * 64, b, blocks);
            NAME(factors_at)(type, &f, own, words, b);
            UNROLLED for (int k = 0; k < 8; k++) {
                vu w = NAME(word)(type, words, b, k);
                memcpy(out[b].words[k] + part * LANES * 4, &w, sizeof(w));
            }
            NAME(store)(out[b].scale + part * LANES, f.scale);
            if (type == TYPE_Q6_K) NAME(store)(out[b].other + part * LANES, f.other);
            if (has_low(type)) NAME(store)(out[b].low + part * LANES, f.low);
        }
    }
}

/* Some parts of a block, each LANES rows, times BATCH rows of activations. */
INLINE void NAME(add_ready)(const int type, const int parts, const struct NAME(ready) *w, const int from,
                            const struct rounded *x, float *sums) {
    vi dots[2][BATCH];
    UNROLLED for (int p = 0; p < parts; p++)
        UNROLLED for (int t = 0; t < BATCH; t++) dots[p][t] = NAME(begin)(type, x[t].start[0]);
    UNROLLED for (int k = 0; k < 8; k++) {
        READ_WORD_LATER();
        vu v[2];
        UNROLLED for (int p = 0; p < parts; p++)
            memcpy(v + p, w->words[k] + (from + p) * LANES * 4, sizeof(vu));
        UNROLLED for (int t = 0; t < BATCH; t++)
            UNROLLED for (int p = 0; p < parts; p++)
                dots[p][t] = NAME(add)(type, dots[p][t], v[p], x[t].x, k);
    }
    UNROLLED for (int p = 0; p < parts; p++) {
        READ_WORD_LATER();
        vf scale = NAME(load)(w->scale + (from + p) * LANES), low = NAME(load)(w->low + (from + p) * LANES);
        UNROLLED for (int t = 0; t < BATCH; t++) {
            float *sum = sums + t * ROWS + (from + p) * LANES;
            vf dot = NAME(floats)(NAME(end)(type, dots[p][t], x[t].start[0]));
            vf y = NAME(fused)(dot, scale * x[t].scale, NAME(load)(sum));
            if (has_low(type)) y = NAME(fused)(low, NAME(all)(x[t].sum), y);
            NAME(store)(sum, y);
        }
    }
}

INLINE void NAME(dot_ready)(const struct NAME(ready) *w, const int part, const int half, vi *dots,
                            const struct rounded *x) {
    UNROLLED for (int t = 0; t < BATCH; t++) dots[t] = NAME(begin)(TYPE_Q6_K, x[t].start[half]);
    UNROLLED for (int k = 4 * half; k < 4 * half + 4; k += 2) {
        READ_WORD_LATER();
        vu v[2];
        for (int i = 0; i < 2; i++) memcpy(v + i, w->words[k + i] + part * LANES * 4, sizeof(vu));
        UNROLLED for (int t = 0; t < BATCH; t++) dots[t] = NAME(add_two)(TYPE_Q6_K, dots[t], v, x[t].x, k);
    }
    UNROLLED for (int t = 0; t < BATCH; t++) dots[t] = NAME(end)(TYPE_Q6_K, dots[t], x[t].start[half]);
}

/* The same for a type with a scale for 16 columns. */
INLINE void NAME(add_ready_halves)(const struct NAME(ready) *w, const int part, const struct rounded *x,
                                   float *sums) {
    vi dots[BATCH], others[BATCH];
    NAME(dot_ready)(w, part, 0, dots, x);
    NAME(dot_ready)(w, part, 1, others, x);
    READ_WORD_LATER();
    vf scale = NAME(load)(w->scale + part * LANES), other = NAME(load)(w->other + part * LANES);
    UNROLLED for (int t = 0; t < BATCH; t++) {
        float *at = sums + t * ROWS + part * LANES;
        vf sum = NAME(fused)(NAME(floats)(others[t]), other, NAME(floats)(dots[t]) * scale);
        NAME(store)(at, NAME(fused)(sum, NAME(all)(x[t].scale), NAME(load)(at)));
    }
}

INLINE void NAME(multiply_ready)(const int type, int blocks, const struct NAME(ready) *w,
                                 const struct rounded *x, float *sums) {
    for (int b = 0; b < blocks; b++, w++, x += BATCH) {
        if (type == TYPE_Q6_K)
            UNROLLED for (int part = 0; part < 16 / LANES; part++) NAME(add_ready_halves)(w, part, x, sums);
        else
            UNROLLED for (int part = 0; part < 16 / LANES; part += AT_A_TIME)
                NAME(add_ready)(type, AT_A_TIME, w, part, x, sums);
    }
}

/* A group of rows times n rows of activations, a multiple of BATCH: sums[n][ROWS]. */
INLINE void NAME(multiply_many)(const int type, int64_t n, float *sums, const uint8_t *weights,
                                const struct rounded *x, int64_t cols) {
    const struct form f = form_of(type);
    const int64_t each = blocks_of(type), all = cols / BLOCK, bytes = step_bytes(f);
    struct NAME(ready) ready[READY];
    memset(sums, 0, (size_t)n * ROWS * sizeof(float));
    for (int64_t b = 0; b < all;) {
        int64_t blocks = 0;
        for (; blocks + each <= READY && b + blocks < all; blocks += each, weights += bytes)
            NAME(prepare)(type, weights, ready + blocks);
        for (int64_t t = 0; t < n; t += BATCH)
            NAME(multiply_ready)(type, (int)blocks, ready, x + t * all + b * BATCH, sums + t * ROWS);
        b += blocks;
    }
}

static void NAME(multiply_many_of)(int64_t type, int64_t n, float *sums, const uint8_t *weights,
                                   const struct rounded *x, int64_t cols) {
    switch (type) {
        case TYPE_Q4_0: NAME(multiply_many)(TYPE_Q4_0, n, sums, weights, x, cols); break;
        case TYPE_Q4_1: NAME(multiply_many)(TYPE_Q4_1, n, sums, weights, x, cols); break;
        case TYPE_Q4_K: NAME(multiply_many)(TYPE_Q4_K, n, sums, weights, x, cols); break;
        default: NAME(multiply_many)(TYPE_Q6_K, n, sums, weights, x, cols);
    }
}

/* Whole batches of rows from `first` on, if they are many; how many that were. */
static int64_t NAME(group_of_many)(const struct product *p, struct NAME(rows) rows, int64_t group,
                                   int64_t first, int64_t end, const struct rounded *x) {
    float results[2][RUN * ROWS];
    int64_t whole = (end - first) / BATCH * BATCH;
    if (whole < MANY || p->type == TYPE_Q8_0) return 0; /* whose bytes are ready as they are */
    for (int64_t t = 0; t < whole; t += RUN) {
        int64_t n = at_most(RUN, whole - t);
        const struct rounded *mine = x + t * (p->cols / BLOCK);
        NAME(multiply_many_of)(p->type, n, results[0], rows.first, mine, p->cols);
        if (rows.second) NAME(multiply_many_of)(p->type, n, results[1], rows.second, mine, p->cols);
        NAME(finish)(p, first + t, n, group * ROWS, results[0], results[1]);
    }
    return whole;
}
#endif

/* A group of columns of `out`, for rows of activations from `first` to `end`. `also`: another one, whose rows are
   the second ones, if there is no activation; the same one: none. */
static void NAME(group)(const struct product *p, multiplier *multiply, struct NAME(rows) rows, int64_t group,
                        int64_t also, int64_t first, int64_t end, const struct rounded *x) {
    float results[2 * BATCH * ROWS], *others = results + BATCH * ROWS;
    int64_t t = first;
#if TILES
    t += NAME(group_by_tiles)(p, rows.first, rows.second, group, first, end, x);
#endif
#if MANY
    t += NAME(group_of_many)(p, rows, group, first, end, x);
#endif
    for (; t < end; t += BATCH) {
        int64_t n = at_most(BATCH, end - t);
        multiply(n, results, rows.first, rows.second, x + (t - first) * (p->cols / BLOCK), p->cols);
        NAME(finish)(p, t, n, group * ROWS, results, others);
        if (also != group) NAME(finish)(p, t, n, also * ROWS, others, NULL);
    }
}

/* What a thread took, for a single row of activations: both halves of it at once. */
static void NAME(halves)(const struct product *p, multiplier *multiply, int64_t from, int64_t to,
                         const struct rounded *x) {
    int64_t half = p->activation == PLAIN ? (to - from) / 2 : 0;
    for (int64_t i = from; i < from + half; i++) {
        struct NAME(rows) rows = {NAME(rows_of)(p, i).first, NAME(rows_of)(p, i + half).first};
        NAME(group)(p, multiply, rows, i, i + half, 0, 1, x);
    }
    for (int64_t i = from + 2 * half; i < to; i++)
        NAME(group)(p, multiply, NAME(rows_of)(p, i), i, i, 0, 1, x);
}

#include "packing_body.h"
#include "partial_body.h"

static void NAME(product)(const struct product *p, int ith, int nth) {
    if (p->partial && p->partial->streamed) {
        NAME(partial_product)(p, ith, nth);
        return;
    }
    struct work w = work_of(p, ith, nth);
    multiplier *multiply = NAME(multiplier_of)(p->type);
    struct rounded *x = (struct rounded *)(p->scratch + ith * p->scratch_size);
    for (int64_t tile = -1; take(p, &w);) {
        if (p->n == 1) {
            if (tile < 0) NAME(round_tile)(p, 0, 1, x);
            tile = 0;
            NAME(halves)(p, multiply, w.from, w.to, x);
            continue;
        }
        for (int64_t unit = w.from; unit < w.to; unit++) {
            int64_t first = unit / w.groups * w.tile, end = at_most(first + w.tile, p->n);
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
