/* The structures and constants that Python passes to the library. _kernels/cpu/abi.py builds
 * the same with ctypes.
 *
 * A structure is a list of its fields, FIELD(S, type, name). The list declares the structure at the end of this file,
 * and abi.c exports the name and the type of each field in it; abi.py has the checksum of all but options, whose lists
 * options.h has. */
#ifndef BIGHORN_ABI_H
#define BIGHORN_ABI_H

#include "options.h"

#include <stdint.h>

enum DataType { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, INT4 = 4 };
enum RoundingMode { ROUND_NEAREST = 0, ROUND_STOCHASTIC = 1, ROUND_KAHAN = 2, ROUND_MASTER = 3, ROUND_KAHAN8 = 4 };

/* The phases of a layer-wise step. If one call runs both, the second phase finds its data in cache. */
enum LayerwisePhase { PHASE_BOTH = 0, PHASE_FIRST = 1, PHASE_SECOND = 2 };

typedef void ParallelFunction(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef void Microtask(int32_t *thread, int32_t *thread_of_team, void *data);
typedef void ForkFunction(const void *location, int32_t arguments, Microtask *task, ...);
typedef void PushFunction(const void *location, int32_t thread, int32_t threads);
typedef int32_t GlobalThreadFunction(const void *location);
typedef int ThreadFunction(void);
typedef double *RoundSums[3];

/* The properties of the process that cpu/library.py determines: the OpenMP runtime that is loaded, and the instruction
 * set.
 * parallel: GOMP_parallel; NULL: the three functions after it, of LLVM's and Intel's runtimes, start a team. */
#define RUN_CONFIG_FIELDS(FIELD, S)                     \
    FIELD(S, ParallelFunction *, parallel)              \
    FIELD(S, ForkFunction *, fork_call)                 \
    FIELD(S, PushFunction *, push_num_threads)          \
    FIELD(S, GlobalThreadFunction *, global_thread_num) \
    FIELD(S, ThreadFunction *, thread_num)              \
    FIELD(S, ThreadFunction *, num_threads)             \
    FIELD(S, int32_t, threads)                          \
    FIELD(S, int32_t, isa)

/* One slot's gradient, dense in the order of the state; its address is new at each step. */
#define GRADIENT_FIELDS(FIELD, S) \
    FIELD(S, int64_t, size)       \
    FIELD(S, int32_t, type)

/* One tensor's weights: how they are stored, and their position in the parameter, which selects their random bits.
 * data, aux: dense in the order of the state. aux: kahan: the compensation, int16, kahan8: int8; master: the master
 * weights, float32.
 * layout: positions in the whole parameter (numbers.h); NULL: they are consecutive.
 * offset: the position of the first weight in the parameter. */
#define WEIGHTS_FIELDS(FIELD, S)      \
    FIELD(S, void *, data)            \
    FIELD(S, void *, aux)             \
    FIELD(S, const int64_t *, layout) \
    FIELD(S, int64_t, offset)         \
    FIELD(S, uint32_t, param_id)      \
    FIELD(S, int32_t, type)           \
    FIELD(S, int32_t, rounding)

/* One tensor (or one slice of a stacked one) of a layer-wise step, with its state, which is dense. LARS has the first
 * moment alone.
 * inner: for moments in quantization blocks, the elements per index of dim 0, which blocks do not cross; else 0.
 * step: the number of steps taken so far.
 * metrics: the output: the metrics of `_kernels/options.py`.
 * options: the index of its options. */
#define LAYER_SLOT_FIELDS(FIELD, S)     \
    FIELD(S, Weights, weights)          \
    FIELD(S, void *, exp_avg)           \
    FIELD(S, void *, exp_avg_sq)        \
    FIELD(S, float *, exp_avg_scale)    \
    FIELD(S, float *, exp_avg_sq_scale) \
    FIELD(S, int64_t, inner)            \
    FIELD(S, const float *, step)       \
    FIELD(S, float *, metrics)          \
    FIELD(S, float *, radius)           \
    FIELD(S, int32_t, state_type)       \
    FIELD(S, int32_t, options)

/* As LayerSlot, with `matrices` of height x width elements one after the other.
 * exp_avg_scale: the scales of an average in codes, whose blocks are within rows of a matrix.
 * exp_avg_sq: the second moment if it is not factored; if it is, the four averages after it are used instead.
 * metrics: the output: the metrics of `_kernels/options.py`. */
#define FACTORED_SLOT_FIELDS(FIELD, S) \
    FIELD(S, Weights, weights)         \
    FIELD(S, void *, exp_avg)          \
    FIELD(S, float *, exp_avg_scale)   \
    FIELD(S, void *, exp_avg_sq)       \
    FIELD(S, void *, exp_avg_sq_row)   \
    FIELD(S, void *, exp_avg_sq_col)   \
    FIELD(S, void *, exp_avg_res_row)  \
    FIELD(S, void *, exp_avg_res_col)  \
    FIELD(S, const float *, step)      \
    FIELD(S, float *, metrics)         \
    FIELD(S, int64_t, matrices)        \
    FIELD(S, int64_t, height)          \
    FIELD(S, int64_t, width)           \
    FIELD(S, int32_t, state_type)      \
    FIELD(S, int32_t, options)         \
    FIELD(S, int32_t, factored)

/* The whole tensor of which a slot is a shard.
 * matrix_at, row_at, col_at: the index in the whole tensor of each matrix, row and column of the shard; NULL: they are
 * equal.
 * sums: for each reduction round, the sums that are added up over all shards.
 * split_down, split_across: whether other shards hold other rows, other columns of the shard's matrices.
 * leads_down, leads_across: whether this shard holds the first row, the first column. */
#define FACTORED_SHARD_FIELDS(FIELD, S)  \
    FIELD(S, int64_t, matrices)          \
    FIELD(S, int64_t, height)            \
    FIELD(S, int64_t, width)             \
    FIELD(S, const int64_t *, matrix_at) \
    FIELD(S, const int64_t *, row_at)    \
    FIELD(S, const int64_t *, col_at)    \
    FIELD(S, RoundSums, sums)            \
    FIELD(S, int32_t, split_down)        \
    FIELD(S, int32_t, split_across)      \
    FIELD(S, int32_t, leads_down)        \
    FIELD(S, int32_t, leads_across)

#define FOR_EACH_STRUCT(STRUCT)                  \
    STRUCT(RunConfig, RUN_CONFIG_FIELDS)         \
    STRUCT(Gradient, GRADIENT_FIELDS)            \
    STRUCT(Weights, WEIGHTS_FIELDS)              \
    STRUCT(LayerSlot, LAYER_SLOT_FIELDS)         \
    STRUCT(FactoredSlot, FACTORED_SLOT_FIELDS)   \
    STRUCT(FactoredShard, FACTORED_SHARD_FIELDS) \
    FOR_EACH_OPTIONS(STRUCT)

#define DECLARE_FIELD(S, type, name) type name;
#define DECLARE_STRUCT(S, FIELDS) \
    typedef struct {              \
        FIELDS(DECLARE_FIELD, S)  \
    } S;
FOR_EACH_STRUCT(DECLARE_STRUCT)

#endif
