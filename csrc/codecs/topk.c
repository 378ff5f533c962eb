/* topk.c: the k elements of a tile with the largest magnitudes, and where they are.
 *
 * Method: top-k sparsification with error feedback (Stich, Cordonnier, Jaggi, "Sparsified SGD with
 * Memory", 2018; Lin et al., "Deep Gradient Compression", 2018), exact, per tile, without sorting:
 *
 *   1. a sample of the tile gives a magnitude that somewhat more than k elements reach;
 *   2. one pass over the tile collects those that reach it (vector compress), with their places;
 *   3. a search over the bits of a float finds the k-th largest magnitude among them;
 *   4. what is larger is kept, and of what is equal the first ones, until there are k.
 *
 * The sample decides how many candidates there are and never which elements are kept: if there are
 * fewer than k, step 2 is made again with all of them. NaNs count as larger than infinities, and
 * these as larger than all numbers.
 *
 *   payload: see sparse.h. Bits per element kept: 16, and those of its value.
 *
 * With `pieces` the tile is cut, and each piece keeps the same fraction of its elements.
 */
#include "codecs/pieces.h"
#include "codecs/sparse.h"
#include "core/common.h"
#include "core/elements.h"

#define INDEX_NBYTES 2u
#define NAN_MAGNITUDE (AGC_F32_NAN_BITS & 0x7fffffffu)

/* Runs of the sample: one cache line of floats in each stretch of so many elements. */
#define RUN_NELEMS 16u
#define STRETCH_NELEMS 512u
#define NSAMPLES_MAX (AGC_TILE_NELEMS_MAX / STRETCH_NELEMS * RUN_NELEMS)

/* What is to be selected from: elements [begin, begin + nelems) of a tile. */
struct source {
    const struct agc_tile *tile;
    const uint8_t *x; /* of the tile's first element */
    uint32_t x_dtype;
    const float *residual; /* likewise; NULL: none */
    uint32_t begin;
    uint32_t nelems;
};

/* A magnitude, as bits, that `nwanted` of the values reach: exactly, or up to `slack` more; or, if
 * equal ones leave no such magnitude, the largest that at least so many reach. guess: where to
 * begin.
 */
static uint32_t find_magnitude(const struct agc_kernels *k, const float *value, uint32_t nelems,
                               uint32_t nwanted, uint32_t slack, uint32_t guess)
{
    /* low is reached by enough, high is not. */
    uint32_t low = 0, high = NAN_MAGNITUDE + 1, nlow = nelems, nhigh = 0;
    uint32_t probe = agc_max_u32(agc_min_u32(guess, NAN_MAGNITUDE), 1), step = 1u << 17;
    bool bracketed[2] = {false, false}, halve = false;
    while (high - low > 1) {
        uint32_t nreached = k->count_magnitude(value, nelems, probe);
        bool enough = nreached >= nwanted;
        if (enough && nreached - nwanted <= slack)
            return probe;
        bracketed[enough] = true;
        if (enough) {
            low = probe;
            nlow = nreached;
        } else {
            high = probe;
            nhigh = nreached;
        }
        if (high - low <= 1)
            break;
        if (!bracketed[0] || !bracketed[1]) { /* in growing steps away from the guess */
            uint32_t stride = agc_min_u32(step, (high - low) / 2);
            probe = enough ? low + stride : high - stride;
            step *= step < 1u << 28 ? 4 : 1;
        } else { /* by the numbers that reach the two, in turns with the middle */
            uint64_t part = (uint64_t)(high - low) * (nlow - nwanted) / (nlow - nhigh);
            probe = low + (halve ? (high - low) / 2 : (uint32_t)part);
            halve = !halve;
        }
        probe = agc_min_u32(agc_max_u32(probe, low + 1), high - 1);
    }
    return low;
}

static uint32_t isqrt(uint32_t x)
{
    uint32_t root = 0;
    while ((uint64_t)(root + 1) * (root + 1) <= x)
        root++;
    return root;
}

/* What a sample says of a source. */
struct estimate {
    uint32_t floor;  /* a magnitude that more than nkept elements are likely to reach; 0: unknown */
    uint32_t middle; /* one that about nkept reach */
};

