// tensor.cuh for the emulator. Lanes show each other where their registers are, and meet before these go.
// What was sent to shared memory is not there before its thread has waited: until then there are no numbers.

#pragma once

#include "cuda_fp16.h"

namespace emulated {

struct Sent { void *to; const void *from; size_t size; bool there; };
static std::vector<Sent> sent[1024];  // by thread

inline half half_of(unsigned word, int i) { return __ushort_as_half((unsigned short)(word >> 16 * i)); }

template <typename T> struct Shown {
    int turn;
    explicit Shown(const T *mine) {
        turn = self->turn ^= 1;
        self->slots[turn] = (uint64_t)mine;
        meet_warp(7);
    }
    const T *of(int lane) const { return (const T *)mate(lane).slots[turn]; }
    ~Shown() { meet_warp(8); }
};

struct Factors { unsigned a[4], b[2]; };

}  // namespace emulated

namespace emulated {

// Products of 16 bits; `number` says which number the lower 16 bits of a word stand for.
template <typename F>
inline void multiply_16_bits(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, F number) {
    Factors mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    Shown<Factors> shown(&mine);
    int group = lane() / 4, place = lane() % 4;
    for (int i = 0; i < 4; i++) {
        int row = group, column = 2 * place + i % 2;
        for (int k = 0; k < 16; k++) {
            unsigned left = shown.of(4 * row + k % 8 / 2)->a[i / 2 + 2 * (k / 8)];
            unsigned right = shown.of(4 * column + k % 8 / 2)->b[k / 8];
            c[i] += number(left >> 16 * (k % 2)) * number(right >> 16 * (k % 2));
        }
    }
}

}  // namespace emulated

inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulated::multiply_16_bits(c, a, b0, b1, [](unsigned x) { return (float)emulated::half_of(x, 0); });
}

inline void multiply_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulated::multiply_16_bits(c, a, b0, b1, [](unsigned x) { return __uint_as_float(x << 16); });
}

namespace emulated {

// Products of bytes, `words` of a row deep.
inline void multiply_words(int (&made)[4], const unsigned *a, const unsigned *b, int words, const int (&c)[4]) {
    Factors mine = {};
    memcpy(mine.a, a, sizeof(unsigned) * 2 * words);
    memcpy(mine.b, b, sizeof(unsigned) * words);
    Shown<Factors> shown(&mine);
    int group = lane() / 4, place = lane() % 4;
    for (int i = 0; i < 4; i++) {
        int row = group, column = 2 * place + i % 2;
        made[i] = c[i];
        for (int k = 0; k < 4 * words; k++) {
            unsigned left = shown.of(4 * row + k % 4)->a[i / 2 + k / 4 * 2];
            unsigned right = shown.of(4 * column + k % 4)->b[k / 4];
            for (int n = 0; n < 32; n += 8) made[i] += (signed char)(left >> n) * (signed char)(right >> n);
        }
    }
}

}  // namespace emulated

inline void multiply_bytes(int (&made)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const int (&c)[4]) {
    unsigned b[2] = {b0, b1};
    emulated::multiply_words(made, a, b, 2, c);
}

inline void multiply_bytes(int (&made)[4], unsigned a0, unsigned a1, unsigned b, const int (&c)[4]) {
    unsigned a[2] = {a0, a1};
    emulated::multiply_words(made, a, &b, 1, c);
}

inline void load_blocks_as(unsigned (&m)[4], const void *row, bool turned) {
    if ((uintptr_t)row % 16) emulated::fail("a row of a block that is not aligned");
    emulated::Shown<half> shown((const half *)row);
    int group = emulated::lane() / 4, place = emulated::lane() % 4;
    for (int i = 0; i < 4; i++) {
        unsigned short two[2];
        for (int j = 0; j < 2; j++) {
            int r = turned ? 2 * place + j : group, column = turned ? group : 2 * place + j;
            memcpy(&two[j], shown.of(8 * i + r) + column, 2);
        }
        m[i] = two[0] | (unsigned)two[1] << 16;
    }
}

inline void load_blocks(unsigned (&m)[4], const void *row) { load_blocks_as(m, row, false); }
inline void load_blocks_turned(unsigned (&m)[4], const void *row) { load_blocks_as(m, row, true); }

inline void send_bytes(void *to, const void *from, size_t size, bool there) {
    bool aligned = (uintptr_t)to % size == 0 && (!there || (uintptr_t)from % size == 0);
    if (!aligned) emulated::fail("%zu bytes that are not aligned", size);
    memset(to, 0xff, size);
    emulated::sent[threadIdx.x].push_back({to, from, size, there});
}

inline void send_16(void *to, const void *from, bool there) { send_bytes(to, from, 16, there); }
inline void send_8(void *to, const void *from, bool there) { send_bytes(to, from, 8, there); }

inline void arrived() {
    for (const emulated::Sent &s : emulated::sent[threadIdx.x]) {
        if (s.there) memcpy(s.to, s.from, s.size);
        else memset(s.to, 0, s.size);
    }
    emulated::sent[threadIdx.x].clear();
}
