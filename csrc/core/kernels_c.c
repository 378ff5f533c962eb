/* kernels_c.c: the kernels in portable C. This file is the definition of correct: every other tier
 * must give these bytes. */
#include <math.h>

#include "core/common.h"
#include "core/half.h"
#include "core/kernels.h"

#if defined(__FAST_MATH__)
#error "compile without -ffast-math: the tiers must agree to the bit"
#endif

/* Element i as it enters the codec: gradient plus what is still owed. */
static inline float with_residual(const float *x, const float *residual, uint32_t i)
{
    return residual ? x[i] + residual[i] : x[i];
}

void agc_grid_encode_tiny(const float *x, float *residual, uint32_t nelems,
                          const struct agc_rng *rng, uint32_t first, struct agc_grid grid,
                          uint8_t *q)
{
    for (uint32_t i = 0; i < nelems; i++) {
        float v = with_residual(x, residual, i);
        float steps = v / grid.scale;
        if (rng)
            steps += agc_rng_dither_at(*rng, first + i);
        float rounded = agc_grid_round(steps, grid.levels);
        q[i] = (uint8_t)(int8_t)rounded;
        if (residual)
            residual[i] = v - rounded * grid.scale;
    }
}

void agc_grid_encode_tail(const float *x, float *residual, uint32_t begin, uint32_t end,
                          const struct agc_rng *rng, uint32_t first, struct agc_grid grid,
                          uint8_t *q)
{
    for (uint32_t i = begin; i < end; i++) {
        float v = with_residual(x, residual, i);
        float steps = v * grid.inverse;
        if (rng)
            steps += agc_rng_dither_at(*rng, first + i);
        float rounded = agc_grid_round(steps, grid.levels);
        q[i] = (uint8_t)(int8_t)rounded;
        if (residual)
            residual[i] = v - rounded * grid.scale;
    }
}

void agc_fp8_encode_tiny(const float *x, float *residual, uint32_t nelems,
                         const struct agc_rng *rng, uint32_t first, struct agc_grid grid,
                         uint8_t *q)
{
    for (uint32_t i = 0; i < nelems; i++) {
        float v = with_residual(x, residual, i);
        float rounded = agc_fp8_round(v / grid.scale, rng ? agc_rng_dither_at(*rng, first + i) : 0);
        q[i] = agc_fp8_code(rounded);
        if (residual)
            residual[i] = v - rounded * grid.scale;
    }
}

void agc_fp8_encode_tail(const float *x, float *residual, uint32_t begin, uint32_t end,
                         const struct agc_rng *rng, uint32_t first, struct agc_grid grid,
                         uint8_t *q)
{
    for (uint32_t i = begin; i < end; i++) {
        float v = with_residual(x, residual, i);
        float dither = rng ? agc_rng_dither_at(*rng, first + i) : 0.0f;
        float rounded = agc_fp8_round(v * grid.inverse, dither);
        q[i] = agc_fp8_code(rounded);
        if (residual)
            residual[i] = v - rounded * grid.scale;
    }
}

static uint32_t absmax_bits(const float *x, const float *residual, uint32_t nelems)
{
    uint32_t max = 0;
    for (uint32_t i = 0; i < nelems; i++) {
        uint32_t bits = agc_f32_bits(with_residual(x, residual, i)) & 0x7fffffffu;
        max = bits > max ? bits : max;
    }
    return max;
}

/* The scale and the steps, a byte each, of one block that is scaled by its largest magnitude. */
static void grid_encode(const float *x, float *residual, uint32_t nelems, const struct agc_rng *rng,
                        uint32_t first, float levels, uint32_t scale_max_bits, uint8_t *scale,
                        uint8_t *q)
{
    struct agc_grid grid =
        agc_grid_from_absmax(absmax_bits(x, residual, nelems), levels, scale_max_bits);
    bool fp8 = levels == AGC_FP8_LEVELS;
    agc_store_u32(scale, agc_f32_bits(grid.scale));
    if (AGC_UNLIKELY(!grid.finite))
        memset(q, 0, nelems); /* the residual stays as it was: what is lost with this round is the
                                 gradient alone */
    else if (AGC_UNLIKELY(grid.tiny))
        (fp8 ? agc_fp8_encode_tiny : agc_grid_encode_tiny)(x, residual, nelems, rng, first, grid,
                                                           q);
    else
        (fp8 ? agc_fp8_encode_tail : agc_grid_encode_tail)(x, residual, 0, nelems, rng, first, grid,
                                                           q);
}

