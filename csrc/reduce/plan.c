/* plan.c: who sends what to whom.
 *
 * Sharded form: n ranks, tiles dealt out in turn. E is the encoded lane.
 *
 *   lane     | t0 | t1 | t2 | t3 | t4 | ...
 *   owner      0    1    2    0    1
 *
 *   phase 1  tile t of every rank goes to its owner
 *   phase 2  the owner sends the encoded mean to all       2 steps, 2 (n-1)/n E sent per rank
 *
 * Direct form: everyone sends its whole lane to everyone   1 step, (n-1) E sent per rank
 *
 * Direct is used for n = 2, where it sends no more, and for lanes so small that a second step costs
 * more than the extra bytes.
 */
#include "reduce/plan.h"

#include "codecs/codec.h"
#include "core/common.h"

/* Bytes that a link carries in the time that a phase costs in latency: about 100 us at 1 Gbit/s. */
#define PHASE_NBYTES 16384u

/* What a message costs beside its bytes: posting, waking and being woken, about 30 us measured over
 * gloo. */
#define MESSAGE_NS 30000u

uint32_t agc_plan_align_nelems(const struct agc_spec *spec)
{
    const struct agc_codec *codec = agc_codec_find(spec->codec);
    bool moves = codec && (codec->flags & AGC_CODEC_ZERO_IN_BLOCK_MOVES) != 0;
    return moves ? spec->block_nelems : 1;
}

struct agc_lane_plan agc_plan_lane(const struct agc_spec *spec, uint32_t dtype, uint64_t nelems,
                                   uint32_t nranks)
{
    struct agc_lane_plan p = {.spec = *spec, .dtype = dtype, .nranks = nranks, .nelems = nelems};
    /* As few stripes as tiles of full size allow, and the lane spread evenly over them: shares
     * differ by at most a tile. */
    uint64_t nstripes = agc_div_up(nelems, (uint64_t)AGC_TILE_NELEMS_MAX * nranks);
    uint64_t even = nelems ? agc_div_up(nelems, nstripes * nranks) : 1;
    /* Whole blocks in a tile, so that a block of a lane is one of a tile. */
    p.tile_nelems = (uint32_t)agc_round_up(
        even, agc_max_u32(AGC_TILE_GRANULE_NELEMS, agc_plan_align_nelems(spec)));
    p.ntiles = agc_div_up(nelems, p.tile_nelems);
    if (nranks <= 2) {
        p.direct = true;
    } else {
        uint64_t encoded_nbytes = agc_tiles_nbytes(spec, dtype, nelems, p.tile_nelems);
        /* Direct sends (n-1)(n-2)/n E bytes more and saves a phase. The first test keeps the
         * product below 2^64. */
        p.direct = encoded_nbytes <= (uint64_t)PHASE_NBYTES * nranks &&
                   encoded_nbytes * (nranks - 1) * (nranks - 2) <= (uint64_t)PHASE_NBYTES * nranks;
    }
    return p;
}

uint32_t agc_plan_tile_nelems(const struct agc_lane_plan *plan, uint64_t t)
{
    return (uint32_t)agc_min_u64(plan->tile_nelems, plan->nelems - t * plan->tile_nelems);
}

uint64_t agc_plan_chunk_nstripes(const struct agc_lane_plan *plan, uint32_t chunk_log2)
{
    /* topk with a large fraction is longer than what it encodes. */
    uint64_t dense_nbytes = (uint64_t)plan->tile_nelems * agc_dtype_nbytes(plan->dtype);
    uint64_t tile_nbytes =
        agc_max_u64(dense_nbytes, agc_tile_nbytes(&plan->spec, plan->dtype, plan->tile_nelems));
    uint64_t stripe_nbytes = tile_nbytes * plan->nranks;
    uint64_t nstripes = ((uint64_t)1 << chunk_log2) / stripe_nbytes;
    return nstripes ? nstripes : 1;
}

uint64_t agc_plan_nchunks(const struct agc_lane_plan *plan, uint64_t chunk_nstripes)
{
    return agc_div_up(plan->ntiles, chunk_nstripes * plan->nranks);
}

