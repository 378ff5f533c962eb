/* cpu.c: which instructions may be used here. On x86 the CPU and the operating system must both
 * agree. */
#include <stdatomic.h>

#include "agentcomm.h"
#include "core/cpu.h"

#define CPU_UNKNOWN 0x80000000u

static _Atomic(uint32_t) cpu_detected = CPU_UNKNOWN;
static _Atomic(uint32_t) cpu_mask = 0xffffffffu;

uint32_t agc_cpu_features(void)
{
    uint32_t f = atomic_load_explicit(&cpu_detected, memory_order_relaxed);
    if (f == CPU_UNKNOWN) {
#if defined(__x86_64__)
        f = agc_cpu_detect_x86();
#else
        f = 0;
#endif
        /* Every thread finds the same value: a race writes it twice. */
        atomic_store_explicit(&cpu_detected, f, memory_order_relaxed);
    }
    return f & atomic_load_explicit(&cpu_mask, memory_order_relaxed);
}

void agc_cpu_set_mask(uint32_t mask)
{
    atomic_store_explicit(&cpu_mask, mask, memory_order_relaxed);
}

const char *agc_cpu_tier_name(uint32_t features)
{
    if (features & AGC_CPU_AVX512)
        return "avx512";
    if (features & AGC_CPU_AVX2)
        return "avx2";
    return "c";
}
