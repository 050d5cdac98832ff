/* libdevicemesh: PyTorch's DeviceMesh without Python. A job says "I am (replicate=2, shard=4)" and
 * gets, for every dimension of that mesh, a ready communicator.
 *
 * Generated from src/ffi by cbindgen (make header). Do not edit.
 *
 * Names and meanings are those of PyTorch's DeviceMesh where it has the function: dm_get_local_rank
 * is the rank along a dimension, dm_rank the rank in the world, and dm_size with dim NULL counts
 * the ranks of the view.
 *
 * Words used below
 *   Local         The call returns without waiting for any other rank.
 *   Collective    Every rank of the named set makes the same call, in the same order. A rank that
 *                 makes a different call, or none, leads to DM_STATUS_MISMATCH or DM_STATUS_TIMEOUT
 *                 on the ranks that called, and the message names the ranks. NCCL alone compares
 *                 nothing: on cuda the work of dm_all_reduce ... dm_recv then hangs on its stream,
 *                 or gives wrong data, until dm_abort.
 *   root mesh     The mesh that dm_init, dm_deserialize, dm_from_comms or dm_shrink made, with all
 *                 its ranks. Every view belongs to one. dm_root gives it, and dm_finalize and
 *                 dm_abort end it as a whole, by whichever view they are called.
 *   range         A view that dm_slice_range made, and the views of it. For the calls that make
 *                 something (dm_flatten, dm_unflatten, dm_reshape, dm_slice_range) and for
 *                 dm_shrink, the ranks of the range stand in place of those of the root mesh: the
 *                 call is collective over the ranks of the range alone.
 *   refused       A call fails with DM_STATUS_INVALID_ARGUMENT, _NOT_FOUND, _UNSUPPORTED or
 *                 _INVALID_STATE before this rank waits for anybody. A rank that refuses its own
 *                 call that makes or ends something, or one of the control plane, tells the others:
 *                 they fail at once with that status, and the message names the rank. A refused
 *                 dm_all_reduce ... dm_recv is not told, as in NCCL: nothing was sent, so this rank
 *                 may make the call again with right arguments, and the others wait for it until
 *                 the deadline of the mesh (on cuda until dm_abort).
 *   lost          A rank is lost when its process has ended, when it has left the world (by
 *                 dm_world_abort, or by freeing the world and all its meshes), or when its host
 *                 fell silent. It stays lost.
 *                 DM_STATUS_PEER_LOST says that a rank is lost or has aborted what the call uses.
 *   out           Parameters named ..._out come last and are written only on success. Queries into
 *                 a buffer (buffer, capacity, len_out) write *len_out also with
 *                 DM_STATUS_BUFFER_TOO_SMALL and DM_STATUS_NOT_MEMBER; capacity 0 asks for the
 *                 length.
 *   borrowed      The thing stays the library's; the named owner bounds its life.
 *   world rank    A process's number in the world, 0 to its size - 1.
 *   rank along    A process's number in its group along a dimension, 0 to the dimension's size - 1.
 *   dim           It is its coordinate there and its rank in the dimension's communicator.
 *                 Arguments that hold one are named dim_rank, peer or root. Ranks, and sizes that
 *                 count ranks, are int32_t; counts of elements, bytes and array elements size_t.
 *   stream        On cuda a cudaStream_t. NULL is CUDA's legacy default stream of the device on
 *                 which the communicator was made (dm_world_info.device), whatever the current
 *                 device of the thread is. On cpu there are no streams: NULL.
 *   timeout       In milliseconds. Calls that make or end a mesh have it in dm_call_options or
 *                 dm_init_options. Calls that only wait for ranks, or make or end a world, take
 *                 timeout_ms. 0 stands for the timeout of the mesh or the world.
 *
 * Errors: an Errors list names what is particular to the call. DM_STATUS_INTERNAL and
 * DM_STATUS_EXHAUSTED can come from any call. A failing call leaves its reason in dm_last_error of
 * the calling thread. No function aborts the process or unwinds into C.
 *
 * Threads: every function may be called from several threads at once, on the same handle. A handle
 * is a token (slot and generation), not an address: one that is stale or made up gives
 * DM_STATUS_INVALID_HANDLE, never undefined behaviour, and the functions that free ignore it. A
 * process with several devices joins one dm_world per device, with explicit ranks, and makes its
 * collective calls from one thread per device.
 *
 * Order: the calls of one world that make or end something, and those of the control plane
 * (dm_barrier, dm_all_gather_bytes ...), happen one after another, in the same order on every rank.
 * Collectives on data (dm_all_reduce ... dm_recv) are ordered for each communicator alone: those
 * along dimensions with different communicators may come in different orders on different ranks. A
 * communicator has one order of issue. On cpu two threads that call along dimensions that share one
 * get the right numbers in any order, and two that call along one dimension at the same time are
 * refused (DM_STATUS_MISMATCH). NCCL does not show the order of the peers: there the library lets
 * one host call at a time into a communicator, and the program issues the calls in the same order
 * on all ranks. dm_abort may come at any time, also beside a call that is just being issued
 * (docs/threads.md).
 *
 * Forks: a child made by fork has none of its parent's sockets and shared memory. In the child of a
 * process that has a world or communicators every call gives DM_STATUS_UNSUPPORTED, but for
 * questions to a handle (dm_rank, dm_size, dm_local_shard ...); dm_free and dm_world_free do
 * nothing. For this the library registers handlers with pthread_atfork when it first has something
 * to keep from children (docs/reliability.md, "Forked children").
 *
 * Strings in are NUL-terminated UTF-8 and copied. NULL where it is not allowed gives
 * DM_STATUS_INVALID_ARGUMENT.
 *
 * Structs (all but dm_placement, which has room to grow) begin with struct_size, their size as the
 * caller knows it: initialise them with their INIT macro. They grow only at their end, and 0 is the
 * default of every new field. So a program works with every newer library of the same SONAME. A
 * program that was compiled with a newer header works with an older library as long as the fields
 * that the library does not know are 0; otherwise the call gives DM_STATUS_INVALID_ARGUMENT. */


#ifndef DEVICEMESH_H
#define DEVICEMESH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- the version of the header ---- */

/**
 * The version of this header: 10000 * major + 100 * minor + patch, so 200 is 0.2.0. dm_version
 * gives that of the loaded library.
 */
#define DEVICEMESH_VERSION 200

/* ---- flags and placements ---- */

/**
 * No rank: what dm_neighbor gives past the edge of a dimension.
 */
#define DM_RANK_NONE (-1)

/**
 * World flag: no rendezvous and no communicators; layout and planning for any rank of any world,
 * on one machine. Calls that are collective elsewhere are local, and as no rank takes part in
 * them, dm_flatten, dm_unflatten, dm_reshape and dm_slice_range also answer for a view that this
 * rank is not in, which is DM_STATUS_NOT_MEMBER in a world with other ranks.
 */
#define DM_WORLD_OFFLINE 1

/**
 * World flag: the options name the device. It counts before the current device of a thread: a
 * call that makes communicators makes it current on its thread. Beside RCCL the program itself
 * makes it current. It is an error on cpu, and an offline world does not use it.
 */
#define DM_WORLD_DEVICE 2

/**
 * What the get of dm_store_callbacks returns when the key did not come in time.
 */
#define DM_STORE_NOT_YET 1

/**
 * Dimension flag: never share this dimension's communicator with one over the same ranks.
 */
#define DM_DIM_OWN_COMM 1

/**
 * Mesh flag: make a dimension's communicator at its first dm_get_comm or collective, which is then
 * collective over this rank's group along that dimension. Later flattened dimensions are lazy too.
 */
#define DM_INIT_LAZY 1

/**
 * Mesh flag of dm_from_comms: the library destroys the communicators when the mesh is finalized or
 * aborted.
 */
#define DM_INIT_OWN_COMMS 2

/**
 * Placement: every rank along the mesh dimension holds the same.
 */
#define DM_REPLICATE 0

/**
 * Placement: the mesh dimension splits a dimension of the tensor.
 */
#define DM_SHARD 1

/**
 * Placement: every rank along the mesh dimension holds a part of a sum (or of another reduction)
 * that is still to be made. Each part has the whole shape.
 */
#define DM_PARTIAL 2

/* ---- types ---- */

/**
 * Bytes of one or several ranks: the result of dm_all_gather_bytes and its neighbours.
 *
 * A handle is a token, not an address, as dm_mesh is. Freed by dm_buffers_free.
 */
typedef struct dm_buffers dm_buffers;

/**
 * One rank's immutable view of a mesh: shape, names, ranks, communicators.
 *
 * A handle is a token, not an address: a stale, freed or made-up one gives
 * DM_STATUS_INVALID_HANDLE. It may be used from several threads at once. Made by dm_init and the
 * functions that return views, freed by dm_free.
 */
typedef struct dm_mesh dm_mesh;

/**
 * This process's place in the job: its rank, the store the ranks meet in, the device, the
 * communicator library.
 *
 * A handle is a token, not an address: a stale, freed or made-up one gives
 * DM_STATUS_INVALID_HANDLE. It may be used from several threads at once. Made by dm_world_init,
 * freed by dm_world_free.
 */
typedef struct dm_world dm_world;

/**
 * The outcome of a call: one of the DM_STATUS_ values.
 */
typedef int32_t dm_status;

/**
 * The failure of a call, filled by dm_last_error_info. Initialise with DM_ERROR_INFO_INIT.
 */
typedef struct dm_error_info {
  /**
   * sizeof(dm_error_info), set by the caller.
   */
  size_t struct_size;
  /**
   * The failing call's status; DM_STATUS_OK when no call of this thread failed.
   */
  dm_status status;
  /**
   * The communicator library's ncclResult_t, 0 when it was not involved.
   */
  int32_t ccl_result;
  /**
   * The device driver's code (CUresult), 0 when it was not involved.
   */
  int32_t device_error;
  /**
   * The errno; 0 when the operating system was not involved.
   */
  int32_t os_error;
  /**
   * One line with the values. Borrowed: valid until this thread's next failing call.
   */
  const char *message;
  /**
   * The world ranks that the failure is about, in ascending order: those that were lost,
   * aborted, did not come, failed, or made another call than the others. At most 512. NULL
   * when there are none. Borrowed: valid until this thread's next failing call.
   */
  const int32_t *ranks;
  /**
   * The number of ranks.
   */
  size_t num_ranks;
  /**
   * Those of ranks that are lost (see "lost" at the head of this file), in ascending order. A
   * rank that only aborted a mesh, did not come or made another call is not lost. NULL when
   * there are none. Borrowed: valid until this thread's next failing call.
   */
  const int32_t *lost_ranks;
  /**
   * The number of lost_ranks.
   */
  size_t num_lost;
  /**
   * The name of the dimension along which the failing call was made; NULL for a call that has no
   * dimension. Borrowed: valid until this thread's next failing call.
   */
  const char *dim;
  /**
   * How long the failing call waited for other ranks, in seconds; negative when it did not wait.
   */
  double waited_seconds;
  /**
   * The number of the failing collective call, as the message shows it ("as call 7"); -1 when
   * the call has no number.
   */
  int64_t call;
} dm_error_info;

/**
 * A level of the log. A record is logged when its level is at most the level that is set.
 */
typedef int32_t dm_log_level;

/**
 * Any key-value service of the caller (JAX's, MPI's, etcd ...) as the store the ranks meet in.
 *
 * Keys are short printable ASCII, values at most 8 MiB. The functions may be called from any
 * thread of this process, and from several threads at once. Each returns 0 for success, and get
 * returns DM_STORE_NOT_YET when the key did not come in time. Any other number says that the
 * service is broken: it ends the call that needed it at once with DM_STATUS_STORE, and the message
 * has the number. Keys and values are the library's: valid during the call, so a function copies
 * what it keeps. A function must return: a C++ exception may not leave it. Initialise with
 * DM_STORE_CALLBACKS_INIT.
 */
