/* engine.c: the progress thread. It takes chunks through the steps that pipeline.h orders: encode,
 * post, wait, decode.
 *
 * Staging: `window` slots, each with room for one chunk's frames. All of it is reserved once, when
 * the engine is created, and touched only as far as frames reach, so that a steady state allocates
 * nothing. Receives are posted with the largest capacity that any frame of this engine can have: a
 * frame from a peer that is out of step still fits, and its header tells what went wrong.
 *
 * Blocking: the transport's wait blocks, and gloo offers no other way to learn of a completion.
 * That is no loss: a rank waits only when everything that it could send is posted. A second thread,
 * the watch, sleeps beside it; it cancels a wait that lasts longer than the timeout and reports
 * peers that are late.
 */
#define _DEFAULT_SOURCE /* madvise */
#include "reduce/engine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "core/common.h"
#include "core/header.h"
#include "reduce/pipeline.h"
#include "reduce/tune.h"

#define WINDOW 8
#define LAG 2
#define QUEUE_CAP 64
#define HUGE_PAGE_NBYTES ((size_t)2 << 20)
/* agc_engine_config.linger_ns, unless told otherwise. */
#define LINGER_NS 2000000000ull
/* How much longer than the timeout an indirect wait lasts, at most, so that the rank waited for is
 * the first to blame somebody. */
#define GRACE_NS 5000000000ull
/* Dense bytes in open chunks, at most, if they allow two: bounds the memory that large chunks take.
 */
#define IN_FLIGHT_NBYTES ((uint64_t)32 << 20)
/* Rounds that are not measured: residuals are touched for the first time, DDP rebuilds its buckets.
 */
#define WARMUP_NROUNDS 2
/* Rounds of other kinds in a row, after which the search turns to them. */
#define TUNE_NOTHERS_MAX 64

struct request {
    void *handle; /* of the transport; NULL: none */
};

struct bucket {
    bool sum;
    uint32_t index;
    uint32_t dtype;
    uint32_t nlanes;
    struct agc_lane *lanes;
    uint64_t nelems;
    struct agc_engine_stats stats;     /* the progress thread's */
    struct agc_engine_stats published; /* as of the last bucket that was done, under the mutex */
};

/* A submission, until its bucket is done. */
struct job {
    struct bucket *bucket;
    uint32_t round;
    uint32_t nforwards;
    bool absent;
    uint8_t *data;
    void *token;
    uint32_t lane; /* next chunk to open */
    uint64_t chunk;
    bool started;
    uint64_t nchunks_open; /* opened and not yet closed */
    uint64_t started_ns;
};

struct slot {
    struct job *job;
    struct agc_lane *lane;
    uint64_t chunk;
    uint64_t chunk_nstripes;
    uint32_t nabsent;                  /* ranks that do not count in the mean */
    struct request *recv_contribution; /* nranks of each */
    struct request *recv_result;
    struct request *send_contribution;
    struct request *send_result;
    uint8_t *
        *in_contribution; /* nranks buffers of message_nbytes_max; the own one is the own frame */
    uint8_t **in_result;
    uint8_t **out_contribution;
    uint8_t *out_result;
};

/* What the progress thread is waiting for, for the watch. */
struct watched {
    void *request;
    uint32_t peer;
    uint32_t round;
    uint32_t bucket;
    uint64_t since_ns; /* 0: now */
    bool indirect;     /* the peer may itself be waiting, for the rank that is to blame */
    bool lingering;    /* after a failure: nobody is told that a peer is late */
    bool timed_out;
    bool closing;
};

/* What a round exchanged, and how long that took. */
struct round_measure {
    uint64_t nbytes; /* dense */
    uint64_t encoded_nbytes;
    uint64_t lane_nbytes_max;
    uint64_t codec_ns;
    uint64_t total_ns; /* with an exchange under way */
};

struct agc_engine {
    struct agc_engine_config config;
    struct agc_transport transport;
    uint32_t rank, nranks;
    uint32_t *rank_names;
    struct agc_param *params;
    uint32_t nparams, params_cap;

    struct bucket **buckets; /* by index */
    uint32_t buckets_cap;

    /* Between callers and the progress thread. */
    pthread_mutex_t mutex;
    pthread_cond_t work; /* a job was queued, or stop */
    pthread_cond_t idle; /* nothing is under way */
    struct job queue[QUEUE_CAP];
    uint64_t queue_head, queue_tail; /* jobs [head, tail) are queued or under way */
    uint64_t queue_next;             /* first job not yet taken by the progress thread */
    bool stop;
    bool started;
    bool failed;
    struct agc_failure failure;
    pthread_t progress_thread, watch_thread;
    struct agc_engine_stats published;

    /* The watch. */
    pthread_mutex_t watch_mutex;
    pthread_cond_t watch_wake;
    struct watched watched;
    bool watch_stop;
    bool *late_told; /* per rank */

