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

static uint32_t int4_block_nbytes(uint32_t n)
{
    return (n + 1) / 2;
}

AGC_BLOCK_CODEC(int4, AGC_INT4_SCALE_MAX_BITS)

const struct agc_codec agc_codec_int4 = {
    .id = 6,
    .name = "int4",
    .flags = AGC_CODEC_BLOCKS | AGC_CODEC_FEEDBACK | AGC_CODEC_STOCHASTIC | AGC_CODEC_VALUES,
    AGC_BLOCK_CODEC_FIELDS(int4),
};