typedef struct dm_store_callbacks {
  /**
   * sizeof(dm_store_callbacks), set by the caller.
   */
  size_t struct_size;
  /**
   * Passed to every function.
   */
  void *user_data;
  /**
   * Stores len bytes under key, replacing what was there.
   */
  int32_t (*set)(void *user_data, const char *key, const void *value, size_t len);
  /**
   * Waits up to timeout_ms milliseconds for key; 0 looks once. When the key is there, copies at
   * most capacity bytes of its value to value, writes the length of the whole value to len_out,
   * and returns 0. The library calls again with a larger buffer where that length is more than
   * capacity. When the key did not come in time, returns DM_STORE_NOT_YET.
   */
  int32_t (*get)(void *user_data, const char *key, void *value, size_t capacity, size_t *len_out, int64_t timeout_ms);
  /**
   * Adds amount to the integer under key (0 when there is none), atomically over all ranks, and
   * writes the sum.
   */
  int32_t (*add)(void *user_data, const char *key, int64_t amount, int64_t *value_out);
  /**
   * Called exactly once, when the world is gone: inside the dm_world_free that frees its last
   * handle, or on a thread of the library where a mesh was freed last. No other function is
   * called any more by then. It is not called where dm_world_init failed. May be NULL.
   */
  void (*drop)(void *user_data);
  /**
   * Removes key; it is no error when it is not there. What it returns does not matter. May be
   * NULL: then what the library has stored stays in the caller's service, some kilobytes for
   * each collective call.
   */
  int32_t (*remove)(void *user_data, const char *key);
} dm_store_callbacks;

/**
 * How to join a world. Initialise with DM_WORLD_OPTIONS_INIT; zero means the default everywhere.
 */
typedef struct dm_world_options {
  /**
   * sizeof(dm_world_options), set by the caller.
   */
  size_t struct_size;
  /**
   * DM_WORLD_ flags.
   */
  uint32_t flags;
  /**
   * Number of ranks. 0: rank, world size and local rank come from the launcher's environment.
   */
  int32_t world_size;
  /**
   * This process's rank, 0 to world_size - 1; used when world_size is given.
   */
  int32_t rank;
  /**
   * This process's rank in its host, from which its device follows; used when world_size is
   * given. Ranks that leave it at 0 get the numbers that no other rank of their host has, the
   * lowest world rank first. So it may stay 0 on all ranks.
   */
  int32_t local_rank;
  /**
   * The index of the device on which communicators are made, among those that this process sees;
   * used when flags has DM_WORLD_DEVICE. Otherwise it is the current device of the thread that
   * joins, or where that thread has none, the local rank modulo the number of devices.
   */
  int32_t device;
  /**
   * 0.
   */
  uint32_t reserved;
  /**
   * How long a call of the library may wait, in milliseconds. 0: 600000.
   */
  int64_t timeout_ms;
  /**
   * Where the ranks meet: "env://" (NULL means this), "tcp://host:port" (rank 0 serves) or
   * "file:///path".
   */
  const char *init_method;
  /**
   * A communicator library with NCCL's C API, by path or SONAME; "python": the NCCL wheel of the
   * active Python environment. NULL: the one that the environment variable DM_CCL_LIBRARY names
   * in the same way, else on cuda a copy that is in this process already or the usual names
   * (libnccl.so.2, librccl.so.1), and on cpu the embedded host engine.
   */
  const char *ccl_library;
  /**
   * NULL: the store that init_method names; else the caller's own.
   */
  const struct dm_store_callbacks *store;
  /**
   * NULL, or where dm_world_init writes a token before it waits for anybody. Another thread that
   * gives this token to dm_world_abort ends the joining: dm_world_init returns
   * DM_STATUS_ABORTED. The token is good for nothing else, and is not live any more once
   * dm_world_init has returned. The write is atomic, so the other thread may read the token at
   * any time if it does so atomically.
   */
  struct dm_world **joining_out;
} dm_world_options;

/**
 * The facts that dm_world_get_info tells about a world. Initialise with DM_WORLD_INFO_INIT.
 */
typedef struct dm_world_info {
  /**
   * sizeof(dm_world_info), set by the caller.
   */
  size_t struct_size;
  /**
   * This process's rank in the world, 0 to size - 1.
   */
  int32_t rank;
  /**
   * The number of ranks in the world.
   */
  int32_t size;
  /**
   * This rank's number among the ranks of its host: what the launcher or dm_world_options says.
   * The ranks for which neither says one get the free numbers, the lowest world rank first.
   */
  int32_t local_rank;
  /**
   * The number of ranks on this host: what the launcher says where it says the local rank too,
   * otherwise the number of ranks that run on this host's kernel. In an offline world all ranks
   * count as ranks of one host.
   */
  int32_t local_size;
  /**
   * The number of this host, 0 to num_hosts - 1. Hosts are numbered in the order of the lowest
   * rank on each. Containers of one machine are one host, as for dm_world_locations.
   */
  int32_t host;
  /**
   * The number of hosts on which the world's ranks run.
   */
  int32_t num_hosts;
  /**
   * The index of this rank's device, among those that this process sees; -1 on cpu, in an
   * offline world, and beside RCCL where dm_world_options names none.
   */
  int32_t device;
  /**
   * The version of the communicator library as ncclGetVersion gives it (22707 is 2.27.7); 0 in
   * an offline world.
   */
  int32_t version;
  /**
   * "cuda" or "cpu". Static.
   */
  const char *device_type;
  /**
   * The communicator library: its path or SONAME, or the name of the embedded host engine; "" in
   * an offline world. Borrowed from the world: valid until its last handle and mesh are freed.
   */
  const char *library;
} dm_world_info;

/**
 * Options of one dimension's communicator. Initialise with DM_DIM_OPTIONS_INIT.
 */
typedef struct dm_dim_options {
  /**
   * sizeof(dm_dim_options), set by the caller; also the distance to the next element of an array
   * of them.
   */
  size_t struct_size;
  /**
   * DM_DIM_ flags.
   */
  uint32_t flags;
  /**
   * Must be 0.
   */
  uint32_t reserved;
  /**
   * NULL or the caller's ncclConfig_t; copied by its own size field, with its strings (netName,
   * commName). A dimension with a config
   * does not share its communicator. The fields other than names must be the same on every rank.
   */
  const void *nccl_config;
  /**
   * The communicator's name in the library's logs. NULL: "mesh_" and the dimension's name.
   */
  const char *comm_name;
} dm_dim_options;

/**
 * Options of a mesh. Initialise with DM_INIT_OPTIONS_INIT.
 */
typedef struct dm_init_options {
  /**
   * sizeof(dm_init_options), set by the caller.
   */
  size_t struct_size;
  /**
   * DM_INIT_ flags.
   */
  uint32_t flags;
  /**
   * Must be 0.
   */
  uint32_t reserved;
  /**
   * NULL: the process's default world of that device type, joined from the environment at first
   * use; for dm_from_comms no world at all.
   */
  struct dm_world *world;
  /**
   * NULL: 0 .. n-1; else n distinct world ranks, row-major in the mesh's shape (n: the product
   * of the shape).
   */
  const int32_t *ranks;
  /**
   * The number of elements of ranks: n; 0 where ranks is NULL.
   */
  size_t num_ranks;
  /**
   * NULL, or one element for each dimension of the mesh.
   */
  const struct dm_dim_options *dim_options;
  /**
   * The number of elements of dim_options: that of the mesh's dimensions; 0 where dim_options
   * is NULL.
   */
  size_t num_dim_options;
  /**
   * How long each collective call of the mesh may wait on the host, in milliseconds. 0: as long
   * as the world's. It does not bound work that a call on cuda has put on a stream: see dm_check
   * and dm_abort.
   */
  int64_t timeout_ms;
} dm_init_options;

/**
 * A communicator of NCCL or of a library with its API: the same line as in nccl.h, so that both
 * headers can be included, in either order.
 */
typedef struct ncclComm *ncclComm_t;

/**
 * Options of a collective call that gives a mesh new dimensions, or ends it. Initialise with
 * DM_CALL_OPTIONS_INIT.
 */
typedef struct dm_call_options {
  /**
   * sizeof(dm_call_options), set by the caller.
   */
  size_t struct_size;
  /**
   * There are no flags yet: 0.
   */
  uint32_t flags;
  /**
   * Must be 0.
   */
  uint32_t reserved;
  /**
   * How long the call may take, in milliseconds. 0: as long as the mesh's calls.
   */
  int64_t timeout_ms;
  /**
   * NULL, or one element for each dimension that the call makes.
   */
  const struct dm_dim_options *dim_options;
  /**
   * The number of elements of dim_options; 0 where dim_options is NULL.
   */
  size_t num_dim_options;
} dm_call_options;

/**
 * How one mesh dimension splits a tensor; dm_local_shard takes one for each dimension.
 */
typedef struct dm_placement {
  /**
   * DM_REPLICATE, DM_SHARD or DM_PARTIAL.
   */
  int32_t kind;
  /**
   * For DM_SHARD: the dimension of the tensor, from 0. Not looked at otherwise.
   */
  int32_t tensor_dim;
  /**
   * For DM_SHARD, among the mesh dimensions that shard one tensor_dim: lower splits first, equal
   * ones in the order of the mesh. All zero is PyTorch's order, from left to right.
   */
  int32_t order;
  /**
   * Must be 0. An initialiser that ends before it, as in `{DM_SHARD, 0, 1}`, makes it 0.
   */
  uint32_t reserved[5];
} dm_placement;

/**
 * The options of dm_plan_ranks. Initialise with DM_PLAN_OPTIONS_INIT.
 */
typedef struct dm_plan_options {
  /**
   * sizeof(dm_plan_options), set by the caller.
   */
  size_t struct_size;
  /**
   * There are no flags yet: 0.
   */
  uint32_t flags;
  /**
   * The number of ranks in the world, and of paths in locations.
   */
  int32_t world_size;
  /**
   * The path of each world rank, from far to near: "rack1/host3/nvl0".
   */
  const char *const *locations;
  /**
   * The size of each dimension of the mesh. The product is at most world_size.
   */
  const int32_t *shape;
  /**
   * The number of dimensions.
   */
  size_t ndim;
  /**
   * NULL, or a weight for each dimension: how much a rank exchanges along it.
   */
  const uint32_t *traffic;
} dm_plan_options;

/**
 * The type of a buffer's elements: the values of ncclDataType_t. On cuda every number up to 255
 * goes to NCCL, which refuses those that it does not know; of a number that is not listed here,
 * the overlap of buffers is not checked.
 */
typedef int32_t dm_dtype;

/**
 * A reduction: the values of ncclRedOp_t. A number that ncclRedOpCreatePreMulSum of the library
 * (dm_get_proc) has made for the communicator (dm_get_comm) is one, too.
 */
typedef int32_t dm_op;

/* ---- statuses ---- */

/**
 * Success.
 */
#define DM_STATUS_OK 0

/**
 * An argument is NULL, out of range, repeated or contradicts another; a struct_size is wrong; a
 * flag is unknown.
 */
#define DM_STATUS_INVALID_ARGUMENT 1

/**
 * The handle was never given out, or was freed.
 */
#define DM_STATUS_INVALID_HANDLE 2

/**
 * No dimension, symbol or registered mesh of that name.
 */
#define DM_STATUS_NOT_FOUND 3

/**
 * The calling rank is not part of this mesh.
 */
#define DM_STATUS_NOT_MEMBER 4

/**
 * The buffer is smaller than the answer; the length that is needed was written.
 */
#define DM_STATUS_BUFFER_TOO_SMALL 5

/**
 * Ranks disagree about a collective call; the message says which rank asked for what.
 */
#define DM_STATUS_MISMATCH 6

/**
 * A deadline passed; the message names the ranks that never came.
 */
#define DM_STATUS_TIMEOUT 7

/**
 * The rendezvous store is unreachable, broke the protocol, or refused this process.
 */
#define DM_STATUS_STORE 8

/**
 * The communicator library failed; ccl_result of dm_error_info has its code.
 */
#define DM_STATUS_CCL 9

/**
 * The device driver failed; device_error of dm_error_info has its code.
 */
#define DM_STATUS_DEVICE 10

/**
 * No usable communicator library; the message lists what was tried.
 */
#define DM_STATUS_LIBRARY 11

