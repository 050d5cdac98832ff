// One call of a handler: the functions of the library, the checks that all collectives have in
// common, and the wait for asynchronous host calls.

#ifndef DEVICEMESH_JAX_CALL_H
#define DEVICEMESH_JAX_CALL_H

#include <dlfcn.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "devicemesh.h"
#include "elements.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Operand = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;
using Token = ffi::Token;
using TokenOut = ffi::Result<ffi::Token>;

// The functions of the copy of libdevicemesh that Python has loaded. Another copy would not know
// its meshes. devicemesh_jax_connect sets them once.
#define DEVICEMESH_FUNCTIONS(X)                                                                                       \
  X(dm_lookup) X(dm_free) X(dm_size) X(dm_device_type) X(dm_get_local_rank) X(dm_last_error) X(dm_status_name)        \
  X(dm_all_reduce) X(dm_reduce) X(dm_broadcast) X(dm_all_gather) X(dm_reduce_scatter) X(dm_all_to_all) X(dm_send)     \
  X(dm_recv) X(dm_group_start) X(dm_group_end) X(dm_get_comm) X(dm_get_proc) X(dm_all_to_allv)                        \
  X(dm_all_gatherv) X(dm_reduce_scatterv)

struct Library {
#define MEMBER(name) decltype(&::name) name = nullptr;
  DEVICEMESH_FUNCTIONS(MEMBER)
#undef MEMBER
};

Library library;

// How many groups (mesh.group() in Python) are open in this process now. The package waits for all
// handlers before it opens one and before it ends one, so a handler that sees a group belongs to a
// program that was called inside it.
std::atomic<int> open_groups{0};

// The asynchronous host calls of Python (async_op=True) that are not over, by the communicator and
// the name of the dimension along which they run.
struct Queued {
  using Key = std::pair<const void *, std::string>;
  std::mutex lock;
  std::condition_variable less;
  std::map<Key, int> calls;
  // The number of all these calls, which a handler reads without the lock.
  std::atomic<int> all{0};

  // The end of a call whose beginning was not told is ignored: a number below 0 would make wait()
  // wait for ever.
  void change(const Key &key, int by) {
    std::lock_guard<std::mutex> held(lock);
    const auto found = calls.try_emplace(key, 0).first;
    if (found->second + by >= 0) {
      found->second += by;
      all += by;
    }
    if (found->second == 0) calls.erase(found);
    less.notify_all();
  }

  // Returns when no such call along this dimension is left. The deadlines of these calls bound the
  // wait: each call ends at the deadline of its mesh at the latest, and no call is added meanwhile,
  // because Python queues none before the jitted collectives are over that XLA was given.
  void wait(const Key &key) {
    std::unique_lock<std::mutex> held(lock);
    less.wait(held, [&] { return calls.count(key) == 0; });
  }
};

Queued queued;

ffi::ErrorCode code_of(dm_status status) {
  switch (status) {
    case DM_STATUS_INVALID_ARGUMENT: return ffi::ErrorCode::kInvalidArgument;
    case DM_STATUS_NOT_FOUND: return ffi::ErrorCode::kNotFound;
    case DM_STATUS_INVALID_HANDLE:
    case DM_STATUS_NOT_MEMBER:
    case DM_STATUS_INVALID_STATE:
    case DM_STATUS_MISMATCH: return ffi::ErrorCode::kFailedPrecondition;
    case DM_STATUS_TIMEOUT: return ffi::ErrorCode::kDeadlineExceeded;
    case DM_STATUS_STORE:
    case DM_STATUS_LIBRARY:
    case DM_STATUS_PEER_LOST: return ffi::ErrorCode::kUnavailable;
    case DM_STATUS_UNSUPPORTED: return ffi::ErrorCode::kUnimplemented;
    case DM_STATUS_ABORTED: return ffi::ErrorCode::kAborted;
    default: return ffi::ErrorCode::kInternal;
  }
}

// The error of this thread's last failing call.
ffi::Error error_of(dm_status status) {
  return ffi::Error(code_of(status), std::string(library.dm_status_name(status)) + ": " + library.dm_last_error());
}

struct Handle {
  dm_mesh *mesh = nullptr;
  Handle() = default;
  Handle(const Handle &) = delete;
  Handle &operator=(const Handle &) = delete;
  ~Handle() { library.dm_free(mesh); }
};

