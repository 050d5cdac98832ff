/* libdevicemesh: PyTorch's DeviceMesh without Python. A job says "I am (replicate=2, shard=4)" and
 * gets, for every dimension of that mesh, a ready communicator.
 *
 * Generated from src/ffi by cbindgen (make header). Do not edit.
 *
 * A function that PyTorch's DeviceMesh has too has PyTorch's name and meaning: dm_get_local_rank
 * gives the rank along a dimension, dm_rank the rank in the world, and dm_size with dim NULL the
 * number of ranks of the view.
 *
 * Words used below
 *   Local         The call returns without waiting for any other rank.
 *   Collective    Every rank of the named set makes the same call, in the same order. A rank that
 *                 makes a different call, or none, leads to DM_STATUS_MISMATCH or DM_STATUS_TIMEOUT
 *                 on the ranks that called, and the message names the ranks. NCCL does not compare
 *                 the calls of the ranks: on cuda the work of dm_all_reduce ... dm_recv then hangs
 *                 on its stream until dm_abort, or gives wrong data.
 *   root mesh     The mesh that dm_init, dm_deserialize, dm_from_comms, dm_shrink or dm_recover made,
 *                 with all its ranks. Every view belongs to one root mesh, which dm_root gives.
 *                 dm_finalize and dm_abort of any view end the whole root mesh.
 *   range         A view that dm_slice_range made, and the views of it. Some calls make something
 *                 (dm_flatten, dm_unflatten, dm_reshape, dm_slice_range). For these calls and for
 *                 dm_shrink, dm_submesh, dm_submesh_count and dm_replica_groups, the range counts as
 *                 the root mesh. It has all ranks of the root mesh whose index along the cut
 *                 dimension is kept, also those of the parallel copies of a slice. The calls that
 *                 are collective are so over the ranks of the range alone.
 *   ended         A mesh has ended after dm_abort, dm_finalize or dm_shrink of its root mesh, and
 *                 after dm_recover, dm_world_abort or dm_world_finalize in its world. Calls on any
 *                 of its views that make a view, use a communicator or wait for ranks then give
 *                 DM_STATUS_ABORTED (but dm_shrink and dm_recover may follow dm_abort). Questions
 *                 about shape and ranks (dm_rank, dm_shape, dm_serialize ...), dm_clone,
 *                 dm_get_world, dm_get_proc, dm_get_recovery and dm_lost_ranks still answer, and the
 *                 handles are still to be freed.
 *   epoch         The time between two recoveries (dm_recover). Every mesh belongs to one epoch, and
 *                 ends with it.
 *   spare         A rank of the world that is not in the mesh, and waits in dm_recover for a place.
 *   refused       A call fails with DM_STATUS_INVALID_ARGUMENT, _NOT_FOUND, _UNSUPPORTED or
 *                 _INVALID_STATE before this rank waits for anybody. A rank whose call makes or
 *                 ends something, or is one of the control plane, then tells the other ranks: their
 *                 call fails at once with that status, and the message names the rank. The
 *                 others are not told if the library cannot know who they are. That is so for an
 *                 unknown dim of a call along a dimension, for a wrong list of dm_shrink, and for a
 *                 wrong struct_size of dm_init_options, because the world is not read then. Two
 *                 errors of dm_recover are not told either: that there is nothing to recover, and
 *                 that another thread of this rank is inside dm_recover of this world. A refused
 *                 dm_all_reduce ... dm_recv is not told either, as in NCCL. Nothing was sent then,
 *                 so this rank may make the call again with right arguments. The other ranks wait
 *                 for it until the deadline of the mesh (on cuda until dm_abort).
 *   lost          A rank is lost when its process has ended, when it has left the world (by
 *                 dm_world_abort, or by freeing the world and all its meshes), or when its host
 *                 fell silent. A lost rank stays lost.
 *                 DM_STATUS_PEER_LOST says that a rank is lost or has aborted what the call uses.
 *   out           The call writes to parameters named ..._out, and only when it succeeds. A query
 *                 with a buffer (buffer, capacity, len_out) writes *len_out also when it fails with
 *                 DM_STATUS_BUFFER_TOO_SMALL or DM_STATUS_NOT_MEMBER, and when it fails because
 *                 buffer is NULL. So capacity 0 asks for the length.
 *   borrowed      The library owns the thing, and it is valid as long as the text says. The caller
 *                 does not free it.
 *   world rank    A process's number in the world, 0 to the world's size - 1.
 *   rank along    A process's number in its group along a dimension, 0 to the dimension's size - 1:
 *   dim           the process's coordinate along the dimension, and its rank in the dimension's
 *                 communicator. Arguments that hold such a rank are named dim_rank, peer or root.
 *   numbers       Ranks, and sizes that count ranks, are int32_t. Counts of elements, of bytes and
 *                 of array elements are size_t.
 *   stream        On cuda a cudaStream_t. NULL is CUDA's legacy default stream of the device on
 *                 which the communicator was made (dm_world_info.device), whatever the current
 *                 device of the thread is. On cpu there are no streams: NULL.
 *   timeout       A time in milliseconds. Calls that make or end a mesh have it in
 *                 dm_init_options or dm_call_options, and dm_world_init has it in dm_world_options.
 *                 Calls that only wait for ranks or end a world have a parameter timeout_ms. 0
 *                 stands for the timeout of the mesh or the world. A negative timeout gives
 *                 DM_STATUS_INVALID_ARGUMENT.
 *
 * Errors: an Errors list names the statuses that the call itself has a reason for.
 * DM_STATUS_INTERNAL and DM_STATUS_EXHAUSTED can come from any call, DM_STATUS_UNSUPPORTED from any
 * call in a forked child (see Forks), and DM_STATUS_STORE from any call in which ranks of a world
 * agree: those that make or end something, and those of the control plane. On cuda,
 * DM_STATUS_DEVICE can come from any call that makes communicators: the thread's current device is
 * not that of the world. A collective on data that makes its communicator, which it does
 * on a mesh of DM_INIT_LAZY and along dimensions of size 1, can give the errors of dm_get_comm.
 * After a recovery, DM_STATUS_NOT_MEMBER can come from any collective call over the world: this
 * rank is not in the mesh that the recovery gave. A failing call leaves its reason in dm_last_error of the calling thread.
 * No function aborts the process or unwinds into C.
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
 * along dimensions with different communicators may come in different orders on different ranks.
 * Two threads must not make the same kind of call along one dimension at the same time. Calls that
 * overlap in this way fail with DM_STATUS_MISMATCH: on cpu on all ranks, on cuda the later one on
 * its rank. Two threads may call along two dimensions that share a communicator. On cpu their order
 * does not matter. On cuda it matters, because NCCL does not show the order of the peers: the
 * library lets one host call at a time into a communicator, and the program issues the calls in the
 * same order on all ranks. dm_abort may come at any time, also while another thread issues a call
 * (docs/threads.md).
 *
 * Forks: a child made by fork has none of its parent's sockets and shared memory. In the child of
 * a process that has a world, communicators, an event handler or a dm_events, every call gives
 * DM_STATUS_UNSUPPORTED, except calls that only ask a handle or compute (dm_rank, dm_size,
 * dm_local_shard, dm_plan_ranks ...). dm_free, dm_world_free, dm_events_free and dm_buffers_free
 * do nothing there. For this the library registers handlers with pthread_atfork when it first has
 * something to keep from children (docs/reliability.md, "Forked children").
 *
 * Strings in are NUL-terminated UTF-8 and copied. NULL where it is not allowed gives
 * DM_STATUS_INVALID_ARGUMENT.
 *
 * Structs begin with struct_size, their size as the caller knows it: initialise them with their
 * INIT macro. (dm_placement has reserved fields instead.) They grow only at their end, and 0 is the
 * default of every new field. So a program works with every newer library of the same SONAME. A
 * program that was compiled with a newer header works with an older library as long as it leaves
 * the fields that the library does not know at 0; otherwise the call gives
 * DM_STATUS_INVALID_ARGUMENT. In a struct that the library fills, an older library sets the fields
 * that it does not know to 0. */


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
 * This value means "no rank". dm_neighbor gives it past the edge of a dimension.
 */
#define DM_RANK_NONE (-1)

/**
 * World flag: an offline world, for layouts and plans of any rank of any world, on one machine. It
 * has no rendezvous and no communicators. Calls that are collective elsewhere are local. So
 * dm_flatten, dm_unflatten, dm_reshape and dm_slice_range also work on a view that this rank is
 * not in; in other worlds that gives DM_STATUS_NOT_MEMBER.
 */
#define DM_WORLD_OFFLINE 1

/**
 * World flag: dm_world_options.device names the device, whatever the current device of a thread
 * is. A call that makes communicators makes that device current on its thread. With RCCL the
 * program itself makes it current. The flag is an error on cpu, and an offline world ignores it.
 */
#define DM_WORLD_DEVICE 2

/**
 * How a process joins: the environment variable DM_JOIN says it (auto, new or running). Without
 * that variable, the process joins the running job if the store's server knows that the earlier
 * process of its rank is lost. Otherwise the process joins a new world.
 */
#define DM_JOIN_AUTO 0

/**
 * The process joins a new world, together with all its ranks.
 */
#define DM_JOIN_NEW 1

/**
 * The process joins the running job in place of the process that had its rank before. Where no job
 * runs yet, the process joins a new world.
 */
#define DM_JOIN_RUNNING 2

/**
 * The get of dm_store_callbacks returns this value when the key did not come in time.
 */
#define DM_STORE_NOT_YET 100

/**
 * Dimension flag: never share this dimension's communicator with one over the same ranks.
 */
#define DM_DIM_OWN_COMM 1

/**
 * Mesh flag: make a dimension's communicator at the dimension's first dm_get_comm or collective.
 * That first call is collective over this rank's group along the dimension. Dimensions that are
 * made later (dm_flatten ...) are lazy too.
 */
#define DM_INIT_LAZY 1

/**
 * Mesh flag of dm_from_comms: the library ends the communicators with the mesh (dm_finalize,
 * dm_abort, dm_shrink, or the end of its world). When dm_from_comms fails, they stay the caller's.
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

/**
 * Recover flag: this rank, which has joined (dm_recovery.has_joined), has received the state of
 * the training. A rank that has never joined has the state anyway. The flag counts for nothing on
 * a rank that is not in the mesh, because the others train on while it waits.
 */
#define DM_RECOVER_HAS_STATE 1

/**
 * Recover flag: the job goes on also where no rank that is left has the state of some shard, for
 * example because the program will read a checkpoint.
 */
#define DM_RECOVER_ANY_STATE 2

/**
 * Recover flag: the mesh may get more indices of its outermost dimension, when new processes fill
 * them (dm_world_options.join). dm_recover_options.max_size bounds them. dim must be the outermost
 * dimension. With DM_RECOVER_ANY_STATE dim may be another one. (New indices along another
 * dimension have no replica that has their state.)
 */
#define DM_RECOVER_GROW 4

/* ---- types ---- */

/**
 * Bytes of one or several ranks: the result of dm_all_gather_bytes, dm_broadcast_bytes,
 * dm_world_all_gather_bytes and dm_world_broadcast_bytes.
 *
 * A handle is a token, not an address, as dm_mesh is. dm_buffers_free frees it.
 */
typedef struct dm_buffers dm_buffers;

/**
 * A queue of events, from dm_events_open.
 *
 * A handle is a token, not an address, as dm_mesh is. dm_events_free frees it.
 */
typedef struct dm_events dm_events;

/**
 * One rank's immutable view of a mesh: shape, names, ranks, communicators.
 *
 * A handle is a token, not an address: a stale, freed or made-up one gives
 * DM_STATUS_INVALID_HANDLE. It may be used from several threads at once. dm_init and every
 * function with a mesh_out give one, and dm_free frees it.
 */
typedef struct dm_mesh dm_mesh;

/**
 * This process's place in the job: its rank, the store in which the ranks meet, the device, and
 * the communicator library.
 *
 * A handle is a token, not an address: a stale, freed or made-up one gives
 * DM_STATUS_INVALID_HANDLE. It may be used from several threads at once. dm_world_init,
 * dm_get_world and dm_default_world give one, and dm_world_free frees it.
 */
typedef struct dm_world dm_world;

