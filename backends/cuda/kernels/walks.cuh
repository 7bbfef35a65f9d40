// How a warp walks along rows of weights and multiplies them by a few rows of the input.
//
// Of most types a lane takes a piece of eight weights at a time. Of the K types that are most used, it would
// then spend more on scales than on weights: twelve loads, and fifteen instructions a weight. So each lane
// works out the scale of one sub-block, and gets those of its weights by shuffles. A byte becomes a float
// without a conversion: as the third byte of 128.0f it adds its value. So a weight is one byte permutation
// and one fmaf with its scale, whose addend takes the 128 away again. This is exact for Q6_K; of Q4_K and
// Q5_K the addend is rounded, to some 2^-17 of the step between weights.
//
// By the compiled code for two rows and one token that is 6.1 instructions of a lane for each weight of Q4_K,
// 6.9 of Q6_K, and 4 of BF16. 132 multiprocessors issue 128 a clock: 4.8 T, 4.3 T and 7.4 T weights a second,
// so 2.7, 3.5 and 15 TB/s are what unpacking alone would allow. It has not been measured.
//
// What a step of a walk reads is asked for before the step before is computed, so a warp that multiplies two
// rows has one or two KB under way; 23 KB for each multiprocessor keep 4.3 TB/s busy for 700 ns.

#pragma once

#include "quants.cuh"

typedef float Input;

__device__ __forceinline__ int64 input_row(int cols) { return cols; }  // from a row to the next

#define AS_BYTE_OF 0x43000000u  // 128.0f
#define BIAS 128.0f

// 128 and byte i of a word.
__device__ __forceinline__ float placed(uint_t word, int i) {
    return __uint_as_float(__byte_perm(word, AS_BYTE_OF, 0x7044 | i << 8));
}

__device__ __forceinline__ float2 of_lane(float2 x, int lane) {
    return {__shfl_sync(ALL_LANES, x.x, lane), __shfl_sync(ALL_LANES, x.y, lane)};
}

// Four weights with one scale.
struct Four {
    float w[4];
};

__device__ __forceinline__ Four four(uint_t word, float scale, float addend) {
    Four f;
    for (int i = 0; i < 4; i++) f.w[i] = fmaf(placed(word, i), scale, addend);
    return f;
}

__device__ __forceinline__ float along(const Four &f, float4 x, float sum) {
    sum = fmaf(f.w[0], x.x, sum), sum = fmaf(f.w[1], x.y, sum);
    return fmaf(f.w[3], x.w, fmaf(f.w[2], x.z, sum));
}

// Four weights of R rows with T rows of the input from a column on.
template <int T, int R>
__device__ __forceinline__ void along(const Four (&f)[R], const float *const (&x)[T], int64 column,
                                      float (&sums)[R][T]) {
#pragma unroll
    for (int t = 0; t < T; t++) {
        float4 numbers = *(const float4 *)(x[t] + column);
        for (int r = 0; r < R; r++) sums[r][t] = along(f[r], numbers, sums[r][t]);
    }
}

// Adds the products of R rows and T rows of the input to sums: to each lane's those of its columns.
template <typename Q> struct Walk {
    template <int T, int R>
    static __device__ __forceinline__ void walk(const byte *const (&rows)[R], const float *const (&x)[T],
                                                int cols, float (&sums)[R][T]) {
        int pieces = cols / Q::WEIGHTS * Q::PIECES;
#pragma unroll(T *R <= 4 ? 2 : 1)
        for (int p = threadIdx.x % WARP; p < pieces; p += WARP) {
            int block = p / Q::PIECES, column = block * Q::WEIGHTS;
            Eight e[R];
            for (int r = 0; r < R; r++) e[r] = Q::unpack(rows[r] + (int64)block * Q::BYTES, p % Q::PIECES);
            for (int r = 0; r < R; r++) {
                Four low = {e[r].w[0], e[r].w[1], e[r].w[2], e[r].w[3]};
                Four high = {e[r].w[4], e[r].w[5], e[r].w[6], e[r].w[7]};
                for (int t = 0; t < T; t++) {
                    const float *from = x[t] + column;
                    sums[r][t] = along(low, *(const float4 *)(from + e[r].a), sums[r][t]);
                    sums[r][t] = along(high, *(const float4 *)(from + e[r].b), sums[r][t]);
                }
            }
        }
    }
};

// --- F16 and BF16: a step is two times eight weights of each lane

