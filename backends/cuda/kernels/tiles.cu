// Experts of many tokens: products of tiles of pairs (grouping.cu) with quantised weights, read as they lie
// in their file; compiled once for each type (-DQUANT=Q4_K).
//
// A block multiplies up to 128 rows by 128 rows of weights, 64 columns (a slab) at a time: both lie in shared
// memory as bf16, and eight warps multiply them on tensor cores, sums in float32. A weight is unpacked once for
// a tile, in about ten instructions that 128 rows share. While a slab is multiplied the next one comes: the
// input by copies that run by themselves, to the other of two places; weights through registers, and they are
// put down once all warps have done with those before them. So 48 KB and 128 registers let two blocks run at
// once on any GPU, and one computes while the other waits.
//
// Blocks of a tile follow each other: they share their rows of the input, and blocks of the next tile often
// the expert, through the second cache. Warps take fragments of 16 rows in turns, and skip those behind the
// tile's pairs: a tile of 32 rows takes a quarter of the products.

#include "matrix.cuh"
#include "tensor.cuh"
#include "tile.cuh"

#define MANY_THREADS 256
#define OUTPUTS 128     // of a block: all of one matrix, or half of each of two
#define SLAB 64         // columns of a row that lie in shared memory at once
#define PIECES_SLAB 8   // pieces of eight weights
#define ROWS_STEP (MANY_THREADS / PIECES_SLAB)
#define LOADS (TILE / ROWS_STEP)  // rows of a slab that one thread brings

// A slab is eight pieces, which is two runs of 32 columns. The second begins APART columns after the first.
template <typename Q> struct Runs {
    static const int APART = 32;
};
template <> struct Runs<Q6_K> {
    static const int APART = 64;
};

__device__ __forceinline__ int first_column(int slab) {
    return Runs<QUANT>::APART == 32 ? SLAB * slab : 128 * (slab / 2) + 32 * (slab % 2);
}

// A slab has two places for the input and one for weights. Eights of a row lie in another order in each of
// eight rows, so that those which are read at once lie in different banks.
__device__ __forceinline__ __nv_bfloat16 *inputs(int which) {
    return (__nv_bfloat16 *)shared_memory + which * TILE * SLAB;
}
__device__ __forceinline__ __nv_bfloat16 *unpacked() { return inputs(2); }
__device__ __forceinline__ int spot(int row, int eighth) { return row * SLAB + 8 * (eighth ^ row % 8); }

#define NO_ROW 0xffffffffu

// Where a thread's rows begin: those of the input, by numbers, and of the weights, by bytes, the first half
// of them in `first` and the others in `second`. Short numbers, because there are no registers to spare.
struct Rows {
    const __nv_bfloat16 *x;
    const byte *first, *second;
    uint_t x_at[LOADS], w_at[LOADS];
    static __device__ __forceinline__ int row(int i) { return threadIdx.x / PIECES_SLAB + ROWS_STEP * i; }
};

// Sends off this thread's eighth of some rows of the input; zeros for rows that are not there, and behind
// their end: the last slab may be half empty.
__device__ __forceinline__ void send(const Rows &rows, int slab, int cols) {
    int eighth = threadIdx.x % PIECES_SLAB;
    int column = first_column(slab) + (eighth < 4 ? 8 * eighth : Runs<QUANT>::APART + 8 * (eighth - 4));
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        bool there = column < cols && rows.x_at[i] != NO_ROW;
        send_16(inputs(slab % 2) + spot(Rows::row(i), eighth), rows.x + (there ? rows.x_at[i] + column : 0), there);
    }
}

// The same eighth of a row of weights.
__device__ __forceinline__ uint4 bring(const Rows &rows, int i, int slab, int cols) {
    int piece = PIECES_SLAB * slab + threadIdx.x % PIECES_SLAB, block = piece / QUANT::PIECES;
    if (block * QUANT::WEIGHTS >= cols) return make_uint4(0, 0, 0, 0);
    const byte *w = (i < LOADS / 2 ? rows.first : rows.second) + rows.w_at[i];
    Eight e = QUANT::unpack(w + block * QUANT::BYTES, piece % QUANT::PIECES);
    return make_uint4(two_bf16(e.w[0], e.w[1]), two_bf16(e.w[2], e.w[3]), two_bf16(e.w[4], e.w[5]),
                      two_bf16(e.w[6], e.w[7]));
}

// Where the first and the last four weights of this thread's piece lie in its rows of a slab: the same in all.
__device__ __forceinline__ int2 places(const byte *w) {
    int i = threadIdx.x % PIECES_SLAB, begin = i / QUANT::PIECES * QUANT::WEIGHTS;
    Eight e = QUANT::unpack(w, i % QUANT::PIECES);  // of any block
    int a = begin + e.a, b = begin + e.b - (Runs<QUANT>::APART - 32), row = Rows::row(0);
    return {spot(row, a / 8) + a % 8, spot(row, b / 8) + b % 8};
}

__device__ __forceinline__ void put(const uint4 (&w)[LOADS], int2 place) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {  // steps of whole eights of rows
        *(uint2 *)(unpacked() + ROWS_STEP * SLAB * i + place.x) = make_uint2(w[i].x, w[i].y);
        *(uint2 *)(unpacked() + ROWS_STEP * SLAB * i + place.y) = make_uint2(w[i].z, w[i].w);
    }
}

#define HALVES 2     // of the warps: they take fragments of rows in turns
#define FRAGMENTS 4  // of 16 rows, of a warp
#define COLUMNS 4    // of eight outputs each, of a warp: 16 of either half of the outputs

