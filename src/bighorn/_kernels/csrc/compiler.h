/* Directives to the compiler: symbols, inlining, and code per instruction set. */
#ifndef BIGHORN_COMPILER_H
#define BIGHORN_COMPILER_H

/* A function that Python calls. CMakeLists.txt hides all other symbols. */
#define EXPORT __attribute__((visibility("default")))

/* A function that is slower than its alternatives unless it is inlined: a few instructions on a register. */
#define FORCE_INLINE static inline __attribute__((always_inline))

/* A function with a buffer, which inlining would add to the stack of all its callers, several times: a thread of Python
 * can have a stack of only 64 KB. */
#define NO_INLINE static __attribute__((noinline, unused))

/* FORCE_INLINE_TEMPLATE is C's substitute for a C++ template. Such a function takes some of its parameters as constants
 * (dtypes, an optimizer's variant, the number of rows), and every call passes literals for these. Inlining is
 * mandatory: the compiler then removes the branches on the constants and vectorizes one loop for each combination. The
 * constants are the parameters that are declared `const int` or `const enum`, and pointers that may be NULL. */
#define FORCE_INLINE_TEMPLATE FORCE_INLINE

#define CONCATENATE_(a, b) a##b
#define CONCATENATE(a, b) CONCATENATE_(a, b)

/* The name of an object that a source file defines once for each instruction set. CMakeLists.txt compiles such files
 * once with each value of ISA: v2, v3 and v4 on x86-64, base elsewhere. */
#define PER_ISA(name) CONCATENATE(name, CONCATENATE(_, ISA))

/* Defines `table_for(isa)`, which selects among tables of functions that were each compiled for one instruction set. */
#define TABLE_PER_ISA(Type, table) TABLE_PER_ISA_(Type, table)
#if defined(ISA_X86)
#define TABLE_PER_ISA_(Type, table)                                           \
    extern const Type table##_v2, table##_v3, table##_v4;                     \
    static inline const Type *table##_for(int isa) {                          \
        return isa >= 4 ? &table##_v4 : isa == 3 ? &table##_v3 : &table##_v2; \
    }
#else
#define TABLE_PER_ISA_(Type, table) \
    extern const Type table##_base; \
    static inline const Type *table##_for(int isa) { return (void)isa, &table##_base; }
#endif

/* A fused multiply-add if the instruction set has one. The build disables automatic contraction. */
#if defined(__FMA__) || defined(__aarch64__)
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

#endif
