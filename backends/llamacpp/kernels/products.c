/* The library's functions, how weights are kept, and how work is shared; the products themselves are compiled
   for each set of instructions (products_body.h). */

#include "products.h"
#include "common.h"

/* Compilers of a few years ago do not know AVX-VNNI. */
#if defined(__clang__)
#define HAS_AVX_VNNI (__clang_major__ >= 12)
#else
#define HAS_AVX_VNNI (__GNUC__ >= 11)
#endif

/* Those of arm64 can make a function for dot products if they are as new as this, or make all of them so. */
#if defined(__ARM_FEATURE_DOTPROD)
#define HAS_DOTPROD 1
#elif defined(__aarch64__) && defined(__linux__)
#if defined(__clang__)
#define HAS_DOTPROD (__clang_major__ >= 16)
#else
#define HAS_DOTPROD (__GNUC__ >= 8)
#endif
#else
#define HAS_DOTPROD 0
#endif

#define WHOLE 12582912.0f /* adding it leaves the nearest whole number in the lowest bits */
#define LEAST 1e-36f      /* activations up to here are zero: 127 / x would not be a number */

enum {
    TILE_BYTES = 256 << 10, /* of activations that are gone through for each group of weights */
    MOST_BLOCK = 210,       /* bytes of a stored block */
    BEGINNING = 4096        /* bytes of the next product that a thread asks memory for */
};

/* 32 columns of a row of activations. */
struct rounded {
    int8_t x[BLOCK];
    float scale;
    float sum;        /* of what x stands for */
    int32_t start[2]; /* what dot products begin with: Q6_K has one for each half, others one */
};

/* How GGUF stores a type, and how blocks become steps of a packed group. Of each block halves (scales) come
   first in a step, [half][block][row], in whole lines of 64 bytes; then its words, [block][word][row]. */
struct form {
    int type;
    int block, bytes;    /* columns of a stored block, and what it takes */
    int blocks;          /* that make one step */
    int halves, half_at; /* how many, and where they are stored */
    int words, word_at;
    uint32_t flip; /* of each word: signed weights become unsigned */
};

INLINE struct form form_of(int64_t type) {
    switch (type) {
        case TYPE_Q4_0: return (struct form){TYPE_Q4_0, 32, 18, 2, 1, 0, 4, 2, 0};
        case TYPE_Q4_1: return (struct form){TYPE_Q4_1, 32, 20, 2, 2, 0, 4, 4, 0};
        case TYPE_Q8_0: return (struct form){TYPE_Q8_0, 32, 34, 2, 1, 0, 8, 2, 0x80808080};
        case TYPE_Q4_K: return (struct form){TYPE_Q4_K, 256, 144, 1, 2, 0, 35, 4, 0};
        case TYPE_Q6_K: return (struct form){TYPE_Q6_K, 256, 210, 1, 1, 208, 52, 0, 0};
        default: return (struct form){0};
    }
}

/* What unsigned weights are too large by. */
INLINE int32_t offset_of(int64_t type) {
    return type == TYPE_Q4_0 ? 8 : type == TYPE_Q8_0 ? 128 : type == TYPE_Q6_K ? 32 : 0;
}

/* Where words of a step begin. */
INLINE int64_t head(struct form f) { return (f.halves * f.blocks * 32 + 63) / 64 * 64; }

INLINE int64_t step_bytes(struct form f) { return head(f) + f.blocks * f.words * 64; }

INLINE int64_t group_bytes(int64_t type, int64_t cols) {
    const struct form f = form_of(type);
    return cols / (f.block * f.blocks) * step_bytes(f);
}

INLINE int64_t half_at(struct form f, int half, int block, int row) {
    return (half * f.blocks + block) * 32 + row * 2;
}

/* Which line of a block a word of each row lies in: memory likes it best when lines are read one behind the
   other. Of Q6_K's words 0 to 31 are nibbles, 32 to 47 pairs of bits, 48 to 51 scales. The scales go first; then
   for each half of the columns 8 words of nibbles beside those of bits, and the other 8. */
INLINE int line_of(int type, int word) {
    if (type != TYPE_Q6_K) return word;
    if (word >= 48) return word - 48;
    if (word >= 32) return 4 + (word - 32) / 8 * 24 + word % 8 * 2 + 1;
    return 4 + word / 16 * 24 + (word % 16 < 8 ? word % 8 * 2 : word % 16 + 8);
}

