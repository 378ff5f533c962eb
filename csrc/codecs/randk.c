/* randk.c: k elements of a tile at places that all ranks know, so that no place travels.
 *
 * Method: random-k sparsification with error feedback (Stich, Cordonnier, Jaggi, "Sparsified SGD
 * with Memory", 2018). The tile is cut into k runs of equal length (to within one), and of each run
 * one element is drawn: every element has the chance k / n, the places ascend and none comes twice.
 * The draw depends on (seed, round, bucket, lane, tile) and not on the rank: contributions meet at
 * the same places, and a mean, which has no others, is sent as it is. Values are not scaled up by
 * n / k: what is not drawn stays in the residual.
 *
 *   payload: see sparse.h, without indices. Bits per element kept: those of its value.
 */
#include "codecs/sparse.h"
#include "core/common.h"
#include "core/elements.h"

/* Run j is elements [floor(j n / k), floor((j + 1) n / k)). */
static void draw(const struct agc_tile *tile, uint32_t *index)
{
    uint32_t nkept = agc_sparse_nkept(&tile->spec, tile->nelems), begin = 0, carry = 0;
    uint32_t whole = tile->nelems / nkept, rest = tile->nelems % nkept;
    for (uint32_t j = 0; j < nkept; j++) {
        carry += rest;
        uint32_t longer = carry >= nkept, length = whole + longer;
        carry -= longer ? nkept : 0;
        index[j] = begin + (uint32_t)((uint64_t)agc_rng_at(tile->index_rng, j) * length >> 32);
        begin += length;
    }
}

static uint64_t randk_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems)
{
    return agc_sparse_payload_nbytes(spec, dtype, nelems, 0);
}

static void randk_encode(const struct agc_tile *tile, const void *x, uint32_t x_dtype,
                         float *residual, uint8_t *dst)
{
    struct agc_kept kept = agc_sparse_scratch(tile);
    uint32_t nkept = agc_sparse_nkept(&tile->spec, tile->nelems);
    size_t elem_nbytes = agc_dtype_nbytes(x_dtype);
    draw(tile, kept.index);
    for (uint32_t j = 0; j < nkept; j++) {
        uint32_t i = kept.index[j];
        float v;
        agc_elements_load(tile->kernels, x_dtype, (const uint8_t *)x + i * elem_nbytes, 1, &v);
        v = residual ? v + residual[i] : v;
        kept.value[j] = v == v ? v : agc_f32_from_bits(AGC_F32_NAN_BITS);
    }
    agc_sparse_send(tile, x, x_dtype, residual, &kept, dst);
}

static void randk_decode(const struct agc_tile *tile, const uint8_t *src, double weight, bool add,
                         void *out, uint32_t out_dtype)
{
    struct agc_kept kept = agc_sparse_scratch(tile);
    draw(tile, kept.index);
    agc_sparse_receive(tile, src, kept.index, weight, add, out, out_dtype);
}

const struct agc_codec agc_codec_randk = {
    .id = 17,
    .name = "randk",
    .flags = AGC_CODEC_SPARSE | AGC_CODEC_FEEDBACK,
    .payload_nbytes = randk_payload_nbytes,
    .encode = randk_encode,
    .decode = randk_decode,
    .validate = agc_sparse_validate,
};
