/* Steps of all loops on buffers of exactly the required size, for sanitizers: dtypes, rounding modes,
 * shapes that do not fill their tiles, shards, and tensors that all threads share. The program prints results for a
 * comparison with steps.expected. */
#include "abi.h"
#include "codec.h"
#include "gradient.h"
#include "library.h"
#include "team.h"

#include <math.h>
#include <string.h>

enum { LAYER_SUMS = 3 }; /* the numbers in LayerSums of layerwise.h */
enum { STEPS = 2, MAX_SLOTS = 512, SCRATCH_BYTES = 1 << 20 };

/* ---- memory ---------------------------------------------------------------------------------------------- */

static void *allocated[16 * MAX_SLOTS];
static int allocations;

/* Zeros in a separate allocation, so that AddressSanitizer detects an access past the end. */
static void *zeros(int64_t count, size_t size) {
    void *memory = calloc((size_t)(count ? count : 1), size);
    if (!memory || allocations == 16 * MAX_SLOTS) abort();
    return allocated[allocations++] = memory;
}

static void free_all(void) {
    while (allocations) free(allocated[--allocations]);
}

static size_t bytes_of(int type) { return type == FLOAT32 ? 4 : type >= INT8 ? 1 : 2; }

/* Values in (-1, 1); the seed is different for each tensor. */
static void *values(int64_t count, int type, uint32_t seed) {
    char *data = zeros(count, bytes_of(type));
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        const float value = (float)(int32_t)seed * 0x1p-31f;
        if (type == FLOAT32) ((float *)data)[i] = value;
        else if (type == FLOAT16) ((uint16_t *)data)[i] = to_float16(value);
        else ((uint16_t *)data)[i] = to_bfloat16(value, 1);
    }
    return data;
}

static double mean_magnitude(const Weights *w, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        float value;
        sum += fabsf(*widen(w->data, w->type, i, 1, &value));
    }
    return count ? sum / (double)count : 0;
}

static const struct {
    int type, rounding;
} STORED[] = {
    {FLOAT32, ROUND_NEAREST}, {BFLOAT16, ROUND_NEAREST}, {BFLOAT16, ROUND_STOCHASTIC}, {BFLOAT16, ROUND_KAHAN},
    {FLOAT16, ROUND_MASTER},  {FLOAT16, ROUND_NEAREST},  {FLOAT16, ROUND_KAHAN},       {BFLOAT16, ROUND_KAHAN8},
};
enum { STORED_WAYS = sizeof STORED / sizeof STORED[0] };

static Weights weights_of(int slot, int64_t height, int64_t width, int stored) {
    const int64_t size = height * width;
    Weights w = {
        .data = values(size, STORED[stored].type, 7u * (uint32_t)slot + 1),
        .offset = 5,
        .param_id = (uint32_t)slot,
        .type = STORED[stored].type,
        .rounding = STORED[stored].rounding,
    };
    if (w.rounding == ROUND_KAHAN) w.aux = zeros(size, sizeof(int16_t));
    if (w.rounding == ROUND_KAHAN8) w.aux = zeros(size, sizeof(int8_t));
    if (w.rounding == ROUND_MASTER) {
        float *master = w.aux = zeros(size, sizeof(float));
        for (int64_t i = 0; i < size; i++) master[i] = from_float16(((const uint16_t *)w.data)[i]);
    }
    return w;
}

static const int GRAD_TYPES[] = {FLOAT32, BFLOAT16, FLOAT16, FLOAT32};

/* ---- slots of both optimizers ------------------------------------------------------------------------------ */

static Gradient gradients[MAX_SLOTS];
static void *grads[MAX_SLOTS];
static int64_t order[MAX_SLOTS];
static float steps[MAX_SLOTS], norms[MAX_SLOTS][3];
static float *counts[MAX_SLOTS];
static int slots;

/* Adds the gradient of the next slot; slots must be added largest first. */
static void add_gradient(int64_t height, int64_t width, int type) {
    const int64_t size = height * width;
    if (slots == MAX_SLOTS) abort();
    steps[slots] = 0;
    counts[slots] = &steps[slots];
    order[slots] = slots;
    grads[slots] = values(size, type, 31u * (uint32_t)slots + 11);
    gradients[slots] = (Gradient){.size = size, .type = type};
    slots++;
}

