/* raw.c: the numbers themselves, in the tensor's own data type.
 *
 *   payload of a tile, 2, 4 or 8 bytes per element, little endian:
 *   | element 0 | element 1 | ... | padding to 16 |
 *
 * Lossless for what a bucket holds. In the second phase of a sharded exchange it carries a mean
 * that was formed in the work type and is rounded once to the data type, as plain DDP would. A
 * residual left by another codec is sent along and cleared.
 */
#include "codecs/codec.h"
#include "core/common.h"

static uint64_t raw_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems)
{
    (void)spec;
    return (uint64_t)agc_dtype_nbytes(dtype) * nelems;
}

static bool is_finite_f64(double x)
{
    return x - x == 0.0;
}

static void encode_f32(const float *x, float *residual, uint32_t nelems, uint8_t *dst)
{
    if (!residual) {
        memcpy(dst, x, 4 * (size_t)nelems);
        return;
    }
    for (uint32_t i = 0; i < nelems; i++) {
        float v = x[i] + residual[i];
        agc_store_u32(dst + 4 * (size_t)i, agc_f32_bits(v));
        residual[i] = is_finite_f64((double)v) ? 0.0f : residual[i];
    }
}

static double load_f64(const uint8_t *src)
{
    uint64_t bits = agc_load_u64(src);
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

static void store_f64(uint8_t *dst, double x)
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    agc_store_u64(dst, bits);
}

/* Doubles are handled as bytes: no alignment is asked of them. */
static void encode_f64(const uint8_t *x, float *residual, uint32_t nelems, uint8_t *dst)
{
    if (!residual) {
        memcpy(dst, x, 8 * (size_t)nelems);
        return;
    }
    for (uint32_t i = 0; i < nelems; i++) {
        double v = load_f64(x + 8 * (size_t)i) + (double)residual[i];
        store_f64(dst + 8 * (size_t)i, v);
        residual[i] = is_finite_f64(v) ? 0.0f : residual[i];
    }
}

static void raw_encode(const struct agc_tile *tile, const void *x, float *residual, uint8_t *dst)
{
    switch (tile->dtype) {
    case AGC_DTYPE_F16:
        tile->kernels->f16_encode((const float *)x, residual, tile->nelems, dst);
        break;
    case AGC_DTYPE_BF16:
        tile->kernels->bf16_encode((const float *)x, residual, tile->nelems, dst);
        break;
    case AGC_DTYPE_F64:
        encode_f64((const uint8_t *)x, residual, tile->nelems, dst);
        break;
    default:
        encode_f32((const float *)x, residual, tile->nelems, dst);
    }
}

static void raw_decode(const struct agc_tile *tile, const uint8_t *src, double weight, void *out)
{
    uint8_t *bytes = (uint8_t *)out;
    switch (tile->dtype) {
    case AGC_DTYPE_F16:
        tile->kernels->f16_decode(src, tile->nelems, (float)weight, (float *)out);
        break;
    case AGC_DTYPE_BF16:
        tile->kernels->bf16_decode(src, tile->nelems, (float)weight, (float *)out);
        break;
    case AGC_DTYPE_F64:
        for (uint32_t i = 0; i < tile->nelems; i++)
            store_f64(bytes + 8 * (size_t)i, load_f64(src + 8 * (size_t)i) * weight);
        break;
    default:
        tile->kernels->f32_decode(src, tile->nelems, (float)weight, (float *)out);
    }
}

static void raw_decode_add(const struct agc_tile *tile, const uint8_t *src, double weight,
                           void *out)
{
    uint8_t *bytes = (uint8_t *)out;
    switch (tile->dtype) {
    case AGC_DTYPE_F16:
        tile->kernels->f16_decode_add(src, tile->nelems, (float)weight, (float *)out);
        break;
    case AGC_DTYPE_BF16:
        tile->kernels->bf16_decode_add(src, tile->nelems, (float)weight, (float *)out);
        break;
    case AGC_DTYPE_F64:
        for (uint32_t i = 0; i < tile->nelems; i++) {
            double x = load_f64(src + 8 * (size_t)i) * weight;
            store_f64(bytes + 8 * (size_t)i, agc_acc_add_f64(load_f64(bytes + 8 * (size_t)i), x));
        }
        break;
    default:
        tile->kernels->f32_decode_add(src, tile->nelems, (float)weight, (float *)out);
    }
}

static enum agc_status raw_validate(const struct agc_tile *tile, const uint8_t *src)
{
    (void)tile;
    (void)src; /* every pattern of bits is a number */
    return AGC_OK;
}

const struct agc_codec agc_codec_raw = {
    .id = 1,
    .name = "raw",
    .flags = AGC_CODEC_LOSSLESS,
    .payload_nbytes = raw_payload_nbytes,
    .encode = raw_encode,
    .decode = raw_decode,
    .decode_add = raw_decode_add,
    .validate = raw_validate,
};
