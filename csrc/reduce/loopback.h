/* loopback.h: a transport whose ranks are threads of one process, for tests: messages are copied
 * through memory.
 *
 * It keeps the contract of transport.h, and can misbehave on purpose: delay deliveries, lose a
 * rank, refuse service.
 */
#ifndef AGC_LOOPBACK_H
#define AGC_LOOPBACK_H

#include "reduce/transport.h"

struct agc_loopback;

/* A network of nranks. NULL: out of memory. */
struct agc_loopback *agc_loopback_create(uint32_t nranks);
/* After all transports were destroyed. */
void agc_loopback_destroy(struct agc_loopback *net);

/* The transport of one rank; each may be asked for once. */
struct agc_transport agc_loopback_transport(struct agc_loopback *net, uint32_t rank);

/* From now on each message becomes visible only after a pseudo-random delay below max_ns; the order
 * is kept. */
void agc_loopback_set_delay(struct agc_loopback *net, uint64_t max_ns, uint32_t seed);

/* The rank's connections break, as when its process dies: calls of and to it give AGC_ERR_PEER,
 * messages not yet received are lost. */
void agc_loopback_kill(struct agc_loopback *net, uint32_t rank);

/* Allocations made by the network itself since its creation: for telling them from the engine's. */
uint64_t agc_loopback_nallocs(const struct agc_loopback *net);

#endif /* AGC_LOOPBACK_H */
