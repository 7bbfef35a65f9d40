/* The library's functions. How weights are kept stands in packing.h, how threads share work in sharing.h; the
   products themselves are compiled for each set of instructions (products_body.h). */

#include "products.h"
#include "common.h"
#include "lookups.h"
#include "packing.h"
#include "sharing.h"
#include "mixture.h"

/* Compilers of a few years ago do not know AVX-VNNI. */
#if defined(__clang__)
#define HAS_AVX_VNNI (__clang_major__ >= 12)
#else
#define HAS_AVX_VNNI (__GNUC__ >= 11)
#endif

/* Nor AMX. Linux has to be asked for it. */
#if defined(__linux__)
#define HAS_AMX HAS_AVX_VNNI
#else
#define HAS_AMX 0
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
#define CLAMP 7.0f        /* of CLAMPED, as gpt-oss has it */
#define CLAMP_STEEPNESS 1.702f
#define LEAST 1e-36f      /* activations up to here are zero: 127 / x would not be a number */

/* Whether lines should come nearer than the second cache. It was measured: only of Q6_K, and not on AMD's CPUs,
   where that takes half of its speed from a single row. */
INLINE int asks_for_first_cache(int type) {
#if defined(__x86_64__)
    return type == TYPE_Q6_K && !__builtin_cpu_is("amd");
#else
    return type == TYPE_Q6_K;
#endif
}

/* Asks memory for a line of what lies so far ahead in a group. */
INLINE void ask(int first_cache, int ahead, const uint8_t *x) {
    if (first_cache)
        __builtin_prefetch(x + 2304, 0, 3);
    else
        __builtin_prefetch(x + ahead, 0, 2);
}

enum { FLOATS_AHEAD = 3072 }; /* the same of weights that are floats */

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

enum {
    RUN = 64,  /* rows of activations that weights are unpacked for at once, where that is worth it */
    READY = 16 /* blocks of a group of weights that are unpacked at once: 11 KiB */
};

/* What dot products of half a block begin with. */
INLINE int32_t start_of_half(const int type, const struct rounded *x, const int half) {
    return has_lows(type) ? 0 : x->start[half];
}

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

#if HAS_AMX /* compilers do not use it by themselves */
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,amx-tile,amx-int8"
#else
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
#endif
BEGIN_TARGET(AVX512)
#define TILES HAS_AMX
#define NAME(x) x##_avx512
#include "dots_avx512.h"
#include "products_body.h"
#undef NAME
#undef TILES
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

#include "cached_mixture.h"

/* Whether weights can be kept so, and what that takes */

/* Whether a weight of such a type and shape can be packed. */
int64_t hetrun_products_takes(int64_t type, int64_t rows, int64_t cols) {
    const struct form f = form_of(type);
    return f.block && rows > 0 && cols > 0 && cols % (f.block * f.blocks) == 0;
}

/* Bytes of a packed weight. */
int64_t hetrun_products_packed(int64_t type, int64_t rows, int64_t cols) {
    return (rows + ROWS - 1) / ROWS * group_bytes(type, cols);
}

/* GGUF's blocks to a packed weight, with these instructions. */
void hetrun_products_pack(int64_t type, int64_t rows, int64_t cols, const uint8_t *stored, uint8_t *packed,
                          int64_t level) {
    switch (level) {
#if defined(__x86_64__)
#if HAS_AMX
        case LEVEL_AMX_INT8: /* nor this */
#endif
        case LEVEL_AVX512_VNNI: pack_avx512(type, rows, cols, stored, packed); break;
#if HAS_AVX_VNNI
        case LEVEL_AVX_VNNI: /* it has nothing more for packing */
#endif
        case LEVEL_AVX2: pack_avx2(type, rows, cols, stored, packed); break;
#endif
#if HAS_DOTPROD
        case LEVEL_DOTPROD: pack_dotprod(type, rows, cols, stored, packed); break;
#endif
        default: pack_portable(type, rows, cols, stored, packed);
    }
}

/* One thread's share of the rows that are looked up: a function as ggml's custom nodes call it. */
void hetrun_lookup(void *node, int ith, int nth, void *lookup) {
    (void)node;
    look_up(lookup, ith, nth);
}

/* Products */

/* Changes whenever the structures do, or what functions are given: a library that was built from other sources
   is not used. */
