/* The sums that are added up over all shards of a tensor in a factored optimizer's step: their positions, and the
 * results for the whole tensor. */
#ifndef BIGHORN_FACTORED_SHARDS_H
#define BIGHORN_FACTORED_SHARDS_H

#include "factored_job.h"

/* Addresses, in the sums of the reduction rounds, of the numbers that are added up; NULL for numbers that are not
 * exchanged. */
typedef struct {
    double *inner;     /* split one way: ratios, added up along the split, or a matrix's sum of 1 / sqrt(average) */
    double *row, *col; /* averages of the lines that are split */
    double *total;     /* split one way: a matrix's sum of the averages that are not split */
    double *update, *param, *confidence; /* the sums of u^2, of x^2, and of the confidence */
} FactoredShardSums;

/* Returns the addresses of an average's sums from `at` on, of which `inner` are inner sums, and the address after them.
 */
FactoredShardSums shard_sums_at(const FactoredShard *h, double *at, int64_t inner, double **rest);

/* Returns the addresses of the second moment's sums. */
FactoredShardSums square_shard_sums(const FactoredJob *job);

/* Sums over all elements: of u^2 before clipping, and of x^2. */
typedef struct {
    double update, param;
} FactoredSquareSums;

/* Stores this shard's part of an average, with its ratios if `ratio` is not NULL. */
void store_shard_average(const FactoredJob *job, const FactoredAverage *average, const FactoredAverage *ratio,
                         const FactoredShardSums *to);
void store_shard_square_sums(const FactoredShardSums *to, FactoredSquareSums sums);

/* Loads an average that has been added up: its lines and, into `job->means`, the means of its rows. */
void load_reduced_average(const FactoredJob *job, const FactoredAverage *average, const FactoredShardSums *from);

/* Return sums over the whole tensor, from sums that have been added up. */
FactoredSquareSums reduced_square_sums(const FactoredJob *job, const FactoredShardSums *from);
/* The mean of the row averages of matrix k. */
double reduced_row_mean(const FactoredShard *h, const FactoredShardSums *from, int64_t k);

#endif
