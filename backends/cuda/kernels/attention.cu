// Attention over keys and values in slabs; compiled for each type of them and each size of heads
// (-DKV=F16 -DHEAD=128).
//
// A slab holds 32 rows of the cache that follow each other, of several layers. `slabs[row / 32]` is where the
// slab of a row lies; in it, the op's keys begin at k_at and its values at v_at, and a row takes row_bytes.

#include "tensor.cuh"

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

#define LOG2_E 1.4426950408889634f
#define Q_IN_REGISTERS (HEAD <= 128)  // wider heads leave no room there

// A score as a power of two, which is what shares are made of.
__device__ __forceinline__ float as_power(float score, float scale, float softcap) {
    return softcap > 0.0f ? capped(score * scale, softcap) * LOG2_E : score * (scale * LOG2_E);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
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
                for (int i = 0; i < THIRTY_TWOS; i++) key[n][i] = *(const uint4 *)(k[n] + 64 * i);
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
            value[i] = there ? *(const uint4 *)(v[i] + 128 * h) : make_uint4(0, 0, 0, 0);
    }
};

// partial[row][head][split] is most, sum and HEAD values, not divided by the sum.
// Blocks: (rows * SPLITS, KV heads, query heads of one in groups of HEADS).
// Shared memory: (2 + HEAD) floats for each warp and head of a group; of wide heads their queries.
extern "C" __global__ void __launch_bounds__(32 * FEW_WARPS, HEAD <= 64 ? 4 : HEAD <= 128 ? 2 : 1)
    attend_few(const float *q, const Row *rows, Table t, float *partial, float scale, float softcap, int n_heads,
               int n_kv_heads) {
    int at = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, warp = threadIdx.x / WARP;
    int of_kv = n_heads / n_kv_heads, skip = blockIdx.z * HEADS;
    int heads = min(HEADS, of_kv - skip), head = blockIdx.y * of_kv + skip;
    Row row = rows[at];
    int size = split_size(row.length), begin = split * size, end = min(row.length, begin + size);
    float *out = partial + (((int64)at * n_heads + head) * SPLITS + split) * (2 + HEAD);
    const int64 to_next_head = (int64)SPLITS * (2 + HEAD);
    if (begin >= end) {
        for (int g = threadIdx.x; g < heads; g += blockDim.x) out[g * to_next_head] = -INFINITY_F;
        return;
    }
    float *shared = (float *)shared_memory;  // [warp][head of the group][2 + HEAD]
    float *mine = shared + warp * heads * (2 + HEAD);
    const float *query = q + ((int64)row.q * n_heads + head) * HEAD;
    Keys keys = {t, row.first, begin, end, (int)blockIdx.y};
    Few<KV, HEAD % 32 == 0>::attend(keys, query, heads, scale, softcap, mine);
    __syncthreads();
    for (int i = threadIdx.x; i < heads * (2 + HEAD); i += blockDim.x) {
        int g = i / (2 + HEAD), what = i % (2 + HEAD);
        float most = -INFINITY_F, sum = 0.0f;
        for (int w = 0; w < FEW_WARPS; w++) most = fmaxf(most, shared[(w * heads + g) * (2 + HEAD)]);
        for (int w = 0; w < FEW_WARPS; w++) {
            const float *from = shared + (w * heads + g) * (2 + HEAD);
            sum += from[what] * exp2f(from[0] - most);
        }
        out[g * to_next_head + what] = what == 0 ? most : sum;
    }
}

// The parts of each row and head as one; a block of whole warps for each, a lane for the weight of each part.
extern "C" __global__ void join(const float *partial, const Row *rows, float *y, int n_heads,
                                const float *sinks) {
    int at = blockIdx.x / n_heads, head = blockIdx.x % n_heads, lane = threadIdx.x % WARP;
    const float *parts = partial + (int64)blockIdx.x * SPLITS * (2 + HEAD), *part = parts + lane * (2 + HEAD);
    bool there = part[0] > -INFINITY_F;
    float most = warp_max(part[0]), weight = there ? exp2f(part[0] - most) : 0.0f;
    float sum = warp_sum(there ? part[1] * weight : 0.0f);
    if (sinks) sum += exp2f(sinks[head] * LOG2_E - most);
    for (int i = threadIdx.x; i - lane < HEAD; i += blockDim.x) {
        float value = 0.0f;
#pragma unroll 8
        for (int s = 0; s < SPLITS; s++) {
            float factor = __shfl_sync(ALL_LANES, weight, s);
            if (factor > 0.0f && i < HEAD) value = fmaf(parts[s * (2 + HEAD) + 2 + i], factor, value);
        }
        if (i < HEAD) y[((int64)rows[at].q * n_heads + head) * HEAD + i] = value / sum;
    }
}

