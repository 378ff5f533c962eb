/* header.h: writing and reading the 64 bytes in front of every frame. */
#ifndef AGC_HEADER_H
#define AGC_HEADER_H

#include "agentcomm.h"
#include "core/kernels.h"

/* Writes a header, checksum included. The fields must be in range (agc_spec_resolve,
 * agc_plan_lane). */
void agc_header_write(const struct agc_kernels *k, const struct agc_frame *f,
                      uint8_t dst[AGC_WIRE_HEADER_NBYTES]);

/* Reads a header and checks all that does not depend on codecs: length, magic, version, checksum,
 * ranges of the fields. */
AGC_NODISCARD enum agc_status agc_header_read(const struct agc_kernels *k, const uint8_t *src,
                                              uint64_t nbytes, struct agc_frame *frame_ret);

#endif /* AGC_HEADER_H */
