/* kernels_c.c: the kernels in portable C. This file is the definition of correct: every other tier
 * must give these bytes. */
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

static uint32_t absmax_bits(const float *x, const float *residual, uint32_t nelems)
{
    uint32_t max = 0;
    for (uint32_t i = 0; i < nelems; i++) {
        uint32_t bits = agc_f32_bits(with_residual(x, residual, i)) & 0x7fffffffu;
        max = bits > max ? bits : max;
    }
    return max;
}

/* The scale and the steps, a byte each, of one block of int8 or int4. */
static void grid_encode(const float *x, float *residual, uint32_t nelems, const struct agc_rng *rng,
                        uint32_t first, float levels, uint32_t scale_max_bits, uint8_t *scale,
                        uint8_t *q)
{
    struct agc_grid grid =
        agc_grid_from_absmax(absmax_bits(x, residual, nelems), levels, scale_max_bits);
    agc_store_u32(scale, agc_f32_bits(grid.scale));
    if (AGC_UNLIKELY(!grid.finite))
        memset(q, 0, nelems); /* the residual stays as it was: what is lost with this round is the
                                 gradient alone */
    else if (AGC_UNLIKELY(grid.tiny))
        agc_grid_encode_tiny(x, residual, nelems, rng, first, grid, q);
    else
        agc_grid_encode_tail(x, residual, 0, nelems, rng, first, grid, q);
}

void agc_int8_encode_c(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                       const struct agc_rng *rng, uint8_t *scales, uint8_t *q)
{
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4)
        grid_encode(x + first, residual ? residual + first : NULL,
                    agc_min_u32(block_nelems, nelems - first), rng, first, AGC_INT8_LEVELS,
                    AGC_INT8_SCALE_MAX_BITS, scales, q + first);
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

void agc_int8_decode_c(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                       uint32_t block_nelems, float weight, float *out)
{
    int8_decode(scales, q, nelems, block_nelems, weight, out, false);
}

void agc_int8_decode_add_c(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                           uint32_t block_nelems, float weight, float *out)
{
    int8_decode(scales, q, nelems, block_nelems, weight, out, true);
}

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

void agc_int4_decode_c(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                       uint32_t block_nelems, float weight, float *out)
{
    int4_decode(scales, q, nelems, block_nelems, weight, out, false);
}

void agc_int4_decode_add_c(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                           uint32_t block_nelems, float weight, float *out)
{
    int4_decode(scales, q, nelems, block_nelems, weight, out, true);
}

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
                if ((agc_f32_bits(decoded) & 0x7fffffffu) < 0x7f800000u)                           \
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
