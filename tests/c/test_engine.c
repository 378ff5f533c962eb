/* test_engine.c: the numbers: engines against the model of engine_model.h, to the bit, whatever
 * chunks, delays and threads do. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine_data.h"

/* ---- layouts ----------------------------------------------------------------------------- */

/* Many small buckets in a round, of every data type; each its own codecs; an empty one; a sum. */
static const struct layout buckets = {
    .name = "buckets",
    .nparams = 14,
    .params = {20000, 64, 9000, 10, 30000, 1000, 0, 12345, 257, 40000, 5, 8000, 8000, 4096},
    .nbuckets = 8,
    .buckets =
        {
            {.dtype = AGC_DTYPE_F32,
             .npieces = 2,
             .pieces = {{0, 0}, {1, 1}},
             .nlanes = 2,
             .lanes = {{INT8, true}, {RAW, false}}},
            {.dtype = AGC_DTYPE_F16,
             .npieces = 3,
             .pieces = {{2, 0}, {3, 1}, {4, 0}},
             .nlanes = 2,
             .lanes = {{INT8, true}, {RAW, false}}},
            {.dtype = AGC_DTYPE_BF16,
             .npieces = 1,
             .pieces = {{5, 0}},
             .nlanes = 1,
             .lanes = {{INT8_SMALL, true}}},
            {.dtype = AGC_DTYPE_F32,
             .npieces = 1,
             .pieces = {{6, 0}},
             .nlanes = 1,
             .lanes = {{INT8, true}}},
            {.dtype = AGC_DTYPE_F64,
             .npieces = 2,
             .pieces = {{7, 0}, {8, 1}},
             .nlanes = 2,
             .lanes = {{INT8, true}, {RAW, false}}},
            {.dtype = AGC_DTYPE_F32,
             .npieces = 2,
             .pieces = {{9, 0}, {10, 0}},
             .nlanes = 2,
             .lanes = {{BF16, true}, {INT8, true}}}, /* the second lane is empty */
            {.dtype = AGC_DTYPE_F32,
             .npieces = 1,
             .pieces = {{11, 0}},
             .nlanes = 1,
             .lanes = {{INT8_STOCHASTIC, true}}},
            {.dtype = AGC_DTYPE_F64,
             .npieces = 2,
             .pieces = {{12, 0}, {13, 1}},
             .nlanes = 2,
             .lanes = {{RAW, false}, {FP16, true}},
             .sum = true},
        },
};

#define SIGN_OF(block) {.codec = 8, .block_nelems = block}
#define TERNARY {.codec = 7}
#define TOPK(frac, of) {.codec = 16, .frac_e9 = frac, .values = of}
#define RANDK(frac, of) {.codec = 17, .frac_e9 = frac, .values = of}

/* Codecs whose tiles are not simply the sum of their elements: parameters that begin blocks of
 * their own, several of them in a tile, and elements that stay behind. */
static const struct layout sparse_and_sign = {
    .name = "sparse and sign",
    .nparams = 18,
    .params = {20000, 63, 0, 9000, 1, 30000, 256, 1000, 5000, 7777, 40000, 33, 8000, 100000, 900,
               3000, 70, 12000},
    .nbuckets = 5,
    .buckets =
        {
            {.dtype = AGC_DTYPE_F32,
             .npieces = 6,
             .pieces = {{0, 0}, {1, 0}, {2, 0}, {3, 1}, {4, 0}, {5, 0}},
             .nlanes = 2,
             .lanes = {{SIGN_OF(256), true}, {TERNARY, true}}},
            {.dtype = AGC_DTYPE_BF16,
             .npieces = 3,
             .pieces = {{6, 0}, {7, 0}, {8, 0}},
             .nlanes = 1,
             .lanes = {{SIGN_OF(4096), true}}},
            {.dtype = AGC_DTYPE_F32,
             .npieces = 4,
             .pieces = {{9, 0}, {10, 0}, {11, 0}, {12, 1}},
             .nlanes = 2,
             .lanes = {{TOPK(100000000, 5), true}, {RANDK(250000000, 0), true}}},
            {.dtype = AGC_DTYPE_F16,
             .npieces = 2,
             .pieces = {{13, 0}, {14, 0}},
             .nlanes = 1,
             .lanes = {{TOPK(10000000, 0), true}}},
            {.dtype = AGC_DTYPE_F64,
             .npieces = 3,
             .pieces = {{15, 0}, {16, 1}, {17, 0}},
             .nlanes = 2,
             .lanes = {{RANDK(500000000, 8), true}, {SIGN_OF(32), false}}},
        },
};

