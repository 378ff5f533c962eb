/* blocks.h: what codecs with a scale per block share. Their payload begins with the scales, one
 * float for each block of the tile.
 */
#ifndef AGC_BLOCKS_H
#define AGC_BLOCKS_H

#include "codecs/codec.h"
#include "core/common.h"

static inline uint64_t agc_blocks_scales_nbytes(const struct agc_spec *spec, uint32_t nelems)
{
    return 4 * agc_div_up(nelems, spec->block_nelems);
}

/* NULL unless the spec asks for stochastic rounding. */
static inline const struct agc_rng *agc_blocks_rng(const struct agc_tile *tile)
{
    return tile->spec.rounding == AGC_ROUNDING_STOCHASTIC ? &tile->rng : NULL;
}

/* Scales are finite and not negative, or the one NaN. */
static inline enum agc_status agc_blocks_validate(const struct agc_tile *tile, const uint8_t *src,
                                                  uint32_t scale_max_bits)
{
    uint64_t nbytes = agc_blocks_scales_nbytes(&tile->spec, tile->nelems);
    for (uint64_t i = 0; i < nbytes; i += 4) {
        uint32_t bits = agc_load_u32(src + i);
        if (bits > scale_max_bits && bits != AGC_F32_NAN_BITS)
            return AGC_ERR_PAYLOAD;
    }
    return AGC_OK;
}

#endif /* AGC_BLOCKS_H */
