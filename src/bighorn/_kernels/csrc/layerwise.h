/* The schedule of a step whose size depends on norms of the whole tensor, as in LAMB or LARS: which thread processes
 * which chunk, where the threads wait, the two sums, and the ratio. The optimizer supplies two
 * loops over chunks.
 *
 * The functions are templates over the optimizer's rule: as calls through pointers, the rule's functions took 10% of
 * the time of 200 tensors of 256 elements. */
#ifndef BIGHORN_LAYERWISE_H
#define BIGHORN_LAYERWISE_H

#include "run.h"

#include <stdbool.h>
#include <stddef.h>

/* A chunk: elements [start, start + size) of a slot. */
typedef struct {
    const LayerSlot *slot;
    const Gradient *gradient;
    const void *grad;
    int64_t start, size;
} LayerChunk;

/* Sums of squares of the weights and of the update, and their inner product if the optimizer needs it. */
typedef struct {
    double weight, update, inner;
} LayerSums;

#define LEAST_NORM 0x1p-80 /* as in arithmetic.py */

static inline void add_sums(LayerSums *total, LayerSums sums) {
    total->weight += sums.weight, total->update += sums.update, total->inner += sums.inner;
}

/* The bytes of a thread for values that are computed once per slot, before the loops. */
enum { LAYER_LOCALS_BYTES = 128 };

/* A thread's part of the scratch begins at a multiple of this. */
enum { CACHE_LINE_BYTES = 64 };

/* The properties of a slot that the schedule needs. */
typedef struct {
    int64_t chunks;
    int update_bytes; /* of one element of a stored update */
    bool needs_ratio; /* false: the first loop finishes the slot */
} LayerInfo;

/* The arguments of a call, which layer_slots.h defines. */
typedef struct LayerSlots LayerSlots;

/* The functions that an optimizer supplies. Rows and chunks are indices. A chunk has at most CHUNK_ELEMS elements, and
 * chunks do not depend on the number of threads. */
typedef struct {
    /* Computes a slot's locals, and returns the properties of the slot that the schedule needs. */
    LayerInfo (*prepare)(const LayerSlots *s, int64_t slot, void *locals);
    LayerChunk (*chunk)(const LayerSlots *s, int64_t slot, int64_t chunk);
    /* The first loop, over one chunk, updates state and u, and the weights if no ratio is needed. What the second loop
     * needs of u is stored in `update`; if `update` is NULL, the second loop computes it again. */
    LayerSums (*first)(const LayerSlots *s, const LayerChunk *chunk, const void *locals, void *update);
    /* Returns the ratio, from the sums over the whole tensor, and adds what else follows from them to the locals.
     * `writes_norms` is true in one thread, which writes the slot's metrics. */
    double (*ratio)(const LayerSlots *s, int64_t slot, void *locals, LayerSums total, bool writes_norms);
    /* The second loop, over one chunk, updates the weights; NULL if no slot needs it. */
    void (*second)(const LayerSlots *s, const LayerChunk *chunk, const void *locals, double ratio, const void *update);
} LayerwiseRule;

/* One call. All fields but `barrier` are inputs. */
typedef struct {
    const LayerSlots *slots; /* the first argument of the rule's functions */
    SlotQueue queue;
    int phase;    /* LayerwisePhase */
    double *sums; /* `sums_per_slot` of each slot, kept between two calls that run one phase each; else NULL */
    int sums_per_slot;
    char *scratch; /* stored updates; the team divides it evenly */
    int64_t scratch_bytes;
    LayerSums
        *partial[2]; /* one per chunk of a shared slot; two arrays, so that a fast thread can begin the next slot */
    RunBarrier barrier;
} LayerwiseStep;

/* The second loop begins with the last chunks, which are the likeliest to be in cache: CACHED_CHUNKS of them from the
 * last to the first, in groups of REVERSED_CHUNKS, and then all others in order. */
enum { CACHED_CHUNKS = 128, REVERSED_CHUNKS = 8 };

/* One thread's share of a slot: chunks [first, last). */
typedef struct {
    int64_t slot, first, last;
    int64_t stored;      /* updates are stored from this chunk on; before it, they are computed again */
    char *scratch;       /* the stored updates */
    int64_t chunk_bytes; /* of a stored update */
    LayerSums *partial;  /* for a slot that all threads share; else NULL */
    int team;
} LayerSlice;

