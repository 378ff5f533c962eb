/* test_codec.c: what every codec promises, for every codec of the list: a new codec is tested by
 * existing.
 *
 * All of it goes through agc_encode and agc_decode, as a user would; check_simd.c compares the CPU
 * tiers underneath.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agentcomm.h"
#include "core/half.h"
#include "core/wire.h"
#include "harness.h"

static float scratch[AGC_SCRATCH_NELEMS];

/* ---- specs ------------------------------------------------------------------------------- */

#define NSPECS_MAX 96
static struct agc_spec specs[NSPECS_MAX];
static struct agc_codec_info infos[NSPECS_MAX]; /* of the same index */
static int nspecs;

static void add_spec(const struct agc_codec_info *info, struct agc_spec spec)
{
    CHECK(nspecs < NSPECS_MAX);
    infos[nspecs] = *info;
    specs[nspecs] = spec;
    specs[nspecs++].codec = info->id;
}

/* Of the sparse codecs: one element of a tile, some, all; each codec of values. */
static const struct agc_spec sparse_specs[] = {
    {.frac_e9 = 1},
    {.frac_e9 = 10000000},
    {.frac_e9 = 1000000000},
    {.frac_e9 = 100000000, .values = 2},
    {.frac_e9 = 500000000, .values = 4},
    {.frac_e9 = 10000000, .values = 5},
    {.frac_e9 = 250000000, .values = 6, .block_nelems = 32, .rounding = AGC_ROUNDING_STOCHASTIC},
    {.frac_e9 = 100000000, .values = 8},
};
#define NSPARSE ((int)(sizeof sparse_specs / sizeof sparse_specs[0]))

/* Every codec with every block size and rounding that it offers. */
static void list_specs(void)
{
    static const uint32_t blocks[] = {0, 32, 256, 4096};
    struct agc_codec_info info;
    for (uint32_t i = 0; agc_codec_info_at(i, &info); i++) {
        for (int j = 0; info.flags & AGC_CODEC_SPARSE && j < NSPARSE; j++)
            add_spec(&info, sparse_specs[j]);
        if (info.flags & AGC_CODEC_SPARSE)
            continue;
        for (int block = 0; block < (info.flags & AGC_CODEC_BLOCKS ? 4 : 1); block++)
            for (uint32_t rounding = 0; rounding < (info.flags & AGC_CODEC_STOCHASTIC ? 2 : 1);
                 rounding++)
                add_spec(&info,
                         (struct agc_spec){.block_nelems = blocks[block], .rounding = rounding});
    }
}

static int spec_now;
static enum value_class values_now;
static uint64_t nelems_now;

static void describe(char *dst, size_t dst_cap_nbytes)
{
    snprintf(dst, dst_cap_nbytes, "%s block %u rounding %u frac %u values %u, %llu elements, %s",
             infos[spec_now].name, specs[spec_now].block_nelems, specs[spec_now].rounding,
             specs[spec_now].frac_e9, specs[spec_now].values, (unsigned long long)nelems_now,
             value_class_name(values_now));
}

static bool is_sparse(int spec)
{
    return (infos[spec].flags & AGC_CODEC_SPARSE) != 0;
}

/* Elements that share their fate: in a sparse codec those of a tile. */
static uint64_t block_nelems_of(int spec)
{
    struct agc_spec resolved;
    if (is_sparse(spec))
        return AGC_TILE_NELEMS_MAX;
    CHECK_OK(agc_spec_resolve(&specs[spec], &resolved));
    return resolved.block_nelems ? resolved.block_nelems : 1;
}

/* ---- a tensor on its way ----------------------------------------------------------------- */

struct tensor {
    uint64_t nelems;
    float *x;
    float *residual_old;
    float *residual; /* after encoding */
    float *decoded;
    float *absmax; /* of blocks of x */
    uint8_t *frame;
    uint64_t frame_nbytes;
};

static struct tensor tensor_create(uint64_t nelems)
{
    struct tensor t = {.nelems = nelems};
    t.x = (float *)test_alloc(4 * nelems);
    t.residual_old = (float *)test_alloc(4 * nelems);
    t.residual = (float *)test_alloc(4 * nelems);
    t.decoded = (float *)test_alloc(4 * nelems);
    t.absmax = (float *)test_alloc(4 * (nelems / 32 + AGC_TILE_NELEMS_MAX / 32));
    t.frame = (uint8_t *)test_alloc(128 + 8 * nelems + 4 * 4096);
    memset(t.residual_old, 0, 4 * nelems);
    nelems_now = nelems;
    return t;
}

static void tensor_destroy(struct tensor *t)
{
    free(t->x);
    free(t->residual_old);
    free(t->residual);
    free(t->decoded);
    free(t->absmax);
    free(t->frame);
}

/* Fills in what block_absmax returns; tiles have room for blocks of 32. */
static void find_absmax(struct tensor *t, int spec)
{
    uint64_t block = block_nelems_of(spec);
    memset(t->absmax, 0, 4 * (t->nelems / 32 + AGC_TILE_NELEMS_MAX / 32));
    for (uint64_t i = 0; block > 1 && i < t->nelems; i++) {
        uint64_t at =
            i / AGC_TILE_NELEMS_MAX * (AGC_TILE_NELEMS_MAX / 32) + i % AGC_TILE_NELEMS_MAX / block;
        t->absmax[at] = fmaxf(t->absmax[at], fabsf(t->x[i]));
    }
}

/* x and residual_old -> frame and residual -> decoded */
static void travel(struct tensor *t, int spec, bool feedback, uint32_t seed)
{
    uint64_t nbytes, cap;
    memcpy(t->residual, t->residual_old, 4 * t->nelems);
    find_absmax(t, spec);
    CHECK_OK(agc_frame_nbytes(&specs[spec], AGC_DTYPE_F32, t->nelems, false, &cap));
    CHECK(cap <= 128 + 8 * t->nelems + 4 * 4096);
    CHECK_OK(agc_encode(&specs[spec], t->x, AGC_DTYPE_F32, t->nelems, feedback ? t->residual : NULL,
                        seed, false, scratch, t->frame, cap, &nbytes));
    CHECK_EQ(nbytes, cap);
    t->frame_nbytes = nbytes;
    CHECK_OK(agc_decode(t->frame, nbytes, t->decoded, AGC_DTYPE_F32, t->nelems, false, scratch));
}

/* Lengths around vectors, blocks and tiles. */
static const uint64_t lengths[] = {0,   1,   2,    15,   31,   33,    100,   255,
                                   256, 257, 1000, 4097, 5000, 65535, 65536, 65537};
#define NLENGTHS ((int)(sizeof lengths / sizeof lengths[0]))

