/* State in few bits, as in _kernels/codec.py, which is the specification. */
#ifndef BIGHORN_CODEC_H
#define BIGHORN_CODEC_H

#include "rounding.h"

#include <math.h>

enum { CODEC_BLOCK_ELEMS = 256 };

/* The conversion of a value's share of its block's scale to a code. */
enum CodecForm { CODEC_LINEAR, CODEC_SIGNED, CODEC_UNSIGNED, CODEC_INT4 };

/* ---- positions of blocks --------------------------------------------------------------------------------- */

/* Blocks are within rows, which have `inner` elements each. */
static inline int64_t blocks_in_row(int64_t inner) { return (inner + CODEC_BLOCK_ELEMS - 1) / CODEC_BLOCK_ELEMS; }

/* Elements [start, start + size) of a tensor, all of them in one block. `at` is the index of the first one in its row,
 * `scale` the index of the block's scale. */
typedef struct {
    int64_t start, at, scale;
    int size;
} CodecPart;

/* The parts of [start, end), each within one block: the first one, and the one after a given part. After the last part,
 * the size is 0. */
static inline CodecPart codec_part_of(int64_t inner, int64_t start, int64_t at, int64_t scale, int64_t end) {
    int64_t rest = inner - at, in_block = CODEC_BLOCK_ELEMS - at % CODEC_BLOCK_ELEMS,
            size = rest < in_block ? rest : in_block;
    return (CodecPart){start, at, scale, (int)(size < end - start ? size : end - start)};
}

static inline CodecPart first_codec_part(int64_t inner, int64_t start, int64_t end) {
    int64_t row = start / inner, at = start % inner;
    return codec_part_of(inner, start, at, row * blocks_in_row(inner) + at / CODEC_BLOCK_ELEMS, end);
}

static inline CodecPart next_codec_part(int64_t inner, CodecPart part, int64_t end) {
    int64_t at = part.at + part.size;
    return codec_part_of(inner, part.start + part.size, at < inner ? at : 0, part.scale + 1, end);
}

#define EACH_CODEC_PART(part, inner, start, end) \
    for (CodecPart part = first_codec_part(inner, start, end); part.size > 0; part = next_codec_part(inner, part, end))

/* ---- scales; forms are compile-time constants ------------------------------------------------------------- */

/* A block's scale, which is the block's largest magnitude, with the factors that follow from it. The specification
 * divides values by the scale; this code multiplies each value once. */
typedef struct {
    float scale;  /* the stored scale */
    float unit;   /* value = unit * (the number that a code stands for) */
    float factor; /* (the number that a code stands for) = factor * value */
    float lift;   /* multiplies values first, so that the factor is finite; mostly 1 */
} CodecScale;

/* The number that the largest code stands for: in CODEC_SIGNED and CODEC_UNSIGNED the specification's 63, times a power
 * of 2 that suits the bit operations. */
FORCE_INLINE_TEMPLATE float top_of(const enum CodecForm form) {
    return form == CODEC_LINEAR ? 127 : form == CODEC_INT4 ? 7 : 63 / 32.0f;
}

FORCE_INLINE_TEMPLATE CodecScale scale_of(const enum CodecForm form, float scale) {
    return (CodecScale){scale, scale / top_of(form), 0, 1};
}

/* A scale from the bits of the largest magnitude; NaN if a magnitude is not finite. */
FORCE_INLINE_TEMPLATE CodecScale new_scale(const enum CodecForm form, uint32_t magnitude) {
    const float largest = from_bits(magnitude < 0x7f800000u ? magnitude : 0x7fc00000u);
    CodecScale s = scale_of(form, largest);
    s.lift = largest < 0x1p-64f ? 0x1p96f : 1;
    /* Rounded up, so that the largest magnitude has the largest code. Of the root forms and of CODEC_INT4 the increase
     * is less than half of a 2^-16th of a code; CODEC_LINEAR's largest code is cut to 127. */
    s.factor = largest > 0 ? top_of(form) / (largest * s.lift) * (1 + 0x1p-23f) : 0;
    return s;
}

/* Prepares values for encoding. In a block of zeros, or with a value that is not finite, all codes are 0. */
static inline void make_ready(float *values, int n, const CodecScale *s) {
    if (!(s->scale > 0))
        for (int i = 0; i < n; i++) values[i] = 0;
    else if (s->lift != 1)
        for (int i = 0; i < n; i++) values[i] = (float)values[i] * s->lift;
}

FORCE_INLINE uint32_t magnitude_of(float value) { return to_bits(value) & 0x7fffffffu; }

