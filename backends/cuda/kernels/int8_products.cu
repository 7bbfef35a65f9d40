// Products of many tokens with quantised weights as they lie in their file, by tensor cores that multiply
// bytes; compiled once for each type (-DQUANT=Q4_K).
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

struct Output {
    const byte *w;      // [rows, cols]
    const float *bias;  // [rows] or null
    const float *add;   // as y, or null; may be y
    float *y;           // [tokens, ldy]
    int rows;
    int ldy;
};

// The input, rounded: rows as int8.cuh has them.
struct Input {
    const byte *rows;
    int tokens;
    int cols;  // whole slabs
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
template <int T> __device__ __forceinline__ void send(const Input &in, int token, int slab, Slab<T> &s) {
    const int APART = Weights::APART, PIECE = APART == 32 ? 16 : 8;  // bytes of scales that lie together
    int column = first_column(slab), quarter = threadIdx.x % 4, row_bytes = int8_row(in.cols);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = threadIdx.x / 4 + T / 2 * i, mine = token + row;
        bool there = mine < in.tokens;
        uint_t at = (uint_t)(there ? mine : 0) * row_bytes + column + APART * (quarter / 2);
        send_16(s.x + row * RUN_LD + 16 * quarter, in.rows + at + quarter % 2 * 16, there);
    }
    if (threadIdx.x < 16 * T / PIECE) {
        int row = threadIdx.x / (16 / PIECE), run = threadIdx.x % (16 / PIECE), mine = token + row;
        bool there = mine < in.tokens;
        uint_t at = (uint_t)(there ? mine : 0) * row_bytes + in.cols + (column + APART * run) / 32 * 8;
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
#pragma unroll
                for (int f = 0; f < FRAGMENTS; f++) {
                    if (f >= fragments) break;  // the same for all threads
                    uint_t a[4];
                    load_blocks(a, x + row(f) * RUN_LD + 32 * run);
                    float2 low = s.x_scales[row(f) + group][run], high = s.x_scales[row(f) + group + 8][run];
                    add_run(sums[f][n], a, b[0], b[1], left, low, high, start);
                    add_run(sums[f][n + 1], a, b[2], b[3], right, low, high, start);
                }
            }
        }
    }

    static __device__ __forceinline__ void add_run(float (&sums)[4], const uint_t (&a)[4], uint_t b0,
                                                   uint_t b1, float4 w, float2 low, float2 high,
                                                   const Start &start) {
        float made[4];
        if (Weights::SIXTEENS) {
            float first[4], second[4];
            multiply_16(first, a[0], a[1], b0, start);
            multiply_16(second, a[2], a[3], b1, start);
#pragma unroll
            for (int j = 0; j < 4; j++)
                made[j] = fmaf(second[j], j % 2 ? w.w : w.y, first[j] * (j % 2 ? w.z : w.x));
        } else {
            multiply_32(made, a, b0, b1, start);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 x = j < 2 ? low : high;
            float scale = Weights::SIXTEENS ? x.x : x.x * (j % 2 ? w.z : w.x);
            sums[j] = fmaf(made[j], scale, sums[j]);
            if (Weights::LEAST) sums[j] = fmaf(x.y, j % 2 ? w.w : w.y, sums[j]);
        }
    }
};

// All products of a tile. `mine` is the row of weights that this thread and its neighbour bring.
template <int T>
__device__ __forceinline__ void multiply(const Input &in, int token, const byte *mine, Part<T> &part) {
    Slab<T> *slabs = (Slab<T> *)shared_memory;
    int n = in.cols / 64, half = threadIdx.x % 2, row = threadIdx.x / 2;
    Start start;
    send(in, token, 0, slabs[0]);
    typename Weights::Raw raw = Weights::read(mine, 0, half);
    Weights::put(raw, mine, 0, half, slabs[0].w + row * RUN_LD, &slabs[0].w_scales[half][row]);
    arrived();
    __syncthreads();
    for (int slab = 0; slab < n; slab++) {
        Slab<T> &next = slabs[(slab + 1) % 2];
        bool more = slab + 1 < n;
        if (more) {
            send(in, token, slab + 1, next);
            raw = Weights::read(mine, slab + 1, half);
        }
        part.multiply(slabs[slab % 2], start);
        if (more) Weights::put(raw, mine, slab + 1, half, next.w + row * RUN_LD, &next.w_scales[half][row]);
        arrived();
        __syncthreads();
    }
}

__device__ __forceinline__ int64 row_bytes(int cols) { return (int64)(cols / QUANT::WEIGHTS) * QUANT::BYTES; }

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
    multiply(in, token, w + row_bytes(in.cols) * min(begin + (int)threadIdx.x / 2, rows - 1), part);
    Output o = which == 0 ? first : which == 1 ? second : third;  // not before: it would take registers
    int lane = threadIdx.x % WARP;
    bool wide = o.ldy % 2 == 0 && (uint64)o.y % sizeof(float2) == 0;
#pragma unroll
    for (int f = 0; f < Part<T>::FRAGMENTS; f++)
        for (int i = 0; i < 2; i++) {
            int mine = token + part.row(f) + lane / 4 + 8 * i;
            if (mine >= in.tokens) continue;
#pragma unroll
            for (int n = 0; n < COLUMNS_OF_WARP; n++) {
                int row = begin + part.output(n) + lane % 4 * 2;
                if (row >= o.rows) continue;
                bool both = row + 1 < o.rows;
                float x = part.sums[f][n][2 * i], y = part.sums[f][n][2 * i + 1];
                int64 at = (int64)mine * o.ldy + row;
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
    multiply(in, token, mine + row_bytes(in.cols) * min(begin + brought % (T / 2), rows - 1), part);
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