/* For every spec, length and finite class of values. */
static void for_each_finite(void (*check)(struct tensor *t))
{
    test_describe = describe;
    for (int i = 0; i < NLENGTHS; i++) {
        struct tensor t = tensor_create(lengths[i]);
        for (int v = 0; v < NVALUES_FINITE; v++) {
            values_now = (enum value_class)v;
            for (spec_now = 0; spec_now < nspecs; spec_now++) {
                if (t.nelems > 10000 && random_below(6) != 0)
                    continue; /* these take their time: a few of each */
                random_fill(t.x, t.nelems, values_now);
                memset(t.residual_old, 0, 4 * t.nelems);
                check(&t);
            }
        }
        tensor_destroy(&t);
    }
    spec_now = 0;
}

/* ---- bounds ------------------------------------------------------------------------------ */

static bool is_codec(const char *name)
{
    return strcmp(infos[spec_now].name, name) == 0;
}

/* Steps from zero to the largest magnitude, of the codecs that are scaled by it; 0: another. */
static double grid_levels(void)
{
    bool stochastic = specs[spec_now].rounding == AGC_ROUNDING_STOCHASTIC;
    return is_codec("int8")                    ? 127
           : is_codec("int4")                  ? 7
           : is_codec("fp8")                   ? 448
           : is_codec("ternary") && stochastic ? 1
                                               : 0;
}

/* The scale of element i's block, from the frame: the scales of a tile are in front of its values.
 */
static double grid_scale(const struct tensor *t, uint64_t i)
{
    uint64_t block = block_nelems_of(spec_now), tile = i / AGC_TILE_NELEMS_MAX, tile_nbytes;
    CHECK_OK(agc_frame_nbytes(&specs[spec_now], AGC_DTYPE_F32, AGC_TILE_NELEMS_MAX, false,
                              &tile_nbytes));
    tile_nbytes -= AGC_WIRE_HEADER_NBYTES;
    const uint8_t *scales = t->frame + AGC_WIRE_HEADER_NBYTES + tile * tile_nbytes;
    return (double)agc_f32_from_bits(agc_load_u32(scales + 4 * (i % AGC_TILE_NELEMS_MAX / block)));
}

/* Largest magnitude of element i's block, the residual left out. */
static double block_absmax(const struct tensor *t, uint64_t i)
{
    uint64_t in_tile = i % AGC_TILE_NELEMS_MAX / block_nelems_of(spec_now);
    return (double)t->absmax[i / AGC_TILE_NELEMS_MAX * (AGC_TILE_NELEMS_MAX / 32) + in_tile];
}

/* Largest error that decoding v, element i of the tensor, may have; infinite where the format may
 * overflow.
 *
 * int8, and int4 with 7 for 127: with s = absmax / 127 exact, scale = s (1 + a), inverse = (1 + b)
 * / s, steps = v inverse (1
 * + c) and decoded = q scale (1 + d), each of a..d at most 2^-24. steps is off v / s by at most 127
 * (|b| + |c|), q off steps by 1/2 (by 1 if stochastic), so the error is at most s (1/2 + 127 (|a| +
 * |b| + |c| + |d|)) <= scale (1/2 + 127 * 2^-22) with room for the products. In a tiny block v is
 * divided by the scale itself, which is one rounding less. The bound holds for the scale on the
 * wire, whatever it had to be rounded up to.
 */
static double error_bound(const struct tensor *t, uint64_t i, double v)
{
    double factor = specs[spec_now].rounding == AGC_ROUNDING_STOCHASTIC ? 1.0 : 0.5;
    if (is_codec("raw"))
        return 0.0;
    if (is_codec("fp16")) /* half a unit in the last of 11 places; subnormals: of 2^-24 */
        return fabs(v) >= 65520.0 ? (double)INFINITY : fmax(fabs(v) * 0x1p-11, 0x1p-25);
    if (is_codec("bf16")) /* 8 places; subnormals: of 2^-133 */
        return fabs(v) >= 0x1.ffp127 ? (double)INFINITY : fmax(fabs(v) * 0x1p-8, 0x1p-134);
    if (is_codec("fp8")) /* the distance of neighbours is an eighth of their magnitude, at least */
        return factor * fmax(fabs(v) * (0.125 + 0x1p-20), grid_scale(t, i) * 0x1p-9) +
               fabs(v) * 0x1p-21 + 0x1p-149;
    if (grid_levels() > 0)
        return grid_scale(t, i) * (factor + grid_levels() * 0x1p-22);
    if (is_codec("ternary") || is_codec("sign")) /* of what is encoded without a residual */
        return fmax(block_absmax(t, i), fabs(v)) * (1.0 + 0x1p-11) + 0x1p-149;
    if (is_sparse(spec_now)) { /* of what is not kept, all of it */
        double largest = fmax(block_absmax(t, i), fabs(v));
        bool overflows = specs[spec_now].values == 2 && largest >= 65520.0;
        return overflows ? (double)INFINITY : largest * (1.0 + 0x1p-11) + 0x1p-149;
    }
    FAIL("codec %s has no error bound here", infos[spec_now].name);
}

static void check_error_bound(struct tensor *t)
{
    travel(t, spec_now, false, 7);
    for (uint64_t i = 0; i < t->nelems; i++) {
        double v = (double)t->x[i], bound = error_bound(t, i, v);
        if (bound < (double)INFINITY)
            CHECK_LE(fabs((double)t->decoded[i] - v), bound);
    }
}

static void test_error_is_bounded(void)
{
    for_each_finite(check_error_bound);
}

/* The scale is no larger than the largest magnitude asks for: absmax / levels, rounded, and one
 * step up if that was down. */
static void test_scale_is_tight(void)
{
    test_describe = describe;
    struct tensor t = tensor_create(512);
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        double levels = grid_levels();
        if (levels == 0)
            continue;
        for (int v = 0; v < NVALUES_FINITE; v++) {
            values_now = (enum value_class)v;
            random_fill(t.x, t.nelems, values_now);
            travel(&t, spec_now, false, 1);
            uint64_t block = block_nelems_of(spec_now);
            for (uint64_t first = 0; first < t.nelems; first += block) {
                double absmax = 0.0;
                for (uint64_t i = first; i < t.nelems && i < first + block; i++)
                    absmax = fmax(absmax, fabs((double)t.x[i]));
                double scale = grid_scale(&t, first);
                CHECK_LE(scale, absmax / levels * (1.0 + 0x1p-22) + 0x1p-149);
                CHECK_LE(absmax / levels * (1.0 - 0x1p-22), scale);
            }
        }
    }
    spec_now = 0;
    tensor_destroy(&t);
}

