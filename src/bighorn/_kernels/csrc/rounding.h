/* Weights in 16 bits, and random bits, as in _kernels/rounding.py, which is the specification. */
#ifndef BIGHORN_ROUNDING_H
#define BIGHORN_ROUNDING_H

#include "numbers.h"

/* ---- random bits ----------------------------------------------------------------------------------------- */

static inline uint32_t mix(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    return h ^ (h >> 16);
}

static inline uint32_t rng_stream_of(const Weights *w, uint64_t seed) {
    return mix((uint32_t)seed ^ mix((uint32_t)(seed >> 32) ^ mix(w->param_id)));
}

/* Returns the rng key of a tensor at step t, which starts at 1. */
static inline uint32_t rng_key_at(const Weights *w, uint64_t seed, int64_t t) {
    return mix(rng_stream_of(w, seed) + (uint32_t)t);
}

/* The increment of the dither phase from one element to the next; the dither is the upper half of the phase. */
#define DITHER_STRIDE 0xc13fa9a9u

static inline uint32_t dither_at(const Weights *w, uint64_t seed, int64_t t) {
    return rng_stream_of(w, seed) + (uint32_t)t * 0x9e3779b9u + (uint32_t)w->offset * DITHER_STRIDE;
}

/* Computes 32 random bits for each of the elements [start, start + n). */
static inline void random_bits(const Weights *w, uint32_t rng_key, int64_t start, int n, uint32_t *restrict bits) {
    const int64_t stride = w->layout ? layout_last_stride(w->layout) : 1;
    for (int64_t done = 0; done < n;) {
        int64_t count = INT64_MAX, position = w->layout ? layout_offset(w->layout, start + done, &count) : start + done;
        const uint32_t lower = (uint32_t)(position += w->offset), upper = mix(rng_key + (uint32_t)(position >> 32));
        const int64_t alike = (UINT32_MAX - lower) / stride + 1; /* elements whose positions have the same upper half */
        count = count < n - done ? count : n - done;
        count = count < alike ? count : alike;
#pragma omp simd
        for (int i = 0; i < (int)count; i++) bits[done + i] = mix((lower + (uint32_t)stride * (uint32_t)i) ^ upper);
        done += count;
    }
}

/* ---- one element; types are compile-time constants ------------------------------------------------------- */

FORCE_INLINE_TEMPLATE float from_half(const int type, uint16_t half) {
    return type == BFLOAT16 ? from_bits((uint32_t)half << 16) : from_float16(half);
}

FORCE_INLINE_TEMPLATE uint16_t to_half(const int type, float value) {
    return type == BFLOAT16 ? to_bfloat16(value, 1) : to_float16(value);
}

FORCE_INLINE int is_finite(float value) { return (to_bits(value) & 0x7fffffffu) < 0x7f800000u; }

/* Returns the number whose addition moves a value to a range in which the bits that its dtype lacks are the last ones
 * of float32. */
FORCE_INLINE_TEMPLATE float raised(const int type, float x) {
    if (type == BFLOAT16) return 0;
    uint32_t bits = to_bits(x);
    return (bits & 0x7fffffffu) < 0x38800000u ? from_bits(0x38800000u | (bits & 0x80000000u)) : 0; /* 2^-14 */
}

/* Returns the number of bits of a float32 that a type lacks. */
FORCE_INLINE int dropped_bits(const int type) { return type == BFLOAT16 ? 16 : 13; }

/* Rounds a value to one of its two neighbours; the result is in float32. */
FORCE_INLINE_TEMPLATE float round_by_chance(const int type, float value, uint32_t bits) {
    const int dropped = dropped_bits(type);
    float shift = raised(type, value);
    uint32_t moved = (to_bits(value + shift) + (bits >> (32 - dropped))) & (0xffffffffu << dropped);
    return is_finite(value) ? from_bits(moved) - shift : value;
}

/* Returns the bits that rounding a value to `near` has cut off. */
FORCE_INLINE_TEMPLATE int16_t lost_bits(const int type, float value, float near) {
    float shift = raised(type, near);
    int32_t lost = (int32_t)(to_bits(value + shift) - to_bits(near + shift));
    lost = lost < INT16_MIN ? INT16_MIN : lost > INT16_MAX ? INT16_MAX : lost;
    return (int16_t)(is_finite(near) ? lost : 0);
}

/* Returns the bits of a value, raised, rounded to the 8 that "kahan8" keeps beside the type's. */
FORCE_INLINE_TEMPLATE uint32_t with_8_bits(const int type, float value) {
    const int unit = dropped_bits(type) - 8;
    return (to_bits(value + raised(type, value)) + (1u << (unit - 1))) & (0xffffffffu << unit);
}

/* Rounds a value to the half from which its `bits` (`with_8_bits`) are -128 to 127 units: up in a tie. */
FORCE_INLINE_TEMPLATE uint16_t to_half_below(const int type, float value, uint32_t bits) {
    const int dropped = dropped_bits(type);
    float near = from_bits((bits + (1u << (dropped - 1))) & (0xffffffffu << dropped)) - raised(type, value);
    near = from_bits((to_bits(near) & 0x7fffffffu) | (to_bits(value) & 0x80000000u));
    return to_half(type, is_finite(value) ? near : value);
}

