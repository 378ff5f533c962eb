/* engine_model.c: what the engines of a world must compute. */
#include "engine_model.h"

#include <stdlib.h>
#include <string.h>

#include "codecs/codec.h"
#include "core/elements.h"
#include "core/half.h"

static const struct agc_kernels *portable(void)
{
    static struct agc_kernels k;
    agc_kernels_init(&k, 0);
    return &k;
}

/* One lane of one bucket, its elements end to end. */
struct lane_view {
    struct agc_lane_plan plan;
    const struct agc_codec *codec;
    bool feedback;
    bool has_residual;
    bool is_f64;
    bool bf16; /* residuals */
    uint32_t npieces;
    uint32_t param[NPIECES_MAX];
    uint64_t lane_elem[NPIECES_MAX + 1]; /* where each piece begins; the end of the last */
    uint64_t piece_nelems[NPIECES_MAX];
    uint64_t bucket_elem[NPIECES_MAX];
};

static struct lane_view view_lane(const struct model *m, uint32_t bucket, uint32_t lane)
{
    const struct bucket_layout *b = &m->layout->buckets[bucket];
    struct lane_view v = {0};
    struct agc_spec spec;
    uint64_t bucket_elem = 0;
    CHECK_OK(agc_spec_resolve(&b->lanes[lane].spec, &spec));
    v.codec = agc_codec_find(spec.codec);
    v.feedback = b->lanes[lane].feedback && !(v.codec->flags & AGC_CODEC_LOSSLESS);
    v.bf16 = b->lanes[lane].feedback_bf16;
    v.is_f64 = agc_work_dtype(v.codec, b->dtype) == AGC_DTYPE_F64;
    for (uint32_t i = 0; i < b->npieces; i++) {
        uint64_t nelems = m->layout->params[b->pieces[i].param];
        if (b->pieces[i].lane == lane) {
            v.param[v.npieces] = b->pieces[i].param;
            v.bucket_elem[v.npieces] = bucket_elem;
            v.piece_nelems[v.npieces] = nelems;
            /* sign: a parameter begins a block */
            if (nelems && v.codec->flags & AGC_CODEC_ZERO_IN_BLOCK_MOVES)
                v.lane_elem[v.npieces] = (v.lane_elem[v.npieces] + spec.block_nelems - 1) /
                                         spec.block_nelems * spec.block_nelems;
            v.lane_elem[v.npieces + 1] = v.lane_elem[v.npieces] + nelems;
            v.npieces++;
            v.has_residual |= m->has_residual[b->pieces[i].param];
        }
        bucket_elem += nelems;
    }
    v.plan = agc_plan_lane(&spec, b->dtype, v.lane_elem[v.npieces], m->nranks);
    return v;
}

static uint32_t piece_of(const struct lane_view *v, uint64_t lane_elem)
{
    uint32_t i = 0;
    while (v->lane_elem[i + 1] <= lane_elem)
        i++;
    return i;
}

/* Behind the last element of a piece and before the next one's block. */
static bool is_gap(const struct lane_view *v, uint64_t lane_elem)
{
    uint32_t p = piece_of(v, lane_elem);
    return lane_elem - v->lane_elem[p] >= v->piece_nelems[p];
}

static bool is_aligned(const struct lane_view *v)
{
    return (v->codec->flags & AGC_CODEC_ZERO_IN_BLOCK_MOVES) != 0;
}

static void allocate_residuals(struct model *m)
{
    const struct layout *l = m->layout;
    for (uint32_t b = 0; b < l->nbuckets; b++) {
        for (uint32_t lane = 0; lane < l->buckets[b].nlanes; lane++) {
            struct lane_view v = view_lane(m, b, lane);
            uint64_t nelems = v.lane_elem[v.npieces];
            for (uint32_t i = 0; v.feedback && i < v.npieces; i++)
                m->has_residual[v.param[i]] |= l->params[v.param[i]] > 0;
            if (v.feedback && !v.plan.direct) {
                m->owner_residual[b][lane] = (float *)test_alloc(4 * nelems);
                memset(m->owner_residual[b][lane], 0, 4 * nelems);
            }
        }
    }
}

