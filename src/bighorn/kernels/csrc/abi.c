/* The digest of the sources and the layout of the structures, by which Python detects a library of another build. */
#include "abi.h"
#include "compiler.h"

#include <stddef.h>

/* The digest of the sources; CMakeLists.txt computes it. */
EXPORT const char *bighorn_sources(void) { return SOURCES; }

/* One field of a structure; an entry with an empty field name describes the whole structure. */
typedef struct {
    const char *structure, *field;
    int64_t offset, size;
} FieldLayout;

#define FIELD_LAYOUT(S, type, name) {#S, #name, offsetof(S, name), sizeof(type)},
#define STRUCT_LAYOUT(S, FIELDS) FIELDS(FIELD_LAYOUT, S){#S, "", 0, sizeof(S)},

/* All fields of all structures of abi.h; after the last one, an entry without names. */
EXPORT const FieldLayout *bighorn_layouts(void) {
    static const FieldLayout layouts[] = {FOR_EACH_STRUCT(STRUCT_LAYOUT){NULL, NULL, 0, 0}};
    return layouts;
}
