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

#include <cstdint>
#include <optional>
#include <string>

#include "call.h"
#include "ragged.h"

namespace {

ffi::Error all_reduce(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_all_reduce(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count, call.dtype,
                                 call.op(), call.stream);
  });
}

// recv begins as zeros, and stays zero on the ranks that are not the root.
ffi::Error reduce(Origin origin, ffi::Dictionary attributes, Operand send, Operand, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_reduce(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count, call.dtype,
                             call.op(), call.root(), call.stream);
  });
}

ffi::Error broadcast(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_broadcast(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count, call.dtype,
                                call.root(), call.stream);
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
    return library.dm_reduce_scatter(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(),
                                     call.count / call.size, call.dtype, call.op(), call.stream);
  });
}

ffi::Error all_to_all(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    return library.dm_all_to_all(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), call.count / call.size,
                                 call.dtype, call.stream);
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
    if (to >= 0)
      status = library.dm_send(call.mesh, call.dim, send.untyped_data(), call.count, call.dtype,
                               static_cast<int32_t>(to), call.stream);
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
      if (status == DM_STATUS_OK)
        status =
            library.dm_recv(call.mesh, call.dim, recv->untyped_data(), count, call.dtype, call.root(), call.stream);
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

// Counts open groups: change is 1 when one has been opened, -1 when one has ended. In the
// first call change is the number of groups that are open by then. Python makes one call at a time.
// The end of a group whose beginning was not told is ignored.
extern "C" __attribute__((visibility("default"))) void devicemesh_jax_group(int change) {
  if (open_groups + change >= 0) open_groups += change;
}

// Counts asynchronous host calls along a dimension: change is 1 when one has been queued, -1 when
// one is over. In the first call for a dimension change may be the number of those that are queued
// by then.
extern "C" __attribute__((visibility("default"))) void devicemesh_jax_queued(const void *comm, const char *dim, int change) {
  queued.change({comm, dim}, change);
}

// The handlers do not have XLA's trait kCmdBufferCompatible, so XLA puts none of them into a
// command buffer (a CUDA graph), not even with CUSTOM_CALL in xla_gpu_enable_command_buffer. XLA
// would call a recorded handler when it records alone, and launch the recording without it: a mesh
// that has ended or has another name by then would go unnoticed, and so would the ranks that
// record while others launch. A live recording also keeps NCCL from ending its communicator.
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
HANDLER(all_gatherv, OPERAND);
HANDLER(reduce_scatterv, OPERAND);
HANDLER(all_to_allv, OPERAND OPERAND OPERAND OPERAND OPERAND OPERAND);
