// Everything that is neither a product nor attention: norms, rotations, activations, sums, choices.
//
// All of it is bound by memory. A processor of an H100 must have about 20 KB under way to keep memory busy,
// which is more than one float of each of its 2048 threads: so four numbers (16 bytes) are taken at a time
// where addresses and widths allow it. And nothing may compute for longer than it reads: rows and columns are
// told apart by divisions of 32 bits, which take a fifth of the instructions of those of 64.

#include "int8.cuh"
#include "rope.cuh"

#define EACH(i, n) \
    for (int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (int64)gridDim.x * blockDim.x)

#define WIDE 4  // numbers of a float4

// Whether it may be read as float4 (null may: it is not read).
__device__ __forceinline__ bool is_wide(const void *p) { return (uint64)p % sizeof(float4) == 0; }

struct Spot {
    int64 row;
    int column;
};

__device__ __forceinline__ Spot spot(int64 i, int width) {
    if (i <= 0xffffffffll) return {(uint_t)i / (uint_t)width, (int)((uint_t)i % (uint_t)width)};
    return {i / width, (int)(i % width)};
}

// --- norms: a block for each slice of a row; x and y may be the same. Shared memory: a float for each warp.
// The second reading of a slice finds it in the cache of the processor.

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// x / sqrt(mean(x^2) + eps) * w; each of `heads` slices of a row by itself, all with one w. `in_bytes`, if it
// is not null, gets the same as rows of bytes: of one slice, whose width is a multiple of 32.
extern "C" __global__ void rms_norm(const float *x, const float *w, float *y, byte *in_bytes, int width,
                                    int heads, float eps) {
    int n = width / heads;
    const float *from = x + (int64)blockIdx.x * n;
    float *to = y + (int64)blockIdx.x * n, sum = 0.0f;
    bool wide = n % WIDE == 0 && is_wide(x) && is_wide(w) && is_wide(y);
    if (wide)
        for (int i = threadIdx.x; i < n / WIDE; i += blockDim.x) {
            float4 v = ((const float4 *)from)[i];
            sum = dot(v, v, sum);
        }
    else
        for (int i = threadIdx.x; i < n; i += blockDim.x) sum = fmaf(from[i], from[i], sum);
    float s = 1.0f / sqrtf(block_sum(sum, (float *)shared_memory) / n + eps);
    if (wide) {
        byte *row = in_bytes ? in_bytes + (int64)blockIdx.x * int8_row(n) : nullptr;
        for (int begin = 0; begin < n / WIDE; begin += blockDim.x) {  // the same for all lanes of a warp
            int i = begin + threadIdx.x;
            bool there = i < n / WIDE;
            float4 z = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (there) {
                float4 v = ((const float4 *)from)[i], u = ((const float4 *)w)[i];
                ((float4 *)to)[i] = z = {v.x * s * u.x, v.y * s * u.y, v.z * s * u.z, v.w * s * u.w};
            }
            if (row) put_rounded(z, there, row, n, i);
        }
    } else
        for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i] * s * w[i];
}

// (x - mean) / sqrt(variance + eps) * gain + bias; gain and bias may be null.
extern "C" __global__ void layer_norm(const float *x, const float *gain, const float *bias, float *y,
                                      int width, float eps) {
    const float *from = x + (int64)blockIdx.x * width;
    float *to = y + (int64)blockIdx.x * width, *parts = (float *)shared_memory, sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += from[i];
    float mean = block_sum(sum, parts) / width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float d = from[i] - mean;
        squares = fmaf(d, d, squares);
    }
    float scale = 1.0f / sqrtf(block_sum(squares, parts) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float z = (from[i] - mean) * scale * (gain ? gain[i] : 1.0f);
        to[i] = bias ? z + bias[i] : z;
    }
}

// --- rotations

// turns[token][pair] = cos and sin of position * frequency, times the magnitude. The product is rounded to
// float32 before its cosine, as everybody does; before that it needs more digits.
extern "C" __global__ void angles(const double *frequencies, const int *positions, float2 *turns,
                                  float magnitude, int pairs, int tokens) {
    EACH(i, (int64)pairs * tokens) {
        Spot at = spot(i, pairs);
        float angle = (float)((double)positions[at.row] * frequencies[at.column]);
        turns[i] = {cosf(angle) * magnitude, sinf(angle) * magnitude};
    }
}