struct model *model_create(uint32_t nranks, const struct layout *layout, uint32_t seed)
{
    struct model *m = (struct model *)test_alloc(sizeof *m);
    memset(m, 0, sizeof *m);
    m->layout = layout;
    m->nranks = nranks;
    m->seed = seed;
    for (uint32_t r = 0; r < nranks; r++) {
        for (uint32_t p = 0; p < layout->nparams; p++) {
            m->residual[r][p] = (float *)test_alloc(4 * layout->params[p]);
            memset(m->residual[r][p], 0, 4 * layout->params[p]);
        }
    }
    allocate_residuals(m);
    return m;
}

static void free_owner_residuals(struct model *m)
{
    for (uint32_t b = 0; b < NBUCKETS_MAX; b++) {
        for (uint32_t lane = 0; lane < NLANES_MAX; lane++) {
            free(m->owner_residual[b][lane]);
            m->owner_residual[b][lane] = NULL;
        }
    }
}

void model_destroy(struct model *m)
{
    free_owner_residuals(m);
    for (uint32_t r = 0; r < m->nranks; r++)
        for (uint32_t p = 0; p < NPARAMS_MAX; p++)
            free(m->residual[r][p]);
    free(m);
}

/* ---- one exchange ------------------------------------------------------------------------ */

/* Element i of an array of floats or doubles. */
static double get(const struct lane_view *v, const void *x, uint64_t i)
{
    return v->is_f64 ? ((const double *)x)[i] : (double)((const float *)x)[i];
}

static void lane_load(const struct lane_view *v, const uint8_t *bucket, void *x)
{
    for (uint64_t i = 0; i < v->lane_elem[v->npieces]; i++) {
        uint32_t piece = piece_of(v, i);
        if (is_gap(v, i)) {
            ((float *)x)[i] = 0.0f;
            continue;
        }
        const uint8_t *src = bucket + (v->bucket_elem[piece] + i - v->lane_elem[piece]) *
                                          agc_dtype_nbytes(v->plan.dtype);
        if (v->is_f64)
            memcpy((double *)x + i, src, 8);
        else
            agc_elements_load(portable(), v->plan.dtype, src, 1, (float *)x + i);
    }
}

static void lane_store(const struct lane_view *v, const void *x, uint8_t *bucket)
{
    for (uint64_t i = 0; i < v->lane_elem[v->npieces]; i++) {
        uint32_t piece = piece_of(v, i);
        if (is_gap(v, i))
            continue;
        uint8_t *dst = bucket + (v->bucket_elem[piece] + i - v->lane_elem[piece]) *
                                    agc_dtype_nbytes(v->plan.dtype);
        if (v->is_f64)
            memcpy(dst, (const double *)x + i, 8);
        else
            agc_elements_store(portable(), v->plan.dtype, (const float *)x + i, 1, dst);
    }
}

/* Encodes the tile of n elements from element `first` on with a residual, which belongs to element
 * 0 of the lane. live: per element, whether its residual takes part; where it does not, it is kept.
 * residual NULL: none. */
static void encode_floats(const struct lane_view *v, const struct agc_tile *tile, uint64_t first,
                          const void *x, float *residual, const bool *live, uint8_t *payload)
{
    static float taken[AGC_TILE_NELEMS_MAX];
    const uint8_t *tile_x = (const uint8_t *)x + first * (v->is_f64 ? 8 : 4);
    uint32_t work = v->is_f64 ? AGC_DTYPE_F64 : AGC_DTYPE_F32;
    if (is_aligned(v)) { /* each piece by itself */
        memset(payload, 0, agc_tile_nbytes(&tile->spec, tile->dtype, tile->nelems));
        for (uint32_t p = 0; p < v->npieces; p++) {
            uint64_t begin = v->lane_elem[p], end = begin + v->piece_nelems[p];
            begin = begin > first ? begin : first;
            end = end < first + tile->nelems ? end : first + tile->nelems;
            if (begin >= end)
                continue;
            v->codec->encode_run(tile, (const float *)x + begin, work,
                                 residual && live[begin] ? residual + begin : NULL,
                                 (uint32_t)(begin - first), (uint32_t)(end - begin), payload);
        }
        return;
    }
    if (!residual) {
        agc_tile_encode(v->codec, tile, tile_x, work, NULL, payload);
        return;
    }
    for (uint32_t i = 0; i < tile->nelems; i++)
        taken[i] = live[first + i] ? residual[first + i] : 0.0f;
    agc_tile_encode(v->codec, tile, tile_x, work, taken, payload);
    for (uint32_t i = 0; i < tile->nelems; i++)
        residual[first + i] = live[first + i] ? taken[i] : residual[first + i];
}

