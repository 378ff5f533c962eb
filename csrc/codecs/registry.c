/* registry.c: the table of codecs, made from codec_list.inc. */
#include "codecs/codec.h"
#include "core/common.h"

static const struct agc_codec *const codec_table[] = {
#define AGC_CODEC(id, symbol, name) &agc_codec_##symbol,
#include "codecs/codec_list.inc"
#undef AGC_CODEC
};

#define NCODECS ((uint32_t)(sizeof codec_table / sizeof codec_table[0]))

const struct agc_codec *agc_codec_find(uint32_t id)
{
    for (uint32_t i = 0; i < NCODECS; i++)
        if (codec_table[i]->id == id)
            return codec_table[i];
    return NULL;
}

bool agc_codec_info_at(uint32_t i, struct agc_codec_info *info_ret)
{
    if (i >= NCODECS)
        return false;
    const struct agc_codec *c = codec_table[i];
    *info_ret = (struct agc_codec_info){.id = c->id,
                                        .name = c->name,
                                        .flags = c->flags,
                                        .default_block_nelems = c->default_block_nelems};
    return true;
}

enum agc_status agc_spec_resolve(const struct agc_spec *spec, struct agc_spec *resolved_ret)
{
    const struct agc_codec *codec = agc_codec_find(spec->codec), *values = codec;
    struct agc_spec s = *spec;
    if (!codec)
        return AGC_ERR_CODEC;
    if (codec->flags & AGC_CODEC_SPARSE) {
        values = agc_codec_find(s.values ? s.values : AGC_CODEC_ID_RAW);
        if (s.frac_e9 == 0 || s.frac_e9 > 1000000000)
            return AGC_ERR_SPEC;
        if (s.values != 0 && (!values || !(values->flags & AGC_CODEC_VALUES)))
            return AGC_ERR_SPEC;
    } else if (s.frac_e9 != 0 || s.values != 0) {
        return AGC_ERR_SPEC;
    }
    if (values->flags & AGC_CODEC_BLOCKS) {
        if (s.block_nelems == 0)
            s.block_nelems = values->default_block_nelems;
        if (!agc_is_pow2(s.block_nelems) || s.block_nelems < AGC_BLOCK_NELEMS_MIN ||
            s.block_nelems > AGC_BLOCK_NELEMS_MAX)
            return AGC_ERR_SPEC;
    } else if (s.block_nelems != 0) {
        return AGC_ERR_SPEC;
    }
    if (s.rounding > AGC_ROUNDING_STOCHASTIC)
        return AGC_ERR_SPEC;
    if (s.rounding == AGC_ROUNDING_STOCHASTIC && !(values->flags & AGC_CODEC_STOCHASTIC))
        return AGC_ERR_SPEC;
    *resolved_ret = s;
    return AGC_OK;
}

uint64_t agc_tile_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems)
{
    const struct agc_codec *codec = agc_codec_find(spec->codec);
    if (AGC_NEVER(!codec) || nelems == 0)
        return 0;
    return agc_round_up(codec->payload_nbytes(spec, dtype, nelems), AGC_PAYLOAD_ALIGN_NBYTES);
}

uint64_t agc_tiles_nbytes(const struct agc_spec *spec, uint32_t dtype, uint64_t nelems,
                          uint32_t tile_nelems)
{
    return nelems / tile_nelems * agc_tile_nbytes(spec, dtype, tile_nelems) +
           agc_tile_nbytes(spec, dtype, (uint32_t)(nelems % tile_nelems));
}

void agc_tile_encode(const struct agc_codec *codec, const struct agc_tile *tile, const void *x,
                     uint32_t x_dtype, float *residual, uint8_t *dst)
{
    uint64_t nbytes = codec->payload_nbytes(&tile->spec, tile->dtype, tile->nelems);
    codec->encode(tile, x, x_dtype, residual, dst);
    memset(dst + nbytes, 0, agc_round_up(nbytes, AGC_PAYLOAD_ALIGN_NBYTES) - nbytes);
}
