/* Dot products of bytes in vectors of 16 lanes (AVX-512 with VNNI). */

#define LANES 16
#define BATCH 8 /* rows of activations at once: their sums stay in registers */
#define FLOATS 8 /* the same for weights that are floats (floats_body.h), */
#define FLOAT_SUMS 16 /* and the vectors that their sums take */
#define SMALL 0
#define UNROLLED UNROLL
#define READ_LATER(when)
#define READ_WORD_LATER()

#define MANY 16
#define WORTH_UNPACKING(type) ((type) == TYPE_Q6_K) /* others gain nothing */
#define MORE_TYPES_READY(EACH) EACH(Q6_K)
#define MORE_KINDS_READY(EACH) EACH(Q6_K)
#define SUMS_STAY 1
#define ROOM(type) 4
#define NEEDS_HALVES(type) 0
#define AT_A_TIME 1
#define TOGETHER(type, n) ((n) <= 2 ? 2 : 1)
#define ADDED_AT_ONCE(type) 1
#define TWO_AS_ONE 1
#define AHEAD(type, n) ((n) > 1 || (type) == TYPE_Q6_K ? 4096 : (type) == TYPE_Q3_K ? 1792 : 1280)

typedef float NAME(vf) __attribute__((vector_size(64)));
typedef int32_t NAME(vi) __attribute__((vector_size(64)));
typedef uint32_t NAME(vu) __attribute__((vector_size(64)));

INLINE NAME(vf) NAME(from_half)(const uint8_t *x) {
    return (NAME(vf))_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}

/* LANES numbers of 16 bits. */
INLINE NAME(vu) NAME(shorts)(const uint8_t *x) {
    return (NAME(vu))_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
}

/* a * b + c, rounded once. */
INLINE NAME(vf) NAME(fused)(NAME(vf) a, NAME(vf) b, NAME(vf) c) {
    return (NAME(vf))_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

/* A sum of products of weights of a type: its beginning, four more columns, and what it is in the end. */
INLINE NAME(vi) NAME(begin)(const int type, int32_t start) {
    (void)type;
    return (NAME(vi))_mm512_set1_epi32(start);
}

INLINE NAME(vi) NAME(add)(const int type, NAME(vi) sum, NAME(vu) weights, const int8_t *x, const int k) {
    (void)type;
    __m512i columns = _mm512_set1_epi32(word_at(x + 4 * k));
    return (NAME(vi))_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, columns);
}

#include "dots_words.h"

/* Each byte's place in a list of sixteen. */
INLINE NAME(vu) NAME(looked_up)(NAME(vu) places, const uint8_t *list) {
    __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)list));
    return (NAME(vu))_mm512_shuffle_epi8(all, (__m512i)places);
}

/* The greater of each two, the greatest of all lanes, and their sum. */
INLINE NAME(vi) NAME(greater)(NAME(vi) a, NAME(vi) b) {
    return (NAME(vi))_mm512_max_epi32((__m512i)a, (__m512i)b);
}

INLINE int32_t NAME(greatest)(NAME(vi) x) { return _mm512_reduce_max_epi32((__m512i)x); }

INLINE int32_t NAME(total)(NAME(vi) x) { return _mm512_reduce_add_epi32((__m512i)x); }

/* The lowest byte of each lane. */
INLINE void NAME(put_bytes)(int8_t *out, NAME(vi) x) {
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)x));
}

/* Four words of every fourth row, and four such vectors with words and rows exchanged: then each has one word of
   all of its rows. */
INLINE NAME(vu) NAME(four_words)(const uint8_t *x, int64_t step) {
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)x));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(x + step)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(x + 2 * step)), 2);
    return (NAME(vu))_mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(x + 3 * step)), 3);
}

INLINE void NAME(transpose)(NAME(vu) x[4]) {
    __m512i a = _mm512_unpacklo_epi32((__m512i)x[0], (__m512i)x[1]);
    __m512i b = _mm512_unpackhi_epi32((__m512i)x[0], (__m512i)x[1]);
    __m512i c = _mm512_unpacklo_epi32((__m512i)x[2], (__m512i)x[3]);
    __m512i d = _mm512_unpackhi_epi32((__m512i)x[2], (__m512i)x[3]);
    x[0] = (NAME(vu))_mm512_unpacklo_epi64(a, c);
    x[1] = (NAME(vu))_mm512_unpackhi_epi64(a, c);
    x[2] = (NAME(vu))_mm512_unpacklo_epi64(b, d);
    x[3] = (NAME(vu))_mm512_unpackhi_epi64(b, d);
}
