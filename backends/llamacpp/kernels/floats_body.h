/* Products by weights of 16-bit floats: they are widened in registers, and multiplied by activations that stay
   as they are. Included by products_body.h.

   A line of a group holds two columns of each of its rows, row by row. So do vectors, and activations are
   broadcast by twos: a row's sum is made in two lanes, one of its even columns and one of its odd ones, each
   in the order of the columns. They are added up in the end. Activations of up to FLOATS rows lie side by
   side, two columns of each. */

enum {
    NAME(vectors) = 2 * ROWS / LANES, /* of a line */
    NAME(lines) = 64                  /* that all rows are multiplied by before the next: 4 KiB */
};

/* LANES numbers. */
INLINE vf NAME(widened)(const int type, const uint8_t *x) {
    return type == TYPE_F16 ? NAME(from_half)(x) : (vf)(NAME(shorts)(x) << 16);
}

/* Two activations, once for each row of a vector. */
INLINE vf NAME(twos)(const float *x) {
    typedef int64_t wide __attribute__((vector_size(4 * LANES)));
    int64_t both;
    memcpy(&both, x, sizeof(both));
    return (vf)(both + (wide){0});
}

/* Asks memory for what lies some lines ahead. */
INLINE void NAME(ask_for_floats)(const uint8_t *x) { __builtin_prefetch(x + FLOATS_AHEAD, 0, 2); }

/* Some lines times n rows of activations: `count` vectors of each line from one on. The activations that come
   next lie `ahead` behind these: the first cache is asked for them. */
INLINE void NAME(add_vectors)(const int type, const int n, const int from, const int count, vf *sums,
                              const uint8_t *weights, const float *x, int64_t lines, int64_t ahead) {
    vf own[NAME(vectors)][FLOATS];
    UNROLLED for (int t = 0; t < n; t++)
        UNROLLED for (int i = 0; i < count; i++) own[i][t] = sums[t * NAME(vectors) + from + i];
    for (; lines > 0; lines--, weights += 64, x += 2 * n) {
        vf w[NAME(vectors)];
        if (from == 0) {
            NAME(ask_for_floats)(weights);
            __builtin_prefetch(x + ahead, 0, 3);
        }
        UNROLLED for (int i = 0; i < count; i++) w[i] = NAME(widened)(type, weights + (from + i) * LANES * 2);
        UNROLLED for (int t = 0; t < n; t++) {
            vf both = NAME(twos)(x + 2 * t);
            UNROLLED for (int i = 0; i < count; i++) own[i][t] = NAME(fused)(w[i], both, own[i][t]);
        }
    }
    UNROLLED for (int t = 0; t < n; t++)
        UNROLLED for (int i = 0; i < count; i++) sums[t * NAME(vectors) + from + i] = own[i][t];
}

/* Vectors of a line that n rows of activations are multiplied by at once: as many sums as stay in registers,
   so that there are enough of them for none to be waited for. */
INLINE int NAME(at_a_time)(const int n) {
    int count = 2;
    while (count < NAME(vectors) && 2 * count * n <= FLOAT_SUMS) count *= 2;
    return count;
}

INLINE void NAME(add_lines)(const int type, const int n, vf *sums, const uint8_t *weights, const float *x,
                            int64_t lines, int64_t ahead) {
    const int count = NAME(at_a_time)(n);
    UNROLLED for (int from = 0; from < NAME(vectors); from += count)
        NAME(add_vectors)(type, n, from, count, sums, weights, x, lines, ahead);
}

INLINE void NAME(add_lines_some)(const int type, int64_t n, vf *sums, const uint8_t *weights, const float *x,
                                 int64_t lines, int64_t ahead) {
#if SMALL
    NAME(add_lines)(type, (int)n, sums, weights, x, lines, ahead);
#else
    switch (n) {
        case 1: NAME(add_lines)(type, 1, sums, weights, x, lines, ahead); break;
        case 2: NAME(add_lines)(type, 2, sums, weights, x, lines, ahead); break;
        case 3: NAME(add_lines)(type, 3, sums, weights, x, lines, ahead); break;
        case 4: NAME(add_lines)(type, 4, sums, weights, x, lines, ahead); break;
#if FLOATS == 8
        case 5: NAME(add_lines)(type, 5, sums, weights, x, lines, ahead); break;
        case 6: NAME(add_lines)(type, 6, sums, weights, x, lines, ahead); break;
        case 7: NAME(add_lines)(type, 7, sums, weights, x, lines, ahead); break;
        case 8: NAME(add_lines)(type, 8, sums, weights, x, lines, ahead); break;
#endif
    }
#endif
}

