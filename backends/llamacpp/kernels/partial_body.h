/* Products by a weight of which only a part is in memory (partial.h). Included by products_body.h. */

/* Rounds all rows of activations: each thread for itself where they are few, else all threads together, each some
   tiles, and no thread goes on before all are done. Returns where they are. */
static const struct rounded *NAME(round_all)(const struct product *p, int ith) {
    struct rounded *own = (struct rounded *)(p->scratch + ith * p->scratch_size);
    const int64_t n = kept_rows(p), tile = shared_rows(p->level, p->type, n, p->cols);
    const int64_t tiles = (n + tile - 1) / tile;
    if (tiles == 1) {
        NAME(round_tile)(p, 0, n, own);
        return own;
    }
    struct rounded *all = (struct rounded *)p->shared;
    for (;;) {
        int64_t i = __atomic_fetch_add(p->counters + 2, 1, __ATOMIC_RELAXED);
        if (i >= tiles) break;
        int64_t first = i * tile, end = at_most(first + tile, n);
        NAME(round_tile)(p, first, end, rows_behind(p, all, first));
        __atomic_add_fetch(p->counters + 3, 1, __ATOMIC_RELEASE);
    }
    while (__atomic_load_n(p->counters + 3, __ATOMIC_ACQUIRE) < tiles) PAUSE();
    return all;
}

/* Packs groups of a piece's rows, of both halves if there is a gate, and gives the piece back behind its last
   ones. Returns 0 if they do not come. */
static int NAME(bring)(const struct product *p, struct unit unit, uint8_t *packed) {
    const struct partial *w = p->partial;
    const struct piece *piece = w->piece + unit.piece;
    int64_t rank = w->rank[unit.piece], row_bytes = stored_row_bytes(p->type, p->cols);
    const uint8_t *stored = w->supply->wait(w->supply->ring, rank);
    if (!stored) return 0;
    for (int half = 0; half < halves_of(p); half++) {
        int64_t row = unit.first * ROWS, rows = at_most(unit.groups * ROWS, columns_out(p) - row);
        const uint8_t *from = stored + piece->starts[half] + (unit.first - piece->first) * ROWS * row_bytes;
        NAME(pack)(p->type, rows, p->cols, from, packed + half * unit.groups * group_bytes(p->type, p->cols));
    }
    int64_t units = (piece->groups + unit_groups(p) - 1) / unit_groups(p);
    if (__atomic_add_fetch(w->taken + unit.piece, 1, __ATOMIC_ACQ_REL) == units) {
        w->taken[unit.piece] = 0;
        w->supply->release(w->supply->ring, rank);
    }
    return 1;
}

/* Neighbouring groups. They lie one behind the other in `packed`, or in the weight, if that is NULL. As many rows
   of activations as stay in a cache are multiplied by all of them. */
static void NAME(multiply_unit)(const struct product *p, multiplier *multiply, struct unit unit,
                                const uint8_t *packed, const struct rounded *x) {
    const int64_t bytes = group_bytes(p->type, p->cols), n = kept_rows(p), tile = tile_rows(p);
    for (int64_t first = 0; first < n; first += tile, x = rows_behind(p, x, tile))
        for (int64_t i = 0; i < unit.groups; i++) {
            struct NAME(rows) rows = {packed + i * bytes, packed + (unit.groups + i) * bytes};
            if (p->activation == PLAIN) rows.second = NULL;
            if (!packed) rows = NAME(rows_of)(p, unit.first + i);
            NAME(group)(p, multiply, rows, unit.first + i, unit.first + i, first, at_most(first + tile, n), x);
        }
}

/* Threads take units in the order of the pieces, so that those come when they are wanted. */
static void NAME(partial_product)(const struct product *p, int ith, int nth) {
    multiplier *multiply = NAME(multiplier_of)(p->type);
    const int64_t rows = own_rows_bytes(p->level, p->type, kept_rows(p), p->cols);
    uint8_t *packed = p->scratch + ith * p->scratch_size + rows;
    const struct rounded *x = ith < p->slots ? NAME(round_all)(p, ith) : NULL;
    struct cursor at = {0};
    for (struct unit unit; x && next_unit(p, &at, &unit);) {
        int streamed = p->partial->rank[unit.piece] >= 0;
        if (streamed && !NAME(bring)(p, unit, packed)) break;
        NAME(multiply_unit)(p, multiply, unit, streamed ? packed : NULL, x);
    }
    done(p, nth);
}
