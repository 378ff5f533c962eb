/* lane.c: the lanes of a bucket. */
#include "reduce/lane.h"

#include "codecs/pieces.h"
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

static enum agc_status lane_fill(struct agc_lane *lane, uint32_t index,
                                 const struct agc_piece_desc *pieces, uint32_t npieces,
                                 bool feedback_bf16, struct agc_param *params,
                                 const struct agc_alloc *alloc)
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
                AGC_TRY(agc_residual_create(&param->residual, param->nelems, feedback_bf16, alloc));
            if (lane->momentum > 0.0f && !param->velocity && param->nelems) {
                param->velocity = (float *)alloc->alloc(alloc->ctx, sizeof(float) * param->nelems);
                if (!param->velocity)
                    return AGC_ERR_NOMEM;
                memset(param->velocity, 0, sizeof(float) * param->nelems);
            }
            lane->has_residual |= param->residual.data != NULL;
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
    enum agc_status status = lane->pieces && lane->tile_piece ? AGC_OK : AGC_ERR_NOMEM;
    if (status == AGC_OK && !lane->plan.direct && lane->feedback && lane->plan.ntiles > rank)
        status = agc_residual_create(&lane->owner_residual,
                                     agc_div_up(lane->plan.ntiles - rank, nranks) *
                                         lane->plan.tile_nelems,
                                     desc->feedback_bf16, alloc);
    if (status == AGC_OK)
        status = lane_fill(lane, index, pieces, npieces, desc->feedback_bf16, params, alloc);
    if (status != AGC_OK)
        agc_lane_destroy(lane, alloc);
    return status;
}