/* A codec with a byte per element. */
static void byte_encode(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                        const struct agc_rng *rng, float levels, uint32_t scale_max_bits,
                        uint8_t *scales, uint8_t *q)
{
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4)
        grid_encode(x + first, residual ? residual + first : NULL,
                    agc_min_u32(block_nelems, nelems - first), rng, first, levels, scale_max_bits,
                    scales, q + first);
}

/* The two ways of decoding, of one function. */
#define DECODE_KERNELS(name)                                                                       \
    void agc_##name##_decode_c(const uint8_t *scales, const uint8_t *q, uint32_t nelems,           \
                               uint32_t block_nelems, float weight, float *out)                    \
    {                                                                                              \
        name##_decode(scales, q, nelems, block_nelems, weight, out, false);                        \
    }                                                                                              \
    void agc_##name##_decode_add_c(const uint8_t *scales, const uint8_t *q, uint32_t nelems,       \
                                   uint32_t block_nelems, float weight, float *out)                \
    {                                                                                              \
        name##_decode(scales, q, nelems, block_nelems, weight, out, true);                         \
    }

void agc_fp8_encode_c(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                      const struct agc_rng *rng, uint8_t *scales, uint8_t *q)
{
    byte_encode(x, residual, nelems, block_nelems, rng, AGC_FP8_LEVELS, AGC_FP8_SCALE_MAX_BITS,
                scales, q);
}

static void fp8_decode(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                       uint32_t block_nelems, float weight, float *out, bool add)
{
    for (uint32_t i = 0; i < nelems; i++) {
        float scale = agc_f32_from_bits(agc_load_u32(scales + 4 * (i / block_nelems))) * weight;
        float v = agc_fp8_value(q[i]) * scale;
        out[i] = add ? agc_acc_add(out[i], v) : v;
    }
}

DECODE_KERNELS(fp8)

void agc_int8_encode_c(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                       const struct agc_rng *rng, uint8_t *scales, uint8_t *q)
{
    byte_encode(x, residual, nelems, block_nelems, rng, AGC_INT8_LEVELS, AGC_INT8_SCALE_MAX_BITS,
                scales, q);
}

/* out = steps times scales, or out += that. */
static void int8_decode(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                        uint32_t block_nelems, float weight, float *out, bool add)
{
    for (uint32_t i = 0; i < nelems; i++) {
        float scale = agc_f32_from_bits(agc_load_u32(scales + 4 * (i / block_nelems))) * weight;
        float v = (float)(int8_t)q[i] * scale;
        out[i] = add ? agc_acc_add(out[i], v) : v;
    }
}

DECODE_KERNELS(int8)

void agc_int4_pack_tail(const uint8_t *q, uint32_t nelems, uint32_t begin, uint8_t *dst)
{
    uint32_t half = (nelems + 1) / 2;
    for (uint32_t j = begin; j < half; j++) {
        uint32_t high = j + half < nelems ? q[j + half] : 0;
        dst[j] = (uint8_t)((q[j] & 15u) | (high & 15u) << 4);
    }
}

void agc_int4_unpack_tail(const uint8_t *src, uint32_t nelems, uint32_t begin, uint8_t *q)
{
    uint32_t half = (nelems + 1) / 2;
    for (uint32_t j = begin; j < half; j++) {
        q[j] = (uint8_t)(((src[j] & 15u) ^ 8u) - 8u);
        if (j + half < nelems)
            q[j + half] = (uint8_t)(((uint32_t)src[j] >> 4 ^ 8u) - 8u);
    }
}

void agc_int4_encode_c(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                       const struct agc_rng *rng, uint8_t *scales, uint8_t *q)
{
    uint8_t steps[AGC_BLOCK_NELEMS_MAX];
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        grid_encode(x + first, residual ? residual + first : NULL, n, rng, first, AGC_INT4_LEVELS,
                    AGC_INT4_SCALE_MAX_BITS, scales, steps);
        agc_int4_pack_tail(steps, n, 0, q);
        q += (n + 1) / 2;
    }
}