/**
 * The outcome of a call: one of the DM_STATUS_ values. A newer library may give values that are
 * not listed here, so a program has a case for all others.
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
   * The communicator library's ncclResult_t; 0 when the library was not involved.
   */
  int32_t ccl_result;
  /**
   * The device driver's code (CUresult); 0 when the driver was not involved.
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
   * The number of elements of ranks.
   */
  size_t num_ranks;
  /**
   * Those of ranks that are lost (see "lost" at the head of this file), in ascending order. A
   * rank that only aborted a mesh, did not come or made another call is not lost. NULL when
   * there are none. Borrowed: valid until this thread's next failing call.
   */
  const int32_t *lost_ranks;
  /**
   * The number of elements of lost_ranks.
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
 * Makes any key-value service of the caller (JAX's, MPI's, etcd ...) the store in which the ranks
 * meet.
 *
 * Keys are short printable ASCII, and values have at most 8 MiB. The functions may be called from
 * any thread of this process, and from several threads at once. set, get, add and compare_set
 * return 0 for success, and get returns DM_STORE_NOT_YET when the key did not come in time. Any
 * other number says that the service is broken: the call that needed the service fails at once
 * with DM_STATUS_STORE, and the message has the number. Keys and values belong to the library and
 * are valid during the call, so a function copies what it keeps. A function must return soon (get
 * by its timeout), because no deadline and no abort of the library ends it. If dm_world_init fails
 * or is aborted, it returns only after its last call of these functions. Until then dm_world_init
 * tells the other ranks of the failure, which takes at most about ten seconds if the functions
 * return soon. A C++ exception may not leave a function. Initialise with DM_STORE_CALLBACKS_INIT.
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
   * Waits for key, timeout_ms milliseconds at most; with 0 it looks once. When the key is there,
   * copies at most capacity bytes of its value to value, writes the length of the whole value to
   * len_out, and returns 0. The library calls again with a larger buffer where that length is
   * more than capacity. When the key did not come in time, the function returns DM_STORE_NOT_YET
   * and writes nothing.
   */
  int32_t (*get)(void *user_data, const char *key, void *value, size_t capacity, size_t *len_out, int64_t timeout_ms);
  /**
   * Adds amount to the integer under key (0 when there is none), atomically over all ranks, and
   * writes the sum to value_out. The integer is the value of the key, in decimal digits: get
   * gives it, and remove removes it.
   */
  int32_t (*add)(void *user_data, const char *key, int64_t amount, int64_t *value_out);
  /**
   * Called exactly once, when the world is gone: inside the dm_world_free that frees its last
   * handle, or on a thread of the library where a mesh was freed last. No other function is
   * called any more by then. This function is not called where dm_world_init failed. May be
   * NULL.
   */
  void (*drop)(void *user_data);
  /**
   * Removes key; a key that is not there is no error. The library ignores the number that the
   * function returns. May be NULL: then everything that the library has stored stays in the
   * caller's service, some kilobytes for each collective call.
   */
  int32_t (*remove)(void *user_data, const char *key);
  /**
   * Stores len bytes under key if the value there is the expected one, atomically over all
   * ranks; an expected_len of 0 means that the key is not there. Afterwards copies at most
   * capacity bytes of the value that is now under key to the buffer stands, and writes the
   * length of that whole value to len_out (0: the key is not there). Returns 0, also where the
   * value was another one. dm_recover needs this function: with add and set alone a rank that
   * dies between the two would leave a decision that nobody can make any more. All ranks have
   * it, or none has. May be NULL: then dm_recover is DM_STATUS_UNSUPPORTED.
   */
  int32_t (*compare_set)(void *user_data,
                         const char *key,
                         const void *expected,
                         size_t expected_len,
                         const void *value,
                         size_t len,
                         void *stands,
                         size_t capacity,
                         size_t *len_out);
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
   * This process's rank, 0 to world_size - 1, when world_size is given, and 0 otherwise.
   */
  int32_t rank;
  /**
   * This process's rank on its host, from which its device follows, when world_size is given,
   * and 0 otherwise. A rank that leaves it at 0 gets a number that no other rank of its host
   * has, the lowest world rank first. So it may stay 0 on all ranks.
   */
  int32_t local_rank;
  /**
   * The index of the device on which communicators are made, among those that this process sees;
   * used when flags has DM_WORLD_DEVICE, and 0 otherwise. Without that flag the world takes the
   * current device of the thread that joins, or where that thread has none, the device whose
   * index is the local rank modulo the number of devices.
   */
  int32_t device;
  /**
   * DM_JOIN_AUTO, DM_JOIN_NEW or DM_JOIN_RUNNING: whether this process joins a running job.
   */
  uint32_t join;
  /**
   * How long dm_world_init may wait, and after it each call of the world and its meshes that has
   * no timeout of its own, in milliseconds. 0: 600000.
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
   * NULL, or the caller's own store. NULL stands for the store that init_method names.
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
   * Where neither says a local rank, the rank gets a number that is free on its host, the lowest
   * world rank first.
   */
  int32_t local_rank;
  /**
   * The number of ranks on this host: what the launcher says where it says the local rank too,
   * otherwise the number of ranks that run on this host. In an offline world all ranks count as
   * ranks of one host.
   */
  int32_t local_size;
  /**
   * The number of this host, 0 to num_hosts - 1. Hosts are numbered in the order of the lowest
   * rank on each. On device type cuda the containers of one machine are one host. On device
   * type cpu ranks are on one host if they share memory, as for dm_world_locations.
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
  int32_t ccl_version;
  /**
   * "cuda" or "cpu". Static.
   */
  const char *device_type;
  /**
   * The communicator library: its path or SONAME, or the name of the embedded host engine; "" in
   * an offline world. Borrowed from the world: valid until its last handle and mesh are freed.
   */
  const char *library;
  /**
   * The epoch in which this process is: 0 until a recovery has given a mesh (dm_recover). A
   * process that joins a running job is in no epoch before its dm_init has returned, and 0
   * stands here.
   */
  int64_t epoch;
  /**
   * The number of processes that have joined the world under this rank before this one. 0: this
   * is the first process of its rank.
   */
  int64_t ticket;
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
   * NULL or the caller's ncclConfig_t. The library copies the config by the config's own size
   * field, with its strings (netName, commName). A dimension with a config does not share its
   * communicator. All fields but the names must be the same on every rank.
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
   * NULL: the process's default world of that device type, which dm_init joins from the
   * environment at first use; for dm_from_comms no world at all.
   */
  struct dm_world *world;
  /**
   * NULL, or n different world ranks, row-major in the mesh's shape; n is the product of the
   * shape. NULL stands for the ranks 0 .. n-1.
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
   * The number of elements of dim_options: the number of the mesh's dimensions; 0 where
   * dim_options is NULL.
   */
  size_t num_dim_options;
  /**
   * How long each collective call of the mesh may wait on the host, in milliseconds. 0: as long
   * as the world's. The timeout does not bound work that a call on cuda has put on a stream: see
   * dm_stream_wait and dm_abort.
   */
  int64_t timeout_ms;
} dm_init_options;

/**
 * A communicator of NCCL or of a library with its API: the same line as in nccl.h, so that both
 * headers can be included, in either order.
 */
typedef struct ncclComm *ncclComm_t;

/**
 * Options of a collective call that gives a mesh new dimensions, or ends the mesh (dm_finalize,
 * dm_shrink). Initialise with DM_CALL_OPTIONS_INIT.
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
   * NULL, or one element for each dimension that the call makes. dm_finalize makes none.
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
   * For DM_SHARD: the dimension of the tensor, from 0. The other kinds ignore it.
   */
  int32_t tensor_dim;
  /**
   * For DM_SHARD, where several mesh dimensions shard one tensor_dim: the dimension with the
   * lowest order splits first, and equal orders split in the order of the mesh. With all orders
   * 0 the dimensions split from left to right, as in PyTorch.
   */
  int32_t order;
  /**
   * Must be 0. An initialiser that ends before this field, as in `{DM_SHARD, 0, 1}`, makes the
   * field 0.
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
   * The number of elements of shape, and of traffic.
   */
  size_t ndim;
  /**
   * NULL, or a weight for each dimension: how much a rank exchanges along it.
   */
  const uint32_t *traffic;
} dm_plan_options;

/**
 * The type of a buffer's elements: the values of ncclDataType_t. On cuda every number up to 255
 * goes to NCCL, which refuses those that it does not know. For a number that is not listed here,
 * the library does not check whether buffers overlap.
 */
typedef int32_t dm_dtype;

/**
 * A reduction: the values of ncclRedOp_t. A number that ncclRedOpCreatePreMulSum of the library
 * (dm_get_proc) has made for the communicator (dm_get_comm) is one, too.
 */
typedef int32_t dm_op;

/**
 * How a job recovers. Initialise with DM_RECOVER_OPTIONS_INIT; zero means the default everywhere.
 * All fields but DM_RECOVER_HAS_STATE and timeout_ms must be the same on every rank that calls.
 * Where they differ on ranks of the mesh, the call fails on all of them.
 */
typedef struct dm_recover_options {
  /**
   * sizeof(dm_recover_options), set by the caller.
   */
  size_t struct_size;
  /**
   * DM_RECOVER_ flags.
   */
  uint32_t flags;
  /**
   * The least size of dim with which the job goes on. 0: 1.
   */
  int32_t min_size;
  /**
   * The dimension of replicas: an index of it that cannot be filled is left out with all its
   * ranks. It is the same in all recoveries of a job. NULL: the outermost dimension.
   */
  const char *dim;
  /**
   * How long the call may take, in milliseconds. 0: as long as the mesh's calls. A rank that is
   * not in the mesh waits without a limit, until it gets a place or the job ends.
   */
  int64_t timeout_ms;
  /**
   * How long to wait for processes that can take the places of lost ranks, in milliseconds, once
   * all living ranks are here. 0: take those that wait already.
   */
  int64_t replace_ms;
  /**
   * After how many milliseconds the ranks that are not known to be lost and have not called are
   * left out. They get DM_STATUS_NOT_MEMBER when they call. 0: never; the call then fails with
   * DM_STATUS_TIMEOUT on all ranks. When it is not 0, min_size must not be 0 either, because an
   * impatient rank could go on alone otherwise.
   */
  int64_t silent_ms;
  /**
   * NULL: the options that the dimensions had. Otherwise one element for each dimension.
   */
  const struct dm_dim_options *dim_options;
  /**
   * The number of elements of dim_options; 0 where dim_options is NULL.
   */
  size_t num_dim_options;
  /**
   * The greatest size to which the outermost dimension may grow, with DM_RECOVER_GROW. It does
   * not make the mesh smaller. 0: no limit.
   */
  int32_t max_size;
  /**
   * Must be 0.
   */
  uint32_t reserved;
} dm_recover_options;

/**
 * What a recovery has come to. Initialise with DM_RECOVERY_INIT. The arrays are borrowed from the
 * mesh that the recovery made: valid until its last handle is freed.
 */
typedef struct dm_recovery {
  /**
   * sizeof(dm_recovery), set by the caller.
   */
  size_t struct_size;
  /**
   * The epoch of the mesh. The job starts in epoch 0, and every recovery that gives a mesh
   * begins a later one.
   */
  int64_t epoch;
  /**
   * The epoch of the mesh that this rank had before; -1 where it had none. For a mesh that no
   * recovery made it is the mesh's own epoch.
   */
  int64_t previous_epoch;
  /**
   * The world ranks that were lost or left out since previous_epoch, in ascending order, also
   * those whose place another process has taken under the same rank. NULL when there are none.
   */
  const int32_t *lost_ranks;
  /**
   * The number of elements of lost_ranks.
   */
  size_t num_lost;
  /**
   * The world ranks of the mesh that need the state: new processes, spares that got a place, and
   * ranks that come back from a replica that was left out. In ascending order. NULL when there
   * are none.
   */
  const int32_t *joined_ranks;
  /**
   * The number of elements of joined_ranks.
   */
  size_t num_joined;
  /**
   * This rank's coordinate in the mesh before; NULL when this rank had none.
   */
  const int32_t *old_coordinate;
  /**
   * This rank's coordinate in the new mesh; NULL when this rank is not in it.
   */
  const int32_t *new_coordinate;
  /**
   * The number of elements of the coordinates that are not NULL.
   */
  size_t ndim;
  /**
   * The rank along dm_recover_options.dim that has the state of this rank's shard: the root of
   * the broadcast along dim by which the joined ranks get the state. DM_RANK_NONE where no rank
   * has it (DM_RECOVER_ANY_STATE), and where this rank is not in the mesh.
   */
  int32_t state_root;
  /**
   * 1 if this rank is one of joined_ranks, otherwise 0.
   */
  int32_t has_joined;
} dm_recovery;

/**
 * The kind of an event.
 */
typedef int32_t dm_event_kind;

/**
 * One event. Initialise with DM_EVENT_INIT before dm_events_next. The library owns the strings
 * and the array.
 */