template <typename Q> struct Halves {
    struct Read {
        uint4 eights[2];
    };

    static __device__ __forceinline__ Read read(const byte *row, int piece, int pieces) {
        Read found;
        for (int i = 0; i < 2; i++)
            if (piece + WARP * i < pieces) found.eights[i] = ((const uint4 *)row)[piece + WARP * i];
        return found;
    }

    template <int T, int R>
    static __device__ __forceinline__ void walk(const byte *const (&rows)[R], const float *const (&x)[T],
                                                int cols, float (&sums)[R][T]) {
        int pieces = cols / 8;
        Read next[R];
        for (int r = 0; r < R; r++) next[r] = read(rows[r], threadIdx.x % WARP, pieces);
        for (int p = threadIdx.x % WARP; p < pieces; p += 2 * WARP) {
            Read now[R];
            for (int r = 0; r < R; r++) now[r] = next[r];
            for (int r = 0; r < R; r++) next[r] = read(rows[r], p + 2 * WARP, pieces);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (p + WARP * i >= pieces) break;
                Four low[R], high[R];
                for (int r = 0; r < R; r++) {
                    Eight e = Q::unpack((const byte *)&now[r].eights[i], 0);
                    low[r] = {e.w[0], e.w[1], e.w[2], e.w[3]}, high[r] = {e.w[4], e.w[5], e.w[6], e.w[7]};
                }
                along(low, x, 8 * (p + WARP * i), sums);
                along(high, x, 8 * (p + WARP * i) + 4, sums);
            }
        }
    }
};

template <> struct Walk<F16> : Halves<F16> {};
template <> struct Walk<BF16> : Halves<BF16> {};

// --- Q4_K and Q5_K: a step is four blocks, which have 32 sub-blocks

struct NoFifth {
    __device__ __forceinline__ void read(const byte *) {}
    __device__ __forceinline__ uint_t low(int) const { return 0; }
    __device__ __forceinline__ uint_t high(int) const { return 0; }
};

// The fifth bits of a lane's eight weights.
struct Fifth {
    uint_t bits;
    __device__ __forceinline__ void read(const byte *from) { bits = aligned_word(from); }
    __device__ __forceinline__ uint_t low(int run) const { return bits >> 2 * run << 4 & 0x10101010u; }
    __device__ __forceinline__ uint_t high(int run) const { return bits >> 2 * run << 3 & 0x10101010u; }
};

template <typename Q, typename FifthBits> struct PairsOfRuns {
    // What a lane reads of four blocks: the beginning of one of them, eight weights of each.
    struct Read {
        uint4 head;
        uint_t nibbles[4];
        FifthBits fifth[4];
    };

    // `row` is where the block `begin` begins; `left` blocks follow from there.
    static __device__ __forceinline__ Read read(const byte *row, int left) {
        int lane = threadIdx.x % WARP;
        Read found;
        found.head = *(const uint4 *)(row + min(lane / 8, left - 1) * Q::BYTES);
        const byte *nibbles = row + Q::BYTES - 128 + 4 * lane, *fifth = row + 16 + 4 * (lane % 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= left) break;  // the same for all lanes
            found.nibbles[i] = aligned_word(nibbles + i * Q::BYTES);
            found.fifth[i].read(fifth + i * Q::BYTES);
        }
        return found;
    }

    // Scale, and what is added, of the lane's sub-block.
    static __device__ __forceinline__ float2 scale(uint4 head) {
        int i = threadIdx.x % 8, shift = 8 * (i % 4);
        uint_t a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
        uint_t scale = i < 4 ? a & 63 : c & 15 | a >> 2 & 48;
        uint_t least = i < 4 ? b & 63 : c >> 4 & 15 | b >> 2 & 48;
        float s = (float)(int)scale * __half2float(__ushort_as_half(head.x & 0xffff));
        float m = (float)(int)least * __half2float(__ushort_as_half(head.x >> 16));
        return {s, -fmaf(BIAS, s, m)};
    }

    template <int T, int R>
    static __device__ __forceinline__ void walk(const byte *const (&rows)[R], const float *const (&x)[T],
                                                int cols, float (&sums)[R][T]) {
        int lane = threadIdx.x % WARP, run = lane / 8;
        int64 row_at = 0, column = 64 * run + 4 * (lane % 8);
        Read next[R];
        for (int r = 0; r < R; r++) next[r] = read(rows[r], cols / Q::WEIGHTS);
        for (int left = cols / Q::WEIGHTS; left > 0; left -= 4) {
            Read now[R];
            float2 own[R];
            for (int r = 0; r < R; r++) now[r] = next[r];
            row_at += 4 * Q::BYTES;
            if (left > 4)
                for (int r = 0; r < R; r++) next[r] = read(rows[r] + row_at, left - 4);
            for (int r = 0; r < R; r++) own[r] = scale(now[r].head);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (i >= left) break;
                Four low[R], high[R];
                for (int r = 0; r < R; r++) {
                    uint_t q = now[r].nibbles[i];
                    float2 a = of_lane(own[r], 8 * i + 2 * run), b = of_lane(own[r], 8 * i + 2 * run + 1);
                    low[r] = four(q & 0x0f0f0f0fu | now[r].fifth[i].low(run), a.x, a.y);
                    high[r] = four(q >> 4 & 0x0f0f0f0fu | now[r].fifth[i].high(run), b.x, b.y);
                }
                along(low, x, column + Q::WEIGHTS * i, sums);
                along(high, x, column + Q::WEIGHTS * i + 32, sums);
            }
            column += 4 * Q::WEIGHTS;
        }
    }
};

