/* The barrier and the distribution of slots, for ThreadSanitizer; this driver needs only run.c. */
#include "team.h"

enum { ROUNDS = 300, SHARED_ROWS = 3, ROWS = 100 };

/* ---- the barrier ----------------------------------------------------------------------------------------- */

static RunBarrier barrier;
static int slots[THREADS]; /* plain memory that only the barrier protects */

static void meet(int thread, int team, void *data) {
    (void)data;
    for (int round = 0; round < ROUNDS; round++) {
        slots[thread] = round;
        wait_for_all(&barrier, team);
        for (int i = 0; i < team; i++) check(slots[i] == round, "all threads have arrived");
        wait_for_all(&barrier, team);
    }
}

/* ---- the distribution of slots ---------------------------------------------------------------------------- */

static int visits[ROWS][THREADS];

static void visit(void *data, int64_t slot, const SlotShare *share) {
    (void)data;
    visits[slot][share->part]++;
    check(share->parts == (slot < SHARED_ROWS ? THREADS : 1), "all threads share the large slots and no others");
}

static void visit_rows(int thread, int team, void *data) { for_each_slot(data, thread, team, visit, NULL); }

static void distribute(void) {
    static Gradient gradients[ROWS];
    static int64_t order[ROWS];
    for (int64_t slot = 0; slot < ROWS; slot++) {
        order[slot] = slot;
        gradients[slot].size = slot < SHARED_ROWS ? 2000 : 1000;
    }
    SlotQueue queue = {.order = order, .gradients = gradients, .count = ROWS, .shared_min_elems = 1000};
    run_parallel(&RUN, PARALLEL_MIN_ELEMS, visit_rows, &queue);
    for (int slot = 0; slot < ROWS; slot++)
        for (int part = 0; part < THREADS; part++)
            check(visits[slot][part] == (slot < SHARED_ROWS || part == 0), "each part of each slot is visited once");
}

int main(void) {
    run_parallel(&RUN, PARALLEL_MIN_ELEMS, meet, NULL);
    distribute();
    puts("done");
    return 0;
}
