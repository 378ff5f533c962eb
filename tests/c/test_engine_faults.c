/* test_engine_faults.c: what can go wrong: dead ranks, silent ranks, ranks that do something else,
 * no memory, no threads. Every case must end, on every rank, with a status that says what happened
 * and a text that names the rank.
 *
 * Where a failure must be noticed and not merely timed out, the timeout is longer than the
 * watchdog: the test then proves it.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/header.h"
#include "engine_fixture.h"

#define RAW {.codec = 1}
#define INT8 {.codec = 5}

#define NELEMS 40000 /* beyond two ranks: sharded */
#define NBIAS 100    /* direct */

static const struct layout small = {
    .name = "small",
    .nparams = 3,
    .params = {NELEMS, NBIAS, 3000},
    .nbuckets = 2,
    .buckets = {{.dtype = AGC_DTYPE_F32,
                 .npieces = 2,
                 .pieces = {{0, 0}, {1, 1}},
                 .nlanes = 2,
                 .lanes = {{INT8, true}, {RAW, false}}},
                {.dtype = AGC_DTYPE_F32,
                 .npieces = 1,
                 .pieces = {{2, 0}},
                 .nlanes = 1,
                 .lanes = {{INT8, true}}}},
};

/* Buckets of all ranks, and their tickets. */
static float x[NRANKS_MAX][2][NELEMS + NBIAS];
static struct ticket tickets[NRANKS_MAX][2];

static void fill(void)
{
    for (uint32_t r = 0; r < NRANKS_MAX; r++)
        for (int b = 0; b < 2; b++)
            random_fill(x[r][b], NELEMS + NBIAS, VALUES_GAUSS);
}

static void submit_round(struct world *w, uint32_t rank, uint32_t round)
{
    for (uint32_t b = 0; b < 2; b++)
        submit(&w->ranks[rank], b, round, x[rank][b], &tickets[rank][b]);
}

