// Attention for few rows, and rows that are stored; compiled for each type of keys and values and each size of
// heads (-DKV=F16 -DHEAD=128).

#include "attention.cuh"
#include "int8.cuh"
#include "rope.cuh"

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

// Queries to turn: x[rows, heads, HEAD], to y. `token_of` says whose turn a row has; null: its own.
struct Turning {
    const float *x;
    float *y;
    const float2 *turns;  // [tokens, turning]
    const int *token_of;
    int rows, heads;
};

// The same as write_rows, with keys that are turned on their way; and the queries of the same attention. A warp
// for each head. Shared memory: HEAD floats for each warp.
extern "C" __global__ void turn_and_write(Turning q, const float *k, const float2 *turns, const float *v,
                                          const int64 *slots, Table t, int n_heads, int tokens, int turning,
                                          int interleaved) {
    int64 job = (int64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, rows = 2LL * n_heads * tokens;
    int lane = threadIdx.x % WARP;
    if (job >= rows + (int64)q.rows * q.heads) return;  // a whole warp
    if (job >= rows) {
        int64 at = job - rows, row = at / q.heads;
        const float2 *mine = q.turns + (int64)(q.token_of ? q.token_of[row] : row) * turning;
        for (int pair = lane; pair < HEAD / 2; pair += WARP)
            turn_pair(q.x + at * HEAD, mine, q.y + at * HEAD, pair, turning, interleaved);
        return;
    }
    int head = job % n_heads, token = job / n_heads % tokens, is_value = job / n_heads / tokens;
    const float *x = (is_value ? v : k) + ((int64)token * n_heads + head) * HEAD;
    if (!is_value) {  // the same for the whole warp
        float *turned = (float *)shared_memory + threadIdx.x / WARP * HEAD;
        for (int pair = lane; pair < HEAD / 2; pair += WARP)
            turn_pair(x, turns + (int64)token * turning, turned, pair, turning, interleaved);
        __syncwarp();
        x = turned;
    }
    KV::put((byte *)head_of(t, is_value ? t.v_at : t.k_at, slots[token], head), x, lane);
}

// --- few rows: the keys and values are what has to be moved
//
// The keys that a row sees are cut into some parts, so that one long sequence has work for all processors:
// `splits` of them at most, which depends on the device and the model only. A block takes one part of one row,
// and of one KV head all query heads (up to HEADS at once), so that keys and values are read once. Its warps
// take keys in turn. The last block of a row and its heads to end joins their parts, always in the same order.
// How keys are cut depends on their number alone: a row's bits are the same in any company.

#define FEW_WARPS 4
#define TILED (HEAD <= 256)      // wider heads have no tiles, and fewer of them fit into registers
#define HEADS (TILED ? 8 : 2)

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

__device__ __forceinline__ int split_size(int length, int splits) {
    int size = (length + splits - 1) / splits;
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
        scale_by(p, exp2f(p.most - most));  // the first time by 0
        p.most = most;
    }
    float share = exp2f(score - most);
    p.sum += share;
    for (int c = 0; c < FOURS; c++) add_to(p.values[c], share, value[c]);
}

// The keys of a KV head that a block looks at, and where.
struct Keys {
    Table t;
    int first, begin, end, head;
    __device__ __forceinline__ const byte *key(int j) const { return head_of(t, t.k_at, (int64)first + j, head); }
    __device__ __forceinline__ const byte *value(int j) const { return head_of(t, t.v_at, (int64)first + j, head); }
};