    /* The progress thread alone. */
    struct agc_engine_stats stats;
    struct agc_pipeline pipeline;
    struct slot *slots;
    struct request *abort_sends; /* two per rank */
    struct agc_tile_scratch *scratch;
    uint8_t *staging;
    uint64_t message_nbytes_max;
    uint64_t job_opening; /* the job whose chunks are being opened */
    uint32_t round;       /* being opened */
    bool round_known;
    uint32_t chunk_log2;      /* of this round */
    uint32_t chunk_log2_next; /* of the next one, as announced */
    uint32_t chunk_log2_max;  /* that the staging has room for */
    bool announced;           /* a frame of this round has told of chunk_log2_next */
    struct agc_tune tune;
    struct round_measure tuned;    /* the kind of round that tune is about; all 0: not yet */
    uint32_t nothers;              /* rounds of other kinds since the last of that kind */
    struct round_measure measured; /* since the round began */
    uint64_t done_ns;              /* when the last bucket was done */
    uint8_t abort_frame[AGC_WIRE_HEADER_NBYTES];
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Large blocks in huge pages where the system offers them: residuals are read and written once per
 * round from end to end, and encoding is bound by that (int8 with error feedback over 32 MiB: 3.2
 * ms in small pages, 2.8 ms in huge ones). */
static void *default_alloc(void *ctx, size_t nbytes)
{
    (void)ctx;
#ifdef MADV_HUGEPAGE
    void *p = NULL;
    if (nbytes >= 2 * HUGE_PAGE_NBYTES) {
        if (posix_memalign(&p, HUGE_PAGE_NBYTES, nbytes) != 0)
            return NULL;
        (void)madvise(p, nbytes, MADV_HUGEPAGE); /* advice: a refusal costs speed alone */
        return p;
    }
#endif
    return malloc(nbytes ? nbytes : 1);
}

static void default_release(void *ctx, void *p)
{
    (void)ctx;
    free(p);
}

static void *engine_alloc(struct agc_engine *e, size_t nbytes)
{
    return e->config.alloc.alloc(e->config.alloc.ctx, nbytes);
}

static void engine_release(struct agc_engine *e, void *p)
{
    if (p)
        e->config.alloc.release(e->config.alloc.ctx, p);
}

/* NULL: nothing to do. */
static void bucket_destroy(struct agc_engine *e, struct bucket *b)
{
    if (!b)
        return;
    for (uint32_t i = 0; i < b->nlanes; i++)
        agc_lane_destroy(&b->lanes[i], &e->config.alloc);
    engine_release(e, b->lanes);
    engine_release(e, b);
}

static uint32_t rank_name(const struct agc_engine *e, uint32_t rank)
{
    return rank < e->nranks ? e->rank_names[rank] : rank;
}

/* ---- waiting and failing ---- */

/* Records the first failure. With e->mutex held. */
static void record_failure(struct agc_engine *e, enum agc_status status, uint32_t rank,
                           const char *text)
{
    if (e->failed)
        return;
    e->failed = true;
    e->failure.status = status;
    e->failure.rank = rank;
    snprintf(e->failure.text, sizeof e->failure.text, "%s", text);
}

/* Returns the status. */
static enum agc_status fail(struct agc_engine *e, enum agc_status status, uint32_t rank,
                            const char *text)
{
    pthread_mutex_lock(&e->mutex);
    record_failure(e, status, rank, text);
    pthread_mutex_unlock(&e->mutex);
    return status;
}

static enum agc_status fail_peer(struct agc_engine *e, uint32_t peer, const struct job *job,
                                 bool timed_out)
{
    char text[AGC_ENGINE_TEXT_NBYTES], reason[256] = "";
    uint32_t round = job->round, bucket = job->bucket->index;
    if (timed_out) {
        snprintf(text, sizeof text,
                 "rank %u did not send its part of round %u bucket %u within %.1f s (timeout_s); "
                 "it is stuck, slower than "
                 "that, or did not take part in this backward pass",
                 rank_name(e, peer), round, bucket, (double)e->config.timeout_ns * 1e-9);
        return fail(e, AGC_ERR_TIMEOUT, peer, text);
    }
    e->transport.error_text(e->transport.ctx, reason, sizeof reason);
    snprintf(text, sizeof text, "rank %u is gone in round %u bucket %u%s%s", rank_name(e, peer),
             round, bucket, reason[0] ? ": " : "", reason);
    return fail(e, AGC_ERR_PEER, peer, text);
}

/* Puts a wait under the eyes of the watch. False: the engine is being closed, so the wait must not
 * begin. */
static bool watch_begin(struct agc_engine *e, struct watched w)
{
    if (!w.since_ns)
        w.since_ns = now_ns();
    pthread_mutex_lock(&e->watch_mutex);
    bool open = !e->watch_stop;
    if (open)
        e->watched = w;
    pthread_mutex_unlock(&e->watch_mutex);
    return open;
}

/* Returns what the watch made of the wait. */
static struct watched watch_end(struct agc_engine *e)
{
    pthread_mutex_lock(&e->watch_mutex);
    struct watched w = e->watched;
    w.closing = e->watch_stop;
    e->watched.request = NULL;
    pthread_mutex_unlock(&e->watch_mutex);
    return w;
}

#define CLOSED_TEXT "the handle was closed while an exchange was under way"

static enum agc_status fail_closed(struct agc_engine *e)
{
    return fail(e, AGC_ERR_CLOSED, AGC_RANK_NONE, CLOSED_TEXT);
}

static enum agc_status wait_for(struct agc_engine *e, struct request *r, uint32_t peer,
                                bool indirect, const struct job *job)
{
    if (!r->handle)
        return AGC_OK;
    if (!watch_begin(e, (struct watched){.request = r->handle,
                                         .peer = peer,
                                         .round = job->round,
                                         .bucket = job->bucket->index,
                                         .indirect = indirect}))
        return fail_closed(e);
    enum agc_status status = e->transport.wait(e->transport.ctx, r->handle);
    struct watched w = watch_end(e);
    uint64_t waited_ns = now_ns() - w.since_ns;
    job->bucket->stats.wait_ns += waited_ns;
    e->stats.wait_ns += waited_ns;
    if (status == AGC_OK) {
        e->transport.release(e->transport.ctx, r->handle);
        r->handle = NULL;
        return AGC_OK;
    }
    return w.closing ? fail_closed(e) : fail_peer(e, peer, job, w.timed_out);
}

/* The watch: wakes a few times per second while a wait is on. */
static void *watch_main(void *arg)
{
    struct agc_engine *e = (struct agc_engine *)arg;
    pthread_mutex_lock(&e->watch_mutex);
    while (!e->watch_stop) {
        struct timespec until;
        uint64_t period_ns = agc_min_u64(
            500000000u, agc_min_u64(e->config.timeout_ns, e->config.late_ns) / 4 + 1000000u);
        clock_gettime(CLOCK_MONOTONIC, &until);
        uint64_t ns = (uint64_t)until.tv_nsec + period_ns;
        until.tv_sec += (time_t)(ns / 1000000000u);
        until.tv_nsec = (long)(ns % 1000000000u);
        pthread_cond_timedwait(&e->watch_wake, &e->watch_mutex, &until);
        struct watched w = e->watched;
        if (!w.request || w.timed_out)
            continue;
        uint64_t waited_ns = now_ns() - w.since_ns;
        uint64_t grace_ns = w.indirect ? agc_min_u64(e->config.timeout_ns / 4, GRACE_NS) : 0;
        if (waited_ns >= e->config.timeout_ns + grace_ns) {
            e->watched.timed_out = true;
            e->transport.cancel(e->transport.ctx, w.request);
        } else if (waited_ns >= e->config.late_ns && !w.indirect && !w.lingering &&
                   e->config.callbacks.peer_late && !e->late_told[w.peer]) {
            e->late_told[w.peer] = true;
            /* Without the mutex: the callback may wait for a lock that a thread holds which waits
             * for the progress thread. */
            pthread_mutex_unlock(&e->watch_mutex);
            e->config.callbacks.peer_late(e->config.callbacks.ctx, rank_name(e, w.peer), w.round,
                                          w.bucket, (double)waited_ns * 1e-9);
            pthread_mutex_lock(&e->watch_mutex);
        }
    }
    /* Closing: whatever is being waited for will not come. */
    if (e->watched.request)
        e->transport.cancel(e->transport.ctx, e->watched.request);
    pthread_mutex_unlock(&e->watch_mutex);
    return NULL;
}

/* Tells every other rank that this one gives up, and whom it blames. Their next receive from here
 * gets this instead of a frame, so that they name the same culprit and not this rank. The culprit
 * is told too, unless it is gone: it may be alive and waiting. */
static void tell_peers(struct agc_engine *e)
{
    struct agc_frame f = {.flags = AGC_FRAME_ABORT,
                          .tile_nelems = AGC_TILE_NELEMS_MAX,
                          .stream = e->config.stream,
                          .round = e->round,
                          .first_tile = e->failure.rank,
                          .seed = (uint32_t)-(int32_t)e->failure.status};
    agc_header_write(agc_kernels_get(), &f, e->abort_frame);
    for (uint32_t i = 0; i < AGC_NCHANNELS * e->nranks; i++) {
        uint32_t peer = i / AGC_NCHANNELS, channel = i % AGC_NCHANNELS + AGC_CHANNEL_CONTRIBUTION;
        if (peer == e->rank || (peer == e->failure.rank && e->failure.status == AGC_ERR_PEER))
            continue;
        if (channel == AGC_CHANNEL_RESULT &&
            e->nranks <= 2) /* always direct: nobody listens there */
            continue;
        if (e->transport.send(e->transport.ctx, peer, channel, e->abort_frame,
                              sizeof e->abort_frame, &e->abort_sends[i].handle) != AGC_OK)
            e->abort_sends[i].handle = NULL;
    }
}

/* ---- frames ---- */

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
        return fail(e, status, peer, text);
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
        return fail(e, keep ? theirs : AGC_ERR_PEER, culprit, text);
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
            "rank %u sent lane %u tiles %u+%u codec %u (%llu elements), expected lane %u tiles "
            "%u+%u codec %u "
            "(%llu elements) in round %u bucket %u: the ranks have different models or settings",
            name, f.lane, f.first_tile, f.ntiles, f.spec.codec, (unsigned long long)f.nelems,
            want.lane, want.first_tile, want.ntiles, want.spec.codec,
            (unsigned long long)want.nelems, want.round, want.bucket);
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
    return fail(e, AGC_ERR_MISMATCH, peer, text);
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
        return fail_peer(e, peer, s->job, false);
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
        return fail_peer(e, peer, s->job, false);
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