static struct estimate estimate_magnitude(const struct source *s, uint32_t nkept)
{
    float sample[NSAMPLES_MAX];
    const struct agc_kernels *k = s->tile->kernels;
    uint32_t nruns = s->nelems / STRETCH_NELEMS, nsamples = nruns * RUN_NELEMS;
    size_t elem_nbytes = agc_dtype_nbytes(s->x_dtype);
    struct estimate e = {0, 0};
    if (nruns < 4)
        return e;
    /* As many of the sample as its share, and three and a half standard deviations. */
    uint32_t share = (uint32_t)((uint64_t)nkept * nsamples / s->nelems);
    uint32_t rank = share + 7 * (isqrt(share) + 1) / 2 + 1;
    if (rank >= nsamples)
        return e;
    for (uint32_t r = 0; r < nruns; r++) {
        /* Not the same place in every stretch: rows of a matrix are often as long. */
        uint32_t place = (r * AGC_RNG_STEP >> 27) * RUN_NELEMS; /* below STRETCH_NELEMS */
        uint32_t at = s->begin + r * STRETCH_NELEMS + place;
        float *run = sample + r * RUN_NELEMS;
        agc_elements_load(k, s->x_dtype, s->x + at * elem_nbytes, RUN_NELEMS, run);
        for (uint32_t i = 0; s->residual && i < RUN_NELEMS; i++)
            run[i] += s->residual[at + i];
    }
    uint32_t one = agc_f32_bits(sample[nsamples / 2]) & 0x7fffffffu;
    e.floor = find_magnitude(k, sample, nsamples, rank, rank / 8, one);
    e.middle = find_magnitude(k, sample, nsamples, share + 1, share / 8, e.floor);
    e.floor = agc_min_u32(e.floor, 0x7f800000u); /* all NaNs are equal, whatever their bits */
    return e;
}

/* Appends the elements that reach a magnitude; returns how many. */
static uint32_t collect(const struct source *s, uint32_t floor, const struct agc_kept *candidates)
{
    const struct agc_kernels *k = s->tile->kernels;
    size_t elem_nbytes = agc_dtype_nbytes(s->x_dtype);
    const uint8_t *x = s->x + s->begin * elem_nbytes;
    const float *residual = s->residual ? s->residual + s->begin : NULL;
    if (agc_is_floats(s->x_dtype, x))
        return k->collect_magnitude((const float *)(const void *)x, residual, s->nelems, s->begin,
                                    floor, candidates->index, candidates->value);
    float piece[AGC_PIECE_NELEMS];
    uint32_t ncollected = 0;
    for (uint32_t first = 0; first < s->nelems; first += AGC_PIECE_NELEMS) {
        uint32_t n = agc_min_u32(AGC_PIECE_NELEMS, s->nelems - first);
        agc_elements_load(k, s->x_dtype, x + first * elem_nbytes, n, piece);
        ncollected += k->collect_magnitude(piece, residual ? residual + first : NULL, n,
                                           s->begin + first, floor, candidates->index + ncollected,
                                           candidates->value + ncollected);
    }
    return ncollected;
}

/* Keeps of n candidates those above a magnitude, and of those that equal it the first nties. */
static void keep_above(uint32_t n, uint32_t last, uint32_t nties, const struct agc_kept *kept)
{
    for (uint32_t i = 0, j = 0; i < n; i++) {
        uint32_t magnitude = agc_f32_bits(kept->value[i]) & 0x7fffffffu;
        uint32_t tie = (magnitude == last) & (nties > 0);
        kept->index[j] = kept->index[i];
        kept->value[j] = kept->value[i];
        nties -= tie;
        j += tie | (magnitude > last);
    }
}

/* Appends the nkept largest elements of a source to what is kept. */
static void select_largest(const struct source *s, uint32_t nkept, const struct agc_kept *kept)
{
    const struct agc_kernels *k = s->tile->kernels;
    struct estimate e = estimate_magnitude(s, nkept);
    uint32_t ncandidates = collect(s, e.floor, kept);
    if (AGC_UNLIKELY(ncandidates < nkept))
        ncandidates = collect(s, 0, kept);
    if (ncandidates == nkept)
        return;
    uint32_t last = find_magnitude(k, kept->value, ncandidates, nkept, 0, e.middle);
    uint32_t nreached = k->count_magnitude(kept->value, ncandidates, last);
    /* One by one, unless there are so many that another pass of vectors is faster. */
    if (nreached == nkept && ncandidates > s->nelems / 8) {
        collect(s, agc_min_u32(last, 0x7f800001u), kept); /* every NaN, whatever its bits */
        return;
    }
    uint32_t nabove = k->count_magnitude(kept->value, ncandidates, last + 1);
    keep_above(ncandidates, last, nkept - nabove, kept);
}

