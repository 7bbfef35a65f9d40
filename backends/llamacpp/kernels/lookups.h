/* Rows of a weight as floats: what an embedding looks up, in memory or in a file. */

#ifndef HETRUN_LOOKUPS_H
#define HETRUN_LOOKUPS_H

#include "packing.h"

enum { READ_AT_ONCE = 16384 }; /* bytes of a row that is read from a file */

static float half_in(const uint8_t *x) {
    uint16_t half;
    memcpy(&half, x, 2);
    return half_to_float(half);
}

/* 16 bytes of nibbles: columns 0 to 15, then 16 to 31. */
static void nibbles_to_floats(const uint8_t *x, float scale, int offset, float low, float *out) {
    for (int i = 0; i < 16; i++) {
        out[i] = (float)((x[i] & 15) - offset) * scale + low;
        out[i + 16] = (float)((x[i] >> 4) - offset) * scale + low;
    }
}

/* The same with 32 fifth bits before them. */
static void five_bits_to_floats(const uint8_t *x, float scale, int offset, float low, float *out) {
    uint32_t fifth = (uint32_t)word_at(x);
    for (int i = 0; i < 32; i++) {
        int nibble = i < 16 ? x[4 + i] & 15 : x[4 + i - 16] >> 4, whole = nibble | (int)(fifth >> i & 1) << 4;
        out[i] = (float)(whole - offset) * scale + low;
    }
}

/* 16 bytes of nibbles that are places in a list. */
static void places_to_floats(const uint8_t *x, const uint8_t *list, int offset, float scale, float *out) {
    for (int i = 0; i < 16; i++) {
        out[i] = (float)(list[x[i] & 15] - offset) * scale;
        out[i + 16] = (float)(list[x[i] >> 4] - offset) * scale;
    }
}

static void iq4_xs_to_floats(const uint8_t *x, float *out) {
    uint32_t upper = x[2] | (uint32_t)x[3] << 8, lower = (uint32_t)word_at(x + 4);
    for (int b = 0; b < 8; b++) {
        int six = (int)((lower >> (4 * b) & 15) | (upper >> (2 * b) & 3) << 4);
        places_to_floats(x + 8 + 16 * b, iq4_places, 128, (float)(six - 32) * half_in(x), out + 32 * b);
    }
}

static void mxfp4_to_floats(const uint8_t *x, float *out) {
    places_to_floats(x + 1, fp4_places, 12, bits_as_float(x[0] > 1 ? (x[0] - 1) << 23 : (x[0] + 1) << 21), out);
}

static void q2_0_to_floats(const uint8_t *x, float *out) {
    for (int i = 0; i < 64; i++) out[i] = (float)((x[2 + i / 4] >> (i % 4 * 2) & 3) - 1) * half_in(x);
}

