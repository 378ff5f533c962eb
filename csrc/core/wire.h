/* wire.h: the bytes on the wire and the arithmetic of one element. The normative text is
 * docs/wire_format.md.
 *
 * This file compiles as C11, as C++17 and in nvcc. It depends on nothing of the project, so that
 * CPU and GPU code share one definition: what a header looks like, how long a tile's payload is,
 * and how one number is quantised.
 *
 *   byte
 *    0   | magic "AGCF"          | version | codec | dtype | values |
 *    8   | flags | forwards | block | tile size | fraction          |
 *   16   | number of elements                                       |
 *   24   | bytes of payload                                         |
 *   32   | stream                                                   |
 *   40   | seed                  | round                            |
 *   48   | first tile            | number of tiles                  |
 *   56   | bucket | lane | chunk | checksum                         |
 *   64   | tile | tile | ...
 */
#ifndef AGC_WIRE_H
#define AGC_WIRE_H

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define AGC_HD static __host__ __device__ __forceinline__
#else
#define AGC_HD static inline
#endif

#define AGC_WIRE_MAGIC 0x46434741u /* "AGCF", little endian */
#define AGC_WIRE_VERSION 1u
#define AGC_WIRE_HEADER_NBYTES 64u
#define AGC_WIRE_CHECKSUM_NBYTES 4u

/* A tile has at most 65,536 elements, so that an index inside it fits 16 bits, and always a
 * multiple of the granule. */
#define AGC_TILE_NELEMS_MAX 65536u
#define AGC_TILE_GRANULE_NELEMS 256u
/* Each tile's payload is padded to a multiple of this with zero bytes. */
#define AGC_PAYLOAD_ALIGN_NBYTES 16u

#define AGC_BLOCK_NELEMS_MIN 32u
#define AGC_BLOCK_NELEMS_MAX 4096u
#define AGC_BLOCK_NELEMS_DEFAULT 256u

/* Offsets of the header's fields. */
enum {
    AGC_WIRE_AT_MAGIC = 0,          /* u32 */
    AGC_WIRE_AT_VERSION = 4,        /* u8 */
    AGC_WIRE_AT_CODEC = 5,          /* u8 */
    AGC_WIRE_AT_DTYPE = 6,          /* u8 */
    AGC_WIRE_AT_VALUES = 7,         /* u8 */
    AGC_WIRE_AT_FLAGS = 8,          /* u8 */
    AGC_WIRE_AT_NFORWARDS = 9,      /* u8 */
    AGC_WIRE_AT_BLOCK_LOG2 = 10,    /* u8 */
    AGC_WIRE_AT_TILE_GRANULES = 11, /* u8: tile_nelems / 256 - 1 */
    AGC_WIRE_AT_FRAC = 12,          /* u32 */
    AGC_WIRE_AT_NELEMS = 16,        /* u64 */
    AGC_WIRE_AT_PAYLOAD = 24,       /* u64 */
    AGC_WIRE_AT_STREAM = 32,        /* u64 */
    AGC_WIRE_AT_SEED = 40,          /* u32 */
    AGC_WIRE_AT_ROUND = 44,         /* u32 */
    AGC_WIRE_AT_FIRST_TILE = 48,    /* u32 */
    AGC_WIRE_AT_NTILES = 52,        /* u32 */
    AGC_WIRE_AT_BUCKET = 56,        /* u16 */
    AGC_WIRE_AT_LANE = 58,          /* u8 */
    AGC_WIRE_AT_CHUNK_LOG2 = 59,    /* u8 */
    AGC_WIRE_AT_CHECKSUM = 60,      /* u32: CRC32C of bytes 0..59 */
};

enum {
    AGC_FRAME_CHECKSUM = 1 << 0,   /* CRC32C of the payload follows it */
    AGC_FRAME_STOCHASTIC = 1 << 1, /* agc_spec.rounding */
    AGC_FRAME_RESULT = 1 << 2,     /* a mean from a tile's owner, not a contribution */
    AGC_FRAME_ABORT = 1 << 3,      /* the sender gave up; no payload; FIRST_TILE: whom it blames */
    AGC_FRAME_ABSENT = 1 << 4,     /* no gradient from here: the mean is over the others */
    AGC_FRAME_KNOWN_FLAGS = (1 << 5) - 1,
};

