/* engine_data.c: gradients of all ranks of a world on their way. */
#include "engine_data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/elements.h"

const struct layout mixed_layout = {
    .name = "mixed",
    .nparams = 9,
    .params = {70000, 3, 0, 300, 50000, 1, 128, 33000, 700},
    .nbuckets = 1,
    .buckets = {{.dtype = AGC_DTYPE_F32,
                 .npieces = 9,
                 .pieces = {{0, 0}, {1, 1}, {2, 0}, {3, 2}, {4, 0}, {5, 1}, {6, 0}, {7, 2}, {8, 0}},
                 .nlanes = 3,
                 .lanes = {{INT8, true}, {RAW, false}, {FP16, false}}}},
};

struct data *data_create(uint32_t nranks, const struct layout *layout)
{
    struct data *d = (struct data *)test_alloc(sizeof *d);
    *d = (struct data){.layout = layout, .nranks = nranks};
    for (uint32_t b = 0; b < layout->nbuckets; b++) {
        uint64_t nbytes = bucket_nbytes(layout, b);
        d->expected[b] = (uint8_t *)test_alloc(nbytes);
        for (uint32_t r = 0; r < nranks; r++) {
            d->gradients[b][r] = (uint8_t *)test_alloc(nbytes);
            d->memory[b][r] = (uint8_t *)test_alloc(nbytes + 16);
            d->exchanged[b][r] = d->memory[b][r] + agc_dtype_nbytes(layout->buckets[b].dtype);
        }
    }
    return d;
}

void data_destroy(struct data *d)
{
    for (uint32_t b = 0; b < d->layout->nbuckets; b++) {
        free(d->expected[b]);
        for (uint32_t r = 0; r < d->nranks; r++) {
            free(d->gradients[b][r]);
            free(d->memory[b][r]);
        }
    }
    free(d);
}

void put(uint32_t dtype, uint8_t *bucket, uint64_t i, float x)
{
    struct agc_kernels k;
    agc_kernels_init(&k, 0);
    agc_elements_store(&k, dtype, &x, 1, bucket + i * agc_dtype_nbytes(dtype));
}

double element(uint32_t dtype, const uint8_t *bucket, uint64_t i)
{
    struct agc_kernels k;
    float x;
    double d;
    if (dtype == AGC_DTYPE_F64) {
        memcpy(&d, bucket + 8 * i, 8);
        return d;
    }
    agc_kernels_init(&k, 0);
    agc_elements_load(&k, dtype, bucket + i * agc_dtype_nbytes(dtype), 1, &x);
    return (double)x;
}

void fill_gradients(struct data *d)
{
    for (uint32_t b = 0; b < d->layout->nbuckets; b++) {
        const struct bucket_layout *l = &d->layout->buckets[b];
        for (uint32_t r = 0; r < d->nranks; r++) {
            uint64_t at = 0;
            for (uint32_t i = 0; i < l->npieces; i++) {
                uint64_t nelems = d->layout->params[l->pieces[i].param];
                float scale = ldexpf(1.0f, (int)random_below(12) - 8);
                bool unused = random_below(10) == 0;
                for (uint64_t j = 0; j < nelems; j++, at++) {
                    float x = unused ? 0.0f : random_gauss() * scale;
                    put(l->dtype, d->gradients[b][r], at, x == 0.0f ? 0.0f : x);
                }
            }
        }
    }
}

void fill_param(struct data *d, uint32_t rank, uint32_t param, bool zero)
{
    const struct bucket_layout *l = &d->layout->buckets[0];
    uint64_t at = 0;
    for (uint32_t i = 0; i < l->npieces; i++) {
        uint64_t nelems = d->layout->params[l->pieces[i].param];
        for (uint64_t j = 0; j < nelems; j++, at++)
            if (l->pieces[i].param == param)
                put(l->dtype, d->gradients[0][rank], at, zero ? 0.0f : 0.1f + random_unit());
    }
}

void exchange_round(struct world *w, struct data *d, uint32_t round)
{
    for (uint32_t b = 0; b < d->layout->nbuckets; b++) {
        uint32_t first = random_below(w->nranks);
        for (uint32_t i = 0; i < w->nranks; i++) {
            uint32_t r = (first + i) % w->nranks;
            memcpy(d->exchanged[b][r], d->gradients[b][r], bucket_nbytes(d->layout, b));
            submit(&w->ranks[r], b, round, d->exchanged[b][r], &d->tickets[b][r]);
        }
    }
    for (uint32_t b = 0; b < d->layout->nbuckets; b++)
        for (uint32_t r = 0; r < w->nranks; r++)
            wait_ok(w, &d->tickets[b][r]);
}

void compare_round(struct data *d, struct model *m, uint32_t round, const bool *absent)
{
    for (uint32_t b = 0; b < d->layout->nbuckets; b++) {
        model_exchange(m, b, round, d->gradients[b], absent, d->expected[b]);
        for (uint32_t r = 0; r < d->nranks; r++)
            CHECK_BYTES(d->exchanged[b][r], d->nranks == 1 ? d->gradients[b][0] : d->expected[b],
                        bucket_nbytes(d->layout, b));
    }
}

void compare_residuals(struct world *w, const struct model *m)
{
    for (uint32_t p = 0; p < m->layout->nparams; p++) {
        uint64_t nelems = m->layout->params[p];
        float *have = (float *)test_alloc(4 * nelems), *want = (float *)test_alloc(4 * nelems);
        for (uint32_t r = 0; r < w->nranks; r++) {
            for (int owner = 0; owner < 2; owner++) {
                CHECK_OK(agc_engine_residual_get(w->ranks[r].engine, p, owner, have));
                model_residual(m, r, p, owner, want);
                CHECK_BYTES(have, want, 4 * nelems);
            }
        }
        free(have);
        free(want);
    }
}
