/* Dot products of bytes in vectors of 8 lanes (AVX2; where VNNI is 1, with AVX-VNNI's instruction for them). */

#define LANES 8
#define BATCH 4 /* rows of activations at once: their sums stay in registers */
#define FLOATS 4 /* the same for weights that are floats (floats_body.h), */
#define FLOAT_SUMS 8 /* and the vectors that their sums take */
#define SMALL 0
#define UNROLLED UNROLL

#define MANY 8
#define WORTH_UNPACKING(type) ((type) != TYPE_Q8_0) /* whose bytes are ready as they are */
#define MORE_TYPES_READY(EACH) EACH(Q4_0) EACH(Q4_1) EACH(Q4_K) EACH(Q6_K)
#define MORE_KINDS_READY(EACH) EACH(Q4_0) EACH(Q4_K) EACH(Q6_K)
#define SUMS_STAY 0
#define ROOM(type) ((type) == TYPE_Q6_K ? 2 : 4) /* in 16 bits */
#if VNNI
#define NEEDS_HALVES(type) 0
#define ADDED_AT_ONCE(type) 1
#else
#define ADDED_AT_ONCE(type) (NAME(sums_of)(type) == NAME(in_32_bits) ? ROOM(type) : 1)
#define NEEDS_HALVES(type) ((type) == TYPE_Q5_0 || (type) == TYPE_Q5_K)
#endif
#define AT_A_TIME 2
#define TWO_AS_ONE 0
#define FAR(type) ((type) == TYPE_Q4_K || (type) == TYPE_Q5_K || (type) == TYPE_IQ4_XS || (type) == TYPE_Q6_K)
#define AHEAD(type, n) (FAR(type) || (n) > 1 ? 6144 : (type) == TYPE_Q3_K ? 1792 : 1280)
#define TOGETHER(type, n) ((n) == 1 || form_of(type).block == 32 || (type) == TYPE_Q6_K ? 2 : 1)

/* For all that compilers know memory has changed here. Otherwise they read the activations of a whole block
   before its first word, run out of registers, and keep most of them on the stack. */
#define READ_LATER(when) __asm__ volatile("" : : : "memory")
#define READ_WORD_LATER() READ_LATER(1)
/* Nor may they make all products of a block first, and add them up in another order. */
#undef ADD_NOW
#define ADD_NOW(sum) __asm__("" : "+x"(sum))

typedef float NAME(vf) __attribute__((vector_size(32)));
typedef int32_t NAME(vi) __attribute__((vector_size(32)));
typedef uint32_t NAME(vu) __attribute__((vector_size(32)));

INLINE NAME(vf) NAME(from_half)(const uint8_t *x) {
    return (NAME(vf))_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}

/* LANES numbers of 16 bits. */
INLINE NAME(vu) NAME(shorts)(const uint8_t *x) {
    return (NAME(vu))_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
}

/* a * b + c, rounded once. */
INLINE NAME(vf) NAME(fused)(NAME(vf) a, NAME(vf) b, NAME(vf) c) {
    return (NAME(vf))_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

/* A sum of products of weights of a type: its beginning, four more columns, and what it is in the end. */
#if VNNI
INLINE NAME(vi) NAME(begin)(const int type, int32_t start) {
    (void)type;
    return (NAME(vi))_mm256_set1_epi32(start);
}

INLINE NAME(vi) NAME(add)(const int type, NAME(vi) sum, NAME(vu) weights, const int8_t *x, const int k) {
    (void)type;
    __m256i columns = _mm256_set1_epi32(word_at(x + 4 * k));
    return (NAME(vi))_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, columns);
}

INLINE NAME(vi) NAME(end)(const int type, NAME(vi) sum, int32_t start) {
    (void)type;
    (void)start;
    return sum;
}
#else
/* Products of two columns are added up in 16 bits. Those of nibbles fit there for a whole block (16 * 15 * 127),
   others only some (ROOM); weights of 8 bits get their signs back, and give them to x, so that 128 * 127 is the
   largest product. So they have no offset. */
enum NAME(sums) { NAME(in_16_bits), NAME(in_32_bits), NAME(with_signs) };

INLINE enum NAME(sums) NAME(sums_of)(const int type) {
    switch (type) {
        case TYPE_Q8_0:
        case TYPE_IQ4_NL:
        case TYPE_IQ4_XS: return NAME(with_signs);
        case TYPE_Q5_0:
        case TYPE_Q5_1:
        case TYPE_Q5_K:
        case TYPE_Q6_K:
        case TYPE_MXFP4: return NAME(in_32_bits);
        default: return NAME(in_16_bits);
    }
}