static void nap(double seconds)
{
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

static char scenario[160];

static void describe(char *dst, size_t dst_cap_nbytes)
{
    snprintf(dst, dst_cap_nbytes, "%s", scenario);
}

/* ---- dead ranks -------------------------------------------------------------------------- */

/* A dead rank is named by all survivors, in this round or, where they had all they needed, in the
 * next. */
static void check_survivors(struct world *w, uint32_t dead, uint32_t round)
{
    char name[32];
    snprintf(name, sizeof name, "rank %u ", dead);
    for (uint32_t r = 0; r < w->nranks; r++) {
        for (uint32_t b = 0; b < 2; b++) {
            wait_ticket(w, &tickets[r][b]);
            if (r != dead && tickets[r][b].failed)
                wait_failure(w, &tickets[r][b], AGC_ERR_PEER, dead, name);
        }
    }
    for (uint32_t r = 0; r < w->nranks; r++)
        if (r != dead)
            submit_round(w, r, round + 1);
    for (uint32_t r = 0; r < w->nranks; r++)
        for (uint32_t b = 0; b < 2; b++)
            if (r != dead)
                wait_failure(w, &tickets[r][b], AGC_ERR_PEER, dead, name);
}

static void test_rank_dies_before_a_round(void)
{
    for (uint32_t nranks = 2; nranks <= 5; nranks++) {
        uint32_t dead = nranks - 1;
        struct world *w = world_create(nranks, &small, &(struct world_options){.chunk_log2 = 12});
        fill();
        for (uint32_t r = 0; r < nranks; r++)
            submit_round(w, r, 0);
        for (uint32_t r = 0; r < nranks; r++)
            for (uint32_t b = 0; b < 2; b++)
                wait_ok(w, &tickets[r][b]);
        world_kill(w, dead);
        for (uint32_t r = 0; r < nranks; r++)
            submit_round(w, r, 1);
        check_survivors(w, dead, 1);
        world_destroy(w);
    }
}

/* In front of every single call of the transport that it makes in two rounds. */
static void test_rank_dies_anywhere(void)
{
    test_describe = describe;
    for (uint32_t nranks = 2; nranks <= 5; nranks += nranks == 2 ? 1 : 2) {
        uint64_t ncalls = UINT64_MAX;
        for (uint64_t at = 1; at <= ncalls; at += nranks == 5 ? 3 : 1) {
            uint32_t dead = (uint32_t)(at % nranks);
            struct world *w =
                world_create(nranks, &small, &(struct world_options){.chunk_log2 = 12});
            snprintf(scenario, sizeof scenario, "%u ranks, rank %u dies at call %llu", nranks, dead,
                     (unsigned long long)at);
            w->ranks[dead].kill_at_call = at;
            fill();
            bool died = false;
            for (uint32_t round = 0; round < 2 && !died; round++) {
                for (uint32_t r = 0; r < nranks; r++)
                    submit_round(w, r, round);
                for (uint32_t r = 0; r < nranks; r++)
                    for (uint32_t b = 0; b < 2; b++)
                        wait_ticket(w, &tickets[r][b]);
                died = w->ranks[dead].ncalls >= at;
                if (died)
                    check_survivors(w, dead, round);
            }
            if (!died && ncalls == UINT64_MAX)
                ncalls = at + nranks; /* every rank has had its last call by now, or soon will */
            world_destroy(w);
        }
    }
}

/* Survivors name the rank by the name it has outside the group. */
static void test_names_of_ranks(void)
{
    static const uint32_t names[] = {10, 20, 30};
    struct world *w = world_create(3, &small, &(struct world_options){.rank_names = names});
    world_kill(w, 2);
    for (uint32_t r = 0; r < 2; r++)
        submit_round(w, r, 7);
    for (uint32_t r = 0; r < 2; r++)
        wait_failure(w, &tickets[r][0], AGC_ERR_PEER, 2, "rank 30 ");
    world_destroy(w);
}

/* ---- silent ranks ------------------------------------------------------------------------ */

static void test_silent_rank(void)
{
    for (uint32_t nranks = 2; nranks <= 3; nranks++) {
        struct world *w =
            world_create(nranks, &small, &(struct world_options){.timeout_s = 2.0, .late_s = 0.5});
        for (uint32_t r = 0; r < nranks; r++)
            if (r != 1)
                submit_round(w, r, 3);
        for (uint32_t r = 0; r < nranks; r++)
            for (uint32_t b = 0; b < 2 && r != 1; b++)
                wait_failure(w, &tickets[r][b], AGC_ERR_TIMEOUT, 1, "rank 1 ");
        /* When it wakes up at last, it may find all that it needs for this round, but then it is
         * told. */
        for (uint32_t round = 3; round < 5; round++) {
            submit_round(w, 1, round);
            wait_ticket(w, &tickets[1][0]);
        }
        wait_failure(w, &tickets[1][0], AGC_ERR_TIMEOUT, 1, "it blames this rank");
        world_destroy(w);
    }
}

/* Told once, with its name; and nobody is called late after the failure, when ranks only linger. */
static void test_late_rank(void)
{
    struct world *w = world_create(3, &small, &(struct world_options){.late_s = 0.05});
    fill();
    for (uint32_t round = 0; round < 2; round++) {
        submit_round(w, 0, round);
        submit_round(w, 2, round);
        nap(0.3);
        pthread_mutex_lock(&w->mutex);
        while (w->ranks[0].nlate == 0 || w->ranks[2].nlate == 0)
            pthread_cond_wait(&w->changed, &w->mutex);
        pthread_mutex_unlock(&w->mutex);
        submit_round(w, 1, round);
        for (uint32_t r = 0; r < 3; r++)
            for (uint32_t b = 0; b < 2; b++)
                wait_ok(w, &tickets[r][b]);
    }
    CHECK_EQ(w->ranks[0].late_rank, 1);
    CHECK_EQ(w->ranks[2].late_rank, 1);
    /* Rank 0 may have had to wait for rank 2 as well on a busy machine, but for none of them twice.
     */
    CHECK(w->ranks[0].nlate <= 2 && w->ranks[2].nlate <= 2);
    CHECK_EQ(w->ranks[0].late_round, 0);
    world_destroy(w);
}

static void test_nobody_is_late_after_a_failure(void)
{
    /* Ranks 0 and 1 time out over rank 2 at the same time. The news that each has for the other is
     * not picked up, for both are through. */
    struct world *w = world_create(
        3, &small, &(struct world_options){.timeout_s = 1.0, .late_s = 0.25, .linger_s = 1.0});
    for (uint32_t r = 0; r < 2; r++)
        submit_round(w, r, 5);
    for (uint32_t r = 0; r < 2; r++)
        wait_failure(w, &tickets[r][0], AGC_ERR_TIMEOUT, 2, "rank 2 ");
    nap(1.5);
    pthread_mutex_lock(&w->mutex);
    for (uint32_t r = 0; r < 2; r++) {
        CHECK_EQ(w->ranks[r].nlate, 1);
        CHECK_EQ(w->ranks[r].late_rank, 2);
        CHECK_EQ(w->ranks[r].late_round, 5);
    }
    pthread_mutex_unlock(&w->mutex);
    world_destroy(w);
}

/* A rank that gives up and closes its engine at once stays until the others have what it sent: they
 * would blame it for being gone, and not the silent rank. */
static void *destroy_engine(void *arg)
{
    agc_engine_destroy((struct agc_engine *)arg);
    return NULL;
}

static void test_failed_rank_leaves_no_riddle(void)
{
    struct world *w =
        world_create(3, &small, &(struct world_options){.timeout_s = 3.0, .linger_s = 3.0});
    pthread_t thread;
    submit_round(w, 0, 0);
    wait_ticket(w, &tickets[0][0]);
    CHECK_EQ(tickets[0][0].failure.status, AGC_ERR_TIMEOUT);
    uint32_t culprit = tickets[0][0].failure.rank, other = culprit == 1 ? 2 : 1;
    CHECK_EQ(pthread_create(&thread, NULL, destroy_engine, w->ranks[0].engine), 0);
    nap(0.1);
    submit_round(w, other, 0);
    wait_failure(w, &tickets[other][0], AGC_ERR_TIMEOUT, culprit, NULL);
    pthread_join(thread, NULL);
    w->ranks[0].engine = NULL;
    world_destroy(w);
}

/* ---- ranks that do something else -------------------------------------------------------- */

enum deviation {
    OTHER_ROUND,
    OTHER_STREAM,
    OTHER_NELEMS,
    OTHER_NFORWARDS,
    OTHER_BLOCKS,
    OTHER_CODEC,
    OTHER_SEED,
    OTHER_BUCKET,
    OTHER_CHUNKS,
    NDEVIATIONS,
};
static const struct {
    const char *name;
    const char *text; /* part of what another rank says */
} deviations[NDEVIATIONS] = {
    [OTHER_ROUND] = {"round", "rank 1 sent round 8 bucket 0, expected round 7 bucket 0"},
    [OTHER_STREAM] = {"stream",
                      "rank 1 sent a frame of another model or handle (stream 1234567890abcdee"},
    [OTHER_NELEMS] = {"nelems", "different models or settings"},
    [OTHER_NFORWARDS] = {"nforwards", "rank 1 sent round 7 after 2 forward passes, expected 1"},
    [OTHER_BLOCKS] = {"blocks", "different models or settings"},
    [OTHER_CODEC] = {"codec", "codec fp16"},
    [OTHER_SEED] = {"seed", "different models or settings"},
    [OTHER_BUCKET] = {"bucket", "rank 1 sent round 7 bucket 1, expected round 7 bucket 0"},
    [OTHER_CHUNKS] = {"chunks", "different models or settings"},
};
static enum deviation deviation;

static void deviate_config(uint32_t rank, struct agc_engine_config *config)
{
    if (rank != 1)
        return;
    if (deviation == OTHER_STREAM)
        config->stream ^= 1;
    if (deviation == OTHER_SEED)
        config->seed ^= 1;
    if (deviation == OTHER_CHUNKS)
        config->chunk_log2 = 22;
}

/* Three stripes of five ranks' tiles: with chunks of the least size three chunks. */
#define NELEMS_LARGE (3 * 65536 * 5)
static float large_x[NRANKS_MAX][NELEMS_LARGE + NBIAS];

static void test_rank_does_something_else(void)
{
    test_describe = describe;
    for (int large = 0; large < 2; large++) {
        for (int i = 0; i < NDEVIATIONS; i++) {
            for (uint32_t nranks = 2; nranks <= 5; nranks += nranks == 2 ? 1 : 2) {
                deviation = (enum deviation)i;
                if (deviation == OTHER_CHUNKS && !large)
                    continue; /* a single chunk either way */
                snprintf(scenario, sizeof scenario, "%u ranks, rank 1 has another %s, %s bucket",
                         nranks, deviations[i].name, large ? "large" : "small");
                struct layout l = small;
                l.params[0] = large ? NELEMS_LARGE : 500;
                struct layout deviant = l;
                if (deviation == OTHER_NELEMS)
                    deviant.buckets[0].pieces[1].lane = 0;
                if (deviation == OTHER_BLOCKS)
                    deviant.buckets[0].lanes[0].spec.block_nelems = 128;
                if (deviation == OTHER_CODEC)
                    deviant.buckets[0].lanes[0].spec = (struct agc_spec){.codec = 2};
                struct world *w = world_create(
                    nranks, &l,
                    &(struct world_options){.chunk_log2 = 12, .change_config = deviate_config});
                agc_engine_reset_buckets(w->ranks[1].engine);
                for (uint32_t b = 0; b < 2; b++) {
                    const struct bucket_layout *bucket = &deviant.buckets[b];
                    CHECK_OK(agc_engine_define_bucket(w->ranks[1].engine, b, bucket->dtype,
                                                      bucket->pieces, bucket->npieces,
                                                      bucket->lanes, bucket->nlanes, false));
                }
                for (uint32_t r = 0; r < nranks; r++) {
                    const uint32_t other = r == 1;
                    struct agc_submission s = submission(
                        &w->ranks[r], deviation == OTHER_BUCKET ? other : 0,
                        deviation == OTHER_ROUND ? 7 + other : 7, large_x[r], &tickets[r][0]);
                    s.nforwards = deviation == OTHER_NFORWARDS ? 1 + other : 1;
                    CHECK_OK(agc_engine_submit(w->ranks[r].engine, &s));
                }
                bool text_seen = false;
                for (uint32_t r = 0; r < nranks; r++) {
                    wait_failure(w, &tickets[r][0], AGC_ERR_MISMATCH, ANY_RANK, NULL);
                    if (r != 1)
                        text_seen |= strstr(tickets[r][0].failure.text, deviations[i].text) != NULL;
                }
                if (!text_seen)
                    FAIL("no rank said \"%s\" but: %s", deviations[i].text,
                         tickets[0][0].failure.text);
                world_destroy(w);
            }
        }
    }
}

/* Rank 0 announces chunks that another rank has no room for: refused, not written beyond the
 * staging. */
static void room_for_less(uint32_t rank, struct agc_engine_config *config)
{
    config->chunk_log2 = rank == 0 ? 20 : 12;
}

static void test_announced_chunks_do_not_fit(void)
{
    struct world *w =
        world_create(2, &small, &(struct world_options){.change_config = room_for_less});
    for (uint32_t r = 0; r < 2; r++)
        submit_round(w, r, 0);
    wait_failure(w, &tickets[1][0], AGC_ERR_MISMATCH, 0, "rank 0 announced chunks of 2^20 bytes");
    wait_ticket(w, &tickets[0][0]); /* which has what rank 1 had sent before; */
    submit_round(w, 0, 1);
    wait_failure(w, &tickets[0][0], AGC_ERR_MISMATCH, 0, "it blames this rank");
    world_destroy(w);
}

/* A peer that sends garbage is told so. */
static void test_damaged_frame(void)
{
    struct world *w = world_create(2, &small, &(struct world_options){.chunk_log2 = 12});
    uint8_t garbage[AGC_WIRE_HEADER_NBYTES] = {1, 2, 3};
    void *request;
    submit_round(w, 0, 0);
    struct agc_transport *t = &w->ranks[1].inner;
    CHECK_OK(t->send(t->ctx, 0, AGC_CHANNEL_CONTRIBUTION, garbage, sizeof garbage, &request));
    wait_failure(w, &tickets[0][0], AGC_ERR_MAGIC, 1,
                 "rank 1 sent a damaged frame for round 0 bucket 0");
    CHECK_OK(t->wait(t->ctx, request));
    t->release(t->ctx, request);
    world_destroy(w);
}

/* ---- closing ----------------------------------------------------------------------------- */

static void test_destroy_under_way(void)
{
    for (uint32_t nranks = 2; nranks <= 3; nranks++) {
        for (int i = 0; i < 10; i++) {
            struct world *w = world_create(
                nranks, &small, &(struct world_options){.chunk_log2 = 12, .noise = i > 5});
            /* Nobody else has come yet; or all have, and it is somewhere in between. */
            for (uint32_t r = 0; r < (i % 2 ? nranks : 1); r++)
                submit_round(w, r, 0);
            if (i > 1)
                nap(1e-4 * random_unit());
            agc_engine_destroy(w->ranks[0].engine);
            w->ranks[0].engine = NULL;
            for (uint32_t b = 0; b < 2; b++) {
                CHECK(tickets[0][b].done); /* handed back before destroy returns */
                if (tickets[0][b].failed)
                    wait_failure(w, &tickets[0][b], AGC_ERR_CLOSED, ANY_RANK, "closed");
            }
            for (uint32_t r = 1; i % 2 && r < nranks; r++) {
                for (uint32_t b = 0; b < 2; b++) {
                    wait_ticket(w, &tickets[r][b]);
                    if (tickets[r][b].failed)
                        wait_failure(w, &tickets[r][b], AGC_ERR_PEER, 0, "rank 0 ");
                }
            }
            for (uint32_t r = 1; r < nranks; r++) {
                agc_engine_destroy(w->ranks[r].engine);
                w->ranks[r].engine = NULL;
            }
            world_destroy(w);
        }
    }
}

static void test_destroy_without_a_round(void)
{
    for (uint32_t nranks = 1; nranks <= 3; nranks++)
        world_destroy(world_create(nranks, &small, &(struct world_options){.chunk_log2 = 12}));
    agc_engine_destroy(NULL);
}

/* stop: what is under way and what comes later is handed back, calls that wait return, what is owed
 * can still be read. */
static void *read_norm(void *arg)
{
    agc_engine_residual_norm((struct agc_engine *)arg);
    return NULL;
}

static void test_stop(void)
{
    for (int started = 0; started < 2; started++) {
        struct world *w = world_create(2, &small, &(struct world_options){.chunk_log2 = 12});
        struct agc_engine *e = w->ranks[0].engine;
        pthread_t reader;
        fill();
        if (started) {
            submit_round(w, 0, 0); /* alone */
            CHECK_EQ(pthread_create(&reader, NULL, read_norm, e), 0);
            nap(0.02);
        }
        agc_engine_stop(e);
        if (started) {
            for (uint32_t b = 0; b < 2; b++) {
                CHECK(tickets[0][b].done);
                wait_failure(w, &tickets[0][b], AGC_ERR_CLOSED, AGC_RANK_NONE, "closed");
            }
            pthread_join(reader, NULL);
        }
        agc_engine_stop(e);
        CHECK_EQ(w->ranks[0].ndestroyed, 1);
        submit_round(w, 0, 1);
        wait_failure(w, &tickets[0][0], AGC_ERR_CLOSED, AGC_RANK_NONE, "closed");
        CHECK(agc_engine_residual_norm(e) >= 0.0); /* does not wait for ever */
        submit_round(w, 1, 0);                     /* the other one learns of it */
        wait_failure(w, &tickets[1][0], AGC_ERR_PEER, 0, "rank 0 ");
        world_destroy(w);
    }
}

/* ---- no memory, no threads --------------------------------------------------------------- */

static uint32_t ndestroyed;

static void count_destroy(void *ctx)
{
    (void)ctx;
    ndestroyed++;
}

/* All that a caller sets up; the k-th allocation and all after it fail. */
static enum agc_status set_up(uint64_t fail_at)
{
    const struct agc_transport transport = {.rank = 1, .nranks = 3, .destroy = count_destroy};
    const struct agc_engine_config config = {.chunk_log2 = 12,
                                             .elem_nbytes_max = 4,
                                             .timeout_ns = 1,
                                             .late_ns = 1,
                                             .alloc = counting_alloc()};
    struct agc_engine *e = NULL;
    uint32_t param;
    ndestroyed = 0;
    counting_alloc_reset(fail_at);
    enum agc_status status =
        agc_engine_create(&config, &transport, small.params, small.nparams, &e);
    if (status != AGC_OK) {
        CHECK(e == NULL);
        CHECK_EQ(ndestroyed, 1);
        CHECK_EQ(engine_memory.nlive, 0);
        return status;
    }
    for (uint32_t b = 0; status == AGC_OK && b < 2; b++) {
        const struct bucket_layout *l = &small.buckets[b];
        status = agc_engine_define_bucket(e, b * 40, l->dtype, l->pieces, l->npieces, l->lanes,
                                          l->nlanes, false);
    }
    for (int i = 0; status == AGC_OK && i < 20; i++)
        status = agc_engine_add_param(e, 10, &param);
    if (status != AGC_OK) { /* what failed can be done again */
        engine_memory.fail_at = UINT64_MAX;
        agc_engine_reset_buckets(e);
        for (uint32_t b = 0; b < 2; b++) {
            const struct bucket_layout *l = &small.buckets[b];
            CHECK_OK(agc_engine_define_bucket(e, b, l->dtype, l->pieces, l->npieces, l->lanes,
                                              l->nlanes, false));
        }
    }
    CHECK_EQ(ndestroyed, 0);
    agc_engine_destroy(e);
    CHECK_EQ(ndestroyed, 1);
    CHECK_EQ(engine_memory.nlive, 0);
    return status;
}

static void test_every_allocation_may_fail(void)
{
    uint64_t k = 0;
    while (set_up(k) != AGC_OK) {
        CHECK_STATUS(set_up(k), AGC_ERR_NOMEM);
        k++;
    }
    CHECK(k > 20); /* it was not over before it began */
    CHECK_STATUS(set_up(UINT64_MAX), AGC_OK);
}

static void test_config_is_checked(void)
{
    const struct agc_transport transport = {.rank = 0, .nranks = 2, .destroy = count_destroy};
    for (uint32_t log2 = 1; log2 < 40; log2++) {
        const struct agc_engine_config config = {
            .chunk_log2 = log2, .elem_nbytes_max = 4, .alloc = counting_alloc()};
        struct agc_engine *e = NULL;
        bool good = log2 >= AGC_CHUNK_LOG2_MIN && log2 <= AGC_CHUNK_LOG2_MAX;
        counting_alloc_reset(UINT64_MAX);
        ndestroyed = 0;
        CHECK_STATUS(agc_engine_create(&config, &transport, NULL, 0, &e),
                     good ? AGC_OK : AGC_ERR_SPEC);
        CHECK_EQ(ndestroyed, !good);
        agc_engine_destroy(e);
        CHECK_EQ(ndestroyed, 1);
        CHECK_EQ(engine_memory.nlive, 0);
    }
}

static void test_threads_may_fail_to_start(void)
{
    for (uint64_t k = 0; k < 2; k++) {
        struct world *w = world_create(2, &small, &(struct world_options){.chunk_log2 = 12});
        fail_threads_from(k);
        const struct agc_submission s = submission(&w->ranks[0], 0, 0, x[0][0], &tickets[0][0]);
        enum agc_status status = agc_engine_submit(w->ranks[0].engine, &s);
        fail_threads_from(UINT64_MAX);
        CHECK_STATUS(status, AGC_ERR_THREAD);
        for (uint32_t r = 0; r < 2; r++) /* and may start later */
            submit_round(w, r, 0);
        for (uint32_t r = 0; r < 2; r++)
            wait_ok(w, &tickets[r][0]);
        world_destroy(w);
    }
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(test_rank_dies_before_a_round),
        TEST(test_rank_dies_anywhere),
        TEST(test_names_of_ranks),
        TEST(test_silent_rank),
        TEST(test_late_rank),
        TEST(test_nobody_is_late_after_a_failure),
        TEST(test_failed_rank_leaves_no_riddle),
        TEST(test_rank_does_something_else),
        TEST(test_announced_chunks_do_not_fit),
        TEST(test_damaged_frame),
        TEST(test_destroy_under_way),
        TEST(test_destroy_without_a_round),
        TEST(test_stop),
        TEST(test_every_allocation_may_fail),
        TEST(test_config_is_checked),
        TEST(test_threads_may_fail_to_start),
    };
    return test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
