/* Vectors of 8 floats. */

#undef LANES
#undef QUERIES
#undef ADDED
#undef MANY
#undef TURNS
#define LANES 8
#define QUERIES 2 /* that are taken at once: their sums with four keys stay in registers */
#define ADDED 2 /* that values are added to at once */
#define MANY INT64_MAX /* from which on halves are made floats once for all of them: never */
#define TURNS 0 /* whether there is `turn_halves` */

typedef float NAME(vf) __attribute__((vector_size(32)));
typedef int32_t NAME(vi) __attribute__((vector_size(32)));

INLINE NAME(vf) NAME(from_half)(const uint16_t *x) {
    return (NAME(vf))_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}

INLINE NAME(vf) NAME(from_bytes)(const int8_t *x) {
    return (NAME(vf))_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
}

/* Four vectors to one: in each half the sums of that half of each. */
INLINE NAME(vf) NAME(fold)(const NAME(vf) x[4]) {
    __m256 ab = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]), cd = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
    return (NAME(vf))_mm256_hadd_ps(ab, cd);
}

/* The sums of sixteen vectors that were folded four by four. */
INLINE void NAME(put_sums)(float *out, const NAME(vf) x[4]) {
    for (int i = 0; i < 4; i += 2) {
        __m256 a = (__m256)x[i], b = (__m256)x[i + 1];
        __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
        _mm256_storeu_ps(out + 4 * i, _mm256_add_ps(low, high));
    }
}

/* The greater of each two, the greatest of all, and the sum of all. */
INLINE NAME(vf) NAME(greater)(NAME(vf) a, NAME(vf) b) { return (NAME(vf))_mm256_max_ps((__m256)a, (__m256)b); }

INLINE float NAME(greatest)(NAME(vf) x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

INLINE float NAME(sum)(NAME(vf) x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