/* The sends of a slot's last chunk must have left before its buffers are written again. */
static enum agc_status finish_sends(struct agc_engine *e, struct slot *s, const struct job *job)
{
    for (uint32_t peer = 0; peer < e->nranks; peer++) {
        AGC_TRY(wait_for(e, &s->send_contribution[peer], peer, true, job));
        AGC_TRY(wait_for(e, &s->send_result[peer], peer, true, job));
    }
    return AGC_OK;
}

/* Open chunks, at most. */
static uint32_t window_of(uint32_t chunk_log2)
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
    return true;
}

static void round_begin(struct agc_engine *e, uint32_t round)
{
    uint32_t wanted = e->chunk_log2_next;
    if (e->rank == 0 && e->config.chunk_log2 == 0 && e->stats.nrounds > WARMUP_NROUNDS &&
        e->measured.nbytes && is_tuned_kind(e))
        wanted = agc_tune_round(&e->tune, e->chunk_log2,
                                (double)e->measured.total_ns / (double)e->measured.nbytes);
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
    agc_pipeline_init(&e->pipeline, window_of(e->chunk_log2), LAG);
}

static enum agc_status step_open(struct agc_engine *e)
{
    struct job *job = &e->queue[e->job_opening % QUEUE_CAP];
    struct slot *s = &e->slots[e->pipeline.opened % e->pipeline.window];
    AGC_TRY(finish_sends(e, s, job));
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
    for (uint32_t i = 0; i < e->nranks; i++) {
        uint32_t rank = own_first ? (e->rank + i) % 2 : i;
        const uint8_t *src =
            rank == e->rank ? own : s->in_contribution[rank] + AGC_WIRE_HEADER_NBYTES + offset;
        (i == 0 ? s->lane->codec->decode : s->lane->codec->decode_add)(tile, src, weight, out);
    }
}

