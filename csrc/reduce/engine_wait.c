/* engine_wait.c: waiting for other ranks, and what happens when they do not come.
 *
 * The transport's wait blocks, and gloo offers no other way to learn of a completion. That is no
 * loss: a rank waits only when everything that it could send is posted. A second thread, the watch,
 * sleeps beside it; it cancels a wait that lasts longer than the timeout and reports peers that are
 * late.
 */
#include <stdio.h>

#include "core/header.h"
#include "reduce/engine_state.h"

/* agc_engine_config.linger_ns, unless told otherwise. */
#define LINGER_NS 2000000000ull
/* How much longer than the timeout an indirect wait lasts, at most, so that the rank waited for is
 * the first to blame somebody. */
#define GRACE_NS 5000000000ull

void agc_engine_record_failure(struct agc_engine *e, enum agc_status status, uint32_t rank,
                               const char *text)
{
    if (e->failed)
        return;
    e->failed = true;
    e->failure.status = status;
    e->failure.rank = rank;
    snprintf(e->failure.text, sizeof e->failure.text, "%s", text);
}

enum agc_status agc_engine_fail(struct agc_engine *e, enum agc_status status, uint32_t rank,
                                const char *text)
{
    pthread_mutex_lock(&e->mutex);
    agc_engine_record_failure(e, status, rank, text);
    pthread_mutex_unlock(&e->mutex);
    return status;
}

enum agc_status agc_engine_fail_peer(struct agc_engine *e, uint32_t peer, const struct job *job,
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
        return agc_engine_fail(e, AGC_ERR_TIMEOUT, peer, text);
    }
    e->transport.error_text(e->transport.ctx, reason, sizeof reason);
    snprintf(text, sizeof text, "rank %u is gone in round %u bucket %u%s%s", rank_name(e, peer),
             round, bucket, reason[0] ? ": " : "", reason);
    return agc_engine_fail(e, AGC_ERR_PEER, peer, text);
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

enum agc_status agc_engine_fail_closed(struct agc_engine *e)
{
    return agc_engine_fail(e, AGC_ERR_CLOSED, AGC_RANK_NONE, CLOSED_TEXT);
}

enum agc_status agc_engine_wait(struct agc_engine *e, struct request *r, uint32_t peer,
                                bool indirect, const struct job *job)
{
    if (!r->handle)
        return AGC_OK;
    if (!watch_begin(e, (struct watched){.request = r->handle,
                                         .peer = peer,
                                         .round = job->round,
                                         .bucket = job->bucket->index,
                                         .indirect = indirect}))
        return agc_engine_fail_closed(e);
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
    return w.closing ? agc_engine_fail_closed(e) : agc_engine_fail_peer(e, peer, job, w.timed_out);
}

/* The watch: wakes a few times per second while a wait is on. */
void *agc_engine_watch_main(void *arg)
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
void agc_engine_tell_peers(struct agc_engine *e)
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

/* Waits until the others have been told, for so long as that may take. */
void agc_engine_linger(struct agc_engine *e, const struct agc_failure *failure)
{
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
        if (!r->handle || (peer == failure->rank && failure->status == AGC_ERR_TIMEOUT) ||
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
