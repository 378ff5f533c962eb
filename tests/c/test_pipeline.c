/* test_pipeline.c: n state machines against each other, with random timing: no deadlock, no bound
 * exceeded, everything closed.
 *
 * The simulation knows who waits for whom, as pipeline.h tells it:
 *   OPEN c      waits until every peer has opened chunk c - window, and taken what it was sent
 *   REDUCE c    waits until every peer has opened chunk c
 *   CLOSE c     waits until every peer has reduced chunk c
 *
 * A rank does one action at a time and may not put it off: what it asks for next it must be able
 * to do sooner or later.
 */
#include <stdio.h>
#include <string.h>

#include "agentcomm.h"
#include "harness.h"
#include "reduce/pipeline.h"

#define NRANKS_MAX 9

static struct agc_pipeline ranks[NRANKS_MAX];
static uint32_t nranks;

static void describe(char *dst, size_t dst_cap_nbytes)
{
    snprintf(dst, dst_cap_nbytes,
             "%u ranks, window %u, lag %u; rank 0 opened %u reduced %u closed %u", nranks,
             ranks[0].window, ranks[0].lag, (unsigned)ranks[0].opened, (unsigned)ranks[0].reduced,
             (unsigned)ranks[0].closed);
}

static bool can_do(uint32_t rank, enum agc_pipeline_action action)
{
    const struct agc_pipeline *me = &ranks[rank];
    for (uint32_t i = 0; i < nranks; i++) {
        const struct agc_pipeline *peer = &ranks[i];
        if (i == rank)
            continue;
        if (action == AGC_PIPELINE_OPEN && peer->opened + me->window <= me->opened)
            return false;
        if (action == AGC_PIPELINE_REDUCE && peer->opened <= me->reduced)
            return false;
        if (action == AGC_PIPELINE_CLOSE && peer->reduced <= me->closed)
            return false;
    }
    return true;
}

/* One action of one rank, with the promises of pipeline.h. */
static void act(struct agc_pipeline *p, enum agc_pipeline_action action)
{
    struct agc_pipeline before = *p;
    agc_pipeline_done(p, action);
    CHECK_EQ(p->opened, before.opened + (action == AGC_PIPELINE_OPEN));
    CHECK_EQ(p->reduced, before.reduced + (action == AGC_PIPELINE_REDUCE));
    CHECK_EQ(p->closed, before.closed + (action == AGC_PIPELINE_CLOSE));
    CHECK(p->closed <= p->reduced && p->reduced <= p->opened && p->opened <= p->offered);
    CHECK(p->opened - p->closed <= p->window);
    CHECK(p->reduced - p->closed <= p->lag);
}

/* nchunks in portions, some of them only when all before are closed: a new round. */
static void simulate(uint64_t nchunks, bool rounds)
{
    uint64_t offered[NRANKS_MAX] = {0};
    uint32_t favourite = random_below(nranks); /* the scheduler may be unfair */
    for (;;) {
        uint32_t ready[NRANKS_MAX], nready = 0;
        bool all_done = true;
        for (uint32_t i = 0; i < nranks; i++) {
            struct agc_pipeline *p = &ranks[i];
            /* The same portions on all ranks: a round ends after every 10th chunk. */
            bool barrier = rounds && offered[i] % 10 == 0 && !agc_pipeline_is_empty(p);
            if (offered[i] < nchunks && !barrier &&
                (random_below(3) == 0 || agc_pipeline_is_empty(p))) {
                agc_pipeline_offer(p, 1);
                offered[i]++;
            }
            enum agc_pipeline_action action = agc_pipeline_next(p);
            if (action != AGC_PIPELINE_IDLE && can_do(i, action))
                ready[nready++] = i;
            if (action == AGC_PIPELINE_IDLE)
                CHECK(agc_pipeline_is_empty(p)); /* work that is left is work to do */
            all_done &= offered[i] == nchunks && agc_pipeline_is_empty(p);
        }
        if (all_done)
            break;
        if (nready == 0)
            FAIL("deadlock");
        uint32_t chosen = ready[random_below(nready)];
        for (uint32_t i = 0; i < nready && random_below(4); i++)
            chosen = ready[i] == favourite ? favourite : chosen;
        act(&ranks[chosen], agc_pipeline_next(&ranks[chosen]));
    }
    for (uint32_t i = 0; i < nranks; i++)
        CHECK_EQ(ranks[i].closed, nchunks);
}

static void run_simulations(bool rounds)
{
    test_describe = describe;
    for (int i = 0; i < 1500; i++) {
        nranks = 1 + random_below(NRANKS_MAX);
        uint32_t window = 1 + random_below(8), lag = 1 + random_below(8);
        for (uint32_t r = 0; r < nranks; r++)
            agc_pipeline_init(&ranks[r], window, lag);
        simulate(random_below(60), rounds);
    }
}

static void test_no_deadlock(void)
{
    run_simulations(false);
}

static void test_no_deadlock_with_rounds(void)
{
    run_simulations(true);
}

/* One rank alone, whose peers are infinitely fast: the order of its steps. */
static void test_order_of_steps(void)
{
    static const char expected[] = "OOORRCORCORCRCC"; /* window 3, lag 2, 5 chunks: see below */
    struct agc_pipeline p;
    char steps[64];
    size_t n = 0;
    agc_pipeline_init(&p, 3, 2);
    CHECK_EQ(agc_pipeline_next(&p), AGC_PIPELINE_IDLE);
    CHECK(agc_pipeline_is_empty(&p));
    agc_pipeline_offer(&p, 5);
    CHECK(!agc_pipeline_is_empty(&p));
    for (enum agc_pipeline_action a; (a = agc_pipeline_next(&p)) != AGC_PIPELINE_IDLE;) {
        CHECK(n + 1 < sizeof steps);
        steps[n++] = "IORC"[a];
        agc_pipeline_done(&p, a);
    }
    steps[n] = 0;
    /* Opens as far as the window goes, reduces as far ahead as the lag goes, then closes one and
     * opens the next in its place. */
    if (strcmp(steps, expected) != 0)
        FAIL("%s, expected %s", steps, expected);
}

static void test_least_window(void)
{
    struct agc_pipeline p;
    agc_pipeline_init(&p, 0, 0); /* means 1 */
    CHECK_EQ(p.window, 1);
    CHECK_EQ(p.lag, 1);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(test_order_of_steps),
        TEST(test_least_window),
        TEST(test_no_deadlock),
        TEST(test_no_deadlock_with_rounds),
    };
    return test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
