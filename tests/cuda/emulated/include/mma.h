// Products of tiles for the emulator. Every lane holds a whole tile and computes all of it; so what a warp
// must do together is wrong here, too, if lanes do not meet before and behind it.

#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

inline float number(half x) { return (float)x; }
inline float number(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float number(float x) { return x; }

template <typename Use, int M, int N, int K, typename T, typename Layout = void> struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "tiles are 16 by 16 by 16 here");
    static constexpr int num_elements = 256;
    T x[256];  // row by row
};

inline unsigned place(unsigned i, unsigned j, unsigned ld, layout_t layout) {
    return layout == mem_row_major ? i * ld + j : j * ld + i;
}

// Tiles lie on borders of 32 bytes, their rows on borders of 16.
template <typename T> void aligned(const T *p, unsigned ld) {
    if ((uintptr_t)p % 32 || ld * sizeof(T) % 16) emulated::fail("a tile that is not aligned");
}

template <typename F, typename T> void fill_fragment(F &f, T value) {
    for (int i = 0; i < 256; i++) f.x[i] = value;
}

template <typename Use, typename T>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, row_major> &f, const T *p, unsigned ld) {
    aligned(p, ld);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) f.x[16 * i + j] = p[i * ld + j];
}

template <typename Use, typename T>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, col_major> &f, const T *p, unsigned ld) {
    aligned(p, ld);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) f.x[16 * i + j] = p[j * ld + i];
}

template <typename T>
void load_matrix_sync(fragment<accumulator, 16, 16, 16, T> &f, const T *p, unsigned ld, layout_t layout) {
    aligned(p, ld);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) f.x[16 * i + j] = p[place(i, j, ld, layout)];
}

template <typename T>
void store_matrix_sync(T *p, const fragment<accumulator, 16, 16, 16, T> &f, unsigned ld, layout_t layout) {
    aligned(p, ld);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) p[place(i, j, ld, layout)] = f.x[16 * i + j];
}

// Nearly all the time of kernels that use tiles goes here, however little the rest is optimised.
__attribute__((optimize("O3"), no_sanitize("alignment"))) inline void add_products(
    const float *__restrict left, const float *__restrict right, float *__restrict sums) {
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 16; j++) sums[16 * i + j] += left[16 * i + k] * right[16 * k + j];
}

template <typename A, typename B, typename C>
void mma_sync(C &d, const A &a, const B &b, const C &c) {
    float left[256], right[256], sums[256];
    for (int i = 0; i < 256; i++) {
        left[i] = number(a.x[i]);
        right[i] = number(b.x[i]);
        sums[i] = c.x[i];
    }
    add_products(left, right, sums);
    for (int i = 0; i < 256; i++) d.x[i] = sums[i];
}

}  // namespace wmma
}  // namespace nvcuda
