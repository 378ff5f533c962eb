/* fuzz_round_trip.c: any numbers through any codec. The first bytes choose the codec and its
 * parameters, the rest are the numbers.
 *
 * Asserted: encoding is deterministic, whatever the destination held; the length is what
 * agc_frame_nbytes said; one byte less fails and writes nothing; the frame decodes; the residual
 * stays finite where it was; and the frame of what was decoded decodes to the same, for codecs that
 * say that they are lossless.
 *
 *   byte 0: codec
 *        1: block size
 *        2: bits 0 to 3: rounding, checksum, residual, odd address; 4 to 7: fraction, if sparse
 *        3: bits 0 and 1: data type; 2 to 7: codec of the values, if sparse
 *        4: seed, four bytes
 *        8: numbers
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "agentcomm.h"
#include "core/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

static float scratch[AGC_SCRATCH_NELEMS];

enum { STOCHASTIC = 1, CHECKSUM = 2, RESIDUAL = 4, ODD = 8 };

/* Chooses fraction and values; returns the codec to which block size and rounding belong. */
static struct agc_codec_info choose_values(struct agc_spec *spec, uint8_t fraction, uint8_t number)
{
    struct agc_codec_info values = {.flags = 0}, info;
    uint32_t nvalues = 1;
    for (uint32_t i = 0; agc_codec_info_at(i, &info); i++)
        nvalues += (info.flags & AGC_CODEC_VALUES) != 0;
    uint32_t left = number % nvalues; /* 0: raw */
    for (uint32_t i = 0; left > 0 && agc_codec_info_at(i, &info); i++) {
        if (info.flags & AGC_CODEC_VALUES && --left == 0) {
            values = info;
            spec->values = info.id;
        }
    }
    spec->frac_e9 = fraction ? 1000000000u - 66666666u * (15u - fraction) : 1;
    return values;
}

static uint8_t *block(uint64_t nbytes)
{
    uint8_t *p = (uint8_t *)malloc(nbytes ? nbytes : 1);
    if (!p)
        abort();
    return p;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    struct agc_codec_info info;
    if (nbytes < 8)
        return 0;
    uint32_t ncodecs = 0;
    while (agc_codec_info_at(ncodecs, &info))
        ncodecs++;
    if (!agc_codec_info_at(data[0] % ncodecs, &info))
        return 0;
    struct agc_spec spec = {.codec = info.id};
    struct agc_codec_info values = info;
    if (info.flags & AGC_CODEC_SPARSE)
        values = choose_values(&spec, data[2] >> 4, data[3] >> 2);
    if (values.flags & AGC_CODEC_BLOCKS && data[1])
        spec.block_nelems = 32u << data[1] % 8;
    if (values.flags & AGC_CODEC_STOCHASTIC && data[2] & STOCHASTIC)
        spec.rounding = AGC_ROUNDING_STOCHASTIC;
    bool checksum = data[2] & CHECKSUM;
    uint32_t dtype = 1 + data[3] % 4, elem_nbytes = agc_dtype_nbytes(dtype),
             shift = data[2] & ODD ? 1 : 0;
    uint32_t seed = agc_load_u32(data + 4);
    uint64_t nelems = (nbytes - 8) / elem_nbytes, wanted, written;

    uint8_t *x = block(nelems * elem_nbytes + shift);
    if (nelems)
        memcpy(x + shift, data + 8, nelems * elem_nbytes);
    float *residuals[2] = {NULL, NULL};
    for (int i = 0; i < 2 && data[2] & RESIDUAL; i++) {
        residuals[i] = (float *)(void *)block(4 * nelems);
        for (uint64_t j = 0; j < nelems; j++)
            residuals[i][j] = (float)(j % 7) * 0.125f - 0.25f;
    }

    enum agc_status status = agc_frame_nbytes(&spec, dtype, nelems, checksum, &wanted);
    assert(status == AGC_OK);
    uint8_t *a = block(wanted), *b = block(wanted);
    memset(a, 0x11, wanted);
    memset(b, 0xee, wanted);
    status = agc_encode(&spec, x + shift, dtype, nelems, residuals[0], seed, checksum, scratch, a,
                        wanted - 1, &written);
    assert(status == AGC_ERR_DST_TOO_SMALL);
    for (uint64_t i = 0; i < wanted; i++)
        assert(a[i] == 0x11);
    status = agc_encode(&spec, x + shift, dtype, nelems, residuals[0], seed, checksum, scratch, a,
                        wanted, &written);
    assert(status == AGC_OK && written == wanted);
    status = agc_encode(&spec, x + shift, dtype, nelems, residuals[1], seed, checksum, scratch, b,
                        wanted, &written);
    assert(status == AGC_OK && written == wanted && memcmp(a, b, wanted) == 0);
    for (uint64_t i = 0; residuals[0] && i < nelems; i++) {
        assert(residuals[0][i] - residuals[0][i] == 0.0f); /* finite */
        assert(agc_f32_bits(residuals[0][i]) == agc_f32_bits(residuals[1][i]));
    }

    uint8_t *out = block(nelems * elem_nbytes + shift),
            *again = block(nelems * elem_nbytes + shift);
    status = agc_decode(a, wanted, out + shift, dtype, nelems, false, scratch);
    assert(status == AGC_OK);
    if (info.flags & AGC_CODEC_LOSSLESS && !residuals[0]) {
        status = agc_encode(&spec, out + shift, dtype, nelems, NULL, seed, checksum, scratch, b,
                            wanted, &written);
        assert(status == AGC_OK);
        status = agc_decode(b, wanted, again + shift, dtype, nelems, false, scratch);
        assert(status == AGC_OK &&
               (nelems == 0 || memcmp(out + shift, again + shift, nelems * elem_nbytes) == 0));
    }
    free(x);
    free(residuals[0]);
    free(residuals[1]);
    free(a);
    free(b);
    free(out);
    free(again);
    return 0;
}
