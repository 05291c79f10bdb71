/* What the loops of layer-wise optimizers share; they are compiled once per instruction set. */
#ifndef BIGHORN_LAYER_LOOPS_H
#define BIGHORN_LAYER_LOOPS_H

#include "gradient.h"
#include "rounding.h"
#include "run.h"

/* A chunk: elements [start, start + size) of a row. */
typedef struct {
    const LayerRow *row;
    const Gradient *gradient;
    const void *grad;
    int64_t start, size;
} LayerChunk;

/* Elements whose squares are added up in the type of the arithmetic: 64 for each lane. The sums of more that are of one
 * size are rounded in one direction, by more than the 1e-7 that rounding leaves otherwise. */
#if defined(__SANITIZE_ADDRESS__)
enum { REAL_SUM_ELEMS = 64 }; /* these loops are not vectorized */
#else
enum { REAL_SUM_ELEMS = 64 * SUM_LANES };
#endif

/* Whether a sum of squares in the type of the arithmetic is accurate. */
static inline int in_range(double sum) { return REAL_TYPE == FLOAT64 || (sum > 1e-24 && sum < 1e30); }

/* Whether weights are bfloat16 that can be used in place. */
static inline int is_in_bfloat16(const Weights *w) {
    return w->type == BFLOAT16 && w->rounding == ROUND_NEAREST && !w->memory;
}

static inline int used_in_place(const Weights *w) { return (w->type == REAL_TYPE && !w->memory) || is_in_bfloat16(w); }

/* The type of the weights that a loop reads: their own if they are used in place. */
static inline int loop_type(const Weights *w) { return used_in_place(w) ? w->type : REAL_TYPE; }

/* Returns weights [start, start + n): in place, or copied into the buffer. */
static inline void *load_weights(const Weights *w, int64_t start, int n, real *buffer) {
    return used_in_place(w) ? at(w->data, w->type, start) : read_weights(w, start, n, buffer);
}

/* Calls `loop` with the types of weights and momentum as constants, and further arguments. */
#define FOR_LAYER_TYPES(w, state_type, loop)                              \
    do {                                                                  \
        if (loop_type(w) == BFLOAT16) {                                   \
            if ((state_type) == BFLOAT16) loop(BFLOAT16, BFLOAT16);       \
            else loop(BFLOAT16, FLOAT32);                                 \
        } else if ((state_type) == REAL_TYPE) loop(REAL_TYPE, REAL_TYPE); \
        else if ((state_type) == BFLOAT16) loop(REAL_TYPE, BFLOAT16);     \
        else loop(REAL_TYPE, FLOAT32);                                    \
    } while (0)

/* Returns the elements of a piece: all of a chunk if its data are used in place. */
static inline int layer_piece(const LayerChunk *b) {
    const int in_place = used_in_place(&b->row->weights) && is_plain(b->gradient) && b->gradient->type == REAL_TYPE;
    return in_place ? CHUNK_ELEMS : PIECE_ELEMS;
}

static inline void store_weights(const Weights *w, uint32_t rng_key, int64_t start, int n, void *x) {
    if (!used_in_place(w)) write_weights(w, rng_key, start, n, x);
}

#endif
