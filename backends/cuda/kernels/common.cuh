// What all kernels share. Rules, so that the tests can run the same sources on a CPU:
// - shared memory is only the dynamic one, by the name `shared_memory`;
// - kernels are extern "C" __global__ void, and every thread of a block reaches the same __syncthreads();
// - a warp is 32 threads, and all of them take part in every warp_* function;
// - arithmetic whose bits matter is written with fmaf, so that no compiler decides about it.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char byte;
typedef unsigned short ushort_t;
typedef unsigned int uint_t;
typedef long long int64;
typedef unsigned long long uint64;

#define WARP 32
#define ALL_LANES 0xffffffffu
#define INFINITY_F __int_as_float(0x7f800000)

extern __shared__ __align__(128) byte shared_memory[];

// Two numbers as bf16 in one word, the first in its lower part.
__device__ __forceinline__ uint_t two_bf16(float x, float y) {
    return (uint_t)__bfloat16_as_ushort(__float2bfloat16(x)) |
           (uint_t)__bfloat16_as_ushort(__float2bfloat16(y)) << 16;
}

// Sums and maxima over a warp; every lane gets the result, and the order of additions is always the same.
__device__ __forceinline__ float warp_sum(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// The sum over a block of whole warps. `parts` has room for a float for each warp and is free afterwards.
__device__ __forceinline__ float block_sum(float x, float *parts) {
    x = warp_sum(x);
    int warps = blockDim.x / WARP;
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < warps; i++) total += parts[i];
    __syncthreads();
    return total;
}

// --- gates

#define CLAMP 7.0f  // of gpt-oss' experts
#define CLAMP_STEEPNESS 1.702f

__device__ __forceinline__ float activated(float x, int act) {
    if (act == 0) return x / (1.0f + expf(-x));
    if (act == 2) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// act(g) * u; act: 0 silu, 1 gelu by tanh, 2 gelu by erf, 3 as gpt-oss has it.
__device__ __forceinline__ float joined(float g, float u, int act) {
    if (act != 3) return activated(g, act) * u;
    g = fminf(g, CLAMP);
    return g / (1.0f + expf(-CLAMP_STEEPNESS * g)) * (fminf(fmaxf(u, -CLAMP), CLAMP) + 1.0f);
}
