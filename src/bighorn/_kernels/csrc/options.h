/* Written by `make options` from the classes of options, most of them in _kernels/options.py; do not edit it.
 *
 * The options that the tensors of one bucket share. The value of an enum is an index among the option's values. A bound
 * that is not set is 0 or infinity. CAME's second beta can depend on the tensor (`beta2s` of bighorn_came_step). */
#ifndef BIGHORN_OPTIONS_H
#define BIGHORN_OPTIONS_H

typedef double Pair[2];
typedef double Triple[3];

enum { BIAS_CORRECTION_FALSE, BIAS_CORRECTION_TRUE, BIAS_CORRECTION_LR };
enum { DECAY_MODE_RATIO, DECAY_MODE_DECOUPLED, DECAY_MODE_L2 };
enum { SECOND_MOMENT_ADAM, SECOND_MOMENT_AMSGRAD, SECOND_MOMENT_ADAGRAD };
enum { DENOMINATOR_SUM, DENOMINATOR_JOINT };

#define CAME_OPTIONS_FIELDS(FIELD, S)  \
    FIELD(S, double, lr)               \
    FIELD(S, double, weight_decay)     \
    FIELD(S, int32_t, maximize)        \
    FIELD(S, uint64_t, rounding_seed)  \
    FIELD(S, Triple, betas)            \
    FIELD(S, Pair, eps)                \
    FIELD(S, double, clip_threshold)   \
    FIELD(S, int32_t, bias_correction) \
    FIELD(S, int32_t, scale_parameter) \
    FIELD(S, double, scale_eps)

#define LAMB_OPTIONS_FIELDS(FIELD, S)  \
    FIELD(S, double, lr)               \
    FIELD(S, double, weight_decay)     \
    FIELD(S, int32_t, maximize)        \
    FIELD(S, uint64_t, rounding_seed)  \
    FIELD(S, Pair, betas)              \
    FIELD(S, double, eps)              \
    FIELD(S, int32_t, bias_correction) \
    FIELD(S, int32_t, grad_averaging)  \
    FIELD(S, int32_t, decay_mode)      \
    FIELD(S, int32_t, adapt)           \
    FIELD(S, int32_t, hyperball)       \
    FIELD(S, Pair, weight_norm_bounds) \
    FIELD(S, Pair, trust_ratio_bounds) \
    FIELD(S, int32_t, second_moment)

#define LARS_OPTIONS_FIELDS(FIELD, S)   \
    FIELD(S, double, lr)                \
    FIELD(S, double, weight_decay)      \
    FIELD(S, int32_t, maximize)         \
    FIELD(S, uint64_t, rounding_seed)   \
    FIELD(S, double, momentum)          \
    FIELD(S, int32_t, nesterov)         \
    FIELD(S, double, trust_coefficient) \
    FIELD(S, double, eps)               \
    FIELD(S, int32_t, denominator)      \
    FIELD(S, int32_t, trust_clip)       \
    FIELD(S, int32_t, lr_in_momentum)   \
    FIELD(S, int32_t, adapt)

#define FOR_EACH_OPTIONS(STRUCT)             \
    STRUCT(CameOptions, CAME_OPTIONS_FIELDS) \
    STRUCT(LambOptions, LAMB_OPTIONS_FIELDS) \
    STRUCT(LarsOptions, LARS_OPTIONS_FIELDS)

#endif
