/* lane.c: the lanes of a bucket. */
#include "reduce/lane.h"

#include "codecs/sparse.h"
#include "core/common.h"
#include "core/elements.h"

/* A run of elements that lie together both in a tile and in a piece. */
struct run {
    const struct agc_piece *piece;
    uint32_t tile_elem;
    uint32_t nelems;
    uint64_t piece_elem;
    uint64_t bucket_elem;
    uint64_t lane_elem; /* of the tile's first element */
};

/* First run of tile t. */
static struct run run_first(const struct agc_lane *lane, uint64_t t)
{
    uint64_t lane_elem = t * lane->plan.tile_nelems;
    const struct agc_piece *piece = &lane->pieces[lane->tile_piece[t]];
    uint64_t piece_elem = lane_elem - piece->lane_elem;
    uint64_t nelems = agc_min_u64(agc_plan_tile_nelems(&lane->plan, t), piece->nelems - piece_elem);
    return (struct run){piece,    0, (uint32_t)nelems, piece_elem, piece->bucket_elem + piece_elem,
                        lane_elem};
}

/* False after the last run of a tile of tile_nelems. */
static bool run_next(struct run *r, uint32_t tile_nelems)
{
    r->tile_elem += r->nelems;
    if (r->tile_elem >= tile_nelems)
        return false;
    do
        r->piece++;
    while (r->piece->nelems == 0);
    uint64_t at = r->piece->lane_elem - r->lane_elem;
    if (at >= tile_nelems)
        return false;
    r->tile_elem = (uint32_t)at;
    r->nelems = (uint32_t)agc_min_u64(tile_nelems - r->tile_elem, r->piece->nelems);
    r->piece_elem = 0;
    r->bucket_elem = r->piece->bucket_elem;
    return true;
}

/* nelems zeros at *p, unless there are some already. */
static enum agc_status zeros_at(float **p, uint64_t nelems, const struct agc_alloc *alloc)
{
    if (*p || nelems == 0)
        return AGC_OK;
    *p = (float *)alloc->alloc(alloc->ctx, sizeof(float) * nelems);
    if (!*p)
        return AGC_ERR_NOMEM;
    memset(*p, 0, sizeof(float) * nelems);
    return AGC_OK;
}

static enum agc_status lane_fill(struct agc_lane *lane, uint32_t index,
                                 const struct agc_piece_desc *pieces, uint32_t npieces,
                                 struct agc_param *params, const struct agc_alloc *alloc)
{
    uint64_t bucket_elem = 0, lane_elem = 0;
    uint32_t align_nelems = agc_plan_align_nelems(&lane->plan.spec);
    for (uint32_t i = 0; i < npieces; i++) {
        struct agc_param *param = &params[pieces[i].param];
        if (pieces[i].lane == index) {
            lane_elem = param->nelems ? agc_round_up(lane_elem, align_nelems) : lane_elem;
            lane->pieces[lane->npieces++] = (struct agc_piece){.param = pieces[i].param,
                                                               .live = true,
                                                               .bucket_elem = bucket_elem,
                                                               .lane_elem = lane_elem,
                                                               .nelems = param->nelems};
            lane_elem += param->nelems;
            if (lane->feedback)
                AGC_TRY(zeros_at(&param->residual, param->nelems, alloc));
            if (lane->momentum > 0.0f)
                AGC_TRY(zeros_at(&param->velocity, param->nelems, alloc));
            lane->has_residual |= param->residual != NULL;
        }
        bucket_elem += param->nelems;
    }
    uint32_t piece = 0;
    for (uint64_t t = 0; t < lane->plan.ntiles; t++) {
        while (lane->pieces[piece].lane_elem + lane->pieces[piece].nelems <=
               t * lane->plan.tile_nelems)
            piece++;
        lane->tile_piece[t] = piece;
    }
    return AGC_OK;
}

