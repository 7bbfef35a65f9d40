// Rotations of pairs of columns of a head.

#pragma once

#include "common.cuh"

// One pair of a head, which may be one that does not turn; x and y may be the same.
__device__ __forceinline__ void turn_pair(const float *x, const float2 *turns, float *y, int pair, int turning,
                                          int interleaved) {
    if (pair >= turning) {
        y[2 * pair] = x[2 * pair], y[2 * pair + 1] = x[2 * pair + 1];
        return;
    }
    int a = interleaved ? 2 * pair : pair, b = interleaved ? a + 1 : pair + turning;
    float2 turn = turns[pair];
    float p = x[a], q = x[b];
    // Each rounded by itself, as the host does it.
    y[a] = __fsub_rn(__fmul_rn(p, turn.x), __fmul_rn(q, turn.y));
    y[b] = __fadd_rn(__fmul_rn(p, turn.y), __fmul_rn(q, turn.x));
}
