/* Sums of products whose columns are added word by word, and are done with that: included by some dots_*.h. */

INLINE NAME(vi) NAME(end)(const int type, NAME(vi) sum, int32_t start) {
    (void)type;
    (void)start;
    return sum;
}

/* Columns of some more words. */
INLINE NAME(vi) NAME(add_words)(const int type, NAME(vi) sum, const NAME(vu) *weights, const int8_t *x,
                                const int k, const int words) {
    UNROLLED for (int i = 0; i < words; i++) sum = NAME(add)(type, sum, weights[i], x, k + i);
    return sum;
}
