// Rows of keys and values between the slabs that they lie in and one piece of memory, in which a copy takes
// them to the host or brings them: [token][plane]. The planes are the K and V rows of each layer.

#include "common.cuh"

#define SLAB_ROWS 32

// Where a row of a plane lies; a plane's rows of a slab follow each other.
__device__ __forceinline__ byte *place(const uint64 *slabs, int64 row, int64 plane_at, int row_bytes) {
    return (byte *)slabs[row / SLAB_ROWS] + plane_at + (row % SLAB_ROWS) * row_bytes;
}

template <typename Unit>
__device__ __forceinline__ void copy_row(byte *target, const byte *source, int nbytes) {
    Unit *to = (Unit *)target;
    const Unit *from = (const Unit *)source;
    for (int i = threadIdx.x; i < nbytes / (int)sizeof(Unit); i += blockDim.x) to[i] = from[i];
}

__device__ __forceinline__ void copy_bytes(byte *target, const byte *source, int nbytes) {
    if (((uint64)target | (uint64)source | nbytes) % 4 == 0)
        copy_row<uint_t>(target, source, nbytes);
    else
        copy_row<ushort_t>(target, source, nbytes);
}

// A block for each row (x) of each plane (y). `sizes[p]` are the bytes of a row of plane p, `planes[p]` where
// the plane begins in a slab, `packed_at[p]` where it begins in what a token has there, which are `token_bytes`.
extern "C" __global__ void pack_rows(const uint64 *slabs, const int64 *slots, const int64 *planes,
                                     const int *sizes, const int64 *packed_at, byte *packed, int64 token_bytes) {
    int p = blockIdx.y, size = sizes[p];
    byte *target = packed + blockIdx.x * token_bytes + packed_at[p];
    copy_bytes(target, place(slabs, slots[blockIdx.x], planes[p], size), size);
}

extern "C" __global__ void spread_rows(const uint64 *slabs, const int64 *slots, const int64 *planes,
                                       const int *sizes, const int64 *packed_at, const byte *packed,
                                       int64 token_bytes) {
    int p = blockIdx.y, size = sizes[p];
    const byte *source = packed + blockIdx.x * token_bytes + packed_at[p];
    copy_bytes(place(slabs, slots[blockIdx.x], planes[p], size), source, size);
}