struct agc_message agc_plan_message(const struct agc_lane_plan *plan, uint64_t chunk_nstripes,
                                    uint64_t chunk, uint32_t owner)
{
    struct agc_message m = {.step = plan->direct ? 1 : plan->nranks};
    uint64_t begin = chunk * chunk_nstripes * plan->nranks;
    uint64_t end = agc_min_u64(plan->ntiles, begin + chunk_nstripes * plan->nranks);
    m.first_tile = plan->direct ? begin : begin + owner;
    if (m.first_tile >= end)
        return m;
    m.ntiles = (uint32_t)agc_div_up(end - m.first_tile, m.step);
    uint64_t last = m.first_tile + (uint64_t)(m.ntiles - 1) * m.step;
    uint32_t last_nelems = agc_plan_tile_nelems(plan, last);
    m.nelems = (uint64_t)(m.ntiles - 1) * plan->tile_nelems + last_nelems;
    m.payload_nbytes = agc_tiles_nbytes(&plan->spec, plan->dtype, m.nelems, plan->tile_nelems);
    return m;
}

uint64_t agc_plan_message_nbytes_max(uint32_t nranks, uint32_t elem_nbytes, uint32_t chunk_log2_max)
{
    /* A message holds a chunk's share of one owner, or the whole chunk in the direct form, which
     * beyond two ranks is only used for lanes below the bound in agc_plan_lane; and never less than
     * one stripe, whose tiles topk may make twice as long as they are: an index of two bytes beside
     * each value of at least two. */
    uint64_t chunk_nbytes = (uint64_t)1 << chunk_log2_max;
    uint64_t tile_nbytes = (uint64_t)AGC_TILE_NELEMS_MAX * elem_nbytes;
    uint64_t share_nbytes = nranks <= 2 ? chunk_nbytes : chunk_nbytes / nranks;
    uint64_t least_nbytes = nranks <= 2 ? 4 * tile_nbytes : 2 * tile_nbytes;
    uint64_t nbytes = share_nbytes > least_nbytes ? share_nbytes : least_nbytes;
    /* Block codecs on tiny tiles: a scale per element at worst, and the padding of each tile. */
    return AGC_WIRE_HEADER_NBYTES + nbytes + nbytes / 16 + 4096;
}

uint64_t agc_plan_wire_nbytes(const struct agc_lane_plan *plan, uint32_t rank, uint32_t chunk_log2)
{
    uint64_t nbytes = 0, nstripes = agc_plan_chunk_nstripes(plan, chunk_log2);
    uint64_t nchunks = plan->nranks > 1 ? agc_plan_nchunks(plan, nstripes) : 0;
    for (uint64_t c = 0; c < nchunks; c++) {
        for (uint32_t peer = 0; peer < plan->nranks; peer++) {
            if (peer == rank)
                continue;
            struct agc_message m = agc_plan_message(plan, nstripes, c, peer);
            nbytes += m.ntiles ? AGC_WIRE_HEADER_NBYTES + m.payload_nbytes : 0;
            if (plan->direct)
                continue;
            m = agc_plan_message(plan, nstripes, c, rank); /* the result, to this peer */
            nbytes += m.ntiles ? AGC_WIRE_HEADER_NBYTES + m.payload_nbytes : 0;
        }
    }
    return nbytes;
}

uint32_t agc_plan_chunk_log2(uint64_t nbytes, uint32_t nranks, uint64_t codec_ns, uint64_t total_ns)
{
    /* With m chunks an exchange takes about max(codec, wire) + (codec + wire) / m + 2 m overhead:
     * filling and draining the pipeline against the fixed cost of a chunk. The best m is
     * sqrt((codec + wire) / (2 overhead)); the wire's time is taken to be all of the exchange's,
     * which it is where the wire is what limits. */
    uint64_t nmessages = nranks <= 2 ? 2 : 4 * ((uint64_t)nranks - 1);
    uint64_t sum_ns = codec_ns + total_ns, nchunks = 1;
    while (nchunks < 4096 && nchunks * nchunks * 2 * nmessages * MESSAGE_NS < sum_ns)
        nchunks++;
    uint64_t chunk_nbytes = nbytes / nchunks;
    uint32_t log2 = AGC_CHUNK_LOG2_AUTO_MIN;
    while (log2 < AGC_CHUNK_LOG2_AUTO_MAX &&
           ((uint64_t)3 << log2) / 2 < chunk_nbytes) /* to the nearest power of two */
        log2++;
    return log2;
}