/* The same; residuals that are kept in half the memory are rounded as they are stored. */
static void encode_tile(const struct lane_view *v, const struct agc_tile *tile, uint64_t first,
                        const void *x, float *residual, const bool *live, struct agc_rng rng,
                        uint8_t *payload)
{
    encode_floats(v, tile, first, x, residual, live, payload);
    for (uint32_t i = 0; residual && v->bf16 && i < tile->nelems; i++)
        if (live[first + i])
            residual[first + i] = agc_bf16_to_f32(
                agc_f32_to_bf16_stochastic(residual[first + i], agc_rng_at(rng, i) >> 16));
}

/* Liveness of a rank's gradient: per parameter. */
static void mark_live_params(const struct lane_view *v, const void *x, bool *live)
{
    for (uint32_t p = 0; p < v->npieces; p++) {
        bool any = false;
        for (uint64_t i = v->lane_elem[p]; i < v->lane_elem[p + 1]; i++)
            any |= get(v, x, i) != 0.0; /* NaN is */
        for (uint64_t i = v->lane_elem[p]; i < v->lane_elem[p + 1]; i++)
            live[i] = any;
    }
}

/* Liveness of a mean: per parameter and tile. */
static void mark_live_runs(const struct lane_view *v, const void *x, bool *live)
{
    uint64_t begin = 0, nelems = v->lane_elem[v->npieces];
    while (begin < nelems) {
        uint64_t end = v->lane_elem[piece_of(v, begin) + 1];
        uint64_t tile_end = (begin / v->plan.tile_nelems + 1) * v->plan.tile_nelems;
        bool any = false;
        end = end < tile_end ? end : tile_end;
        for (uint64_t i = begin; i < end; i++)
            any |= get(v, x, i) != 0.0;
        for (uint64_t i = begin; i < end; i++)
            live[i] = any;
        begin = end;
    }
}

static float scratch[AGC_SCRATCH_NELEMS];

static struct agc_rng index_rng(const struct model *m, uint32_t round, uint32_t bucket,
                                uint32_t lane, uint64_t first)
{
    return agc_rng_key(m->seed, round, bucket, lane | AGC_RNG_LANE_OF_INDICES, first);
}

static struct agc_rng residual_rng(const struct model *m, uint32_t round, uint32_t bucket,
                                   uint32_t lane, uint64_t first)
{
    return agc_rng_key(m->seed, round, bucket, lane | AGC_RNG_LANE_OF_RESIDUALS, first);
}

