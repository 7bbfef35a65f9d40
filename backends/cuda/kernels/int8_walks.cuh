// How a warp walks along rows of weights and multiplies them by a few rows of bytes (int8.cuh): as walks.cuh,
// but four products take one instruction. A lane takes as many weights at a time as share scales.
//
// A sum of bytes is an integer, and becomes a float without a conversion, whose rate is a fourth of the
// others': it begins with the bits of 1.5 * 2^23, to which a float of that size adds what is added to its bits.
//
// By the compiled code for two rows and one token that is 1.4 instructions of a lane for each weight of Q4_K
// (tests/cuda/test_sass.py holds it): memory is what they wait for.

#pragma once

#include "int8.cuh"
#include "quants.cuh"

typedef byte Input;

__device__ __forceinline__ int64 input_row(int cols) { return int8_row(cols); }

#define SUM_BITS 0x4b400000
#define SUM_BIAS 12582912.0f

__device__ __forceinline__ float sum_of(int bits) { return __int_as_float(bits) - SUM_BIAS; }

__device__ __forceinline__ uint_t word(const uint4 &x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Byte i of a word as a float: as the third byte of 128.0f it adds its value.
__device__ __forceinline__ float byte_of(uint_t word, int i) {
    return __uint_as_float(__byte_perm(word, 0x43000000u, 0x7044 | i << 8)) - 128.0f;
}

// Adds the products of R rows and T rows of the input to sums: to each lane's those of its columns.
template <typename Q> struct Walk;

// --- Q4_K and Q5_K: a lane takes a run, which is two sub-blocks of 32 weights

// What a run has besides nibbles; and the bytes of its low and high weights, these HIGH times too large.
struct OnlyNibbles {
    static constexpr float HIGH = 16.0f;
    __device__ __forceinline__ void read(const byte *) {}
    __device__ __forceinline__ uint_t low(uint_t q, int, int) const { return q & 0x0f0f0f0fu; }
    __device__ __forceinline__ uint_t high(uint_t q, int, int) const { return q & 0xf0f0f0f0u; }
};

struct WithFifth {
    static constexpr float HIGH = 1.0f;
    uint4 bits[2];
    __device__ __forceinline__ void read(const byte *from) {
        bits[0] = ((const uint4 *)from)[0], bits[1] = ((const uint4 *)from)[1];
    }
    // Bit `at` of each byte as the fifth one: what crosses between bytes is not looked at.
    __device__ __forceinline__ uint_t fifth(int k, int at) const {
        uint_t found = word(bits[k / 4], k % 4);
        return __funnelshift_r(found, found, at + 28) & 0x10101010u;
    }
    __device__ __forceinline__ uint_t low(uint_t q, int k, int run) const { return q & 0x0f0f0f0fu | fifth(k, 2 * run); }
    __device__ __forceinline__ uint_t high(uint_t q, int k, int run) const {
        return q >> 4 & 0x0f0f0f0fu | fifth(k, 2 * run + 1);
    }
};

template <typename Q, typename Besides> struct Int8Runs {
    struct Read {
        uint4 head, nibbles[2];
        Besides besides;
    };

    static __device__ __forceinline__ Read read(const byte *block, int run) {
        const byte *nibbles = block + Q::BYTES - 128 + 32 * run;
        Read found;
        found.head = *(const uint4 *)block;
        found.nibbles[0] = ((const uint4 *)nibbles)[0], found.nibbles[1] = ((const uint4 *)nibbles)[1];
        found.besides.read(block + 16);
        return found;
    }

    // Scales of both sub-blocks, and what is taken away.
    static __device__ __forceinline__ float4 scales(const uint4 &head, int run) {
        int shift = 16 * (run % 2);
        uint_t a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
        uint_t scale = run < 2 ? a & 0x3f3f : c & 0x0f0f | a >> 2 & 0x3030;
        uint_t least = run < 2 ? b & 0x3f3f : c >> 4 & 0x0f0f | b >> 2 & 0x3030;
        float d = __half2float(__ushort_as_half(head.x & 0xffff)), m = -__half2float(__ushort_as_half(head.x >> 16));
        return {byte_of(scale, 0) * d, byte_of(scale, 1) * (d * (1.0f / Besides::HIGH)), byte_of(least, 0) * m,
                byte_of(least, 1) * m};
    }

    template <int T, int R>
    static __device__ __forceinline__ void walk(const byte *const (&rows)[R], const Input *const (&x)[T],
                                                int cols, float (&sums)[R][T]) {
        int lane = threadIdx.x % WARP, run = lane % 4, pieces = cols / 64, at = lane / 4 * Q::BYTES;
        Read next[R];
        if (lane < pieces)
            for (int r = 0; r < R; r++) next[r] = read(rows[r] + at, run);
#pragma unroll(T == 1 && R <= 2 ? 2 : 1)
        for (int p = lane; p < pieces; p += WARP) {
            uint_t low[R][8], high[R][8];
            float4 s[R];
#pragma unroll
            for (int r = 0; r < R; r++) {
                s[r] = scales(next[r].head, run);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    uint_t q = word(next[r].nibbles[k / 4], k % 4);
                    low[r][k] = next[r].besides.low(q, k, run), high[r][k] = next[r].besides.high(q, k, run);
                }
            }
            at += WARP / 4 * Q::BYTES;
            if (p + WARP < pieces)
                for (int r = 0; r < R; r++) next[r] = read(rows[r] + at, run);
#pragma unroll
            for (int t = 0; t < T; t++) {
                const uint4 *from = (const uint4 *)(x[t] + 64 * p);
                uint4 v[4] = {from[0], from[1], from[2], from[3]};
                float4 of_x = ((const float4 *)(x[t] + cols))[p];  // two scales, each with its sum
#pragma unroll
                for (int r = 0; r < R; r++) {
                    int a = SUM_BITS, b = SUM_BITS;
#pragma unroll
                    for (int k = 0; k < 8; k++) {
                        a = dot4(low[r][k], word(v[k / 4], k % 4), a);
                        b = dot4(high[r][k], word(v[2 + k / 4], k % 4), b);
                    }
                    float sum = fmaf(s[r].x * of_x.x, sum_of(a), sums[r][t]);
                    sum = fmaf(s[r].y * of_x.z, sum_of(b), sum);
                    sums[r][t] = fmaf(s[r].w, of_x.w, fmaf(s[r].z, of_x.y, sum));
                }
            }
        }
    }
};