static void check_stays_finite(struct tensor *t)
{
    /* What was lost before is of the size of a quantum; only at 3e38 the sum itself would leave the
     * range. */
    bool feedback = values_now != VALUES_MAX && values_now != VALUES_HUGE &&
                    values_now != VALUES_MIXED && values_now != VALUES_ONE_HOT &&
                    values_now != VALUES_CONSTANT;
    travel(t, spec_now, feedback, 3);
    for (int round = 0; round < 3; round++) {
        for (uint64_t i = 0; i < t->nelems; i++) {
            double v = (double)t->x[i] + (double)t->residual_old[i];
            if (error_bound(t, i, v) < (double)INFINITY)
                CHECK(isfinite(t->decoded[i]));
            CHECK(isfinite(t->residual[i]));
        }
        memcpy(t->residual_old, t->residual, 4 * t->nelems);
        travel(t, spec_now, feedback, 3);
    }
}

static void test_finite_stays_finite(void)
{
    for_each_finite(check_stays_finite);
}

static void test_constant_block(void)
{
    test_describe = describe;
    struct tensor t = tensor_create(3 * 4096 + 17);
    values_now = VALUES_CONSTANT;
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        for (int i = 0; i < 100; i++) {
            random_fill(t.x, t.nelems, VALUES_CONSTANT);
            travel(&t, spec_now, false, (uint32_t)i);
            for (uint64_t j = 0; j < t.nelems; j += 97) {
                double c = (double)t.x[j], bound = error_bound(&t, j, c);
                /* Every element is the largest step, give or take roundings; a subnormal scale is
                 * rounded up too far for that, and a stochastic rounding may take the roundings for
                 * a fraction. */
                if (specs[spec_now].rounding == AGC_ROUNDING_NEAREST && fabs(c) > 0x1p-110) {
                    if (grid_levels() > 0)
                        bound = fabs(c) * 0x1p-21;
                    else if (!is_sparse(spec_now) &&
                             block_nelems_of(spec_now) > 1) /* a sum of up to 4096 roundings */
                        bound = fabs(c) * 0x1p-12;
                }
                if (bound < (double)INFINITY)
                    CHECK_LE(fabs((double)t.decoded[j] - c), bound);
            }
        }
    }
    spec_now = 0;
    tensor_destroy(&t);
}

/* ---- zero -------------------------------------------------------------------------------- */

static void check_zeros(struct tensor *t)
{
    /* Zeros of both signs among whatever the class holds. */
    for (uint64_t i = 0; i < t->nelems; i++)
        if (i % 3 == 0)
            t->x[i] = i % 2 ? 0.0f : -0.0f;
    bool alone = values_now == VALUES_ZERO || values_now == VALUES_MINUS_ZERO;
    travel(t, spec_now, true, 5);
    for (uint64_t i = 0; i < t->nelems; i++) {
        if (t->x[i] != 0.0f)
            continue;
        bool moves = infos[spec_now].flags & AGC_CODEC_ZERO_IN_BLOCK_MOVES ||
                     specs[spec_now].values == 8; /* sign */
        if (alone || !moves) {
            CHECK(t->decoded[i] == 0.0f);
            CHECK(t->residual[i] == 0.0f);
        }
    }
}

static void test_zero_stays_zero(void)
{
    for_each_finite(check_zeros);
}

/* ---- residuals --------------------------------------------------------------------------- */

/* x + residual before = decoded + residual after. The codec forms v = x + residual and v - decoded
 * in fp32: two roundings, each at most 2^-24 of its result (2^-150 where that is subnormal). */
static void check_conservation(struct tensor *t)
{
    for (uint64_t i = 0; i < t->nelems; i++)
        t->residual_old[i] = t->x[i] * 0.01f * random_gauss();
    travel(t, spec_now, true, 11);
    for (uint64_t i = 0; i < t->nelems; i++) {
        double v = (double)t->x[i] + (double)t->residual_old[i];
        if (fabs(v) > 3e38 || error_bound(t, i, v) == (double)INFINITY)
            continue; /* nothing is conserved of what overflows */
        if (!isfinite(t->decoded[i]))
            continue; /* shares a block with one that overflowed */
        double after = (double)t->decoded[i] + (double)t->residual[i];
        double bound = 0x1p-23 * (fabs(v) + fabs((double)t->residual[i])) + 0x1p-149;
        CHECK_LE(fabs(v - after), bound);
    }
}

static void test_residual_conserves(void)
{
    for_each_finite(check_conservation);
}

/* Over many rounds too: what was sent plus what is owed is what came in. */
static void test_residual_over_rounds(void)
{
    enum { NROUNDS = 50 };
    test_describe = describe;
    values_now = VALUES_GAUSS;
    struct tensor t = tensor_create(1000);
    double *in = (double *)test_alloc(8 * t.nelems), *out = (double *)test_alloc(8 * t.nelems);
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        memset(t.residual_old, 0, 4 * t.nelems);
        memset(in, 0, 8 * t.nelems);
        memset(out, 0, 8 * t.nelems);
        for (uint32_t round = 0; round < NROUNDS; round++) {
            random_fill(t.x, t.nelems, VALUES_GAUSS);
            travel(&t, spec_now, true, round);
            memcpy(t.residual_old, t.residual, 4 * t.nelems);
            for (uint64_t i = 0; i < t.nelems; i++) {
                in[i] += (double)t.x[i];
                out[i] += (double)t.decoded[i];
            }
        }
        /* Two roundings of numbers below 8 per round. */
        for (uint64_t i = 0; i < t.nelems; i++)
            CHECK_LE(fabs(in[i] - out[i] - (double)t.residual[i]), NROUNDS * 8 * 0x1p-23);
    }
    spec_now = 0;
    free(in);
    free(out);
    tensor_destroy(&t);
}

/* ---- what is not finite ------------------------------------------------------------------ */

static void test_non_finite_stays_in_its_block(void)
{
    static const uint32_t bad_bits[] = {0x7f800000u, 0xff800000u, 0x7fc00000u,
                                        0xffc12345u, 0x7f800001u, 0xffbfffffu};
    test_describe = describe;
    values_now = VALUES_NAN;
    struct tensor clean = tensor_create(70000), t = tensor_create(70000);
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        uint64_t block = block_nelems_of(spec_now);
        if (is_sparse(spec_now))
            continue; /* the next test */
        random_fill(clean.x, clean.nelems, VALUES_GAUSS);
        random_fill(clean.residual_old, clean.nelems, VALUES_GAUSS);
        travel(&clean, spec_now, true, 1);
        for (int i = 0; i < 36; i++) {
            memcpy(t.x, clean.x, 4 * t.nelems);
            memcpy(t.residual_old, clean.residual_old, 4 * t.nelems);
            /* The first and last of the tensor, the tile and a block, and anywhere. */
            uint64_t at[] = {0, t.nelems - 1, 65535, 65536, 256, random_u64() % t.nelems};
            uint64_t bad = at[i % 6], tile = bad / AGC_TILE_NELEMS_MAX * AGC_TILE_NELEMS_MAX;
            uint64_t begin = tile + (bad - tile) / block * block;
            uint64_t end = begin + block < t.nelems ? begin + block : t.nelems;
            memcpy(&t.x[bad], &bad_bits[i / 6], 4);
            travel(&t, spec_now, true, 1);
            for (uint64_t j = begin; j < end; j++)
                CHECK(!isfinite(t.decoded[j]));
            CHECK_BYTES(t.residual + begin, t.residual_old + begin, 4 * (end - begin));
            CHECK_BYTES(t.decoded, clean.decoded, 4 * begin);
            CHECK_BYTES(t.residual, clean.residual, 4 * begin);
            CHECK_BYTES(t.decoded + end, clean.decoded + end, 4 * (t.nelems - end));
            CHECK_BYTES(t.residual + end, clean.residual + end, 4 * (t.nelems - end));
        }
    }
    spec_now = 0;
    tensor_destroy(&clean);
    tensor_destroy(&t);
}