/**
 * Not available for this device type, world or library version; the message says what to do
 * instead.
 */
#define DM_STATUS_UNSUPPORTED 12

/**
 * The mesh was aborted or finalized, or its world aborted.
 */
#define DM_STATUS_ABORTED 13

/**
 * A rank is lost (see "lost" at the head of this file), or has aborted what the call uses. The
 * message names it where known. Only the lost_ranks of dm_error_info are gone for good.
 */
#define DM_STATUS_PEER_LOST 14

/**
 * A bug in this library (a caught panic).
 */
#define DM_STATUS_INTERNAL 15

/**
 * This process has no more handles (2^24 of a kind), memory, descriptors or threads; the message
 * names the limit and how to raise it.
 */
#define DM_STATUS_EXHAUSTED 16

/**
 * The arguments are right, but the call may not be made now; the message says what to do first.
 */
#define DM_STATUS_INVALID_STATE 17

/* ---- types of elements ---- */

/**
 * Signed 8-bit integers.
 */
#define DM_INT8 0

/**
 * Unsigned 8-bit integers.
 */
#define DM_UINT8 1

/**
 * Signed 32-bit integers.
 */
#define DM_INT32 2

/**
 * Unsigned 32-bit integers.
 */
#define DM_UINT32 3

/**
 * Signed 64-bit integers.
 */
#define DM_INT64 4

/**
 * Unsigned 64-bit integers.
 */
#define DM_UINT64 5

/**
 * IEEE 754 binary16.
 */
#define DM_FLOAT16 6

/**
 * IEEE 754 binary32.
 */
#define DM_FLOAT32 7

/**
 * IEEE 754 binary64.
 */
#define DM_FLOAT64 8

/**
 * bfloat16: the upper half of a binary32.
 */
#define DM_BFLOAT16 9

/**
 * ncclFloat8e4m3 (NCCL 2.24): 4 bits of exponent, 3 of mantissa, no infinity, 448 at most. The
 * host engine computes in binary32 and rounds once; what is beyond the largest number becomes the
 * largest number, as in NCCL.
 */
#define DM_FLOAT8E4M3 10

/**
 * ncclFloat8e5m2 (NCCL 2.24): 5 bits of exponent, 2 of mantissa, 57344 at most. Rounded as
 * DM_FLOAT8E4M3; so the sum of infinities is the largest number, but DM_MAX and DM_MIN keep them.
 */
#define DM_FLOAT8E5M2 11

/* ---- reductions ---- */

/**
 * Sum.
 */
#define DM_SUM 0

/**
 * Product.
 */
#define DM_PROD 1

/**
 * Maximum. On the host engine it is NaN where a rank has NaN; NCCL ignores a NaN where another
 * rank has a number.
 */
#define DM_MAX 2

/**
 * Minimum. NaNs are as in DM_MAX.
 */
#define DM_MIN 3

/**
 * Sum divided by the number of ranks. On the host engine it does not overflow, and that of
 * integers is the exact sum divided and truncated towards zero. NCCL makes the sum of integers in
 * the element's own type, where it can overflow, and multiplies floating-point numbers by 1/n
 * before it adds them.
 */
#define DM_AVG 4

/* ---- levels of the log ---- */

/**
 * Nothing is logged.
 */
#define DM_LOG_OFF 0

/**
 * A failure that no caller is told of.
 */
#define DM_LOG_ERROR 1

/**
 * A rank that is lost, an abort, a communicator that has failed, a deadline that comes near.
 */
#define DM_LOG_WARN 2

/**
 * Joining and leaving a world, and each communicator with its cost.
 */
#define DM_LOG_INFO 3

/**
 * Each step of joining, each agreement of the ranks, each error that a caller gets.
 */
#define DM_LOG_DEBUG 4

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/* ---- errors and versions ---- */

/**
 * The name of a status, for example "DM_STATUS_TIMEOUT"; "DM_STATUS_UNKNOWN" for a number that is
 * no status.
 *
 * Local. The string is static and never NULL.
 */
const char *dm_status_name(dm_status status);

/**
 * Returns the message of this thread's last failing call: one line with the values, or "" when no
 * call has failed yet.
 *
 * Local. Borrowed: valid until this thread's next failing call. A call that succeeds does not
 * clear it.
 */
const char *dm_last_error(void);

/**
 * This thread's last failing call in full: status, message, the codes of the layers below, and
 * which ranks, dimension and call the failure is about. A program needs no text to go on without
 * the ranks that are lost (dm_shrink).
 *
 * Local. `info_out->struct_size` is set by the caller (DM_ERROR_INFO_INIT). Before any failure the
 * status is DM_STATUS_OK and the message "". Errors: DM_STATUS_INVALID_ARGUMENT when info_out is
 * NULL or its struct_size is wrong.
 */
dm_status dm_last_error_info(struct dm_error_info *info_out);

/**
 * The version of the loaded library: 10000 * major + 100 * minor + patch, so 200 is 0.2.0.
 *
 * Local. A program that loads the library by dlopen checks it first: another minor version
 * (below 1.0) or major version has other functions and types. Where the library was loaded by
 * the file name of such a version (libdevicemesh.so.0.1), dm_world_init, dm_init, dm_from_comms,
 * dm_deserialize and dm_plan_ranks fail with DM_STATUS_UNSUPPORTED.
 */
uint32_t dm_version(void);

/* ---- the log ---- */

/**
 * Sets what the library logs, and where. It replaces what the environment variable DM_LOG (error,
 * warn, info or debug) has set; without both nothing is logged.
 *
 * Local. log NULL: each record is one line on stderr, with time (UTC), level and rank. Otherwise
 * the library calls log(user_data, level, message) in place of that. message is one line of UTF-8
 * without a newline, which begins with the rank ("rank 3: ..."); it is valid during the call.
 *
 * log is called from threads of the library too, from several threads at once, and never while
 * the library holds a lock that a local function needs: it may call dm_abort, dm_rank, dm_set_log
 * and other local functions, but no collective ones. What such calls log on this thread is
 * dropped. log must return: a C++ exception that leaves it ends the process, and longjmp out of it
 * is not allowed. After dm_set_log has replaced log, user_data may be freed, unless dm_set_log was
 * called from inside log. In a forked child of a process with a world nothing is logged.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (level is no DM_LOG_ value), DM_STATUS_TIMEOUT (the new log
 * is set, but another thread has been inside the earlier one for 5 s), DM_STATUS_UNSUPPORTED (a
 * Rust program has a logger of its own).
 */
dm_status dm_set_log(dm_log_level level,
                     void (*log)(void *user_data, dm_log_level level, const char *message),
                     void *user_data);

/* ---- the world ---- */

/**
 * Joins the world: finds out which rank this process is, reaches the store, and agrees with the
 * other ranks on the members of the world.
 *
 * Collective over the world, except with DM_WORLD_OFFLINE. device_type is "cuda", "cpu", or NULL
 * for cuda where a driver with a device and NCCL (or RCCL) are present and cpu elsewhere.
 * options NULL: everything from the launcher's environment (torchrun, Open MPI, PALS, PMI, PMIx, Slurm, a
 * Kubernetes indexed job, or alone; docs/launchers.md has their variables). A process with several
 * devices joins one world per device, each with an explicit rank, from one thread per device. Each
 * rank frees its handle with dm_world_free.
 *
 * With init_method "tcp://host:port" or an environment without a launcher's store, rank 0 serves
 * the store until its handle and meshes are freed or its process ends; the other ranks need it
 * for every collective call of this library. Rank 0 listens only on the addresses of the host
 * that is named. With DM_STORE_SECRET set in the environment of all ranks, it serves only
 * connections that prove to have the secret (PyTorch's clients cannot).
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (options, partial or contradictory environment variables),
 * DM_STATUS_STORE (unreachable, port in use), DM_STATUS_TIMEOUT (names the ranks that never came),
 * DM_STATUS_MISMATCH (world size, device type or library version differ), DM_STATUS_PEER_LOST (a
 * rank has gone; it is named), DM_STATUS_LIBRARY and DM_STATUS_DEVICE (no communicator library, no
 * device driver), DM_STATUS_UNSUPPORTED (device type cpu on several hosts).
 */
dm_status dm_world_init(const char *device_type, const struct dm_world_options *options, struct dm_world **world_out);

/**
 * This process's rank in the world, 0 to size - 1.
 *
 * Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (rank_out is NULL).
 */
dm_status dm_world_rank(const struct dm_world *world, int32_t *rank_out);

/**
 * The number of ranks in the world.
 *
 * Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (size_out is NULL).
 */
dm_status dm_world_size(const struct dm_world *world, int32_t *size_out);

/**
 * Returns when every rank of the world has called it.
 *
 * Collective over the world. timeout_ms 0: the world's timeout. The call goes through the store,
 * so it costs some round trips. It says nothing about work on devices. Errors: DM_STATUS_TIMEOUT
 * names the ranks that did not come, DM_STATUS_MISMATCH names a rank that made another call,
 * DM_STATUS_PEER_LOST a rank that is lost; DM_STATUS_ABORTED says that this rank has left by
 * dm_world_abort; DM_STATUS_INVALID_STATE (operations wait in a group of this thread),
 * DM_STATUS_INVALID_ARGUMENT, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world),
 * DM_STATUS_STORE.
 */
dm_status dm_world_barrier(const struct dm_world *world, int64_t timeout_ms);

/**
 * Gives the location of every rank of the world as dm_plan_ranks takes it: world_size paths in
 * rank order.
 *
 * Collective over the world. location is the path of this rank, from far to near
 * ("rack1/host3/nvl0"). NULL stands for the name of its host, which is the same for all
 * containers of one machine. Ranks may give different levels, but for a plan all paths should
 * have the same levels. timeout_ms 0: the world's timeout. *locations_out is borrowed from the
 * world: valid until its last handle and mesh are freed.
 *
 * ```c
 * dm_plan_options plan = DM_PLAN_OPTIONS_INIT;
 * dm_world_locations(world, NULL, 0, &plan.locations);
 * plan.world_size = world_size;
 * plan.shape = shape;
 * plan.ndim = ndim;
 * dm_plan_ranks(&plan, ranks, NULL, 0, NULL);
 * ```
 *
 * The library owns the list and its strings: the caller copies what must live longer, and frees
 * nothing. Equal answers are lent once, so repeated calls need no further memory.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (also a location of more than 4096 bytes, a negative
 * timeout), DM_STATUS_UNSUPPORTED (an offline world), and those of dm_world_barrier.
 */
dm_status dm_world_locations(const struct dm_world *world,
                             const char *location,
                             int64_t timeout_ms,
                             const char *const **locations_out);

/**
 * Ends this rank's part in the world, without waiting for other ranks: wakes every call of it that
 * is blocked on this rank (dm_init, dm_world_barrier, dm_flatten ...) and aborts all its root
 * meshes, as dm_abort does. To the other ranks this rank is lost from then on.
 *
 * Local, from any thread; takes no lock that a blocked call holds. From then on every collective
 * call of the world answers DM_STATUS_ABORTED, and raw communicators of its meshes must not be
 * used any more; handles are still to be freed. Other ranks that wait for this one get
 * DM_STATUS_PEER_LOST, which names it. A second abort does nothing. A token of
 * dm_world_options.joining_out ends the dm_world_init that wrote it. dm_default_world_abort does
 * this for the worlds that dm_init joins by itself. Errors: those of dm_abort.
 */
dm_status dm_world_abort(const struct dm_world *world);

/**
 * Ends this rank's part in the default worlds, those that dm_init joins by itself, as
 * dm_world_abort does. It ends one that is being joined, too.
 *
 * Local, from any thread; takes no lock that a blocked call holds. A dm_init that begins after
 * that joins the default world anew, so the ranks can meet again once all of them have aborted
 * theirs. Without a default world it does nothing. Errors: DM_STATUS_CCL.
 */
dm_status dm_default_world_abort(void);