template <> struct Walk<Q4_K> : Int8Runs<Q4_K, OnlyNibbles> {};
template <> struct Walk<Q5_K> : Int8Runs<Q5_K, WithFifth> {};

// --- Q6_K: a lane takes sixteen weights of each run of a half block, which share their high bits

template <> struct Walk<Q6_K> {
    struct Read {
        uint_t low[5], other[5], high[5];
        signed char scales[4];
        ushort_t d;
    };

    // Blocks are aligned to two bytes only. What lies around sixteen of them is in the block, too.
    static __device__ __forceinline__ void words(const byte *from, uint_t (&found)[5]) {
        const uint_t *begin = (const uint_t *)(from - ((uint64)from & 2));
        for (int i = 0; i < 5; i++) found[i] = begin[i];
    }

    static __device__ __forceinline__ Read read(const byte *block, int half_block, int at) {
        Read found;
        words(block + 64 * half_block + 16 * at, found.low);
        words(block + 64 * half_block + 32 + 16 * at, found.other);
        words(block + 128 + 32 * half_block + 16 * at, found.high);
        const signed char *scales = (const signed char *)block + 192 + 8 * half_block + at;
        for (int g = 0; g < 4; g++) found.scales[g] = scales[2 * g];
        found.d = *(const ushort_t *)(block + 208);
        return found;
    }

    static __device__ __forceinline__ uint_t bytes(uint_t low, uint_t other, uint_t high, int g) {
        uint_t nibbles = (g % 2 ? other : low) >> 4 * (g / 2) & 0x0f0f0f0fu;
        return nibbles | (g == 0 ? high << 4 : g == 1 ? high << 2 : g == 2 ? high : high >> 2) & 0x30303030u;
    }

    template <int T, int R>
    static __device__ __forceinline__ void walk(const byte *const (&rows)[R], const Input *const (&x)[T],
                                                int cols, float (&sums)[R][T]) {
        int lane = threadIdx.x % WARP, half_block = lane / 2 % 2, at = lane % 2, pieces = cols / 64;
        int begin = lane / 4 * Q6_K::BYTES, column = lane / 4 * Q6_K::WEIGHTS + 128 * half_block + 16 * at;
        Read next[R];
        if (lane < pieces)
            for (int r = 0; r < R; r++) next[r] = read(rows[r] + begin, half_block, at);
#pragma unroll(T == 1 && R <= 2 ? 2 : 1)
        for (int p = lane; p < pieces; p += WARP) {
            uint_t q[R][4][4];
            float s[R][4];
#pragma unroll
            for (int r = 0; r < R; r++) {
                uint_t odd = 8 * ((uint_t)(uint64)(rows[r] + begin) & 2);
                const Read &now = next[r];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    uint_t low = __funnelshift_r(now.low[k], now.low[k + 1], odd);
                    uint_t other = __funnelshift_r(now.other[k], now.other[k + 1], odd);
                    uint_t high = __funnelshift_r(now.high[k], now.high[k + 1], odd);
                    for (int g = 0; g < 4; g++) q[r][g][k] = bytes(low, other, high, g);
                }
                for (int g = 0; g < 4; g++)
                    s[r][g] = (float)now.scales[g] * __half2float(__ushort_as_half(now.d));
            }
            begin += WARP / 4 * Q6_K::BYTES;
            if (p + WARP < pieces)
                for (int r = 0; r < R; r++) next[r] = read(rows[r] + begin, half_block, at);
#pragma unroll
            for (int t = 0; t < T; t++) {
                const float2 *of_x = (const float2 *)(x[t] + cols) + column / ROUNDED;
#pragma unroll
                for (int g = 0; g < 4; g++) {
                    uint4 v = *(const uint4 *)(x[t] + column + 32 * g);
                    int lowered = SUM_BITS;  // by 32 for each weight, of all rows
#pragma unroll
                    for (int k = 0; k < 4; k++) lowered = signed_dot4(0xe0e0e0e0u, word(v, k), lowered);
                    float scale = of_x[g].x;
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        int sum = lowered;
#pragma unroll
                        for (int k = 0; k < 4; k++) sum = dot4(q[r][g][k], word(v, k), sum);
                        sums[r][t] = fmaf(s[r][g] * scale, sum_of(sum), sums[r][t]);
                    }
                }
            }
            column += WARP / 4 * Q6_K::WEIGHTS;
        }
    }
};

