/* test_engine_residual.c: what is owed: error feedback over rounds and layouts, parameters that are
 * not used, numbers that are not finite, ranks that are absent. Against the model of
 * engine_model.h, and against the conservation of gradients, which knows no model.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine_data.h"

/* Sum of gradients = nranks * sum of means + what all ranks still owe. Roundings, each 2^-24 of
 * numbers below `most`: per round and rank two in the worker and two in the mean, then one for the
 * owner's loss and the result: nranks times those. The same again for the folding of residuals
 * between layouts, and a factor of 2 for what adds up. */
static void check_conservation(struct world *w, const struct layout *layout, double *const sums[],
                               double most, uint32_t nrounds)
{
    for (uint32_t p = 0; p < layout->nparams; p++) {
        float *owed = (float *)test_alloc(4 * layout->params[p]);
        for (uint32_t r = 0; r < w->nranks; r++) {
            CHECK_OK(agc_engine_residual_get(w->ranks[r].engine, p, true, owed));
            for (uint64_t i = 0; i < layout->params[p]; i++)
                sums[p][i] -= (double)owed[i];
        }
        free(owed);
        for (uint64_t i = 0; i < layout->params[p]; i++)
            CHECK_LE(fabs(sums[p][i]), 2 * most * 0x1p-24 * nrounds * w->nranks * 8);
    }
}

/* Adds gradients and takes away nranks times the mean, per parameter. */
static void add_to_sums(const struct data *d, double *const sums[])
{
    for (uint32_t b = 0; b < d->layout->nbuckets; b++) {
        const struct bucket_layout *l = &d->layout->buckets[b];
        uint64_t at = 0;
        for (uint32_t i = 0; i < l->npieces; i++) {
            uint32_t p = l->pieces[i].param;
            for (uint64_t j = 0; j < d->layout->params[p]; j++, at++) {
                for (uint32_t r = 0; r < d->nranks; r++)
                    sums[p][j] += element(l->dtype, d->gradients[b][r], at);
                sums[p][j] -= d->nranks * element(l->dtype, d->exchanged[b][0], at);
            }
        }
    }
}

/* DDP rebuilds its buckets after the first round: other buckets, other order, other tiles and
 * owners, the same parameters. */
static void test_new_layout_keeps_what_is_owed(void)
{
    static const struct layout before = {
        .name = "before",
        .nparams = 6,
        .params = {30000, 5000, 0, 70000, 1, 9000},
        .nbuckets = 2,
        .buckets = {{.dtype = AGC_DTYPE_F32,
                     .npieces = 3,
                     .pieces = {{0, 0}, {1, 1}, {2, 0}},
                     .nlanes = 2,
                     .lanes = {{INT8, true}, {FP16, true}}},
                    {.dtype = AGC_DTYPE_F32,
                     .npieces = 3,
                     .pieces = {{3, 0}, {4, 0}, {5, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8, true}}}},
    };
    static const struct layout after = {
        .name = "after",
        .nparams = 6,
        .params = {30000, 5000, 0, 70000, 1, 9000},
        .nbuckets = 3,
        .buckets = {{.dtype = AGC_DTYPE_F32,
                     .npieces = 2,
                     .pieces = {{5, 0}, {4, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8_SMALL, true}}},
                    {.dtype = AGC_DTYPE_F32,
                     .npieces = 1,
                     .pieces = {{3, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8, true}}},
                    {.dtype = AGC_DTYPE_F32,
                     .npieces = 3,
                     .pieces = {{2, 0}, {1, 0}, {0, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8, true}}}},
    };
    enum { NROUNDS = 3 };
    double *sums[NPARAMS_MAX];
    for (uint32_t nranks = 2; nranks <= 5; nranks++) {
        struct world *w = world_create(nranks, &before, &(struct world_options){.chunk_log2 = 12});
        struct model *m = model_create(nranks, &before, 0);
        for (uint32_t p = 0; p < before.nparams; p++) {
            sums[p] = (double *)test_alloc(8 * before.params[p]);
            memset(sums[p], 0, 8 * before.params[p]);
        }
        for (int part = 0; part < 2; part++) {
            struct data *d = data_create(nranks, part ? &after : &before);
            if (part) {
                for (uint32_t r = 0; r < nranks; r++)
                    agc_engine_reset_buckets(w->ranks[r].engine);
                model_relayout(m, &after);
                compare_residuals(w, m);
                world_define(w, &after);
            }
            for (uint32_t round = 0; round < NROUNDS; round++) {
                fill_gradients(d);
                exchange_round(w, d, (uint32_t)part * NROUNDS + round);
                compare_round(d, m, (uint32_t)part * NROUNDS + round, NULL);
                add_to_sums(d, sums);
            }
            compare_residuals(w, m);
            data_destroy(d);
        }
        check_conservation(w, &after, sums, 32.0,
                           2 * NROUNDS); /* gradients are below 28: 3.5 deviations of 8 */
        for (uint32_t p = 0; p < before.nparams; p++)
            free(sums[p]);
        model_destroy(m);
        world_destroy(w);
    }
}