/* Residuals in half the memory, of a codec for each way of encoding: in place, gathered, by blocks
 * of the parameters, sparse. */
static const struct layout half_residuals = {
    .name = "half residuals",
    .nparams = 9,
    .params = {70000, 3000, 900, 50, 20000, 8000, 300, 5000, 600},
    .nbuckets = 3,
    .buckets =
        {
            {.dtype = AGC_DTYPE_F32,
             .npieces = 4,
             .pieces = {{0, 0}, {1, 0}, {2, 1}, {3, 1}},
             .nlanes = 2,
             .lanes = {{INT8, true, true}, {FP16, true, true}}},
            {.dtype = AGC_DTYPE_BF16,
             .npieces = 3,
             .pieces = {{4, 0}, {5, 0}, {6, 0}},
             .nlanes = 1,
             .lanes = {{SIGN_OF(256), true, true}}},
            {.dtype = AGC_DTYPE_F32,
             .npieces = 2,
             .pieces = {{7, 0}, {8, 0}},
             .nlanes = 1,
             .lanes = {{TOPK(100000000, 5), true, true}}},
        },
};

/* More tiles than the window has slots for, at the least chunk size. */
static const struct layout large = {
    .name = "large",
    .nparams = 4,
    .params = {900000, 77, 500000, 123},
    .nbuckets = 1,
    .buckets = {{.dtype = AGC_DTYPE_F32,
                 .npieces = 4,
                 .pieces = {{0, 0}, {1, 0}, {2, 1}, {3, 0}},
                 .nlanes = 2,
                 .lanes = {{INT8, true}, {FP16, true}}}},
};

static const struct layout all_raw = {
    .name = "all raw",
    .nparams = 3,
    .params = {50000, 9, 30000},
    .nbuckets = 3,
    .buckets =
        {
            {.dtype = AGC_DTYPE_F32,
             .npieces = 1,
             .pieces = {{0, 0}},
             .nlanes = 1,
             .lanes = {{RAW, false}}},
            {.dtype = AGC_DTYPE_F32,
             .npieces = 1,
             .pieces = {{1, 0}},
             .nlanes = 1,
             .lanes = {{RAW, false}}},
            {.dtype = AGC_DTYPE_F64,
             .npieces = 1,
             .pieces = {{2, 0}},
             .nlanes = 1,
             .lanes = {{RAW, false}}},
        },
};

/* ---- running them -------------------------------------------------------------------------- */

static char scenario[200];

static void describe(char *dst, size_t dst_cap_nbytes)
{
    snprintf(dst, dst_cap_nbytes, "%s", scenario);
}

static void run_rounds(uint32_t nranks, const struct layout *layout, uint32_t nrounds,
                       struct world_options options)
{
    test_describe = describe;
    options.seed = (uint32_t)random_u64();
    snprintf(scenario, sizeof scenario, "%s, %u ranks, chunk 2^%u%s%s%s", layout->name, nranks,
             options.chunk_log2, options.chunk_auto ? " auto" : "",
             options.delay_ns ? ", delays" : "", options.noise ? ", noise" : "");
    struct world *w = world_create(nranks, layout, &options);
    struct model *m = model_create(nranks, layout, options.seed);
    struct data *d = data_create(nranks, layout);
    for (uint32_t round = 0; round < nrounds; round++) {
        fill_gradients(d);
        exchange_round(w, d, round);
        compare_round(d, m, round, NULL);
    }
    compare_residuals(w, m);
    data_destroy(d);
    model_destroy(m);
    world_destroy(w);
}

/* ---- the numbers ------------------------------------------------------------------------- */

static void test_mixed_lanes(void)
{
    for (uint32_t nranks = 1; nranks <= 5; nranks++)
        run_rounds(nranks, &mixed_layout, 3, (struct world_options){.chunk_log2 = 12});
}

static void test_residuals_in_half_the_memory(void)
{
    for (uint32_t nranks = 2; nranks <= 4; nranks++)
        run_rounds(nranks, &half_residuals, 5, (struct world_options){.chunk_log2 = 14});
}

static void test_sparse_and_sign(void)
{
    for (uint32_t nranks = 2; nranks <= 5; nranks++)
        run_rounds(nranks, &sparse_and_sign, 4,
                   (struct world_options){.chunk_log2 = 12, .noise = nranks % 2});
}

