// Weights as bytes: a slab of a row, which is two runs of 32 columns, by two threads that are neighbours.
//
// Each type has
//   APART     columns from the beginning of the first run to that of the second,
//   SCALES    what a run is multiplied by,
//   read()    what thread `half` of the two reads of a slab of a row,
//   put()     its bytes to where the row of the slab lies, the second run 32 bytes behind the first, and what
//             run `half` is multiplied by.

#pragma once

#include "quants.cuh"

#define HIGHEST 0x80808080u  // bits

enum Scales {
    ONE,       // {scale, -}
    LEAST,     // {scale, what is added for each unit of the input}
    SIXTEENS,  // the scales of both halves
    // {scale, what is added for each unit of the input and of its half's minimum}: these are two bytes of each
    // run, 64 bytes behind the beginning of the row. Bytes of weights are times the scale of their half.
    LEASTS,
};

template <int N> struct Words {
    uint_t at[N];
};

// Words that have N others in them, which begin anywhere: taken apart only when they are needed, so that the
// thread computes until then. Up to three bytes before and after are read: rows are parts of larger memory.
template <int N> __device__ __forceinline__ Words<N + 1> words_around(const byte *p) {
    const uint_t *q = (const uint_t *)(p - ((uint64)p & 3));
    Words<N + 1> found;
#pragma unroll
    for (int i = 0; i < N; i++) found.at[i] = q[i];
    found.at[N] = (uint64)p & 3 ? q[N] : 0;
    return found;
}

template <int N> __device__ __forceinline__ Words<N - 1> words_from(const Words<N> &w, const byte *p) {
    int shift = 8 * (int)((uint64)p & 3);
    Words<N - 1> found;
#pragma unroll
    for (int i = 0; i < N - 1; i++) found.at[i] = (uint_t)(((uint64)w.at[i + 1] << 32 | w.at[i]) >> shift);
    return found;
}

__device__ __forceinline__ Words<4> aligned_words(const byte *p) {
    uint4 x = *(const uint4 *)p;
    return {{x.x, x.y, x.z, x.w}};
}

__device__ __forceinline__ uint_t low_nibbles(uint_t q) { return q & 0x0f0f0f0fu; }
__device__ __forceinline__ uint_t high_nibbles(uint_t q) { return q >> 4 & 0x0f0f0f0fu; }

// Four bytes below 128, less LESS of each. Nothing is carried from one to the next.
template <int LESS> __device__ __forceinline__ uint_t less(uint_t bytes) {
    return bytes + (128 - LESS) * 0x01010101u ^ HIGHEST;
}

__device__ __forceinline__ void put_16(byte *to, const Words<4> &w) {
    *(uint4 *)to = make_uint4(w.at[0], w.at[1], w.at[2], w.at[3]);
}

// Four bytes of weights' two runs, or halves of a run.
struct Split {
    uint_t low, high;
};

// 16 bytes to either place: `split` says which four of them a word becomes.
template <typename F> __device__ __forceinline__ void put_both(byte *to_low, byte *to_high, F split) {
    Words<4> low, high;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Split s = split(i);
        low.at[i] = s.low, high.at[i] = s.high;
    }
    put_16(to_low, low);
    put_16(to_high, high);
}

template <typename Q> struct Int8;

// --- runs with one scale, of nibbles: each thread has one run, and the low ones are its first half

struct Block {
    Words<5> q;         // the nibbles are in there
    uint_t more, head;  // `head` begins with the scale
};

template <typename Q> struct Runs32 {
    static const int APART = 32;
    static const Scales SCALES = Q::SCALES;
    typedef Block Raw;
    static __device__ __forceinline__ Raw read(const byte *row, int slab, int half) {
        return Q::block(row, 2 * slab + half);
    }
    static __device__ __forceinline__ void put(const Raw &raw, const byte *row, int slab, int half, byte *to,
                                               float2 *scale) {
        Words<4> q = words_from(raw.q, Q::nibbles(row, 2 * slab + half));
        byte *mine = to + 32 * half;
        put_both(mine, mine + 16, [&](int i) { return Q::split(q.at[i], raw.more >> 4 * i); });
        *scale = Q::scale(raw, 2 * slab + half);
    }
};

__device__ __forceinline__ float low_half(uint_t x) { return __half2float(__ushort_as_half(x & 0xffff)); }
__device__ __forceinline__ float high_half(uint_t x) { return __half2float(__ushort_as_half(x >> 16)); }

// The four lowest bits, each as the fifth of a byte.
__device__ __forceinline__ uint_t as_fifths(uint_t bits) {
    return (bits & 15) * 0x00204081u << 4 & 0x10101010u;
}

