/* The rule of LAMB on the moments and u, which is included for one type of elements: numbers in lamb_loops.c, vectors
 * in lamb_blocks.c. They define Value, MULTIPLY_ADD(a, b, c), and EACH(factor), a factor of all elements of a Value. */
#include "lamb.h"

FORCE_INLINE Value next_m(const LambFloats f, Value m, Value grad) {
    return MULTIPLY_ADD(EACH(f.beta1), m, f.beta3 * grad); /* LAMB-m */
}

FORCE_INLINE Value next_v(const LambFloats f, Value v, Value grad) {
    return MULTIPLY_ADD(EACH(f.beta2), v, f.beta4 * grad * grad); /* LAMB-v */
}

/* Computes u, with the same bits in every function that calls this one. The root of v is `root` times `unit`. */
FORCE_INLINE Value update_of(const LambFloats f, Value x, Value m, Value root, float unit) {
    const Value r = f.correction * m / MULTIPLY_ADD(EACH(unit), root, EACH(f.eps));
    return MULTIPLY_ADD(EACH(f.weight_decay), x, r); /* LAMB-u */
}
