/* residual.c: what a rank owes, in float or bfloat16. */
#include "reduce/residual.h"

#include "codecs/pieces.h"
#include "core/common.h"

static uint64_t elem_nbytes(const struct agc_residual *r)
{
    return r->bf16 ? sizeof(uint16_t) : sizeof(float);
}

enum agc_status agc_residual_create(struct agc_residual *r, uint64_t nelems, bool bf16,
                                    const struct agc_alloc *alloc)
{
    if (r->data || nelems == 0)
        return AGC_OK;
    *r = (struct agc_residual){.nelems = nelems, .bf16 = bf16};
    r->data = (uint8_t *)alloc->alloc(alloc->ctx, elem_nbytes(r) * nelems);
    if (!r->data)
        return AGC_ERR_NOMEM;
    agc_residual_clear(r);
    return AGC_OK;
}

void agc_residual_destroy(struct agc_residual *r, const struct agc_alloc *alloc)
{
    if (r->data)
        alloc->release(alloc->ctx, r->data);
    *r = (struct agc_residual){0};
}

void agc_residual_clear(struct agc_residual *r)
{
    if (r->data)
        memset(r->data, 0, elem_nbytes(r) * r->nelems);
}

void agc_residual_load(const struct agc_residual *r, const struct agc_kernels *k, uint64_t first,
                       uint32_t nelems, float *dst)
{
    const uint8_t *src = r->data + elem_nbytes(r) * first;
    if (r->bf16)
        k->bf16_decode(src, nelems, 1.0f, dst);
    else
        memcpy(dst, src, sizeof(float) * nelems);
}

void agc_residual_store(struct agc_residual *r, const struct agc_kernels *k, uint64_t first,
                        uint32_t nelems, const float *src, struct agc_rng rng, uint32_t rng_first)
{
    uint8_t *dst = r->data + elem_nbytes(r) * first;
    if (r->bf16)
        k->bf16_store(src, nelems, agc_rng_skip(rng, rng_first), dst);
    else
        memcpy(dst, src, sizeof(float) * nelems);
}

float *agc_residual_take(struct agc_residual *r, const struct agc_kernels *k, uint64_t first,
                         uint32_t nelems, float *scratch)
{
    if (!r->bf16)
        return (float *)(void *)r->data + first;
    agc_residual_load(r, k, first, nelems, scratch);
    return scratch;
}

void agc_residual_give(struct agc_residual *r, const struct agc_kernels *k, uint64_t first,
                       uint32_t nelems, const float *taken, struct agc_rng rng, uint32_t rng_first)
{
    if (r->bf16)
        agc_residual_store(r, k, first, nelems, taken, rng, rng_first);
}

double agc_residual_sum_of_squares(const struct agc_residual *r, const struct agc_kernels *k)
{
    float piece[AGC_PIECE_NELEMS];
    double sum = 0.0;
    for (uint64_t first = 0; r->data && first < r->nelems; first += AGC_PIECE_NELEMS) {
        uint32_t n = (uint32_t)agc_min_u64(AGC_PIECE_NELEMS, r->nelems - first);
        agc_residual_load(r, k, first, n, piece);
        for (uint32_t i = 0; i < n; i++)
            sum += (double)piece[i] * (double)piece[i];
    }
    return sum;
}
