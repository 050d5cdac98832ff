// The XLA FFI handlers. Each runs one collective of libdevicemesh on the mesh that is registered
// under a name.
//
// XLA gives a handler its buffers, the attributes of the call and, on cuda, the stream. The mesh
// comes from dm_lookup at every call, so that a compiled program holds no handle, a name that is
// registered anew is seen, and a name that is gone is an error. The communicator stays inside the
// library. Nothing of XLA is linked; built with the headers of jaxlib 0.7.2 one binary serves all
// later versions, because XLA refuses handlers that are newer than itself and takes older ones.
//
// The token after the operands and after the results is what orders the calls: see
// devicemesh_jax/_order.py.

#include <dlfcn.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

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
  X(dm_lookup) X(dm_free) X(dm_size) X(dm_device_type) X(dm_get_local_rank) X(dm_last_error) X(dm_status_name)           \
  X(dm_all_reduce) X(dm_reduce) X(dm_broadcast) X(dm_all_gather) X(dm_reduce_scatter) X(dm_all_to_all) X(dm_send)     \
  X(dm_recv) X(dm_group_start) X(dm_group_end) X(dm_get_comm) X(dm_get_world)                                \
  X(dm_world_get_info) X(dm_world_free)

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

  void change(Key key, int by) {
    std::lock_guard<std::mutex> held(lock);
    if ((calls[key] += by) == 0) calls.erase(key);
    all += by;
    less.notify_all();
  }

  // Returns when no such call along this dimension is left. Each of them ends at the deadline of
  // its mesh at the latest.
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
  static std::optional<Type> Decode(const XLA_FFI_Api *api, XLA_FFI_ExecutionContext *context, DiagnosticEngine &) { return Origin{api, context}; }
};

namespace {

// One call with its checks: the mesh is registered now, the dimension is as long as when the call
// was traced, and the library can move or (a call with an operator) reduce the elements.
struct Call {
  Call(Origin origin, const ffi::Dictionary &attributes, const Operand &operand) : attributes(attributes) { error = prepare(origin, operand); }

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
  void *stream = nullptr;
  ffi::Error error;

 private:
  ffi::Error prepare(Origin origin, const Operand &operand) {
    mesh_name = text("mesh");
    dim_name = text("dim");
    dim = dim_name.c_str();
    size = number("size");
    const std::string platform = text("platform");
    if (error.failure()) return error;
    if (open_groups.load() != 0) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        "a jitted collective on mesh \"" + mesh_name + "\" was called inside a group (with mesh.group()): what is called there starts "
                            "when the group ends, which is after XLA reads the result; call the jitted function before the group or after it");
    }
    const ffi::DataType type = operand.element_type();
    std::optional<Wire> wire = attributes.contains("op") ? reduced(type, op()) : moved(type);
    if (!wire) {
      return ffi::Error::InvalidArgument("elements of XLA's type " + std::to_string(static_cast<int>(type)) + " cannot take part in this call");
    }
    dtype = wire->dtype;
    count = operand.element_count() * wire->parts;
    if (dm_status status = library.dm_lookup(mesh_name.c_str(), &handle.mesh)) return error_of(status);
    mesh = handle.mesh;
    int32_t now = 0;
    if (dm_status status = library.dm_size(mesh, dim, &now)) return error_of(status);
    if (now != size) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        "dimension " + dim_name + " of mesh \"" + mesh_name + "\" has " + std::to_string(now) + " ranks now and had " + std::to_string(size) +
                            " when this was traced; trace it again, or register the new mesh under another name");
    }
    if (ffi::Error wrong = check_device(mesh, mesh_name, platform); wrong.failure()) return wrong;
    if (platform == "cpu") return after_queued();
    if (ffi::Error wrong = check_ordinal(origin); wrong.failure()) return wrong;
    return find_stream(origin);
  }

  // XLA's GPU and the mesh's are one. The lowering has compared them already; but a program can be
  // compiled for one device and run on another, and a name can mean another mesh by now.
  ffi::Error check_ordinal(Origin origin) {
    dm_world *world = nullptr;
    const dm_status found = library.dm_get_world(mesh, &world);
    // Communicators that were adopted without a world: nobody knows their device.
    if (found == DM_STATUS_UNSUPPORTED) return ffi::Error::Success();
    if (found) return error_of(found);
    dm_world_info info = DM_WORLD_INFO_INIT;
    const dm_status asked = library.dm_world_get_info(world, &info);
    library.dm_world_free(world);
    if (asked) return error_of(asked);
    XLA_FFI_DeviceOrdinal_Get_Args arguments{};
    arguments.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
    arguments.ctx = origin.context;
    if (XLA_FFI_Error *problem = origin.api->XLA_FFI_DeviceOrdinal_Get(&arguments)) return reported(origin, problem);
    if (info.device < 0 || info.device == arguments.device_ordinal) return ffi::Error::Success();
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "this computation runs on GPU " + std::to_string(arguments.device_ordinal) + " of those that the process sees, but mesh \"" + mesh_name +
                          "\" has its communicators on GPU " + std::to_string(info.device) +
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

ffi::Error all_reduce(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_all_reduce(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count, call.dtype, call.op(), call.stream);
  });
}

