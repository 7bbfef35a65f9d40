// The gated delta rule: each head of v has a matrix S [v_dim, k_dim], which every token changes. Mamba 2's rule
// is the same where nothing is taken off, keys and queries are as they are, and some of v is in the result.
//
// Rows of S know nothing of each other, so a few lanes keep a row in registers from a sequence's first token
// of the pass to its last: memory is read and written once, however many tokens there are. Some at a time
// are made ready in shared memory by all warps of a block (keys and queries of length 1, decays, rates), as
// each of its rows needs them. A token's arithmetic does not depend on how many there are.
//
// COLUMNS, which the source is compiled with, is k_dim rounded up to whole vectors of all lanes of a row.

#include "states.cuh"

#define WIDE 4  // numbers of a float4
#define WARPS 4
#define THREADS (WARPS * WARP)
#define LANES (COLUMNS <= 128 ? 8 : COLUMNS <= 256 ? 16 : 32)  // of a row
#define VECTORS (COLUMNS / (WIDE * LANES))                    // of a row, in each of them
#define OF_LANE 2                                             // rows that a lane has a part of
#define ROWS (THREADS / LANES * OF_LANE)                      // of a block
#define TOKENS (COLUMNS <= 128 ? 16 : 8)                      // that are made ready at once
#define OF_WARP (TOKENS / WARPS)                              // of these
#define EACH (COLUMNS / WARP)                                 // columns of a lane that makes them ready

static_assert(VECTORS * WIDE * LANES == COLUMNS, "rows are whole vectors of all lanes");

// Where what is ready lies.
struct Ready {
    float *keys, *queries, *values;  // [TOKENS, COLUMNS], the same, [TOKENS, ROWS]
    float *facts;  // four of each: what is left of S, how much is learnt, key times query, what is taken off
    uint64 *writes;                  // the place of the state after a token, or 0
};

struct Net {
    const float *x, *decay, *rate, *decays, *biases;
    int k_heads, v_heads, k_dim, v_dim, q_at, k_at, v_at, log, mamba;
    float eps, scale;  // what is added to squares of lengths, what queries are multiplied by
};

__device__ __forceinline__ Ready shared_ready() {
    Ready r;
    r.keys = (float *)shared_memory;
    r.queries = r.keys + TOKENS * COLUMNS;
    r.values = r.queries + TOKENS * COLUMNS;
    r.facts = r.values + TOKENS * ROWS;
    r.writes = (uint64 *)(r.facts + TOKENS * 4);
    return r;
}

// log(1 + e^x)
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// `n` tokens from `begin` on, as head `head` of v and head `of` of q and k have them; of v the rows from
// `row` on. All that is read is asked for before any of it is used.
__device__ __forceinline__ void make_ready(const Net &net, const Ready &ready, const uint64 *writes,
                                           int begin, int n, int head, int of, int row) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, k_width = net.k_heads * net.k_dim;
    int64 stride = 2 * k_width + net.v_heads * net.v_dim;
    float k[OF_WARP][EACH], q[OF_WARP][EACH];
#pragma unroll
    for (int e = 0; e < OF_WARP; e++) {
        int t = e * WARPS + warp;
        const float *from = net.x + (begin + t) * stride + of * net.k_dim;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int column = j * WARP + lane;
            bool there = t < n && column < net.k_dim;
            q[e][j] = there ? from[net.q_at + column] : 0.0f;
            k[e][j] = there ? from[net.k_at + column] : 0.0f;
        }
    }
    for (int i = threadIdx.x; i < n * ROWS; i += THREADS) {
        int t = i / ROWS, r = row + i % ROWS;
        const float *from = net.x + (begin + t) * stride + net.v_at + head * net.v_dim;
        ready.values[i] = r < net.v_dim ? from[r] : 0.0f;
    }
    if (threadIdx.x < n) {  // a token for each of a few threads
        int64 at = (int64)(begin + threadIdx.x) * net.v_heads + head;
        float w = net.decays[head], decay = net.log ? -expf(w) : w;
        float *fact = ready.facts + 4 * threadIdx.x;
        fact[0] = expf(decay * softplus(net.decay[at] + net.biases[head]));
        fact[1] = net.mamba ? softplus(net.rate[at] + net.biases[head]) : 1.0f / (1.0f + expf(-net.rate[at]));
        fact[3] = net.mamba ? 0.0f : -fact[0];
        ready.writes[threadIdx.x] = writes[begin + threadIdx.x];
    }
    // The sums of all tokens of a warp at once, so that none waits for another.
    float kk[OF_WARP], qq[OF_WARP], kq[OF_WARP];
#pragma unroll
    for (int e = 0; e < OF_WARP; e++) {
        kk[e] = qq[e] = kq[e] = 0.0f;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            kk[e] = fmaf(k[e][j], k[e][j], kk[e]);
            qq[e] = fmaf(q[e][j], q[e][j], qq[e]);
            kq[e] = fmaf(k[e][j], q[e][j], kq[e]);
        }
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
#pragma unroll
        for (int e = 0; e < OF_WARP; e++) {
            kk[e] += __shfl_xor_sync(ALL_LANES, kk[e], step);
            qq[e] += __shfl_xor_sync(ALL_LANES, qq[e], step);
            kq[e] += __shfl_xor_sync(ALL_LANES, kq[e], step);
        }
    }