static void test_many_buckets(void)
{
    for (uint32_t nranks = 1; nranks <= 5; nranks++)
        run_rounds(nranks, &buckets, 4, (struct world_options){.chunk_log2 = 12});
}

static void test_more_chunks_than_slots(void)
{
    for (uint32_t nranks = 2; nranks <= 3; nranks++)
        run_rounds(nranks, &large, 2, (struct world_options){.chunk_log2 = 12});
}

static void test_nine_ranks(void)
{
    run_rounds(9, &mixed_layout, 2, (struct world_options){.chunk_log2 = 14});
    run_rounds(9, &buckets, 2, (struct world_options){.chunk_log2 = 12, .noise = true});
}

/* Chunk sizes, delays and scheduling change from run to run; the model knows none of them. */
static void test_timing_never_shows(void)
{
    for (uint32_t nranks = 2; nranks <= 4; nranks++) {
        run_rounds(nranks, &mixed_layout, 3,
                   (struct world_options){.chunk_log2 = 12, .delay_ns = 1000000});
        run_rounds(nranks, &mixed_layout, 3,
                   (struct world_options){.chunk_log2 = 16, .noise = true});
        run_rounds(nranks, &buckets, 3,
                   (struct world_options){.chunk_log2 = 20, .noise = true, .delay_ns = 300000});
        run_rounds(nranks, &large, 2, (struct world_options){.chunk_log2 = 18, .noise = true});
    }
}

static void test_measured_chunk_size(void)
{
    for (uint32_t nranks = 2; nranks <= 3; nranks++) {
        run_rounds(nranks, &large, 6, (struct world_options){.chunk_auto = true});
        run_rounds(nranks, &buckets, 6,
                   (struct world_options){.chunk_auto = true, .delay_ns = 2000000});
    }
}

/* A round without elements announces no chunk size, so nobody may change it after that. (The size
 * tuned for 768 KiB is at most 2^19: such a bucket has two chunks then, and one at the size of the
 * first rounds.) */
static void test_round_without_chunks(void)
{
    static const struct layout layout = {
        .nparams = 2,
        .params = {196608, 0},
        .nbuckets = 2,
        .buckets = {{.dtype = AGC_DTYPE_F32,
                     .npieces = 1,
                     .pieces = {{0, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8, true}}},
                    {.dtype = AGC_DTYPE_F32,
                     .npieces = 1,
                     .pieces = {{1, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8, true}}}},
    };
    struct world *w = world_create(2, &layout, &(struct world_options){.chunk_auto = true});
    struct data *d = data_create(2, &layout);
    fill_gradients(d);
    for (uint32_t round = 0; round < 8; round++) {
        uint32_t b = round % 3 == 2;
        for (uint32_t r = 0; r < 2; r++)
            submit(&w->ranks[r], b, round, d->exchanged[b][r], &d->tickets[b][r]);
        for (uint32_t r = 0; r < 2; r++)
            wait_ok(w, &d->tickets[b][r]);
    }
    struct agc_engine_stats stats[2];
    for (uint32_t r = 0; r < 2; r++)
        agc_engine_stats(w->ranks[r].engine, &stats[r]);
    CHECK_EQ(stats[0].chunk_log2, stats[1].chunk_log2);
    CHECK(stats[0].chunk_log2 <= 19); /* the test reaches what it is about */
    data_destroy(d);
    world_destroy(w);
}

/* Rounds submitted back to back: a chunk size that is announced in one round holds from the next
 * on, on all ranks, though the next is already there when it arrives. (Sizes as above.) */
