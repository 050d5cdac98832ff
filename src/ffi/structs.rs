//! The structs of the C contract, each after the flags that it takes. Their layout and the numbers
//! are part of the ABI: a struct grows only at its end.

use std::ffi::{c_char, c_void};

use super::types::{dm_status, dm_world};

/// The failure of a call, filled by dm_last_error_info. Initialise with DM_ERROR_INFO_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_error_info {
    /// sizeof(dm_error_info), set by the caller.
    pub struct_size: usize,
    /// The failing call's status; DM_STATUS_OK when no call of this thread failed.
    pub status: dm_status,
    /// The communicator library's ncclResult_t; 0 when the library was not involved.
    pub ccl_result: i32,
    /// The device driver's code (CUresult); 0 when the driver was not involved.
    pub device_error: i32,
    /// The errno; 0 when the operating system was not involved.
    pub os_error: i32,
    /// One line with the values. Borrowed: valid until this thread's next failing call.
    pub message: *const c_char,
    /// The world ranks that the failure is about, in ascending order: those that were lost,
    /// aborted, did not come, failed, or made another call than the others. At most 512. NULL
    /// when there are none. Borrowed: valid until this thread's next failing call.
    pub ranks: *const i32,
    /// The number of elements of ranks.
    pub num_ranks: usize,
    /// Those of ranks that are lost (see "lost" at the head of this file), in ascending order. A
    /// rank that only aborted a mesh, did not come or made another call is not lost. NULL when
    /// there are none. Borrowed: valid until this thread's next failing call.
    pub lost_ranks: *const i32,
    /// The number of elements of lost_ranks.
    pub num_lost: usize,
    /// The name of the dimension along which the failing call was made; NULL for a call that has no
    /// dimension. Borrowed: valid until this thread's next failing call.
    pub dim: *const c_char,
    /// How long the failing call waited for other ranks, in seconds; negative when it did not wait.
    pub waited_seconds: f64,
    /// The number of the failing collective call, as the message shows it ("as call 7"); -1 when
    /// the call has no number.
    pub call: i64,
}

/// World flag: an offline world, for layouts and plans of any rank of any world, on one machine. It
/// has no rendezvous and no communicators. Calls that are collective elsewhere are local. So
/// dm_flatten, dm_unflatten, dm_reshape and dm_slice_range also work on a view that this rank is
/// not in; in other worlds that gives DM_STATUS_NOT_MEMBER.
pub const DM_WORLD_OFFLINE: u32 = 1;

/// World flag: dm_world_options.device names the device, whatever the current device of a thread
/// is. A call that makes communicators makes that device current on its thread. With RCCL the
/// program itself makes it current. The flag is an error on cpu, and an offline world ignores it.
pub const DM_WORLD_DEVICE: u32 = 2;

/// How a process joins: the environment variable DM_JOIN says it (auto, new or running). Without
/// that variable, the process joins the running job if the store's server knows that the earlier
/// process of its rank is lost. Otherwise the process joins a new world.
pub const DM_JOIN_AUTO: u32 = 0;

/// The process joins a new world, together with all its ranks.
pub const DM_JOIN_NEW: u32 = 1;

/// The process joins the running job in place of the process that had its rank before. Where no job
/// runs yet, the process joins a new world.
pub const DM_JOIN_RUNNING: u32 = 2;

