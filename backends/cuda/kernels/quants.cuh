// The types of weights: how to get eight of them out of a block of a file.
//
// A row is a run of blocks of WEIGHTS weights in BYTES bytes, as hetrun/quant describes them. A block is
// unpacked in pieces: four bytes of nibbles are eight weights in two runs of four, those of the low nibbles
// and those of the high ones. unpack() gives the weights of a piece, w[0..3] from place `a` of the block on,
// w[4..7] from place `b` on: a lane that walks along a row multiplies them by two float4 of the input.
//
// Blocks begin where the one before ends, so most types have nothing aligned to more than two bytes.

#pragma once

#include "common.cuh"

struct Eight {
    float w[8];
    int a, b;
};

__device__ __forceinline__ float half_at(const byte *p) {
    return __half2float(__ushort_as_half(*(const ushort_t *)p));
}

// Four bytes, from where at least two are aligned.
__device__ __forceinline__ uint_t word_at(const byte *p) {
    const ushort_t *q = (const ushort_t *)p;
    return q[0] | (uint_t)q[1] << 16;
}

__device__ __forceinline__ uint_t aligned_word(const byte *p) { return *(const uint_t *)p; }

// Byte i of a word.
__device__ __forceinline__ int part(uint_t word, int i) { return word >> 8 * i & 0xff; }

// --- floats

struct F32 {
    static const int WEIGHTS = 8, BYTES = 32, PIECES = 1;
    static __device__ __forceinline__ Eight unpack(const byte *block, int) {
        float4 x = ((const float4 *)block)[0], y = ((const float4 *)block)[1];
        return {{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}, 0, 4};
    }
};

struct F16 {
    static const int WEIGHTS = 8, BYTES = 16, PIECES = 1;
    static __device__ __forceinline__ float low(uint_t x) { return __half2float(__ushort_as_half(x & 0xffff)); }
    static __device__ __forceinline__ float high(uint_t x) { return __half2float(__ushort_as_half(x >> 16)); }
    static __device__ __forceinline__ Eight unpack(const byte *block, int) {
        uint4 x = *(const uint4 *)block;
        return {{low(x.x), high(x.x), low(x.y), high(x.y), low(x.z), high(x.z), low(x.w), high(x.w)}, 0, 4};
    }
};

struct BF16 {
    static const int WEIGHTS = 8, BYTES = 16, PIECES = 1;
    static __device__ __forceinline__ float low(uint_t x) { return __uint_as_float(x << 16); }
    static __device__ __forceinline__ float high(uint_t x) { return __uint_as_float(x & 0xffff0000u); }
    static __device__ __forceinline__ Eight unpack(const byte *block, int) {
        uint4 x = *(const uint4 *)block;
        return {{low(x.x), high(x.x), low(x.y), high(x.y), low(x.z), high(x.z), low(x.w), high(x.w)}, 0, 4};
    }
};

// --- 32 weights with one scale

struct Q4_0 {
    static const int WEIGHTS = 32, BYTES = 18, PIECES = 4;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        float d = half_at(block);
        uint_t q = word_at(block + 2 + 4 * piece);
        Eight e;
        e.a = 4 * piece, e.b = 16 + 4 * piece;
        for (int i = 0; i < 4; i++) {
            e.w[i] = (float)((part(q, i) & 15) - 8) * d;
            e.w[4 + i] = (float)((part(q, i) >> 4) - 8) * d;
        }
        return e;
    }
};

struct Q4_1 {
    static const int WEIGHTS = 32, BYTES = 20, PIECES = 4;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        float d = half_at(block), m = half_at(block + 2);
        uint_t q = aligned_word(block + 4 + 4 * piece);
        Eight e;
        e.a = 4 * piece, e.b = 16 + 4 * piece;
        for (int i = 0; i < 4; i++) {
            e.w[i] = fmaf((float)(part(q, i) & 15), d, m);
            e.w[4 + i] = fmaf((float)(part(q, i) >> 4), d, m);
        }
        return e;
    }
};

struct Q5_0 {
    static const int WEIGHTS = 32, BYTES = 22, PIECES = 4;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        float d = half_at(block);
        uint_t high = word_at(block + 2) >> 4 * piece, q = word_at(block + 6 + 4 * piece);
        Eight e;
        e.a = 4 * piece, e.b = 16 + 4 * piece;
        for (int i = 0; i < 4; i++) {
            e.w[i] = (float)((int)(part(q, i) & 15 | (high >> i & 1) << 4) - 16) * d;
            e.w[4 + i] = (float)((int)(part(q, i) >> 4 | (high >> (16 + i) & 1) << 4) - 16) * d;
        }
        return e;
    }
};

