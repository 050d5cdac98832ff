//! The part of UCP's C interface that the wire uses: the layouts of UCX 1.13, and its functions.
//!
//! Later releases have only appended fields to these structures. A mask in front of each structure
//! says which fields are set, so the library reads no field that is missing here.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`: 0 for success, 1 for an operation under way, and otherwise an error below 0.
pub(super) type Status = i8;

/// `UCS_OK`.
pub(super) const OK: Status = 0;
/// `UCS_ERR_BUSY`: the worker cannot be armed, because events wait.
pub(super) const BUSY: Status = -15;
/// The errors that mean that the peer's process has ended, as far as its host says:
/// `UCS_ERR_UNREACHABLE`, `UCS_ERR_REJECTED`, `UCS_ERR_NOT_CONNECTED` and
/// `UCS_ERR_CONNECTION_RESET`.
pub(super) const ENDED: [Status; 4] = [-6, -23, -24, -25];

/// `UCS_ERR_ENDPOINT_TIMEOUT`. UCX's TCP transport reports a closed connection by this error.
/// UCX's RDMA transports report by this error a peer that does not answer.
pub(super) const NO_ANSWER: Status = -80;

/// `UCP_FEATURE_WAKEUP` and `UCP_FEATURE_AM`.
pub(super) const FEATURES: u64 = 1 << 4 | 1 << 6;
/// `UCS_THREAD_MODE_SERIALIZED`: several threads use the worker, one at a time.
pub(super) const SERIALIZED: c_int = 1;
/// `UCP_WORKER_ADDRESS_FLAG_NET_ONLY`: the address leaves out transports over shared memory.
pub(super) const NET_ONLY: u32 = 1;
/// `UCP_ERR_HANDLING_MODE_PEER`: an endpoint reports that its peer is gone.
pub(super) const ERRORS_OF_PEER: c_int = 1;
/// `UCP_EP_CLOSE_FLAG_FORCE`: an endpoint is closed without the peer.
pub(super) const CLOSE_FORCE: u32 = 1;
/// `UCP_AM_SEND_FLAG_REPLY`: the receiver gets an endpoint for its answer.
pub(super) const SEND_REPLY: u32 = 1;
/// `UCP_AM_SEND_FLAG_EAGER`: the message goes at once.
pub(super) const SEND_EAGER: u32 = 1 << 1;
/// `UCP_AM_SEND_FLAG_RNDV`: the receiver names the buffer before the message goes.
pub(super) const SEND_RNDV: u32 = 1 << 2;
/// `UCP_AM_RECV_ATTR_FIELD_REPLY_EP`.
pub(super) const HAS_REPLY: u64 = 1;
/// `UCP_AM_RECV_ATTR_FLAG_RNDV`: the data are at the sender until the receiver takes them.
pub(super) const IS_RNDV: u64 = 1 << 17;
/// `UCP_OP_ATTR_FIELD_CALLBACK`.
pub(super) const OP_CALLBACK: u32 = 1 << 1;
/// `UCP_OP_ATTR_FIELD_USER_DATA`.
pub(super) const OP_USER_DATA: u32 = 1 << 2;
/// `UCP_OP_ATTR_FIELD_FLAGS`.
pub(super) const OP_FLAGS: u32 = 1 << 4;

/// `ucp_params_t`.
#[repr(C)]
pub(super) struct ContextParams {
    /// Which fields are set: features (1 << 0) and name (1 << 8).
    pub(super) fields: u64,
    /// The features that the program uses.
    pub(super) features: u64,
    /// Not used here.
    pub(super) request_size: usize,
    /// Not used here.
    pub(super) request_init: usize,
    /// Not used here.
    pub(super) request_cleanup: usize,
    /// Not used here.
    pub(super) tag_sender_mask: u64,
    /// Not used here.
    pub(super) workers_shared: c_int,
    /// Not used here.
    pub(super) estimated_endpoints: usize,
    /// Not used here.
    pub(super) estimated_per_node: usize,
    /// The name of the context in UCX's own messages.
    pub(super) name: *const c_char,
}

