// Attention over keys and values in slabs; compiled for each type of them and each size of heads
// (-DKV=F16 -DHEAD=128).
//
// A slab holds 32 rows of the cache that follow each other, of several layers. `slabs[row / 32]` is where the
// slab of a row lies; in it, the op's keys begin at k_at and its values at v_at, and a row takes row_bytes.

#include <mma.h>

#include "common.cuh"

using namespace nvcuda;

#define SLAB_ROWS 32
#define FOURS ((HEAD + 4 * WARP - 1) / (4 * WARP))  // groups of four numbers of a head that a lane has

struct Table {
    const uint64 *slabs;
    int64 k_at, v_at;
    int row_bytes;
};

// --- heads of rows, by their type: four numbers at a time

struct F32 {
    static const int HEAD_BYTES = 4 * HEAD;
    static __device__ __forceinline__ float4 four(const byte *head, int i) { return *(const float4 *)(head + 4 * i); }
    static __device__ __forceinline__ void put(byte *head, const float *x, int lane) {
        for (int i = lane; i < HEAD; i += WARP) ((float *)head)[i] = x[i];
    }
};

struct F16 {
    static const int HEAD_BYTES = 2 * HEAD;
    static __device__ __forceinline__ float number(uint_t bits) { return __half2float(__ushort_as_half(bits)); }
    static __device__ __forceinline__ float4 four(const byte *head, int i) {
        uint2 x = *(const uint2 *)(head + 2 * i);
        return {number(x.x & 0xffff), number(x.x >> 16), number(x.y & 0xffff), number(x.y >> 16)};
    }
    static __device__ __forceinline__ void put(byte *head, const float *x, int lane) {
        for (int i = lane; i < HEAD; i += WARP) ((half *)head)[i] = __float2half_rn(x[i]);
    }
};

struct BF16 {
    static const int HEAD_BYTES = 2 * HEAD;
    static __device__ __forceinline__ float4 four(const byte *head, int i) {
        uint2 x = *(const uint2 *)(head + 2 * i);
        return {__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
                __uint_as_float(x.y & 0xffff0000u)};
    }
    static __device__ __forceinline__ void put(byte *head, const float *x, int lane) {
        for (int i = lane; i < HEAD; i += WARP) ((__nv_bfloat16 *)head)[i] = __float2bfloat16_rn(x[i]);
    }
};

// Blocks of 32 numbers with a scale: 34 bytes.
struct Q8_0 {
    static const int HEAD_BYTES = 34 * (HEAD / 32);
    static __device__ __forceinline__ float4 four(const byte *head, int i) {
        const byte *block = head + i / 32 * 34;
        float d = __half2float(__ushort_as_half(*(const ushort_t *)block));
        const ushort_t *q = (const ushort_t *)(block + 2 + i % 32);
        return {(signed char)(q[0] & 0xff) * d, (signed char)(q[0] >> 8) * d, (signed char)(q[1] & 0xff) * d,
                (signed char)(q[1] >> 8) * d};
    }
    // As ggml rounds: to the nearest, halves away from zero, by the scale before it is rounded itself.
    static __device__ __forceinline__ void put(byte *head, const float *x, int lane) {
        for (int b = 0; b < HEAD / 32; b++) {
            float mine = x[32 * b + lane], scale = warp_max(fabsf(mine)) / 127.0f;
            float inverse = 1.0f / scale;
            float q = mine * (inverse == INFINITY_F ? 0.0f : inverse), whole = truncf(q);
            whole += truncf((q - whole) * 2.0f);
            byte *block = head + 34 * b;
            if (lane == 0) *(ushort_t *)block = __half_as_ushort(__float2half_rn(scale));
            block[2 + lane] = (byte)(signed char)(int)whole;
        }
    }
};

__device__ __forceinline__ const byte *head_of(const Table &t, int64 at, int64 row, int head) {
    return (const byte *)t.slabs[row / SLAB_ROWS] + at + row % SLAB_ROWS * t.row_bytes + head * KV::HEAD_BYTES;
}

