/* transport.h: how the engine reaches other ranks. The caller supplies the functions; the core has
 * no network stack.
 *
 * Messages between a pair of ranks on one channel arrive in the order of their sending, and the
 * k-th message meets the k-th receive. A message may be shorter than the receive's capacity, never
 * longer.
 *
 * Threads: send, recv, wait and release are called from one thread at a time. cancel may be called
 * from another thread while wait blocks on the same request, and makes that wait return
 * AGC_ERR_CLOSED.
 */
#ifndef AGC_TRANSPORT_H
#define AGC_TRANSPORT_H

#include "agentcomm.h"

/* Contributions and results travel on channels of their own, since their order relative to each
 * other depends on timing. */
enum {
    AGC_CHANNEL_CONTRIBUTION = 1,
    AGC_CHANNEL_RESULT = 2,
    AGC_NCHANNELS = 2,
};

struct agc_transport {
    void *ctx;
    uint32_t rank;
    uint32_t nranks;

    /* Start sending nbytes from buf, or receiving at most nbytes into buf. Neither blocks. buf must
     * live until wait has returned AGC_OK for the request, or else until destroy. AGC_ERR_PEER if
     * the peer is known to be gone. */
    enum agc_status (*send)(void *ctx, uint32_t peer, uint32_t channel, const void *buf,
                            uint64_t nbytes, void **request_ret);
    enum agc_status (*recv)(void *ctx, uint32_t peer, uint32_t channel, void *buf, uint64_t nbytes,
                            void **request_ret);
    /* Blocks until the request is complete. AGC_ERR_PEER, AGC_ERR_CLOSED. */
    enum agc_status (*wait)(void *ctx, void *request);
    void (*cancel)(void *ctx, void *request);
    /* Forgets a request that wait has returned for. */
    void (*release)(void *ctx, void *request);
    /* What the network said about the last failure of a call on this thread, as a string. */
    void (*error_text)(void *ctx, char *dst, size_t dst_cap_nbytes);
    /* Closes the connections. No wait may be in progress. */
    void (*destroy)(void *ctx);

    /* Collectives over device memory, where the network has them natively; NULL elsewhere. Ordered
     * after the work that is queued on the current stream, not waited for by the host. send and
     * recv hold nranks pieces of nbytes (allgather: send holds one). */
    enum agc_status (*alltoall)(void *ctx, int device, const void *send, void *recv,
                                uint64_t nbytes);
    enum agc_status (*allgather)(void *ctx, int device, const void *send, void *recv,
                                 uint64_t nbytes);
};

#endif /* AGC_TRANSPORT_H */
