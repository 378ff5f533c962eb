/* sign.c: one bit per element and a scale per block.
 *
 * Method: within a block of B elements (default 256), scale = mean |x|, and x ~ scale with the sign
 * of x: Seide et al., "1-Bit Stochastic Gradient Descent" (2014); with error feedback Karimireddy
 * et al., "Error Feedback Fixes SignSGD" (2019), here with a scale per block. A zero is sent as
 * +scale or -scale, unless its whole block is zero: ternary is the cure.
 *
 *   payload of a tile:
 *   | scale of block 0 | scale of block 1 | ... | bits of block 0 | bits of block 1 | ... |
 *     float, 4 bytes                              ceil(n / 8) bytes for n elements
 *
 * Bit i mod 8 of byte i / 8 of a block is the sign of its element i. Bits per element: 1 + 32 / B.
 * Needs error feedback. Non-finite blocks: as in int8.
 */
#include "codecs/blocks.h"

static uint32_t sign_block_nbytes(uint32_t n)
{
    return (n + 7) / 8;
}

AGC_BLOCK_CODEC(sign, AGC_SIGN_SCALE_MAX_BITS)

const struct agc_codec agc_codec_sign = {
    .id = 8,
    .name = "sign",
    .flags =
        AGC_CODEC_BLOCKS | AGC_CODEC_FEEDBACK | AGC_CODEC_ZERO_IN_BLOCK_MOVES | AGC_CODEC_VALUES,
    AGC_BLOCK_CODEC_FIELDS(sign),
};