/// `ucp_worker_params_t`.
#[repr(C)]
pub(super) struct WorkerParams {
    /// Which fields are set: the thread mode (1 << 0).
    pub(super) fields: u64,
    /// How threads use the worker.
    pub(super) thread_mode: c_int,
    /// Not used here.
    pub(super) cpu_mask: [u64; 16],
    /// Not used here.
    pub(super) events: c_uint,
    /// Not used here.
    pub(super) user_data: usize,
    /// Not used here.
    pub(super) event_fd: c_int,
    /// Not used here.
    pub(super) flags: u64,
    /// Not used here.
    pub(super) name: *const c_char,
    /// Not used here.
    pub(super) am_alignment: usize,
    /// Not used here.
    pub(super) client_id: u64,
}

/// `ucp_worker_attr_t`.
#[repr(C)]
pub(super) struct WorkerAttributes {
    /// Which fields are asked for: the address (1 << 1) and its flags (1 << 2).
    pub(super) fields: u64,
    /// Not used here.
    pub(super) thread_mode: c_int,
    /// Which transports the address has.
    pub(super) address_flags: u32,
    /// The address, which `ucp_worker_release_address` frees.
    pub(super) address: *mut c_void,
    /// The length of the address in bytes.
    pub(super) address_bytes: usize,
    /// Not used here.
    pub(super) max_am_header: usize,
    /// Not used here.
    pub(super) name: [c_char; 32],
    /// Not used here.
    pub(super) max_debug_string: usize,
}

/// Runs when an endpoint's peer is gone.
pub(super) type OnError = unsafe extern "C" fn(argument: *mut c_void, endpoint: *mut c_void, status: Status);

/// `ucp_ep_params_t`.
#[repr(C)]
pub(super) struct EndpointParams {
    /// Which fields are set: the address (1 << 0), the error mode (1 << 1) and handler (1 << 2).
    pub(super) fields: u64,
    /// The peer's address.
    pub(super) address: *const c_void,
    /// How the endpoint treats errors.
    pub(super) error_mode: c_int,
    /// Runs when the peer is gone.
    pub(super) on_error: Option<OnError>,
    /// The first argument of `on_error`.
    pub(super) argument: *mut c_void,
    /// Not used here.
    pub(super) user_data: usize,
    /// Not used here.
    pub(super) flags: c_uint,
    /// Not used here.
    pub(super) socket_address: [usize; 2],
    /// Not used here.
    pub(super) connection_request: usize,
    /// Not used here.
    pub(super) name: *const c_char,
    /// Not used here.
    pub(super) local_socket_address: [usize; 2],
}

/// The callback of an operation. Its second form has a length in third place, before the argument.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Callback {
    /// Runs when a send, a flush or a close is over.
    pub(super) send: unsafe extern "C" fn(request: *mut c_void, status: Status, argument: *mut c_void),
    /// Runs when the data of a message have arrived.
    pub(super) receive: unsafe extern "C" fn(request: *mut c_void, status: Status, bytes: usize, argument: *mut c_void),
}

/// `ucp_request_param_t`.
#[repr(C)]
pub(super) struct OpParams {
    /// Which fields are set, and how the operation runs.
    pub(super) attributes: u32,
    /// The operation's own flags.
    pub(super) flags: u32,
    /// Not used here.
    pub(super) request: usize,
    /// Runs when the operation is over, unless it was over at once.
    pub(super) callback: Callback,
    /// Not used here.
    pub(super) datatype: u64,
    /// The last argument of the callback.
    pub(super) user_data: *mut c_void,
    /// Not used here.
    pub(super) reply_buffer: usize,
    /// Not used here.
    pub(super) memory_type: c_int,
    /// Not used here.
    pub(super) info: usize,
    /// Not used here.
    pub(super) memory: usize,
}

/// `ucp_am_recv_param_t`.
#[repr(C)]
pub(super) struct MessageParams {
    /// The kind of the message: [`IS_RNDV`], and whether there is an endpoint for an answer.
    pub(super) attributes: u64,
    /// The endpoint for an answer.
    pub(super) reply: *mut c_void,
}

/// Runs when a message arrives.
pub(super) type OnMessage = unsafe extern "C" fn(
    argument: *mut c_void,
    header: *const c_void,
    header_bytes: usize,
    data: *mut c_void,
    bytes: usize,
    params: *const MessageParams,
) -> Status;

