/* elements.h: moving numbers between a tensor's data type and the work type. */
#ifndef AGC_ELEMENTS_H
#define AGC_ELEMENTS_H

#include "core/kernels.h"

/* A mask for agc_kernels.any_nonzero that ignores the signs of zeros. */
uint64_t agc_dtype_zero_mask(uint32_t dtype);

/* dst = src converted to float. src needs no alignment. */
void agc_elements_load(const struct agc_kernels *k, uint32_t dtype, const void *src,
                       uint32_t nelems, float *dst);

/* dst = src rounded to dtype. dst needs no alignment. */
void agc_elements_store(const struct agc_kernels *k, uint32_t dtype, const float *src,
                        uint32_t nelems, void *dst);

/* p += 0: a negative zero becomes a positive one, a NaN the one NaN. p needs no alignment. */
void agc_elements_add_zero(uint32_t dtype, uint32_t nelems, void *p);

#endif /* AGC_ELEMENTS_H */