/* The one NaN that codecs produce. */
#define AGC_F32_NAN_BITS 0x7fc00000u

AGC_HD uint32_t agc_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

AGC_HD float agc_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

AGC_HD int agc_f32_is_finite(float x)
{
    return (agc_f32_bits(x) & 0x7f800000u) != 0x7f800000u;
}

/* Little endian loads and stores from any address. Compilers turn them into one move. */
AGC_HD uint32_t agc_load_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

AGC_HD uint16_t agc_load_u16(const uint8_t *p)
{
    return (uint16_t)((uint32_t)p[0] | (uint32_t)p[1] << 8);
}

AGC_HD uint64_t agc_load_u64(const uint8_t *p)
{
    return (uint64_t)agc_load_u32(p) | (uint64_t)agc_load_u32(p + 4) << 32;
}

AGC_HD void agc_store_u16(uint8_t *p, uint16_t x)
{
    p[0] = (uint8_t)x;
    p[1] = (uint8_t)(x >> 8);
}

AGC_HD void agc_store_u32(uint8_t *p, uint32_t x)
{
    agc_store_u16(p, (uint16_t)x);
    agc_store_u16(p + 2, (uint16_t)(x >> 16));
}

AGC_HD void agc_store_u64(uint8_t *p, uint64_t x)
{
    agc_store_u32(p, (uint32_t)x);
    agc_store_u32(p + 4, (uint32_t)(x >> 32));
}

/* Sum of a decoded value into an accumulator: a NaN is always the same NaN. */
AGC_HD float agc_acc_add(float acc, float x)
{
    float sum = acc + x;
    return sum == sum ? sum : agc_f32_from_bits(AGC_F32_NAN_BITS);
}

AGC_HD double agc_acc_add_f64(double acc, double x)
{
    double sum = acc + x;
    return sum == sum ? sum : (double)agc_f32_from_bits(AGC_F32_NAN_BITS);
}

/* ---- int8 and int4: q = round(x * levels / absmax), x ~ q * scale, scale = absmax / levels ----
 */

#define AGC_INT8_LEVELS 127.0f
#define AGC_INT4_LEVELS 7.0f
/* Below this absmax the reciprocal would overflow or the scale be subnormal: such a block is
 * divided by its scale instead. */
#define AGC_GRID_TINY_BITS 0x0d800000u /* 2^-100 */
/* The largest scales of which `levels` times is finite. */
#define AGC_INT8_SCALE_MAX_BITS 0x7c010203u
#define AGC_INT4_SCALE_MAX_BITS 0x7e124924u

/* The evenly spaced values of a block. */
struct agc_grid {
    float scale;   /* goes on the wire */
    float inverse; /* quantise by multiplication; unused if tiny */
    float levels;  /* steps are -levels..levels */
    int tiny;
    int finite; /* 0: the block holds a NaN or an infinity; all of it decodes to NaN */
};

/* What a block's largest magnitude (as bits with the sign cleared) makes of it. */
AGC_HD struct agc_grid agc_grid_from_absmax(uint32_t absmax_bits, float levels,
                                            uint32_t scale_max_bits)
{
    struct agc_grid g;
    float absmax = agc_f32_from_bits(absmax_bits);
    g.levels = levels;
    g.inverse = 0.0f;
    g.tiny = 0;
    g.finite = absmax_bits < 0x7f800000u;
    if (!g.finite) {
        g.scale = agc_f32_from_bits(AGC_F32_NAN_BITS);
        return g;
    }
    if (absmax_bits == 0) {
        g.scale = 0.0f;
        return g;
    }
    g.scale = absmax / levels;
    if (absmax_bits < AGC_GRID_TINY_BITS) {
        g.tiny = 1;
        /* A subnormal quotient may have been rounded down by so much that `levels` steps no longer
         * reach absmax. */
        if (g.scale * levels < absmax)
            g.scale = agc_f32_from_bits(agc_f32_bits(g.scale) + 1);
        return g;
    }
    if (agc_f32_bits(g.scale) > scale_max_bits)
        g.scale = agc_f32_from_bits(scale_max_bits);
    g.inverse = levels / absmax;
    return g;
}