static enum agc_status step_reduce(struct agc_engine *e)
{
    struct slot *s = &e->slots[e->pipeline.reduced % e->pipeline.window];
    struct agc_message own = slot_message(s, e->rank);
    if (!own.ntiles)
        return AGC_OK;
    for (uint32_t peer = 0; peer < e->nranks; peer++) {
        if (peer == e->rank)
            continue;
        AGC_TRY(wait_for(e, &s->recv_contribution[peer], peer, false, s->job));
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
        void *out = agc_lane_tile_out(s->lane, &c, t);
        if (s->lane->plan.direct) {
            average_tile(e, s, &c, &tile, t, offset, out);
        } else {
            /* The owner keeps the decoded mean, as everybody else will, and never the exact one:
             * replicas must not drift. */
            uint8_t *result = s->out_result + AGC_WIRE_HEADER_NBYTES + offset;
            void *mean = agc_lane_mean(s->lane, &c, result);
            average_tile(e, s, &c, &tile, t, offset, mean);
            agc_lane_encode_mean(s->lane, &c, t, mean, result);
            s->lane->codec->decode(&tile, result, 1.0, out);
        }
        agc_lane_tile_put(s->lane, &c, t, out);
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

static enum agc_status step_close(struct agc_engine *e)
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
            AGC_TRY(wait_for(e, &s->recv_result[peer], peer, true, s->job));
            AGC_TRY(check_frame(e, s, peer, s->in_result[peer], &m, true));
            uint64_t began = now_ns();
            const uint8_t *src = s->in_result[peer] + AGC_WIRE_HEADER_NBYTES;
            for (uint32_t j = 0; j < m.ntiles; j++) {
                uint64_t t = m.first_tile + (uint64_t)j * m.step;
                struct agc_tile tile = agc_lane_tile(s->lane, &c, t);
                void *out = agc_lane_tile_out(s->lane, &c, t);
                s->lane->codec->decode(&tile, src, 1.0, out);
                agc_lane_tile_put(s->lane, &c, t, out);
                src += agc_tile_nbytes(&tile.spec, tile.dtype, tile.nelems);
            }
            count_decode(e, s->job, began);
        }
    }
    s->job->nchunks_open--;
    return AGC_OK;
}

/* ---- jobs ---- */

/* Skips lanes that have been opened to the end. False: the job has no more chunks to open. */
static bool job_has_chunk(const struct agc_engine *e, struct job *job)
{
    for (; job->lane < job->bucket->nlanes; job->lane++, job->chunk = 0) {
        const struct agc_lane_plan *plan = &job->bucket->lanes[job->lane].plan;
        if (job->chunk < agc_plan_nchunks(plan, agc_plan_chunk_nstripes(plan, e->chunk_log2)))
            return true;
    }
    return false;
}

static void count_done(struct agc_engine *e, const struct job *job)
{
    struct agc_engine_stats *b = &job->bucket->stats;
    uint64_t nbytes = job->bucket->nelems * agc_dtype_nbytes(job->bucket->dtype), t = now_ns();
    uint64_t dense_nbytes = nbytes * 2 * (e->nranks - 1) / e->nranks;
    b->nrounds++;
    b->nbuckets++;
    b->dense_nbytes += dense_nbytes;
    e->stats.nbuckets++;
    e->stats.dense_nbytes += dense_nbytes;
    /* Time with an exchange under way: buckets overlap, and between them backward may take its
     * time. */
    e->measured.nbytes += nbytes;
    e->measured.total_ns += t - (job->started_ns > e->done_ns ? job->started_ns : e->done_ns);
    e->done_ns = t;
    for (uint32_t i = 0; i < job->bucket->nlanes; i++) {
        const struct agc_lane_plan *plan = &job->bucket->lanes[i].plan;
        uint64_t lane_nbytes = plan->nelems * agc_dtype_nbytes(plan->dtype);
        if (lane_nbytes > e->measured.lane_nbytes_max)
            e->measured.lane_nbytes_max = lane_nbytes;
        if (plan->nelems > 0)
            e->measured.encoded_nbytes +=
                agc_tiles_nbytes(&plan->spec, plan->dtype, plan->nelems, plan->tile_nelems);
    }
}

/* Hands the oldest job back. */
static void job_finish(struct agc_engine *e, const struct agc_failure *failure)
{
    struct job job = e->queue[e->queue_head % QUEUE_CAP];
    if (!failure)
        count_done(e, &job);
    pthread_mutex_lock(&e->mutex);
    e->published = e->stats;
    job.bucket->published = job.bucket->stats;
    pthread_mutex_unlock(&e->mutex);
    e->config.callbacks.bucket_done(e->config.callbacks.ctx, job.token, failure);
    pthread_mutex_lock(&e->mutex);
    e->queue_head++;
    pthread_cond_broadcast(&e->idle);
    pthread_mutex_unlock(&e->mutex);
}

/* Takes jobs from the queue while the pipeline can use them: offers chunk after chunk of the oldest
 * job that has any left. */
static void feed(struct agc_engine *e)
{
    while (e->pipeline.opened == e->pipeline.offered && e->job_opening < e->queue_next) {
        struct job *job = &e->queue[e->job_opening % QUEUE_CAP];
        if (!job->started) {
            bool new_round = !e->round_known || job->round != e->round;
            /* The chunk size of a round is known when the round before is over. */
            if (new_round && !agc_pipeline_is_empty(&e->pipeline))
                return;
            if (new_round)
                round_begin(e, job->round);
            job->started = true;
            job->started_ns = now_ns();
            for (uint32_t i = 0; i < job->bucket->nlanes && e->nranks > 1; i++) {
                struct agc_lane_context c = {.kernels = agc_kernels_get(), .bucket = job->data};
                agc_lane_mark_live(&job->bucket->lanes[i], &c);
            }
        }
        if (e->nranks > 1 && job_has_chunk(e, job)) {
            agc_pipeline_offer(&e->pipeline, 1);
            return;
        }
        e->job_opening++;
    }
}

/* Jobs whose chunks are all closed are done, in order. Before the last of them is handed back,
 * everything sent has left: the caller may end the process now, and the others still need it. */
