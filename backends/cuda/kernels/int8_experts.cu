// Experts of many tokens in bytes: products of tiles of pairs (grouping.cu) with quantised weights as they lie
// in their file (int8_tiles.cuh); compiled once for each type (-DQUANT=Q4_K).
//
// A tile has up to 128 pairs of one expert. Fragments behind its pairs are skipped, so a tile of 32 takes a
// quarter of the products; its weights are unpacked all the same. What passes between both products is
// rounded to bytes as it is made: a block has whole runs of 32 of it.

#include "int8_tiles.cuh"
#include "matrix.cuh"
#include "tile.cuh"

#define THREADS (2 * TILE)
#define HALF (TILE / 2)      // outputs of a block, of one matrix of two
#define HALF_LD (HALF + 4)
#define NO_ROW 0xffffffffu

// Rows of the input that lie anywhere: where, is in shared memory behind the slabs.
struct Listed {
    const byte *rows;
    int cols;
    static __device__ __forceinline__ uint_t *list() {
        return (uint_t *)(shared_memory + 2 * sizeof(Slab<TILE>));
    }
    __device__ __forceinline__ bool find(int row, uint_t &at) const {
        uint_t found = list()[row];
        at = found == NO_ROW ? 0 : found;
        return found != NO_ROW;
    }
};

// inner[place] = act(x[token] @ gate.T) * (x[token] @ up.T) in bytes, by sorted pairs; none for pairs of no
// expert. n_ff is a multiple of 64. Grid: n_ff / 64 blocks for each tile. Shared memory: two slabs and
// the list.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
experts_gated_int8(const byte *gate, const byte *up, const float *gate_bias, const float *up_bias,
                   const int *order, const Tile *tiles, int held, byte *inner, const byte *x, int n_ff,
                   int cols, int n_used, int act) {
    int blocks = n_ff / HALF, begin = blockIdx.x % blocks * HALF;
    Tile tile = tiles[blockIdx.x / blocks];
    if (tile.expert < 0 || tile.expert >= held) return;  // a whole block
    if (threadIdx.x < TILE) {
        bool there = threadIdx.x < tile.count;
        uint_t token = there ? order[tile.begin + threadIdx.x] / n_used : 0;
        Listed::list()[threadIdx.x] = there ? token * int8_row(cols) : NO_ROW;
    }
    int brought = threadIdx.x / 2;
    const byte *mine = brought < HALF ? gate : up;
    mine += row_bytes(cols) * ((int64)n_ff * tile.expert + begin + brought % HALF);
    Part<TILE> part(tile.count);
    multiply(Listed{x, cols}, mine, part);  // its first threads wait for each other before they read the list
    float *made = (float *)shared_memory;   // [TILE][HALF_LD]
    int64 biases = (int64)tile.expert * n_ff + begin;
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < COLUMNS_OF_WARP / 2; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int output = part.output(n) + lane % 4 * 2 + j;
            float g = gate_bias ? gate_bias[biases + output] : 0.0f, u = up_bias ? up_bias[biases + output] : 0.0f;
#pragma unroll
            for (int f = 0; f < Part<TILE>::FRAGMENTS; f++) {
                if (f >= part.fragments) break;
                for (int i = 0; i < 2; i++)
                    made[(part.row(f) + lane / 4 + 8 * i) * HALF_LD + output] =
                        joined(part.sums[f][n][2 * i + j] + g, part.sums[f][n + 2][2 * i + j] + u, act);
            }
        }
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * part.fragments * (HALF / 4); i += THREADS) {  // whole warps
        int row = i / (HALF / 4), four = i % (HALF / 4);
        byte *to = inner + (int64)(tile.begin + row) * int8_row(n_ff);
        put_rounded(*(const float4 *)(made + row * HALF_LD + 4 * four), row < tile.count, to, n_ff,
                    begin / 4 + four);
    }
}

// y[pair] = share * (inner[place] @ down.T); zeros for pairs of no expert. Grid: width / 128 blocks for each
// tile; width is even. Shared memory: two slabs.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
experts_down_int8(const byte *down, const float *bias, const int *order, const Tile *tiles, int held,
                  const float *shares, float *y, const byte *inner, int width, int n_ff) {
    int blocks = (width + TILE - 1) / TILE, begin = blockIdx.x % blocks * TILE;
    tiles += blockIdx.x / blocks;
    int expert = tiles->expert, count = tiles->count;
    if (expert < 0) return;
    Part<TILE> part(count);
    if (expert < held) {  // the same for all threads
        int64 row = (int64)width * expert + min(begin + (int)threadIdx.x / 2, width - 1);
        const byte *x = inner + (int64)tiles->begin * int8_row(n_ff);
        multiply(Following{x, n_ff, 0, count}, down + row_bytes(n_ff) * row, part);
    }
    write_pairs(part, *tiles, held, order, shares, bias, y, begin, width);  // it reads the tile again
}
