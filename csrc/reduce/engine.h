/* engine.h: averages buckets over ranks: one progress thread per engine.
 *
 * Life cycle: agc_engine_create, agc_engine_define_bucket for each bucket, then round after round
 * agc_engine_submit; agc_engine_destroy. Buckets are exchanged in the order of submission, which
 * must be the same on all ranks.
 *
 * Failure: the first failure is final. It is told to the other ranks, every bucket under way is
 * handed back with it, and so is every later one. A peer that does not answer ends a wait after
 * timeout_ns. One that may itself be waiting for the rank that is to blame, as a tile's owner may,
 * gets a quarter more (at most 5 s), so that its report comes first; nothing waits longer.
 */
#ifndef AGC_ENGINE_H
#define AGC_ENGINE_H

#include "reduce/lane.h"
#include "reduce/transport.h"

#define AGC_ENGINE_TEXT_NBYTES 512

struct agc_failure {
    enum agc_status status;
    uint32_t rank; /* of the group: whom the failure is about; AGC_RANK_NONE if nobody */
    char text[AGC_ENGINE_TEXT_NBYTES];
};
#define AGC_RANK_NONE 0xffffffffu

struct agc_engine_callbacks {
    void *ctx;
    /* A submitted bucket holds the mean (failure NULL), or was given up. Called on the progress
     * thread, or inside submit. The bucket's memory is not touched afterwards. */
    void (*bucket_done)(void *ctx, void *token, const struct agc_failure *failure);
    /* A peer has let this rank wait for its contribution for longer than late_ns; once per peer.
     * May be NULL. */
    void (*peer_late)(void *ctx, uint32_t rank, uint32_t round, uint32_t bucket, double seconds);
};

struct agc_engine_config {
    uint64_t stream; /* what tells this engine's frames from another's */
    uint32_t seed;
    uint32_t chunk_log2;      /* 0: measured */
    uint32_t elem_nbytes_max; /* of any bucket */
    uint64_t timeout_ns;
    uint64_t late_ns;
    uint64_t linger_ns; /* after a failure: how long destroy may wait for the news of it to reach
                           the others; 0: 2 s */
    const uint32_t *rank_names; /* nranks numbers by which messages call the ranks; copied; NULL:
                                   their rank in the group */
    struct agc_engine_callbacks callbacks;
    struct agc_alloc alloc; /* all zero: malloc and free */
};

struct agc_engine_stats {
    uint64_t nrounds;
    uint64_t nbuckets;
    uint64_t dense_nbytes; /* what a dense ring would have sent from this rank */
    uint64_t wire_nbytes;  /* handed to the transport to send */
    uint64_t encode_ns;
    uint64_t wait_ns;
    uint64_t decode_ns;
    uint32_t chunk_log2;  /* in use now */
    double residual_norm; /* L2 norm of all that this rank still owes, the owner's part included */
};

struct agc_engine;

/* Takes over the transport, on failure too. params_nelems: elements of each parameter.
 * AGC_ERR_NOMEM, AGC_ERR_THREAD, AGC_ERR_SPEC. */
AGC_NODISCARD enum agc_status agc_engine_create(const struct agc_engine_config *config,
                                                const struct agc_transport *transport,
                                                const uint64_t *params_nelems, uint32_t nparams,
                                                struct agc_engine **engine_ret);

/* Stops the threads and closes the connections. Buckets under way, and later ones, are handed back
 * as AGC_ERR_CLOSED; calls that wait in other threads return. Idempotent. */
void agc_engine_stop(struct agc_engine *engine);

/* Stops, if that was not done, and frees everything. No call may be under way. */
void agc_engine_destroy(struct agc_engine *engine);

/* One more parameter, numbered after those there are. Waits until nothing is under way.
 * AGC_ERR_NOMEM. */
AGC_NODISCARD enum agc_status agc_engine_add_param(struct agc_engine *engine, uint64_t nelems,
                                                   uint32_t *param_ret);

/* Describes bucket `index` (at most 65535): its parameters in order of memory and its lanes. Waits
 * until nothing is under way. sum: give the sum over ranks, not the mean. */
AGC_NODISCARD enum agc_status
agc_engine_define_bucket(struct agc_engine *engine, uint32_t index, uint32_t dtype,
                         const struct agc_piece_desc *pieces, uint32_t npieces,
                         const struct agc_lane_desc *lanes, uint32_t nlanes, bool sum);

/* Forgets all buckets, moving what owners still owe to the parameters. Waits until nothing is under
 * way. */
void agc_engine_reset_buckets(struct agc_engine *engine);

/* A bucket to be exchanged in place. */
struct agc_submission {
    uint32_t bucket;
    uint32_t round;     /* the same on all ranks, and larger than any before whenever it changes */
    uint32_t nforwards; /* see struct agc_frame */
    bool absent; /* this rank does not count in the mean; its data, which should be zeros, is taken
                    all the same */
    void *data;  /* stays the engine's until bucket_done(token) */
    uint32_t dtype; /* of data; these must be what the bucket was defined with */
    uint64_t nelems;
    void *token;
};

/* AGC_ERR_STATE for a bucket that was not defined, AGC_ERR_DTYPE, AGC_ERR_NELEMS, AGC_ERR_THREAD.
 */
AGC_NODISCARD enum agc_status agc_engine_submit(struct agc_engine *engine,
                                                const struct agc_submission *submission);

/* True inside of this engine's callbacks. There, functions that wait until nothing is under way
 * would wait for themselves, and agc_engine_stop and agc_engine_destroy must not be called. */
bool agc_engine_is_own_thread(struct agc_engine *engine);

/* Totals, and one bucket's part of them (false: not defined). Neither waits. agc_engine_stats
 * leaves residual_norm at 0. */
void agc_engine_stats(struct agc_engine *engine, struct agc_engine_stats *stats_ret);
bool agc_engine_bucket_stats(struct agc_engine *engine, uint32_t index,
                             struct agc_engine_stats *stats_ret);

/* These wait until nothing is under way. Copying out gives zeros for a parameter that owes nothing;
 * owner: the owner's part times nranks is added. Clearing forgets what is owed, the owner's part
 * included. */
double agc_engine_residual_norm(struct agc_engine *engine);
AGC_NODISCARD enum agc_status agc_engine_residual_get(struct agc_engine *engine, uint32_t param,
                                                      bool owner, float *dst);
void agc_engine_residual_clear(struct agc_engine *engine);

#endif /* AGC_ENGINE_H */
