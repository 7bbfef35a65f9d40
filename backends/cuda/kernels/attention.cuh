// Keys and values in slabs, and what attention over them has in common.
//
// A slab holds 32 rows of the cache that follow each other, of several layers. `slabs[row / 32]` is where the
// slab of a row lies; in it, the op's keys begin at k_at and its values at v_at, and a row takes row_bytes.

#pragma once

#include "tensor.cuh"

#define SLAB_ROWS 32
#define FOURS ((HEAD + 4 * WARP - 1) / (4 * WARP))  // groups of four numbers of a head that a lane has

struct Table {
    const uint64 *slabs;
    int64 k_at, v_at;
    int row_bytes;
};

// --- heads of rows, by their type: four numbers at a time. Where a slab lies is read from memory, so the
// compiler must be told (__ldg) that it is no shared memory.

struct F32 {
    static const int HEAD_BYTES = 4 * HEAD;
    static __device__ __forceinline__ float4 four(const byte *head, int i) { return *(const float4 *)(head + 4 * i); }
    static __device__ __forceinline__ void put(byte *head, const float *x, int lane) {
        for (int i = lane; i < HEAD; i += WARP) ((float *)head)[i] = x[i];
    }
};

struct F16 {
    static const int HEAD_BYTES = 2 * HEAD;
    static __device__ __forceinline__ float number(uint_t bits) { return __half2float(__ushort_as_half(bits)); }
    static __device__ __forceinline__ float4 four(const byte *head, int i) {
        uint2 x = *(const uint2 *)(head + 2 * i);
        return {number(x.x & 0xffff), number(x.x >> 16), number(x.y & 0xffff), number(x.y >> 16)};
    }
    static __device__ __forceinline__ void put(byte *head, const float *x, int lane) {
        for (int i = lane; i < HEAD; i += WARP) ((half *)head)[i] = __float2half_rn(x[i]);
    }
};

struct BF16 {
    static const int HEAD_BYTES = 2 * HEAD;
    static __device__ __forceinline__ float4 four(const byte *head, int i) {
        uint2 x = *(const uint2 *)(head + 2 * i);
        return {__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
                __uint_as_float(x.y & 0xffff0000u)};
    }
    static __device__ __forceinline__ void put(byte *head, const float *x, int lane) {
        for (int i = lane; i < HEAD; i += WARP) ((__nv_bfloat16 *)head)[i] = __float2bfloat16_rn(x[i]);
    }
};

// Blocks of 32 numbers with a scale: 34 bytes.
struct Q8_0 {
    static const int HEAD_BYTES = 34 * (HEAD / 32);
    static __device__ __forceinline__ float4 four(const byte *head, int i) {
        const byte *block = head + i / 32 * 34;
        float d = __half2float(__ushort_as_half(__ldg((const ushort_t *)block)));
        const ushort_t *from = (const ushort_t *)(block + 2 + i % 32);
        ushort_t q = __ldg(from), r = __ldg(from + 1);
        return {(signed char)(q & 0xff) * d, (signed char)(q >> 8) * d, (signed char)(r & 0xff) * d,
                (signed char)(r >> 8) * d};
    }
    // As ggml rounds: to the nearest, halves away from zero, by the scale before it is rounded itself.
    static __device__ __forceinline__ void put(byte *head, const float *x, int lane) {
        for (int b = 0; b < HEAD / 32; b++) {
            float mine = x[32 * b + lane], scale = warp_max(fabsf(mine)) / 127.0f;
            float inverse = 1.0f / scale;
            float q = mine * (inverse == INFINITY_F ? 0.0f : inverse), whole = truncf(q);
            whole += truncf((q - whole) * 2.0f);
            byte *block = head + 34 * b;
            if (lane == 0) *(ushort_t *)block = __half_as_ushort(__float2half_rn(scale));
            block[2 + lane] = (byte)(signed char)(int)whole;
        }
    }
};

__device__ __forceinline__ const byte *head_of(const Table &t, int64 at, int64 row, int head) {
    return (const byte *)t.slabs[row / SLAB_ROWS] + at + row % SLAB_ROWS * t.row_bytes + head * KV::HEAD_BYTES;
}

__device__ __forceinline__ float capped(float score, float softcap) {
    return softcap > 0.0f ? tanhf(score / softcap) * softcap : score;
}

#define LOG2_E 1.4426950408889634f
#define Q_IN_REGISTERS (HEAD <= 128)  // wider heads leave no room there

// A score as a power of two, which is what shares are made of.
__device__ __forceinline__ float as_power(float score, float scale, float softcap) {
    return softcap > 0.0f ? capped(score * scale, softcap) * LOG2_E : score * (scale * LOG2_E);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
