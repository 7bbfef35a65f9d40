/* What is done with vectors of LANES floats: included once for each set of instructions, after its lanes. */

#define vf NAME(vf)
#define vi NAME(vi)

INLINE vf NAME(load)(const float *x) {
    vf v;
    memcpy(&v, x, sizeof(v));
    return v;
}

INLINE void NAME(store)(float *x, vf v) { memcpy(x, &v, sizeof(v)); }

INLINE vf NAME(all)(float x) { return x - (vf){0}; }

/* a where the mask is set, b elsewhere. */
INLINE vf NAME(choose)(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* e to the power of x, for x up to 88; 0 below -87. */
INLINE vf NAME(power)(vf x) {
    const float round = 12582912.0f; /* adding it leaves the nearest integer in the lowest bits */
    vf shifted = x * 1.44269504088896341f + round, n = shifted - round;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    y *= (vf)(((vi)shifted << 23) + (127 << 23));
    return (vf)((vi)y & ~(vi)(x < NAME(all)(-87.0f)));
}

#undef vf
#undef vi
