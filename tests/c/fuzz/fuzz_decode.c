/* fuzz_decode.c: any bytes as a frame: an error or numbers, but nothing is read or written outside
 * the buffers.
 *
 * The input goes through twice: as it is, and with magic, version and checksums repaired, since no
 * fuzzer guesses a CRC; the second pass is what reaches the codecs. It lies in a heap block of
 * exactly its size, and so does what is decoded.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "agentcomm.h"
#include "core/kernels.h"
#include "core/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

static float scratch[AGC_SCRATCH_NELEMS];

/* 16 bytes of a frame may stand for a tile of 65,536 elements: of how many a fuzzer waits for. */
#define NELEMS_DECODED_MAX (4u * AGC_TILE_NELEMS_MAX)

static void decode_as(const uint8_t *frame, size_t nbytes, const struct agc_frame *f,
                      uint32_t dtype)
{
    uint64_t out_nbytes = f->nelems * agc_dtype_nbytes(dtype);
    uint8_t *out = (uint8_t *)malloc(out_nbytes ? out_nbytes : 1);
    if (!out)
        return;
    memset(out, 0x55, out_nbytes);
    enum agc_status status = agc_decode(frame, nbytes, out, dtype, f->nelems, false, scratch);
    if (status == AGC_OK) {
        status = agc_decode(frame, nbytes, out, dtype, f->nelems, true, scratch);
        assert(status == AGC_OK);
    } else {
        assert(status == AGC_ERR_PAYLOAD || status == AGC_ERR_PAYLOAD_CHECKSUM);
        for (uint64_t i = 0; i < out_nbytes; i++)
            assert(out[i] == 0x55); /* a damaged frame leaves out as it was */
    }
    free(out);
}

static void try_frame(const uint8_t *frame, size_t nbytes)
{
    struct agc_frame f;
    enum agc_status status = agc_frame_parse(frame, nbytes, &f);
    if (status != AGC_OK) {
        assert(status <= AGC_ERR_TRUNCATED && status > AGC_ERR_MISMATCH);
        status = agc_decode(frame, nbytes, NULL, AGC_DTYPE_F32, 1, false, scratch);
        assert(status != AGC_OK);
        return;
    }
    /* What is allocated for a frame is bounded by its length. */
    assert(f.nelems <= nbytes / AGC_PAYLOAD_ALIGN_NBYTES * AGC_TILE_NELEMS_MAX);
    if (f.nelems > NELEMS_DECODED_MAX)
        return;
    for (uint32_t dtype = AGC_DTYPE_F32; dtype <= AGC_DTYPE_F64; dtype++)
        decode_as(frame, nbytes, &f, dtype);
    status = agc_decode(frame, nbytes, NULL, AGC_DTYPE_F32, f.nelems + 1, false, scratch);
    assert(status == AGC_ERR_NELEMS);
}

/* What a sender of this header and payload would have written around them. */
static void repair(uint8_t *frame, size_t nbytes)
{
    const struct agc_kernels *k = agc_kernels_get();
    if (nbytes < AGC_WIRE_HEADER_NBYTES)
        return;
    agc_store_u32(frame + AGC_WIRE_AT_MAGIC, AGC_WIRE_MAGIC);
    frame[AGC_WIRE_AT_VERSION] = AGC_WIRE_VERSION;
    agc_store_u32(frame + AGC_WIRE_AT_CHECKSUM, k->crc32c(0, frame, AGC_WIRE_AT_CHECKSUM));
    uint64_t payload_nbytes = agc_load_u64(frame + AGC_WIRE_AT_PAYLOAD);
    if (payload_nbytes <= nbytes - AGC_WIRE_HEADER_NBYTES &&
        nbytes - AGC_WIRE_HEADER_NBYTES - payload_nbytes >= AGC_WIRE_CHECKSUM_NBYTES) {
        uint8_t *payload = frame + AGC_WIRE_HEADER_NBYTES;
        agc_store_u32(payload + payload_nbytes, k->crc32c(0, payload, payload_nbytes));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    uint8_t *frame = (uint8_t *)calloc(1, nbytes ? nbytes : 1);
    if (!frame)
        return 0;
    if (nbytes)
        memcpy(frame, data, nbytes);
    try_frame(frame, nbytes);
    repair(frame, nbytes);
    try_frame(frame, nbytes);
    free(frame);
    return 0;
}
