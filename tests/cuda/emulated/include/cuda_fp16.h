// Half floats for the emulator: the compiler's own type.

#pragma once

typedef _Float16 __half;
typedef __half half;
struct alignas(4) __half2 { half x, y; };
typedef __half2 half2;

inline half __float2half(float x) { return (half)x; }
inline half __float2half_rn(float x) { return (half)x; }
inline float __half2float(half x) { return (float)x; }
inline half __ushort_as_half(unsigned short bits) { half h; memcpy(&h, &bits, 2); return h; }
inline unsigned short __half_as_ushort(half h) { unsigned short bits; memcpy(&bits, &h, 2); return bits; }
inline float2 __half22float2(half2 h) { return {(float)h.x, (float)h.y}; }
inline half2 __floats2half2_rn(float x, float y) { return {(half)x, (half)y}; }