/* Rank of a magnitude: NaNs are equal, and larger than infinities. */
static uint32_t magnitude_of(float x)
{
    return x == x ? agc_f32_bits(x) & 0x7fffffffu : AGC_F32_NAN_BITS;
}

/* Checks the indices of one tile's payload; returns the length of the payload. An element is kept
 * if fewer than k are larger, or equal and before it. */
static uint64_t check_largest(const struct tensor *t, uint64_t first, const uint8_t *payload)
{
    uint64_t nelems = t->nelems - first, nkept, nlarger = 0, nties = 0, j = 0, nbytes;
    nelems = nelems < AGC_TILE_NELEMS_MAX ? nelems : AGC_TILE_NELEMS_MAX;
    nkept = (nelems * specs[spec_now].frac_e9 + 999999999) / 1000000000;
    uint32_t last = UINT32_MAX;
    for (uint64_t i = 0; i < nkept; i++) { /* the smallest that is kept */
        uint32_t m = magnitude_of(t->x[first + agc_load_u16(payload + 2 * i)]);
        last = m < last ? m : last;
    }
    for (uint64_t i = 0; i < nelems; i++)
        nlarger += magnitude_of(t->x[first + i]) > last;
    CHECK(nlarger < nkept);
    for (uint64_t i = 0; i < nelems; i++) {
        uint32_t m = magnitude_of(t->x[first + i]);
        bool kept = m > last || (m == last && nties++ < nkept - nlarger);
        if (kept)
            CHECK_EQ(agc_load_u16(payload + 2 * j++), i);
        float expected = kept ? t->x[first + i] : 0.0f;
        CHECK(t->decoded[first + i] == expected || expected != expected);
    }
    CHECK_EQ(j, nkept);
    nbytes = (2 * nkept + 15) / 16 * 16 + 4 * nkept;
    return (nbytes + 15) / 16 * 16;
}

/* In a sparse codec what is not finite is kept like the largest of its tile (topk), or if it is
 * drawn (randk); what shares a block of values with it is lost too, and the rest arrives. */
static void test_non_finite_in_sparse_codecs(void)
{
    static const uint32_t bad_bits[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffbfffffu};
    test_describe = describe;
    values_now = VALUES_NAN;
    struct tensor t = tensor_create(70000);
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        for (int i = 0; is_sparse(spec_now) && i < 8; i++) {
            random_fill(t.x, t.nelems, VALUES_GAUSS);
            random_fill(t.residual_old, t.nelems, VALUES_GAUSS);
            uint64_t bad = random_u64() % t.nelems;
            uint32_t nlost = 0;
            bad = i < 4 ? (i % 2 ? 65536 : 0) : bad;
            memcpy(&t.x[bad], &bad_bits[i % 4], 4);
            travel(&t, spec_now, true, 1);
            if (is_codec("topk"))
                CHECK(!isfinite(t.decoded[bad]));
            for (uint64_t j = 0; j < t.nelems; j++) {
                CHECK(isfinite(t.residual[j]));
                if (isfinite(t.decoded[j]))
                    continue;
                nlost++;
                CHECK_EQ(j / AGC_TILE_NELEMS_MAX, bad / AGC_TILE_NELEMS_MAX);
                CHECK(t.residual[j] == t.residual_old[j]);
            }
            CHECK_LE(nlost, specs[spec_now].values > 2 ? 256u : 1u);
            CHECK(t.residual[bad] == t.residual_old[bad]);
        }
    }
    spec_now = 0;
    tensor_destroy(&t);
}

/* What is kept is the largest, of equal ones the first, by an obvious method. */
static void test_topk_keeps_the_largest(void)
{
    test_describe = describe;
    for (int l = 0; l < NLENGTHS; l++) {
        struct tensor t = tensor_create(lengths[l]);
        for (int v = 0; v < NVALUES; v++) {
            values_now = (enum value_class)v;
            random_fill(t.x, t.nelems, values_now);
            for (spec_now = 0; spec_now < nspecs; spec_now++) {
                if (!is_codec("topk") || specs[spec_now].values)
                    continue;
                travel(&t, spec_now, false, 1);
                const uint8_t *payload = t.frame + AGC_WIRE_HEADER_NBYTES;
                for (uint64_t first = 0; first < t.nelems; first += AGC_TILE_NELEMS_MAX)
                    payload += check_largest(&t, first, payload);
            }
        }
        tensor_destroy(&t);
    }
    spec_now = 0;
}

/* ---- adding, aligning, converting -------------------------------------------------------- */

static void test_decode_add_is_decode_then_add(void)
{
    test_describe = describe;
    for (int i = 0; i < NLENGTHS; i++) {
        struct tensor t = tensor_create(lengths[i]);
        float *sum = (float *)test_alloc(4 * t.nelems), *expected = t.residual_old;
        for (spec_now = 0; spec_now < nspecs; spec_now++) {
            for (int v = 0; v < NVALUES; v++) {
                values_now = (enum value_class)v;
                random_fill(t.x, t.nelems, values_now);
                travel(&t, spec_now, false, 2);
                random_fill(sum, t.nelems, (enum value_class)random_below(NVALUES));
                for (uint64_t j = 0; j < t.nelems; j++) {
                    float added = sum[j] + t.decoded[j];
                    expected[j] = added == added ? added : agc_f32_from_bits(AGC_F32_NAN_BITS);
                }
                CHECK_OK(agc_decode(t.frame, t.frame_nbytes, sum, AGC_DTYPE_F32, t.nelems, true,
                                    scratch));
                CHECK_BYTES(sum, expected, 4 * t.nelems);
            }
        }
        free(sum);
        tensor_destroy(&t);
    }
    spec_now = 0;
}

static const uint32_t dtypes[] = {AGC_DTYPE_F32, AGC_DTYPE_F16, AGC_DTYPE_BF16, AGC_DTYPE_F64};

/* x in another data type, by definitions that share nothing with csrc/core/elements.c but half.h,
 * which has a test below. */
