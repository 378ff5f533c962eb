/* kernels_template.h: the vector kernels, written once and included by each tier.
 *
 * "Parameters", defined by the including file:
 *   SUFFIX, TARGET          avx2 | avx512, and the target attribute of every function
 *   VL                      floats per vector: 8 | 16
 *   VF, VI                  types of a vector of floats, of 32-bit integers
 *   VF_LOAD VF_STORE VF_SET1 VF_ADD VF_SUB VF_MUL VF_MIN VF_MAX VF_ROUND
 *   VF_FROM_I32 VI_FROM_F32 VF_BITS (VF -> VI) VI_AS_VF (VI -> VF)
 *   VI_SET1 VI_IOTA VI_ADD VI_MUL VI_XOR VI_AND VI_SRL VI_MAX_U32 VI_HMAX_U32
 *   VI_LOAD VI_STORE VI_OR VI_SLL16 VI_SRL16 VI_SUB8  bytes and 16-bit halves of vectors
 *   I8_STORE(p, vi)         narrows VL integers in -128..127 to bytes
 *   I8_LOAD(p)              widens VL bytes
 *   H_LOAD(p), H_STORE(p, h)  VL 16-bit values as VH
 *   VH_FROM_I32(vi)         narrows integers in 0..65535 to 16 bits
 *   VI_FROM_VH(h)           widens them
 *   F16_FROM_F32, F32_FROM_F16  by instruction
 *   VF_FIX_NAN(v)           v, with every NaN replaced by the one NaN
 *   VF_SELECT_FINITE(d, a, b)  a where d is finite, else b
 *
 * Whole vectors are done here; what is left over goes through the scalar functions of core, which
 * give the same bits. Every combination included is compared with the scalar tier by
 * tests/c/check_simd.c.
 */
#define PASTE2(a, b) a##_##b
#define PASTE(a, b) PASTE2(a, b)
#define FN(name) PASTE(agc_##name, SUFFIX)

TARGET static inline VF FN(dither)(struct agc_rng rng, VI index)
{
    VI x = VI_ADD(VI_MUL(index, VI_SET1(AGC_RNG_STEP)), VI_SET1(rng.key0));
    x = VI_MUL(VI_XOR(x, VI_SRL(x, 16)), VI_SET1(AGC_RNG_MUL0));
    x = VI_MUL(VI_ADD(VI_XOR(x, VI_SRL(x, 15)), VI_SET1(rng.key1)), VI_SET1(AGC_RNG_MUL1));
    x = VI_XOR(x, VI_SRL(x, 16));
    return VF_SUB(VF_MUL(VF_FROM_I32(VI_SRL(x, 8)), VF_SET1(0x1p-24f)), VF_SET1(0.5f));
}

/* One ordinary block. The two flags are constants wherever this is inlined. */
TARGET static inline __attribute__((always_inline)) void
FN(grid_block)(const float *x, float *residual, uint32_t n, const struct agc_rng *rng,
               uint32_t first, struct agc_grid grid, uint8_t *q, bool feedback, bool stochastic)
{
    VF inverse = VF_SET1(grid.inverse), scale = VF_SET1(grid.scale);
    VF hi = VF_SET1(grid.levels), lo = VF_SET1(-grid.levels);
    VI index = VI_ADD(VI_SET1(first), VI_IOTA);
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        VF v = VF_LOAD(x + i);
        if (feedback)
            v = VF_ADD(v, VF_LOAD(residual + i));
        VF steps = VF_MUL(v, inverse);
        if (stochastic) {
            steps = VF_ADD(steps, FN(dither)(*rng, index));
            steps = VF_MAX(VF_MIN(VF_ROUND(steps), hi), lo);
            index = VI_ADD(index, VI_SET1(VL));
        }
        /* Without dither |steps| <= levels (1 + 2^-23), which rounds to levels: no clamp. */
        VI rounded = VI_FROM_F32(steps);
        I8_STORE(q + i, rounded);
        if (feedback)
            VF_STORE(residual + i, VF_SUB(v, VF_MUL(VF_FROM_I32(rounded), scale)));
    }
    if (AGC_UNLIKELY(i < n))
        agc_grid_encode_tail(x, residual, i, n, rng, first, grid, q);
}

