/* The slots of a layer-wise step: their chunks, and the call. layerwise.h has the schedule.
 *
 * An optimizer Name adds, in this order:
 * - the types NameOptions (options.h), NameFactors and NameLoops, and `name_loops` for each instruction set;
 * - LAYER_OPTIMIZER(Name, name);
 * - the functions `prepare`, `first` and `ratio` of a LayerwiseRule, and `second` or NULL;
 * - LAYER_STEP(bighorn_name_step, NameOptions, second). */
#ifndef BIGHORN_LAYER_SLOTS_H
#define BIGHORN_LAYER_SLOTS_H

#include "codec.h"
#include "layer_loops.h"

/* All threads share a larger tensor, because their caches together hold more of it; one thread gets a smaller one. */
enum { SHARED_MIN_ELEMS = 1 << 18 };

struct LayerSlots {
    int isa;
    const void *options; /* the optimizer's, by the index in a slot */
    const LayerSlot *slots;
    const Gradient *gradients;
    void *const *grads;
    double grad_scale;
};

/* ---- chunks ---------------------------------------------------------------------------------------------- */

/* Returns the first element of a chunk. Quantization blocks are not divided: a chunk has as many of them as fit. */
static inline int64_t layer_start(const LayerSlot *slot, int64_t size, int64_t chunk) {
    int64_t start = chunk * CHUNK_ELEMS;
    if (slot->inner) {
        int64_t per_row = blocks_in_row(slot->inner);
        int64_t least = slot->inner < CODEC_BLOCK_ELEMS ? slot->inner : CODEC_BLOCK_ELEMS;
        int64_t first = chunk * (CHUNK_ELEMS / least);
        start = first / per_row * slot->inner + first % per_row * CODEC_BLOCK_ELEMS;
    }
    return start < size ? start : size;
}

static inline int64_t layer_chunks(const LayerSlot *slot, int64_t size) {
    if (!slot->inner) return chunks_in(size);
    int64_t least = slot->inner < CODEC_BLOCK_ELEMS ? slot->inner : CODEC_BLOCK_ELEMS, per_chunk = CHUNK_ELEMS / least;
    return (size / slot->inner * blocks_in_row(slot->inner) + per_chunk - 1) / per_chunk;
}

/* The function `chunk` of a LayerwiseRule. */
static inline LayerChunk layer_chunk(const LayerSlots *s, int64_t slot, int64_t chunk) {
    const int64_t size = s->gradients[slot].size, start = layer_start(&s->slots[slot], size, chunk);
    return (LayerChunk){
        .slot = &s->slots[slot],
        .gradient = &s->gradients[slot],
        .grad = s->grads[slot],
        .start = start,
        .size = layer_start(&s->slots[slot], size, chunk + 1) - start,
    };
}

/* Returns the properties of a slot whose chunks the first loop finishes unless `needs_ratio`. */
static inline LayerInfo layer_info(const LayerSlots *s, int64_t slot, int update_bytes, bool needs_ratio) {
    return (LayerInfo){layer_chunks(&s->slots[slot], s->gradients[slot].size), update_bytes, needs_ratio};
}

/* ---- an optimizer's slots --------------------------------------------------------------------------------- */

/* Declares `name_loops_for`, which finds the loops for an instruction set; NameLocals, what a thread computes once per
 * slot; and `options_of`, which finds the options of a slot. */
#define LAYER_OPTIMIZER(Name, name)                                                                \
    TABLE_PER_ISA(Name##Loops, name##_loops)                                                       \
    typedef struct {                                                                               \
        const Name##Loops *loops;                                                                  \
        Name##Factors factors;                                                                     \
    } Name##Locals;                                                                                \
    _Static_assert(sizeof(Name##Locals) <= LAYER_LOCALS_BYTES, "layerwise.h reserves too little"); \
    static inline const Name##Options *options_of(const LayerSlots *s, const LayerSlot *slot) {    \
        return (const Name##Options *)s->options + slot->options;                                  \
    }

/* ---- the call -------------------------------------------------------------------------------------------- */

/* The largest number of chunks in any of the slots in `order`, or in any slot if that is NULL. */
int64_t bighorn_layer_chunks(const LayerSlot *slots, const Gradient *gradients, const int64_t *order, int64_t count);

/* Defines the function of an optimizer. It makes one step of the `count` slots in `order`, the largest first, without
 * counting it, or one phase of it. If slots are shards, `sums`, two or three per slot (LayerSums), are added up over
 * all ranks between the two phases. `partial` has two entries per chunk of the largest number of chunks in any slot;
 * the scratch may have any size. The function allocates no memory, so it cannot fail. */
#define LAYER_STEP(function, Options, second)                                                                        \
    static void step_slot(void *step, int64_t slot, const SlotShare *share) {                                        \
        static const LayerwiseRule rule = {prepare, layer_chunk, first, ratio, second};                              \
        layerwise_step_slot(rule, step, slot, share);                                                                \
    }                                                                                                                \
    static void step_slots(int thread, int team, void *data) {                                                       \
        LayerwiseStep *step = data;                                                                                  \
        for_each_slot(&step->queue, thread, team, step_slot, step);                                                  \
    }                                                                                                                \
    EXPORT void function(const RunConfig *run, const Options *options, const LayerSlot *slots,                       \
                         const Gradient *gradients, void *const *grads, const int64_t *order, int64_t count,         \
                         double grad_scale, LayerSums *partial, void *scratch, int64_t scratch_bytes, int phase,     \
                         double *sums, int sums_per_slot) {                                                          \
        const LayerSlots layers = {                                                                                  \
            run->isa, options, slots, gradients, grads, grad_scale,                                                  \
        };                                                                                                           \
        LayerwiseStep step = {                                                                                       \
            .slots = &layers,                                                                                        \
            .queue = {.order = order, .gradients = gradients, .count = count, .shared_min_elems = SHARED_MIN_ELEMS}, \
            .phase = phase,                                                                                          \
            .sums = sums,                                                                                            \
            .sums_per_slot = sums_per_slot,                                                                          \
            .scratch = scratch,                                                                                      \
            .scratch_bytes = scratch_bytes,                                                                          \
            .partial = {partial, partial + bighorn_layer_chunks(slots, gradients, order, count)},                    \
        };                                                                                                           \
        run_parallel(run, elements_in(&step.queue), step_slots, &step);                                              \
    }

#endif
