/* test_frame.c: frames: what is written is read, and what is damaged is named. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agentcomm.h"
#include "core/header.h"
#include "core/kernels.h"
#include "core/wire.h"
#include "harness.h"

#define NELEMS 700 /* three blocks, the last one short */
#define FRAME_NBYTES_MAX (64 + 8 * NELEMS + 64)

static float scratch[AGC_SCRATCH_NELEMS];
static float x[NELEMS];
static float out[FRAME_NBYTES_MAX];

static const struct agc_spec raw = {.codec = 1};
static const struct agc_spec int8 = {.codec = 5};

/* A frame of x, in memory of exactly its size: one byte beyond it is not mapped. */
struct framed {
    struct guarded memory;
    uint8_t *bytes;
    uint64_t nbytes;
};

static struct framed frame_of(const struct agc_spec *spec, uint64_t nelems, bool checksum)
{
    struct framed f;
    uint64_t written;
    CHECK_OK(agc_frame_nbytes(spec, AGC_DTYPE_F32, nelems, checksum, &f.nbytes));
    f.memory = guarded_create(f.nbytes);
    f.bytes = guarded_back(&f.memory, f.nbytes);
    random_fill(x, nelems, VALUES_GAUSS);
    CHECK_OK(agc_encode(spec, x, AGC_DTYPE_F32, nelems, NULL, 42, checksum, scratch, f.bytes,
                        f.nbytes, &written));
    CHECK_EQ(written, f.nbytes);
    return f;
}

static enum agc_status decode(const struct framed *f, uint64_t nelems)
{
    return agc_decode(f->bytes, f->nbytes, out, AGC_DTYPE_F32, nelems, false, scratch);
}

/* After a change of the header: what a sender with that header would have sent. */
static void repair_checksum(uint8_t *frame)
{
    agc_store_u32(frame + AGC_WIRE_AT_CHECKSUM,
                  agc_kernels_get()->crc32c(0, frame, AGC_WIRE_AT_CHECKSUM));
}

/* ---- what is written is read ------------------------------------------------------------- */

static void test_header_round_trip(void)
{
    for (int i = 0; i < 20000; i++) {
        uint8_t bytes[AGC_WIRE_HEADER_NBYTES];
        struct agc_frame back,
            f = {
                .spec = {.codec = random_below(256),
                         .block_nelems = random_bool() ? 0 : 32u << random_below(8),
                         .rounding = random_below(2),
                         .frac_e9 = (uint32_t)random_u64(),
                         .values = random_below(256)},
                .dtype = 1 + random_below(4),
                .flags = random_bool() ? AGC_FRAME_CHECKSUM : AGC_FRAME_RESULT,
                .tile_nelems = 256 * (1 + random_below(256)),
                .nelems = random_u64() >> (18 + random_below(40)),
                .payload_nbytes = random_u64(),
                .stream = random_u64(),
                .seed = (uint32_t)random_u64(),
                .round = (uint32_t)random_u64(),
                .bucket = random_below(65536),
                .lane = random_below(256),
                .nforwards = random_below(256),
                .chunk_log2 = random_below(63),
                .first_tile = (uint32_t)random_u64(),
            };
        f.nelems %= (uint64_t)UINT32_MAX * f.tile_nelems; /* so that its tiles can be counted */
        f.ntiles = (uint32_t)((f.nelems + f.tile_nelems - 1) / f.tile_nelems);
        agc_header_write(agc_kernels_get(), &f, bytes);
        CHECK_OK(agc_header_read(agc_kernels_get(), bytes, sizeof bytes, &back));
        if (f.spec.rounding)
            f.flags |= AGC_FRAME_STOCHASTIC;
        CHECK_EQ(back.spec.codec, f.spec.codec);
        CHECK_EQ(back.spec.block_nelems, f.spec.block_nelems);
        CHECK_EQ(back.spec.rounding, f.spec.rounding);
        CHECK_EQ(back.spec.frac_e9, f.spec.frac_e9);
        CHECK_EQ(back.spec.values, f.spec.values);
        CHECK_EQ(back.dtype, f.dtype);
        CHECK_EQ(back.flags, f.flags);
        CHECK_EQ(back.tile_nelems, f.tile_nelems);
        CHECK_EQ(back.nelems, f.nelems);
        CHECK_EQ(back.payload_nbytes, f.payload_nbytes);
        CHECK_EQ(back.stream, f.stream);
        CHECK_EQ(back.seed, f.seed);
        CHECK_EQ(back.round, f.round);
        CHECK_EQ(back.bucket, f.bucket);
        CHECK_EQ(back.lane, f.lane);
        CHECK_EQ(back.nforwards, f.nforwards);
        CHECK_EQ(back.chunk_log2, f.chunk_log2);
        CHECK_EQ(back.first_tile, f.first_tile);
        CHECK_EQ(back.ntiles, f.ntiles);
    }
}

