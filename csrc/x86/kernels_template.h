/* kernels_template.h: the vector kernels, written once and included by each tier.
 *
 * "Parameters", defined by the including file:
 *   SUFFIX, TARGET          avx2 | avx512, and the target attribute of every function
 *   VL                      floats per vector: 8 | 16
 *   VF, VI                  types of a vector of floats, of 32-bit integers
 *   VF_LOAD VF_STORE VF_SET1 VF_ADD VF_SUB VF_MUL VF_MIN VF_MAX VF_ROUND
 *   VF_FROM_I32 VI_FROM_F32 VF_BITS (VF -> VI) VI_AS_VF (VI -> VF)
 *   VI_SET1 VI_IOTA VI_ADD VI_MUL VI_XOR VI_AND VI_SRL VI_MAX_U32 VI_MIN_U32 VI_HMAX_U32
 *   VI_LOAD VI_STORE VI_OR VI_SLL16 VI_SRL16 VI_SRL16_BY VI_SUB8  bytes and 16-bit halves of
 * vectors VI_SUB VI_MAX_I32 VI_ADD8 VI_SUB16 VI_MUL16  more integers VF_SUM_LANES(sums)
 * agc_sum_lanes of 16 / VL vectors;  VI_HSUM(a)  sum of the VL integers VF_ABS(v), VF_SELECT_GT(a,
 * b, x)  x where a > b, else 0;  VI_COUNT_GT(n, a, b)  n + 1 where a > b I8_STORE(p, vi) narrows VL
 * integers in -128..127 to bytes U8_STORE(p, vi) narrows VL integers in 0..255 I8_LOAD(p) widens VL
 * bytes VH_LOAD_U8(p)           VL bytes as 16-bit values; VH_SLL VH_SRA VH_AND VH_SET1
 * SIGNS_STORE(p, v)       the VL sign bits SIGNS_LOAD(p)           VL bits as the sign bits of a VI
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

/* agc_rng_at */
TARGET static inline VI FN(random)(struct agc_rng rng, VI index)
{
    VI x = VI_ADD(VI_MUL(index, VI_SET1(AGC_RNG_STEP)), VI_SET1(rng.key0));
    x = VI_MUL(VI_XOR(x, VI_SRL(x, 16)), VI_SET1(AGC_RNG_MUL0));
    x = VI_MUL(VI_ADD(VI_XOR(x, VI_SRL(x, 15)), VI_SET1(rng.key1)), VI_SET1(AGC_RNG_MUL1));
    return VI_XOR(x, VI_SRL(x, 16));
}

TARGET static inline VF FN(dither)(struct agc_rng rng, VI index)
{
    VI bits = VI_SRL(FN(random)(rng, index), 8);
    return VF_SUB(VF_MUL(VF_FROM_I32(bits), VF_SET1(0x1p-24f)), VF_SET1(0.5f));
}

