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

INLINE struct form form_of(int64_t type) {
    switch (type) {
        case TYPE_Q4_0: return (struct form){TYPE_Q4_0, 32, 18, 2, 1, 0, 4, 2, 0};
        case TYPE_Q4_1: return (struct form){TYPE_Q4_1, 32, 20, 2, 2, 0, 4, 4, 0};
        case TYPE_Q8_0: return (struct form){TYPE_Q8_0, 32, 34, 2, 1, 0, 8, 2, 0x80808080};
        case TYPE_Q4_K: return (struct form){TYPE_Q4_K, 256, 144, 1, 2, 0, 35, 4, 0};
        case TYPE_Q6_K: return (struct form){TYPE_Q6_K, 256, 210, 1, 1, 208, 52, 0, 0};
        default: return (struct form){0};
    }
}

/* Blocks of 32 columns in a step, and whether something is added to each weight. */
INLINE int blocks_of(int64_t type) {
    const struct form f = form_of(type);
    return f.block * f.blocks / 32;
}

INLINE int has_low(int type) { return type == TYPE_Q4_1 || type == TYPE_Q4_K; }

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

/* One block of one row, as it is stored, to its place among its group's blocks, or back. */
static void pack_block(struct form f, const uint8_t *stored, uint8_t *step, int block, int row) {
    for (int i = 0; i < f.halves; i++) memcpy(step + half_at(f, i, block, row), stored + f.half_at + 2 * i, 2);
    for (int i = 0; i < f.words; i++) {
        uint32_t word = (uint32_t)word_at(stored + f.word_at + 4 * i) ^ f.flip;
        memcpy(step + word_in(f, i, block, row), &word, 4);
    }
}

static void unpack_block(struct form f, uint8_t *stored, const uint8_t *step, int block, int row) {
    for (int i = 0; i < f.halves; i++) memcpy(stored + f.half_at + 2 * i, step + half_at(f, i, block, row), 2);
    for (int i = 0; i < f.words; i++) {
        uint32_t word = (uint32_t)word_at(step + word_in(f, i, block, row)) ^ f.flip;
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
