/* Dot products of bytes in vectors of 4 lanes, in plain C: for CPUs that nothing was written for. */

#define LANES 4
#define BATCH 8 /* rows of activations at once: their sums stay in registers */
#define FLOATS 8 /* the same for weights that are floats (floats_body.h), */
#define FLOAT_SUMS 8 /* and the vectors that their sums take */
#define SMALL 1 /* code: one for any number of rows of activations */
#define UNROLLED
#define READ_LATER(when) /* for compilers that read too early (dots_neon.h, dots_avx2.h) */
#define READ_WORD_LATER()

/* Of weights that are unpacked first (ready_body.h): */
#define MANY 0 /* rows of activations from which on others are, too, ... */
#define WORTH_UNPACKING(type) 0 /* ... if they are of such a type; */
#define MORE_TYPES_READY(EACH)  /* these types, */
#define MORE_KINDS_READY(EACH)  /* and those of them that look different once they are unpacked */
#define SUMS_STAY 0 /* in registers, from block to block */
#define ROOM(type) 4 /* words whose products are added up at once */
#define NEEDS_HALVES(type) 0 /* because sums of a whole block have no room */
#define AT_A_TIME 1 /* vectors of rows of a weight that share an activation */
#define TOGETHER(type, n) 1 /* the same where they are multiplied as they lie there */
#define ADDED_AT_ONCE(type) 1 /* words of those */
#define TWO_AS_ONE 0 /* whether two rows of activations are multiplied as one is: of all types as they lie there */
/* How far ahead memory is asked for K types, in bytes: it was measured, and differs from that of others. */
#define AHEAD(type, n) ((type) == TYPE_Q3_K ? 1792 : 1280)

typedef float NAME(vf) __attribute__((vector_size(16)));
typedef int32_t NAME(vi) __attribute__((vector_size(16)));
typedef uint32_t NAME(vu) __attribute__((vector_size(16)));

INLINE NAME(vf) NAME(from_half)(const uint8_t *x) {
    uint16_t h[4];
    memcpy(h, x, sizeof(h));
    return (NAME(vf)){half_to_float(h[0]), half_to_float(h[1]), half_to_float(h[2]), half_to_float(h[3])};
}

/* LANES numbers of 16 bits. */
INLINE NAME(vu) NAME(shorts)(const uint8_t *x) {
    uint16_t h[4];
    memcpy(h, x, sizeof(h));
    return (NAME(vu)){h[0], h[1], h[2], h[3]};
}

/* a * b + c, rounded once. */
INLINE NAME(vf) NAME(fused)(NAME(vf) a, NAME(vf) b, NAME(vf) c) {
    return (NAME(vf)){fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]),
                      fmaf(a[3], b[3], c[3])};
}

/* A sum of products of weights of a type: its beginning, four more columns, and what it is in the end. */
INLINE NAME(vi) NAME(begin)(const int type, int32_t start) {
    (void)type;
    return (NAME(vi)){start, start, start, start};
}

INLINE NAME(vi) NAME(add)(const int type, NAME(vi) sum, NAME(vu) weights, const int8_t *x, const int k) {
    (void)type;
    for (int i = 0; i < 4; i++) sum += (NAME(vi))((weights >> (8 * i)) & 255) * x[4 * k + i];
    return sum;
}

#include "dots_words.h"

/* Each byte's place in a list of sixteen. */
INLINE NAME(vu) NAME(looked_up)(NAME(vu) places, const uint8_t *list) {
    uint8_t bytes[16];
    memcpy(bytes, &places, sizeof(bytes));
    for (int i = 0; i < 16; i++) bytes[i] = list[bytes[i] & 15];
    memcpy(&places, bytes, sizeof(bytes));
    return places;
}

/* The greater of each two, the greatest of all lanes, and their sum. */
INLINE NAME(vi) NAME(greater)(NAME(vi) a, NAME(vi) b) {
    NAME(vi) more = a > b;
    return (more & a) | (~more & b);
}

INLINE int32_t NAME(greatest)(NAME(vi) x) {
    int32_t a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

INLINE int32_t NAME(total)(NAME(vi) x) { return x[0] + x[1] + x[2] + x[3]; }

/* The lowest byte of each lane. */
INLINE void NAME(put_bytes)(int8_t *out, NAME(vi) x) {
    for (int i = 0; i < 4; i++) out[i] = (int8_t)(uint8_t)x[i];
}

/* Four words of a row, and four rows of them with words and rows exchanged. */
INLINE NAME(vu) NAME(four_words)(const uint8_t *x, int64_t step) {
    NAME(vu) v;
    memcpy(&v, x, sizeof(v));
    (void)step;
    return v;
}

INLINE void NAME(transpose)(NAME(vu) x[4]) {
    NAME(vu) a = x[0], b = x[1], c = x[2], d = x[3];
    for (int i = 0; i < 4; i++) x[i] = (NAME(vu)){a[i], b[i], c[i], d[i]};
}
