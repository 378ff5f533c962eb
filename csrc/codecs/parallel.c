/* parallel.c: many equal pieces of work over a few threads. Each thread takes the next item that
 * nobody has taken, so that a slow core does less. */
#include "codecs/parallel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

struct work {
    agc_work_item *item;
    void *ctx;
    uint64_t nitems;
    _Atomic(uint64_t) next;
};

struct worker {
    struct work *work;
    uint32_t number;
    pthread_t thread;
    bool started;
};

static void *work_off(void *arg)
{
    const struct worker *w = (const struct worker *)arg;
    for (;;) {
        uint64_t i = atomic_fetch_add_explicit(&w->work->next, 1, memory_order_relaxed);
        if (i >= w->work->nitems)
            return NULL;
        w->work->item(w->work->ctx, w->number, i);
    }
}

void agc_parallel(uint32_t nthreads, uint64_t nitems, agc_work_item *item, void *ctx)
{
    struct work work = {.item = item, .ctx = ctx, .nitems = nitems};
    struct worker workers[AGC_NTHREADS_MAX];
    if (nthreads > AGC_NTHREADS_MAX)
        nthreads = AGC_NTHREADS_MAX;
    if (nthreads > nitems)
        nthreads = (uint32_t)nitems;
    atomic_init(&work.next, 0);
    for (uint32_t t = 0; t < nthreads; t++) {
        workers[t] = (struct worker){.work = &work, .number = t};
        workers[t].started =
            t > 0 && pthread_create(&workers[t].thread, NULL, work_off, &workers[t]) == 0;
    }
    if (nthreads > 0)
        work_off(&workers[0]);
    for (uint32_t t = 0; t < nthreads; t++)
        if (workers[t].started)
            pthread_join(workers[t].thread, NULL);
}
