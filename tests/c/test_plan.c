/* test_plan.c: all ranks' view of a plan, side by side: everything is sent once, to the one who
 * expects it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agentcomm.h"
#include "codecs/codec.h"
#include "core/common.h"
#include "harness.h"
#include "reduce/plan.h"

#define NRANKS_MAX 9

static const struct agc_spec specs[] = {
    {.codec = 1},
    {.codec = 2},
    {.codec = 5, .block_nelems = 32},
    {.codec = 5, .block_nelems = 256},
    {.codec = 5, .block_nelems = 4096},
};
#define NSPECS ((int)(sizeof specs / sizeof specs[0]))
static const uint32_t dtypes[] = {AGC_DTYPE_F32, AGC_DTYPE_F16, AGC_DTYPE_F64};
static const uint32_t chunk_log2s[] = {12, 16, 18, 20, 22, 26};
#define NCHUNK_LOG2S ((int)(sizeof chunk_log2s / sizeof chunk_log2s[0]))

static struct agc_lane_plan plan;
static uint32_t chunk_log2;

static void describe(char *dst, size_t dst_cap_nbytes)
{
    snprintf(
        dst, dst_cap_nbytes,
        "%llu elements of dtype %u over %u ranks, codec %u block %u, %s, tiles of %u, chunk 2^%u",
        (unsigned long long)plan.nelems, plan.dtype, plan.nranks, plan.spec.codec,
        plan.spec.block_nelems, plan.direct ? "direct" : "sharded", plan.tile_nelems, chunk_log2);
}

/* Runs check for plans of many sizes; plan and chunk_log2 are set. */
static void for_each_plan(void (*check)(void))
{
    static const uint64_t sizes[] = {0,      1,      2,      255,    256,     257,    1000,  2560,
                                     7001,   24576,  32768,  65535,  65536,   65537,  98304, 131072,
                                     196608, 300000, 589824, 589825, 1000003, 4000000};
    test_describe = describe;
    for (uint32_t nranks = 1; nranks <= NRANKS_MAX; nranks++) {
        for (int s = 0; s < NSPECS; s++) {
            for (int d = 0; d < 3; d++) {
                for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] + 4; i++) {
                    uint64_t nelems = i < sizeof sizes / sizeof sizes[0]
                                          ? sizes[i]
                                          : random_u64() >> (42 + random_below(20));
                    plan = agc_plan_lane(&specs[s], dtypes[d], nelems, nranks);
                    chunk_log2 = 0;
                    for (int c = 0; c < NCHUNK_LOG2S; c++) {
                        chunk_log2 = chunk_log2s[c];
                        check();
                    }
                }
            }
        }
    }
}

/* ---- tiles ------------------------------------------------------------------------------- */

static void check_tiles(void)
{
    CHECK(plan.tile_nelems % AGC_TILE_GRANULE_NELEMS == 0);
    CHECK(plan.tile_nelems >= AGC_TILE_GRANULE_NELEMS && plan.tile_nelems <= AGC_TILE_NELEMS_MAX);
    uint64_t sum = 0, shares[NRANKS_MAX] = {0}, least = UINT64_MAX, most = 0;
    for (uint64_t t = 0; t < plan.ntiles; t++) {
        uint32_t n = agc_plan_tile_nelems(&plan, t);
        CHECK(n > 0 && (n == plan.tile_nelems || t + 1 == plan.ntiles));
        shares[t % plan.nranks] += n;
        sum += n;
    }
    CHECK_EQ(sum, plan.nelems);
    for (uint32_t r = 0; r < plan.nranks; r++) {
        least = agc_min_u64(least, shares[r]);
        most = shares[r] > most ? shares[r] : most;
    }
    /* Dealt out in turn: the richest rank has at most one tile more than the poorest. */
    CHECK(most - least <= plan.tile_nelems);
    /* And a tile is no more than a fair share, but for rounding to the granule. */
    CHECK(plan.tile_nelems < plan.nelems / plan.nranks + 1 + AGC_TILE_GRANULE_NELEMS);
}

static void test_tiles_cover_the_lane_evenly(void)
{
    for_each_plan(check_tiles);
}

/* ---- chunks and messages ----------------------------------------------------------------- */

/* Every tile is in one message of one chunk; chunks and, inside each, the tiles of a message come
 * in order. */