/* Returns the address at which the update of a chunk is stored; NULL if it is not stored. */
FORCE_INLINE void *layerwise_update(const LayerSlice *slice, int64_t chunk) {
    return chunk < slice->stored ? NULL : slice->scratch + (chunk - slice->stored) * slice->chunk_bytes;
}

/* Returns the sums of the whole slot. They are added up chunk by chunk, so that they do not depend on the number of
 * threads. */
FORCE_INLINE_TEMPLATE LayerSums layerwise_first_phase(const LayerwiseRule rule, LayerwiseStep *s,
                                                      const LayerSlice *slice, const LayerInfo info, void *locals) {
    LayerSums total = {0}, *partial = slice->partial;
    for (int64_t b = slice->first; b < slice->last; b++) {
        const LayerChunk chunk = rule.chunk(s->slots, slice->slot, b);
        const LayerSums sums = rule.first(s->slots, &chunk, locals, layerwise_update(slice, b));
        if (partial) partial[b] = sums;
        add_sums(&total, sums);
    }
    if (!partial) return total;
    wait_for_all(&s->barrier, slice->team);
    total = (LayerSums){0};
    for (int64_t b = 0; b < info.chunks; b++) add_sums(&total, partial[b]);
    return total;
}

/* Runs the second loop over the slice. */
FORCE_INLINE_TEMPLATE void layerwise_second_phase(const LayerwiseRule rule, LayerwiseStep *s, const LayerSlice *slice,
                                                  void *locals, double ratio) {
    for (int64_t start, end = slice->last; end > slice->first; end = start) {
        const int64_t group = slice->last - end < CACHED_CHUNKS ? REVERSED_CHUNKS : end - slice->first;
        start = end - group > slice->first ? end - group : slice->first;
        for (int64_t b = start; b < end; b++) {
            const LayerChunk chunk = rule.chunk(s->slots, slice->slot, b);
            rule.second(s->slots, &chunk, locals, ratio, layerwise_update(slice, b));
        }
    }
}

/* Steps one slot, or one thread's share of it. `rule` is a constant, so that its functions are inlined. */
FORCE_INLINE_TEMPLATE void layerwise_step_slot(const LayerwiseRule rule, LayerwiseStep *s, int64_t slot,
                                               const SlotShare *share) {
    _Alignas(16) char locals[LAYER_LOCALS_BYTES];
    const int64_t thread_bytes = s->scratch_bytes / share->team / CACHE_LINE_BYTES * CACHE_LINE_BYTES;
    const LayerInfo info = rule.prepare(s->slots, slot, locals);
    const int64_t chunk_bytes = CHUNK_ELEMS * info.update_bytes;
    const int64_t room = s->phase == PHASE_BOTH ? thread_bytes / chunk_bytes : 0;
    const bool leads = share->part == 0;
    LayerSlice slice = {
        .slot = slot,
        .first = share_of(info.chunks, share->part, share->parts),
        .last = share_of(info.chunks, share->part + 1, share->parts),
        .scratch = s->scratch + share->thread * thread_bytes,
        .chunk_bytes = chunk_bytes,
        .partial = share->parts > 1 ? s->partial[share->turn % 2] : NULL,
        .team = share->team,
    };
    slice.stored = slice.last - slice.first < room ? slice.first : slice.last - room;
    double *sums = s->sums ? s->sums + slot * s->sums_per_slot : NULL;
    const LayerSums total = s->phase == PHASE_SECOND ? (LayerSums){sums[0], sums[1], s->sums_per_slot > 2 ? sums[2] : 0}
                                                     : layerwise_first_phase(rule, s, &slice, info, locals);
    if (s->phase == PHASE_FIRST) {
        if (leads) sums[0] = total.weight, sums[1] = total.update;
        if (leads && s->sums_per_slot > 2) sums[2] = total.inner;
        return;
    }
    const double ratio = rule.ratio(s->slots, slot, locals, total, leads);
    if (rule.second && info.needs_ratio) layerwise_second_phase(rule, s, &slice, locals, ratio);
}

#endif