// What a warp makes: sums[f][0] and [1] of the block's first 64 outputs, [2] and [3] of the others. Lanes have
// numbers of it as tensor.cuh says.
struct Part {
    float sums[FRAGMENTS][COLUMNS][4];
    int half, quarter, count;
    __device__ __forceinline__ Part(int pairs) {
        int warp = threadIdx.x / WARP;
        half = warp % HALVES, quarter = warp / HALVES, count = pairs;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
            for (int n = 0; n < COLUMNS; n++)
                for (int j = 0; j < 4; j++) sums[f][n][j] = 0.0f;
    }
    __device__ __forceinline__ int row(int f) const { return 16 * (HALVES * f + half); }
    __device__ __forceinline__ int output(int n) const { return OUTPUTS / 2 * (n / 2) + 16 * quarter + n % 2 * 8; }
    // The 16 columns from 16 i on of a slab whose input lies at `x`.
    __device__ __forceinline__ void multiply(const __nv_bfloat16 *x, int i) {
        int lane = threadIdx.x % WARP;
        uint_t b[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++)
            load_blocks(b[n], unpacked() + spot(output(2 * n) + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
            if (row(f) >= count) break;  // the same for all lanes
            uint_t a[4];
            load_blocks(a, x + spot(row(f) + lane % 16, 2 * i + lane / 16));
#pragma unroll
            for (int n = 0; n < COLUMNS; n++)
                multiply_bf16(sums[f][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
};

// All products of a tile with a block's rows of weights.
__device__ __forceinline__ void multiply(const Rows &rows, int cols, Part &part) {
    int slabs = (cols + SLAB - 1) / SLAB;
    int2 place = places(rows.first);
    uint4 w[LOADS];
    send(rows, 0, cols);
#pragma unroll
    for (int i = 0; i < LOADS; i++) w[i] = bring(rows, i, 0, cols);
    put(w, place);
    arrived();
    __syncthreads();
    for (int s = 0; s < slabs; s++) {
        bool more = s + 1 < slabs;
        if (more) send(rows, s + 1, cols);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if (more) w[i] = bring(rows, i, s + 1, cols);
            part.multiply(inputs(s % 2), i);
        }
        if (!more) break;
        __syncthreads();
        put(w, place);
        arrived();
        __syncthreads();
    }
}

// inner[place] = act(x[token] @ gate.T) * (x[token] @ up.T) in bf16, by sorted pairs; none for pairs of no
// expert. Grid: n_ff / 64 blocks for each tile.
extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2)
experts_gated_many(const byte *gate, const byte *up, const float *gate_bias, const float *up_bias,
                   const int *order, const Tile *tiles, int held, __nv_bfloat16 *inner,
                   const __nv_bfloat16 *x, int n_ff, int cols, int n_used, int act) {
    int blocks = (n_ff + OUTPUTS / 2 - 1) / (OUTPUTS / 2), begin = blockIdx.x % blocks * (OUTPUTS / 2);
    Tile tile = tiles[blockIdx.x / blocks];
    if (tile.expert < 0 || tile.expert >= held) return;  // a whole block
    int64 skip = row_bytes(cols) * n_ff * tile.expert;
    Rows rows = {x, gate + skip, up + skip};
    for (int i = 0; i < LOADS; i++) {
        int row = Rows::row(i);
        rows.x_at[i] = row < tile.count ? (uint_t)(order[tile.begin + row] / n_used) * cols : NO_ROW;
        rows.w_at[i] = (uint_t)row_bytes(cols) * min(begin + row % (OUTPUTS / 2), n_ff - 1);
    }
    Part part(tile.count);
    multiply(rows, cols, part);
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < COLUMNS / 2; n++) {
        int output = begin + part.output(n) + lane % 4 * 2;
        if (output >= n_ff) continue;
        int64 bias = (int64)tile.expert * n_ff + output;
        float2 g = {0.0f, 0.0f}, u = {0.0f, 0.0f};
        if (gate_bias) g = *(const float2 *)(gate_bias + bias), u = *(const float2 *)(up_bias + bias);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
            for (int i = 0; i < 2; i++) {
                int row = part.row(f) + lane / 4 + 8 * i;
                if (row >= tile.count) continue;
                const float *gates = part.sums[f][n] + 2 * i, *ups = part.sums[f][n + 2] + 2 * i;
                float x = joined(gates[0] + g.x, ups[0] + u.x, act), y = joined(gates[1] + g.y, ups[1] + u.y, act);
                *(uint_t *)(inner + (int64)(tile.begin + row) * n_ff + output) = two_bf16(x, y);
            }
    }
}

// y[pair] = share * (inner[place] @ down.T); zeros for pairs of no expert. Grid: width / 128 blocks a tile.
extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2)
experts_down_many(const byte *down, const float *bias, const int *order, const Tile *tiles, int held,
                  const float *shares, float *y, const __nv_bfloat16 *inner, int width, int n_ff) {
    int blocks = (width + OUTPUTS - 1) / OUTPUTS, begin = blockIdx.x % blocks * OUTPUTS;
    tiles += blockIdx.x / blocks;
    int expert = tiles->expert, count = tiles->count;
    if (expert < 0) return;
    Part part(count);
    if (expert < held) {  // the same for all threads
        const byte *mine = down + row_bytes(n_ff) * width * expert;
        Rows rows = {inner, mine, mine};
        for (int i = 0; i < LOADS; i++) {
            int row = Rows::row(i);
            rows.x_at[i] = row < count ? (uint_t)(tiles->begin + row) * n_ff : NO_ROW;
            rows.w_at[i] = (uint_t)row_bytes(n_ff) * min(begin + row, width - 1);
        }
        multiply(rows, n_ff, part);
    }
    write_pairs(part, *tiles, held, order, shares, bias, y, begin, width);  // it reads the tile again
}
