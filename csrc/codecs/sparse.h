/* sparse.h: what the codecs share that send some elements of a tile and leave the others to the
 * residual: topk and randk. They differ in which elements that are.
 *
 *   payload of a tile of n elements, k of them kept:
 *   | index 0 | index 1 | ... | padding to 16 | kept values, as a tile of k elements of `values` |
 *     uint16, ascending; topk only
 *
 * k = max(1, ceil(n * frac)): the same for every tile of n elements, whatever it holds.
 */
#ifndef AGC_SPARSE_H
#define AGC_SPARSE_H

#include "codecs/codec.h"

/* Elements of a tile that are to be sent; the arrays have room for a vector behind the tile's
 * elements. */
struct agc_kept {
    uint32_t *index; /* ascending */
    float *value;    /* element and residual */
};

/* Elements kept of n. */
uint32_t agc_sparse_nkept(const struct agc_spec *spec, uint32_t nelems);

/* Where the values are in a payload whose indices, if any, take nbytes each. */
uint64_t agc_sparse_values_at(const struct agc_spec *spec, uint32_t nelems, uint32_t index_nbytes);

uint64_t agc_sparse_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems,
                                   uint32_t index_nbytes);

/* Scratch for a selection: the first half of the tile's. */
struct agc_kept agc_sparse_scratch(const struct agc_tile *tile);

/* Writes the values of what is kept, and brings the residual up to date: of the elements kept what
 * their codec loses, all of the others. */
void agc_sparse_send(const struct agc_tile *tile, const void *x, uint32_t x_dtype, float *residual,
                     const struct agc_kept *kept, uint8_t *dst);

/* Decodes the values at src and puts or adds them where index, which ascends, says. Safe with any
 * indices. */
void agc_sparse_receive(const struct agc_tile *tile, const uint8_t *src, const uint32_t *index,
                        double weight, bool add, void *out, uint32_t out_dtype);

enum agc_status agc_sparse_validate(const struct agc_tile *tile, const uint8_t *src);

#endif /* AGC_SPARSE_H */
