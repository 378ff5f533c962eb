/* codec.h: what a codec is. A codec turns one tile of numbers into a payload of fixed length and
 * back.
 *
 * Numbers enter and leave in any data type; arithmetic is in the *work type*: float, but double for
 * the lossless codec on AGC_DTYPE_F64. Codecs hold no intrinsics: they lay out the payload and call
 * kernels.
 */
#ifndef AGC_CODEC_H
#define AGC_CODEC_H

#include "agentcomm.h"
#include "core/kernels.h"

/* Everything about a tile but its numbers. */
struct agc_tile {
    const struct agc_kernels *kernels;
    struct agc_spec spec;       /* resolved */
    uint32_t dtype;             /* of the bucket or tensor */
    uint32_t nelems;            /* 1..AGC_TILE_NELEMS_MAX */
    struct agc_rng rng;         /* of rounding */
    struct agc_rng index_rng;   /* of what all ranks draw alike */
    const uint32_t *piece_ends; /* topk: where pieces that keep the same fraction end */
    uint32_t npieces;           /* 0, 1: all of the tile is one */
    float *scratch; /* AGC_SCRATCH_NELEMS, for codecs that need more than the stack should give */
};

struct agc_codec {
    uint32_t id;
    const char *name;
    uint32_t flags;                /* AGC_CODEC_... */
    uint32_t default_block_nelems; /* 0: no blocks */

    /* Bytes of a tile's payload before padding: a pure function of its arguments. */
    uint64_t (*payload_nbytes)(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems);

    /* Writes payload_nbytes bytes. x: elements of x_dtype, at any address; x_dtype is the tile's,
     * or the work type. residual: NULL or floats added before encoding, the loss afterwards; where
     * the numbers are not finite it stays as it was. */
    void (*encode)(const struct agc_tile *tile, const void *x, uint32_t x_dtype, float *residual,
                   uint8_t *dst);

    /* Encodes elements [first, first + nelems) of a tile, the first of which is at x, where first
     * is a multiple of the block: for tiles whose pieces begin new blocks. NULL: not offered. The
     * bytes that no element needs stay as they are. */
    void (*encode_run)(const struct agc_tile *tile, const void *x, uint32_t x_dtype,
                       float *residual, uint32_t first, uint32_t nelems, uint8_t *dst);

    /* out = weight * decoded, or out += weight * decoded (a sparse codec leaves what it did not
     * send alone, a negative zero and a NaN of another's too). out: elements of out_dtype, which
     * may be any, at any address. Safe on any bytes. */
    void (*decode)(const struct agc_tile *tile, const uint8_t *src, double weight, bool add,
                   void *out, uint32_t out_dtype);

    /* AGC_ERR_PAYLOAD for bytes that encode never writes. */
    enum agc_status (*validate)(const struct agc_tile *tile, const uint8_t *src);
};

#define AGC_CODEC(id, symbol, name) extern const struct agc_codec agc_codec_##symbol;
#include "codecs/codec_list.inc"
#undef AGC_CODEC

#define AGC_CODEC_ID_RAW 1u

/* Added to the lane in agc_rng_key, so that what is drawn for one purpose has nothing to do with
 * what is drawn for another: the places of index_rng, the rounding of residuals. */
#define AGC_RNG_LANE_OF_INDICES (1u << 31)
#define AGC_RNG_LANE_OF_RESIDUALS (1u << 30)

/* NULL for an unknown id. */
const struct agc_codec *agc_codec_find(uint32_t id);

/* Payload of one tile on the wire, padding included. */
uint64_t agc_tile_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems);

/* Payload of nelems elements cut into tiles of tile_nelems, the last one shorter. */
uint64_t agc_tiles_nbytes(const struct agc_spec *spec, uint32_t dtype, uint64_t nelems,
                          uint32_t tile_nelems);

/* The data type of the arithmetic on a bucket of dtype. */
static inline uint32_t agc_work_dtype(const struct agc_codec *codec, uint32_t dtype)
{
    bool f64 = (codec->flags & AGC_CODEC_LOSSLESS) != 0 && dtype == AGC_DTYPE_F64;
    return f64 ? AGC_DTYPE_F64 : AGC_DTYPE_F32;
}

/* Encode, then zero the padding. */
void agc_tile_encode(const struct agc_codec *codec, const struct agc_tile *tile, const void *x,
                     uint32_t x_dtype, float *residual, uint8_t *dst);

#endif /* AGC_CODEC_H */