__device__ __forceinline__ Split with_fifths(uint_t q, uint_t bits) {
    return {low_nibbles(q) | as_fifths(bits), high_nibbles(q) | as_fifths(bits >> 16)};
}

struct ScaleOnly {
    static const Scales SCALES = ONE;
    static __device__ __forceinline__ float2 scale(const Block &b, int) { return {low_half(b.head), 0.0f}; }
};

struct ScaleAndLeast {
    static const Scales SCALES = LEAST;
    static __device__ __forceinline__ float2 scale(const Block &b, int) {
        return {low_half(b.head), high_half(b.head)};
    }
};

struct RunsOfQ4_0 : ScaleOnly {
    static __device__ __forceinline__ const byte *nibbles(const byte *row, int i) {
        return row + i * Q4_0::BYTES + 2;
    }
    static __device__ __forceinline__ Block block(const byte *row, int i) {
        const byte *p = row + i * Q4_0::BYTES;
        return {words_around<4>(p + 2), 0, *(const ushort_t *)p};
    }
    static __device__ __forceinline__ Split split(uint_t q, uint_t) {
        return {less<8>(low_nibbles(q)), less<8>(high_nibbles(q))};
    }
};

struct RunsOfQ4_1 : ScaleAndLeast {
    static __device__ __forceinline__ const byte *nibbles(const byte *row, int i) {
        return row + i * Q4_1::BYTES + 4;
    }
    static __device__ __forceinline__ Block block(const byte *row, int i) {
        const byte *p = row + i * Q4_1::BYTES;
        return {words_around<4>(p + 4), 0, aligned_word(p)};
    }
    static __device__ __forceinline__ Split split(uint_t q, uint_t) {
        return {low_nibbles(q), high_nibbles(q)};
    }
};

struct RunsOfQ5_0 : ScaleOnly {
    static __device__ __forceinline__ const byte *nibbles(const byte *row, int i) {
        return row + i * Q5_0::BYTES + 6;
    }
    static __device__ __forceinline__ Block block(const byte *row, int i) {
        const byte *p = row + i * Q5_0::BYTES;
        return {words_around<4>(p + 6), word_at(p + 2), *(const ushort_t *)p};
    }
    static __device__ __forceinline__ Split split(uint_t q, uint_t bits) {
        Split s = with_fifths(q, bits);
        return {less<16>(s.low), less<16>(s.high)};
    }
};

struct RunsOfQ5_1 : ScaleAndLeast {
    static __device__ __forceinline__ const byte *nibbles(const byte *row, int i) {
        return row + i * Q5_1::BYTES + 8;
    }
    static __device__ __forceinline__ Block block(const byte *row, int i) {
        const byte *p = row + i * Q5_1::BYTES;
        return {words_around<4>(p + 8), aligned_word(p + 4), aligned_word(p)};
    }
    static __device__ __forceinline__ Split split(uint_t q, uint_t bits) { return with_fifths(q, bits); }
};

// Nibbles that are places in a list, which lies in four words: eight of them at a time, by permutations whose
// selectors they are.
__device__ __forceinline__ uint_t four_listed(uint_t a, uint_t b, uint_t c, uint_t d, uint_t nibbles) {
    uint_t places = nibbles & 0x7777, upper = nibbles >> 1 & 0x4444;
    return __byte_perm(__byte_perm(a, b, places), __byte_perm(c, d, places), 0x3210 | upper);
}

__device__ __forceinline__ Split listed(uint_t a, uint_t b, uint_t c, uint_t d, uint_t q) {
    uint_t first = four_listed(a, b, c, d, q & 0xffff), second = four_listed(a, b, c, d, q >> 16);
    return {__byte_perm(first, second, 0x6420), __byte_perm(first, second, 0x7531)};
}

struct ListOfIQ4 {
    static __device__ __forceinline__ Split split(uint_t q, uint_t) {
        return listed(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, q);
    }
};

struct RunsOfIQ4_NL : ScaleOnly, ListOfIQ4 {
    static __device__ __forceinline__ const byte *nibbles(const byte *row, int i) {
        return RunsOfQ4_0::nibbles(row, i);
    }
    static __device__ __forceinline__ Block block(const byte *row, int i) {
        return RunsOfQ4_0::block(row, i);
    }
};

struct RunsOfIQ4_XS : ListOfIQ4 {
    static const Scales SCALES = ONE;
    static __device__ __forceinline__ const byte *nibbles(const byte *row, int i) {
        return row + i / 8 * IQ4_XS::BYTES + 8 + 16 * (i % 8);
    }
    static __device__ __forceinline__ Block block(const byte *row, int i) {
        const byte *p = row + i / 8 * IQ4_XS::BYTES;
        return {words_around<4>(nibbles(row, i)), aligned_word(p + 4), aligned_word(p)};
    }
    static __device__ __forceinline__ float2 scale(const Block &b, int i) {
        uint_t low = b.more >> 4 * (i % 8) & 15, high = b.head >> 16 + 2 * (i % 8) & 3;
        return {(float)((int)(low | high << 4) - 32) * low_half(b.head), 0.0f};
    }
};

