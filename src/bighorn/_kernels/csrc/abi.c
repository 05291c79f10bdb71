/* The digest of the sources and the fields of the structures, from which Python builds its own. */
#include "abi.h"
#include "compiler.h"

#include <stddef.h>

/* The digest of the sources; CMakeLists.txt computes it. */
EXPORT const char *bighorn_sources(void) { return SOURCES; }

typedef struct {
    const char *structure, *name, *type;
} Field;

#define DESCRIBE_FIELD(S, type, name) {#S, #name, #type},
#define DESCRIBE_STRUCT(S, FIELDS) FIELDS(DESCRIBE_FIELD, S)

/* All fields of all structures; after the last one, an entry without names. */
EXPORT const Field *bighorn_fields(void) {
    static const Field fields[] = {FOR_EACH_STRUCT(DESCRIBE_STRUCT){NULL, NULL, NULL}};
    return fields;
}
