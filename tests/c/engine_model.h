/* engine_model.h: what the engines of a world must compute, computed once more by one thread.
 *
 * The model shares the codecs and the cutting into tiles with the engine (both have tests of their
 * own), and nothing else: it knows no chunks, messages or buffers, holds lanes end to end, and does
 * in loops over elements what lane.c does in runs of memory. It uses the portable kernels, whatever
 * the engines use.
 *
 * It does not tell -0 from 0 where a residual of 0 is added or not: tests keep -0 out of gradients.
 */
#ifndef AGC_TEST_ENGINE_MODEL_H
#define AGC_TEST_ENGINE_MODEL_H

#include "engine_fixture.h"

struct model {
    const struct layout *layout;
    uint32_t nranks;
    uint32_t seed;
    bool has_residual[NPARAMS_MAX];
    float *residual[NRANKS_MAX][NPARAMS_MAX]; /* the workers' */
    float *owner_residual[NBUCKETS_MAX]
                         [NLANES_MAX]; /* of all owners: each element of a lane has one */
};

struct model *model_create(uint32_t nranks, const struct layout *layout, uint32_t seed);
void model_destroy(struct model *m);

/* The exchange of one bucket. gradients: nranks buckets, which stay as they are; result: one.
 * absent: which ranks do not count; may be NULL. */
void model_exchange(struct model *m, uint32_t bucket, uint32_t round, uint8_t *const gradients[],
                    const bool *absent, uint8_t *result);

/* Another layout of the same parameters. */
void model_relayout(struct model *m, const struct layout *layout);

/* What rank's engine must say is owed for a parameter: agc_engine_residual_get. */
void model_residual(const struct model *m, uint32_t rank, uint32_t param, bool owner, float *dst);

#endif /* AGC_TEST_ENGINE_MODEL_H */