typedef struct dm_event {
  /**
   * sizeof(dm_event): set by the caller of dm_events_next, and by the library for a handler.
   */
  size_t struct_size;
  /**
   * A DM_EVENT_ number. A later release may have further ones.
   */
  dm_event_kind kind;
  /**
   * This process's rank in the world. For a slow call that belongs to no world, its rank in the
   * communicator.
   */
  int32_t rank;
  /**
   * The number of ranks of the world, or of that communicator.
   */
  int32_t world_size;
  /**
   * Always 0.
   */
  uint32_t reserved;
  /**
   * The epoch of the world, or of the mesh that the event is about.
   */
  int64_t epoch;
  /**
   * When this process noticed what has happened, in nanoseconds since 1970-01-01 (UTC).
   */
  int64_t time_ns;
  /**
   * The world ranks that the event is about, in ascending order. JOINED: the ranks that have
   * joined. SLOW: the ranks for which the call waits, as far as this process knows them. LOST:
   * the lost ranks. ABORTED: the ranks that have aborted. RECOVERED: the ranks that were lost or
   * left out. NULL when there are none.
   */
  const int32_t *ranks;
  /**
   * The number of elements of ranks.
   */
  size_t num_ranks;
  /**
   * The name of a group of ranks, as `devicemesh why` shows it. SLOW: the group of the call,
   * for example "mesh/tp", or "the world" for a call like dm_init. Other kinds: the name of the
   * mesh, for example "mesh". NULL where the event is about the world, and where a SLOW event is
   * about dm_recover.
   */
  const char *group;
  /**
   * SLOW: the dimension of the call; NULL where it has none.
   */
  const char *dim;
  /**
   * SLOW: the name of the operation ("all-reduce"), or the text of a call like dm_flatten; NULL
   * otherwise.
   */
  const char *operation;
  /**
   * SLOW: the number of the call in its group, from 1; -1 for dm_recover and dm_stream_wait.
   * Sends and receives are counted apart. Other kinds: -1.
   */
  int64_t call;
  /**
   * SLOW: how long the call has waited, in seconds; negative otherwise.
   */
  double waited_seconds;
  /**
   * How many events were left out before this one because the queue was full.
   */
  uint64_t dropped;
  /**
   * A description of the event in one line, which begins with the rank ("rank 3 ..."). Never
   * NULL.
   */
  const char *message;
} dm_event;

/**
 * The options of dm_set_event_handler and dm_events_open. Initialise with DM_EVENT_OPTIONS_INIT;
 * zero means the default everywhere.
 */
typedef struct dm_event_options {
  /**
   * sizeof(dm_event_options), set by the caller.
   */
  size_t struct_size;
  /**
   * Must be 0: there are no flags yet.
   */
  uint32_t flags;
  /**
   * Must be 0.
   */
  uint32_t reserved;
  /**
   * The time in milliseconds after which a waiting call is slow. The call gives an event then,
   * and another one whenever the time that it has waited has doubled. 0: 10000.
   */
  int64_t slow_ms;
} dm_event_options;

/* ---- statuses ---- */

/**
 * Success.
 */
#define DM_STATUS_OK 0

/**
 * An argument is NULL, is out of range, is repeated or contradicts another one; or a struct_size
 * is wrong; or a flag is unknown.
 */
#define DM_STATUS_INVALID_ARGUMENT 1

/**
 * The handle was never given out, or was freed.
 */
#define DM_STATUS_INVALID_HANDLE 2

/**
 * There is no dimension, symbol or registered mesh of that name.
 */
#define DM_STATUS_NOT_FOUND 3

/**
 * The calling rank, or the rank that the call asks about, is not in this view or in this rank's
 * group along the dimension.
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
 * A deadline passed. Where the call waited for ranks, the message names those that did not come.
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
 * There is no usable communicator library; the message lists what was tried.
 */
#define DM_STATUS_LIBRARY 11

/**
 * The call is not available for this device type, world or library version, or in a forked child;
 * the message says what to do instead.
 */
#define DM_STATUS_UNSUPPORTED 12

/**
 * The mesh or its world has ended (see "ended" at the head of this file), or the call was ended by
 * an abort.
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
 * ncclFloat8e5m2 (NCCL 2.24): 5 bits of exponent, 2 of mantissa, 57344 at most. Results are
 * rounded as for DM_FLOAT8E4M3. So the sum of infinities is the largest number, but DM_MAX and
 * DM_MIN keep infinities.
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
 * Sum divided by the number of ranks. On the host engine the sum does not overflow, and the
 * average of integers is the exact sum, divided and truncated towards zero. NCCL adds integers in
 * the element's own type, in which the sum can overflow, and multiplies floating-point numbers by
 * 1/n before it adds them.
 */
#define DM_AVG 4

/* ---- levels of the log ---- */

/**
 * Nothing is logged.
 */
#define DM_LOG_OFF 0

/**
 * A failure of which no caller is told.
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

/* ---- kinds of events ---- */

/**
 * There is no event: dm_events_next has found none.
 */
#define DM_EVENT_NONE 0

/**
 * This rank has joined its world, or ranks have joined in a recovery and need the state of the
 * training (dm_recovery.joined_ranks).
 */
#define DM_EVENT_JOINED 1

/**
 * A call of this rank has waited for dm_event_options.slow_ms.
 */
#define DM_EVENT_SLOW 2

/**
 * Ranks are lost (see "lost" at the head of this file).
 */
#define DM_EVENT_LOST 3

/**
 * A rank has ended a mesh by dm_abort, or this rank has ended its world by dm_world_abort. On cuda
 * the event also tells of another rank that has ended a mesh by dm_recover or dm_shrink.
 */
#define DM_EVENT_ABORTED 4

/**
 * dm_recover or dm_shrink has given the mesh with which the job goes on.
 */
#define DM_EVENT_RECOVERED 5

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
 * clear the message.
 */
const char *dm_last_error(void);

/**
 * Tells all about this thread's last failing call: its status and message, the codes of the layers
 * below, and which ranks, dimension and call the failure is about. So a program need not read the
 * message to learn which ranks are lost (dm_lost_ranks has the whole list for dm_shrink).
 *
 * Local. `info_out->struct_size` is set by the caller (DM_ERROR_INFO_INIT). Before any failure the
 * status is DM_STATUS_OK and the message "". Errors: DM_STATUS_INVALID_ARGUMENT when info_out is
 * NULL or its struct_size is wrong.
 */
dm_status dm_last_error_info(struct dm_error_info *info_out);

/**
 * The version of the loaded library: 10000 * major + 100 * minor + patch, so 200 is 0.2.0.
 *
 * Local. A program that loads the library by dlopen checks the version first: another major
 * version, and below 1.0 another minor version, has other functions and types. Where a file name
 * of such a version (libdevicemesh.so.0.1) has loaded this library, dm_world_init, dm_init,
 * dm_from_comms, dm_deserialize and dm_plan_ranks fail with DM_STATUS_UNSUPPORTED.
 */
uint32_t dm_version(void);

/* ---- the log ---- */

/**
 * Sets what the library logs, and where. The level replaces the one that the environment variable
 * DM_LOG (error, warn, info or debug) has set. Without the call and the variable nothing is
 * logged.
 *
 * Local. log NULL: each record is one line on stderr, with time (UTC), level and rank. Otherwise
 * the library calls log(user_data, level, message) for each record, and writes nothing to stderr.
 * message is one line of UTF-8 without a newline, which begins with the rank ("rank 3: ..."); it
 * is valid during the call.
 *
 * log is called from threads of the library too, and from several threads at once. The library
 * holds no lock then that a local function needs: log may call dm_abort, dm_rank, dm_set_log and
 * other local functions, but no collective ones. Records of such calls on this thread are dropped.
 * log must return: a C++ exception that leaves it ends the process, and longjmp out of it is not
 * allowed. After dm_set_log has replaced log, user_data may be freed, unless dm_set_log was called
 * from inside log. In a forked child of a process with a world nothing is logged.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (level is no DM_LOG_ value), DM_STATUS_TIMEOUT (the new log
 * is set, but another thread has been inside an earlier one for 5 s: keep what the earlier ones
 * use until a later call returns DM_STATUS_OK), DM_STATUS_UNSUPPORTED (a Rust program has a logger
 * of its own).
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
 * for cuda where a driver with a device and NCCL (or RCCL) are present and cpu elsewhere. options
 * NULL: everything from the launcher's environment (torchrun, Open MPI, PALS, PMI, PMIx, Slurm, a
 * Kubernetes indexed job, or alone; docs/launchers.md has their variables). A process with several
 * devices joins one world per device, each with an explicit rank, from one thread per device.
 * *world_out is a handle, which the caller frees with dm_world_free.
 *
 * With init_method "tcp://host:port" or an environment without a launcher's store, rank 0 serves
 * the store until its handle and meshes are freed or its process ends. The other ranks need the
 * store for every call that makes or ends something, and for the control plane. Rank 0 listens
 * only on the addresses of the host that is named. With DM_STORE_SECRET set in the environment of
 * all ranks, it serves only connections that prove to have the secret (PyTorch's clients cannot).
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (options, partial or contradictory environment variables),
 * DM_STATUS_STORE (unreachable, port in use), DM_STATUS_TIMEOUT (names the ranks that never came),
 * DM_STATUS_MISMATCH (world size, device type or library version differ), DM_STATUS_PEER_LOST (a
 * rank is lost; it is named), DM_STATUS_LIBRARY and DM_STATUS_DEVICE (no communicator library, no
 * device driver), DM_STATUS_ABORTED (dm_world_abort with the token of options->joining_out),
 * DM_STATUS_UNSUPPORTED (device type cpu on several hosts, with an older libhostccl.so),
 * DM_STATUS_INVALID_STATE (the job that this process was to join has ended).
 *
 * A process that takes the place of a lost one in a running job (options->join, DM_JOIN) waits for
 * nobody here: it compares itself with the job, and its dm_init waits for the place. Until then
 * collective calls of the world other than dm_init give DM_STATUS_INVALID_STATE, and
 * dm_world_finalize only ends the world on this rank.
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
 * so it costs some round trips. It does not wait for work on devices. Errors: DM_STATUS_TIMEOUT
 * (names the ranks that did not come), DM_STATUS_MISMATCH (names a rank that made another call),
 * DM_STATUS_PEER_LOST (names a rank that is lost), DM_STATUS_ABORTED (this rank has ended its part
 * by dm_world_abort, or the world was finalized), DM_STATUS_INVALID_STATE (operations wait in a
 * group of this thread), DM_STATUS_INVALID_ARGUMENT (a negative timeout),
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_STORE.
 */
dm_status dm_world_barrier(const struct dm_world *world, int64_t timeout_ms);

/**
 * Gives the location of every rank of the world as dm_plan_ranks takes it: world_size paths in
 * rank order.
 *
 * Collective over the world. location is the path of this rank, from far to near
 * ("rack1/host3/nvl0"). NULL stands for the name of its host. On device type cuda that is the same
 * for all containers of one machine. On device type cpu ranks that share no memory have hosts of
 * their own, so two containers of one machine that are both called "a" get the names "a" and
 * "a#2". Each rank gives its own path. Paths may have different numbers of levels, but a plan is
 * best when all have the same ones. timeout_ms 0: the world's timeout. *locations_out is borrowed
 * from the world: valid until the world's last handle and mesh are freed.
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
 * nothing. Calls with equal answers give one list, so repeated calls need no further memory.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (also a location of more than 4096 bytes, a negative
 * timeout), DM_STATUS_UNSUPPORTED (an offline world), and those of dm_world_barrier.
 */
dm_status dm_world_locations(const struct dm_world *world,
                             const char *location,
                             int64_t timeout_ms,
                             const char *const **locations_out);

/**
 * Ends this rank's part in the world, without waiting for other ranks: wakes every call of the
 * world that is blocked on this rank (dm_init, dm_world_barrier, dm_flatten ...) and aborts all
 * its root meshes, as dm_abort does. To the other ranks this rank is lost from then on.
 *
 * Local, from any thread; takes no lock that a blocked call holds. From then on every collective
 * call of the world gives DM_STATUS_ABORTED, its meshes have ended, and their raw communicators
 * must not be used any more; handles are still to be freed. Other ranks that wait for this one get
 * DM_STATUS_PEER_LOST, which names it. A second abort only waits for what has not ended yet. With
 * a token of dm_world_options.joining_out the call ends the dm_world_init that wrote the token.
 * dm_default_world_abort ends the worlds that dm_init joins by itself. Errors: those of dm_abort.
 */
dm_status dm_world_abort(const struct dm_world *world);

