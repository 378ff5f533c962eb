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
 * throughout.
 */
#include "codecs/blocks.h"

static uint32_t int8_block_nbytes(uint32_t n)
{
    return n;
}

AGC_BLOCK_CODEC(int8, AGC_INT8_SCALE_MAX_BITS)

const struct agc_codec agc_codec_int8 = {
    .id = 5,
    .name = "int8",
    .flags = AGC_CODEC_BLOCKS | AGC_CODEC_FEEDBACK | AGC_CODEC_STOCHASTIC | AGC_CODEC_VALUES,
    AGC_BLOCK_CODEC_FIELDS(int8),
};
