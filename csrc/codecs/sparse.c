/* sparse.c: what topk and randk share: sending, receiving, and what is left to the residual. */
#include "codecs/sparse.h"

#include "codecs/pieces.h"
#include "core/common.h"
#include "core/elements.h"

/* The tile's scratch has four arrays of a tile and a vector; the first two are a selection. */
#define SCRATCH_STRIDE (AGC_SCRATCH_NELEMS / 4)

uint32_t agc_sparse_nkept(const struct agc_spec *spec, uint32_t nelems)
{
    uint64_t nkept = agc_div_up((uint64_t)nelems * spec->frac_e9, 1000000000);
    return (uint32_t)agc_max_u64(nkept, 1);
}

uint64_t agc_sparse_values_at(const struct agc_spec *spec, uint32_t nelems, uint32_t index_nbytes)
{
    return agc_round_up((uint64_t)index_nbytes * agc_sparse_nkept(spec, nelems),
                        AGC_PAYLOAD_ALIGN_NBYTES);
}

static const struct agc_codec *values_codec(const struct agc_spec *spec)
{
    return agc_codec_find(spec->values ? spec->values : AGC_CODEC_ID_RAW);
}

static struct agc_spec values_spec(const struct agc_spec *spec)
{
    return (struct agc_spec){.codec = values_codec(spec)->id,
                             .block_nelems = spec->block_nelems,
                             .rounding = spec->rounding};
}

/* Values that are sent as they are have the tensor's data type; doubles go through float. */
static uint32_t values_dtype(uint32_t dtype)
{
    return dtype == AGC_DTYPE_F64 ? AGC_DTYPE_F32 : dtype;
}

/* The kept values as a tile of their own. */
static struct agc_tile values_tile(const struct agc_tile *tile)
{
    struct agc_tile values = *tile;
    values.spec = values_spec(&tile->spec);
    values.dtype = values_dtype(tile->dtype);
    values.nelems = agc_sparse_nkept(&tile->spec, tile->nelems);
    return values;
}

uint64_t agc_sparse_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems,
                                   uint32_t index_nbytes)
{
    struct agc_spec values = values_spec(spec);
    return agc_sparse_values_at(spec, nelems, index_nbytes) +
           values_codec(spec)->payload_nbytes(&values, values_dtype(dtype),
                                              agc_sparse_nkept(spec, nelems));
}

struct agc_kept agc_sparse_scratch(const struct agc_tile *tile)
{
    return (struct agc_kept){.index = (uint32_t *)(void *)tile->scratch,
                             .value = tile->scratch + SCRATCH_STRIDE};
}

/* residual += x, but where that is not finite. */
static void residual_add_piece(const struct agc_tile *tile, const float *x, float *residual,
                               uint32_t first, uint32_t nelems, uint8_t *dst)
{
    (void)first;
    (void)dst;
    tile->kernels->residual_add(x, residual, nelems);
}

void agc_sparse_send(const struct agc_tile *tile, const void *x, uint32_t x_dtype, float *residual,
                     const struct agc_kept *kept, uint8_t *dst)
{
    const struct agc_codec *codec = values_codec(&tile->spec);
    struct agc_tile values = values_tile(tile);
    codec->encode(&values, kept->value, AGC_DTYPE_F32, NULL, dst);
    if (!residual)
        return;
    /* What is owed of the elements kept, while the residual still is what it was. */
    float *owed = tile->scratch + 2 * (size_t)SCRATCH_STRIDE;
    codec->decode(&values, dst, 1.0, false, owed, AGC_DTYPE_F32);
    for (uint32_t j = 0; j < values.nelems; j++)
        owed[j] = agc_f32_is_finite(owed[j]) ? kept->value[j] - owed[j] : residual[kept->index[j]];
    agc_pieces_encode(tile, x, x_dtype, residual, NULL, residual_add_piece);
    for (uint32_t j = 0; j < values.nelems; j++)
        residual[kept->index[j]] = owed[j];
}

/* Adds values to the elements of floats that index names; returns how many lay before `end`. */
static uint32_t scatter(const uint32_t *index, const float *value, uint32_t nkept, uint32_t begin,
                        uint32_t end, float *out)
{
    uint32_t j = 0;
    for (; j < nkept && index[j] < end; j++)
        if (AGC_LIKELY(index[j] >= begin))
            out[index[j] - begin] = agc_acc_add(out[index[j] - begin], value[j]);
    return j;
}

/* The same with doubles: what is there keeps its 53 bits. */
static void scatter_f64(const uint32_t *index, const float *value, uint32_t nkept, uint32_t nelems,
                        uint8_t *out)
{
    for (uint32_t j = 0; j < nkept && index[j] < nelems; j++) {
        uint8_t *dst = out + 8 * (size_t)index[j];
        double sum;
        memcpy(&sum, dst, 8);
        sum = agc_acc_add_f64(sum, (double)value[j]);
        memcpy(dst, &sum, 8);
    }
}

/* Indices may be anything (a peer's bytes): one beyond the tile ends the tile, one that does not
 * ascend may be left out, and nothing is written outside. */
void agc_sparse_receive(const struct agc_tile *tile, const uint8_t *src, const uint32_t *index,
                        double weight, bool add, void *out, uint32_t out_dtype)
{
    struct agc_tile values = values_tile(tile);
    float *value = tile->scratch + 2 * (size_t)SCRATCH_STRIDE;
    uint32_t nkept = values.nelems;
    size_t elem_nbytes = agc_dtype_nbytes(out_dtype);
    values_codec(&tile->spec)->decode(&values, src, weight, false, value, AGC_DTYPE_F32);
    if (!add)
        memset(out, 0, tile->nelems * elem_nbytes);
    if (agc_is_floats(out_dtype, out)) {
        scatter(index, value, nkept, 0, tile->nelems, (float *)out);
        return;
    }
    if (out_dtype == AGC_DTYPE_F64) {
        scatter_f64(index, value, nkept, tile->nelems, (uint8_t *)out);
        return;
    }
    float piece[AGC_PIECE_NELEMS];
    for (uint32_t begin = 0; begin < tile->nelems && nkept > 0; begin += AGC_PIECE_NELEMS) {
        uint32_t end = agc_min_u32(tile->nelems, begin + AGC_PIECE_NELEMS);
        uint8_t *dst = (uint8_t *)out + begin * elem_nbytes;
        if (index[0] >= end)
            continue;
        agc_elements_load(tile->kernels, out_dtype, dst, end - begin, piece);
        uint32_t ndone = scatter(index, value, nkept, begin, end, piece);
        agc_elements_store(tile->kernels, out_dtype, piece, end - begin, dst);
        index += ndone;
        value += ndone;
        nkept -= ndone;
    }
}

enum agc_status agc_sparse_validate(const struct agc_tile *tile, const uint8_t *src)
{
    struct agc_tile values = values_tile(tile);
    return values_codec(&tile->spec)->validate(&values, src);
}