/* Returns the units from `near` to a value, given its bits from `with_8_bits`. */
FORCE_INLINE_TEMPLATE int8_t lost_units(const int type, float value, uint32_t bits, float near) {
    float shift = raised(type, near), kept = from_bits(bits) - raised(type, value);
    int32_t lost = (int32_t)(to_bits(kept + shift) - to_bits(near + shift)) >> (dropped_bits(type) - 8);
    lost = lost < INT8_MIN ? INT8_MIN : lost > INT8_MAX ? INT8_MAX : lost;
    return (int8_t)(is_finite(near) ? lost : 0);
}

/* A bfloat16 that a program has set to 0 keeps its compensation, and the bit patterns below 0's are NaN, so the
 * compensation of 0 is ignored. */
FORCE_INLINE_TEMPLATE float with_lost_bits(const int type, float near, int16_t lost) {
    float shift = raised(type, near);
    return from_bits(to_bits(near + shift) + (uint32_t)(near + shift == 0 ? 0 : lost)) - shift;
}

/* Returns the master, unless the parameter is no longer its rounding. */
FORCE_INLINE_TEMPLATE float with_master(const int type, float near, float master) {
    return from_half(type, to_half(type, master)) == near ? master : near;
}

/* ---- pieces ---------------------------------------------------------------------------------------------- */

FORCE_INLINE_TEMPLATE void read_halves(const int type, const Weights *w, const uint16_t *restrict x, int64_t start,
                                       int n, float *restrict out) {
    const int16_t *restrict lost = (const int16_t *)w->aux + start;
    const int8_t *restrict units = (const int8_t *)w->aux + start;
    const float *restrict master = (const float *)w->aux + start;
    if (w->rounding == ROUND_KAHAN) {
#pragma omp simd
        for (int i = 0; i < n; i++) out[i] = with_lost_bits(type, from_half(type, x[i]), lost[i]);
    } else if (w->rounding == ROUND_KAHAN8) {
        const int unit = 1 << (dropped_bits(type) - 8);
#pragma omp simd
        for (int i = 0; i < n; i++) {
            out[i] = with_lost_bits(type, from_half(type, x[i]), (int16_t)(units[i] * unit));
        }
    } else {
#pragma omp simd
        for (int i = 0; i < n; i++) out[i] = with_master(type, from_half(type, x[i]), master[i]);
    }
}

FORCE_INLINE_TEMPLATE void write_halves(const int type, const Weights *w, uint32_t rng_key, uint16_t *restrict x,
                                        int64_t start, int n, const float *restrict values) {
    int16_t *restrict lost = (int16_t *)w->aux + start;
    int8_t *restrict units = (int8_t *)w->aux + start;
    if (w->rounding == ROUND_KAHAN) {
#pragma omp simd
        for (int i = 0; i < n; i++) {
            x[i] = to_half(type, (float)values[i]);
            lost[i] = lost_bits(type, (float)values[i], from_half(type, x[i]));
        }
    } else if (w->rounding == ROUND_KAHAN8) {
#pragma omp simd
        for (int i = 0; i < n; i++) {
            uint32_t bits = with_8_bits(type, (float)values[i]);
            x[i] = to_half_below(type, (float)values[i], bits);
            units[i] = lost_units(type, (float)values[i], bits, from_half(type, x[i]));
        }
    } else {
        uint32_t bits[PIECE_ELEMS];
        random_bits(w, rng_key, start, n, bits);
#pragma omp simd
        for (int i = 0; i < n; i++) x[i] = to_half(type, round_by_chance(type, (float)values[i], bits[i]));
    }
}

/* Reads weights of another type than the arithmetic's. */
static inline void read_stored(const Weights *w, const void *x, int64_t start, int n, float *buffer) {
    if (w->rounding == ROUND_NEAREST || w->rounding == ROUND_STOCHASTIC) widen(x, w->type, 0, n, buffer);
    else if (w->type == BFLOAT16) read_halves(BFLOAT16, w, x, start, n, buffer);
    else read_halves(FLOAT16, w, x, start, n, buffer);
}

static inline void write_stored(const Weights *w, uint32_t rng_key, void *x, int64_t start, int n,
                                const float *values) {
    if (w->rounding == ROUND_NEAREST || w->rounding == ROUND_MASTER) narrow(values, n, x, w->type, 0);
    else if (w->type == BFLOAT16) write_halves(BFLOAT16, w, rng_key, x, start, n, values);
    else write_halves(FLOAT16, w, rng_key, x, start, n, values);
}

/* Returns the values that weights [start, start + n) stand for, a piece at most: in place if they are float32, else in
 * the buffer. */
static inline float *read_weights(const Weights *w, int64_t start, int n, float *buffer) {
    if (w->type == FLOAT32) return (float *)w->data + start;
    read_stored(w, at(w->data, w->type, start), start, n, buffer);
    return buffer;
}

/* Stores values that `read_weights` returned and that were changed since; `rng_key` is from `rng_key_at`. */
static inline void write_weights(const Weights *w, uint32_t rng_key, int64_t start, int n, float *values) {
    write_stored(w, rng_key, at(w->data, w->type, start), start, n, values);
    if (w->rounding == ROUND_MASTER) memcpy((float *)w->aux + start, values, (size_t)n * sizeof(float));
}

#endif
