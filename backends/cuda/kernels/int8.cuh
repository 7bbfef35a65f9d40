// Inputs of products rounded to bytes: what `--precision fast` multiplies quantised weights by.
//
// A row of `cols` numbers is as many bytes, and behind them, for each 32 of these, a float2: their scale, and
// the scale times the sum of the bytes, which is what the least weights of sub-blocks are multiplied by. The
// next row begins on a border of 16 bytes.

#pragma once

#include "common.cuh"

#define ROUNDED 32  // numbers with one scale

__device__ __forceinline__ int int8_row(int cols) { return (cols + cols / ROUNDED * 8 + 15) / 16 * 16; }

// Four numbers of a row, from column 4 i on; eight lanes that follow each other have those of one scale, and
// whole warps come here, some lanes of which may have nothing (`there`).
__device__ __forceinline__ void put_rounded(float4 v, bool there, byte *row, int cols, int i) {
    // As integers, as what is not a number comes before all that are then: it must not get lost.
    int most = max(max(__float_as_int(fabsf(v.x)), __float_as_int(fabsf(v.y))),
                   max(__float_as_int(fabsf(v.z)), __float_as_int(fabsf(v.w))));
    for (int step = 1; step < ROUNDED / 4; step *= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, step));
    float scale = __int_as_float(most) / 127.0f, inverse = most ? 127.0f / __int_as_float(most) : 0.0f;
    if (inverse == INFINITY_F) scale = inverse = 0.0f;  // numbers too small for that are zeros
    int a = (int)rintf(v.x * inverse), b = (int)rintf(v.y * inverse);
    int c = (int)rintf(v.z * inverse), d = (int)rintf(v.w * inverse), sum = a + b + c + d;
    for (int step = 1; step < ROUNDED / 4; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (!there) return;
    ((uint_t *)row)[i] = a & 0xff | (b & 0xff) << 8 | (c & 0xff) << 16 | (uint_t)d << 24;
    if (i % 8 == 0) ((float2 *)(row + cols))[i / 8] = make_float2(scale, scale * (float)sum);
}

// One number of each lane of a warp, which are those of one scale: from a column that is a multiple of 32 on.
__device__ __forceinline__ void put_rounded_by_lanes(float x, byte *row, int cols, int column) {
    int most = __float_as_int(fabsf(x));
    for (int step = 1; step < ROUNDED; step *= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, step));
    float scale = __int_as_float(most) / 127.0f, inverse = most ? 127.0f / __int_as_float(most) : 0.0f;
    if (inverse == INFINITY_F) scale = inverse = 0.0f;
    int rounded = (int)rintf(x * inverse), sum = rounded;
    for (int step = 1; step < ROUNDED; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    row[column] = (byte)rounded;
    if (column % ROUNDED == 0) ((float2 *)(row + cols))[column / ROUNDED] = make_float2(scale, scale * (float)sum);
}

// c + the products of four bytes each: of `a` without a sign, and with one.
#ifdef __CUDACC__
__device__ __forceinline__ int dot4(uint_t a, uint_t b, int c) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ int signed_dot4(uint_t a, uint_t b, int c) { return __dp4a((int)a, (int)b, c); }
#else
inline int dot4(uint_t a, uint_t b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(a >> 8 * i & 0xff) * (signed char)(b >> 8 * i);
    return c;
}

inline int signed_dot4(uint_t a, uint_t b, int c) {
    for (int i = 0; i < 4; i++) c += (signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
    return c;
}
#endif
