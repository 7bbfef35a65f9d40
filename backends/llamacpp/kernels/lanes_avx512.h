/* Vectors of 16 floats. */

#undef LANES
#undef QUERIES
#define LANES 16
#define QUERIES 4 /* that are taken at once: their sums with four keys stay in registers */

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