// Stores the rows of some tokens; a warp for each token and head, keys and then values.
extern "C" __global__ void write_rows(const float *k, const float *v, const int64 *slots, Table t, int n_heads,
                                      int tokens) {
    int64 job = (int64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (job >= 2LL * n_heads * tokens) return;  // a whole warp
    int head = job % n_heads, token = job / n_heads % tokens, is_value = job / n_heads / tokens;
    const float *x = (is_value ? v : k) + ((int64)token * n_heads + head) * HEAD;
    byte *to = (byte *)head_of(t, is_value ? t.v_at : t.k_at, slots[token], head);
    KV::put(to, x, threadIdx.x % WARP);
}

__device__ __forceinline__ float capped(float score, float softcap) {
    return softcap > 0.0f ? tanhf(score / softcap) * softcap : score;
}

// --- few rows: the keys and values are what has to be moved
//
// The keys that a row sees are cut into SPLITS parts, so that one long sequence has work for all processors. A
// block takes one part of one row, and of one KV head all query heads (up to HEADS at once), so that keys and
// values are read once. Its warps take keys in turn. How keys are cut depends on their number alone: a row's
// bits are the same in any company.

#define SPLITS 32
#define FEW_WARPS 4
#define HEADS 8

struct Row {
    int q;       // its row of the query and of the result
    int first;   // the row of the cache with the first key that it sees
    int length;  // and how many it sees
    int unused;
};

struct Part {
    float most, sum;
    float4 values[FOURS];
};

__device__ __forceinline__ int split_size(int length) {
    int size = (length + SPLITS - 1) / SPLITS;
    return (size + SLAB_ROWS - 1) / SLAB_ROWS * SLAB_ROWS;
}

__device__ __forceinline__ void scale_by(Part &p, float factor) {
    p.sum *= factor;
    for (int c = 0; c < FOURS; c++)
        p.values[c] = {p.values[c].x * factor, p.values[c].y * factor, p.values[c].z * factor,
                       p.values[c].w * factor};
}

__device__ __forceinline__ void add_to(float4 &sum, float factor, const float4 &x) {
    sum = {fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y), fmaf(factor, x.z, sum.z), fmaf(factor, x.w, sum.w)};
}

__device__ __forceinline__ float product(const float4 &a, const float4 &b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}