/* A spec of a codec: sparse ones need a fraction. */
static struct agc_spec spec_of(const struct agc_codec_info *info)
{
    bool sparse = info->flags & AGC_CODEC_SPARSE;
    return (struct agc_spec){
        .codec = info->id, .frac_e9 = sparse ? 250000000 : 0, .values = sparse ? 5 : 0};
}

/* Every codec and block size: frames of exact size decode, twice the same bytes, the header says
 * what was asked for. */
static void test_encode_and_parse(void)
{
    static const uint64_t sizes[] = {0, 1, 31, 32, 33, 256, 257, NELEMS};
    static const uint32_t blocks[] = {0, 32, 4096};
    struct agc_codec_info info;
    for (uint32_t i = 0; agc_codec_info_at(i, &info); i++) {
        for (int b = 0; b < (info.flags & AGC_CODEC_BLOCKS ? 3 : 1); b++) {
            for (size_t j = 0; j < sizeof sizes / sizeof sizes[0]; j++) {
                struct agc_spec spec = spec_of(&info), resolved;
                spec.block_nelems = blocks[b];
                uint8_t again[FRAME_NBYTES_MAX];
                uint64_t nbytes;
                struct agc_frame parsed;
                struct framed f = frame_of(&spec, sizes[j], j % 2);
                CHECK_OK(agc_spec_resolve(&spec, &resolved));
                CHECK_OK(agc_frame_parse(f.bytes, f.nbytes, &parsed));
                CHECK_BYTES(&parsed.spec, &resolved, sizeof resolved);
                CHECK_EQ(parsed.nelems, sizes[j]);
                CHECK_EQ(parsed.dtype, AGC_DTYPE_F32);
                CHECK_EQ(parsed.seed, 42);
                CHECK_OK(decode(&f, sizes[j]));
                CHECK_OK(agc_encode(&spec, x, AGC_DTYPE_F32, sizes[j], NULL, 42, j % 2, scratch,
                                    again, sizeof again, &nbytes));
                CHECK_EQ(nbytes, f.nbytes);
                CHECK_BYTES(again, f.bytes, nbytes);
                guarded_destroy(&f.memory);
            }
        }
    }
}

/* However many threads: the same bytes, residuals and numbers. */
static void test_threads_do_not_show(void)
{
    enum { NMANY = 5 * 65536 + 777 };
    struct agc_codec_info info;
    float *many = (float *)test_alloc(4 * NMANY), *scratches;
    float *residual = (float *)test_alloc(4 * NMANY), *first_residual, *back, *first_back;
    first_residual = (float *)test_alloc(4 * NMANY);
    back = (float *)test_alloc(4 * NMANY);
    first_back = (float *)test_alloc(4 * NMANY);
    scratches = (float *)test_alloc(sizeof(float) * AGC_SCRATCH_NELEMS * 8);
    uint8_t *frame = (uint8_t *)test_alloc(8 * NMANY), *first = (uint8_t *)test_alloc(8 * NMANY);
    random_fill(many, NMANY, VALUES_GAUSS);
    for (uint32_t i = 0; agc_codec_info_at(i, &info); i++) {
        const struct agc_spec spec = spec_of(&info);
        uint64_t nbytes, first_nbytes = 0;
        for (uint32_t nthreads = 1; nthreads <= 8; nthreads += nthreads < 3 ? 1 : 5) {
            for (uint32_t j = 0; j < NMANY; j++)
                residual[j] = many[j] * 0.125f;
            CHECK_OK(agc_encode_parallel(&spec, many, AGC_DTYPE_F32, NMANY, residual, 3, true,
                                         nthreads, scratches, frame, 8 * NMANY, &nbytes));
            CHECK_OK(agc_decode_parallel(frame, nbytes, back, AGC_DTYPE_F32, NMANY, false, nthreads,
                                         scratches));
            if (nthreads == 1) {
                memcpy(first, frame, nbytes);
                memcpy(first_residual, residual, 4 * NMANY);
                memcpy(first_back, back, 4 * NMANY);
                first_nbytes = nbytes;
                continue;
            }
            CHECK_EQ(nbytes, first_nbytes);
            CHECK_BYTES(frame, first, nbytes);
            CHECK_BYTES(residual, first_residual, 4 * NMANY);
            CHECK_BYTES(back, first_back, 4 * NMANY);
        }
    }
    void *const owned[] = {many,       residual,  first_residual, back,
                           first_back, scratches, frame,          first};
    for (int i = 0; i < 8; i++)
        free(owned[i]);
}

