/* Copies of elements that are not consecutive in memory. */
#ifndef BIGHORN_STRIDED_H
#define BIGHORN_STRIDED_H

#include "numbers.h"

static inline int64_t dtype_bytes(int type) { return type == FLOAT32 ? 4 : 2; }

/* Every instruction set has a separate function. */
#ifdef ISA
#define strided_copy CONCATENATE(strided_copy_, ISA)
#endif

/* The direction of a copy. */
enum StridedCopy { STRIDED_GATHER, STRIDED_SCATTER };

/* Copies elements [start, start + n) of a layout to consecutive memory, or back. */
void strided_copy(const int64_t *layout, void *data, int type, int64_t start, int64_t n, void *dense,
                  enum StridedCopy direction);

typedef struct {
    void (*copy)(const int64_t *layout, void *data, int type, int64_t start, int64_t n, void *dense,
                 enum StridedCopy direction);
} StridedLoops;

/* Returns the address of elements [start, start + n) if they are consecutive in memory, else NULL. `layout` may be
 * NULL. */
static inline void *consecutive(const int64_t *layout, const void *data, int type, int64_t start, int n) {
    int64_t count = n;
    if (layout) start = layout_offset(layout, start, &count);
    if (layout && (count < n || layout_last_stride(layout) != 1)) return NULL;
    return (char *)data + start * dtype_bytes(type);
}

/* Whether other elements than neighbours are next to each other in memory, so that a piece would read a few bytes of
 * each cache line. */
static inline int is_transposed(const int64_t *layout) {
    const int64_t dims = layout ? layout[0] : 0;
    for (int64_t d = 1; d < dims; d++)
        if (layout[dims + d] < layout_last_stride(layout)) return 1;
    return 0;
}

/* The elements of a thread's buffer for a part of a transposed tensor. It has whole cache lines of rows of
 * 8,192 elements and stays in the second-level cache. */
enum { STAGED_ELEMS = 1 << 17 };

#endif
