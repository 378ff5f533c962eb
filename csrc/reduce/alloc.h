/* alloc.h: where the engine's memory comes from. */
#ifndef AGC_ALLOC_H
#define AGC_ALLOC_H

#include <stddef.h>

struct agc_alloc {
    void *(*alloc)(void *ctx, size_t nbytes); /* NULL: out of memory */
    void (*release)(void *ctx, void *p);
    void *ctx;
};

#endif /* AGC_ALLOC_H */
