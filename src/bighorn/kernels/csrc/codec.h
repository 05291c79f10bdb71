/* State in 8 bits: kernels/codec.py, which is the specification. */
#ifndef BIGHORN_CODEC_H
#define BIGHORN_CODEC_H

#include "numbers.h"

enum { CODEC_BLOCK = 256 };

/* Codes and scales of a tensor whose rows of dim 0 have `inner` elements each. */
typedef struct {
    int8_t *codes;
    float *scales;
    int64_t inner;
} Int8;

static inline int64_t blocks_in_row(int64_t inner) { return (inner + CODEC_BLOCK - 1) / CODEC_BLOCK; }

/* The part of elements [start, start + n) that lies in the block of the first of them. */
typedef struct {
    int64_t scale;
    int size;
} Part;

static inline Part first_part(const Int8 *data, int64_t start, int n) {
    int64_t row = start / data->inner, at = start % data->inner, rest = data->inner - at;
    int64_t in_block = CODEC_BLOCK - at % CODEC_BLOCK, size = rest < in_block ? rest : in_block;
    return (Part){row * blocks_in_row(data->inner) + at / CODEC_BLOCK, (int)(size < n ? size : n)};
}

static inline void decode(const Int8 *data, int64_t start, int n, float *restrict out) {
    for (Part part; n > 0; start += part.size, out += part.size, n -= part.size) {
        part = first_part(data, start, n);
        const int8_t *restrict codes = data->codes + start;
        const float scale = data->scales[part.scale];
#pragma omp simd
        for (int i = 0; i < part.size; i++) out[i] = (float)codes[i] / 127.0f * scale;
    }
}

/* Elements [start, start + n) are whole blocks. A block with a value that is not finite has scale NaN. */
static inline void encode(const Int8 *data, int64_t start, int n, const float *restrict values) {
    const float round = 0x1.8p23f; /* adding and subtracting it rounds to the nearest integer, ties to even */
    for (Part part; n > 0; start += part.size, values += part.size, n -= part.size) {
        part = first_part(data, start, n);
        int8_t *restrict codes = data->codes + start;
        uint32_t top = 0; /* the bits of magnitudes are in the order of magnitudes, infinity and NaN above all */
#pragma omp simd reduction(max : top)
        for (int i = 0; i < part.size; i++) {
            uint32_t magnitude = to_bits(values[i]) & 0x7fffffffu;
            top = magnitude > top ? magnitude : top;
        }
        const float scale = from_bits(top < 0x7f800000u ? top : 0x7fc00000u);
        data->scales[part.scale] = scale;
        if (!(scale > 0)) {
            memset(codes, 0, (size_t)part.size);
            continue;
        }
#pragma omp simd
        for (int i = 0; i < part.size; i++) codes[i] = (int8_t)(int)(values[i] / scale * 127.0f + round - round);
    }
}

#endif
