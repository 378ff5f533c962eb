/* tune.c: hill climbing over the chunk sizes. */
#include "reduce/tune.h"

#include "core/common.h"

/* Gains below this are noise. */
#define GAIN 0.01
/* Twice in a row this much dearer than the best size, and a size is given up. */
#define DEAR 1.1
/* A change of the cost that calls for a new search: another link, another codec. */
#define SHIFT 1.5

/* Exponents relative to the best size, in the order of their trial. */
static const int neighbours[] = {+1, -1, +2, -2};

void agc_tune_init(struct agc_tune *t, uint32_t log2, uint32_t log2_min, uint32_t log2_max)
{
    assert(log2_min <= log2_max && log2_max - log2_min < AGC_TUNE_NSIZES);
    uint32_t first = agc_min_u32(agc_max_u32(log2, log2_min), log2_max);
    *t = (struct agc_tune){.log2_min = log2_min,
                           .log2_max = log2_max,
                           .best = first,
                           .log2 = first,
                           .rest_nrounds = AGC_TUNE_REST_NROUNDS_MIN};
}

static double median_cost(const struct agc_tune *t)
{
    double sorted[AGC_TUNE_NROUNDS];
    for (uint32_t i = 0; i < AGC_TUNE_NROUNDS; i++) {
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > t->costs[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = t->costs[i];
    }
    return sorted[AGC_TUNE_NROUNDS / 2];
}

/* Goes on to a neighbour that is not known yet, or to rest. */
static void try_next(struct agc_tune *t)
{
    for (size_t i = 0; i < sizeof neighbours / sizeof neighbours[0]; i++) {
        int64_t log2 = (int64_t)t->best + neighbours[i];
        if (log2 >= t->log2_min && log2 <= t->log2_max && t->known[log2 - t->log2_min] == 0) {
            t->log2 = (uint32_t)log2;
            return;
        }
    }
    t->log2 = t->best;
    t->resting = true;
    t->nrested = 0;
}

/* The best size was measured again, while resting. */
static void rested(struct agc_tune *t, double cost)
{
    double before = t->known[t->best - t->log2_min];
    bool shifted = cost > before * SHIFT || cost * SHIFT < before;
    t->nrested += AGC_TUNE_NROUNDS;
    if (!shifted && t->nrested < t->rest_nrounds)
        return;
    t->rest_nrounds = shifted ? AGC_TUNE_REST_NROUNDS_MIN
                              : agc_min_u32(2 * t->rest_nrounds, AGC_TUNE_REST_NROUNDS_MAX);
    t->resting = false;
    memset(t->known, 0, sizeof t->known);
    t->known[t->best - t->log2_min] = cost;
    try_next(t);
}

uint32_t agc_tune_round(struct agc_tune *t, uint32_t log2, double cost)
{
    if (log2 != t->log2 || t->log2_min == t->log2_max)
        return t->log2;
    t->costs[t->ncosts++] = cost;
    double best_cost = t->known[t->best - t->log2_min];
    bool dear = t->log2 != t->best && t->ncosts == 2 && t->costs[0] > DEAR * best_cost &&
                t->costs[1] > DEAR * best_cost;
    if (t->ncosts < AGC_TUNE_NROUNDS && !dear)
        return t->log2;
    double measured = dear ? cost : median_cost(t);
    t->ncosts = 0;
    if (t->resting) {
        rested(t, measured);
        return t->log2;
    }
    t->known[t->log2 - t->log2_min] = measured;
    if (measured < best_cost * (1 - GAIN))
        t->best = t->log2;
    try_next(t);
    return t->log2;
}
