/* How weights and scales of each type are read from a step of a group, LANES rows at once (where they lie:
   packing.h). Included by products_body.h. */

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

/* Some bits of each byte, from `from` on, moved to where the mask is. */
INLINE vu NAME(bits)(vu x, const int from, const int to, const uint32_t mask) {
    return (from < to ? x << (to - from) : x >> (from - to)) & (mask * 0x01010101u);
}

/* Four columns of LANES rows as bytes: word k of block b of a step. */
INLINE vu NAME(word)(const int type, const uint8_t *words, const int b, const int k) {
    const int half = b / 4 * 8; /* of K types' columns: eight words with two bits of each column */
    switch (type) {
        case TYPE_Q4_0:
        case TYPE_Q4_1: return NAME(nibbles)(NAME(line)(words, 4 * b + k % 4), k / 4);
        case TYPE_Q5_0:
        case TYPE_Q5_1: {
            vu low = NAME(nibbles)(NAME(line)(words, 5 * b + 1 + k % 4), k / 4);
            return low | NAME(bits)(NAME(line)(words, 5 * b), k, 4, 0x10);
        }
        case TYPE_Q8_0: return NAME(line)(words, 8 * b + k);
        case TYPE_Q2_0: return NAME(bits)(NAME(line)(words, 2 * b + k / 4), k % 4 * 2, 0, 3);
        case TYPE_Q2_K: return NAME(bits)(NAME(line)(words, 4 + half + k), b % 4 * 2, 0, 3);
        case TYPE_Q3_K: {
            vu low = NAME(bits)(NAME(line)(words, 8 + half + k), b % 4 * 2, 0, 3);
            return low | NAME(bits)(NAME(line)(words, k), b, 2, 4);
        }
        case TYPE_Q4_K: return NAME(nibbles)(NAME(line)(words, 3 + b / 2 * 8 + k), b % 2);
        case TYPE_Q5_K: {
            vu low = NAME(nibbles)(NAME(line)(words, 11 + b / 2 * 8 + k), b % 2);
            return low | NAME(bits)(NAME(line)(words, 3 + k), b, 4, 0x10);
        }
        case TYPE_IQ4_NL:
            return NAME(looked_up)(NAME(nibbles)(NAME(line)(words, 4 * b + k % 4), k / 4), iq4_places);
        case TYPE_IQ4_XS:
            return NAME(looked_up)(NAME(nibbles)(NAME(line)(words, 1 + 4 * b + k % 4), k / 4), iq4_places);
        case TYPE_MXFP4:
            return NAME(looked_up)(NAME(nibbles)(NAME(line)(words, 4 * b + k % 4), k / 4), fp4_places);
        default: { /* Q6_K: 128 columns have 16 words of nibbles, two runs of 32 columns in each */
            const int run = b % 4;
            vu low = NAME(nibbles)(NAME(line)(words, line_of(type, 2 * half + run % 2 * 8 + k)), run / 2);
            return low | NAME(bits)(NAME(line)(words, line_of(type, 32 + half + k)), 2 * run, 4, 0x30);
        }
    }
}

/* Byte i of each lane. */
INLINE vf NAME(byte)(vu x, const int i) { return NAME(floats)((vi)((x >> (8 * i)) & 255)); }

INLINE vf NAME(signed_byte)(vu x, const int i) { return NAME(floats)((vi)(x << (24 - 8 * i)) >> 24); }

/* Half of two to the power of x - 127, as MXFP4 keeps it: the two smallest are denormal. */
INLINE vf NAME(half_of_power)(vu x) {
    return NAME(choose)((vi)(x > 1), (vf)((x - 1) << 23), (vf)((x + 1) << 21));
}

/* What a part of a step multiplies the dot products of its blocks by, and what it adds. */
struct NAME(factors) {
    vf scale, other;          /* of a block; of its second half */
    vf low, other_low;        /* the same of what is added to each weight */
    vf scales, minimum;       /* of K types: of all blocks */
    vu bytes[4], minima[2];   /* six bits each */
};

/* Words 0 and 1 hold scales and minima of the first four blocks and the upper bits of the others, word 2 the
   others' lower bits. */
