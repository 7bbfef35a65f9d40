// What a pass of many tokens makes of its experts' work: pairs of a token and a place, sorted by expert, cut
// into tiles of pairs of one expert.

#pragma once

#include "common.cuh"

#define TILE 128  // pairs of a tile at most

struct Tile {
    int expert;  // among those that are held; their number: pairs of no expert; -1: no tile
    int begin;   // of the sorted pairs
    int count;
    int unused;
};

// What a block made of a tile with rows of down from `begin` on, to the pairs it belongs to, each times its
// share; zeros for pairs of no expert. Lanes have numbers of it as tensor.cuh says.
template <typename Part>
__device__ __forceinline__ void write_pairs(const Part &part, const Tile &from, int held, const int *order,
                                            const float *shares, const float *bias, float *y, int begin,
                                            int width) {
    Tile tile = from;
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int f = 0; f < TILE / 32; f++)
        for (int i = 0; i < 2; i++) {
            int row = part.row(f) + lane / 4 + 8 * i;
            if (row >= tile.count) continue;
            int pair = order[tile.begin + row];
            float share = shares[pair];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                int output = begin + part.output(n) + lane % 4 * 2;
                if (output >= width) continue;
                float2 made = {part.sums[f][n][2 * i], part.sums[f][n][2 * i + 1]};
                if (bias && tile.expert < held) {
                    float2 b = *(const float2 *)(bias + (int64)tile.expert * width + output);
                    made = {made.x + b.x, made.y + b.y};
                }
                if (tile.expert < held) made = {share * made.x, share * made.y};  // else zeros
                *(float2 *)(y + (int64)pair * width + output) = made;
            }
        }
}
