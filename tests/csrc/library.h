/* The functions of the library, which Python calls by ctypes, for programs in C that call them. */
#ifndef BIGHORN_LIBRARY_H
#define BIGHORN_LIBRARY_H

#include "abi.h"

int bighorn_isa(void);
void bighorn_advance(float *const *, int64_t);
double bighorn_square_sum(const RunConfig *, const Gradient *, void *const *, int64_t, double *);
int64_t bighorn_layer_chunks(const LayerSlot *, const Gradient *, const int64_t *, int64_t);
void bighorn_lamb_step(const RunConfig *, const LambOptions *, const LayerSlot *, const Gradient *, void *const *,
                       const int64_t *, int64_t, double, double *, void *, int64_t, int, double *, int);
void bighorn_lars_step(const RunConfig *, const LarsOptions *, const LayerSlot *, const Gradient *, void *const *,
                       const int64_t *, int64_t, double, double *, void *, int64_t, int, double *, int);
int64_t bighorn_factored_workspace(const FactoredSlot *, const FactoredShard *, const Gradient *, int64_t, int);
void bighorn_came_step(const RunConfig *, const CameOptions *, const FactoredSlot *, const FactoredShard *,
                       const Gradient *, void *const *, const double *, const int64_t *, int64_t, double, int,
                       double *);

#endif