TARGET static inline __attribute__((always_inline)) uint32_t FN(absmax_bits)(const float *x,
                                                                             const float *residual,
                                                                             uint32_t n,
                                                                             bool feedback)
{
    VI mask = VI_SET1(0x7fffffffu), max0 = VI_SET1(0), max1 = VI_SET1(0);
    uint32_t i = 0, result;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        VF a = VF_LOAD(x + i), b = VF_LOAD(x + i + VL);
        if (feedback) {
            a = VF_ADD(a, VF_LOAD(residual + i));
            b = VF_ADD(b, VF_LOAD(residual + i + VL));
        }
        max0 = VI_MAX_U32(max0, VI_AND(VF_BITS(a), mask));
        max1 = VI_MAX_U32(max1, VI_AND(VF_BITS(b), mask));
    }
    result = VI_HMAX_U32(VI_MAX_U32(max0, max1));
    for (; i < n; i++) {
        uint32_t bits = agc_f32_bits(feedback ? x[i] + residual[i] : x[i]) & 0x7fffffffu;
        result = bits > result ? bits : result;
    }
    return result;
}

/* The scale and the steps, a byte each, of one block of int8 or int4. */
TARGET static inline __attribute__((always_inline)) void
FN(grid_encode)(const float *x, float *residual, uint32_t n, const struct agc_rng *rng,
                uint32_t first, float levels, uint32_t scale_max_bits, uint8_t *scale, uint8_t *q,
                bool feedback, bool stochastic)
{
    struct agc_grid grid =
        agc_grid_from_absmax(FN(absmax_bits)(x, residual, n, feedback), levels, scale_max_bits);
    agc_store_u32(scale, agc_f32_bits(grid.scale));
    if (AGC_UNLIKELY(!grid.finite))
        memset(q, 0, n);
    else if (AGC_UNLIKELY(grid.tiny))
        agc_grid_encode_tiny(x, residual, n, rng, first, grid, q);
    else
        FN(grid_block)(x, residual, n, rng, first, grid, q, feedback, stochastic);
}

TARGET static inline __attribute__((always_inline)) void
FN(int8_encode_as)(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                   const struct agc_rng *rng, uint8_t *scales, uint8_t *q, bool feedback,
                   bool stochastic)
{
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4)
        FN(grid_encode)(x + first, feedback ? residual + first : NULL,
                        agc_min_u32(block_nelems, nelems - first), rng, first, AGC_INT8_LEVELS,
                        AGC_INT8_SCALE_MAX_BITS, scales, q + first, feedback, stochastic);
}

TARGET static inline void FN(int4_pack)(const uint8_t *q, uint32_t n, uint8_t *dst)
{
    uint32_t half = (n + 1) / 2, j = 0;
    VI low = VI_SET1(0x0f0f0f0fu), high = VI_SET1(0xf0f0f0f0u);
    for (; j + half + 4 * VL <= n; j += 4 * VL)
        VI_STORE(dst + j, VI_OR(VI_AND(VI_LOAD(q + j), low),
                                VI_AND(VI_SLL16(VI_LOAD(q + half + j), 4), high)));
    agc_int4_pack_tail(q, n, j, dst);
}

TARGET static inline void FN(int4_unpack)(const uint8_t *src, uint32_t n, uint8_t *q)
{
    uint32_t half = (n + 1) / 2, j = 0;
    VI low = VI_SET1(0x0f0f0f0fu), sign = VI_SET1(0x08080808u);
    for (; j + half + 4 * VL <= n; j += 4 * VL) {
        VI pair = VI_LOAD(src + j);
        VI_STORE(q + j, VI_SUB8(VI_XOR(VI_AND(pair, low), sign), sign));
        VI_STORE(q + half + j, VI_SUB8(VI_XOR(VI_AND(VI_SRL16(pair, 4), low), sign), sign));
    }
    agc_int4_unpack_tail(src, n, j, q);
}

TARGET static inline __attribute__((always_inline)) void
FN(int4_encode_as)(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                   const struct agc_rng *rng, uint8_t *scales, uint8_t *q, bool feedback,
                   bool stochastic)
{
    uint8_t steps[AGC_BLOCK_NELEMS_MAX];
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        FN(grid_encode)(x + first, feedback ? residual + first : NULL, n, rng, first,
                        AGC_INT4_LEVELS, AGC_INT4_SCALE_MAX_BITS, scales, steps, feedback,
                        stochastic);
        FN(int4_pack)(steps, n, q);
        q += (n + 1) / 2;
    }
}

