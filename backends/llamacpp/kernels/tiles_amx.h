/* Sixteen rows of activations at once, by AMX's tiles: included by products_body.h for the instructions that
   CPUs with tiles have besides.

   A line of unpacked weights (four columns of each of 16 rows) is a row of a tile, so one instruction makes all
   dot products of a block with 16 rows of activations. They are whole numbers and exact. What follows is done by
   vectors, in the same order and by the same operations as elsewhere (add_block, add_halves): same bits.

   Columns are gone through in spans: what is unpacked of a group of weights stays in the first cache for all
   rows of activations, and so do the sums. */

enum {
    SPAN_BLOCKS = 16,  /* blocks of columns that are unpacked at once; a multiple of a step's */
    MOST_BATCHES = 16, /* batches of rows that the same unpacked weights are used for */
    FEWEST = 14,       /* rows that are worth a batch: it takes as long as one of 16 */
    FEWEST_MORE = 8    /* the same behind other batches, for which weights are unpacked anyway */
};

/* 32 columns of 16 rows of activations. Lies where as many struct rounded would. */
struct rounded_rows {
    int8_t x[TILE_ROWS][BLOCK];
    float scale[TILE_ROWS];
    float sum[TILE_ROWS]; /* of what x stands for */
    float unused[TILE_ROWS * sizeof(struct rounded) / sizeof(float) - TILE_ROWS * (BLOCK / 4 + 2)];
};

/* 32 columns of a group of weights, as signed bytes. */
struct unpacked {
    int8_t lines[8][64];
    float scale[ROWS];
    float other[ROWS]; /* of the second half of the columns; of other types what is added to each weight */
};

/* What tiles are used for, and how large they are: 0 to 3 for sums, 4 and 5 for activations, 6 and 7 for
   weights. */
struct tile_sizes {
    uint8_t palette, start, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

static const struct tile_sizes blocks_of_32 = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 32, 32, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 8, 8}};
static const struct tile_sizes blocks_of_16 = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 16, 16, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 4, 4}};

/* Compilers do not know what tiles read. */
#define WRITTEN(x) __asm__ volatile("" : : "r"(x) : "memory")

/* Of rows from `first` to `end` those that are multiplied in batches of 16, of which the last may lack some. Only
   the last of all rows are no whole batch, and whether they become one follows from how many rows there are, not
   from how these were cut: who rounds activations may cut them otherwise than who multiplies. */
static int64_t rows_by_tiles(const struct product *p, int64_t first, int64_t end) {
    if (p->level != LEVEL_AMX_INT8 || has_lows((int)p->type) || of_floats(p->type)) return 0;
    int64_t n = end - first, least = kept_rows(p) < TILE_ROWS ? FEWEST : FEWEST_MORE;
    return n % TILE_ROWS < least ? n / TILE_ROWS * TILE_ROWS : n;
}

/* Activations */

/* Lane i of the result is the greatest, or the sum, of the lanes of x[i]. */
INLINE vi NAME(joined)(vi a, vi b, const int sums) { return sums ? a + b : NAME(greater)(a, b); }

INLINE vi NAME(across)(const vi x[16], const int sums) {
    vi a[8], b[4], c[2];
    UNROLLED for (int i = 0; i < 8; i++) {
        __m512i even = (__m512i)x[2 * i], odd = (__m512i)x[2 * i + 1];
        a[i] = NAME(joined)((vi)_mm512_unpacklo_epi32(even, odd), (vi)_mm512_unpackhi_epi32(even, odd), sums);
    }
    UNROLLED for (int i = 0; i < 4; i++) {
        __m512i even = (__m512i)a[2 * i], odd = (__m512i)a[2 * i + 1];
        b[i] = NAME(joined)((vi)_mm512_unpacklo_epi64(even, odd), (vi)_mm512_unpackhi_epi64(even, odd), sums);
    }
    UNROLLED for (int i = 0; i < 2; i++) {
        __m512i even = (__m512i)b[2 * i], odd = (__m512i)b[2 * i + 1];
        c[i] = NAME(joined)((vi)_mm512_shuffle_i32x4(even, odd, 0x88),
                            (vi)_mm512_shuffle_i32x4(even, odd, 0xdd), sums);
    }
    return NAME(joined)((vi)_mm512_shuffle_i32x4((__m512i)c[0], (__m512i)c[1], 0x88),
                        (vi)_mm512_shuffle_i32x4((__m512i)c[0], (__m512i)c[1], 0xdd), sums);
}