static void int4_decode(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                        uint32_t block_nelems, float weight, float *out, bool add)
{
    uint8_t steps[AGC_BLOCK_NELEMS_MAX];
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        agc_int4_unpack_tail(q, n, 0, steps);
        int8_decode(scales, steps, n, block_nelems, weight, out + first, add);
        q += (n + 1) / 2;
    }
}

DECODE_KERNELS(int4)

/* ---- ternary and sign ---- */

/* Sum and number of the magnitudes, times factor, that are above a threshold; NaNs are. */
static float magnitude_sum(const float *x, const float *residual, uint32_t nelems, float factor,
                           float threshold, uint32_t *count_ret)
{
    float lanes[AGC_SUM_NLANES] = {0};
    uint32_t count = 0;
    for (uint32_t i = 0; i < nelems; i++) {
        float a = fabsf(with_residual(x, residual, i)) * factor;
        bool above = !(a <= threshold);
        /* By a mask: which elements are above cannot be predicted. */
        lanes[i % AGC_SUM_NLANES] += agc_f32_from_bits(agc_f32_bits(a) & (0u - above));
        count += above;
    }
    *count_ret = count;
    return agc_sum_lanes(lanes);
}

/* Of a block whose sum, with its elements times factor, is finite. */
static struct agc_magnitude magnitude_of(const float *x, const float *residual, uint32_t nelems,
                                         float sum, float factor, bool ternary)
{
    struct agc_magnitude m = {0.0f, sum / (float)nelems};
    if (ternary) {
        uint32_t count;
        m.threshold = m.scale * AGC_TERNARY_THRESHOLD;
        sum = magnitude_sum(x, residual, nelems, factor, m.threshold, &count);
        m.scale = count ? sum / (float)count : 0.0f;
    }
    return m;
}

struct agc_magnitude agc_magnitude_rare(const float *x, const float *residual, uint32_t nelems,
                                        bool ternary)
{
    const struct agc_magnitude not_finite = {0.0f, agc_f32_from_bits(AGC_F32_NAN_BITS)};
    if (absmax_bits(x, residual, nelems) >= 0x7f800000u)
        return not_finite;
    uint32_t count;
    float sum = magnitude_sum(x, residual, nelems, 1.0f / AGC_BLOCK_NELEMS_MAX, -1.0f, &count);
    struct agc_magnitude m =
        magnitude_of(x, residual, nelems, sum, 1.0f / AGC_BLOCK_NELEMS_MAX, ternary);
    m.threshold *= AGC_BLOCK_NELEMS_MAX;
    m.scale *= AGC_BLOCK_NELEMS_MAX;
    if (agc_f32_bits(m.scale) > AGC_SIGN_SCALE_MAX_BITS) /* rounded up beyond the largest float */
        m.scale = agc_f32_from_bits(AGC_SIGN_SCALE_MAX_BITS);
    return m;
}

static struct agc_magnitude magnitude(const float *x, const float *residual, uint32_t nelems,
                                      bool ternary)
{
    uint32_t count;
    float sum = magnitude_sum(x, residual, nelems, 1.0f, -1.0f, &count);
    if (AGC_UNLIKELY(!(sum < INFINITY)))
        return agc_magnitude_rare(x, residual, nelems, ternary);
    return magnitude_of(x, residual, nelems, sum, 1.0f, ternary);
}

/* magnitude with the sign of v */
static inline float signed_as(float magnitude, float v)
{
    return agc_f32_from_bits(agc_f32_bits(magnitude) | (agc_f32_bits(v) & 0x80000000u));
}

void agc_sign_encode_tail(const float *x, float *residual, uint32_t begin, uint32_t end,
                          float scale, uint8_t *q)
{
    for (uint32_t i = begin; i < end; i++) {
        float v = with_residual(x, residual, i);
        uint32_t bit = agc_f32_bits(v) >> 31 << i % 8;
        q[i / 8] = (uint8_t)(i % 8 ? q[i / 8] | bit : bit);
        if (residual)
            residual[i] = v - signed_as(scale, v);
    }
}

