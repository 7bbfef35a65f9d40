/* How weights are kept: from GGUF's blocks to groups of rows that lie side by side (products.h), and back. */

#ifndef HETRUN_PACKING_H
#define HETRUN_PACKING_H

#include "common.h"
#include "products.h"

enum { MOST_BLOCK = 210 }; /* bytes of a stored block */

/* How GGUF stores a type, and how blocks become steps of a packed group. Of each block halves (scales) come
   first in a step, [half][block][row], in whole lines of 64 bytes; then its words, [block][word][row]. */
struct form {
    int type;
    int block, bytes;    /* columns of a stored block, and what it takes */
    int blocks;          /* that make one step */
    int halves, half_at; /* how many, and where they are stored */
    int words, word_at;
    uint32_t flip; /* of each word: signed weights become unsigned */
};

/* Types that there is code for, to be named one by one: those that few rows are multiplied by as they lie
   there, and those whose blocks are unpacked first unless there is a single row (ready_body.h). */
#define TYPES_AS_THEY_LIE(EACH) EACH(Q4_0) EACH(Q4_1) EACH(Q8_0) EACH(Q4_K) EACH(Q6_K)
#define TYPES_UNPACKED(EACH)                                                                                  \
    EACH(Q5_0) EACH(Q5_1) EACH(Q2_K) EACH(Q3_K) EACH(Q5_K) EACH(IQ4_NL) EACH(IQ4_XS) EACH(MXFP4) EACH(Q2_0)
#define ALL_TYPES(EACH) TYPES_AS_THEY_LIE(EACH) TYPES_UNPACKED(EACH)
/* And those that activations are not rounded for (floats_body.h). Their blocks are only what we call so. */
#define TYPES_OF_FLOATS(EACH) EACH(F16) EACH(BF16)

INLINE struct form form_of(int64_t type) {
    switch (type) {
        case TYPE_Q4_0: return (struct form){TYPE_Q4_0, 32, 18, 2, 1, 0, 4, 2, 0};
        case TYPE_Q4_1: return (struct form){TYPE_Q4_1, 32, 20, 2, 2, 0, 4, 4, 0};
        case TYPE_Q8_0: return (struct form){TYPE_Q8_0, 32, 34, 2, 1, 0, 8, 2, 0x80808080};
        case TYPE_Q4_K: return (struct form){TYPE_Q4_K, 256, 144, 1, 2, 0, 35, 4, 0};
        case TYPE_Q6_K: return (struct form){TYPE_Q6_K, 256, 210, 1, 1, 208, 52, 0, 0};
        case TYPE_Q5_0: return (struct form){TYPE_Q5_0, 32, 22, 2, 1, 0, 5, 2, 0};
        case TYPE_Q5_1: return (struct form){TYPE_Q5_1, 32, 24, 2, 2, 0, 5, 4, 0};
        case TYPE_Q2_K: return (struct form){TYPE_Q2_K, 256, 84, 1, 2, 80, 20, 0, 0};
        case TYPE_Q3_K: return (struct form){TYPE_Q3_K, 256, 110, 1, 1, 108, 27, 0, 0};
        case TYPE_Q5_K: return (struct form){TYPE_Q5_K, 256, 176, 1, 2, 0, 43, 4, 0};
        case TYPE_IQ4_NL: return (struct form){TYPE_IQ4_NL, 32, 18, 2, 1, 0, 4, 2, 0};
        case TYPE_IQ4_XS: return (struct form){TYPE_IQ4_XS, 256, 136, 1, 2, 0, 33, 4, 0};
        case TYPE_MXFP4: return (struct form){TYPE_MXFP4, 32, 17, 2, 1, 0, 4, 1, 0}; /* its half is a byte */
        case TYPE_Q2_0: return (struct form){TYPE_Q2_0, 64, 18, 2, 1, 0, 4, 2, 0};
        case TYPE_F16: return (struct form){TYPE_F16, 32, 64, 1, 0, 0, 16, 0, 0};
        case TYPE_BF16: return (struct form){TYPE_BF16, 32, 64, 1, 0, 0, 16, 0, 0};
        default: return (struct form){0};
    }
}

