/* pipeline.c: the order of work on chunks. */
#include "reduce/pipeline.h"

#include "core/common.h"

void agc_pipeline_init(struct agc_pipeline *p, uint32_t window, uint32_t lag)
{
    *p = (struct agc_pipeline){.window = window ? window : 1, .lag = lag ? lag : 1};
}

void agc_pipeline_offer(struct agc_pipeline *p, uint64_t nchunks)
{
    p->offered += nchunks;
}

enum agc_pipeline_action agc_pipeline_next(const struct agc_pipeline *p)
{
    /* Opening keeps the wire fed and never waits: it goes first. Then contributions before results,
     * since other ranks wait for the mean of ours; but results that are due by now are not left
     * lying, or the window would stay full. */
    if (p->opened < p->offered && p->opened - p->closed < p->window)
        return AGC_PIPELINE_OPEN;
    if (p->reduced < p->opened && p->reduced - p->closed < p->lag)
        return AGC_PIPELINE_REDUCE;
    if (p->closed < p->reduced)
        return AGC_PIPELINE_CLOSE;
    return AGC_PIPELINE_IDLE;
}

void agc_pipeline_done(struct agc_pipeline *p, enum agc_pipeline_action action)
{
    switch (action) {
    case AGC_PIPELINE_OPEN:
        p->opened++;
        break;
    case AGC_PIPELINE_REDUCE:
        p->reduced++;
        break;
    case AGC_PIPELINE_CLOSE:
        p->closed++;
        break;
    case AGC_PIPELINE_IDLE:
        break;
    }
    assert(p->closed <= p->reduced && p->reduced <= p->opened && p->opened <= p->offered);
}

bool agc_pipeline_is_empty(const struct agc_pipeline *p)
{
    return p->closed == p->offered;
}