/**
 * Ends this rank's part in the default worlds, those that dm_init joins by itself, as
 * dm_world_abort does. It also ends the joining of a default world.
 *
 * Local, from any thread; takes no lock that a blocked call holds. A dm_init that begins after
 * that joins the default world anew, so the ranks can meet again once all of them have aborted
 * theirs. Without a default world it does nothing. Errors: DM_STATUS_TIMEOUT and DM_STATUS_CCL, as
 * in dm_abort.
 */
dm_status dm_default_world_abort(void);

/**
 * Ends the world in order: waits for the outstanding work of all its meshes on all ranks, destroys
 * their communicators, also those of meshes whose handles were freed, and ends the meshes and the
 * world. PyTorch's destroy_process_group() does the same.
 *
 * Collective over the world; local in an offline world. timeout_ms 0: the world's timeout. From
 * then on every collective call of the world gives DM_STATUS_ABORTED, its meshes have ended, and
 * their raw communicators must not be used any more; handles are still to be freed. Communicators
 * that dm_from_comms took without DM_INIT_OWN_COMMS stay the caller's. Where dm_init joined the
 * world by itself, the next dm_init joins it anew. Errors: DM_STATUS_TIMEOUT and
 * DM_STATUS_MISMATCH as in dm_init (when a rank never made the call, the world is as before, and
 * dm_world_abort ends it), DM_STATUS_CCL and DM_STATUS_PEER_LOST (a communicator had failed, or
 * fails now: it is aborted, and the world has ended all the same), DM_STATUS_ABORTED (it has ended
 * already), DM_STATUS_INVALID_ARGUMENT (a negative timeout), DM_STATUS_INVALID_STATE (operations
 * wait in a group of this thread, or a CUDA graph is being captured), DM_STATUS_INVALID_HANDLE.
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
 * Meshes keep alive what they need of the world, and communicators live on as dm_get_comm says.
 * Where this was the last handle of the world and no mesh is left, the call returns when the
 * connection to the store is closed, and on rank 0 when the store's server has ended.
 */
void dm_world_free(struct dm_world *world);

/**
 * Gives the world that the mesh belongs to, also when dm_init joined the world by itself.
 *
 * Local; it works for each view of the mesh, also after the mesh has ended. *world_out is a new
 * handle, which the caller frees with dm_world_free. The world lives on as long as one of its
 * handles or meshes does. Errors: DM_STATUS_UNSUPPORTED (a mesh of dm_from_comms without a world),
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (world_out is NULL).
 */
dm_status dm_get_world(const struct dm_mesh *mesh, struct dm_world **world_out);

/**
 * Gives the default world: the one that dm_init joins when its options name no world. Where this
 * process is not in it yet, the call joins it first.
 *
 * Collective over the world where this process is not in it, local otherwise. device_type is as
 * for dm_world_init; each device type has a default world of its own. The ranks and their store
 * come from the launcher's environment. timeout_ms bounds the joining; 0: 600000. *world_out is a
 * new handle, which the caller frees with dm_world_free; this process stays in the default world.
 * After dm_default_world_abort, dm_default_world_finalize, or a dm_world_abort or
 * dm_world_finalize of this world, the next call joins anew, with all ranks. Errors: those of
 * dm_world_init; DM_STATUS_ABORTED also when dm_default_world_abort has ended the joining.
 */
dm_status dm_default_world(const char *device_type, int64_t timeout_ms, struct dm_world **world_out);

/**
 * Tells which rank this process is in the world, where it runs, and which library makes its
 * communicators.
 *
 * Local; it answers also after the world has ended. `info_out->struct_size` is set by the caller
 * (DM_WORLD_INFO_INIT). A program needs no environment variable to choose its device: the library
 * has chosen `device` for this rank, and uses it also on threads that have no current device.
 * Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (info_out is NULL, or its
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

/**
 * Gives the number of processes that wait to join the running job. The next dm_recover lets them
 * in where there is a place for them.
 *
 * Local, and cheap enough for every step: it makes no store operation while nobody waits, and
 * looks at a socket at most once in 10 ms (in a folder and with dm_store_callbacks: at the store,
 * once a second). A process for which the last recovery had no place does not count. A process
 * that would be beyond the mesh counts when all ranks of its index of the outermost dimension
 * wait. Ranks may get different numbers for a moment. So the ranks agree before they call
 * dm_recover for it, for example by the sum of a reduction that they make anyway. Errors:
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (count_out is NULL), DM_STATUS_UNSUPPORTED
 * (an offline world), DM_STATUS_ABORTED (the world has ended).
 */
dm_status dm_waiting(const struct dm_world *world, int32_t *count_out);

/* ---- making meshes ---- */

/**
 * Makes a mesh, and a communicator of this rank for every dimension. dm_finalize ends the
 * communicators; dm_free frees only the handle.
 *
 * ```c
 * dm_init("cuda", (int[]){2, 4}, 2, (const char *[]){"replicate", "shard"}, NULL, &mesh);
 * dm_get_comm(mesh, "shard", &comm);
 * ```
 *
 * Collective over the world: where the mesh is smaller than the world, the ranks outside it make
 * the call too. They get a handle, and calls on it that need a member give DM_STATUS_NOT_MEMBER.
 * Ranks lie in the mesh row-major: the last dimension is the fastest. device_type is "cuda", "cpu"
 * or NULL (the device type of options->world; without a world see dm_world_init). shape has ndim
 * sizes, each at least 1; their product is at most the world's size. dim_names are ndim different,
 * non-empty names; NULL names them dim_0, dim_1 ... options NULL: the default world, ranks 0 ..
 * n-1, the world's timeout. options->num_ranks and num_dim_options are the lengths of the lists
 * beside them. options->timeout_ms bounds the whole call, with the joining of the default world.
 * After a joining that failed, was late or was aborted, the next call joins anew. The caller frees
 * the handle with dm_free.
 *
 * Before any communicator is made, the ranks agree that they all made this same call. Errors:
 * DM_STATUS_INVALID_ARGUMENT (see "refused" at the head of this file; a rank that is not in the
 * default world yet cannot tell the others), DM_STATUS_MISMATCH (says which rank asked for what),
 * DM_STATUS_TIMEOUT (names the ranks that did not come), DM_STATUS_INVALID_STATE (a CUDA graph is
 * being captured, where the driver tells), DM_STATUS_CCL, DM_STATUS_INVALID_HANDLE
 * (options->world), DM_STATUS_PEER_LOST, DM_STATUS_ABORTED (dm_world_abort on this rank ends the
 * call, also while it is blocked), and what dm_world_init gives when the default world is joined
 * here. When the call fails on any rank, it fails on all ranks and leaves nothing behind.
 *
 * In a process that joins a running job (dm_world_options.join) the call waits for the next
 * dm_recover of the job, which lets this process in where its place is empty, and gives the mesh
 * of that recovery: dm_get_recovery says that this rank has joined. The dimensions that the job
 * has made exist, and no other rank takes part in this dm_init. The arguments are those of the
 * dm_init that began the job. A process whose rank the job did not have passes a larger size of
 * the outermost dimension, so that the mesh has this rank. It is let in when processes wait for
 * all ranks of its index (DM_RECOVER_GROW). Where a spare has the place, and where a rank of the
 * job is not in the mesh of its dm_init, this process becomes a spare. Errors of such a process:
 * DM_STATUS_TIMEOUT (no recovery has come; the next dm_init goes on waiting), DM_STATUS_MISMATCH
 * (it asks for another mesh, or its rank lives), DM_STATUS_INVALID_STATE (the job has ended),
 * DM_STATUS_NOT_MEMBER (the others take it for lost), and those of dm_recover.
 */
dm_status dm_init(const char *device_type,
                  const int32_t *shape,
                  size_t ndim,
                  const char *const *dim_names,
                  const struct dm_init_options *options,
                  struct dm_mesh **mesh_out);

/**
 * Makes a mesh of communicators that exist already, one for each dimension, in the order of the
 * dimensions.
 *
 * Local. Element i of comms is this rank's communicator along dimension i: it has as many ranks as
 * the dimension, and this process's rank in it is its coordinate (checked). On cuda the
 * communicators belong to the library that the program has named (dm_world_options.ccl_library of
 * options->world, or dm_set_ccl_resolver), or else to the only copy of NCCL that is loaded in the
 * process. DM_CCL_LIBRARY does not count here. Several copies are refused, and the message has
 * their paths. The communicators stay the caller's, must outlive the mesh, and are not aborted by
 * dm_abort, unless options->flags has DM_INIT_OWN_COMMS. options may not have DM_INIT_LAZY or
 * dim_options, because no communicator is made here. options->world NULL: the mesh belongs to no
 * world, and its ranks are 0 .. n-1 unless options->ranks says others. Local calls, collectives on
 * data and dm_finalize work on it. Calls that make something with other ranks (dm_flatten ...),
 * dm_shrink and the control plane need a world. The caller frees the handle with dm_free.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (also when a communicator's size or rank does not fit),
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_CCL, DM_STATUS_LIBRARY (several copies of NCCL are loaded,
 * or none), DM_STATUS_TIMEOUT (NCCL does not answer about a communicator), DM_STATUS_ABORTED
 * (options->world has ended), DM_STATUS_NOT_MEMBER (this rank is not among the ranks, or not in
 * the mesh of the last recovery), DM_STATUS_INVALID_STATE (this process waits to come into a
 * running job), DM_STATUS_UNSUPPORTED (options->world is offline).
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
 * devicemesh is the version of the format, 1. ranks is a list of world ranks in runs of count
 * ranks: [first, count] stands for first, first + 1 ..., and [first, count, step] for first,
 * first + step ...; step may be negative. layout has for each dimension its (size, stride) pairs,
 * the most significant first; their sizes multiply to the dimension's in shape, and a dimension of
 * size 1 may have none. The rank at a coordinate is element
 *
 * ```c
 * base + sum over dimensions and their pairs of  digit * stride
 * ```
 *
 * of ranks. The digits of a dimension are its coordinate, written in the mixed radix of the
 * dimension's sizes: coordinate 5 of `[[2,8],[4,1]]` has the digits (1, 1), which give 1 * 8 + 1 *
 * 1 = 9. So in the text above, the rank at coordinate 2 is element 4 + 2 * 1 of 0 .. 7. When the
 * pairs are in the order of their strides, each stride is a multiple of size * stride of the pair
 * before it, so no rank appears twice. ranks may have more elements than the layout reaches.
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
 * Makes the mesh that a text of dm_serialize describes: does what dm_init does with the device
 * type, the shape, the names and the ranks of the text. It is a root mesh, equal (dm_equal) to the
 * view that was written, with a communicator for every dimension.
 *
 * Collective over the world. To the ranks it is a call of dm_init, and messages name it so: every
 * rank passes a text of the same mesh, or calls dm_init with the same arguments. (After dm_slice
 * ranks have different views: pass the text of one of them on all ranks.) options are those of
 * dm_init, with dim_options for the dimensions of the text; options->ranks is NULL. Without
 * options->world it is the default world of the text's device type, which may be larger than the
 * one the text comes from. The caller frees the handle with dm_free.
 *
 * Keys may come in any order and with spaces between. All seven are needed and there are no
 * others; numbers are integers; there are at most 65536 dimensions. The text may come from a
 * stranger: it is checked before this rank waits for anybody, and takes memory in proportion to
 * its length and the world's size, not to the numbers in it. Errors: DM_STATUS_INVALID_ARGUMENT
 * (says where the text is no JSON, which key is missing, which numbers contradict each other, or
 * which rank is listed twice or is not in the world), and those of dm_init.
 */
dm_status dm_deserialize(const char *text, const struct dm_init_options *options, struct dm_mesh **mesh_out);

/* ---- views of a mesh ---- */

/**
 * Gives the view that has the named dimensions, in that order. It shares the communicators of
 * mesh.
 *
 * Local. Any view can be sliced, in any order of names: ("cp", "dp") gives the transposed view.
 * The root mesh, and every view that has the dimensions of a flattened dimension, also know the
 * name of the flattened one. num_names 0 gives a view without dimensions, of this rank alone. The
 * caller frees the handle with dm_free; mesh may be freed before.
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
 * Joins all dimensions of this view into one, with a communicator over the ranks of the view in
 * row-major order.
 *
 * Collective over the root mesh; for a view of a range, over the ranks of the range (see "range"
 * at the head of this file). name NULL joins the dimensions' names with "_". A second call with
 * these dimensions and this name gives the communicator that exists, without communication. With
 * another name the new dimension shares that communicator, unless options->dim_options says
 * DM_DIM_OWN_COMM. options NULL: the defaults; its dim_options has one element. The caller frees
 * the handle with dm_free.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (a dimension has the name; dm_flatten or dm_reshape has given
 * the name to other groups), DM_STATUS_INVALID_STATE (a CUDA graph is being captured),
 * DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT, DM_STATUS_PEER_LOST, DM_STATUS_CCL, DM_STATUS_NOT_MEMBER,
 * DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (a mesh of dm_from_comms
 * without a world).
 */
