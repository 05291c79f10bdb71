/* The global gradient norm and the step counts, which every algorithm needs. */
#include "square_sum.h"
#include "run.h"

TABLE_PER_ISA(SquareSumLoops, square_sum_loops)

typedef struct {
    const SquareSumLoops *loops;
    const Gradient *gradients;
    void *const *data; /* NULL: the slot has no gradient */
    int64_t slots;
    double *partial; /* one per chunk of every gradient, in order */
    int64_t chunks;
} SquareSum;

static int64_t chunks_of(const Gradient *gradient, const void *data) { return data ? chunks_in(gradient->size) : 0; }

static void square_sum_body(int thread, int team, void *data) {
    const SquareSum *s = data;
    int64_t first = share_of(s->chunks, thread, team), last = share_of(s->chunks, thread + 1, team), before = 0;
    for (int64_t slot = 0; slot < s->slots && before < last; slot++) {
        const Gradient *gradient = &s->gradients[slot];
        int64_t count = chunks_of(gradient, s->data[slot]);
        for (int64_t b = first > before ? first - before : 0; b < count && before + b < last; b++) {
            int64_t start = b * CHUNK_ELEMS, rest = gradient->size - start;
            s->partial[before + b] =
                s->loops->square_sum(gradient, s->data[slot], start, rest < CHUNK_ELEMS ? rest : CHUNK_ELEMS);
        }
        before += count;
    }
}

/* Returns the sum of all gradients' squares; `data` is NULL for a slot without one. `partial` must have one entry per
 * chunk of every slot. */
EXPORT double bighorn_square_sum(const RunConfig *run, const Gradient *gradients, void *const *data, int64_t slots,
                                 double *partial) {
    SquareSum s = {
        .loops = square_sum_loops_for(run->isa),
        .gradients = gradients,
        .data = data,
        .slots = slots,
        .partial = partial,
    };
    for (int64_t slot = 0; slot < slots; slot++) s.chunks += chunks_of(&gradients[slot], data[slot]);
    run_parallel(run, elements_of(gradients, slots), square_sum_body, &s);
    double total = 0;
    for (int64_t b = 0; b < s.chunks; b++) total += partial[b];
    return total;
}

/* Counts a step for each parameter. This is separate from the step, since the slices of a stacked parameter share a
 * count. */
EXPORT void bighorn_advance(float *const *steps, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float growth = *steps[i] * 0x1.8p-24f; /* above 2^24, to the next float32: _kernels/arithmetic.py */
        *steps[i] += growth < 1 ? 1 : growth;
    }
}
