// Products with quantised weights, read as they lie in their file; compiled once for each type
// (-DQUANT=Q4_K), and of some types once more for inputs that were rounded to bytes (-DINT8=int8).
//
// For few tokens the weights are what has to be moved. A warp takes R rows along all of their columns
// (walks.cuh) and multiplies them by up to T tokens. With more tokens the input is read more often, from the
// first cache, so a warp takes more rows then.
//
// The order of additions in a row's result depends on the number of columns only: not on T, R, or who else is
// in the launch.

#ifdef INT8
#include "int8_walks.cuh"
#else
#include "walks.cuh"
#endif
#include "matrix.cuh"

#define WARPS 4  // of a block

// The sums of R rows and T tokens; lane T * r + t gets that of row r and token t. Rows and tokens that are
// not there repeat the last one, so that all lanes do the same.
template <int T, int R>
__device__ __forceinline__ float dot(const byte *w, int row, int rows, const Input *x, int cols, int ldx,
                                     int tokens) {
    const byte *at[R];
    const Input *from[T];
    float sums[R][T];
    for (int r = 0; r < R; r++) at[r] = w + row_bytes(cols) * min(row + r, rows - 1);
    for (int t = 0; t < T; t++) from[t] = x + (int64)ldx * min(t, tokens - 1);
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sums[r][t] = 0.0f;
    Walk<QUANT>::walk(at, from, cols, sums);
    float mine = 0.0f;
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int t = 0; t < T; t++) {
            float sum = warp_sum(sums[r][t]);
            if (threadIdx.x % WARP == T * r + t) mine = sum;
        }
    }
    return mine;
}

__device__ __forceinline__ int blocks_of(int rows, int r) { return (rows + WARPS * r - 1) / (WARPS * r); }

// y = x @ w.T (+ bias) (+ add) for up to three matrices with one input. Blocks that differ only by their
// tokens follow each other, so that the rows they share come from the second cache.
template <int T, int R>
__device__ __forceinline__ void few(Output first, Output second, Output third, const Input *x, int cols,
                                    int ldx, int tokens) {
    int groups = (tokens + T - 1) / T, block = blockIdx.x / groups, token = blockIdx.x % groups * T;
    Output o = first;
    if (block >= blocks_of(o.rows, R)) {
        block -= blocks_of(o.rows, R), o = second;
        if (block >= blocks_of(o.rows, R)) block -= blocks_of(o.rows, R), o = third;
    }
    int row = (block * WARPS + threadIdx.x / WARP) * R;
    if (row >= o.rows) return;  // a whole warp: no other waits for it
    float sum = dot<T, R>(o.w, row, o.rows, x + (int64)token * ldx, cols, ldx, tokens - token);
    int lane = threadIdx.x % WARP;
    row += lane / T, token += lane % T;
    if (lane >= R * T || row >= o.rows || token >= tokens) return;
    int64 at = (int64)token * o.ldy + row;
    float y = sum + (o.bias ? o.bias[row] : 0.0f);
    o.y[at] = o.add ? y + o.add[at] : y;
}

// y = act(x @ gate.T) * (x @ up.T); act: 0 silu, 1 gelu by tanh, 2 gelu by erf.
template <int T, int R>
__device__ __forceinline__ void gated(const byte *gate, const byte *up, const float *gate_bias,
                                      const float *up_bias, float *y, int rows, const Input *x, int cols,
                                      int ldx, int tokens, int act) {
    int groups = (tokens + T - 1) / T, block = blockIdx.x / groups, token = blockIdx.x % groups * T;
    int row = (block * WARPS + threadIdx.x / WARP) * R;
    if (row >= rows) return;
    const Input *from = x + (int64)token * ldx;
    float g = dot<T, R>(gate, row, rows, from, cols, ldx, tokens - token);
    float u = dot<T, R>(up, row, rows, from, cols, ldx, tokens - token);
    int lane = threadIdx.x % WARP;
    row += lane / T, token += lane % T;
    if (lane >= R * T || row >= rows || token >= tokens) return;
    g += gate_bias ? gate_bias[row] : 0.0f;
    u += up_bias ? up_bias[row] : 0.0f;
    y[(int64)token * rows + row] = activated(g, act) * u;
}

// The Python side (matmul_launch.py) knows R for each T, and so how many blocks there are.
// kernels: few_1 few_2 few_4 few_8 gated_1 gated_2 gated_4 gated_8
#define SIZE(T, R)                                                                                          \
    extern "C" __global__ void few_##T(Output first, Output second, Output third, const Input *x, int cols, \
                                       int ldx, int tokens) {                                               \
        few<T, R>(first, second, third, x, cols, ldx, tokens);                                              \
    }                                                                                                       \
    extern "C" __global__ void gated_##T(const byte *gate, const byte *up, const float *gate_bias,          \
                                         const float *up_bias, float *y, int rows, const Input *x,          \
                                         int cols, int ldx, int tokens, int act) {                          \
        gated<T, R>(gate, up, gate_bias, up_bias, y, rows, x, cols, ldx, tokens, act);                      \
    }

