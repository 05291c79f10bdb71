/* Vectors of the width of the instruction set, for loops on bytes and floats at once, for which compilers generate slow
 * code. Operators work on them as on scalars; a comparison returns words in which all bits are set or none. */
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
typedef __m512i LaneRaw;
typedef __m256i LaneRawHalves;
#elif defined(__AVX2__)
enum { LANES = 8 };
#define SIMD(name) _mm256_##name
typedef __m256i LaneRaw;
typedef __m128i LaneRawHalves;
#elif defined(__SSE4_1__)
enum { LANES = 4 };
#define SIMD(name) _mm_##name
typedef __m128i LaneRaw, LaneRawHalves;
#else
enum { LANES = 4 };
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t LaneWords __attribute__((vector_size(4 * LANES)));
typedef int32_t LaneInts __attribute__((vector_size(4 * LANES)));

#define EACH_LANE(lane) for (int lane = 0; lane < LANES; lane++)

FORCE_INLINE Lanes lanes(float value) { return value - (Lanes){0}; }

FORCE_INLINE Lanes load(const float *data) {
    Lanes x;
    memcpy(&x, data, sizeof x);
    return x;
}

FORCE_INLINE void store(float *data, Lanes x) { memcpy(data, &x, sizeof x); }

FORCE_INLINE LaneWords counted(uint32_t first, uint32_t step) {
    LaneWords numbers;
    EACH_LANE(lane) numbers[lane] = (uint32_t)lane;
    return first + numbers * step;
}

FORCE_INLINE Lanes magnitudes(Lanes x) { return (Lanes)((LaneWords)x & 0x7fffffffu); }

/* Returns x with the sign of another vector; x must not be negative. */
FORCE_INLINE Lanes with_sign(Lanes x, Lanes sign) { return (Lanes)((LaneWords)x | ((LaneWords)sign & 0x80000000u)); }

/* ---- differences between instruction sets ---------------------------------------------------------------- */

/* Returns a b + c. */
FORCE_INLINE Lanes fused(Lanes a, Lanes b, Lanes c) {
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

FORCE_INLINE Lanes square_root(Lanes x) { return SIMD(sqrt_ps)(x); }
FORCE_INLINE LaneWords larger(LaneWords a, LaneWords b) { return (LaneWords)SIMD(max_epu32)((LaneRaw)a, (LaneRaw)b); }
FORCE_INLINE LaneWords smaller(LaneWords a, LaneWords b) { return (LaneWords)SIMD(min_epu32)((LaneRaw)a, (LaneRaw)b); }
FORCE_INLINE Lanes from_ints(LaneWords x) { return SIMD(cvtepi32_ps)((LaneRaw)x); }
FORCE_INLINE LaneWords nearest_ints(Lanes x) { return (LaneWords)SIMD(cvtps_epi32)(x); } /* ties to even */

FORCE_INLINE uint32_t largest(LaneWords x) {
    __m128i quads[LANES / 4];
    memcpy(quads, &x, sizeof x);
    for (int i = 1; i < LANES / 4; i++) quads[0] = _mm_max_epu32(quads[0], quads[i]);
    __m128i pair = _mm_max_epu32(quads[0], _mm_shuffle_epi32(quads[0], 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(pair, _mm_shuffle_epi32(pair, 0xb1)));
}

FORCE_INLINE_TEMPLATE LaneWords load_bytes(const void *data, const int is_signed) {
    __m128i raw = _mm_setzero_si128();
    memcpy(&raw, data, LANES);
    return (LaneWords)(is_signed ? SIMD(cvtepi8_epi32)(raw) : SIMD(cvtepu8_epi32)(raw));
}

FORCE_INLINE Lanes load_bfloat16(const void *data) {
    LaneRawHalves raw = {0};
    memcpy(&raw, data, 2 * LANES);
    return (Lanes)((LaneWords)SIMD(cvtepu16_epi32)(raw) << 16);
}

/* Stores the lowest byte of each word. */
FORCE_INLINE void store_bytes(void *data, LaneWords words) {
#if defined(__AVX512F__)
    __m128i bytes = _mm512_cvtepi32_epi8((LaneRaw)words);
#else
    const __m128i lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
#if defined(__AVX2__)
    __m128i upper = _mm_shuffle_epi8(_mm256_extracti128_si256((LaneRaw)words, 1), lowest);
    __m128i bytes = _mm_unpacklo_epi32(_mm_shuffle_epi8(_mm256_castsi256_si128((LaneRaw)words), lowest), upper);
#else
    __m128i bytes = _mm_shuffle_epi8((LaneRaw)words, lowest);
#endif
#endif
    memcpy(data, &bytes, LANES);
}

#else

FORCE_INLINE Lanes square_root(Lanes x) {
    EACH_LANE(lane) x[lane] = sqrtf(x[lane]);
    return x;
}

FORCE_INLINE LaneWords larger(LaneWords a, LaneWords b) {
    EACH_LANE(lane) a[lane] = a[lane] > b[lane] ? a[lane] : b[lane];
    return a;
}

FORCE_INLINE LaneWords smaller(LaneWords a, LaneWords b) {
    EACH_LANE(lane) a[lane] = a[lane] < b[lane] ? a[lane] : b[lane];
    return a;
}

FORCE_INLINE uint32_t largest(LaneWords x) {
    uint32_t most = 0;
    EACH_LANE(lane) most = x[lane] > most ? x[lane] : most;
    return most;
}

FORCE_INLINE LaneWords nearest_ints(Lanes x) {
    LaneWords values;
    EACH_LANE(lane) values[lane] = (uint32_t)(int32_t)rintf(x[lane]);
    return values;
}

FORCE_INLINE Lanes from_ints(LaneWords x) {
    Lanes values;
    EACH_LANE(lane) values[lane] = (float)(int32_t)x[lane];
    return values;
}

FORCE_INLINE_TEMPLATE LaneWords load_bytes(const void *data, const int is_signed) {
    LaneWords values;
    EACH_LANE(lane) values[lane] = is_signed ? (uint32_t)((const int8_t *)data)[lane] : ((const uint8_t *)data)[lane];
    return values;
}

FORCE_INLINE Lanes load_bfloat16(const void *data) {
    Lanes values;
    EACH_LANE(lane) values[lane] = from_bits((uint32_t)((const uint16_t *)data)[lane] << 16);
    return values;
}

FORCE_INLINE void store_bytes(void *data, LaneWords words) {
    uint8_t *bytes = data;
    EACH_LANE(lane) bytes[lane] = (uint8_t)words[lane];
}

#endif

#endif