void agc_sign_encode_c(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                       const struct agc_rng *rng, uint8_t *scales, uint8_t *q)
{
    (void)rng;
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        float *owed = residual ? residual + first : NULL;
        float scale = magnitude(x + first, owed, n, false).scale;
        agc_store_u32(scales, agc_f32_bits(scale));
        if (AGC_UNLIKELY(scale != scale))
            memset(q + first / 8, 0, agc_div_up(n, 8));
        else
            agc_sign_encode_tail(x + first, owed, 0, n, scale, q + first / 8);
    }
}

static void sign_decode(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                        uint32_t block_nelems, float weight, float *out, bool add)
{
    for (uint32_t i = 0; i < nelems; i++) {
        float scale = agc_f32_from_bits(agc_load_u32(scales + 4 * (i / block_nelems))) * weight;
        float v = agc_f32_from_bits(agc_f32_bits(scale) ^ (uint32_t)(q[i / 8] >> i % 8) << 31);
        out[i] = add ? agc_acc_add(out[i], v) : v;
    }
}

DECODE_KERNELS(sign)

void agc_ternary_encode_tail(const float *x, float *residual, uint32_t begin, uint32_t end,
                             struct agc_magnitude m, uint8_t *q)
{
    for (uint32_t i = begin; i < end; i++) {
        float v = with_residual(x, residual, i);
        uint32_t above = fabsf(v) > m.threshold;
        uint32_t sent = agc_f32_bits(signed_as(m.scale, v)) & (0u - above);
        q[i] = (uint8_t)((v > m.threshold) - (-v > m.threshold));
        if (residual)
            residual[i] = v - agc_f32_from_bits(sent);
    }
}

/* Steps that do not exist count as 0. */
static void ternary_pack(const uint8_t *q, uint32_t nelems, uint8_t *dst)
{
    uint32_t run = (uint32_t)agc_div_up(nelems, AGC_TERNARY_PER_BYTE);
    for (uint32_t j = 0; j < run; j++) {
        uint32_t byte = 0;
        for (uint32_t k = AGC_TERNARY_PER_BYTE; k-- > 0;) {
            uint32_t i = j + k * run;
            byte = 3 * byte + (i < nelems ? (uint8_t)(q[i] + 1u) : 1u);
        }
        dst[j] = (uint8_t)byte;
    }
}

static void ternary_unpack(const uint8_t *src, uint32_t nelems, uint8_t *q)
{
    uint32_t run = (uint32_t)agc_div_up(nelems, AGC_TERNARY_PER_BYTE);
    for (uint32_t j = 0; j < run; j++) {
        uint32_t byte = src[j];
        for (uint32_t i = j; i < nelems; i += run, byte /= 3)
            q[i] = (uint8_t)(byte % 3 - 1);
    }
}

void agc_ternary_encode_c(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                          const struct agc_rng *rng, uint8_t *scales, uint8_t *q)
{
    uint8_t steps[AGC_BLOCK_NELEMS_MAX];
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        float *owed = residual ? residual + first : NULL;
        if (rng) {
            grid_encode(x + first, owed, n, rng, first, 1.0f, AGC_TERNARY_SCALE_MAX_BITS, scales,
                        steps);
        } else {
            struct agc_magnitude m = magnitude(x + first, owed, n, true);
            agc_store_u32(scales, agc_f32_bits(m.scale));
            if (AGC_UNLIKELY(m.scale != m.scale))
                memset(steps, 0, n);
            else
                agc_ternary_encode_tail(x + first, owed, 0, n, m, steps);
        }
        ternary_pack(steps, n, q);
        q += agc_div_up(n, AGC_TERNARY_PER_BYTE);
    }
}

static void ternary_decode(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                           uint32_t block_nelems, float weight, float *out, bool add)
{
    uint8_t steps[AGC_BLOCK_NELEMS_MAX];
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        ternary_unpack(q, n, steps);
        int8_decode(scales, steps, n, block_nelems, weight, out + first, add);
        q += agc_div_up(n, AGC_TERNARY_PER_BYTE);
    }
}

DECODE_KERNELS(ternary)