/// How to join a world. Initialise with DM_WORLD_OPTIONS_INIT; zero means the default everywhere.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_world_options {
    /// sizeof(dm_world_options), set by the caller.
    pub struct_size: usize,
    /// DM_WORLD_ flags.
    pub flags: u32,
    /// Number of ranks. 0: rank, world size and local rank come from the launcher's environment.
    pub world_size: i32,
    /// This process's rank, 0 to world_size - 1, when world_size is given, and 0 otherwise.
    pub rank: i32,
    /// This process's rank on its host, from which its device follows, when world_size is given,
    /// and 0 otherwise. A rank that leaves it at 0 gets a number that no other rank of its host
    /// has, the lowest world rank first. So it may stay 0 on all ranks.
    pub local_rank: i32,
    /// The index of the device on which communicators are made, among those that this process sees;
    /// used when flags has DM_WORLD_DEVICE, and 0 otherwise. Without that flag the world takes the
    /// current device of the thread that joins, or where that thread has none, the device whose
    /// index is the local rank modulo the number of devices.
    pub device: i32,
    /// DM_JOIN_AUTO, DM_JOIN_NEW or DM_JOIN_RUNNING: whether this process joins a running job.
    pub join: u32,
    /// How long dm_world_init may wait, and after it each call of the world and its meshes that has
    /// no timeout of its own, in milliseconds. 0: 600000.
    pub timeout_ms: i64,
    /// Where the ranks meet: "env://" (NULL means this), "tcp://host:port" (rank 0 serves) or
    /// "file:///path".
    pub init_method: *const c_char,
    /// A communicator library with NCCL's C API, by path or SONAME; "python": the NCCL wheel of the
    /// active Python environment. NULL: the one that the environment variable DM_CCL_LIBRARY names
    /// in the same way, else on cuda a copy that is in this process already or the usual names
    /// (libnccl.so.2, librccl.so.1), and on cpu the embedded host engine.
    pub ccl_library: *const c_char,
    /// NULL, or the caller's own store. NULL stands for the store that init_method names.
    pub store: *const dm_store_callbacks,
    /// NULL, or where dm_world_init writes a token before it waits for anybody. Another thread that
    /// gives this token to dm_world_abort ends the joining: dm_world_init returns
    /// DM_STATUS_ABORTED. The token is good for nothing else, and is not live any more once
    /// dm_world_init has returned. The write is atomic, so the other thread may read the token at
    /// any time if it does so atomically.
    pub joining_out: *mut *mut dm_world,
}

/// The facts that dm_world_get_info tells about a world. Initialise with DM_WORLD_INFO_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_world_info {
    /// sizeof(dm_world_info), set by the caller.
    pub struct_size: usize,
    /// This process's rank in the world, 0 to size - 1.
    pub rank: i32,
    /// The number of ranks in the world.
    pub size: i32,
    /// This rank's number among the ranks of its host: what the launcher or dm_world_options says.
    /// Where neither says a local rank, the rank gets a number that is free on its host, the lowest
    /// world rank first.
    pub local_rank: i32,
    /// The number of ranks on this host: what the launcher says where it says the local rank too,
    /// otherwise the number of ranks that run on this host. In an offline world all ranks count as
    /// ranks of one host.
    pub local_size: i32,
    /// The number of this host, 0 to num_hosts - 1. Hosts are numbered in the order of the lowest
    /// rank on each. On device type cuda the containers of one machine are one host. On device
    /// type cpu ranks are on one host if they share memory, as for dm_world_locations.
    pub host: i32,
    /// The number of hosts on which the world's ranks run.
    pub num_hosts: i32,
    /// The index of this rank's device, among those that this process sees; -1 on cpu, in an
    /// offline world, and beside RCCL where dm_world_options names none.
    pub device: i32,
    /// The version of the communicator library as ncclGetVersion gives it (22707 is 2.27.7); 0 in
    /// an offline world.
    pub ccl_version: i32,
    /// "cuda" or "cpu". Static.
    pub device_type: *const c_char,
    /// The communicator library: its path or SONAME, or the name of the embedded host engine; "" in
    /// an offline world. Borrowed from the world: valid until its last handle and mesh are freed.
    pub library: *const c_char,
    /// The epoch in which this process is: 0 until a recovery has given a mesh (dm_recover). A
    /// process that joins a running job is in no epoch before its dm_init has returned, and 0
    /// stands here.
    pub epoch: i64,
    /// The number of processes that have joined the world under this rank before this one. 0: this
    /// is the first process of its rank.
    pub ticket: i64,
}

/// The get of dm_store_callbacks returns this value when the key did not come in time.
pub const DM_STORE_NOT_YET: i32 = 100;

