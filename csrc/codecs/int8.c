/* int8.c: eight bits per element and a scale per block.
 *
 * Method: within a block of B elements (default 256), scale = absmax / 127 and q = round(x * 127 /
 * absmax), to nearest even or stochastically. Blockwise absmax quantisation after Dettmers et al.,
 * "8-bit Optimizers via Block-wise Quantization" (2022), with a linear code, so that decoding is
 * one multiplication.
 *
 *   payload of a tile:
 *   | scale of block 0 | scale of block 1 | ... | q of element 0 | q of element 1 | ... | padding |
 *     float, 4 bytes                              int8, 1 byte                            to 16
 *
 * Bits per element: 8 + 32 / B. Error of an element: at most half a scale (one scale if
 * stochastic). A block that holds a NaN or an infinity has a NaN for a scale and decodes to NaN
 * throughout. Scales in front of the values keep both streams aligned and let the decoder prefetch;
 * interleaved blocks of 4 + B bytes were no faster and would misalign every load.
 */
#include "codecs/blocks.h"

static uint64_t int8_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems)
{
    (void)dtype;
    return agc_blocks_scales_nbytes(spec, nelems) + nelems;
}

static void int8_encode(const struct agc_tile *tile, const void *x, float *residual, uint8_t *dst)
{
    tile->kernels->int8_encode((const float *)x, residual, tile->nelems, tile->spec.block_nelems,
                               agc_blocks_rng(tile), dst,
                               dst + agc_blocks_scales_nbytes(&tile->spec, tile->nelems));
}

static void int8_decode(const struct agc_tile *tile, const uint8_t *src, double weight, void *out)
{
    tile->kernels->int8_decode(src, src + agc_blocks_scales_nbytes(&tile->spec, tile->nelems),
                               tile->nelems, tile->spec.block_nelems, (float)weight, (float *)out);
}

static void int8_decode_add(const struct agc_tile *tile, const uint8_t *src, double weight,
                            void *out)
{
    tile->kernels->int8_decode_add(src, src + agc_blocks_scales_nbytes(&tile->spec, tile->nelems),
                                   tile->nelems, tile->spec.block_nelems, (float)weight,
                                   (float *)out);
}

static enum agc_status int8_validate(const struct agc_tile *tile, const uint8_t *src)
{
    return agc_blocks_validate(tile, src, AGC_INT8_SCALE_MAX_BITS);
}

const struct agc_codec agc_codec_int8 = {
    .id = 5,
    .name = "int8",
    .flags = AGC_CODEC_BLOCKS | AGC_CODEC_FEEDBACK | AGC_CODEC_STOCHASTIC,
    .default_block_nelems = AGC_BLOCK_NELEMS_DEFAULT,
    .payload_nbytes = int8_payload_nbytes,
    .encode = int8_encode,
    .decode = int8_decode,
    .decode_add = int8_decode_add,
    .validate = int8_validate,
};