// recv begins as zeros, and stays zero on the ranks that are not the root.
ffi::Error reduce(Origin origin, ffi::Dictionary attributes, Operand send, Operand, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_reduce(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count, call.dtype, call.op(), call.root(), call.stream);
  });
}

ffi::Error broadcast(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_broadcast(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count, call.dtype, call.root(), call.stream);
  });
}

ffi::Error all_gather(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_all_gather(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count, call.dtype, call.stream);
  });
}

ffi::Error reduce_scatter(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_reduce_scatter(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count / call.size, call.dtype, call.op(), call.stream);
  });
}

ffi::Error all_to_all(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_all_to_all(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count / call.size, call.dtype, call.stream);
  });
}

// Runs body between the begin and the end of a group, so that its messages make progress together.
// A group that was begun must end, also when an operation failed. Its end reports the failure.
template <typename Body>
dm_status grouped(const Call &call, Body body) {
  if (dm_status status = library.dm_group_start(call.mesh)) return status;
  const dm_status status = body();
  const dm_status ended = library.dm_group_end(call.mesh);
  return status ? status : ended;
}

// Sends the operand to a rank along the dimension, and receives from one. A negative rank is
// nobody. recv begins as zeros, and stays zero on a rank to which nothing is sent.
dm_status exchange(const Call &call, const Operand &send, int64_t to, Result &recv, Wire received, int64_t from) {
  return grouped(call, [&] {
    dm_status status = DM_STATUS_OK;
    if (to >= 0) status = library.dm_send(call.mesh, call.dim, send.untyped_data(), call.count, call.dtype, static_cast<int32_t>(to), call.stream);
    if (status == DM_STATUS_OK && from >= 0) {
      status = library.dm_recv(call.mesh, call.dim, recv->untyped_data(), recv->element_count() * received.parts, received.dtype, static_cast<int32_t>(from),
                               call.stream);
    }
    return status;
  });
}

// Sends to the rank that is offset steps further along the dimension.
ffi::Error shift(Origin origin, ffi::Dictionary attributes, Operand send, Operand, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&]() -> dm_status {
    int32_t rank = 0;
    if (dm_status status = library.dm_get_local_rank(call.mesh, call.dim, &rank)) return status;
    const int64_t size = call.size, offset = call.number("offset");
    int64_t to = rank + offset, from = rank - offset;
    if (call.number("wrap")) {
      to = (to % size + size) % size;
      from = (from % size + size) % size;
    }
    return exchange(call, send, to < size ? to : -1, recv, *moved(recv->element_type()), from < size ? from : -1);
  });
}

// Sends to one rank and receives from one, which this rank has chosen.
ffi::Error sendrecv(Origin origin, ffi::Dictionary attributes, Operand send, Operand, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  const std::optional<Wire> received = moved(recv->element_type());
  if (!received) return ffi::Error::InvalidArgument("elements of this type cannot be received");
  return call.run([&] { return exchange(call, send, call.number("dest"), recv, *received, call.number("source")); });
}