static void exchange_lane(struct model *m, uint32_t bucket, uint32_t lane, uint32_t round,
                          uint8_t *const gradients[], const bool *absent, uint8_t *result)
{
    const struct lane_view v = view_lane(m, bucket, lane);
    uint64_t nelems = v.lane_elem[v.npieces];
    size_t elem_nbytes = v.is_f64 ? 8 : 4;
    uint32_t work = v.is_f64 ? AGC_DTYPE_F64 : AGC_DTYPE_F32;
    void *x = test_alloc(elem_nbytes * nelems), *mean = test_alloc(elem_nbytes * nelems);
    float *residual = (float *)test_alloc(4 * nelems);
    bool *live = (bool *)test_alloc(nelems);
    uint8_t *payload = (uint8_t *)test_alloc(8 * AGC_TILE_NELEMS_MAX + 8192);
    uint32_t ncounted = m->nranks;
    for (uint32_t r = 0; absent && r < m->nranks; r++)
        ncounted -= absent[r];
    double weight = m->layout->buckets[bucket].sum ? 1.0 : 1.0 / (ncounted ? ncounted : m->nranks);

    for (uint32_t rank = 0; rank < m->nranks; rank++) {
        lane_load(&v, gradients[rank], x);
        mark_live_params(&v, x, live);
        for (uint64_t i = 0; i < nelems; i++) {
            uint32_t p = piece_of(&v, i);
            residual[i] = is_gap(&v, i) ? 0.0f : m->residual[rank][v.param[p]][i - v.lane_elem[p]];
        }
        for (uint64_t first = 0; first < nelems; first += v.plan.tile_nelems) {
            uint64_t t = first / v.plan.tile_nelems;
            struct agc_tile tile = {
                .kernels = portable(),
                .spec = v.plan.spec,
                .dtype = v.plan.dtype,
                .nelems = agc_plan_tile_nelems(&v.plan, t),
                .rng = agc_rng_key(m->seed, round, bucket, lane | (rank + 1) << 8, first),
                .index_rng = index_rng(m, round, bucket, lane, first),
                .scratch = scratch};
            encode_tile(&v, &tile, first, x, v.has_residual ? residual : NULL, live,
                        residual_rng(m, round, bucket, lane | (rank + 1) << 8, first), payload);
            v.codec->decode(&tile, payload, weight, rank > 0, (uint8_t *)mean + first * elem_nbytes,
                            work);
        }
        for (uint64_t i = 0; i < nelems; i++) {
            uint32_t p = piece_of(&v, i);
            if (m->has_residual[v.param[p]] && !is_gap(&v, i))
                m->residual[rank][v.param[p]][i - v.lane_elem[p]] = residual[i];
        }
    }
    for (uint64_t i = 0; is_aligned(&v) && i < nelems; i++)
        if (is_gap(&v, i))
            ((float *)mean)[i] = 0.0f;
    if (!v.plan.direct) {
        mark_live_runs(&v, mean, live);
        for (uint64_t first = 0; first < nelems; first += v.plan.tile_nelems) {
            uint64_t t = first / v.plan.tile_nelems;
            struct agc_tile tile = {.kernels = portable(),
                                    .spec = v.plan.spec,
                                    .dtype = v.plan.dtype,
                                    .nelems = agc_plan_tile_nelems(&v.plan, t),
                                    .rng = agc_rng_key(m->seed, round, bucket, lane, first),
                                    .index_rng = index_rng(m, round, bucket, lane, first),
                                    .scratch = scratch};
            encode_tile(&v, &tile, first, mean, m->owner_residual[bucket][lane], live,
                        residual_rng(m, round, bucket, lane, first), payload);
            v.codec->decode(&tile, payload, 1.0, false, (uint8_t *)mean + first * elem_nbytes,
                            work);
        }
    }
    lane_store(&v, mean, result);
    free(x);
    free(mean);
    free(residual);
    free(live);
    free(payload);
}

void model_exchange(struct model *m, uint32_t bucket, uint32_t round, uint8_t *const gradients[],
                    const bool *absent, uint8_t *result)
{
    if (m->nranks == 1) {
        memcpy(result, gradients[0], bucket_nbytes(m->layout, bucket));
        return;
    }
    for (uint32_t lane = 0; lane < m->layout->buckets[bucket].nlanes; lane++)
        exchange_lane(m, bucket, lane, round, gradients, absent, result);
}

/* ---- between layouts --------------------------------------------------------------------- */

/* Adds nranks times what `rank` owes as an owner to the parameter's elements. */
static void add_owner_residual(const struct model *m, uint32_t rank, uint32_t param, float *dst)
{
    for (uint32_t b = 0; b < m->layout->nbuckets; b++) {
        for (uint32_t lane = 0; lane < m->layout->buckets[b].nlanes; lane++) {
            const struct lane_view v = view_lane(m, b, lane);
            for (uint32_t p = 0; m->owner_residual[b][lane] && p < v.npieces; p++) {
                for (uint64_t i = v.lane_elem[p];
                     v.param[p] == param && i < v.lane_elem[p] + v.piece_nelems[p]; i++)
                    if (i / v.plan.tile_nelems % m->nranks == rank)
                        dst[i - v.lane_elem[p]] += (float)m->nranks * m->owner_residual[b][lane][i];
            }
        }
    }
}

void model_relayout(struct model *m, const struct layout *layout)
{
    for (uint32_t r = 0; r < m->nranks; r++)
        for (uint32_t p = 0; p < m->layout->nparams; p++)
            add_owner_residual(m, r, p, m->residual[r][p]);
    free_owner_residuals(m);
    m->layout = layout;
    allocate_residuals(m);
}

void model_residual(const struct model *m, uint32_t rank, uint32_t param, bool owner, float *dst)
{
    memcpy(dst, m->residual[rank][param], 4 * m->layout->params[param]);
    if (owner)
        add_owner_residual(m, rank, param, dst);
}
