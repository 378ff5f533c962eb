/* engine_steps.c: one chunk on its way: encode and send, average, decode.
 *
 * Receives are posted with the largest capacity that any frame of this engine can have: a frame
 * from a peer that is out of step still fits, and its header tells what went wrong.
 */
#include <stdio.h>

#include "core/header.h"
#include "reduce/engine_state.h"

/* Dense bytes in open chunks, at most, if they allow two: bounds the memory that large chunks take.
 */
#define IN_FLIGHT_NBYTES ((uint64_t)32 << 20)
/* Rounds that are not measured: residuals are touched for the first time, DDP rebuilds its buckets.
 */
#define WARMUP_NROUNDS 2
/* Rounds of other kinds in a row, after which the search turns to them. */
#define TUNE_NOTHERS_MAX 64

static struct agc_frame describe(const struct agc_engine *e, const struct slot *s,
                                 const struct agc_message *m, bool result)
{
    return (struct agc_frame){
        .spec = s->lane->plan.spec,
        .dtype = s->lane->plan.dtype,
        .flags =
            (result ? AGC_FRAME_RESULT : 0u) | (!result && s->job->absent ? AGC_FRAME_ABSENT : 0u) |
            (s->lane->plan.spec.rounding == AGC_ROUNDING_STOCHASTIC ? AGC_FRAME_STOCHASTIC : 0u),
        .tile_nelems = s->lane->plan.tile_nelems,
        .nelems = m->nelems,
        .payload_nbytes = m->payload_nbytes,
        .stream = e->config.stream,
        .seed = e->config.seed,
        .round = s->job->round,
        .bucket = s->job->bucket->index,
        .lane = s->lane->index,
        .nforwards = s->job->nforwards,
        .chunk_log2 = e->chunk_log2_next,
        .first_tile = (uint32_t)m->first_tile,
        .ntiles = m->ntiles,
    };
}

static struct agc_message slot_message(const struct slot *s, uint32_t owner)
{
    return agc_plan_message(&s->lane->plan, s->chunk_nstripes, s->chunk, owner);
}

static struct agc_lane_context slot_context(const struct agc_engine *e, const struct slot *s,
                                            const struct agc_kernels *k)
{
    return (struct agc_lane_context){.kernels = k,
                                     .params = e->params,
                                     .scratch = e->scratch,
                                     .bucket = s->job->data,
                                     .bucket_index = s->job->bucket->index,
                                     .seed = e->config.seed,
                                     .round = s->job->round,
                                     .rank = e->rank};
}

static const char *codec_name(uint32_t id)
{
    const struct agc_codec *codec = agc_codec_find(id);
    return codec ? codec->name : "(unknown)";
}

