/* The arithmetic of a LARS step in float32 (and, in lars_loops_double.c, in float64). Weights of the type of the
 * arithmetic and of bfloat16 are read and written in place, and so is the momentum. */
#include "lars.h"

/* The factors in the type of the arithmetic, as LarsFactors. */
typedef struct {
    real grad_scale, weight_decay, norm_decay, momentum, before, after_u, after_m;
} LarsReals;

static LarsReals reals_of(const LarsFactors *f) {
    return (LarsReals){(real)f->grad_scale, (real)f->weight_decay, (real)f->norm_decay, (real)f->momentum,
                       (real)f->before,     (real)f->after_u,      (real)f->after_m};
}

/* Returns a gradient with its decay. A decay of 0 is not added, so that a weight that is not finite leaves the momentum
 * as it is. */
FORCE_INLINE_TEMPLATE real decayed(const int decays, real weight_decay, real grad, real x) {
    return decays ? FMA(weight_decay, x, grad) : grad; /* LARS-u, without its factor */
}

FORCE_INLINE_TEMPLATE LayerSums norms_loop(const LarsReals f, const int x_type, const int decays, int n,
                                           const real *restrict g, const void *restrict x) {
    LayerSums sums = {0};
    for (int start = 0, end; start < n; start = end) {
        real weight = 0, update = 0;
        end = n - start < REAL_SUM_ELEMS ? n : start + REAL_SUM_ELEMS;
#pragma omp simd reduction(+ : weight, update)
        for (int i = start; i < end; i++) {
            const real old_x = load_element(x_type, x, i),
                       u = decayed(decays, f.norm_decay, f.grad_scale * g[i], old_x);
            weight = FMA(old_x, old_x, weight);
            update = FMA(u, u, update);
        }
        add_sums(&sums, (LayerSums){.weight = weight, .update = update});
    }
    if (in_range(sums.weight) && in_range(sums.update)) return sums;
    sums = (LayerSums){0}; /* squares leave the range of float32 */
    for (int i = 0; i < n; i++) {
        const double old_x = load_element(x_type, x, i);
        const double u = (double)f.grad_scale * g[i] + (decays ? f.norm_decay * old_x : 0);
        add_sums(&sums, (LayerSums){.weight = old_x * old_x, .update = u * u});
    }
    return sums;
}

FORCE_INLINE_TEMPLATE void apply_loop(const LarsReals f, const int x_type, const int state_type, const int decays,
                                      int n, const real *restrict g, void *restrict m, void *restrict x) {
#pragma omp simd
    for (int i = 0; i < n; i++) {
        const real old_x = load_element(x_type, x, i);
        const real u = f.before * decayed(decays, f.weight_decay, f.grad_scale * g[i], old_x);
        const real new_m =
            rounded(state_type, REAL_TYPE, FMA(f.momentum, load_element(state_type, m, i), u)); /* LARS-m */
        store_element(state_type, m, i, new_m);
        const real new_x = FMA(-f.after_m, new_m, FMA(-f.after_u, u, old_x)); /* LARS-x */
        store_element(x_type, x, i, rounded(x_type, REAL_TYPE, new_x));
    }
}

static LayerSums norms(const LayerChunk *b, const LarsFactors *factors) {
    const LarsReals f = reals_of(factors);
    const Weights *w = &b->row->weights;
    const int piece = layer_piece(b);
    real x_buffer[PIECE_ELEMS], g_buffer[PIECE_ELEMS];
    LayerSums sums = {0};
    for (int64_t done = 0; done < b->size; done += piece) {
        const int n = (int)(b->size - done < piece ? b->size - done : piece);
        const void *x = load_weights(w, b->start + done, n, x_buffer);
        const real *g = read_grad(b->gradient, b->grad, b->start + done, n, g_buffer);
        const bool in_bfloat16 = loop_type(w) == BFLOAT16, decays = f.norm_decay != 0;
        add_sums(&sums, in_bfloat16 ? decays ? norms_loop(f, BFLOAT16, 1, n, g, x) : norms_loop(f, BFLOAT16, 0, n, g, x)
                        : decays    ? norms_loop(f, REAL_TYPE, 1, n, g, x)
                                    : norms_loop(f, REAL_TYPE, 0, n, g, x));
    }
    return sums;
}

#define APPLY_LOOP(x_type, state_type)                                      \
    (f.weight_decay != 0 ? apply_loop(f, x_type, state_type, 1, n, g, m, x) \
                         : apply_loop(f, x_type, state_type, 0, n, g, m, x))

static void apply(const LayerChunk *b, const LarsFactors *factors) {
    const LarsReals f = reals_of(factors);
    const Weights *w = &b->row->weights;
    const int piece = layer_piece(b), state_type = b->row->state_type;
    real x_buffer[PIECE_ELEMS], g_buffer[PIECE_ELEMS];
    for (int64_t done = 0; done < b->size; done += piece) {
        const int n = (int)(b->size - done < piece ? b->size - done : piece);
        const int64_t start = b->start + done;
        void *x = load_weights(w, start, n, x_buffer), *m = at(b->row->exp_avg, state_type, start);
        const real *g = read_grad(b->gradient, b->grad, start, n, g_buffer);
        FOR_LAYER_TYPES(w, state_type, APPLY_LOOP);
        store_weights(w, factors->rng_key, start, n, x);
    }
}

const LarsLoops PER_ISA(lars_loops) = {
    .norms = norms,
    .apply = apply,
};
