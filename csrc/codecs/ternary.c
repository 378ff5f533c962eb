/* ternary.c: {-s, 0, s}: 1.6 bits per element and a scale per block.
 *
 * Method: within a block of B elements (default 256), magnitudes above three quarters of the mean
 * one are sent, as their sign; the scale s is the mean of those: Li, Zhang, Liu, "Ternary Weight
 * Networks" (2016), equations 5 and 6. Stochastic: s = absmax, an element is sent with probability
 * |x| / s: Wen et al., "TernGrad" (2017). Zero stays zero.
 *
 *   payload of a tile:
 *   | scale of block 0 | scale of block 1 | ... | bytes of block 0 | bytes of block 1 | ... |
 *     float, 4 bytes                              ceil(n / 5) bytes for n elements
 *
 * Five elements share a byte, sum of 3^k (step + 1): byte j of a block has elements j + k ceil(n /
 * 5), k = 0..4, so that every digit is a run for vectors; a step that does not exist counts as 0.
 * Bits per element: 8 ceil(B / 5) / B + 32 / B. Meant for error feedback, which it needs.
 * Non-finite blocks: as in int8.
 */
#include "codecs/blocks.h"

static uint32_t ternary_block_nbytes(uint32_t n)
{
    return (n + AGC_TERNARY_PER_BYTE - 1) / AGC_TERNARY_PER_BYTE;
}

AGC_BLOCK_CODEC(ternary, AGC_TERNARY_SCALE_MAX_BITS)

/* Scales as in every codec with blocks, and no byte that is not five steps. */
static enum agc_status ternary_validate_bytes(const struct agc_tile *tile, const uint8_t *src)
{
    uint64_t nbytes = ternary_payload_nbytes(&tile->spec, tile->dtype, tile->nelems);
    for (uint64_t i = agc_blocks_scales_nbytes(&tile->spec, tile->nelems); i < nbytes; i++)
        if (src[i] > AGC_TERNARY_BYTE_MAX)
            return AGC_ERR_PAYLOAD;
    return ternary_validate(tile, src);
}

const struct agc_codec agc_codec_ternary = {
    .id = 7,
    .name = "ternary",
    .flags = AGC_CODEC_BLOCKS | AGC_CODEC_FEEDBACK | AGC_CODEC_STOCHASTIC,
    .default_block_nelems = AGC_BLOCK_NELEMS_DEFAULT,
    .payload_nbytes = ternary_payload_nbytes,
    .encode = ternary_encode,
    .encode_run = ternary_encode_run,
    .decode = ternary_decode,
    .validate = ternary_validate_bytes,
};
