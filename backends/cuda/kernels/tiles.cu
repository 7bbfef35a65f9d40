// Experts of many tokens: products of tiles of pairs (grouping.cu) with quantised weights, read as they lie
// in their file; compiled once for each type (-DQUANT=Q4_K).
//
// A block multiplies up to 128 rows by 128 rows of weights, 64 columns (a slab) at a time: what was gathered
// and unpacked lies in shared memory as bf16, and eight warps multiply it on tensor cores, sums in float32. A
// weight is unpacked once for a tile, in about ten instructions that 128 rows share, so a slab takes a warp
// some 800 instructions: at four a clock, 132 multiprocessors could make 300 TFLOP/s. While a slab is
// multiplied the next one comes, through registers, into the other half of the memory, so a slab takes one
// __syncthreads(); 128 registers let two blocks run at once, and one computes while the other waits.
//
// Blocks of a tile follow each other: they share their rows of the input, and blocks of the next tile often
// the expert, through the second cache. Warps take fragments of 16 rows in turns, and skip those behind the
// tile's pairs: a tile of 32 rows takes a quarter of the products.

#include "matrix.cuh"
#include "tensor.cuh"
#include "tile.cuh"

#define MANY_THREADS 256
#define OUTPUTS 128     // of a block: so many of one matrix, or half of them of two
#define SLAB 64         // columns of a row that lie in shared memory at once
#define SLAB_LD 72      // eight more, so that rows begin at different banks
#define PIECES_SLAB 8   // pieces of eight weights
#define ROWS_STEP (MANY_THREADS / PIECES_SLAB)
#define LOADS (TILE / ROWS_STEP)  // rows of a slab that one thread brings
#define OUT_LD (OUTPUTS + 4)

// A slab is eight pieces, which is two runs of 32 columns. The second run begins so many behind the first.
template <typename Q> struct Runs {
    static const int APART = 32;
};
template <> struct Runs<Q6_K> {
    static const int APART = 64;
};

__device__ __forceinline__ int first_column(int slab) {
    return Runs<QUANT>::APART == 32 ? SLAB * slab : 128 * (slab / 2) + 32 * (slab % 2);
}

__device__ __forceinline__ uint4 eight(const float *x) {
    return make_uint4(two_bf16(x[0], x[1]), two_bf16(x[2], x[3]), two_bf16(x[4], x[5]), two_bf16(x[6], x[7]));
}

// The slabs in shared memory; there are two of each.
struct Slabs {
    __nv_bfloat16 *x, *w;  // [TILE][SLAB_LD], [OUTPUTS][SLAB_LD]
    __device__ __forceinline__ Slabs(int which) {
        x = (__nv_bfloat16 *)shared_memory + which * (TILE + OUTPUTS) * SLAB_LD;
        w = x + TILE * SLAB_LD;
    }
};

#define NO_ROW 0xffffffffu

// Where a thread's rows begin: those of the input, by numbers, and of the weights, by bytes, the first half
// of them in `first` and the others in `second`. Short numbers, because there are no registers to spare.
struct Rows {
    const __nv_bfloat16 *x;
    const byte *first, *second;
    uint_t x_at[LOADS], w_at[LOADS];
    static __device__ __forceinline__ int row(int i) { return threadIdx.x / PIECES_SLAB + ROWS_STEP * i; }
};

// What a thread brings of a slab at a time: the same eighth of some rows of the input, and of the weights.
#define AT_ONCE (LOADS / 2)

struct Brought {
    uint4 x[AT_ONCE], w[AT_ONCE];
};

__device__ __forceinline__ void bring(const Rows &rows, int from, int slab, int cols, Brought &b) {
    int eighth = threadIdx.x % PIECES_SLAB;
    int column = first_column(slab) + (eighth < 4 ? 8 * eighth : Runs<QUANT>::APART + 8 * (eighth - 4));
    int piece = PIECES_SLAB * slab + eighth, block = piece / QUANT::PIECES;
    bool inside = column < cols, there = block * QUANT::WEIGHTS < cols;  // the last slab may be half empty
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int row = from + i;
        b.x[i] = b.w[i] = make_uint4(0, 0, 0, 0);
        if (inside && rows.x_at[row] != NO_ROW) b.x[i] = *(const uint4 *)(rows.x + rows.x_at[row] + column);
        if (!there) continue;
        const byte *w = (row < LOADS / 2 ? rows.first : rows.second) + rows.w_at[row];
        Eight e = QUANT::unpack(w + block * QUANT::BYTES, piece % QUANT::PIECES);
        b.w[i] = eight(e.w);
    }
}

// Where the first and the last four weights of this thread's piece lie in a slab: the same in all slabs.
__device__ __forceinline__ int2 places(const byte *w) {
    int i = threadIdx.x % PIECES_SLAB, begin = i / QUANT::PIECES * QUANT::WEIGHTS;
    Eight e = QUANT::unpack(w, i % QUANT::PIECES);  // of any block
    return {begin + e.a, begin + e.b - (Runs<QUANT>::APART - 32)};
}