static enum agc_status finish_jobs(struct agc_engine *e)
{
    while (e->queue_head < e->job_opening &&
           e->queue[e->queue_head % QUEUE_CAP].nchunks_open == 0) {
        const struct job *job = &e->queue[e->queue_head % QUEUE_CAP];
        for (uint32_t i = 0; e->queue_head + 1 == e->queue_next && i < WINDOW; i++)
            AGC_TRY(finish_sends(e, &e->slots[i], job));
        job_finish(e, NULL);
    }
    return AGC_OK;
}

/* Gives up: hands back all that is under way, then lingers until the others have been told. */
static void surrender(struct agc_engine *e)
{
    struct agc_failure failure = e->failure;
    bool tell = failure.status != AGC_ERR_CLOSED;
    if (tell)
        tell_peers(e);
    for (;;) {
        pthread_mutex_lock(&e->mutex);
        bool any = e->queue_head < e->queue_tail;
        pthread_mutex_unlock(&e->mutex);
        if (!any)
            break;
        job_finish(e, &failure);
    }
    if (!tell)
        return;
    /* The watch bounds all of these waits together. A rank that has been silent for the whole
     * timeout is not waited for again. */
    uint64_t began = now_ns();
    pthread_mutex_lock(&e->watch_mutex);
    e->config.timeout_ns =
        agc_min_u64(e->config.timeout_ns, e->config.linger_ns ? e->config.linger_ns : LINGER_NS);
    pthread_cond_signal(&e->watch_wake); /* it has been sleeping by the longer one */
    pthread_mutex_unlock(&e->watch_mutex);
    for (uint32_t i = 0; i < AGC_NCHANNELS * e->nranks; i++) {
        struct request *r = &e->abort_sends[i];
        uint32_t peer = i / AGC_NCHANNELS;
        if (!r->handle || (peer == failure.rank && failure.status == AGC_ERR_TIMEOUT) ||
            now_ns() - began >= e->config.timeout_ns)
            continue;
        if (!watch_begin(
                e, (struct watched){
                       .request = r->handle, .peer = peer, .since_ns = began, .lingering = true}))
            return;
        enum agc_status status = e->transport.wait(e->transport.ctx, r->handle);
        watch_end(e);
        if (status == AGC_OK) {
            e->transport.release(e->transport.ctx, r->handle);
            r->handle = NULL;
        }
    }
}

static void *progress_main(void *arg)
{
    struct agc_engine *e = (struct agc_engine *)arg;
    for (;;) {
        pthread_mutex_lock(&e->mutex);
        while (e->queue_head == e->queue_tail && !e->stop)
            pthread_cond_wait(&e->work, &e->mutex);
        bool stop = e->stop;
        e->queue_next = e->queue_tail;
        pthread_mutex_unlock(&e->mutex);
        if (stop) {
            fail_closed(e);
            break;
        }
        feed(e);
        enum agc_status status = finish_jobs(e);
        if (status != AGC_OK)
            break;
        enum agc_pipeline_action action = agc_pipeline_next(&e->pipeline);
        switch (action) {
        case AGC_PIPELINE_OPEN:
            status = step_open(e);
            break;
        case AGC_PIPELINE_REDUCE:
            status = step_reduce(e);
            break;
        case AGC_PIPELINE_CLOSE:
            status = step_close(e);
            break;
        case AGC_PIPELINE_IDLE:
            break;
        }
        if (status != AGC_OK)
            break;
        agc_pipeline_done(&e->pipeline, action);
    }
    surrender(e);
    return NULL;
}

/* ---- the interface ---- */

/* Cuts one block of memory into the slots' buffers; returns its size. base NULL: only that. */
static uint64_t lay_out_staging(struct agc_engine *e, uint8_t *base)
{
    uint64_t at = 0, frame = agc_round_up(e->message_nbytes_max, 64);
    uint32_t nslots = e->config.chunk_log2 ? window_of(e->config.chunk_log2) : WINDOW;
    for (uint32_t i = 0; i < nslots; i++) {
        struct slot *s = &e->slots[i];
        for (uint32_t rank = 0; rank < e->nranks; rank++, at += frame)
            s->in_contribution[rank] = base ? base + at : NULL;
        if (e->nranks <= 2)
            continue; /* always direct: one phase, and one frame for everybody */
        for (uint32_t rank = 0; rank < e->nranks; rank++) {
            if (rank == e->rank)
                continue;
            s->in_result[rank] = base ? base + at : NULL;
            s->out_contribution[rank] = base ? base + at + frame : NULL;
            at += 2 * frame;
        }
        s->out_result = base ? base + at : NULL;
        at += frame;
    }
    return at;
}

