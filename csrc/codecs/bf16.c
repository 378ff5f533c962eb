/* bf16.c: bfloat16: the upper half of a float, 7 bits of mantissa and the full range.
 *
 * Relative error of an element: at most 2^-8. Overflows only where rounding up leaves the range of
 * a float (above 3.39e38).
 *
 *   payload of a tile, 2 bytes per element, little endian:
 *   | element 0 | element 1 | ... | padding to 16 |
 */
#include "codecs/codec.h"

static uint64_t bf16_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems)
{
    (void)spec;
    (void)dtype;
    return 2 * (uint64_t)nelems;
}

static void bf16_encode(const struct agc_tile *tile, const void *x, float *residual, uint8_t *dst)
{
    tile->kernels->bf16_encode((const float *)x, residual, tile->nelems, dst);
}

static void bf16_decode(const struct agc_tile *tile, const uint8_t *src, double weight, void *out)
{
    tile->kernels->bf16_decode(src, tile->nelems, (float)weight, (float *)out);
}

static void bf16_decode_add(const struct agc_tile *tile, const uint8_t *src, double weight,
                            void *out)
{
    tile->kernels->bf16_decode_add(src, tile->nelems, (float)weight, (float *)out);
}

static enum agc_status bf16_validate(const struct agc_tile *tile, const uint8_t *src)
{
    (void)tile;
    (void)src; /* every pattern of bits is a number */
    return AGC_OK;
}

const struct agc_codec agc_codec_bf16 = {
    .id = 3,
    .name = "bf16",
    .flags = 0,
    .payload_nbytes = bf16_payload_nbytes,
    .encode = bf16_encode,
    .decode = bf16_decode,
    .decode_add = bf16_decode_add,
    .validate = bf16_validate,
};
