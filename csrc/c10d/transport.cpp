/* transport.cpp: the transport over a c10d process group. The only file that includes PyTorch, and
 * the only C++.
 *
 * On the CPU it uses point-to-point operations: on gloo, send and recv are carried out by the
 * calling thread as far as the socket takes them, while gloo's collectives hand every operation to
 * another thread (1.3 to 4 times slower here). The group's own timeout is kept out of the way by an
 * explicit one in every wait (Backend::setTimeout does not reach gloo's connections): after a
 * timeout gloo closes all of them, and the other ranks could no longer be told who was missing. The
 * engine's watch cancels a wait instead (Work::abort), which leaves the connections up.
 */
#include "c10d/c10d.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/version.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

namespace
{

/* Longer than any wait; the watch ends waits. */
constexpr std::chrono::hours kNever{24 * 365};

struct Group {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    c10::intrusive_ptr<c10d::Backend> cpu;
};

using Request = c10::intrusive_ptr<c10d::Work>;

/* What the last failed call on this thread said. */
thread_local std::string last_error;

Group &group_of(void *ctx)
{
    return *static_cast<Group *>(ctx);
}

/* No exception may pass into C. */
template <typename Function>
enum agc_status guarded(enum agc_status on_failure, Function &&function)
{
    try {
        return function();
    } catch (const std::bad_alloc &) {
        last_error = "out of memory";
        return AGC_ERR_NOMEM;
    } catch (const std::exception &e) {
        last_error = e.what();
    } catch (...) {
        last_error = "unknown exception";
    }
    return on_failure;
}

/* gloo guards a connection by one lock, which a sender holds while it writes; a message that
 * arrives meanwhile makes the event loop spin for the lock. Each direction of a pair therefore uses
 * a connection of its own: a group that was made with several devices has one per device, and
 * chooses by the tag, modulo their number. */
int tag_of(uint32_t channel, int from, int to)
{
    return static_cast<int>(channel) * 2 + (from < to ? 1 : 0);
}

std::vector<at::Tensor> as_bytes(const void *buf, uint64_t nbytes)
{
    return {at::from_blob(const_cast<void *>(buf), {static_cast<int64_t>(nbytes)}, at::kByte)};
}

at::Tensor as_device_bytes(const void *buf, uint64_t nbytes, int device)
{
    auto options = at::TensorOptions().dtype(at::kByte).device(
        at::kCUDA, static_cast<c10::DeviceIndex>(device));
    return at::from_blob(const_cast<void *>(buf), {static_cast<int64_t>(nbytes)}, options);
}

enum agc_status c10d_send(void *ctx, uint32_t peer, uint32_t channel, const void *buf,
                          uint64_t nbytes, void **request_ret)
{
    return guarded(AGC_ERR_PEER, [&] {
        auto tensors = as_bytes(buf, nbytes);
        auto &cpu = *group_of(ctx).cpu;
        int to = static_cast<int>(peer);
        *request_ret = new Request(cpu.send(tensors, to, tag_of(channel, cpu.getRank(), to)));
        return AGC_OK;
    });
}

enum agc_status c10d_recv(void *ctx, uint32_t peer, uint32_t channel, void *buf, uint64_t nbytes,
                          void **request_ret)
{
    return guarded(AGC_ERR_PEER, [&] {
        auto tensors = as_bytes(buf, nbytes);
        auto &cpu = *group_of(ctx).cpu;
        int from = static_cast<int>(peer);
        *request_ret = new Request(cpu.recv(tensors, from, tag_of(channel, from, cpu.getRank())));
        return AGC_OK;
    });
}

enum agc_status c10d_wait(void *, void *request)
{
    return guarded(AGC_ERR_PEER, [&] {
        bool completed = (*static_cast<Request *>(request))->wait(kNever);
        if (!completed)
            last_error = "the wait was cancelled";
        return completed ? AGC_OK : AGC_ERR_CLOSED;
    });
}

void c10d_cancel(void *, void *request)
{
    (void)guarded(AGC_ERR_PEER, [&] {
        (*static_cast<Request *>(request))->abort();
        return AGC_OK;
    });
}

void c10d_release(void *, void *request)
{
    delete static_cast<Request *>(request);
}

void c10d_error_text(void *, char *dst, size_t dst_cap_nbytes)
{
    /* gloo appends advice on many lines; the first says what happened. */
    std::string line = last_error.substr(0, last_error.find('\n'));
    std::snprintf(dst, dst_cap_nbytes, "%s", line.c_str());
}

void c10d_destroy(void *ctx)
{
    delete static_cast<Group *>(ctx);
}

enum agc_status c10d_alltoall(void *ctx, int device, const void *send, void *recv, uint64_t nbytes)
{
    return guarded(AGC_ERR_PEER, [&] {
        auto &group = group_of(ctx).group;
        uint64_t total = nbytes * static_cast<uint64_t>(group->getSize());
        at::Tensor in = as_device_bytes(send, total, device),
                   out = as_device_bytes(recv, total, device);
        std::vector<int64_t> even;
        group->getBackend(c10::DeviceType::CUDA)->alltoall_base(out, in, even, even)->wait();
        return AGC_OK;
    });
}

enum agc_status c10d_allgather(void *ctx, int device, const void *send, void *recv, uint64_t nbytes)
{
    return guarded(AGC_ERR_PEER, [&] {
        auto &group = group_of(ctx).group;
        uint64_t total = nbytes * static_cast<uint64_t>(group->getSize());
        at::Tensor in = as_device_bytes(send, nbytes, device),
                   out = as_device_bytes(recv, total, device);
        group->getBackend(c10::DeviceType::CUDA)->_allgather_base(out, in)->wait();
        return AGC_OK;
    });
}

bool serves(c10d::ProcessGroup &group, c10::DeviceType type)
{
    for (const auto &device : group.getDeviceTypes())
        if (device.type() == type)
            return true;
    return false;
}

} // namespace

enum agc_status agc_c10d_open(const char *group_name, struct agc_transport *transport_ret,
                              char *error_text, size_t error_text_cap_nbytes)
{
    Group *opened = nullptr;
    enum agc_status status = guarded(AGC_ERR_STATE, [&] {
        auto group = c10d::resolve_process_group(group_name);
        bool cpu = serves(*group, c10::DeviceType::CPU),
             cuda = serves(*group, c10::DeviceType::CUDA);
        if (!cpu && !cuda) {
            last_error = "the process group serves neither CPU nor CUDA tensors";
            return AGC_ERR_STATE;
        }
        *transport_ret = {};
        opened = new Group{group, {}};
        transport_ret->ctx = opened;
        transport_ret->rank = static_cast<uint32_t>(group->getRank());
        transport_ret->nranks = static_cast<uint32_t>(group->getSize());
        if (cpu) {
            opened->cpu = group->getBackend(c10::DeviceType::CPU);
            transport_ret->send = c10d_send;
            transport_ret->recv = c10d_recv;
            transport_ret->wait = c10d_wait;
        }
        transport_ret->cancel = c10d_cancel;
        transport_ret->release = c10d_release;
        transport_ret->error_text = c10d_error_text;
        transport_ret->destroy = c10d_destroy;
        if (cuda) {
            transport_ret->alltoall = c10d_alltoall;
            transport_ret->allgather = c10d_allgather;
        }
        return AGC_OK;
    });
    if (status != AGC_OK) {
        c10d_error_text(nullptr, error_text, error_text_cap_nbytes);
        delete opened;
    }
    return status;
}

const char *agc_c10d_torch_version()
{
    return TORCH_VERSION;
}
