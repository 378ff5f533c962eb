/* test_tune.c: the search for the chunk size, on cost curves of many shapes. */
#include <math.h>
#include <stdio.h>

#include "harness.h"
#include "reduce/tune.h"

#define LOG2_MIN 18u
#define LOG2_MAX 24u

/* Cost per byte of chunks of 2^log2 bytes: an overhead per chunk and a time to fill the pipeline.
 */
struct curve {
    double overhead;
    double fill;
    double noise;      /* relative, uniform */
    double late_every; /* one round in so many takes ten times as long; 0: none */
};

static struct curve curve;

static void describe(char *dst, size_t dst_cap_nbytes)
{
    snprintf(dst, dst_cap_nbytes, "overhead %g, fill %g, noise %g, late every %g", curve.overhead,
             curve.fill, curve.noise, curve.late_every);
}

static double true_cost(uint32_t log2)
{
    double size = ldexp(1, (int)log2 - (int)LOG2_MIN);
    return 1 + curve.overhead / size + curve.fill * size;
}

static double random_cost(uint32_t log2)
{
    double cost =
        true_cost(log2) * (1 + curve.noise * (2.0 * (double)random_below(10001) / 10000 - 1));
    if (curve.late_every > 0 && random_below((uint32_t)curve.late_every) == 0)
        cost *= 10;
    return cost;
}

static double best_cost(void)
{
    double best = true_cost(LOG2_MIN);
    for (uint32_t log2 = LOG2_MIN; log2 <= LOG2_MAX; log2++)
        best = fmin(best, true_cost(log2));
    return best;
}

/* Runs until the search rests; returns the number of rounds. The size comes into use late, as it
 * does in the engine. */
static uint32_t run_to_rest(struct agc_tune *t, uint32_t delay)
{
    uint32_t in_use[4] = {t->log2, t->log2, t->log2, t->log2}, nrounds = 0;
    while (!t->resting && nrounds < 10000) {
        uint32_t next = agc_tune_round(t, in_use[0], random_cost(in_use[0]));
        CHECK(next >= t->log2_min && next <= t->log2_max);
        for (uint32_t i = 0; i < delay; i++)
            in_use[i] = in_use[i + 1];
        in_use[delay] = next;
        nrounds++;
    }
    return nrounds;
}

static void test_finds_the_best_size(void)
{
    static const double sizes[] = {0, 0.001, 0.01, 0.1, 0.5, 2, 8};
    test_describe = describe;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (size_t j = 0; j < sizeof sizes / sizeof sizes[0]; j++) {
            for (uint32_t start = LOG2_MIN - 2; start <= LOG2_MAX + 2; start++) {
                for (uint32_t delay = 0; delay < 3; delay++) {
                    curve = (struct curve){.overhead = sizes[i], .fill = sizes[j]};
                    struct agc_tune t;
                    agc_tune_init(&t, start, LOG2_MIN, LOG2_MAX);
                    CHECK(run_to_rest(&t, delay) <= 8 * (AGC_TUNE_NROUNDS + AGC_TUNE_NSKIPPED));
                    /* Each step not taken was worth less than 2 %. */
                    CHECK(true_cost(t.log2) <= best_cost() * 1.05);
                    CHECK_EQ(t.log2, t.best);
                }
            }
        }
    }
}

static void test_noise_and_late_rounds(void)
{
    test_describe = describe;
    int nbad = 0;
    for (int i = 0; i < 500; i++) {
        curve =
            (struct curve){.overhead = 2, .fill = 0.02 * i / 500, .noise = 0.05, .late_every = 12};
        struct agc_tune t;
        agc_tune_init(&t, LOG2_MIN, LOG2_MIN, LOG2_MAX);
        run_to_rest(&t, 1);
        nbad += true_cost(t.log2) > best_cost() * 1.15;
    }
    CHECK(nbad < 25);
}

static void test_rests_and_wakes(void)
{
    test_describe = describe;
    curve = (struct curve){.overhead = 1, .fill = 1};
    struct agc_tune t;
    agc_tune_init(&t, LOG2_MIN, LOG2_MIN, LOG2_MAX);
    uint32_t last = 0;
    for (int i = 0; i < 10; i++) {
        run_to_rest(&t, 0);
        uint32_t nrounds = 0;
        for (; t.resting; nrounds++) {
            CHECK_EQ(t.log2, t.best);
            agc_tune_round(&t, t.log2, random_cost(t.log2));
        }
        CHECK(nrounds > last || nrounds >= AGC_TUNE_REST_NROUNDS_MAX);
        CHECK(nrounds < AGC_TUNE_REST_NROUNDS_MAX + AGC_TUNE_NROUNDS);
        last = nrounds;
    }
    run_to_rest(&t, 0);
    curve = (struct curve){.overhead = 64, .fill = 0.01}; /* another link: larger chunks */
    for (uint32_t i = 0; i < AGC_TUNE_NROUNDS + AGC_TUNE_NSKIPPED; i++)
        agc_tune_round(&t, t.log2, random_cost(t.log2));
    CHECK(!t.resting);
    run_to_rest(&t, 0);
    CHECK(true_cost(t.log2) <= best_cost() * 1.05);
}

static void test_equal_bounds(void)
{
    struct agc_tune t;
    agc_tune_init(&t, LOG2_MAX, LOG2_MIN, LOG2_MIN);
    for (int i = 0; i < 100; i++)
        CHECK_EQ(agc_tune_round(&t, LOG2_MIN, 1 + i % 7), LOG2_MIN);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(test_finds_the_best_size),
        TEST(test_noise_and_late_rounds),
        TEST(test_rests_and_wakes),
        TEST(test_equal_bounds),
    };
    return test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