struct Q5_1 {
    static const int WEIGHTS = 32, BYTES = 24, PIECES = 4;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        float d = half_at(block), m = half_at(block + 2);
        uint_t high = aligned_word(block + 4) >> 4 * piece, q = aligned_word(block + 8 + 4 * piece);
        Eight e;
        e.a = 4 * piece, e.b = 16 + 4 * piece;
        for (int i = 0; i < 4; i++) {
            e.w[i] = fmaf((float)(part(q, i) & 15 | (high >> i & 1) << 4), d, m);
            e.w[4 + i] = fmaf((float)(part(q, i) >> 4 | (high >> (16 + i) & 1) << 4), d, m);
        }
        return e;
    }
};

struct Q8_0 {
    static const int WEIGHTS = 32, BYTES = 34, PIECES = 4;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        float d = half_at(block);
        uint_t q = word_at(block + 2 + 8 * piece), r = word_at(block + 6 + 8 * piece);
        Eight e;
        e.a = 8 * piece, e.b = 8 * piece + 4;
        for (int i = 0; i < 4; i++) {
            e.w[i] = (float)(signed char)part(q, i) * d;
            e.w[4 + i] = (float)(signed char)part(r, i) * d;
        }
        return e;
    }
};

// --- 256 weights in sub-blocks

// Two halves of 128 weights: 32 bytes hold four runs of 32, two bits each. A piece has two of the four.
struct Q2_K {
    static const int WEIGHTS = 256, BYTES = 84, PIECES = 32;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        int half_block = piece / 16, pair = piece / 8 % 2, at = 4 * (piece % 8);
        uint_t q = aligned_word(block + 16 + 32 * half_block + at) >> 4 * pair;
        float d = half_at(block + 80), least = half_at(block + 82);
        Eight e;
        e.a = 128 * half_block + 64 * pair + at, e.b = e.a + 32;
        int s = block[e.a / 16], t = block[e.b / 16];
        float scale = (float)(s & 15) * d, other = (float)(t & 15) * d;
        float low = (float)(s >> 4) * least, other_low = (float)(t >> 4) * least;
        for (int i = 0; i < 4; i++) {
            e.w[i] = fmaf((float)(part(q, i) & 3), scale, -low);
            e.w[4 + i] = fmaf((float)(part(q, i) >> 2 & 3), other, -other_low);
        }
        return e;
    }
};

struct Q3_K {
    static const int WEIGHTS = 256, BYTES = 110, PIECES = 32;
    // Of sixteen scales of six bits, the low four lie in eight bytes and the high two in four.
    static __device__ __forceinline__ float scale(const byte *block, int i) {
        int low = block[96 + i % 8] >> 4 * (i / 8) & 15;
        int high = block[104 + i % 4] >> 2 * (i / 4) & 3;
        return (float)((low | high << 4) - 32) * half_at(block + 108);
    }
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        int half_block = piece / 16, pair = piece / 8 % 2, at = 4 * (piece % 8);
        uint_t q = word_at(block + 32 + 32 * half_block + at) >> 4 * pair;
        uint_t high = word_at(block + at) >> (4 * half_block + 2 * pair);
        Eight e;
        e.a = 128 * half_block + 64 * pair + at, e.b = e.a + 32;
        float s = scale(block, e.a / 16), t = scale(block, e.b / 16);
        for (int i = 0; i < 4; i++) {
            e.w[i] = (float)((part(q, i) & 3 | (part(high, i) & 1) << 2) - 4) * s;
            e.w[4 + i] = (float)((part(q, i) >> 2 & 3 | (part(high, i) >> 1 & 1) << 2) - 4) * t;
        }
        return e;
    }
};

// Scale and minimum of one of the 8 sub-blocks of Q4_K and Q5_K, six bits each in 12 bytes.
__device__ __forceinline__ float2 scale_and_least(const byte *block, int i) {
    const byte *s = block + 4;
    int scale, least;
    if (i < 4) {
        scale = s[i] & 63, least = s[4 + i] & 63;
    } else {
        scale = s[4 + i] & 15 | s[i - 4] >> 6 << 4;
        least = s[4 + i] >> 4 | s[i] >> 6 << 4;
    }
    return {(float)scale * half_at(block), (float)least * half_at(block + 2)};
}

// Four runs of 32 bytes; the low nibbles of a run are one sub-block, the high ones the next.
struct Q4_K {
    static const int WEIGHTS = 256, BYTES = 144, PIECES = 32;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        int run = piece / 8, at = 4 * (piece % 8);
        uint_t q = aligned_word(block + 16 + 4 * piece);
        float2 low = scale_and_least(block, 2 * run), high = scale_and_least(block, 2 * run + 1);
        Eight e;
        e.a = 64 * run + at, e.b = e.a + 32;
        for (int i = 0; i < 4; i++) {
            e.w[i] = fmaf((float)(part(q, i) & 15), low.x, -low.y);
            e.w[4 + i] = fmaf((float)(part(q, i) >> 4), high.x, -high.y);
        }
        return e;
    }
};