/* A lossless codec sends what another one left over, and clears it. */
static void test_raw_sends_what_is_owed(void)
{
    struct layout first = mixed_layout, then = mixed_layout;
    for (int i = 0; i < 3; i++) {
        first.buckets[0].lanes[i] = (struct agc_lane_desc){.spec = INT8, .feedback = true};
        then.buckets[0].lanes[i] = (struct agc_lane_desc){.spec = RAW};
    }
    for (uint32_t nranks = 2; nranks <= 3; nranks++) {
        struct world *w = world_create(nranks, &first, &(struct world_options){.chunk_log2 = 12});
        struct model *m = model_create(nranks, &first, 0);
        struct data *d = data_create(nranks, &first);
        for (uint32_t round = 0; round < 3; round++) {
            if (round == 1) {
                for (uint32_t r = 0; r < nranks; r++) {
                    CHECK(agc_engine_residual_norm(w->ranks[r].engine) > 0.0);
                    agc_engine_reset_buckets(w->ranks[r].engine);
                }
                world_define(w, &then);
                model_relayout(m, &then);
            }
            for (uint32_t r = 0; r < nranks; r++)
                for (uint64_t i = 0; i < bucket_nelems(&mixed_layout, 0); i++)
                    put(AGC_DTYPE_F32, d->gradients[0][r], i, 0.5f + random_unit());
            exchange_round(w, d, round);
            compare_round(d, m, round, NULL);
        }
        for (uint32_t r = 0; r < nranks; r++)
            CHECK(agc_engine_residual_norm(w->ranks[r].engine) == 0.0);
        data_destroy(d);
        model_destroy(m);
        world_destroy(w);
    }
}

/* A parameter whose gradient is all zero on a rank keeps its residual there; where it is zero on
 * all ranks the owners keep theirs too, and the result is zero. Parameters that share blocks with
 * it go on. */
static void test_unused_parameters_keep_what_they_owe(void)
{
    static const struct layout layout = {
        .name = "unused",
        .nparams = 4,
        .params = {40000, 300, 50000, 20000},
        .nbuckets = 1,
        .buckets = {{.dtype = AGC_DTYPE_F32,
                     .npieces = 4,
                     .pieces = {{0, 0}, {1, 0}, {2, 0}, {3, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8, true}}}},
    };
    static float owed[2][NRANKS_MAX][50000], now[50000];
    for (uint32_t nranks = 2; nranks <= 4; nranks++) {
        struct world *w = world_create(nranks, &layout, &(struct world_options){.chunk_log2 = 12});
        struct model *m = model_create(nranks, &layout, 0);
        struct data *d = data_create(nranks, &layout);
        for (uint32_t round = 0; round < 6; round++) {
            uint32_t unused =
                1 + round % 2; /* a short one inside a tile, and one that has tiles of its own */
            uint32_t nunused = round < 2 ? 0 : round < 4 ? 1 : nranks;
            for (uint32_t p = 0; p < 4; p++)
                for (uint32_t r = 0; r < nranks; r++)
                    fill_param(d, r, p, p == unused && r < nunused);
            for (uint32_t r = 0; r < nranks; r++)
                for (int owner = 0; owner < 2; owner++)
                    CHECK_OK(
                        agc_engine_residual_get(w->ranks[r].engine, unused, owner, owed[owner][r]));
            exchange_round(w, d, round);
            compare_round(d, m, round, NULL);
            for (uint32_t r = 0; r < nunused; r++) {
                for (int owner = 0; owner < (nunused == nranks ? 2 : 1); owner++) {
                    CHECK_OK(agc_engine_residual_get(w->ranks[r].engine, unused, owner, now));
                    CHECK_BYTES(now, owed[owner][r], 4 * layout.params[unused]);
                }
            }
            uint64_t at = unused == 1 ? 40000 : 40300;
            for (uint64_t i = 0; nunused == nranks && i < layout.params[unused]; i++)
                CHECK(element(AGC_DTYPE_F32, d->exchanged[0][0], at + i) == 0.0);
        }
        compare_residuals(w, m);
        data_destroy(d);
        model_destroy(m);
        world_destroy(w);
    }
}