// A thread for each pair of columns, those that do not turn among them. `token_of` says whose turn a row has;
// null: its own. x and y may be the same.
extern "C" __global__ void rope(const float *x, const float2 *turns, const int *token_of, float *y, int rows,
                                int n_heads, int head_dim, int n_rot, int interleaved) {
    int pairs = head_dim / 2, turning = n_rot / 2;
    EACH(i, (int64)rows * n_heads * pairs) {
        Spot at = spot(i, pairs);
        int64 row = spot(at.row, n_heads).row;
        const float2 *mine = turns + (int64)(token_of ? token_of[row] : row) * turning;
        turn_pair(x + at.row * head_dim, mine, y + at.row * head_dim, at.column, turning, interleaved);
    }
}

// --- one number at a time: z may be x or y

template <typename F>
__device__ __forceinline__ void each_of(const float *x, float *z, int64 n, F f) {
    int64 wide = is_wide(x) && is_wide(z) ? n / WIDE : 0;
    EACH(i, wide) {
        float4 v = ((const float4 *)x)[i];
        ((float4 *)z)[i] = {f(v.x), f(v.y), f(v.z), f(v.w)};
    }
    EACH(i, n - wide * WIDE) z[wide * WIDE + i] = f(x[wide * WIDE + i]);
}

template <typename F>
__device__ __forceinline__ void each_of_two(const float *x, const float *y, float *z, int64 n, F f) {
    int64 wide = is_wide(x) && is_wide(y) && is_wide(z) ? n / WIDE : 0;
    EACH(i, wide) {
        float4 v = ((const float4 *)x)[i], u = ((const float4 *)y)[i];
        ((float4 *)z)[i] = {f(v.x, u.x), f(v.y, u.y), f(v.z, u.z), f(v.w, u.w)};
    }
    EACH(i, n - wide * WIDE) z[wide * WIDE + i] = f(x[wide * WIDE + i], y[wide * WIDE + i]);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ __forceinline__ float gelu_of(float x, int exact) {
    float cubic = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + (exact ? erff(x * 0.7071067811865476f) : tanhf(cubic)));
}