static void q2_k_to_floats(const uint8_t *x, float *out) {
    float scale = half_in(x + 80), minimum = half_in(x + 82);
    for (int i = 0; i < 256; i++) {
        int both = x[i / 16], two = x[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        out[i] = (float)two * ((float)(both & 15) * scale) - (float)(both >> 4) * minimum;
    }
}

static void q3_k_to_floats(const uint8_t *x, float *out) {
    const uint8_t *s = x + 96;
    float scale = half_in(x + 108);
    for (int i = 0; i < 256; i++) {
        int h = i / 16, six = (s[h % 8] >> (h / 8 * 4) & 15) | (s[8 + h % 4] >> (h / 4 * 2) & 3) << 4;
        int two = x[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3, third = x[i % 32] >> (i / 32) & 1;
        out[i] = (float)((two | third << 2) - 4) * ((float)(six - 32) * scale);
    }
}

/* Q4_K, and Q5_K, which has 32 bytes of fifth bits before its nibbles. */
static void q4_k_to_floats(const uint8_t *x, const uint8_t *fifth, const uint8_t *nibbles, float *out) {
    const uint8_t *s = x + 4;
    float scale = half_in(x), minimum = half_in(x + 2);
    for (int b = 0; b < 8; b++) {
        int six = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | (s[b - 4] >> 6 << 4);
        int low = b < 4 ? s[b + 4] & 63 : (s[b + 4] >> 4) | (s[b] >> 6 << 4);
        float d = scale * (float)six, m = minimum * (float)low;
        for (int i = 0; i < 32; i++) {
            int whole = nibbles[b / 2 * 32 + i] >> (b % 2 * 4) & 15;
            if (fifth) whole |= (fifth[i] >> b & 1) << 4;
            out[32 * b + i] = (float)whole * d - m;
        }
    }
}

static void q6_k_to_floats(const uint8_t *x, float *out) {
    const int8_t *scales = (const int8_t *)x + 192;
    float scale = half_in(x + 208);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, run = i % 128 / 32;
        int low = x[half * 64 + run % 2 * 32 + i % 32] >> (run / 2 * 4) & 15;
        int high = x[128 + half * 32 + i % 32] >> (2 * run) & 3;
        out[i] = (float)((low | high << 4) - 32) * ((float)scales[i / 16] * scale);
    }
}

static void halves_to_floats(const uint8_t *x, float *out) {
    for (int i = 0; i < 32; i++) out[i] = half_in(x + 2 * i);
}

static void brain_to_floats(const uint8_t *x, float *out) {
    for (int i = 0; i < 32; i++) {
        uint32_t upper = (uint32_t)x[2 * i] | (uint32_t)x[2 * i + 1] << 8;
        out[i] = bits_as_float((int32_t)(upper << 16));
    }
}

static void block_to_floats(int64_t type, const uint8_t *x, float *out) {
    switch (type) {
        case TYPE_Q4_0: nibbles_to_floats(x + 2, half_in(x), 8, -0.0f, out); break;
        case TYPE_Q4_1: nibbles_to_floats(x + 4, half_in(x), 0, half_in(x + 2), out); break;
        case TYPE_Q8_0:
            for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)x[2 + i] * half_in(x);
            break;
        case TYPE_F16: halves_to_floats(x, out); break;
        case TYPE_BF16: brain_to_floats(x, out); break;
        case TYPE_Q5_0: five_bits_to_floats(x + 2, half_in(x), 16, -0.0f, out); break;
        case TYPE_Q5_1: five_bits_to_floats(x + 4, half_in(x), 0, half_in(x + 2), out); break;
        case TYPE_IQ4_NL: places_to_floats(x + 2, iq4_places, 128, half_in(x), out); break;
        case TYPE_IQ4_XS: iq4_xs_to_floats(x, out); break;
        case TYPE_MXFP4: mxfp4_to_floats(x, out); break;
        case TYPE_Q2_0: q2_0_to_floats(x, out); break;
        case TYPE_Q2_K: q2_k_to_floats(x, out); break;
        case TYPE_Q3_K: q3_k_to_floats(x, out); break;
        case TYPE_Q4_K: q4_k_to_floats(x, NULL, x + 16, out); break;
        case TYPE_Q5_K: q4_k_to_floats(x, x + 16, x + 48, out); break;
        default: q6_k_to_floats(x, out);
    }
}

/* Rows that are read from a file, some blocks at a time. */
static void look_up_in_file(const struct lookup *l, int ith, int nth) {
    const struct form f = form_of(l->type);
    uint8_t stored[READ_AT_ONCE];
    int64_t blocks = l->cols / f.block, most = READ_AT_ONCE / f.bytes;
    for (int64_t i = l->n * ith / nth; i < l->n * (ith + 1) / nth; i++)
        for (int64_t b = 0; b < blocks; b += most) {
            int64_t n = at_most(most, blocks - b), at = l->offset + (l->ids[i] * blocks + b) * f.bytes;
            if (l->supply->read(l->supply->ring, l->file, at, n * f.bytes, stored)) return;
            for (int64_t k = 0; k < n; k++)
                block_to_floats(l->type, stored + k * f.bytes, l->out + i * l->out_stride + (b + k) * f.block);
        }
}

/* One thread's share of the rows. */
static void look_up(const struct lookup *l, int ith, int nth) {
    const struct form f = form_of(l->type);
    uint8_t block[MOST_BLOCK];
    if (l->supply && (!l->partial || l->partial->streamed)) {
        look_up_in_file(l, ith, nth);
        return;
    }
    for (int64_t i = l->n * ith / nth; i < l->n * (ith + 1) / nth; i++) {
        const uint8_t *step = l->weights + l->ids[i] / ROWS * group_bytes(l->type, l->cols);
        float *out = l->out + i * l->out_stride;
        for (int64_t b = 0; b < l->cols / f.block; b++, out += f.block) {
            unpack_block(f, block, step, (int)(b % f.blocks), l->ids[i] % ROWS);
            block_to_floats(l->type, block, out);
            if ((b + 1) % f.blocks == 0) step += step_bytes(f);
        }
    }
}

#endif