static void test_rounds_back_to_back(void)
{
    enum { NROUNDS = 8 };
    static const struct layout layout = {
        .name = "back to back",
        .nparams = 1,
        .params = {196608},
        .nbuckets = 1,
        .buckets = {{.dtype = AGC_DTYPE_F32,
                     .npieces = 1,
                     .pieces = {{0, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8, true}}}},
    };
    struct data *d[NROUNDS];
    struct world *w = world_create(2, &layout, &(struct world_options){.chunk_auto = true});
    struct model *m = model_create(2, &layout, 0);
    for (uint32_t round = 0; round < NROUNDS; round++) {
        d[round] = data_create(2, &layout);
        fill_gradients(d[round]);
        for (uint32_t r = 0; r < 2; r++)
            memcpy(d[round]->exchanged[0][r], d[round]->gradients[0][r], bucket_nbytes(&layout, 0));
    }
    for (uint32_t round = 0; round < NROUNDS; round++)
        for (uint32_t r = 0; r < 2; r++)
            submit(&w->ranks[r], 0, round, d[round]->exchanged[0][r], &d[round]->tickets[0][r]);
    for (uint32_t round = 0; round < NROUNDS; round++) {
        for (uint32_t r = 0; r < 2; r++)
            wait_ok(w, &d[round]->tickets[0][r]);
        compare_round(d[round], m, round, NULL);
        data_destroy(d[round]);
    }
    struct agc_engine_stats stats;
    agc_engine_stats(w->ranks[1].engine, &stats);
    CHECK(stats.chunk_log2 <= 19); /* the size did change */
    model_destroy(m);
    world_destroy(w);
}

/* raw: the sum of x * (1/n) in rank order, to the bit; at 2 and 4 ranks, where x / n is exact, the
 * rounded sum itself. */
static void test_raw_is_the_mean(void)
{
    for (uint32_t nranks = 2; nranks <= 5; nranks++) {
        struct world *w = world_create(nranks, &all_raw, &(struct world_options){.chunk_log2 = 12});
        struct data *d = data_create(nranks, &all_raw);
        fill_gradients(d);
        exchange_round(w, d, 0);
        for (uint32_t b = 0; b < all_raw.nbuckets; b++) {
            uint32_t dtype = all_raw.buckets[b].dtype;
            for (uint64_t i = 0; i < bucket_nelems(&all_raw, b); i++) {
                float sum = (float)element(dtype, d->gradients[b][0], i) * (1.0f / (float)nranks);
                double sum_f64 = element(dtype, d->gradients[b][0], i) * (1.0 / nranks);
                for (uint32_t r = 1; r < nranks; r++) {
                    sum += (float)element(dtype, d->gradients[b][r], i) * (1.0f / (float)nranks);
                    sum_f64 += element(dtype, d->gradients[b][r], i) * (1.0 / nranks);
                }
                for (uint32_t r = 0; r < nranks; r++)
                    CHECK(element(dtype, d->exchanged[b][r], i) ==
                          (dtype == AGC_DTYPE_F64 ? sum_f64 : (double)sum));
            }
        }
        data_destroy(d);
        world_destroy(w);
    }
}

/* 3e38 on every rank has a mean of 3e38. */
static void test_huge_gradients(void)
{
    for (uint32_t nranks = 2; nranks <= 3; nranks++) {
        struct world *w =
            world_create(nranks, &mixed_layout, &(struct world_options){.chunk_log2 = 12});
        struct data *d = data_create(nranks, &mixed_layout);
        uint64_t nelems = bucket_nelems(&mixed_layout, 0);
        for (uint32_t r = 0; r < nranks; r++)
            for (uint64_t i = 0; i < nelems; i++)
                put(AGC_DTYPE_F32, d->gradients[0][r], i, i % 2 ? 3e38f : -3e38f);
        exchange_round(w, d, 0);
        uint64_t at = 0;
        for (uint32_t i = 0; i < mixed_layout.buckets[0].npieces; i++) {
            uint64_t end = at + mixed_layout.params[mixed_layout.buckets[0].pieces[i].param];
            for (; at < end; at++) {
                double x = element(AGC_DTYPE_F32, d->exchanged[0][0], at);
                if (mixed_layout.buckets[0].pieces[i].lane == 2)
                    CHECK(isinf(x)); /* fp16: documented */
                else                 /* within a quantum, 3e38 / 254, and roundings */
                    CHECK_LE(fabs(fabs(x) - 3e38), 3e38 / 250);
            }
        }
        data_destroy(d);
        world_destroy(w);
    }
}

/* Means of stochastically rounded gradients are unbiased, though they are rounded twice, and the
 * errors of the ranks average out: every sender draws its own numbers. Per element, the mean error
 * over the rounds is some z standard errors; z^2 averages to 1 over the elements, within 1.3 % per
 * standard deviation. (Ranks that share their numbers have 2.9.) The data is the same in every run.
 */
