/* A mixture of which some experts are left to others, without computing them here.

   ggml's products by experts take as many experts of every row. So the pairs of a row and an expert that stay
   here are put one behind the other, and the products get as many rows as there are pairs: nodes between the two
   of this file have their sizes set while the graph runs. Python sets them back before the next run. */

#include <stdint.h>
#include <string.h>

struct pairs {
    const int32_t *chosen; /* the experts of each row */
    const float *shares;   /* and what share each has in the row's result */
    int64_t rows, used, stride; /* of chosen: how many for each row, and numbers from row to row */
    const uint8_t *left_out;    /* of each expert, whether it is left out */
    int32_t *expert, *row;      /* what is made of it: pairs */
    float *share;
    int64_t **sizes; /* sizes of tensors that are as long as there are pairs */
    int64_t n_sizes;
    int64_t count; /* of pairs */
};

struct sum {
    const struct pairs *pairs;
    const float *results; /* of each pair */
    float *out;           /* of each row */
    int64_t width;
};

int64_t hetrun_experts_layout(void) { return 1000 * sizeof(struct pairs) + sizeof(struct sum); }

/* A node of ggml's; one thread. */
void hetrun_experts_sort(void *node, int ith, int nth, void *data) {
    struct pairs *p = data;
    int64_t n = 0;
    (void)node, (void)nth;
    if (ith)
        return;
    for (int64_t row = 0; row < p->rows; row++)
        for (int64_t k = 0; k < p->used; k++) {
            int32_t expert = p->chosen[row * p->stride + k];
            if (p->left_out[expert])
                continue;
            p->expert[n] = expert;
            p->row[n] = (int32_t)row;
            p->share[n++] = p->shares[row * p->used + k];
        }
    p->count = n;
    for (int64_t i = 0; i < p->n_sizes; i++)
        *p->sizes[i] = n;
}

/* A node of ggml's: the results of pairs, by their shares, into their rows. Each thread has some columns. */
void hetrun_experts_sum(void *node, int ith, int nth, void *data) {
    const struct sum *s = data;
    const struct pairs *p = s->pairs;
    int64_t a = s->width * ith / nth, b = s->width * (ith + 1) / nth;
    (void)node;
    for (int64_t row = 0; row < p->rows; row++)
        memset(s->out + row * s->width + a, 0, (size_t)(b - a) * sizeof(float));
    for (int64_t i = 0; i < p->count; i++) {
        const float *from = s->results + i * s->width;
        float *to = s->out + p->row[i] * s->width, share = p->share[i];
        for (int64_t c = a; c < b; c++)
            to[c] += share * from[c];
    }
}
