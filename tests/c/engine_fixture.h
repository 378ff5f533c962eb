/* engine_fixture.h: engines whose ranks live in one process, over csrc/reduce/loopback.h, and ways
 * to disturb them. */
#ifndef AGC_TEST_ENGINE_FIXTURE_H
#define AGC_TEST_ENGINE_FIXTURE_H

#include <pthread.h>

#include "harness.h"
#include "reduce/engine.h"
#include "reduce/loopback.h"

#define NRANKS_MAX 9
#define NPARAMS_MAX 24
#define NPIECES_MAX 12
#define NLANES_MAX 4
#define NBUCKETS_MAX 8

/* ---- layouts ----------------------------------------------------------------------------- */

struct bucket_layout {
    uint32_t dtype;
    uint32_t npieces;
    struct agc_piece_desc pieces[NPIECES_MAX]; /* {parameter, lane} */
    uint32_t nlanes;
    struct agc_lane_desc lanes[NLANES_MAX];
    bool sum;
};

struct layout {
    const char *name;
    uint32_t nparams;
    uint64_t params[NPARAMS_MAX]; /* elements of each */
    uint32_t nbuckets;
    struct bucket_layout buckets[NBUCKETS_MAX];
};

uint64_t bucket_nelems(const struct layout *l, uint32_t bucket);
uint64_t bucket_nbytes(const struct layout *l, uint32_t bucket);

/* ---- worlds ------------------------------------------------------------------------------ */

/* What became of one submission. */
struct ticket {
    bool done;
    bool failed;
    struct agc_failure failure;
};

struct world;

struct rank {
    struct world *world;
    uint32_t rank;
    struct agc_engine *engine;
    /* The loopback's. The engine has a wrapper that counts and disturbs. */
    struct agc_transport inner;
    _Atomic(uint64_t) ncalls; /* of send, recv and wait */
    uint64_t kill_at_call;    /* dies in front of that call; 0: never */
    uint64_t noise;           /* state of the generator of naps; 0: no naps */
    uint32_t ndestroyed;      /* calls of the transport's destroy */
    uint32_t nlate;           /* calls of peer_late, and what they told last */
    uint32_t late_rank;
    uint32_t late_round;
};

struct world {
    uint32_t nranks;
    const struct layout *layout;
    struct agc_loopback *net;
    pthread_mutex_t mutex; /* over all tickets and the reports of ranks */
    pthread_cond_t changed;
    struct rank ranks[NRANKS_MAX];
};

/* All zero: chunks of 2^16 bytes, a timeout that no test reaches, no disturbance. */
struct world_options {
    uint32_t chunk_log2;
    bool chunk_auto; /* chunk_log2 0, really */
    double timeout_s;
    double late_s;
    double linger_s;   /* 0: 10 ms */
    uint64_t delay_ns; /* messages become visible only after up to that */
    bool noise;        /* ranks nap now and then in front of calls of the transport */
    uint32_t seed;
    const uint32_t *rank_names;
    void (*change_config)(uint32_t rank, struct agc_engine_config *config);
};

/* Creates nranks engines for the layout's parameters and defines its buckets on each. */
struct world *world_create(uint32_t nranks, const struct layout *layout,
                           const struct world_options *options);
void world_define(struct world *w, const struct layout *layout);
/* Also checks that the engines have freed what they allocated and closed their transports once. */
void world_destroy(struct world *w);
void world_kill(struct world *w, uint32_t rank);

/* One forward pass, all ranks present; clears the ticket. */
struct agc_submission submission(const struct rank *r, uint32_t bucket, uint32_t round, void *data,
                                 struct ticket *ticket);
/* Fails the test if the engine refuses. */
void submit(struct rank *r, uint32_t bucket, uint32_t round, void *data, struct ticket *ticket);
/* Returns when the ticket is done. */
void wait_ticket(struct world *w, struct ticket *ticket);
/* Waits, and checks that the exchange went well. */
void wait_ok(struct world *w, struct ticket *ticket);
/* Waits, and checks status, culprit (ANY_RANK: whoever) and a part of the text (NULL: any). */
#define ANY_RANK 0xfffffffeu
void wait_failure(struct world *w, struct ticket *ticket, enum agc_status status, uint32_t rank,
                  const char *part);

/* ---- memory of the engines --------------------------------------------------------------- */

/* Counts; fails number fail_at (from 0; UINT64_MAX: none) and all after it. */
struct counting_alloc {
    pthread_mutex_t mutex;
    uint64_t nallocs;
    uint64_t nlive;
    uint64_t fail_at;
};
extern struct counting_alloc engine_memory;
struct agc_alloc counting_alloc(void);
void counting_alloc_reset(uint64_t fail_at);

/* Calls of malloc, calloc and realloc by anybody in this program (the linker wraps them). */
uint64_t process_nallocs(void);
/* pthread_create fails from the n-th call on (from 0; UINT64_MAX: never). */
void fail_threads_from(uint64_t n);

#endif /* AGC_TEST_ENGINE_FIXTURE_H */