static void test_stochastic_means_are_unbiased(void)
{
    enum { NRANKS = 4, NROUNDS = 300, N = 12288 };
    static const struct layout layout = {
        .name = "stochastic",
        .nparams = 1,
        .params = {N},
        .nbuckets = 1,
        .buckets = {{.dtype = AGC_DTYPE_F32,
                     .npieces = 1,
                     .pieces = {{0, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8_STOCHASTIC, false}}}},
    };
    static double sum[N], sum_of_squares[N];
    random_seed(1);
    struct world *w = world_create(NRANKS, &layout, &(struct world_options){.seed = 1});
    struct data *d = data_create(NRANKS, &layout);
    for (uint32_t r = 0; r < NRANKS; r++)
        for (uint64_t i = 0; i < N; i++)
            put(AGC_DTYPE_F32, d->gradients[0][r], i, random_gauss() * (1.0f + (float)r));
    memset(sum, 0, sizeof sum);
    memset(sum_of_squares, 0, sizeof sum_of_squares);
    for (uint32_t round = 0; round < NROUNDS; round++) {
        exchange_round(w, d, round);
        for (uint64_t i = 0; i < N; i++) {
            double error = element(AGC_DTYPE_F32, d->exchanged[0][0], i);
            for (uint32_t r = 0; r < NRANKS; r++)
                error -= element(AGC_DTYPE_F32, d->gradients[0][r], i) / NRANKS;
            sum[i] += error;
            sum_of_squares[i] += error * error;
        }
    }
    double chi2 = 0.0;
    for (uint64_t i = 0; i < N; i++)
        chi2 += sum[i] * sum[i] / (sum_of_squares[i] * N);
    CHECK_LE(chi2, 1.0 + 6 * 0.013);
    data_destroy(d);
    world_destroy(w);
}

/* ---- parameters, buckets, statistics ----------------------------------------------------- */

static void test_added_parameters(void)
{
    struct layout l = mixed_layout;
    struct world *w = world_create(2, &mixed_layout, &(struct world_options){.chunk_log2 = 12});
    for (uint32_t i = 0; i < 15; i++) {
        l.params[l.nparams++] = 100 + i;
        for (uint32_t r = 0; r < 2; r++) {
            uint32_t param = 0;
            CHECK_OK(agc_engine_add_param(w->ranks[r].engine, 100 + i, &param));
            CHECK_EQ(param, l.nparams - 1);
        }
    }
    l.nbuckets = 1;
    l.buckets[0] = (struct bucket_layout){.dtype = AGC_DTYPE_F32,
                                          .npieces = 3,
                                          .pieces = {{20, 0}, {0, 0}, {9, 0}},
                                          .nlanes = 1,
                                          .lanes = {{INT8, true}}};
    for (uint32_t r = 0; r < 2; r++)
        agc_engine_reset_buckets(w->ranks[r].engine);
    world_define(w, &l);
    struct model *m = model_create(2, &l, 0);
    struct data *d = data_create(2, &l);
    for (uint32_t round = 0; round < 2; round++) {
        fill_gradients(d);
        exchange_round(w, d, round);
        compare_round(d, m, round, NULL);
    }
    compare_residuals(w, m);
    data_destroy(d);
    model_destroy(m);
    world_destroy(w);
}

/* Buckets of nothing: no parameters, no lanes, no elements. They are done like any other, in their
 * turn. */
static void test_empty_buckets(void)
{
    static const struct layout layout = {
        .nparams = 2,
        .params = {0, 1},
        .nbuckets = 4,
        .buckets = {{.dtype = AGC_DTYPE_F32},
                    {.dtype = AGC_DTYPE_F32, .nlanes = 2, .lanes = {{INT8, true}, {RAW, false}}},
                    {.dtype = AGC_DTYPE_F32,
                     .npieces = 1,
                     .pieces = {{0, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8, true}}},
                    {.dtype = AGC_DTYPE_F32,
                     .npieces = 1,
                     .pieces = {{1, 0}},
                     .nlanes = 1,
                     .lanes = {{INT8, true}}}},
    };
    for (uint32_t nranks = 1; nranks <= 3; nranks++)
        run_rounds(nranks, &layout, 3, (struct world_options){.chunk_log2 = 12});
}