// --- many rows: products of tiles
//
// A block takes up to 64 lines: rows of one sequence that follow each other, times the query heads of one KV
// head, so that keys and values are shared by all of them. Each of its four warps has 16 lines to itself, and
// their queries, scores and results in registers, as tensor cores have them (tensor.cuh): lanes 4 g to 4 g + 3
// share lines g and g + 8. Warps only meet when keys and values have come: halves by copies that run by
// themselves, while those before them are used. A line's shares are taken relative to a maximum that is moved
// only when scores outgrow it by far, so results are seldom scaled.

#define LINES 64
#define KEYS_OF(head) ((head) > 64 ? 32 : 64)
#define KEYS KEYS_OF(HEAD)
#define MANY_THREADS 128
#define HEAD_LD (HEAD + 8)  // halves from one row to the next: other banks
#define DEEP (HEAD / 16)
#define OUTGROWN 11.5f  // as powers of two

struct Tile {
    int q;       // the first row of the query and of the result
    int rows;    // that it has
    int first;   // the row of the cache with the first key that its first row sees
    int length;  // and how many that one sees; each further row sees one more at the end
    int window;  // and no more than so many; 0: all
};

struct Shared {
    half k[2][KEYS * HEAD_LD], v[2][KEYS * HEAD_LD];
    half q[Q_IN_REGISTERS ? 1 : LINES * HEAD_LD];  // of wide heads, which leave no registers for them
};

// Keys or values as halves, eight at a time.
template <typename T> struct Eights {
    static __device__ __forceinline__ void bring(half *to, const byte *head, int column, bool there) {
        float4 x = {0.0f, 0.0f, 0.0f, 0.0f}, y = x;
        if (there) x = T::four(head, column), y = T::four(head, column + 4);
        *(uint4 *)to = make_uint4(two_halves(x.x, x.y), two_halves(x.z, x.w), two_halves(y.x, y.y),
                                  two_halves(y.z, y.w));
    }
};
template <> struct Eights<F16> {
    static __device__ __forceinline__ void bring(half *to, const byte *head, int column, bool there) {
        send_16(to, head + 2 * column, there);
    }
};

// Where rows of the cache lie that follow each other. A warp's worth of them is in two slabs at most, and the
// second of these is the first of the next.
struct Places {
    const uint64 *slabs;
    const byte *here, *next;
    int skip;  // rows of `here` that come before

    __device__ __forceinline__ Places(const Table &t, int first, int end) {
        slabs = t.slabs + first / SLAB_ROWS, skip = first % SLAB_ROWS;
        here = (const byte *)slabs[0];
        next = there(end) ? (const byte *)slabs[1] : here;
    }
    __device__ __forceinline__ bool there(int end) const { return skip + end > SLAB_ROWS; }
    __device__ __forceinline__ void turn(int end) {
        slabs++, here = next;
        next = there(end) ? (const byte *)slabs[1] : here;
    }
    __device__ __forceinline__ const byte *row(int i, int row_bytes) const {
        int at = skip + i;
        return (at < SLAB_ROWS ? here : next) + at % SLAB_ROWS * row_bytes;
    }
};

// The next KEYS keys and values, of which `left` are there; zeros after the last.
__device__ __forceinline__ void bring(half *k, half *v, const Table &t, Places &places, int head, int left) {
    const int EIGHTS = HEAD / 8;
    for (int part = 0; part < KEYS / SLAB_ROWS; part++) {
        for (int i = threadIdx.x; i < SLAB_ROWS * EIGHTS; i += MANY_THREADS) {
            int key = i / EIGHTS, column = i % EIGHTS * 8;
            const byte *row = places.row(key, t.row_bytes) + head * KV::HEAD_BYTES;
            int to = (SLAB_ROWS * part + key) * HEAD_LD + column;
            Eights<KV>::bring(k + to, row + t.k_at, column, key < left);
            Eights<KV>::bring(v + to, row + t.v_at, column, key < left);
        }
        left -= SLAB_ROWS;
        places.turn(left);
    }
}

