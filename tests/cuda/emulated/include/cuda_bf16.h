// bfloat16 for the emulator: rounded to the nearest, ties to even, as the hardware does.

#pragma once

struct __nv_bfloat16 { unsigned short bits; };

inline __nv_bfloat16 __float2bfloat16(float x) {
    unsigned n;
    memcpy(&n, &x, 4);
    if (x != x) return {(unsigned short)0x7fff};
    return {(unsigned short)((n + 0x7fff + (n >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __float2bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) {
    unsigned n = (unsigned)x.bits << 16;
    float f;
    memcpy(&f, &n, 4);
    return f;
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
