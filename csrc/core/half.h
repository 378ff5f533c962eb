/* half.h: conversions between float and the two 16-bit formats, by integers: the same bits on every
 * machine.
 *
 * Rounding is to nearest, ties to even (IEEE 754). Every NaN becomes one NaN, the positive quiet
 * one without payload: CPUs and GPUs differ in which payload survives arithmetic, and ranks must
 * not differ.
 */
#ifndef AGC_HALF_H
#define AGC_HALF_H

#include "core/wire.h"

AGC_HD uint16_t agc_f32_to_bf16(float x)
{
    uint32_t bits = agc_f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fc0u;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* A finite number, away from zero with the probability of what is cut off; random: 16 bits. The
 * largest stay finite. */
AGC_HD uint16_t agc_f32_to_bf16_stochastic(float x, uint32_t random)
{
    uint32_t bits = agc_f32_bits(x), magnitude = (bits & 0x7fffffffu) + random;
    if (magnitude > 0x7f7fffffu)
        magnitude = 0x7f7fffffu;
    return (uint16_t)((bits >> 16 & 0x8000u) | magnitude >> 16);
}

AGC_HD float agc_bf16_to_f32(uint16_t h)
{
    return agc_f32_from_bits((uint32_t)h << 16);
}

AGC_HD uint16_t agc_f32_to_f16(float x)
{
    uint32_t bits = agc_f32_bits(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u)
        return 0x7e00u;
    if (mag >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (mag >= 0x38800000u) { /* normal in fp16: rebias the exponent by 112, round 13 bits away */
        uint32_t rounded = mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u);
        return (uint16_t)(sign | (rounded >> 13));
    }
    /* Subnormal in fp16. Adding 0.5 aligns the binary point of the sum with 2^-24, so that the
     * addition itself rounds. */
    float aligned = agc_f32_from_bits(mag) + 0.5f;
    return (uint16_t)(sign | (agc_f32_bits(aligned) - 0x3f000000u));
}

AGC_HD float agc_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t mag = h & 0x7fffu;
    if (mag > 0x7c00u)
        return agc_f32_from_bits(AGC_F32_NAN_BITS);
    if (mag == 0x7c00u)
        return agc_f32_from_bits(sign | 0x7f800000u);
    if (mag >= 0x0400u)
        return agc_f32_from_bits(sign | ((mag << 13) + 0x38000000u));
    /* Subnormal: mag * 2^-24, exact. */
    return agc_f32_from_bits(sign | agc_f32_bits((float)(int32_t)mag * 0x1p-24f));
}

#endif /* AGC_HALF_H */