/* Compares what a peer sent with what was expected of it; learns the next chunk size. */
static enum agc_status check_frame(struct agc_engine *e, struct slot *s, uint32_t peer,
                                   const uint8_t *src, const struct agc_message *m, bool result)
{
    char text[AGC_ENGINE_TEXT_NBYTES];
    const uint32_t absent = AGC_FRAME_ABSENT; /* may differ between ranks */
    struct agc_frame f, want = describe(e, s, m, result);
    uint32_t name = rank_name(e, peer);
    enum agc_status status = agc_header_read(agc_kernels_get(), src, AGC_WIRE_HEADER_NBYTES, &f);
    if (status != AGC_OK) {
        snprintf(text, sizeof text, "rank %u sent a damaged frame for round %u bucket %u: %s", name,
                 want.round, want.bucket, agc_status_text(status));
        return agc_engine_fail(e, status, peer, text);
    }
    if (f.flags & AGC_FRAME_ABORT) {
        enum agc_status theirs = (enum agc_status) - (int32_t)f.seed;
        uint32_t culprit = f.first_tile < e->nranks ? f.first_tile : peer;
        snprintf(text, sizeof text, "rank %u gave up in round %u: %s%s", name, f.round,
                 agc_status_text(theirs), culprit == e->rank ? "; it blames this rank" : "");
        if (culprit != peer && culprit != e->rank)
            snprintf(text, sizeof text, "rank %u %s: reported by rank %u in round %u (%s)",
                     rank_name(e, culprit),
                     theirs == AGC_ERR_MISMATCH ? "does not match" : "is gone or silent", name,
                     f.round, agc_status_text(theirs));
        bool keep = theirs == AGC_ERR_MISMATCH || theirs == AGC_ERR_TIMEOUT;
        return agc_engine_fail(e, keep ? theirs : AGC_ERR_PEER, culprit, text);
    }
    if (f.stream != want.stream) {
        snprintf(text, sizeof text,
                 "rank %u sent a frame of another model or handle (stream %016llx, expected "
                 "%016llx) in round %u bucket %u",
                 name, (unsigned long long)f.stream, (unsigned long long)want.stream, want.round,
                 want.bucket);
    } else if (f.round != want.round || f.bucket != want.bucket) {
        snprintf(text, sizeof text,
                 "rank %u sent round %u bucket %u, expected round %u bucket %u: the ranks do not "
                 "make the same backward passes",
                 name, f.round, f.bucket, want.round, want.bucket);
    } else if (f.nforwards && want.nforwards && f.nforwards != want.nforwards) {
        snprintf(text, sizeof text,
                 "rank %u sent round %u after %u forward passes, expected %u: it left out or "
                 "repeated a backward pass",
                 name, f.round, f.nforwards, want.nforwards);
    } else if (f.lane != want.lane || f.first_tile != want.first_tile || f.ntiles != want.ntiles ||
               f.nelems != want.nelems || f.payload_nbytes != want.payload_nbytes ||
               (f.flags | absent) != (want.flags | absent) || f.dtype != want.dtype ||
               f.tile_nelems != want.tile_nelems || f.seed != want.seed ||
               memcmp(&f.spec, &want.spec, sizeof f.spec) != 0) {
        snprintf(
            text, sizeof text,
            "rank %u sent lane %u tiles %u+%u codec %s (%llu elements), expected lane %u tiles "
            "%u+%u codec %s (%llu elements) in round %u bucket %u: the ranks have different models "
            "or settings (set_codec is for all ranks alike)",
            name, f.lane, f.first_tile, f.ntiles, codec_name(f.spec.codec),
            (unsigned long long)f.nelems, want.lane, want.first_tile, want.ntiles,
            codec_name(want.spec.codec), (unsigned long long)want.nelems, want.round, want.bucket);
    } else if (peer == 0 &&
               (f.chunk_log2 < AGC_CHUNK_LOG2_MIN || f.chunk_log2 > e->chunk_log2_max)) {
        snprintf(text, sizeof text,
                 "rank %u announced chunks of 2^%u bytes in round %u, this rank has room for 2^%u: "
                 "chunk_nbytes differs "
                 "between the ranks",
                 name, f.chunk_log2, f.round, e->chunk_log2_max);
    } else {
        if (peer == 0)
            e->chunk_log2_next = f.chunk_log2;
        s->nabsent += f.flags & absent ? 1 : 0;
        return AGC_OK;
    }
    return agc_engine_fail(e, AGC_ERR_MISMATCH, peer, text);
}

/* Encodes the tiles of a message into a frame. kept: the frame stays here, so tiles whose payload
 * the bucket holds are left out. */
static void encode_message(struct agc_engine *e, struct slot *s, const struct agc_message *m,
                           bool kept, uint8_t *dst)
{
    const struct agc_kernels *k = agc_kernels_get();
    struct agc_lane_context c = slot_context(e, s, k);
    struct agc_frame f = describe(e, s, m, false);
    uint8_t *payload = dst + AGC_WIRE_HEADER_NBYTES;
    agc_header_write(k, &f, dst);
    for (uint32_t i = 0; i < m->ntiles; i++) {
        uint64_t t = m->first_tile + (uint64_t)i * m->step;
        if (!kept || !agc_lane_payload(s->lane, &c, t))
            agc_lane_encode(s->lane, &c, t, payload);
        payload += agc_tile_nbytes(&s->lane->plan.spec, s->lane->plan.dtype,
                                   agc_plan_tile_nelems(&s->lane->plan, t));
    }
}

static enum agc_status post_send(struct agc_engine *e, struct slot *s, uint32_t peer,
                                 uint32_t channel, const uint8_t *frame,
                                 const struct agc_message *m, struct request *r)
{
    uint64_t nbytes = AGC_WIRE_HEADER_NBYTES + m->payload_nbytes;
    if (e->transport.send(e->transport.ctx, peer, channel, frame, nbytes, &r->handle) != AGC_OK) {
        r->handle = NULL;
        return agc_engine_fail_peer(e, peer, s->job, false);
    }
    s->job->bucket->stats.wire_nbytes += nbytes;
    e->stats.wire_nbytes += nbytes;
    return AGC_OK;
}