// Host memory given to NCCL, or device memory to the host engine, would end the process.
ffi::Error check_device(const dm_mesh *mesh, const std::string &name, std::string_view platform) {
  const char *device = library.dm_device_type(mesh);
  if (device == nullptr) return error_of(DM_STATUS_INVALID_HANDLE);
  if (platform == device) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "mesh \"" + name + "\" is on " + device + ", but this computation runs on " + std::string(platform));
}

// The context of XLA's call. A handler asks it for the stream, on the platform that has streams.
struct Origin {
  const XLA_FFI_Api *api;
  XLA_FFI_ExecutionContext *context;
};

}  // namespace

template <>
struct xla::ffi::CtxDecoding<Origin> {
  using Type = Origin;
  static std::optional<Type> Decode(const XLA_FFI_Api *api, XLA_FFI_ExecutionContext *context, DiagnosticEngine &) {
    return Origin{api, context};
  }
};

namespace {

// One call with its checks: the mesh is registered now, the dimension is as long as when the call
// was traced, and the library can move or (a call with an operator) reduce the elements.
struct Call {
  Call(Origin origin, const ffi::Dictionary &attributes, const Operand &operand) : attributes(attributes) {
    error = prepare(origin, operand);
  }

  // Runs the collective, unless a check has failed. A rank whose operand has no elements takes
  // part too, because other ranks may have elements, and the library compares the counts. If this
  // rank left the call out, each of its later calls would be paired with an earlier call of the
  // other ranks.
  template <typename Body>
  ffi::Error run(Body body) {
    if (error.success()) {
      if (dm_status status = body()) return error_of(status);
    }
    return error;
  }

  int64_t number(std::string_view name) { return get<int64_t>(name); }
  std::string text(std::string_view name) { return std::string(get<std::string_view>(name)); }
  ffi::Span<const int64_t> list(std::string_view name) { return get<ffi::Span<const int64_t>>(name); }
  dm_op op() { return static_cast<dm_op>(number("op")); }
  int32_t root() { return static_cast<int32_t>(number("root")); }

  ffi::Dictionary attributes;
  std::string mesh_name, dim_name;
  Handle handle;
  dm_mesh *mesh = nullptr;
  const char *dim = nullptr;
  int64_t size = 0;
  // The number of the operand's elements, and their type, as the library is told.
  size_t count = 0;
  dm_dtype dtype = 0;
  // The number of these elements in one element of XLA's.
  size_t parts = 1;
  void *stream = nullptr;
  ffi::Error error;

  // Copies the integers of a small operand. On cuda they lie on the device, and this thread waits
  // until the stream has made them.
  ffi::Error read(const Operand &array, std::vector<int64_t> &numbers) const {
    const size_t count = array.element_count(), bytes = array.size_bytes();
    const bool wide = array.element_type() == ffi::DataType::S64;
    if (!wide && array.element_type() != ffi::DataType::S32)
      return ffi::Error::InvalidArgument("offsets and sizes are 32-bit or 64-bit integers");
    std::vector<int64_t> copy(count);
    if (stream == nullptr) {
      std::memcpy(copy.data(), array.untyped_data(), bytes);
    } else if (const int code = from_device(copy.data(), array.untyped_data(), bytes)) {
      return ffi::Error(ffi::ErrorCode::kInternal, "the CUDA driver gives " + std::to_string(code) +
                                                       " where offsets and sizes are copied to the host");
    }
    for (size_t i = 0; i < count; i++) {
      int32_t narrow;
      std::memcpy(&narrow, reinterpret_cast<const char *>(copy.data()) + i * sizeof narrow, sizeof narrow);
      numbers.push_back(wide ? copy[i] : narrow);
    }
    return ffi::Error::Success();
  }

 private:
  // Returns the driver's error, or -1 where there is no driver. XLA has loaded the driver by now.
  int from_device(void *to, const void *from, size_t bytes) const {
    static void *const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver == nullptr) return -1;
    static const auto copy = reinterpret_cast<int (*)(void *, uintptr_t, size_t, void *)>(dlsym(driver, "cuMemcpyDtoHAsync_v2"));
    static const auto wait = reinterpret_cast<int (*)(void *)>(dlsym(driver, "cuStreamSynchronize"));
    if (copy == nullptr || wait == nullptr) return -1;
    const int copied = copy(to, reinterpret_cast<uintptr_t>(from), bytes, stream);
    return copied != 0 ? copied : wait(stream);
  }