enum agc_status agc_lane_init(struct agc_lane *lane, const struct agc_lane_desc *desc,
                              uint32_t index, uint32_t dtype, const struct agc_piece_desc *pieces,
                              uint32_t npieces, struct agc_param *params, uint32_t nranks,
                              uint32_t rank, const struct agc_alloc *alloc)
{
    struct agc_spec spec;
    uint64_t nelems = 0;
    uint32_t own = 0;
    *lane = (struct agc_lane){0};
    AGC_TRY(agc_spec_resolve(&desc->spec, &spec));
    if (agc_dtype_nbytes(dtype) == 0)
        return AGC_ERR_DTYPE;
    for (uint32_t i = 0; i < npieces; i++) {
        uint64_t piece_nelems = params[pieces[i].param].nelems;
        if (pieces[i].lane == index) {
            if (piece_nelems)
                nelems = agc_round_up(nelems, agc_plan_align_nelems(&spec)) + piece_nelems;
            own++;
        }
    }
    if (nelems > (uint64_t)UINT32_MAX *
                     AGC_TILE_GRANULE_NELEMS) /* tiles are counted in 32 bits on the wire */
        return AGC_ERR_NELEMS;
    lane->plan = agc_plan_lane(&spec, dtype, nelems, nranks);
    lane->codec = agc_codec_find(spec.codec);
    lane->index = index;
    lane->feedback = desc->feedback && !(lane->codec->flags & AGC_CODEC_LOSSLESS);
    lane->per_param = desc->per_param && (lane->codec->flags & AGC_CODEC_SPARSE);
    lane->momentum = lane->codec->flags & AGC_CODEC_SPARSE ? desc->momentum : 0.0f;
    lane->pieces = (struct agc_piece *)alloc->alloc(alloc->ctx, sizeof *lane->pieces * (own + 1));
    lane->tile_piece =
        (uint32_t *)alloc->alloc(alloc->ctx, sizeof *lane->tile_piece * (lane->plan.ntiles + 1));
    if (!lane->plan.direct && lane->feedback) {
        lane->owner_residual_nelems =
            lane->plan.ntiles > rank
                ? agc_div_up(lane->plan.ntiles - rank, nranks) * lane->plan.tile_nelems
                : 0;
        lane->owner_residual =
            (float *)alloc->alloc(alloc->ctx, sizeof(float) * (lane->owner_residual_nelems + 1));
        if (lane->owner_residual)
            memset(lane->owner_residual, 0, sizeof(float) * lane->owner_residual_nelems);
    }
    enum agc_status status = AGC_ERR_NOMEM;
    if (lane->pieces && lane->tile_piece && (lane->owner_residual || !lane->owner_residual_nelems))
        status = lane_fill(lane, index, pieces, npieces, params, alloc);
    if (status != AGC_OK)
        agc_lane_destroy(lane, alloc);
    return status;
}

void agc_lane_destroy(struct agc_lane *lane, const struct agc_alloc *alloc)
{
    void *const owned[] = {lane->pieces, lane->tile_piece, lane->owner_residual};
    for (int i = 0; i < 3; i++)
        if (owned[i])
            alloc->release(alloc->ctx, owned[i]);
    *lane = (struct agc_lane){0};
}

static uint8_t *bucket_at(const struct agc_lane *lane, const struct agc_lane_context *c,
                          uint64_t elem)
{
    return c->bucket + elem * agc_dtype_nbytes(lane->plan.dtype);
}

void agc_lane_mark_live(struct agc_lane *lane, const struct agc_lane_context *c)
{
    if (!lane->has_residual)
        return; /* nothing is kept back: zeros may as well be sent as what they are */
    uint64_t mask = agc_dtype_zero_mask(lane->plan.dtype);
    for (uint32_t i = 0; i < lane->npieces; i++) {
        struct agc_piece *p = &lane->pieces[i];
        p->live = c->kernels->any_nonzero(bucket_at(lane, c, p->bucket_elem),
                                          p->nelems * agc_dtype_nbytes(lane->plan.dtype), mask);
    }
}

