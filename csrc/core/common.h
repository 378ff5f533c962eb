/* common.h: small helpers that every C file of the core may use. */
#ifndef AGC_COMMON_H
#define AGC_COMMON_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define AGC_LIKELY(x) __builtin_expect(!!(x), 1)
#define AGC_UNLIKELY(x) __builtin_expect(!!(x), 0)
#else
#define AGC_LIKELY(x) (x)
#define AGC_UNLIKELY(x) (x)
#endif

/* A branch that only a bug of ours could take: asserts in debug builds, stays in release builds. */
#define AGC_NEVER(x) (AGC_UNLIKELY(x) ? (assert(false && "impossible: " #x), true) : false)

/* Returns the status of an expression if it failed. */
#define AGC_TRY(expr)                                                                              \
    do {                                                                                           \
        enum agc_status agc_try_status = (expr);                                                   \
        if (AGC_UNLIKELY(agc_try_status != AGC_OK))                                                \
            return agc_try_status;                                                                 \
    } while (0)

static inline uint64_t agc_div_up(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

/* b is a power of two. */
static inline uint64_t agc_round_up(uint64_t a, uint64_t b)
{
    return (a + b - 1) & ~(b - 1);
}

static inline uint32_t agc_min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline uint32_t agc_max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static inline uint64_t agc_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t agc_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static inline uint32_t agc_log2_u32(uint32_t x)
{
    uint32_t n = 0;
    while (x >>= 1)
        n++;
    return n;
}

static inline bool agc_is_pow2(uint64_t x)
{
    return x != 0 && (x & (x - 1)) == 0;
}

#endif /* AGC_COMMON_H */