// A head's numbers, as a warp holds them: lane i has the fours i, i + 32, ...
__device__ __forceinline__ void read_head(const byte *head, float4 (&x)[FOURS]) {
    for (int c = 0; c < FOURS; c++) {
        int i = 4 * (threadIdx.x % WARP + WARP * c);
        x[c] = i < HEAD ? KV::four(head, i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
}

// One more key and its value for one query head.
__device__ __forceinline__ void see(Part &p, float score, const float4 (&value)[FOURS]) {
    float most = fmaxf(p.most, score);
    if (most > p.most) {
        scale_by(p, expf(p.most - most));  // the first time by 0
        p.most = most;
    }
    float share = expf(score - most);
    p.sum += share;
    for (int c = 0; c < FOURS; c++) add_to(p.values[c], share, value[c]);
}

// partial[row][head][split] is most, sum and HEAD values, not divided by the sum.
// Blocks: (rows * SPLITS, KV heads, query heads of one in groups of HEADS).
// Shared memory: (2 + HEAD) floats for each warp and head of a group.
extern "C" __global__ void attend_few(const float *q, const Row *rows, Table t, float *partial, float scale,
                                      float softcap, int n_heads, int n_kv_heads) {
    int at = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, warp = threadIdx.x / WARP;
    int lane = threadIdx.x % WARP, of_kv = n_heads / n_kv_heads, skip = blockIdx.z * HEADS;
    int heads = min(HEADS, of_kv - skip), head = blockIdx.y * of_kv + skip;
    Row row = rows[at];
    int size = split_size(row.length), begin = split * size, end = min(row.length, begin + size);
    float *out = partial + (((int64)at * n_heads + head) * SPLITS + split) * (2 + HEAD);
    const int64 to_next_head = (int64)SPLITS * (2 + HEAD);
    if (begin >= end) {
        for (int g = threadIdx.x; g < heads; g += blockDim.x) out[g * to_next_head] = -INFINITY_F;
        return;
    }
    float4 query[HEADS][FOURS];
    Part parts[HEADS];
    for (int g = 0; g < HEADS; g++) {
        parts[g].most = -INFINITY_F, parts[g].sum = 0.0f;
        for (int c = 0; c < FOURS; c++) {
            int i = 4 * (lane + WARP * c);
            bool there = g < heads && i < HEAD;
            const float *from = q + ((int64)row.q * n_heads + head + g) * HEAD + i;
            query[g][c] = there ? *(const float4 *)from : float4{0.0f, 0.0f, 0.0f, 0.0f};
            parts[g].values[c] = {0.0f, 0.0f, 0.0f, 0.0f};
        }
    }
    for (int j = begin + warp; j < end; j += FEW_WARPS) {
        float4 key[FOURS], value[FOURS];
        read_head(head_of(t, t.k_at, (int64)row.first + j, blockIdx.y), key);
        read_head(head_of(t, t.v_at, (int64)row.first + j, blockIdx.y), value);
        for (int g = 0; g < HEADS; g++) {
            if (g >= heads) break;
            float score = 0.0f;
            for (int c = 0; c < FOURS; c++) score += product(query[g][c], key[c]);
            see(parts[g], capped(warp_sum(score) * scale, softcap), value);
        }
    }
    float *shared = (float *)shared_memory;  // [warp][head of the group][2 + HEAD]
    for (int g = 0; g < heads; g++) {
        float *mine = shared + (warp * heads + g) * (2 + HEAD);
        if (lane == 0) mine[0] = parts[g].most, mine[1] = parts[g].sum;
        for (int c = 0; c < FOURS; c++) {
            int i = 4 * (lane + WARP * c);
            if (i >= HEAD) continue;
            mine[2 + i] = parts[g].values[c].x, mine[3 + i] = parts[g].values[c].y;
            mine[4 + i] = parts[g].values[c].z, mine[5 + i] = parts[g].values[c].w;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * (2 + HEAD); i += blockDim.x) {
        int g = i / (2 + HEAD), what = i % (2 + HEAD);
        float most = -INFINITY_F, sum = 0.0f;
        for (int w = 0; w < FEW_WARPS; w++) most = fmaxf(most, shared[(w * heads + g) * (2 + HEAD)]);
        for (int w = 0; w < FEW_WARPS; w++) {
            const float *from = shared + (w * heads + g) * (2 + HEAD);
            sum += from[what] * expf(from[0] - most);
        }
        out[g * to_next_head + what] = what == 0 ? most : sum;
    }
}

// The parts of each row and head as one; a block for each.
extern "C" __global__ void join(const float *partial, const Row *rows, float *y, int n_heads) {
    int at = blockIdx.x / n_heads, head = blockIdx.x % n_heads;
    const float *parts = partial + (int64)blockIdx.x * SPLITS * (2 + HEAD);
    float most = -INFINITY_F, sum = 0.0f;
    for (int s = 0; s < SPLITS; s++) most = fmaxf(most, parts[s * (2 + HEAD)]);
    for (int s = 0; s < SPLITS; s++) {
        const float *p = parts + s * (2 + HEAD);
        if (p[0] > -INFINITY_F) sum = fmaf(p[1], expf(p[0] - most), sum);
    }
    for (int i = threadIdx.x; i < HEAD; i += blockDim.x) {
        float value = 0.0f;
        for (int s = 0; s < SPLITS; s++) {
            const float *p = parts + s * (2 + HEAD);
            if (p[0] > -INFINITY_F) value = fmaf(p[2 + i], expf(p[0] - most), value);
        }
        y[((int64)rows[at].q * n_heads + head) * HEAD + i] = value / sum;
    }
}

// --- many rows: products of tiles
//
// A block takes up to 64 lines: rows of one sequence that follow each other, times the query heads of one KV
// head, so that keys and values are shared by all of them. Each of its four warps has 16 lines to itself: their
// scores, shares and results, so warps only meet when keys and values are read. The results stay in fragments,
// whose layout nobody knows: so a line's shares are taken relative to a maximum that is moved only when scores
// outgrow it by far, and then the results pass through shared memory once to be scaled.

#define LINES 64
#define KEYS 64
#define MANY_WARPS 4
#define HEAD_LD (HEAD + 8)  // halves from one row to the next: other banks
#define KEYS_LD (KEYS + 8)
#define FRAGMENTS (HEAD / 16)
#define OUTGROWN 8.0f

struct Tile {
    int q;       // the first row of the query and of the result
    int rows;    // that it has
    int first;   // the row of the cache with the first key that its first row sees
    int length;  // and how many that one sees; each further row sees one more at the end
    int window;  // and no more than so many; 0: all
};

struct Shared {
    half q[LINES * HEAD_LD], k[KEYS * HEAD_LD], v[KEYS * HEAD_LD];
    float scores[LINES * KEYS_LD];
    half shares[LINES * KEYS_LD];
};

typedef wmma::fragment<wmma::accumulator, 16, 16, 16, float> Sums;

__device__ __forceinline__ void put_four(half *to, const float4 &x) {
    to[0] = __float2half_rn(x.x), to[1] = __float2half_rn(x.y);
    to[2] = __float2half_rn(x.z), to[3] = __float2half_rn(x.w);
}

// 64 keys or values from `begin` on; zeros behind the last.
__device__ __forceinline__ void read_rows(half *to, const Table &t, int64 at, int64 first, int begin, int end) {
    for (int i = threadIdx.x; i < KEYS * HEAD / 4; i += blockDim.x) {
        int key = i / (HEAD / 4), column = i % (HEAD / 4) * 4;
        float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
        if (begin + key < end) x = KV::four(head_of(t, at, first + begin + key, blockIdx.y), column);
        put_four(to + key * HEAD_LD + column, x);
    }
}

__device__ __forceinline__ void score_keys(const Shared &s, float *scores, int line) {
    for (int tile = 0; tile < KEYS / 16; tile++) {
        Sums sums;
        wmma::fill_fragment(sums, 0.0f);
        for (int i = 0; i < HEAD; i += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
            wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> b;
            wmma::load_matrix_sync(a, s.q + line * HEAD_LD + i, HEAD_LD);
            wmma::load_matrix_sync(b, s.k + tile * 16 * HEAD_LD + i, HEAD_LD);
            wmma::mma_sync(sums, a, b, sums);
        }
        wmma::store_matrix_sync(scores + tile * 16, sums, KEYS_LD, wmma::mem_row_major);
    }
}

__device__ __forceinline__ void add_values(const Shared &s, const half *shares, Sums (&sums)[FRAGMENTS]) {
    for (int k = 0; k < KEYS; k += 16) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
        wmma::load_matrix_sync(a, shares + k, KEYS_LD);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
            wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
            wmma::load_matrix_sync(b, s.v + k * HEAD_LD + f * 16, HEAD_LD);
            wmma::mma_sync(sums[f], a, b, sums[f]);
        }
    }
}

// The results of a warp's lines, each times a factor that two lanes have; through `room`, 16 lines of 16 columns.
__device__ __forceinline__ void scale_lines(Sums (&sums)[FRAGMENTS], float *room, float factor) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
        wmma::store_matrix_sync(room, sums[f], KEYS_LD, wmma::mem_row_major);
        __syncwarp();
        for (int i = 0; i < 8; i++) room[lane / 2 * KEYS_LD + lane % 2 * 8 + i] *= factor;
        __syncwarp();
        wmma::load_matrix_sync(sums[f], room, KEYS_LD, wmma::mem_row_major);
        __syncwarp();
    }
}