__device__ __forceinline__ void put(const Brought &b, int from, int2 place, Slabs s) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        int row = Rows::row(from + i) * SLAB_LD;
        *(uint4 *)(s.x + row + 8 * (threadIdx.x % PIECES_SLAB)) = b.x[i];
        *(uint2 *)(s.w + row + place.x) = make_uint2(b.w[i].x, b.w[i].y);
        *(uint2 *)(s.w + row + place.y) = make_uint2(b.w[i].z, b.w[i].w);
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
    __device__ __forceinline__ void multiply(Slabs s, int from, int to) {
        int lane = threadIdx.x % WARP;
        const __nv_bfloat16 *x = s.x + lane % 16 * SLAB_LD + lane / 16 * 8;
        const __nv_bfloat16 *w = s.w + (lane / 16 * 8 + lane % 8) * SLAB_LD + lane / 8 % 2 * 8;
#pragma unroll
        for (int k = from; k < to; k += 16) {
            uint_t b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) load_blocks(b[i], w + output(2 * i) * SLAB_LD + k);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                if (row(f) >= count) break;  // the same for all lanes
                uint_t a[4];
                load_blocks(a, x + row(f) * SLAB_LD + k);
#pragma unroll
                for (int n = 0; n < COLUMNS; n++)
                    multiply_bf16(sums[f][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            }
        }
    }
};

// All products of a tile with a block's rows of weights. Shared memory is free afterwards.
__device__ __forceinline__ void multiply(const Rows &rows, int cols, Part &part) {
    int slabs = (cols + SLAB - 1) / SLAB;
    int2 place = places(rows.first);
    Brought b;
#pragma unroll
    for (int i = 0; i < LOADS; i += AT_ONCE) {
        bring(rows, i, 0, cols, b);
        put(b, i, place, Slabs(0));
    }
    __syncthreads();
    for (int s = 0; s < slabs; s++) {
        bool more = s + 1 < slabs;
#pragma unroll
        for (int i = 0; i < LOADS; i += AT_ONCE) {
            if (more) bring(rows, i, s + 1, cols, b);
            part.multiply(Slabs(s % 2), SLAB / LOADS * i, SLAB / LOADS * (i + AT_ONCE));
            if (more) put(b, i, place, Slabs((s + 1) % 2));
        }
        __syncthreads();
    }
}

// The sums to shared memory as [TILE][OUT_LD], so that rows can be written whole.
__device__ __forceinline__ void show(const Part &part) {
    int group = threadIdx.x % WARP / 4, place = threadIdx.x % 4;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
        for (int n = 0; n < COLUMNS; n++)
            for (int i = 0; i < 2; i++) {
                float *to = (float *)shared_memory + (part.row(f) + group + 8 * i) * OUT_LD + part.output(n);
                *(float2 *)(to + 2 * place) = make_float2(part.sums[f][n][2 * i], part.sums[f][n][2 * i + 1]);
            }
    __syncthreads();
}

// inner[place] = act(x[token] @ gate.T) * (x[token] @ up.T) in bf16, by sorted pairs; nobody's have none.
// Grid: n_ff / 64 blocks for each tile.
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
    show(part);  // only there a number's column is known, and so its bias
    int n = min(OUTPUTS / 2, n_ff - begin) / 8;  // eight at a time
    for (int i = threadIdx.x; i < tile.count * n; i += MANY_THREADS) {
        float *y = (float *)shared_memory + i / n * OUT_LD + 8 * (i % n);
        int64 bias = (int64)tile.expert * n_ff + begin + 8 * (i % n);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float g = y[j], u = y[OUTPUTS / 2 + j];
            if (gate_bias) g += gate_bias[bias + j], u += up_bias[bias + j];
            y[j] = joined(g, u, act);
        }
        *(uint4 *)(inner + (int64)(tile.begin + i / n) * n_ff + begin + 8 * (i % n)) = eight(y);
    }
}

// y[pair] = share * (inner[place] @ down.T); zeros for nobody's pairs. Grid: width / 128 blocks a tile.
extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2)
experts_down_many(const byte *down, const float *bias, const int *order, const Tile *tiles, int held,
                  const float *shares, float *y, const __nv_bfloat16 *inner, int width, int n_ff) {
    int blocks = (width + OUTPUTS - 1) / OUTPUTS, begin = blockIdx.x % blocks * OUTPUTS;
    Tile tile = tiles[blockIdx.x / blocks];
    if (tile.expert < 0) return;
    if (tile.expert < held) {  // the same for all threads
        const byte *mine = down + row_bytes(n_ff) * width * tile.expert;
        Rows rows = {inner, mine, mine};
        for (int i = 0; i < LOADS; i++) {
            int row = Rows::row(i);
            rows.x_at[i] = row < tile.count ? (uint_t)(tile.begin + row) * n_ff : NO_ROW;
            rows.w_at[i] = (uint_t)row_bytes(n_ff) * min(begin + row, width - 1);
        }
        Part part(tile.count);
        multiply(rows, n_ff, part);
        show(part);
    }
    int n = min(OUTPUTS, width - begin) / 4;
    for (int i = threadIdx.x; i < tile.count * n; i += MANY_THREADS) {
        int pair = order[tile.begin + i / n];
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (tile.expert < held) {
            sum = *(const float4 *)((float *)shared_memory + i / n * OUT_LD + 4 * (i % n));
            float share = shares[pair];
            if (bias) {
                float4 b = *(const float4 *)(bias + (int64)tile.expert * width + begin + 4 * (i % n));
                sum = make_float4(sum.x + b.x, sum.y + b.y, sum.z + b.z, sum.w + b.w);
            }
            sum = make_float4(share * sum.x, share * sum.y, share * sum.z, share * sum.w);
        }
        *(float4 *)(y + (int64)pair * width + begin + 4 * (i % n)) = sum;
    }
}
