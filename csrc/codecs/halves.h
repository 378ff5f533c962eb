/* halves.h: what the 16-bit floating-point codecs share: everything but the kernels. */
#ifndef AGC_HALVES_H
#define AGC_HALVES_H

#include "codecs/pieces.h"

/* The functions of codec `name`, made of the kernels of `kernel`. */
#define AGC_HALF_CODEC(name, kernel)                                                               \
    static uint64_t name##_payload_nbytes(const struct agc_spec *spec, uint32_t dtype,             \
                                          uint32_t nelems)                                         \
    {                                                                                              \
        (void)spec;                                                                                \
        (void)dtype;                                                                               \
        return 2 * (uint64_t)nelems;                                                               \
    }                                                                                              \
    static void name##_encode_piece(const struct agc_tile *tile, const float *x, float *residual,  \
                                    uint32_t first, uint32_t nelems, uint8_t *dst)                 \
    {                                                                                              \
        tile->kernels->kernel##_encode(x, residual, nelems, dst + 2 * (size_t)first);              \
    }                                                                                              \
    static void name##_decode_piece(const struct agc_tile *tile, const uint8_t *src,               \
                                    uint32_t first, uint32_t nelems, float weight, bool add,       \
                                    float *out)                                                    \
    {                                                                                              \
        (add ? tile->kernels->kernel##_decode_add                                                  \
             : tile->kernels->kernel##_decode)(src + 2 * (size_t)first, nelems, weight, out);      \
    }                                                                                              \
    AGC_PIECES_CODEC(name)                                                                         \
    static enum agc_status name##_validate(const struct agc_tile *tile, const uint8_t *src)        \
    {                                                                                              \
        (void)tile;                                                                                \
        (void)src; /* every pattern of bits is a number */                                         \
        return AGC_OK;                                                                             \
    }

#define AGC_HALF_CODEC_FIELDS(name)                                                                \
    .payload_nbytes = name##_payload_nbytes, .encode = name##_encode, .decode = name##_decode,     \
    .validate = name##_validate

#endif /* AGC_HALVES_H */
