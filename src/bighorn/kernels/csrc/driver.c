/* Who does what, and when: threads, schedule, norms and the trust ratio. No arithmetic on elements here.
 *
 * Small tensors go to threads whole, so that the second phase finds them in cache. Large ones are shared by all
 * threads in static slices with one barrier between the phases. Threads are borrowed from the OpenMP runtime that
 * the process has already (torch's): a second pool would compete with its spinning workers. */
#include "lamb.h"

#include <math.h>
#include <stdatomic.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum { LARGE = 1 << 20 }; /* elements: from here on a tensor is shared by all threads */

/* ---- instruction sets ------------------------------------------------------------------------------------ */

#if defined(ISA_X86)
extern const Loops loops_v2, loops_v3, loops_v4;
static const Loops *loops_for(int isa) { return isa >= 4 ? &loops_v4 : isa == 3 ? &loops_v3 : &loops_v2; }

EXPORT int bighorn_isa(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
        return 4;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                   __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")
               ? 3
               : 2;
}
#else
extern const Loops loops_base;
static const Loops *loops_for(int isa) { return (void)isa, &loops_base; }

EXPORT int bighorn_isa(void) { return 0; }
#endif

/* ---- threads --------------------------------------------------------------------------------------------- */

static inline void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* The caller's rounding and flush-to-zero modes hold in every thread that works for it. */
static inline uint64_t float_mode(void) {
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    return mode;
#else
    return 0;
#endif
}

static inline void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ __volatile__("msr fpcr, %0" ::"r"(mode));
#else
    (void)mode;
#endif
}

typedef void Body(int thread, int team, void *data);

typedef struct {
    const Run *run;
    Body *body;
    void *data;
    uint64_t float_mode;
} Region;

/* The team can be smaller than asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC): only its size in here counts. */
static void enter(void *argument) {
    const Region *region = argument;
    uint64_t own = float_mode();
    set_float_mode(region->float_mode);
    region->body(region->run->thread_num(), region->run->num_threads(), region->data);
    set_float_mode(own);
}

static void run_parallel(const Run *run, Body *body, void *data) {
    if (run->threads <= 1 || !run->parallel) {
        body(0, 1, data);
        return;
    }
    Region region = {run, body, data, float_mode()};
    run->parallel(enter, &region, (unsigned)run->threads, 0);
}

/* Spins briefly, then sleeps in the kernel: spinning alone is 5 to 46 times slower with more threads than cores. */
typedef struct {
    atomic_int arrived, phase, sleepers;
} Barrier;