struct RunsOfMXFP4 {
    static const Scales SCALES = ONE;
    static __device__ __forceinline__ const byte *nibbles(const byte *row, int i) {
        return row + i * MXFP4::BYTES + 1;
    }
    static __device__ __forceinline__ Block block(const byte *row, int i) {
        const byte *p = row + i * MXFP4::BYTES;
        return {words_around<4>(p + 1), 0, *p};
    }
    static __device__ __forceinline__ Split split(uint_t q, uint_t) {
        return listed(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, q);
    }
    static __device__ __forceinline__ float2 scale(const Block &b, int) {
        return {MXFP4::scale(b.head), 0.0f};
    }
};

template <> struct Int8<Q4_0> : Runs32<RunsOfQ4_0> {};
template <> struct Int8<Q4_1> : Runs32<RunsOfQ4_1> {};
template <> struct Int8<Q5_0> : Runs32<RunsOfQ5_0> {};
template <> struct Int8<Q5_1> : Runs32<RunsOfQ5_1> {};
template <> struct Int8<IQ4_NL> : Runs32<RunsOfIQ4_NL> {};
template <> struct Int8<IQ4_XS> : Runs32<RunsOfIQ4_XS> {};
template <> struct Int8<MXFP4> : Runs32<RunsOfMXFP4> {};

template <> struct Int8<Q8_0> {
    static const int APART = 32;
    static const Scales SCALES = ONE;
    struct Raw {
        Words<9> q;
        ushort_t d;
    };
    static __device__ __forceinline__ const byte *block(const byte *row, int slab, int half) {
        return row + (2 * slab + half) * Q8_0::BYTES;
    }
    static __device__ __forceinline__ Raw read(const byte *row, int slab, int half) {
        const byte *p = block(row, slab, half);
        return {words_around<8>(p + 2), *(const ushort_t *)p};
    }
    static __device__ __forceinline__ void put(const Raw &raw, const byte *row, int slab, int half, byte *to,
                                               float2 *scale) {
        Words<8> words = words_from(raw.q, block(row, slab, half) + 2);
        const uint_t *q = words.at;
        *(uint4 *)(to + 32 * half) = make_uint4(q[0], q[1], q[2], q[3]);
        *(uint4 *)(to + 32 * half + 16) = make_uint4(q[4], q[5], q[6], q[7]);
        *scale = make_float2(low_half(raw.d), 0.0f);
    }
};

// --- 256 weights in sub-blocks: each thread has a half of both runs

// Q4_K and Q5_K: low nibbles are one sub-block, high ones the next.
template <typename Q, bool FIFTH> struct PairsOfSubBlocks {
    static const int APART = 32;
    static const Scales SCALES = LEAST;
    struct Raw {
        Words<4> q, fifth;
        uint4 head;
    };
    static __device__ __forceinline__ Raw read(const byte *row, int slab, int half) {
        const byte *block = row + slab / 4 * Q::BYTES;
        Raw raw;
        raw.head = *(const uint4 *)block;
        raw.q = aligned_words(block + Q::BYTES - 128 + 32 * (slab % 4) + 16 * half);
        if (FIFTH) raw.fifth = aligned_words(block + 16 + 16 * half);
        return raw;
    }
    static __device__ __forceinline__ uint_t fifths(uint_t bits, int i) {
        return bits >> i << 4 & 0x10101010u;
    }

    static __device__ __forceinline__ void put(const Raw &raw, const byte *, int slab, int half, byte *to,
                                               float2 *scale) {
        put_both(to + 16 * half, to + 32 + 16 * half, [&](int i) {
            Split s = {low_nibbles(raw.q.at[i]), high_nibbles(raw.q.at[i])};
            if (!FIFTH) return s;
            uint_t bits = raw.fifth.at[i];
            return Split{s.low | fifths(bits, slab % 4 * 2), s.high | fifths(bits, slab % 4 * 2 + 1)};
        });
        int i = slab % 4 * 2 + half, shift = 8 * (i % 4);
        uint_t a = raw.head.y >> shift, b = raw.head.z >> shift, c = raw.head.w >> shift;
        uint_t s = i < 4 ? a & 63 : c & 15 | a >> 2 & 48, m = i < 4 ? b & 63 : c >> 4 & 15 | b >> 2 & 48;
        *scale = make_float2((float)(int)s * low_half(raw.head.x), (float)(int)m * -high_half(raw.head.x));
    }
};

