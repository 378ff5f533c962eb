/* pieces.h: what codecs that work on floats share: meeting tensors of every data type.
 *
 * Floats are used where they lie. Anything else (16-bit formats, doubles, floats at odd addresses)
 * is converted a piece at a time on the stack, so that the conversion stays in the first-level
 * cache and no float copy of a tile is ever made.
 */
#ifndef AGC_PIECES_H
#define AGC_PIECES_H

#include "codecs/codec.h"

/* A whole number of blocks of any size. */
#define AGC_PIECE_NELEMS AGC_BLOCK_NELEMS_MAX

/* Elements [first, first + nelems) of a tile, whose floats begin at x, into the tile's payload.
 * first is a multiple of AGC_PIECE_NELEMS, or where a run begins. */
typedef void agc_encode_piece(const struct agc_tile *tile, const float *x, float *residual,
                              uint32_t first, uint32_t nelems, uint8_t *dst);

/* The way back, from the tile's payload: out = weight * decoded, or out += that. */
typedef void agc_decode_piece(const struct agc_tile *tile, const uint8_t *src, uint32_t first,
                              uint32_t nelems, float weight, bool add, float *out);

/* agc_codec.encode_run, encode and decode, made of these. */
void agc_pieces_encode_run(const struct agc_tile *tile, const void *x, uint32_t x_dtype,
                           float *residual, uint32_t first, uint32_t nelems, uint8_t *dst,
                           agc_encode_piece *encode);
void agc_pieces_encode(const struct agc_tile *tile, const void *x, uint32_t x_dtype,
                       float *residual, uint8_t *dst, agc_encode_piece *encode);
void agc_pieces_decode(const struct agc_tile *tile, const uint8_t *src, double weight, bool add,
                       void *out, uint32_t out_dtype, agc_decode_piece *decode);

/* The elements are floats at a float's address. */
static inline bool agc_is_floats(uint32_t dtype, const void *p)
{
    return dtype == AGC_DTYPE_F32 && (uintptr_t)p % sizeof(float) == 0;
}

/* The two, of functions of these names. */
#define AGC_PIECES_CODEC(name)                                                                     \
    static void name##_encode(const struct agc_tile *tile, const void *x, uint32_t x_dtype,        \
                              float *residual, uint8_t *dst)                                       \
    {                                                                                              \
        agc_pieces_encode(tile, x, x_dtype, residual, dst, name##_encode_piece);                   \
    }                                                                                              \
    static void name##_decode(const struct agc_tile *tile, const uint8_t *src, double weight,      \
                              bool add, void *out, uint32_t out_dtype)                             \
    {                                                                                              \
        agc_pieces_decode(tile, src, weight, add, out, out_dtype, name##_decode_piece);            \
    }

#endif /* AGC_PIECES_H */