// Queries of a warp's lines, sixteen columns of them at a time.
struct Queries {
    uint_t kept[Q_IN_REGISTERS ? DEEP : 1][4];
    const half *row;  // in shared memory

    static __device__ __forceinline__ uint_t two(const float *line, int column) {
        if (!line) return 0;
        float2 x = *(const float2 *)(line + column);
        return two_halves(x.x, x.y);
    }
    // `low` and `high` are the lane's lines; null: no line.
    __device__ __forceinline__ void keep(const float *low, const float *high, half *shared) {
        int lane = threadIdx.x % WARP, group = lane / 4;
        half *mine = shared + threadIdx.x / WARP * 16 * HEAD_LD;
        row = mine + lane % 16 * HEAD_LD + lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            int column = 16 * i + lane % 4 * 2;
            uint_t a[4] = {two(low, column), two(high, column), two(low, column + 8), two(high, column + 8)};
            for (int j = 0; j < 4; j++) {
                if (Q_IN_REGISTERS) kept[Q_IN_REGISTERS ? i : 0][j] = a[j];
                else *(uint_t *)(mine + (group + j % 2 * 8) * HEAD_LD + column + j / 2 * 8) = a[j];
            }
        }
        if (!Q_IN_REGISTERS) __syncwarp();
    }
    __device__ __forceinline__ void get(int i, uint_t (&a)[4]) const {
        if (Q_IN_REGISTERS)
            for (int j = 0; j < 4; j++) a[j] = kept[Q_IN_REGISTERS ? i : 0][j];
        else
            load_blocks(a, row + 16 * i);
    }
};