/* Elements i.. as they enter the codec: gradients plus what is still owed. */
TARGET static inline __attribute__((always_inline)) VF FN(with_residual)(const float *x,
                                                                         const float *residual,
                                                                         uint32_t i, bool feedback)
{
    VF v = VF_LOAD(x + i);
    return feedback ? VF_ADD(v, VF_LOAD(residual + i)) : v;
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
        VF v = FN(with_residual)(x, residual, i, feedback);
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

/* One ordinary block of fp8, as agc_fp8_encode_tail. */
TARGET static inline __attribute__((always_inline)) void
FN(fp8_block)(const float *x, float *residual, uint32_t n, const struct agc_rng *rng,
              uint32_t first, struct agc_grid grid, uint8_t *q, bool feedback, bool stochastic)
{
    VF inverse = VF_SET1(grid.inverse), scale = VF_SET1(grid.scale);
    VF hi = VF_SET1(AGC_FP8_LEVELS), lo = VF_SET1(-AGC_FP8_LEVELS);
    VF normal = VI_AS_VF(VI_SET1(AGC_FP8_NORMAL_BITS)), subnormals = VF_SET1(512.0f);
    VI magnitude_bits = VI_SET1(0x7fffffffu), sign_bit = VI_SET1(0x80u);
    VI index = VI_ADD(VI_SET1(first), VI_IOTA);
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        VF v = FN(with_residual)(x, residual, i, feedback);
        VF steps = VF_MUL(v, inverse);
        VI exponent =
            VI_MAX_I32(VI_AND(VF_BITS(steps), VI_SET1(0x7f800000u)), VI_SET1(AGC_FP8_NORMAL_BITS));
        VF rounder = VI_AS_VF(VI_ADD(exponent, VI_SET1((20u << 23) + 0x400000u)));
        if (stochastic) {
            VF quantum = VI_AS_VF(VI_SUB(exponent, VI_SET1(3u << 23)));
            steps = VF_ADD(steps, VF_MUL(FN(dither)(*rng, index), quantum));
            index = VI_ADD(index, VI_SET1(VL));
        }
        VF rounded = VF_SUB(VF_ADD(steps, rounder), rounder);
        if (stochastic) /* else |steps| <= 448 (1 + 2^-23), which rounds to 448 */
            rounded = VF_MAX(VF_MIN(rounded, hi), lo);
        /* The code of a normal number is its upper bits; of a smaller one, its multiple of 2^-9. As
         * the first is too small for the smaller ones and the second at most 8, the larger is
         * right.
         */
        VI bits = VF_BITS(rounded), magnitude = VI_AND(bits, magnitude_bits);
        VI small = VI_FROM_F32(VF_MUL(VF_MIN(VI_AS_VF(magnitude), normal), subnormals));
        VI code = VI_MAX_I32(VI_SUB(VI_SRL(magnitude, 20), VI_SET1(120u << 3)), small);
        U8_STORE(q + i, VI_OR(code, VI_AND(VI_SRL(bits, 24), sign_bit)));
        if (feedback)
            VF_STORE(residual + i, VF_SUB(v, VF_MUL(rounded, scale)));
    }
    if (AGC_UNLIKELY(i < n))
        agc_fp8_encode_tail(x, residual, i, n, rng, first, grid, q);
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

/* The scale and the steps, a byte each, of one block that is scaled by its largest magnitude. */
TARGET static inline __attribute__((always_inline)) void
FN(grid_encode)(const float *x, float *residual, uint32_t n, const struct agc_rng *rng,
                uint32_t first, float levels, uint32_t scale_max_bits, uint8_t *scale, uint8_t *q,
                bool feedback, bool stochastic)
{
    struct agc_grid grid =
        agc_grid_from_absmax(FN(absmax_bits)(x, residual, n, feedback), levels, scale_max_bits);
    agc_store_u32(scale, agc_f32_bits(grid.scale));
    bool fp8 = levels == AGC_FP8_LEVELS; /* a constant wherever this is inlined */
    if (AGC_UNLIKELY(!grid.finite))
        memset(q, 0, n);
    else if (AGC_UNLIKELY(grid.tiny))
        (fp8 ? agc_fp8_encode_tiny : agc_grid_encode_tiny)(x, residual, n, rng, first, grid, q);
    else
        (fp8 ? FN(fp8_block) : FN(grid_block))(x, residual, n, rng, first, grid, q, feedback,
                                               stochastic);
}

/* A codec with a byte per element. */
TARGET static inline __attribute__((always_inline)) void
FN(byte_encode)(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                const struct agc_rng *rng, float levels, uint32_t scale_max_bits, uint8_t *scales,
                uint8_t *q, bool feedback, bool stochastic)
{
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4)
        FN(grid_encode)(x + first, feedback ? residual + first : NULL,
                        agc_min_u32(block_nelems, nelems - first), rng, first, levels,
                        scale_max_bits, scales, q + first, feedback, stochastic);
}

TARGET static inline __attribute__((always_inline)) void
FN(int8_encode_as)(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                   const struct agc_rng *rng, uint8_t *scales, uint8_t *q, bool feedback,
                   bool stochastic)
{
    FN(byte_encode)(x, residual, nelems, block_nelems, rng, AGC_INT8_LEVELS,
                    AGC_INT8_SCALE_MAX_BITS, scales, q, feedback, stochastic);
}

