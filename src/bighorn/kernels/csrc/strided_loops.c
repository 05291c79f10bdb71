/* Copies of elements that are not consecutive in memory. Compiled once per instruction set. */
#include "strided.h"

/* The elements of a line of a block: a cache line, or half of one in 16 bits. */
FORCE_INLINE_TEMPLATE int line_elems(const int bytes) { return bytes == 8 ? 8 : 16; }

FORCE_INLINE_TEMPLATE void copy_one(const int bytes, const enum StridedCopy direction, char *strided, char *dense) {
    if (direction == STRIDED_GATHER) memcpy(dense, strided, (size_t)bytes);
    else memcpy(strided, dense, (size_t)bytes);
}

/* A box of `rows` of a dense matrix whose rows are `width` apart, and the same elements in memory. */
typedef struct {
    char *strided, *dense;
    int64_t rows, columns, width, row_stride, column_stride;
} StridedBox;

FORCE_INLINE_TEMPLATE void copy_loop(const int bytes, const enum StridedCopy direction, const StridedBox b) {
    for (int64_t i = 0; i < b.rows; i++)
        for (int64_t j = 0; j < b.columns; j++)
            copy_one(bytes, direction, b.strided + (i * b.row_stride + j * b.column_stride) * bytes,
                     b.dense + (i * b.width + j) * bytes);
}

/* Copies a block whose columns are consecutive in memory, through a buffer: cache lines whose addresses differ by whole
 * pages would displace each other before all of their elements are used. Processors do not prefetch from page to page:
 * if there is `another` block on the right, its lines are prefetched here. */
FORCE_INLINE_TEMPLATE void copy_block(const int bytes, const enum StridedCopy direction, const StridedBox b,
                                      int another) {
    const int n = line_elems(bytes);
    char lines[16 * 16 * 4]; /* n * n * bytes, at most */
    StridedBox block = {lines, b.dense, n, n, b.width, 1, n};
    if (direction == STRIDED_SCATTER) copy_loop(bytes, direction, block);
    for (int j = 0; j < n; j++) {
        char *line = b.strided + j * b.column_stride * bytes, *copy = lines + j * n * bytes;
        if (another) __builtin_prefetch(line + n * b.column_stride * bytes);
        if (direction == STRIDED_GATHER) memcpy(copy, line, (size_t)(n * bytes));
        else memcpy(line, copy, (size_t)(n * bytes));
    }
    if (direction == STRIDED_GATHER) copy_loop(bytes, direction, block);
}

/* Copies a box; blocks below each other come one after the other, since they have the same pages. */
FORCE_INLINE_TEMPLATE void copy_box(const int bytes, const enum StridedCopy direction, const StridedBox b) {
    const int n = line_elems(bytes);
    if (b.rows == 1 || b.row_stride >= b.column_stride) {
        copy_loop(bytes, direction, b);
        return;
    }
    for (int64_t j = 0; j < b.columns; j += n)
        for (int64_t i = 0; i < b.rows; i += n) {
            StridedBox part = b;
            part.strided += (i * b.row_stride + j * b.column_stride) * bytes;
            part.dense += (i * b.width + j) * bytes;
            part.rows = b.rows - i < n ? b.rows - i : n;
            part.columns = b.columns - j < n ? b.columns - j : n;
            if (b.row_stride == 1 && part.rows == n && part.columns == n)
                copy_block(bytes, direction, part, j + 2 * n <= b.columns);
            else copy_loop(bytes, direction, part);
        }
}

/* Copies a range of a layout as boxes of the last two dimensions. */
FORCE_INLINE_TEMPLATE void copy_range(const int bytes, const enum StridedCopy direction, const int64_t *layout,
                                      char *data, int64_t start, int64_t n, char *dense) {
    const int64_t dims = layout[0], width = layout[dims], height = dims > 1 ? layout[dims - 1] : 1;
    const int64_t row_stride = dims > 1 ? layout[2 * dims - 1] : 0, column_stride = layout[2 * dims];
    for (int64_t end = start + n; start < end;) {
        int64_t rest; /* of the row */
        const int64_t offset = layout_offset(layout, start, &rest), row = start / width % height;
        StridedBox b = {data + offset * bytes, dense, 1, rest, width, row_stride, column_stride};
        if (rest == width && end - start >= width) {
            b.rows = (end - start) / width;
            b.rows = b.rows < height - row ? b.rows : height - row;
        } else if (rest > end - start) {
            b.columns = end - start;
        }
        if (column_stride == 1)
            for (int64_t i = 0; i < b.rows; i++) {
                char *line = b.strided + i * row_stride * bytes, *copy = dense + i * width * bytes;
                if (direction == STRIDED_GATHER) memcpy(copy, line, (size_t)(b.columns * bytes));
                else memcpy(line, copy, (size_t)(b.columns * bytes));
            }
        else copy_box(bytes, direction, b);
        start += b.rows * b.columns;
        dense += b.rows * b.columns * bytes;
    }
}

#define COPY_RANGE(bytes)                                                                                   \
    (direction == STRIDED_GATHER ? copy_range(bytes, STRIDED_GATHER, layout, data, start, n, (char *)dense) \
                                 : copy_range(bytes, STRIDED_SCATTER, layout, data, start, n, (char *)dense))

void strided_copy(const int64_t *layout, void *data, int type, int64_t start, int64_t n, void *dense,
                  enum StridedCopy direction) {
    switch (dtype_bytes(type)) {
        case 2: COPY_RANGE(2); break;
        case 4: COPY_RANGE(4); break;
        default: COPY_RANGE(8); break;
    }
}

const StridedLoops PER_ISA(strided_loops) = {.copy = strided_copy};
