/* frame.c: whole tensors to self-describing frames and back.
 *
 *   | header, 64 bytes | tile 0 | tile 1 | ... | CRC32C of the tiles, 4 bytes |
 *                                                if the header says so
 *
 * The tiles are those of an exchange (65,536 elements), so that a frame of a whole tensor and the
 * frames of a bucket hold the same bytes per tile.
 */
#include "codecs/codec.h"
#include "core/common.h"
#include "core/elements.h"
#include "core/header.h"

/* Largest tensor whose tiles can be counted in a header. */
#define FRAME_NELEMS_MAX ((uint64_t)UINT32_MAX * AGC_TILE_NELEMS_MAX)

static enum agc_status frame_describe(const struct agc_spec *spec, uint32_t dtype, uint64_t nelems,
                                      bool checksum, struct agc_frame *f)
{
    *f = (struct agc_frame){.dtype = dtype, .nelems = nelems, .tile_nelems = AGC_TILE_NELEMS_MAX};
    AGC_TRY(agc_spec_resolve(spec, &f->spec));
    if (agc_dtype_nbytes(dtype) == 0)
        return AGC_ERR_DTYPE;
    if (nelems > FRAME_NELEMS_MAX)
        return AGC_ERR_NELEMS;
    f->flags = checksum ? AGC_FRAME_CHECKSUM : 0;
    f->ntiles = (uint32_t)agc_div_up(nelems, AGC_TILE_NELEMS_MAX);
    f->payload_nbytes = agc_tiles_nbytes(&f->spec, dtype, nelems, AGC_TILE_NELEMS_MAX);
    return AGC_OK;
}

static uint64_t frame_total_nbytes(const struct agc_frame *f)
{
    return AGC_WIRE_HEADER_NBYTES + f->payload_nbytes +
           (f->flags & AGC_FRAME_CHECKSUM ? AGC_WIRE_CHECKSUM_NBYTES : 0);
}

enum agc_status agc_frame_nbytes(const struct agc_spec *spec, uint32_t dtype, uint64_t nelems,
                                 bool checksum, uint64_t *nbytes_ret)
{
    struct agc_frame f;
    AGC_TRY(frame_describe(spec, dtype, nelems, checksum, &f));
    *nbytes_ret = frame_total_nbytes(&f);
    return AGC_OK;
}

/* Tile t of a frame. */
static struct agc_tile frame_tile(const struct agc_kernels *k, const struct agc_frame *f,
                                  uint64_t first_elem, float *scratch)
{
    return (struct agc_tile){
        .kernels = k,
        .spec = f->spec,
        .dtype = f->dtype,
        .nelems = (uint32_t)agc_min_u64(f->tile_nelems, f->nelems - first_elem),
        .rng = agc_rng_key(f->seed, f->round, f->bucket, f->lane, first_elem),
        .index_rng = agc_rng_key(f->seed, f->round, f->bucket, f->lane | AGC_RNG_LANE_OF_INDICES,
                                 first_elem),
        .scratch = scratch};
}

enum agc_status agc_encode(const struct agc_spec *spec, const void *src, uint32_t dtype,
                           uint64_t nelems, float *residual, uint32_t seed, bool checksum,
                           float *scratch, uint8_t *dst, uint64_t dst_cap_nbytes,
                           uint64_t *nbytes_ret)
{
    const struct agc_kernels *k = agc_kernels_get();
    struct agc_frame f;
    AGC_TRY(frame_describe(spec, dtype, nelems, checksum, &f));
    if (dst_cap_nbytes < frame_total_nbytes(&f))
        return AGC_ERR_DST_TOO_SMALL;
    f.seed = seed;
    agc_header_write(k, &f, dst);

    const struct agc_codec *codec = agc_codec_find(f.spec.codec);
    uint32_t elem_nbytes = agc_dtype_nbytes(dtype);
    uint8_t *payload = dst + AGC_WIRE_HEADER_NBYTES;
    for (uint64_t first = 0; first < nelems; first += f.tile_nelems) {
        struct agc_tile tile = frame_tile(k, &f, first, scratch);
        agc_tile_encode(codec, &tile, (const uint8_t *)src + first * elem_nbytes, dtype,
                        residual ? residual + first : NULL, payload);
        payload += agc_tile_nbytes(&f.spec, dtype, tile.nelems);
    }
    if (checksum)
        agc_store_u32(payload, k->crc32c(0, dst + AGC_WIRE_HEADER_NBYTES, f.payload_nbytes));
    *nbytes_ret = frame_total_nbytes(&f);
    return AGC_OK;
}

enum agc_status agc_frame_parse(const uint8_t *src, uint64_t nbytes, struct agc_frame *frame_ret)
{
    struct agc_frame f;
    struct agc_spec resolved;
    AGC_TRY(agc_header_read(agc_kernels_get(), src, nbytes, &f));
    if (f.flags & AGC_FRAME_ABORT)
        return AGC_ERR_HEADER;
    if (!agc_codec_find(f.spec.codec))
        return AGC_ERR_CODEC;
    if (agc_spec_resolve(&f.spec, &resolved) != AGC_OK ||
        resolved.block_nelems != f.spec.block_nelems)
        return AGC_ERR_HEADER;
    if (f.payload_nbytes != agc_tiles_nbytes(&f.spec, f.dtype, f.nelems, f.tile_nelems))
        return AGC_ERR_HEADER;
    if (nbytes < frame_total_nbytes(&f))
        return AGC_ERR_TRUNCATED;
    *frame_ret = f;
    return AGC_OK;
}

enum agc_status agc_decode(const uint8_t *src, uint64_t nbytes, void *out, uint32_t out_dtype,
                           uint64_t nelems, bool add, float *scratch)
{
    const struct agc_kernels *k = agc_kernels_get();
    struct agc_frame f;
    AGC_TRY(agc_frame_parse(src, nbytes, &f));
    uint32_t out_nbytes = agc_dtype_nbytes(out_dtype);
    if (out_nbytes == 0)
        return AGC_ERR_DTYPE;
    if (nelems != f.nelems)
        return AGC_ERR_NELEMS;
    const struct agc_codec *codec = agc_codec_find(f.spec.codec);
    const uint8_t *first_payload = src + AGC_WIRE_HEADER_NBYTES;
    if (f.flags & AGC_FRAME_CHECKSUM && agc_load_u32(first_payload + f.payload_nbytes) !=
                                            k->crc32c(0, first_payload, f.payload_nbytes))
        return AGC_ERR_PAYLOAD_CHECKSUM;

    /* All of it is checked before any of it is written: a damaged frame leaves out as it was. */
    const uint8_t *payload = first_payload;
    for (uint64_t first = 0; first < nelems; first += f.tile_nelems) {
        struct agc_tile tile = frame_tile(k, &f, first, scratch);
        AGC_TRY(codec->validate(&tile, payload));
        payload += agc_tile_nbytes(&f.spec, f.dtype, tile.nelems);
    }
    payload = first_payload;
    for (uint64_t first = 0; first < nelems; first += f.tile_nelems) {
        struct agc_tile tile = frame_tile(k, &f, first, scratch);
        codec->decode(&tile, payload, 1.0, add, (uint8_t *)out + first * out_nbytes, out_dtype);
        payload += agc_tile_nbytes(&f.spec, f.dtype, tile.nelems);
    }
    return AGC_OK;
}