/* The wire format, byte for byte: a change here is a new version. */
static void test_golden_frame(void)
{
    /* clang-format off */
    static const uint8_t golden[] = {
        'A', 'G', 'C', 'F', 1, 5, 1, 0,     /* magic, version, int8, float, values codec */
        1, 0, 8, 255, 0, 0, 0, 0,           /* checksum, no count, block 2^8, tiles 65536, FRAC */
        3, 0, 0, 0, 0, 0, 0, 0,             /* nelems */
        16, 0, 0, 0, 0, 0, 0, 0,            /* payload: 4 + 3, padded */
        0, 0, 0, 0, 0, 0, 0, 0,             /* stream */
        7, 0, 0, 0, 0, 0, 0, 0,             /* seed, round */
        0, 0, 0, 0, 1, 0, 0, 0,             /* first tile, tiles */
        0, 0, 0, 0, 0, 0, 0, 0,             /* bucket, lane, chunk; checksum goes here */
        0, 0, 0x80, 0x3f, 127, 0xff, 3, 0,  /* scale 1.0, values 127 -1 3 */
        0, 0, 0, 0, 0, 0, 0, 0,             /* padding */
        0, 0, 0, 0,                         /* checksum of the payload goes here */
    };
    /* clang-format on */
    const float values[] = {127.0f, -1.25f, 2.5001f};
    uint8_t frame[sizeof golden], wanted[sizeof golden];
    uint64_t nbytes;
    memcpy(wanted, golden, sizeof golden);
    repair_checksum(wanted);
    agc_store_u32(wanted + 80, agc_kernels_get()->crc32c(0, wanted + 64, 16));
    CHECK_OK(agc_encode(&int8, values, AGC_DTYPE_F32, 3, NULL, 7, true, scratch, frame,
                        sizeof frame, &nbytes));
    CHECK_EQ(nbytes, sizeof golden);
    CHECK_BYTES(frame, wanted, sizeof golden);
    CHECK_EQ(agc_load_u32(frame + AGC_WIRE_AT_CHECKSUM), 0xc29d76ebu);
}

/* ---- what is damaged is named ------------------------------------------------------------ */

static void test_cut_short(void)
{
    const struct agc_spec *specs[] = {&raw, &int8};
    for (int i = 0; i < 4; i++) {
        struct framed f = frame_of(specs[i / 2], 100, i % 2);
        struct guarded part = guarded_create(f.nbytes);
        for (uint64_t nbytes = 0; nbytes < f.nbytes; nbytes++) {
            struct agc_frame parsed;
            uint8_t *p = guarded_back(&part, nbytes);
            memcpy(p, f.bytes, nbytes);
            memset(out, 0x77, sizeof out);
            CHECK_STATUS(agc_frame_parse(p, nbytes, &parsed), AGC_ERR_TRUNCATED);
            CHECK_STATUS(agc_decode(p, nbytes, out, AGC_DTYPE_F32, 100, false, scratch),
                         AGC_ERR_TRUNCATED);
            for (size_t j = 0; j < sizeof out; j++)
                CHECK_EQ(((const uint8_t *)out)[j], 0x77);
        }
        guarded_destroy(&part);
        guarded_destroy(&f.memory);
    }
}

