/* The code of BODY compiled for each set of instructions, and the choice among them when it is called. */

#define NAME(x) x##_portable
#include "lanes_portable.h"
#include "vectors.h"
#include BODY
#undef NAME

#if defined(__x86_64__)
BEGIN_TARGET("avx2,fma,f16c")
#define NAME(x) x##_avx2
#include "lanes_avx2.h"
#include "vectors.h"
#include BODY
#undef NAME
END_TARGET

BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define NAME(x) x##_avx512
#include "lanes_avx512.h"
#include "vectors.h"
#include BODY
#undef NAME
END_TARGET

#define AT_LEVEL(level, function, ...)                        \
    ((level) == LEVEL_AVX512 ? function##_avx512(__VA_ARGS__) \
     : (level) == LEVEL_AVX2 ? function##_avx2(__VA_ARGS__)   \
                             : function##_portable(__VA_ARGS__))
#else
#define AT_LEVEL(level, function, ...) ((void)(level), function##_portable(__VA_ARGS__))
#endif