static void check_messages(void)
{
    uint64_t nstripes = agc_plan_chunk_nstripes(&plan, chunk_log2);
    uint64_t nchunks = agc_plan_nchunks(&plan, nstripes);
    uint64_t chunk_nbytes =
        nstripes * plan.tile_nelems * plan.nranks * agc_dtype_nbytes(plan.dtype);
    CHECK(nstripes == 1 || chunk_nbytes <= (uint64_t)1 << chunk_log2);
    uint8_t *seen = (uint8_t *)test_alloc(plan.ntiles);
    memset(seen, 0, plan.ntiles);
    for (uint64_t c = 0; c < nchunks; c++) {
        uint64_t begin = c * nstripes * plan.nranks, ntiles = 0;
        for (uint32_t owner = 0; owner < (plan.direct ? 1 : plan.nranks); owner++) {
            struct agc_message m = agc_plan_message(&plan, nstripes, c, owner);
            uint64_t nelems = 0, nbytes = 0;
            for (uint32_t i = 0; i < m.ntiles; i++) {
                uint64_t t = m.first_tile + (uint64_t)i * m.step;
                CHECK(t >= begin && t < begin + nstripes * plan.nranks && t < plan.ntiles);
                CHECK(plan.direct || t % plan.nranks == owner);
                CHECK_EQ(seen[t]++, 0);
                nelems += agc_plan_tile_nelems(&plan, t);
                nbytes += agc_tile_nbytes(&plan.spec, plan.dtype, agc_plan_tile_nelems(&plan, t));
            }
            ntiles += m.ntiles;
            CHECK_EQ(m.nelems, nelems);
            CHECK_EQ(m.payload_nbytes, nbytes);
            CHECK(
                AGC_WIRE_HEADER_NBYTES + nbytes <=
                agc_plan_message_nbytes_max(plan.nranks, agc_dtype_nbytes(plan.dtype), chunk_log2));
            CHECK(
                AGC_WIRE_HEADER_NBYTES + nbytes <=
                agc_plan_message_nbytes_max(plan.nranks, 8, 26)); /* a bound for larger ones too */
        }
        CHECK(ntiles > 0); /* no chunk for nothing */
        /* In the direct form the message is the same whoever asks. */
        if (plan.direct) {
            struct agc_message a = agc_plan_message(&plan, nstripes, c, 0),
                               b = agc_plan_message(&plan, nstripes, c, plan.nranks - 1);
            CHECK(a.first_tile == b.first_tile && a.ntiles == b.ntiles && a.nelems == b.nelems);
        }
    }
    for (uint64_t t = 0; t < plan.ntiles; t++)
        CHECK_EQ(seen[t], 1);
    free(seen);
}

static void test_every_tile_is_sent_once(void)
{
    for_each_plan(check_messages);
}

/* Chunks are cut from tiles, never the other way round: the same tiles whatever the chunk size,
 * since agc_plan_lane is not told it. What is left to check is that the order of all tiles over all
 * chunks is the same. */
static void check_order(void)
{
    uint64_t nstripes = agc_plan_chunk_nstripes(&plan, chunk_log2);
    for (uint32_t owner = 0; owner < plan.nranks; owner++) {
        uint64_t next = plan.direct ? 0 : owner;
        for (uint64_t c = 0; c < agc_plan_nchunks(&plan, nstripes); c++) {
            struct agc_message m = agc_plan_message(&plan, nstripes, c, owner);
            CHECK(m.ntiles == 0 || m.first_tile == next);
            next += (uint64_t)m.ntiles * m.step;
        }
        CHECK(next >= plan.ntiles);
    }
}

static void test_chunks_keep_the_order_of_tiles(void)
{
    for_each_plan(check_order);
}

/* ---- bytes ------------------------------------------------------------------------------- */

/* Bytes that each pair exchanges, from the receiver's side: contributions to the tiles it owns,
 * means of those it does not. */
static void check_wire_nbytes(void)
{
    uint64_t nstripes = agc_plan_chunk_nstripes(&plan, chunk_log2), sent = 0, received = 0;
    uint64_t nchunks = agc_plan_nchunks(&plan, nstripes);
    for (uint32_t r = 0; r < plan.nranks; r++) {
        sent += agc_plan_wire_nbytes(&plan, r, chunk_log2);
        for (uint64_t c = 0; c < nchunks; c++) {
            for (uint32_t peer = 0; peer < plan.nranks; peer++) {
                struct agc_message own = agc_plan_message(&plan, nstripes, c, r);
                struct agc_message theirs = agc_plan_message(&plan, nstripes, c, peer);
                if (peer == r)
                    continue;
                if (own.ntiles)
                    received += AGC_WIRE_HEADER_NBYTES + own.payload_nbytes;
                if (!plan.direct && theirs.ntiles)
                    received += AGC_WIRE_HEADER_NBYTES + theirs.payload_nbytes;
            }
        }
    }
    CHECK_EQ(sent, received);

    /* The formulas of plan.c. E: the encoded lane. Shares differ by at most a tile, which moves a
     * rank's part by one tile each way. */
    uint64_t n = plan.nranks, encoded = 0, tile = 0;
    for (uint64_t t = 0; t < plan.ntiles; t++) {
        uint64_t nbytes = agc_tile_nbytes(&plan.spec, plan.dtype, agc_plan_tile_nelems(&plan, t));
        encoded += nbytes;
        tile = nbytes > tile ? nbytes : tile;
    }
    for (uint32_t r = 0; r < plan.nranks; r++) {
        uint64_t nbytes = agc_plan_wire_nbytes(&plan, r, chunk_log2);
        if (plan.direct) {
            CHECK_EQ(nbytes, (n - 1) * (encoded + nchunks * AGC_WIRE_HEADER_NBYTES));
        } else {
            double fair = 2.0 * (double)(n - 1) / (double)n * (double)encoded;
            double headers = 2.0 * (double)(n - 1) * (double)nchunks * AGC_WIRE_HEADER_NBYTES;
            CHECK_LE((double)nbytes, fair + headers + (double)(n - 1) * (double)tile);
            CHECK_LE(fair, (double)nbytes + (double)(n - 1) * (double)tile);
        }
    }
}