static void test_flipped_bits_in_header(void)
{
    struct framed f = frame_of(&int8, NELEMS, true);
    struct agc_frame parsed;
    for (uint32_t i = 0; i < 8 * AGC_WIRE_HEADER_NBYTES; i++) {
        enum agc_status wanted = i < 32   ? AGC_ERR_MAGIC
                                 : i < 40 ? AGC_ERR_VERSION
                                          : AGC_ERR_HEADER_CHECKSUM;
        f.bytes[i / 8] ^= (uint8_t)(1u << i % 8);
        CHECK_STATUS(agc_frame_parse(f.bytes, f.nbytes, &parsed), wanted);
        CHECK_STATUS(decode(&f, NELEMS), wanted);
        for (uint32_t j = 0; j < i; j++) { /* and any two */
            f.bytes[j / 8] ^= (uint8_t)(1u << j % 8);
            CHECK(agc_frame_parse(f.bytes, f.nbytes, &parsed) != AGC_OK);
            f.bytes[j / 8] ^= (uint8_t)(1u << j % 8);
        }
        f.bytes[i / 8] ^= (uint8_t)(1u << i % 8);
    }
    CHECK_OK(decode(&f, NELEMS));
    guarded_destroy(&f.memory);
}

static void test_flipped_bits_in_payload(void)
{
    struct framed f = frame_of(&int8, 100, true);
    for (uint64_t i = 8 * AGC_WIRE_HEADER_NBYTES; i < 8 * f.nbytes; i++) {
        f.bytes[i / 8] ^= (uint8_t)(1u << i % 8);
        memset(out, 0x77, sizeof out);
        CHECK_STATUS(decode(&f, 100), AGC_ERR_PAYLOAD_CHECKSUM);
        for (size_t j = 0; j < sizeof out; j++)
            CHECK_EQ(((const uint8_t *)out)[j], 0x77);
        f.bytes[i / 8] ^= (uint8_t)(1u << i % 8);
    }
    CHECK_OK(decode(&f, 100));
    guarded_destroy(&f.memory);
}

/* Without a checksum of the payload the codec looks for what its encoder never writes, and nothing
 * is decoded if it finds any. */
static void test_impossible_scales(void)
{
    static const uint32_t bad[] = {0x7f800000u, 0xff800000u, 0x7fc00001u, 0xffc00000u,
                                   0x80000000u, 0xbf800000u, 0x7c010204u};
    static const uint32_t good[] = {0, 1, 0x3f800000u, 0x7c010203u, 0x7fc00000u};
    struct framed f = frame_of(&int8, NELEMS, false);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        memset(out, 0x77, sizeof out);
        agc_store_u32(f.bytes + AGC_WIRE_HEADER_NBYTES + 4 * (i % 3), bad[i]);
        CHECK_STATUS(decode(&f, NELEMS), AGC_ERR_PAYLOAD);
        agc_store_u32(f.bytes + AGC_WIRE_HEADER_NBYTES + 4 * (i % 3), 0);
        for (size_t j = 0; j < sizeof out; j++)
            CHECK_EQ(((const uint8_t *)out)[j], 0x77);
    }
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        agc_store_u32(f.bytes + AGC_WIRE_HEADER_NBYTES, good[i]);
        CHECK_OK(decode(&f, NELEMS));
    }
    guarded_destroy(&f.memory);
}

/* One byte of the header changed on purpose, its checksum repaired: what a sender of another
 * version or a liar would send. */