dm_status dm_flatten(const struct dm_mesh *mesh,
                     const char *name,
                     const struct dm_call_options *options,
                     struct dm_mesh **mesh_out);

/**
 * Gives the view in which ndim new dimensions replace the dimension dim, each with a communicator.
 * Their sizes in shape multiply to the size of dim.
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
 * Gives all ranks of this view, row-major, another shape, and each of its dimensions a
 * communicator. So one set of ranks can have several factorisations.
 *
 * Collective over the root mesh. The ndim sizes in shape multiply to the view's number of ranks;
 * the first of the new dimensions is the slowest. Where the view or its root mesh already has a
 * dimension of a name, the name must mean the same groups (the same pipeline stages, for example).
 * A new dimension with the groups of an existing one shares the communicator of the existing one.
 * Expert parallelism beside dense layers, on a mesh (pp=2, dp=2, cp=2, tp=2) of 16 ranks:
 *
 * ```c
 * dm_reshape(dense, (int[]){2, 2, 2, 2}, 4, (const char *[]){"pp", "edp", "ep", "etp"}, NULL, &sparse);
 * ```
 *
 * Here the call checks that pp has the same stages as before, and etp shares the communicator of
 * tp. From now on dm_flatten refuses edp, ep and etp as names for other groups. options NULL: the
 * defaults; its dim_options has ndim elements, one per new dimension. The caller frees the handle
 * with dm_free.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (the shape; a repeated name; a name that means other groups,
 * and the message has both layouts), and those of dm_flatten.
 */
dm_status dm_reshape(const struct dm_mesh *mesh,
                     const int32_t *shape,
                     size_t ndim,
                     const char *const *dim_names,
                     const struct dm_call_options *options,
                     struct dm_mesh **mesh_out);

/**
 * Gives the view that keeps only len indices of dimension dim: start, start + step ... It has a
 * communicator of its own along dim. Examples are the first stages of a pipeline, every second
 * replica, and all ranks but the spare ones.
 *
 * Collective over the root mesh of this view (where this view is one of a range itself, over the
 * ranks of that range), also for the ranks at other indices: they get a handle too, and calls on
 * it that need a member give DM_STATUS_NOT_MEMBER. dim NULL is allowed on a 1-D mesh. The result
 * is a range. Row-major positions, strides (dm_describe), dm_submesh and dm_replica_groups count
 * among the ranks that are left. Calls on the result that make something (dm_flatten ...) are
 * collective over these ranks. The other dimensions keep their communicators. dm_root gives the
 * root mesh that this view belongs to, with all its ranks; the result ends with that mesh. A range
 * of all indices is the view itself. The result knows those flattened dimensions of the root mesh
 * whose groups the range leaves whole. In the range, a name that a call on the range has given to
 * other groups means only these groups. options NULL: the defaults; its dim_options has one
 * element, for what is left of dim. The caller frees the handle with dm_free.
 *
 * On a mesh (pp=4, tp=2) over ranks 0 .. 7, start 2, len 2, step 1 along pp gives (pp=2, tp=2)
 * over ranks 4 .. 7, in which rank 6 has coordinate (1, 0). Making the same range again gives the
 * communicators that it has.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (len or step is less than 1, start is negative, an index past
 * the end), DM_STATUS_NOT_FOUND (no such dimension), and those of dm_flatten.
 */
dm_status dm_slice_range(const struct dm_mesh *mesh,
                         const char *dim,
                         int32_t start,
                         int32_t len,
                         int32_t step,
                         const struct dm_call_options *options,
                         struct dm_mesh **mesh_out);

/**
 * Makes one view of n views of one root mesh: it has the dimensions of all of them, in the order
 * of meshes.
 *
 * Local. The dimensions may not overlap: each rank appears once. The caller frees the handle with
 * dm_free.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (no mesh, different roots, overlap, a repeated name),
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED.
 */
dm_status dm_concatenate(const struct dm_mesh *const *meshes, size_t n, struct dm_mesh **mesh_out);

/**
 * Gives the root mesh of a view: the one that dm_init, dm_deserialize, dm_from_comms, dm_shrink or
 * dm_recover made.
 *
 * Local. The caller frees the handle with dm_free. Errors: DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_ABORTED.
 */
dm_status dm_root(const struct dm_mesh *mesh, struct dm_mesh **mesh_out);

/**
 * Gives the number of parallel copies of the named dimensions over the ranks of the root mesh: the
 * size of the root mesh divided by the sizes of the dimensions.
 *
 * Local. Errors: as dm_slice; DM_STATUS_INVALID_ARGUMENT when count_out is NULL.
 */
dm_status dm_submesh_count(const struct dm_mesh *mesh,
                           const char *const *dim_names,
                           size_t num_names,
                           int32_t *count_out);

/**
 * Gives one of the parallel copies of the named dimensions over the ranks of the root mesh, by its
 * index. The copies are ordered by the row-major position of their first rank.
 *
 * Local. The copy that holds this rank equals dm_slice of those names. The other copies answer
 * questions about their ranks, and give DM_STATUS_NOT_MEMBER for questions about this rank's own
 * place or communicator. The caller frees the handle with dm_free.
 *
 * Errors: as dm_slice; DM_STATUS_INVALID_ARGUMENT when index is not below dm_submesh_count.
 */
dm_status dm_submesh(const struct dm_mesh *mesh,
                     const char *const *dim_names,
                     size_t num_names,
                     int32_t index,
                     struct dm_mesh **mesh_out);

/**
 * Gives another handle of the view. The caller frees it with dm_free, like the first one.
 *
 * Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (mesh_out is NULL).
 */
dm_status dm_clone(const struct dm_mesh *mesh, struct dm_mesh **mesh_out);

/**
 * Frees a mesh handle. It ends no working communicator, because raw pointers to it may be in use:
 * call dm_finalize (or dm_world_finalize, dm_abort) before, which ends the communicators.
 *
 * Local, waits for no rank; NULL is a no-op, and so are a handle that was freed before and any
 * handle in a forked child. Other views are not touched. A program that makes meshes and only
 * frees them keeps the memory of every communicator until dm_world_finalize. Where this was the
 * last handle, a thread of the library ends what takes time: failed communicators that no mesh has
 * any more, and the world. The end of the process waits one second at most for that thread.
 */
void dm_free(struct dm_mesh *mesh);

/* ---- questions to a mesh ---- */

/**
 * The number of dimensions. 0 stands for a view without dimensions, and for an invalid handle
 * (dm_last_error then says so).
 *
 * Local.
 */
size_t dm_ndim(const struct dm_mesh *mesh);

/**
 * The name of the dimension at that index; NULL for an index past the end and for an invalid
 * handle.
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
 * The device type of the mesh, "cuda" or "cpu": the kind of memory in which the buffers of its
 * collectives lie. NULL for an invalid handle (dm_last_error then says so).
 *
 * Local. The string is static.
 */
const char *dm_device_type(const struct dm_mesh *mesh);

/**
 * Whether this process's rank is in the view. The call never gives DM_STATUS_NOT_MEMBER, and it
 * also answers when the mesh has ended.
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
 * This process's rank along a dimension: its coordinate there, and its rank in the dimension's
 * communicator. PyTorch calls this number the local rank. (dm_world_info.local_rank is another
 * number: the rank on the host.)
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
 * All groups along a dimension, in the form that XLA wants: an array of shape [groups, size of
 * dim], row-major, that holds each rank of the root mesh once.
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
 * Local. The call compares values, so views of different root meshes can be equal. Errors:
 * DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_equal(const struct dm_mesh *a, const struct dm_mesh *b, bool *equal_out);

/**
 * A hash of the properties that dm_equal compares. Within one release of the library, equal views
 * have equal hashes on every rank, in every run and on every machine. Another release may compute
 * other hashes, so a program stores the text of dm_serialize, not the hash.
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
 * Gives the world rank of the rank dim_rank along dim, in this rank's group along dim.
 *
 * Local. dim NULL is allowed on a 1-D mesh. On mesh (dp=2, tp=4) over ranks 0..7, world rank 6
 * gets 4 for dim_rank 0 of tp and 2 for dim_rank 0 of dp. dm_translate_world_rank does the
 * reverse. Errors: DM_STATUS_INVALID_ARGUMENT (dim_rank is negative or not below the dimension's
 * size), DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_translate_rank(const struct dm_mesh *mesh, const char *dim, int32_t dim_rank, int32_t *world_rank_out);

/**
 * Gives the rank along dim of a world rank in this rank's group along dim: the number that
 * dm_send, dm_recv and root arguments take.
 *
 * Local. dim NULL is allowed on a 1-D mesh. On mesh (dp=2, tp=4) over ranks 0..7, world rank 6
 * gets 0 for world rank 4 along tp, and DM_STATUS_NOT_MEMBER for world rank 3, which lies in the
 * other group along tp. Errors: DM_STATUS_NOT_MEMBER (this rank is not in the view, or the world
 * rank is not in its group), DM_STATUS_NOT_FOUND, DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_translate_world_rank(const struct dm_mesh *mesh,
                                  const char *dim,
                                  int32_t world_rank,
                                  int32_t *dim_rank_out);

/**
 * Gives the rank along dim that lies offset steps from this rank: offset 1 is the next stage of a
 * pipeline, -1 the one before. dm_send and dm_recv take the result as it is, unless it is
 * DM_RANK_NONE; dm_translate_rank makes a world rank of it.
 *
 * Local. Past the edge the result is DM_RANK_NONE, or with wrap the rank at (this rank along dim +
 * offset) modulo the dimension's size. offset 0 is this rank. dim NULL is allowed on a 1-D mesh.
 * Errors: DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_neighbor(const struct dm_mesh *mesh, const char *dim, int32_t offset, bool wrap, int32_t *dim_rank_out);

/* ---- what a rank holds ---- */

/**
 * Gives the shape and the offsets of one rank's block of a tensor whose dimensions are split over
 * dimensions of the mesh.
 *
 * Local, no communication. placements has one element per dimension of mesh, so num_placements is
 * dm_ndim(mesh). tensor_shape, local_shape_out and offset_out have tensor_ndim elements each; all
 * three may be NULL when it is 0. world_rank is a rank of the mesh, or -1 for the caller's.
 * Element i of the block along tensor dimension d is element `offset_out[d] + i` of the tensor.
 *
 * A dimension of n indices over p ranks is cut as torch.chunk cuts it: into chunks of ceil(n / p),
 * the last ones shorter or empty. 5 indices over 4 ranks give 2, 2, 1 and 0. When several mesh
 * dimensions shard one tensor_dim, each splits the chunks of those before it, and
 * dm_placement.order says which are before. On a mesh (fsdp=2, tp=4) that shards 16 rows over
 * both, rank 6, at (1, 2), has
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
 * Computes a rank array for dm_init_options.ranks in which the dimensions that talk most stay
 * inside the closest domains of the machine.
 *
 * Local, no communication. Ranks that pass equal options get equal plans. locations has world_size
 * paths, one for each world rank, from far to near: "rack1/host3/nvl0" (dm_world_locations gathers
 * them). Level 0 of this path is the rack, and level 2 the NVLink domain; there are at most 32
 * levels. A name counts within the domain around it: host3 of rack1 is not host3 of rack2. Ranks
 * may have equal paths. A path that ends early, or is empty, puts its rank into a domain without a
 * name at the levels below, together with the other ranks whose paths lack these levels. shape has
 * ndim sizes whose product n is at most world_size: where the mesh has fewer ranks than the world,
 * the plan also chooses the ranks. ranks_out has n elements, row-major.
 *
 * traffic has a weight for each dimension: how much a rank exchanges along it, evenly with the
 * ranks of its group (0: nothing). NULL: later dimensions talk more; the weight of each is the
 * product of the sizes up to its own, its own included. The plan makes this cost small:
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
 * The report is one line of JSON, and *len_out its length with the NUL. report NULL: the call
 * writes no report, and len_out may be NULL too.
 *
 * ```c
 * {"ranks":8,"world_size":8,"domains":[2],"cost":64,"identity_cost":256,"even":true,"dimensions":[
 *  {"size":2,"traffic":2,"groups":4,"crossing_groups":[4],"most_domains":[2],"pairs":[8],"cost":64},
 *  {"size":4,"traffic":8,"groups":2,"crossing_groups":[0],"most_domains":[1],"pairs":[0],"cost":0}]}
 * ```
 *
 * The lists have one number for each level: domains counts the domains of the world,
 * crossing_groups the dimension's groups whose ranks are in different domains, most_domains the
 * domains of the group that has the most, and pairs is as in the cost above. identity_cost is the
 * cost of the order 0 .. n-1. even is false when the mesh does not fall into equal boxes, one for
 * each domain: the shape or the machine does not divide, and some groups of a dimension cross more
 * domains than others. Costs are integers and can have more than 64 bits.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT (NULL, also as a path; an empty component as in
 * "rack1//nvl0"; a size of 0; n larger than world_size), DM_STATUS_BUFFER_TOO_SMALL (capacity is
 * too small for the report: *len_out has its length, and ranks_out is not written),
 * DM_STATUS_UNSUPPORTED (see dm_version).
 */