static enum agc_status post_recv(struct agc_engine *e, struct slot *s, uint32_t peer,
                                 uint32_t channel, uint8_t *buf, struct request *r)
{
    if (e->transport.recv(e->transport.ctx, peer, channel, buf, e->message_nbytes_max,
                          &r->handle) != AGC_OK) {
        r->handle = NULL;
        return agc_engine_fail_peer(e, peer, s->job, false);
    }
    return AGC_OK;
}

/* Adds the time since since_ns to one of the codec's two counters: the bucket's and the total. */
static void count_codec(struct agc_engine *e, uint64_t *bucket_ns, uint64_t *total_ns,
                        uint64_t since_ns)
{
    uint64_t ns = now_ns() - since_ns;
    *bucket_ns += ns;
    *total_ns += ns;
    e->measured.codec_ns += ns;
}

static void count_encode(struct agc_engine *e, struct job *job, uint64_t since_ns)
{
    count_codec(e, &job->bucket->stats.encode_ns, &e->stats.encode_ns, since_ns);
}

static void count_decode(struct agc_engine *e, struct job *job, uint64_t since_ns)
{
    count_codec(e, &job->bucket->stats.decode_ns, &e->stats.decode_ns, since_ns);
}

/* ---- the three steps ---- */

enum agc_status agc_engine_finish_sends(struct agc_engine *e, struct slot *s, const struct job *job)
{
    for (uint32_t peer = 0; peer < e->nranks; peer++) {
        AGC_TRY(agc_engine_wait(e, &s->send_contribution[peer], peer, true, job));
        AGC_TRY(agc_engine_wait(e, &s->send_result[peer], peer, true, job));
    }
    return AGC_OK;
}

uint32_t agc_engine_window(uint32_t chunk_log2)
{
    uint64_t nchunks = IN_FLIGHT_NBYTES >> chunk_log2;
    return agc_max_u32(2, (uint32_t)agc_min_u64(nchunks, WINDOW));
}

/* The round is one of those that the search compares: equal rounds, or their times say nothing of
 * the chunk size. The largest are taken, and others when those are no longer seen (another codec).
 */
static bool is_tuned_kind(struct agc_engine *e)
{
    const struct round_measure *m = &e->measured, *tuned = &e->tuned;
    if (m->nbytes == tuned->nbytes && m->encoded_nbytes == tuned->encoded_nbytes) {
        e->nothers = 0;
        return true;
    }
    if (m->nbytes <= tuned->nbytes && ++e->nothers < TUNE_NOTHERS_MAX)
        return false;
    uint32_t log2 = AGC_CHUNK_LOG2_AUTO_MIN; /* chunks larger than every lane are all the same */
    while (log2 < AGC_CHUNK_LOG2_AUTO_MAX && (uint64_t)1 << log2 < m->lane_nbytes_max)
        log2++;
    agc_tune_init(&e->tune, agc_plan_chunk_log2(m->nbytes, e->nranks, m->codec_ns, m->total_ns),
                  AGC_CHUNK_LOG2_AUTO_MIN, log2);
    e->tuned = *m;
    e->nothers = 0;
    /* What counts is the step: large chunks leave more of the processors to the rest of it. But
     * where exchanges are rare, the pauses between them would drown the difference. */
    e->tune_period = m->total_ns > m->period_ns / 4;
    return true;
}