// --- 32 weights with one scale, aligned to two bytes: a lane takes a part of a block

// Adds what a part of a block gives; LOWERED bytes are what is taken from each weight.
template <typename Q, int PARTS, uint_t LOWERED, typename Part>
struct Int8Blocks {
    template <int T, int R>
    static __device__ __forceinline__ void walk(const byte *const (&rows)[R], const Input *const (&x)[T],
                                                int cols, float (&sums)[R][T]) {
        int part = threadIdx.x % PARTS, pieces = cols / Q::WEIGHTS * PARTS;
#pragma unroll(T *R <= 4 ? 2 : 1)
        for (int p = threadIdx.x % WARP; p < pieces; p += WARP) {
            int block = p / PARTS;
            Part q[R];
            float d[R];
            for (int r = 0; r < R; r++) {
                const byte *from = rows[r] + (int64)block * Q::BYTES;
                q[r].read(from + 2, part), d[r] = half_at(from);
            }
#pragma unroll
            for (int t = 0; t < T; t++) {
                uint_t v[Part::WORDS];
                Part::input(x[t] + Q::WEIGHTS * block, part, v);
                float scale = ((const float2 *)(x[t] + cols))[block].x;
                int lowered = SUM_BITS;
                if (LOWERED)
                    for (int k = 0; k < Part::WORDS; k++) lowered = signed_dot4(LOWERED, v[k], lowered);
                for (int r = 0; r < R; r++) {
                    int sum = lowered;
                    for (int k = 0; k < Part::WORDS; k++) sum = signed_dot4(q[r].words[k], v[k], sum);
                    sums[r][t] = fmaf(d[r] * scale, sum_of(sum), sums[r][t]);
                }
            }
        }
    }
};

// Eight bytes of sixteen: the low nibbles are a quarter of the block, and the high ones another.
struct PartOfNibbles {
    static const int WORDS = 4;
    uint_t words[WORDS];
    __device__ __forceinline__ void read(const byte *from, int part) {
        for (int k = 0; k < 2; k++) {
            uint_t q = word_at(from + 8 * part + 4 * k);
            words[k] = q & 0x0f0f0f0fu, words[2 + k] = q >> 4 & 0x0f0f0f0fu;
        }
    }
    static __device__ __forceinline__ void input(const Input *x, int part, uint_t (&v)[WORDS]) {
        uint2 low = *(const uint2 *)(x + 8 * part), high = *(const uint2 *)(x + 16 + 8 * part);
        v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
    }
};

// Eight bytes of 32.
struct PartOfBytes {
    static const int WORDS = 2;
    uint_t words[WORDS];
    __device__ __forceinline__ void read(const byte *from, int part) {
        for (int k = 0; k < WORDS; k++) words[k] = word_at(from + 8 * part + 4 * k);
    }
    static __device__ __forceinline__ void input(const Input *x, int part, uint_t (&v)[WORDS]) {
        uint2 mine = *(const uint2 *)(x + 8 * part);
        v[0] = mine.x, v[1] = mine.y;
    }
};

template <> struct Walk<Q4_0> : Int8Blocks<Q4_0, 2, 0xf8f8f8f8u, PartOfNibbles> {};
template <> struct Walk<Q8_0> : Int8Blocks<Q8_0, 4, 0u, PartOfBytes> {};