INLINE NAME(vi) NAME(begin)(const int type, int32_t start) {
    return (NAME(vi))_mm256_set1_epi32(NAME(sums_of)(type) == NAME(in_32_bits) ? start : 0);
}

INLINE NAME(vi) NAME(add)(const int type, NAME(vi) sum, NAME(vu) weights, const int8_t *x, const int k) {
    __m256i w = (__m256i)weights, columns = _mm256_set1_epi32(word_at(x + 4 * k));
    if (NAME(sums_of)(type) == NAME(with_signs)) {
        __m256i with_sign = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        w = _mm256_abs_epi8(with_sign);
        columns = _mm256_sign_epi8(columns, with_sign);
    }
    __m256i pairs = _mm256_maddubs_epi16(w, columns);
    if (NAME(sums_of)(type) == NAME(in_16_bits))
        pairs = _mm256_add_epi16((__m256i)sum, pairs);
    else
        pairs = _mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    ADD_NOW(pairs);
    return (NAME(vi))pairs;
}

INLINE NAME(vi) NAME(end)(const int type, NAME(vi) sum, int32_t start) {
    if (NAME(sums_of)(type) != NAME(in_16_bits)) return sum;
    return (NAME(vi))_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) + start;
}
#endif

/* Columns of some more words, as many as there is room for. */
INLINE NAME(vi) NAME(add_words)(const int type, NAME(vi) sum, const NAME(vu) *weights, const int8_t *x,
                                const int k, const int words) {
#if VNNI
    UNROLLED for (int i = 0; i < words; i++) sum = NAME(add)(type, sum, weights[i], x, k + i);
    return sum;
#else
    (void)type;
    __m256i pairs = _mm256_maddubs_epi16((__m256i)weights[0], _mm256_set1_epi32(word_at(x + 4 * k)));
    UNROLLED for (int i = 1; i < words; i++) {
        __m256i more = _mm256_maddubs_epi16((__m256i)weights[i], _mm256_set1_epi32(word_at(x + 4 * (k + i))));
        pairs = _mm256_add_epi16(pairs, more);
    }
    pairs = _mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    ADD_NOW(pairs);
    return (NAME(vi))pairs;
#endif
}

/* Each byte's place in a list of sixteen. */
INLINE NAME(vu) NAME(looked_up)(NAME(vu) places, const uint8_t *list) {
    __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)list));
    return (NAME(vu))_mm256_shuffle_epi8(all, (__m256i)places);
}

/* The greater of each two, the greatest of all lanes, and their sum. */
INLINE NAME(vi) NAME(greater)(NAME(vi) a, NAME(vi) b) {
    return (NAME(vi))_mm256_max_epi32((__m256i)a, (__m256i)b);
}

INLINE int32_t NAME(greatest)(NAME(vi) x) {
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

INLINE int32_t NAME(total)(NAME(vi) x) {
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

/* The lowest byte of each lane. */
INLINE void NAME(put_bytes)(int8_t *out, NAME(vi) x) {
    const __m256i lowest = _mm256_set1_epi64x(0x0c080400);
    __m256i y = _mm256_shuffle_epi8((__m256i)x, lowest);
    y = _mm256_permutevar8x32_epi32(y, _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0));
    _mm_storel_epi64((__m128i *)out, _mm256_castsi256_si128(y));
}

/* Four words of every fourth row, and four such vectors with words and rows exchanged: then each has one word of
   all of its rows. */
INLINE NAME(vu) NAME(four_words)(const uint8_t *x, int64_t step) {
    __m256i v = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)x));
    return (NAME(vu))_mm256_inserti128_si256(v, _mm_loadu_si128((const __m128i *)(x + step)), 1);
}

INLINE void NAME(transpose)(NAME(vu) x[4]) {
    __m256i a = _mm256_unpacklo_epi32((__m256i)x[0], (__m256i)x[1]);
    __m256i b = _mm256_unpackhi_epi32((__m256i)x[0], (__m256i)x[1]);
    __m256i c = _mm256_unpacklo_epi32((__m256i)x[2], (__m256i)x[3]);
    __m256i d = _mm256_unpackhi_epi32((__m256i)x[2], (__m256i)x[3]);
    x[0] = (NAME(vu))_mm256_unpacklo_epi64(a, c);
    x[1] = (NAME(vu))_mm256_unpackhi_epi64(a, c);
    x[2] = (NAME(vu))_mm256_unpacklo_epi64(b, d);
    x[3] = (NAME(vu))_mm256_unpackhi_epi64(b, d);
}
