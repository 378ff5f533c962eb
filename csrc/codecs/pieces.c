/* pieces.c: codecs that work on floats, on tensors of every data type. */
#include "codecs/pieces.h"

#include "core/common.h"
#include "core/elements.h"

void agc_pieces_encode_run(const struct agc_tile *tile, const void *x, uint32_t x_dtype,
                           float *residual, uint32_t first, uint32_t nelems, uint8_t *dst,
                           agc_encode_piece *encode)
{
    if (AGC_LIKELY(agc_is_floats(x_dtype, x))) {
        encode(tile, (const float *)x, residual, first, nelems, dst);
        return;
    }
    float piece[AGC_PIECE_NELEMS];
    size_t elem_nbytes = agc_dtype_nbytes(x_dtype);
    for (uint32_t done = 0; done < nelems; done += AGC_PIECE_NELEMS) {
        uint32_t n = agc_min_u32(AGC_PIECE_NELEMS, nelems - done);
        agc_elements_load(tile->kernels, x_dtype, (const uint8_t *)x + done * elem_nbytes, n,
                          piece);
        encode(tile, piece, residual ? residual + done : NULL, first + done, n, dst);
    }
}

void agc_pieces_encode(const struct agc_tile *tile, const void *x, uint32_t x_dtype,
                       float *residual, uint8_t *dst, agc_encode_piece *encode)
{
    agc_pieces_encode_run(tile, x, x_dtype, residual, 0, tile->nelems, dst, encode);
}

/* out += x, in double: what is there keeps its 53 bits. out needs no alignment. */
static void add_to_f64(uint8_t *out, const float *x, uint32_t nelems)
{
    for (uint32_t i = 0; i < nelems; i++) {
        double sum;
        memcpy(&sum, out + 8 * (size_t)i, 8);
        sum = agc_acc_add_f64(sum, (double)x[i]);
        memcpy(out + 8 * (size_t)i, &sum, 8);
    }
}

void agc_pieces_decode(const struct agc_tile *tile, const uint8_t *src, double weight, bool add,
                       void *out, uint32_t out_dtype, agc_decode_piece *decode)
{
    if (AGC_LIKELY(agc_is_floats(out_dtype, out))) {
        decode(tile, src, 0, tile->nelems, (float)weight, add, (float *)out);
        return;
    }
    float piece[AGC_PIECE_NELEMS];
    size_t elem_nbytes = agc_dtype_nbytes(out_dtype);
    for (uint32_t first = 0; first < tile->nelems; first += AGC_PIECE_NELEMS) {
        uint32_t n = agc_min_u32(AGC_PIECE_NELEMS, tile->nelems - first);
        uint8_t *dst = (uint8_t *)out + first * elem_nbytes;
        if (add && out_dtype == AGC_DTYPE_F64) {
            decode(tile, src, first, n, (float)weight, false, piece);
            add_to_f64(dst, piece, n);
            continue;
        }
        if (add)
            agc_elements_load(tile->kernels, out_dtype, dst, n, piece);
        decode(tile, src, first, n, (float)weight, add, piece);
        agc_elements_store(tile->kernels, out_dtype, piece, n, dst);
    }
}