static void convert(uint32_t dtype, const float *x, uint64_t nelems, uint8_t *dst)
{
    for (uint64_t i = 0; i < nelems; i++) {
        double d = (double)x[i];
        uint16_t h = dtype == AGC_DTYPE_F16 ? agc_f32_to_f16(x[i]) : agc_f32_to_bf16(x[i]);
        uint32_t nbytes = agc_dtype_nbytes(dtype);
        memcpy(dst + i * nbytes,
               dtype == AGC_DTYPE_F32   ? (const void *)&x[i]
               : dtype == AGC_DTYPE_F64 ? (const void *)&d
                                        : (const void *)&h,
               nbytes);
    }
}

/* Every address will do, and every data type in and out: encoding it is encoding the floats that it
 * holds. */
static void test_dtypes_and_alignment(void)
{
    enum { NELEMS = 66000 };
    test_describe = describe;
    struct tensor t = tensor_create(NELEMS);
    struct guarded src = guarded_create(8 * NELEMS + 16), dst = guarded_create(8 * NELEMS + 16);
    uint8_t *frame = (uint8_t *)test_alloc(9 * NELEMS + 4096), *wanted;
    wanted = (uint8_t *)test_alloc(8 * NELEMS);
    values_now = VALUES_GAUSS;
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        for (int in = 0; in < 4; in++) {
            uint32_t in_nbytes = agc_dtype_nbytes(dtypes[in]);
            bool lossless = infos[spec_now].flags & AGC_CODEC_LOSSLESS;
            random_fill(t.x, NELEMS, VALUES_GAUSS);
            convert(dtypes[in], t.x, NELEMS, wanted);
            if (dtypes[in] == AGC_DTYPE_F16 || dtypes[in] == AGC_DTYPE_BF16) {
                for (int i = 0; i < NELEMS; i++) { /* the floats that the tensor holds */
                    uint16_t h;
                    memcpy(&h, wanted + 2 * i, 2);
                    t.x[i] = dtypes[in] == AGC_DTYPE_F16 ? agc_f16_to_f32(h) : agc_bf16_to_f32(h);
                }
            }
            travel(&t, spec_now, false, 9);
            for (uint32_t shift = 0; shift < 4; shift++) {
                uint8_t *x = guarded_back(&src, (size_t)in_nbytes * NELEMS + shift), *out;
                uint64_t nbytes, cap;
                memcpy(x, wanted, (size_t)in_nbytes * NELEMS);
                CHECK_OK(agc_frame_nbytes(&specs[spec_now], dtypes[in], NELEMS, true, &cap));
                CHECK_OK(agc_encode(&specs[spec_now], x, dtypes[in], NELEMS, NULL, 9, true, scratch,
                                    frame, cap, &nbytes));
                /* Values that topk sends as they are have the tensor's data type. */
                bool same = !lossless && (!is_sparse(spec_now) || specs[spec_now].values);
                if (same)
                    CHECK_BYTES(frame + 64, t.frame + 64, t.frame_nbytes - 64);
                for (int to = 0; to < 4; to++) {
                    size_t out_nbytes = (size_t)agc_dtype_nbytes(dtypes[to]) * NELEMS;
                    out = guarded_front(&dst, out_nbytes) + shift;
                    CHECK_OK(agc_decode(frame, nbytes, out, dtypes[to], NELEMS, false, scratch));
                    uint8_t *expected = (uint8_t *)t.residual_old;
                    if (dtypes[to] == AGC_DTYPE_F64)
                        continue; /* exact in fp32, as the next line says of all the others */
                    convert(dtypes[to], t.decoded, NELEMS, expected);
                    CHECK_BYTES(out, expected, out_nbytes);
                }
            }
        }
    }
    spec_now = 0;
    guarded_destroy(&src);
    guarded_destroy(&dst);
    free(frame);
    free(wanted);
    tensor_destroy(&t);
}

/* raw gives back what it got: every bit of every number; a NaN comes back as a NaN. */
static void test_lossless_is_lossless(void)
{
    enum { NELEMS = 3000 };
    test_describe = describe;
    uint8_t x[8 * NELEMS], out[8 * NELEMS], frame[8 * NELEMS + 128];
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        if (!(infos[spec_now].flags & AGC_CODEC_LOSSLESS))
            continue;
        for (int d = 0; d < 4; d++) {
            uint32_t size = agc_dtype_nbytes(dtypes[d]);
            uint64_t nbytes;
            for (uint32_t i = 0; i < size * NELEMS; i++)
                x[i] = (uint8_t)random_u64();
            CHECK_OK(agc_encode(&specs[spec_now], x, dtypes[d], NELEMS, NULL, 0, false, scratch,
                                frame, sizeof frame, &nbytes));
            CHECK_OK(agc_decode(frame, nbytes, out, dtypes[d], NELEMS, false, scratch));
            for (uint32_t i = 0; i < NELEMS; i++) {
                /* All bits of the exponent set and some of the mantissa: a NaN. Byte order is the
                 * machine's, little endian. */
                uint64_t bits = 0, exponent = d == 0   ? 0x7f800000u
                                              : d == 1 ? 0x7c00u
                                              : d == 2 ? 0x7f80u
                                                       : 0x7ff0000000000000u;
                memcpy(&bits, x + i * size, size);
                uint64_t magnitude = bits & ~((uint64_t)1 << (8 * size - 1));
                if (magnitude <= exponent) {
                    CHECK_BYTES(out + i * size, x + i * size, size);
                } else {
                    bits = 0;
                    memcpy(&bits, out + i * size, size);
                    CHECK((bits & ~((uint64_t)1 << (8 * size - 1))) > exponent);
                }
            }
        }
    }
    spec_now = 0;
}

/* Doubles keep their 53 bits in a sum too. */
static void test_lossless_adds_doubles(void)
{
    const struct agc_spec raw = {.codec = 1};
    double x[3] = {1.0 + 0x1p-52, 1e300, -1.0 / 3.0}, sum[3] = {0x1p-52, 1e299, 5.0}, expected[3];
    uint8_t frame[128];
    uint64_t nbytes;
    for (int i = 0; i < 3; i++)
        expected[i] = sum[i] + x[i];
    CHECK_OK(agc_encode(&raw, x, AGC_DTYPE_F64, 3, NULL, 0, true, scratch, frame, sizeof frame,
                        &nbytes));
    CHECK_OK(agc_decode(frame, nbytes, sum, AGC_DTYPE_F64, 3, true, scratch));
    CHECK_BYTES(sum, expected, sizeof sum);
}

/* ---- stochastic rounding ----------------------------------------------------------------- */

/* Distance of the two values that v may become. */
static double quantum_of(double v, double scale)
{
    if (!is_codec("fp8"))
        return scale;
    int exponent;
    frexp(v / scale, &exponent); /* in [0.5, 1) 2^exponent */
    return scale * ldexp(1.0, (exponent - 1 < -6 ? -6 : exponent - 1) - 3);
}