/* A group of rows times n rows of activations: sums[n][vectors]. */
INLINE void NAME(several)(const int type, int64_t n, vf *sums, const uint8_t *weights, const float *x,
                          int64_t cols) {
    memset(sums, 0, (size_t)n * 2 * ROWS * sizeof(float));
    for (int64_t c = 0; c < cols; c += 2 * NAME(lines), weights += 64 * NAME(lines)) {
        int64_t lines = at_most(NAME(lines), (cols - c) / 2);
        for (int64_t t = 0; t < n; t += FLOATS) {
            int64_t some = at_most(FLOATS, n - t);
            const float *mine = x + t * cols + c * some, *next = mine + some * cols;
            if (t + some == n) next = x + (c + 2 * lines) * at_most(FLOATS, n);
            NAME(add_lines_some)(type, some, sums + t * NAME(vectors), weights, mine, lines, next - mine);
        }
    }
}

/* A line times one row of activations. */
INLINE void NAME(add_line)(const int type, vf sums[NAME(vectors)], const uint8_t *weights, vf both) {
    NAME(ask_for_floats)(weights);
    UNROLLED for (int i = 0; i < NAME(vectors); i++)
        sums[i] = NAME(fused)(NAME(widened)(type, weights + i * LANES * 2), both, sums[i]);
}

/* One row of activations times one or two groups of rows, which are read side by side. */
INLINE void NAME(single)(const int type, const int groups, vf *sums, vf *more, const uint8_t *weights,
                         const uint8_t *others, const float *x, int64_t cols) {
    vf own[2][NAME(vectors)] = {0};
    for (int64_t c = 0; c < cols; c += 2, weights += 64, others += 64) {
        vf both = NAME(twos)(x + c);
        NAME(add_line)(type, own[0], weights, both);
        if (groups == 2) NAME(add_line)(type, own[1], others, both);
    }
    memcpy(sums, own[0], sizeof(own[0]));
    if (groups == 2) memcpy(more, own[1], sizeof(own[1]));
}

/* One group of rows, or two, times n rows of activations. */
INLINE void NAME(by_floats)(const int type, int64_t n, vf *sums, vf *more, const uint8_t *weights,
                            const uint8_t *others, const float *x, int64_t cols) {
    if (n > 1) {
        NAME(several)(type, n, sums, weights, x, cols);
        if (others) NAME(several)(type, n, more, others, x, cols);
    } else if (others) {
        NAME(single)(type, 2, sums, more, weights, others, x, cols);
    } else {
        NAME(single)(type, 1, sums, more, weights, weights, x, cols);
    }
}

#define BY_FLOATS(name)                                                                                       \
    static void NAME(by_##name)(int64_t n, vf *sums, vf *more, const uint8_t *weights, const uint8_t *others, \
                                const float *x, int64_t cols) {                                               \
        NAME(by_floats)(TYPE_##name, n, sums, more, weights, others, x, cols);                                \
    }
TYPES_OF_FLOATS(BY_FLOATS)
#undef BY_FLOATS

/* Even and odd columns of n rows of activations: out[n][ROWS]. */
static void NAME(add_up)(int64_t n, float *out, const vf *sums) {
    const float *x = (const float *)sums;
    for (int64_t i = 0; i < n * ROWS; i++) out[i] = x[2 * i] + x[2 * i + 1];
}

/* A group of columns of `out`, or two, as in `group`. */
static void NAME(group_of_floats)(const struct product *p, struct NAME(rows) rows, int64_t group, int64_t also,
                                  int64_t first, int64_t end, const float *x) {
    vf sums[2][RUN * NAME(vectors)];
    float results[2][RUN * ROWS];
    for (int64_t t = first; t < end; t += RUN, x += RUN * p->cols) {
        int64_t n = at_most(RUN, end - t);
        if (p->type == TYPE_F16)
            NAME(by_F16)(n, sums[0], sums[1], rows.first, rows.second, x, p->cols);
        else
            NAME(by_BF16)(n, sums[0], sums[1], rows.first, rows.second, x, p->cols);
        NAME(add_up)(n, results[0], sums[0]);
        if (rows.second) NAME(add_up)(n, results[1], sums[1]);
        NAME(finish)(p, t, n, group * ROWS, results[0], results[1]);
        if (also != group) NAME(finish)(p, t, n, also * ROWS, results[1], NULL);
    }
}

/* A row of activations, normed if there is a norm. Its columns lie by twos, which are `step` floats apart. */
static void NAME(keep_row)(const struct product *p, int64_t row, float *out, int64_t step) {
    const float *x = row_of_x(p, row);
    float factor = p->gain ? NAME(inverse_rms)(x, p->cols, p->eps) : 1;
    for (int64_t c = 0; c < p->cols; c += LANES) {
        vf v = NAME(load)(x + c);
        if (p->gain) v = v * factor * NAME(load)(p->gain + c);
        UNROLLED for (int i = 0; i < LANES; i += 2, out += step) memcpy(out, (const float *)&v + i, 8);
    }
}

/* Rows of activations from `first` to `end`, FLOATS together. */
static void NAME(keep_tile)(const struct product *p, int64_t first, int64_t end, float *out) {
    for (int64_t t = first; t < end; t += FLOATS, out += FLOATS * p->cols) {
        int64_t n = at_most(FLOATS, end - t);
        for (int64_t i = 0; i < n; i++) NAME(keep_row)(p, t + i, out + 2 * i, 2 * n);
    }
}
