/* header.c: writing and reading the 64 bytes in front of every frame. */
#include "core/header.h"

#include "core/common.h"

void agc_header_write(const struct agc_kernels *k, const struct agc_frame *f,
                      uint8_t dst[AGC_WIRE_HEADER_NBYTES])
{
    uint32_t flags =
        f->flags | (f->spec.rounding == AGC_ROUNDING_STOCHASTIC ? AGC_FRAME_STOCHASTIC : 0u);
    agc_store_u32(dst + AGC_WIRE_AT_MAGIC, AGC_WIRE_MAGIC);
    dst[AGC_WIRE_AT_VERSION] = AGC_WIRE_VERSION;
    dst[AGC_WIRE_AT_CODEC] = (uint8_t)f->spec.codec;
    dst[AGC_WIRE_AT_DTYPE] = (uint8_t)f->dtype;
    dst[AGC_WIRE_AT_VALUES] = (uint8_t)f->spec.values;
    dst[AGC_WIRE_AT_FLAGS] = (uint8_t)flags;
    dst[AGC_WIRE_AT_NFORWARDS] = (uint8_t)f->nforwards;
    dst[AGC_WIRE_AT_BLOCK_LOG2] =
        (uint8_t)(f->spec.block_nelems ? agc_log2_u32(f->spec.block_nelems) : 0);
    dst[AGC_WIRE_AT_TILE_GRANULES] = (uint8_t)(f->tile_nelems / AGC_TILE_GRANULE_NELEMS - 1);
    agc_store_u32(dst + AGC_WIRE_AT_FRAC, f->spec.frac_e9);
    agc_store_u64(dst + AGC_WIRE_AT_NELEMS, f->nelems);
    agc_store_u64(dst + AGC_WIRE_AT_PAYLOAD, f->payload_nbytes);
    agc_store_u64(dst + AGC_WIRE_AT_STREAM, f->stream);
    agc_store_u32(dst + AGC_WIRE_AT_SEED, f->seed);
    agc_store_u32(dst + AGC_WIRE_AT_ROUND, f->round);
    agc_store_u32(dst + AGC_WIRE_AT_FIRST_TILE, f->first_tile);
    agc_store_u32(dst + AGC_WIRE_AT_NTILES, f->ntiles);
    agc_store_u16(dst + AGC_WIRE_AT_BUCKET, (uint16_t)f->bucket);
    dst[AGC_WIRE_AT_LANE] = (uint8_t)f->lane;
    dst[AGC_WIRE_AT_CHUNK_LOG2] = (uint8_t)f->chunk_log2;
    agc_store_u32(dst + AGC_WIRE_AT_CHECKSUM, k->crc32c(0, dst, AGC_WIRE_AT_CHECKSUM));
}

enum agc_status agc_header_read(const struct agc_kernels *k, const uint8_t *src, uint64_t nbytes,
                                struct agc_frame *frame_ret)
{
    struct agc_frame f;
    if (nbytes < AGC_WIRE_HEADER_NBYTES)
        return AGC_ERR_TRUNCATED;
    if (agc_load_u32(src + AGC_WIRE_AT_MAGIC) != AGC_WIRE_MAGIC)
        return AGC_ERR_MAGIC;
    /* Before the checksum: another version may compute it differently, and "another version" is the
     * better news. */
    if (src[AGC_WIRE_AT_VERSION] != AGC_WIRE_VERSION)
        return AGC_ERR_VERSION;
    if (agc_load_u32(src + AGC_WIRE_AT_CHECKSUM) != k->crc32c(0, src, AGC_WIRE_AT_CHECKSUM))
        return AGC_ERR_HEADER_CHECKSUM;

    f.flags = src[AGC_WIRE_AT_FLAGS];
    f.nforwards = src[AGC_WIRE_AT_NFORWARDS];
    f.spec.codec = src[AGC_WIRE_AT_CODEC];
    f.spec.values = src[AGC_WIRE_AT_VALUES];
    f.spec.frac_e9 = agc_load_u32(src + AGC_WIRE_AT_FRAC);
    f.spec.rounding =
        f.flags & AGC_FRAME_STOCHASTIC ? AGC_ROUNDING_STOCHASTIC : AGC_ROUNDING_NEAREST;
    uint32_t block_log2 = src[AGC_WIRE_AT_BLOCK_LOG2];
    f.spec.block_nelems = block_log2 && block_log2 < 32 ? 1u << block_log2 : 0;
    f.dtype = src[AGC_WIRE_AT_DTYPE];
    f.tile_nelems = ((uint32_t)src[AGC_WIRE_AT_TILE_GRANULES] + 1) * AGC_TILE_GRANULE_NELEMS;
    f.nelems = agc_load_u64(src + AGC_WIRE_AT_NELEMS);
    f.payload_nbytes = agc_load_u64(src + AGC_WIRE_AT_PAYLOAD);
    f.stream = agc_load_u64(src + AGC_WIRE_AT_STREAM);
    f.seed = agc_load_u32(src + AGC_WIRE_AT_SEED);
    f.round = agc_load_u32(src + AGC_WIRE_AT_ROUND);
    f.first_tile = agc_load_u32(src + AGC_WIRE_AT_FIRST_TILE);
    f.ntiles = agc_load_u32(src + AGC_WIRE_AT_NTILES);
    f.bucket = agc_load_u16(src + AGC_WIRE_AT_BUCKET);
    f.lane = src[AGC_WIRE_AT_LANE];
    f.chunk_log2 = src[AGC_WIRE_AT_CHUNK_LOG2];

    if (f.flags & ~(uint32_t)AGC_FRAME_KNOWN_FLAGS || block_log2 > 31 || f.chunk_log2 > 62)
        return AGC_ERR_HEADER;
    if (f.flags & AGC_FRAME_ABORT) {
        if (f.payload_nbytes != 0 || f.nelems != 0)
            return AGC_ERR_HEADER;
    } else if (agc_dtype_nbytes(f.dtype) == 0 || f.ntiles != agc_div_up(f.nelems, f.tile_nelems)) {
        return AGC_ERR_HEADER;
    }
    *frame_ret = f;
    return AGC_OK;
}
