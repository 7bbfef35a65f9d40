/* Vectors of 4 floats, which every CPU of the last decades has, and every compiler knows how to do without. */

#undef LANES
#undef QUERIES
#undef ADDED
#undef MANY
#undef TURNS
#define LANES 4
#define QUERIES 2 /* that are taken at once: their sums with four keys stay in registers */
#define ADDED 2 /* that values are added to at once */
#define MANY 3 /* from which on halves are made floats once for all of them */
#define TURNS 0 /* whether there is `turn_halves` */

typedef float NAME(vf) __attribute__((vector_size(16)));
typedef int32_t NAME(vi) __attribute__((vector_size(16)));

INLINE NAME(vf) NAME(from_half)(const uint16_t *x) {
#if defined(__aarch64__)
    return (NAME(vf))vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
#else
    return (NAME(vf)){half_to_float(x[0]), half_to_float(x[1]), half_to_float(x[2]), half_to_float(x[3])};
#endif
}

INLINE NAME(vf) NAME(from_bytes)(const int8_t *x) { return (NAME(vf)){x[0], x[1], x[2], x[3]}; }

/* The sums of four vectors. */
INLINE NAME(vf) NAME(fold)(const NAME(vf) x[4]) {
    NAME(vf) sums;
    for (int i = 0; i < 4; i++) sums[i] = (x[i][0] + x[i][2]) + (x[i][1] + x[i][3]);
    return sums;
}

/* The sums of sixteen vectors that were folded four by four. */
INLINE void NAME(put_sums)(float *out, const NAME(vf) x[4]) { memcpy(out, x, 16 * sizeof(float)); }

/* The greater of each two, the greatest of all, and the sum of all. */
INLINE NAME(vf) NAME(greater)(NAME(vf) a, NAME(vf) b) {
    NAME(vi) more = a > b;
    return (NAME(vf))((more & (NAME(vi))a) | (~more & (NAME(vi))b));
}

INLINE float NAME(greatest)(NAME(vf) x) {
    float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

INLINE float NAME(sum)(NAME(vf) x) { return (x[0] + x[2]) + (x[1] + x[3]); }