/**
 * Ends the world in order: waits for the outstanding work of all its meshes on all ranks, destroys
 * their communicators, also those of meshes whose handles were freed, and ends the meshes and the
 * world. It is what destroy_process_group() is in PyTorch.
 *
 * Collective over the world; local in an offline world. timeout_ms 0: the world's timeout. Every
 * call of the world and its meshes answers DM_STATUS_ABORTED from then on, raw communicators of
 * its meshes must not be used any more, and handles are still to be freed. Communicators that
 * dm_from_comms took without DM_INIT_OWN_COMMS stay the caller's. Where dm_init joined the world
 * by itself, the next dm_init joins it anew. Errors: DM_STATUS_TIMEOUT and DM_STATUS_MISMATCH as
 * in dm_init (when a rank never made the call, the world is as before, and dm_world_abort ends
 * it), DM_STATUS_CCL and DM_STATUS_PEER_LOST (a communicator had failed, or fails now: it is
 * aborted, and the world has ended all the same), DM_STATUS_ABORTED (it has ended already),
 * DM_STATUS_INVALID_ARGUMENT (a negative timeout), DM_STATUS_INVALID_STATE (operations wait in a
 * group of this thread), DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_world_finalize(const struct dm_world *world, int64_t timeout_ms);

/**
 * Ends the default worlds in order, those that dm_init joins by itself, as dm_world_finalize does.
 *
 * Collective over the default worlds that this process is in: all of them have the same ranks.
 * timeout_ms bounds the whole call, also where the process is in two of them; 0: the longest of
 * their timeouts. Where the process is in none, this does nothing. A dm_init that begins after
 * that joins the default world anew. Errors: those of dm_world_finalize.
 */
dm_status dm_default_world_finalize(int64_t timeout_ms);

/**
 * Frees a world handle. Local; NULL is a no-op, and so are a handle that was freed before and any
 * handle in a forked child.
 *
 * Meshes keep what they need of the world alive; communicators live on as dm_get_comm says. Where
 * this was the last handle of the world, the call returns when the store has been let go, and on
 * rank 0 when its server has ended.
 */
void dm_world_free(struct dm_world *world);

/**
 * Gives the world that the mesh is in, also when dm_init joined it by itself.
 *
 * Local; it works for each view of the mesh, and after the mesh has ended too. *world_out is a new
 * handle, which the caller frees with dm_world_free. The world lives on as long as one of its
 * handles or meshes does. Errors: DM_STATUS_UNSUPPORTED (a mesh of dm_from_comms without a world),
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (world_out is NULL).
 */
dm_status dm_get_world(const struct dm_mesh *mesh, struct dm_world **world_out);

/**
 * Gives the default world, the one that dm_init joins where its options name no world. Joins it
 * first where this process is not in it.
 *
 * Collective over the world where this process is not in it, local otherwise. device_type is as
 * for dm_world_init; each device type has a default world of its own. The ranks and their store
 * come from the launcher's environment. timeout_ms bounds the joining; 0: 600000. *world_out is a
 * new handle, which the caller frees with dm_world_free; this process stays in the default world.
 * After dm_default_world_abort, dm_default_world_finalize, or a dm_world_abort or
 * dm_world_finalize of this world, the next call joins anew, with all ranks. Errors: those of
 * dm_world_init.
 */
dm_status dm_default_world(const char *device_type, int64_t timeout_ms, struct dm_world **world_out);

/**
 * Tells who this process is in the world, where it runs, and what makes its communicators.
 *
 * Local; it answers after the world has ended too. `info_out->struct_size` is set by the caller
 * (DM_WORLD_INFO_INIT). A program needs no environment variable to choose its device: the
 * library has chosen `device` for this rank, and works on it also on threads that have no current
 * device. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (info_out is NULL, or its
 * struct_size is wrong).
 *
 * ```c
 * dm_world *world;
 * dm_world_info info = DM_WORLD_INFO_INIT;
 * dm_get_world(mesh, &world);
 * dm_world_get_info(world, &info);
 * cudaSetDevice(info.device);
 * dm_world_free(world);
 * ```
 */
dm_status dm_world_get_info(const struct dm_world *world, struct dm_world_info *info_out);

/* ---- making meshes ---- */

/**
 * Makes a mesh: gives every dimension of this rank a ready communicator. dm_finalize ends the
 * communicators; dm_free frees the handle alone.
 *
 * ```c
 * dm_init("cuda", (int[]){2, 4}, 2, (const char *[]){"replicate", "shard"}, NULL, &mesh);
 * dm_get_comm(mesh, "shard", &comm);
 * ```
 *
 * Collective over the world, also for ranks outside a mesh that is smaller than the world (their
 * handle answers DM_STATUS_NOT_MEMBER where membership matters). Ranks lie in the mesh row-major:
 * the last dimension is the fastest. device_type is "cuda", "cpu" or NULL (the device type of
 * options->world; without a world see dm_world_init). shape has ndim sizes, each at least 1; their
 * product is at most the world's size. dim_names are ndim different, non-empty names; NULL names
 * them dim_0, dim_1 ... options NULL: the default world, ranks 0 .. n-1, the world's timeout.
 * options->num_ranks and num_dim_options are the lengths of the lists beside them.
 * options->timeout_ms bounds the whole call, also the join of the default world in it. After a
 * join that failed, was late or was aborted, the next call joins anew. The caller frees the handle
 * with dm_free.
 *
 * Before any communicator is made, the ranks agree that they all made this same call. Errors:
 * DM_STATUS_INVALID_ARGUMENT (found before anybody is waited for; the other ranks are told and get
 * it too, but not where the call was to join the default world), DM_STATUS_MISMATCH
 * (which rank asked for what), DM_STATUS_TIMEOUT (which ranks never came), DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_ABORTED (dm_world_abort on this rank ends the call, also while
 * it is blocked), and what dm_world_init gives when the default world is joined here. When the
 * call fails on any rank, it fails on all ranks and leaves nothing behind.
 */
dm_status dm_init(const char *device_type,
                  const int32_t *shape,
                  size_t ndim,
                  const char *const *dim_names,
                  const struct dm_init_options *options,
                  struct dm_mesh **mesh_out);

/**
 * Makes a mesh over communicators that exist already, one per dimension in the order of the
 * dimensions.
 *
 * Local. Element i of comms is this rank's communicator along dimension i: it has as many ranks
 * as the dimension, and this process's rank in it is its coordinate (checked). On cuda the
 * communicators belong to the library that the program has named (dm_world_options.ccl_library of
 * options->world, or dm_set_ccl_resolver), or else to the only copy of NCCL that is loaded in the
 * process; DM_CCL_LIBRARY does not count here, and several copies are refused with their paths.
 * The communicators stay the caller's, must outlive the mesh, and are not aborted by dm_abort,
 * unless options->flags has DM_INIT_OWN_COMMS. options may not have DM_INIT_LAZY or dim_options, because
 * nothing is made here. options->world NULL: the mesh joins no world, its ranks
 * are 0 .. n-1, and only local calls and collectives on it work (dm_flatten needs a world).
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (also when a communicator's size or rank does not fit),
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_CCL, DM_STATUS_LIBRARY (several copies of NCCL are loaded,
 * or none).
 */
dm_status dm_from_comms(const char *device_type,
                        const int32_t *shape,
                        size_t ndim,
                        const char *const *dim_names,
                        const ncclComm_t *comms,
                        const struct dm_init_options *options,
                        struct dm_mesh **mesh_out);

/* ---- meshes as text ---- */

/**
 * Writes the view as one line of JSON, from which dm_deserialize makes it again, for example in
 * another job or from another language.
 *
 * Local. *len_out is the length in bytes with the NUL. This is the text of row 1 of a mesh (dp=2,
 * tp=4) over 8 ranks, which dm_slice(mesh, {"tp"}) gives on ranks 4 to 7:
 *
 * ```c
 * {"devicemesh":1,"device_type":"cuda","shape":[4],"names":["tp"],"layout":[[[4,1]]],"base":4,"ranks":[[0,8]]}
 * ```
 *
 * devicemesh is the version of the format, 1. ranks is a list of world ranks in runs: [first,
 * count] is first, first + 1 ..., [first, count, step] is first, first + step ..., count of them;
 * step may be negative. layout has for each dimension its (size, stride) pairs, the most
 * significant first; their sizes multiply to the dimension's in shape, and a dimension of size 1
 * may have none. The rank at a coordinate is element
 *
 * ```c
 * base + sum over dimensions and their pairs of  digit * stride
 * ```
 *
 * of ranks, where the digits of a dimension are those of its coordinate as a number in the mixed
 * radix of its sizes: 5 in `[[2,8],[4,1]]` is (1, 1), which lies at 9. So in the text above, the
 * rank at coordinate 2 is element 4 + 2 * 1 of 0 .. 7. When the pairs are in the order of their
 * strides, each stride is a multiple of size * stride of the pair before it, so no rank appears
 * twice. ranks may have more elements than the layout reaches.
 *
 * A mesh (64, 32, 64, 8) of 1,048,576 ranks in a row has a text of 171 bytes, and the texts of
 * its views are no longer. A mesh made with a rank array has as many runs as its list of ranks.
 * Equal views can have different texts: compare with dm_equal. After dm_slice, ranks that hold
 * different views have different texts.
 *
 * Errors: DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_serialize(const struct dm_mesh *mesh, char *text, size_t capacity, size_t *len_out);

/**
 * Makes the mesh that a text of dm_serialize describes, as dm_init does with the text's device
 * type, shape, names and ranks. It is a root mesh, equal (dm_equal) to the view that was written,
 * with a communicator for every dimension.
 *
 * Collective over the world, on the same terms as dm_init, which the messages name: every rank
 * passes a text of the same mesh, or makes that call of dm_init. (After dm_slice each rank has a
 * view of its own: pass one of their texts to all ranks.) options are dm_init's, with dim_options
 * for the dimensions of the text; options->ranks is NULL. Without options->world it is the default
 * world of the text's device type, which may be larger than the one the text comes from. The
 * caller frees the handle with dm_free.
 *
 * Keys may come in any order and with spaces between. All seven are needed and there are no
 * others; numbers are integers; there are at most 65536 dimensions. The text may come from a
 * stranger: it is checked before anybody is waited for, and takes memory in proportion to its
 * length and the world's size, not to the numbers in it. Errors: DM_STATUS_INVALID_ARGUMENT (on
 * the caller alone: where it is not JSON, which key is missing, which numbers contradict each
 * other, which rank is listed twice or not in the world), and those of dm_init.
 */
dm_status dm_deserialize(const char *text, const struct dm_init_options *options, struct dm_mesh **mesh_out);

/* ---- views of a mesh ---- */

/**
 * A view of the named dimensions, in the order given; it shares the parent's communicators.
 *
 * Local. Any view can be sliced, in any order of names: ("cp", "dp") gives the transposed view. A
 * name given to a flattened dimension is known to the root and to every view that holds its
 * dimensions. num_names 0 gives a view without dimensions, of this rank alone. The caller frees
 * the handle with dm_free; it does not depend on the handle of the parent.
 *
 * Errors: DM_STATUS_NOT_FOUND (lists the names there are), DM_STATUS_INVALID_ARGUMENT (a repeated
 * name, or dimensions that overlap), DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED,
 * DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_slice(const struct dm_mesh *mesh,
                   const char *const *dim_names,
                   size_t num_names,
                   struct dm_mesh **mesh_out);

/**
 * Joins all dimensions of this view into one, with a communicator over its ranks in row-major
 * order.
 *
 * Collective over the root mesh; for a view of a range, over the ranks of the range (see "range"
 * at the head of this file). name NULL joins the dimensions' names with "_". The same dimensions
 * under the same name give the communicator that exists, without communication; under another name
 * they share it unless options->dim_options says DM_DIM_OWN_COMM. options NULL: the defaults; its
 * dim_options has one element. The caller frees the handle with dm_free.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (the name is a dimension's or another flattened dimension's),
 * DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT, DM_STATUS_CCL, DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED,
 * DM_STATUS_INVALID_HANDLE; DM_STATUS_UNSUPPORTED for a mesh without a world (dm_from_comms).
 */
dm_status dm_flatten(const struct dm_mesh *mesh,
                     const char *name,
                     const struct dm_call_options *options,
                     struct dm_mesh **mesh_out);