extern "C" __global__ void swiglu(const float *x, const float *y, float *z, int64 n) {
    each_of_two(x, y, z, n, [](float a, float b) { return silu(a) * b; });
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

extern "C" __global__ void sigmoid_gate(const float *x, const float *y, float *z, int64 n) {
    each_of_two(x, y, z, n, [](float a, float b) { return sigmoid(a) * b; });
}

extern "C" __global__ void multiply(const float *x, const float *y, float *z, int64 n) {
    each_of_two(x, y, z, n, [](float a, float b) { return a * b; });
}

extern "C" __global__ void geglu(const float *x, const float *y, float *z, int64 n, int exact) {
    each_of_two(x, y, z, n, [exact](float a, float b) { return gelu_of(a, exact) * b; });
}

extern "C" __global__ void gelu(const float *x, float *z, int64 n, int exact) {
    each_of(x, z, n, [exact](float a) { return gelu_of(a, exact); });
}

// What is not a number stays what it is: fmaxf would hide it.
extern "C" __global__ void relu(const float *x, float *z, int64 n) {
    each_of(x, z, n, [](float a) { return a < 0.0f ? 0.0f : a; });
}

extern "C" __global__ void add(const float *x, const float *y, float *z, int64 n) {
    each_of_two(x, y, z, n, [](float a, float b) { return a + b; });
}

// `by`: one more factor, or NULL.
extern "C" __global__ void scale(const float *x, float *z, int64 n, float factor, const float *by) {
    if (by) factor *= *by;
    each_of(x, z, n, [factor](float a) { return a * factor; });
}

// Each row by what its token's position says.
extern "C" __global__ void grow(const float *x, const int *positions, const int *token_of, float *z, int64 n,
                                int width, float by, int every) {
    EACH(i, n) {
        int64 row = spot(i, width).row;
        int position = positions[token_of ? token_of[row] : row];
        z[i] = x[i] * (1.0f + by * logf(1.0f + (float)(position / every)));
    }
}

extern "C" __global__ void softcap(const float *x, float *z, int64 n, float cap) {
    each_of(x, z, n, [cap](float a) { return tanhf(a / cap) * cap; });
}

extern "C" __global__ void round_bf16(const float *x, __nv_bfloat16 *z, int64 n) {
    int64 wide = is_wide(x) && is_wide(z) ? n / WIDE : 0;
    EACH(i, wide) {
        float4 v = ((const float4 *)x)[i];
        ((uint2 *)z)[i] = {two_bf16(v.x, v.y), two_bf16(v.z, v.w)};
    }
    EACH(i, n - wide * WIDE) z[wide * WIDE + i] = __float2bfloat16(x[wide * WIDE + i]);
}

// Rows of floats as rows of bytes: four numbers of a thread at a time, and all lanes of a warp to the end.
extern "C" __global__ void round_int8(const float *x, byte *y, int cols, int64 n) {
    int64 row_bytes = int8_row(cols), fours = n / WIDE;
    for (int64 begin = (int64)blockIdx.x * blockDim.x; begin < fours; begin += (int64)gridDim.x * blockDim.x) {
        int64 i = begin + threadIdx.x;
        bool there = i < fours;
        Spot at = spot(there ? i : 0, cols / WIDE);
        float4 v = there ? ((const float4 *)x)[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        put_rounded(v, there, y + at.row * row_bytes, cols, at.column);
    }
}

// --- rows and columns: of floats, or of float4, of which a row has a fourth as many

template <typename T>
__device__ __forceinline__ void columns_copied(const T *x, T *y, int width, int ldy, int64 n) {
    EACH(i, n) {
        Spot at = spot(i, width);
        y[at.row * ldy + at.column] = x[i];
    }
}

// x[rows, width] as the columns of y from y on, which has ldy of them.
extern "C" __global__ void copy_columns(const float *x, float *y, int width, int ldy, int64 n) {
    if (width % WIDE == 0 && ldy % WIDE == 0 && is_wide(x) && is_wide(y))
        columns_copied((const float4 *)x, (float4 *)y, width / WIDE, ldy / WIDE, n / WIDE);
    else
        columns_copied(x, y, width, ldy, n);
}

// Of slices of `width` columns those from `first` on, in front of slices of `wide` ones.
extern "C" __global__ void copy_slices(const float *x, float *y, int width, int first, int wide, int count,
                                       int64 n) {
    EACH(i, n) y[i / count * wide + i % count] = x[i / count * width + first + i % count];
}

// Few words from page-locked memory of the host: a read of the GPU's own waits behind no copy of weights.
extern "C" __global__ void fetch_words(const int *from, int *to, int64 n) {
    EACH(i, n) to[i] = from[i];
}

template <typename T>
__device__ __forceinline__ void rows_selected(const T *x, const int *wanted, T *y, int width, int64 n) {
    EACH(i, n) {
        Spot at = spot(i, width);
        y[i] = x[(int64)wanted[at.row] * width + at.column];
    }
}

extern "C" __global__ void select_rows(const float *x, const int *wanted, float *y, int width, int64 n) {
    if (width % WIDE == 0 && is_wide(x) && is_wide(y))
        rows_selected((const float4 *)x, wanted, (float4 *)y, width / WIDE, n / WIDE);
    else
        rows_selected(x, wanted, y, width, n);
}

__device__ __forceinline__ float sum_of(float a, float b) { return a + b; }
__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

template <typename T>
__device__ __forceinline__ void row_added(T *y, const T *row, int width, int64 n) {
    EACH(i, n) y[i] = sum_of(y[i], row[spot(i, width).column]);
}

// y += row, for each row of y: the bias of a product that cuBLAS made.
extern "C" __global__ void add_row(float *y, const float *row, int width, int64 n) {
    if (width % WIDE == 0 && is_wide(y) && is_wide(row))
        row_added((float4 *)y, (const float4 *)row, width / WIDE, n / WIDE);
    else
        row_added(y, row, width, n);
}

__device__ __forceinline__ float times(float s, float a) { return s * a; }
__device__ __forceinline__ float4 times(float s, float4 a) { return {s * a.x, s * a.y, s * a.z, s * a.w}; }

template <typename T>
__device__ __forceinline__ void rows_gated(const float *gates, const T *x, T *y, int width, int64 n) {
    EACH(i, n) y[i] = times(sigmoid(gates[spot(i, width).row]), x[i]);
}

// As sigmoid_gate, with one number for each row; x and y may be the same.
extern "C" __global__ void sigmoid_gate_rows(const float *gates, const float *x, float *y, int width,
                                             int64 n) {
    if (width % WIDE == 0 && is_wide(x) && is_wide(y))
        rows_gated(gates, (const float4 *)x, (float4 *)y, width / WIDE, n / WIDE);
    else
        rows_gated(gates, x, y, width, n);
}

template <typename T>
__device__ __forceinline__ void slices_selected(const T *x, T *y, int width, int first, int64 n) {
    EACH(i, n) {
        Spot at = spot(i, width);
        y[i] = x[(2 * at.row + first) * width + at.column];
    }
}

// y = every second slice of x, of `width` columns each, from `first` (0 or 1) on. Rows follow each other,
// so they need not be told apart.
extern "C" __global__ void every_second(const float *x, float *y, int width, int first, int64 n) {
    if (width % WIDE == 0 && is_wide(x) && is_wide(y))
        slices_selected((const float4 *)x, (float4 *)y, width / WIDE, first, n / WIDE);
    else
        slices_selected(x, y, width, first, n);
}

template <typename T>
__device__ __forceinline__ void pairs_summed(const T *pairs, T *y, int width, int n_used, int64 n) {
    EACH(i, n) {
        Spot at = spot(i, width);
        const T *from = pairs + at.row * n_used * width + at.column;
        T sum = from[0];
        for (int place = 1; place < n_used; place++) sum = sum_of(sum, from[(int64)place * width]);
        y[i] = sum;
    }
}

// y[token] = the sum of its pairs, in the order of places.
extern "C" __global__ void experts_sum(const float *pairs, float *y, int width, int n_used, int64 n) {
    if (width % WIDE == 0 && is_wide(pairs) && is_wide(y))
        pairs_summed((const float4 *)pairs, (float4 *)y, width / WIDE, n_used, n / WIDE);
    else
        pairs_summed(pairs, y, width, n_used, n);
}

extern "C" __global__ void set_entries(uint64 *table, const int64 *index, const uint64 *value, int n) {
    EACH(i, n) table[index[i]] = value[i];
}

// --- choices

#define NOT_A_NUMBER __int_as_float(0x7fc00000)

// A number and whose it is, as one number: of two keys the greater one is of the greater number, or of equals
// (0 and -0 are) of the one with the lower id. What is not a number is less than all that are. No id has the
// key 0.
__device__ __forceinline__ uint64 key_of(float x, int id) {
    uint_t bits = __float_as_uint(x == 0.0f ? 0.0f : x), order = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64)(x != x ? 0u : order) << 32 | (uint_t)~id;
}

// The same where what is not a number is to be heard of: it comes before all that are.
__device__ __forceinline__ uint64 key_of_logit(float x, int id) {
    return x != x ? (uint64)0xffffffffu << 32 | (uint_t)~id : key_of(x, id);
}

__device__ __forceinline__ int id_of(uint64 key) { return (int)~(uint_t)key; }

__device__ __forceinline__ float value_of(uint64 key) {
    uint_t order = key >> 32;
    return order && order != 0xffffffffu ? __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order) : NOT_A_NUMBER;
}