static void select_in_pieces(const struct agc_tile *tile, struct source s, uint32_t nkept,
                             struct agc_kept kept)
{
    /* One of each piece, and the rest by their lengths: sums of floor(total * length / n) up to
     * each piece's end differ by its share. */
    uint64_t nothers = nkept - tile->npieces, nelems = tile->nelems - tile->npieces;
    uint64_t done_before = 0;
    for (uint32_t p = 0; p < tile->npieces; p++) {
        uint32_t end = tile->piece_ends[p];
        uint64_t done = nelems ? nothers * (end - p - 1) / nelems : 0;
        uint32_t share = (uint32_t)(1 + done - done_before);
        s.nelems = end - s.begin;
        select_largest(&s, share, &kept);
        kept.index += share;
        kept.value += share;
        s.begin = end;
        done_before = done;
    }
}

static uint64_t topk_payload_nbytes(const struct agc_spec *spec, uint32_t dtype, uint32_t nelems)
{
    return agc_sparse_payload_nbytes(spec, dtype, nelems, INDEX_NBYTES);
}

static void topk_encode(const struct agc_tile *tile, const void *x, uint32_t x_dtype,
                        float *residual, uint8_t *dst)
{
    struct agc_kept kept = agc_sparse_scratch(tile);
    uint32_t nkept = agc_sparse_nkept(&tile->spec, tile->nelems);
    struct source s = {tile, (const uint8_t *)x, x_dtype, residual, 0, tile->nelems};
    if (tile->npieces > 1 && tile->npieces <= nkept)
        select_in_pieces(tile, s, nkept, kept);
    else
        select_largest(&s, nkept, &kept);
    uint64_t values_at = agc_sparse_values_at(&tile->spec, tile->nelems, INDEX_NBYTES);
    for (uint32_t j = 0; j < nkept; j++)
        agc_store_u16(dst + INDEX_NBYTES * (size_t)j, (uint16_t)kept.index[j]);
    memset(dst + INDEX_NBYTES * (size_t)nkept, 0, values_at - INDEX_NBYTES * (size_t)nkept);
    agc_sparse_send(tile, x, x_dtype, residual, &kept, dst + values_at);
}

static void topk_decode(const struct agc_tile *tile, const uint8_t *src, double weight, bool add,
                        void *out, uint32_t out_dtype)
{
    struct agc_kept kept = agc_sparse_scratch(tile);
    uint32_t nkept = agc_sparse_nkept(&tile->spec, tile->nelems);
    for (uint32_t j = 0; j < nkept; j++)
        kept.index[j] = agc_load_u16(src + INDEX_NBYTES * (size_t)j);
    agc_sparse_receive(tile, src + agc_sparse_values_at(&tile->spec, tile->nelems, INDEX_NBYTES),
                       kept.index, weight, add, out, out_dtype);
}

/* Indices ascend, so that none stands twice, and stay inside the tile. */
static enum agc_status topk_validate(const struct agc_tile *tile, const uint8_t *src)
{
    uint32_t nkept = agc_sparse_nkept(&tile->spec, tile->nelems), next = 0;
    for (uint32_t j = 0; j < nkept; j++) {
        uint32_t index = agc_load_u16(src + INDEX_NBYTES * (size_t)j);
        if (index < next || index >= tile->nelems)
            return AGC_ERR_PAYLOAD;
        next = index + 1;
    }
    return agc_sparse_validate(tile,
                               src + agc_sparse_values_at(&tile->spec, tile->nelems, INDEX_NBYTES));
}

const struct agc_codec agc_codec_topk = {
    .id = 16,
    .name = "topk",
    .flags = AGC_CODEC_SPARSE | AGC_CODEC_FEEDBACK,
    .payload_nbytes = topk_payload_nbytes,
    .encode = topk_encode,
    .decode = topk_decode,
    .validate = topk_validate,
};
