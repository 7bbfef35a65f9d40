// A short convolution over time, then most often silu, for all sequences of a pass at once.
//
// A thread has a column and some tokens of a sequence that follow each other: it reads each of their rows
// once, and the few before them. What it reads is all there when it begins, as nothing waits for its results.

#include "states.cuh"

#define MOST_TAPS 8
#define SPAN 8  // tokens of a thread at most

// Tokens of a sequence, and which one it is of.
struct Span {
    int first, count, part, unused;
};

// Rows by how many come after them: the newest is the last of `MOST`, of which `taps` count.
template <int MOST>
__device__ __forceinline__ void convolve(const float *__restrict__ x, const float *__restrict__ weight,
                                         const float *__restrict__ biases, float *__restrict__ out,
                                         const Part *parts, const Span *spans, const uint64 *writes, int64 at,
                                         int width, int taps, int silu) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    Span span = spans[blockIdx.y];
    Part part = parts[span.part];
    float kernel[MOST], rows[MOST - 1 + SPAN], bias = biases ? biases[column] : 0.0f;
    uint64 places[SPAN];
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        int tap = i - (MOST - taps);
        kernel[i] = tap >= 0 ? weight[(int64)column * taps + tap] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < MOST - 1 + SPAN; i++) {
        int back = i - (MOST - 1), token = span.first + back;  // `back` is less than 0 before the span
        int kept = taps - 1 + token - part.first;              // its row in the state, where it is not here
        rows[i] = 0.0f;
        if (token >= part.first) {
            if (back < span.count) rows[i] = x[(int64)token * width + column];
        } else if (part.read && kept >= 0) {
            rows[i] = part_of(part.read, at)[(int64)kept * width + column];
        }
    }
#pragma unroll
    for (int t = 0; t < SPAN; t++) places[t] = t < span.count ? writes[span.first + t] : 0;
#pragma unroll
    for (int t = 0; t < SPAN; t++) {
        if (t >= span.count) break;
        float sum = bias;
#pragma unroll
        for (int i = 0; i < MOST; i++)
            if (i >= MOST - taps) sum = fmaf(rows[t + i], kernel[i], sum);
        out[(int64)(span.first + t) * width + column] = silu ? sum / (1.0f + expf(-sum)) : sum;
        if (!places[t]) continue;
        float *to = part_of(places[t], at);
#pragma unroll
        for (int i = 1; i < MOST; i++) {
            int kept = i - 1 - (MOST - taps);
            if (kept >= 0) to[(int64)kept * width + column] = rows[t + i];
        }
    }
}

// x and out are [tokens, width], weight is [width, taps], biases has a number for each column or is null; the
// state is the last taps - 1 rows. A block has blockDim.x columns (x) of a span (y).
extern "C" __global__ void causal_conv(const float *x, const float *weight, const float *biases, float *out,
                                       const Part *parts, const Span *spans, const uint64 *writes, int64 at,
                                       int width, int taps, int silu) {
    if (taps == 4)  // as most models have it
        convolve<4>(x, weight, biases, out, parts, spans, writes, at, width, 4, silu);
    else
        convolve<MOST_TAPS>(x, weight, biases, out, parts, spans, writes, at, width, taps, silu);
}