static void check_square_sum(void) {
    int64_t blocks = 0;
    for (int i = 0; i < slots; i++) blocks += chunks_in(gradients[i].size);
    check(bighorn_square_sum(&RUN, gradients, grads, slots, zeros(blocks, sizeof(double))) > 0,
          "gradients have a norm");
}

typedef struct {
    double figures[4];
} Results;

/* Prints every sixteenth slot, and adds up all slots. */
static void add_result(Results *all, const char *name, int slot, const Weights *weights) {
    const float *n = norms[slot];
    const double figures[4] = {n[0], n[1], n[2], mean_magnitude(weights, gradients[slot].size)};
    for (int i = 0; i < 4; i++) {
        check(isfinite(figures[i]), "results are finite");
        all->figures[i] += figures[i];
    }
    if (slot % 16 == 0)
        printf("%s-%d %.7g %.7g %.7g %.7g\n", name, slot, figures[0], figures[1], figures[2], figures[3]);
}

static void print_results(const Results *all, const char *name) {
    const double *f = all->figures;
    printf("%s %.7g %.7g %.7g %.7g\n", name, f[0], f[1], f[2], f[3]);
}

/* ---- LAMB ------------------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    int second_moment, bias_correction, decay_mode, adapt, hyperball;
} LAMBS[] = {
    {"lamb", SECOND_MOMENT_ADAM, BIAS_CORRECTION_TRUE, DECAY_MODE_RATIO, 1, 0},
    {"ball", SECOND_MOMENT_ADAM, BIAS_CORRECTION_LR, DECAY_MODE_RATIO, 1, 1},
    {"l2", SECOND_MOMENT_ADAM, BIAS_CORRECTION_LR, DECAY_MODE_L2, 1, 0},
    {"adamw", SECOND_MOMENT_ADAM, BIAS_CORRECTION_TRUE, DECAY_MODE_DECOUPLED, 0, 0},
    {"adagrad", SECOND_MOMENT_ADAGRAD, BIAS_CORRECTION_FALSE, DECAY_MODE_L2, 0, 0},
};

static LayerSlot layer_slots[MAX_SLOTS];

static void add_layer(int64_t height, int64_t width, int stored, int state_type) {
    const int64_t size = height * width, scales = height * blocks_in_row(width);
    const bool in_blocks = state_type >= INT8;
    layer_slots[slots] = (LayerSlot){
        .weights = weights_of(slots, height, width, stored),
        .exp_avg = zeros(size, bytes_of(state_type)),
        .exp_avg_sq = zeros(size, bytes_of(state_type)),
        .exp_avg_scale = in_blocks ? zeros(scales, sizeof(float)) : NULL,
        .exp_avg_sq_scale = in_blocks ? zeros(scales, sizeof(float)) : NULL,
        .inner = in_blocks ? width : 0,
        .step = &steps[slots],
        .metrics = norms[slots],
        .radius = zeros(1, sizeof(float)),
        .state_type = state_type,
    };
    add_gradient(height, width, GRAD_TYPES[slots % 4]);
}

enum LambMoments { IN_FLOATS, IN_BLOCKS };

static void step_lamb(int variant, enum LambMoments moments) {
    static const int64_t SHAPES[][2] = {{500, 600}, {41, 1003}, {3, 8192}, {70, 99},
                                        {9, 257},   {5, 16},    {1, 13},   {1, 1}};
    const int types[2][2] = {{FLOAT32, BFLOAT16}, {INT8, INT4}};
    const LambOptions options = {
        .lr = 0.1,
        .betas = {0.9, 0.999},
        .eps = 1e-6,
        .weight_decay = 0.1,
        .weight_norm_bounds = {0, INFINITY},
        .trust_ratio_bounds = {0, INFINITY},
        .rounding_seed = 1ull << 40,
        .adapt = LAMBS[variant].adapt,
        .hyperball = LAMBS[variant].hyperball,
        .bias_correction = LAMBS[variant].bias_correction,
        .grad_averaging = 1,
        .decay_mode = LAMBS[variant].decay_mode,
        .second_moment = LAMBS[variant].second_moment,
        .maximize = variant == 2,
    };
    slots = 0;
    for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++)
        for (int stored = 0; stored < (i ? STORED_WAYS : 1); stored++)
            for (int k = 0; k < 2; k++)
                if (types[moments][k] != INT4 || SHAPES[i][1] % 2 == 0)
                    add_layer(SHAPES[i][0], SHAPES[i][1], stored, types[moments][k]);
    double *partial = zeros(2 * LAYER_SUMS * bighorn_layer_chunks(layer_slots, gradients, NULL, slots), sizeof(double));
    double *sums = zeros(LAYER_SUMS * slots, sizeof(double));
    void *scratch = zeros(SCRATCH_BYTES, 1);
    check_square_sum();
    for (int step = 0; step < STEPS; step++) {
        const int first = step == 1 ? PHASE_FIRST : PHASE_BOTH, last = step == 1 ? PHASE_SECOND : PHASE_BOTH;
        for (int phase = first; phase <= last; phase++)
            bighorn_lamb_step(&RUN, &options, layer_slots, gradients, grads, order, slots, 0.5, partial, scratch,
                              SCRATCH_BYTES, phase, sums, LAYER_SUMS);
        bighorn_advance(counts, slots);
    }
    Results all = {0};
    char name[24];
    snprintf(name, sizeof name, "%s%s", LAMBS[variant].name, moments == IN_BLOCKS ? "-blocks" : "");
    for (int i = 0; i < slots; i++) add_result(&all, name, i, &layer_slots[i].weights);
    print_results(&all, name);
    free_all();
}

/* ---- CAME ------------------------------------------------------------------------------------------------ */

