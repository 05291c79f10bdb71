/* Vectors as wide as the instruction set has them, for loops on bytes and floats at once, which compilers make slow
 * code of. Operators work on them as on numbers; a comparison gives words of all bits or none. */
#ifndef BIGHORN_LANES_H
#define BIGHORN_LANES_H

#include "numbers.h"

#include <math.h>
#if defined(__SSE4_1__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#define SIMD(name) _mm512_##name
typedef __m512i Raw;
typedef __m256i RawHalves;
#elif defined(__AVX2__)
enum { LANES = 8 };
#define SIMD(name) _mm256_##name
typedef __m256i Raw;
typedef __m128i RawHalves;
#elif defined(__SSE4_1__)
enum { LANES = 4 };
#define SIMD(name) _mm_##name
typedef __m128i Raw, RawHalves;
#else
enum { LANES = 4 };
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

#define EACH_LANE(lane) for (int lane = 0; lane < LANES; lane++)

ALWAYS Lanes lanes(float value) { return value - (Lanes){0}; }

ALWAYS Lanes load(const float *data) {
    Lanes x;
    memcpy(&x, data, sizeof x);
    return x;
}

ALWAYS void store(float *data, Lanes x) { memcpy(data, &x, sizeof x); }

ALWAYS Words counted(uint32_t first, uint32_t step) {
    Words numbers;
    EACH_LANE(lane) numbers[lane] = (uint32_t)lane;
    return first + numbers * step;
}

ALWAYS Lanes magnitudes(Lanes x) { return (Lanes)((Words)x & 0x7fffffffu); }

/* For x that is not negative. */
ALWAYS Lanes with_sign(Lanes x, Lanes sign) { return (Lanes)((Words)x | ((Words)sign & 0x80000000u)); }

/* ---- what instruction sets differ in --------------------------------------------------------------------- */

/* a b + c */
ALWAYS Lanes fused(Lanes a, Lanes b, Lanes c) {
#if defined(__FMA__)
    return SIMD(fmadd_ps)(a, b, c);
#elif defined(__aarch64__)
    EACH_LANE(lane) c[lane] = FMA(a[lane], b[lane], c[lane]);
    return c;
#else
    return a * b + c;
#endif
}

#if defined(SIMD)

ALWAYS Lanes square_root(Lanes x) { return SIMD(sqrt_ps)(x); }
ALWAYS Words larger(Words a, Words b) { return (Words)SIMD(max_epu32)((Raw)a, (Raw)b); }
ALWAYS Words smaller(Words a, Words b) { return (Words)SIMD(min_epu32)((Raw)a, (Raw)b); }
ALWAYS Lanes from_ints(Words x) { return SIMD(cvtepi32_ps)((Raw)x); }
ALWAYS Words nearest_ints(Lanes x) { return (Words)SIMD(cvtps_epi32)(x); } /* ties to even */

ALWAYS uint32_t largest(Words x) {
    __m128i quads[LANES / 4];
    memcpy(quads, &x, sizeof x);
    for (int i = 1; i < LANES / 4; i++) quads[0] = _mm_max_epu32(quads[0], quads[i]);
    __m128i pair = _mm_max_epu32(quads[0], _mm_shuffle_epi32(quads[0], 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(pair, _mm_shuffle_epi32(pair, 0xb1)));
}

ALWAYS Words load_bytes(const void *data, const int is_signed) {
    __m128i raw = _mm_setzero_si128();
    memcpy(&raw, data, LANES);
    return (Words)(is_signed ? SIMD(cvtepi8_epi32)(raw) : SIMD(cvtepu8_epi32)(raw));
}

ALWAYS Lanes load_bfloat16(const void *data) {
    RawHalves raw = {0};
    memcpy(&raw, data, 2 * LANES);
    return (Lanes)((Words)SIMD(cvtepu16_epi32)(raw) << 16);
}

/* The lowest byte of each word. */
ALWAYS void store_bytes(void *data, Words words) {
#if defined(__AVX512F__)
    __m128i bytes = _mm512_cvtepi32_epi8((Raw)words);
#else
    const __m128i lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
#if defined(__AVX2__)
    __m128i upper = _mm_shuffle_epi8(_mm256_extracti128_si256((Raw)words, 1), lowest);
    __m128i bytes = _mm_unpacklo_epi32(_mm_shuffle_epi8(_mm256_castsi256_si128((Raw)words), lowest), upper);
#else
    __m128i bytes = _mm_shuffle_epi8((Raw)words, lowest);
#endif
#endif
    memcpy(data, &bytes, LANES);
}

#else

ALWAYS Lanes square_root(Lanes x) {
    EACH_LANE(lane) x[lane] = sqrtf(x[lane]);
    return x;
}

ALWAYS Words larger(Words a, Words b) {
    EACH_LANE(lane) a[lane] = a[lane] > b[lane] ? a[lane] : b[lane];
    return a;
}

ALWAYS Words smaller(Words a, Words b) {
    EACH_LANE(lane) a[lane] = a[lane] < b[lane] ? a[lane] : b[lane];
    return a;
}

ALWAYS uint32_t largest(Words x) {
    uint32_t most = 0;
    EACH_LANE(lane) most = x[lane] > most ? x[lane] : most;
    return most;
}

ALWAYS Words nearest_ints(Lanes x) {
    Words values;
    EACH_LANE(lane) values[lane] = (uint32_t)(int32_t)rintf(x[lane]);
    return values;
}

ALWAYS Lanes from_ints(Words x) {
    Lanes values;
    EACH_LANE(lane) values[lane] = (float)(int32_t)x[lane];
    return values;
}

ALWAYS Words load_bytes(const void *data, const int is_signed) {
    Words values;
    EACH_LANE(lane) values[lane] = is_signed ? (uint32_t)((const int8_t *)data)[lane] : ((const uint8_t *)data)[lane];
    return values;
}

ALWAYS Lanes load_bfloat16(const void *data) {
    Lanes values;
    EACH_LANE(lane) values[lane] = from_bits((uint32_t)((const uint16_t *)data)[lane] << 16);
    return values;
}

ALWAYS void store_bytes(void *data, Words words) {
    uint8_t *bytes = data;
    EACH_LANE(lane) bytes[lane] = (uint8_t)words[lane];
}

#endif

/* float16 numbers, and float32 rounded to them, to the nearest, ties to even. */
ALWAYS Lanes load_float16(const void *data) {
#if defined(__AVX512F__) || defined(__AVX2__)
    RawHalves raw;
    memcpy(&raw, data, sizeof raw);
    return SIMD(cvtph_ps)(raw);
#else
    Lanes values;
    EACH_LANE(lane) values[lane] = from_float16(((const uint16_t *)data)[lane]);
    return values;
#endif
}

/* Returns what is stored. */
ALWAYS Lanes store_float16(void *data, Lanes x) {
#if defined(__AVX512F__) || defined(__AVX2__)
    RawHalves raw = SIMD(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT);
    memcpy(data, &raw, sizeof raw);
    return SIMD(cvtph_ps)(raw);
#else
    uint16_t *halves = data;
    EACH_LANE(lane) halves[lane] = to_float16(x[lane]);
    return load_float16(data);
#endif
}

#endif