TARGET static inline __attribute__((always_inline)) void
FN(fp8_encode_as)(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                  const struct agc_rng *rng, uint8_t *scales, uint8_t *q, bool feedback,
                  bool stochastic)
{
    FN(byte_encode)(x, residual, nelems, block_nelems, rng, AGC_FP8_LEVELS, AGC_FP8_SCALE_MAX_BITS,
                    scales, q, feedback, stochastic);
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
    _Alignas(64) uint8_t steps[AGC_BLOCK_NELEMS_MAX];
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
    _Alignas(64) uint8_t steps[AGC_BLOCK_NELEMS_MAX];
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        FN(int4_unpack)(q, n, steps);
        FN(grid_decode)(steps, n, agc_f32_from_bits(agc_load_u32(scales)) * weight, out + first,
                        add);
        q += (n + 1) / 2;
    }
}

TARGET static inline __attribute__((always_inline)) void
FN(fp8_decode_as)(const uint8_t *scales, const uint8_t *q, uint32_t nelems, uint32_t block_nelems,
                  float weight, float *out, bool add)
{
    /* The code, moved to the place of a binary16, is 2^-8 times its value. */
    VF by_256 = VF_SET1(256.0f);
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first), i = 0;
        const uint8_t *codes = q + first;
        float *dst = out + first, scale = agc_f32_from_bits(agc_load_u32(scales)) * weight;
        VF scale_v = VF_SET1(scale);
        for (; i + VL <= n; i += VL) {
            VH half = VH_SRA(VH_SLL(VH_LOAD_U8(codes + i), 8), 1);
            VF value = VF_MUL(F32_FROM_F16(VH_AND(half, VH_SET1(0xbfff))), by_256);
            VF v = VF_MUL(value, scale_v);
            if (add)
                v = VF_FIX_NAN(VF_ADD(VF_LOAD(dst + i), v));
            VF_STORE(dst + i, v);
        }
        for (; i < n; i++) {
            float v = agc_fp8_value(codes[i]) * scale;
            dst[i] = add ? agc_acc_add(dst[i], v) : v;
        }
    }
}

/* ---- ternary and sign ---- */

#define NSUMS (AGC_SUM_NLANES / VL)

/* Sum of all magnitudes of a block. v: NULL, or where x + residual goes. */
TARGET static inline __attribute__((always_inline)) float
FN(magnitude_sum)(const float *x, const float *residual, uint32_t n, float *v, bool feedback)
{
    VF sums[NSUMS];
    float lanes[AGC_SUM_NLANES];
    uint32_t i = 0;
    for (uint32_t u = 0; u < NSUMS; u++)
        sums[u] = VF_SET1(0.0f);
    for (; i + AGC_SUM_NLANES <= n; i += AGC_SUM_NLANES) {
        for (uint32_t u = 0; u < NSUMS; u++) {
            VF a = FN(with_residual)(x, residual, i + u * VL, feedback);
            if (v)
                VF_STORE(v + i + u * VL, a);
            sums[u] = VF_ADD(sums[u], VF_ABS(a));
        }
    }
    if (AGC_LIKELY(i == n))
        return VF_SUM_LANES(sums);
    for (uint32_t u = 0; u < NSUMS; u++)
        VF_STORE(lanes + u * VL, sums[u]);
    for (; i < n; i++) {
        float a = feedback ? x[i] + residual[i] : x[i];
        if (v)
            v[i] = a;
        lanes[i % AGC_SUM_NLANES] += agc_f32_from_bits(agc_f32_bits(a) & 0x7fffffffu);
    }
    return agc_sum_lanes(lanes);
}

