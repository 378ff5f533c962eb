/* dlpack.h: the structures of DLPack 0.x (github.com/dmlc/dlpack), by which tensors cross from
 * torch to _core without torch's headers. Only what is read here; the layout is fixed by that
 * specification.
 */
#ifndef AGC_DLPACK_H
#define AGC_DLPACK_H

#include <stdint.h>

enum { DLPACK_DEVICE_CPU = 1 };
enum { DLPACK_UINT = 1, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4 };

struct dlpack_tensor {
    void *data;
    struct {
        int32_t type;
        int32_t id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code;
        uint8_t bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: row-major without gaps */
    uint64_t byte_offset;
};

struct dlpack_managed {
    struct dlpack_tensor tensor;
    void *manager_ctx;
    void (*deleter)(struct dlpack_managed *self);
};

#endif /* AGC_DLPACK_H */