static FactoredSlot came_slots[MAX_SLOTS];
static FactoredShard shards[MAX_SLOTS];

static void add_came(int64_t matrices, int64_t height, int64_t width, int stored, int state_type, bool factored) {
    const int64_t size = matrices * height * width, scales = matrices * height * blocks_in_row(width);
    came_slots[slots] = (FactoredSlot){
        .weights = weights_of(slots, matrices * height, width, stored),
        .exp_avg = zeros(size, bytes_of(state_type)),
        .exp_avg_scale = state_type >= INT8 ? zeros(scales, sizeof(float)) : NULL,
        .exp_avg_sq = factored ? NULL : zeros(size, sizeof(float)),
        .exp_avg_sq_row = factored ? zeros(matrices * height, sizeof(float)) : NULL,
        .exp_avg_sq_col = factored ? zeros(matrices * width, sizeof(float)) : NULL,
        .exp_avg_res_row = factored ? zeros(matrices * height, sizeof(float)) : NULL,
        .exp_avg_res_col = factored ? zeros(matrices * width, sizeof(float)) : NULL,
        .step = &steps[slots],
        .metrics = norms[slots],
        .matrices = matrices,
        .height = height,
        .width = width,
        .state_type = state_type,
        .factored = factored,
    };
    add_gradient(matrices * height, width, GRAD_TYPES[slots % 4]);
}

/* All shards are in this process, one per tensor, so their sums are complete. */
static void add_shard(int slot, int split_down, int split_across) {
    const FactoredSlot *r = &came_slots[slot];
    const int64_t lines = r->matrices * (r->height + r->width);
    shards[slot] = (FactoredShard){
        .matrices = r->matrices,
        .height = r->height,
        .width = r->width,
        .split_down = split_down && r->factored,
        .split_across = split_across && r->factored,
        .leads_down = 1,
        .leads_across = 1,
    };
    for (int round = 0; round < 3; round++) shards[slot].sums[round] = zeros(2 * lines + 2, sizeof(double));
}