/* Mean of the magnitudes above a threshold, 0 if there is none. All are finite. */
TARGET static inline __attribute__((always_inline)) float FN(mean_above)(const float *v, uint32_t n,
                                                                         float threshold)
{
    VF sums[NSUMS], threshold_v = VF_SET1(threshold);
    VI counts[NSUMS];
    float lanes[AGC_SUM_NLANES];
    uint32_t i = 0, count;
    for (uint32_t u = 0; u < NSUMS; u++) {
        sums[u] = VF_SET1(0.0f);
        counts[u] = VI_SET1(0);
    }
    for (; i + AGC_SUM_NLANES <= n; i += AGC_SUM_NLANES) {
        for (uint32_t u = 0; u < NSUMS; u++) {
            VF a = VF_ABS(VF_LOAD(v + i + u * VL));
            counts[u] = VI_COUNT_GT(counts[u], a, threshold_v);
            sums[u] = VF_ADD(sums[u], VF_SELECT_GT(a, threshold_v, a));
        }
    }
    for (uint32_t u = 1; u < NSUMS; u++)
        counts[0] = VI_ADD(counts[0], counts[u]);
    count = VI_HSUM(counts[0]);
    if (AGC_LIKELY(i == n))
        return count ? VF_SUM_LANES(sums) / (float)(int32_t)count : 0.0f;
    for (uint32_t u = 0; u < NSUMS; u++)
        VF_STORE(lanes + u * VL, sums[u]);
    for (; i < n; i++) {
        float a = agc_f32_from_bits(agc_f32_bits(v[i]) & 0x7fffffffu);
        bool above = a > threshold;
        lanes[i % AGC_SUM_NLANES] += above ? a : 0.0f;
        count += above;
    }
    return count ? agc_sum_lanes(lanes) / (float)(int32_t)count : 0.0f;
}

TARGET static inline __attribute__((always_inline)) void
FN(sign_encode_as)(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                   uint8_t *scales, uint8_t *q, bool feedback)
{
    VI sign = VI_SET1(0x80000000u);
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        const float *block = x + first;
        float *owed = feedback ? residual + first : NULL;
        uint32_t n = agc_min_u32(block_nelems, nelems - first), i = 0;
        uint8_t *bits = q + first / 8;
        float sum = FN(magnitude_sum)(block, owed, n, NULL, feedback);
        float scale = AGC_LIKELY(sum < __builtin_inff())
                          ? sum / (float)n
                          : agc_magnitude_rare(block, owed, n, false).scale;
        agc_store_u32(scales, agc_f32_bits(scale));
        if (AGC_UNLIKELY(scale != scale)) {
            memset(bits, 0, (n + 7) / 8);
            continue;
        }
        VI scale_bits = VI_SET1(agc_f32_bits(scale));
        for (; i + VL <= n; i += VL) {
            VF v = FN(with_residual)(block, owed, i, feedback);
            SIGNS_STORE(bits + i / 8, v);
            if (feedback) {
                VI sent = VI_OR(scale_bits, VI_AND(VF_BITS(v), sign));
                VF_STORE(owed + i, VF_SUB(v, VI_AS_VF(sent)));
            }
        }
        if (AGC_UNLIKELY(i < n))
            agc_sign_encode_tail(block, owed, i, n, scale, bits);
    }
}

TARGET static void FN(sign_encode)(const float *x, float *residual, uint32_t nelems,
                                   uint32_t block_nelems, const struct agc_rng *rng,
                                   uint8_t *scales, uint8_t *q)
{
    (void)rng;
    if (residual)
        FN(sign_encode_as)(x, residual, nelems, block_nelems, scales, q, true);
    else
        FN(sign_encode_as)(x, residual, nelems, block_nelems, scales, q, false);
}

TARGET static inline __attribute__((always_inline)) void
FN(sign_decode_as)(const uint8_t *scales, const uint8_t *q, uint32_t nelems, uint32_t block_nelems,
                   float weight, float *out, bool add)
{
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first), i = 0;
        const uint8_t *bits = q + first / 8;
        float *dst = out + first, scale = agc_f32_from_bits(agc_load_u32(scales)) * weight;
        VI scale_bits = VI_SET1(agc_f32_bits(scale));
        for (; i + VL <= n; i += VL) {
            VF v = VI_AS_VF(VI_XOR(scale_bits, SIGNS_LOAD(bits + i / 8)));
            if (add)
                v = VF_FIX_NAN(VF_ADD(VF_LOAD(dst + i), v));
            VF_STORE(dst + i, v);
        }
        for (; i < n; i++) {
            float v =
                agc_f32_from_bits(agc_f32_bits(scale) ^ (uint32_t)(bits[i / 8] >> i % 8) << 31);
            dst[i] = add ? agc_acc_add(dst[i], v) : v;
        }
    }
}