struct agc_tile agc_lane_tile(const struct agc_lane *lane, const struct agc_lane_context *c,
                              uint64_t t)
{
    return (struct agc_tile){
        .kernels = c->kernels,
        .spec = lane->plan.spec,
        .dtype = lane->plan.dtype,
        .nelems = agc_plan_tile_nelems(&lane->plan, t),
        .rng = agc_rng_key(c->seed, c->round, c->bucket_index, lane->index,
                           t * lane->plan.tile_nelems),
        .index_rng = agc_rng_key(c->seed, c->round, c->bucket_index,
                                 lane->index | AGC_RNG_LANE_OF_INDICES, t * lane->plan.tile_nelems),
        .scratch = c->scratch->codec,
    };
}

static uint32_t work_dtype(const struct agc_lane *lane)
{
    return agc_work_dtype(lane->codec, lane->plan.dtype);
}

/* The bucket holds the work type. */
static bool is_work_dtype(const struct agc_lane *lane)
{
    return lane->plan.dtype == work_dtype(lane);
}

static size_t work_nbytes(const struct agc_lane *lane)
{
    return agc_dtype_nbytes(work_dtype(lane));
}

/* Copies a run from the bucket into the work type. */
static void run_load(const struct agc_lane *lane, const struct agc_lane_context *c,
                     const struct run *r, void *x)
{
    const uint8_t *src = bucket_at(lane, c, r->bucket_elem);
    uint8_t *dst = (uint8_t *)x + r->tile_elem * work_nbytes(lane);
    if (is_work_dtype(lane))
        memcpy(dst, src, r->nelems * work_nbytes(lane));
    else
        agc_elements_load(c->kernels, lane->plan.dtype, src, r->nelems, (float *)x + r->tile_elem);
}

/* Where the bucket holds tile t, if it lies there in one piece; else NULL. */
static void *whole_tile(const struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t)
{
    struct run r = run_first(lane, t);
    bool whole = r.nelems == agc_plan_tile_nelems(&lane->plan, t);
    return whole ? bucket_at(lane, c, r.bucket_elem) : NULL;
}

/* The lane's encoding is the bucket's own bytes. */
static bool is_verbatim(const struct agc_lane *lane)
{
    return (lane->codec->flags & AGC_CODEC_LOSSLESS) != 0 && !lane->has_residual;
}

const uint8_t *agc_lane_payload(const struct agc_lane *lane, const struct agc_lane_context *c,
                                uint64_t t)
{
    return is_verbatim(lane) ? whole_tile(lane, c, t) : NULL;
}

/* Puts the residual of a run into scratch: zeros for a run that is not live or has none (NULL). */
static void residual_take(float *scratch_residual, const float *residual, uint32_t nelems,
                          bool live)
{
    if (residual && live)
        memcpy(scratch_residual, residual, nelems * sizeof(float));
    else
        memset(scratch_residual, 0, nelems * sizeof(float));
}

/* Random numbers of a rank's contribution. Each sender draws its own: were they the same, the
 * errors of the ranks would not average out, and the mean, rounded once more with the numbers that
 * made it, would be biased. */
static struct agc_rng contribution_rng(const struct agc_lane *lane,
                                       const struct agc_lane_context *c, uint64_t t)
{
    return agc_rng_key(c->seed, c->round, c->bucket_index, lane->index | (c->rank + 1) << 8,
                       t * lane->plan.tile_nelems);
}

/* The bytes between a tile's payload and the next tile. */
static void pad(const struct agc_tile *tile, size_t nbytes, uint8_t *dst)
{
    memset(dst + nbytes, 0, agc_tile_nbytes(&tile->spec, tile->dtype, tile->nelems) - nbytes);
}