/* Up to 16 blocks of a row, rounded as round_block does it; v becomes what is left of them. */
INLINE void NAME(round_span)(const int type, vf v[16][2], int64_t blocks, struct rounded_rows *out, int row) {
    vi most[16], sums[16];
    float scales[16], inverses[16], all[16];
    for (int64_t b = 0; b < 16; b++) {
        most[b] = sums[b] = (vi){0};
        if (b < blocks) most[b] = NAME(greater)((vi)NAME(absolute)(v[b][1]), (vi)NAME(absolute)(v[b][0]));
    }
    vf top = (vf)NAME(across)(most, 0), least = NAME(all)(LEAST);
    vf scale = NAME(choose)((vi)(top <= least), NAME(all)(0), top / 127.0f);
    NAME(store)(inverses, NAME(choose)((vi)(top > least), 127.0f / top, NAME(all)(0)));
    NAME(store)(scales, scale);
    for (int64_t b = 0; b < blocks; b++) {
        for (int i = 0; i < 2; i++) {
            vf shifted = v[b][i] * inverses[b] + WHOLE;
            NAME(put_bytes)(out[b].x[row] + i * 16, (vi)shifted);
            sums[b] += ((vi)shifted << 24) >> 24;
            v[b][i] = NAME(left)(v[b][i], shifted, scales[b]);
        }
        out[b].scale[row] = scales[b];
    }
    if (!has_low(type)) return;
    NAME(store)(all, scale * NAME(floats)(NAME(across)(sums, 1)));
    for (int64_t b = 0; b < blocks; b++) out[b].sum[row] = all[b];
}

/* Up to 16 blocks of a row of activations, normed. */
INLINE void NAME(read_span)(const float *x, const float *gain, float factor, int64_t blocks, vf v[16][2]) {
    for (int64_t b = 0; b < blocks; b++)
        for (int i = 0; i < 2; i++) {
            v[b][i] = NAME(load)(x + b * BLOCK + i * 16);
            if (gain) v[b][i] = v[b][i] * factor * NAME(load)(gain + b * BLOCK + i * 16);
        }
}

/* A batch of up to 16 rows of 8 bits; those that it lacks are zero. */
static void NAME(round_batch)(const struct product *p, int64_t first, int64_t n, struct rounded_rows *out) {
    float factors[TILE_ROWS];
    const int64_t blocks = p->cols / BLOCK, digits = digits_of(p);
    for (int64_t i = 0; i < n; i += digits)
        factors[i] = p->gain ? NAME(inverse_rms)(row_of_x(p, (first + i) / digits), p->cols, p->eps) : 1;
    for (int64_t b = 0; b < blocks; b += 16) {
        int64_t some = at_most(16, blocks - b);
        const float *gain = p->gain ? p->gain + b * BLOCK : NULL;
        if (n < TILE_ROWS) memset(out + b, 0, (size_t)some * sizeof(*out));
        for (int64_t i = 0; i < n; i += digits) {
            vf v[16][2];
            NAME(read_span)(row_of_x(p, (first + i) / digits) + b * BLOCK, gain, factors[i], some, v);
            for (int64_t k = 0; k < digits; k++)
                NAME(round_span)((int)p->type, v, some, out + b, (int)(i + k));
        }
    }
}

INLINE struct rounded_rows *NAME(batch_at)(const struct product *p, const struct rounded *x, int64_t row) {
    return (struct rounded_rows *)(x + row * (p->cols / BLOCK));
}

/* Weights */

