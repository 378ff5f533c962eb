/* plan.h: who sends what to whom. Pure functions; docs/planner.md has the formulas and their
 * reasons. */
#ifndef AGC_PLAN_H
#define AGC_PLAN_H

#include "agentcomm.h"

/* How a lane is cut into tiles: a function of nothing but the arguments of agc_plan_lane, so that
 * no measurement shows in the numbers. */
struct agc_lane_plan {
    struct agc_spec spec; /* resolved */
    uint32_t dtype;
    uint32_t nranks;
    uint64_t nelems;
    uint32_t tile_nelems; /* every tile but the last has as many; a multiple of
                             AGC_TILE_GRANULE_NELEMS */
    uint64_t ntiles;
    bool direct; /* everyone sends everything to everyone, one phase; else tile t goes through rank
                    t % nranks, two phases */
};

/* Parameters begin at multiples of this in a lane of a resolved spec. */
uint32_t agc_plan_align_nelems(const struct agc_spec *spec);

/* spec must be resolved. */
struct agc_lane_plan agc_plan_lane(const struct agc_spec *spec, uint32_t dtype, uint64_t nelems,
                                   uint32_t nranks);

/* Elements of tile t. */
uint32_t agc_plan_tile_nelems(const struct agc_lane_plan *plan, uint64_t t);

/* A stripe is nranks consecutive tiles, one of each owner. A chunk is a whole number of stripes: as
 * many as fit 2^chunk_log2 bytes of dense data, at least one. */
uint64_t agc_plan_chunk_nstripes(const struct agc_lane_plan *plan, uint32_t chunk_log2);
uint64_t agc_plan_nchunks(const struct agc_lane_plan *plan, uint64_t chunk_nstripes);

/* The tiles of one message: first_tile, first_tile + step, ... */
struct agc_message {
    uint64_t first_tile;
    uint32_t step;
    uint32_t ntiles; /* 0: there is no such message */
    uint64_t nelems;
    uint64_t payload_nbytes;
};

/* The tiles of a chunk that `owner` owns; in the direct form all tiles of the chunk, whatever the
 * owner. */
struct agc_message agc_plan_message(const struct agc_lane_plan *plan, uint64_t chunk_nstripes,
                                    uint64_t chunk, uint32_t owner);

/* Upper bound of a message with its header, for every lane of at most elem_nbytes per element and
 * every chunk size up to the given one: receives are posted with this capacity, so that the message
 * of a peer that is out of step can be read and named. */
uint64_t agc_plan_message_nbytes_max(uint32_t nranks, uint32_t elem_nbytes,
                                     uint32_t chunk_log2_max);

/* Bytes that one rank sends for a lane in one round, headers included. */
uint64_t agc_plan_wire_nbytes(const struct agc_lane_plan *plan, uint32_t rank, uint32_t chunk_log2);

/* Bounds of chunk_nbytes, and where "auto" starts. */
#define AGC_CHUNK_LOG2_MIN 12u
#define AGC_CHUNK_LOG2_MAX 26u
#define AGC_CHUNK_LOG2_AUTO_MIN 18u
#define AGC_CHUNK_LOG2_AUTO_MAX 24u
#define AGC_CHUNK_LOG2_AUTO_FIRST 20u

/* Estimate of the best chunk size for exchanges of nbytes dense bytes that keep the codec busy for
 * codec_ns and take total_ns. tune.h goes on from there. */
uint32_t agc_plan_chunk_log2(uint64_t nbytes, uint32_t nranks, uint64_t codec_ns,
                             uint64_t total_ns);

#endif /* AGC_PLAN_H */
