/* Packing in vectors of LANES rows of a weight: four words of four rows change places in registers. Included by
   products_body.h, once for each set of instructions. The bits are those of `pack`. */

/* The lower half of each lane. */
INLINE void NAME(put_halves)(uint8_t *out, vu x) {
    NAME(vh) halves = __builtin_convertvector(x & 0xffff, NAME(vh));
    memcpy(out, &halves, sizeof(halves));
}

/* Words i to i + 3 of a block of all rows, and nothing else is read. Word -1 holds both halves. */
INLINE void NAME(pack_words)(const int type, const int i, const int block, const uint8_t *stored,
                             int64_t row_bytes, uint8_t *step) {
    const struct form f = form_of(type);
    UNROLLED for (int first = 0; first < ROWS; first += LANES) {
        vu x[4];
        for (int k = 0; k < 4; k++)
            x[k] = NAME(four_words)(stored + (first + k) * row_bytes + f.word_at + 4 * i, 4 * row_bytes);
        NAME(transpose)(x);
        if (i < 0) {
            NAME(put_halves)(step + half_at(f, 0, block, first), x[0]);
            NAME(put_halves)(step + half_at(f, 1, block, first), x[0] >> 16);
        }
        for (int k = i < 0 ? 1 : 0; k < 4; k++) {
            vu words = x[k] ^ f.flip;
            if (fifth_bits(type, i + k)) TO_BYTES(words);
            if (type == TYPE_Q2_0) TURN_PAIRS(words);
            memcpy(step + word_in(f, i + k, block, first), &words, sizeof(words));
        }
    }
}

/* One block of all rows. */
INLINE void NAME(pack_rows)(const int type, const int block, const uint8_t *stored, int64_t row_bytes,
                            uint8_t *step) {
    const struct form f = form_of(type);
    const int with_halves = type == TYPE_Q4_K || type == TYPE_Q5_K; /* only so their words can be read by fours */
    for (int half = 0; half < f.halves && !with_halves; half++)
        UNROLLED for (int row = 0; row < ROWS; row++)
            memcpy(step + half_at(f, half, block, row), stored + row * row_bytes + f.half_at + 2 * half,
                   half_bytes(type));
    /* The last four may be some once more. */
    UNROLLED for (int i = with_halves ? -1 : 0; i < f.words; i += 4)
        NAME(pack_words)(type, i + 4 > f.words ? f.words - 4 : i, block, stored, row_bytes, step);
}

/* One group of rows. Memory is asked for the group behind it, a little with each step: the rows of one group are
   read side by side, which caches do not foresee. */
INLINE void NAME(pack_group)(const int type, int64_t cols, const uint8_t *stored, uint8_t *packed) {
    const struct form f = form_of(type);
    const int bytes = f.blocks * f.bytes; /* of a row, for one step */
    int64_t row_bytes = stored_row_bytes(type, cols);
    const uint8_t *next = stored + ROWS * row_bytes;
    for (int64_t c = 0; c < cols; c += f.block * f.blocks) {
        UNROLLED for (int i = 0; i < ROWS * bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
        if (head(f) > f.halves * f.blocks * 2 * ROWS || half_bytes(type) < 2) memset(packed, 0, head(f));
        UNROLLED for (int block = 0; block < f.blocks; block++)
            NAME(pack_rows)(type, block, stored + block * f.bytes, row_bytes, packed);
        stored += bytes, packed += step_bytes(f), next += ROWS * bytes;
    }
}

/* As `pack`, which is left with the last rows if they are no whole group. */
static void NAME(pack)(int64_t type, int64_t rows, int64_t cols, const uint8_t *stored, uint8_t *packed) {
    int64_t from = ROWS * stored_row_bytes(type, cols), to = group_bytes(type, cols);
#define PACK(name)                                                                                            \
    case TYPE_##name: NAME(pack_group)(TYPE_##name, cols, stored, packed); break;
    for (; rows >= ROWS; rows -= ROWS, stored += from, packed += to)
        switch (type) { ALL_TYPES(PACK) TYPES_OF_FLOATS(PACK) }
#undef PACK
    pack(type, rows, cols, stored, packed);
}