static void test_wire_nbytes(void)
{
    for_each_plan(check_wire_nbytes);
}

/* Direct where it is no dearer: always for two ranks; beyond, while the extra bytes cost less than
 * a phase of latency. */
static void test_direct_or_sharded(void)
{
    test_describe = describe;
    for (uint32_t nranks = 1; nranks <= NRANKS_MAX; nranks++) {
        bool was_direct = true;
        for (uint64_t nelems = 0; nelems < 3000000; nelems += 1 + nelems / 50) {
            plan = agc_plan_lane(&specs[3], AGC_DTYPE_F32, nelems, nranks);
            CHECK(nranks > 2 || plan.direct);
            CHECK(was_direct || !plan.direct); /* once it is sharded, larger lanes are too */
            was_direct = plan.direct;
        }
        CHECK_EQ(was_direct, nranks <= 2);
        plan = agc_plan_lane(&specs[3], AGC_DTYPE_F32, 256, nranks);
        CHECK(plan.direct); /* a bias */
    }
}

/* ---- large numbers ----------------------------------------------------------------------- */

static void test_sizes_beyond_32_bits(void)
{
    static const uint64_t sizes[] = {0x100000000u, 0x200000000u + 12345, 0xfffffffu * 256};
    test_describe = describe;
    for (size_t i = 0; i < 3; i++) {
        for (uint32_t nranks = 2; nranks <= 5; nranks++) {
            plan = agc_plan_lane(&specs[3], AGC_DTYPE_F32, sizes[i], nranks);
            chunk_log2 = 26;
            CHECK_EQ(plan.direct, nranks == 2);
            CHECK(plan.ntiles * plan.tile_nelems >= sizes[i]);
            CHECK((plan.ntiles - 1) * plan.tile_nelems < sizes[i]);
            uint64_t nstripes = agc_plan_chunk_nstripes(&plan, chunk_log2), nelems = 0;
            uint64_t nchunks = agc_plan_nchunks(&plan, nstripes), last = nchunks - 1;
            for (uint32_t owner = 0; owner < (plan.direct ? 1 : nranks); owner++) {
                /* All chunks but the last are alike. */
                nelems += last * agc_plan_message(&plan, nstripes, 0, owner).nelems;
                nelems += agc_plan_message(&plan, nstripes, last, owner).nelems;
            }
            CHECK_EQ(nelems, sizes[i]);
            uint64_t encoded = sizes[i] + sizes[i] / 64; /* int8 in blocks of 256 */
            uint64_t nbytes = agc_plan_wire_nbytes(&plan, 0, chunk_log2);
            double factor = plan.direct ? nranks - 1.0 : 2.0 * (nranks - 1) / nranks;
            CHECK_LE((double)nbytes, factor * (double)encoded * 1.001);
            CHECK_LE(factor * (double)encoded * 0.999, (double)nbytes);
        }
    }
}

/* ---- chunk size -------------------------------------------------------------------------- */

static void test_chunk_size_from_measurement(void)
{
    for (int i = 0; i < 100000; i++) {
        uint64_t nbytes = random_u64() >> (20 + random_below(40));
        uint64_t codec_ns = random_u64() >> (28 + random_below(36));
        uint64_t total_ns = random_u64() >> (28 + random_below(36));
        uint32_t nranks = 2 + random_below(30);
        uint32_t log2 = agc_plan_chunk_log2(nbytes, nranks, codec_ns, total_ns);
        CHECK(log2 >= AGC_CHUNK_LOG2_AUTO_MIN && log2 <= AGC_CHUNK_LOG2_AUTO_MAX);
        /* A slower exchange of as much never asks for larger chunks: there is more to overlap. */
        CHECK(agc_plan_chunk_log2(nbytes, nranks, codec_ns, 2 * total_ns) <= log2);
        /* More ranks, more messages per chunk. */
        CHECK(agc_plan_chunk_log2(nbytes, nranks + 1, codec_ns, total_ns) >= log2);
    }
    /* 32 MiB: in 10 ms (loopback), large chunks; in 300 ms (1 Gbit/s), small ones. */
    CHECK_EQ(agc_plan_chunk_log2(32u << 20, 2, 8000000, 10000000), 21);
    CHECK(agc_plan_chunk_log2(32u << 20, 2, 8000000, 300000000) <= 20);
    CHECK_EQ(agc_plan_chunk_log2(0, 2, 0, 0), AGC_CHUNK_LOG2_AUTO_MIN);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(test_tiles_cover_the_lane_evenly),
        TEST(test_every_tile_is_sent_once),
        TEST(test_chunks_keep_the_order_of_tiles),
        TEST(test_wire_nbytes),
        TEST(test_direct_or_sharded),
        TEST(test_sizes_beyond_32_bits),
        TEST(test_chunk_size_from_measurement),
    };
    return test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
