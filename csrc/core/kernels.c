/* kernels.c: choice of kernels. The order of the overlays is the policy: the last tier that has an
 * operation wins. */
#include "core/kernels.h"

#include <stdatomic.h>

#include "core/common.h"

void agc_kernels_init(struct agc_kernels *k, uint32_t cpu_features)
{
#define AGC_KERNEL(ret, name, args) k->name = agc_##name##_c;
#include "core/kernels.inc"
#undef AGC_KERNEL
#if defined(__x86_64__)
    if (cpu_features & AGC_CPU_CRC32)
        agc_kernels_overlay_crc32(k);
    if (cpu_features & AGC_CPU_AVX2)
        agc_kernels_overlay_avx2(k);
    if (cpu_features & AGC_CPU_AVX512)
        agc_kernels_overlay_avx512(k);
#else
    (void)cpu_features;
#endif
}

/* Tables for every set of features; each is written by one thread at most once, then only read. */
static struct agc_kernels kernel_tables[8];
static _Atomic(uint32_t) kernel_tables_ready; /* bit f: table f is complete */
static atomic_flag kernel_tables_lock = ATOMIC_FLAG_INIT;

const struct agc_kernels *agc_kernels_get(void)
{
    uint32_t f = agc_cpu_features() & 7u;
    if (AGC_LIKELY(atomic_load_explicit(&kernel_tables_ready, memory_order_acquire) & (1u << f)))
        return &kernel_tables[f];
    while (atomic_flag_test_and_set_explicit(&kernel_tables_lock, memory_order_acquire))
        ;
    if (!(atomic_load_explicit(&kernel_tables_ready, memory_order_relaxed) & (1u << f))) {
        agc_kernels_init(&kernel_tables[f], f);
        atomic_fetch_or_explicit(&kernel_tables_ready, 1u << f, memory_order_release);
    }
    atomic_flag_clear_explicit(&kernel_tables_lock, memory_order_release);
    return &kernel_tables[f];
}