INLINE int64_t word_in(struct form f, int word, int block, int row) {
    return head(f) + (block * f.words + line_of(f.type, word)) * 64 + row * 4;
}

INLINE int32_t word_at(const void *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return word;
}

INLINE float bits_as_float(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Columns of the results. */
INLINE int64_t columns_out(const struct product *p) { return p->activation == PLAIN ? p->rows : p->rows / 2; }

/* How work is shared */

/* What a thread does: units from `from` to `to`. A unit is a group of columns of `out` for a tile of rows. */
struct work {
    int64_t tile, groups, units; /* rows of a tile; groups of one tile; units of all tiles */
    int64_t workers, fixed;      /* threads that take part, and units that each takes at first */
    int64_t mine, from, to;
};

/* Rows of activations that a thread has memory for. */
static int64_t most_rows(int64_t cols) {
    int64_t each = cols / BLOCK * (int64_t)sizeof(struct rounded);
    return at_least(1, TILE_BYTES / (each * AT_ONCE)) * AT_ONCE;
}

/* Rows that are rounded together: tiles are about equally large. */
static int64_t tile_rows(int64_t n, int64_t cols) {
    int64_t tiles = at_least(1, (n + most_rows(cols) - 1) / most_rows(cols));
    return at_least(1, ((n + tiles - 1) / tiles + AT_ONCE - 1) / AT_ONCE * AT_ONCE);
}

static struct work work_of(const struct product *p, int ith, int nth) {
    struct work w = {.tile = tile_rows(p->n, p->cols), .groups = (columns_out(p) + ROWS - 1) / ROWS};
    w.units = (p->n + w.tile - 1) / w.tile * w.groups;
    w.workers = at_least(1, at_most(nth, p->slots));
    w.fixed = w.units * 3 / (4 * w.workers); /* the rest goes to whoever is fast */
    w.mine = ith < w.workers ? ith : -1;
    w.from = w.to = 0;
    return w;
}

/* The next units of a thread: first those that are always its own, then smaller and smaller takes of what is
   left. Returns whether there are any. */
static int take(const struct product *p, struct work *w) {
    if (w->mine < 0) return 0;
    if (w->to == 0 && w->fixed) {
        w->from = w->mine * w->fixed;
        w->to = w->from + w->fixed;
        return 1;
    }
    int64_t before = w->fixed * w->workers, size;
    int32_t taken = __atomic_load_n(p->counters, __ATOMIC_RELAXED);
    do {
        size = at_least(1, (w->units - before - taken) / (2 * w->workers));
        if (before + taken >= w->units) return 0;
    } while (!__atomic_compare_exchange_n(p->counters, &taken, taken + (int32_t)size, 1, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    w->from = before + taken;
    w->to = w->from + size;
    return 1;
}

/* Nobody takes a unit any more once all are here: the counters are ready for the next call. */
static void done(const struct product *p, int nth) {
    if (__atomic_add_fetch(p->counters + 1, 1, __ATOMIC_ACQ_REL) == nth) p->counters[0] = p->counters[1] = 0;
}

/* Inlined: compilers drop calls of functions that do nothing but ask for memory. */
INLINE void fetch(const uint8_t *x, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(x + i, 0, 2);
}

/* Asks memory for what this thread begins with in the next product, while it waits for the others. */
static void fetch_beginning(const struct product *p, int ith, int nth) {
    struct work w = work_of(p, ith, nth);
    if (w.mine < 0) return;
    int64_t bytes = group_bytes(p->type, p->cols), all = w.groups * bytes;
    int64_t at = w.mine * w.fixed % w.groups * bytes;
    if (p->activation == PLAIN) {
        fetch(p->weights + at, at_most(BEGINNING, all - at));
    } else { /* it takes turns with groups of both halves */
        fetch(p->weights + at, at_most(bytes, BEGINNING / 2));
        fetch(p->weights + all + at, at_most(bytes, BEGINNING / 2));
    }
}

/* Asks memory for a line of what lies ahead in a group. How far ahead, and that only Q6_K's lines should come
   nearer than the second cache, was measured. */
INLINE void ask(int type, const uint8_t *x) {
    if (type == TYPE_Q6_K)
        __builtin_prefetch(x + 2304, 0, 3);
    else
        __builtin_prefetch(x + (type == TYPE_Q4_K ? 1280 : 3072), 0, 2);
}

#define READ_LATER(when) /* for compilers that read too early (dots_neon.h) */

typedef void multiplier(int64_t n, float *out, const uint8_t *weights, const uint8_t *others,
                        const struct rounded *x, int64_t cols);

#define NAME(x) x##_portable
#include "dots_portable.h"
#include "products_body.h"
#undef NAME

#if defined(__x86_64__)
BEGIN_TARGET("avx2,fma,f16c")
#define NAME(x) x##_avx2
#define VNNI 0
#include "dots_avx2.h"
#include "products_body.h"
#undef VNNI
#undef NAME
END_TARGET

#if HAS_AVX_VNNI
BEGIN_TARGET("avxvnni,avx2,fma,f16c")
#define NAME(x) x##_avx_vnni
#define VNNI 1
#include "dots_avx2.h"
#include "products_body.h"
#undef VNNI
#undef NAME
END_TARGET
#endif

BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define NAME(x) x##_avx512
#include "dots_avx512.h"
#include "products_body.h"
#undef NAME
END_TARGET
#endif

#if HAS_DOTPROD
BEGIN_TARGET("arch=armv8.2-a+dotprod")
#define NAME(x) x##_dotprod
#include "dots_neon.h"
#include "products_body.h"
#undef NAME
END_TARGET
#endif

/* How weights are kept */

/* One block of one row, as it is stored, to its place among its group's blocks, or back. */
static void pack_block(struct form f, const uint8_t *stored, uint8_t *step, int block, int row) {
    for (int i = 0; i < f.halves; i++) memcpy(step + half_at(f, i, block, row), stored + f.half_at + 2 * i, 2);
    for (int i = 0; i < f.words; i++) {
        uint32_t word = (uint32_t)word_at(stored + f.word_at + 4 * i) ^ f.flip;
        memcpy(step + word_in(f, i, block, row), &word, 4);
    }
}

static void unpack_block(struct form f, uint8_t *stored, const uint8_t *step, int block, int row) {
    for (int i = 0; i < f.halves; i++) memcpy(stored + f.half_at + 2 * i, step + half_at(f, i, block, row), 2);
    for (int i = 0; i < f.words; i++) {
        uint32_t word = (uint32_t)word_at(step + word_in(f, i, block, row)) ^ f.flip;
        memcpy(stored + f.word_at + 4 * i, &word, 4);
    }
}

/* Whether a weight of such a type and shape can be packed. */
int64_t hetrun_products_takes(int64_t type, int64_t rows, int64_t cols) {
    const struct form f = form_of(type);
    return f.block && rows > 0 && cols > 0 && cols % (f.block * f.blocks) == 0;
}

/* Bytes of a packed weight. */
int64_t hetrun_products_packed(int64_t type, int64_t rows, int64_t cols) {
    return (rows + ROWS - 1) / ROWS * group_bytes(type, cols);
}

/* GGUF's blocks to a packed weight. Rows that the last group lacks are zero. */
void hetrun_products_pack(int64_t type, int64_t rows, int64_t cols, const uint8_t *stored, uint8_t *packed) {
    static const uint8_t zero[MOST_BLOCK];
    const struct form f = form_of(type);
    int64_t row_bytes = cols / f.block * f.bytes;
    for (int64_t first = 0; first < rows; first += ROWS, stored += ROWS * row_bytes)
        for (int64_t b = 0; b < cols / f.block; b += f.blocks, packed += step_bytes(f)) {
            memset(packed, 0, head(f));
            for (int row = 0; row < ROWS; row++)
                for (int i = 0; i < f.blocks; i++) {
                    const uint8_t *block = stored + row * row_bytes + (b + i) * f.bytes;
                    pack_block(f, first + row < rows ? block : zero, packed, i, row);
                }
        }
}

/* Blocks as floats */

static float half_in(const uint8_t *x) {
    uint16_t half;
    memcpy(&half, x, 2);
    return half_to_float(half);
}

/* 16 bytes of nibbles: columns 0 to 15, then 16 to 31. */
static void nibbles_to_floats(const uint8_t *x, float scale, int offset, float low, float *out) {
    for (int i = 0; i < 16; i++) {
        out[i] = (float)((x[i] & 15) - offset) * scale + low;
        out[i + 16] = (float)((x[i] >> 4) - offset) * scale + low;
    }
}

static void q4_k_to_floats(const uint8_t *x, float *out) {
    const uint8_t *s = x + 4, *nibbles = x + 16;
    float scale = half_in(x), minimum = half_in(x + 2);
    for (int b = 0; b < 8; b++) {
        int six = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | (s[b - 4] >> 6 << 4);
        int low = b < 4 ? s[b + 4] & 63 : (s[b + 4] >> 4) | (s[b] >> 6 << 4);
        float d = scale * (float)six, m = minimum * (float)low;
        for (int i = 0; i < 32; i++)
            out[32 * b + i] = (float)(nibbles[b / 2 * 32 + i] >> (b % 2 * 4) & 15) * d - m;
    }
}

static void q6_k_to_floats(const uint8_t *x, float *out) {
    const int8_t *scales = (const int8_t *)x + 192;
    float scale = half_in(x + 208);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, run = i % 128 / 32;
        int low = x[half * 64 + run % 2 * 32 + i % 32] >> (run / 2 * 4) & 15;
        int high = x[128 + half * 32 + i % 32] >> (2 * run) & 3;
        out[i] = (float)((low | high << 4) - 32) * ((float)scales[i / 16] * scale);
    }
}

static void block_to_floats(int64_t type, const uint8_t *x, float *out) {
    switch (type) {
        case TYPE_Q4_0: nibbles_to_floats(x + 2, half_in(x), 8, -0.0f, out); break;
        case TYPE_Q4_1: nibbles_to_floats(x + 4, half_in(x), 0, half_in(x + 2), out); break;
        case TYPE_Q8_0:
            for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)x[2 + i] * half_in(x);
            break;
        case TYPE_Q4_K: q4_k_to_floats(x, out); break;
        default: q6_k_to_floats(x, out);
    }
}

/* One thread's share of the rows that are looked up: a function as ggml's custom nodes call it. */
void hetrun_lookup(void *node, int ith, int nth, void *lookup) {
    const struct lookup *l = lookup;
    const struct form f = form_of(l->type);
    uint8_t block[MOST_BLOCK];
    (void)node;
    for (int64_t i = l->n * ith / nth; i < l->n * (ith + 1) / nth; i++) {
        const uint8_t *step = l->weights + l->ids[i] / ROWS * group_bytes(l->type, l->cols);
        float *out = l->out + i * l->out_stride;
        for (int64_t b = 0; b < l->cols / f.block; b++, out += f.block) {
            unpack_block(f, block, step, (int)(b % f.blocks), l->ids[i] % ROWS);
            block_to_floats(l->type, block, out);
            if ((b + 1) % f.blocks == 0) step += step_bytes(f);
        }
    }
}

/* Products */

/* Changes whenever the structures do: a library that was built from other sources is not used. */
int64_t hetrun_products_layout(void) { return 1000 * sizeof(struct product) + sizeof(struct lookup); }

/* The best instructions that this CPU and its system have. */
int hetrun_products_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        return LEVEL_AVX512_VNNI;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        return HAS_AVX_VNNI && has_avx_vnni() ? LEVEL_AVX_VNNI : LEVEL_AVX2;
#endif
#if HAS_DOTPROD
    if (has_dotprod()) return LEVEL_DOTPROD;
#endif
    return LEVEL_PORTABLE;
}

/* Bytes of scratch memory that a thread needs for products of up to n rows of activations. */
int64_t hetrun_products_scratch(int64_t n, int64_t cols) {
    return (at_most(n, most_rows(cols)) * (cols / BLOCK) * (int64_t)sizeof(struct rounded) + 63) / 64 * 64;
}

/* One thread's share of a product: a function as ggml's custom nodes call it. */
void hetrun_product(void *node, int ith, int nth, void *product) {
    const struct product *p = product;
    (void)node;
    switch (p->level) {
#if defined(__x86_64__)
        case LEVEL_AVX512_VNNI: product_avx512(p, ith, nth); break;
#if HAS_AVX_VNNI
        case LEVEL_AVX_VNNI: product_avx_vnni(p, ith, nth); break;
#endif
        case LEVEL_AVX2: product_avx2(p, ith, nth); break;
#endif
#if HAS_DOTPROD
        case LEVEL_DOTPROD: product_dotprod(p, ith, nth); break;
#endif
        default: product_portable(p, ith, nth);
    }
}