__device__ __forceinline__ uint64 warp_greatest(uint64 key) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        uint64 other = __shfl_xor_sync(ALL_LANES, key, step);
        if (other > key) key = other;
    }
    return key;
}

// How a router chooses.
struct Routing {
    int n_experts, n_used, normalise, sigmoid, groups, groups_used, group_best;
    float scale;
    const float *bias, *choice_bias, *expert_scale;  // a number for each expert, or NULL
    const int *slots;  // where each expert lies, or -1; NULL: by its own number
};

// Of a warp's row: what each expert is liked, those of all but the best groups no more. `worth`: memory for a
// number of each group.
__device__ __forceinline__ void keep_best_groups(float *liked, float *worth, const Routing &r, int lane) {
    int size = r.n_experts / r.groups;
    for (int g = lane; g < r.groups; g += WARP) {
        uint64 last = ~0ull;
        worth[g] = 0.0f;
        for (int place = 0; place < r.group_best; place++) {
            uint64 best = 0;
            for (int i = g * size; i < (g + 1) * size; i++) {
                uint64 key = key_of(liked[i], i);
                if (key < last && key > best) best = key;
            }
            last = best;
            if (best) worth[g] += liked[id_of(last)];
        }
    }
    __syncwarp();
    for (int g = lane; g < r.groups; g += WARP) {
        int better = 0;
        for (int other = 0; other < r.groups; other++)
            better += worth[other] > worth[g] || (worth[other] == worth[g] && other < g);
        for (int i = g * size; better >= r.groups_used && i < (g + 1) * size; i++) liked[i] = -INFINITY_F;
    }
    __syncwarp();
}