/* One block's steps times its scale. */
TARGET static inline __attribute__((always_inline)) void
FN(grid_decode)(const uint8_t *q, uint32_t n, float scale, float *out, bool add)
{
    VF scales_v = VF_SET1(scale);
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        VF v = VF_MUL(VF_FROM_I32(I8_LOAD(q + i)), scales_v);
        if (add)
            v = VF_FIX_NAN(VF_ADD(VF_LOAD(out + i), v));
        VF_STORE(out + i, v);
    }
    for (; i < n; i++) {
        float v = (float)(int8_t)q[i] * scale;
        out[i] = add ? agc_acc_add(out[i], v) : v;
    }
}

TARGET static inline __attribute__((always_inline)) void
FN(int8_decode_as)(const uint8_t *scales, const uint8_t *q, uint32_t nelems, uint32_t block_nelems,
                   float weight, float *out, bool add)
{
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4)
        FN(grid_decode)(q + first, agc_min_u32(block_nelems, nelems - first),
                        agc_f32_from_bits(agc_load_u32(scales)) * weight, out + first, add);
}

TARGET static inline __attribute__((always_inline)) void
FN(int4_decode_as)(const uint8_t *scales, const uint8_t *q, uint32_t nelems, uint32_t block_nelems,
                   float weight, float *out, bool add)
{
    uint8_t steps[AGC_BLOCK_NELEMS_MAX];
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        FN(int4_unpack)(q, n, steps);
        FN(grid_decode)(steps, n, agc_f32_from_bits(agc_load_u32(scales)) * weight, out + first,
                        add);
        q += (n + 1) / 2;
    }
}

