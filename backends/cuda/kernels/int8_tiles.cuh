// Products of tiles in bytes, by tensor cores: T rows of the input by T rows of weights.
//
// The input was rounded to bytes in runs of 32 numbers (int8.cuh). A block multiplies T rows
// of it by T rows of weights, 64 columns (a slab: two runs of 32) at a time: both lie in shared memory as
// bytes, beside their scales. A weight is unpacked to a byte once for a tile, in one to three instructions
// that T rows share. Sums over a run are integers and exact; each is multiplied by the scales of its row and
// of its token and added up in float32. Types with a minimum need what the bytes of a token's run add up to;
// it is taken after rounding, so that a weight's error is in parts of the weight and not of its minimum.
//
// While a slab is multiplied the next one comes: the input by copies that run by themselves, weights through
// registers. So a slab takes one __syncthreads(). Two blocks of 128 rows, or four of 64, have room in a
// multiprocessor of 100 KB.

#pragma once

#include "int8.cuh"
#include "int8_weights.cuh"
#include "tensor.cuh"

#define RUNS 2             // of a slab
#define RUN_LD 80          // bytes from one row of a slab to the next: other banks for each eight of them
#define COLUMNS_OF_WARP 4  // of eight outputs each

// --- sums of a run

// They are wanted as floats. They begin as the integer whose bits are the float 3 * 2^22, so that these bits
// as a float are that much too large, and one addition converts them. That holds up to 2^22; a run of the
// largest bytes makes an eighth of it.
#define START 12582912.0f

// It comes out of shared memory, so that the compiler keeps it in registers: what it knows, it would move
// there for every product.
struct Start {
    int sums[4];
    // All threads of a block; shared memory is free before and afterwards.
    __device__ __forceinline__ Start() {
        if (threadIdx.x < 4) ((int *)shared_memory)[threadIdx.x] = __float_as_int(START);
        __syncthreads();
        int4 x = *(const int4 *)shared_memory;
        sums[0] = x.x, sums[1] = x.y, sums[2] = x.z, sums[3] = x.w;
        __syncthreads();
    }
};

__device__ __forceinline__ void as_floats(float (&made)[4], const int (&sums)[4]) {
    for (int i = 0; i < 4; i++) made[i] = __int_as_float(sums[i]) - START;
}

__device__ __forceinline__ void multiply_32(float (&made)[4], const uint_t (&a)[4], uint_t b0, uint_t b1,
                                            const Start &start) {
    int sums[4];
    multiply_bytes(sums, a, b0, b1, start.sums);
    as_floats(made, sums);
}

__device__ __forceinline__ void multiply_16(float (&made)[4], uint_t a0, uint_t a1, uint_t b,
                                            const Start &start) {
    int sums[4];
    multiply_bytes(sums, a0, a1, b, start.sums);
    as_floats(made, sums);
}

// --- slabs

typedef Int8<QUANT> Weights;

// Where a tile's rows of the input lie, which are as int8.cuh has them: find() says how far behind `rows` one
// of them begins, and whether there is one. These follow each other.
struct Following {
    const byte *rows;
    int cols;         // whole slabs
    int first, rows_at_all;
    __device__ __forceinline__ bool find(int row, uint_t &at) const {
        bool there = first + row < rows_at_all;
        at = (uint_t)(there ? first + row : 0) * int8_row(cols);
        return there;
    }
};

template <int T> struct Slab {
    byte x[T * RUN_LD], w[T * RUN_LD];
    float2 x_scales[T][RUNS];
    float2 w_scales[RUNS][T];  // as Weights::put has them
};

__device__ __forceinline__ int first_column(int slab) {
    return Weights::APART == 32 ? 64 * slab : 128 * (slab / 2) + 32 * (slab % 2);
}

// Sends a slab of the input off; zeros for tokens that are not there. Offsets are short, because there are no
// registers to spare.
template <int T, typename In> __device__ __forceinline__ void send(const In &in, int slab, Slab<T> &s) {
    const int APART = Weights::APART, PIECE = APART == 32 ? 16 : 8;  // bytes of scales that lie together
    int column = first_column(slab), quarter = threadIdx.x % 4;
    uint_t at;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = threadIdx.x / 4 + T / 2 * i;
        bool there = in.find(row, at);
        send_16(s.x + row * RUN_LD + 16 * quarter,
                in.rows + (at + column + APART * (quarter / 2)) + quarter % 2 * 16, there);
    }
    if (threadIdx.x < 16 * T / PIECE) {
        int row = threadIdx.x / (16 / PIECE), run = threadIdx.x % (16 / PIECE);
        bool there = in.find(row, at);
        at += in.cols + (column + APART * run) / 32 * 8;
        if (PIECE == 16) send_16(s.x_scales[row], in.rows + at, there);
        else send_8(&s.x_scales[row][run], in.rows + at, there);
    }
}