// For each row the experts that it goes through and their shares: the softmax over all or a sigmoid of each, by
// itself or as a part of those chosen. A warp for each row; shared memory: two floats for each expert and one
// for each group, for each warp.
extern "C" __global__ void route(const float *scores, int *chosen, float *shares, int tokens, Routing r) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n = r.n_experts;
    int token = blockIdx.x * (blockDim.x / WARP) + warp;
    if (token >= tokens) return;  // a whole warp
    float *liked = (float *)shared_memory + warp * (2 * n + r.groups), *parts = liked + n;
    float most = -INFINITY_F, sum = 0.0f;
    for (int i = lane; i < n; i += WARP) {
        liked[i] = scores[(int64)token * n + i] + (r.bias ? r.bias[i] : 0.0f);
        most = fmaxf(most, liked[i]);
    }
    most = warp_max(most);
    for (int i = lane; i < n; i += WARP) sum += expf(liked[i] - most);
    sum = warp_sum(sum);
    for (int i = lane; i < n; i += WARP) {
        parts[i] = r.sigmoid ? 1.0f / (1.0f + expf(-liked[i])) : expf(liked[i] - most) / sum;
        if (r.choice_bias) liked[i] = parts[i] + r.choice_bias[i];
    }
    __syncwarp();
    if (r.groups_used < r.groups) keep_best_groups(liked, parts + n, r, lane);
    float of_chosen = 0.0f;
    uint64 last = ~0ull;  // the key of the expert that was chosen before: the next is the best of those below
    for (int place = 0; place < r.n_used; place++) {
        uint64 best = 0;
        for (int i = lane; i < n; i += WARP) {
            uint64 key = key_of(liked[i], i);
            if (key < last && key > best) best = key;
        }
        last = warp_greatest(best);
        int expert = id_of(last);
        of_chosen += parts[expert];
        if (lane == 0) {
            chosen[(int64)token * r.n_used + place] = r.slots ? r.slots[expert] : expert;
            shares[(int64)token * r.n_used + place] =
                parts[expert] * (r.expert_scale ? r.expert_scale[expert] : 1.0f);
        }
    }
    __syncwarp();
    float part = r.scale / (r.normalise ? fmaxf(of_chosen, 1e-20f) : 1.0f);
    for (int place = lane; place < r.n_used; place += WARP) shares[(int64)token * r.n_used + place] *= part;
}

// The k greatest numbers of each row of logits, best first, in two steps, so that many processors read a row:
// `greatest_parts` takes the best of each part of it, `greatest` the best of those. Both with
// GREATEST_THREADS threads and GREATEST_SHARED bytes of shared memory; k is at most GREATEST_MOST.
// (backends/cuda/top_k.py names these as well.)
#define GREATEST_MOST 256
#define GREATEST_THREADS 256
#define AT_ONCE 4                               // keys that a thread looks at before the block meets
#define CHUNK (AT_ONCE * GREATEST_THREADS)
#define ROOM (2 * CHUNK)                        // a power of two, and at least GREATEST_MOST + CHUNK
#define GREATEST_SHARED (8 * (ROOM + 1))        // the keys, and how many there are

