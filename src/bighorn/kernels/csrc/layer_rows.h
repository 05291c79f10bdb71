/* The rows of a layer-wise step: their chunks, copies of windows of transposed ones, and the call. The optimizer adds
 * its options and its loops; layerwise.h has the schedule. */
#ifndef BIGHORN_LAYER_ROWS_H
#define BIGHORN_LAYER_ROWS_H

#include "codec.h"
#include "layer_loops.h"

TABLE_PER_ISA(StridedLoops, strided_loops)

/* All threads share a larger tensor, because their caches together hold more of it; one thread gets a smaller one. */
enum { SHARED_MIN_ELEMS = 1 << 18 };

struct LayerRows {
    int isa;
    const StridedLoops *strided;
    const void *options; /* the optimizer's, which a row has the index of */
    const LayerRow *rows;
    const Gradient *gradients;
    void *const *grads;
    double grad_scale;
};

/* The first member of an optimizer's locals. If a gradient or weights are transposed, the loops use copies of a window
 * of them; the addresses of these copies are NULL otherwise. */
typedef struct {
    char *grad_copy, *weights_copy;
    LayerRow row;
    Gradient gradient;
    const void *grad;
    bool first_writes, second_reads_grad; /* whether the first loop writes weights, and the second reads gradients */
} LayerCopies;

/* ---- chunks ---------------------------------------------------------------------------------------------- */

/* Returns the first element of a chunk. Quantization blocks are not divided: a chunk has as many of them as fit. */
static inline int64_t layer_start(const LayerRow *row, int64_t size, int64_t chunk) {
    int64_t start = chunk * CHUNK_ELEMS;
    if (row->inner) {
        int64_t per_row = blocks_in_row(row->inner);
        int64_t least = row->inner < CODEC_BLOCK_ELEMS ? row->inner : CODEC_BLOCK_ELEMS;
        int64_t first = chunk * (CHUNK_ELEMS / least);
        start = first / per_row * row->inner + first % per_row * CODEC_BLOCK_ELEMS;
    }
    return start < size ? start : size;
}

static inline int64_t layer_chunks(const LayerRow *row, int64_t size) {
    if (!row->inner) return chunks_in(size);
    int64_t least = row->inner < CODEC_BLOCK_ELEMS ? row->inner : CODEC_BLOCK_ELEMS, per_chunk = CHUNK_ELEMS / least;
    return (size / row->inner * blocks_in_row(row->inner) + per_chunk - 1) / per_chunk;
}

/* The function `chunk` of a LayerwiseRule. */
static inline LayerChunk layer_chunk(const LayerRows *s, int64_t row, int64_t chunk, const void *locals) {
    const LayerCopies *c = locals;
    const int64_t size = s->gradients[row].size, start = layer_start(&s->rows[row], size, chunk);
    return (LayerChunk){
        .row = c->weights_copy ? &c->row : &s->rows[row],
        .gradient = c->grad_copy ? &c->gradient : &s->gradients[row],
        .grad = c->grad_copy ? c->grad : s->grads[row],
        .start = start,
        .size = layer_start(&s->rows[row], size, chunk + 1) - start,
    };
}

/* ---- copies of windows ----------------------------------------------------------------------------------- */

