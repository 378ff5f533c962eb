/* pipeline.h: the order of work on chunks, as a state machine without threads, clock or I/O.
 *
 * Every chunk goes through three steps, each of which may have to wait for other ranks:
 *
 *   OPEN    post the receives, encode, post the sends
 *           waits for peers to OPEN the chunk that had its place, `window` earlier
 *   REDUCE  wait for the contributions, average, send the mean
 *           waits for peers to OPEN the same chunk
 *   CLOSE   wait for the means of the other owners, decode
 *           waits for peers to REDUCE the same chunk
 *
 * Chunks enter each step in the order of their numbers, the same on all ranks. At most `window`
 * chunks are open at once: their staging is what bounds the memory. Since every step waits only for
 * an earlier step of the same chunk, or for an earlier chunk, the oldest open chunk can always go
 * on: there is no deadlock, whatever the timing.
 */
#ifndef AGC_PIPELINE_H
#define AGC_PIPELINE_H

#include <stdbool.h>
#include <stdint.h>

enum agc_pipeline_action {
    AGC_PIPELINE_IDLE,   /* nothing to do until agc_pipeline_offer */
    AGC_PIPELINE_OPEN,   /* chunk number `opened` */
    AGC_PIPELINE_REDUCE, /* chunk number `reduced` */
    AGC_PIPELINE_CLOSE,  /* chunk number `closed` */
};

struct agc_pipeline {
    uint32_t window; /* chunks that may be open at once, at least 1 */
    uint32_t lag;    /* chunks reduced before the oldest of them is closed, at least 1 */
    uint64_t offered;
    uint64_t opened;
    uint64_t reduced;
    uint64_t closed;
};

void agc_pipeline_init(struct agc_pipeline *p, uint32_t window, uint32_t lag);

/* Event: nchunks more may be opened. */
void agc_pipeline_offer(struct agc_pipeline *p, uint64_t nchunks);

/* The next action. Event: that action is done. */
enum agc_pipeline_action agc_pipeline_next(const struct agc_pipeline *p);
void agc_pipeline_done(struct agc_pipeline *p, enum agc_pipeline_action action);

/* Every chunk that was offered is closed. */
bool agc_pipeline_is_empty(const struct agc_pipeline *p);

#endif /* AGC_PIPELINE_H */
