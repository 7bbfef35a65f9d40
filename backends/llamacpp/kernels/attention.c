/* The library's functions, and the same code compiled for each set of instructions (attention_body.h). */

#include "attention.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define STRINGS(...) #__VA_ARGS__

#if defined(__clang__)
#define BEGIN_TARGET(t) _Pragma(STRINGS(clang attribute push(__attribute__((target(t))), apply_to = function)))
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_TARGET(t) _Pragma("GCC push_options") _Pragma(STRINGS(GCC target(t)))
#define END_TARGET _Pragma("GCC pop_options")
#endif
#define INLINE static inline __attribute__((always_inline))

/* A 16-bit float, bit by bit. */
static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13, bits;
    float value;
    if ((h & 0x7c00) == 0x7c00) {
        bits = sign | 0x7f800000 | rest;
    } else {
        float scaled; /* the exponent is 112 too small; multiplying by 2^112 puts subnormal ones right, too */
        memcpy(&scaled, &rest, 4);
        scaled *= 0x1p112f;
        memcpy(&bits, &scaled, 4);
        bits |= sign;
    }
    memcpy(&value, &bits, 4);
    return value;
}

#define NAME(x) x##_portable
#include "lanes_portable.h"
#include "attention_body.h"
#undef NAME

#if defined(__x86_64__)
BEGIN_TARGET("avx2,fma,f16c")
#define NAME(x) x##_avx2
#include "lanes_avx2.h"
#include "attention_body.h"
#undef NAME
END_TARGET

BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define NAME(x) x##_avx512
#include "lanes_avx512.h"
#include "attention_body.h"
#undef NAME
END_TARGET
#endif

/* Changes whenever the structures do: a library that was built from other sources is not used. */
int64_t hetrun_kernels_layout(void) {
    return 1000000 * sizeof(struct sequence) + 1000 * sizeof(struct pass) + sizeof(struct layer);
}

#if defined(__x86_64__)
/* Compilers of a few years ago do not know this one by name. */
static int has_f16c(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* The best instructions that this CPU and its system have. */
int hetrun_kernels_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return LEVEL_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        return LEVEL_AVX2;
#endif
    return LEVEL_PORTABLE;
}

/* Cut the work of a pass. Returns how many partials there will be, of each query head. */
int64_t hetrun_attention_plan(struct pass *p) {
    p->chunks = p->partials = 0;
    for (int64_t i = 0; i < p->n; i++) {
        struct sequence *s = &p->sequences[i];
        s->chunks = chunk_at(s->position + s->length - 1, p->window) - chunk_at(s->position, p->window) + 1;
        s->chunks_before = p->chunks;
        s->partials_before = p->partials;
        p->chunks += s->chunks;
        p->partials += s->chunks * s->rows;
    }
    return p->partials;
}

/* Floats of scratch memory that a thread needs for sequences of up to `rows` query rows. */
int64_t hetrun_attention_scratch(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim) {
    int64_t queries = at_least(rows * (heads / kv_heads), AT_ONCE);
    return queries * (2 * padded(head_dim) + BLOCK) + 4 * padded(queries) + 2 * BATCH * padded(head_dim);
}

/* One thread's share of a layer: a function as ggml's custom nodes call it. */
void hetrun_attend(void *node, int ith, int nth, void *layer) {
    const struct layer *a = layer;
    (void)node;
#if defined(__x86_64__)
    if (a->level == LEVEL_AVX512) {
        attend_avx512(a, ith, nth);
        return;
    }
    if (a->level == LEVEL_AVX2) {
        attend_avx2(a, ith, nth);
        return;
    }
#endif
    attend_portable(a, ith, nth);
}
