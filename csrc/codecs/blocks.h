/* blocks.h: what codecs with a scale per block share: everything but the kernels and the length of
 * a block.
 *
 *   payload of a tile:
 *   | scale of block 0 | scale of block 1 | ... | values of block 0 | values of block 1 | ... |
 *     float, 4 bytes
 *
 * Scales in front of the values keep both streams aligned and let the decoder prefetch; interleaved
 * blocks were no faster and would misalign every load.
 */
#ifndef AGC_BLOCKS_H
#define AGC_BLOCKS_H

#include "codecs/pieces.h"
#include "core/common.h"

/* Bytes of the values of a block of n elements. */
typedef uint32_t agc_block_nbytes(uint32_t n);

static inline uint64_t agc_blocks_scales_nbytes(const struct agc_spec *spec, uint32_t nelems)
{
    return 4 * agc_div_up(nelems, spec->block_nelems);
}

static inline uint64_t agc_blocks_payload_nbytes(const struct agc_spec *spec, uint32_t nelems,
                                                 agc_block_nbytes *nbytes)
{
    uint32_t nblocks = nelems / spec->block_nelems, rest = nelems % spec->block_nelems;
    return agc_blocks_scales_nbytes(spec, nelems) + (uint64_t)nblocks * nbytes(spec->block_nelems) +
           nbytes(rest);
}

/* Where in a tile's payload the scales and the values of a piece are. */
struct agc_blocks_at {
    uint64_t scales;
    uint64_t values;
};

static inline struct agc_blocks_at agc_blocks_at(const struct agc_tile *tile, uint32_t first,
                                                 agc_block_nbytes *nbytes)
{
    uint64_t block = first / tile->spec.block_nelems;
    return (struct agc_blocks_at){4 * block, agc_blocks_scales_nbytes(&tile->spec, tile->nelems) +
                                                 block * nbytes(tile->spec.block_nelems)};
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

/* The functions of a codec of this kind, made of its kernels and of name_block_nbytes. */
#define AGC_BLOCK_CODEC(name, scale_max_bits)                                                      \
    static uint64_t name##_payload_nbytes(const struct agc_spec *spec, uint32_t dtype,             \
                                          uint32_t nelems)                                         \
    {                                                                                              \
        (void)dtype;                                                                               \
        return agc_blocks_payload_nbytes(spec, nelems, name##_block_nbytes);                       \
    }                                                                                              \
    static void name##_encode_piece(const struct agc_tile *tile, const float *x, float *residual,  \
                                    uint32_t first, uint32_t nelems, uint8_t *dst)                 \
    {                                                                                              \
        struct agc_blocks_at at = agc_blocks_at(tile, first, name##_block_nbytes);                 \
        struct agc_rng rng = agc_rng_skip(tile->rng, first);                                       \
        tile->kernels->name##_encode(x, residual, nelems, tile->spec.block_nelems,                 \
                                     tile->spec.rounding == AGC_ROUNDING_STOCHASTIC ? &rng : NULL, \
                                     dst + at.scales, dst + at.values);                            \
    }                                                                                              \
    static void name##_decode_piece(const struct agc_tile *tile, const uint8_t *src,               \
                                    uint32_t first, uint32_t nelems, float weight, bool add,       \
                                    float *out)                                                    \
    {                                                                                              \
        struct agc_blocks_at at = agc_blocks_at(tile, first, name##_block_nbytes);                 \
        (add ? tile->kernels->name##_decode_add : tile->kernels->name##_decode)(                   \
            src + at.scales, src + at.values, nelems, tile->spec.block_nelems, weight, out);       \
    }                                                                                              \
    AGC_PIECES_CODEC(name)                                                                         \
    static void name##_encode_run(const struct agc_tile *tile, const void *x, uint32_t x_dtype,    \
                                  float *residual, uint32_t first, uint32_t nelems, uint8_t *dst)  \
    {                                                                                              \
        agc_pieces_encode_run(tile, x, x_dtype, residual, first, nelems, dst,                      \
                              name##_encode_piece);                                                \
    }                                                                                              \
    static enum agc_status name##_validate(const struct agc_tile *tile, const uint8_t *src)        \
    {                                                                                              \
        return agc_blocks_validate(tile, src, scale_max_bits);                                     \
    }

/* The part of struct agc_codec that these have in common. */
#define AGC_BLOCK_CODEC_FIELDS(name)                                                               \
    .default_block_nelems = AGC_BLOCK_NELEMS_DEFAULT, .payload_nbytes = name##_payload_nbytes,     \
    .encode = name##_encode, .encode_run = name##_encode_run, .decode = name##_decode,             \
    .validate = name##_validate

#endif /* AGC_BLOCKS_H */
