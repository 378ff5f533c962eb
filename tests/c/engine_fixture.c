/* engine_fixture.c: engines whose ranks live in one process. */
#define _POSIX_C_SOURCE 200809L
#include "engine_fixture.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- layouts ----------------------------------------------------------------------------- */

uint64_t bucket_nelems(const struct layout *l, uint32_t bucket)
{
    uint64_t nelems = 0;
    for (uint32_t i = 0; i < l->buckets[bucket].npieces; i++)
        nelems += l->params[l->buckets[bucket].pieces[i].param];
    return nelems;
}

uint64_t bucket_nbytes(const struct layout *l, uint32_t bucket)
{
    return bucket_nelems(l, bucket) * agc_dtype_nbytes(l->buckets[bucket].dtype);
}

/* ---- the disturbed transport ------------------------------------------------------------- */

static void before_call(struct rank *r)
{
    if (++r->ncalls == r->kill_at_call)
        agc_loopback_kill(r->world->net, r->rank);
    if (!r->noise)
        return;
    r->noise = r->noise * 6364136223846793005u + 1442695040888963407u;
    if ((r->noise >> 33) % 8 == 0) {
        struct timespec nap = {0, (long)((r->noise >> 40) % 300000)};
        nanosleep(&nap, NULL);
    }
}

static enum agc_status test_send(void *ctx, uint32_t peer, uint32_t channel, const void *buf,
                                 uint64_t nbytes, void **request_ret)
{
    struct rank *r = (struct rank *)ctx;
    before_call(r);
    return r->inner.send(r->inner.ctx, peer, channel, buf, nbytes, request_ret);
}

static enum agc_status test_recv(void *ctx, uint32_t peer, uint32_t channel, void *buf,
                                 uint64_t nbytes, void **request_ret)
{
    struct rank *r = (struct rank *)ctx;
    before_call(r);
    return r->inner.recv(r->inner.ctx, peer, channel, buf, nbytes, request_ret);
}

static enum agc_status test_wait(void *ctx, void *request)
{
    struct rank *r = (struct rank *)ctx;
    before_call(r);
    return r->inner.wait(r->inner.ctx, request);
}

static void test_cancel(void *ctx, void *request)
{
    struct rank *r = (struct rank *)ctx;
    r->inner.cancel(r->inner.ctx, request);
}

static void test_release(void *ctx, void *request)
{
    struct rank *r = (struct rank *)ctx;
    r->inner.release(r->inner.ctx, request);
}

static void test_error_text(void *ctx, char *dst, size_t dst_cap_nbytes)
{
    struct rank *r = (struct rank *)ctx;
    r->inner.error_text(r->inner.ctx, dst, dst_cap_nbytes);
}

static void test_destroy(void *ctx)
{
    struct rank *r = (struct rank *)ctx;
    r->ndestroyed++;
    r->inner.destroy(r->inner.ctx);
}

/* ---- callbacks --------------------------------------------------------------------------- */

static void on_bucket_done(void *ctx, void *token, const struct agc_failure *failure)
{
    struct rank *r = (struct rank *)ctx;
    struct ticket *t = (struct ticket *)token;
    pthread_mutex_lock(&r->world->mutex);
    t->done = true;
    t->failed = failure != NULL;
    if (failure)
        t->failure = *failure;
    pthread_cond_broadcast(&r->world->changed);
    pthread_mutex_unlock(&r->world->mutex);
}

static void on_peer_late(void *ctx, uint32_t rank, uint32_t round, uint32_t bucket, double seconds)
{
    struct rank *r = (struct rank *)ctx;
    (void)bucket;
    (void)seconds;
    pthread_mutex_lock(&r->world->mutex);
    r->nlate++;
    r->late_rank = rank;
    r->late_round = round;
    pthread_cond_broadcast(&r->world->changed);
    pthread_mutex_unlock(&r->world->mutex);
}

/* ---- worlds ------------------------------------------------------------------------------ */