/* Decoded values average to the encoded ones. A value v of f steps beyond a multiple of the scale s
 * decodes to one of its two neighbours, with variance s^2 f (1 - f). Over N seeds the mean's
 * z-score is standard normal: with a fixed list of seeds this test sees the same numbers in every
 * run, so |z| < 5 for 255 elements is no lottery; and their z^2 add up to a chi-square of 255
 * degrees of freedom (standard deviation 22.6), which a subtler bias would lift. */
static void test_stochastic_rounding_is_unbiased(void)
{
    enum { NELEMS = 256, NSEEDS = 4000 };
    test_describe = describe;
    struct tensor t = tensor_create(NELEMS);
    double *mean = (double *)test_alloc(8 * NELEMS), *product = (double *)test_alloc(8 * NELEMS);
    random_seed(1);
    values_now = VALUES_GAUSS;
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        if (specs[spec_now].rounding != AGC_ROUNDING_STOCHASTIC || block_nelems_of(spec_now) != 256)
            continue;
        for (int i = 0; i < NELEMS; i++)
            t.x[i] = random_unit() * 2.0f - 1.0f;
        t.x[100] = 1.27f; /* the largest: exact */
        memset(mean, 0, 8 * NELEMS);
        memset(product, 0, 8 * NELEMS);
        for (uint32_t seed = 0; seed < NSEEDS; seed++) {
            travel(&t, spec_now, false, seed);
            for (int i = 0; i < NELEMS; i++) {
                mean[i] += (double)t.decoded[i] / NSEEDS;
                if (i)
                    product[i] += ((double)t.decoded[i] - (double)t.x[i]) *
                                  ((double)t.decoded[i - 1] - (double)t.x[i - 1]) / NSEEDS;
            }
        }
        double chi2 = 0.0, correlation = 0.0, before = 0.0;
        for (int i = 0; i < NELEMS; i++) {
            double quantum = quantum_of((double)t.x[i], grid_scale(&t, 0));
            double steps = (double)t.x[i] / quantum, f = steps - floor(steps);
            double deviation = quantum * sqrt(f * (1.0 - f) / NSEEDS);
            if (i == 100) {
                CHECK_LE(fabs(mean[i] - (double)t.x[i]), 1e-6);
                continue;
            }
            /* 1e-7: what fp32 rounding of v, the scale and the product adds, not random. */
            double z = fmax(fabs(mean[i] - (double)t.x[i]) - 1e-7, 0.0) / deviation;
            CHECK_LE(z, 5.0);
            chi2 += z * z;
            /* Neighbours err independently: the products average to 0, with a deviation of at most
             * a quarter of both quanta / sqrt(N). */
            if (i)
                correlation += product[i] / (quantum * before / 4 / sqrt(NSEEDS));
            before = quantum;
        }
        CHECK_LE(chi2, 255 + 5 * 22.6);
        CHECK_LE(255 - 5 * 22.6, chi2);
        CHECK_LE(fabs(correlation), 5 * sqrt(255));
    }
    spec_now = 0;
    free(mean);
    free(product);
    tensor_destroy(&t);
}

/* Elements, tiles and seeds draw different numbers; the same coordinates draw the same. */
static void test_stochastic_rounding_is_keyed(void)
{
    test_describe = describe;
    struct tensor a = tensor_create(2 * AGC_TILE_NELEMS_MAX), b = tensor_create(a.nelems);
    values_now = VALUES_CONSTANT;
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        if (specs[spec_now].rounding != AGC_ROUNDING_STOCHASTIC || is_sparse(spec_now))
            continue;
        /* Half-way between two steps, with a scale of 1; fp8's are one apart from 8 on. */
        float low = is_codec("fp8") ? 8.0f : 0.0f;
        for (uint64_t i = 0; i < a.nelems; i++)
            a.x[i] = b.x[i] = i % 32 ? low + 0.5f : (float)grid_levels();
        travel(&a, spec_now, false, 1);
        travel(&b, spec_now, false, 1);
        CHECK_BYTES(a.frame, b.frame, a.frame_nbytes);
        travel(&b, spec_now, false, 2);
        CHECK(memcmp(a.decoded, b.decoded, 4 * a.nelems) != 0);
        CHECK(memcmp(a.decoded, a.decoded + AGC_TILE_NELEMS_MAX, 4 * AGC_TILE_NELEMS_MAX) != 0);
        uint64_t nup = 0;
        for (uint64_t i = 0; i < a.nelems; i++)
            nup += i % 32 && a.decoded[i] > low;
        double n = (double)a.nelems * 31 / 32; /* half of them, give or take 5 deviations */
        CHECK_LE(fabs((double)nup - n / 2), 5 * sqrt(n / 4));
    }
    spec_now = 0;
    tensor_destroy(&a);
    tensor_destroy(&b);
}

/* ---- 16-bit formats against their definition --------------------------------------------- */

/* What a format of `places` significant bits whose smallest step is `least` makes of x: rint rounds
 * to even, and doubles have room for everything on the way. */
static double round_to_places(double x, int places, double least, double overflow)
{
    if (!isfinite(x) || x == 0.0)
        return x;
    int exponent;
    frexp(x, &exponent); /* |x| in [2^(exponent - 1), 2^exponent) */
    double step = fmax(ldexp(1.0, exponent - places), least);
    double rounded = rint(x / step) * step;
    return fabs(rounded) >= overflow ? copysign((double)INFINITY, x) : rounded;
}

static void check_half(uint32_t bits, bool bf16)
{
    float x = agc_f32_from_bits(bits), back;
    uint16_t h = bf16 ? agc_f32_to_bf16(x) : agc_f32_to_f16(x);
    back = bf16 ? agc_bf16_to_f32(h) : agc_f16_to_f32(h);
    double expected = bf16 ? round_to_places((double)x, 8, 0x1p-133, 0x1p128)
                           : round_to_places((double)x, 11, 0x1p-24, 65536.0);
    if (isnan(x))
        CHECK_EQ(agc_f32_bits(back), AGC_F32_NAN_BITS);
    else if ((double)back != expected || signbit(back) != signbit(x))
        FAIL("0x%08x (%.9g) became %.9g, expected %.9g", bits, (double)x, (double)back, expected);
}

static void test_halves_round_trip(void)
{
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t h = (uint16_t)i;
        float f16 = agc_f16_to_f32(h), bf16 = agc_bf16_to_f32(h);
        int sign = h & 0x8000 ? -1 : 1, exponent = h >> 10 & 31, mantissa = h & 1023;
        if (exponent == 31 && mantissa) {
            CHECK_EQ(agc_f32_bits(f16), AGC_F32_NAN_BITS);
            CHECK_EQ(agc_f32_to_f16(f16), 0x7e00);
        } else {
            double value = exponent == 31  ? (double)INFINITY
                           : exponent == 0 ? ldexp(mantissa, -24)
                                           : ldexp(1024 + mantissa, exponent - 25);
            CHECK((double)f16 == sign * value);
            CHECK_EQ(agc_f32_to_f16(f16), h);
        }
        CHECK_EQ(agc_f32_bits(bf16), i << 16); /* its definition */
        CHECK_EQ(agc_f32_to_bf16(bf16), isnan(bf16) ? 0x7fc0 : h);
    }
}

