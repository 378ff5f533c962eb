/* agentcomm.h: the public C interface of agentcomm's core.
 *
 * The core turns gradients into frames and back (codecs), and averages buckets of gradients over
 * ranks (engine). It knows neither Python nor torch nor a network: bytes travel through a table of
 * functions that the caller supplies (struct agc_transport).
 *
 * Life cycle: codecs are stateless functions. An engine is created for one transport and one list
 * of parameters, is told the layout of each bucket once, gets buckets submitted round after round,
 * and is destroyed.
 *
 * Threads: codec functions may be called from any thread at once. An engine's functions may be
 * called from any thread; buckets of one engine are exchanged in the order of their submission,
 * which must be the same on all ranks.
 *
 * Errors: every function that can fail returns enum agc_status; results are written through `_ret`
 * pointers on success only. The core never prints, never reads the environment, never ends the
 * process.
 */
#ifndef AGENTCOMM_H
#define AGENTCOMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define AGC_VERSION_MAJOR 0
#define AGC_VERSION_MINOR 1
#define AGC_VERSION_PATCH 0

#if defined(__GNUC__)
#define AGC_NODISCARD __attribute__((warn_unused_result))
#else
#define AGC_NODISCARD
#endif

/* ---- status ---- */

enum agc_status {
#define AGC_STATUS(name, value, fatal, exception, text) AGC_##name = value,
#include "agc_status.inc"
#undef AGC_STATUS
};

/* Name of a status ("AGC_ERR_TRUNCATED"), its sentence, and the Python exception class. Never NULL,
 * whatever the value. */
const char *agc_status_name(enum agc_status s);
const char *agc_status_text(enum agc_status s);
const char *agc_status_exception(enum agc_status s);

/* False: the caller may correct its call and go on with the same objects. */
bool agc_status_is_fatal(enum agc_status s);

/* ---- data types ---- */

/* Values are part of the wire format. */
enum agc_dtype {
    AGC_DTYPE_F32 = 1,
    AGC_DTYPE_F16 = 2,
    AGC_DTYPE_BF16 = 3,
    AGC_DTYPE_F64 = 4,
};

/* Bytes of one element; 0 for an unknown value. */
uint32_t agc_dtype_nbytes(uint32_t dtype);

/* ---- codecs ---- */

enum agc_rounding {
    AGC_ROUNDING_NEAREST = 0,    /* half to even */
    AGC_ROUNDING_STOCHASTIC = 1, /* up with probability equal to the fraction: unbiased */
};

/* What names a codec: the C form of a spec such as "int8[block=128]". Zero means the codec's
 * default in every field but codec. */
struct agc_spec {
    uint32_t codec;        /* id from codec_list.inc */
    uint32_t block_nelems; /* elements that share a scale: a power of two in 32..4096 */
    uint32_t rounding;     /* enum agc_rounding */
    uint32_t frac_e9;      /* sparse codecs: kept fraction in parts of 10^9, 1..10^9 */
    uint32_t values;       /* sparse codecs: id of the codec of the kept values, to which
                              block_nelems and rounding belong; 0: raw */
};

enum {
    AGC_CODEC_LOSSLESS = 1 << 0,   /* decode gives back what was encoded */
    AGC_CODEC_BLOCKS = 1 << 1,     /* has a scale per block: agc_spec.block_nelems counts */
    AGC_CODEC_FEEDBACK = 1 << 2,   /* feedback="auto" means on */
    AGC_CODEC_STOCHASTIC = 1 << 3, /* offers AGC_ROUNDING_STOCHASTIC */
    AGC_CODEC_ZERO_IN_BLOCK_MOVES = 1 << 4, /* a zero beside non-zeros may decode to non-zero */
    AGC_CODEC_SPARSE = 1 << 5, /* keeps agc_spec.frac_e9, in the codec agc_spec.values */
    AGC_CODEC_VALUES = 1 << 6, /* may be agc_spec.values */
};

/* Facts about one codec, for tables and tests. */
struct agc_codec_info {
    uint32_t id;
    const char *name;
    uint32_t flags;                /* AGC_CODEC_... */
    uint32_t default_block_nelems; /* 0: no blocks */
};

/* i-th codec in order of id; false beyond the last. */
bool agc_codec_info_at(uint32_t i, struct agc_codec_info *info_ret);

/* Fills in defaults and checks ranges. AGC_ERR_SPEC; AGC_ERR_CODEC for an unknown id. */
AGC_NODISCARD enum agc_status agc_spec_resolve(const struct agc_spec *spec,
                                               struct agc_spec *resolved_ret);

/* ---- frames ---- */

