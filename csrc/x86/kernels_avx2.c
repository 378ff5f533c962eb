/* kernels_avx2.c: the AVX2 tier (with FMA, F16C and BMI2 present, as on every CPU since Haswell; no
 * fused operation is used). */
#if defined(__x86_64__)
#if defined(__AVX2__)
#error "compile without -march or -mavx2: newer instructions would leak into baseline code"
#endif
#include <immintrin.h>

#include "core/common.h"
#include "core/kernels.h"

#define SUFFIX avx2
#define TARGET __attribute__((target("avx2,f16c,bmi2")))
#define VL 8
#define VF __m256
#define VI __m256i
#define VH __m128i
#define VF_LOAD(p) _mm256_loadu_ps(p)
#define VF_LOAD_BYTES(p) _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define VF_STORE(p, v) _mm256_storeu_ps(p, v)
#define VF_SET1(x) _mm256_set1_ps(x)
#define VF_ADD(a, b) _mm256_add_ps(a, b)
#define VF_SUB(a, b) _mm256_sub_ps(a, b)
#define VF_MUL(a, b) _mm256_mul_ps(a, b)
#define VF_MIN(a, b) _mm256_min_ps(a, b)
#define VF_MAX(a, b) _mm256_max_ps(a, b)
#define VF_ROUND(a) _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define VF_BITS(a) _mm256_castps_si256(a)
#define VI_AS_VF(a) _mm256_castsi256_ps(a)
#define VF_FROM_I32(a) _mm256_cvtepi32_ps(a)
#define VI_FROM_F32(a) _mm256_cvtps_epi32(a)
#define VI_SET1(x) _mm256_set1_epi32((int)(x))
#define VI_IOTA _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)
#define VI_ADD(a, b) _mm256_add_epi32(a, b)
#define VI_MUL(a, b) _mm256_mullo_epi32(a, b)
#define VI_XOR(a, b) _mm256_xor_si256(a, b)
#define VI_AND(a, b) _mm256_and_si256(a, b)
#define VI_SRL(a, n) _mm256_srli_epi32(a, n)
#define VI_SLL(a, n) _mm256_slli_epi32(a, n)
#define VI_LOAD(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define VI_STORE(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), v)
#define VI_OR(a, b) _mm256_or_si256(a, b)
#define VI_SLL16(a, n) _mm256_slli_epi16(a, n)
#define VI_SRL16(a, n) _mm256_srli_epi16(a, n)
#define VI_SRL16_BY(a, n) _mm256_srl_epi16(a, _mm_cvtsi32_si128(n))
#define VI_SUB8(a, b) _mm256_sub_epi8(a, b)
#define VI_MAX_U32(a, b) _mm256_max_epu32(a, b)
#define VI_MIN_U32(a, b) _mm256_min_epu32(a, b)
#define VI_HMAX_U32(a) vi_hmax_u32_256(a)
#define VI_SUB(a, b) _mm256_sub_epi32(a, b)
#define VI_MAX_I32(a, b) _mm256_max_epi32(a, b)
#define VI_ADD8(a, b) _mm256_add_epi8(a, b)
#define VI_MUL16(a, b) _mm256_mullo_epi16(a, b)
#define VI_HSUM(a) vi_hsum_256(a)
#define VF_SUM_LANES(sums) vf_sum_lanes_256(sums)
#define VF_ABS(a) VI_AS_VF(VI_AND(VF_BITS(a), VI_SET1(0x7fffffffu)))
#define VF_SELECT_GT(a, b, x) _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), x)
#define VI_COUNT_GT(n, a, b) _mm256_sub_epi32(n, VF_BITS(_mm256_cmp_ps(a, b, _CMP_GT_OQ)))
#define VI_MASK_GT_I32(a, b) ((uint32_t)_mm256_movemask_ps(VI_AS_VF(_mm256_cmpgt_epi32(a, b))))
#define VI_COUNT_GT_I32(n, a, b) _mm256_sub_epi32(n, _mm256_cmpgt_epi32(a, b))
#define VI_COMPRESS_STORE(p, mask, v) vi_compress_store_256(p, mask, v)
#define I8_STORE(p, v) i8_store_256(p, v)
#define I8_LOAD(p) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p)))
#define U8_STORE(p, v) u8_store_256(p, v)
#define VH_LOAD_U8(p) _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)(p)))
#define VH_SLL(a, n) _mm_slli_epi16(a, n)
#define VH_SRA(a, n) _mm_srai_epi16(a, n)
#define VH_AND(a, b) _mm_and_si128(a, b)
#define VH_SET1(x) _mm_set1_epi16((short)(x))
#define SIGNS_STORE(p, v) (*(p) = (uint8_t)_mm256_movemask_ps(v))
#define SIGNS_LOAD(p) signs_load_256(p)
#define H_LOAD(p) _mm_loadu_si128((const __m128i *)(const void *)(p))
#define H_STORE(p, h) _mm_storeu_si128((__m128i *)(void *)(p), h)
#define VH_FROM_I32(v) vh_from_i32_256(v)
#define VI_FROM_VH(h) _mm256_cvtepu16_epi32(h)
#define F16_FROM_F32(v) _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define F32_FROM_F16(h) _mm256_cvtph_ps(h)
#define VF_FIX_NAN(v) vf_fix_nan_256(v)
#define VF_SELECT_FINITE(d, a, b) vf_select_finite_256(d, a, b)