/* Notes where the runs of a tile end, for codecs that treat each by itself. */
static void mark_pieces(const struct agc_lane *lane, const struct agc_lane_context *c, struct run r,
                        struct agc_tile *tile)
{
    if (!lane->per_param)
        return;
    tile->piece_ends = c->scratch->piece_ends;
    do
        c->scratch->piece_ends[tile->npieces++] = r.tile_elem + r.nelems;
    while (run_next(&r, tile->nelems));
}

/* Encodes the tile that lies in scratch->x, r being its first run. A piece whose gradient is all
 * zero takes part with a residual of zero and keeps its own. */
static void encode_gathered(const struct agc_lane *lane, const struct agc_lane_context *c,
                            struct agc_tile *tile, struct run r, uint32_t dtype, uint8_t *dst)
{
    float *scratch_residual = lane->has_residual ? c->scratch->residual : NULL;
    struct run first = r;
    mark_pieces(lane, c, r, tile);
    if (!scratch_residual) {
        agc_tile_encode(lane->codec, tile, c->scratch->x, dtype, NULL, dst);
        return;
    }
    do {
        const float *residual = c->params[r.piece->param].residual;
        residual_take(scratch_residual + r.tile_elem, residual ? residual + r.piece_elem : NULL,
                      r.nelems, r.piece->live);
    } while (run_next(&r, tile->nelems));
    agc_tile_encode(lane->codec, tile, c->scratch->x, dtype, scratch_residual, dst);
    r = first;
    do {
        float *residual = c->params[r.piece->param].residual;
        if (residual && r.piece->live)
            memcpy(residual + r.piece_elem, scratch_residual + r.tile_elem,
                   r.nelems * sizeof(float));
    } while (run_next(&r, tile->nelems));
}

/* Momentum correction and factor masking (Lin et al., "Deep Gradient Compression", 2018, equations
 * 4 to 6): the velocity u = momentum * u + gradient is what enters the codec and its residual, and
 * is forgotten where it is sent. A piece whose gradient is all zero leaves its velocity alone. */
static void encode_with_momentum(const struct agc_lane *lane, const struct agc_lane_context *c,
                                 struct agc_tile *tile, struct run r, uint8_t *dst)
{
    float *x = (float *)c->scratch->x; /* a sparse codec works on floats */
    const struct run first = r;
    do {
        const float *velocity = c->params[r.piece->param].velocity + r.piece_elem;
        float *u = x + r.tile_elem;
        run_load(lane, c, &r, x);
        for (uint32_t i = 0; r.piece->live && i < r.nelems; i++)
            u[i] += lane->momentum * velocity[i];
    } while (run_next(&r, tile->nelems));
    encode_gathered(lane, c, tile, first, AGC_DTYPE_F32, dst);

    const uint32_t *kept = agc_sparse_scratch(tile).index;
    uint32_t nkept = agc_sparse_nkept(&tile->spec, tile->nelems), j = 0;
    r = first;
    do {
        float *velocity = c->params[r.piece->param].velocity + r.piece_elem;
        const float *u = x + r.tile_elem;
        for (uint32_t i = 0; r.piece->live && i < r.nelems; i++)
            velocity[i] = (agc_f32_bits(u[i]) & 0x7f800000u) != 0x7f800000u ? u[i] : velocity[i];
        for (; j < nkept && kept[j] < r.tile_elem + r.nelems; j++) {
            uint32_t i = kept[j] - r.tile_elem;
            if (r.piece->live && velocity[i] == u[i]) /* not if it was not finite */
                velocity[i] = 0.0f;
        }
    } while (run_next(&r, tile->nelems));
}