#pragma unroll
    for (int e = 0; e < OF_WARP; e++) {
        int t = e * WARPS + warp;
        float by_k = net.mamba ? 1.0f : rsqrtf(kk[e] + net.eps);
        float by_q = net.mamba ? 1.0f : rsqrtf(qq[e] + net.eps) * net.scale;
        if (t < n) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                ready.keys[t * COLUMNS + j * WARP + lane] = k[e][j] * by_k;
                ready.queries[t * COLUMNS + j * WARP + lane] = q[e][j] * by_q;
            }
            if (lane == 0) ready.facts[4 * t + 2] = kq[e] * by_k * by_q;
        }
    }
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ __forceinline__ float4 changed(float4 s, float g, float missing, float4 k) {
    return {fmaf(missing, k.x, g * s.x), fmaf(missing, k.y, g * s.y), fmaf(missing, k.z, g * s.z),
            fmaf(missing, k.w, g * s.w)};
}

// The sum over the lanes of a row; each of them gets it.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// What a lane has of its rows, of which `rows` are there.
__device__ __forceinline__ void keep(float *to, const float4 (&s)[OF_LANE][VECTORS], int lane, int width,
                                     int rows) {
#pragma unroll
    for (int r = 0; r < OF_LANE; r++)
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int column = (i * LANES + lane) * WIDE;
            if (r < rows && column < width) *(float4 *)(to + r * width + column) = s[r][i];
        }
}

// x is [tokens, q and k of k_heads and v of v_heads, which begin at *_at], decay and rate are [tokens, v_heads],
// skips is null or what of each head's v is added to its result, out is
// [tokens, v_heads * v_dim]. The state is [v_heads, v_dim, k_dim filled up to a multiple of 16]. A block has
// ROWS rows (x) of a head of v (y) of a sequence (z), and launch.delta_shared bytes of shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    delta_net(const float *x, const float *decay, const float *rate, const float *decays, const float *biases,
              const float *skips, float *out, const Part *parts, const uint64 *writes, int64 at, int k_heads,
              int v_heads, int k_dim, int v_dim, int q_at, int k_at, int v_at, int tiled, int log, int mamba,
              float eps) {
    float scale = rsqrtf((float)k_dim);
    Net net = {x,     decay, rate, decays, biases, k_heads, v_heads, k_dim, v_dim,
               q_at,  k_at,  v_at, log,    mamba,  eps,     scale};
    Ready ready = shared_ready();
    Part part = parts[blockIdx.z];
    int head = blockIdx.y, of = tiled ? head % k_heads : head / (v_heads / k_heads);
    int lane = threadIdx.x % LANES, mine = threadIdx.x / LANES * OF_LANE;
    int first = blockIdx.x * ROWS, width = (k_dim + 15) / 16 * 16, rows = v_dim - first - mine;
    int64 begin_of = (int64)(head * v_dim + first + mine) * width;
    bool answers = lane < OF_LANE && lane < rows;  // each of a row's first lanes has the answer of one
    float *to = out + ((int64)part.first * v_heads + head) * v_dim + first + mine + lane;
    float skip = skips ? skips[head] : 0.0f;
    float4 s[OF_LANE][VECTORS];
#pragma unroll
    for (int r = 0; r < OF_LANE; r++)
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int column = (i * LANES + lane) * WIDE;
            s[r][i] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (part.read && r < rows && column < width)
                s[r][i] = *(const float4 *)(part_of(part.read, at) + begin_of + r * width + column);
        }
    for (int begin = part.first; begin < part.end; begin += TOKENS) {
        int n = min(TOKENS, part.end - begin);
        make_ready(net, ready, writes, begin, n, head, of, first);
        __syncthreads();
#pragma unroll 2
        for (int t = 0; t < n; t++) {
            const float4 *keys = (const float4 *)(ready.keys + t * COLUMNS) + lane;
            const float4 *queries = (const float4 *)(ready.queries + t * COLUMNS) + lane;
            float4 k[VECTORS], fact = ((const float4 *)ready.facts)[t];
            float known[OF_LANE], answer[OF_LANE];
#pragma unroll
            for (int r = 0; r < OF_LANE; r++) known[r] = answer[r] = 0.0f;
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                float4 q = queries[i * LANES];
                k[i] = keys[i * LANES];
#pragma unroll
                for (int r = 0; r < OF_LANE; r++) {
                    known[r] = dot(s[r][i], k[i], known[r]);
                    answer[r] = dot(s[r][i], q, answer[r]);
                }
            }
#pragma unroll
            for (int r = 0; r < OF_LANE; r++) {
                float right = ready.values[t * ROWS + mine + r];
                float missing = fmaf(fact.w, row_sum(known[r]), right) * fact.y;
                answer[r] = fmaf(skip, right, fmaf(fact.x, row_sum(answer[r]), missing * fact.z));
#pragma unroll
                for (int i = 0; i < VECTORS; i++) s[r][i] = changed(s[r][i], fact.x, missing, k[i]);
            }
            float own = answer[0];
#pragma unroll
            for (int r = 1; r < OF_LANE; r++)
                if (lane == r) own = answer[r];
            if (answers) *to = own;
            to += v_heads * v_dim;
            if (ready.writes[t]) keep(part_of(ready.writes[t], at) + begin_of, s, lane, width, rows);
        }
        __syncthreads();  // what is ready is read; the next ones take its place
    }
}