TARGET static inline uint32_t vi_hmax_u32_256(VI v)
{
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

TARGET static inline void i8_store_256(uint8_t *p, VI v)
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(words, words));
}

TARGET static inline void u8_store_256(uint8_t *p, VI v)
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packus_epi16(words, words));
}

/* Bit l of a byte moves to the top of lane l. */
TARGET static inline VI signs_load_256(const uint8_t *p)
{
    VI shifted = _mm256_sllv_epi32(VI_SET1(*p), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
    return VI_AND(shifted, VI_SET1(0x80000000u));
}

TARGET static inline VH vh_from_i32_256(VI v)
{
    return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

TARGET static inline VF vf_fix_nan_256(VF v)
{
    return _mm256_blendv_ps(v, VI_AS_VF(VI_SET1(AGC_F32_NAN_BITS)),
                            _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

TARGET static inline VF vf_select_finite_256(VF d, VF a, VF b)
{
    VI magnitude =
        VI_AND(VF_BITS(d), VI_SET1(0x7fffffffu)); /* below 2^31: a signed comparison does */
    return _mm256_blendv_ps(b, a, VI_AS_VF(_mm256_cmpgt_epi32(VI_SET1(0x7f800000u), magnitude)));
}

TARGET static inline void vi_compress_store_256(void *p, uint32_t mask, VI v)
{
    /* The numbers of the mask's lanes, a byte each, moved together. */
    uint64_t bytes = _pdep_u64(mask, 0x0101010101010101u) * 0xffu;
    uint64_t lanes = _pext_u64(0x0706050403020100u, bytes);
    VI order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)lanes));
    VI_STORE(p, _mm256_permutevar8x32_epi32(v, order));
}

TARGET static inline uint32_t vi_hsum_256(VI v)
{
    __m128i m = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_add_epi32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm_add_epi32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

TARGET static inline float vf_sum_lanes_256(const VF *sums)
{
    __m256 by8 = _mm256_add_ps(sums[0], sums[1]);
    __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
    __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_add_ss(by2, _mm_shuffle_ps(by2, by2, 1)));
}

#include "x86/kernels_template.h"

void agc_kernels_overlay_avx2(struct agc_kernels *k)
{
    OVERLAY(k);
}
#else
typedef int agc_kernels_avx2_unused; /* ISO C wants one declaration in a file */
#endif
