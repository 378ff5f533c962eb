/* bf16.c: bfloat16: the upper half of a float, 7 bits of mantissa and the full range.
 *
 * Relative error of an element: at most 2^-8. Overflows only where rounding up leaves the range of
 * a float (above 3.39e38).
 *
 *   payload of a tile, 2 bytes per element, little endian:
 *   | element 0 | element 1 | ... | padding to 16 |
 */
#include "codecs/halves.h"

AGC_HALF_CODEC(bf16, bf16)

const struct agc_codec agc_codec_bf16 = {
    .id = 3,
    .name = "bf16",
    .flags = 0,
    AGC_HALF_CODEC_FIELDS(bf16),
};