static void test_unknown_and_contradicting_headers(void)
{
    static const struct {
        uint32_t at;
        uint8_t value;
        enum agc_status status;
    } changes[] = {
        {AGC_WIRE_AT_MAGIC + 3, 'G', AGC_ERR_MAGIC},
        {AGC_WIRE_AT_VERSION, 2, AGC_ERR_VERSION},
        {AGC_WIRE_AT_CODEC, 0, AGC_ERR_CODEC},
        {AGC_WIRE_AT_CODEC, 200, AGC_ERR_CODEC},
        {AGC_WIRE_AT_CODEC, 1, AGC_ERR_HEADER}, /* raw has no blocks */
        {AGC_WIRE_AT_FLAGS, AGC_FRAME_KNOWN_FLAGS + 1, AGC_ERR_HEADER},
        {AGC_WIRE_AT_FLAGS, 1 << 7, AGC_ERR_HEADER},
        {AGC_WIRE_AT_FLAGS, AGC_FRAME_ABORT, AGC_ERR_HEADER},
        {AGC_WIRE_AT_DTYPE, 0, AGC_ERR_HEADER},
        {AGC_WIRE_AT_DTYPE, 5, AGC_ERR_HEADER},
        {AGC_WIRE_AT_VALUES, 5, AGC_ERR_HEADER},
        {AGC_WIRE_AT_BLOCK_LOG2, 0, AGC_ERR_HEADER},
        {AGC_WIRE_AT_BLOCK_LOG2, 4, AGC_ERR_HEADER},
        {AGC_WIRE_AT_BLOCK_LOG2, 13, AGC_ERR_HEADER},
        {AGC_WIRE_AT_BLOCK_LOG2, 40, AGC_ERR_HEADER},
        {AGC_WIRE_AT_BLOCK_LOG2, 7, AGC_ERR_HEADER},    /* would need more scales */
        {AGC_WIRE_AT_TILE_GRANULES, 1, AGC_ERR_HEADER}, /* would be more tiles */
        {AGC_WIRE_AT_FRAC, 1, AGC_ERR_HEADER},
        {AGC_WIRE_AT_NELEMS, 0, AGC_ERR_HEADER},
        {AGC_WIRE_AT_NELEMS + 4, 1, AGC_ERR_HEADER}, /* 2^32 elements more */
        {AGC_WIRE_AT_NELEMS + 7, 255, AGC_ERR_HEADER},
        {AGC_WIRE_AT_PAYLOAD, 0, AGC_ERR_HEADER},
        {AGC_WIRE_AT_PAYLOAD + 7, 255, AGC_ERR_HEADER},
        {AGC_WIRE_AT_NTILES, 2, AGC_ERR_HEADER},
        {AGC_WIRE_AT_CHUNK_LOG2, 63, AGC_ERR_HEADER},
        /* These say where a frame belongs, not what it holds. */
        {AGC_WIRE_AT_STREAM, 1, AGC_OK},
        {AGC_WIRE_AT_ROUND, 1, AGC_OK},
        {AGC_WIRE_AT_BUCKET, 1, AGC_OK},
        {AGC_WIRE_AT_LANE, 1, AGC_OK},
        {AGC_WIRE_AT_FIRST_TILE, 1, AGC_OK},
        {AGC_WIRE_AT_NFORWARDS, 1, AGC_OK},
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        struct framed f = frame_of(&int8, NELEMS, false);
        f.bytes[changes[i].at] = changes[i].value;
        repair_checksum(f.bytes);
        enum agc_status status = decode(&f, NELEMS);
        if (status != changes[i].status)
            FAIL("byte %u = %u: %s, expected %s", changes[i].at, changes[i].value,
                 agc_status_name(status), agc_status_name(changes[i].status));
        guarded_destroy(&f.memory);
    }
}

/* Any header at all with a good checksum, over a payload of the right length or not: an answer,
 * never a crash (see also fuzz/). */
static void test_random_headers(void)
{
    struct framed f = frame_of(&int8, NELEMS, true);
    uint8_t header[AGC_WIRE_HEADER_NBYTES];
    unsigned nok = 0;
    memcpy(header, f.bytes, sizeof header);
    for (int i = 0; i < 200000; i++) {
        struct agc_frame parsed;
        memcpy(f.bytes, header, sizeof header);
        for (uint32_t n = 1 + random_below(3); n > 0; n--)
            f.bytes[5 + random_below(55)] =
                (uint8_t)(random_bool() ? random_u64() : random_below(8));
        repair_checksum(f.bytes);
        if (agc_frame_parse(f.bytes, f.nbytes, &parsed) != AGC_OK)
            continue;
        nok++;
        /* A tile has 16 bytes at least: the frame's length bounds what its decoder must hold. */
        CHECK(parsed.nelems <= f.nbytes / 16 * 65536);
        const size_t decoded_nbytes = sizeof(float) * (size_t)parsed.nelems;
        struct guarded decoded = guarded_create(decoded_nbytes + 1);
        enum agc_status status =
            agc_decode(f.bytes, f.nbytes, guarded_back(&decoded, decoded_nbytes), AGC_DTYPE_F32,
                       parsed.nelems, false, scratch);
        guarded_destroy(&decoded);
        CHECK(status == AGC_OK || status == AGC_ERR_PAYLOAD || status == AGC_ERR_PAYLOAD_CHECKSUM ||
              status == AGC_ERR_NELEMS);
    }
    CHECK(nok > 1000); /* the test reaches decoders */
    guarded_destroy(&f.memory);
}

