/* harness.c: what every C test program shares. */
#define _DEFAULT_SOURCE
#include "harness.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "agentcomm.h"

void (*test_describe)(char *dst, size_t dst_cap_nbytes);

static sigjmp_buf leave_test;
static pthread_t main_thread;
static const char *current_test = "";
static unsigned npassed, nfailed;
static uint64_t start_seed, random_state;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1 /* the sanitizer reports crashes better */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

/* ---- running ----------------------------------------------------------------------------- */

static void print_failure(const char *format, ...)
{
    va_list args;
    printf("FAIL %s: ", current_test);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    if (test_describe) {
        char text[256] = "";
        test_describe(text, sizeof text);
        printf("\n     in: %s", text);
    }
    printf("\n     again: --seed %llu %s\n", (unsigned long long)start_seed, current_test);
    fflush(stdout);
}

void test_fail(const char *file, int line, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    print_failure("%s:%d: %s", file, line, text);
    siglongjmp(leave_test, 1);
}

/* The end of the program is near, so what a handler may not call is called all the same. */
static void on_hang(int signal_number)
{
    (void)signal_number;
    print_failure("the watchdog: still running after the timeout");
    printf("agentcomm-c: %u passed, %u failed\n", npassed, nfailed + 1);
    fflush(stdout);
    _exit(1);
}

#ifndef SANITIZED
static void on_crash(int signal_number, siginfo_t *info, void *context)
{
    (void)context;
    print_failure("%s at address %p", strsignal(signal_number), info->si_addr);
    if (!pthread_equal(pthread_self(), main_thread))
        _exit(1); /* the main thread cannot go on without the one that crashed */
    siglongjmp(leave_test, 1);
}
#endif

void test_start(uint64_t seed, unsigned timeout_s)
{
    const char *seed_text = getenv("AGC_TEST_SEED"), *timeout_text = getenv("AGC_TEST_TIMEOUT");
    const char *mask_text = getenv("AGC_TEST_CPU_MASK");
    if (!seed && seed_text)
        seed = strtoull(seed_text, NULL, 0);
    if (!seed)
        seed = ((uint64_t)time(NULL) << 16 ^ (uint64_t)getpid()) & 0xffffffffffffu;
    if (mask_text)
        agc_cpu_set_mask((uint32_t)strtoul(mask_text, NULL, 0));
    start_seed = seed;
    main_thread = pthread_self();
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
#ifndef SANITIZED
    struct sigaction action = {.sa_flags = SA_SIGINFO};
    action.sa_sigaction = on_crash;
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    sigaction(SIGFPE, &action, NULL);
    sigaction(SIGILL, &action, NULL);
#endif
    signal(SIGALRM, on_hang);
    if (timeout_s && timeout_text)
        timeout_s = (unsigned)strtoul(timeout_text, NULL, 0);
    alarm(timeout_s);
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void test_run(const struct test *test)
{
    double began = seconds_now();
    current_test = test->name;
    test_describe = NULL;
    random_seed(start_seed);
    if (sigsetjmp(leave_test, 1) == 0) {
        test->run();
        npassed++;
    } else {
        nfailed++;
    }
    if (seconds_now() - began > 2.0)
        printf("%.1f s: %s\n", seconds_now() - began, test->name);
    current_test = "";
}

int test_finish(void)
{
    printf("agentcomm-c: %u passed, %u failed\n", npassed, nfailed);
    return nfailed != 0;
}

int test_main(int argc, char **argv, const struct test *tests, size_t ntests)
{
    uint64_t seed = 0;
    int nnames = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
            seed = strtoull(argv[++i], NULL, 0);
        } else if (strcmp(argv[i], "--list") == 0) {
            for (size_t j = 0; j < ntests; j++)
                puts(tests[j].name);
            return 0;
        } else {
            argv[nnames++] = argv[i];
        }
    }
    test_start(seed, 300);
    for (size_t i = 0; i < ntests; i++) {
        bool wanted = nnames == 0;
        for (int j = 0; j < nnames; j++)
            wanted |= strstr(tests[i].name, argv[j]) != NULL;
        if (wanted)
            test_run(&tests[i]);
    }
    return test_finish();
}

/* ---- checks ------------------------------------------------------------------------------ */

void check_u64(const char *file, int line, const char *what, uint64_t a, uint64_t b)
{
    if (a != b)
        test_fail(file, line, "%s: %llu, %llu", what, (unsigned long long)a, (unsigned long long)b);
}

void check_bytes(const char *file, int line, const char *what, const void *a, const void *b,
                 size_t nbytes)
{
    const uint8_t *p = (const uint8_t *)a, *q = (const uint8_t *)b;
    if (nbytes == 0 || memcmp(p, q, nbytes) == 0)
        return;
    size_t i = 0;
    while (p[i] == q[i])
        i++;
    test_fail(file, line, "%s: byte %zu of %zu is 0x%02x, 0x%02x", what, i, nbytes, p[i], q[i]);
}

void check_text(const char *file, int line, const char *text, const char *part)
{
    if (!strstr(text, part))
        test_fail(file, line, "\"%s\" does not hold \"%s\"", text, part);
}

/* ---- random numbers ---------------------------------------------------------------------- */

void random_seed(uint64_t seed)
{
    random_state = seed;
}

/* splitmix64: any seed is good, and it is not the generator under test in another guise: the core's
 * is keyed by coordinates. */