/**
 * The view with dimension dim replaced by ndim dimensions, whose sizes in shape multiply to its
 * size, each with a communicator.
 *
 * Collective over the root mesh. The first of the new dimensions is the slowest. Their names must
 * not be those of the view's other dimensions. options NULL: the defaults; its dim_options has
 * ndim elements, one per new dimension. The caller frees the handle with dm_free.
 *
 * Errors: DM_STATUS_NOT_FOUND (no such dimension), DM_STATUS_INVALID_ARGUMENT (shape, names), and
 * those of dm_flatten.
 */
dm_status dm_unflatten(const struct dm_mesh *mesh,
                       const char *dim,
                       const int32_t *shape,
                       size_t ndim,
                       const char *const *dim_names,
                       const struct dm_call_options *options,
                       struct dm_mesh **mesh_out);

/**
 * All ranks of this view, row-major, under another shape: a second factorisation of the same
 * ranks, each dimension with a communicator.
 *
 * Collective over the root mesh. The ndim sizes in shape multiply to the view's number of ranks;
 * the first of the new dimensions is the slowest. A name that the view or its root has already
 * must mean the same groups (the same pipeline stages, for example), and dimensions over the same
 * ranks as an existing one share its communicator. Expert parallelism beside dense layers, on a
 * mesh (pp=2, dp=2, cp=2, tp=2) of 16 ranks:
 *
 * ```c
 * dm_reshape(dense, (int[]){2, 2, 2, 2}, 4, (const char *[]){"pp", "edp", "ep", "etp"}, NULL, &sparse);
 * ```
 *
 * Here pp is checked to be the same stages, and etp shares the communicator of tp. options NULL:
 * the defaults; its dim_options has ndim elements, one per new dimension. The caller frees the
 * handle with dm_free.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (shape; a repeated name; a name that means other groups, with
 * both layouts), and those of dm_flatten.
 */
dm_status dm_reshape(const struct dm_mesh *mesh,
                     const int32_t *shape,
                     size_t ndim,
                     const char *const *dim_names,
                     const struct dm_call_options *options,
                     struct dm_mesh **mesh_out);

/**
 * The view with dimension dim restricted to its indices start, start + step ... (len of them),
 * with a communicator of its own along dim. Examples are the first stages of a pipeline, every
 * second replica, and all ranks but the spare ones.
 *
 * Collective over the root mesh of this view (where this view is one of a range itself, over the
 * ranks of that range), also for the ranks at other indices: they get a handle too, which answers
 * DM_STATUS_NOT_MEMBER where membership matters. dim NULL is allowed on a 1-D mesh.
 * The result is a range. Row-major positions, strides (dm_describe), dm_submesh and
 * dm_replica_groups count among the ranks that are left, and so do the calls on it that are
 * collective over the root mesh and make something (dm_flatten ...). The other dimensions keep
 * their communicators. dm_root gives the root mesh that this view belongs to, with all its ranks;
 * the result ends with that mesh. A range of all indices is the view itself. options NULL: the
 * defaults; its dim_options has one element, for what is left of dim. The caller frees the handle
 * with dm_free.
 *
 * On a mesh (pp=4, tp=2) over ranks 0 .. 7, start 2, len 2, step 1 along pp gives (pp=2, tp=2)
 * over ranks 4 .. 7, in which rank 6 has coordinate (1, 0). Making the same range again gives the
 * communicators that it has.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (len or step is 0, an index past the end),
 * DM_STATUS_NOT_FOUND (no such dimension), and those of dm_flatten.
 */
dm_status dm_slice_range(const struct dm_mesh *mesh,
                         const char *dim,
                         int32_t start,
                         int32_t len,
                         int32_t step,
                         const struct dm_call_options *options,
                         struct dm_mesh **mesh_out);

/**
 * Makes one view of several views of one root mesh: it has the dimensions of all of them, in
 * order.
 *
 * Local. They may not overlap: each rank appears once. The caller frees the handle with dm_free.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (no mesh, different roots, overlap, a repeated name),
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED.
 */
dm_status dm_concatenate(const struct dm_mesh *const *meshes, size_t n, struct dm_mesh **mesh_out);

/**
 * The root mesh of a view: the one that dm_init, dm_deserialize, dm_from_comms or dm_shrink made.
 *
 * Local. The caller frees the handle with dm_free. Errors: DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_ABORTED.
 */
dm_status dm_root(const struct dm_mesh *mesh, struct dm_mesh **mesh_out);

/**
 * How many parallel copies of the named dimensions there are over the ranks of the root mesh: its
 * size divided by theirs.
 *
 * Local. Errors: as dm_slice; DM_STATUS_INVALID_ARGUMENT when count_out is NULL.
 */
dm_status dm_submesh_count(const struct dm_mesh *mesh,
                           const char *const *dim_names,
                           size_t num_names,
                           int32_t *count_out);

/**
 * One of the parallel copies of the named dimensions over the ranks of the root mesh, by index;
 * the copies are ordered by the row-major position of their first rank.
 *
 * Local. The copy that holds this rank equals dm_slice of those names; the others answer questions
 * about their ranks, and DM_STATUS_NOT_MEMBER where this rank's own place or communicator is asked
 * for. The caller frees the handle with dm_free.
 *
 * Errors: as dm_slice; DM_STATUS_INVALID_ARGUMENT when index is not below dm_submesh_count.
 */
dm_status dm_submesh(const struct dm_mesh *mesh,
                     const char *const *dim_names,
                     size_t num_names,
                     int32_t index,
                     struct dm_mesh **mesh_out);

/**
 * Another handle of the same view, freed on its own.
 *
 * Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (mesh_out is NULL).
 */
dm_status dm_clone(const struct dm_mesh *mesh, struct dm_mesh **mesh_out);

/**
 * Frees a mesh handle. It never ends communicators, because raw pointers to them may be in use:
 * dm_finalize (or dm_world_finalize, dm_abort) ends them, so call it before.
 *
 * Local, never blocks; NULL is a no-op, and so are a handle that was freed before and any handle
 * in a forked child. Other views are not touched. A program that makes meshes and only frees them
 * keeps the memory of every communicator until dm_world_finalize. A thread of the library ends
 * everything that takes time: failed communicators that no mesh has any more, and the world, where
 * this was its last handle. The end of the process waits for that thread for two seconds.
 */
void dm_free(struct dm_mesh *mesh);

/* ---- questions to a mesh ---- */

/**
 * The number of dimensions; 0 for an invalid handle (dm_last_error then says so) and for a view
 * without dimensions.
 *
 * Local.
 */
size_t dm_ndim(const struct dm_mesh *mesh);

/**
 * The name of the dimension at that index; NULL past the end and for an invalid handle.
 *
 * Local. Borrowed from the handle: valid until it is freed.
 */
const char *dm_dim_name(const struct dm_mesh *mesh, size_t index);

/**
 * The sizes of the dimensions, in order.
 *
 * Local. *len_out is the number of dimensions, always written for a valid handle. Errors:
 * DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_shape(const struct dm_mesh *mesh, int32_t *sizes, size_t capacity, size_t *len_out);

/**
 * The size of a dimension in ranks; dim NULL: the number of ranks of the whole view.
 *
 * Local. Errors: DM_STATUS_NOT_FOUND, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_size(const struct dm_mesh *mesh, const char *dim, int32_t *size_out);

/**
 * "cuda" or "cpu": where the buffers of the mesh's collectives lie; NULL for an invalid handle
 * (dm_last_error then says so).
 *
 * Local. The string is static.
 */
const char *dm_device_type(const struct dm_mesh *mesh);

/**
 * Whether this process's rank is in the view. It never gives DM_STATUS_NOT_MEMBER, and answers
 * also when the mesh has ended.
 *
 * Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (member_out is NULL).
 */
dm_status dm_is_member(const struct dm_mesh *mesh, bool *member_out);

/**
 * This process's rank in the world, whether or not it is in the mesh.
 *
 * Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_rank(const struct dm_mesh *mesh, int32_t *world_rank_out);

/**
 * This process's rank along a dimension: its coordinate along it, and its rank in that
 * dimension's communicator. PyTorch calls it the local rank.
 *
 * Local. dim NULL is allowed on a 1-D mesh. Errors: DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (dim is NULL on a mesh of several
 * dimensions).
 */
dm_status dm_get_local_rank(const struct dm_mesh *mesh, const char *dim, int32_t *dim_rank_out);

/**
 * This rank's coordinate in the view, one number per dimension.
 *
 * Local. *len_out is the number of dimensions. Errors: DM_STATUS_NOT_MEMBER,
 * DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_get_coordinate(const struct dm_mesh *mesh, int32_t *coordinate, size_t capacity, size_t *len_out);

/**
 * The coordinate in the view of any of its ranks, by world rank: one number per dimension.
 *
 * Local. *len_out is the number of dimensions. Errors: DM_STATUS_NOT_MEMBER (the rank is not in
 * this view), DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_coordinate_of(const struct dm_mesh *mesh,
                           int32_t world_rank,
                           int32_t *coordinate,
                           size_t capacity,
                           size_t *len_out);

/**
 * The world ranks of the view, row-major in its shape.
 *
 * Local. *len_out is their number, the product of the shape. Errors: DM_STATUS_BUFFER_TOO_SMALL,
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_ranks(const struct dm_mesh *mesh, int32_t *ranks, size_t capacity, size_t *len_out);

/**
 * The world ranks of this rank's group along a dimension, in the order of their ranks in its
 * communicator.
 *
 * Local. dim NULL is allowed on a 1-D mesh. *len_out is the size of the dimension. Errors:
 * DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_group_ranks(const struct dm_mesh *mesh, const char *dim, int32_t *ranks, size_t capacity, size_t *len_out);

/**
 * All groups along a dimension, as XLA wants them: an array of shape [groups, size of dim],
 * row-major, that holds each rank of the root mesh once.
 *
 * Local. dim NULL is allowed on a 1-D mesh. *len_out is groups times size, the number of ranks of
 * the root mesh. Groups are ordered by the row-major position of their first rank. Errors:
 * DM_STATUS_NOT_FOUND, DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_replica_groups(const struct dm_mesh *mesh,
                            const char *dim,
                            int32_t *ranks,
                            size_t capacity,
                            size_t *len_out);

/**
 * Whether two views have the same ranks, shape, dimension names and device type.
 *
 * Local. By value: views of different root meshes can be equal. Errors: DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_equal(const struct dm_mesh *a, const struct dm_mesh *b, bool *equal_out);

/**
 * A hash of what dm_equal compares: with one release of the library, equal views have equal hashes
 * on every rank, in every run and on every machine. Another release may compute another hash, so
 * store the text of dm_serialize where something must last.
 *
 * Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_hash(const struct dm_mesh *mesh, uint64_t *hash_out);

/**
 * The view as text, as PyTorch prints it: DeviceMesh((dp=2, tp=4), 'cuda', stride=(4, 1)). It is
 * for people and may change between releases; dm_serialize is for programs.
 *
 * Local. *len_out is the length in bytes with the NUL. Errors: DM_STATUS_BUFFER_TOO_SMALL,
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_describe(const struct dm_mesh *mesh, char *text, size_t capacity, size_t *len_out);

/* ---- other ranks along a dimension ---- */