/* ---- the caller's mistakes --------------------------------------------------------------- */

static void test_destination_too_small(void)
{
    struct agc_codec_info info;
    for (uint32_t i = 0; agc_codec_info_at(i, &info); i++) {
        for (int checksum = 0; checksum < 2; checksum++) {
            const struct agc_spec spec = spec_of(&info);
            float residual[NELEMS], kept[NELEMS];
            uint64_t nbytes, written = 12345;
            CHECK_OK(agc_frame_nbytes(&spec, AGC_DTYPE_F32, NELEMS, checksum, &nbytes));
            struct guarded memory = guarded_create(nbytes);
            random_fill(x, NELEMS, VALUES_GAUSS);
            random_fill(residual, NELEMS, VALUES_GAUSS);
            memcpy(kept, residual, sizeof kept);
            const uint64_t caps[] = {nbytes - 1, nbytes / 2, 64, 63, 0};
            for (int j = 0; j < 5; j++) {
                uint8_t *dst = guarded_back(&memory, caps[j]);
                memset(dst, 0xa5, caps[j]);
                CHECK_STATUS(agc_encode(&spec, x, AGC_DTYPE_F32, NELEMS, residual, 0, checksum,
                                        scratch, dst, caps[j], &written),
                             AGC_ERR_DST_TOO_SMALL);
                CHECK_EQ(written, 12345);
                CHECK_BYTES(residual, kept, sizeof kept);
                for (uint64_t k = 0; k < caps[j]; k++)
                    CHECK_EQ(dst[k], 0xa5);
            }
            CHECK_OK(agc_encode(&spec, x, AGC_DTYPE_F32, NELEMS, residual, 0, checksum, scratch,
                                guarded_back(&memory, nbytes), nbytes, &written));
            guarded_destroy(&memory);
        }
    }
}

static void test_wrong_arguments(void)
{
    struct framed f = frame_of(&int8, NELEMS, false);
    uint8_t dst[FRAME_NBYTES_MAX];
    uint64_t nbytes = 1;
    const struct agc_spec unknown = {.codec = 77}, odd = {.codec = 5, .block_nelems = 100};
    CHECK_STATUS(decode(&f, NELEMS - 1), AGC_ERR_NELEMS);
    CHECK_STATUS(decode(&f, NELEMS + 1), AGC_ERR_NELEMS);
    CHECK_STATUS(decode(&f, 0), AGC_ERR_NELEMS);
    CHECK_STATUS(agc_decode(f.bytes, f.nbytes, out, 0, NELEMS, false, scratch), AGC_ERR_DTYPE);
    CHECK_STATUS(agc_decode(f.bytes, f.nbytes, out, 5, NELEMS, false, scratch), AGC_ERR_DTYPE);
    CHECK_STATUS(agc_encode(&unknown, x, AGC_DTYPE_F32, 1, NULL, 0, false, scratch, dst, sizeof dst,
                            &nbytes),
                 AGC_ERR_CODEC);
    CHECK_STATUS(
        agc_encode(&odd, x, AGC_DTYPE_F32, 1, NULL, 0, false, scratch, dst, sizeof dst, &nbytes),
        AGC_ERR_SPEC);
    CHECK_STATUS(agc_encode(&int8, x, 9, 1, NULL, 0, false, scratch, dst, sizeof dst, &nbytes),
                 AGC_ERR_DTYPE);
    CHECK_STATUS(agc_encode(&int8, x, AGC_DTYPE_F32, UINT64_MAX, NULL, 0, false, scratch, dst,
                            sizeof dst, &nbytes),
                 AGC_ERR_NELEMS);
    CHECK_EQ(nbytes, 1);
    guarded_destroy(&f.memory);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(test_header_round_trip),
        TEST(test_encode_and_parse),
        TEST(test_threads_do_not_show),
        TEST(test_golden_frame),
        TEST(test_cut_short),
        TEST(test_flipped_bits_in_header),
        TEST(test_flipped_bits_in_payload),
        TEST(test_impossible_scales),
        TEST(test_unknown_and_contradicting_headers),
        TEST(test_random_headers),
        TEST(test_destination_too_small),
        TEST(test_wrong_arguments),
    };
    return test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