void agc_engine_round_begin(struct agc_engine *e, uint32_t round)
{
    uint32_t wanted = e->chunk_log2_next;
    uint64_t began_ns = now_ns();
    e->measured.period_ns = began_ns - e->round_began_ns;
    e->round_began_ns = began_ns;
    if (e->rank == 0 && e->config.chunk_log2 == 0 && e->stats.nrounds > WARMUP_NROUNDS &&
        e->measured.nbytes && is_tuned_kind(e))
        wanted =
            agc_tune_round(&e->tune, e->chunk_log2,
                           (double)(e->tune_period ? e->measured.period_ns : e->measured.total_ns));
    memset(&e->measured, 0, sizeof e->measured);
    e->round = round;
    e->round_known = true;
    if (e->rank == 0 && !e->announced) /* a round without chunks: the others know of no new size */
        e->chunk_log2_next = e->chunk_log2;
    e->announced = false;
    e->chunk_log2 = e->chunk_log2_next;
    e->chunk_log2_next = wanted;
    e->stats.nrounds++;
    e->stats.chunk_log2 = e->chunk_log2;
    /* Every round begins in the first slots: those are the ones still cached, and the others stay
     * untouched where a round has few chunks. */
    agc_pipeline_init(&e->pipeline, agc_engine_window(e->chunk_log2), LAG);
}

enum agc_status agc_engine_open(struct agc_engine *e)
{
    struct job *job = &e->queue[e->job_opening % QUEUE_CAP];
    struct slot *s = &e->slots[e->pipeline.opened % e->pipeline.window];
    AGC_TRY(agc_engine_finish_sends(e, s, job));
    s->job = job;
    s->lane = &job->bucket->lanes[job->lane];
    s->chunk_nstripes = agc_plan_chunk_nstripes(&s->lane->plan, e->chunk_log2);
    /* From the end: backward has filled the bucket from its beginning, so that what it wrote last
     * may still be cached. And DDP will copy the results out from the beginning, which is then what
     * was decoded last. */
    s->chunk = agc_plan_nchunks(&s->lane->plan, s->chunk_nstripes) - 1 - job->chunk;
    s->nabsent = job->absent ? 1 : 0;
    bool direct = s->lane->plan.direct;

    struct agc_message own = slot_message(s, e->rank);
    for (uint32_t peer = 0; peer < e->nranks; peer++) {
        if (peer == e->rank)
            continue;
        if (own.ntiles)
            AGC_TRY(post_recv(e, s, peer, AGC_CHANNEL_CONTRIBUTION, s->in_contribution[peer],
                              &s->recv_contribution[peer]));
        if (!direct && slot_message(s, peer).ntiles)
            AGC_TRY(post_recv(e, s, peer, AGC_CHANNEL_RESULT, s->in_result[peer],
                              &s->recv_result[peer]));
    }
    /* Beginning behind the own rank, so that not everyone sends to rank 0 first. The own frame
     * comes last; in the direct form it is the one that everybody gets, so it comes first. */
    uint64_t t = now_ns();
    if (direct)
        encode_message(e, s, &own, false, s->in_contribution[e->rank]);
    for (uint32_t i = 1; i < e->nranks; i++) {
        uint32_t peer = (e->rank + i) % e->nranks;
        struct agc_message m = direct ? own : slot_message(s, peer);
        if (!m.ntiles)
            continue;
        if (!direct)
            encode_message(e, s, &m, false, s->out_contribution[peer]);
        count_encode(e, job, t);
        AGC_TRY(post_send(e, s, peer, AGC_CHANNEL_CONTRIBUTION,
                          direct ? s->in_contribution[e->rank] : s->out_contribution[peer], &m,
                          &s->send_contribution[peer]));
        t = now_ns();
    }
    if (!direct && own.ntiles)
        encode_message(e, s, &own, true, s->in_contribution[e->rank]);
    count_encode(e, job, t);

    e->announced = true;
    job->nchunks_open++;
    job->chunk++;
    return AGC_OK;
}

/* Mean (or sum) over all ranks of tile t, which lies at `offset` in the own message's payload, in
 * rank order. With two ranks the own contribution goes first, on both: a sum of two does not depend
 * on the order, and it may stand where the sum is to stand. */
static void average_tile(struct agc_engine *e, const struct slot *s,
                         const struct agc_lane_context *c, const struct agc_tile *tile, uint64_t t,
                         uint64_t offset, void *out)
{
    const uint8_t *own = agc_lane_payload(s->lane, c, t);
    bool own_first = e->nranks == 2;
    if (!own || (s->lane->plan.direct && !own_first))
        own = s->in_contribution[e->rank] + AGC_WIRE_HEADER_NBYTES + offset;
    uint32_t ncounted = s->nabsent < e->nranks ? e->nranks - s->nabsent : e->nranks;
    double weight = s->job->bucket->sum ? 1.0 : 1.0 / (double)ncounted;
    uint32_t work_dtype = agc_work_dtype(s->lane->codec, tile->dtype);
    for (uint32_t i = 0; i < e->nranks; i++) {
        uint32_t rank = own_first ? (e->rank + i) % 2 : i;
        const uint8_t *src =
            rank == e->rank ? own : s->in_contribution[rank] + AGC_WIRE_HEADER_NBYTES + offset;
        s->lane->codec->decode(tile, src, weight, i > 0, out, work_dtype);
    }
}