/**
 * The world rank of the rank that is dim_rank along dim, in this rank's group along it.
 *
 * Local. dim NULL is allowed on a 1-D mesh. On mesh (dp=2, tp=4) over ranks 0..7, world rank 6
 * gets 4 for dim_rank 0 of tp and 2 for dim_rank 0 of dp. dm_translate_world_rank is the way back.
 * Errors: DM_STATUS_INVALID_ARGUMENT (dim_rank is negative or not below the dimension's size),
 * DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_translate_rank(const struct dm_mesh *mesh, const char *dim, int32_t dim_rank, int32_t *world_rank_out);

/**
 * The rank along dim of a world rank in this rank's group along it: the number that dm_send,
 * dm_recv and root arguments take.
 *
 * Local. dim NULL is allowed on a 1-D mesh. On mesh (dp=2, tp=4) over ranks 0..7, world rank 6
 * gets 0 for world rank 4 along tp, and DM_STATUS_NOT_MEMBER for world rank 3, which lies in the
 * other group along tp. Errors: DM_STATUS_NOT_MEMBER (also of this rank), DM_STATUS_NOT_FOUND,
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_translate_world_rank(const struct dm_mesh *mesh,
                                  const char *dim,
                                  int32_t world_rank,
                                  int32_t *dim_rank_out);

/**
 * The rank along dim that lies offset steps from this rank: 1 is the next stage of a pipeline, -1
 * the one before. dm_send and dm_recv take it as it is; dm_translate_rank makes a world rank of
 * it.
 *
 * Local. Past the edge: DM_RANK_NONE, or with wrap the rank at (this rank along dim + offset)
 * modulo the dimension's size. offset 0 is this rank. dim NULL is allowed on a 1-D mesh. Errors:
 * DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_neighbor(const struct dm_mesh *mesh, const char *dim, int32_t offset, bool wrap, int32_t *dim_rank_out);

/* ---- what a rank holds ---- */

/**
 * The shape and the offsets of one rank's block of a tensor whose dimensions are split over
 * dimensions of the mesh.
 *
 * Local, no communication. placements has one element per dimension of mesh, so num_placements is
 * dm_ndim(mesh). tensor_shape, local_shape_out and offset_out have tensor_ndim elements each; all
 * three may be NULL when it is 0. world_rank is a rank of the mesh, or -1 for the caller's.
 * Element i of the block along tensor dimension d is element `offset_out[d] + i` of the tensor.
 *
 * A dimension of n indices over p ranks is cut as torch.chunk does: chunks of ceil(n / p), the
 * last ones shorter or empty. 5 over 4 ranks: 2, 2, 1, 0. When several mesh dimensions shard one
 * tensor_dim, each splits what the ones before it left, and dm_placement.order says which are
 * before. On a mesh (fsdp=2, tp=4) that shards 16 rows over both, rank 6, at (1, 2), has
 *
 * ```c
 * {{DM_SHARD, 0, 0}, {DM_SHARD, 0, 0}}   fsdp first, PyTorch's default: rows 12 and 13
 * {{DM_SHARD, 0, 1}, {DM_SHARD, 0, 0}}   tp first, what FSDP of a tensor-parallel model holds: rows 10 and 11
 * ```
 *
 * A rank whose block has no elements gets local size 0, and the size of the tensor's dimension as
 * offset. A block is always contiguous. With all orders 0 the answers are those of PyTorch's
 * DTensor. The second placement above is _StridedShard in PyTorch. Where the sizes divide evenly,
 * the blocks are PyTorch's; otherwise PyTorch may cut in another way (for example 13 rows over a
 * (3, 2) mesh).
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (num_placements is another number, an unknown kind, a
 * tensor_dim that is negative or past the end, world_rank below -1), DM_STATUS_NOT_MEMBER (the
 * rank is not in this view), DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_local_shard(const struct dm_mesh *mesh,
                         const struct dm_placement *placements,
                         size_t num_placements,
                         const size_t *tensor_shape,
                         size_t tensor_ndim,
                         int32_t world_rank,
                         size_t *local_shape_out,
                         size_t *offset_out);

/* ---- rank plans ---- */

/**
 * A rank array for dm_init_options.ranks that keeps the dimensions that talk most inside the
 * closest domains of the machine.
 *
 * Local, no communication; the same on every rank that asks with the same options. locations
 * has world_size paths, of each world rank, far to near: "rack1/host3/nvl0" (dm_world_locations
 * gathers them). Level 0 is the racks here, level 2 the NVLink domains; there are at most 32
 * levels. A name counts within the domain around it: host3 of rack1 is not host3 of rack2. Ranks
 * may have equal paths. A path that ends early, or is empty, puts its rank into a domain without
 * a name at the levels below, together with the other ranks whose paths lack these levels. shape
 * has ndim sizes whose product n is at most world_size: with fewer ranks than the world has, the
 * plan also says which ones. ranks_out has n elements, row-major.
 *
 * traffic has a weight for each dimension: how much a rank exchanges along it, evenly with the
 * ranks of its group (0: nothing). NULL: later dimensions talk more, each weighs the product of
 * the sizes up to and with its own. The plan makes this cost small:
 *
 * ```c
 * cost = sum over dimensions d and levels l of  traffic[d] * pairs[d][l] * n / shape[d]
 * ```
 *
 * where `pairs[d][l]` counts the ordered pairs of ranks that share a group along d and no domain
 * of level l. The candidates are the order 0 .. n-1, boxes of the mesh that nest as the domains
 * do, and row-major orders of the dimensions. In worlds of up to 1024 ranks, swaps improve them.
 * The candidate with the lowest cost is the plan, so it never costs more than the order 0 .. n-1.
 * A better order may exist, because finding the best one takes exponential time. On the machines
 * of up to 12 ranks that the tests search exhaustively, the plan is the best order.
 *
 * report NULL: none, and len_out may be NULL too. Else it becomes one line of JSON, and *len_out
 * its length with the NUL:
 *
 * ```c
 * {"ranks":8,"world_size":8,"domains":[2],"cost":64,"identity_cost":256,"even":true,"dimensions":[
 *  {"size":2,"traffic":2,"groups":4,"crossing_groups":[4],"most_domains":[2],"pairs":[8],"cost":64},
 *  {"size":4,"traffic":8,"groups":2,"crossing_groups":[0],"most_domains":[1],"pairs":[0],"cost":0}]}
 * ```
 *
 * Lists run over the levels: how many domains the world has; in how many of the dimension's
 * groups ranks are in different domains; the most domains of one group; pairs. identity_cost is
 * that of ranks 0 .. n-1. even is false when the mesh does not fall into equal boxes, one for
 * each domain: the shape or the machine does not divide, and some groups of a dimension cross
 * more domains than others. Costs are integers and can have more than 64 bits.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (NULL, also as a path; an empty component as in
 * "rack1//nvl0"; a size of 0; n larger than world_size), DM_STATUS_BUFFER_TOO_SMALL (the report;
 * *len_out says how long it is, ranks_out is not written).
 */
dm_status dm_plan_ranks(const struct dm_plan_options *options,
                        int32_t *ranks_out,
                        char *report,
                        size_t capacity,
                        size_t *len_out);

/* ---- raw communicators ---- */

/**
 * The raw communicator of this rank's group along a dimension; rank order in it is the coordinate
 * along the dimension.
 *
 * Local; with DM_INIT_LAZY the first call for a dimension is collective over this rank's group
 * along it. dim NULL is allowed on a 1-D mesh. All dimensions of size 1 give one communicator,
 * which holds this rank alone and is made at the first such call.
 *
 * The communicator is borrowed from the root mesh. It lives until the mesh or its world is
 * finalized, aborted or shrunk, or until the process ends, whatever handles are freed. Only a
 * communicator that has failed ends with the last handle of its meshes. The caller never destroys
 * it. It is valid only in the library that made it: call it through dm_get_proc, or ask for
 * device type "cuda" by name and link that same copy of NCCL. A mesh of device type NULL may be on
 * cpu, and a linked NCCL crashes on its communicator. On NCCL it is blocking, unless the
 * dimension's nccl_config says otherwise: operations are on the stream when they return. The call
 * takes no lock and lasts a few nanoseconds.
 *
 * Errors: DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED, DM_STATUS_UNSUPPORTED (an
 * offline world), DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_get_comm(const struct dm_mesh *mesh, const char *dim, ncclComm_t *comm_out);

/**
 * The function of that name ("ncclAllReduce", ...) in the library that made this mesh's
 * communicators. It is of the right copy when the process has several NCCLs, and it also works on
 * cpu, where no NCCL is linked.
 *
 * Local. Cast the result to the function's type, for example decltype(&ncclAllReduce). It stays
 * valid until the end of the process. Errors: DM_STATUS_NOT_FOUND (names the library and its
 * version), DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_get_proc(const struct dm_mesh *mesh, const char *symbol, void **proc_out);

/**
 * The function of that name ("ncclMemAlloc", ...) in the library that meshes of device_type will
 * get, before there is a mesh.
 *
 * Local. device_type is "cuda", "cpu" or NULL, as in dm_world_init. The library is the one that a
 * world gets whose options name none; a program that names one (dm_world_options.ccl_library) asks
 * dm_get_proc with a mesh of that world. Errors: DM_STATUS_NOT_FOUND (names the library and its
 * version), DM_STATUS_LIBRARY, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_get_device_proc(const char *device_type, const char *symbol, void **proc_out);

/**
 * Makes the NCCL that is linked into the program the library of device type cuda: resolve gives
 * the address of NCCL's function of a name, or NULL where the program has none of that name.
 *
 * ```c
 * static void *resolve(void *user_data, const char *name) {
 *   return strcmp(name, "ncclAllReduce") == 0 ? (void *)ncclAllReduce : ... : NULL;
 * }
 * dm_set_ccl_resolver(resolve, NULL);
 * ```
 *
 * Local, for the whole process; call it before anything else of device type cuda or NULL. Without
 * it the library loads a shared NCCL, and a communicator of that copy crashes in the functions
 * that the program links. It goes before DM_CCL_LIBRARY and after dm_world_options.ccl_library.
 * resolve is called here and by dm_get_proc, from any thread, until the process ends. NULL takes
 * an earlier resolver back. Not every rank needs one; the releases of NCCL must be equal.
 * docs/nccl.md lists the functions that must be there. Errors: DM_STATUS_LIBRARY (a function is
 * missing; it is named), DM_STATUS_INVALID_STATE (device type cuda is in use already).
 */
dm_status dm_set_ccl_resolver(void *(*resolve)(void *user_data, const char *name), void *user_data);

/* ---- collectives ---- */

/**
 * Reduces count elements over all ranks of dim; every rank gets the result, bitwise the same.
 *
 * Collective over this rank's group along dim. In place when send == recv.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's timeout),
 * DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_all_reduce(const struct dm_mesh *mesh,
                        const char *dim,
                        const void *send,
                        void *recv,
                        size_t count,
                        dm_dtype dtype,
                        dm_op op,
                        void *stream);

/**
 * Reduces count elements over all ranks of dim to its rank root.
 *
 * Collective over this rank's group along dim. recv is used on the root only and may be NULL
 * elsewhere. In place when send == recv on the root.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's timeout),
 * DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_reduce(const struct dm_mesh *mesh,
                    const char *dim,
                    const void *send,
                    void *recv,
                    size_t count,
                    dm_dtype dtype,
                    dm_op op,
                    int32_t root,
                    void *stream);

/**
 * Copies count elements from the rank root of dim to all its ranks.
 *
 * Collective over this rank's group along dim. send is used on the root only and may be NULL
 * elsewhere. In place when send == recv on the root.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's timeout),
 * DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_broadcast(const struct dm_mesh *mesh,
                       const char *dim,
                       const void *send,
                       void *recv,
                       size_t count,
                       dm_dtype dtype,
                       int32_t root,
                       void *stream);

/**
 * Gathers send_count elements of every rank of dim, in rank order, on every rank.
 *
 * Collective over this rank's group along dim. recv has room for send_count times the size of dim.
 * In place when send == recv + (my rank in dim) * send_count.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's timeout),
 * DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_all_gather(const struct dm_mesh *mesh,
                        const char *dim,
                        const void *send,
                        void *recv,
                        size_t send_count,
                        dm_dtype dtype,
                        void *stream);

/**
 * Reduces over all ranks of dim and leaves block i of recv_count elements on rank i.
 *
 * Collective over this rank's group along dim. send has recv_count times the size of dim elements.
 * In place when recv == send + (my rank in dim) * recv_count.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's timeout),
 * DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_reduce_scatter(const struct dm_mesh *mesh,
                            const char *dim,
                            const void *send,
                            void *recv,
                            size_t recv_count,
                            dm_dtype dtype,
                            dm_op op,
                            void *stream);

/**
 * Sends block i of send to rank i of dim, and receives block i of recv from rank i.
 *
 * Collective over this rank's group along dim. Both have count_per_peer times the size of dim
 * elements. On cpu in place when send == recv; on cuda they must not overlap.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's timeout),
 * DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_all_to_all(const struct dm_mesh *mesh,
                        const char *dim,
                        const void *send,
                        void *recv,
                        size_t count_per_peer,
                        dm_dtype dtype,
                        void *stream);

/**
 * Sends count elements to the rank peer of dim, which receives them with dm_recv.
 *
 * Between two ranks: the peer makes the matching dm_recv. On a lazy mesh the first operation along
 * dim makes the communicator and is collective over the group. On cpu it returns when the
 * receiver has taken everything. So two ranks that both send before they receive block each other
 * until the deadline: sends and receives of one exchange belong in a group (dm_group_start).
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's timeout),
 * DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_send(const struct dm_mesh *mesh,
                  const char *dim,
                  const void *send,
                  size_t count,
                  dm_dtype dtype,
                  int32_t peer,
                  void *stream);

/**
 * Receives count elements from the rank peer of dim, which sends as many with dm_send.
 *
 * Between two ranks: the peer makes the matching dm_send. On a lazy mesh the first operation along
 * dim makes the communicator and is collective over the group. Sends and receives of one
 * exchange belong in a group (dm_group_start).
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's timeout),
 * DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_recv(const struct dm_mesh *mesh,
                  const char *dim,
                  void *recv,
                  size_t count,
                  dm_dtype dtype,
                  int32_t peer,
                  void *stream);

/**
 * Begins a group: the calling thread's operations up to dm_group_end run together, so that no
 * order of sends and receives blocks.
 *
 * No operation of a group may write to a buffer that another one of the same group reads or
 * writes: their order is not defined. A group that is not ended does nothing: while operations are
 * queued in one, dm_finalize, dm_barrier, dm_world_barrier, dm_world_locations and the like of the
 * same thread are refused (DM_STATUS_INVALID_STATE), and when the thread ends, on cpu the
 * communicators of these operations fail for all their ranks.
 *
 * Local. Groups nest: only the outermost end runs the operations. A group has the operations on
 * all meshes of the same library, also those on raw communicators. Calls that make communicators
 * (dm_init, dm_flatten ...) are no part of a group of dm_group_start: inside one they are done
 * when they return. Errors: DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED
 * (an offline world).
 */
