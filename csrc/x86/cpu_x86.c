/* cpu_x86.c: CPUID and XGETBV. A feature counts only if the operating system saves its registers.
 */
#if defined(__x86_64__)
#include <cpuid.h>
#include <stdbool.h>

#include "agentcomm.h"
#include "core/cpu.h"

/* State components of XCR0. */
#define XCR0_YMM 0x06u /* xmm, ymm */
#define XCR0_ZMM 0xe6u /* xmm, ymm, masks, zmm */

static uint64_t read_xcr0(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static bool has_bits(uint32_t word, uint32_t bits)
{
    return (word & bits) == bits;
}

uint32_t agc_cpu_detect_x86(void)
{
    uint32_t eax, ebx, ecx, edx, ebx7 = 0, features = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx))
        return 0;
    if (has_bits(ecx, bit_SSE4_2))
        features |= AGC_CPU_CRC32;
    if (!has_bits(ecx, bit_OSXSAVE))
        return features;
    uint64_t xcr0 = read_xcr0();
    uint32_t ecx1 = ecx;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        ebx7 = ebx;
    if ((xcr0 & XCR0_YMM) == XCR0_YMM && has_bits(ecx1, bit_AVX | bit_FMA | bit_F16C) &&
        has_bits(ebx7, bit_AVX2 | bit_BMI2)) {
        features |= AGC_CPU_AVX2;
        if ((xcr0 & XCR0_ZMM) == XCR0_ZMM &&
            has_bits(ebx7, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL))
            features |= AGC_CPU_AVX512;
    }
    return features;
}
#else
typedef int agc_cpu_x86_unused; /* ISO C wants one declaration in a file */
#endif
