/* Dtypes and arithmetic that all loops share, compiled once per instruction set.
 *
 * All arithmetic on elements is in float32. bfloat16 can be widened and rounded in registers, other dtypes in a buffer
 * for a piece that stays in the first-level cache. So each line of mathematics is written once for all dtypes. */
#ifndef BIGHORN_NUMBERS_H
#define BIGHORN_NUMBERS_H

#include "abi.h"
#include "compiler.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

/* The elements of a piece, which a loop converts at once, in a buffer that stays in the first-level cache. */
enum { PIECE_ELEMS = 1024 };

/* ---- dtypes ---------------------------------------------------------------------------------------------- */

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Rounds to bfloat16, to the nearest, ties to even. A NaN that came from bfloat16 has no low bits that could carry into
 * the sign, so it needs no special case (which would take an eighth of the time of an all-bfloat16 step). */
static inline float round_bfloat16(float value, int any_nan) {
    uint32_t bits = to_bits(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return from_bits(any_nan && value != value ? 0x7fc00000u : rounded);
}

static inline uint16_t to_bfloat16(float value, int any_nan) {
    return (uint16_t)(to_bits(round_bfloat16(value, any_nan)) >> 16);
}

/* Two neighbours in bfloat16. Shifts and masks split and join them, where widening and narrowing would move them
 * between the lanes of vectors. */
typedef uint32_t __attribute__((aligned(2), may_alias)) Bfloat16Pair;

static inline float low(Bfloat16Pair pair) { return from_bits(pair << 16); }
static inline float high(Bfloat16Pair pair) { return from_bits(pair & 0xffff0000u); }
static inline Bfloat16Pair pair_of(float low, float high) {
    return to_bits(low) >> 16 | to_bits(high);
} /* low and high are rounded already */

/* float16 without hardware support. Scaling by powers of two makes the float unit handle subnormals and rounding. */
static inline float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = (uint32_t)(half & 0x7fffu) << 13;
    uint32_t magnitude = rest >= 0x0f800000u ? rest + 0x70000000u : to_bits(from_bits(rest + 0x38800000u) - 0x1p-14f);
    uint32_t normal = rest >= 0x00800000u && rest < 0x0f800000u ? rest + 0x38000000u : magnitude;
    return from_bits(sign | normal);
}

static inline uint16_t to_float16(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t normal = (rest + 0xfffu + ((rest >> 13) & 1u) - 0x38000000u) >> 13; /* nearest, ties to even */
    uint32_t subnormal = to_bits(from_bits(rest) + 0.5f) - 0x3f000000u;
    uint32_t half = rest < 0x38800000u ? subnormal : rest >= 0x477ff000u ? 0x7c00u : normal;
    return (uint16_t)(sign | (rest > 0x7f800000u ? 0x7e00u : half));
}

static inline void widen_float16(const uint16_t *restrict in, int n, float *restrict out) {
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < n; i++) out[i] = from_float16(in[i]);
}

static inline void narrow_float16(const float *restrict in, int n, uint16_t *restrict out) {
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) out[i] = to_float16((float)in[i]);
}

/* Returns elements in float32: a pointer into `data` if that is their type, else a copy in `buffer`. */
static inline float *widen(const void *data, int type, int64_t start, int n, float *restrict buffer) {
    const uint16_t *half = (const uint16_t *)data + start;
    if (type == FLOAT32) return (float *)data + start;
    if (type == FLOAT16) {
        widen_float16(half, n, buffer);
    } else {
#pragma omp simd
        for (int i = 0; i < n; i++) buffer[i] = from_bits((uint32_t)half[i] << 16);
    }
    return buffer;
}

/* Stores values, rounded to the nearest; float32 values are in `data` already. */
static inline void narrow(const float *restrict values, int n, void *data, int type, int64_t start) {
    uint16_t *restrict half = (uint16_t *)data + start;
    if (type == FLOAT32) return;
    if (type == FLOAT16) {
        narrow_float16(values, n, half);
    } else if (type == BFLOAT16) {
#pragma omp simd
        for (int i = 0; i < n; i++) half[i] = to_bfloat16((float)values[i], 1);
    }
}