static void test_definitions_are_checked(void)
{
    struct world *w = world_create(2, &mixed_layout, &(struct world_options){.chunk_log2 = 12});
    struct agc_engine *e = w->ranks[0].engine;
    struct agc_piece_desc piece = {0, 0};
    struct agc_lane_desc lane = {.spec = INT8, .feedback = true};
    const struct agc_lane_desc odd = {.spec = {.codec = 5, .block_nelems = 33}},
                               unknown = {.spec = {.codec = 99}};
    struct ticket ticket;
    CHECK_STATUS(agc_engine_define_bucket(e, 0, AGC_DTYPE_F32, &piece, 1, &lane, 1, false),
                 AGC_ERR_STATE);
    CHECK_STATUS(agc_engine_define_bucket(e, 65536, AGC_DTYPE_F32, &piece, 1, &lane, 1, false),
                 AGC_ERR_SPEC);
    CHECK_STATUS(agc_engine_define_bucket(e, 1, AGC_DTYPE_F32, &piece, 1, &lane, 256, false),
                 AGC_ERR_SPEC);
    CHECK_STATUS(agc_engine_define_bucket(e, 1, AGC_DTYPE_F32, &piece, 1, &odd, 1, false),
                 AGC_ERR_SPEC);
    CHECK_STATUS(agc_engine_define_bucket(e, 1, AGC_DTYPE_F32, &piece, 1, &unknown, 1, false),
                 AGC_ERR_CODEC);
    CHECK_STATUS(agc_engine_define_bucket(e, 1, 77, &piece, 1, &lane, 1, false), AGC_ERR_DTYPE);
    piece.lane = 1;
    CHECK_STATUS(agc_engine_define_bucket(e, 1, AGC_DTYPE_F32, &piece, 1, &lane, 1, false),
                 AGC_ERR_SPEC);
    piece = (struct agc_piece_desc){mixed_layout.nparams, 0};
    CHECK_STATUS(agc_engine_define_bucket(e, 1, AGC_DTYPE_F32, &piece, 1, &lane, 1, false),
                 AGC_ERR_SPEC);
    struct agc_submission s = submission(&w->ranks[0], 0, 0, NULL, &ticket);
    s.bucket = 1;
    CHECK_STATUS(agc_engine_submit(e, &s), AGC_ERR_STATE);
    s.bucket = 70000;
    CHECK_STATUS(agc_engine_submit(e, &s), AGC_ERR_STATE);
    s.bucket = 0;
    s.nelems++;
    CHECK_STATUS(agc_engine_submit(e, &s), AGC_ERR_NELEMS);
    s.nelems--;
    s.dtype = s.dtype == AGC_DTYPE_F16 ? AGC_DTYPE_BF16 : AGC_DTYPE_F16;
    CHECK_STATUS(agc_engine_submit(e, &s), AGC_ERR_DTYPE);
    piece = (struct agc_piece_desc){0, 0};
    CHECK_OK(agc_engine_define_bucket(e, 65535, AGC_DTYPE_F32, &piece, 1, &lane, 1, false));
    world_destroy(w);
}

static void test_statistics(void)
{
    enum { NROUNDS = 3, CHUNK_LOG2 = 14 };
    for (uint32_t nranks = 1; nranks <= 4; nranks++) {
        struct world *w =
            world_create(nranks, &buckets, &(struct world_options){.chunk_log2 = CHUNK_LOG2});
        struct data *d = data_create(nranks, &buckets);
        for (uint32_t round = 0; round < NROUNDS; round++) {
            fill_gradients(d);
            exchange_round(w, d, round);
        }
        for (uint32_t r = 0; r < nranks; r++) {
            struct agc_engine_stats total, part;
            uint64_t dense = 0, wire = 0;
            agc_engine_stats(w->ranks[r].engine, &total);
            for (uint32_t b = 0; b < buckets.nbuckets; b++) {
                const struct bucket_layout *l = &buckets.buckets[b];
                uint64_t bucket_wire = 0;
                for (uint32_t lane = 0; lane < l->nlanes; lane++) {
                    uint64_t nelems = 0;
                    struct agc_spec spec;
                    for (uint32_t i = 0; i < l->npieces; i++)
                        nelems +=
                            l->pieces[i].lane == lane ? buckets.params[l->pieces[i].param] : 0;
                    CHECK_OK(agc_spec_resolve(&l->lanes[lane].spec, &spec));
                    struct agc_lane_plan plan = agc_plan_lane(&spec, l->dtype, nelems, nranks);
                    bucket_wire += agc_plan_wire_nbytes(&plan, r, CHUNK_LOG2);
                }
                CHECK(agc_engine_bucket_stats(w->ranks[r].engine, b, &part));
                CHECK_EQ(part.nbuckets, NROUNDS);
                CHECK_EQ(part.wire_nbytes, NROUNDS * bucket_wire);
                CHECK_EQ(part.dense_nbytes,
                         NROUNDS * (bucket_nbytes(&buckets, b) * 2 * (nranks - 1) / nranks));
                dense += part.dense_nbytes;
                wire += part.wire_nbytes;
            }
            CHECK_EQ(total.nrounds, NROUNDS);
            CHECK_EQ(total.nbuckets, NROUNDS * buckets.nbuckets);
            CHECK_EQ(total.wire_nbytes, wire);
            CHECK_EQ(total.dense_nbytes, dense);
            CHECK_EQ(total.chunk_log2, CHUNK_LOG2);
            CHECK(!agc_engine_bucket_stats(w->ranks[r].engine, buckets.nbuckets, &part));
            CHECK(!agc_engine_bucket_stats(w->ranks[r].engine, 1000000, &part));
        }
        data_destroy(d);
        world_destroy(w);
    }
}