// What a warp makes of its keys for some query heads: `out` is [head][2 + HEAD].
template <typename T, bool WHOLE> struct Few {
    static __device__ __forceinline__ void attend(const Keys &keys, const float *q, int heads, float scale,
                                                  float softcap, float *out) {
        int lane = threadIdx.x % WARP;
        float4 query[HEADS][FOURS];
        Part parts[HEADS];
        for (int g = 0; g < HEADS; g++) {
            parts[g].most = -INFINITY_F, parts[g].sum = 0.0f;
            for (int c = 0; c < FOURS; c++) {
                int i = 4 * (lane + WARP * c);
                bool there = g < heads && i < HEAD;
                query[g][c] = there ? *(const float4 *)(q + g * HEAD + i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
                parts[g].values[c] = {0.0f, 0.0f, 0.0f, 0.0f};
            }
        }
        for (int j = keys.begin + threadIdx.x / WARP; j < keys.end; j += FEW_WARPS) {
            float4 key[FOURS], value[FOURS];
            read_head(keys.key(j), key);
            read_head(keys.value(j), value);
            for (int g = 0; g < HEADS; g++) {
                if (g >= heads) break;
                float score = 0.0f;
                for (int c = 0; c < FOURS; c++) score += product(query[g][c], key[c]);
                see(parts[g], as_power(warp_sum(score), scale, softcap), value);
            }
        }
        for (int g = 0; g < heads; g++) {
            float *mine = out + g * (2 + HEAD);
            if (lane == 0) mine[0] = parts[g].most, mine[1] = parts[g].sum;
            for (int c = 0; c < FOURS; c++) {
                int i = 4 * (lane + WARP * c);
                if (i >= HEAD) continue;
                mine[2 + i] = parts[g].values[c].x, mine[3 + i] = parts[g].values[c].y;
                mine[4 + i] = parts[g].values[c].z, mine[5 + i] = parts[g].values[c].w;
            }
        }
    }
};

// Halves go from memory to tensor cores as they lie. Columns of keys and values take turns in another order
// there, which is the same for both factors: so a lane has 16 bytes of a row at a time. A product has 16 rows,
// and there are eight query heads: of each number the eight others have what rounding it to a half leaves,
// and both results together are as good as in float32. Shares are taken times 2^ROOM, so that also those of
// keys that hardly count are more than halves can tell from nothing.
#define ROOM 14.0f
#define FEW_ASIDE(heads) (FEW_WARPS * (heads) * (2 + HEAD) * 4 + 15) / 16 * 16

template <> struct Few<F16, true> {
    static const int THIRTY_TWOS = HEAD / 32, SIXTY_FOURS = (HEAD + 63) / 64;
    static const int KEPT = Q_IN_REGISTERS ? 2 * THIRTY_TWOS : 1;

    // Two numbers as halves, and what that leaves of them.
    static __device__ __forceinline__ void split(float x, float y, uint_t &high, uint_t &low) {
        high = two_halves(x, y);
        low = two_halves(x - __half2float(__ushort_as_half(high & 0xffff)),
                         y - __half2float(__ushort_as_half(high >> 16)));
    }

    static __device__ __forceinline__ uint_t word(const uint4 &x, int i) {
        return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
    }

    static __device__ __forceinline__ void attend(const Keys &keys, const float *q, int heads, float scale,
                                                  float softcap, float *out) {
        int lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
        uint_t query[KEPT][4];
        uint4 *aside = (uint4 *)(shared_memory + FEW_ASIDE(heads)) + lane;  // queries of wide heads
#pragma unroll
        for (int i = 0; i < 2 * THIRTY_TWOS; i++) {
            float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
            if (group < heads) x = *(const float4 *)(q + group * HEAD + 32 * (i / 2) + 8 * place + 4 * (i % 2));
            uint_t a[4];
            split(x.x, x.y, a[0], a[1]);
            split(x.z, x.w, a[2], a[3]);
            if (Q_IN_REGISTERS)
                for (int c = 0; c < 4; c++) query[i % KEPT][c] = a[c];
            else if (threadIdx.x < WARP)  // the same for all warps
                aside[WARP * i] = make_uint4(a[0], a[1], a[2], a[3]);
        }
        if (!Q_IN_REGISTERS) __syncthreads();
        float values[SIXTY_FOURS][8][4], most = -INFINITY_F, sum = 0.0f;
#pragma unroll
        for (int h = 0; h < SIXTY_FOURS; h++)
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 4; j++) values[h][i][j] = 0.0f;
        for (int j = keys.begin + threadIdx.x / WARP * 16; j < keys.end; j += FEW_WARPS * 16) {
            int last = keys.end - 1;
            const byte *k[2], *v[4];
            for (int i = 0; i < 2; i++) k[i] = keys.key(min(j + 8 * i + group, last)) + 16 * place;
            for (int i = 0; i < 4; i++)
                v[i] = keys.value(min(j + 2 * place + i % 2 + i / 2 * 8, last)) + 16 * group;
            uint4 key[2][THIRTY_TWOS], value[4];
#pragma unroll
            for (int n = 0; n < 2; n++)
                for (int i = 0; i < THIRTY_TWOS; i++) key[n][i] = __ldg((const uint4 *)(k[n] + 64 * i));
            read_values(v, 0, group, value);  // they come while scores are computed
            float scores[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
                for (int i = 0; i < 2 * THIRTY_TWOS; i++) {
                    const uint4 &b = key[n][i / 2];
                    uint_t b0 = i % 2 ? b.z : b.x, b1 = i % 2 ? b.w : b.y;
                    if (Q_IN_REGISTERS) {
                        multiply(scores[n], query[i % KEPT], b0, b1);
                    } else {
                        uint4 x = aside[WARP * i];
                        uint_t a[4] = {x.x, x.y, x.z, x.w};
                        multiply(scores[n], a, b0, b1);
                    }
                }
                for (int i = 0; i < 2; i++) {
                    float score = as_power(scores[n][i] + scores[n][2 + i], scale, softcap);
                    scores[n][i] = j + 8 * n + 2 * place + i <= last ? score : -INFINITY_F;
                }
            }
            float here = fmaxf(fmaxf(scores[0][0], scores[0][1]), fmaxf(scores[1][0], scores[1][1]));
            float now = fmaxf(most, quad_max(here)), factor = exp2f(most - now);  // the first time 0
            if (__ballot_sync(ALL_LANES, now > most)) {
#pragma unroll
                for (int h = 0; h < SIXTY_FOURS; h++)
                    for (int i = 0; i < 8; i++)
                        for (int c = 0; c < 4; c++) values[h][i][c] *= factor;
                sum *= factor, most = now;
            }
            uint_t shares[4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float x = exp2f(scores[n][0] - most + ROOM), y = exp2f(scores[n][1] - most + ROOM);
                split(x, y, shares[2 * n], shares[2 * n + 1]);
                sum += x + y;
            }
#pragma unroll
            for (int h = 0; h < SIXTY_FOURS; h++) {
                if (h) read_values(v, h, group, value);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    int half_of = i % 2 ? 0x7632 : 0x5410;
                    uint_t b0 = __byte_perm(word(value[0], i / 2), word(value[1], i / 2), half_of);
                    uint_t b1 = __byte_perm(word(value[2], i / 2), word(value[3], i / 2), half_of);
                    multiply(values[h][i], shares, b0, b1);
                }
            }
        }
        sum = quad_sum(sum);
        if (group >= heads) return;
        float *mine = out + group * (2 + HEAD);
        const float small = exp2f(-ROOM);
        if (place == 0) mine[0] = most, mine[1] = sum * small;
#pragma unroll
        for (int h = 0; h < SIXTY_FOURS; h++)
            for (int i = 0; i < 8; i++)
                for (int c = 0; c < 2; c++) {
                    int column = 64 * h + 8 * (2 * place + c) + i;
                    if (column < HEAD) mine[2 + column] = (values[h][i][c] + values[h][i][2 + c]) * small;
                }
    }

    static __device__ __forceinline__ void read_values(const byte *const (&v)[4], int h, int group,
                                                       uint4 (&value)[4]) {
        bool there = HEAD % 64 == 0 || 64 * h + 8 * group < HEAD;
        for (int i = 0; i < 4; i++)
            value[i] = there ? __ldg((const uint4 *)(v[i] + 128 * h)) : make_uint4(0, 0, 0, 0);
    }
};