dm_status dm_plan_ranks(const struct dm_plan_options *options,
                        int32_t *ranks_out,
                        char *report,
                        size_t capacity,
                        size_t *len_out);

/* ---- raw communicators ---- */

/**
 * Gives the raw communicator of this rank's group along a dimension. A process's rank in it is the
 * process's coordinate along the dimension.
 *
 * Local; with DM_INIT_LAZY the first call for a dimension is collective over this rank's group
 * along it. dim NULL is allowed on a 1-D mesh. All dimensions of size 1 share one communicator,
 * which holds this rank alone and is made at its first use.
 *
 * The communicator is borrowed from the root mesh, and the caller never destroys it. It is valid
 * until the mesh has ended (see "ended" at the head of this file), also when all handles were
 * freed. Only a communicator that has failed ends with the last handle of its meshes. Another root
 * mesh that shares the communicator ends it by dm_abort, too. Only the library that made the
 * communicator can use it: call functions of dm_get_proc, or ask for device type "cuda" by name
 * and link that same copy of NCCL. A mesh of device type NULL may be on cpu, and a linked NCCL
 * crashes on its communicator. On NCCL the communicator is blocking, unless the dimension's
 * nccl_config says otherwise: operations are on the stream when they return. Once the communicator
 * is made, the call takes no lock and lasts a few nanoseconds.
 *
 * Errors: DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED, DM_STATUS_UNSUPPORTED (an
 * offline world), DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT; where the call makes the
 * communicator also DM_STATUS_INVALID_STATE (a CUDA graph is being captured), DM_STATUS_MISMATCH,
 * DM_STATUS_TIMEOUT, DM_STATUS_PEER_LOST and DM_STATUS_CCL.
 */
dm_status dm_get_comm(const struct dm_mesh *mesh, const char *dim, ncclComm_t *comm_out);

/**
 * Gives the function of that name ("ncclAllReduce", ...) in the library that made this mesh's
 * communicators. When the process has several copies of NCCL, the function is of the right one.
 * The call also works on cpu, where no NCCL is linked.
 *
 * Local. Cast *proc_out to the function's type, for example decltype(&ncclAllReduce). The address
 * stays valid until the end of the process. Errors: DM_STATUS_NOT_FOUND (names the library and its
 * version), DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_get_proc(const struct dm_mesh *mesh, const char *symbol, void **proc_out);

/**
 * Gives the function of that name ("ncclMemAlloc", ...) in the library that meshes of device_type
 * will get, before there is a mesh.
 *
 * Local. device_type is "cuda", "cpu" or NULL, as in dm_world_init. This is the library of a world
 * whose options name none. A program that names one (dm_world_options.ccl_library) calls
 * dm_get_proc with a mesh of that world. Errors: DM_STATUS_NOT_FOUND (names the library and its
 * version), DM_STATUS_LIBRARY, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_get_device_proc(const char *device_type, const char *symbol, void **proc_out);

/**
 * Makes the NCCL that is linked into the program the library of device type cuda. resolve returns
 * the address of NCCL's function of that name, or NULL where the program has none.
 *
 * ```c
 * static void *resolve(void *user_data, const char *name) {
 *   return strcmp(name, "ncclAllReduce") == 0 ? (void *)ncclAllReduce : ... : NULL;
 * }
 * dm_set_ccl_resolver(resolve, NULL);
 * ```
 *
 * Local, for the whole process; call it before anything else of device type cuda or NULL. Without
 * this call the library loads a shared NCCL, and a communicator of that copy crashes in the
 * functions that the program links. dm_world_options.ccl_library goes before the resolver, and the
 * resolver before DM_CCL_LIBRARY. This call, dm_get_proc and dm_get_device_proc call resolve, from
 * any thread, until the process ends. resolve NULL removes an earlier resolver. Not every rank
 * needs one, but all ranks need the same release of NCCL. docs/nccl.md lists the functions that
 * must be there. Errors: DM_STATUS_LIBRARY (a function is missing; it is named),
 * DM_STATUS_INVALID_STATE (device type cuda is in use already).
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
 * DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
 * along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
 * the mesh's timeout; cuda: a call of another thread kept the communicator so long),
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
 * Reduces count elements over all ranks of dim, and gives the result to the rank root along dim.
 *
 * Collective over this rank's group along dim. recv is used on the root only and may be NULL
 * elsewhere. In place when send == recv on the root.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
 * along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
 * the mesh's timeout; cuda: a call of another thread kept the communicator so long),
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
 * Copies count elements from the rank root along dim to all ranks of dim.
 *
 * Collective over this rank's group along dim. send is used on the root only and may be NULL
 * elsewhere. In place when send == recv on the root.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
 * along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
 * the mesh's timeout; cuda: a call of another thread kept the communicator so long),
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
 * DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
 * along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
 * the mesh's timeout; cuda: a call of another thread kept the communicator so long),
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
 * DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
 * along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
 * the mesh's timeout; cuda: a call of another thread kept the communicator so long),
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
 * Collective over this rank's group along dim. send and recv have count_per_peer times the size of
 * dim elements each. On cpu the call works in place when send == recv; on cuda send and recv must
 * not overlap.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
 * along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
 * the mesh's timeout; cuda: a call of another thread kept the communicator so long),
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
 * Sends count elements to the rank peer along dim, which receives them with dm_recv.
 *
 * Between two ranks: the peer makes the matching dm_recv. On a lazy mesh the first operation along
 * dim makes the communicator and is collective over the group. On cpu dm_send returns when the
 * receiver has taken everything; where the receiver is on another host, when it has made its call
 * and everything is on its way. So two ranks that both send before they receive block each other
 * until the deadline. The sends and receives of one exchange therefore belong in a group
 * (dm_group_start).
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
 * DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
 * along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
 * the mesh's timeout; cuda: a call of another thread kept the communicator so long),
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
 * Receives count elements from the rank peer along dim, which sends as many with dm_send.
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
 * DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
 * along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
 * the mesh's timeout; cuda: a call of another thread kept the communicator so long),
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
 * order of sends and receives makes them block.
 *
 * No operation of a group may write to a buffer that another operation of the group reads or
 * writes, because their order is not defined. The operations only run when the group ends. While
 * operations are queued in a group, dm_finalize, dm_world_finalize, dm_world_locations and the
 * control plane (dm_barrier, dm_all_gather_bytes ...) are refused on this thread
 * (DM_STATUS_INVALID_STATE). When a thread ends with such a group on cpu, the communicators of its
 * operations fail for all their ranks.
 *
 * Local. Groups nest: only the outermost end runs the operations. A group has all operations of
 * the thread on meshes of one library, also those on raw communicators. Calls that make
 * communicators (dm_init, dm_flatten ...) do not join the group: they are done when they return.
 * Errors: DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
 */
dm_status dm_group_start(const struct dm_mesh *mesh);

/**
 * Ends the group that this thread began, and runs its operations. On cpu it returns when all
 * results are there, and on cuda when all operations are on their streams. It waits for other
 * ranks as its operations do.
 *
 * Errors: the first error of any operation of the group, also of one that was refused when it was
 * called (on cpu none of the group's operations runs then); DM_STATUS_INVALID_STATE (no group was
 * begun); DM_STATUS_UNSUPPORTED (an offline world). Call dm_group_end on every path of the
 * program, because operations of this thread only wait until then.
 *
 * DM_STATUS_ABORTED says that another thread has aborted a mesh with operations in the group. On
 * cpu none of the group's operations runs then; when the abort comes while they run, those on
 * other meshes run to their end. The message says which. On cpu, dm_abort of a mesh also ends the
 * group that the thread of dm_abort has open, so that thread has no group to end after it. On cuda
 * NCCL cannot end a group that holds an operation of a communicator which dm_abort has ended: the
 * call gives DM_STATUS_ABORTED, and so does every later operation of this thread; make those from
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
 * the blocks follow each other. A count may be 0. The count that rank i sends to rank k is the
 * count that k expects from i. On cpu other counts give DM_STATUS_MISMATCH on all ranks, before
 * anything is written (DM_STATUS_INVALID_ARGUMENT in a group of one rank); NCCL does not compare
 * the counts. No block of recv overlaps another block of either buffer.
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh. The lists of counts are copied.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
 * DM_STATUS_MISMATCH (cpu: the counts of two ranks do not fit together, and the message has both;
 * and as in dm_all_reduce), DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (as in
 * dm_all_reduce), DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline
 * world, or a dtype whose size is not known here).
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
 * many elements as its own count says. On cpu other counts give DM_STATUS_MISMATCH on all ranks,
 * before anything is written; NCCL does not compare the counts. Without displacements (NULL) the
 * blocks follow each other. A count may be 0. The blocks of recv do not overlap. In place when
 * send == recv + recv_displs[my rank in dim].
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh. The lists of counts are copied.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
 * DM_STATUS_MISMATCH (cpu: the counts of two ranks do not fit together, and the message has both;
 * and as in dm_all_reduce), DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (as in
 * dm_all_reduce), DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline
 * world, or a dtype whose size is not known here).
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
 * Reduces a block for each rank i of dim over all ranks of dim, and leaves the result on rank i.
 * The block has send_counts[i] elements, which begin send_displs[i] elements after send.
 *
 * Collective over this rank's group along dim. All ranks give the same counts, and each receives
 * as many elements as its own count says. On cpu other counts give DM_STATUS_MISMATCH on all
 * ranks, before anything is written; NCCL does not compare the counts. Without displacements
 * (NULL) the blocks follow each other. A count may be 0. In place when recv == send +
 * send_displs[my rank in dim].
 *
 * Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
 * returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
 * is allowed on a 1-D mesh. The lists of counts are copied.
 *
 * Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
 * DM_STATUS_MISMATCH (cpu: the counts of two ranks do not fit together, and the message has both;
 * and as in dm_all_reduce), DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (as in
 * dm_all_reduce), DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline
 * world, or a dtype whose size is not known here).
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
 * the mesh's timeout. The call goes through the store and uses no communicator. So it works on
 * every device type, makes no communicator on a mesh with DM_INIT_LAZY, and costs some round
 * trips. It does not wait for work on devices. It takes its turn among the calls of the world that
 * make or end something (see "Order" at the head of this file).
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
 * Collective over this rank's group along dim. len may differ from rank to rank and may be 0; data
 * is NULL then, or anything. A rank gives at most 8 MiB, all ranks of the group together 64 MiB.
 * dim NULL is allowed on a 1-D mesh. timeout_ms 0: the mesh's timeout. The bytes travel through
 * the store, which dm_barrier uses, too. So the call is for small things: seeds, IPC handles,
 * names of files, configuration. The caller frees the result with dm_buffers_free.
 *
 * ```c
 * dm_all_gather_bytes(mesh, "tp", &handle, sizeof handle, 0, &handles);
 * dm_buffers_get(handles, peer, &bytes, &len);
 * ```
 *
 * Errors: those of dm_barrier; DM_STATUS_INVALID_ARGUMENT also for too many bytes (when one rank
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
 * The bytes travel through the store, which dm_barrier uses, too. The caller frees the result with
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
 * Collective over the world. timeout_ms 0: the world's timeout. The caller frees the result with
 * dm_buffers_free. Errors: those of dm_world_barrier; DM_STATUS_INVALID_ARGUMENT also for more
 * than 8 MiB of this rank, or 64 MiB of all ranks.
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
 * Collective over the world. data and len are used on the root only; len is at most 8 MiB and may
 * be 0. timeout_ms 0: the world's timeout. The caller frees the result with dm_buffers_free.
 * Errors: those of dm_world_all_gather_bytes; DM_STATUS_MISMATCH also when ranks give different
 * roots.
 */
dm_status dm_world_broadcast_bytes(const struct dm_world *world,
                                   const void *data,
                                   size_t len,
                                   int32_t root,
                                   int64_t timeout_ms,
                                   struct dm_buffers **buffers_out);