/// `ucp_am_handler_param_t`.
#[repr(C)]
pub(super) struct HandlerParams {
    /// Which fields are set: number, flags, function and argument (15).
    pub(super) fields: u64,
    /// The number of the handler, which a sender names.
    pub(super) id: c_uint,
    /// Always 1, which is `UCP_AM_FLAG_WHOLE_MSG`.
    pub(super) flags: u32,
    /// The handler.
    pub(super) function: Option<OnMessage>,
    /// The handler's first argument.
    pub(super) argument: *mut c_void,
}

/// The result of a call that begins an operation.
pub(super) enum Begun {
    /// The operation is over.
    Done,
    /// The operation has failed.
    Failed(Status),
    /// The operation is under way, and its callback will run.
    Pending,
}

/// Reads a `ucs_status_ptr_t`: NULL, a request, or an error between -1 and -100.
pub(super) fn begun(answer: *mut c_void) -> Begun {
    match answer as isize {
        0 => Begun::Done,
        error @ -100..0 => Begun::Failed(error as Status),
        _ => Begun::Pending,
    }
}

/// Declares the table of functions, and how it is filled.
macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// UCP's functions. Their arguments are those of `ucp.h`.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Functions {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// Fills the table. `find` returns the address of a symbol. Fails with the name of the
            /// first symbol that is missing.
            pub(super) fn load(find: impl Fn(&std::ffi::CStr) -> *mut c_void) -> Result<Functions, &'static str> {
                $(let $field = find($symbol);
                if $field.is_null() {
                    return Err($symbol.to_str().unwrap_or_default());
                })*
                // SAFETY: the symbols are functions of these types since UCX 1.13.
                Ok(unsafe { Functions { $($field: std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>($field),)* } })
            }
        }
    };
}

functions! {
    /// Writes major, minor and release number.
    get_version = c"ucp_get_version": fn(*mut c_uint, *mut c_uint, *mut c_uint);
    /// Returns the text of a status.
    status_text = c"ucs_status_string": fn(Status) -> *const c_char;
    /// Makes a context.
    init = c"ucp_init_version": fn(c_uint, c_uint, *const ContextParams, *const c_void, *mut *mut c_void) -> Status;
    /// Ends a context.
    cleanup = c"ucp_cleanup": fn(*mut c_void);
    /// Makes a worker.
    worker_create = c"ucp_worker_create": fn(*mut c_void, *const WorkerParams, *mut *mut c_void) -> Status;
    /// Ends a worker.
    worker_destroy = c"ucp_worker_destroy": fn(*mut c_void);
    /// Asks for the worker's address.
    worker_query = c"ucp_worker_query": fn(*mut c_void, *mut WorkerAttributes) -> Status;
    /// Frees an address.
    release_address = c"ucp_worker_release_address": fn(*mut c_void, *mut c_void);
    /// Moves what can be moved, and runs callbacks. Returns how much has moved.
    progress = c"ucp_worker_progress": fn(*mut c_void) -> c_uint;
    /// Writes the descriptor that becomes readable when the worker is armed and something happens.
    event_fd = c"ucp_worker_get_efd": fn(*mut c_void, *mut c_int) -> Status;
    /// Arms the worker's descriptor.
    arm = c"ucp_worker_arm": fn(*mut c_void) -> Status;
    /// Sets the handler of messages.
    set_handler = c"ucp_worker_set_am_recv_handler": fn(*mut c_void, *const HandlerParams) -> Status;
    /// Makes an endpoint.
    connect = c"ucp_ep_create": fn(*mut c_void, *const EndpointParams, *mut *mut c_void) -> Status;
    /// Closes an endpoint.
    close = c"ucp_ep_close_nbx": fn(*mut c_void, *const OpParams) -> *mut c_void;
    /// Ends once all that was sent over the endpoint has arrived.
    flush = c"ucp_ep_flush_nbx": fn(*mut c_void, *const OpParams) -> *mut c_void;
    /// Sends a message: endpoint, handler, header, its length, data, their length.
    send = c"ucp_am_send_nbx": fn(*mut c_void, c_uint, *const c_void, usize, *const c_void, usize, *const OpParams) -> *mut c_void;
    /// Takes the data of a message that are still at the sender.
    receive = c"ucp_am_recv_data_nbx": fn(*mut c_void, *mut c_void, *mut c_void, usize, *const OpParams) -> *mut c_void;
    /// Frees a request that is over.
    free = c"ucp_request_free": fn(*mut c_void);
}