void agc_lane_destroy(struct agc_lane *lane, const struct agc_alloc *alloc)
{
    void *const owned[] = {lane->pieces, lane->tile_piece};
    for (int i = 0; i < 2; i++)
        if (owned[i])
            alloc->release(alloc->ctx, owned[i]);
    agc_residual_destroy(&lane->owner_residual, alloc);
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

/* Puts the residual of a run into scratch: zeros for a run that is not live or has none. first: of
 * the run, in the residual. */
static void residual_gather(const struct agc_lane_context *c, const struct agc_residual *residual,
                            uint64_t first, const struct run *r, bool live)
{
    float *dst = c->scratch->residual + r->tile_elem;
    if (residual->data && live)
        agc_residual_load(residual, c->kernels, first, r->nelems, dst);
    else
        memset(dst, 0, r->nelems * sizeof(float));
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

/* Random numbers of storing residuals: nobody's numbers of rounding. sender: rank + 1, 0 for the
 * owner's. */
static struct agc_rng residual_rng(const struct agc_lane *lane, const struct agc_lane_context *c,
                                   uint32_t sender, uint64_t t)
{
    return agc_rng_key(c->seed, c->round, c->bucket_index,
                       lane->index | sender << 8 | AGC_RNG_LANE_OF_RESIDUALS,
                       t * lane->plan.tile_nelems);
}

/* Encodes one run of a tile, or all of it, with the residual that belongs to it, from elements of
 * dtype at x. */
static void encode_run(const struct agc_lane *lane, const struct agc_lane_context *c,
                       const struct agc_tile *tile, const struct run *r, const void *x,
                       uint32_t dtype, struct agc_residual *residual, uint64_t first,
                       struct agc_rng rng, uint8_t *dst)
{
    float *owed = NULL;
    if (residual && residual->data)
        owed = agc_residual_take(residual, c->kernels, first, r->nelems, c->scratch->residual);
    if (r->nelems == tile->nelems)
        agc_tile_encode(lane->codec, tile, x, dtype, owed, dst);
    else
        lane->codec->encode_run(tile, x, dtype, owed, r->tile_elem, r->nelems, dst);
    if (owed)
        agc_residual_give(residual, c->kernels, first, r->nelems, owed, rng, r->tile_elem);
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
                            struct agc_tile *tile, struct run r, uint64_t t, uint32_t dtype,
                            uint8_t *dst)
{
    struct run first = r;
    mark_pieces(lane, c, r, tile);
    if (!lane->has_residual) {
        agc_tile_encode(lane->codec, tile, c->scratch->x, dtype, NULL, dst);
        return;
    }
    do
        residual_gather(c, &c->params[r.piece->param].residual, r.piece_elem, &r, r.piece->live);
    while (run_next(&r, tile->nelems));
    agc_tile_encode(lane->codec, tile, c->scratch->x, dtype, c->scratch->residual, dst);
    struct agc_rng rng = residual_rng(lane, c, c->rank + 1, t);
    r = first;
    do {
        struct agc_residual *residual = &c->params[r.piece->param].residual;
        if (residual->data && r.piece->live)
            agc_residual_store(residual, c->kernels, r.piece_elem, r.nelems,
                               c->scratch->residual + r.tile_elem, rng, r.tile_elem);
    } while (run_next(&r, tile->nelems));
}

/* Momentum correction and factor masking (Lin et al., "Deep Gradient Compression", 2018, equations
 * 4 to 6): the velocity u = momentum * u + gradient is what enters the codec and its residual, and
 * is forgotten where it is sent. Where what is sent decodes to something that is not finite,
 * nothing arrives, and the velocity stays as it was before this gradient, as the residual does. A
 * piece whose gradient is all zero leaves its velocity alone. */
static void encode_with_momentum(const struct agc_lane *lane, const struct agc_lane_context *c,
                                 struct agc_tile *tile, struct run r, uint64_t t, uint8_t *dst)
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
    encode_gathered(lane, c, tile, first, t, AGC_DTYPE_F32, dst);

    float *sent = (float *)c->scratch->residual; /* which has been given back */
    lane->codec->decode(tile, dst, 1.0, false, sent, AGC_DTYPE_F32);
    const uint32_t *kept = agc_sparse_scratch(tile).index;
    uint32_t nkept = agc_sparse_nkept(&tile->spec, tile->nelems), j = 0;
    r = first;
    do {
        float *velocity = c->params[r.piece->param].velocity + r.piece_elem;
        float *u = x + r.tile_elem;
        for (; j < nkept && kept[j] < r.tile_elem + r.nelems; j++) {
            uint32_t i = kept[j] - r.tile_elem;
            if (r.piece->live)
                u[i] = agc_f32_is_finite(sent[kept[j]]) ? 0.0f : velocity[i];
        }
        for (uint32_t i = 0; r.piece->live && i < r.nelems; i++)
            velocity[i] = agc_f32_is_finite(u[i]) ? u[i] : velocity[i];
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
        encode_with_momentum(lane, c, &tile, r, t, dst);
        return;
    }
    /* One piece, or pieces that share no block: in place. */
    if (r.nelems == tile.nelems || agc_plan_align_nelems(&tile.spec) > 1) {
        if (r.nelems < tile.nelems)
            memset(dst, 0, agc_tile_nbytes(&tile.spec, tile.dtype, tile.nelems));
        do
            encode_run(lane, c, &tile, &r, bucket_at(lane, c, r.bucket_elem), lane->plan.dtype,
                       r.piece->live ? &c->params[r.piece->param].residual : NULL, r.piece_elem,
                       residual_rng(lane, c, c->rank + 1, t), dst);
        while (run_next(&r, tile.nelems));
        return;
    }

    /* Several pieces: gather. */
    struct run first = r;
    do
        run_load(lane, c, &r, c->scratch->x);
    while (run_next(&r, tile.nelems));
    encode_gathered(lane, c, &tile, first, t, work_dtype(lane), dst);
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

void agc_lane_encode_mean(struct agc_lane *lane, const struct agc_lane_context *c, uint64_t t,
                          void *mean, uint8_t *dst)
{
    struct agc_tile tile = agc_lane_tile(lane, c, t);
    if (mean == (void *)dst) {
        pad(&tile, tile.nelems * work_nbytes(lane), dst);
        return;
    }
    const struct run first = run_first(lane, t);
    struct run r = first;
    struct agc_residual *residual = &lane->owner_residual;
    uint64_t owned = t / lane->plan.nranks * lane->plan.tile_nelems;
    struct agc_rng rng = residual_rng(lane, c, 0, t);
    float *x = (float *)mean; /* a lossy lane's work type is float */
    if (!residual->data && agc_plan_align_nelems(&tile.spec) == 1) {
        mark_pieces(lane, c, first, &tile);
        agc_tile_encode(lane->codec, &tile, mean, work_dtype(lane), NULL, dst);
        return;
    }
    /* A parameter used by no rank has a mean of zeros. DDP throws its result away, so the residual
     * must not be sent with it. */
    if (r.nelems == tile.nelems || agc_plan_align_nelems(&tile.spec) > 1) {
        /* What lies between the runs in x counts for nothing. */
        if (r.nelems < tile.nelems)
            memset(dst, 0, agc_tile_nbytes(&tile.spec, tile.dtype, tile.nelems));
        do
            encode_run(lane, c, &tile, &r, x + r.tile_elem, AGC_DTYPE_F32,
                       run_is_live(c, &r, x) ? residual : NULL, owned + r.tile_elem, rng, dst);
        while (run_next(&r, tile.nelems));
        return;
    }
    mark_pieces(lane, c, first, &tile);
    do
        residual_gather(c, residual, owned + r.tile_elem, &r, run_is_live(c, &r, x));
    while (run_next(&r, tile.nelems));
    agc_tile_encode(lane->codec, &tile, x, AGC_DTYPE_F32, c->scratch->residual, dst);
    r = first;
    do
        if (run_is_live(c, &r, x))
            agc_residual_store(residual, c->kernels, owned + r.tile_elem, r.nelems,
                               c->scratch->residual + r.tile_elem, rng, r.tile_elem);
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

/* Calls back for every run of the owner's residual, with its floats, times nranks, in pieces. */
static void for_owner_residual(const struct agc_lane *lane, const struct agc_kernels *k,
                               uint32_t rank,
                               void (*visit)(void *ctx, const struct agc_piece *piece,
                                             uint64_t piece_elem, uint32_t nelems, const float *x),
                               void *ctx)
{
    float x[AGC_PIECE_NELEMS], nranks = (float)lane->plan.nranks;
    for (uint64_t t = rank; lane->owner_residual.data && t < lane->plan.ntiles;
         t += lane->plan.nranks) {
        uint64_t owned = t / lane->plan.nranks * lane->plan.tile_nelems;
        struct run r = run_first(lane, t);
        do {
            for (uint32_t done = 0; done < r.nelems; done += AGC_PIECE_NELEMS) {
                uint32_t n = agc_min_u32(AGC_PIECE_NELEMS, r.nelems - done);
                agc_residual_load(&lane->owner_residual, k, owned + r.tile_elem + done, n, x);
                for (uint32_t i = 0; i < n; i++)
                    x[i] *= nranks;
                visit(ctx, r.piece, r.piece_elem + done, n, x);
            }
        } while (run_next(&r, agc_plan_tile_nelems(&lane->plan, t)));
    }
}

struct addition {
    uint32_t param;
    float *dst;
};

static void add_to_floats(void *ctx, const struct agc_piece *piece, uint64_t piece_elem,
                          uint32_t nelems, const float *x)
{
    const struct addition *a = (const struct addition *)ctx;
    for (uint32_t i = 0; piece->param == a->param && i < nelems; i++)
        a->dst[piece_elem + i] += x[i];
}

void agc_lane_add_owner_residual(const struct agc_lane *lane, const struct agc_kernels *k,
                                 uint32_t param, uint32_t rank, float *dst)
{
    struct addition a = {param, dst};
    for_owner_residual(lane, k, rank, add_to_floats, &a);
}

struct folding {
    const struct agc_kernels *kernels;
    struct agc_param *params;
    struct agc_rng rng;
    uint32_t ndone;
};

static void add_to_residual(void *ctx, const struct agc_piece *piece, uint64_t piece_elem,
                            uint32_t nelems, const float *x)
{
    struct folding *f = (struct folding *)ctx;
    struct agc_residual *residual = &f->params[piece->param].residual;
    float sum[AGC_PIECE_NELEMS];
    if (!residual->data)
        return;
    agc_residual_load(residual, f->kernels, piece_elem, nelems, sum);
    for (uint32_t i = 0; i < nelems; i++)
        sum[i] += x[i];
    agc_residual_store(residual, f->kernels, piece_elem, nelems, sum, f->rng, f->ndone);
    f->ndone += nelems;
}

void agc_lane_fold_owner_residual(struct agc_lane *lane, const struct agc_kernels *k,
                                  struct agc_param *params, uint32_t rank)
{
    struct folding f = {k, params,
                        agc_rng_key(0, 0, 0, lane->index | AGC_RNG_LANE_OF_RESIDUALS, rank), 0};
    for_owner_residual(lane, k, rank, add_to_residual, &f);
    agc_residual_clear(&lane->owner_residual);
}
