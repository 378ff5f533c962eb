/* parallel.h: many equal pieces of work over a few threads. */
#ifndef AGC_PARALLEL_H
#define AGC_PARALLEL_H

#include <stdint.h>

/* At most so many threads work on one call. */
#define AGC_NTHREADS_MAX 64u

/* Does item i, in thread `worker` (0 .. nthreads - 1). */
typedef void agc_work_item(void *ctx, uint32_t worker, uint64_t i);

/* Does items 0 .. nitems - 1, each once, in any order, in up to nthreads threads of which the
 * caller's is one; returns when all are done. The threads live for this call only: there is no pool
 * that a fork could leave without its threads. Where the system has none left, fewer do the work.
 */
void agc_parallel(uint32_t nthreads, uint64_t nitems, agc_work_item *item, void *ctx);

#endif /* AGC_PARALLEL_H */