int64_t hetrun_products_layout(void) {
    const int64_t arguments = 2; /* how often they were settled */
    int64_t mixtures = 1000000000 * arguments + sizeof(struct routing) + sizeof(struct expert_products) +
                       sizeof(struct cached_mixture) + sizeof(struct expert_hint);
    return 1000000 * sizeof(struct product) + 1000 * sizeof(struct partial) + sizeof(struct lookup) + mixtures;
}

/* Whether this CPU and its system have all instructions of a level. A better one may be there without one below
   it: the first CPUs with AVX512-VNNI have no AVX-VNNI. */
int hetrun_products_runs(int level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    switch (level) {
#if defined(__x86_64__)
        case LEVEL_AMX_INT8:
            return HAS_AMX && hetrun_products_runs(LEVEL_AVX512_VNNI) && may_use_amx_int8();
        case LEVEL_AVX512_VNNI:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512vnni");
        case LEVEL_AVX_VNNI: return HAS_AVX_VNNI && hetrun_products_runs(LEVEL_AVX2) && has_avx_vnni();
        case LEVEL_AVX2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
#if HAS_DOTPROD
        case LEVEL_DOTPROD: return has_dotprod();
#endif
        default: return level == LEVEL_PORTABLE;
    }
}

/* The best instructions that this CPU and its system have. To ask takes a virtual machine long. */
int hetrun_products_level(void) {
    static int known = -1;
    int level = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (level < 0) {
        for (level = LEVEL_DOTPROD; !hetrun_products_runs(level);) level--;
        __atomic_store_n(&known, level, __ATOMIC_RELAXED);
    }
    return level;
}

/* Bytes of scratch memory that a thread needs for products of up to n rows of activations. */
int64_t hetrun_products_scratch(int64_t type, int64_t n, int64_t cols) {
    return own_rows_bytes(hetrun_products_level(), type, n, cols);
}

/* What it needs besides for a partial weight, with or without a gate. */
int64_t hetrun_products_unit(int64_t type, int64_t cols, int64_t halves) {
    return groups_at_once(hetrun_products_level(), type, cols, halves) * group_bytes(type, cols) * halves;
}

/* Bytes that all threads need together for it: 0 where each rounds all rows for itself. */
int64_t hetrun_products_shared(int64_t type, int64_t n, int64_t cols) {
    if (n <= shared_rows(LEVEL_PORTABLE, type, n, cols)) return 0;
    return kept_bytes(type, in_whole(n, TILE_ROWS), cols);
}

/* One thread's share of a product: a function as ggml's custom nodes call it. */
void hetrun_product(void *node, int ith, int nth, void *product) {
    const struct product *p = product;
    (void)node;
    switch (p->level) {
#if defined(__x86_64__)
#if HAS_AMX
        case LEVEL_AMX_INT8: product_with_tiles_avx512(p, ith, nth); break;
#endif
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

/* Who of the experts takes which rows; one thread. */
void hetrun_route(void *node, int ith, int nth, void *routing) {
    (void)node, (void)nth;
    if (ith == 0) route(routing);
}

/* One thread's share of a product by all experts: they follow on one another without waiting. */
void hetrun_expert_products(void *node, int ith, int nth, void *products) {
    const struct expert_products *m = products;
    struct product now, then;
    int64_t expert = -1;
    for (int more = next_expert(m, &expert, &now); more; now = then) {
        more = next_expert(m, &expert, &then);
        if (more) now.next = &then;
        hetrun_product(node, ith, nth, &now);
    }
    expert = -1;
    if (m->after && next_expert(m->after, &expert, &now)) fetch_beginning(&now, ith, nth);
    clear_left_out(m, ith, nth);
}

/* Has reading begin. The node's own memory is for the results of gate and up. */
void hetrun_want_experts(void *node, int ith, int nth, void *mixture) {
    (void)node, (void)nth;
    if (ith == 0) want_chosen(mixture);
}

/* One thread's share of a mixture whose experts come when they are wanted. */
void hetrun_cached_mixture(void *node, int ith, int nth, void *mixture) {
    while (next_wave(mixture, node, ith, nth)) continue;
}

/* What the next mixture may choose: the experts that its router likes best of these rows. */
void hetrun_expert_hint(void *node, int ith, int nth, void *hint) {
    const struct expert_hint *h = hint;
    (void)node, (void)nth;
    for (int64_t row = 0; ith == 0 && row < h->rows; row++)
        h->supply->hint(h->supply->cache, h->mixture, h->chosen + row * h->stride, h->used);
}