static enum agc_status engine_init(struct agc_engine *e, const uint64_t *params_nelems)
{
    uint32_t n = e->nranks;
    e->rank_names = (uint32_t *)engine_alloc(e, sizeof *e->rank_names * n);
    e->params = (struct agc_param *)engine_alloc(e, sizeof *e->params * (e->nparams + 1));
    e->slots = (struct slot *)engine_alloc(e, sizeof *e->slots * WINDOW);
    e->scratch = (struct agc_tile_scratch *)engine_alloc(e, sizeof *e->scratch);
    e->late_told = (bool *)engine_alloc(e, n);
    e->abort_sends = (struct request *)engine_alloc(e, sizeof *e->abort_sends * AGC_NCHANNELS * n);
    if (e->params)
        for (uint32_t i = 0; i < e->nparams; i++)
            e->params[i] = (struct agc_param){.nelems = params_nelems[i]};
    if (e->slots)
        memset(e->slots, 0, sizeof *e->slots * WINDOW);
    if (!e->rank_names || !e->params || !e->slots || !e->scratch || !e->late_told ||
        !e->abort_sends)
        return AGC_ERR_NOMEM;
    memset(e->late_told, 0, n);
    memset(e->abort_sends, 0, sizeof *e->abort_sends * AGC_NCHANNELS * n);
    for (uint32_t i = 0; i < n; i++)
        e->rank_names[i] = e->config.rank_names ? e->config.rank_names[i] : i;
    e->config.rank_names = NULL;
    for (uint32_t i = 0; i < WINDOW; i++) {
        struct slot *s = &e->slots[i];
        s->recv_contribution = (struct request *)engine_alloc(e, sizeof(struct request) * 4 * n);
        s->in_contribution = (uint8_t **)engine_alloc(e, sizeof(uint8_t *) * 3 * n);
        if (!s->recv_contribution || !s->in_contribution)
            return AGC_ERR_NOMEM;
        memset(s->recv_contribution, 0, sizeof(struct request) * 4 * n);
        memset(s->in_contribution, 0, sizeof(uint8_t *) * 3 * n);
        s->recv_result = s->recv_contribution + n;
        s->send_contribution = s->recv_contribution + 2 * n;
        s->send_result = s->recv_contribution + 3 * n;
        s->in_result = s->in_contribution + n;
        s->out_contribution = s->in_contribution + 2 * n;
    }
    if (n > 1) {
        e->chunk_log2_max = e->config.chunk_log2 ? e->config.chunk_log2 : AGC_CHUNK_LOG2_AUTO_MAX;
        e->message_nbytes_max =
            agc_plan_message_nbytes_max(n, e->config.elem_nbytes_max, e->chunk_log2_max);
        uint64_t staging_nbytes = lay_out_staging(e, NULL);
        e->staging = (uint8_t *)engine_alloc(e, staging_nbytes);
        if (!e->staging)
            return AGC_ERR_NOMEM;
#ifdef MADV_NOHUGEPAGE
        /* Most of it is reserve: in huge pages every frame, however short, would take up at least
         * one. */
        if (e->config.alloc.alloc == default_alloc)
            (void)madvise(e->staging, staging_nbytes, MADV_NOHUGEPAGE);
#endif
        lay_out_staging(e, e->staging);
    }
    e->chunk_log2 = e->config.chunk_log2 ? e->config.chunk_log2 : AGC_CHUNK_LOG2_AUTO_FIRST;
    e->chunk_log2_next = e->chunk_log2;
    e->stats.chunk_log2 = e->chunk_log2;
    e->published = e->stats;
    agc_pipeline_init(&e->pipeline, window_of(e->chunk_log2), LAG);
    return AGC_OK;
}

/* Frees all but the locks and threads. */
static void engine_free(struct agc_engine *e)
{
    for (uint32_t i = 0; e->slots && i < WINDOW; i++) {
        engine_release(e, e->slots[i].recv_contribution);
        engine_release(e, e->slots[i].in_contribution);
    }
    for (uint32_t i = 0; i < e->buckets_cap; i++)
        bucket_destroy(e, e->buckets[i]);
    for (uint32_t i = 0; e->params && i < e->nparams; i++)
        engine_release(e, e->params[i].residual);
    engine_release(e, e->buckets);
    engine_release(e, e->params);
    engine_release(e, e->slots);
    engine_release(e, e->scratch);
    engine_release(e, e->staging);
    engine_release(e, e->late_told);
    engine_release(e, e->abort_sends);
    engine_release(e, e->rank_names);
    engine_release(e, e);
}

enum agc_status agc_engine_create(const struct agc_engine_config *config,
                                  const struct agc_transport *transport,
                                  const uint64_t *params_nelems, uint32_t nparams,
                                  struct agc_engine **engine_ret)
{
    struct agc_alloc alloc = config->alloc;
    if (!alloc.alloc)
        alloc = (struct agc_alloc){default_alloc, default_release, NULL};
    enum agc_status status = AGC_ERR_SPEC;
    struct agc_engine *e = NULL;
    if (config->chunk_log2 == 0 ||
        (config->chunk_log2 >= AGC_CHUNK_LOG2_MIN && config->chunk_log2 <= AGC_CHUNK_LOG2_MAX)) {
        status = AGC_ERR_NOMEM;
        e = (struct agc_engine *)alloc.alloc(alloc.ctx, sizeof *e);
    }
    if (!e) {
        transport->destroy(transport->ctx);
        return status;
    }
    memset(e, 0, sizeof *e);
    e->config = *config;
    e->config.alloc = alloc;
    e->transport = *transport;
    e->rank = transport->rank;
    e->nranks = transport->nranks;
    e->nparams = nparams;
    e->params_cap = nparams + 1;
    status = engine_init(e, params_nelems);
    if (status != AGC_OK) {
        transport->destroy(transport->ctx);
        engine_free(e);
        return status;
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&e->mutex, NULL);
    pthread_mutex_init(&e->watch_mutex, NULL);
    pthread_cond_init(&e->work, NULL);
    pthread_cond_init(&e->idle, NULL);
    pthread_cond_init(&e->watch_wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *engine_ret = e;
    return AGC_OK;
}

/* The threads start with the first bucket, so that a handle that is only created costs none. With
 * e->mutex held. */
static enum agc_status start_threads(struct agc_engine *e)
{
    if (e->started)
        return AGC_OK;
    if (pthread_create(&e->watch_thread, NULL, watch_main, e) != 0)
        return AGC_ERR_THREAD;
    if (pthread_create(&e->progress_thread, NULL, progress_main, e) != 0) {
        pthread_mutex_lock(&e->watch_mutex);
        e->watch_stop = true;
        pthread_cond_signal(&e->watch_wake);
        pthread_mutex_unlock(&e->watch_mutex);
        pthread_join(e->watch_thread, NULL);
        e->watch_stop = false;
        return AGC_ERR_THREAD;
    }
    e->started = true;
    return AGC_OK;
}

static void release_all(struct agc_engine *e, struct request *requests, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (requests[i].handle)
            e->transport.release(e->transport.ctx, requests[i].handle);
}

void agc_engine_stop(struct agc_engine *e)
{
    pthread_mutex_lock(&e->mutex);
    bool stopped = e->stop;
    e->stop = true;
    bool started = e->started, failed = e->failed;
    if (!started) /* there is no thread to do it */
        record_failure(e, AGC_ERR_CLOSED, AGC_RANK_NONE, CLOSED_TEXT);
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->mutex);
    if (stopped)
        return;
    if (started) {
        if (failed) /* let it reach the others, or they would blame this rank for being gone; at
                       most linger_ns */
            pthread_join(e->progress_thread, NULL);
        pthread_mutex_lock(&e->watch_mutex);
        e->watch_stop = true;
        pthread_cond_signal(&e->watch_wake);
        pthread_mutex_unlock(&e->watch_mutex);
        pthread_join(e->watch_thread, NULL);
        if (!failed)
            pthread_join(e->progress_thread, NULL);
    }
    for (uint32_t i = 0; i < WINDOW; i++)
        release_all(e, e->slots[i].recv_contribution, 4 * e->nranks);
    release_all(e, e->abort_sends, AGC_NCHANNELS * e->nranks);
    e->transport.destroy(e->transport.ctx);
}