// Where rows of results go, and what joins the parts of heads.
struct Joined {
    float *y;
    const float *sinks;  // by head, or null
    byte *in_bytes;      // the same as rows of bytes, of heads of whole ROUNDED; or null
    int *ended;          // by row, KV head and group of its query heads: blocks that have; 0 before and after
};

#define PART_LD (HEAD + 4)  // from a part to the next: values, the greatest score, the sum of shares

// Adds the parts of some heads that follow each other. `from` is [head][splits][PART_LD], and `used` of the
// parts are there; `weights` has room for as many numbers of each head in shared memory. A block comes here.
__device__ __forceinline__ void join(const float *from, int heads, int splits, int used, float *weights,
                                     const Joined &to, int64 row, int n_heads, int head) {
    int lane = threadIdx.x % WARP;
    for (int g = threadIdx.x / WARP; g < heads; g += FEW_WARPS) {
        const float *scores = from + (int64)g * splits * PART_LD + HEAD;
        float most = -INFINITY_F, sum = 0.0f;
        for (int s = lane; s < used; s += WARP) most = fmaxf(most, __ldcg(scores + s * PART_LD));
        most = warp_max(most);
        for (int s = lane; s < used; s += WARP) {
            float2 part = __ldcg((const float2 *)(scores + s * PART_LD));
            float weight = exp2f(part.x - most);
            weights[g * used + s] = weight, sum += part.y * weight;
        }
        sum = warp_sum(sum);
        if (to.sinks) sum += exp2f(to.sinks[head + g] * LOG2_E - most);
        for (int s = lane; s < used; s += WARP) weights[g * used + s] /= sum;
    }
    __syncthreads();
    int fours = heads * (HEAD / 4), cols = n_heads * HEAD;
    for (int i = threadIdx.x; i - lane < fours; i += blockDim.x) {  // whole warps
        float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
        int g = i / (HEAD / 4), column = head * HEAD + 4 * i;
        bool there = i < fours;
        if (there) {
            const float *values = from + (int64)g * splits * PART_LD + i % (HEAD / 4) * 4;
#pragma unroll 8
            for (int s = 0; s < used; s++)
                add_to(value, weights[g * used + s], __ldcg((const float4 *)(values + s * PART_LD)));
            *(float4 *)(to.y + row * cols + column) = value;
        }
        if (to.in_bytes) put_rounded(value, there, to.in_bytes + row * int8_row(cols), cols, column / 4);
    }
}

