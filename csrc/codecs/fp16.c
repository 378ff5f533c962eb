/* fp16.c: IEEE 754 binary16: 10 bits of mantissa, finite up to 65504.
 *
 * Relative error of an element: at most 2^-11 from 6.1e-5 up, absolute error 2^-25 below. A
 * magnitude of 65520 and above becomes an infinity, which every rank sees, as with torch's fp16
 * hook; the mean itself is formed in fp32, so that sums never overflow.
 *
 *   payload of a tile, 2 bytes per element, little endian:
 *   | element 0 | element 1 | ... | padding to 16 |
 */
#include "codecs/halves.h"

AGC_HALF_CODEC(fp16, f16)

const struct agc_codec agc_codec_fp16 = {
    .id = 2,
    .name = "fp16",
    .flags = AGC_CODEC_VALUES,
    AGC_HALF_CODEC_FIELDS(fp16),
};