void agc_engine_destroy(struct agc_engine *e)
{
    if (!e)
        return;
    agc_engine_stop(e);
    pthread_cond_destroy(&e->work);
    pthread_cond_destroy(&e->idle);
    pthread_cond_destroy(&e->watch_wake);
    pthread_mutex_destroy(&e->mutex);
    pthread_mutex_destroy(&e->watch_mutex);
    engine_free(e);
}

bool agc_engine_is_own_thread(struct agc_engine *e)
{
    pthread_t me = pthread_self();
    pthread_mutex_lock(&e->mutex);
    bool own =
        e->started && (pthread_equal(me, e->progress_thread) || pthread_equal(me, e->watch_thread));
    pthread_mutex_unlock(&e->mutex);
    return own;
}

/* With e->mutex held. */
static void wait_idle(struct agc_engine *e)
{
    while (e->queue_head != e->queue_tail)
        pthread_cond_wait(&e->idle, &e->mutex);
}

enum agc_status agc_engine_add_param(struct agc_engine *e, uint64_t nelems, uint32_t *param_ret)
{
    enum agc_status status = AGC_OK;
    pthread_mutex_lock(&e->mutex);
    wait_idle(e);
    if (e->nparams == e->params_cap) {
        uint32_t cap = 2 * e->params_cap + 16;
        struct agc_param *grown = (struct agc_param *)engine_alloc(e, sizeof *grown * cap);
        if (grown) {
            memcpy(grown, e->params, sizeof *grown * e->nparams);
            engine_release(e, e->params);
            e->params = grown;
            e->params_cap = cap;
        } else {
            status = AGC_ERR_NOMEM;
        }
    }
    if (status == AGC_OK) {
        *param_ret = e->nparams;
        e->params[e->nparams++] = (struct agc_param){.nelems = nelems};
    }
    pthread_mutex_unlock(&e->mutex);
    return status;
}

static enum agc_status bucket_create(struct agc_engine *e, uint32_t index, uint32_t dtype,
                                     const struct agc_piece_desc *pieces, uint32_t npieces,
                                     const struct agc_lane_desc *lanes, uint32_t nlanes,
                                     struct bucket **bucket_ret)
{
    enum agc_status status = AGC_ERR_NOMEM;
    struct bucket *b = (struct bucket *)engine_alloc(e, sizeof *b);
    if (!b)
        return status;
    *b = (struct bucket){.index = index, .dtype = dtype};
    b->lanes = (struct agc_lane *)engine_alloc(e, sizeof *b->lanes * (nlanes + 1));
    for (uint32_t i = 0; b->lanes && i < nlanes; i++) {
        status = agc_lane_init(&b->lanes[i], &lanes[i], i, dtype, pieces, npieces, e->params,
                               e->nranks, e->rank, &e->config.alloc);
        if (status != AGC_OK)
            break;
        b->nlanes++;
        b->nelems += b->lanes[i].plan.nelems;
    }
    if (b->lanes && nlanes == 0)
        status = AGC_OK;
    if (status != AGC_OK) {
        bucket_destroy(e, b);
        return status;
    }
    *bucket_ret = b;
    return AGC_OK;
}

enum agc_status agc_engine_define_bucket(struct agc_engine *e, uint32_t index, uint32_t dtype,
                                         const struct agc_piece_desc *pieces, uint32_t npieces,
                                         const struct agc_lane_desc *lanes, uint32_t nlanes,
                                         bool sum)
{
    if (index > UINT16_MAX || nlanes > UINT8_MAX ||
        agc_dtype_nbytes(dtype) > e->config.elem_nbytes_max)
        return AGC_ERR_SPEC;
    for (uint32_t i = 0; i < npieces; i++)
        if (pieces[i].param >= e->nparams || pieces[i].lane >= nlanes)
            return AGC_ERR_SPEC;
    pthread_mutex_lock(&e->mutex);
    wait_idle(e);
    struct bucket *b = NULL;
    enum agc_status status = AGC_OK;
    if (index < e->buckets_cap && e->buckets[index])
        status = AGC_ERR_STATE;
    if (status == AGC_OK && index >= e->buckets_cap) {
        uint32_t cap = index + 16;
        struct bucket **grown = (struct bucket **)engine_alloc(e, sizeof(struct bucket *) * cap);
        if (grown) {
            for (uint32_t i = 0; i < cap; i++)
                grown[i] = i < e->buckets_cap ? e->buckets[i] : NULL;
            engine_release(e, e->buckets);
            e->buckets = grown;
            e->buckets_cap = cap;
        } else {
            status = AGC_ERR_NOMEM;
        }
    }
    if (status == AGC_OK)
        status = bucket_create(e, index, dtype, pieces, npieces, lanes, nlanes, &b);
    if (status == AGC_OK) {
        b->sum = sum;
        e->buckets[index] = b;
    }
    pthread_mutex_unlock(&e->mutex);
    return status;
}