dm_status dm_group_start(const struct dm_mesh *mesh);

/**
 * Ends the group that this thread began, and runs its operations. On cpu it returns when all of
 * their results are there.
 *
 * Errors: the first error of any of the operations, as they would give it, also of one that was
 * refused when it was called (on cpu none of the group's operations runs then);
 * DM_STATUS_INVALID_STATE when no group was begun. Call it on every path: until then operations of
 * this thread only wait. DM_STATUS_ABORTED where another thread has aborted a mesh with operations
 * in the group: on cpu none of the group's operations runs, or, when the abort comes while they
 * run, those on other meshes run to their end. The message says which. On cpu, dm_abort of a mesh
 * ends the group that its thread has open, so there is no group to end after it. On cuda NCCL
 * cannot end a group that holds an operation of a communicator which dm_abort has ended: the call
 * gives DM_STATUS_ABORTED, and so does every later operation of this thread; make those from
 * another thread. A handle that is not live (DM_STATUS_INVALID_HANDLE) ends the group that this
 * thread has begun last; on cpu none of its operations runs.
 */
dm_status dm_group_end(const struct dm_mesh *mesh);

/* ---- collectives with a count for each rank ---- */

/**
 * Sends send_counts[i] elements to rank i of dim, and receives recv_counts[i] elements from it.
 *
 * Collective over this rank's group along dim. The block for rank i begins send_displs[i] elements
 * after send, that from rank i recv_displs[i] elements after recv; without displacements (NULL)
 * the blocks follow each other. A count may be 0. What rank i sends to rank k is what k expects
 * from i: on cpu other counts are DM_STATUS_MISMATCH on all ranks, before anything is written;
 * NCCL does not compare them. No block of recv overlaps another block of either buffer.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh. The lists of counts are copied.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
 * DM_STATUS_MISMATCH (cpu: the counts of two ranks do not fit together; the message has both),
 * DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's
 * timeout), DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world,
 * or a dtype whose size is not known here).
 */
dm_status dm_all_to_allv(const struct dm_mesh *mesh,
                         const char *dim,
                         const void *send,
                         const size_t *send_counts,
                         const size_t *send_displs,
                         void *recv,
                         const size_t *recv_counts,
                         const size_t *recv_displs,
                         dm_dtype dtype,
                         void *stream);

/**
 * Gathers recv_counts[i] elements of each rank i of dim on every rank, recv_displs[i] elements
 * after recv.
 *
 * Collective over this rank's group along dim. All ranks give the same counts, and each sends as
 * many elements as its own count says: on cpu other counts are DM_STATUS_MISMATCH on all ranks,
 * before anything is written; NCCL does not compare them. Without displacements (NULL) the blocks
 * follow each other. A count may be 0. The blocks of recv do not overlap. In place when send ==
 * recv + recv_displs[my rank in dim].
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh. The lists of counts are copied.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
 * DM_STATUS_MISMATCH (cpu: the counts of two ranks do not fit together; the message has both),
 * DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's
 * timeout), DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world,
 * or a dtype whose size is not known here).
 */
dm_status dm_all_gatherv(const struct dm_mesh *mesh,
                         const char *dim,
                         const void *send,
                         void *recv,
                         const size_t *recv_counts,
                         const size_t *recv_displs,
                         dm_dtype dtype,
                         void *stream);

/**
 * Reduces over all ranks of dim a block for each rank i, send_counts[i] elements that begin
 * send_displs[i] elements after send, and leaves it on rank i.
 *
 * Collective over this rank's group along dim. All ranks give the same counts, and each receives
 * as many elements as its own count says: on cpu other counts are DM_STATUS_MISMATCH on all ranks,
 * before anything is written; NCCL does not compare them. Without displacements (NULL) the blocks
 * follow each other. A count may be 0. In place when recv == send + send_displs[my rank in dim].
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh. The lists of counts are copied.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
 * DM_STATUS_MISMATCH (cpu: the counts of two ranks do not fit together; the message has both),
 * DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (cpu: a peer did not come by the mesh's
 * timeout), DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world,
 * or a dtype whose size is not known here).
 */
dm_status dm_reduce_scatterv(const struct dm_mesh *mesh,
                             const char *dim,
                             const void *send,
                             const size_t *send_counts,
                             const size_t *send_displs,
                             void *recv,
                             dm_dtype dtype,
                             dm_op op,
                             void *stream);

/* ---- the control plane: barriers and bytes ---- */

/**
 * Returns when every rank of this rank's group along dim has called it.
 *
 * Collective over this rank's group along dim. dim NULL is allowed on a 1-D mesh. timeout_ms 0:
 * the mesh's timeout. The call goes through the store and uses no communicator, so it works on
 * every device type, makes nothing on a mesh with DM_INIT_LAZY, and costs some round trips. It
 * says nothing about work on devices. It takes its turn among the calls of the world that make or
 * end something (see "Order" at the head of this file).
 *
 * Errors: DM_STATUS_TIMEOUT (names the ranks that did not come), DM_STATUS_MISMATCH (names a rank
 * that made another call), DM_STATUS_PEER_LOST (a rank of the group is lost), DM_STATUS_ABORTED,
 * DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_ARGUMENT (a negative timeout),
 * DM_STATUS_INVALID_STATE (operations wait in a group of this thread), DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_UNSUPPORTED (an offline world, or a mesh of dm_from_comms without a world),
 * DM_STATUS_STORE.
 */
dm_status dm_barrier(const struct dm_mesh *mesh, const char *dim, int64_t timeout_ms);

/**
 * Gathers len bytes of every rank of dim on every rank: element i of the result is what the rank
 * i along dim gave.
 *
 * Collective over this rank's group along dim. len may differ from rank to rank and may be 0;
 * data is NULL then, or anything. A rank gives at most 8 MiB, all ranks of the group together 64
 * MiB. dim NULL is allowed on a 1-D mesh. timeout_ms 0: the mesh's timeout. The bytes travel
 * through the store, as dm_barrier does: seeds, IPC handles, names of files, configuration. The
 * caller frees the result with dm_buffers_free.
 *
 * ```c
 * dm_all_gather_bytes(mesh, "tp", &handle, sizeof handle, 0, &handles);
 * dm_buffers_get(handles, peer, &bytes, &len);
 * ```
 *
 * Errors: those of dm_barrier, and DM_STATUS_INVALID_ARGUMENT (too many bytes; when one rank
 * gives too many, all ranks get the error).
 */
dm_status dm_all_gather_bytes(const struct dm_mesh *mesh,
                              const char *dim,
                              const void *data,
                              size_t len,
                              int64_t timeout_ms,
                              struct dm_buffers **buffers_out);

/**
 * Gives every rank of dim the len bytes of its rank root: the result has one element.
 *
 * Collective over this rank's group along dim. data and len are used on the root only; len is at
 * most 8 MiB and may be 0. dim NULL is allowed on a 1-D mesh. timeout_ms 0: the mesh's timeout.
 * The bytes travel through the store, as dm_barrier does. The caller frees the result with
 * dm_buffers_free. Errors: those of dm_all_gather_bytes; DM_STATUS_MISMATCH also when ranks give
 * different roots.
 */
dm_status dm_broadcast_bytes(const struct dm_mesh *mesh,
                             const char *dim,
                             const void *data,
                             size_t len,
                             int32_t root,
                             int64_t timeout_ms,
                             struct dm_buffers **buffers_out);

/**
 * Gathers len bytes of every rank of the world on every rank, as dm_all_gather_bytes does along a
 * dimension: element i of the result is what world rank i gave.
 *
 * Collective over the world. timeout_ms 0: the world's timeout. Errors: those of
 * dm_world_barrier, DM_STATUS_INVALID_ARGUMENT (more than 8 MiB of this rank, or 64 MiB of all
 * ranks) and DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_world_all_gather_bytes(const struct dm_world *world,
                                    const void *data,
                                    size_t len,
                                    int64_t timeout_ms,
                                    struct dm_buffers **buffers_out);

/**
 * Gives every rank of the world the len bytes of the world rank root, as dm_broadcast_bytes does
 * along a dimension: the result has one element.
 *
 * Collective over the world. data and len are used on the root only. timeout_ms 0: the world's
 * timeout. Errors: those of dm_world_all_gather_bytes; DM_STATUS_MISMATCH also when ranks give
 * different roots.
 */
dm_status dm_world_broadcast_bytes(const struct dm_world *world,
                                   const void *data,
                                   size_t len,
                                   int32_t root,
                                   int64_t timeout_ms,
                                   struct dm_buffers **buffers_out);

/**
 * The number of elements: the number of ranks for an all-gather, 1 for a broadcast; 0 for an
 * invalid handle (dm_last_error then says so).
 *
 * Local.
 */
size_t dm_buffers_count(const struct dm_buffers *buffers);

/**
 * One element: its bytes and their number.
 *
 * Local. *data_out is borrowed from the handle: valid until dm_buffers_free. It is never NULL,
 * and a NUL follows the bytes that len does not count, so text that was sent without one is a
 * string. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (no such element).
 */
dm_status dm_buffers_get(const struct dm_buffers *buffers, size_t index, const void **data_out, size_t *len_out);

/**
 * Frees the result of a call. Local; NULL is a no-op, and so is a handle that was freed before.
 */
void dm_buffers_free(struct dm_buffers *buffers);

/* ---- life and death of a mesh ---- */