  ffi::Error prepare(Origin origin, const Operand &operand) {
    mesh_name = text("mesh");
    dim_name = text("dim");
    dim = dim_name.c_str();
    size = number("size");
    const std::string platform = text("platform");
    if (error.failure()) return error;
    if (open_groups.load() != 0) {
      return ffi::Error(
          ffi::ErrorCode::kFailedPrecondition,
          "a jitted collective on mesh \"" + mesh_name +
              "\" was called inside a group (with mesh.group()): what is called there starts "
              "when the group ends, which is after XLA reads the result; call the jitted function before the group or after it");
    }
    const ffi::DataType type = operand.element_type();
    std::optional<Wire> wire = attributes.contains("op") ? reduced(type, op()) : moved(type);
    if (!wire) {
      return ffi::Error::InvalidArgument("elements of XLA's type " + std::to_string(static_cast<int>(type)) +
                                         " cannot take part in this call");
    }
    dtype = wire->dtype;
    parts = wire->parts;
    count = operand.element_count() * wire->parts;
    if (dm_status status = library.dm_lookup(mesh_name.c_str(), &handle.mesh)) return error_of(status);
    mesh = handle.mesh;
    int32_t now = 0;
    if (dm_status status = library.dm_size(mesh, dim, &now)) return error_of(status);
    if (now != size) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        "dimension " + dim_name + " of mesh \"" + mesh_name + "\" has " + std::to_string(now) +
                            " ranks now and had " + std::to_string(size) +
                            " when this was traced; trace it again, or register the new mesh under another name");
    }
    if (ffi::Error wrong = check_device(mesh, mesh_name, platform); wrong.failure()) return wrong;
    if (platform == "cpu") return after_queued();
    if (ffi::Error wrong = check_ordinal(origin); wrong.failure()) return wrong;
    return find_stream(origin);
  }

  // XLA's GPU and the communicator's are one. The lowering has compared XLA's with the world's; but
  // a program can be compiled for one device and run on another, a name can mean another mesh by
  // now, and an adopted communicator has a device of its own.
  ffi::Error check_ordinal(Origin origin) {
    void *found = nullptr;
    // Every NCCL has this function.
    if (library.dm_get_proc(mesh, "ncclCommCuDevice", &found)) return ffi::Error::Success();
    ncclComm_t comm = nullptr;
    if (dm_status status = library.dm_get_comm(mesh, dim, &comm)) return error_of(status);
    int ours = 0;
    // The collective itself says what is wrong with the communicator.
    if (reinterpret_cast<int (*)(ncclComm_t, int *)>(found)(comm, &ours) != 0) return ffi::Error::Success();
    XLA_FFI_DeviceOrdinal_Get_Args arguments{};
    arguments.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
    arguments.ctx = origin.context;
    if (XLA_FFI_Error *problem = origin.api->XLA_FFI_DeviceOrdinal_Get(&arguments)) return reported(origin, problem);
    if (ours == arguments.device_ordinal) return ffi::Error::Success();
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "this computation runs on GPU " + std::to_string(arguments.device_ordinal) +
            " of those that the process sees, but mesh \"" + mesh_name + "\" has its communicators on GPU " +
            std::to_string(ours) +
            ": let each process see one GPU (CUDA_VISIBLE_DEVICES), or name it (jax.distributed.initialize(local_device_ids=...), "
            "dm_world_options.device)");
  }

  static ffi::Error reported(Origin origin, XLA_FFI_Error *problem) {
    ffi::Error error(ffi::ErrorCode::kInternal, ffi::internal::GetErrorMessage(origin.api, problem));
    ffi::internal::DestroyError(origin.api, problem);
    return error;
  }

  // The host calls that were queued before XLA was given this call come first.
  ffi::Error after_queued() {
    if (queued.all.load() == 0) return ffi::Error::Success();
    ncclComm_t comm = nullptr;
    if (dm_status status = library.dm_get_comm(mesh, dim, &comm)) return error_of(status);
    queued.wait({comm, dim_name});
    return ffi::Error::Success();
  }

  ffi::Error find_stream(Origin origin) {
    XLA_FFI_Stream_Get_Args arguments{};
    arguments.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
    arguments.ctx = origin.context;
    if (XLA_FFI_Error *problem = origin.api->XLA_FFI_Stream_Get(&arguments)) return reported(origin, problem);
    stream = arguments.stream;
    return ffi::Error::Success();
  }

  template <typename T>
  T get(std::string_view name) {
    ffi::ErrorOr<T> found = attributes.get<T>(name);
    if (found.has_value()) return *found;
    error = found.error();
    return T();
  }
};

}  // namespace

#endif
