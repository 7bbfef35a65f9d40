/* Dot products of bytes in vectors of 4 lanes (arm64 with its instructions for them). */

#define LANES 4
#define BATCH 8 /* rows of activations at once: their sums stay in registers */
#define FLOATS 8 /* the same for weights that are floats (floats_body.h), */
#define FLOAT_SUMS 16 /* and the vectors that their sums take */
#define SMALL 0
#define UNROLLED UNROLL

#define MANY 0
#define WORTH_UNPACKING(type) 0
#define MORE_TYPES_READY(EACH)
#define MORE_KINDS_READY(EACH)
#define SUMS_STAY 0
#define ROOM(type) 4
#define NEEDS_HALVES(type) 0
#define AT_A_TIME 1
#define TOGETHER(type, n) 1
#define ADDED_AT_ONCE(type) 1
#define TWO_AS_ONE 0
#define AHEAD(type, n) ((type) == TYPE_Q3_K ? 1792 : 1280)

/* For all that compilers know memory has changed here. Otherwise they read what four parts of a step have in
   common before the first, and what a block needs long before it, and run out of registers. */
#define READ_LATER(when) if (when) __asm__ volatile("" : : : "memory")
#define READ_WORD_LATER()

typedef float NAME(vf) __attribute__((vector_size(16)));
typedef int32_t NAME(vi) __attribute__((vector_size(16)));
typedef uint32_t NAME(vu) __attribute__((vector_size(16)));

INLINE NAME(vf) NAME(from_half)(const uint8_t *x) {
    uint16x4_t halves;
    memcpy(&halves, x, sizeof(halves));
    return (NAME(vf))vcvt_f32_f16(vreinterpret_f16_u16(halves));
}

/* LANES numbers of 16 bits. */
INLINE NAME(vu) NAME(shorts)(const uint8_t *x) {
    uint16x4_t shorts;
    memcpy(&shorts, x, sizeof(shorts));
    return (NAME(vu))vmovl_u16(shorts);
}

/* a * b + c, rounded once. */
INLINE NAME(vf) NAME(fused)(NAME(vf) a, NAME(vf) b, NAME(vf) c) {
    return (NAME(vf))vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

/* A sum of products of weights of a type: its beginning, four more columns, and what it is in the end. Bytes
   have signs here: those of 8 bits get theirs back, and have no offset, and others do not need one. */
INLINE NAME(vi) NAME(begin)(const int type, int32_t start) {
    return (NAME(vi))vdupq_n_s32(offset_of(type) == 128 ? 0 : start);
}

INLINE NAME(vi) NAME(add)(const int type, NAME(vi) sum, NAME(vu) weights, const int8_t *x, const int k) {
    const int8x16_t columns = vld1q_s8(x + k / 4 * 16);
    int8x16_t w = (int8x16_t)(offset_of(type) == 128 ? weights ^ 0x80808080 : weights);
    switch (k % 4) {
        case 0: return (NAME(vi))vdotq_laneq_s32((int32x4_t)sum, w, columns, 0);
        case 1: return (NAME(vi))vdotq_laneq_s32((int32x4_t)sum, w, columns, 1);
        case 2: return (NAME(vi))vdotq_laneq_s32((int32x4_t)sum, w, columns, 2);
        default: return (NAME(vi))vdotq_laneq_s32((int32x4_t)sum, w, columns, 3);
    }
}

#include "dots_words.h"

/* Each byte's place in a list of sixteen. */
INLINE NAME(vu) NAME(looked_up)(NAME(vu) places, const uint8_t *list) {
    return (NAME(vu))vqtbl1q_u8(vld1q_u8(list), (uint8x16_t)places);
}

/* The greater of each two, the greatest of all lanes, and their sum. */
INLINE NAME(vi) NAME(greater)(NAME(vi) a, NAME(vi) b) { return (NAME(vi))vmaxq_s32((int32x4_t)a, (int32x4_t)b); }

INLINE int32_t NAME(greatest)(NAME(vi) x) { return vmaxvq_s32((int32x4_t)x); }

INLINE int32_t NAME(total)(NAME(vi) x) { return vaddvq_s32((int32x4_t)x); }

/* The lowest byte of each lane. */
INLINE void NAME(put_bytes)(int8_t *out, NAME(vi) x) {
    int16x4_t low = vmovn_s32((int32x4_t)x);
    int8x8_t bytes = vmovn_s16(vcombine_s16(low, low));
    memcpy(out, &bytes, 4);
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
