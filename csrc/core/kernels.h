/* kernels.h: the table of kernels, one pointer per line of kernels.inc. */
#ifndef AGC_KERNELS_H
#define AGC_KERNELS_H

#include <stdbool.h>

#include "agentcomm.h"
#include "core/rng.h"
#include "core/wire.h"

struct agc_kernels {
#define AGC_KERNEL(ret, name, args) ret(*name) args;
#include "core/kernels.inc"
#undef AGC_KERNEL
};

/* Fills a table for a set of CPU features: scalar C first, then each tier overlays what it
 * improves. Pure. */
void agc_kernels_init(struct agc_kernels *k, uint32_t cpu_features);

/* The table for this CPU; chosen at the first call, from any thread. */
const struct agc_kernels *agc_kernels_get(void);

/* Overlays, in csrc/x86. */
void agc_kernels_overlay_avx2(struct agc_kernels *k);
void agc_kernels_overlay_avx512(struct agc_kernels *k);
void agc_kernels_overlay_crc32(struct agc_kernels *k);

#define AGC_KERNEL(ret, name, args) ret agc_##name##_c args;
#include "core/kernels.inc"
#undef AGC_KERNEL

/* What the tiers have in common: rare paths, and what is left over when whole vectors are done.
 *
 * x and residual are those of a block; residual may be NULL. first: index of the block in its tile.
 */

/* Quantises one block by division: the path of every tier for blocks of tiny numbers. */
void agc_grid_encode_tiny(const float *x, float *residual, uint32_t nelems,
                          const struct agc_rng *rng, uint32_t first, struct agc_grid grid,
                          uint8_t *q);
void agc_fp8_encode_tiny(const float *x, float *residual, uint32_t nelems,
                         const struct agc_rng *rng, uint32_t first, struct agc_grid grid,
                         uint8_t *q);

/* Quantise elements [begin, end) of an ordinary block. */
void agc_grid_encode_tail(const float *x, float *residual, uint32_t begin, uint32_t end,
                          const struct agc_rng *rng, uint32_t first, struct agc_grid grid,
                          uint8_t *q);
void agc_fp8_encode_tail(const float *x, float *residual, uint32_t begin, uint32_t end,
                         const struct agc_rng *rng, uint32_t first, struct agc_grid grid,
                         uint8_t *q);

/* Two steps of a block of nelems to a byte: step j in the low half of byte j, step j + ceil(nelems
 * / 2) in its high half, so that both halves are runs. These do the bytes from `begin` on. */
void agc_int4_pack_tail(const uint8_t *q, uint32_t nelems, uint32_t begin, uint8_t *dst);
void agc_int4_unpack_tail(const uint8_t *src, uint32_t nelems, uint32_t begin, uint8_t *q);

/* What a block of ternary or sign decodes to. */
struct agc_magnitude {
    float threshold; /* larger magnitudes are sent; sign sends all */
    float scale;     /* NaN: the block holds something that is not finite */
};

/* For a block whose sum of magnitudes is not finite: because of its elements, or of their sum. */
struct agc_magnitude agc_magnitude_rare(const float *x, const float *residual, uint32_t nelems,
                                        bool ternary);

/* Elements [begin, end). begin is a multiple of 8. */
void agc_sign_encode_tail(const float *x, float *residual, uint32_t begin, uint32_t end,
                          float scale, uint8_t *q);
void agc_ternary_encode_tail(const float *x, float *residual, uint32_t begin, uint32_t end,
                             struct agc_magnitude m, uint8_t *q);

#endif /* AGC_KERNELS_H */
