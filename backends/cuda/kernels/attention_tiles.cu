// Attention for many rows; compiled for each type of keys and values and each size of heads up to 256.

#include "attention.cuh"

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
    int window;  // and at most this many tokens back; 0: all
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