/* Blocks that are encoded together: each pass over a block waits for the sum of the one before, and
 * those of neighbours do not wait for each other. More would starve the memory meanwhile. */
#define BATCH_NELEMS 512u
#define BATCH_NBLOCKS (BATCH_NELEMS / AGC_BLOCK_NELEMS_MIN)

/* Runs of steps are read and written a whole vector at a time, past their ends: there is room
 * behind those of each block, and what lies there does not count. */
#define STEPS_GAP_NBYTES 64u
#define STEPS_NBYTES (AGC_BLOCK_NELEMS_MAX + BATCH_NBLOCKS * STEPS_GAP_NBYTES + 4 * VL)
#define RUN_NBYTES (AGC_BLOCK_NELEMS_MAX / AGC_TERNARY_PER_BYTE + 1 + 4 * VL)

/* The steps of one ordinary block, v being x + residual. */
TARGET static inline __attribute__((always_inline)) void
FN(ternary_block)(const float *x, const float *v, float *residual, uint32_t n,
                  struct agc_magnitude m, uint8_t *q, bool feedback)
{
    VF threshold = VF_SET1(m.threshold);
    VI scale = VI_SET1(agc_f32_bits(m.scale)), sign = VI_SET1(0x80000000u), none = VI_SET1(0);
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        VF a = VF_LOAD(v + i);
        VI bits = VF_BITS(a);
        VI above = VI_COUNT_GT(none, a, threshold);
        VI below = VI_COUNT_GT(none, VI_AS_VF(VI_XOR(bits, sign)), threshold);
        I8_STORE(q + i, VI_SUB(above, below));
        if (feedback) {
            VF sent = VI_AS_VF(VI_OR(scale, VI_AND(bits, sign)));
            VF_STORE(residual + i, VF_SUB(a, VF_SELECT_GT(VF_ABS(a), threshold, sent)));
        }
    }
    if (AGC_UNLIKELY(i < n))
        agc_ternary_encode_tail(x, residual, i, n, m, q);
}

/* Behind the n steps there is room for 5 + 4 VL. */
TARGET static inline void FN(ternary_pack)(uint8_t *steps, uint32_t n, uint8_t *dst)
{
    _Alignas(64) uint8_t packed[RUN_NBYTES];
    uint32_t run = (n + AGC_TERNARY_PER_BYTE - 1) / AGC_TERNARY_PER_BYTE;
    memset(steps + n, 0, AGC_TERNARY_PER_BYTE);
    for (uint32_t j = 0; j < run; j += 4 * VL) {
        VI sum = VI_LOAD(steps + 4 * run + j);
        for (uint32_t k = 4; k-- > 0;) {
            VI step = VI_LOAD(steps + k * run + j);
            sum = VI_ADD8(VI_ADD8(VI_ADD8(sum, sum), sum), step);
        }
        VI_STORE(packed + j, VI_ADD8(sum, VI_SET1(0x79797979u))); /* 121 = 1 + 3 + 9 + 27 + 81 */
    }
    memcpy(dst, packed, run);
}

/* (x * multiplier) >> shift of the bytes of x; at most 255 * multiplier < 2^16. */
TARGET static inline __attribute__((always_inline)) VI FN(divide_bytes)(VI x, uint32_t multiplier,
                                                                        int shift)
{
    VI low = VI_AND(x, VI_SET1(0x00ff00ffu)), high = VI_SRL16(x, 8);
    VI by = VI_SET1(multiplier * 0x10001u);
    low = VI_SRL16_BY(VI_MUL16(low, by), shift);
    high = VI_SRL16_BY(VI_MUL16(high, by), shift);
    return VI_OR(low, VI_SLL16(high, 8));
}

