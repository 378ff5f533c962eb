/* engine_data.h: gradients of all ranks of a world on their way: what went in, what came out, what
 * should have. */
#ifndef AGC_TEST_ENGINE_DATA_H
#define AGC_TEST_ENGINE_DATA_H

#include "engine_fixture.h"
#include "engine_model.h"

/* Specs and lanes of layouts. */
#define RAW {.codec = 1}
#define FP16 {.codec = 2}
#define BF16 {.codec = 3}
#define INT8 {.codec = 5}
#define INT8_SMALL {.codec = 5, .block_nelems = 32}
#define INT8_STOCHASTIC {.codec = 5, .rounding = AGC_ROUNDING_STOCHASTIC}

/* Three codecs in one bucket; parameters that end inside blocks and tiles; one without elements,
 * one with a single one. */
extern const struct layout mixed_layout;

/* For each bucket, the buckets of all ranks. What the engines get begins one element off alignment:
 * a bucket may be a view. */
struct data {
    const struct layout *layout;
    uint32_t nranks;
    uint8_t *memory[NBUCKETS_MAX][NRANKS_MAX];
    uint8_t *gradients[NBUCKETS_MAX][NRANKS_MAX]; /* what goes in */
    uint8_t *exchanged[NBUCKETS_MAX][NRANKS_MAX]; /* what the engines work on */
    uint8_t *expected[NBUCKETS_MAX];
    struct ticket tickets[NBUCKETS_MAX][NRANKS_MAX];
};

struct data *data_create(uint32_t nranks, const struct layout *layout);
void data_destroy(struct data *d);

/* Element i of a bucket. */
void put(uint32_t dtype, uint8_t *bucket, uint64_t i, float x);
double element(uint32_t dtype, const uint8_t *bucket, uint64_t i);

/* Gaussian gradients whose size differs from parameter to parameter; each is zero on a rank now and
 * then. No -0, see engine_model.h. */
void fill_gradients(struct data *d);
/* Sets or clears the gradients of one parameter of bucket 0. */
void fill_param(struct data *d, uint32_t rank, uint32_t param, bool zero);

/* One round on all ranks, buckets in order; ranks in any order, as they would come. */
void exchange_round(struct world *w, struct data *d, uint32_t round);
/* Every rank has what the model says. */
void compare_round(struct data *d, struct model *m, uint32_t round, const bool *absent);
void compare_residuals(struct world *w, const struct model *m);

#endif /* AGC_TEST_ENGINE_DATA_H */
