/* check_simd.c: every kernel of every CPU tier against the portable one, to the bit.
 *
 * Method (after dav1d's checkasm): each operation of core/kernels.inc has one function here that
 * draws inputs, runs the portable variant and the tier's, and compares all that they may write, and
 * the bytes around it, which must stay as they were. Inputs and outputs lie flush against unmapped
 * pages, in front or behind, so that a read or write beyond them crashes.
 *
 *   check_simd               every length x block size x class of values x variant
 *   check_simd --cases N     N random cases instead
 *   check_simd --bench       GB/s of dense data and multiples of the time of memcpy
 *   check_simd --bench --only fp8     of what begins with this
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "agentcomm.h"
#include "core/common.h"
#include "core/elements.h"
#include "core/kernels.h"
#include "harness.h"

#define NELEMS_MAX AGC_TILE_NELEMS_MAX
#define SLACK 64 /* bytes around an output that are compared too */

/* ---- tiers ------------------------------------------------------------------------------- */

struct tier {
    const char *name;
    uint32_t features;
    bool present;
    struct agc_kernels kernels;
};
static struct tier tiers[] = {
    {.name = "c", .features = 0},
    {.name = "crc32", .features = AGC_CPU_CRC32},
    {.name = "avx2", .features = AGC_CPU_AVX2 | AGC_CPU_CRC32},
    {.name = "avx512", .features = AGC_CPU_AVX512 | AGC_CPU_AVX2 | AGC_CPU_CRC32},
};
#define NTIERS (sizeof tiers / sizeof tiers[0])
static const struct agc_kernels *const ref = &tiers[0].kernels;

static void tiers_init(void)
{
    for (size_t i = 0; i < NTIERS; i++) {
        tiers[i].present = (agc_cpu_features() & tiers[i].features) == tiers[i].features;
        agc_kernels_init(&tiers[i].kernels, tiers[i].features);
        if (!tiers[i].present)
            printf("tier %s is left out: this CPU lacks it\n", tiers[i].name);
    }
}

/* ---- one case ---------------------------------------------------------------------------- */

/* What the check functions draw their inputs from. */
static struct {
    const char *op;
    const struct tier *tier;
    uint32_t nelems;
    uint32_t block_nelems;
    enum value_class values;
    bool residual;
    bool stochastic;
    bool back;      /* buffers end at the back guard; else they begin behind the front guard ... */
    uint32_t shift; /* ... at this alignment: elements for floats, bytes for bytes */
} now;

static void describe(char *dst, size_t dst_cap_nbytes)
{
    snprintf(dst, dst_cap_nbytes, "%s %s nelems %u block %u %s%s%s %s shift %u", now.op,
             now.tier->name, now.nelems, now.block_nelems, value_class_name(now.values),
             now.residual ? " residual" : "", now.stochastic ? " stochastic" : "",
             now.back ? "back" : "front", now.shift);
}

/* Inputs x and y; output z twice, of the portable variant and of the tier; two outputs for kernels
 * that write two. */
static struct guarded in_x, in_y, out_ref[2], out_tier[2];
static float *keep; /* what an input held */

static uint8_t *place(const struct guarded *g, size_t nbytes, size_t unit)
{
    return now.back ? guarded_back(g, nbytes) : guarded_front(g, nbytes) + now.shift * unit;
}

static float *place_floats(const struct guarded *g, uint32_t nelems)
{
    return (float *)(void *)place(g, nelems * sizeof(float), sizeof(float));
}

/* An output with a pattern around and in it; the same for both. */
static uint8_t *place_output(const struct guarded *g, size_t nbytes, size_t unit)
{
    uint8_t *p = place(g, nbytes, unit);
    uint8_t *begin = p - g->begin > SLACK ? p - SLACK : g->begin;
    uint8_t *end = g->end - (p + nbytes) > SLACK ? p + nbytes + SLACK : g->end;
    memset(begin, 0xa5, (size_t)(end - begin));
    return p;
}

/* The two outputs hold the same, and what surrounds them is untouched. */
static void check_output(int i, const uint8_t *a, const uint8_t *b, size_t nbytes)
{
    CHECK_BYTES(a, b, nbytes);
    const struct guarded *g = &out_tier[i];
    for (const uint8_t *p = g->begin > b - SLACK ? g->begin : b - SLACK; p < b; p++)
        CHECK_EQ(*p, 0xa5);
    const uint8_t *end = b + nbytes;
    for (const uint8_t *p = end; p < g->end && p < end + SLACK; p++)
        CHECK_EQ(*p, 0xa5);
}

static float random_weight(void)
{
    static const float weights[] = {1.0f, 0.5f, 1.0f / 3.0f, 0.2f, 0.0f, 1.0f / 7.0f};
    return weights[random_below(6)];
}