static void step_came(int split_down, int split_across, bool sharded) {
    static const int64_t SHAPES[][3] = {{1, 1100, 1000}, {1, 3, 9001}, {3, 1500, 5}, {3, 5, 1500}, {1, 70, 90},
                                        {1, 30, 31},     {40, 3, 3},   {1, 17, 3},   {64, 1, 1},   {1, 1, 1}};
    static const int STATE_TYPES[] = {FLOAT32, BFLOAT16, INT8, FLOAT16};
    const CameOptions options = {
        .lr = 0.1,
        .betas = {0.9, 0.999, 0.9999},
        .eps = {1e-30, 1e-16},
        .clip_threshold = 1,
        .weight_decay = 0.1,
        .scale_eps = 1e-3,
        .rounding_seed = 3,
        .bias_correction = 1,
        .scale_parameter = 1,
    };
    slots = 0;
    for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++) {
        const int64_t *shape = SHAPES[i];
        for (int k = 0; k < (i ? 8 : 1); k++)
            add_came(shape[0], shape[1], shape[2], (k + (int)i) % STORED_WAYS,
                     k == 2 && shape[2] % 2 == 0 ? INT4 : STATE_TYPES[k % 4], k < 6);
    }
    for (int i = 0; i < slots; i++) add_shard(i, split_down, split_across);
    double *beta2s = zeros(slots, sizeof(double));
    for (int i = 0; i < slots; i++) beta2s[i] = 0.999;
    const FactoredShard *given = sharded ? shards : NULL;
    double *workspace = zeros(bighorn_factored_workspace(came_slots, given, gradients, slots, THREADS), sizeof(double));
    for (int step = 0; step < STEPS; step++) {
        for (int round = 0; round < (sharded ? 4 : 1); round++)
            bighorn_came_step(&RUN, &options, came_slots, given, gradients, grads, beta2s, order, slots, 0.5, round,
                              workspace);
        bighorn_advance(counts, slots);
    }
    const char *name = !sharded ? "came" : split_down && split_across ? "both" : split_down ? "down" : "across";
    Results all = {0};
    for (int i = 0; i < slots; i++) add_result(&all, name, i, &came_slots[i].weights);
    print_results(&all, name);
    free_all();
}

/* ---- LARS ------------------------------------------------------------------------------------------------ */

static void step_lars(int variant) {
    static const int64_t SHAPES[][2] = {{500, 600}, {41, 1003}, {70, 99}, {9, 257}, {1, 13}};
    const LarsOptions options = {
        .lr = 0.1,
        .momentum = 0.9,
        .nesterov = variant,
        .weight_decay = variant ? 0 : 0.1,
        .trust_coefficient = 1,
        .denominator = variant,
        .trust_clip = variant,
        .lr_in_momentum = !variant,
        .adapt = 1,
        .maximize = variant,
        .rounding_seed = 1ull << 40,
    };
    slots = 0;
    for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++)
        for (int stored = 0; stored < STORED_WAYS; stored++)
            for (int k = 0; k < 2; k++) add_layer(SHAPES[i][0], SHAPES[i][1], stored, k ? BFLOAT16 : FLOAT32);
    double *partial = zeros(2 * LAYER_SUMS * bighorn_layer_chunks(layer_slots, gradients, NULL, slots), sizeof(double));
    double *sums = zeros(LAYER_SUMS * slots, sizeof(double));
    void *scratch = zeros(SCRATCH_BYTES, 1);
    for (int step = 0; step < STEPS; step++) {
        const int first = step == 1 ? PHASE_FIRST : PHASE_BOTH, last = step == 1 ? PHASE_SECOND : PHASE_BOTH;
        for (int phase = first; phase <= last; phase++)
            bighorn_lars_step(&RUN, &options, layer_slots, gradients, grads, order, slots, 0.5, partial, scratch,
                              SCRATCH_BYTES, phase, sums, LAYER_SUMS);
        bighorn_advance(counts, slots);
    }
    Results all = {0};
    const char *name = variant ? "lars-joint" : "lars";
    for (int i = 0; i < slots; i++) add_result(&all, name, i, &layer_slots[i].weights);
    print_results(&all, name);
    free_all();
}

/* The arguments are the level of x86-64 whose loops step the tensors, 2, 3 or 4, and on Windows an OpenMP runtime. */
int main(int argc, char **argv) {
    if (argc > 1) RUN.isa = atoi(argv[1]);
#if defined(_WIN32)
    if (argc > 2) use_runtime(argv[2]);
#endif
    check(RUN.isa <= bighorn_isa(), "the processor has this instruction set");
    for (int variant = 0; variant < (int)(sizeof LAMBS / sizeof LAMBS[0]); variant++) {
        step_lamb(variant, IN_FLOATS);
        if (LAMBS[variant].second_moment == SECOND_MOMENT_ADAM) step_lamb(variant, IN_BLOCKS);
    }
    for (int variant = 0; variant < 2; variant++) step_lars(variant);
    step_came(0, 0, false);
    step_came(1, 0, true);
    step_came(0, 1, true);
    step_came(1, 1, true);
    return 0;
}
