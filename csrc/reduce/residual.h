/* residual.h: what a rank owes (error feedback): zeros at first, in float or in half the memory.
 *
 * In bfloat16 each store rounds stochastically: 8 bits of mantissa cannot hold a small loss beside
 * a large one, and rounding to nearest would drop it in every round; so it survives with the right
 * probability, and nothing is lost on average.
 */
#ifndef AGC_RESIDUAL_H
#define AGC_RESIDUAL_H

#include "core/kernels.h"
#include "reduce/alloc.h"

struct agc_residual {
    uint8_t *data; /* NULL: none */
    uint64_t nelems;
    bool bf16;
};

/* Zeros, unless there are some already. */
AGC_NODISCARD enum agc_status agc_residual_create(struct agc_residual *r, uint64_t nelems,
                                                  bool bf16, const struct agc_alloc *alloc);
void agc_residual_destroy(struct agc_residual *r, const struct agc_alloc *alloc);
void agc_residual_clear(struct agc_residual *r);

/* Copies elements [first, first + nelems). */
void agc_residual_load(const struct agc_residual *r, const struct agc_kernels *k, uint64_t first,
                       uint32_t nelems, float *dst);

/* Stores them; bfloat16 draws number rng_first + i for element first + i. */
void agc_residual_store(struct agc_residual *r, const struct agc_kernels *k, uint64_t first,
                        uint32_t nelems, const float *src, struct agc_rng rng, uint32_t rng_first);

/* The floats themselves where they are floats, else a copy in scratch; agc_residual_give stores
 * what has become of them. */
float *agc_residual_take(struct agc_residual *r, const struct agc_kernels *k, uint64_t first,
                         uint32_t nelems, float *scratch);
void agc_residual_give(struct agc_residual *r, const struct agc_kernels *k, uint64_t first,
                       uint32_t nelems, const float *taken, struct agc_rng rng, uint32_t rng_first);

double agc_residual_sum_of_squares(const struct agc_residual *r, const struct agc_kernels *k);

#endif /* AGC_RESIDUAL_H */
