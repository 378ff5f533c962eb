/* kernels_avx512.c: the AVX-512 tier (F, BW, DQ, VL). */
#if defined(__x86_64__)
#if defined(__AVX512F__)
#error "compile without -march or -mavx512f: newer instructions would leak into baseline code"
#endif
#include <immintrin.h>

#include "core/common.h"
#include "core/kernels.h"

#define SUFFIX avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define VL 16
#define VF __m512
#define VI __m512i
#define VH __m256i
#define VF_LOAD(p) _mm512_loadu_ps(p)
#define VF_LOAD_BYTES(p) _mm512_castsi512_ps(_mm512_loadu_si512(p))
#define VF_STORE(p, v) _mm512_storeu_ps(p, v)
#define VF_SET1(x) _mm512_set1_ps(x)
#define VF_ADD(a, b) _mm512_add_ps(a, b)
#define VF_SUB(a, b) _mm512_sub_ps(a, b)
#define VF_MUL(a, b) _mm512_mul_ps(a, b)
#define VF_MIN(a, b) _mm512_min_ps(a, b)
#define VF_MAX(a, b) _mm512_max_ps(a, b)
#define VF_ROUND(a) _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define VF_BITS(a) _mm512_castps_si512(a)
#define VI_AS_VF(a) _mm512_castsi512_ps(a)
#define VF_FROM_I32(a) _mm512_cvtepi32_ps(a)
#define VI_FROM_F32(a) _mm512_cvtps_epi32(a)
#define VI_SET1(x) _mm512_set1_epi32((int)(x))
#define VI_IOTA _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define VI_ADD(a, b) _mm512_add_epi32(a, b)
#define VI_MUL(a, b) _mm512_mullo_epi32(a, b)
#define VI_XOR(a, b) _mm512_xor_si512(a, b)
#define VI_AND(a, b) _mm512_and_si512(a, b)
#define VI_SRL(a, n) _mm512_srli_epi32(a, n)
#define VI_SLL(a, n) _mm512_slli_epi32(a, n)
#define VI_LOAD(p) _mm512_loadu_si512(p)
#define VI_STORE(p, v) _mm512_storeu_si512(p, v)
#define VI_OR(a, b) _mm512_or_si512(a, b)
#define VI_SLL16(a, n) _mm512_slli_epi16(a, n)
#define VI_SRL16(a, n) _mm512_srli_epi16(a, n)
#define VI_SRL16_BY(a, n) _mm512_srl_epi16(a, _mm_cvtsi32_si128(n))
#define VI_SUB8(a, b) _mm512_sub_epi8(a, b)
#define VI_MAX_U32(a, b) _mm512_max_epu32(a, b)
#define VI_MIN_U32(a, b) _mm512_min_epu32(a, b)
#define VI_HMAX_U32(a) _mm512_reduce_max_epu32(a)
#define VI_SUB(a, b) _mm512_sub_epi32(a, b)
#define VI_MAX_I32(a, b) _mm512_max_epi32(a, b)
#define VI_ADD8(a, b) _mm512_add_epi8(a, b)
#define VI_MUL16(a, b) _mm512_mullo_epi16(a, b)
#define VI_HSUM(a) ((uint32_t)_mm512_reduce_add_epi32(a))
#define VF_SUM_LANES(sums) vf_sum_lanes_512(sums)
#define VF_ABS(a) _mm512_abs_ps(a)
#define VF_SELECT_GT(a, b, x) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x)
#define VI_COUNT_GT(n, a, b)                                                                       \
    _mm512_mask_add_epi32(n, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), n, VI_SET1(1))
#define VI_MASK_GT_I32(a, b) ((uint32_t)_mm512_cmpgt_epi32_mask(a, b))
#define VI_COUNT_GT_I32(n, a, b)                                                                   \
    _mm512_mask_add_epi32(n, _mm512_cmpgt_epi32_mask(a, b), n, VI_SET1(1))
/* Through a register: compressing to memory is slow on some CPUs. */
#define VI_COMPRESS_STORE(p, mask, v) VI_STORE(p, _mm512_maskz_compress_epi32((__mmask16)(mask), v))
#define I8_STORE(p, v) _mm_storeu_si128((__m128i *)(void *)(p), _mm512_cvtepi32_epi8(v))
#define I8_LOAD(p) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define U8_STORE(p, v) I8_STORE(p, v)
#define VH_LOAD_U8(p) _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define VH_SLL(a, n) _mm256_slli_epi16(a, n)
#define VH_SRA(a, n) _mm256_srai_epi16(a, n)
#define VH_AND(a, b) _mm256_and_si256(a, b)
#define VH_SET1(x) _mm256_set1_epi16((short)(x))
#define SIGNS_STORE(p, v) agc_store_u16(p, (uint16_t)_mm512_movepi32_mask(VF_BITS(v)))
#define SIGNS_LOAD(p) _mm512_maskz_mov_epi32((__mmask16)agc_load_u16(p), VI_SET1(0x80000000u))
#define H_LOAD(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define H_STORE(p, h) _mm256_storeu_si256((__m256i *)(void *)(p), h)
#define VH_FROM_I32(v) _mm512_cvtepi32_epi16(v)
#define VI_FROM_VH(h) _mm512_cvtepu16_epi32(h)
#define F16_FROM_F32(v) _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define F32_FROM_F16(h) _mm512_cvtph_ps(h)
#define VF_FIX_NAN(v) vf_fix_nan_512(v)
#define VF_SELECT_FINITE(d, a, b) vf_select_finite_512(d, a, b)

TARGET static inline VF vf_fix_nan_512(VF v)
{
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(nan, v, VI_AS_VF(VI_SET1(AGC_F32_NAN_BITS)));
}

TARGET static inline VF vf_select_finite_512(VF d, VF a, VF b)
{
    VI magnitude = VI_AND(VF_BITS(d), VI_SET1(0x7fffffffu));
    return _mm512_mask_blend_ps(_mm512_cmplt_epu32_mask(magnitude, VI_SET1(0x7f800000u)), b, a);
}

TARGET static inline float vf_sum_lanes_512(const VF *sums)
{
    __m256 by8 = _mm256_add_ps(_mm512_castps512_ps256(sums[0]), _mm512_extractf32x8_ps(sums[0], 1));
    __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
    __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_add_ss(by2, _mm_shuffle_ps(by2, by2, 1)));
}

#include "x86/kernels_template.h"

void agc_kernels_overlay_avx512(struct agc_kernels *k)
{
    OVERLAY(k);
}
#else
typedef int agc_kernels_avx512_unused; /* ISO C wants one declaration in a file */
#endif