/* Run k of a block's steps: digit k of each byte, less 1. */
TARGET static inline __attribute__((always_inline)) void
FN(ternary_unpack_run)(const uint8_t *packed, uint32_t run, uint32_t multiplier, int shift,
                       uint8_t *q)
{
    for (uint32_t j = 0; j < run; j += 4 * VL) {
        VI x = VI_LOAD(packed + j);
        if (multiplier)
            x = FN(divide_bytes)(x, multiplier, shift);
        VI third = FN(divide_bytes)(x, 171, 9);
        x = VI_SUB8(x, VI_ADD8(VI_ADD8(third, third), third));
        VI_STORE(q + j, VI_SUB8(x, VI_SET1(0x01010101u)));
    }
}

/* q has STEPS_NBYTES. */
TARGET static inline void FN(ternary_unpack)(const uint8_t *src, uint32_t n, uint8_t *q)
{
    _Alignas(64) uint8_t packed[RUN_NBYTES];
    uint32_t run = (n + AGC_TERNARY_PER_BYTE - 1) / AGC_TERNARY_PER_BYTE;
    memcpy(packed, src, run);
    /* Division of a byte by 3, 9, 27, 81: exact for all 256. Each run overwrites what the one
     * before wrote past its end. */
    FN(ternary_unpack_run)(packed, run, 0, 0, q);
    FN(ternary_unpack_run)(packed, run, 171, 9, q + run);
    FN(ternary_unpack_run)(packed, run, 57, 9, q + 2 * run);
    FN(ternary_unpack_run)(packed, run, 19, 9, q + 3 * run);
    FN(ternary_unpack_run)(packed, run, 203, 14, q + 4 * run);
}

TARGET static inline __attribute__((always_inline)) void
FN(ternary_encode_nearest)(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                           uint8_t *scales, uint8_t *q, bool feedback)
{
    _Alignas(64) uint8_t steps[STEPS_NBYTES];
    _Alignas(64) float v[AGC_BLOCK_NELEMS_MAX];
    struct agc_magnitude m[BATCH_NBLOCKS];
    uint32_t batch_nelems = agc_max_u32(BATCH_NELEMS, block_nelems);
    for (uint32_t first = 0; first < nelems; first += batch_nelems) {
        const float *piece = x + first;
        float *owed = feedback ? residual + first : NULL;
        uint32_t end = agc_min_u32(batch_nelems, nelems - first), n;
        struct agc_magnitude *block = m;
        for (uint32_t i = 0; i < end; i += n, block++) {
            n = agc_min_u32(block_nelems, end - i);
            block->scale =
                FN(magnitude_sum)(piece + i, feedback ? owed + i : NULL, n, v + i, feedback);
            block->threshold = block->scale / (float)n * AGC_TERNARY_THRESHOLD;
        }
        block = m;
        for (uint32_t i = 0; i < end; i += n, block++) {
            n = agc_min_u32(block_nelems, end - i);
            if (AGC_LIKELY(block->scale < __builtin_inff()))
                block->scale = FN(mean_above)(v + i, n, block->threshold);
            else
                *block = agc_magnitude_rare(piece + i, feedback ? owed + i : NULL, n, true);
        }
        uint8_t *block_steps = steps;
        block = m;
        for (uint32_t i = 0; i < end; i += n, block++, scales += 4) {
            n = agc_min_u32(block_nelems, end - i);
            agc_store_u32(scales, agc_f32_bits(block->scale));
            if (AGC_UNLIKELY(block->scale != block->scale))
                memset(block_steps, 0, n);
            else
                FN(ternary_block)(piece + i, v + i, feedback ? owed + i : NULL, n, *block,
                                  block_steps, feedback);
            block_steps += block_nelems + STEPS_GAP_NBYTES;
        }
        block_steps = steps;
        for (uint32_t i = 0; i < end; i += n) {
            n = agc_min_u32(block_nelems, end - i);
            FN(ternary_pack)(block_steps, n, q);
            block_steps += block_nelems + STEPS_GAP_NBYTES;
            q += (n + AGC_TERNARY_PER_BYTE - 1) / AGC_TERNARY_PER_BYTE;
        }
    }
}

