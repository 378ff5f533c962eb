/* frame.c: whole tensors to self-describing frames and back.
 *
 *   | header, 64 bytes | tile 0 | tile 1 | ... | CRC32C of the tiles, 4 bytes |
 *                                                if the header says so
 *
 * The tiles are those of an exchange (65,536 elements), so that a frame of a whole tensor and the
 * frames of a bucket hold the same bytes per tile.
 */
#include "codecs/codec.h"
#include "codecs/parallel.h"
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

/* What the threads of one call share. Tiles of a frame do not know of each other. */
struct tiles {
    const struct agc_kernels *kernels;
    const struct agc_codec *codec;
    const struct agc_frame *frame;
    const uint8_t *src; /* elements, or payload */
    uint8_t *dst;
    float *residual;
    float *scratch; /* AGC_SCRATCH_NELEMS for each thread */
    uint32_t dtype; /* of the elements */
    bool add;
    uint64_t tile_nbytes; /* of a full one */
};

static struct agc_tile tile_at(const struct tiles *t, uint32_t worker, uint64_t i)
{
    return frame_tile(t->kernels, t->frame, i * t->frame->tile_nelems,
                      t->scratch + (size_t)worker * AGC_SCRATCH_NELEMS);
}

static void encode_item(void *ctx, uint32_t worker, uint64_t i)
{
    const struct tiles *t = (const struct tiles *)ctx;
    struct agc_tile tile = tile_at(t, worker, i);
    uint64_t first = i * t->frame->tile_nelems;
    agc_tile_encode(t->codec, &tile, t->src + first * agc_dtype_nbytes(t->dtype), t->dtype,
                    t->residual ? t->residual + first : NULL, t->dst + i * t->tile_nbytes);
}

static void decode_item(void *ctx, uint32_t worker, uint64_t i)
{
    const struct tiles *t = (const struct tiles *)ctx;
    struct agc_tile tile = tile_at(t, worker, i);
    uint8_t *out = t->dst + i * t->frame->tile_nelems * agc_dtype_nbytes(t->dtype);
    /* To the bit what decoding and adding would give: also where nothing was sent. */
    if (t->add && t->codec->flags & AGC_CODEC_SPARSE)
        agc_elements_add_zero(t->dtype, tile.nelems, out);
    t->codec->decode(&tile, t->src + i * t->tile_nbytes, 1.0, t->add, out, t->dtype);
}

enum agc_status agc_encode(const struct agc_spec *spec, const void *src, uint32_t dtype,
                           uint64_t nelems, float *residual, uint32_t seed, bool checksum,
                           float *scratch, uint8_t *dst, uint64_t dst_cap_nbytes,
                           uint64_t *nbytes_ret)
{
    return agc_encode_parallel(spec, src, dtype, nelems, residual, seed, checksum, 1, scratch, dst,
                               dst_cap_nbytes, nbytes_ret);
}

enum agc_status agc_encode_parallel(const struct agc_spec *spec, const void *src, uint32_t dtype,
                                    uint64_t nelems, float *residual, uint32_t seed, bool checksum,
                                    uint32_t nthreads, float *scratch, uint8_t *dst,
                                    uint64_t dst_cap_nbytes, uint64_t *nbytes_ret)
{
    const struct agc_kernels *k = agc_kernels_get();
    struct agc_frame f;
    AGC_TRY(frame_describe(spec, dtype, nelems, checksum, &f));
    if (dst_cap_nbytes < frame_total_nbytes(&f))
        return AGC_ERR_DST_TOO_SMALL;
    f.seed = seed;
    agc_header_write(k, &f, dst);

    uint8_t *payload = dst + AGC_WIRE_HEADER_NBYTES;
    struct tiles t = {.kernels = k,
                      .codec = agc_codec_find(f.spec.codec),
                      .frame = &f,
                      .src = (const uint8_t *)src,
                      .dst = payload,
                      .residual = residual,
                      .scratch = scratch,
                      .dtype = dtype,
                      .tile_nbytes = agc_tile_nbytes(&f.spec, dtype, f.tile_nelems)};
    agc_parallel(nthreads, f.ntiles, encode_item, &t);
    if (checksum)
        agc_store_u32(payload + f.payload_nbytes, k->crc32c(0, payload, f.payload_nbytes));
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
    return agc_decode_parallel(src, nbytes, out, out_dtype, nelems, add, 1, scratch);
}

enum agc_status agc_decode_parallel(const uint8_t *src, uint64_t nbytes, void *out,
                                    uint32_t out_dtype, uint64_t nelems, bool add,
                                    uint32_t nthreads, float *scratch)
{
    const struct agc_kernels *k = agc_kernels_get();
    struct agc_frame f;
    AGC_TRY(agc_frame_parse(src, nbytes, &f));
    if (agc_dtype_nbytes(out_dtype) == 0)
        return AGC_ERR_DTYPE;
    if (nelems != f.nelems)
        return AGC_ERR_NELEMS;
    const uint8_t *payload = src + AGC_WIRE_HEADER_NBYTES;
    if (f.flags & AGC_FRAME_CHECKSUM &&
        agc_load_u32(payload + f.payload_nbytes) != k->crc32c(0, payload, f.payload_nbytes))
        return AGC_ERR_PAYLOAD_CHECKSUM;

    struct tiles t = {.kernels = k,
                      .codec = agc_codec_find(f.spec.codec),
                      .frame = &f,
                      .src = payload,
                      .dst = (uint8_t *)out,
                      .scratch = scratch,
                      .dtype = out_dtype,
                      .add = add,
                      .tile_nbytes = agc_tile_nbytes(&f.spec, f.dtype, f.tile_nelems)};
    /* All of it is checked before any of it is written: a damaged frame leaves out as it was. */
    for (uint64_t i = 0; i < f.ntiles; i++) {
        struct agc_tile tile = tile_at(&t, 0, i);
        AGC_TRY(t.codec->validate(&tile, payload + i * t.tile_nbytes));
    }
    agc_parallel(nthreads, f.ntiles, decode_item, &t);
    return AGC_OK;
}