/* Every number of the format, every midpoint between neighbours, and the floats beside them: all
 * the decisions there are. */
static void test_halves_round_to_even(void)
{
    for (uint32_t h = 0; h < 0x7c00; h++) {
        uint32_t low = agc_f32_bits(agc_f16_to_f32((uint16_t)h));
        uint32_t high = h == 0x7bff ? 0x47800000u : agc_f32_bits(agc_f16_to_f32((uint16_t)(h + 1)));
        float middle = agc_f32_from_bits(low) * 0.5f + agc_f32_from_bits(high) * 0.5f; /* exact */
        uint32_t at[] = {low, agc_f32_bits(middle), high};
        for (int i = 0; i < 9; i++) {
            uint32_t bits = at[i / 3] + (uint32_t)(i % 3) - 1;
            if (bits == UINT32_MAX)
                continue;
            check_half(bits, false);
            check_half(bits | 0x80000000u, false);
        }
    }
    for (uint32_t h = 0; h < 0x7f80; h++) {
        for (uint32_t low_bits = 0; low_bits < 7; low_bits++) {
            static const uint32_t cuts[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x4000};
            check_half(h << 16 | cuts[low_bits], true);
            check_half(h << 16 | cuts[low_bits] | 0x80000000u, true);
        }
    }
    for (int i = 0; i < 1000000; i++) {
        uint32_t bits = (uint32_t)random_u64();
        check_half(bits, false);
        check_half(bits, true);
    }
    /* By hand: ties to even, the edge of overflow, the smallest. */
    CHECK_EQ(agc_f32_to_f16(1.0f + 0x1p-11f), 0x3c00);
    CHECK_EQ(agc_f32_to_f16(1.0f + 3 * 0x1p-11f), 0x3c02);
    CHECK_EQ(agc_f32_to_f16(65519.996f), 0x7bff);
    CHECK_EQ(agc_f32_to_f16(65520.0f), 0x7c00);
    CHECK_EQ(agc_f32_to_f16(-65520.0f), 0xfc00);
    CHECK_EQ(agc_f32_to_f16(0x1p-25f), 0);
    CHECK_EQ(agc_f32_to_f16(0x1.000002p-25f), 1);
    CHECK_EQ(agc_f32_to_f16(-0.0f), 0x8000);
    CHECK_EQ(agc_f32_to_bf16(1.0f + 0x1p-8f), 0x3f80);
    CHECK_EQ(agc_f32_to_bf16(1.0f + 3 * 0x1p-8f), 0x3f82);
    CHECK_EQ(agc_f32_to_bf16(3.40282347e38f), 0x7f80);
}

/* ---- sizes and specs --------------------------------------------------------------------- */

/* Bytes of a tile of a codec with blocks. */
static uint64_t blocks_nbytes(const char *name, uint64_t block, uint64_t n)
{
    static const struct {
        const char *name;
        uint64_t per_byte;
    } known[] = {{"fp8", 1}, {"int8", 1}, {"int4", 2}, {"ternary", 5}, {"sign", 8}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        uint64_t nbytes = 0, per_byte = known[i].per_byte;
        if (strcmp(name, known[i].name) != 0)
            continue;
        for (uint64_t first = 0; first < n; first += block)
            nbytes += 4 + ((n - first < block ? n - first : block) + per_byte - 1) / per_byte;
        return nbytes;
    }
    FAIL("codec %s has no size here", name);
}

static uint64_t sparse_nbytes(const char *name, const struct agc_spec *s, uint32_t dtype,
                              uint64_t n)
{
    uint64_t k = (n * s->frac_e9 + 999999999) / 1000000000, elem_nbytes = agc_dtype_nbytes(dtype);
    uint64_t nbytes = strcmp(name, "topk") == 0 ? (2 * k + 15) / 16 * 16 : 0;
    static const char *const names[] = {[4] = "fp8", [5] = "int8", [6] = "int4", [8] = "sign"};
    if (s->values == 0)
        return nbytes + k * (elem_nbytes < 4 ? elem_nbytes : 4);
    return nbytes + (s->values == 2 ? 2 * k : blocks_nbytes(names[s->values], s->block_nelems, k));
}

/* Bytes of a frame by the description in the codecs' headers, one tile after another. */
static uint64_t expected_nbytes(const struct agc_spec *spec, const char *name, uint32_t dtype,
                                uint64_t nelems)
{
    struct agc_spec s;
    CHECK_OK(agc_spec_resolve(spec, &s));
    uint64_t nbytes = 64, full = nelems / 65536, rest = nelems % 65536, sizes[2] = {65536, rest};
    for (int i = 0; i < 2; i++) {
        uint64_t n = sizes[i], payload = 0;
        if (strcmp(name, "raw") == 0)
            payload = n * agc_dtype_nbytes(dtype);
        else if (strcmp(name, "fp16") == 0 || strcmp(name, "bf16") == 0)
            payload = 2 * n;
        else if (s.frac_e9)
            payload = n ? sparse_nbytes(name, &s, dtype, n) : 0;
        else
            payload = blocks_nbytes(name, s.block_nelems, n);
        nbytes += (i == 0 ? full : 1) * ((payload + 15) / 16 * 16);
    }
    return nbytes;
}

static void test_sizes(void)
{
    static const uint64_t sizes[] = {0,
                                     1,
                                     17,
                                     65536,
                                     65537,
                                     0xffffffffu,
                                     0x100000000u,
                                     0x100000001u,
                                     0x200000000u,
                                     0x123456789abu,
                                     (uint64_t)UINT32_MAX * 65536};
    test_describe = describe;
    for (spec_now = 0; spec_now < nspecs; spec_now++) {
        for (int d = 0; d < 4; d++) {
            for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                uint64_t nbytes, with_checksum;
                nelems_now = sizes[i];
                CHECK_OK(agc_frame_nbytes(&specs[spec_now], dtypes[d], sizes[i], false, &nbytes));
                CHECK_EQ(nbytes, expected_nbytes(&specs[spec_now], infos[spec_now].name, dtypes[d],
                                                 sizes[i]));
                CHECK_OK(
                    agc_frame_nbytes(&specs[spec_now], dtypes[d], sizes[i], true, &with_checksum));
                CHECK_EQ(with_checksum, nbytes + 4);
            }
            uint64_t nbytes = 1;
            CHECK_STATUS(agc_frame_nbytes(&specs[spec_now], dtypes[d],
                                          (uint64_t)UINT32_MAX * 65536 + 1, false, &nbytes),
                         AGC_ERR_NELEMS);
            CHECK_STATUS(agc_frame_nbytes(&specs[spec_now], dtypes[d], UINT64_MAX, false, &nbytes),
                         AGC_ERR_NELEMS);
            CHECK_EQ(nbytes, 1); /* untouched by failure */
        }
    }
    spec_now = 0;
}

