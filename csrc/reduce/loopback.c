/* loopback.c: a transport whose ranks are threads. One lock for the whole network: it is for tests,
 * where clarity beats speed. */
#define _POSIX_C_SOURCE 200809L
#include "reduce/loopback.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "core/common.h"

/* One operation. Sends and receives of a pair and channel meet in order, whichever comes first; as
 * in gloo, a message is copied out of the sender's buffer only once the receiver has posted its
 * own. */
struct operation {
    struct operation *next; /* in the queue that it waits in */
    void *buf;
    const void *src;
    uint64_t nbytes;
    uint32_t peer;
    uint64_t ready_ns; /* when it becomes visible */
    bool done;
    bool cancelled;
    bool queued;
    bool released; /* nobody will wait for it any more; freed when it leaves the queue */
    enum agc_status status;
};

struct operations {
    struct operation *head, *tail;
};

struct endpoint {
    struct agc_loopback *net;
    uint32_t rank;
};

struct agc_loopback {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint32_t nranks;
    uint64_t delay_max_ns;
    uint64_t delay_state;
    bool *dead;
    struct endpoint *endpoints;
    struct operations *sends; /* [from][to][channel] */
    struct operations *recvs;
    uint64_t nallocs;
};

static uint64_t loopback_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static size_t queue_at(const struct agc_loopback *net, uint32_t from, uint32_t to, uint32_t channel)
{
    return ((size_t)from * net->nranks + to) * AGC_NCHANNELS + (channel - AGC_CHANNEL_CONTRIBUTION);
}

static void queue_push(struct operations *q, struct operation *op)
{
    op->next = NULL;
    op->queued = true;
    if (q->tail)
        q->tail->next = op;
    else
        q->head = op;
    q->tail = op;
}

static void queue_pop(struct operations *q)
{
    struct operation *op = q->head;
    q->head = op->next;
    if (!q->head)
        q->tail = NULL;
    op->queued = false;
    if (op->released)
        free(op);
}

/* Lets sends meet receives. */
static void match(struct operations *sends, struct operations *recvs)
{
    while (sends->head && recvs->head) {
        struct operation *send = sends->head, *recv = recvs->head;
        assert(send->nbytes <= recv->nbytes);
        if (!recv->released)
            memcpy(recv->buf, send->src, send->nbytes);
        recv->ready_ns = send->ready_ns;
        send->done = recv->done = true;
        queue_pop(sends);
        queue_pop(recvs);
    }
}

static enum agc_status loopback_post(struct endpoint *from_here, uint32_t peer, uint32_t channel,
                                     const void *src, void *buf, uint64_t nbytes,
                                     void **request_ret)
{
    struct agc_loopback *net = from_here->net;
    uint32_t me = from_here->rank;
    bool is_send = src != NULL;
    struct operation *op = (struct operation *)calloc(1, sizeof *op);
    if (!op)
        return AGC_ERR_NOMEM;
    *op = (struct operation){.src = src, .buf = buf, .nbytes = nbytes, .peer = peer};
    pthread_mutex_lock(&net->mutex);
    net->nallocs++;
    if (net->dead[me] || net->dead[peer]) {
        pthread_mutex_unlock(&net->mutex);
        free(op);
        return AGC_ERR_PEER;
    }
    if (net->delay_max_ns) {
        net->delay_state = net->delay_state * 6364136223846793005u + 1442695040888963407u;
        op->ready_ns = loopback_now_ns() + (net->delay_state >> 33) % net->delay_max_ns;
    }
    size_t at = is_send ? queue_at(net, me, peer, channel) : queue_at(net, peer, me, channel);
    queue_push(is_send ? &net->sends[at] : &net->recvs[at], op);
    match(&net->sends[at], &net->recvs[at]);
    pthread_cond_broadcast(&net->changed);
    pthread_mutex_unlock(&net->mutex);
    *request_ret = op;
    return AGC_OK;
}

static enum agc_status loopback_send(void *ctx, uint32_t peer, uint32_t channel, const void *buf,
                                     uint64_t nbytes, void **request_ret)
{
    return loopback_post((struct endpoint *)ctx, peer, channel, buf, NULL, nbytes, request_ret);
}

static enum agc_status loopback_recv(void *ctx, uint32_t peer, uint32_t channel, void *buf,
                                     uint64_t nbytes, void **request_ret)
{
    return loopback_post((struct endpoint *)ctx, peer, channel, NULL, buf, nbytes, request_ret);
}