struct Q5_K {
    static const int WEIGHTS = 256, BYTES = 176, PIECES = 32;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        int run = piece / 8, at = 4 * (piece % 8);
        uint_t q = aligned_word(block + 48 + 4 * piece), fifth = aligned_word(block + 16 + at) >> 2 * run;
        float2 low = scale_and_least(block, 2 * run), high = scale_and_least(block, 2 * run + 1);
        Eight e;
        e.a = 64 * run + at, e.b = e.a + 32;
        for (int i = 0; i < 4; i++) {
            e.w[i] = fmaf((float)(part(q, i) & 15 | (part(fifth, i) & 1) << 4), low.x, -low.y);
            e.w[4 + i] = fmaf((float)(part(q, i) >> 4 | (part(fifth, i) >> 1 & 1) << 4), high.x, -high.y);
        }
        return e;
    }
};

// Two halves of 128 weights: 64 bytes hold four runs of 32 low nibbles, 32 bytes the high pairs of bits.
struct Q6_K {
    static const int WEIGHTS = 256, BYTES = 210, PIECES = 32;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        int half_block = piece / 16, run = piece / 8 % 2, at = 4 * (piece % 8);
        uint_t q = word_at(block + 64 * half_block + 32 * run + at);
        uint_t high = word_at(block + 128 + 32 * half_block + at) >> 2 * run;
        float d = half_at(block + 208);
        const signed char *scales = (const signed char *)block + 192;
        Eight e;
        e.a = 128 * half_block + 32 * run + at, e.b = e.a + 64;
        float s = (float)scales[e.a / 16] * d, t = (float)scales[e.b / 16] * d;
        for (int i = 0; i < 4; i++) {
            e.w[i] = (float)((part(q, i) & 15 | (part(high, i) & 3) << 4) - 32) * s;
            e.w[4 + i] = (float)((part(q, i) >> 4 | (part(high, i) >> 4 & 3) << 4) - 32) * t;
        }
        return e;
    }
};

// --- nibbles that are places in a list of sixteen

// The list lies in four words: a byte of them is found with shifts, which is faster than memory.
__device__ __forceinline__ float listed(uint_t a, uint_t b, uint_t c, uint_t d, int i) {
    uint_t word = i < 8 ? (i < 4 ? a : b) : (i < 12 ? c : d);
    return (float)(signed char)(word >> 8 * (i & 3));
}

__device__ __forceinline__ float iq4(int i) {
    return listed(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, i);
}

// Twice the floats of 2 + 1 bits.
__device__ __forceinline__ float fp4(int i) {
    return listed(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, i);
}

struct IQ4_NL {
    static const int WEIGHTS = 32, BYTES = 18, PIECES = 4;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        float d = half_at(block);
        uint_t q = word_at(block + 2 + 4 * piece);
        Eight e;
        e.a = 4 * piece, e.b = 16 + 4 * piece;
        for (int i = 0; i < 4; i++) {
            e.w[i] = iq4(part(q, i) & 15) * d;
            e.w[4 + i] = iq4(part(q, i) >> 4) * d;
        }
        return e;
    }
};

// Eight sub-blocks; of their scales' six bits, the high two lie in two bytes and the low four in four.
struct IQ4_XS {
    static const int WEIGHTS = 256, BYTES = 136, PIECES = 32;
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        int run = piece / 4, at = 4 * (piece % 4);
        int low = block[4 + run / 2] >> 4 * (run % 2) & 15, high = block[2 + run / 4] >> 2 * (run % 4) & 3;
        float scale = (float)((low | high << 4) - 32) * half_at(block);
        uint_t q = aligned_word(block + 8 + 4 * piece);
        Eight e;
        e.a = 32 * run + at, e.b = e.a + 16;
        for (int i = 0; i < 4; i++) {
            e.w[i] = iq4(part(q, i) & 15) * scale;
            e.w[4 + i] = iq4(part(q, i) >> 4) * scale;
        }
        return e;
    }
};

// A power of two as the scale, halved because the list is doubled; blocks of 17 bytes are not aligned at all.
struct MXFP4 {
    static const int WEIGHTS = 32, BYTES = 17, PIECES = 4;
    static __device__ __forceinline__ float scale(uint_t power) {
        return __uint_as_float(power < 2 ? 0x00200000u << power : (power - 1) << 23);
    }
    static __device__ __forceinline__ Eight unpack(const byte *block, int piece) {
        float d = scale(block[0]);
        Eight e;
        e.a = 4 * piece, e.b = 16 + 4 * piece;
        for (int i = 0; i < 4; i++) {
            int q = block[1 + 4 * piece + i];
            e.w[i] = fp4(q & 15) * d;
            e.w[4 + i] = fp4(q >> 4) * d;
        }
        return e;
    }
};
