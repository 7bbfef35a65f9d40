// Products of many tokens with quantised weights as they lie in their file, by tensor cores that multiply
// bytes (int8_tiles.cuh); compiled once for each type (-DQUANT=Q4_K).

#include "int8_tiles.cuh"
#include "matrix.cuh"

// The input, rounded.
struct Input {
    const byte *rows;
    int tokens;
    int cols;
};

__device__ __forceinline__ int blocks_of(int rows, int each) { return (rows + each - 1) / each; }

// Two numbers that follow each other, of which the second may not be there. `wide`: on a border of both.
__device__ __forceinline__ void write(float *to, float x, float y, bool both, bool wide) {
    if (both && wide) {
        *(float2 *)to = make_float2(x, y);
    } else {
        to[0] = x;
        if (both) to[1] = y;
    }
}

// y = x @ w.T (+ bias) (+ add) for up to three matrices with one input. Blocks that differ only by their
// tokens follow each other, so that the rows they share come from the second cache.
template <int T>
__device__ __forceinline__ void products(Output first, Output second, Output third, const Input &in) {
    int tiles = blocks_of(in.tokens, T), block = blockIdx.x / tiles, token = blockIdx.x % tiles * T, which = 0;
    if (block >= blocks_of(first.rows, T)) {
        block -= blocks_of(first.rows, T), which = 1;
        if (block >= blocks_of(second.rows, T)) block -= blocks_of(second.rows, T), which = 2;
    }
    int begin = block * T, rows = which == 0 ? first.rows : which == 1 ? second.rows : third.rows;
    const byte *w = which == 0 ? first.w : which == 1 ? second.w : third.w;
    Part<T> part(in.tokens - token);
    const byte *mine = w + row_bytes(in.cols) * min(begin + (int)threadIdx.x / 2, rows - 1);
    multiply(Following{in.rows, in.cols, token, in.tokens}, mine, part);
    Output o = which == 0 ? first : which == 1 ? second : third;  // not before: it would take registers
    int lane = threadIdx.x % WARP;
    bool wide = o.ldy % 2 == 0 && (uint64)o.y % sizeof(float2) == 0;
#pragma unroll
    for (int f = 0; f < Part<T>::FRAGMENTS; f++)
        for (int i = 0; i < 2; i++) {
            int row_of_x = token + part.row(f) + lane / 4 + 8 * i;
            if (row_of_x >= in.tokens) continue;
#pragma unroll
            for (int n = 0; n < COLUMNS_OF_WARP; n++) {
                int row = begin + part.output(n) + lane % 4 * 2;
                if (row >= o.rows) continue;
                bool both = row + 1 < o.rows;
                float x = part.sums[f][n][2 * i], y = part.sums[f][n][2 * i + 1];
                int64 at = (int64)row_of_x * o.ldy + row;
                if (o.bias) x += o.bias[row], y += both ? o.bias[row + 1] : 0.0f;
                if (o.add) x += o.add[at], y += both ? o.add[at + 1] : 0.0f;
                write(o.y + at, x, y, both, wide);
            }
        }
}

// y = act(x @ gate.T) * (x @ up.T); act: 0 silu, 1 gelu by tanh, 2 gelu by erf. A block has T / 2 rows of
// each matrix.
template <int T>
__device__ __forceinline__ void gated(const byte *gate, const byte *up, const float *gate_bias,
                                      const float *up_bias, float *y, int rows, int act, const Input &in) {
    int tiles = blocks_of(in.tokens, T), begin = blockIdx.x / tiles * (T / 2), token = blockIdx.x % tiles * T;
    int brought = threadIdx.x / 2;
    const byte *mine = brought < T / 2 ? gate : up;
    Part<T> part(in.tokens - token);
    mine += row_bytes(in.cols) * min(begin + brought % (T / 2), rows - 1);
    multiply(Following{in.rows, in.cols, token, in.tokens}, mine, part);
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int f = 0; f < Part<T>::FRAGMENTS; f++)
        for (int i = 0; i < 2; i++) {
            int at = token + part.row(f) + lane / 4 + 8 * i;
            if (at >= in.tokens) continue;
#pragma unroll
            for (int n = 0; n < COLUMNS_OF_WARP / 2; n++) {
                int row = begin + part.output(n) + lane % 4 * 2;
                if (row >= rows) continue;
                bool both = row + 1 < rows;
                float made[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float g = part.sums[f][n][2 * i + j], u = part.sums[f][n + 2][2 * i + j];
                    bool there = j == 0 || both;
                    if (gate_bias && there) g += gate_bias[row + j];
                    if (up_bias && there) u += up_bias[row + j];
                    made[j] = activated(g, act) * u;
                }
                write(y + (int64)at * rows + row, made[0], made[1], both, rows % 2 == 0);
            }
        }
}

// Shared memory: two slabs. Grid: for each tile of tokens the tiles of all matrices.
// kernels: products_64 products_128 gated_64 gated_128
#define SIZE(T)                                                                                              \
    extern "C" __launch_bounds__(2 * T, 256 / T) __global__                                                 \
        void products_##T(Output first, Output second, Output third, Input in) {                            \
        products<T>(first, second, third, in);                                                              \
    }                                                                                                       \
    extern "C" __launch_bounds__(2 * T, 256 / T) __global__                                                 \
        void gated_##T(const byte *gate, const byte *up, const float *gate_bias, const float *up_bias,      \
                       float *y, int rows, int act, Input in) {                                             \
        gated<T>(gate, up, gate_bias, up_bias, y, rows, act, in);                                           \
    }

SIZE(64)
SIZE(128)
