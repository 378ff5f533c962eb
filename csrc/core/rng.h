/* rng.h: counter-based random numbers.
 *
 * Problem: stochastic rounding needs a random number per element that does not depend on which
 * thread, vector lane, chunk or device computes it. So a number is a hash of its coordinates (seed,
 * round, bucket, element), never the next one of a stream. Method: the coordinates that are
 * constant over a tile are mixed into a 64-bit key (splitmix64, Steele et al. 2014); the element's
 * index in the tile goes through a 32-bit finaliser with low bias (Wellons, "hash prospector"), the
 * second half of the key entering between its rounds. 32-bit multiplications only: they vectorise
 * on AVX2 and are cheap on GPUs.
 */
#ifndef AGC_RNG_H
#define AGC_RNG_H

#include "core/wire.h"

struct agc_rng {
    uint32_t key0;
    uint32_t key1;
};

#define AGC_RNG_STEP 0x9e3779b1u
#define AGC_RNG_MUL0 0x7feb352du
#define AGC_RNG_MUL1 0x846ca68bu

AGC_HD uint64_t agc_splitmix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Key of the tile that starts at element first_elem of lane `lane`. The engine adds (rank + 1) << 8
 * to the lane of a contribution: ranks must not draw the same numbers. */
AGC_HD struct agc_rng agc_rng_key(uint32_t seed, uint32_t round, uint32_t bucket, uint32_t lane,
                                  uint64_t first_elem)
{
    uint64_t x = agc_splitmix64(((uint64_t)seed << 32) | round);
    struct agc_rng rng;
    x = agc_splitmix64(x ^ (((uint64_t)bucket << 32) | lane));
    x = agc_splitmix64(x ^ first_elem);
    rng.key0 = (uint32_t)x;
    rng.key1 = (uint32_t)(x >> 32);
    return rng;
}

/* The key with which element i draws what element first + i draws with this one. */
AGC_HD struct agc_rng agc_rng_skip(struct agc_rng rng, uint32_t first)
{
    rng.key0 += first * AGC_RNG_STEP;
    return rng;
}

/* Random bits of element i of the tile. */
AGC_HD uint32_t agc_rng_at(struct agc_rng rng, uint32_t i)
{
    uint32_t x = i * AGC_RNG_STEP + rng.key0;
    x = (x ^ (x >> 16)) * AGC_RNG_MUL0;
    x = ((x ^ (x >> 15)) + rng.key1) * AGC_RNG_MUL1;
    return x ^ (x >> 16);
}

/* Uniform over [-0.5, 0.5) in steps of 2^-24: what stochastic rounding adds before it rounds to
 * nearest. */
AGC_HD float agc_rng_dither_at(struct agc_rng rng, uint32_t i)
{
    return (float)(int32_t)(agc_rng_at(rng, i) >> 8) * 0x1p-24f - 0.5f;
}

#endif /* AGC_RNG_H */