/* ---- one element of bfloat16 or float32; types are compile-time constants -------------------------------- */

FORCE_INLINE_TEMPLATE void *at(const void *data, const int type, int64_t start) {
    return (char *)data + start * (type == FLOAT32 ? 4 : 2);
}

FORCE_INLINE_TEMPLATE float load_element(const int type, const void *data, int i) {
    return type == FLOAT32 ? ((const float *)data)[i] : from_bits((uint32_t)((const uint16_t *)data)[i] << 16);
}

/* Rounds a value to the dtype `type`; `from` is the dtype of the data that the value was computed from. */
FORCE_INLINE_TEMPLATE float rounded(const int type, const int from, float value) {
    return type == FLOAT32 ? value : round_bfloat16(value, from != BFLOAT16);
}

/* Stores a rounded value. */
FORCE_INLINE_TEMPLATE void store_element(const int type, void *data, int i, float value) {
    if (type == FLOAT32) ((float *)data)[i] = value;
    else ((uint16_t *)data)[i] = (uint16_t)(to_bits(value) >> 16);
}

/* ---- sums in lanes --------------------------------------------------------------------------------------- */

/* A loop over short rows keeps a sum for each lane of a vector. GCC 12 adds up the lanes of `omp simd reduction` one
 * after the other, which takes longer than a row of 64 elements. */
#if defined(__AVX512F__)
enum { SUM_LANES = 64 / sizeof(float) };
#elif defined(__AVX2__)
enum { SUM_LANES = 32 / sizeof(float) };
#else
enum { SUM_LANES = 4 };
#endif

typedef float FourSums __attribute__((vector_size(4 * sizeof(float))));

FORCE_INLINE float sum_of_lanes(const float *lanes) {
    FourSums sums = {0}, more;
    for (int i = 0; i < SUM_LANES; i += 4) {
        memcpy(&more, lanes + i, sizeof more);
        sums += more;
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* Calls `function(first, lanes, ...)` for all of `n` elements; `lanes` is a constant, except for the last ones. */
#define FOR_LANES(n, function, ...)                                                                      \
    do {                                                                                                 \
        int first_ = 0;                                                                                  \
        for (; first_ + SUM_LANES <= (n); first_ += SUM_LANES) function(first_, SUM_LANES, __VA_ARGS__); \
        function(first_, (n) - first_, __VA_ARGS__);                                                     \
    } while (0)

/* ---- layouts --------------------------------------------------------------------------------------------- */

/* A layout is dims, sizes, strides of elements that are counted outermost dimension first. Returns the offset of an
 * element; `count` is the number of elements from there to the end of the last dimension, which are
 * `layout_last_stride` apart. */
static inline int64_t layout_offset(const int64_t *layout, int64_t index, int64_t *count) {
    const int64_t last = layout[0] - 1, *sizes = layout + 1, *strides = sizes + last + 1;
    int64_t inner = index % sizes[last], rest = index / sizes[last], offset = inner * strides[last];
    for (int64_t d = last - 1; d >= 0; rest /= sizes[d--]) offset += rest % sizes[d] * strides[d];
    *count = sizes[last] - inner;
    return offset;
}

static inline int64_t layout_last_stride(const int64_t *layout) { return layout[2 * layout[0]]; }

/* Returns 1 - base^exponent without the digits that 1 - 0.9999^2 loses: if p is 1 - a and q is 1 - b, then 1 - ab is
 * p + (1 - p) q. */
static inline double one_minus_power(double base, int64_t exponent) {
    double result = 0, square = 1 - base;
    for (; exponent > 0; exponent >>= 1, square += (1 - square) * square)
        if (exponent & 1) result += (1 - result) * square;
    return result;
}

#endif