struct world *world_create(uint32_t nranks, const struct layout *layout,
                           const struct world_options *options)
{
    struct world *w = (struct world *)test_alloc(sizeof *w);
    memset(w, 0, sizeof *w);
    counting_alloc_reset(UINT64_MAX);
    w->nranks = nranks;
    w->net = agc_loopback_create(nranks);
    CHECK(w->net != NULL);
    if (options->delay_ns)
        agc_loopback_set_delay(w->net, options->delay_ns, (uint32_t)random_u64());
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->changed, NULL);
    for (uint32_t i = 0; i < nranks; i++) {
        struct rank *r = &w->ranks[i];
        *r = (struct rank){.world = w, .rank = i, .inner = agc_loopback_transport(w->net, i)};
        r->noise = options->noise ? random_u64() | 1 : 0;
        struct agc_transport transport = {
            .ctx = r,
            .rank = i,
            .nranks = nranks,
            .send = test_send,
            .recv = test_recv,
            .wait = test_wait,
            .cancel = test_cancel,
            .release = test_release,
            .error_text = test_error_text,
            .destroy = test_destroy,
        };
        double timeout_s = options->timeout_s > 0 ? options->timeout_s : 1000.0;
        double late_s = options->late_s > 0 ? options->late_s : 1000.0;
        struct agc_engine_config config = {
            .stream = 0x1234567890abcdefu,
            .seed = options->seed,
            .chunk_log2 = options->chunk_log2 || options->chunk_auto ? options->chunk_log2 : 16,
            .elem_nbytes_max = 8,
            .timeout_ns = (uint64_t)(timeout_s * 1e9),
            .late_ns = (uint64_t)(late_s * 1e9),
            .linger_ns = options->linger_s > 0 ? (uint64_t)(options->linger_s * 1e9) : 10000000,
            .rank_names = options->rank_names,
            .callbacks = {r, on_bucket_done, on_peer_late},
            .alloc = counting_alloc(),
        };
        if (options->change_config)
            options->change_config(i, &config);
        CHECK_OK(
            agc_engine_create(&config, &transport, layout->params, layout->nparams, &r->engine));
    }
    world_define(w, layout);
    return w;
}

void world_define(struct world *w, const struct layout *layout)
{
    w->layout = layout;
    for (uint32_t i = 0; i < w->nranks; i++) {
        for (uint32_t b = 0; b < layout->nbuckets; b++) {
            const struct bucket_layout *l = &layout->buckets[b];
            CHECK_OK(agc_engine_define_bucket(w->ranks[i].engine, b, l->dtype, l->pieces,
                                              l->npieces, l->lanes, l->nlanes, l->sum));
        }
    }
}

void world_destroy(struct world *w)
{
    for (uint32_t i = 0; i < w->nranks; i++) {
        agc_engine_destroy(w->ranks[i].engine); /* NULL: the test has done it */
        CHECK_EQ(w->ranks[i].ndestroyed, 1);
    }
    CHECK_EQ(engine_memory.nlive, 0);
    agc_loopback_destroy(w->net);
    pthread_mutex_destroy(&w->mutex);
    pthread_cond_destroy(&w->changed);
    free(w);
}

void world_kill(struct world *w, uint32_t rank)
{
    agc_loopback_kill(w->net, rank);
}

struct agc_submission submission(const struct rank *r, uint32_t bucket, uint32_t round, void *data,
                                 struct ticket *ticket)
{
    *ticket = (struct ticket){.done = false};
    const struct layout *l = r->world->layout;
    return (struct agc_submission){.bucket = bucket,
                                   .round = round,
                                   .nforwards = 1,
                                   .data = data,
                                   .dtype = l->buckets[bucket].dtype,
                                   .nelems = bucket_nelems(l, bucket),
                                   .token = ticket};
}

void submit(struct rank *r, uint32_t bucket, uint32_t round, void *data, struct ticket *ticket)
{
    const struct agc_submission s = submission(r, bucket, round, data, ticket);
    CHECK_OK(agc_engine_submit(r->engine, &s));
}