void agc_lane_encode(struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t,
                     uint8_t *dst)
{
    struct agc_tile tile = agc_lane_tile(lane, c, t);
    struct run r = run_first(lane, t);
    tile.rng = contribution_rng(lane, c, t);

    if (is_verbatim(lane)) {
        size_t elem_nbytes = agc_dtype_nbytes(lane->plan.dtype);
        do
            memcpy(dst + r.tile_elem * elem_nbytes, bucket_at(lane, c, r.bucket_elem),
                   r.nelems * elem_nbytes);
        while (run_next(&r, tile.nelems));
        pad(&tile, tile.nelems * elem_nbytes, dst);
        return;
    }

    if (lane->momentum > 0.0f) {
        encode_with_momentum(lane, c, &tile, r, dst);
        return;
    }
    if (r.nelems == tile.nelems) { /* one piece: in place */
        float *residual = c->params[r.piece->param].residual;
        agc_tile_encode(lane->codec, &tile, bucket_at(lane, c, r.bucket_elem), lane->plan.dtype,
                        residual && r.piece->live ? residual + r.piece_elem : NULL, dst);
        return;
    }
    if (agc_plan_align_nelems(&tile.spec) > 1) { /* in place too: no run shares a block */
        memset(dst, 0, agc_tile_nbytes(&tile.spec, tile.dtype, tile.nelems));
        do {
            float *residual = c->params[r.piece->param].residual;
            lane->codec->encode_run(&tile, bucket_at(lane, c, r.bucket_elem), lane->plan.dtype,
                                    residual && r.piece->live ? residual + r.piece_elem : NULL,
                                    r.tile_elem, r.nelems, dst);
        } while (run_next(&r, tile.nelems));
        return;
    }

    /* Several pieces: gather. */
    struct run first = r;
    do
        run_load(lane, c, &r, c->scratch->x);
    while (run_next(&r, tile.nelems));
    encode_gathered(lane, c, &tile, first, work_dtype(lane), dst);
}

/* The run of a mean has a non-zero. */
static bool run_is_live(const struct agc_lane_context *c, const struct run *r, const float *mean)
{
    return c->kernels->any_nonzero((const uint8_t *)(mean + r->tile_elem),
                                   r->nelems * sizeof(float), agc_dtype_zero_mask(AGC_DTYPE_F32));
}

void *agc_lane_mean(const struct agc_lane *lane, const struct agc_lane_context *c, uint8_t *dst)
{
    return is_verbatim(lane) && is_work_dtype(lane) ? (void *)dst : c->scratch->mean;
}

/* Each run by itself; what lies between them in x counts for nothing. */
static void encode_mean_of_runs(const struct agc_lane *lane, const struct agc_lane_context *c,
                                const struct agc_tile *tile, struct run r, const float *x,
                                float *residual, uint8_t *dst)
{
    memset(dst, 0, agc_tile_nbytes(&tile->spec, tile->dtype, tile->nelems));
    do {
        bool live = run_is_live(c, &r, x);
        lane->codec->encode_run(tile, x + r.tile_elem, AGC_DTYPE_F32,
                                residual && live ? residual + r.tile_elem : NULL, r.tile_elem,
                                r.nelems, dst);
    } while (run_next(&r, tile->nelems));
}