static enum agc_status loopback_wait(void *ctx, void *request)
{
    struct endpoint *here = (struct endpoint *)ctx;
    struct agc_loopback *net = here->net;
    struct operation *op = (struct operation *)request;
    enum agc_status status = AGC_OK;
    pthread_mutex_lock(&net->mutex);
    for (;;) {
        uint64_t now = loopback_now_ns();
        if (op->done && op->ready_ns <= now)
            break;
        if (op->cancelled) {
            status = AGC_ERR_CLOSED;
            break;
        }
        if (!op->done && (net->dead[op->peer] || net->dead[here->rank])) {
            status = AGC_ERR_PEER;
            break;
        }
        if (op->done) {
            struct timespec nap = {0, (long)(op->ready_ns - now) % 1000000000};
            pthread_mutex_unlock(&net->mutex);
            nanosleep(&nap, NULL);
            pthread_mutex_lock(&net->mutex);
        } else {
            pthread_cond_wait(&net->changed, &net->mutex);
        }
    }
    pthread_mutex_unlock(&net->mutex);
    return status;
}

static void loopback_cancel(void *ctx, void *request)
{
    struct agc_loopback *net = ((struct endpoint *)ctx)->net;
    pthread_mutex_lock(&net->mutex);
    ((struct operation *)request)->cancelled = true;
    pthread_cond_broadcast(&net->changed);
    pthread_mutex_unlock(&net->mutex);
}

static void loopback_release(void *ctx, void *request)
{
    struct agc_loopback *net = ((struct endpoint *)ctx)->net;
    struct operation *op = (struct operation *)request;
    pthread_mutex_lock(&net->mutex);
    if (op->queued)
        op->released = true;
    else
        free(op);
    pthread_mutex_unlock(&net->mutex);
}

static void loopback_error_text(void *ctx, char *dst, size_t dst_cap_nbytes)
{
    (void)ctx;
    snprintf(dst, dst_cap_nbytes, "loopback connection closed");
}

static void loopback_close(void *ctx)
{
    struct endpoint *here = (struct endpoint *)ctx;
    agc_loopback_kill(here->net, here->rank);
}

struct agc_loopback *agc_loopback_create(uint32_t nranks)
{
    struct agc_loopback *net = (struct agc_loopback *)calloc(1, sizeof *net);
    if (!net)
        return NULL;
    size_t nqueues = (size_t)nranks * nranks * AGC_NCHANNELS;
    net->nranks = nranks;
    net->dead = (bool *)calloc(nranks, sizeof *net->dead);
    net->endpoints = (struct endpoint *)calloc(nranks, sizeof *net->endpoints);
    net->sends = (struct operations *)calloc(nqueues, sizeof *net->sends);
    net->recvs = (struct operations *)calloc(nqueues, sizeof *net->recvs);
    pthread_mutex_init(&net->mutex, NULL);
    pthread_cond_init(&net->changed, NULL);
    if (!net->dead || !net->endpoints || !net->sends || !net->recvs) {
        agc_loopback_destroy(net);
        return NULL;
    }
    for (uint32_t i = 0; i < nranks; i++)
        net->endpoints[i] = (struct endpoint){net, i};
    return net;
}

void agc_loopback_destroy(struct agc_loopback *net)
{
    for (size_t i = 0;
         net->sends && net->recvs && i < (size_t)net->nranks * net->nranks * AGC_NCHANNELS; i++) {
        while (net->sends[i].head)
            queue_pop(&net->sends[i]);
        while (net->recvs[i].head)
            queue_pop(&net->recvs[i]);
    }
    pthread_mutex_destroy(&net->mutex);
    pthread_cond_destroy(&net->changed);
    free(net->dead);
    free(net->endpoints);
    free(net->sends);
    free(net->recvs);
    free(net);
}

struct agc_transport agc_loopback_transport(struct agc_loopback *net, uint32_t rank)
{
    return (struct agc_transport){
        .ctx = &net->endpoints[rank],
        .rank = rank,
        .nranks = net->nranks,
        .send = loopback_send,
        .recv = loopback_recv,
        .wait = loopback_wait,
        .cancel = loopback_cancel,
        .release = loopback_release,
        .error_text = loopback_error_text,
        .destroy = loopback_close,
    };
}

void agc_loopback_set_delay(struct agc_loopback *net, uint64_t max_ns, uint32_t seed)
{
    pthread_mutex_lock(&net->mutex);
    net->delay_max_ns = max_ns;
    net->delay_state = seed;
    pthread_mutex_unlock(&net->mutex);
}

void agc_loopback_kill(struct agc_loopback *net, uint32_t rank)
{
    pthread_mutex_lock(&net->mutex);
    net->dead[rank] = true;
    pthread_cond_broadcast(&net->changed);
    pthread_mutex_unlock(&net->mutex);
}

uint64_t agc_loopback_nallocs(const struct agc_loopback *net)
{
    return net->nallocs;
}