uint64_t random_u64(void)
{
    uint64_t x = random_state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint32_t random_below(uint32_t bound)
{
    return (uint32_t)((random_u64() >> 32) * bound >> 32);
}

bool random_bool(void)
{
    return random_u64() >> 63;
}

float random_unit(void)
{
    return (float)(random_u64() >> 40) * 0x1p-24f;
}

/* Irwin-Hall with four summands: near enough to a Gaussian, and without libm's rounding. */
float random_gauss(void)
{
    return (random_unit() + random_unit() + random_unit() + random_unit() - 2.0f) * 1.7320508f;
}

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A finite number of any magnitude. */
static float random_finite(void)
{
    uint32_t bits;
    do
        bits = (uint32_t)random_u64();
    while ((bits & 0x7f800000u) == 0x7f800000u);
    return from_bits(bits);
}

static float random_value(enum value_class c, float constant)
{
    switch (c) {
    case VALUES_MINUS_ZERO:
        return -0.0f;
    case VALUES_GAUSS:
    case VALUES_INF:
    case VALUES_NAN:
        return random_gauss();
    case VALUES_NEGATIVE:
        return -0.25f - random_unit();
    case VALUES_CONSTANT:
        return constant;
    case VALUES_DENORMAL:
        return from_bits((uint32_t)random_u64() & 0x807fffffu);
    case VALUES_TINY:
        return random_gauss() * (random_bool() ? 0x1p-100f : 1e-40f);
    case VALUES_HUGE:
        return (random_bool() ? 3e38f : -3e38f) * (1.0f - 0.1f * random_unit());
    case VALUES_MAX:
        return random_below(8) ? random_gauss() : random_bool() ? 3.40282347e38f : -3.40282347e38f;
    case VALUES_HALF: /* 13 bits are rounded away: make half of them ties */
        return from_bits((0x32800000u + ((uint32_t)random_u64() & 0x1fffffffu) % 0x15000000u) &
                         (random_bool() ? 0xfffff000u : 0xffffffffu)) *
               (random_bool() ? 1.0f : -1.0f);
    case VALUES_MIXED:
        return random_finite();
    case VALUES_BITS:
        return from_bits((uint32_t)random_u64());
    case VALUES_ZERO:
    case VALUES_ONE_HOT:
    case NVALUES:
        break;
    }
    return 0.0f;
}

const char *value_class_name(enum value_class c)
{
    static const char *const names[NVALUES] = {
        [VALUES_ZERO] = "zero",         [VALUES_MINUS_ZERO] = "minus zero",
        [VALUES_ONE_HOT] = "one hot",   [VALUES_GAUSS] = "gauss",
        [VALUES_NEGATIVE] = "negative", [VALUES_CONSTANT] = "constant",
        [VALUES_DENORMAL] = "denormal", [VALUES_TINY] = "tiny",
        [VALUES_HUGE] = "huge",         [VALUES_MAX] = "max",
        [VALUES_HALF] = "half",         [VALUES_MIXED] = "mixed",
        [VALUES_INF] = "inf",           [VALUES_NAN] = "nan",
        [VALUES_BITS] = "bits",
    };
    return names[c];
}

void random_fill(float *x, size_t nelems, enum value_class c)
{
    float constant = random_finite();
    for (size_t i = 0; i < nelems; i++)
        x[i] = random_value(c, constant);
    if (nelems == 0)
        return;
    /* A few special ones at random places. */
    size_t nspecial = 1 + nelems / 300;
    for (size_t i = 0; i < nspecial; i++) {
        size_t at = (size_t)(random_u64() % nelems);
        uint32_t sign = (uint32_t)random_u64() & 0x80000000u;
        uint32_t payload = random_bool() ? 0x00400000u : 1u + random_below(0x003fffffu);
        if (c == VALUES_INF)
            x[at] = from_bits(sign | 0x7f800000u);
        else if (c == VALUES_NAN) /* payloads below 2^22 signal */
            memcpy(&x[at], &(uint32_t){sign | 0x7f800000u | payload}, sizeof x[at]);
        else if (c == VALUES_ONE_HOT && i == 0)
            x[at] = random_finite();
    }
}

/* ---- memory ------------------------------------------------------------------------------ */

struct guarded guarded_create(size_t nbytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t inner = (nbytes + page - 1) / page * page;
    inner = inner ? inner : page;
    uint8_t *all = (uint8_t *)mmap(NULL, inner + 2 * page, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED);
    CHECK(mprotect(all, page, PROT_NONE) == 0);
    CHECK(mprotect(all + page + inner, page, PROT_NONE) == 0);
    return (struct guarded){all + page, all + page + inner};
}

void guarded_destroy(struct guarded *g)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    munmap(g->begin - page, (size_t)(g->end - g->begin) + 2 * page);
    *g = (struct guarded){NULL, NULL};
}

uint8_t *guarded_front(const struct guarded *g, size_t nbytes)
{
    CHECK(nbytes <= (size_t)(g->end - g->begin));
    return g->begin;
}

uint8_t *guarded_back(const struct guarded *g, size_t nbytes)
{
    CHECK(nbytes <= (size_t)(g->end - g->begin));
    return g->end - nbytes;
}

void *test_alloc(size_t nbytes)
{
    void *p = malloc(nbytes ? nbytes : 1);
    CHECK(p != NULL);
    return p;
}