/**
 * The number of elements of the result: the number of ranks for an all-gather, 1 for a broadcast.
 * 0 stands for an invalid handle (dm_last_error then says so).
 *
 * Local.
 */
size_t dm_buffers_count(const struct dm_buffers *buffers);

/**
 * Gives one element of the result: its bytes and their number.
 *
 * Local. *data_out is borrowed from the handle: valid until dm_buffers_free. It is never NULL. A
 * NUL, which *len_out does not count, follows the bytes. So text that was sent without a NUL is a
 * string. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (no such element).
 */
dm_status dm_buffers_get(const struct dm_buffers *buffers, size_t index, const void **data_out, size_t *len_out);

/**
 * Frees the result of a call. Local; NULL is a no-op, and so are a handle that was freed before
 * and any handle in a forked child.
 */
void dm_buffers_free(struct dm_buffers *buffers);

/* ---- life and death of a mesh ---- */

/**
 * Returns the asynchronous error of dim's communicator: DM_STATUS_OK while it works, while it is
 * being made, and before it is made (DM_INIT_LAZY). dim NULL: all communicators of the mesh that
 * have no rank outside the view. These are those of its dimensions, and flattened ones. The first
 * error counts.
 *
 * Local: it makes no communicator, and waits for no rank and for no work. On cuda it waits for the
 * answer of ncclCommGetAsyncError, five seconds at most for each communicator; where NCCL works,
 * the answer is there at once. It does not ask the store, so DM_STATUS_OK does not say that all
 * ranks live: dm_lost_ranks and dm_stream_wait ask the store.
 *
 * Errors: DM_STATUS_PEER_LOST (a rank is lost, or has aborted; named where known),
 * DM_STATUS_MISMATCH (an earlier collective failed), DM_STATUS_TIMEOUT (an earlier collective
 * failed, or NCCL does not answer), DM_STATUS_CCL, DM_STATUS_ABORTED, DM_STATUS_NOT_FOUND,
 * DM_STATUS_NOT_MEMBER, DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_INVALID_ARGUMENT (dim
 * is empty or not UTF-8), DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_check(const struct dm_mesh *mesh, const char *dim);

/**
 * Waits until the work on a stream is done, or until it is clear that a lost rank or a failed
 * communicator holds it up. (cudaStreamSynchronize would wait for ever.) DM_STATUS_OK says that
 * the work is done, and that no communicator has failed and no rank was lost or has aborted by
 * then.
 *
 * Local: it makes no communicator, and may be called from several threads. The waiting thread
 * sleeps, and asks the stream (cuStreamQuery) with growing pauses of at most 10 ms. Every 100 ms
 * it asks the communicators for their asynchronous errors. It asks the store for lost ranks after
 * 250 ms, then with growing pauses of at most two seconds, and once more when the work is done.
 * dim names the dimension whose communicator and ranks it asks about. dim NULL stands for the
 * communicators of dm_check with dim NULL, and for the ranks of the view. A communicator that is
 * not made yet is left out. timeout_ms 0: the mesh's timeout. The stream may hold other work, too.
 * A stream that is being captured is refused. On cpu a collective is done when it returns: stream
 * is NULL there, and the call asks the communicators once and returns.
 *
 * When the call fails, the work stays on the stream: dm_abort ends the work. When a rank is lost,
 * the call waits one second more, because work that does not need the rank may end by itself.
 * After that it gives DM_STATUS_PEER_LOST, whether or not the work waits for that rank. So a rank
 * ends its process only after dm_finalize. When another rank of the world is in dm_recover and the
 * work is not done, the call gives DM_STATUS_PEER_LOST with that rank, within about half a second.
 *
 * The call gives DM_STATUS_PEER_LOST also when the work is done, but a rank is lost or has ended
 * the mesh by dm_abort, dm_recover or dm_shrink. Use no result then: when a rank aborts, NCCL may
 * let the other ranks' kernels end with wrong data and without an error, which
 * cudaStreamSynchronize cannot show. Do not use the results either when the work is done and the
 * call gives DM_STATUS_STORE or DM_STATUS_TIMEOUT, because the store does not say whether a rank
 * has ended the mesh. A mesh without a world has no store: there only a communicator can tell of a
 * lost rank. dm_last_error_info has the lost ranks, the dimension and the time that passed.
 *
 * Errors: DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (no rank is known to be lost; or as in dm_check;
 * or the store does not answer when the work is done), DM_STATUS_STORE (the store cannot be
 * reached when the work is done), DM_STATUS_CCL (a communicator has failed), DM_STATUS_DEVICE
 * (work on the stream has failed), DM_STATUS_ABORTED (also when dm_abort on another thread ends
 * the wait), DM_STATUS_MISMATCH (cpu: an earlier collective failed), DM_STATUS_NOT_FOUND,
 * DM_STATUS_NOT_MEMBER, DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT (a negative timeout, a stream on cpu), DM_STATUS_INVALID_STATE (the
 * stream is being captured, or operations wait in a group of this thread), DM_STATUS_DEVICE also
 * where stream is a default stream and another device than the communicators' is current on this
 * thread.
 */
dm_status dm_stream_wait(const struct dm_mesh *mesh, const char *dim, void *stream, int64_t timeout_ms);

/**
 * Ends the root mesh of this view on this rank, without an agreement with other ranks, and wakes
 * every call of this rank that is blocked in any of its views. With the host engine it also wakes
 * such calls on the other ranks, where they get DM_STATUS_PEER_LOST.
 *
 * Local, from any thread; takes no lock that a blocked call holds. On cpu it returns at once. On
 * cuda it waits for calls of this library that are inside NCCL on these communicators, and then
 * for NCCL's own abort, which waits for captured CUDA graphs with work of the communicator and for
 * ranks of this host. The limit for both together is the mesh's timeout, but not less than one
 * second and not more than five. At the limit the call gives DM_STATUS_TIMEOUT, and the
 * communicator ends later. On cuda the call first tells the store, which takes half a second at
 * most and does not count for this limit.
 *
 * The mesh has ended (see "ended" at the head of this file) from the beginning of the call on,
 * also when the call fails. A communicator that another root mesh of this world shares ends for
 * that one as well; a mesh that is made afterwards has new ones. Raw communicators from
 * dm_get_comm must not be used any more. A second abort, or one after dm_finalize, only waits for
 * communicators that have not ended yet; one after dm_shrink does nothing. A dm_init in progress
 * has no mesh yet: dm_world_abort ends it.
 *
 * NCCL's abort returns when the work of this root has left the streams. Where this work lies
 * behind stuck work of another mesh, dm_world_abort ends both. NCCL forbids ending a communicator
 * while a thread is inside a call on it. The library sees to this for its own calls, and the
 * program for its calls on raw communicators.
 *
 * Another rank may wait for this one through the store alone, in a call on this mesh: dm_flatten
 * and the like, the making of a communicator of a DM_INIT_LAZY mesh, or a call of the control
 * plane. Its call ends with DM_STATUS_PEER_LOST, and so does each later one that needs this rank.
 * dm_shrink waits, because this rank may still call dm_shrink, too.
 *
 * Errors: DM_STATUS_TIMEOUT (cuda: a communicator has not ended yet), DM_STATUS_CCL (NCCL's abort
 * failed), DM_STATUS_INVALID_HANDLE. After DM_STATUS_TIMEOUT and DM_STATUS_CCL the mesh has ended,
 * too.
 */
dm_status dm_abort(const struct dm_mesh *mesh);

/**
 * Waits for the outstanding work of this view's root mesh, destroys those of its communicators
 * that no other root mesh of this world shares, and ends the mesh (see "ended" at the head of this
 * file). On cuda it does not wait for work on a communicator that another root mesh shares, or
 * that the program made (dm_from_comms): dm_stream_wait does.
 *
 * Collective over the root mesh; local on a rank outside it, and for a mesh without a world.
 * options NULL: the mesh's timeout. options->num_dim_options must be 0. Errors: DM_STATUS_TIMEOUT
 * and DM_STATUS_MISMATCH as in dm_init (when a rank never made the call, the mesh is as before,
 * and dm_abort ends it; when all ranks made the call and one did not get through it, the mesh has
 * ended here), DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_ABORTED (it has ended already),
 * DM_STATUS_INVALID_STATE (operations wait in a group of this thread, or a CUDA graph is being
 * captured), DM_STATUS_INVALID_ARGUMENT, DM_STATUS_INVALID_HANDLE.
 *
 * A communicator that has failed has no work to wait for: it is aborted, and the call gives the
 * failure on all ranks. Then the call waits one second at most for ranks that have not come. When
 * a rank waits in a collective of the host engine for a rank that has called dm_finalize, both get
 * DM_STATUS_MISMATCH after about a second.
 *
 * When the ranks of a dimension have made different collectives along it, the call gives
 * DM_STATUS_MISMATCH on all ranks of the mesh. The error has the ranks of the group and the
 * dimension, and the message has the first collective that differs, as far as the recordings of
 * the processes show it. The mesh has ended then.
 */
dm_status dm_finalize(const struct dm_mesh *mesh, const struct dm_call_options *options);

/**
 * Gives the world ranks of this view that are known to be lost by now (see "lost" at the head of
 * this file), in ascending order, without a limit of their number. dm_shrink takes this list.
 *
 * Local: it asks the store and the communicators, and waits for half a second at most where they
 * do not answer. *len_out is the number of lost ranks. Other ranks may learn of a loss a moment
 * earlier or later. The call also answers after the mesh has ended. On a mesh without a world
 * (dm_from_comms) it knows only losses that a communicator of the mesh has met. Errors:
 * DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_lost_ranks(const struct dm_mesh *mesh, int32_t *ranks, size_t capacity, size_t *len_out);

/**
 * Gives a mesh without those indices along dim that hold a lost rank, so that the job goes on
 * after a rank has died. Each such index is left out with all its ranks (a whole replica).
 *
 * Collective over the ranks of the mesh that are not lost (where the mesh is a range, over those
 * of the range), also over living ranks whose replica is left out: calls on their handle that need
 * a member give DM_STATUS_NOT_MEMBER. A rank that has called dm_abort is not lost. mesh has all
 * ranks of its root mesh or its range (a view of some of them is refused). dim NULL is allowed on
 * a 1-D mesh. On a mesh (dp=4, tp=2) over ranks 0 .. 7, rank 5 lost and dim "dp" give (dp=3, tp=2)
 * over ranks 0, 1, 2, 3, 6, 7.
 *
 * With num_lost 0, whatever lost_ranks is, the ranks that are left agree on who is lost: all of
 * them leave out the same ranks, whatever each of them knew. The call waits until every rank has
 * made it or is lost. Ranks that are lost meanwhile are left out too. When no rank is lost, all
 * ranks get DM_STATUS_INVALID_STATE; the mesh has ended all the same, so make it anew with
 * dm_init. A rank that lives and that the others take for lost gets DM_STATUS_NOT_MEMBER. When a
 * rank neither calls nor is known to be lost, the others get DM_STATUS_TIMEOUT at the deadline,
 * and dm_last_error_info has the rank.
 *
 * Otherwise lost_ranks are num_lost world ranks of the mesh, the same set on every rank. A rank
 * that is named may be alive: it calls dm_abort, and not dm_shrink. Ranks that name different lost
 * ranks get DM_STATUS_MISMATCH if they wait for each other, and so do ranks with a list and ranks
 * without one. Two sets of ranks that name each other as lost go on apart. A list that is wrong in
 * itself is refused on its caller alone.
 *
 * The call ends the root mesh on this rank as dm_abort does, whether or not it succeeds, unless
 * this rank itself refuses it: calls that are blocked in any of its views return. dm_shrink may
 * therefore be called from any thread (one at a time), and after dm_abort on some or all ranks,
 * but not after dm_finalize. Only dm_world_abort ends the call early. When it fails with
 * DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT or the refusal of a rank, the ranks
 * may call it again on the same handle. The result is a root mesh of its own; its dimensions have
 * the names of this one's, and share no communicator with meshes made before. The caller frees the
 * handle with dm_free.
 *
 * The new mesh inherits this one's timeout, whether it is lazy, and the dm_dim_options of its
 * dimensions. options->dim_options has one element for each dimension of the mesh, and replaces
 * the inherited ones; options->timeout_ms bounds this call. options NULL: the inherited options,
 * and the timeout of the mesh.
 *
 * ncclCommShrink makes the new communicators from those of the mesh. Errors: DM_STATUS_UNSUPPORTED
 * (the library has none: NCCL before 2.27; a mesh without a world), DM_STATUS_INVALID_ARGUMENT (a
 * rank outside the mesh, this rank, nothing left), DM_STATUS_INVALID_STATE (no rank is lost, or a
 * CUDA graph is being captured), DM_STATUS_ABORTED (after dm_finalize, dm_world_finalize or
 * dm_world_abort, and when a dm_recover has given the job another mesh), DM_STATUS_NOT_MEMBER,
 * DM_STATUS_NOT_FOUND, DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT, DM_STATUS_PEER_LOST (a further rank
 * is lost; or the lost rank served the store, as rank 0 may do, and then no call succeeds any
 * more), DM_STATUS_CCL, DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_shrink(const struct dm_mesh *mesh,
                    const char *dim,
                    const int32_t *lost_ranks,
                    size_t num_lost,
                    const struct dm_call_options *options,
                    struct dm_mesh **mesh_out);

/* ---- recovery from lost ranks ---- */

