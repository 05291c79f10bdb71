/* The sums that are added up over all shards of a tensor in a CAME step: their positions, and the results for the whole
 * tensor. */
#ifndef BIGHORN_CAME_SHARDS_H
#define BIGHORN_CAME_SHARDS_H

#include "came_job.h"

/* Every type has separate functions. */
#define square_shard_sums PER_TYPE(square_shard_sums)
#define residual_shard_sums PER_TYPE(residual_shard_sums)
#define store_shard_average PER_TYPE(store_shard_average)
#define store_shard_square_sums PER_TYPE(store_shard_square_sums)
#define load_reduced_average PER_TYPE(load_reduced_average)
#define reduced_square_sums PER_TYPE(reduced_square_sums)
#define reduced_confidence PER_TYPE(reduced_confidence)

/* How a shard is split: other shards have other rows or columns of its matrices. */
static inline int is_split(const CameShard *shard) { return shard && (shard->split_down || shard->split_across); }
static inline int is_split_both_ways(const CameShard *shard) {
    return shard && shard->split_down && shard->split_across;
}

/* Addresses, in the sums of the reduction rounds, of the numbers that are added up; NULL for those that are not
 * exchanged. */
typedef struct {
    double *inner;     /* split one way: ratios, added up along the split, or a matrix's sum of 1 / sqrt(average) */
    double *row, *col; /* averages of the lines that are split */
    double *total;     /* split one way: a matrix's sum of the averages that are not split */
    double *update, *param, *confidence; /* the sums of u^2, of x^2, and of the confidence */
} CameShardSums;

CameShardSums square_shard_sums(const CameJob *job);
CameShardSums residual_shard_sums(const CameJob *job);

/* Sums over all elements: of u^2 before clipping, and of x^2. */
typedef struct {
    double update, param;
} CameSquareSums;

/* Stores this shard's part of an average, with its ratios if `ratio` is not NULL. */
void store_shard_average(const CameJob *job, const CameAverage *average, const CameAverage *ratio,
                         const CameShardSums *to);
void store_shard_square_sums(const CameShardSums *to, CameSquareSums sums);

/* Loads an average that has been added up: its lines and, into `job->means`, the means of its rows. */
void load_reduced_average(const CameJob *job, const CameAverage *average, const CameShardSums *from);

/* Return sums over the whole tensor, from sums that have been added up. */
CameSquareSums reduced_square_sums(const CameJob *job, const CameShardSums *from);
double reduced_confidence(const CameJob *job, const CameShardSums *from);

#endif