/* Residuals are of the size of what was lost, or anything finite. */
static void fill_residual(float *residual, uint32_t nelems)
{
    enum value_class c = now.values;
    if (random_below(3) == 0)
        c = (enum value_class)random_below(NVALUES_FINITE);
    random_fill(residual, nelems, c);
    for (uint32_t i = 0; i < nelems; i++) /* the engine never keeps another one */
        if ((agc_f32_bits(residual[i]) & 0x7f800000u) == 0x7f800000u)
            residual[i] = 1.0f;
}

/* ---- one function per operation ---------------------------------------------------------- */

typedef void grid_encode(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                         const struct agc_rng *rng, uint8_t *scales, uint8_t *q);
typedef void grid_decode(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                         uint32_t block_nelems, float weight, float *out);

/* Bytes of the values of n elements: `per_byte` to a byte, each block beginning with a new one. */
static size_t values_nbytes(size_t n, uint32_t per_byte)
{
    return n / now.block_nelems * agc_div_up(now.block_nelems, per_byte) +
           agc_div_up(n % now.block_nelems, per_byte);
}

static void check_grid_encode(grid_encode *of_ref, grid_encode *of_tier, uint32_t per_byte)
{
    size_t scales_nbytes = 4 * agc_div_up(now.nelems, now.block_nelems), n = now.nelems;
    size_t nbytes = scales_nbytes + values_nbytes(n, per_byte);
    struct agc_rng rng = {(uint32_t)random_u64(), (uint32_t)random_u64()};
    const struct agc_rng *rng_or_null = now.stochastic ? &rng : NULL;
    float *x = place_floats(&in_x, now.nelems), *residuals[2] = {NULL, NULL};
    random_fill(x, n, now.values);
    memcpy(keep, x, 4 * n);
    if (now.residual) {
        fill_residual(place_floats(&in_y, now.nelems), now.nelems);
        const float *drawn = place_floats(&in_y, now.nelems);
        residuals[0] = (float *)(void *)place_output(&out_ref[0], 4 * n, 4);
        residuals[1] = (float *)(void *)place_output(&out_tier[0], 4 * n, 4);
        memcpy(residuals[0], drawn, 4 * n);
        memcpy(residuals[1], drawn, 4 * n);
    }
    /* Scales and values share a buffer, the scales first, as in a payload. */
    uint8_t *a = place_output(&out_ref[1], nbytes, 1);
    uint8_t *b = place_output(&out_tier[1], nbytes, 1);
    of_ref(x, residuals[0], now.nelems, now.block_nelems, rng_or_null, a, a + scales_nbytes);
    of_tier(x, residuals[1], now.nelems, now.block_nelems, rng_or_null, b, b + scales_nbytes);
    check_output(1, a, b, nbytes);
    if (now.residual)
        check_output(0, (uint8_t *)residuals[0], (uint8_t *)residuals[1], 4 * n);
    CHECK_BYTES(keep, x, 4 * n);
}

/* Scales as the encoder writes them, and any bits at all: decoders meet the bytes of others. */
static void fill_scales(uint8_t *scales, size_t nscales)
{
    float x;
    for (size_t i = 0; i < nscales; i++) {
        random_fill(&x, 1, now.values);
        uint32_t bits = agc_f32_bits(x);
        if (random_bool())
            bits = agc_f32_bits(
                agc_grid_from_absmax(bits & 0x7fffffffu, AGC_INT8_LEVELS, AGC_INT8_SCALE_MAX_BITS)
                    .scale);
        agc_store_u32(scales + 4 * i, bits);
    }
}

static void check_grid_decode(grid_decode *of_ref, grid_decode *of_tier, uint32_t per_byte,
                              bool add)
{
    size_t scales_nbytes = 4 * agc_div_up(now.nelems, now.block_nelems), n = now.nelems;
    size_t q_nbytes = values_nbytes(n, per_byte);
    float weight = random_weight();
    uint8_t *scales = place(&in_x, scales_nbytes, 1), *q = place(&in_y, q_nbytes, 1);
    fill_scales(scales, scales_nbytes / 4);
    for (size_t i = 0; i < q_nbytes; i++)
        q[i] = (uint8_t)random_u64();
    float *a = (float *)(void *)place_output(&out_ref[0], 4 * n, 4);
    float *b = (float *)(void *)place_output(&out_tier[0], 4 * n, 4);
    if (add) {
        random_fill(a, n, (enum value_class)random_below(NVALUES));
        memcpy(b, a, 4 * n);
    }
    of_ref(scales, q, now.nelems, now.block_nelems, weight, a);
    of_tier(scales, q, now.nelems, now.block_nelems, weight, b);
    check_output(0, (uint8_t *)a, (uint8_t *)b, 4 * n);
}