INLINE void NAME(six_bits_of_4_and_5)(struct NAME(factors) *f, const uint8_t *words) {
    vu first = NAME(line)(words, 0), second = NAME(line)(words, 1), lower = NAME(line)(words, 2);
    f->bytes[0] = first & 0x3f3f3f3f;
    f->bytes[1] = NAME(nibbles)(lower, 0) | NAME(bits)(first, 6, 4, 0x30);
    f->minima[0] = second & 0x3f3f3f3f;
    f->minima[1] = NAME(nibbles)(lower, 1) | NAME(bits)(second, 6, 4, 0x30);
}

/* Words 24 and 25 hold nibbles of all scales, word 26 their upper bits. */
INLINE void NAME(six_bits_of_3)(struct NAME(factors) *f, const uint8_t *words) {
    vu upper = NAME(line)(words, 26);
    UNROLLED for (int i = 0; i < 4; i++)
        f->bytes[i] = NAME(nibbles)(NAME(line)(words, 24 + i % 2), i / 2) | NAME(bits)(upper, 2 * i, 4, 0x30);
}

INLINE struct NAME(factors) NAME(factors_of)(const int type, const uint8_t *step, const uint8_t *words) {
    struct NAME(factors) f = {0};
    if (form_of(type).block == 256) f.scales = NAME(from_half)(step);
    if (type == TYPE_Q2_K || type == TYPE_Q4_K || type == TYPE_Q5_K) f.minimum = -NAME(from_half)(step + 32);
    if (type == TYPE_Q4_K || type == TYPE_Q5_K) NAME(six_bits_of_4_and_5)(&f, words);
    if (type == TYPE_Q3_K) NAME(six_bits_of_3)(&f, words);
    return f;
}

/* The same of block b. */
INLINE void NAME(factors_at)(const int type, struct NAME(factors) *f, const uint8_t *step, const uint8_t *words,
                             const int b) {
    const int first = 2 * b % 4, second = first + 1; /* bytes of a word that halves of a block have */
    switch (type) {
        case TYPE_Q2_K: {
            vu both = NAME(line)(words, b / 2), scales = NAME(nibbles)(both, 0), minima = NAME(nibbles)(both, 1);
            f->scale = f->scales * NAME(byte)(scales, first);
            f->other = f->scales * NAME(byte)(scales, second);
            f->low = f->minimum * NAME(byte)(minima, first);
            f->other_low = f->minimum * NAME(byte)(minima, second);
            return;
        }
        case TYPE_Q3_K:
            f->scale = f->scales * (NAME(byte)(f->bytes[b / 2], first) - 32.0f);
            f->other = f->scales * (NAME(byte)(f->bytes[b / 2], second) - 32.0f);
            return;
        case TYPE_Q4_K:
        case TYPE_Q5_K:
            f->low = f->minimum * NAME(byte)(f->minima[b / 4], b % 4);
            f->scale = f->scales * NAME(byte)(f->bytes[b / 4], b % 4);
            return;
        case TYPE_Q6_K: {
            vu scales = NAME(line)(words, line_of(TYPE_Q6_K, 48 + b / 2));
            f->scale = f->scales * NAME(signed_byte)(scales, first);
            f->other = f->scales * NAME(signed_byte)(scales, second);
            return;
        }
        case TYPE_IQ4_XS: { /* a word of nibbles, and where others have a second half the bits above them */
            vu low = (NAME(line)(words, 0) >> (4 * b)) & 15, high = (NAME(shorts)(step + 32) >> (2 * b)) & 3;
            f->scale = f->scales * (NAME(floats)((vi)(low | high << 4)) - 32.0f);
            return;
        }
        case TYPE_MXFP4: f->scale = NAME(half_of_power)(NAME(shorts)(step + 32 * b)); return;
        case TYPE_Q2_0: f->scale = NAME(from_half)(step + b / 2 * 32); return;
        default: f->scale = NAME(from_half)(step + 32 * b);
    }
    if (has_low(type)) f->low = NAME(from_half)(step + 64 + 32 * b);
}
