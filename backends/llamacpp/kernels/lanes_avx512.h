/* Vectors of 16 floats. */

#undef LANES
#undef QUERIES
#undef ADDED
#undef MANY
#undef TURNS
#define LANES 16
#define QUERIES 4 /* that are taken at once: their sums with four keys stay in registers */
#define ADDED 6 /* that values are added to at once */
#define MANY 10 /* from which on halves are made floats once for all of them */
#define TURNS 1 /* whether there is `turn_halves` */

typedef float NAME(vf) __attribute__((vector_size(64)));
typedef int32_t NAME(vi) __attribute__((vector_size(64)));

INLINE NAME(vf) NAME(from_half)(const uint16_t *x) {
    return (NAME(vf))_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}

INLINE NAME(vf) NAME(from_bytes)(const int8_t *x) {
    return (NAME(vf))_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}

/* Four vectors to one: in each quarter the sums of that quarter of each. */
INLINE NAME(vf) NAME(fold)(const NAME(vf) x[4]) {
    __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
    return (NAME(vf))_mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}

/* The sums of sixteen vectors that were folded four by four. */
INLINE void NAME(put_sums)(float *out, const NAME(vf) x[4]) {
    __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
    _mm512_storeu_ps(
        out, _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)));
}

/* The greater of each two, the greatest of all, and the sum of all. */
INLINE NAME(vf) NAME(greater)(NAME(vf) a, NAME(vf) b) { return (NAME(vf))_mm512_max_ps((__m512)a, (__m512)b); }

INLINE float NAME(greatest)(NAME(vf) x) { return _mm512_reduce_max_ps((__m512)x); }

INLINE float NAME(sum)(NAME(vf) x) { return _mm512_reduce_add_ps((__m512)x); }

/* Eight halves of each of four rows that are four rows apart. */
INLINE __m512i NAME(pieces)(const uint8_t *const *rows, int64_t at) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[0] + at)));
    x = _mm512_mask_broadcast_i32x4(x, 0x00f0, _mm_loadu_si128((const __m128i *)(rows[4] + at)));
    x = _mm512_mask_broadcast_i32x4(x, 0x0f00, _mm_loadu_si128((const __m128i *)(rows[8] + at)));
    return _mm512_mask_broadcast_i32x4(x, 0xf000, _mm_loadu_si128((const __m128i *)(rows[12] + at)));
}

/* Turns 16 rows of n halves, and makes them floats: row d of the result has number d of each. */
INLINE void NAME(turn_halves)(float *out, int64_t out_stride, const uint8_t *const *rows, int64_t n) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    for (int64_t d = 0; d < n; d += 8, out += 8 * out_stride) {
        __m512i a = NAME(pieces)(rows, 2 * d), b = NAME(pieces)(rows + 1, 2 * d);
        __m512i c = NAME(pieces)(rows + 2, 2 * d), e = NAME(pieces)(rows + 3, 2 * d);
        __m512i ac[2] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c)};
        __m512i be[2] = {_mm512_unpacklo_epi16(b, e), _mm512_unpackhi_epi16(b, e)};
        __m512i pairs[4]; /* two numbers of each row, four rows in each quarter */
        for (int i = 0; i < 2; i++) {
            pairs[2 * i] = _mm512_unpacklo_epi16(ac[i], be[i]);
            pairs[2 * i + 1] = _mm512_unpackhi_epi16(ac[i], be[i]);
        }
        for (int i = 0; i < 4; i++) {
            __m512i x = _mm512_permutexvar_epi64(order, pairs[i]);
            _mm512_storeu_ps(out + 2 * i * out_stride, _mm512_cvtph_ps(_mm512_castsi512_si256(x)));
            _mm512_storeu_ps(out + (2 * i + 1) * out_stride, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)));
        }
    }
}