/* What nibbles of some types stand for, made unsigned. */
static const uint8_t iq4_places[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t fp4_places[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Blocks of 32 columns in a step, and whether something is added to each weight. */
INLINE int blocks_of(int64_t type) {
    const struct form f = form_of(type);
    return f.block * f.blocks / 32;
}

INLINE int has_low(int type) {
    return type == TYPE_Q4_1 || type == TYPE_Q5_1 || type == TYPE_Q4_K || type == TYPE_Q5_K;
}

/* Whether 16 columns have a scale of their own, and with Q2_K something that is added to each weight. */
INLINE int by_halves(int type) { return type == TYPE_Q2_K || type == TYPE_Q3_K || type == TYPE_Q6_K; }

INLINE int has_lows(int type) { return type == TYPE_Q2_K; }

INLINE int of_floats(int64_t type) { return type == TYPE_F16 || type == TYPE_BF16; }

/* Whether few rows of activations are multiplied by its words as they lie there. */
INLINE int as_it_lies(int64_t type) {
#define IS_IT(name) || type == TYPE_##name
    return 0 TYPES_AS_THEY_LIE(IS_IT);
#undef IS_IT
}

/* A type whose blocks look the same once they are unpacked, but for what weights are too large by. */
INLINE int unpacked_like(int64_t type) {
    switch (type) {
        case TYPE_Q4_1: return TYPE_Q4_K;
        case TYPE_Q5_1: return TYPE_Q5_K;
        case TYPE_MXFP4:
        case TYPE_Q2_0: return TYPE_Q5_0;
        case TYPE_IQ4_NL:
        case TYPE_IQ4_XS: return TYPE_Q8_0;
        default: return (int)type;
    }
}

/* What unsigned weights are too large by. */
INLINE int32_t offset_of(int64_t type) {
    switch (type) {
        case TYPE_Q2_0: return 1;
        case TYPE_Q3_K: return 4;
        case TYPE_Q4_0: return 8;
        case TYPE_MXFP4: return 12;
        case TYPE_Q5_0: return 16;
        case TYPE_Q6_K: return 32;
        case TYPE_Q8_0:
        case TYPE_IQ4_NL:
        case TYPE_IQ4_XS: return 128;
        default: return 0;
    }
}

/* Where words of a step begin. */
INLINE int64_t head(struct form f) { return (f.halves * f.blocks * 32 + 63) / 64 * 64; }

INLINE int64_t step_bytes(struct form f) { return head(f) + f.blocks * f.words * 64; }

INLINE int64_t group_bytes(int64_t type, int64_t cols) {
    const struct form f = form_of(type);
    return cols / (f.block * f.blocks) * step_bytes(f);
}

/* Bytes of a row of a file. */
INLINE int64_t stored_row_bytes(int64_t type, int64_t cols) {
    const struct form f = form_of(type);
    return cols / f.block * f.bytes;
}

INLINE int64_t half_at(struct form f, int half, int block, int row) {
    return (half * f.blocks + block) * 32 + row * 2;
}

/* Which line of a block a word of each row lies in: memory likes it best when lines are read one behind the
   other. Of Q6_K's words 0 to 31 are nibbles, 32 to 47 pairs of bits, 48 to 51 scales. The scales go first; then
   for each half of the columns 8 words of nibbles beside those of bits, and the other 8. */
INLINE int line_of(int type, int word) {
    if (type != TYPE_Q6_K) return word;
    if (word >= 48) return word - 48;
    if (word >= 32) return 4 + (word - 32) / 8 * 24 + word % 8 * 2 + 1;
    return 4 + word / 16 * 24 + (word % 16 < 8 ? word % 8 * 2 : word % 16 + 8);
}

INLINE int64_t word_in(struct form f, int word, int block, int row) {
    return head(f) + (block * f.words + line_of(f.type, word)) * 64 + row * 4;
}

INLINE int32_t word_at(const void *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return word;
}

/* The fifth bits of 32 columns: where column 4 k + i has bit 4 k + i in a file, it has bit 8 i + k in a group, so
   that those of four neighbours can be shifted to their bytes together. As macros: words are vectors, too. */
#define EXCHANGE(x, by, mask)                                                                                 \
    do {                                                                                                      \
        __typeof__(x) differ = ((x >> (by)) ^ x) & (mask);                                                    \
        x ^= differ ^ (differ << (by));                                                                       \
    } while (0)
#define EXCHANGE_1(x) EXCHANGE(x, 1, 0x22222222u)
#define EXCHANGE_2(x) EXCHANGE(x, 2, 0x0c0c0c0cu)
#define EXCHANGE_7(x) EXCHANGE(x, 7, 0x00aa00aau)
#define EXCHANGE_14(x) EXCHANGE(x, 14, 0x0000ccccu)
#define TO_BYTES(x) do { EXCHANGE_14(x); EXCHANGE_7(x); EXCHANGE_2(x); EXCHANGE_1(x); } while (0)
#define FROM_BYTES(x) do { EXCHANGE_1(x); EXCHANGE_2(x); EXCHANGE_7(x); EXCHANGE_14(x); } while (0)

/* The pairs of bits of 16 columns: where byte i of a word has columns 4 i to 4 i + 3 in a file, it has columns i,
   4 + i, 8 + i and 12 + i in a group, so that those of four neighbours are moved to their places together. The
   same once more is the way back. */
#define EXCHANGE_6(x) EXCHANGE(x, 6, 0x00cc00ccu)
#define EXCHANGE_12(x) EXCHANGE(x, 12, 0x0000f0f0u)
#define TURN_PAIRS(x) do { EXCHANGE_6(x); EXCHANGE_12(x); } while (0)

/* Whether a word is one of fifth bits. */
INLINE int fifth_bits(int type, int word) { return (type == TYPE_Q5_0 || type == TYPE_Q5_1) && word == 0; }

/* Bytes of a stored half: MXFP4 has only an exponent. */
INLINE size_t half_bytes(int type) { return type == TYPE_MXFP4 ? 1 : 2; }

/* One block of one row, as it is stored, to its place among its group's blocks, or back. What a half lacks is
   zero before. */
static void pack_block(struct form f, const uint8_t *stored, uint8_t *step, int block, int row) {
    for (int i = 0; i < f.halves; i++)
        memcpy(step + half_at(f, i, block, row), stored + f.half_at + 2 * i, half_bytes(f.type));
    for (int i = 0; i < f.words; i++) {
        uint32_t word = (uint32_t)word_at(stored + f.word_at + 4 * i) ^ f.flip;
        if (fifth_bits(f.type, i)) TO_BYTES(word);
        if (f.type == TYPE_Q2_0) TURN_PAIRS(word);
        memcpy(step + word_in(f, i, block, row), &word, 4);
    }
}

static void unpack_block(struct form f, uint8_t *stored, const uint8_t *step, int block, int row) {
    for (int i = 0; i < f.halves; i++)
        memcpy(stored + f.half_at + 2 * i, step + half_at(f, i, block, row), half_bytes(f.type));
    for (int i = 0; i < f.words; i++) {
        uint32_t word = (uint32_t)word_at(step + word_in(f, i, block, row)) ^ f.flip;
        if (fifth_bits(f.type, i)) FROM_BYTES(word);
        if (f.type == TYPE_Q2_0) TURN_PAIRS(word);
        memcpy(stored + f.word_at + 4 * i, &word, 4);
    }
}

/* GGUF's blocks to a packed weight, word by word (packing_body.h is fast). Rows that the last group lacks are
   zero. */
static void pack(int64_t type, int64_t rows, int64_t cols, const uint8_t *stored, uint8_t *packed) {
    static const uint8_t zero[MOST_BLOCK];
    const struct form f = form_of(type);
    int64_t row_bytes = cols / f.block * f.bytes;
    for (int64_t first = 0; first < rows; first += ROWS, stored += ROWS * row_bytes)
        for (int64_t b = 0; b < cols / f.block; b += f.blocks, packed += step_bytes(f)) {
            memset(packed, 0, head(f));
            for (int row = 0; row < ROWS; row++)
                for (int i = 0; i < f.blocks; i++) {
                    const uint8_t *block = stored + row * row_bytes + (b + i) * f.bytes;
                    pack_block(f, first + row < rows ? block : zero, packed, i, row);
                }
        }
}

#endif
