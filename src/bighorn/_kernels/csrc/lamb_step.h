/* The first loops of a LAMB step, which lamb_loops.c includes twice: with the sums of squares, and for Hyperball with
 * the inner product of x and u as well. A sum that is added up for nothing took 4% of all instructions (GCC 12). */
#if STEP_ON_BALL
#define STEP_NAME(name) name##_on_ball
#define STEP_SUMS weight, update, inner
#define STEP_INNER(x, u) inner = FMA(x, u, inner)
#else
#define STEP_NAME(name) name
#define STEP_SUMS weight, update
#define STEP_INNER(x, u)
#endif

/* One loop per combination of the compile-time constants: types, and the use of u. */
FORCE_INLINE_TEMPLATE LayerSums STEP_NAME(step_loop)(const LambFloats f, const enum LambUpdateUse after,
                                                     const int x_type, const int g_type, const int state_type,
                                                     float step, int n, const void *restrict g, void *restrict m,
                                                     void *restrict v, void *restrict x, float *restrict stored) {
    LayerSums sums = {0};
    for (int start = 0, end; start < n; start = end) {
        float weight = 0, update = 0, inner = 0;
        end = n - start < FLOAT_SUM_ELEMS ? n : start + FLOAT_SUM_ELEMS;
#pragma omp simd reduction(+ : STEP_SUMS)
        for (int i = start; i < end; i++) {
            float old_x = load_element(x_type, x, i), new_m = load_element(state_type, m, i),
                  new_v = load_element(state_type, v, i);
            float new_u = step_one(f, g_type, state_type, load_element(g_type, g, i), old_x, &new_m, &new_v);
            store_element(state_type, m, i, new_m);
            store_element(state_type, v, i, new_v);
            weight = FMA(old_x, old_x, weight);
            update = FMA(new_u, new_u, update);
            STEP_INNER(old_x, new_u);
            if (keeps(after)) stored[i] = new_u;
            if (after == UPDATE_APPLY)
                store_element(x_type, x, i, rounded(x_type, state_type, moved(f, step, old_x, new_u)));
        }
        add_sums(&sums, (LayerSums){weight, update, inner});
    }
    return sums;
}

/* The same for pairs of bfloat16, n / 2 of them. In `stored`, the first elements of all pairs come before the
 * second ones. */
FORCE_INLINE_TEMPLATE LayerSums STEP_NAME(step_pairs)(const LambFloats f, const enum LambUpdateUse after,
                                                      const int g_type, float step, int n, const void *restrict g,
                                                      Bfloat16Pair *restrict m, Bfloat16Pair *restrict v,
                                                      Bfloat16Pair *restrict x, float *restrict stored) {
    const int half = n / 2;
    LayerSums sums = {0};
    for (int start = 0, end; start < half; start = end) {
        float weight = 0, update = 0, inner = 0;
        end = half - start < FLOAT_SUM_ELEMS / 2 ? half : start + FLOAT_SUM_ELEMS / 2;
#pragma omp simd reduction(+ : STEP_SUMS)
        for (int i = start; i < end; i++) {
            float g1 = g_type == FLOAT32 ? ((const float *)g)[2 * i] : low(((const Bfloat16Pair *)g)[i]);
            float g2 = g_type == FLOAT32 ? ((const float *)g)[2 * i + 1] : high(((const Bfloat16Pair *)g)[i]);
            float x1 = low(x[i]), m1 = low(m[i]), v1 = low(v[i]);
            float x2 = high(x[i]), m2 = high(m[i]), v2 = high(v[i]);
            float u1 = step_one(f, g_type, BFLOAT16, g1, x1, &m1, &v1);
            float u2 = step_one(f, g_type, BFLOAT16, g2, x2, &m2, &v2);
            m[i] = pair_of(m1, m2);
            v[i] = pair_of(v1, v2);
            weight = FMA(x1, x1, FMA(x2, x2, weight));
            update = FMA(u1, u1, FMA(u2, u2, update));
            STEP_INNER(x1, u1);
            STEP_INNER(x2, u2);
            if (keeps(after)) stored[i] = u1, stored[half + i] = u2;
            if (after == UPDATE_APPLY)
                x[i] = pair_of(round_bfloat16(moved(f, step, x1, u1), 0), round_bfloat16(moved(f, step, x2, u2), 0));
        }
        add_sums(&sums, (LayerSums){weight, update, inner});
    }
    if (n % 2) {
        LayerSums last =
            STEP_NAME(step_loop)(f, after, BFLOAT16, g_type, BFLOAT16, step, 1, at((void *)g, g_type, n - 1), m + half,
                                 v + half, x + half, stored + n - 1);
        add_sums(&sums, last);
    }
    return sums;
}

#undef STEP_NAME
#undef STEP_SUMS
#undef STEP_INNER
