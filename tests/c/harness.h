/* harness.h: what every C test program shares.
 *
 * A program is a list of test functions. A failed CHECK prints the place, the values and the seed,
 * ends that test function (by longjmp; what it had allocated is lost) and lets the others run.
 * CHECKs belong on the main thread: rank threads report through variables. A crash counts as a
 * failure of the test in which it happens.
 *
 *   program [NAME...]            all tests, or those whose name contains one of NAMEs
 *   program --list               their names
 *   program --seed N             the same random numbers again, as does AGC_TEST_SEED=N
 *   AGC_TEST_TIMEOUT=S           seconds until the watchdog ends the program (default 300)
 *   AGC_TEST_CPU_MASK=0          without newer instructions (a mask of AGC_CPU_...)
 *
 * The last line is "agentcomm-c: N passed, N failed".
 */
#ifndef AGC_TEST_HARNESS_H
#define AGC_TEST_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct test {
    const char *name;
    void (*run)(void);
};
#define TEST(function) {#function, function}

/* Runs the tests that the arguments ask for; returns main's result. */
int test_main(int argc, char **argv, const struct test *tests, size_t ntests);

/* The parts of test_main, for a program with arguments of its own. */
void test_start(
    uint64_t seed,
    unsigned timeout_s); /* seed 0: from the environment, or else the clock; timeout 0: none */
int test_finish(void);
void test_run(const struct test *test);

/* Says in one line what is being tested, for the message of a failed CHECK or a crash. NULL:
 * nothing. */
extern void (*test_describe)(char *dst, size_t dst_cap_nbytes);

/* ---- checks ------------------------------------------------------------------------------ */

void test_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));
void check_u64(const char *file, int line, const char *what, uint64_t a, uint64_t b);
void check_bytes(const char *file, int line, const char *what, const void *a, const void *b,
                 size_t nbytes);
void check_text(const char *file, int line, const char *text, const char *part);

#define FAIL(...) test_fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            FAIL("%s", #condition);                                                                \
    } while (0)
/* Both integers are at most 64 bits and not negative. */
#define CHECK_EQ(a, b) check_u64(__FILE__, __LINE__, #a " == " #b, (uint64_t)(a), (uint64_t)(b))
/* value <= bound, both doubles; fails for NaN. */
#define CHECK_LE(value, bound)                                                                     \
    do {                                                                                           \
        double check_value = (value), check_bound = (bound);                                       \
        if (!(check_value <= check_bound))                                                         \
            FAIL("%s <= %s: %.9g, %.9g", #value, #bound, check_value, check_bound);                \
    } while (0)
#define CHECK_BYTES(a, b, nbytes)                                                                  \
    check_bytes(__FILE__, __LINE__, #a " == " #b, (a), (b), (size_t)(nbytes))
/* The text holds the part. */
#define CHECK_TEXT(text, part) check_text(__FILE__, __LINE__, (text), (part))
/* enum agc_status */
#define CHECK_STATUS(expression, want)                                                             \
    do {                                                                                           \
        enum agc_status check_status = (expression);                                               \
        if (check_status != (want))                                                                \
            FAIL("%s: %s, expected %s", #expression, agc_status_name(check_status),                \
                 agc_status_name(want));                                                           \
    } while (0)
#define CHECK_OK(expression) CHECK_STATUS(expression, AGC_OK)

/* ---- random numbers ---------------------------------------------------------------------- */

uint64_t random_u64(void);
uint32_t random_below(uint32_t bound); /* 0 .. bound - 1 */
bool random_bool(void);
float random_unit(void); /* [0, 1) */
float random_gauss(void);
void random_seed(uint64_t seed); /* for tests that must see the same numbers in every run */

/* The kinds of numbers that break codecs. */
enum value_class {
    VALUES_ZERO,
    VALUES_MINUS_ZERO,
    VALUES_ONE_HOT,
    VALUES_GAUSS,
    VALUES_NEGATIVE,
    VALUES_CONSTANT,
    VALUES_DENORMAL,
    VALUES_TINY,  /* around 2^-100, where int8 changes its arithmetic, and 1e-40 */
    VALUES_HUGE,  /* around 3e38 */
    VALUES_MAX,   /* +-FLT_MAX beside small ones */
    VALUES_HALF,  /* the range of binary16: subnormal, normal, overflowing; ties */
    VALUES_MIXED, /* finite, of all magnitudes */
    NVALUES_FINITE,
    VALUES_INF = NVALUES_FINITE, /* gauss with infinities */
    VALUES_NAN,                  /* gauss with NaNs of all payloads, signalling ones too */
    VALUES_BITS,                 /* anything */
    NVALUES,
};
const char *value_class_name(enum value_class c);
void random_fill(float *x, size_t nelems, enum value_class c);

/* ---- memory ------------------------------------------------------------------------------ */

/* Memory between two pages that must not be touched. */
struct guarded {
    uint8_t *begin;
    uint8_t *end;
};
struct guarded guarded_create(size_t nbytes);
void guarded_destroy(struct guarded *g);
/* nbytes against the front guard, or nbytes against the back guard. */
uint8_t *guarded_front(const struct guarded *g, size_t nbytes);
uint8_t *guarded_back(const struct guarded *g, size_t nbytes);

/* malloc that fails the test instead of returning NULL. */
void *test_alloc(size_t nbytes);

#endif /* AGC_TEST_HARNESS_H */
