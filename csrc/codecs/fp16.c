/* fp16.c: IEEE 754 binary16: 10 bits of mantissa, finite up to 65504.
 *
 * Relative error of an element: at most 2^-11 from 6.1e-5 up, absolute error 2^-25 below. A
 * magnitude of 65520 and above becomes an infinity, which every rank sees, as with torch's fp16
 * hook; the mean itself is formed in fp32, so that sums never overflow.
 *
 *   payload of a tile, 2 bytes per element, little endian:
 *   | element 0 | element 1 | ... | padding to 16 |
 */
#include "codecs/codec.h"

static uint64_t fp16_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems)
{
    (void)spec;
    (void)dtype;
    return 2 * (uint64_t)nelems;
}

static void fp16_encode(const struct agc_tile *tile, const void *x, float *residual, uint8_t *dst)
{
    tile->kernels->f16_encode((const float *)x, residual, tile->nelems, dst);
}

static void fp16_decode(const struct agc_tile *tile, const uint8_t *src, double weight, void *out)
{
    tile->kernels->f16_decode(src, tile->nelems, (float)weight, (float *)out);
}

static void fp16_decode_add(const struct agc_tile *tile, const uint8_t *src, double weight,
                            void *out)
{
    tile->kernels->f16_decode_add(src, tile->nelems, (float)weight, (float *)out);
}

static enum agc_status fp16_validate(const struct agc_tile *tile, const uint8_t *src)
{
    (void)tile;
    (void)src; /* every pattern of bits is a number */
    return AGC_OK;
}

const struct agc_codec agc_codec_fp16 = {
    .id = 2,
    .name = "fp16",
    .flags = 0,
    .payload_nbytes = fp16_payload_nbytes,
    .encode = fp16_encode,
    .decode = fp16_decode,
    .decode_add = fp16_decode_add,
    .validate = fp16_validate,
};
