/* Dot products of bytes in vectors of 8 lanes (AVX2; where VNNI is 1, with AVX-VNNI's instruction for them). */

#undef LANES
#undef BATCH
#undef SMALL
#undef UNROLLED
#define LANES 8
#define BATCH 4 /* rows of activations at once: their sums stay in registers */
#define SMALL 0
#undef MANY
#undef AT_A_TIME
#define MANY 8 /* rows of activations from which on weights are unpacked for all of them */
#define AT_A_TIME 2 /* vectors of rows of a weight that share an activation once it is broadcast */
#define UNROLLED UNROLL

/* For all that compilers know memory has changed here. Otherwise they read the activations of a whole block
   before its first word, run out of registers, and keep most of them on the stack. */
#undef READ_LATER
#undef READ_WORD_LATER
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
   those of 6 bits once; weights of 8 bits get their signs back, and give them to x, so that 128 * 127 is the
   largest product. So they have no offset. */
INLINE NAME(vi) NAME(begin)(const int type, int32_t start) {
    return (NAME(vi))_mm256_set1_epi32(type == TYPE_Q6_K ? start : 0);
}

INLINE NAME(vi) NAME(add)(const int type, NAME(vi) sum, NAME(vu) weights, const int8_t *x, const int k) {
    __m256i w = (__m256i)weights, columns = _mm256_set1_epi32(word_at(x + 4 * k));
    if (type == TYPE_Q8_0) {
        __m256i with_sign = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        w = _mm256_abs_epi8(with_sign);
        columns = _mm256_sign_epi8(columns, with_sign);
    }
    __m256i pairs = _mm256_maddubs_epi16(w, columns);
    if (type == TYPE_Q8_0 || type == TYPE_Q6_K)
        pairs = _mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    else
        pairs = _mm256_add_epi16((__m256i)sum, pairs);
    ADD_NOW(pairs);
    return (NAME(vi))pairs;
}

INLINE NAME(vi) NAME(end)(const int type, NAME(vi) sum, int32_t start) {
    if (type == TYPE_Q8_0 || type == TYPE_Q6_K) return sum;
    return (NAME(vi))_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) + start;
}
#endif

/* Eight more columns: of 6 bits two products fit into 16 bits, so they are added up there. */
INLINE NAME(vi) NAME(add_two)(const int type, NAME(vi) sum, const NAME(vu) weights[2], const int8_t *x,
                              const int k) {
#if VNNI
    return NAME(add)(type, NAME(add)(type, sum, weights[0], x, k), weights[1], x, k + 1);
#else
    (void)type;
    __m256i first = _mm256_maddubs_epi16((__m256i)weights[0], _mm256_set1_epi32(word_at(x + 4 * k)));
    __m256i second = _mm256_maddubs_epi16((__m256i)weights[1], _mm256_set1_epi32(word_at(x + 4 * k + 4)));
    __m256i both = _mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));
    both = _mm256_add_epi32((__m256i)sum, both);
    ADD_NOW(both);
    return (NAME(vi))both;
#endif
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