#define CHECK_GRID(name, per_byte)                                                                 \
    static void check_##name##_encode(void)                                                        \
    {                                                                                              \
        check_grid_encode(ref->name##_encode, now.tier->kernels.name##_encode, per_byte);          \
    }                                                                                              \
    static void check_##name##_decode(void)                                                        \
    {                                                                                              \
        check_grid_decode(ref->name##_decode, now.tier->kernels.name##_decode, per_byte, false);   \
    }                                                                                              \
    static void check_##name##_decode_add(void)                                                    \
    {                                                                                              \
        check_grid_decode(ref->name##_decode_add, now.tier->kernels.name##_decode_add, per_byte,   \
                          true);                                                                   \
    }

CHECK_GRID(fp8, 1)
CHECK_GRID(int8, 1)
CHECK_GRID(int4, 2)
CHECK_GRID(ternary, 5)
CHECK_GRID(sign, 8)

typedef void half_encode(const float *x, float *residual, uint32_t nelems, uint8_t *dst);
typedef void float_decode(const uint8_t *src, uint32_t nelems, float weight, float *out);

static void check_half_encode(half_encode *of_ref, half_encode *of_tier)
{
    size_t n = now.nelems;
    float *x = place_floats(&in_x, now.nelems), *residuals[2] = {NULL, NULL};
    random_fill(x, n, now.values);
    memcpy(keep, x, 4 * n);
    if (now.residual) {
        float *drawn = place_floats(&in_y, now.nelems);
        fill_residual(drawn, now.nelems);
        residuals[0] = (float *)(void *)place_output(&out_ref[0], 4 * n, 4);
        residuals[1] = (float *)(void *)place_output(&out_tier[0], 4 * n, 4);
        memcpy(residuals[0], drawn, 4 * n);
        memcpy(residuals[1], drawn, 4 * n);
    }
    uint8_t *a = place_output(&out_ref[1], 2 * n, 1), *b = place_output(&out_tier[1], 2 * n, 1);
    of_ref(x, residuals[0], now.nelems, a);
    of_tier(x, residuals[1], now.nelems, b);
    check_output(1, a, b, 2 * n);
    if (now.residual)
        check_output(0, (uint8_t *)residuals[0], (uint8_t *)residuals[1], 4 * n);
    CHECK_BYTES(keep, x, 4 * n);
}

static void check_float_decode(float_decode *of_ref, float_decode *of_tier, size_t elem_nbytes,
                               bool add)
{
    size_t n = now.nelems;
    float weight = random_weight();
    uint8_t *src = place(&in_x, n * elem_nbytes, 1);
    if (elem_nbytes == 4) {
        random_fill(keep, n, now.values);
        memcpy(src, keep, 4 * n);
    } else {
        for (size_t i = 0; i < 2 * n; i++)
            src[i] = (uint8_t)random_u64();
    }
    float *a = (float *)(void *)place_output(&out_ref[0], 4 * n, 4);
    float *b = (float *)(void *)place_output(&out_tier[0], 4 * n, 4);
    if (add) {
        random_fill(a, n, (enum value_class)random_below(NVALUES));
        memcpy(b, a, 4 * n);
    }
    of_ref(src, now.nelems, weight, a);
    of_tier(src, now.nelems, weight, b);
    check_output(0, (uint8_t *)a, (uint8_t *)b, 4 * n);
}

static void check_f16_encode(void)
{
    check_half_encode(ref->f16_encode, now.tier->kernels.f16_encode);
}

static void check_f16_decode(void)
{
    check_float_decode(ref->f16_decode, now.tier->kernels.f16_decode, 2, false);
}

static void check_f16_decode_add(void)
{
    check_float_decode(ref->f16_decode_add, now.tier->kernels.f16_decode_add, 2, true);
}

static void check_bf16_encode(void)
{
    check_half_encode(ref->bf16_encode, now.tier->kernels.bf16_encode);
}

static void check_bf16_decode(void)
{
    check_float_decode(ref->bf16_decode, now.tier->kernels.bf16_decode, 2, false);
}

static void check_bf16_decode_add(void)
{
    check_float_decode(ref->bf16_decode_add, now.tier->kernels.bf16_decode_add, 2, true);
}

static void check_f32_decode(void)
{
    check_float_decode(ref->f32_decode, now.tier->kernels.f32_decode, 4, false);
}

static void check_f32_decode_add(void)
{
    check_float_decode(ref->f32_decode_add, now.tier->kernels.f32_decode_add, 4, true);
}

/* A magnitude that some of the numbers reach: one of theirs, its neighbour, or anything. */
static uint32_t random_magnitude(const float *x, size_t n)
{
    uint32_t bits = n ? agc_f32_bits(x[random_below((uint32_t)n)]) & 0x7fffffffu : 0;
    switch (random_below(5)) {
    case 0:
        return 0;
    case 1:
        return (uint32_t)random_u64() & 0x7fffffffu;
    case 2:
        return bits + (bits < 0x7fffffffu);
    default:
        return bits;
    }
}

static void check_collect_magnitude(void)
{
    size_t n = now.nelems;
    float *x = place_floats(&in_x, now.nelems), *residual = NULL;
    random_fill(x, n, now.values);
    if (now.residual) {
        residual = place_floats(&in_y, now.nelems);
        fill_residual(residual, now.nelems);
    }
    uint32_t magnitude = random_magnitude(x, n), first = random_below(1000);
    /* Both arrays may be written a vector too far. */
    size_t nbytes = 4 * (n + 16);
    uint32_t *index[2] = {(uint32_t *)(void *)place_output(&out_ref[0], nbytes, 4),
                          (uint32_t *)(void *)place_output(&out_tier[0], nbytes, 4)};
    float *value[2] = {(float *)(void *)place_output(&out_ref[1], nbytes, 4),
                       (float *)(void *)place_output(&out_tier[1], nbytes, 4)};
    uint32_t a =
        ref->collect_magnitude(x, residual, now.nelems, first, magnitude, index[0], value[0]);
    uint32_t b = now.tier->kernels.collect_magnitude(x, residual, now.nelems, first, magnitude,
                                                     index[1], value[1]);
    CHECK_EQ(a, b);
    CHECK_BYTES(index[0], index[1], 4 * (size_t)a);
    CHECK_BYTES(value[0], value[1], 4 * (size_t)a);
    for (uint32_t i = 0; i < a; i++)
        CHECK(index[0][i] >= first && index[0][i] < first + n &&
              (!i || index[0][i - 1] < index[0][i]));
    check_output(0, (uint8_t *)index[1], (uint8_t *)index[1], nbytes); /* what lies around them */
    check_output(1, (uint8_t *)value[1], (uint8_t *)value[1], nbytes);
}

static void check_count_magnitude(void)
{
    float *x = place_floats(&in_x, now.nelems);
    random_fill(x, now.nelems, now.values);
    uint32_t magnitude = random_magnitude(x, now.nelems), expected = 0;
    for (uint32_t i = 0; i < now.nelems; i++)
        expected += (agc_f32_bits(x[i]) & 0x7fffffffu) >= magnitude;
    CHECK_EQ(ref->count_magnitude(x, now.nelems, magnitude), expected);
    CHECK_EQ(now.tier->kernels.count_magnitude(x, now.nelems, magnitude), expected);
}

static void check_residual_add(void)
{
    size_t n = now.nelems;
    float *x = place_floats(&in_x, now.nelems), *drawn = place_floats(&in_y, now.nelems);
    random_fill(x, n, now.values);
    fill_residual(drawn, now.nelems);
    float *a = (float *)(void *)place_output(&out_ref[0], 4 * n, 4);
    float *b = (float *)(void *)place_output(&out_tier[0], 4 * n, 4);
    memcpy(a, drawn, 4 * n);
    memcpy(b, drawn, 4 * n);
    ref->residual_add(x, a, now.nelems);
    now.tier->kernels.residual_add(x, b, now.nelems);
    check_output(0, (uint8_t *)a, (uint8_t *)b, 4 * n);
}

static void check_bf16_store(void)
{
    struct agc_rng rng = {(uint32_t)random_u64(), (uint32_t)random_u64()};
    float *x = place_floats(&in_x, now.nelems);
    fill_residual(x, now.nelems);
    size_t nbytes = 2 * (size_t)now.nelems;
    uint8_t *a = place_output(&out_ref[0], nbytes, 1), *b = place_output(&out_tier[0], nbytes, 1);
    ref->bf16_store(x, now.nelems, rng, a);
    now.tier->kernels.bf16_store(x, now.nelems, rng, b);
    check_output(0, a, b, nbytes);
    for (uint32_t i = 0; i < now.nelems; i++) { /* one of the two neighbours, both finite */
        uint32_t down = agc_f32_bits(x[i]) >> 16, stored = agc_load_u16(a + 2 * (size_t)i);
        CHECK(stored == down || stored == down + 1);
        CHECK((stored & 0x7f80u) != 0x7f80u);
    }
}

static void check_any_nonzero(void)
{
    static const uint32_t dtypes[] = {AGC_DTYPE_F32, AGC_DTYPE_BF16, AGC_DTYPE_F64};
    size_t nbytes = now.nelems;
    uint64_t mask = random_below(4) ? agc_dtype_zero_mask(dtypes[random_below(3)]) : random_u64();
    uint8_t *src = place(&in_x, nbytes, 1);
    memset(src, 0, nbytes);
    for (uint32_t n = random_below(3); nbytes && n > 0; n--) { /* often only a sign */
        size_t at = random_below((uint32_t)nbytes);
        src[at] = (uint8_t)(random_bool() ? 0x80u : 1u << random_below(8));
    }
    bool expected = false;
    for (size_t i = 0; i < nbytes; i++)
        expected |= (src[i] & (uint8_t)(mask >> 8 * (i % 8))) != 0;
    CHECK_EQ(ref->any_nonzero(src, nbytes, mask), expected);
    CHECK_EQ(now.tier->kernels.any_nonzero(src, nbytes, mask), expected);
}

static void check_crc32c(void)
{
    size_t nbytes = now.nelems, half = nbytes / 3;
    uint32_t crc = random_bool() ? 0 : (uint32_t)random_u64();
    uint8_t *src = place(&in_x, nbytes, 1);
    for (size_t i = 0; i < nbytes; i++)
        src[i] = (uint8_t)random_u64();
    uint32_t expected = ref->crc32c(crc, src, nbytes);
    CHECK_EQ(now.tier->kernels.crc32c(crc, src, nbytes), expected);
    crc = now.tier->kernels.crc32c(crc, src, half); /* in two pieces */
    CHECK_EQ(now.tier->kernels.crc32c(crc, src + half, nbytes - half), expected);
}

/* Which of the case's dimensions an operation has: the others are not multiplied out. */
enum { HAS_BLOCKS = 1, HAS_VALUES = 2, HAS_RESIDUAL = 4, HAS_ROUNDING = 8 };

enum op {
#define AGC_KERNEL(ret, name, args) OP_##name,
#include "core/kernels.inc"
#undef AGC_KERNEL
    NOPS
};

#define BLOCK_OPS(name, has_rounding)                                                              \
    [OP_##name##_encode] = {#name "_encode", check_##name##_encode,                                \
                            HAS_BLOCKS | HAS_VALUES | HAS_RESIDUAL | (has_rounding)},              \
    [OP_##name##_decode] = {#name "_decode", check_##name##_decode, HAS_BLOCKS | HAS_VALUES},      \
    [OP_##name##_decode_add] = {#name "_decode_add", check_##name##_decode_add,                    \
                                HAS_BLOCKS | HAS_VALUES}

/* A new line of kernels.inc without a line here has no check, which main reports. */
static const struct {
    const char *name;
    void (*check)(void);
    unsigned has;
} ops[NOPS] = {
    BLOCK_OPS(fp8, HAS_ROUNDING),
    BLOCK_OPS(int8, HAS_ROUNDING),
    BLOCK_OPS(int4, HAS_ROUNDING),
    BLOCK_OPS(ternary, HAS_ROUNDING),
    BLOCK_OPS(sign, 0),
    [OP_f16_encode] = {"f16_encode", check_f16_encode, HAS_VALUES | HAS_RESIDUAL},
    [OP_f16_decode] = {"f16_decode", check_f16_decode, 0},
    [OP_f16_decode_add] = {"f16_decode_add", check_f16_decode_add, 0},
    [OP_bf16_encode] = {"bf16_encode", check_bf16_encode, HAS_VALUES | HAS_RESIDUAL},
    [OP_bf16_decode] = {"bf16_decode", check_bf16_decode, 0},
    [OP_bf16_decode_add] = {"bf16_decode_add", check_bf16_decode_add, 0},
    [OP_f32_decode] = {"f32_decode", check_f32_decode, HAS_VALUES},
    [OP_f32_decode_add] = {"f32_decode_add", check_f32_decode_add, HAS_VALUES},
    [OP_collect_magnitude] = {"collect_magnitude", check_collect_magnitude,
                              HAS_VALUES | HAS_RESIDUAL},
    [OP_count_magnitude] = {"count_magnitude", check_count_magnitude, HAS_VALUES},
    [OP_residual_add] = {"residual_add", check_residual_add, HAS_VALUES},
    [OP_bf16_store] = {"bf16_store", check_bf16_store, HAS_VALUES},
    [OP_any_nonzero] = {"any_nonzero", check_any_nonzero, 0},
    [OP_crc32c] = {"crc32c", check_crc32c, 0},
};

/* The tier has its own variant of the operation. */
static bool tier_has(const struct tier *tier, enum op op)
{
    static const size_t offsets[NOPS] = {
#define AGC_KERNEL(ret, name, args) offsetof(struct agc_kernels, name),
#include "core/kernels.inc"
#undef AGC_KERNEL
    };
    typedef void (*any_function)(void);
    const uint8_t *a = (const uint8_t *)ref, *b = (const uint8_t *)&tier->kernels;
    return memcmp(a + offsets[op], b + offsets[op], sizeof(any_function)) != 0;
}

/* ---- all cases, and random ones ---------------------------------------------------------- */

static enum op op_under_test;
static const struct tier *tier_under_test;
static uint64_t ncases;

static void run_case(void)
{
    now.shift = now.back ? 0 : random_below(16);
    ops[op_under_test].check();
    ncases++;
}

static void for_length(uint32_t nelems)
{
    static const uint32_t blocks[] = {32, 256, 4096};
    unsigned has = ops[op_under_test].has;
    bool huge = nelems > 10000; /* these take their time: a few of each */
    now.nelems = nelems;
    for (uint32_t block = 0; block < (has & HAS_BLOCKS ? 3 : 1); block++) {
        now.block_nelems = blocks[block];
        for (int values = 0; values < (has & HAS_VALUES ? NVALUES : 1); values++) {
            now.values = (enum value_class)values;
            for (int variant = 0; variant < 8; variant++) {
                now.residual = variant & 1;
                now.stochastic = variant & 2;
                now.back = variant & 4;
                if ((now.residual && !(has & HAS_RESIDUAL)) ||
                    (now.stochastic && !(has & HAS_ROUNDING)))
                    continue;
                if (!huge || random_below(4) == 0)
                    run_case();
            }
        }
    }
}

static void check_every_length(void)
{
    static const uint32_t long_ones[] = {255,  256,  257,  511,   512,  513,
                                         4095, 4096, 4097, 65535, 65536};
    test_describe = describe;
    now.op = ops[op_under_test].name;
    now.tier = tier_under_test;
    for (uint32_t n = 0; n <= 130; n++)
        for_length(n);
    for (size_t i = 0; i < sizeof long_ones / sizeof long_ones[0]; i++)
        for_length(long_ones[i]);
}

static uint64_t ncases_wanted;

static void check_random_cases(void)
{
    static const uint32_t length_below[] = {20, 20, 140, 140, 140, 600, 600, 5000, NELEMS_MAX + 1};
    test_describe = describe;
    for (uint64_t i = 0; i < ncases_wanted;) {
        op_under_test = (enum op)random_below(NOPS);
        now.op = ops[op_under_test].name;
        now.tier = &tiers[1 + random_below(NTIERS - 1)];
        if (!now.tier->present || !tier_has(now.tier, op_under_test))
            continue;
        /* The longest are rare, or they would take all the time. */
        now.nelems = random_below(length_below[random_below(random_below(100) ? 8 : 9)]);
        now.block_nelems = 32u << random_below(8);
        now.values = (enum value_class)random_below(NVALUES);
        now.residual = random_bool();
        now.stochastic = random_bool();
        now.back = random_bool();
        run_case();
        i++;
    }
}

/* The portable kernels are the definition of correct; here is what defines them. */
static void check_known_values(void)
{
    CHECK_EQ(ref->crc32c(0, (const uint8_t *)"123456789", 9), 0xe3069283u); /* RFC 3720 */
    for (size_t i = 0; i < NTIERS; i++) {
        if (tiers[i].present)
            CHECK_EQ(tiers[i].kernels.crc32c(0, (const uint8_t *)"123456789", 9), 0xe3069283u);
    }
    for (int op = 0; op < NOPS; op++)
        CHECK(ops[op].check != NULL); /* a line of kernels.inc has no check above */
}

/* ---- bench ------------------------------------------------------------------------------- */

#define BENCH_NELEMS (16u << 20) /* 64 MiB of floats */
#define BENCH_NRUNS 15

static struct {
    float *x, *y, *residual, *residual_start;
    uint8_t *encoded;
    const struct agc_kernels *k;
} bench;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One tile of each measurement: at element i of the tensor. */
typedef void bench_tile(size_t i, uint32_t n);

static void bench_memcpy(size_t i, uint32_t n)
{
    memcpy(bench.y + i, bench.x + i, 4 * (size_t)n);
}

#define BENCH_GRID(name, kernel, residual, rng)                                                    \
    static void name(size_t i, uint32_t n)                                                         \
    {                                                                                              \
        const struct agc_rng key = {1, 2};                                                         \
        (void)key;                                                                                 \
        uint8_t *dst = bench.encoded + i / NELEMS_MAX * (NELEMS_MAX + 1024);                       \
        bench.k->kernel##_encode(bench.x + i, residual, n, 256, rng, dst, dst + 1024);             \
    }
#define BENCH_GRID_DECODE(kernel)                                                                  \
    static void bench_##kernel(size_t i, uint32_t n)                                               \
    {                                                                                              \
        const uint8_t *src = bench.encoded + i / NELEMS_MAX * (NELEMS_MAX + 1024);                 \
        bench.k->kernel(src, src + 1024, n, 256, 0.5f, bench.y + i);                               \
    }
#define BENCH_BLOCKS(name)                                                                         \
    BENCH_GRID(bench_##name, name, NULL, NULL)                                                     \
    BENCH_GRID(bench_##name##_ef, name, bench.residual + i, NULL)                                  \
    BENCH_GRID(bench_##name##_st, name, NULL, &key)                                                \
    BENCH_GRID(bench_##name##_ef_st, name, bench.residual + i, &key)                               \
    BENCH_GRID_DECODE(name##_decode)                                                               \
    BENCH_GRID_DECODE(name##_decode_add)
BENCH_BLOCKS(fp8)
BENCH_BLOCKS(int8)
BENCH_BLOCKS(int4)
BENCH_BLOCKS(ternary)
BENCH_BLOCKS(sign)

#define BENCH_HALF(name)                                                                           \
    static void bench_##name##_encode(size_t i, uint32_t n)                                        \
    {                                                                                              \
        bench.k->name##_encode(bench.x + i, NULL, n, bench.encoded + 2 * i);                       \
    }                                                                                              \
    static void bench_##name##_encode_ef(size_t i, uint32_t n)                                     \
    {                                                                                              \
        bench.k->name##_encode(bench.x + i, bench.residual + i, n, bench.encoded + 2 * i);         \
    }                                                                                              \
    static void bench_##name##_decode(size_t i, uint32_t n)                                        \
    {                                                                                              \
        bench.k->name##_decode(bench.encoded + 2 * i, n, 0.5f, bench.y + i);                       \
    }                                                                                              \
    static void bench_##name##_decode_add(size_t i, uint32_t n)                                    \
    {                                                                                              \
        bench.k->name##_decode_add(bench.encoded + 2 * i, n, 0.5f, bench.y + i);                   \
    }
BENCH_HALF(f16)
BENCH_HALF(bf16)

static void bench_f32_decode(size_t i, uint32_t n)
{
    bench.k->f32_decode((const uint8_t *)(bench.x + i), n, 0.5f, bench.y + i);
}

static void bench_f32_decode_add(size_t i, uint32_t n)
{
    bench.k->f32_decode_add((const uint8_t *)(bench.x + i), n, 0.5f, bench.y + i);
}

static void bench_bf16_store(size_t i, uint32_t n)
{
    const struct agc_rng key = {1, 2};
    bench.k->bf16_store(bench.x + i, n, key, bench.encoded + 2 * i);
}

static bool bench_any;
static uint32_t bench_crc;

static void bench_any_nonzero(size_t i, uint32_t n)
{
    /* Zeros: the longest way. */
    bench_any |= bench.k->any_nonzero((const uint8_t *)(bench.residual_start + i), 4 * (uint64_t)n,
                                      ~(uint64_t)0);
}

static void bench_crc32c(size_t i, uint32_t n)
{
    bench_crc = bench.k->crc32c(bench_crc, (const uint8_t *)(bench.x + i), 4 * (uint64_t)n);
}

#define BENCH_BLOCKS_ROWS(name)                                                                    \
    {#name "_encode", OP_##name##_encode, bench_##name, NULL},                                     \
        {#name "_encode residual", OP_##name##_encode, bench_##name##_ef, NULL},                   \
        {#name "_encode stochastic", OP_##name##_encode, bench_##name##_st, NULL},                 \
        {#name "_encode residual stochastic", OP_##name##_encode, bench_##name##_ef_st, NULL},     \
        {#name "_decode", OP_##name##_decode, bench_##name##_decode, bench_##name},                \
    {                                                                                              \
        #name "_decode_add", OP_##name##_decode_add, bench_##name##_decode_add, bench_##name       \
    }

static const struct {
    const char *name;
    enum op op;
    bench_tile *tile;
    bench_tile *prepare; /* fills what it reads; NULL: nothing */
} benches[] = {
    BENCH_BLOCKS_ROWS(fp8),
    BENCH_BLOCKS_ROWS(int8),
    BENCH_BLOCKS_ROWS(int4),
    BENCH_BLOCKS_ROWS(ternary),
    BENCH_BLOCKS_ROWS(sign),
    {"f16_encode", OP_f16_encode, bench_f16_encode, NULL},
    {"f16_encode residual", OP_f16_encode, bench_f16_encode_ef, NULL},
    {"f16_decode", OP_f16_decode, bench_f16_decode, bench_f16_encode},
    {"f16_decode_add", OP_f16_decode_add, bench_f16_decode_add, bench_f16_encode},
    {"bf16_encode", OP_bf16_encode, bench_bf16_encode, NULL},
    {"bf16_encode residual", OP_bf16_encode, bench_bf16_encode_ef, NULL},
    {"bf16_decode", OP_bf16_decode, bench_bf16_decode, bench_bf16_encode},
    {"bf16_decode_add", OP_bf16_decode_add, bench_bf16_decode_add, bench_bf16_encode},
    {"f32_decode", OP_f32_decode, bench_f32_decode, NULL},
    {"f32_decode_add", OP_f32_decode_add, bench_f32_decode_add, NULL},
    {"bf16_store", OP_bf16_store, bench_bf16_store, NULL},
    {"any_nonzero", OP_any_nonzero, bench_any_nonzero, NULL},
    {"crc32c", OP_crc32c, bench_crc32c, NULL},
};

static const char *bench_prefix = "";

static double time_pass(bench_tile *tile)
{
    double began = seconds();
    for (size_t i = 0; i < BENCH_NELEMS; i += NELEMS_MAX)
        tile(i, NELEMS_MAX);
    return seconds() - began;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Interleaved with memcpy: on a shared machine both see the same neighbours. The median says what a
 * run gets here, the fastest of each says what the code can do. */
static void bench_one(const char *name, const char *tier, bench_tile *tile)
{
    double times[BENCH_NRUNS], ratios[BENCH_NRUNS], fastest_copy = 1e9;
    int nruns = 0;
    double budget = seconds() + 3.0; /* the slowest portable kernels: fewer runs */
    for (; nruns < BENCH_NRUNS && (nruns < 3 || seconds() < budget); nruns++) {
        double copy = time_pass(bench_memcpy);
        fastest_copy = copy < fastest_copy ? copy : fastest_copy;
        times[nruns] = time_pass(tile);
        ratios[nruns] = times[nruns] / copy;
    }
    qsort(times, (size_t)nruns, sizeof times[0], by_value);
    qsort(ratios, (size_t)nruns, sizeof ratios[0], by_value);
    printf("%-32s %-7s %7.2f GB/s %7.2f x memcpy    fastest %7.2f GB/s %7.2f x\n", name, tier,
           4e-9 * BENCH_NELEMS / times[nruns / 2], ratios[nruns / 2],
           4e-9 * BENCH_NELEMS / times[0], times[0] / fastest_copy);
    fflush(stdout);
}

static void run_benches(void)
{
    size_t nbytes = 4 * (size_t)BENCH_NELEMS;
    bench.x = (float *)test_alloc(nbytes);
    bench.y = (float *)test_alloc(nbytes);
    bench.residual = (float *)test_alloc(nbytes);
    bench.residual_start = (float *)test_alloc(nbytes);
    bench.encoded = (uint8_t *)test_alloc(nbytes);
    random_fill(bench.x, BENCH_NELEMS, VALUES_GAUSS);
    memset(bench.y, 0, nbytes);
    memset(bench.residual_start, 0, nbytes);
    memset(bench.encoded, 0, nbytes);
    printf("64 MiB of floats in tiles of 65,536, medians; GB/s counts the floats\n");
    for (size_t i = 0; i < sizeof benches / sizeof benches[0]; i++) {
        if (strncmp(benches[i].name, bench_prefix, strlen(bench_prefix)) != 0)
            continue;
        for (size_t t = 0; t < NTIERS; t++) {
            if (!tiers[t].present || (t && !tier_has(&tiers[t], benches[i].op)))
                continue;
            if (t > 1 && benches[i].op == OP_crc32c)
                continue; /* the same function in every tier */
            bench.k = &tiers[t].kernels;
            memset(bench.residual, 0, nbytes);
            if (benches[i].prepare)
                time_pass(benches[i].prepare);
            bench_one(benches[i].name, tiers[t].name, benches[i].tile);
        }
    }
    free(bench.x);
    free(bench.y);
    free(bench.residual);
    free(bench.residual_start);
    free(bench.encoded);
}

/* ---- main -------------------------------------------------------------------------------- */

static void run_all_checks(void)
{
    char name[64];
    test_run(&(struct test)TEST(check_known_values));
    if (ncases_wanted) {
        test_run(&(struct test)TEST(check_random_cases));
        return;
    }
    for (size_t t = 1; t < NTIERS; t++) {
        for (int op = 0; op < NOPS; op++) {
            op_under_test = (enum op)op;
            tier_under_test = &tiers[t];
            if (!tiers[t].present || !ops[op].check || !tier_has(&tiers[t], op_under_test))
                continue;
            snprintf(name, sizeof name, "%s %s", ops[op].name, tiers[t].name);
            test_run(&(struct test){name, check_every_length});
        }
    }
    /* What no tier overlays is checked as it is. */
    op_under_test = OP_any_nonzero;
    tier_under_test = &tiers[0];
    test_run(&(struct test){"any_nonzero c", check_every_length});
}

int main(int argc, char **argv)
{
    uint64_t seed = 0;
    bool benchmark = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            seed = strtoull(argv[++i], NULL, 0);
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
            bench_prefix = argv[++i];
        else if (strcmp(argv[i], "--cases") == 0 && i + 1 < argc)
            ncases_wanted = strtoull(argv[++i], NULL, 0);
        else if (strcmp(argv[i], "--bench") == 0)
            benchmark = true;
    }
    test_start(seed, benchmark || ncases_wanted ? 0 : 300);
    tiers_init();
    size_t nbytes = 4 * (size_t)NELEMS_MAX + 4096;
    in_x = guarded_create(nbytes);
    in_y = guarded_create(nbytes);
    for (int i = 0; i < 2; i++) {
        out_ref[i] = guarded_create(nbytes);
        out_tier[i] = guarded_create(nbytes);
    }
    keep = (float *)test_alloc(4 * (size_t)NELEMS_MAX);
    if (benchmark) {
        run_benches();
    } else {
        run_all_checks();
        printf("%llu cases\n", (unsigned long long)ncases);
    }
    guarded_destroy(&in_x);
    guarded_destroy(&in_y);
    for (int i = 0; i < 2; i++) {
        guarded_destroy(&out_ref[i]);
        guarded_destroy(&out_tier[i]);
    }
    free(keep);
    return benchmark ? 0 : test_finish();
}