template <> struct Walk<Q4_K> : PairsOfRuns<Q4_K, NoFifth> {};
template <> struct Walk<Q5_K> : PairsOfRuns<Q5_K, Fifth> {};

// --- Q6_K: a step is two blocks, which have 32 scales. A lane has 16 weights, which share their high bits

template <> struct Walk<Q6_K> {
    struct Read {
        uint_t low, other, high;
        signed char scale;
        ushort_t d;
    };

    // `block` is that of this lane.
    static __device__ __forceinline__ Read read(const byte *block) {
        int lane = threadIdx.x % WARP, half_block = lane / 8 % 2, at = 4 * (lane % 8);
        const byte *nibbles = block + 64 * half_block + at;
        return {word_at(nibbles), word_at(nibbles + 32), word_at(block + 128 + 32 * half_block + at),
                ((const signed char *)block)[192 + lane % 16], *(const ushort_t *)(block + 208)};
    }

    // Run g of the half block's four.
    static __device__ __forceinline__ uint_t bytes(const Read &r, int g) {
        uint_t low = (g % 2 ? r.other : r.low) >> 4 * (g / 2) & 0x0f0f0f0fu;
        uint_t high = g == 0 ? r.high << 4 : g == 1 ? r.high << 2 : g == 2 ? r.high : r.high >> 2;
        return low | high & 0x30303030u;
    }

    template <int T, int R>
    static __device__ __forceinline__ void walk(const byte *const (&rows)[R], const float *const (&x)[T],
                                                int cols, float (&sums)[R][T]) {
        int lane = threadIdx.x % WARP, blocks = cols / Q6_K::WEIGHTS;
        int first = lane / 8 * 8 + lane % 8 / 4;  // the lane that knows the scale of this one's first run
        Read next[R];
        for (int r = 0; r < R; r++) next[r] = read(rows[r] + min(lane / 16, blocks - 1) * Q6_K::BYTES);
        for (int begin = 0; begin < blocks; begin += 2) {
            // Of an odd number, half of the lanes take the last block again, times zero.
            int block = min(begin + lane / 16, blocks - 1);
            bool there = begin + lane / 16 < blocks;
            Read now[R];
            float own[R];
            for (int r = 0; r < R; r++) now[r] = next[r];
            if (begin + 2 < blocks) {
                int64 at = (int64)min(begin + 2 + lane / 16, blocks - 1) * Q6_K::BYTES;
                for (int r = 0; r < R; r++) next[r] = read(rows[r] + at);
            }
            for (int r = 0; r < R; r++)
                own[r] = there ? (float)now[r].scale * __half2float(__ushort_as_half(now[r].d)) : 0.0f;
            int64 column = Q6_K::WEIGHTS * block + 128 * (lane / 8 % 2) + 4 * (lane % 8);
#pragma unroll
            for (int g = 0; g < 4; g++) {
                Four f[R];
                for (int r = 0; r < R; r++) {
                    float s = __shfl_sync(ALL_LANES, own[r], first + 2 * g);
                    f[r] = four(bytes(now[r], g), s, -(BIAS + 32.0f) * s);
                }
                along(f, x, column + 32 * g, sums);
            }
        }
    }
};