template <> struct Int8<Q4_K> : PairsOfSubBlocks<Q4_K, false> {};
template <> struct Int8<Q5_K> : PairsOfSubBlocks<Q5_K, true> {};

// 16 bytes have low bits of two runs that are 64 columns apart; two slabs share the high bits.
template <> struct Int8<Q6_K> {
    static const int APART = 64;
    static const Scales SCALES = SIXTEENS;
    struct Raw {
        Words<5> low, high;
        ushort_t scales, d;
    };
    static __device__ __forceinline__ Raw read(const byte *row, int slab, int half) {
        const byte *block = row + slab / 4 * Q6_K::BYTES;
        int half_block = slab / 2 % 2, side = slab % 2;
        const byte *scales = block + 192 + 8 * half_block + 4 * half + 2 * side;
        return {words_around<4>(block + 64 * half_block + 32 * side + 16 * half),
                words_around<4>(block + 128 + 32 * half_block + 16 * half), *(const ushort_t *)scales,
                *(const ushort_t *)(block + 208)};
    }
    static __device__ __forceinline__ void put(const Raw &raw, const byte *row, int slab, int half, byte *to,
                                               float2 *scale) {
        const byte *block = row + slab / 4 * Q6_K::BYTES;  // all that is read begins as many words behind it
        Words<4> lows = words_from(raw.low, block), highs = words_from(raw.high, block);
        put_both(to + 16 * half, to + 32 + 16 * half, [&](int i) {
            uint_t low = lows.at[i], high = highs.at[i] >> slab % 2 * 2;
            return Split{less<32>(low_nibbles(low) | high << 4 & 0x30303030u),
                         less<32>(high_nibbles(low) | high & 0x30303030u)};
        });
        float d = low_half(raw.d);
        *scale = make_float2((float)(signed char)raw.scales * d, (float)(signed char)(raw.scales >> 8) * d);
    }
};

// Two bits of four runs in 32 bytes, the third bits of all in 32 others.
template <> struct Int8<Q3_K> {
    static const int APART = 32;
    static const Scales SCALES = SIXTEENS;
    struct Raw {
        Words<5> low, high;
        float2 scale;
    };
    static __device__ __forceinline__ Raw read(const byte *row, int slab, int half) {
        const byte *block = row + slab / 4 * Q3_K::BYTES;
        int first = 4 * (slab % 4) + 2 * half;  // of the block's scales
        return {words_around<4>(block + 32 + 32 * (slab / 2 % 2) + 16 * half), words_around<4>(block + 16 * half),
                {Q3_K::scale(block, first), Q3_K::scale(block, first + 1)}};
    }
    static __device__ __forceinline__ uint_t run(uint_t low, uint_t high, int i) {
        return less<4>(low >> i % 4 * 2 & 0x03030303u | high >> i << 2 & 0x04040404u);
    }
    static __device__ __forceinline__ void put(const Raw &raw, const byte *row, int slab, int half, byte *to,
                                               float2 *scale) {
        const byte *block = row + slab / 4 * Q3_K::BYTES;
        Words<4> low = words_from(raw.low, block), high = words_from(raw.high, block);
        int first = slab % 4 * 2;  // of eight runs
        put_both(to + 16 * half, to + 32 + 16 * half, [&](int i) {
            return Split{run(low.at[i], high.at[i], first), run(low.at[i], high.at[i], first + 1)};
        });
        *scale = raw.scale;
    }
};

// Two bits of four runs in 32 bytes. Times its scale, which is below 16, a weight still is a byte.
template <> struct Int8<Q2_K> {
    static const int APART = 32;
    static const Scales SCALES = LEASTS;
    struct Raw {
        Words<4> q;
        byte first, second;  // scale and minimum of either run's half
        uint_t head;
    };
    static __device__ __forceinline__ Raw read(const byte *row, int slab, int half) {
        const byte *block = row + slab / 4 * Q2_K::BYTES, *scales = block + 4 * (slab % 4) + half;
        const uint_t *q = (const uint_t *)(block + 16 + 32 * (slab / 2 % 2) + 16 * half);
        return {{q[0], q[1], q[2], q[3]}, scales[0], scales[2], aligned_word(block + 80)};
    }
    static __device__ __forceinline__ void put(const Raw &raw, const byte *, int slab, int half, byte *to,
                                               float2 *scale) {
        put_both(to + 16 * half, to + 32 + 16 * half, [&](int i) {
            uint_t q = raw.q.at[i] >> slab % 2 * 4;
            return Split{(q & 0x03030303u) * (raw.first & 15u), (q >> 2 & 0x03030303u) * (raw.second & 15u)};
        });
        to[64 + half] = raw.first >> 4;
        to[66 + half] = raw.second >> 4;
        *scale = make_float2(low_half(raw.head), -high_half(raw.head));
    }
};
