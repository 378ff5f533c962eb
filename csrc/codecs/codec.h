/* codec.h: what a codec is. A codec turns one tile of numbers into a payload of fixed length and
 * back.
 *
 * Numbers enter and leave in the *work type*: float, but double for the lossless codec on
 * AGC_DTYPE_F64. Codecs hold no intrinsics: they lay out the payload and call kernels.
 */
#ifndef AGC_CODEC_H
#define AGC_CODEC_H

#include "agentcomm.h"
#include "core/kernels.h"

/* Everything about a tile but its numbers. */
struct agc_tile {
    const struct agc_kernels *kernels;
    struct agc_spec spec; /* resolved */
    uint32_t dtype;       /* of the bucket or tensor */
    uint32_t nelems;      /* 1..AGC_TILE_NELEMS_MAX */
    struct agc_rng rng;
};

struct agc_codec {
    uint32_t id;
    const char *name;
    uint32_t flags;                /* AGC_CODEC_... */
    uint32_t default_block_nelems; /* 0: no blocks */

    /* Bytes of a tile's payload before padding: a pure function of its arguments. */
    uint64_t (*payload_nbytes)(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems);

    /* Writes payload_nbytes bytes. residual: NULL or floats added before encoding, the loss
     * afterwards; where the numbers are not finite it stays as it was. */
    void (*encode)(const struct agc_tile *tile, const void *x, float *residual, uint8_t *dst);

    /* out = weight * decoded, out += weight * decoded. Safe on any bytes. */
    void (*decode)(const struct agc_tile *tile, const uint8_t *src, double weight, void *out);
    void (*decode_add)(const struct agc_tile *tile, const uint8_t *src, double weight, void *out);

    /* AGC_ERR_PAYLOAD for bytes that encode never writes. */
    enum agc_status (*validate)(const struct agc_tile *tile, const uint8_t *src);
};

#define AGC_CODEC(id, symbol, name) extern const struct agc_codec agc_codec_##symbol;
#include "codecs/codec_list.inc"
#undef AGC_CODEC

/* NULL for an unknown id. */
const struct agc_codec *agc_codec_find(uint32_t id);

/* Payload of one tile on the wire, padding included. */
uint64_t agc_tile_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems);

/* Payload of nelems elements cut into tiles of tile_nelems, the last one shorter. */
uint64_t agc_tiles_nbytes(const struct agc_spec *spec, uint32_t dtype, uint64_t nelems,
                          uint32_t tile_nelems);

/* The work type is double. */
static inline bool agc_tile_is_f64(const struct agc_codec *codec, uint32_t dtype)
{
    return (codec->flags & AGC_CODEC_LOSSLESS) != 0 && dtype == AGC_DTYPE_F64;
}

/* Encode, then zero the padding. */
void agc_tile_encode(const struct agc_codec *codec, const struct agc_tile *tile, const void *x,
                     float *residual, uint8_t *dst);

#endif /* AGC_CODEC_H */