// Sorts the first `found` keys of the room, best first, and behind them writes 0 up to a power of two.
__device__ __forceinline__ void sort_keys(uint64 *room, int found) {
    int n = WARP;
    while (n < found) n *= 2;
    for (int i = found + threadIdx.x; i < n; i += blockDim.x) room[i] = 0;
    __syncthreads();
    for (int run = 2; run <= n; run *= 2) {  // bitonic: runs that rise and fall in turn become longer ones
        for (int step = run / 2; step > 0; step /= 2) {
            for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
                int low = 2 * i - (i & (step - 1)), high = low + step;
                uint64 a = room[low], b = room[high];
                if ((a < b) == ((low & run) == 0)) room[low] = b, room[high] = a;
            }
            __syncthreads();
        }
    }
}

// The k best of n keys, which `read` gives, to the beginning of the room, best first; 0 where there are no
// more. All that beat the k-th best so far are collected, and sorted when the room is nearly full: seldom,
// unless each is better than all before it. The order in which they are collected is unknown, but no two are
// equal.
template <typename Read>
__device__ __forceinline__ void keep_best(Read read, int n, int k) {
    uint64 *room = (uint64 *)shared_memory, least = 0;
    int *found = (int *)(room + ROOM);
    if (threadIdx.x == 0) *found = 0;
    __syncthreads();
    for (int begin = 0; begin < n; begin += CHUNK) {
        uint64 keys[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int i = begin + j * GREATEST_THREADS + threadIdx.x;
            keys[j] = i < n ? read(i) : 0;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (keys[j] > least) room[atomicAdd(found, 1)] = keys[j];
        __syncthreads();
        int so_far = *found;
        __syncthreads();
        if (so_far <= ROOM - CHUNK) continue;  // the next chunk has room even if all of it is better
        sort_keys(room, so_far);
        least = room[k - 1];
        if (threadIdx.x == 0) *found = k;
        __syncthreads();
    }
    int so_far = *found;
    sort_keys(room, so_far);
    for (int i = so_far + threadIdx.x; i < k; i += blockDim.x) room[i] = 0;
    __syncthreads();
}

// The same for k = 1, which needs no room: most answers are chosen so.
template <typename Read>
__device__ __forceinline__ void keep_greatest(Read read, int n) {
    uint64 *room = (uint64 *)shared_memory, best = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        uint64 key = read(i);
        if (key > best) best = key;
    }
    best = warp_greatest(best);
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x < WARP) {
        best = warp_greatest(threadIdx.x < GREATEST_THREADS / WARP ? room[threadIdx.x] : 0);
        if (threadIdx.x == 0) room[0] = best;
    }
    __syncthreads();
}

// Grid: (parts, rows). keys[row][part][k]; a row has `width` numbers.
extern "C" __global__ void greatest_parts(const float *logits, uint64 *keys, int width, int k) {
    int size = (width - 1) / gridDim.x + 1, first = min((int)blockIdx.x * size, width);
    int n = min(size, width - first);
    const float *from = logits + (int64)blockIdx.y * width + first;
    auto read = [=](int i) { return key_of_logit(from[i], first + i); };
    if (k == 1)
        keep_greatest(read, n);
    else
        keep_best(read, n, k);
    uint64 *to = keys + ((int64)blockIdx.y * gridDim.x + blockIdx.x) * k;
    for (int i = threadIdx.x; i < k; i += blockDim.x) to[i] = ((uint64 *)shared_memory)[i];
}

// Grid: rows. Where a row has fewer than k numbers, ids are -1 behind them.
extern "C" __global__ void greatest(const uint64 *keys, int *ids, float *values, int parts, int k) {
    const uint64 *from = keys + (int64)blockIdx.x * parts * k;
    auto read = [=](int i) { return from[i]; };
    if (k == 1)
        keep_greatest(read, parts);
    else
        keep_best(read, parts * k, k);
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        uint64 key = ((uint64 *)shared_memory)[i];
        ids[(int64)blockIdx.x * k + i] = key ? id_of(key) : -1;
        values[(int64)blockIdx.x * k + i] = value_of(key);
    }
}