// Blocks: (tiles, KV heads). Shared memory: a `Shared`.
extern "C" __global__ void attend_many(const float *q, const Tile *tiles, Table t, float *y, float scale,
                                       float softcap, int n_heads, int n_kv_heads) {
    Shared &s = *(Shared *)shared_memory;
    Tile tile = tiles[blockIdx.x];
    int of_kv = n_heads / n_kv_heads, head = blockIdx.y * of_kv, lines = tile.rows * of_kv;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, line = warp * 16;
    for (int i = threadIdx.x; i < LINES * HEAD / 4; i += blockDim.x) {
        int l = i / (HEAD / 4), column = i % (HEAD / 4) * 4;
        const float *from = q + ((int64)(tile.q + l / of_kv) * n_heads + head + l % of_kv) * HEAD + column;
        put_four(s.q + l * HEAD_LD + column, l < lines ? *(const float4 *)from : float4{0.0f, 0.0f, 0.0f, 0.0f});
    }
    Sums sums[FRAGMENTS];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) wmma::fill_fragment(sums[f], 0.0f);
    // Two lanes share a line; each looks at every other key.
    int mine = line + lane / 2, row = mine / of_kv;
    int sees = mine < lines ? tile.length + row : 0, from = tile.window ? max(0, sees - tile.window) : 0;
    float *scores = s.scores + line * KEYS_LD, *my_scores = s.scores + mine * KEYS_LD;
    half *shares = s.shares + line * KEYS_LD, *my_shares = s.shares + mine * KEYS_LD;
    float most = -INFINITY_F, sum = 0.0f;
    int end = tile.length + tile.rows - 1;
    for (int begin = 0; begin < end; begin += KEYS) {
        __syncthreads();
        read_rows(s.k, t, t.k_at, tile.first, begin, end);
        read_rows(s.v, t, t.v_at, tile.first, begin, end);
        __syncthreads();
        score_keys(s, scores, line);
        __syncwarp();
        float here = -INFINITY_F;
        for (int k = lane % 2; k < KEYS; k += 2) {
            bool seen = begin + k >= from && begin + k < sees;
            float score = seen ? capped(my_scores[k] * scale, softcap) : -INFINITY_F;
            my_scores[k] = score;
            here = fmaxf(here, score);
        }
        here = fmaxf(here, __shfl_xor_sync(ALL_LANES, here, 1));
        float before = most;
        if (here > most + OUTGROWN || most == -INFINITY_F) most = fmaxf(most, here);
        float added = 0.0f;
        for (int k = lane % 2; k < KEYS; k += 2) {
            half share = __float2half_rn(my_scores[k] > -INFINITY_F ? expf(my_scores[k] - most) : 0.0f);
            my_shares[k] = share;
            added += __half2float(share);  // what the values are multiplied by, and nothing else
        }
        bool moved = most > before && before > -INFINITY_F;
        float factor = moved ? expf(before - most) : 1.0f;
        sum = sum * factor + added + __shfl_xor_sync(ALL_LANES, added, 1);
        __syncwarp();
        if (__ballot_sync(ALL_LANES, moved)) scale_lines(sums, scores, factor);
        add_values(s, shares, sums);
    }
    __syncwarp();
    float part = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
        wmma::store_matrix_sync(scores, sums[f], KEYS_LD, wmma::mem_row_major);
        __syncwarp();
        float *to = y + ((int64)(tile.q + row) * n_heads + head + mine % of_kv) * HEAD + f * 16 + lane % 2 * 8;
        if (mine < lines)
            for (int i = 0; i < 8; i++) to[i] = my_scores[lane % 2 * 8 + i] * part;
        __syncwarp();
    }
}
