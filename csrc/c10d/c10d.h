/* c10d.h: the C interface of the transport over torch.distributed's process groups. */
#ifndef AGC_C10D_H
#define AGC_C10D_H

#include "reduce/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a transport over the process group registered under group_name, which is then the
 * transport's alone. It keeps the group alive until destroy, which must not be called while holding
 * a lock that the group's threads may want (Python's GIL, for one). On failure error_text says why.
 */
AGC_NODISCARD enum agc_status agc_c10d_open(const char *group_name,
                                            struct agc_transport *transport_ret, char *error_text,
                                            size_t error_text_cap_nbytes);

/* Version of torch that this was compiled against. */
const char *agc_c10d_torch_version(void);

#ifdef __cplusplus
}
#endif
#endif /* AGC_C10D_H */
