/* engine.c: the interface, the queue of buckets, and the progress thread, which takes chunks
 * through the steps that pipeline.h orders.
 *
 * Staging: slots, each with room for one chunk's frames. All of it is reserved once, when the
 * engine is created, and touched only as far as frames reach, so that a steady state allocates
 * nothing.
 */
#define _DEFAULT_SOURCE /* madvise */
#include "reduce/engine.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "reduce/engine_state.h"

#define HUGE_PAGE_NBYTES ((size_t)2 << 20)

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
    uint64_t elem_nbytes = agc_dtype_nbytes(job->bucket->dtype), t = now_ns();
    uint64_t nbytes = job->bucket->nelems * elem_nbytes;
    uint64_t dense_nbytes = nbytes * 2 * (e->nranks - 1) / e->nranks;
    b->nrounds++;
    b->nbuckets++;
    b->dense_nbytes += dense_nbytes;
    e->stats.nbuckets++;
    e->stats.dense_nbytes += dense_nbytes;
    struct round_measure *m = &e->measured;
    m->nbytes += nbytes;
    m->encoded_nbytes += job->bucket->encoded_nbytes;
    m->lane_nbytes_max =
        agc_max_u64(m->lane_nbytes_max, job->bucket->lane_nelems_max * elem_nbytes);
    /* Time with an exchange under way: buckets overlap, and between them backward may take its
     * time. */
    m->total_ns += t - agc_max_u64(job->started_ns, e->done_ns);
    e->done_ns = t;
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
                agc_engine_round_begin(e, job->round);
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
            AGC_TRY(agc_engine_finish_sends(e, &e->slots[i], job));
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
        agc_engine_tell_peers(e);
    for (;;) {
        pthread_mutex_lock(&e->mutex);
        bool any = e->queue_head < e->queue_tail;
        pthread_mutex_unlock(&e->mutex);
        if (!any)
            break;
        job_finish(e, &failure);
    }
    if (tell)
        agc_engine_linger(e, &failure);
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
            agc_engine_fail_closed(e);
            break;
        }
        feed(e);
        enum agc_status status = finish_jobs(e);
        if (status != AGC_OK)
            break;
        enum agc_pipeline_action action = agc_pipeline_next(&e->pipeline);
        switch (action) {
        case AGC_PIPELINE_OPEN:
            status = agc_engine_open(e);
            break;
        case AGC_PIPELINE_REDUCE:
            status = agc_engine_reduce(e);
            break;
        case AGC_PIPELINE_CLOSE:
            status = agc_engine_close(e);
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
    uint32_t nslots = e->config.chunk_log2 ? agc_engine_window(e->config.chunk_log2) : WINDOW;
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
    agc_pipeline_init(&e->pipeline, agc_engine_window(e->chunk_log2), LAG);
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
    for (uint32_t i = 0; e->params && i < e->nparams; i++) {
        agc_residual_destroy(&e->params[i].residual, &e->config.alloc);
        engine_release(e, e->params[i].velocity);
    }
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
    if (pthread_create(&e->watch_thread, NULL, agc_engine_watch_main, e) != 0)
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
        agc_engine_record_failure(e, AGC_ERR_CLOSED, AGC_RANK_NONE, CLOSED_TEXT);
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
    for (uint32_t i = 0; i < npieces; i++)
        b->nelems += e->params[pieces[i].param].nelems;
    b->lanes = (struct agc_lane *)engine_alloc(e, sizeof *b->lanes * (nlanes + 1));
    for (uint32_t i = 0; b->lanes && i < nlanes; i++) {
        status = agc_lane_init(&b->lanes[i], &lanes[i], i, dtype, pieces, npieces, e->params,
                               e->nranks, e->rank, &e->config.alloc);
        if (status != AGC_OK)
            break;
        const struct agc_lane_plan *plan = &b->lanes[i].plan;
        b->nlanes++;
        b->lane_nelems_max = agc_max_u64(b->lane_nelems_max, plan->nelems);
        if (plan->nelems > 0)
            b->encoded_nbytes +=
                agc_tiles_nbytes(&plan->spec, dtype, plan->nelems, plan->tile_nelems);
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
            agc_lane_fold_owner_residual(&b->lanes[j], agc_kernels_get(), e->params, e->rank);
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
    const struct agc_kernels *k = agc_kernels_get();
    double sum = 0.0;
    pthread_mutex_lock(&e->mutex);
    wait_idle(e);
    for (uint32_t i = 0; i < e->nparams; i++)
        sum += agc_residual_sum_of_squares(&e->params[i].residual, k);
    for (uint32_t i = 0; i < e->buckets_cap; i++)
        for (uint32_t j = 0; e->buckets[i] && j < e->buckets[i]->nlanes; j++)
            sum += agc_residual_sum_of_squares(&e->buckets[i]->lanes[j].owner_residual, k);
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
    const struct agc_kernels *k = agc_kernels_get();
    const struct agc_param *p = &e->params[param];
    memset(dst, 0, sizeof(float) * p->nelems);
    for (uint64_t first = 0; p->residual.data && first < p->nelems; first += AGC_TILE_NELEMS_MAX)
        agc_residual_load(&p->residual, k, first,
                          (uint32_t)agc_min_u64(AGC_TILE_NELEMS_MAX, p->nelems - first),
                          dst + first);
    for (uint32_t i = 0; owner && i < e->buckets_cap; i++)
        for (uint32_t j = 0; e->buckets[i] && j < e->buckets[i]->nlanes; j++)
            agc_lane_add_owner_residual(&e->buckets[i]->lanes[j], k, param, e->rank, dst);
    pthread_mutex_unlock(&e->mutex);
    return AGC_OK;
}

void agc_engine_residual_clear(struct agc_engine *e)
{
    pthread_mutex_lock(&e->mutex);
    wait_idle(e);
    for (uint32_t i = 0; i < e->nparams; i++) {
        struct agc_param *p = &e->params[i];
        agc_residual_clear(&p->residual);
        if (p->velocity)
            memset(p->velocity, 0, sizeof(float) * p->nelems);
    }
    for (uint32_t i = 0; i < e->buckets_cap; i++)
        for (uint32_t j = 0; e->buckets[i] && j < e->buckets[i]->nlanes; j++)
            agc_residual_clear(&e->buckets[i]->lanes[j].owner_residual);
    pthread_mutex_unlock(&e->mutex);
}