void wait_ticket(struct world *w, struct ticket *ticket)
{
    pthread_mutex_lock(&w->mutex);
    while (!ticket->done)
        pthread_cond_wait(&w->changed, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
}

void wait_ok(struct world *w, struct ticket *ticket)
{
    wait_ticket(w, ticket);
    if (ticket->failed)
        FAIL("%s: %s", agc_status_name(ticket->failure.status), ticket->failure.text);
}

void wait_failure(struct world *w, struct ticket *ticket, enum agc_status status, uint32_t rank,
                  const char *part)
{
    wait_ticket(w, ticket);
    if (!ticket->failed)
        FAIL("the exchange went well, expected %s", agc_status_name(status));
    const struct agc_failure *f = &ticket->failure;
    if (f->status != status || (rank != ANY_RANK && f->rank != rank))
        FAIL("%s rank %u: \"%s\", expected %s rank %u", agc_status_name(f->status), f->rank,
             f->text, agc_status_name(status), rank);
    if (part)
        CHECK_TEXT(f->text, part);
}

/* ---- memory ------------------------------------------------------------------------------ */

struct counting_alloc engine_memory = {.mutex = PTHREAD_MUTEX_INITIALIZER, .fail_at = UINT64_MAX};

static void *counting_alloc_get(void *ctx, size_t nbytes)
{
    struct counting_alloc *a = (struct counting_alloc *)ctx;
    pthread_mutex_lock(&a->mutex);
    void *p = a->nallocs++ >= a->fail_at ? NULL : malloc(nbytes);
    if (p) {
        a->nlive++;
        /* Old contents must not matter. All of it only where it is small: staging is large and
         * touched as far as it is used. */
        memset(p, 0xcc, nbytes < 1u << 20 ? nbytes : 1u << 20);
    }
    pthread_mutex_unlock(&a->mutex);
    return p;
}

static void counting_alloc_release(void *ctx, void *p)
{
    struct counting_alloc *a = (struct counting_alloc *)ctx;
    pthread_mutex_lock(&a->mutex);
    if (p)
        a->nlive--;
    else
        a->nlive =
            UINT64_MAX / 2; /* what was never allocated must not be released: shows as a leak */
    free(p);
    pthread_mutex_unlock(&a->mutex);
}

struct agc_alloc counting_alloc(void)
{
    return (struct agc_alloc){counting_alloc_get, counting_alloc_release, &engine_memory};
}

void counting_alloc_reset(uint64_t fail_at)
{
    pthread_mutex_lock(&engine_memory.mutex);
    engine_memory.nallocs = 0;
    engine_memory.nlive = 0;
    engine_memory.fail_at = fail_at;
    pthread_mutex_unlock(&engine_memory.mutex);
}

/* ---- what the linker wraps --------------------------------------------------------------- */

typedef void *thread_main(void *arg);

void *__real_malloc(size_t nbytes);
void *__real_calloc(size_t n, size_t nbytes);
void *__real_realloc(void *p, size_t nbytes);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, thread_main *start,
                          void *arg);
void *__wrap_malloc(size_t nbytes);
void *__wrap_calloc(size_t n, size_t nbytes);
void *__wrap_realloc(void *p, size_t nbytes);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, thread_main *start,
                          void *arg);

static _Atomic(uint64_t) nallocs_of_process;
static _Atomic(uint64_t) nthreads_left = UINT64_MAX;

uint64_t process_nallocs(void)
{
    return atomic_load(&nallocs_of_process);
}

void fail_threads_from(uint64_t n)
{
    atomic_store(&nthreads_left, n);
}

void *__wrap_malloc(size_t nbytes)
{
    atomic_fetch_add(&nallocs_of_process, 1);
    return __real_malloc(nbytes);
}

void *__wrap_calloc(size_t n, size_t nbytes)
{
    atomic_fetch_add(&nallocs_of_process, 1);
    return __real_calloc(n, nbytes);
}

void *__wrap_realloc(void *p, size_t nbytes)
{
    atomic_fetch_add(&nallocs_of_process, 1);
    return __real_realloc(p, nbytes);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, thread_main *start,
                          void *arg)
{
    if (atomic_load(&nthreads_left) == 0)
        return 11; /* EAGAIN */
    if (atomic_load(&nthreads_left) != UINT64_MAX)
        atomic_fetch_sub(&nthreads_left, 1);
    return __real_pthread_create(thread, attributes, start, arg);
}