/**
 * Gives the mesh with which the job goes on after ranks were lost: agrees with all living ranks on
 * who is lost, lets spares and new processes take the places, and makes the communicators anew.
 *
 * Collective over the ranks of the world that live, also those that are not in the mesh: spares,
 * and ranks whose replica was left out. Such a rank waits in the call until it gets a place. mesh
 * is the root mesh of the last dm_recover. Before the first dm_recover it may be any root mesh,
 * but the same one on all ranks. All other root meshes of the world end, too: make them anew by
 * dm_init. The call ends the meshes on this rank as dm_abort does, unless this rank refuses the
 * call: calls that are blocked in any of their views return. On the other ranks, calls that are
 * blocked in the store, in the host engine or in dm_stream_wait give DM_STATUS_PEER_LOST with this
 * rank, also where they wait for another rank, which hangs. Dimensions that were made (dm_flatten
 * ...) exist in the new mesh under their names, as long as their sizes still fit, and names of
 * dm_register lead to its views.
 *
 * A rank that holds a place and lives keeps it. A process that has come back as a lost rank (see
 * dm_world_options.join) takes its place. A spare, a rank of the world that is not in the
 * mesh, takes an empty place where its replica becomes whole by that. A place that is still empty
 * after options->replace_ms leaves its whole index of options->dim out of the mesh, and the living
 * ranks of that index get a handle for which calls that need a member give DM_STATUS_NOT_MEMBER.
 * They call dm_recover again, and come back when the index is whole again. A world rank belongs to
 * a process for its life; the coordinate belongs to the place.
 *
 * With DM_RECOVER_GROW new processes under ranks that the job did not have fill further indices of
 * the outermost dimension, when an index gets all of its ranks. The ranks that are there keep
 * their coordinates, and dm_world_size grows. dm_waiting counts such processes when an index is
 * complete.
 *
 * All ranks get the same epoch, or the same error. A rank that was taken for lost or left out gets
 * DM_STATUS_NOT_MEMBER: the others go on without it, and it ends. Losses during the call begin it
 * anew within its timeout. After an error the ranks may call it again on the same handle. The new
 * mesh has the timeout of this one, is lazy where this one is, and its dimensions have the
 * dm_dim_options of this one's.
 *
 * From the first recovery on, collective calls of the world (dm_init, dm_world_barrier ...) are
 * those of the ranks of the mesh. dm_world_finalize of these ranks ends the job: the ranks that
 * wait in dm_recover get DM_STATUS_ABORTED, and their world has ended.
 *
 * options NULL: the defaults. recovery_out may be NULL; dm_get_recovery gives the same later. The
 * caller frees the handle with dm_free.
 *
 * Errors: DM_STATUS_INVALID_STATE (nothing is to be recovered: this rank knows of no lost rank, of
 * no failed communicator and of nobody who waits to join, and then the mesh stays as it is; too
 * few ranks are left; no rank has the state of some shard; another thread is in the call; a CUDA
 * graph is being captured), DM_STATUS_TIMEOUT (names the ranks that did not come),
 * DM_STATUS_MISMATCH (the ranks' options or meshes differ; says which rank asked for what),
 * DM_STATUS_NOT_MEMBER, DM_STATUS_PEER_LOST (the store went with a lost rank: no call goes on),
 * DM_STATUS_ABORTED (the job has ended; dm_world_abort; a mesh of an earlier epoch),
 * DM_STATUS_UNSUPPORTED (a mesh without a world, an offline world, a world over
 * dm_store_callbacks without compare_set), DM_STATUS_NOT_FOUND (dim), DM_STATUS_INVALID_ARGUMENT
 * (also another dim than before, and a root mesh that no recovery gave), DM_STATUS_CCL,
 * DM_STATUS_INVALID_HANDLE.
 */
dm_status dm_recover(const struct dm_mesh *mesh,
                     const struct dm_recover_options *options,
                     struct dm_mesh **mesh_out,
                     struct dm_recovery *recovery_out);

/**
 * Gives what the recovery that made this mesh has come to.
 *
 * Local; it answers also after the mesh has ended. `recovery_out->struct_size` is set by the
 * caller (DM_RECOVERY_INIT). For a mesh that no recovery made, nobody was lost and nobody has
 * joined. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_get_recovery(const struct dm_mesh *mesh, struct dm_recovery *recovery_out);

/* ---- meshes by name ---- */

/**
 * Keeps a view under a name, for dm_lookup anywhere in this process. The view replaces an earlier
 * one of that name. dm_unregister removes the view.
 *
 * Local. The handle may be freed: the registry keeps the view, and with it the view's world, until
 * dm_unregister. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (name is NULL or
 * empty).
 */
dm_status dm_register(const struct dm_mesh *mesh, const char *name);

/**
 * Forgets the view that was registered under that name.
 *
 * Local. Errors: DM_STATUS_NOT_FOUND (lists the names there are), DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_unregister(const char *name);

/**
 * Gives a new handle of the view that was registered under that name. The caller frees it with
 * dm_free.
 *
 * Local. Errors: DM_STATUS_NOT_FOUND (lists the names there are), DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_lookup(const char *name, struct dm_mesh **mesh_out);

/* ---- events and counters ---- */

/**
 * Sets the handler of this process, in place of an earlier one: the library calls
 * handler(user_data, event) for each event. If handler is NULL, the process has no handler any
 * more.
 *
 * Local. The library calls the handler on one thread of its own, "dm-events", which exists while
 * there is a handler or a dm_events, and which blocks all signals but those of faults. So the
 * handler gets one event at a time, in the order in which the library noticed the events. The
 * first events are JOINED, one for each world that this process is in. Then come the events that
 * wait for the earlier handler, but not SLOW, which comes again when a call has waited for the new
 * slow_ms. event and its strings are valid during the call. When 256 events wait because the
 * handler is slow, further ones are left out, and dm_event.dropped says how many. But an event of
 * another kind takes the place of the last SLOW.
 *
 * A slow call is found while its thread is blocked: in a collective of the host engine, in a call
 * on which the ranks agree (dm_init, dm_barrier ...), in dm_recover or in dm_stream_wait. On cuda
 * a slow collective is found where NCCL reports its kernels (NCCL_PROFILER_PLUGIN). A group that
 * has several running calls gives events for the oldest one, because the others may wait for that
 * call. Ranks that end after dm_finalize of this rank's last mesh give no event. The event of
 * another rank's dm_abort comes within about two seconds.
 *
 * The library holds no lock while the handler runs: it may call all local functions, dm_abort,
 * dm_world_abort and dm_set_event_handler among them. The handler should return soon and make no
 * collective call, because the thread notices nothing while the handler runs. A C++ exception
 * that leaves the handler ends the process, and longjmp out of the handler is not allowed. After
 * dm_set_event_handler has replaced the handler, user_data may be freed, unless
 * dm_set_event_handler was called from inside the handler. Remove the handler before its code is
 * unloaded and before main returns. While there is a handler, and until "dm-events" has ended, a
 * forked child may make no calls (see "Forks").
 *
 * options NULL: the defaults. Without a handler and a queue there is no thread, and an event
 * costs one load of a flag.
 *
 * Errors: DM_STATUS_TIMEOUT (the new handler is set, but an earlier one has been running for 5 s:
 * keep its user_data until a later call, which waits again, returns DM_STATUS_OK),
 * DM_STATUS_INVALID_ARGUMENT, DM_STATUS_EXHAUSTED (no thread).
 */
dm_status dm_set_event_handler(void (*handler)(void *user_data, const struct dm_event *event),
                               void *user_data,
                               const struct dm_event_options *options);

/**
 * Opens a queue that keeps the events of this process from now on, for programs with a loop of
 * their own. It works beside a handler and other queues, each of which gets every event.
 *
 * Local. The first events are JOINED, one for each world that this process is in. The queue holds
 * 256 events. While it is full, later events are left out, and the next event that finds a place
 * has their number in dm_event.dropped. An event that is not SLOW takes the place of the last
 * SLOW. The thread "dm-events" fills it (see dm_set_event_handler). options NULL: the defaults.
 * The caller frees the handle with dm_events_free. Errors: DM_STATUS_INVALID_ARGUMENT,
 * DM_STATUS_EXHAUSTED (no descriptor or thread).
 */
dm_status dm_events_open(const struct dm_event_options *options, struct dm_events **events_out);

/**
 * Gives a descriptor that is readable while the queue has events, for poll, select and epoll.
 *
 * Local. Borrowed: the descriptor is closed by dm_events_free. Read nothing from it; call
 * dm_events_next until it gives DM_EVENT_NONE. Errors: DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT (fd_out is NULL).
 */
dm_status dm_events_fd(const struct dm_events *events, int32_t *fd_out);

/**
 * Takes the next event of the queue. Where there is no event, event_out->kind is DM_EVENT_NONE.
 *
 * Local. The call waits for an event for timeout_ms milliseconds at most; with 0 it does not
 * wait. `event_out->struct_size` is set by the caller (DM_EVENT_INIT). The strings and the array
 * are borrowed: valid until this thread's next dm_events_next on any queue. A queue may be read
 * by several threads, and each event goes to one of them. Errors: DM_STATUS_INVALID_HANDLE,
 * DM_STATUS_INVALID_ARGUMENT (event_out is NULL, its struct_size is wrong, a negative timeout),
 * DM_STATUS_INVALID_STATE (the calling thread ends, and its thread-locals are gone).
 */
dm_status dm_events_next(const struct dm_events *events, int64_t timeout_ms, struct dm_event *event_out);

/**
 * Frees a queue with the events in it, and closes its descriptor. NULL, and a handle that was
 * freed, do nothing.
 *
 * Local. A dm_events_next that waits on another thread ends at its timeout.
 */
void dm_events_free(struct dm_events *events);

/**
 * Gives the counters of this process as text in Prometheus' format (version 0.0.4, for an HTTP
 * answer of the type "text/plain; version=0.0.4"): its worlds, and for each group of ranks how
 * many calls this rank has begun, the number of the last call that has ended, and for how long
 * the oldest running call has run. docs/events.md lists the counters.
 *
 * Local. *len_out counts the NUL. The counters are those of the recording (docs/recording.md).
 * Between two calls the text may grow, so ask again after DM_STATUS_BUFFER_TOO_SMALL. Errors:
 * DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_UNSUPPORTED (DM_RECORDER=0), DM_STATUS_INVALID_ARGUMENT.
 */
dm_status dm_metrics(char *buffer, size_t capacity, size_t *len_out);

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
#define DM_WORLD_INFO_INIT { sizeof(dm_world_info), 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, 0, 0 }
/**
 * A dm_store_callbacks without functions: set, get and add are to be filled in.
 */
#define DM_STORE_CALLBACKS_INIT { sizeof(dm_store_callbacks), NULL, NULL, NULL, NULL, NULL, NULL, NULL }
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
 * A dm_recover_options in which everything is the default.
 */
#define DM_RECOVER_OPTIONS_INIT { sizeof(dm_recover_options), 0, 0, NULL, 0, 0, 0, NULL, 0, 0, 0 }
/**
 * A dm_recovery to pass to dm_recover or dm_get_recovery.
 */
#define DM_RECOVERY_INIT { sizeof(dm_recovery), -1, -1, NULL, 0, NULL, 0, NULL, NULL, 0, -1, 0 }
/**
 * A dm_event to pass to dm_events_next.
 */
#define DM_EVENT_INIT { sizeof(dm_event), 0, -1, 0, 0, 0, 0, NULL, 0, NULL, NULL, NULL, -1, -1.0, 0, "" }
/**
 * A dm_event_options in which everything is the default.
 */
#define DM_EVENT_OPTIONS_INIT { sizeof(dm_event_options), 0, 0, 0 }
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
