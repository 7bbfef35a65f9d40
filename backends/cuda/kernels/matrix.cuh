// Matrices of weights of one type (-DQUANT=Q4_K), and where products of them go.

#pragma once

#include "quants.cuh"

struct Output {
    const byte *w;      // [rows, cols]
    const float *bias;  // [rows] or null
    const float *add;   // as y, or null; may be y
    float *y;           // [tokens, ldy]
    int rows;
    int ldy;
};

__device__ __forceinline__ int64 row_bytes(int cols) { return (int64)(cols / QUANT::WEIGHTS) * QUANT::BYTES; }