/* Rounds to nearest, ties to even; exact for |x| < 2^22. */
AGC_HD float agc_round_even(float x)
{
    return (x + 12582912.0f) - 12582912.0f;
}

/* steps: the element in units of the scale, dither added; returns the quantised number of steps. */
AGC_HD float agc_grid_round(float steps, float levels)
{
    float q = agc_round_even(steps);
    q = q > levels ? levels : q;
    return q < -levels ? -levels : q;
}

/* ---- fp8: OCP 8-bit E4M3, of x * 448 / absmax ----
 *
 * Four bits of exponent, three of mantissa, no infinity. The code that the format keeps for NaN is
 * never written, and read as the 480 that its bits say. */

#define AGC_FP8_LEVELS 448.0f
#define AGC_FP8_SCALE_MAX_BITS 0x7b124924u
/* 2^-6: the numbers below it are 2^-9 apart. */
#define AGC_FP8_NORMAL_BITS 0x3c800000u

/* Exponent field of steps, as that of the distance of its neighbours is derived from it. */
AGC_HD uint32_t agc_fp8_exponent(float steps)
{
    uint32_t exponent = agc_f32_bits(steps) & 0x7f800000u;
    return exponent < AGC_FP8_NORMAL_BITS ? AGC_FP8_NORMAL_BITS : exponent;
}

/* Distance of the numbers around steps. */
AGC_HD float agc_fp8_quantum(float steps)
{
    return agc_f32_from_bits(agc_fp8_exponent(steps) - (3u << 23));
}

/* The nearest number, ties to even; with dither, times the distance of its neighbours, added
 * before. */
AGC_HD float agc_fp8_round(float steps, float dither)
{
    /* 1.5 * 2^23 distances: adding and subtracting it rounds to a multiple of the distance. */
    float rounder = agc_f32_from_bits(agc_fp8_exponent(steps) + (20u << 23) + 0x400000u), x;
    steps += dither * agc_fp8_quantum(steps);
    x = (steps + rounder) - rounder;
    x = x > AGC_FP8_LEVELS ? AGC_FP8_LEVELS : x;
    return x < -AGC_FP8_LEVELS ? -AGC_FP8_LEVELS : x;
}

/* Code of a number of the format. */
AGC_HD uint8_t agc_fp8_code(float x)
{
    uint32_t bits = agc_f32_bits(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    if (magnitude >= AGC_FP8_NORMAL_BITS)
        return (uint8_t)(sign | ((magnitude >> 20) - (120u << 3)));
    return (uint8_t)(sign | (uint32_t)(int32_t)(agc_f32_from_bits(magnitude) * 512.0f));
}

AGC_HD float agc_fp8_value(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7fu;
    if (magnitude >= 8)
        return agc_f32_from_bits(sign | ((magnitude << 20) + (120u << 23)));
    return agc_f32_from_bits(sign | agc_f32_bits((float)(int32_t)magnitude * 0x1p-9f));
}

/* ---- sign and ternary: x ~ {-scale, scale}, x ~ {-scale, 0, scale} ---- */

/* Any finite scale will do. */
#define AGC_SIGN_SCALE_MAX_BITS 0x7f7fffffu
#define AGC_TERNARY_SCALE_MAX_BITS 0x7f7fffffu
/* Magnitudes up to this share of the mean one become zero. */
#define AGC_TERNARY_THRESHOLD 0.75f
/* Steps of a block that share a byte: sum of 3^k (step + 1). */
#define AGC_TERNARY_PER_BYTE 5u
#define AGC_TERNARY_BYTE_MAX 242u

/* Sums of magnitudes keep one order on every tier: element i of a block goes to partial sum i mod
 * 16, and these are added in halves: l and l + 8, l and l + 4, ... */
#define AGC_SUM_NLANES 16u

AGC_HD float agc_sum_lanes(float lanes[AGC_SUM_NLANES])
{
    for (uint32_t half = AGC_SUM_NLANES / 2; half > 0; half /= 2)
        for (uint32_t l = 0; l < half; l++)
            lanes[l] += lanes[l + half];
    return lanes[0];
}

#endif /* AGC_WIRE_H */
