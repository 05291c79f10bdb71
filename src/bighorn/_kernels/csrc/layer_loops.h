/* Shared by the loops of layer-wise optimizers, which are compiled once per instruction set. */
#ifndef BIGHORN_LAYER_LOOPS_H
#define BIGHORN_LAYER_LOOPS_H

#include "gradient.h"
#include "layerwise.h"
#include "rounding.h"

/* Elements whose squares are added up in float32: 64 for each lane. Sums of more elements of one
 * size are rounded in one direction, by more than the 1e-7 that rounding leaves otherwise. */
#if defined(__SANITIZE_ADDRESS__)
enum { FLOAT_SUM_ELEMS = 64 }; /* these loops are not vectorized */
#else
enum { FLOAT_SUM_ELEMS = 64 * SUM_LANES };
#endif

/* Whether a sum of squares in float32 is accurate. */
static inline int in_range(double sum) { return sum > 1e-24 && sum < 1e30; }

/* Whether weights are bfloat16 that can be used in place. */
static inline int is_in_bfloat16(const Weights *w) { return w->type == BFLOAT16 && w->rounding == ROUND_NEAREST; }

static inline int used_in_place(const Weights *w) { return w->type == FLOAT32 || is_in_bfloat16(w); }

/* The type of the weights that a loop reads: their own if they are used in place. */
static inline int loop_type(const Weights *w) { return used_in_place(w) ? w->type : FLOAT32; }

/* Returns the elements of a piece: all of a chunk if its data are used in place, since a longer loop has more loads in
 * flight, which saves 4% of a step beyond the caches. */
static inline int layer_piece(const LayerChunk *b) {
    const int in_place = used_in_place(&b->slot->weights) && b->gradient->type == FLOAT32;
    return in_place ? CHUNK_ELEMS : PIECE_ELEMS;
}

/* Memory of a thread for pieces that are not used in place. */
typedef struct {
    float x[PIECE_ELEMS], g[PIECE_ELEMS];
} LayerBuffers;

/* A piece of a chunk: elements [start, start + n) of the slot. Moments are used in place, and so are weights that
 * are not float16, and rounded to the nearest. */
typedef struct {
    const LayerChunk *chunk;
    LayerBuffers *buffers;
    int64_t start;
    int n, x_type, state_type;
    void *x, *m, *v; /* v: NULL if there is no second moment */
} LayerPiece;

/* Moves to the next piece, of at most so many elements; returns false after the last one. */
FORCE_INLINE bool next_piece(LayerPiece *p, int most) {
    const LayerChunk *b = p->chunk;
    const LayerSlot *slot = b->slot;
    const Weights *w = &slot->weights;
    const int64_t left = b->start + b->size - (p->start += p->n);
    if (left <= 0) return false;
    p->n = left < most ? (int)left : most;
    p->x_type = loop_type(w), p->state_type = slot->state_type;
    p->x = used_in_place(w) ? at(w->data, w->type, p->start) : read_weights(w, p->start, p->n, p->buffers->x);
    p->m = at(slot->exp_avg, slot->state_type, p->start);
    p->v = slot->exp_avg_sq ? at(slot->exp_avg_sq, slot->state_type, p->start) : NULL;
    return true;
}

#define EACH_PIECE(p, b, most, memory) \
    for (LayerPiece p = {.chunk = (b), .buffers = (memory), .start = (b)->start}; next_piece(&(p), most);)

/* Returns the gradient of a piece in float32. */
FORCE_INLINE const float *piece_grad(const LayerPiece *p) {
    return read_grad(p->chunk->gradient, p->chunk->grad, p->start, p->n, p->buffers->g);
}

static inline void store_piece(const LayerPiece *p, uint32_t rng_key) {
    const Weights *w = &p->chunk->slot->weights;
    if (!used_in_place(w)) write_weights(w, rng_key, p->start, p->n, p->x);
}

/* Calls `loop`, and `pairs` if both are bfloat16, with the types of weights and moments as constants. */
#define FOR_LAYER_TYPES(p, loop, pairs)                                   \
    do {                                                                  \
        switch ((p).x_type << 1 | (p).state_type) {                       \
            case FLOAT32 << 1 | FLOAT32: loop(FLOAT32, FLOAT32); break;   \
            case FLOAT32 << 1 | BFLOAT16: loop(FLOAT32, BFLOAT16); break; \
            case BFLOAT16 << 1 | FLOAT32: loop(BFLOAT16, FLOAT32); break; \
            default: pairs(BFLOAT16, BFLOAT16); break;                    \
        }                                                                 \
    } while (0)

#endif