/**
 * The asynchronous error of dim's communicator: DM_STATUS_OK while it is well, while it is being
 * made, and before it is made (DM_INIT_LAZY). dim NULL: all communicators of the view's
 * dimensions; the first error in the order of the dimensions counts.
 *
 * Local; it does not wait and makes nothing. Errors: DM_STATUS_PEER_LOST (a rank's process has
 * gone, or it aborted; named where known), DM_STATUS_MISMATCH and
 * DM_STATUS_TIMEOUT (an earlier collective failed), DM_STATUS_CCL, DM_STATUS_ABORTED,
 * DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_check(const struct dm_mesh *mesh, const char *dim);

/**
 * Waits until the work on a stream is done, where cudaStreamSynchronize would wait for ever for a
 * rank that is lost. DM_STATUS_OK: the work is done, and no communicator has failed by then.
 *
 * Local: it makes no communicator, and may be called from several threads. The waiting thread
 * sleeps, and asks the stream (cuStreamQuery) with growing pauses of at most 10 ms. Meanwhile it
 * asks the communicators for their asynchronous errors, and the store every two seconds for lost
 * ranks. dim names the dimension whose communicator and ranks are asked about; NULL stands for
 * all communicators of the mesh that exist. timeout_ms 0: the mesh's timeout. The stream may hold
 * other work, too. A stream that is being captured is refused. On cpu a collective is done when it
 * returns: stream is NULL there, and the call returns at once after the check that dm_check makes.
 *
 * A failure leaves the work on the stream: dm_abort ends it. When a rank is lost, the call waits
 * one second more, because work that does not need the rank may end by itself. After that it
 * gives DM_STATUS_PEER_LOST, whether or not the work waits for that rank. So ranks end their
 * processes after dm_finalize. dm_last_error_info names the lost ranks, the dimension and the time
 * that passed.
 *
 * Errors: DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (no rank is known to be lost), DM_STATUS_CCL (a
 * communicator has failed), DM_STATUS_DEVICE (work on the stream has failed),
 * DM_STATUS_ABORTED (also when dm_abort on another thread ends the wait), DM_STATUS_NOT_FOUND,
 * DM_STATUS_NOT_MEMBER, DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT (a negative timeout, a stream on cpu), DM_STATUS_INVALID_STATE (the
 * stream is being captured).
 */
dm_status dm_stream_wait(const struct dm_mesh *mesh, const char *dim, void *stream, int64_t timeout_ms);

/**
 * Ends the root mesh of this view on this rank, without waiting for other ranks: wakes every call
 * that is blocked in any of its views, here and, with the host engine, on the other ranks, where
 * they get DM_STATUS_PEER_LOST.
 *
 * Local, from any thread; takes no lock that a blocked call holds. On cpu it returns at once. On
 * cuda it waits for calls of this library that are inside NCCL on these communicators, and then
 * for NCCL's own abort, which waits for captured CUDA graphs with work of the communicator and for
 * ranks of this host. Both together last the mesh's timeout at most, but at least one second and
 * at most five. Then the call gives DM_STATUS_TIMEOUT, and the communicator ends later.
 *
 * Every view of this root answers DM_STATUS_ABORTED from the beginning of the call on, also when
 * it fails. A communicator that another root mesh of this world shares ends for that one as well;
 * a mesh that is made afterwards has new ones. Raw communicators from dm_get_comm must not be used
 * any more. A second abort, or one after dm_finalize or dm_shrink, does nothing. A dm_init in
 * progress has no mesh yet: dm_world_abort ends it.
 *
 * NCCL's abort returns when this root's work has left the streams: where that lies behind a stuck
 * call of another mesh, dm_world_abort ends both. NCCL forbids ending a communicator while a
 * thread is inside a call on it. The library keeps its own calls away; calls on raw communicators
 * are the program's to keep away. Another rank that waits for this one through the store alone (to
 * make a communicator that a DM_INIT_LAZY mesh has not made yet, or in dm_barrier and its
 * neighbours where no communicator of the host engine tells it) is told by dm_world_abort only;
 * otherwise it waits until its deadline.
 *
 * Errors: DM_STATUS_TIMEOUT (cuda: a communicator has not ended yet), DM_STATUS_CCL (NCCL's abort
 * failed), DM_STATUS_INVALID_HANDLE. After each of them but the last the mesh has ended.
 */
dm_status dm_abort(const struct dm_mesh *mesh);

/**
 * Waits for the outstanding work of this view's root mesh and destroys those of its communicators
 * that no other root mesh of this world shares. Every view of this root answers DM_STATUS_ABORTED
 * from then on; handles are still to be freed.
 *
 * Collective over the root mesh; on a rank outside it, local. options NULL: the mesh's timeout;
 * its dim_options is NULL. Errors: DM_STATUS_TIMEOUT and
 * DM_STATUS_MISMATCH as in dm_init (when a rank never made the call, the mesh is as before, and
 * dm_abort ends it; when a rank did not get through the call, the mesh has ended here),
 * DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_ABORTED (it has ended already),
 * DM_STATUS_INVALID_STATE (operations wait in a group of this thread), DM_STATUS_INVALID_ARGUMENT,
 * DM_STATUS_INVALID_HANDLE.
 *
 * A communicator that has failed has no work to wait for: it is aborted, and the call gives its
 * failure on all ranks. The call does not wait for a rank that has not come one second after the
 * failure. When a rank waits in a collective of the host engine for a rank that has called
 * dm_finalize, both get DM_STATUS_MISMATCH after about a second.
 */
dm_status dm_finalize(const struct dm_mesh *mesh, const struct dm_call_options *options);

/**
 * The world ranks of the mesh that are known to be lost by now (see "lost" at the head of this
 * file), in ascending order. dm_shrink takes them.
 *
 * Local: it asks the store, and waits for half a second at most where the store does not answer.
 * *len_out is their number. Other ranks may learn of a loss a moment earlier or later. The handle
 * may be of a mesh that was aborted. Without a world (dm_from_comms) only losses are known that a
 * communicator of the mesh has met. Errors: DM_STATUS_BUFFER_TOO_SMALL,
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_lost_ranks(const struct dm_mesh *mesh, int32_t *ranks, size_t capacity, size_t *len_out);

/**
 * The mesh without those indices along dim that hold a lost rank, for going on after a rank has
 * died. Whole replicas go, with all their ranks.
 *
 * Collective over the ranks of the mesh that are not lost (where the mesh is a range, over those
 * of the range), also those whose replica goes: they get
 * a handle that answers DM_STATUS_NOT_MEMBER. A rank that has called dm_abort is not lost. mesh
 * has all ranks of its root (a view of some of them is refused). dim NULL is allowed on a 1-D
 * mesh. On a mesh (dp=4, tp=2) over ranks 0 .. 7, rank 5 lost and dim "dp" give (dp=3, tp=2) over
 * ranks 0, 1, 2, 3, 6, 7.
 *
 * With lost_ranks NULL and num_lost 0 the ranks that are left agree on who is lost: all of them
 * leave out the same ranks, whatever each of them knew. The call waits until every rank has made
 * it or is lost. Ranks that are lost meanwhile are left out too. When no rank is lost, all ranks
 * get DM_STATUS_INVALID_STATE; the mesh has ended all the same, so make it anew with dm_init. A
 * rank that lives and that the others take for lost gets
 * DM_STATUS_NOT_MEMBER. A rank that neither calls nor is known to be lost is missed at the
 * deadline: DM_STATUS_TIMEOUT, and dm_last_error_info names it.
 *
 * Otherwise lost_ranks are num_lost world ranks of the mesh, the same set on every rank. A rank
 * that is named need not have died: it calls dm_abort. Ranks that name different lost ranks get
 * DM_STATUS_MISMATCH if they wait for each other, and so do ranks with a list and ranks without
 * one. Two sets of ranks that name each other as lost go on apart. A list that is wrong in itself
 * is refused on its caller alone.
 *
 * The call ends the root mesh on this rank as dm_abort does, whether or not it succeeds, unless
 * this rank itself refuses it: calls that are blocked in any of its views return, and every view
 * answers DM_STATUS_ABORTED. It may therefore be called from any thread (one at a time), and after
 * dm_abort on some or all ranks, but not after dm_finalize. Only dm_world_abort ends the call
 * early. When it fails with DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT or the
 * refusal of a rank, it may be called again on the same handle. The result is a root mesh of its
 * own; its dimensions have the names of this one's, and share no communicator with meshes made
 * before. The caller frees the handle with dm_free.
 *
 * The new mesh inherits this one's timeout, whether it is lazy, and the dm_dim_options of its
 * dimensions. options->dim_options has one element for each dimension of the mesh, and replaces
 * the inherited ones; options->timeout_ms bounds this call. options NULL: as inherited.
 *
 * ncclCommShrink makes the new communicators from those of the mesh. Errors:
 * DM_STATUS_UNSUPPORTED (the library has none: NCCL before 2.27; a mesh without a world),
 * DM_STATUS_INVALID_ARGUMENT (an empty list, a rank outside the mesh, this rank, nothing left),
 * DM_STATUS_INVALID_STATE (no rank is lost),
 * DM_STATUS_NOT_MEMBER, DM_STATUS_NOT_FOUND, DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT,
 * DM_STATUS_PEER_LOST (a further rank; or the store went with the lost one, as rank 0's does, and
 * then no call goes on), DM_STATUS_CCL, DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_shrink(const struct dm_mesh *mesh,
                    const char *dim,
                    const int32_t *lost_ranks,
                    size_t num_lost,
                    const struct dm_call_options *options,
                    struct dm_mesh **mesh_out);

/* ---- meshes by name ---- */

/**
 * Keeps a view under a name, for dm_lookup anywhere in this process; replaces an earlier one of
 * that name. dm_unregister removes it.
 *
 * Local. The registry holds the view by itself: the handle may be freed. Errors:
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (name is NULL or empty).
 */
dm_status dm_register(const struct dm_mesh *mesh, const char *name);

/**
 * Forgets the view that was registered under that name.
 *
 * Local. Errors: DM_STATUS_NOT_FOUND (lists the names there are), DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_unregister(const char *name);

/**
 * A new handle of the view that was registered under that name. The caller frees it with dm_free.
 *
 * Local. Errors: DM_STATUS_NOT_FOUND (lists the names there are), DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_lookup(const char *name, struct dm_mesh **mesh_out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus


/* ---- initialisers ---- */

/**
 * A dm_error_info to pass to dm_last_error_info.
 */
#define DM_ERROR_INFO_INIT { sizeof(dm_error_info), 0, 0, 0, 0, NULL, NULL, 0, NULL, 0, NULL, -1.0, -1 }
/**
 * A dm_world_options in which everything is the default.
 */
#define DM_WORLD_OPTIONS_INIT { sizeof(dm_world_options), 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL }
/**
 * A dm_world_info to pass to dm_world_get_info.
 */
#define DM_WORLD_INFO_INIT { sizeof(dm_world_info), 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL }
/**
 * A dm_store_callbacks without functions: set, get and add are to be filled in.
 */
#define DM_STORE_CALLBACKS_INIT { sizeof(dm_store_callbacks), NULL, NULL, NULL, NULL, NULL, NULL }
/**
 * A dm_dim_options in which everything is the default.
 */
#define DM_DIM_OPTIONS_INIT { sizeof(dm_dim_options), 0, 0, NULL, NULL }
/**
 * A dm_init_options in which everything is the default.
 */
#define DM_INIT_OPTIONS_INIT { sizeof(dm_init_options), 0, 0, NULL, NULL, 0, NULL, 0, 0 }
/**
 * A dm_call_options in which everything is the default.
 */
#define DM_CALL_OPTIONS_INIT { sizeof(dm_call_options), 0, 0, 0, NULL, 0 }
/**
 * A dm_plan_options without a machine: world_size, locations, shape and ndim are to be filled in.
 */
#define DM_PLAN_OPTIONS_INIT { sizeof(dm_plan_options), 0, 0, NULL, NULL, 0, NULL }
/* ---- flags and placements ---- */

/**
 * A dm_placement: every rank along the mesh dimension holds the same.
 */
#define DM_PLACEMENT_REPLICATE { DM_REPLICATE, 0, 0, { 0, 0, 0, 0, 0 } }
/**
 * A dm_placement: the mesh dimension splits tensor_dim, before those of higher order.
 */
#define DM_PLACEMENT_SHARD(tensor_dim, order) { DM_SHARD, (tensor_dim), (order), { 0, 0, 0, 0, 0 } }
/**
 * A dm_placement: every rank along the mesh dimension holds a part of a sum.
 */
#define DM_PLACEMENT_PARTIAL { DM_PARTIAL, 0, 0, { 0, 0, 0, 0, 0 } }

#endif /* DEVICEMESH_H */