/// Makes any key-value service of the caller (JAX's, MPI's, etcd ...) the store in which the ranks
/// meet.
///
/// Keys are short printable ASCII, and values have at most 8 MiB. The functions may be called from
/// any thread of this process, and from several threads at once. set, get, add and compare_set
/// return 0 for success, and get returns DM_STORE_NOT_YET when the key did not come in time. Any
/// other number says that the service is broken: the call that needed the service fails at once
/// with DM_STATUS_STORE, and the message has the number. Keys and values belong to the library and
/// are valid during the call, so a function copies what it keeps. A function must return soon (get
/// by its timeout), because no deadline and no abort of the library ends it. If dm_world_init fails
/// or is aborted, it returns only after its last call of these functions. Until then dm_world_init
/// tells the other ranks of the failure, which takes at most about ten seconds if the functions
/// return soon. A C++ exception may not leave a function. Initialise with DM_STORE_CALLBACKS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_store_callbacks {
    /// sizeof(dm_store_callbacks), set by the caller.
    pub struct_size: usize,
    /// Passed to every function.
    pub user_data: *mut c_void,
    /// Stores len bytes under key, replacing what was there.
    pub set: Option<
        unsafe extern "C" fn(user_data: *mut c_void, key: *const c_char, value: *const c_void, len: usize) -> i32,
    >,
    /// Waits for key, timeout_ms milliseconds at most; with 0 it looks once. When the key is there,
    /// copies at most capacity bytes of its value to value, writes the length of the whole value to
    /// len_out, and returns 0. The library calls again with a larger buffer where that length is
    /// more than capacity. When the key did not come in time, the function returns DM_STORE_NOT_YET
    /// and writes nothing.
    pub get: Option<
        unsafe extern "C" fn(
            user_data: *mut c_void,
            key: *const c_char,
            value: *mut c_void,
            capacity: usize,
            len_out: *mut usize,
            timeout_ms: i64,
        ) -> i32,
    >,
    /// Adds amount to the integer under key (0 when there is none), atomically over all ranks, and
    /// writes the sum to value_out. The integer is the value of the key, in decimal digits: get
    /// gives it, and remove removes it.
    pub add: Option<
        unsafe extern "C" fn(user_data: *mut c_void, key: *const c_char, amount: i64, value_out: *mut i64) -> i32,
    >,
    /// Called exactly once, when the world is gone: inside the dm_world_free that frees its last
    /// handle, or on a thread of the library where a mesh was freed last. No other function is
    /// called any more by then. This function is not called where dm_world_init failed. May be
    /// NULL.
    pub drop: Option<unsafe extern "C" fn(user_data: *mut c_void)>,
    /// Removes key; a key that is not there is no error. The library ignores the number that the
    /// function returns. May be NULL: then everything that the library has stored stays in the
    /// caller's service, some kilobytes for each collective call.
    pub remove: Option<unsafe extern "C" fn(user_data: *mut c_void, key: *const c_char) -> i32>,
    /// Stores len bytes under key if the value there is the expected one, atomically over all
    /// ranks; an expected_len of 0 means that the key is not there. Afterwards copies at most
    /// capacity bytes of the value that is now under key to the buffer stands, and writes the
    /// length of that whole value to len_out (0: the key is not there). Returns 0, also where the
    /// value was another one. dm_recover needs this function: with add and set alone a rank that
    /// dies between the two would leave a decision that nobody can make any more. All ranks have
    /// it, or none has. May be NULL: then dm_recover is DM_STATUS_UNSUPPORTED.
    pub compare_set: Option<
        unsafe extern "C" fn(
            user_data: *mut c_void,
            key: *const c_char,
            expected: *const c_void,
            expected_len: usize,
            value: *const c_void,
            len: usize,
            stands: *mut c_void,
            capacity: usize,
            len_out: *mut usize,
        ) -> i32,
    >,
}

/// Dimension flag: never share this dimension's communicator with one over the same ranks.
pub const DM_DIM_OWN_COMM: u32 = 1;

/// Options of one dimension's communicator. Initialise with DM_DIM_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_dim_options {
    /// sizeof(dm_dim_options), set by the caller; also the distance to the next element of an array
    /// of them.
    pub struct_size: usize,
    /// DM_DIM_ flags.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
    /// NULL or the caller's ncclConfig_t. The library copies the config by the config's own size
    /// field, with its strings (netName, commName). A dimension with a config does not share its
    /// communicator. All fields but the names must be the same on every rank.
    pub nccl_config: *const c_void,
    /// The communicator's name in the library's logs. NULL: "mesh_" and the dimension's name.
    pub comm_name: *const c_char,
}