/* A header counts to 255: more forward passes than that are no mismatch. */
static void test_many_forward_passes(void)
{
    struct world *w = world_create(2, &all_raw, &(struct world_options){.chunk_log2 = 12});
    struct data *d = data_create(2, &all_raw);
    fill_gradients(d);
    for (uint32_t nforwards = 250; nforwards < 600; nforwards += 7) {
        for (uint32_t r = 0; r < 2; r++) {
            struct agc_submission s =
                submission(&w->ranks[r], 1, nforwards, d->exchanged[1][r], &d->tickets[1][r]);
            s.nforwards = nforwards;
            CHECK_OK(agc_engine_submit(w->ranks[r].engine, &s));
        }
        for (uint32_t r = 0; r < 2; r++)
            wait_ok(w, &d->tickets[1][r]);
    }
    data_destroy(d);
    world_destroy(w);
}

/* More submissions than the queue holds: submit waits for room, and all come back in order. */
static void test_many_submissions_at_once(void)
{
    enum { NSUBMISSIONS = 300, NELEMS = 64 };
    static const struct layout layout = {
        .nparams = 1,
        .params = {NELEMS},
        .nbuckets = 1,
        .buckets = {{.dtype = AGC_DTYPE_F32,
                     .npieces = 1,
                     .pieces = {{0, 0}},
                     .nlanes = 1,
                     .lanes = {{RAW, false}}}},
    };
    static float x[NSUBMISSIONS][2][NELEMS];
    static struct ticket tickets[NSUBMISSIONS][2];
    struct world *w = world_create(2, &layout, &(struct world_options){.chunk_log2 = 12});
    for (uint32_t i = 0; i < NSUBMISSIONS; i++) {
        for (uint32_t r = 0; r < 2; r++) {
            for (int j = 0; j < NELEMS; j++)
                x[i][r][j] = (float)(i + r);
            submit(&w->ranks[r], 0, i / 7, x[i][r], &tickets[i][r]);
        }
    }
    wait_ok(w, &tickets[NSUBMISSIONS - 1][0]);
    for (uint32_t i = 0; i < NSUBMISSIONS; i++) {
        CHECK(tickets[i][0].done);
        wait_ok(w, &tickets[i][1]);
        for (uint32_t r = 0; r < 2; r++)
            for (int j = 0; j < NELEMS; j++)
                CHECK(x[i][r][j] == (float)i + 0.5f);
    }
    world_destroy(w);
}

/* Many rounds of small buckets, each rank with a thread of its own that submits when it is ready,
 * as training does. */
static const struct layout tiny = {
    .name = "tiny",
    .nparams = 5,
    .params = {2000, 10, 600, 7000, 33},
    .nbuckets = 3,
    .buckets = {{.dtype = AGC_DTYPE_F32,
                 .npieces = 2,
                 .pieces = {{0, 0}, {1, 1}},
                 .nlanes = 2,
                 .lanes = {{INT8, true}, {RAW, false}}},
                {.dtype = AGC_DTYPE_BF16,
                 .npieces = 1,
                 .pieces = {{2, 0}},
                 .nlanes = 1,
                 .lanes = {{INT8, true}}},
                {.dtype = AGC_DTYPE_F32,
                 .npieces = 2,
                 .pieces = {{3, 0}, {4, 0}},
                 .nlanes = 1,
                 .lanes = {{INT8_STOCHASTIC, true}}}},
};
#define TINY_NROUNDS 100
static struct data *tiny_data[TINY_NROUNDS];

