/* elements.c: moving numbers between a tensor's data type and the work type. */
#include "core/elements.h"

#include "core/common.h"

uint32_t agc_dtype_nbytes(uint32_t dtype)
{
    switch (dtype) {
    case AGC_DTYPE_F32:
        return 4;
    case AGC_DTYPE_F16:
    case AGC_DTYPE_BF16:
        return 2;
    case AGC_DTYPE_F64:
        return 8;
    default:
        return 0;
    }
}

uint64_t agc_dtype_zero_mask(uint32_t dtype)
{
    switch (agc_dtype_nbytes(dtype)) {
    case 2:
        return 0x7fff7fff7fff7fffu;
    case 4:
        return 0x7fffffff7fffffffu;
    default:
        return 0x7fffffffffffffffu;
    }
}

void agc_elements_load(const struct agc_kernels *k, uint32_t dtype, const void *src,
                       uint32_t nelems, float *dst)
{
    const uint8_t *bytes = (const uint8_t *)src;
    switch (dtype) {
    case AGC_DTYPE_F16:
        k->f16_decode(bytes, nelems, 1.0f, dst);
        break;
    case AGC_DTYPE_BF16:
        k->bf16_decode(bytes, nelems, 1.0f, dst);
        break;
    case AGC_DTYPE_F64:
        for (uint32_t i = 0; i < nelems; i++) {
            double x;
            memcpy(&x, bytes + 8 * (size_t)i, 8);
            dst[i] = (float)x;
        }
        break;
    default:
        memcpy(dst, src, 4 * (size_t)nelems);
    }
}

void agc_elements_store(const struct agc_kernels *k, uint32_t dtype, const float *src,
                        uint32_t nelems, void *dst)
{
    uint8_t *bytes = (uint8_t *)dst;
    switch (dtype) {
    case AGC_DTYPE_F16:
        k->f16_encode(src, NULL, nelems, bytes);
        break;
    case AGC_DTYPE_BF16:
        k->bf16_encode(src, NULL, nelems, bytes);
        break;
    case AGC_DTYPE_F64:
        for (uint32_t i = 0; i < nelems; i++) {
            double x = (double)src[i];
            memcpy(bytes + 8 * (size_t)i, &x, 8);
        }
        break;
    default:
        memcpy(dst, src, 4 * (size_t)nelems);
    }
}

/* Sums by memcpy, since nothing is aligned: loops that compilers turn into vectors. */
static void add_zero_f32(uint8_t *p, uint32_t nelems)
{
    for (uint32_t i = 0; i < nelems; i++) {
        float x;
        memcpy(&x, p + 4 * (size_t)i, 4);
        x = agc_acc_add(x, 0.0f);
        memcpy(p + 4 * (size_t)i, &x, 4);
    }
}

static void add_zero_f64(uint8_t *p, uint32_t nelems)
{
    for (uint32_t i = 0; i < nelems; i++) {
        double x;
        memcpy(&x, p + 8 * (size_t)i, 8);
        x = agc_acc_add_f64(x, 0.0);
        memcpy(p + 8 * (size_t)i, &x, 8);
    }
}

/* Of a 16-bit format whose NaNs are those above `infinity` and become `nan`. */
static void add_zero_half(uint8_t *p, uint32_t nelems, uint32_t infinity, uint32_t nan)
{
    for (uint32_t i = 0; i < nelems; i++) {
        uint32_t bits = agc_load_u16(p + 2 * (size_t)i), magnitude = bits & 0x7fffu;
        bits = magnitude == 0 ? 0 : bits;
        bits = magnitude > infinity ? nan : bits;
        agc_store_u16(p + 2 * (size_t)i, (uint16_t)bits);
    }
}

void agc_elements_add_zero(uint32_t dtype, uint32_t nelems, void *p)
{
    switch (dtype) {
    case AGC_DTYPE_F16:
        add_zero_half((uint8_t *)p, nelems, 0x7c00u, 0x7e00u);
        break;
    case AGC_DTYPE_BF16:
        add_zero_half((uint8_t *)p, nelems, 0x7f80u, 0x7fc0u);
        break;
    case AGC_DTYPE_F64:
        add_zero_f64((uint8_t *)p, nelems);
        break;
    default:
        add_zero_f32((uint8_t *)p, nelems);
    }
}
