/* lane.h: the lanes of a bucket: how a tile finds its numbers in the bucket and its residuals at
 * the parameters.
 *
 *   bucket   | w0 (big)     | b0 | w1 (big)     | b1 |      as DDP lays it out
 *   lane 0   | w0           | w1           |                int8
 *   lane 1   | b0 | b1 |                                    raw
 *   tiles      ^^^^^ of lane 0
 *
 * Most tiles lie in one piece and are encoded in place; one that crosses pieces is gathered first.
 *
 * Where a codec cannot keep a zero beside non-zeros (sign), each parameter begins a block of its
 * own, and what lies between two is no element: a parameter without a gradient shares no block.
 *
 * The worker's residual belongs to the parameter, in the parameter's own memory order: when DDP
 * rebuilds its buckets nothing has to move. The owner's residual belongs to the tiles that this
 * rank owns.
 */
#ifndef AGC_LANE_H
#define AGC_LANE_H

#include "codecs/codec.h"
#include "reduce/plan.h"
#include "reduce/residual.h"

struct agc_param {
    uint64_t nelems;
    struct agc_residual residual; /* none until a lane with feedback needs it */
    float *velocity;              /* nelems floats; NULL until a lane with momentum needs them */
};

/* One parameter of a bucket, as the caller describes it: they follow one another without gaps. */
struct agc_piece_desc {
    uint32_t param;
    uint32_t lane;
};

struct agc_lane_desc {
    struct agc_spec spec;
    bool feedback;
    bool feedback_bf16; /* residuals that are made now are kept in half the memory */
    bool per_param;     /* topk: each parameter keeps the fraction inside a tile */
    float momentum;     /* sparse codecs: momentum correction (csrc/reduce/lane.c), 0: none */
};

struct agc_piece {
    uint32_t param;
    bool live; /* its gradient of this round has a non-zero */
    uint64_t bucket_elem;
    uint64_t lane_elem;
    uint64_t nelems;
};

struct agc_lane {
    struct agc_lane_plan plan;
    const struct agc_codec *codec;
    uint32_t index;
    bool feedback;
    bool per_param;
    float momentum;
    bool has_residual; /* some parameter holds one: feedback, or left over from another codec */
    uint32_t npieces;
    struct agc_piece *pieces;
    uint32_t *tile_piece;               /* first piece of each tile */
    struct agc_residual owner_residual; /* of the tiles owned, one after another; none in the direct
                                           form or without feedback */
};

/* Buffers for one tile. */
struct agc_tile_scratch {
    double x[AGC_TILE_NELEMS_MAX]; /* floats or doubles, as the work type is */
    double mean[AGC_TILE_NELEMS_MAX];
    float residual[AGC_TILE_NELEMS_MAX];
    float codec[AGC_SCRATCH_NELEMS]; /* agc_tile.scratch */
    uint32_t piece_ends[AGC_TILE_NELEMS_MAX];
};

/* What encoding needs beside the lane. */
struct agc_lane_context {
    const struct agc_kernels *kernels;
    struct agc_param *params;
    struct agc_tile_scratch *scratch;
    uint8_t *bucket;
    uint32_t bucket_index;
    uint32_t seed;
    uint32_t round;
    uint32_t rank;
};

/* Builds lane `index` of a bucket of npieces parameters. Allocates residuals. AGC_ERR_NOMEM leaves
 * nothing behind but residuals. */
AGC_NODISCARD enum agc_status agc_lane_init(struct agc_lane *lane, const struct agc_lane_desc *desc,
                                            uint32_t index, uint32_t dtype,
                                            const struct agc_piece_desc *pieces, uint32_t npieces,
                                            struct agc_param *params, uint32_t nranks,
                                            uint32_t rank, const struct agc_alloc *alloc);
void agc_lane_destroy(struct agc_lane *lane, const struct agc_alloc *alloc);

/* Notes which pieces have a non-zero gradient in this round. */
void agc_lane_mark_live(struct agc_lane *lane, const struct agc_lane_context *c);

/* Encodes tile t of the bucket with the worker's residual. dst has agc_tile_nbytes of the tile. */
void agc_lane_encode(struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t,
                     uint8_t *dst);

/* Where the bucket itself holds what agc_lane_encode would write for tile t, padding aside: a
 * lossless lane's tile that lies in one piece. Else NULL. */
const uint8_t *agc_lane_payload(const struct agc_lane *lane, const struct agc_lane_context *c,
                                uint64_t t);

/* Where the mean of a tile is to be computed, in the work type, before it is encoded to dst: right
 * there if the lane sends it as it is, else in scratch->mean. */
void *agc_lane_mean(const struct agc_lane *lane, const struct agc_lane_context *c, uint8_t *dst);

/* Encodes the mean of tile t with the owner's residual. */
void agc_lane_encode_mean(struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t,
                          void *mean, uint8_t *dst);

/* The tile as codecs see it; its random numbers are those of the owner's mean. */
struct agc_tile agc_lane_tile(const struct agc_lane *lane, const struct agc_lane_context *c,
                              uint64_t t);

/* Where contributions to tile t are to be added up, in the work type: in the bucket itself if the
 * tile lies there in one piece and the bucket is of that type, else scratch->x; put copies it from
 * there. */
void *agc_lane_sum(const struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t);
void agc_lane_sum_put(const struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t,
                      const void *sum);

/* Decodes tile t into the bucket. */
void agc_lane_decode(const struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t,
                     const struct agc_tile *tile, const uint8_t *src);

/* Adds nranks times the owner's residual of one parameter to dst, which has as many elements as the
 * parameter. */
void agc_lane_add_owner_residual(const struct agc_lane *lane, const struct agc_kernels *k,
                                 uint32_t param, uint32_t rank, float *dst);

/* Adds nranks times the owner's residual to the worker's, and clears it: before a new layout, so
 * that nothing is lost. */
void agc_lane_fold_owner_residual(struct agc_lane *lane, const struct agc_kernels *k,
                                  struct agc_param *params, uint32_t rank);

#endif /* AGC_LANE_H */
