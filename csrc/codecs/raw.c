/* raw.c: the numbers themselves, in the tensor's own data type.
 *
 *   payload of a tile, 2, 4 or 8 bytes per element, little endian:
 *   | element 0 | element 1 | ... | padding to 16 |
 *
 * Lossless for what a bucket holds. In the second phase of a sharded exchange it carries a mean
 * that was formed in the work type and is rounded once to the data type, as plain DDP would. A
 * residual left by another codec is sent along and cleared.
 */
#include "codecs/pieces.h"
#include "core/common.h"
#include "core/elements.h"

static uint64_t raw_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems)
{
    (void)spec;
    return (uint64_t)agc_dtype_nbytes(dtype) * nelems;
}

static bool is_finite_f64(double x)
{
    return x - x == 0.0;
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
    for (uint32_t i = 0; i < nelems; i++) {
        double v = load_f64(x + 8 * (size_t)i) + (double)residual[i];
        store_f64(dst + 8 * (size_t)i, v);
        residual[i] = is_finite_f64(v) ? 0.0f : residual[i];
    }
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

static void raw_encode_piece(const struct agc_tile *tile, const float *x, float *residual,
                             uint32_t first, uint32_t nelems, uint8_t *dst)
{
    dst += (size_t)agc_dtype_nbytes(tile->dtype) * first;
    if (tile->dtype == AGC_DTYPE_F16)
        tile->kernels->f16_encode(x, residual, nelems, dst);
    else if (tile->dtype == AGC_DTYPE_BF16)
        tile->kernels->bf16_encode(x, residual, nelems, dst);
    else
        encode_f32(x, residual, nelems, dst);
}

static void raw_encode(const struct agc_tile *tile, const void *x, uint32_t x_dtype,
                       float *residual, uint8_t *dst)
{
    if (x_dtype == tile->dtype && !residual) /* the bits themselves, whatever NaNs they hold */
        memcpy(dst, x, (size_t)agc_dtype_nbytes(x_dtype) * tile->nelems);
    else if (tile->dtype == AGC_DTYPE_F64)
        encode_f64((const uint8_t *)x, residual, tile->nelems, dst);
    else
        agc_pieces_encode(tile, x, x_dtype, residual, dst, raw_encode_piece);
}

static void raw_decode_piece(const struct agc_tile *tile, const uint8_t *src, uint32_t first,
                             uint32_t nelems, float weight, bool add, float *out)
{
    const struct agc_kernels *k = tile->kernels;
    src += (size_t)agc_dtype_nbytes(tile->dtype) * first;
    if (tile->dtype == AGC_DTYPE_F16)
        (add ? k->f16_decode_add : k->f16_decode)(src, nelems, weight, out);
    else if (tile->dtype == AGC_DTYPE_BF16)
        (add ? k->bf16_decode_add : k->bf16_decode)(src, nelems, weight, out);
    else
        (add ? k->f32_decode_add : k->f32_decode)(src, nelems, weight, out);
}

/* Doubles into a tensor of any type, one at a time: a narrower one gets them rounded once. */
static void decode_f64(const struct agc_tile *tile, const uint8_t *src, double weight, bool add,
                       uint8_t *out, uint32_t out_dtype)
{
    size_t out_nbytes = agc_dtype_nbytes(out_dtype);
    for (uint32_t i = 0; i < tile->nelems; i++, out += out_nbytes) {
        double x = load_f64(src + 8 * (size_t)i) * weight;
        if (out_dtype == AGC_DTYPE_F64) {
            store_f64(out, add ? agc_acc_add_f64(load_f64(out), x) : x);
            continue;
        }
        float sum, narrow = (float)x;
        if (add) {
            agc_elements_load(tile->kernels, out_dtype, out, 1, &sum);
            narrow = agc_acc_add(sum, narrow);
        }
        agc_elements_store(tile->kernels, out_dtype, &narrow, 1, out);
    }
}

static void raw_decode(const struct agc_tile *tile, const uint8_t *src, double weight, bool add,
                       void *out, uint32_t out_dtype)
{
    if (out_dtype == tile->dtype && !add && weight == 1.0) /* to the bit, as in raw_encode */
        memcpy(out, src, (size_t)agc_dtype_nbytes(out_dtype) * tile->nelems);
    else if (tile->dtype == AGC_DTYPE_F64)
        decode_f64(tile, src, weight, add, (uint8_t *)out, out_dtype);
    else
        agc_pieces_decode(tile, src, weight, add, out, out_dtype, raw_decode_piece);
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
    .validate = raw_validate,
};
