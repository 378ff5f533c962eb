/* tune.h: the search for the chunk size, as a state machine without clock or I/O.
 *
 * What limits an exchange decides which size is best: a slow link wants small chunks, which fill
 * the pipeline early; processors that are busy anyway want large ones, since every message costs
 * them time. The two cannot be told apart from inside, so sizes are tried: from the estimate of
 * agc_plan_chunk_log2 the search climbs to the size with the lowest cost.
 *
 * One size is measured for AGC_TUNE_NROUNDS rounds in a row, and its cost is their mean without the
 * pauses among them; one that is far too dear is given up sooner. Neighbours of the best size are
 * tried, at a factor of 4 and then 2; one that is better becomes the best, until none is left to
 * try. Then the search rests, twice as long each time; a cost that changes much ends the rest.
 */
#ifndef AGC_TUNE_H
#define AGC_TUNE_H

#include <stdbool.h>
#include <stdint.h>

#define AGC_TUNE_NROUNDS 16u
#define AGC_TUNE_NSKIPPED 2u /* rounds with a new size that do not count: new memory is touched */
#define AGC_TUNE_NSIZES 16u  /* log2_max - log2_min, at most, and 1 */
#define AGC_TUNE_REST_NROUNDS_MIN 256u
#define AGC_TUNE_REST_NROUNDS_MAX 16384u

struct agc_tune {
    uint32_t log2_min, log2_max;
    uint32_t best;
    uint32_t log2; /* the size being measured */
    bool resting;
    double known[AGC_TUNE_NSIZES];  /* cost of each size from log2_min on; 0: not yet measured */
    double costs[AGC_TUNE_NROUNDS]; /* of the size being measured */
    uint32_t ncosts;
    uint32_t nskipped; /* of the first rounds with this size */
    uint32_t nrested, rest_nrounds;
};

/* Begins at 2^log2, which is taken into the bounds. */
void agc_tune_init(struct agc_tune *t, uint32_t log2, uint32_t log2_min, uint32_t log2_max);

/* Event: a round with chunks of 2^log2 bytes is over; cost is above 0. Rounds with another size
 * than the one being measured do not count: the size takes a round or two to come into use. Returns
 * the size to use next. */
uint32_t agc_tune_round(struct agc_tune *t, uint32_t log2, double cost);

#endif /* AGC_TUNE_H */
