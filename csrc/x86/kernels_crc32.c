/* kernels_crc32.c: CRC32C by the instruction of SSE4.2. */
#if defined(__x86_64__)
#include <nmmintrin.h>

#include "core/kernels.h"

__attribute__((target("sse4.2"))) static uint32_t agc_crc32c_sse42(uint32_t crc, const uint8_t *src,
                                                                   uint64_t nbytes)
{
    uint64_t state = ~crc & 0xffffffffu;
    for (; nbytes >= 8; nbytes -= 8, src += 8)
        state = _mm_crc32_u64(state, agc_load_u64(src));
    uint32_t tail = (uint32_t)state;
    for (; nbytes; nbytes--, src++)
        tail = _mm_crc32_u8(tail, *src);
    return ~tail;
}

void agc_kernels_overlay_crc32(struct agc_kernels *k)
{
    k->crc32c = agc_crc32c_sse42;
}
#else
typedef int agc_kernels_crc32_unused; /* ISO C wants one declaration in a file */
#endif