/* A NaN or an infinity on one rank: its block is not finite on any rank, all else is as ever; the
 * next round is clean. */
static void test_non_finite_gradients(void)
{
    static const struct layout layout = {
        .name = "non-finite",
        .nparams = 3,
        .params = {30000, 20000, 100},
        .nbuckets = 1,
        .buckets = {{.dtype = AGC_DTYPE_F32,
                     .npieces = 3,
                     .pieces = {{0, 0}, {1, 0}, {2, 1}},
                     .nlanes = 2,
                     .lanes = {{INT8, true}, {RAW, false}}}},
    };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    static float owed[30000];
    for (uint32_t nranks = 2; nranks <= 4; nranks++) {
        struct world *w = world_create(nranks, &layout, &(struct world_options){.chunk_log2 = 12});
        struct model *m = model_create(nranks, &layout, 0);
        struct data *d = data_create(nranks, &layout);
        for (uint32_t round = 0; round < 7; round++) {
            fill_gradients(d);
            uint64_t at = random_below(50000), begin = at / 256 * 256;
            uint64_t end = begin + 256 < 50000 ? begin + 256 : 50000;
            if (round % 2) {
                put(AGC_DTYPE_F32, d->gradients[0][random_below(nranks)], at, bad[round / 2]);
                put(AGC_DTYPE_F32, d->gradients[0][random_below(nranks)], 50007, bad[round / 2]);
            }
            exchange_round(w, d, round);
            compare_round(d, m, round, NULL);
            /* Tiles are multiples of 256, so blocks count from the begin of the lane, which is the
             * bucket's. */
            for (uint64_t i = 0; i < 50100; i++) {
                bool hit = round % 2 && ((i >= begin && i < end) || i == 50007);
                CHECK_EQ(isfinite(element(AGC_DTYPE_F32, d->exchanged[0][0], i)) == 0, hit);
            }
            for (uint32_t r = 0; r < nranks; r++) {
                for (uint32_t p = 0; p < 3; p++) {
                    CHECK_OK(agc_engine_residual_get(w->ranks[r].engine, p, true, owed));
                    for (uint64_t i = 0; i < layout.params[p]; i++)
                        CHECK(isfinite(owed[i]));
                }
            }
        }
        data_destroy(d);
        model_destroy(m);
        world_destroy(w);
    }
}

/* NaNs with payloads of their own on every rank: one NaN comes out, the same on all. */
static void test_nans_are_one_nan(void)
{
    static const struct layout layout = {
        .name = "NaNs",
        .nparams = 4,
        .params = {2000, 2000, 2000, 2000},
        .nbuckets = 4,
        .buckets =
            {
                {.dtype = AGC_DTYPE_F32,
                 .npieces = 1,
                 .pieces = {{0, 0}},
                 .nlanes = 1,
                 .lanes = {{RAW, false}}},
                {.dtype = AGC_DTYPE_F16,
                 .npieces = 1,
                 .pieces = {{1, 0}},
                 .nlanes = 1,
                 .lanes = {{RAW, false}}},
                {.dtype = AGC_DTYPE_F64,
                 .npieces = 1,
                 .pieces = {{2, 0}},
                 .nlanes = 1,
                 .lanes = {{RAW, false}}},
                {.dtype = AGC_DTYPE_BF16,
                 .npieces = 1,
                 .pieces = {{3, 0}},
                 .nlanes = 1,
                 .lanes = {{INT8, true}}},
            },
    };
    for (uint32_t nranks = 2; nranks <= 4; nranks++) {
        struct world *w = world_create(nranks, &layout, &(struct world_options){.chunk_log2 = 12});
        struct data *d = data_create(nranks, &layout);
        for (uint32_t b = 0; b < layout.nbuckets; b++)
            for (uint32_t r = 0; r < nranks; r++)
                for (uint64_t i = 0; i < bucket_nbytes(&layout, b);
                     i++) /* the high bytes are those of NaNs, the others anything */
                    d->gradients[b][r][i] =
                        (i + 1) % agc_dtype_nbytes(layout.buckets[b].dtype) == 0 ? 0x7f
                        : (i + 2) % agc_dtype_nbytes(layout.buckets[b].dtype) == 0
                            ? 0xf1
                            : (uint8_t)random_u64();
        for (uint32_t r = 0; r < nranks; r++)
            for (uint64_t i = 1; i < bucket_nbytes(&layout, 1); i += 2)
                d->gradients[1][r][i] = random_bool() ? 0x7e : 0xfd;
        exchange_round(w, d, 0);
        for (uint32_t b = 0; b < layout.nbuckets; b++) {
            for (uint32_t r = 1; r < nranks; r++)
                CHECK_BYTES(d->exchanged[b][r], d->exchanged[b][0], bucket_nbytes(&layout, b));
            for (uint64_t i = 0; i < bucket_nelems(&layout, b); i++)
                CHECK(isnan(element(layout.buckets[b].dtype, d->exchanged[b][0], i)));
        }
        data_destroy(d);
        world_destroy(w);
    }
}