/* ---- pieces of a tensor ---------------------------------------------------------------------------------- */

/* Loops over a part have no `omp simd`: codes are vectorized by 64, and GCC 12 would compute the rest of such a loop
 * one by one, which is all of a short row. */

/* The codes and scales of CODEC_LINEAR, or of CODEC_INT4, two codes to a byte. `layout` is of the elements in the whole
 * parameter (numbers.h), where each row is consecutive; NULL if the whole tensor is. */
typedef struct {
    int8_t *codes;
    float *scales;
    int64_t inner;
    const int64_t *layout;
} CodecData;

/* Copies an even number of codes from `both`, two to a byte, and to it. */
static inline void unpack_int4(const int8_t *restrict both, int n, int8_t *restrict codes) {
#pragma omp simd
    for (int i = 0; i < n / 2; i++) {
        const uint8_t first = both[i] & 15, second = (uint8_t)both[i] >> 4;
        codes[2 * i] = (int8_t)((first ^ 8) - 8);
        codes[2 * i + 1] = (int8_t)((second ^ 8) - 8);
    }
}

static inline void pack_int4(const int8_t *restrict codes, int n, int8_t *restrict both) {
#pragma omp simd
    for (int i = 0; i < n / 2; i++) both[i] = (int8_t)((codes[2 * i] & 15) | (uint8_t)codes[2 * i + 1] << 4);
}

/* Returns the codes of a part, each in a byte: in place, or in the buffer, which has two bytes more than a block. */
FORCE_INLINE_TEMPLATE const int8_t *codes_at(const enum CodecForm form, const CodecData *data, CodecPart part,
                                             int8_t *buffer) {
    if (form != CODEC_INT4) return data->codes + part.start;
    const int odd = part.start & 1;
    unpack_int4(data->codes + part.start / 2, part.size + odd + 1, buffer);
    return buffer + odd;
}

FORCE_INLINE_TEMPLATE void decode(const enum CodecForm form, const CodecData *data, int64_t start, int n,
                                  float *restrict out) {
    EACH_CODEC_PART(part, data->inner, start, start + n) {
        const float unit = scale_of(form, data->scales[part.scale]).unit;
        int8_t buffer[CODEC_BLOCK_ELEMS + 2];
        const int8_t *restrict codes = codes_at(form, data, part, buffer);
        for (int i = 0; i < part.size; i++) out[i] = codes[i] * unit;
        out += part.size;
    }
}

/* Encodes the values of a whole block, the largest of whose magnitudes has these bits, and replaces them by the numbers
 * that the codes stand for. `phase` is the dither phase of the tensor's first element. */
FORCE_INLINE_TEMPLATE void encode_block(const enum CodecForm form, const CodecData *data, CodecPart part,
                                        uint32_t largest, uint32_t phase, float *restrict values) {
    const CodecScale scale = new_scale(form, largest);
    const float in_2_16ths = scale.factor * 0x1p16f, unit = scale.unit;
    const int top = (int)top_of(form);
    int8_t unpacked[CODEC_BLOCK_ELEMS];
    int8_t *restrict codes = form == CODEC_INT4 ? unpacked : data->codes + part.start;
    int64_t count;
    const int64_t position = data->layout ? layout_offset(data->layout, part.start, &count) : part.start;
    uint32_t dither = phase + (uint32_t)position * DITHER_STRIDE;
    data->scales[part.scale] = scale.scale;
    make_ready(values, part.size, &scale);
    for (int i = 0; i < part.size; i++, dither += DITHER_STRIDE) {
        const float value = (float)values[i];
        const int size = ((int)(fabsf(value) * in_2_16ths + 0.5f) + (int)(dither >> 16)) >> 16;
        const int kept = size < top ? size : top, code = value < 0 ? -kept : kept;
        codes[i] = (int8_t)code;
        values[i] = code * unit;
    }
    if (form == CODEC_INT4) pack_int4(unpacked, part.size, data->codes + part.start / 2);
}

/* Encodes elements [start, start + n), which must be whole blocks, likewise. */
FORCE_INLINE_TEMPLATE void encode(const enum CodecForm form, const CodecData *data, int64_t start, int n,
                                  float *restrict values, uint32_t phase) {
    EACH_CODEC_PART(part, data->inner, start, start + n) {
        uint32_t largest = 0;
        for (int i = 0; i < part.size; i++) {
            const uint32_t magnitude = magnitude_of((float)values[i]);
            largest = magnitude > largest ? magnitude : largest;
        }
        encode_block(form, data, part, largest, phase, values);
        values += part.size;
    }
}

#endif