/* What a header says (docs/wire_format.md). */
struct agc_frame {
    struct agc_spec spec;
    uint32_t dtype; /* of the tensor that was encoded */
    uint32_t flags; /* AGC_FRAME_... of core/wire.h */
    uint32_t tile_nelems;
    uint64_t nelems;
    uint64_t payload_nbytes;
    uint64_t stream;
    uint32_t seed;
    uint32_t round;
    uint32_t bucket;
    uint32_t lane;
    uint32_t nforwards;  /* synchronising forward passes since the previous round, at most 255; 0:
                            not told */
    uint32_t chunk_log2; /* announcement of group rank 0: dense bytes of the next round's chunks; 0:
                            none */
    uint32_t first_tile;
    uint32_t ntiles;
};

/* Bytes of the frame that agc_encode writes: a pure function of its arguments. AGC_ERR_SPEC,
 * AGC_ERR_CODEC, AGC_ERR_DTYPE. */
AGC_NODISCARD enum agc_status agc_frame_nbytes(const struct agc_spec *spec, uint32_t dtype,
                                               uint64_t nelems, bool checksum,
                                               uint64_t *nbytes_ret);

/* Floats of scratch that agc_encode and agc_decode need: four tiles, and room behind each for a
 * vector. */
#define AGC_SCRATCH_NELEMS (4 * (65536 + 16))

/* Encodes nelems elements of src (no alignment needed) into one self-describing frame.
 * residual: NULL, or nelems floats that are added to src before encoding and hold the loss
 * afterwards (error feedback); it must not overlap src. checksum: adds CRC32C of the payload.
 * scratch: AGC_SCRATCH_NELEMS floats. On failure nothing is written. AGC_ERR_DST_TOO_SMALL and the
 * errors of agc_frame_nbytes. Deterministic: same arguments, same bytes, on every CPU. */
AGC_NODISCARD enum agc_status agc_encode(const struct agc_spec *spec, const void *src,
                                         uint32_t dtype, uint64_t nelems, float *residual,
                                         uint32_t seed, bool checksum, float *scratch, uint8_t *dst,
                                         uint64_t dst_cap_nbytes, uint64_t *nbytes_ret);

/* The same in up to nthreads threads, which live for the call; the bytes do not depend on their
 * number. scratch: AGC_SCRATCH_NELEMS floats for each. */
AGC_NODISCARD enum agc_status agc_encode_parallel(const struct agc_spec *spec, const void *src,
                                                  uint32_t dtype, uint64_t nelems, float *residual,
                                                  uint32_t seed, bool checksum, uint32_t nthreads,
                                                  float *scratch, uint8_t *dst,
                                                  uint64_t dst_cap_nbytes, uint64_t *nbytes_ret);

/* Reads and checks a header: everything that can be checked without the payload. All AGC_ERR_... of
 * group -2x. */
AGC_NODISCARD enum agc_status agc_frame_parse(const uint8_t *src, uint64_t nbytes,
                                              struct agc_frame *frame_ret);

/* Decodes a frame into out (nelems elements of out_dtype; must equal the frame's number of
 * elements), adding to what out holds if add. Safe on untrusted bytes: nothing is read or written
 * outside src and out. The errors of agc_frame_parse, AGC_ERR_PAYLOAD, AGC_ERR_PAYLOAD_CHECKSUM,
 * AGC_ERR_NELEMS, AGC_ERR_DTYPE. */
AGC_NODISCARD enum agc_status agc_decode(const uint8_t *src, uint64_t nbytes, void *out,
                                         uint32_t out_dtype, uint64_t nelems, bool add,
                                         float *scratch);

/* The same in up to nthreads threads. scratch: AGC_SCRATCH_NELEMS floats for each. */
AGC_NODISCARD enum agc_status agc_decode_parallel(const uint8_t *src, uint64_t nbytes, void *out,
                                                  uint32_t out_dtype, uint64_t nelems, bool add,
                                                  uint32_t nthreads, float *scratch);

/* ---- CPU ---- */

enum {
    AGC_CPU_AVX2 = 1 << 0,   /* AVX2, FMA, F16C, BMI2 and the operating system saves ymm */
    AGC_CPU_AVX512 = 1 << 1, /* F, BW, DQ, VL, and the operating system saves zmm and masks */
    AGC_CPU_CRC32 = 1 << 2,  /* SSE4.2 crc32 */
};

/* Features of this CPU, less those masked away; and the mask (for tests and benchmarks; not while
 * other threads encode). */
uint32_t agc_cpu_features(void);
void agc_cpu_set_mask(uint32_t mask);
/* Name of the best tier in a set of features: "avx512", "avx2" or "c". */
const char *agc_cpu_tier_name(uint32_t features);

#ifdef __cplusplus
}
#endif
#endif /* AGENTCOMM_H */
