/* tune.c: hill climbing over the chunk sizes. */
#include "reduce/tune.h"

#include "core/common.h"

/* Gains below this are noise. */
#define GAIN 0.01
/* So much dearer than the best size after a quarter of the rounds, and a size is given up. */
#define DEAR 1.2
#define NROUNDS_DEAR (AGC_TUNE_NROUNDS / 4)
/* Rounds that take so many times the median hold a pause: validation, a checkpoint, a late peer. */
#define PAUSE 2
/* A change of the cost that calls for a new search: another link, another codec. */
#define SHIFT 1.5

/* Exponents relative to the best size, in the order of their trial. */
static const int neighbours[] = {+2, -2, +1, -1};

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

/* Of a block of rounds in a row: where one round waits for a peer and the next gains by it, only
 * the sum says what the two took. */
static double mean_cost(const struct agc_tune *t)
{
    double sorted[AGC_TUNE_NROUNDS];
    for (uint32_t i = 0; i < t->ncosts; i++) {
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > t->costs[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = t->costs[i];
    }
    double limit = PAUSE * sorted[t->ncosts / 2], sum = 0;
    uint32_t n = 0;
    for (; n < t->ncosts && sorted[n] <= limit; n++)
        sum += sorted[n];
    return sum / n;
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
    if (t->nskipped < AGC_TUNE_NSKIPPED) {
        t->nskipped++;
        return t->log2;
    }
    t->costs[t->ncosts++] = cost;
    double best_cost = t->known[t->best - t->log2_min];
    bool dear = t->log2 != t->best && t->ncosts == NROUNDS_DEAR && mean_cost(t) > DEAR * best_cost;
    if (t->ncosts < AGC_TUNE_NROUNDS && !dear)
        return t->log2;
    double measured = mean_cost(t);
    uint32_t measured_log2 = t->log2;
    t->ncosts = 0;
    if (t->resting) {
        rested(t, measured);
    } else {
        t->known[t->log2 - t->log2_min] = measured;
        if (measured < best_cost * (1 - GAIN))
            t->best = t->log2;
        try_next(t);
    }
    t->nskipped = t->log2 == measured_log2 ? AGC_TUNE_NSKIPPED : 0;
    return t->log2;
}