// Every rank sends to the root. recv begins as zeros, and stays zero on the other ranks.
ffi::Error gather(Origin origin, ffi::Dictionary attributes, Operand send, Operand, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&]() -> dm_status {
    int32_t rank = 0;
    if (dm_status status = library.dm_get_local_rank(call.mesh, call.dim, &rank)) return status;
    return grouped(call, [&] {
      dm_status status = library.dm_send(call.mesh, call.dim, send.untyped_data(), call.count, call.dtype, call.root(), call.stream);
      for (int32_t from = 0; rank == call.root() && from < call.size && status == DM_STATUS_OK; from++) {
        char *block = static_cast<char *>(recv->untyped_data()) + from * send.size_bytes();
        status = library.dm_recv(call.mesh, call.dim, block, call.count, call.dtype, from, call.stream);
      }
      return status;
    });
  });
}

// The root sends block i of its operand to rank i. The other ranks' operands are not read.
ffi::Error scatter(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&]() -> dm_status {
    int32_t rank = 0;
    if (dm_status status = library.dm_get_local_rank(call.mesh, call.dim, &rank)) return status;
    const size_t count = call.count / call.size;
    return grouped(call, [&] {
      dm_status status = DM_STATUS_OK;
      for (int32_t to = 0; rank == call.root() && to < call.size && status == DM_STATUS_OK; to++) {
        const char *block = static_cast<const char *>(send.untyped_data()) + to * recv->size_bytes();
        status = library.dm_send(call.mesh, call.dim, block, count, call.dtype, to, call.stream);
      }
      if (status == DM_STATUS_OK) status = library.dm_recv(call.mesh, call.dim, recv->untyped_data(), count, call.dtype, call.root(), call.stream);
      return status;
    });
  });
}

}  // namespace

// Takes the functions of the libdevicemesh that is loaded from this path. Returns NULL, or a
// static string that says what is wrong.
extern "C" __attribute__((visibility("default"))) const char *devicemesh_jax_connect(const char *path) {
  static std::string problem;
  void *loaded = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) {
    problem = dlerror();
    return problem.c_str();
  }
  Library found;
#define RESOLVE(name)                                                           \
  found.name = reinterpret_cast<decltype(&::name)>(dlsym(loaded, #name));       \
  if (found.name == nullptr) {                                                  \
    problem = std::string(path) + " has no " #name;                             \
    return problem.c_str();                                                     \
  }
  DEVICEMESH_FUNCTIONS(RESOLVE)
#undef RESOLVE
  library = found;
  return nullptr;
}

// Counts open groups: change is 1 when one has been opened, -1 when one has ended.
extern "C" __attribute__((visibility("default"))) void devicemesh_jax_group(int change) { open_groups += change; }

// Counts asynchronous host calls along a dimension: change is 1 when one has been queued, -1 when
// one is over.
extern "C" __attribute__((visibility("default"))) void devicemesh_jax_queued(const void *comm, const char *dim, int change) {
  queued.change({comm, dim}, change);
}

// The handlers do not have XLA's trait kCmdBufferCompatible, so XLA puts none of them into a command
// buffer (a CUDA graph), not even with CUSTOM_CALL in xla_gpu_enable_command_buffer. XLA would call
// a recorded handler when it records alone, and launch the recording without it: a mesh that has
// ended or has another name by then would go unnoticed, and so would the ranks that record while
// others launch. A live recording also keeps NCCL from ending its communicator.
#define HANDLER(name, operands)                                                                                                        \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error *devicemesh_##name(XLA_FFI_CallFrame *);                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(devicemesh_##name, name,                                                                               \
                                ffi::Ffi::Bind().Ctx<Origin>().Attrs() operands.Arg<Token>().Ret<ffi::AnyBuffer>().Ret<Token>())
#define OPERAND .Arg<ffi::AnyBuffer>()

HANDLER(all_reduce, OPERAND);
HANDLER(reduce, OPERAND OPERAND);
HANDLER(broadcast, OPERAND);
HANDLER(all_gather, OPERAND);
HANDLER(reduce_scatter, OPERAND);
HANDLER(all_to_all, OPERAND);
HANDLER(shift, OPERAND OPERAND);
HANDLER(sendrecv, OPERAND OPERAND);
HANDLER(gather, OPERAND OPERAND);
HANDLER(scatter, OPERAND);