// partial[row][head][split] is what a part makes, not divided by the sum.
// Blocks: (rows * splits, KV heads, query heads of one in groups of HEADS).
// Shared memory: (2 + HEAD) floats for each warp and head of a group, and `splits` floats for each head; of
// wide heads their queries.
extern "C" __global__ void __launch_bounds__(32 * FEW_WARPS, HEAD <= 64 ? 4 : HEAD <= 128 ? 2 : 1)
    attend_few(const float *q, const Row *rows, Table t, float *partial, float scale, float softcap, int n_heads,
               int n_kv_heads, int splits, Joined to) {
    int at = blockIdx.x / splits, split = blockIdx.x % splits, warp = threadIdx.x / WARP;
    int of_kv = n_heads / n_kv_heads, skip = blockIdx.z * HEADS;
    int heads = min(HEADS, of_kv - skip), head = blockIdx.y * of_kv + skip;
    Row row = rows[at];
    int size = split_size(row.length, splits), begin = split * size, end = min(row.length, begin + size);
    if (begin >= end) return;
    float *shared = (float *)shared_memory;  // [warp][head of the group][2 + HEAD]
    float *mine = shared + warp * heads * (2 + HEAD);
    const float *query = q + ((int64)row.q * n_heads + head) * HEAD;
    Keys keys = {t, row.first, begin, end, (int)blockIdx.y};
    Few<KV, HEAD % 32 == 0 && TILED>::attend(keys, query, heads, scale, softcap, mine);
    __syncthreads();
    float *parts = partial + ((int64)at * n_heads + head) * splits * PART_LD;
    for (int i = threadIdx.x; i < heads * (2 + HEAD); i += blockDim.x) {
        int g = i / (2 + HEAD), what = i % (2 + HEAD);
        float most = -INFINITY_F, sum = 0.0f;
        for (int w = 0; w < FEW_WARPS; w++) most = fmaxf(most, shared[(w * heads + g) * (2 + HEAD)]);
        for (int w = 0; w < FEW_WARPS; w++) {
            const float *from = shared + (w * heads + g) * (2 + HEAD);
            sum += from[what] * exp2f(from[0] - most);
        }
        float *out = parts + ((int64)g * splits + split) * PART_LD;
        out[what < 2 ? HEAD + what : what - 2] = what == 0 ? most : sum;
    }
    __threadfence();
    __syncthreads();
    int used = (row.length + size - 1) / size;
    uint_t *before = (uint_t *)shared_memory;  // how many blocks had ended; the last one sets the count to 0 again
    if (threadIdx.x == 0)
        *before = atomicInc((uint_t *)to.ended + (at * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z, used - 1);
    __syncthreads();
    if (*before + 1 < used) return;  // a whole block
    __syncthreads();
    __threadfence();
    join(parts, heads, splits, used, shared, to, row.q, n_heads, head);
}