__device__ __forceinline__ void score_keys(const half *k, const Queries &queries, float (&scores)[KEYS / 8][4]) {
    int lane = threadIdx.x % WARP;
    const half *row = k + (lane / 16 * 8 + lane % 8) * HEAD_LD + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
        for (int j = 0; j < 4; j++) scores[n][j] = 0.0f;
#pragma unroll
    for (int i = 0; i < DEEP; i++) {
        uint_t a[4];
        queries.get(i, a);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2) {
            uint_t b[4];
            load_blocks(b, row + 8 * n * HEAD_LD + 16 * i);
            multiply(scores[n], a, b[0], b[1]);
            multiply(scores[n + 1], a, b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void add_values(const half *v, const uint_t (&shares)[KEYS / 8][2],
                                           float (&sums)[HEAD / 8][4]) {
    int lane = threadIdx.x % WARP;
    const half *row = v + (lane / 8 % 2 * 8 + lane % 8) * HEAD_LD + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        uint_t a[4] = {shares[2 * i][0], shares[2 * i][1], shares[2 * i + 1][0], shares[2 * i + 1][1]};
#pragma unroll
        for (int n = 0; n < HEAD / 8; n += 2) {
            uint_t b[4];
            load_blocks_turned(b, row + 16 * i * HEAD_LD + 8 * n);
            multiply(sums[n], a, b[0], b[1]);
            multiply(sums[n + 1], a, b[2], b[3]);
        }
    }
}

// One of the two lines that a lane shares with three others.
struct Line {
    int from, sees;  // keys
    float most, sum;  // of what was seen; the sum is this lane's part
};

__device__ __forceinline__ float halves_sum(uint_t two) {
    return __half2float(__ushort_as_half(two & 0xffff)) + __half2float(__ushort_as_half(two >> 16));
}

// Scores of the keys from `begin` on become shares, and are added to a line's sum; the factor by which its
// results change first.
template <int WHICH>
__device__ __forceinline__ float share_out(Line &line, float (&scores)[KEYS / 8][4],
                                           uint_t (&shares)[KEYS / 8][2], int begin, bool all, float scale,
                                           float softcap) {
    int column = begin + threadIdx.x % 4 * 2;
    float here = -INFINITY_F;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
        for (int j = 0; j < 2; j++) {
            float &score = scores[n][2 * WHICH + j];
            score = as_power(score, scale, softcap);
            int key = column + 8 * n + j;
            if (!all && (key < line.from || key >= line.sees)) score = -INFINITY_F;
            here = fmaxf(here, score);
        }
    here = quad_max(here);
    float before = line.most;
    if (here > before + OUTGROWN || before == -INFINITY_F) line.most = fmaxf(before, here);
    float most = line.most > -INFINITY_F ? line.most : 0.0f;  // nothing is seen yet: shares are 0
    float factor = before > -INFINITY_F && line.most > before ? exp2f(before - line.most) : 1.0f, added = 0.0f;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
        shares[n][WHICH] = two_halves(exp2f(scores[n][2 * WHICH] - most), exp2f(scores[n][2 * WHICH + 1] - most));
        added += halves_sum(shares[n][WHICH]);  // what the values are multiplied by, and nothing else
    }
    line.sum = fmaf(line.sum, factor, added);
    return factor;
}

// Blocks: (tiles, KV heads). Shared memory: a `Shared`.
extern "C" __global__ void __launch_bounds__(MANY_THREADS, HEAD <= 128 ? 2 : 1)
    attend_many(const float *q, const Tile *tiles, Table t, float *y, const float *sinks, float scale,
                float softcap, int n_heads, int n_kv_heads) {
    Shared &s = *(Shared *)shared_memory;
    Tile tile = tiles[blockIdx.x];
    int of_kv = n_heads / n_kv_heads, head = blockIdx.y * of_kv, lines = tile.rows * of_kv;
    int lane = threadIdx.x % WARP, mine = threadIdx.x / WARP * 16 + lane / 4;
    Line line[2];
    int64 at[2];  // of a line's numbers, in the query and in the result
    for (int i = 0; i < 2; i++) {
        int number = mine + 8 * i, row = number / of_kv;
        line[i].sees = number < lines ? tile.length + row : 0;
        line[i].from = tile.window ? max(0, line[i].sees - tile.window) : 0;
        line[i].most = -INFINITY_F, line[i].sum = 0.0f;
        at[i] = ((int64)(tile.q + row) * n_heads + head + number % of_kv) * HEAD;
    }
    Queries queries;
    queries.keep(line[0].sees ? q + at[0] : nullptr, line[1].sees ? q + at[1] : nullptr, s.q);
    float sums[HEAD / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
        for (int j = 0; j < 4; j++) sums[n][j] = 0.0f;
    int end = tile.length + tile.rows - 1;
    // Keys that every line sees: those up to the first row's last, from the last row's first on.
    int every_from = tile.window ? max(0, end - tile.window) : 0, every_end = tile.length;
    bool full = lines == LINES;
    Places places(t, tile.first, end);
    bring(s.k[0], s.v[0], t, places, blockIdx.y, end);
    for (int begin = 0, which = 0; begin < end; begin += KEYS, which ^= 1) {
        arrived();
        __syncthreads();  // and all warps have used what the next ones replace
        if (begin + KEYS < end)
            bring(s.k[which ^ 1], s.v[which ^ 1], t, places, blockIdx.y, end - begin - KEYS);
        float scores[KEYS / 8][4];
        uint_t shares[KEYS / 8][2];
        score_keys(s.k[which], queries, scores);
        bool all = full && begin >= every_from && begin + KEYS <= every_end;
        float low = share_out<0>(line[0], scores, shares, begin, all, scale, softcap);
        float high = share_out<1>(line[1], scores, shares, begin, all, scale, softcap);
        if (__ballot_sync(ALL_LANES, low != 1.0f || high != 1.0f)) {
#pragma unroll
            for (int n = 0; n < HEAD / 8; n++)
                sums[n][0] *= low, sums[n][1] *= low, sums[n][2] *= high, sums[n][3] *= high;
        }
        add_values(s.v[which], shares, sums);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum = quad_sum(line[i].sum);
        if (!line[i].sees) continue;
        if (sinks) sum += exp2f(sinks[head + (mine + 8 * i) % of_kv] * LOG2_E - line[i].most);
        float *to = y + at[i] + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++)
            *(float2 *)(to + 8 * n) = make_float2(sums[n][2 * i] / sum, sums[n][2 * i + 1] / sum);
    }
}