void agc_lane_encode_mean(struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t,
                          void *mean, uint8_t *dst)
{
    struct agc_tile tile = agc_lane_tile(lane, c, t);
    if (mean == (void *)dst) {
        pad(&tile, tile.nelems * work_nbytes(lane), dst);
        return;
    }
    const struct run first = run_first(lane, t);
    float *residual = NULL, *x = (float *)mean; /* a lossy lane's work type is float */
    if (lane->owner_residual)
        residual = lane->owner_residual + t / lane->plan.nranks * lane->plan.tile_nelems;
    if (agc_plan_align_nelems(&tile.spec) > 1 && first.nelems != tile.nelems) {
        encode_mean_of_runs(lane, c, &tile, first, x, residual, dst);
        return;
    }
    mark_pieces(lane, c, first, &tile);
    if (!residual) {
        agc_tile_encode(lane->codec, &tile, mean, work_dtype(lane), NULL, dst);
        return;
    }
    /* A parameter used by no rank has a mean of zeros. DDP throws its result away, so the residual
     * must not be sent with it. */
    bool any_live = false, all_live = true;
    struct run r = first;
    do {
        bool live = run_is_live(c, &r, x);
        any_live |= live;
        all_live &= live;
    } while (run_next(&r, tile.nelems));
    if (all_live || !any_live) {
        agc_tile_encode(lane->codec, &tile, x, AGC_DTYPE_F32, all_live ? residual : NULL, dst);
        return;
    }
    float *scratch_residual = c->scratch->residual;
    r = first;
    do
        residual_take(scratch_residual + r.tile_elem, residual + r.tile_elem, r.nelems,
                      run_is_live(c, &r, x));
    while (run_next(&r, tile.nelems));
    agc_tile_encode(lane->codec, &tile, x, AGC_DTYPE_F32, scratch_residual, dst);
    r = first;
    do
        if (run_is_live(c, &r, x))
            memcpy(residual + r.tile_elem, scratch_residual + r.tile_elem,
                   r.nelems * sizeof(float));
    while (run_next(&r, tile.nelems));
}

void *agc_lane_sum(const struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t)
{
    void *in_bucket = is_work_dtype(lane) ? whole_tile(lane, c, t) : NULL;
    return in_bucket ? in_bucket : c->scratch->x;
}

void agc_lane_sum_put(const struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t,
                      const void *sum)
{
    if (sum != (const void *)c->scratch->x)
        return;
    struct run r = run_first(lane, t);
    do {
        uint8_t *dst = bucket_at(lane, c, r.bucket_elem);
        const uint8_t *src = (const uint8_t *)sum + r.tile_elem * work_nbytes(lane);
        if (is_work_dtype(lane))
            memcpy(dst, src, r.nelems * work_nbytes(lane));
        else
            agc_elements_store(c->kernels, lane->plan.dtype, (const float *)sum + r.tile_elem,
                               r.nelems, dst);
    } while (run_next(&r, agc_plan_tile_nelems(&lane->plan, t)));
}

void agc_lane_decode(const struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t,
                     const struct agc_tile *tile, const uint8_t *src)
{
    void *in_bucket = whole_tile(lane, c, t);
    if (in_bucket) {
        lane->codec->decode(tile, src, 1.0, false, in_bucket, lane->plan.dtype);
        return;
    }
    lane->codec->decode(tile, src, 1.0, false, c->scratch->x, work_dtype(lane));
    agc_lane_sum_put(lane, c, t, c->scratch->x);
}

void agc_lane_add_owner_residual(const struct agc_lane *lane, uint32_t param, uint32_t rank,
                                 float *dst)
{
    if (!lane->owner_residual)
        return;
    float nranks = (float)lane->plan.nranks;
    for (uint64_t t = rank; t < lane->plan.ntiles; t += lane->plan.nranks) {
        const float *owed = lane->owner_residual + t / lane->plan.nranks * lane->plan.tile_nelems;
        struct run r = run_first(lane, t);
        do
            for (uint32_t i = 0; r.piece->param == param && i < r.nelems; i++)
                dst[r.piece_elem + i] += nranks * owed[r.tile_elem + i];
        while (run_next(&r, agc_plan_tile_nelems(&lane->plan, t)));
    }
}

void agc_lane_fold_owner_residual(struct agc_lane *lane, struct agc_param *params, uint32_t rank)
{
    if (!lane->owner_residual)
        return;
    for (uint32_t i = 0; i < lane->npieces; i++)
        if (params[lane->pieces[i].param].residual)
            agc_lane_add_owner_residual(lane, lane->pieces[i].param, rank,
                                        params[lane->pieces[i].param].residual);
    memset(lane->owner_residual, 0, sizeof(float) * lane->owner_residual_nelems);
}
