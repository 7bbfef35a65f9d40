// Sorts pairs of a token and a place by expert, stable, and cuts them into tiles. How many pairs an expert
// has is known on the device only, so there are always as many tiles as there could be at most.
//
// A block for each expert, and one for the pairs of experts that are not held. Every block reads all choices:
// 8192 tokens with 8 experts are 256 KB, which lie in the second cache. So no block waits for another.

#include "tile.cuh"

#define EACH 8  // pairs that follow each other, of one thread at a time

__device__ __forceinline__ int group_of(int chosen, int first, int held) {
    int e = chosen - first;
    return e >= 0 && e < held ? e : held;
}

// The sum over a block; `parts` has room for an int for each warp and is free afterwards.
__device__ __forceinline__ int block_total(int x, int *parts) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    int total = 0;
    for (int i = 0; i < blockDim.x / WARP; i++) total += parts[i];
    __syncthreads();
    return total;
}

// The sum over the threads before, and over all of them.
__device__ __forceinline__ int2 before_and_total(int x, int *parts) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, sum = x;
    for (int step = 1; step < WARP; step *= 2) {
        int other = __shfl_sync(ALL_LANES, sum, lane - step & WARP - 1);
        if (lane >= step) sum += other;
    }
    if (lane == WARP - 1) parts[warp] = sum;
    __syncthreads();
    int before = sum - x, total = 0;
    for (int i = 0; i < blockDim.x / WARP; i++) {
        if (i < warp) before += parts[i];
        total += parts[i];
    }
    __syncthreads();
    return {before, total};
}

// order[i] = the pair at place i; tiles[most] as above. Grid: held + 1. Shared memory: held + 1 ints, and one
// for each warp.
extern "C" __global__ void group_pairs(const int *chosen, int first, int held, int pairs, int *order,
                                       Tile *tiles, int most) {
    int *counts = (int *)shared_memory, *parts = counts + held + 1, mine = blockIdx.x;
    for (int i = threadIdx.x; i <= held; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        int group = group_of(chosen[i], first, held);
        if (group <= mine) atomicAdd(&counts[group], 1);
    }
    __syncthreads();
    int begin = 0, tile = 0, count = counts[mine], made = (count + TILE - 1) / TILE;
    for (int i = threadIdx.x; i < mine; i += blockDim.x) {
        begin += counts[i];
        tile += (counts[i] + TILE - 1) / TILE;
    }
    begin = block_total(begin, parts);
    tile = block_total(tile, parts);
    for (int i = threadIdx.x; i < made; i += blockDim.x)
        tiles[tile + i] = {mine, begin + TILE * i, min(TILE, count - TILE * i), 0};
    if (mine == held)
        for (int i = tile + made + threadIdx.x; i < most; i += blockDim.x) tiles[i] = {-1, 0, 0, 0};

    for (int from = 0; from < pairs && count; from += EACH * blockDim.x) {  // the same for all threads
        int pair = from + EACH * threadIdx.x, found = 0;
        for (int i = 0; i < EACH; i++)
            if (pair + i < pairs && group_of(chosen[pair + i], first, held) == mine) found |= 1 << i;
        int2 places = before_and_total(__popc(found), parts);
        int *to = order + begin + places.x;
        for (int i = 0; i < EACH; i++)
            if (found >> i & 1) *to++ = pair + i;
        begin += places.y;
    }
}