/// Mesh flag: make a dimension's communicator at the dimension's first dm_get_comm or collective.
/// That first call is collective over this rank's group along the dimension. Dimensions that are
/// made later (dm_flatten ...) are lazy too.
pub const DM_INIT_LAZY: u32 = 1;
/// Mesh flag of dm_from_comms: the library ends the communicators with the mesh (dm_finalize,
/// dm_abort, dm_shrink, or the end of its world). When dm_from_comms fails, they stay the caller's.
pub const DM_INIT_OWN_COMMS: u32 = 2;

/// Options of a mesh. Initialise with DM_INIT_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_init_options {
    /// sizeof(dm_init_options), set by the caller.
    pub struct_size: usize,
    /// DM_INIT_ flags.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
    /// NULL: the process's default world of that device type, which dm_init joins from the
    /// environment at first use; for dm_from_comms no world at all.
    pub world: *mut dm_world,
    /// NULL, or n different world ranks, row-major in the mesh's shape; n is the product of the
    /// shape. NULL stands for the ranks 0 .. n-1.
    pub ranks: *const i32,
    /// The number of elements of ranks: n; 0 where ranks is NULL.
    pub num_ranks: usize,
    /// NULL, or one element for each dimension of the mesh.
    pub dim_options: *const dm_dim_options,
    /// The number of elements of dim_options: the number of the mesh's dimensions; 0 where
    /// dim_options is NULL.
    pub num_dim_options: usize,
    /// How long each collective call of the mesh may wait on the host, in milliseconds. 0: as long
    /// as the world's. The timeout does not bound work that a call on cuda has put on a stream: see
    /// dm_stream_wait and dm_abort.
    pub timeout_ms: i64,
}

/// Options of a collective call that gives a mesh new dimensions, or ends the mesh (dm_finalize,
/// dm_shrink). Initialise with DM_CALL_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_call_options {
    /// sizeof(dm_call_options), set by the caller.
    pub struct_size: usize,
    /// There are no flags yet: 0.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
    /// How long the call may take, in milliseconds. 0: as long as the mesh's calls.
    pub timeout_ms: i64,
    /// NULL, or one element for each dimension that the call makes. dm_finalize makes none.
    pub dim_options: *const dm_dim_options,
    /// The number of elements of dim_options; 0 where dim_options is NULL.
    pub num_dim_options: usize,
}

/// The options of dm_plan_ranks. Initialise with DM_PLAN_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_plan_options {
    /// sizeof(dm_plan_options), set by the caller.
    pub struct_size: usize,
    /// There are no flags yet: 0.
    pub flags: u32,
    /// The number of ranks in the world, and of paths in locations.
    pub world_size: i32,
    /// The path of each world rank, from far to near: "rack1/host3/nvl0".
    pub locations: *const *const c_char,
    /// The size of each dimension of the mesh. The product is at most world_size.
    pub shape: *const i32,
    /// The number of elements of shape, and of traffic.
    pub ndim: usize,
    /// NULL, or a weight for each dimension: how much a rank exchanges along it.
    pub traffic: *const u32,
}

/// Placement: every rank along the mesh dimension holds the same.
pub const DM_REPLICATE: i32 = 0;
/// Placement: the mesh dimension splits a dimension of the tensor.
pub const DM_SHARD: i32 = 1;
/// Placement: every rank along the mesh dimension holds a part of a sum (or of another reduction)
/// that is still to be made. Each part has the whole shape.
pub const DM_PARTIAL: i32 = 2;

/// How one mesh dimension splits a tensor; dm_local_shard takes one for each dimension.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_placement {
    /// DM_REPLICATE, DM_SHARD or DM_PARTIAL.
    pub kind: i32,
    /// For DM_SHARD: the dimension of the tensor, from 0. The other kinds ignore it.
    pub tensor_dim: i32,
    /// For DM_SHARD, where several mesh dimensions shard one tensor_dim: the dimension with the
    /// lowest order splits first, and equal orders split in the order of the mesh. With all orders
    /// 0 the dimensions split from left to right, as in PyTorch.
    pub order: i32,
    /// Must be 0. An initialiser that ends before this field, as in `{DM_SHARD, 0, 1}`, makes the
    /// field 0.
    pub reserved: [u32; 5],
}
