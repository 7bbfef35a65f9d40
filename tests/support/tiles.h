/* AMX's tiles in plain C, for the compiler's command line (-include): kernels that use them run on other CPUs. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static __thread struct {
    uint8_t palette, start, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_sizes_now;
static __thread int8_t tiles_now[8][16][64];

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig(from) memcpy(&tile_sizes_now, from, sizeof(tile_sizes_now))
#define _tile_storeconfig(to) memcpy(to, &tile_sizes_now, sizeof(tile_sizes_now))
#define _tile_loadd(tile, from, stride) tile_load(tile, from, stride)
#define _tile_stored(tile, to, stride) tile_store(tile, to, stride)
#define _tile_dpbssd(sums, a, b) tile_multiply(sums, a, b)

static inline void tile_load(int tile, const void *from, long stride) {
    memset(tiles_now[tile], 0, sizeof(tiles_now[tile]));
    for (int row = 0; row < tile_sizes_now.rows[tile]; row++)
        memcpy(tiles_now[tile][row], (const char *)from + row * stride, tile_sizes_now.row_bytes[tile]);
}

static inline void tile_store(int tile, void *to, long stride) {
    for (int row = 0; row < tile_sizes_now.rows[tile]; row++)
        memcpy((char *)to + row * stride, tiles_now[tile][row], tile_sizes_now.row_bytes[tile]);
}

/* Each 32-bit number of a row of `sums` gets four products for each word of the same row of `a`. */
static inline void tile_multiply(int sums, int a, int b) {
    for (int row = 0; row < tile_sizes_now.rows[sums]; row++)
        for (int word = 0; word < tile_sizes_now.row_bytes[a] / 4; word++)
            for (int column = 0; column < tile_sizes_now.row_bytes[sums] / 4; column++) {
                int32_t sum;
                memcpy(&sum, &tiles_now[sums][row][4 * column], 4);
                for (int i = 0; i < 4; i++)
                    sum += tiles_now[a][row][4 * word + i] * tiles_now[b][word][4 * column + i];
                memcpy(&tiles_now[sums][row][4 * column], &sum, 4);
            }
}