void agc_engine_reset_buckets(struct agc_engine *e)
{
    pthread_mutex_lock(&e->mutex);
    wait_idle(e);
    for (uint32_t i = 0; i < e->buckets_cap; i++) {
        struct bucket *b = e->buckets[i];
        if (!b)
            continue;
        for (uint32_t j = 0; j < b->nlanes; j++)
            agc_lane_fold_owner_residual(&b->lanes[j], e->params, e->rank);
        bucket_destroy(e, b);
        e->buckets[i] = NULL;
    }
    pthread_mutex_unlock(&e->mutex);
}

/* With e->mutex held. */
static enum agc_status check_submission(const struct agc_engine *e, const struct agc_submission *s)
{
    const struct bucket *b = s->bucket < e->buckets_cap ? e->buckets[s->bucket] : NULL;
    if (!b)
        return AGC_ERR_STATE;
    if (b->dtype != s->dtype)
        return AGC_ERR_DTYPE;
    return b->nelems == s->nelems ? AGC_OK : AGC_ERR_NELEMS;
}

enum agc_status agc_engine_submit(struct agc_engine *e, const struct agc_submission *s)
{
    pthread_mutex_lock(&e->mutex);
    enum agc_status status = check_submission(e, s);
    if (status == AGC_OK && !e->failed)
        status = start_threads(e);
    while (status == AGC_OK && !e->failed && e->queue_tail - e->queue_head == QUEUE_CAP) {
        if (pthread_equal(pthread_self(), e->progress_thread))
            status = AGC_ERR_STATE; /* nobody else could make room */
        else
            pthread_cond_wait(&e->idle, &e->mutex);
    }
    if (status == AGC_OK && e->failed) {
        struct agc_failure failure = e->failure;
        pthread_mutex_unlock(&e->mutex);
        e->config.callbacks.bucket_done(e->config.callbacks.ctx, s->token, &failure);
        return AGC_OK;
    }
    if (status == AGC_OK) {
        e->queue[e->queue_tail % QUEUE_CAP] =
            (struct job){.bucket = e->buckets[s->bucket],
                         .round = s->round,
                         .nforwards = agc_min_u32(s->nforwards, UINT8_MAX),
                         .absent = s->absent,
                         .data = (uint8_t *)s->data,
                         .token = s->token};
        e->queue_tail++;
        pthread_cond_signal(&e->work);
    }
    pthread_mutex_unlock(&e->mutex);
    return status;
}

void agc_engine_stats(struct agc_engine *e, struct agc_engine_stats *stats_ret)
{
    pthread_mutex_lock(&e->mutex);
    *stats_ret = e->published;
    pthread_mutex_unlock(&e->mutex);
}

bool agc_engine_bucket_stats(struct agc_engine *e, uint32_t index,
                             struct agc_engine_stats *stats_ret)
{
    pthread_mutex_lock(&e->mutex);
    bool defined = index < e->buckets_cap && e->buckets[index];
    if (defined)
        *stats_ret = e->buckets[index]->published;
    pthread_mutex_unlock(&e->mutex);
    return defined;
}

static double sum_of_squares(const float *x, uint64_t nelems)
{
    double sum = 0.0;
    for (uint64_t i = 0; x && i < nelems; i++)
        sum += (double)x[i] * (double)x[i];
    return sum;
}

static double square_root(double x)
{
    /* Newton's method: the core links no libm. Converges quadratically from an overestimate. */
    double r = x > 1.0 ? x : 1.0;
    for (int i = 0; i < 2000 && x > 0.0; i++) {
        double next = 0.5 * (r + x / r);
        if (!(next < r))
            break;
        r = next;
    }
    return x > 0.0 ? r : 0.0;
}

double agc_engine_residual_norm(struct agc_engine *e)
{
    double sum = 0.0;
    pthread_mutex_lock(&e->mutex);
    wait_idle(e);
    for (uint32_t i = 0; i < e->nparams; i++)
        sum += sum_of_squares(e->params[i].residual, e->params[i].nelems);
    for (uint32_t i = 0; i < e->buckets_cap; i++)
        for (uint32_t j = 0; e->buckets[i] && j < e->buckets[i]->nlanes; j++)
            sum += sum_of_squares(e->buckets[i]->lanes[j].owner_residual,
                                  e->buckets[i]->lanes[j].owner_residual_nelems);
    pthread_mutex_unlock(&e->mutex);
    return square_root(sum);
}

enum agc_status agc_engine_residual_get(struct agc_engine *e, uint32_t param, bool owner,
                                        float *dst)
{
    if (param >= e->nparams)
        return AGC_ERR_NELEMS;
    pthread_mutex_lock(&e->mutex);
    wait_idle(e);
    const struct agc_param *p = &e->params[param];
    if (p->residual)
        memcpy(dst, p->residual, sizeof(float) * p->nelems);
    else
        memset(dst, 0, sizeof(float) * p->nelems);
    for (uint32_t i = 0; owner && i < e->buckets_cap; i++)
        for (uint32_t j = 0; e->buckets[i] && j < e->buckets[i]->nlanes; j++)
            agc_lane_add_owner_residual(&e->buckets[i]->lanes[j], param, e->rank, dst);
    pthread_mutex_unlock(&e->mutex);
    return AGC_OK;
}

void agc_engine_residual_clear(struct agc_engine *e)
{
    pthread_mutex_lock(&e->mutex);
    wait_idle(e);
    for (uint32_t i = 0; i < e->nparams; i++)
        if (e->params[i].residual)
            memset(e->params[i].residual, 0, sizeof(float) * e->params[i].nelems);
    for (uint32_t i = 0; i < e->buckets_cap; i++) {
        for (uint32_t j = 0; e->buckets[i] && j < e->buckets[i]->nlanes; j++) {
            struct agc_lane *lane = &e->buckets[i]->lanes[j];
            if (lane->owner_residual)
                memset(lane->owner_residual, 0, sizeof(float) * lane->owner_residual_nelems);
        }
    }
    pthread_mutex_unlock(&e->mutex);
}
