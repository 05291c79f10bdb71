/* The arithmetic of a LARS step in float32. Weights of float32 and of bfloat16 are read and written in place, and so is
 * the momentum. */
#include "lars.h"

/* Adds the decay to a gradient. A decay of 0 is not added, so that a weight that is not finite leaves the momentum as
 * it is. */
FORCE_INLINE_TEMPLATE float decayed(const int decays, float decay, float grad, float x) {
    return decays ? FMA(decay, x, grad) : grad; /* LARS-u, without its factor */
}

FORCE_INLINE_TEMPLATE LayerSums norms_loop(const LarsFactors *f, const int x_type, const int decays, int n,
                                           const float *restrict g, const void *restrict x) {
    const float scale = (float)f->grad_scale, decay = (float)f->norm_decay;
    LayerSums sums = {0};
    for (int start = 0, end; start < n; start = end) {
        float weight = 0, update = 0;
        end = n - start < FLOAT_SUM_ELEMS ? n : start + FLOAT_SUM_ELEMS;
#pragma omp simd reduction(+ : weight, update)
        for (int i = start; i < end; i++) {
            const float old_x = load_element(x_type, x, i), u = decayed(decays, decay, scale * g[i], old_x);
            weight = FMA(old_x, old_x, weight);
            update = FMA(u, u, update);
        }
        add_sums(&sums, (LayerSums){.weight = weight, .update = update});
    }
    if (in_range(sums.weight) && in_range(sums.update)) return sums;
    sums = (LayerSums){0}; /* squares leave the range of float32 */
    for (int i = 0; i < n; i++) {
        const double old_x = load_element(x_type, x, i);
        const double u = (double)scale * g[i] + (decays ? decay * old_x : 0);
        add_sums(&sums, (LayerSums){.weight = old_x * old_x, .update = u * u});
    }
    return sums;
}

FORCE_INLINE_TEMPLATE void apply_loop(const LarsFactors *f, const int x_type, const int state_type, const int decays,
                                      int n, const float *restrict g, void *restrict m, void *restrict x) {
    const float scale = (float)f->grad_scale, decay = (float)f->weight_decay, before = (float)f->before;
    const float momentum = (float)f->momentum, after_u = (float)f->after_u, after_m = (float)f->after_m;
#pragma omp simd
    for (int i = 0; i < n; i++) {
        const float old_x = load_element(x_type, x, i), u = before * decayed(decays, decay, scale * g[i], old_x);
        const float new_m = rounded(state_type, FLOAT32, FMA(momentum, load_element(state_type, m, i), u)); /* LARS-m */
        store_element(state_type, m, i, new_m);
        const float new_x = FMA(-after_m, new_m, FMA(-after_u, u, old_x)); /* LARS-x */
        store_element(x_type, x, i, rounded(x_type, FLOAT32, new_x));
    }
}

#define NORMS_LOOP(x_type) \
    (f->norm_decay != 0 ? norms_loop(f, x_type, 1, p.n, g, p.x) : norms_loop(f, x_type, 0, p.n, g, p.x))

static LayerSums norms(const LayerChunk *b, const LarsFactors *f) {
    LayerSums sums = {0};
    LayerBuffers buffers;
    EACH_PIECE(p, b, layer_piece(b), &buffers) {
        const float *g = piece_grad(&p);
        add_sums(&sums, p.x_type == BFLOAT16 ? NORMS_LOOP(BFLOAT16) : NORMS_LOOP(FLOAT32));
    }
    return sums;
}

#define APPLY_LOOP(x_type, state_type)                                             \
    (f->weight_decay != 0 ? apply_loop(f, x_type, state_type, 1, p.n, g, p.m, p.x) \
                          : apply_loop(f, x_type, state_type, 0, p.n, g, p.m, p.x))

static void apply(const LayerChunk *b, const LarsFactors *f) {
    LayerBuffers buffers;
    EACH_PIECE(p, b, layer_piece(b), &buffers) {
        const float *g = piece_grad(&p);
        FOR_LAYER_TYPES(p, APPLY_LOOP, APPLY_LOOP);
        store_piece(&p, f->rng_key);
    }
}

const LarsLoops PER_ISA(lars_loops) = {.norms = norms, .apply = apply};