/* The three kernels of a codec of evenly spaced values. */
#define GRID_TIER(name)                                                                            \
    TARGET static void FN(name##_encode)(const float *x, float *residual, uint32_t nelems,         \
                                         uint32_t block_nelems, const struct agc_rng *rng,         \
                                         uint8_t *scales, uint8_t *q)                              \
    {                                                                                              \
        if (rng && residual)                                                                       \
            FN(name##_encode_as)(x, residual, nelems, block_nelems, rng, scales, q, true, true);   \
        else if (rng)                                                                              \
            FN(name##_encode_as)(x, residual, nelems, block_nelems, rng, scales, q, false, true);  \
        else if (residual)                                                                         \
            FN(name##_encode_as)(x, residual, nelems, block_nelems, rng, scales, q, true, false);  \
        else                                                                                       \
            FN(name##_encode_as)(x, residual, nelems, block_nelems, rng, scales, q, false, false); \
    }                                                                                              \
    TARGET static void FN(name##_decode)(const uint8_t *scales, const uint8_t *q, uint32_t nelems, \
                                         uint32_t block_nelems, float weight, float *out)          \
    {                                                                                              \
        FN(name##_decode_as)(scales, q, nelems, block_nelems, weight, out, false);                 \
    }                                                                                              \
    TARGET static void FN(name##_decode_add)(const uint8_t *scales, const uint8_t *q,              \
                                             uint32_t nelems, uint32_t block_nelems, float weight, \
                                             float *out)                                           \
    {                                                                                              \
        FN(name##_decode_as)(scales, q, nelems, block_nelems, weight, out, true);                  \
    }

GRID_TIER(int8)
GRID_TIER(int4)

/* ---- 16-bit formats and raw: encode, decode, decode_add of one conversion pair ---- */

TARGET static inline VH FN(bf16_from_f32)(VF v)
{
    /* All bits of the one NaN survive rounding, so NaNs are replaced first. */
    VI bits = VF_BITS(VF_FIX_NAN(v));
    VI odd = VI_AND(VI_SRL(bits, 16), VI_SET1(1));
    VI rounded = VI_SRL(VI_ADD(VI_ADD(bits, VI_SET1(0x7fffu)), odd), 16);
    return VH_FROM_I32(rounded);
}

TARGET static inline VF FN(f32_from_bf16)(VH h)
{
    return VI_AS_VF(VI_SLL(VI_FROM_VH(h), 16));
}

TARGET static inline VH FN(f16_from_f32)(VF v)
{
    return F16_FROM_F32(VF_FIX_NAN(v));
}

TARGET static inline VF FN(f32_from_f16)(VH h)
{
    return VF_FIX_NAN(F32_FROM_F16(h));
}

#define HALF_TIER(name, from_f32, to_f32)                                                          \
    TARGET static void FN(name##_encode)(const float *x, float *residual, uint32_t nelems,         \
                                         uint8_t *dst)                                             \
    {                                                                                              \
        uint32_t i = 0;                                                                            \
        if (residual) {                                                                            \
            for (; i + VL <= nelems; i += VL) {                                                    \
                VF owed = VF_LOAD(residual + i), v = VF_ADD(VF_LOAD(x + i), owed);                 \
                VH h = from_f32(v);                                                                \
                VF decoded = to_f32(h);                                                            \
                H_STORE(dst + 2 * (size_t)i, h);                                                   \
                VF_STORE(residual + i, VF_SELECT_FINITE(decoded, VF_SUB(v, decoded), owed));       \
            }                                                                                      \
        } else {                                                                                   \
            for (; i + VL <= nelems; i += VL)                                                      \
                H_STORE(dst + 2 * (size_t)i, from_f32(VF_LOAD(x + i)));                            \
        }                                                                                          \
        if (i < nelems)                                                                            \
            agc_##name##_encode_c(x + i, residual ? residual + i : NULL, nelems - i,               \
                                  dst + 2 * (size_t)i);                                            \
    }                                                                                              \
    TARGET static void FN(name##_decode)(const uint8_t *src, uint32_t nelems, float weight,        \
                                         float *out)                                               \
    {                                                                                              \
        VF w = VF_SET1(weight);                                                                    \
        uint32_t i = 0;                                                                            \
        for (; i + VL <= nelems; i += VL)                                                          \
            VF_STORE(out + i, VF_MUL(to_f32(H_LOAD(src + 2 * (size_t)i)), w));                     \
        if (i < nelems)                                                                            \
            agc_##name##_decode_c(src + 2 * (size_t)i, nelems - i, weight, out + i);               \
    }                                                                                              \
    TARGET static void FN(name##_decode_add)(const uint8_t *src, uint32_t nelems, float weight,    \
                                             float *out)                                           \
    {                                                                                              \
        VF w = VF_SET1(weight);                                                                    \
        uint32_t i = 0;                                                                            \
        for (; i + VL <= nelems; i += VL) {                                                        \
            VF v = VF_MUL(to_f32(H_LOAD(src + 2 * (size_t)i)), w);                                 \
            VF_STORE(out + i, VF_FIX_NAN(VF_ADD(VF_LOAD(out + i), v)));                            \
        }                                                                                          \
        if (i < nelems)                                                                            \
            agc_##name##_decode_add_c(src + 2 * (size_t)i, nelems - i, weight, out + i);           \
    }

HALF_TIER(f16, FN(f16_from_f32), FN(f32_from_f16))
HALF_TIER(bf16, FN(bf16_from_f32), FN(f32_from_bf16))

TARGET static void FN(f32_decode)(const uint8_t *src, uint32_t nelems, float weight, float *out)
{
    VF w = VF_SET1(weight);
    uint32_t i = 0;
    for (; i + VL <= nelems; i += VL)
        VF_STORE(out + i, VF_MUL(VF_LOAD_BYTES(src + 4 * (size_t)i), w));
    if (i < nelems)
        agc_f32_decode_c(src + 4 * (size_t)i, nelems - i, weight, out + i);
}

TARGET static void FN(f32_decode_add)(const uint8_t *src, uint32_t nelems, float weight, float *out)
{
    VF w = VF_SET1(weight);
    uint32_t i = 0;
    for (; i + VL <= nelems; i += VL) {
        VF v = VF_MUL(VF_LOAD_BYTES(src + 4 * (size_t)i), w);
        VF_STORE(out + i, VF_FIX_NAN(VF_ADD(VF_LOAD(out + i), v)));
    }
    if (i < nelems)
        agc_f32_decode_add_c(src + 4 * (size_t)i, nelems - i, weight, out + i);
}

#define OVERLAY(k)                                                                                 \
    do {                                                                                           \
        (k)->int8_encode = FN(int8_encode);                                                        \
        (k)->int8_decode = FN(int8_decode);                                                        \
        (k)->int8_decode_add = FN(int8_decode_add);                                                \
        (k)->int4_encode = FN(int4_encode);                                                        \
        (k)->int4_decode = FN(int4_decode);                                                        \
        (k)->int4_decode_add = FN(int4_decode_add);                                                \
        (k)->f16_encode = FN(f16_encode);                                                          \
        (k)->f16_decode = FN(f16_decode);                                                          \
        (k)->f16_decode_add = FN(f16_decode_add);                                                  \
        (k)->bf16_encode = FN(bf16_encode);                                                        \
        (k)->bf16_decode = FN(bf16_decode);                                                        \
        (k)->bf16_decode_add = FN(bf16_decode_add);                                                \
        (k)->f32_decode = FN(f32_decode);                                                          \
        (k)->f32_decode_add = FN(f32_decode_add);                                                  \
    } while (0)
