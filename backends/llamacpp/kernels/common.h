/* What the libraries have in common: compiling the same code for several sets of instructions, and halves. */

#ifndef HETRUN_COMMON_H
#define HETRUN_COMMON_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

#define STRINGS(...) #__VA_ARGS__

#if defined(__clang__)
#define BEGIN_TARGET(t) _Pragma(STRINGS(clang attribute push(__attribute__((target(t))), apply_to = function)))
#define END_TARGET _Pragma("clang attribute pop")
#define UNROLL _Pragma("unroll")
#else
#define BEGIN_TARGET(t) _Pragma("GCC push_options") _Pragma(STRINGS(GCC target(t)))
#define END_TARGET _Pragma("GCC pop_options")
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE float bits_as_float(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

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

#if defined(__x86_64__)
/* Compilers of a few years ago do not know these by name. */
static inline int has_f16c(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static inline int has_avx_vnni(void) {
    unsigned a = 0, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 16);
}

/* Whether there are tiles for bytes, and Linux keeps them for each thread and lets this process use them: it has
   to be asked for that. */
static inline int may_use_amx_int8(void) {
#if defined(__linux__)
    const unsigned tiles = 1 << 24 | 1 << 25, kept = 1 << 17 | 1 << 18;
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    unsigned a, b, c = 0, d = 0, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tiles) != tiles) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & kept) == kept && !syscall(SYS_arch_prctl, request, tile_data);
#else
    return 0;
#endif
}
#endif

#if defined(__aarch64__)
/* And instructions for atomics, which compilers use beside those for dot products. */
static inline int has_dotprod(void) {
#if defined(__linux__)
    const unsigned long atomics = 1 << 8, dotprod = 1 << 20; /* as the kernel numbers them */
    return (getauxval(AT_HWCAP) & (atomics | dotprod)) == (atomics | dotprod);
#else
    return 1; /* asked only if compilers take it for granted */
#endif
}
#endif

#endif