static void wait_for_all(Barrier *barrier, int team) {
    if (team == 1) return;
    int phase = atomic_load(&barrier->phase);
    if (atomic_fetch_add(&barrier->arrived, 1) == team - 1) {
        atomic_store(&barrier->arrived, 0);
        atomic_store(&barrier->phase, phase + 1);
#if defined(__linux__)
        if (atomic_load(&barrier->sleepers))
            syscall(SYS_futex, &barrier->phase, FUTEX_WAKE_PRIVATE, team, NULL, NULL, 0);
#endif
        return;
    }
    for (int spin = 0; spin < 4000; spin++) {
        if (atomic_load_explicit(&barrier->phase, memory_order_acquire) != phase) return;
        relax();
    }
    atomic_fetch_add(&barrier->sleepers, 1);
    while (atomic_load(&barrier->phase) == phase) {
#if defined(__linux__)
        syscall(SYS_futex, &barrier->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
#else
        relax();
#endif
    }
    atomic_fetch_sub(&barrier->sleepers, 1);
}

/* ---- one tensor ------------------------------------------------------------------------------------------ */

/* base^exponent by squaring: bias corrections without a mathematics library. */
static double power(double base, int64_t exponent) {
    double result = 1;
    for (; exponent > 0; exponent >>= 1, base *= base)
        if (exponent & 1) result *= base;
    return result;
}

/* The same decision as trust_ratio() in reference/lamb.py, which is the specification. NaN passes through. */
static double trust_ratio(const Options *o, double weight_norm, double update_norm) { /* LAMB-q */
    if (!o->adapt || weight_norm == 0 || update_norm == 0) return 1;
    double low = o->weight_norm_bounds[0], high = o->weight_norm_bounds[1];
    double phi = weight_norm < low ? low : weight_norm > high ? high : weight_norm;
    double ratio = phi / update_norm;
    low = o->trust_ratio_bounds[0], high = o->trust_ratio_bounds[1];
    return ratio < low ? low : ratio > high ? high : ratio;
}

/* u = correction * m / (sqrt(v) + eps) carries both bias corrections: eps grows by sqrt(1 - beta2^t) instead of v
 * being divided by it. Returns the learning rate that multiplies u. */
static double prepare(const Options *o, const Row *row, double grad_scale, Factors *f) {
    int64_t t = (int64_t)*row->step + 1;
    double correction1 = o->bias_correction == NONE ? 1 : 1 - power(o->beta1, t);
    double correction2 = o->bias_correction == NONE || o->second_moment == ADAGRAD ? 1 : 1 - power(o->beta2, t);
    double correction = sqrt(correction2) / correction1, root = sqrt(correction2), lr = o->lr;
    if (o->bias_correction == LEARNING_RATE) lr *= correction, correction = root = 1;
    *f = (Factors){
        .grad_scale = (float)(o->maximize ? -grad_scale : grad_scale),
        .l2 = o->decay_mode == L2 ? (float)o->weight_decay : 0,
        .beta1 = (float)o->beta1,
        .beta3 = o->grad_averaging ? (float)(1 - o->beta1) : 1,
        .beta2 = o->second_moment == ADAGRAD ? 1 : (float)o->beta2,
        .beta4 = o->second_moment == ADAGRAD ? 1 : (float)(1 - o->beta2),
        .correction = (float)correction,
        .eps = (float)(o->eps * root),
        .weight_decay = o->decay_mode == RATIO ? (float)o->weight_decay : 0,
        .decay = o->decay_mode == DECOUPLED ? (float)(1 - o->lr * o->weight_decay) : 1,
    };
    return lr;
}

/* ---- all tensors ----------------------------------------------------------------------------------------- */

typedef struct {
    const Loops *loops;
    const Options *options;
    const Row *rows;
    void *const *grads;
    const int64_t *order; /* rows, largest first */
    int64_t rows_count;
    double grad_scale;
    float *scratch;       /* shared out evenly to the team */
    int64_t scratch_size; /* floats */
    Sums *partial[2];     /* per block of a large row; two, so that a fast thread can go on to the next row */
    atomic_llong next;    /* small rows are handed out in order */
    Barrier barrier;
} Step;

static int64_t blocks_in(int64_t size) { return (size + BLOCK - 1) / BLOCK; }

static Block block_at(const Step *s, int64_t row, int64_t block) {
    int64_t start = block * BLOCK, rest = s->rows[row].size - start;
    return (Block){&s->rows[row], s->grads[row], start, rest < BLOCK ? rest : BLOCK};
}

/* Blocks [first, last) of a row, by one thread; `partial` is for a row that is shared with the other threads. */
static void step_slice(Step *s, int64_t index, int64_t first, int64_t last, Sums *partial, int thread, int team) {
    const Row *row = &s->rows[index];
    const Options *o = &s->options[row->options];
    int64_t count = blocks_in(row->size), share = s->scratch_size / team / BLOCK;
    int64_t kept = last - first < share ? first : last - share; /* from here on u is kept, before it is recomputed */
    float *scratch = s->scratch + thread * share * BLOCK;
    Sums total = {0, 0};
    Factors f;
    double lr = prepare(o, row, s->grad_scale, &f);

    for (int64_t b = first; b < last; b++) {
        Block block = block_at(s, index, b);
        Sums sums;
        if (!o->adapt)
            sums = s->loops->moments_and_apply(&block, &f, o->second_moment, (float)lr);
        else
            sums = s->loops->moments(&block, &f, o->second_moment, b < kept ? NULL : scratch + (b - kept) * BLOCK);
        if (partial) partial[b] = sums;
        total.weight += sums.weight, total.update += sums.update;
    }
    if (partial) {
        wait_for_all(&s->barrier, team);
        total = (Sums){0, 0};
        for (int64_t b = 0; b < count; b++) total.weight += partial[b].weight, total.update += partial[b].update;
    }
    double weight_norm = sqrt(total.weight) * fabs(f.decay), update_norm = sqrt(total.update);
    double ratio = trust_ratio(o, weight_norm, update_norm);
    if (!partial || thread == 0)
        row->norms[0] = (float)weight_norm, row->norms[1] = (float)update_norm, row->norms[2] = (float)ratio;
    if (!o->adapt) return;
    for (int64_t b = first; b < last; b++) {
        Block block = block_at(s, index, b);
        s->loops->apply(&block, &f, (float)(lr * ratio), b < kept ? NULL : scratch + (b - kept) * BLOCK);
    }
}

static void step_body(int thread, int team, void *data) {
    Step *s = data;
    int64_t large = 0;
    for (; large < s->rows_count && team > 1 && s->rows[s->order[large]].size > LARGE; large++) {
        int64_t index = s->order[large], count = blocks_in(s->rows[index].size);
        step_slice(s, index, count * thread / team, count * (thread + 1) / team, s->partial[large % 2], thread, team);
    }
    for (;;) {
        int64_t position = large + atomic_fetch_add(&s->next, 1);
        if (position >= s->rows_count) return;
        int64_t index = s->order[position];
        step_slice(s, index, 0, blocks_in(s->rows[index].size), NULL, thread, team);
    }
}

/* Counts a step for each parameter. Apart from the step, since the slices of a stacked one share a count. */
EXPORT void bighorn_advance(float *const *steps, int64_t count) {
    for (int64_t i = 0; i < count; i++) *steps[i] += 1;
}

/* One LAMB step of every row, without counting it. `partial` has room for two entries per block of the largest row;
 * the scratch may be of any size. Nothing is allocated here, so nothing can fail. */
EXPORT void bighorn_lamb_step(const Run *run, const Options *options, const Row *rows, void *const *grads,
                              const int64_t *order, int64_t rows_count, double grad_scale, Sums *partial,
                              float *scratch, int64_t scratch_size) {
    int64_t most = rows_count ? blocks_in(rows[order[0]].size) : 0;
    Step s = {loops_for(run->isa), options, rows, grads, order, rows_count, grad_scale, scratch, scratch_size,
              {partial, partial + most}, 0, {0, 0, 0}};
    run_parallel(run, step_body, &s);
}

/* ---- the global gradient norm ---------------------------------------------------------------------------- */

typedef struct {
    const Step *step;
    double *partial; /* one per block of every row, in order */
    int64_t blocks;
} SquareSum;

static void square_sum_body(int thread, int team, void *data) {
    const SquareSum *job = data;
    const Step *s = job->step;
    int64_t first = job->blocks * thread / team, last = job->blocks * (thread + 1) / team, before = 0;
    for (int64_t row = 0; row < s->rows_count && before < last; row++) {
        int64_t count = blocks_in(s->rows[row].size);
        for (int64_t b = first > before ? first - before : 0; b < count && before + b < last; b++) {
            Block block = block_at(s, row, b);
            job->partial[before + b] = s->loops->square_sum(&block);
        }
        before += count;
    }
}

/* The sum of all gradients' squares. `partial` has room for one entry per block of every row. */
EXPORT double bighorn_square_sum(const Run *run, const Row *rows, void *const *grads, int64_t rows_count,
                                 double *partial) {
    Step s = {.loops = loops_for(run->isa), .rows = rows, .grads = grads, .rows_count = rows_count};
    SquareSum job = {&s, partial, 0};
    for (int64_t row = 0; row < rows_count; row++) job.blocks += blocks_in(rows[row].size);
    run_parallel(run, square_sum_body, &job);
    double total = 0;
    for (int64_t b = 0; b < job.blocks; b++) total += partial[b];
    return total;
}
