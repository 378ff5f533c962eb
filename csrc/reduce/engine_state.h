/* engine_state.h: what the engine's files share. engine.c has the interface, the queue and the
 * progress thread; engine_steps.c takes a chunk through its three steps; engine_wait.c waits for
 * other ranks, and fails.
 */
#ifndef AGC_ENGINE_STATE_H
#define AGC_ENGINE_STATE_H

#include <pthread.h>
#include <time.h>

#include "core/common.h"
#include "reduce/engine.h"
#include "reduce/pipeline.h"
#include "reduce/tune.h"

#define WINDOW 8 /* slots, and open chunks at most */
#define LAG 2
#define QUEUE_CAP 64
#define CLOSED_TEXT "the handle was closed while an exchange was under way"

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
    uint64_t encoded_nbytes;
    uint64_t lane_nelems_max;
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
    uint64_t lane_nbytes_max; /* dense, of the largest */
    uint64_t codec_ns;
    uint64_t total_ns;  /* with an exchange under way */
    uint64_t period_ns; /* to the next round */
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
    struct round_measure tuned; /* the kind of round that tune is about; all 0: not yet */
    uint32_t nothers;           /* rounds of other kinds since the last of that kind */
    bool tune_period;           /* a cost is the period, else the time with an exchange under way */
    struct round_measure measured; /* since the round began */
    uint64_t round_began_ns;
    uint64_t done_ns; /* when the last bucket was done */
    uint8_t abort_frame[AGC_WIRE_HEADER_NBYTES];
};

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint32_t rank_name(const struct agc_engine *e, uint32_t rank)
{
    return rank < e->nranks ? e->rank_names[rank] : rank;
}

/* ---- engine_wait.c ---- */

/* Record the first failure and return its status; agc_engine_record_failure is called with e->mutex
 * held. */
void agc_engine_record_failure(struct agc_engine *e, enum agc_status status, uint32_t rank,
                               const char *text);
enum agc_status agc_engine_fail(struct agc_engine *e, enum agc_status status, uint32_t rank,
                                const char *text);
enum agc_status agc_engine_fail_peer(struct agc_engine *e, uint32_t peer, const struct job *job,
                                     bool timed_out);
enum agc_status agc_engine_fail_closed(struct agc_engine *e);

/* Waits for a request, if there is one, under the eyes of the watch, and releases it. */
enum agc_status agc_engine_wait(struct agc_engine *e, struct request *r, uint32_t peer,
                                bool indirect, const struct job *job);
void *agc_engine_watch_main(void *engine);

/* After a failure: tell the others, then wait until they know. */
void agc_engine_tell_peers(struct agc_engine *e);
void agc_engine_linger(struct agc_engine *e, const struct agc_failure *failure);

/* ---- engine_steps.c ---- */

/* Chunks of 2^chunk_log2 bytes that may be open at once, at most. */
uint32_t agc_engine_window(uint32_t chunk_log2);
void agc_engine_round_begin(struct agc_engine *e, uint32_t round);

/* The actions of pipeline.h. */
enum agc_status agc_engine_open(struct agc_engine *e);
enum agc_status agc_engine_reduce(struct agc_engine *e);
enum agc_status agc_engine_close(struct agc_engine *e);

/* The sends of a slot's last chunk must have left before its buffers are written again. */
enum agc_status agc_engine_finish_sends(struct agc_engine *e, struct slot *s,
                                        const struct job *job);

#endif /* AGC_ENGINE_STATE_H */