static void check_sparse_spec(uint32_t id)
{
    struct agc_spec out;
    static const uint32_t good_values[] = {0, 2, 4, 5, 6, 8};
    for (uint32_t values = 0; values < 300; values++) {
        struct agc_spec s = {.codec = id, .frac_e9 = 1000, .values = values};
        bool good = false, blocks = values > 2;
        for (int i = 0; i < 6; i++)
            good |= values == good_values[i];
        CHECK_STATUS(agc_spec_resolve(&s, &out), good ? AGC_OK : AGC_ERR_SPEC);
        if (!good)
            continue;
        CHECK_EQ(out.block_nelems, blocks ? 256 : 0);
        s.block_nelems = 64;
        CHECK_STATUS(agc_spec_resolve(&s, &out), blocks ? AGC_OK : AGC_ERR_SPEC);
        s.block_nelems = 48;
        CHECK_STATUS(agc_spec_resolve(&s, &out), AGC_ERR_SPEC);
        s.block_nelems = 0;
        s.rounding = AGC_ROUNDING_STOCHASTIC;
        CHECK_STATUS(agc_spec_resolve(&s, &out), blocks && values != 8 ? AGC_OK : AGC_ERR_SPEC);
        s.rounding = AGC_ROUNDING_NEAREST;
        s.frac_e9 = 0;
        CHECK_STATUS(agc_spec_resolve(&s, &out), AGC_ERR_SPEC);
        s.frac_e9 = 1000000000;
        CHECK_OK(agc_spec_resolve(&s, &out));
        s.frac_e9 = 1000000001;
        CHECK_STATUS(agc_spec_resolve(&s, &out), AGC_ERR_SPEC);
    }
}

static void test_spec_errors(void)
{
    struct agc_spec out = {.codec = 99};
    struct agc_codec_info info;
    for (uint32_t i = 0; agc_codec_info_at(i, &info); i++) {
        bool blocks = info.flags & AGC_CODEC_BLOCKS, stochastic = info.flags & AGC_CODEC_STOCHASTIC;
        struct agc_spec s = {.codec = info.id};
        if (info.flags & AGC_CODEC_SPARSE) {
            check_sparse_spec(info.id);
            continue;
        }
        CHECK_OK(agc_spec_resolve(&s, &out));
        CHECK_EQ(out.block_nelems, info.default_block_nelems);
        for (uint32_t b = 1; b < 10000; b++) {
            bool good = blocks && b >= 32 && b <= 4096 && (b & (b - 1)) == 0;
            s.block_nelems = b;
            CHECK_STATUS(agc_spec_resolve(&s, &out), good ? AGC_OK : AGC_ERR_SPEC);
            if (good)
                CHECK_EQ(out.block_nelems, b);
        }
        s = (struct agc_spec){.codec = info.id, .block_nelems = 0x80000000u};
        CHECK_STATUS(agc_spec_resolve(&s, &out), AGC_ERR_SPEC);
        s = (struct agc_spec){.codec = info.id, .rounding = AGC_ROUNDING_STOCHASTIC};
        CHECK_STATUS(agc_spec_resolve(&s, &out), stochastic ? AGC_OK : AGC_ERR_SPEC);
        s = (struct agc_spec){.codec = info.id, .rounding = 2};
        CHECK_STATUS(agc_spec_resolve(&s, &out), AGC_ERR_SPEC);
        s = (struct agc_spec){.codec = info.id, .frac_e9 = 1000};
        CHECK_STATUS(agc_spec_resolve(&s, &out), AGC_ERR_SPEC);
        s = (struct agc_spec){.codec = info.id, .values = 5};
        CHECK_STATUS(agc_spec_resolve(&s, &out), AGC_ERR_SPEC);
    }
    struct agc_spec unknown = {.codec = 0};
    CHECK_STATUS(agc_spec_resolve(&unknown, &out), AGC_ERR_CODEC);
    unknown.codec = 255;
    CHECK_STATUS(agc_spec_resolve(&unknown, &out), AGC_ERR_CODEC);
}

/* Ids and names are unique and in order; every status has its texts. */
static void test_tables(void)
{
    struct agc_codec_info a, b;
    for (uint32_t i = 0; agc_codec_info_at(i, &a); i++) {
        CHECK(a.id > 0 && a.id < 256 && a.name[0]);
        CHECK_EQ(a.default_block_nelems != 0, (a.flags & AGC_CODEC_BLOCKS) != 0);
        for (uint32_t j = 0; j < i; j++) {
            CHECK(agc_codec_info_at(j, &b));
            CHECK(b.id < a.id && strcmp(a.name, b.name) != 0);
        }
    }
    for (int s = -100; s <= 0; s++) {
        enum agc_status status = (enum agc_status)s;
        CHECK(agc_status_name(status) && agc_status_text(status) && agc_status_exception(status));
    }
    CHECK(strcmp(agc_status_name(AGC_ERR_TRUNCATED), "AGC_ERR_TRUNCATED") == 0);
    CHECK(strcmp(agc_status_name((enum agc_status)77), "AGC_ERR_UNKNOWN") == 0);
    CHECK(agc_status_is_fatal(AGC_ERR_PEER) && !agc_status_is_fatal(AGC_ERR_SPEC));
    for (uint32_t d = 0; d < 256; d++)
        CHECK_EQ(agc_dtype_nbytes(d), d == 1 ? 4 : d == 2 || d == 3 ? 2 : d == 4 ? 8 : 0);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(test_tables),
        TEST(test_spec_errors),
        TEST(test_sizes),
        TEST(test_halves_round_trip),
        TEST(test_halves_round_to_even),
        TEST(test_error_is_bounded),
        TEST(test_scale_is_tight),
        TEST(test_finite_stays_finite),
        TEST(test_constant_block),
        TEST(test_zero_stays_zero),
        TEST(test_residual_conserves),
        TEST(test_residual_over_rounds),
        TEST(test_non_finite_stays_in_its_block),
        TEST(test_non_finite_in_sparse_codecs),
        TEST(test_topk_keeps_the_largest),
        TEST(test_decode_add_is_decode_then_add),
        TEST(test_dtypes_and_alignment),
        TEST(test_lossless_is_lossless),
        TEST(test_lossless_adds_doubles),
        TEST(test_stochastic_rounding_is_unbiased),
        TEST(test_stochastic_rounding_is_keyed),
    };
    list_specs();
    return test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