enum agc_status agc_engine_reduce(struct agc_engine *e)
{
    struct slot *s = &e->slots[e->pipeline.reduced % e->pipeline.window];
    struct agc_message own = slot_message(s, e->rank);
    if (!own.ntiles)
        return AGC_OK;
    for (uint32_t peer = 0; peer < e->nranks; peer++) {
        if (peer == e->rank)
            continue;
        AGC_TRY(agc_engine_wait(e, &s->recv_contribution[peer], peer, false, s->job));
        AGC_TRY(check_frame(e, s, peer, s->in_contribution[peer], &own, false));
    }
    const struct agc_kernels *k = agc_kernels_get();
    struct agc_lane_context c = slot_context(e, s, k);
    uint64_t offset = 0, began = now_ns();
    if (!s->lane->plan.direct) {
        struct agc_frame f = describe(e, s, &own, true);
        agc_header_write(k, &f, s->out_result);
    }
    for (uint32_t i = 0; i < own.ntiles; i++) {
        uint64_t t = own.first_tile + (uint64_t)i * own.step;
        struct agc_tile tile = agc_lane_tile(s->lane, &c, t);
        if (s->lane->plan.direct) {
            void *mean = agc_lane_sum(s->lane, &c, t);
            average_tile(e, s, &c, &tile, t, offset, mean);
            agc_lane_sum_put(s->lane, &c, t, mean);
        } else {
            /* The owner keeps the decoded mean, as everybody else will, and never the exact one:
             * replicas must not drift. */
            uint8_t *result = s->out_result + AGC_WIRE_HEADER_NBYTES + offset;
            void *mean = agc_lane_mean(s->lane, &c, result);
            average_tile(e, s, &c, &tile, t, offset, mean);
            agc_lane_encode_mean(s->lane, &c, t, mean, result);
            agc_lane_decode(s->lane, &c, t, &tile, result);
        }
        offset += agc_tile_nbytes(&tile.spec, tile.dtype, tile.nelems);
    }
    count_decode(e, s->job, began);
    if (s->lane->plan.direct)
        return AGC_OK;
    for (uint32_t i = 1; i < e->nranks; i++) {
        uint32_t peer = (e->rank + i) % e->nranks;
        AGC_TRY(
            post_send(e, s, peer, AGC_CHANNEL_RESULT, s->out_result, &own, &s->send_result[peer]));
    }
    return AGC_OK;
}

enum agc_status agc_engine_close(struct agc_engine *e)
{
    struct slot *s = &e->slots[e->pipeline.closed % e->pipeline.window];
    const struct agc_kernels *k = agc_kernels_get();
    struct agc_lane_context c = slot_context(e, s, k);
    if (!s->lane->plan.direct) {
        for (uint32_t i = 1; i < e->nranks; i++) {
            uint32_t peer = (e->rank + i) % e->nranks;
            struct agc_message m = slot_message(s, peer);
            if (!m.ntiles)
                continue;
            AGC_TRY(agc_engine_wait(e, &s->recv_result[peer], peer, true, s->job));
            AGC_TRY(check_frame(e, s, peer, s->in_result[peer], &m, true));
            uint64_t began = now_ns();
            const uint8_t *src = s->in_result[peer] + AGC_WIRE_HEADER_NBYTES;
            for (uint32_t j = 0; j < m.ntiles; j++) {
                uint64_t t = m.first_tile + (uint64_t)j * m.step;
                struct agc_tile tile = agc_lane_tile(s->lane, &c, t);
                agc_lane_decode(s->lane, &c, t, &tile, src);
                src += agc_tile_nbytes(&tile.spec, tile.dtype, tile.nelems);
            }
            count_decode(e, s->job, began);
        }
    }
    s->job->nchunks_open--;
    return AGC_OK;
}
