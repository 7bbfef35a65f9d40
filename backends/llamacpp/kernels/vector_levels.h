/* Sets of instructions that functions over floats are compiled for, and which of them this CPU has. */

#ifndef HETRUN_VECTOR_LEVELS_H
#define HETRUN_VECTOR_LEVELS_H

#include "common.h"

enum { LEVEL_PORTABLE, LEVEL_AVX2, LEVEL_AVX512 };

/* The best instructions that this CPU and its system have. */
static inline int best_level(void) {
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

#endif
