/* fp8.c: eight bits of floating point per element and a scale per block.
 *
 * Method: within a block of B elements (default 256), scale = absmax / 448, and x * 448 / absmax is
 * rounded to E4M3, the 8-bit format with 4 bits of exponent and 3 of mantissa (Micikevicius et al.,
 * "FP8 Formats for Deep Learning", 2022; OCP OFP8 1.0), to nearest even or stochastically. Against
 * int8 the error follows the element, not the block's largest: better where magnitudes spread.
 *
 *   payload of a tile:
 *   | scale of block 0 | scale of block 1 | ... | code of element 0 | code of element 1 | ... |
 *     float, 4 bytes                              E4M3, 1 byte
 *
 * Bits per element: 8 + 32 / B. Error of an element: 2^-4 of its magnitude, at most half of 2^-9
 * scales where that is more (twice that if stochastic). Non-finite blocks: as in int8.
 */
#include "codecs/blocks.h"

static uint32_t fp8_block_nbytes(uint32_t n)
{
    return n;
}

AGC_BLOCK_CODEC(fp8, AGC_FP8_SCALE_MAX_BITS)

const struct agc_codec agc_codec_fp8 = {
    .id = 4,
    .name = "fp8",
    .flags = AGC_CODEC_BLOCKS | AGC_CODEC_FEEDBACK | AGC_CODEC_STOCHASTIC | AGC_CODEC_VALUES,
    AGC_BLOCK_CODEC_FIELDS(fp8),
};