/* The three kernels of a 16-bit format differ in the two conversions alone. */
#define HALF_KERNELS(name, from_f32, to_f32)                                                       \
    void agc_##name##_encode_c(const float *x, float *residual, uint32_t nelems, uint8_t *dst)     \
    {                                                                                              \
        for (uint32_t i = 0; i < nelems; i++) {                                                    \
            float v = with_residual(x, residual, i);                                               \
            uint16_t h = from_f32(v);                                                              \
            agc_store_u16(dst + 2 * (size_t)i, h);                                                 \
            if (residual) {                                                                        \
                float decoded = to_f32(h);                                                         \
                if (agc_f32_is_finite(decoded))                                                    \
                    residual[i] = v - decoded;                                                     \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    void agc_##name##_decode_c(const uint8_t *src, uint32_t nelems, float weight, float *out)      \
    {                                                                                              \
        for (uint32_t i = 0; i < nelems; i++)                                                      \
            out[i] = to_f32(agc_load_u16(src + 2 * (size_t)i)) * weight;                           \
    }                                                                                              \
    void agc_##name##_decode_add_c(const uint8_t *src, uint32_t nelems, float weight, float *out)  \
    {                                                                                              \
        for (uint32_t i = 0; i < nelems; i++)                                                      \
            out[i] = agc_acc_add(out[i], to_f32(agc_load_u16(src + 2 * (size_t)i)) * weight);      \
    }

HALF_KERNELS(f16, agc_f32_to_f16, agc_f16_to_f32)
HALF_KERNELS(bf16, agc_f32_to_bf16, agc_bf16_to_f32)

void agc_bf16_store_c(const float *x, uint32_t nelems, struct agc_rng rng, uint8_t *dst)
{
    for (uint32_t i = 0; i < nelems; i++)
        agc_store_u16(dst + 2 * (size_t)i,
                      agc_f32_to_bf16_stochastic(x[i], agc_rng_at(rng, i) >> 16));
}

void agc_f32_decode_c(const uint8_t *src, uint32_t nelems, float weight, float *out)
{
    for (uint32_t i = 0; i < nelems; i++)
        out[i] = agc_f32_from_bits(agc_load_u32(src + 4 * (size_t)i)) * weight;
}

void agc_f32_decode_add_c(const uint8_t *src, uint32_t nelems, float weight, float *out)
{
    for (uint32_t i = 0; i < nelems; i++)
        out[i] = agc_acc_add(out[i], agc_f32_from_bits(agc_load_u32(src + 4 * (size_t)i)) * weight);
}

uint32_t agc_collect_magnitude_c(const float *x, const float *residual, uint32_t nelems,
                                 uint32_t first, uint32_t magnitude_bits, uint32_t *index,
                                 float *value)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < nelems; i++) {
        float v = with_residual(x, residual, i);
        value[n] = v == v ? v : agc_f32_from_bits(AGC_F32_NAN_BITS);
        index[n] = first + i;
        n += (agc_f32_bits(v) & 0x7fffffffu) >= magnitude_bits;
    }
    return n;
}

uint32_t agc_count_magnitude_c(const float *value, uint32_t nelems, uint32_t magnitude_bits)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < nelems; i++)
        n += (agc_f32_bits(value[i]) & 0x7fffffffu) >= magnitude_bits;
    return n;
}

void agc_residual_add_c(const float *x, float *residual, uint32_t nelems)
{
    for (uint32_t i = 0; i < nelems; i++) {
        float v = x[i] + residual[i];
        residual[i] = agc_f32_is_finite(v) ? v : residual[i];
    }
}

bool agc_any_nonzero_c(const uint8_t *src, uint64_t nbytes, uint64_t mask)
{
    uint64_t i = 0;
    /* In runs of 4 KiB without a branch inside, so that the loop vectorises; dense gradients leave
     * after the first. */
    for (; i + 4096 <= nbytes; i += 4096) {
        uint64_t any = 0;
        for (uint32_t j = 0; j < 4096; j += 8) {
            uint64_t word;
            memcpy(&word, src + i + j, 8);
            any |= word & mask;
        }
        if (any)
            return true;
    }
    for (; i < nbytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, src + i, agc_min_u64(8, nbytes - i));
        if (word & mask)
            return true;
    }
    return false;
}

uint32_t agc_crc32c_c(uint32_t crc, const uint8_t *src, uint64_t nbytes)
{
    crc = ~crc;
    for (uint64_t i = 0; i < nbytes; i++) {
        crc ^= src[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (0x82f63b78u & (0u - (crc & 1u)));
    }
    return ~crc;
}
