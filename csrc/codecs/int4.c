/* int4.c: four bits per element and a scale per block.
 *
 * Method: as int8, with 7 levels to each side: within a block of B elements (default 256), scale =
 * absmax / 7 and q = round(x * 7 / absmax). The grid is symmetric, so -8 is never sent: with error
 * feedback a bias would add up.
 *
 *   payload of a tile:
 *   | scale of block 0 | scale of block 1 | ... | nibbles of block 0 | nibbles of block 1 | ... |
 *     float, 4 bytes                              ceil(n / 2) bytes for n elements
 *
 * Byte j of a block of n elements has q of element j in its low half and q of element
 * j + ceil(n / 2) in its high half: both halves are runs, so that vectors pack and unpack them
 * without a shuffle. Bits per element: 4 + 32 / B. Error of an element: at most half a scale (one
 * scale if stochastic). Non-finite blocks: as in int8.
 */
#include "codecs/blocks.h"

static uint64_t int4_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems)
{
    (void)dtype;
    return agc_blocks_scales_nbytes(spec, nelems) + agc_div_up(nelems, 2);
}

static void int4_encode(const struct agc_tile *tile, const void *x, float *residual, uint8_t *dst)
{
    tile->kernels->int4_encode((const float *)x, residual, tile->nelems, tile->spec.block_nelems,
                               agc_blocks_rng(tile), dst,
                               dst + agc_blocks_scales_nbytes(&tile->spec, tile->nelems));
}

static void int4_decode(const struct agc_tile *tile, const uint8_t *src, double weight, void *out)
{
    tile->kernels->int4_decode(src, src + agc_blocks_scales_nbytes(&tile->spec, tile->nelems),
                               tile->nelems, tile->spec.block_nelems, (float)weight, (float *)out);
}

static void int4_decode_add(const struct agc_tile *tile, const uint8_t *src, double weight,
                            void *out)
{
    tile->kernels->int4_decode_add(src, src + agc_blocks_scales_nbytes(&tile->spec, tile->nelems),
                                   tile->nelems, tile->spec.block_nelems, (float)weight,
                                   (float *)out);
}

static enum agc_status int4_validate(const struct agc_tile *tile, const uint8_t *src)
{
    return agc_blocks_validate(tile, src, AGC_INT4_SCALE_MAX_BITS);
}

const struct agc_codec agc_codec_int4 = {
    .id = 6,
    .name = "int4",
    .flags = AGC_CODEC_BLOCKS | AGC_CODEC_FEEDBACK | AGC_CODEC_STOCHASTIC,
    .default_block_nelems = AGC_BLOCK_NELEMS_DEFAULT,
    .payload_nbytes = int4_payload_nbytes,
    .encode = int4_encode,
    .decode = int4_decode,
    .decode_add = int4_decode_add,
    .validate = int4_validate,
};