/* Reserves memory for copies of a window, if the row is transposed and the scratch has space for them. */
static inline void plan_copies(const LayerRows *s, int64_t row, char *scratch, int64_t bytes, LayerCopies *c,
                               LayerInfo *info) {
    const Gradient *g = &s->gradients[row];
    const Weights *w = &s->rows[row].weights;
    const int64_t g_bytes = is_transposed(g->layout) ? dtype_bytes(g->type) : 0;
    const int64_t x_bytes = is_transposed(w->memory) ? dtype_bytes(w->type) : 0;
    c->grad_copy = c->weights_copy = NULL;
    if (!g_bytes && !x_bytes) return;
    int64_t most = (bytes - CACHE_LINE_BYTES) / (g_bytes + x_bytes);
    if (most > STAGED_ELEMS) most = STAGED_ELEMS;
    info->window = most / CHUNK_ELEMS;
    if (info->window <= 0) {
        info->window = 0;
        return;
    }
    const int64_t elements = info->window * CHUNK_ELEMS;
    if (x_bytes) c->weights_copy = scratch;
    if (g_bytes) c->grad_copy = scratch + elements * x_bytes;
    const int64_t used = elements * (x_bytes + g_bytes);
    info->used_bytes = (used + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES * CACHE_LINE_BYTES;
    c->row = s->rows[row];
    c->row.weights.memory = NULL;
    c->gradient = *g;
    c->gradient.layout = NULL;
}

static inline void copy_weights(const LayerRows *s, int64_t row, int64_t first, int64_t last, const LayerCopies *c,
                                enum StridedCopy direction) {
    const Weights *w = &s->rows[row].weights;
    const int64_t size = s->gradients[row].size, start = layer_start(&s->rows[row], size, first);
    s->strided->copy(w->memory, w->data, w->type, start, layer_start(&s->rows[row], size, last) - start,
                     c->weights_copy, direction);
}

/* The functions `open_window` and `close_window` of a LayerwiseRule. */
static inline void open_window(const LayerRows *s, int64_t row, int64_t first, int64_t last, void *locals,
                               bool second) {
    const Gradient *g = &s->gradients[row];
    LayerCopies *c = locals;
    const int64_t start = layer_start(&s->rows[row], g->size, first), end = layer_start(&s->rows[row], g->size, last);
    if (c->weights_copy) {
        copy_weights(s, row, first, last, c, STRIDED_GATHER);
        c->row.weights.data = c->weights_copy - start * dtype_bytes(c->row.weights.type);
    }
    if (!c->grad_copy || (second && !c->second_reads_grad)) return;
    s->strided->copy(g->layout, s->grads[row], g->type, start, end - start, c->grad_copy, STRIDED_GATHER);
    c->grad = c->grad_copy - start * dtype_bytes(g->type);
}

static inline void close_window(const LayerRows *s, int64_t row, int64_t first, int64_t last, const void *locals,
                                bool second) {
    const LayerCopies *c = locals;
    if (c->weights_copy && (second || c->first_writes)) copy_weights(s, row, first, last, c, STRIDED_SCATTER);
}

/* Returns the properties of a row whose chunks the first loop finishes unless `needs_ratio`, and plans its copies. */
static inline LayerInfo plan_row(const LayerRows *s, int64_t row, char *scratch, int64_t bytes, LayerCopies *c,
                                 int update_bytes, bool needs_ratio, bool second_reads_grad) {
    LayerInfo info = {
        .chunks = layer_chunks(&s->rows[row], s->gradients[row].size),
        .update_bytes = update_bytes,
        .needs_ratio = needs_ratio,
    };
    plan_copies(s, row, scratch, bytes, c, &info);
    c->first_writes = !needs_ratio, c->second_reads_grad = second_reads_grad;
    return info;
}

/* ---- an optimizer's rows --------------------------------------------------------------------------------- */

/* Declares for an optimizer, whose types are NameOptions, NameFactors and NameLoops: the tables of its loops for each
 * instruction set; NameLocals, what a thread computes once per row; and the function
 * `options_of`, which finds the options of a row. */
#define LAYER_OPTIMIZER(Name, name)                                                                \
    TABLE_PER_ISA(Name##Loops, name##_loops)                                                       \
    typedef struct {                                                                               \
        LayerCopies copies;                                                                        \
        const Name##Loops *loops;                                                                  \
        Name##Factors factors;                                                                     \
    } Name##Locals;                                                                                \
    _Static_assert(sizeof(Name##Locals) <= LAYER_LOCALS_BYTES, "layerwise.h reserves too little"); \
    static inline const Name##Options *options_of(const LayerRows *s, const LayerRow *row) {       \
        return (const Name##Options *)s->options + row->options;                                   \
    }

/* ---- the call -------------------------------------------------------------------------------------------- */

/* The largest number of chunks in any of the rows in `order`, or in any row if that is NULL. */
int64_t bighorn_layer_chunks(const LayerRow *rows, const Gradient *gradients, const int64_t *order, int64_t count);

/* Defines the function of an optimizer, which has the functions `prepare`, `first` and `ratio` of a LayerwiseRule, and
 * passes `second`.
 *
 * The function makes one step of the `count` rows in `order`, the largest first, without counting it, or one phase of
 * it. If rows are shards, `sums`, one per row, are added up over all ranks between the two phases. `partial` has two
 * entries per chunk of the largest number of chunks in any row; the scratch may have any size. The function allocates
 * no memory, so it cannot fail. */
#define LAYER_STEP(function, Options, second)                                                                        \
    static void step_row(void *step, int64_t row, const RowShare *share) {                                           \
        static const LayerwiseRule rule = {prepare, open_window, close_window, layer_chunk, first, ratio, second};   \
        layerwise_step_row(rule, step, row, share);                                                                  \
    }                                                                                                                \
    static void step_rows(int thread, int team, void *data) {                                                        \
        LayerwiseStep *step = data;                                                                                  \
        for_each_row(&step->queue, thread, team, step_row, step);                                                    \
    }                                                                                                                \
    EXPORT void function(const RunConfig *run, const Options *options, const LayerRow *rows,                         \
                         const Gradient *gradients, void *const *grads, const int64_t *order, int64_t count,         \
                         double grad_scale, LayerSums *partial, void *scratch, int64_t scratch_bytes, int phase,     \
                         LayerSums *sums) {                                                                          \
        const LayerRows own = {                                                                                      \
            run->isa, strided_loops_for(run->isa), options, rows, gradients, grads, grad_scale,                      \
        };                                                                                                           \
        LayerwiseStep step = {                                                                                       \
            .rows = &own,                                                                                            \
            .queue = {.order = order, .gradients = gradients, .count = count, .shared_min_elems = SHARED_MIN_ELEMS}, \
            .phase = phase,                                                                                          \
            .sums = sums,                                                                                            \
            .scratch = scratch,                                                                                      \
            .scratch_bytes = scratch_bytes,                                                                          \
            .partial = {partial, partial + bighorn_layer_chunks(rows, gradients, order, count)},                     \
        };                                                                                                           \
        run_parallel(run, elements_in(&step.queue), step_rows, &step);                                               \
    }

#endif
