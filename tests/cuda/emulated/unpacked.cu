// Eight weights at a time of every type, in one program: those of the backend are made for one type each, and
// what they differ by is this.
// kernels: unpacked_F32 unpacked_F16 unpacked_BF16 unpacked_Q4_0 unpacked_Q4_1 unpacked_Q5_0 unpacked_Q5_1
// kernels: unpacked_Q8_0 unpacked_Q2_K unpacked_Q3_K unpacked_Q4_K unpacked_Q5_K unpacked_Q6_K
// kernels: unpacked_IQ4_NL unpacked_IQ4_XS unpacked_MXFP4

#include "quants.cuh"

#define UNPACKED(Q)                                                                               \
    extern "C" __global__ void unpacked_##Q(const byte *w, float *y, int pieces) {                \
        for (int p = blockIdx.x * blockDim.x + threadIdx.x; p < pieces; p += gridDim.x * blockDim.x) { \
            int block = p / Q::PIECES;                                                            \
            Eight e = Q::unpack(w + block * Q::BYTES, p % Q::PIECES);                             \
            float *to = y + block * Q::WEIGHTS;                                                   \
            for (int i = 0; i < 4; i++) {                                                         \
                to[e.a + i] = e.w[i];                                                             \
                to[e.b + i] = e.w[4 + i];                                                         \
            }                                                                                     \
        }                                                                                         \
    }

UNPACKED(F32)
UNPACKED(F16)
UNPACKED(BF16)
UNPACKED(Q4_0)
UNPACKED(Q4_1)
UNPACKED(Q5_0)
UNPACKED(Q5_1)
UNPACKED(Q8_0)
UNPACKED(Q2_K)
UNPACKED(Q3_K)
UNPACKED(Q4_K)
UNPACKED(Q5_K)
UNPACKED(Q6_K)
UNPACKED(IQ4_NL)
UNPACKED(IQ4_XS)
UNPACKED(MXFP4)