TARGET static inline __attribute__((always_inline)) void
FN(ternary_encode_as)(const float *x, float *residual, uint32_t nelems, uint32_t block_nelems,
                      const struct agc_rng *rng, uint8_t *scales, uint8_t *q, bool feedback,
                      bool stochastic)
{
    _Alignas(64) uint8_t steps[STEPS_NBYTES];
    if (!stochastic) {
        FN(ternary_encode_nearest)(x, residual, nelems, block_nelems, scales, q, feedback);
        return;
    }
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        FN(grid_encode)(x + first, feedback ? residual + first : NULL, n, rng, first, 1.0f,
                        AGC_TERNARY_SCALE_MAX_BITS, scales, steps, feedback, true);
        FN(ternary_pack)(steps, n, q);
        q += (n + AGC_TERNARY_PER_BYTE - 1) / AGC_TERNARY_PER_BYTE;
    }
}

TARGET static inline __attribute__((always_inline)) void
FN(ternary_decode_as)(const uint8_t *scales, const uint8_t *q, uint32_t nelems,
                      uint32_t block_nelems, float weight, float *out, bool add)
{
    _Alignas(64) uint8_t steps[STEPS_NBYTES];
    for (uint32_t first = 0; first < nelems; first += block_nelems, scales += 4) {
        uint32_t n = agc_min_u32(block_nelems, nelems - first);
        FN(ternary_unpack)(q, n, steps);
        FN(grid_decode)(steps, n, agc_f32_from_bits(agc_load_u32(scales)) * weight, out + first,
                        add);
        q += (n + AGC_TERNARY_PER_BYTE - 1) / AGC_TERNARY_PER_BYTE;
    }
}

#define ENCODE_TIER(name)                                                                          \
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
    }

#define DECODE_TIER(name)                                                                          \
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

ENCODE_TIER(fp8)
ENCODE_TIER(int8)
ENCODE_TIER(int4)
ENCODE_TIER(ternary)
DECODE_TIER(fp8)
DECODE_TIER(int8)
DECODE_TIER(int4)
DECODE_TIER(ternary)
DECODE_TIER(sign)

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

TARGET static void FN(bf16_store)(const float *x, uint32_t nelems, struct agc_rng rng, uint8_t *dst)
{
    VI most = VI_SET1(0x7f7fffffu), sign = VI_SET1(0x8000u), index = VI_IOTA;
    uint32_t i = 0;
    for (; i + VL <= nelems; i += VL) {
        VI bits = VF_BITS(VF_LOAD(x + i));
        VI random = VI_SRL(FN(random)(rng, index), 16);
        VI magnitude = VI_ADD(VI_AND(bits, VI_SET1(0x7fffffffu)), random);
        magnitude = VI_MIN_U32(magnitude, most);
        H_STORE(dst + 2 * (size_t)i,
                VH_FROM_I32(VI_OR(VI_AND(VI_SRL(bits, 16), sign), VI_SRL(magnitude, 16))));
        index = VI_ADD(index, VI_SET1(VL));
    }
    if (i < nelems)
        agc_bf16_store_c(x + i, nelems - i, agc_rng_skip(rng, i), dst + 2 * (size_t)i);
}

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

/* ---- topk ---- */

TARGET static inline __attribute__((always_inline)) uint32_t
FN(collect)(const float *x, const float *residual, uint32_t nelems, uint32_t first,
            uint32_t magnitude_bits, uint32_t *index, float *value, bool feedback)
{
    VI magnitude = VI_SET1(0x7fffffffu), below = VI_SET1(magnitude_bits - 1);
    VI place = VI_ADD(VI_SET1(first), VI_IOTA);
    uint32_t i = 0, n = 0;
    for (; i + VL <= nelems; i += VL) {
        VF v = FN(with_residual)(x, residual, i, feedback);
        uint32_t reached = VI_MASK_GT_I32(VI_AND(VF_BITS(v), magnitude), below);
        if (AGC_UNLIKELY(reached)) {
            VI_COMPRESS_STORE(value + n, reached, VF_BITS(VF_FIX_NAN(v)));
            VI_COMPRESS_STORE(index + n, reached, VI_ADD(place, VI_SET1(i)));
            n += (uint32_t)__builtin_popcount(reached);
        }
    }
    return n + agc_collect_magnitude_c(x + i, feedback ? residual + i : NULL, nelems - i, first + i,
                                       magnitude_bits, index + n, value + n);
}