/* Ranks that have no more data (DDP's Join) send zeros and do not count. */
static void test_absent_ranks(void)
{
    static const struct layout layout = {
        .name = "absent",
        .nparams = 2,
        .params = {40000, 1000},
        .nbuckets = 1,
        .buckets = {{.dtype = AGC_DTYPE_F32,
                     .npieces = 2,
                     .pieces = {{0, 0}, {1, 1}},
                     .nlanes = 2,
                     .lanes = {{INT8, true}, {RAW, false}}}},
    };
    for (uint32_t nranks = 2; nranks <= 4; nranks++) {
        struct world *w = world_create(nranks, &layout, &(struct world_options){.chunk_log2 = 12});
        struct model *m = model_create(nranks, &layout, 0);
        struct data *d = data_create(nranks, &layout);
        for (uint32_t round = 0; round < 5; round++) {
            bool absent[NRANKS_MAX] = {false};
            fill_gradients(d);
            for (uint32_t r = 0; r < nranks; r++) {
                absent[r] = round == 4 ||
                            (round && r >= nranks - round); /* one more each round, at last all */
                if (absent[r])
                    memset(d->gradients[0][r], 0, bucket_nbytes(&layout, 0));
                memcpy(d->exchanged[0][r], d->gradients[0][r], bucket_nbytes(&layout, 0));
                struct agc_submission s =
                    submission(&w->ranks[r], 0, round, d->exchanged[0][r], &d->tickets[0][r]);
                s.absent = absent[r];
                CHECK_OK(agc_engine_submit(w->ranks[r].engine, &s));
            }
            for (uint32_t r = 0; r < nranks; r++)
                wait_ok(w, &d->tickets[0][r]);
            compare_round(d, m, round, absent);
        }
        compare_residuals(w, m);
        data_destroy(d);
        model_destroy(m);
        world_destroy(w);
    }
}

static void test_clearing_residuals(void)
{
    struct world *w = world_create(3, &mixed_layout, &(struct world_options){.chunk_log2 = 12});
    struct model *m = model_create(3, &mixed_layout, 0);
    struct data *d = data_create(3, &mixed_layout);
    float *owed = (float *)test_alloc(4 * 70000), *with_owner = (float *)test_alloc(4 * 70000);
    for (uint32_t round = 0; round < 2; round++) {
        fill_gradients(d);
        fill_param(d, 0, 0, false); /* not an unused one, or nothing would be owed */
        exchange_round(w, d, round);
        compare_round(d, m, round, NULL); /* the second time too: nothing of the first is left */
        for (uint32_t r = 0; r < 3; r++) {
            struct agc_engine *e = w->ranks[r].engine;
            double sum = 0.0;
            for (uint32_t p = 0; p < mixed_layout.nparams; p++) {
                CHECK_OK(agc_engine_residual_get(e, p, false, owed));
                CHECK_OK(agc_engine_residual_get(e, p, true, with_owner));
                for (uint64_t i = 0; i < mixed_layout.params[p]; i++) {
                    double owners = ((double)with_owner[i] - (double)owed[i]) / 3;
                    sum += (double)owed[i] * (double)owed[i] + owners * owners;
                }
            }
            double norm = agc_engine_residual_norm(e);
            CHECK(norm > 0.0);
            CHECK_LE(fabs(norm - sqrt(sum)), 1e-5 * norm); /* with_owner is a rounded sum */
            CHECK_STATUS(agc_engine_residual_get(e, mixed_layout.nparams, false, owed),
                         AGC_ERR_NELEMS);
            agc_engine_residual_clear(e);
            CHECK(agc_engine_residual_norm(e) == 0.0);
        }
        model_destroy(m);
        m = model_create(3, &mixed_layout, 0);
    }
    free(owed);
    free(with_owner);
    data_destroy(d);
    model_destroy(m);
    world_destroy(w);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(test_new_layout_keeps_what_is_owed),
        TEST(test_raw_sends_what_is_owed),
        TEST(test_unused_parameters_keep_what_they_owe),
        TEST(test_non_finite_gradients),
        TEST(test_nans_are_one_nan),
        TEST(test_absent_ranks),
        TEST(test_clearing_residuals),
    };
    return test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