SIZE(1, 2)
SIZE(2, 2)
#ifdef INT8  // a row takes more registers, and reads less of the input
SIZE(4, 2)
SIZE(8, 2)
#else
SIZE(4, 4)
SIZE(8, 4)
#endif

// --- experts: matrices on top of each other, of which a pair of a token and a place has one

// The expert of a pair among those that are held, or -1.
__device__ __forceinline__ int expert_of(const int *chosen, int pair, int first, int held) {
    int e = chosen[pair] - first;
    return e >= 0 && e < held ? e : -1;
}

// y[pair] = act(x[token] @ gate.T) * (x[token] @ up.T) by the pair's expert; zeros where it is not held.
extern "C" __global__ void experts_gated(const byte *gate, const byte *up, const float *gate_bias,
                                         const float *up_bias, const int *chosen, int first, int held,
                                         float *y, const Input *x, int n_ff, int cols, int n_used, int pairs,
                                         int act) {
    int pair = blockIdx.x % pairs, row = blockIdx.x / pairs * WARPS + threadIdx.x / WARP;
    if (row >= n_ff) return;
    int e = expert_of(chosen, pair, first, held);
    float g = 0.0f, u = 0.0f;
    if (e >= 0) {  // the same for all lanes
        int64 skip = row_bytes(cols) * n_ff * e;
        const Input *from = x + pair / n_used * input_row(cols);
        g = dot<1, 1>(gate + skip, row, n_ff, from, cols, cols, 1);
        u = dot<1, 1>(up + skip, row, n_ff, from, cols, cols, 1);
        if (gate_bias) g += gate_bias[(int64)e * n_ff + row], u += up_bias[(int64)e * n_ff + row];
    }
    if (threadIdx.x % WARP == 0) y[(int64)pair * n_ff + row] = e >= 0 ? joined(g, u, act) : 0.0f;
}

// y[pair] = share * (inner[pair] @ down.T) by the pair's expert; zeros where it is not held.
extern "C" __global__ void experts_down(const byte *down, const float *bias, const int *chosen,
                                        const float *shares, int first, int held, float *y, const Input *inner, int width, int n_ff,
                                        int pairs) {
    int pair = blockIdx.x % pairs, row = blockIdx.x / pairs * WARPS + threadIdx.x / WARP;
    if (row >= width) return;
    int e = expert_of(chosen, pair, first, held);
    float sum = 0.0f;
    if (e >= 0) {
        int64 skip = row_bytes(n_ff) * width * e;
        sum = dot<1, 1>(down + skip, row, width, inner + pair * input_row(n_ff), n_ff, n_ff, 1);
        if (bias) sum += bias[(int64)e * width + row];
    }
    if (threadIdx.x % WARP == 0) y[(int64)pair * width + row] = shares[pair] * sum;
}

// --- weights as numbers

// All weights of some rows as bf16, for cuBLAS; a thread for each piece, whose two halves lie on borders of
// eight bytes.
extern "C" __global__ void unpack_bf16(const byte *w, __nv_bfloat16 *y, int64 pieces) {
    int64 first = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64 p = first; p < pieces; p += (int64)gridDim.x * blockDim.x) {
        int64 block = p / QUANT::PIECES;
        Eight e = QUANT::unpack(w + block * QUANT::BYTES, (int)(p % QUANT::PIECES));
        __nv_bfloat16 *to = y + block * QUANT::WEIGHTS;
        *(uint2 *)(to + e.a) = make_uint2(two_bf16(e.w[0], e.w[1]), two_bf16(e.w[2], e.w[3]));
        *(uint2 *)(to + e.b) = make_uint2(two_bf16(e.w[4], e.w[5]), two_bf16(e.w[6], e.w[7]));
    }
}

// Rows ids[i] + offset of a table; a block for each.
extern "C" __global__ void lookup(const byte *table, const int *ids, int offset, float *y, int cols) {
    const byte *row = table + row_bytes(cols) * (ids[blockIdx.x] + offset);
    for (int p = threadIdx.x; p < cols / QUANT::WEIGHTS * QUANT::PIECES; p += blockDim.x) {
        int block = p / QUANT::PIECES;
        Eight e = QUANT::unpack(row + (int64)block * QUANT::BYTES, p % QUANT::PIECES);
        float *to = y + (int64)blockIdx.x * cols + block * QUANT::WEIGHTS;
        for (int i = 0; i < 4; i++) {
            to[e.a + i] = e.w[i];
            to[e.b + i] = e.w[4 + i];
        }
    }
}