// What a warp makes: half of the tile's rows of the input, in fragments of 16 that take turns with the other
// half's, by 16 of the block's first T / 2 rows of weights and 16 of the others. Lanes have numbers of it as
// tensor.cuh says.
template <int T> struct Part {
    static const int FRAGMENTS = T / 32;
    float sums[FRAGMENTS][COLUMNS_OF_WARP][4];
    int half, group_of_rows, fragments;

    __device__ __forceinline__ Part(int tokens) {
        int warp = threadIdx.x / WARP;
        half = warp % 2, group_of_rows = warp / 2, fragments = (tokens + 31) / 32;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
            for (int n = 0; n < COLUMNS_OF_WARP; n++)
                for (int j = 0; j < 4; j++) sums[f][n][j] = 0.0f;
    }
    __device__ __forceinline__ int row(int f) const { return 16 * (2 * f + half); }
    __device__ __forceinline__ int output(int n) const {
        return T / 2 * (n / 2) + 16 * group_of_rows + n % 2 * 8;
    }

    // Two columns at a time: there are no registers for the scales of all four.
    __device__ __forceinline__ void multiply(const Slab<T> &s, const Start &start) {
        int lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
        const byte *x = s.x + lane % 16 * RUN_LD + lane / 16 * 16;
        const byte *w = s.w + (lane / 16 * 8 + lane % 8) * RUN_LD + lane / 8 % 2 * 16;
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
#pragma unroll
            for (int n = 0; n < COLUMNS_OF_WARP; n += 2) {
                uint_t b[4];
                load_blocks(b, w + output(n) * RUN_LD + 32 * run);
                float4 left = *(const float4 *)&s.w_scales[run][output(n) + 2 * place];  // of two rows
                float4 right = *(const float4 *)&s.w_scales[run][output(n + 1) + 2 * place];
                uint_t leasts[2] = {0, 0};
                if (Weights::SCALES == LEASTS)
                    for (int i = 0; i < 2; i++)
                        leasts[i] = *(const ushort_t *)(s.w + (output(n + i) + group) * RUN_LD + 64 + 2 * run);
#pragma unroll
                for (int f = 0; f < FRAGMENTS; f++) {
                    if (f >= fragments) break;  // the same for all threads
                    uint_t a[4];
                    load_blocks(a, x + row(f) * RUN_LD + 32 * run);
                    float2 low = s.x_scales[row(f) + group][run], high = s.x_scales[row(f) + group + 8][run];
                    add_run(sums[f][n], a, b[0], b[1], leasts[0], left, low, high, start);
                    add_run(sums[f][n + 1], a, b[2], b[3], leasts[1], right, low, high, start);
                }
            }
        }
    }

    // Two products where a run has two scales, or one of its bytes and one of its minima.
    static __device__ __forceinline__ void add_run(float (&sums)[4], const uint_t (&a)[4], uint_t b0,
                                                   uint_t b1, uint_t leasts, float4 w, float2 low,
                                                   float2 high, const Start &start) {
        const bool TWO = Weights::SCALES == SIXTEENS || Weights::SCALES == LEASTS;
        float made[4];
        if (TWO) {
            float first[4], second[4];
            if (Weights::SCALES == SIXTEENS) {
                multiply_16(first, a[0], a[1], b0, start);
                multiply_16(second, a[2], a[3], b1, start);
            } else {
                multiply_32(first, a, b0, b1, start);
                multiply_32(second, a, __byte_perm(leasts, 0, 0x0000), __byte_perm(leasts, 0, 0x1111), start);
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                made[j] = fmaf(second[j], j % 2 ? w.w : w.y, first[j] * (j % 2 ? w.z : w.x));
        } else {
            multiply_32(made, a, b0, b1, start);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 x = j < 2 ? low : high;
            float scale = TWO ? x.x : x.x * (j % 2 ? w.z : w.x);
            sums[j] = fmaf(made[j], scale, sums[j]);
            if (Weights::SCALES == LEAST) sums[j] = fmaf(x.y, j % 2 ? w.w : w.y, sums[j]);
        }
    }
};

// All products of a tile. `mine` is the row of weights that this thread and its neighbour bring.
template <int T, typename In>
__device__ __forceinline__ void multiply(const In &in, const byte *mine, Part<T> &part) {
    Slab<T> *slabs = (Slab<T> *)shared_memory;
    int n = in.cols / 64, half = threadIdx.x % 2, row = threadIdx.x / 2;
    Start start;
    send(in, 0, slabs[0]);
    typename Weights::Raw raw = Weights::read(mine, 0, half);
    Weights::put(raw, mine, 0, half, slabs[0].w + row * RUN_LD, &slabs[0].w_scales[half][row]);
    arrived();
    __syncthreads();
    for (int slab = 0; slab < n; slab++) {
        Slab<T> &next = slabs[(slab + 1) % 2];
        bool more = slab + 1 < n;
        if (more) {
            send(in, slab + 1, next);
            raw = Weights::read(mine, slab + 1, half);
        }
        part.multiply(slabs[slab % 2], start);
        if (more) Weights::put(raw, mine, slab + 1, half, next.w + row * RUN_LD, &next.w_scales[half][row]);
        arrived();
        __syncthreads();
    }
}
