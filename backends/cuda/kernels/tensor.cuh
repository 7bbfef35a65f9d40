// Tensor cores and copies that run by themselves: what no C++ says. The emulator of the tests has the same
// functions.
//
// A fragment is spread over a warp; lane 4 g + t is in group g and has place t of it. Of a product of 16 rows
// by 8 columns, 16 deep, it has
//   a[0], a[1]: columns 2t and 2t + 1 of rows g and g + 8; a[2], a[3]: columns 2t + 8 and 2t + 9 of the same,
//   b[0], b[1]: rows 2t and 2t + 1, and 2t + 8 and 2t + 9, of column g,
//   c[0], c[1]: columns 2t and 2t + 1 of row g; c[2], c[3]: the same of row g + 8.
// Of bytes, a register has four: a product is 32 deep where one of halves is 16 deep.

#pragma once

#include "common.cuh"

#ifdef __CUDACC__

__device__ __forceinline__ uint_t shared_address(const void *p) { return (uint_t)__cvta_generic_to_shared(p); }

// c += a b in halves, sums in float32.
__device__ __forceinline__ void multiply(float (&c)[4], const uint_t (&a)[4], uint_t b0, uint_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same in bf16.
__device__ __forceinline__ void multiply_bf16(float (&c)[4], const uint_t (&a)[4], uint_t b0, uint_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a b in bytes with signs, 32 or 16 deep, as integers that begin with `c`.
__device__ __forceinline__ void multiply_bytes(int (&made)[4], const uint_t (&a)[4], uint_t b0, uint_t b1,
                                               const int (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=r"(made[0]), "=r"(made[1]), "=r"(made[2]), "=r"(made[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]),
          "r"(c[3]));
}

__device__ __forceinline__ void multiply_bytes(int (&made)[4], uint_t a0, uint_t a1, uint_t b,
                                               const int (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
        : "=r"(made[0]), "=r"(made[1]), "=r"(made[2]), "=r"(made[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// Four blocks of 8 by 8 halves; lane l says where row l % 8 of block l / 8 lies in shared memory. m[i] is the
// lane's two numbers of block i: columns 2t and 2t + 1 of row g.
__device__ __forceinline__ void load_blocks(uint_t (&m)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
}

// The same with rows and columns exchanged: rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void load_blocks_turned(uint_t (&m)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
}

// 16 or 8 bytes to shared memory, or as many zeros; they are there once `arrived` has returned.
__device__ __forceinline__ void send_16(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(there ? 16 : 0));
}

__device__ __forceinline__ void send_8(void *to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(there ? 8 : 0));
}

// What this thread has sent is there; others know of it after the next __syncthreads().
__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#else

#include "emulated_tensor.h"

#endif

// Two numbers as halves in one word, the first in its lower part.
__device__ __forceinline__ uint_t two_halves(float x, float y) {
    return (uint_t)__half_as_ushort(__float2half_rn(x)) | (uint_t)__half_as_ushort(__float2half_rn(y)) << 16;
}

// The sum over the four lanes of a group.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