static void *train(void *arg)
{
    struct rank *r = (struct rank *)arg;
    uint32_t nap = r->rank + 1;
    for (uint32_t round = 0; round < TINY_NROUNDS; round++) {
        struct data *d = tiny_data[round];
        for (uint32_t b = 0; b < tiny.nbuckets; b++) {
            nap = nap * 1664525u + 1013904223u;
            if (nap >> 28 == 0)
                nanosleep(&(struct timespec){0, 100000}, NULL);
            memcpy(d->exchanged[b][r->rank], d->gradients[b][r->rank], bucket_nbytes(&tiny, b));
            const struct agc_submission s =
                submission(r, b, round, d->exchanged[b][r->rank], &d->tickets[b][r->rank]);
            if (agc_engine_submit(r->engine, &s) != AGC_OK)
                return NULL;
        }
        for (uint32_t b = 0; b < tiny.nbuckets; b++)
            wait_ticket(r->world, &d->tickets[b][r->rank]);
        struct agc_engine_stats stats; /* as a logger would, at any time */
        agc_engine_stats(r->engine, &stats);
        agc_engine_bucket_stats(r->engine, round % 3, &stats);
    }
    return NULL;
}

static void test_many_rounds(void)
{
    for (uint32_t nranks = 2; nranks <= 5; nranks += 3) {
        pthread_t threads[NRANKS_MAX];
        struct world *w =
            world_create(nranks, &tiny, &(struct world_options){.chunk_auto = true, .noise = true});
        struct model *m = model_create(nranks, &tiny, 0);
        for (uint32_t round = 0; round < TINY_NROUNDS; round++) {
            tiny_data[round] = data_create(nranks, &tiny);
            fill_gradients(tiny_data[round]);
        }
        for (uint32_t r = 0; r < nranks; r++)
            CHECK_EQ(pthread_create(&threads[r], NULL, train, &w->ranks[r]), 0);
        for (uint32_t r = 0; r < nranks; r++)
            pthread_join(threads[r], NULL);
        for (uint32_t round = 0; round < TINY_NROUNDS; round++) {
            for (uint32_t b = 0; b < tiny.nbuckets; b++)
                for (uint32_t r = 0; r < nranks; r++)
                    wait_ok(w, &tiny_data[round]->tickets[b][r]);
            compare_round(tiny_data[round], m, round, NULL);
            data_destroy(tiny_data[round]);
        }
        compare_residuals(w, m);
        model_destroy(m);
        world_destroy(w);
    }
}

/* ---- memory ------------------------------------------------------------------------------ */

/* After two rounds nothing in the process allocates but the loopback's own operations. */
static void test_steady_state_allocates_nothing(void)
{
    struct world *w = world_create(3, &buckets, &(struct world_options){.chunk_log2 = 12});
    struct data *d = data_create(3, &buckets);
    uint64_t engines = 0, process = 0, loopback = 0;
    fill_gradients(d);
    for (uint32_t round = 0; round < 6; round++) {
        if (round == 2) {
            engines = engine_memory.nallocs;
            process = process_nallocs();
            loopback = agc_loopback_nallocs(w->net);
        }
        exchange_round(w, d, round);
    }
    CHECK_EQ(engine_memory.nallocs, engines);
    CHECK(agc_loopback_nallocs(w->net) > loopback); /* the counters count */
    CHECK_EQ(process_nallocs() - process, agc_loopback_nallocs(w->net) - loopback);
    data_destroy(d);
    world_destroy(w);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(test_mixed_lanes),
        TEST(test_residuals_in_half_the_memory),
        TEST(test_sparse_and_sign),
        TEST(test_many_buckets),
        TEST(test_more_chunks_than_slots),
        TEST(test_nine_ranks),
        TEST(test_timing_never_shows),
        TEST(test_measured_chunk_size),
        TEST(test_round_without_chunks),
        TEST(test_rounds_back_to_back),
        TEST(test_raw_is_the_mean),
        TEST(test_huge_gradients),
        TEST(test_stochastic_means_are_unbiased),
        TEST(test_added_parameters),
        TEST(test_empty_buckets),
        TEST(test_definitions_are_checked),
        TEST(test_statistics),
        TEST(test_many_forward_passes),
        TEST(test_many_submissions_at_once),
        TEST(test_many_rounds),
        TEST(test_steady_state_allocates_nothing),
    };
    return test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
