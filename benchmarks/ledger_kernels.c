/* Steps of one tensor in one thread at x86-64-v3, for valgrind, which does not know AVX-512; see ledger.py.
 *
 *     ledger_kernels OPTIMIZER STORED STEPS PASSES
 *
 * OPTIMIZER is lamb, lars or came, STORED the dtype of weights, gradient and state: float32, bfloat16, or int8 or int4,
 * which is the state's alone. PASSES more passes over the gradient are made in each step, for a test of the
 * counts. */
#include "../tests/csrc/library.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE = 512, ELEMS = SIDE * SIDE, SUMS = 8, SCRATCH_BYTES = 8 << 20, ALIGNMENT = 1 << 20 };

static const RunConfig RUN = {.threads = 1, .isa = 3};
static const int64_t ORDER[] = {0};
static const double BETA2S[] = {0.999};

/* Zeros at the start of a set of every cache, so that misses do not depend on addresses. */
static void *zeros(int64_t bytes) {
    const size_t size = ((size_t)bytes / ALIGNMENT + 1) * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, size);
    if (!memory) abort();
    return memset(memory, 0, size);
}

static void *values(int type, uint32_t seed) {
    float *floats = zeros(4 * ELEMS);
    uint16_t *halves = zeros(2 * ELEMS);
    for (int64_t i = 0; i < ELEMS; i++) {
        seed = seed * 1664525u + 1013904223u;
        floats[i] = (float)(int32_t)seed * 0x1p-31f;
        uint32_t bits;
        memcpy(&bits, &floats[i], sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    return type == BFLOAT16 ? (void *)halves : (void *)floats;
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    const int is_lamb = !strcmp(arguments[1], "lamb"), is_lars = !strcmp(arguments[1], "lars");
    const int steps = atoi(arguments[3]), passes = atoi(arguments[4]);
    const int stored = !strcmp(arguments[2], "bfloat16") ? BFLOAT16 : FLOAT32;
    const int in_blocks = !strncmp(arguments[2], "int", 3);
    const int state = !strcmp(arguments[2], "int8") ? INT8 : in_blocks ? INT4 : stored;
    float *step = zeros(4), *metrics = zeros(12);
    float *scales[2] = {zeros(ELEMS), zeros(ELEMS)};
    const Gradient gradient = {.size = ELEMS, .type = stored};
    void *grads[] = {values(stored, 1)};
    const Weights weights = {
        .data = values(stored, 2),
        .type = stored,
        .rounding = stored == BFLOAT16 ? ROUND_STOCHASTIC : ROUND_NEAREST,
    };
    const LambOptions lamb_options = {
        .lr = 1e-4,
        .betas = {0.9, 0.999},
        .eps = 1e-6,
        .weight_decay = 0.01,
        .weight_norm_bounds = {0, INFINITY},
        .trust_ratio_bounds = {0, INFINITY},
        .adapt = 1,
        .bias_correction = BIAS_CORRECTION_TRUE,
        .grad_averaging = 1,
    };
    const LarsOptions lars_options = {
        .lr = 1,
        .momentum = 0.9,
        .weight_decay = 0.01,
        .trust_coefficient = 1e-3,
        .eps = 1e-8,
        .lr_in_momentum = 1,
        .adapt = 1,
    };
    const LayerSlot lamb = {
        .weights = weights,
        .exp_avg = zeros(4 * ELEMS),
        .exp_avg_sq = zeros(4 * ELEMS),
        .exp_avg_scale = in_blocks ? scales[0] : NULL,
        .exp_avg_sq_scale = in_blocks ? scales[1] : NULL,
        .inner = in_blocks ? SIDE : 0,
        .step = step,
        .metrics = metrics,
        .state_type = state,
    };
    const CameOptions came_options = {
        .lr = 1e-4,
        .betas = {0.9, 0.999, 0.9999},
        .eps = {1e-30, 1e-16},
        .clip_threshold = 1,
        .weight_decay = 0.01,
    };
    const FactoredSlot came = {
        .weights = weights,
        .exp_avg = lamb.exp_avg,
        .exp_avg_scale = lamb.exp_avg_scale,
        .exp_avg_sq_row = zeros(4 * SIDE),
        .exp_avg_sq_col = zeros(4 * SIDE),
        .exp_avg_res_row = zeros(4 * SIDE),
        .exp_avg_res_col = zeros(4 * SIDE),
        .step = step,
        .metrics = metrics,
        .matrices = 1,
        .height = SIDE,
        .width = SIDE,
        .state_type = state,
        .factored = 1,
    };
    double *sums = zeros(8 * SUMS), *squares = zeros(ELEMS);
    double *partial = zeros(8 * SUMS * bighorn_layer_chunks(&lamb, &gradient, NULL, 1));
    double *workspace = zeros(8 * bighorn_factored_workspace(&came, NULL, &gradient, 1, 1));
    void *scratch = zeros(SCRATCH_BYTES);
    for (int i = 0; i < steps; i++) {
        for (int pass = 0; pass < passes; pass++) bighorn_square_sum(&RUN, &gradient, grads, 1, squares);
        if (is_lamb)
            bighorn_lamb_step(&RUN, &lamb_options, &lamb, &gradient, grads, ORDER, 1, 1, partial, scratch,
                              SCRATCH_BYTES, PHASE_BOTH, sums, 2);
        else if (is_lars)
            bighorn_lars_step(&RUN, &lars_options, &lamb, &gradient, grads, ORDER, 1, 1, partial, scratch,
                              SCRATCH_BYTES, PHASE_BOTH, sums, 2);
        else bighorn_came_step(&RUN, &came_options, &came, NULL, &gradient, grads, BETA2S, ORDER, 1, 1, 0, workspace);
        bighorn_advance(&step, 1);
    }
    return !(metrics[0] > 0);
}