/* Eight lines of words of a step, made signed. */
INLINE void NAME(unpack_words)(const int type, struct unpacked *out, const uint8_t *words, const int b) {
    const uint32_t offset = (uint32_t)offset_of(type) * 0x01010101u;
    UNROLLED for (int k = 0; k < 8; k++) {
        vu w = NAME(word)(type, words, b, k);
        if (offset_of(type) == 128)
            w ^= offset;
        else if (offset)
            w = (vu)_mm512_sub_epi8((__m512i)w, _mm512_set1_epi32((int)offset));
        memcpy(out->lines[k], &w, 64);
    }
}

/* Neighbouring steps of a group. */
INLINE void NAME(unpack_lines)(const int type, struct unpacked *out, const uint8_t *step, int64_t blocks) {
    const int each = blocks_of(type), first_cache = asks_for_first_cache(type);
    const int run = SPAN_BLOCKS / each * (int)step_bytes(form_of(type));
    for (; blocks > 0; blocks -= each, step += step_bytes(form_of(type))) {
        const uint8_t *words = step + head(form_of(type));
        struct NAME(factors) f = NAME(factors_of)(type, step, words);
        UNROLLED for (int b = 0; b < each; b++, out++) {
            NAME(ask)(type, first_cache, run, step, b, each);
            NAME(factors_at)(type, &f, step, words, b);
            NAME(store)(out->scale, f.scale);
            if (by_halves(type)) NAME(store)(out->other, f.other);
            if (has_low(type)) NAME(store)(out->other, f.low);
            NAME(unpack_words)(type, out, words, b);
        }
    }
    WRITTEN(out);
}