TARGET static uint32_t FN(collect_magnitude)(const float *x, const float *residual, uint32_t nelems,
                                             uint32_t first, uint32_t magnitude_bits,
                                             uint32_t *index, float *value)
{
    if (residual)
        return FN(collect)(x, residual, nelems, first, magnitude_bits, index, value, true);
    return FN(collect)(x, NULL, nelems, first, magnitude_bits, index, value, false);
}

TARGET static uint32_t FN(count_magnitude)(const float *value, uint32_t nelems,
                                           uint32_t magnitude_bits)
{
    VI magnitude = VI_SET1(0x7fffffffu), below = VI_SET1(magnitude_bits - 1);
    VI n0 = VI_SET1(0), n1 = VI_SET1(0);
    uint32_t i = 0;
    for (; i + 2 * VL <= nelems; i += 2 * VL) {
        n0 = VI_COUNT_GT_I32(n0, VI_AND(VF_BITS(VF_LOAD(value + i)), magnitude), below);
        n1 = VI_COUNT_GT_I32(n1, VI_AND(VF_BITS(VF_LOAD(value + i + VL)), magnitude), below);
    }
    return VI_HSUM(VI_ADD(n0, n1)) + agc_count_magnitude_c(value + i, nelems - i, magnitude_bits);
}

TARGET static void FN(residual_add)(const float *x, float *residual, uint32_t nelems)
{
    uint32_t i = 0;
    for (; i + VL <= nelems; i += VL) {
        VF owed = VF_LOAD(residual + i), v = VF_ADD(VF_LOAD(x + i), owed);
        VF_STORE(residual + i, VF_SELECT_FINITE(v, v, owed));
    }
    if (i < nelems)
        agc_residual_add_c(x + i, residual + i, nelems - i);
}

#define OVERLAY(k)                                                                                 \
    do {                                                                                           \
        (k)->fp8_encode = FN(fp8_encode);                                                          \
        (k)->fp8_decode = FN(fp8_decode);                                                          \
        (k)->fp8_decode_add = FN(fp8_decode_add);                                                  \
        (k)->int8_encode = FN(int8_encode);                                                        \
        (k)->int8_decode = FN(int8_decode);                                                        \
        (k)->int8_decode_add = FN(int8_decode_add);                                                \
        (k)->int4_encode = FN(int4_encode);                                                        \
        (k)->int4_decode = FN(int4_decode);                                                        \
        (k)->int4_decode_add = FN(int4_decode_add);                                                \
        (k)->ternary_encode = FN(ternary_encode);                                                  \
        (k)->ternary_decode = FN(ternary_decode);                                                  \
        (k)->ternary_decode_add = FN(ternary_decode_add);                                          \
        (k)->sign_encode = FN(sign_encode);                                                        \
        (k)->sign_decode = FN(sign_decode);                                                        \
        (k)->sign_decode_add = FN(sign_decode_add);                                                \
        (k)->f16_encode = FN(f16_encode);                                                          \
        (k)->f16_decode = FN(f16_decode);                                                          \
        (k)->f16_decode_add = FN(f16_decode_add);                                                  \
        (k)->bf16_encode = FN(bf16_encode);                                                        \
        (k)->bf16_decode = FN(bf16_decode);                                                        \
        (k)->bf16_decode_add = FN(bf16_decode_add);                                                \
        (k)->collect_magnitude = FN(collect_magnitude);                                            \
        (k)->count_magnitude = FN(count_magnitude);                                                \
        (k)->residual_add = FN(residual_add);                                                      \
        (k)->bf16_store = FN(bf16_store);                                                          \
        (k)->f32_decode = FN(f32_decode);                                                          \
        (k)->f32_decode_add = FN(f32_decode_add);                                                  \
    } while (0)