#define UNPACK(name)                                                                                          \
    static void NAME(lines_##name)(struct unpacked *out, const uint8_t *step, int64_t blocks) {               \
        NAME(unpack_lines)(TYPE_##name, out, step, blocks);                                                   \
    }
ALL_TYPES(UNPACK)
#undef UNPACK

static void NAME(unpack_span)(int64_t type, struct unpacked *out, const uint8_t *step, int64_t blocks) {
#define UNPACK(name)                                                                                          \
    case TYPE_##name: NAME(lines_##name)(out, step, blocks); break;
    switch (type) { ALL_TYPES(UNPACK) }
#undef UNPACK
}

/* Products

   While tiles work, only one of the units that multiply vectors does. So what need not be a multiplication is not
   one: dot products begin at a number that makes them floats (WHOLE), from which it is subtracted. */

typedef float dots[TILE_ROWS][ROWS];

/* The beginning of each row of a tile. */
static const float whole_line[ROWS] __attribute__((aligned(64))) = {
    WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE,
    WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE};

#define START(sums, x_tile, w_tile, x, w)                                                                     \
    do {                                                                                                      \
        _tile_loadd(sums, whole_line, 0);                                                                     \
        _tile_loadd(x_tile, x, BLOCK);                                                                        \
        _tile_loadd(w_tile, w, 64);                                                                           \
        _tile_dpbssd(sums, x_tile, w_tile);                                                                   \
    } while (0)

/* Begins with dot products of a block, or of half of one, in one of four places. */
INLINE void NAME(start_dots)(const int place, const int8_t *x, const int8_t *w) {
    switch (place) {
        case 0: START(0, 4, 6, x, w); break;
        case 1: START(1, 5, 7, x, w); break;
        case 2: START(2, 4, 6, x, w); break;
        default: START(3, 5, 7, x, w);
    }
}

INLINE void NAME(end_dots)(const int place, dots out) {
    switch (place) {
        case 0: _tile_stored(0, out, 64); break;
        case 1: _tile_stored(1, out, 64); break;
        case 2: _tile_stored(2, out, 64); break;
        default: _tile_stored(3, out, 64);
    }
}

/* A block is added as elsewhere. `others`: dot products of the second half of its columns, if that has a scale. */
INLINE void NAME(add_dots)(const int type, vf sums[TILE_ROWS], dots from, dots others, const struct unpacked *w,
                           const struct rounded_rows *x) {
    vf scale = NAME(load)(w->scale), other = NAME(load)(w->other);
    UNROLLED for (int t = 0; t < TILE_ROWS; t++) {
        vf dot = NAME(load)(from[t]) - WHOLE;
        if (by_halves(type)) {
            vf sum = NAME(fused)(NAME(load)(others[t]) - WHOLE, other, dot * scale);
            sums[t] = NAME(fused)(sum, NAME(all)(x->scale[t]), sums[t]);
        } else {
            sums[t] = NAME(fused)(dot, scale * x->scale[t], sums[t]);
            if (has_low(type))
                sums[t] = NAME(fused)(other, NAME(all)(x->sum[t]), sums[t]);
        }
    }
}

/* A span of columns of a group of weights times batches of rows, whose blocks begin `stride` apart. Tiles work
   some blocks ahead of the vectors, and go on with the next batch meanwhile: dot products are started, stored
   4 turns later, and added another 2 later. A turn is a block, or half of one for types by halves; turns are taken by fours.
   `first`: nothing was added to the results before. */
INLINE void NAME(multiply_span)(const int type, int64_t batches, float *results, const struct unpacked *w,
                                const struct rounded_rows *x, int64_t stride, int64_t blocks, int first) {
    const int parts = by_halves(type) ? 2 : 1;
    const struct rounded_rows *ahead = x;
    dots ring[4] __attribute__((aligned(64)));
    vf sums[TILE_ROWS];
    UNROLLED for (int t = 0; t < TILE_ROWS; t++) sums[t] = (vf){0};
    int64_t turns = batches * blocks * parts, b = 0, c = 0; /* blocks to be started and added next */
    for (int64_t turn = 0; turn < turns + 8; turn += 4) {
        UNROLLED for (int k = 0; k < 4; k++) {
            if (turn && turn < turns + 4) NAME(end_dots)(k, ring[k]);
            if (turn < turns) {
                const int part = k % parts;
                NAME(start_dots)(k, ahead[b].x[0] + part * BLOCK / 2, w[b].lines[part * 4]);
                if (part == parts - 1) b++;
                if (k == 3 && b == blocks) {
                    b = 0;
                    ahead += stride;
                }
            }
            if (k < 2 ? turn < 8 : !turn || turn >= turns + 4) continue;
            if (k % parts != parts - 1) continue;
            if (k == 1 + parts && c == 0 && !first)
                UNROLLED for (int t = 0; t < TILE_ROWS; t++) sums[t] = NAME(load)(results + t * ROWS);
            NAME(add_dots)(type, sums, ring[(k + 3 - parts) % 4], ring[(k + 2) % 4], w + c, x + c);
            c++;
            if (k == 1 && c == blocks) {
                c = 0;
                UNROLLED for (int t = 0; t < TILE_ROWS; t++) {
                    NAME(store)(results + t * ROWS, sums[t]);
                    sums[t] = (vf){0};
                }
                results += TILE_ROWS * ROWS;
                x += stride;
            }
        }
    }
}

/* The same for two blocks: those that are left of columns that are no multiple of 128. */
INLINE void NAME(multiply_two)(const int type, int64_t batches, float *results, const struct unpacked *w,
                               const struct rounded_rows *x, int64_t stride, int first) {
    dots out __attribute__((aligned(64)));
    vf sums[TILE_ROWS];
    for (; batches; batches--, results += TILE_ROWS * ROWS, x += stride) {
        UNROLLED for (int t = 0; t < TILE_ROWS; t++) sums[t] = first ? (vf){0} : NAME(load)(results + t * ROWS);
        for (int b = 0; b < 2; b++) {
            NAME(start_dots)(0, x[b].x[0], w[b].lines[0]);
            NAME(end_dots)(0, out);
            NAME(add_dots)(type, sums, out, out, w + b, x + b);
        }
        UNROLLED for (int t = 0; t < TILE_ROWS; t++) NAME(store)(results + t * ROWS, sums[t]);
    }
}

/* A span of columns, of a type or of one that is like it. */
INLINE void NAME(span)(const int type, int64_t batches, float *out, const struct unpacked *w,
                       const struct rounded_rows *x, int64_t stride, int64_t blocks, int first) {
    int64_t fours = by_halves(type) ? blocks : blocks / 4 * 4;
    if (fours) NAME(multiply_span)(type, batches, out, w, x, stride, fours, first);
    if (fours < blocks) NAME(multiply_two)(type, batches, out, w + fours, x + fours, stride, first && !fours);
}

static void NAME(span_plain)(int64_t batches, float *out, const struct unpacked *w, const struct rounded_rows *x,
                             int64_t stride, int64_t blocks, int first) {
    NAME(span)(TYPE_Q4_0, batches, out, w, x, stride, blocks, first);
}

static void NAME(span_with_low)(int64_t batches, float *out, const struct unpacked *w,
                                const struct rounded_rows *x, int64_t stride, int64_t blocks, int first) {
    NAME(span)(TYPE_Q4_1, batches, out, w, x, stride, blocks, first);
}

static void NAME(span_by_halves)(int64_t batches, float *out, const struct unpacked *w,
                                 const struct rounded_rows *x, int64_t stride, int64_t blocks, int first) {
    NAME(span)(TYPE_Q6_K, batches, out, w, x, stride, blocks, first);
}

/* A group of weights times batches of rows: out[row][ROWS]. */
static void NAME(some_batches)(int64_t type, int64_t batches, float *out, const uint8_t *weights,
                               const struct rounded *x, int64_t cols) {
    struct unpacked w[SPAN_BLOCKS] __attribute__((aligned(64)));
    const int64_t blocks = cols / BLOCK, run = SPAN_BLOCKS / blocks_of(type) * step_bytes(form_of(type));
    for (int64_t b = 0; b < blocks; b += SPAN_BLOCKS, weights += run) {
        int64_t some = at_most(SPAN_BLOCKS, blocks - b);
        const struct rounded_rows *rows = (const struct rounded_rows *)x + b;
        NAME(unpack_span)(type, w, weights, some);
        if (by_halves((int)type))
            NAME(span_by_halves)(batches, out, w, rows, blocks, some, b == 0);
        else if (has_low((int)type))
            NAME(span_with_low)(batches, out, w, rows, blocks, some, b == 0);
        else
            NAME(span_plain)(batches, out, w, rows, blocks, some, b == 0);
    }
}

/* Rows from `first` to `end` as far as tiles take them, which is returned. */
static int64_t NAME(round_by_tiles)(const struct product *p, int64_t first, int64_t end, struct rounded *out) {
    int64_t n = rows_by_tiles(p, first, end);
    for (int64_t t = 0; t < n; t += TILE_ROWS)
        NAME(round_batch)(p, first + t, at_most(TILE_ROWS, n - t), NAME(batch_at)(p, out, t));
    return n;
}

/* A group of columns of `out` for rows of activations from `first` on, as far as tiles take them. */
static int64_t NAME(group_by_tiles)(const struct product *p, const uint8_t *weights, const uint8_t *others,
                                    int64_t group, int64_t first, int64_t end, const struct rounded *x) {
    float results[2][MOST_BATCHES * TILE_ROWS * ROWS] __attribute__((aligned(64)));
    int64_t n = rows_by_tiles(p, first, end);
    for (int64_t t = 0; t < n; t += MOST_BATCHES * TILE_ROWS) {
        int64_t rows = at_most(MOST_BATCHES * TILE_ROWS, n - t), batches = (rows + TILE_ROWS - 1) / TILE_ROWS;
        const struct rounded *from = x + t * (p->cols / BLOCK);
        NAME(some_batches)(p->type, batches, results[0], weights, from, p->cols);
        if (others) NAME(some_batches)(p->type, batches, results[1], others, from, p->cols);
        NAME(finish)(p, first + t, rows, group * ROWS, results[0], results[1]);
    }
    return n;
}

static void NAME(product)(const struct product *p, int ith, int nth);

/* A product with tiles. Others in this process use them, too, and some set them up only once in a thread: they
   are left as they were. */
static void NAME(product_with_tiles)(const struct product *p, int ith, int nth) {
    struct tile_sizes before;
    int tiles = kept_rows(p) >= FEWEST && !of_floats(p->type);
    if (tiles) {
        _tile_storeconfig(&before);
        _tile_loadconfig(by_halves((int)p->type) ? &blocks_of_16 : &blocks_of_32);
    }
    NAME(product)(p, ith, nth);
    if (tiles) {
        WRITTEN(&before);
        _tile_loadconfig(&before);
    }
}
