//! One UCP worker: its context, its endpoints, and the memory of this process that UCX uses. One
//! thread at a time uses the worker.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;

use super::api::{self, Begun, Callback, EndpointParams, OpParams, Status};
use super::frame::{GREETING, Greeting, HEADER, Header};
use super::library::Library;
use super::mailbox::{Mailbox, Note, on_error, on_received, on_sent};
use crate::fork::Private;

/// The handler of messages between wires that know each other.
pub(super) const MESSAGES: u32 = 1;
/// The handler of greetings.
pub(super) const GREETINGS: u32 = 2;

/// The purpose of an operation under way in UCX, and the memory that the operation uses.
#[derive(Debug)]
pub(super) enum Flight {
    /// A block of this process's memory goes out. The block is freed when the operation is over.
    Block(#[expect(dead_code, reason = "UCX reads the block until the operation is over")] Box<[u8]>),
    /// A piece of the send with that number goes out. Its length in bytes and its header follow.
    Piece(u64, usize, #[expect(dead_code, reason = "UCX reads the block until the operation is over")] Box<[u8]>),
    /// A piece of that many bytes arrives for the receive with that number.
    Landing(u64, usize),
    /// An endpoint is being flushed or closed.
    Endpoint,
}

/// A worker.
#[derive(Debug)]
pub(super) struct Worker {
    /// UCX's library.
    pub(super) library: &'static Library,
    /// The context; NULL before it exists.
    context: *mut c_void,
    /// The worker; NULL before it exists, and after [`Worker::take`].
    pub(super) worker: *mut c_void,
    /// The mailbox to which the callbacks write. The mailbox has an address of its own, because
    /// UCX keeps the address.
    mailbox: *mut Mailbox,
    /// The operations under way.
    pub(super) flights: HashMap<u64, Flight>,
    /// The number that the last operation got.
    last: u64,
}

impl Worker {
    /// Makes a context and a worker.
    pub(super) fn new(library: &'static Library) -> Result<Worker, String> {
        let failed =
            |what: &str, status| Err(format!("DM_WIRE=ucx: {library} refuses {what}: {}", library.text(status)));
        let mailbox = Box::into_raw(Box::default());
        let (context, worker) = (ptr::null_mut(), ptr::null_mut());
        // From here on a failure drops `made`, which frees what exists.
        let mut made = Worker { library, context, worker, mailbox, flights: HashMap::new(), last: 0 };
        let params = api::ContextParams {
            fields: 1 | 1 << 8,
            features: api::FEATURES,
            request_size: 0,
            request_init: 0,
            request_cleanup: 0,
            tag_sender_mask: 0,
            workers_shared: 0,
            estimated_endpoints: 0,
            estimated_per_node: 0,
            name: c"libdevicemesh".as_ptr(),
        };
        let (major, minor) = (library.version.0, library.version.1.min(13));
        // SAFETY: the parameters are whole, and UCX copies them. Without a configuration UCX reads
        // its own variables.
        let status =
            unsafe { (library.functions.init)(major, minor, &raw const params, ptr::null(), &raw mut made.context) };
        if status != api::OK {
            made.context = ptr::null_mut();
            return failed("a context", status);
        }
        let params = api::WorkerParams {
            fields: 1,
            thread_mode: api::SERIALIZED,
            cpu_mask: [0; 16],
            events: 0,
            user_data: 0,
            event_fd: -1,
            flags: 0,
            name: ptr::null(),
            am_alignment: 0,
            client_id: 0,
        };
        // SAFETY: the parameters are whole, and UCX copies them.
        let status =
            unsafe { (library.functions.worker_create)(made.context, &raw const params, &raw mut made.worker) };
        if status != api::OK {
            made.worker = ptr::null_mut();
            return failed("a worker", status);
        }
        Ok(made)
    }

    /// Sets the function that takes messages of the kind `id`. The function runs inside
    /// [`Worker::progress`].
    pub(super) fn set_handler(&self, id: u32, function: api::OnMessage, argument: *mut c_void) -> Result<(), String> {
        let params = api::HandlerParams { fields: 15, id, flags: 1, function: Some(function), argument };
        // SAFETY: the parameters are whole, and UCX copies them.
        match unsafe { (self.library.functions.set_handler)(self.worker, &raw const params) } {
            api::OK => Ok(()),
            status => Err(format!("DM_WIRE=ucx: {} refuses a handler: {}", self.library, self.library.text(status))),
        }
    }

    /// Returns the worker's address.
    pub(super) fn address(&self) -> Result<Vec<u8>, String> {
        let mut asked = api::WorkerAttributes {
            fields: 1 << 1 | 1 << 2,
            thread_mode: 0,
            address_flags: api::NET_ONLY,
            address: ptr::null_mut(),
            address_bytes: 0,
            max_am_header: 0,
            name: [0; 32],
            max_debug_string: 0,
        };
        // SAFETY: UCX writes the fields that are asked for.
        let status = unsafe { (self.library.functions.worker_query)(self.worker, &raw mut asked) };
        if status != api::OK || asked.address.is_null() {
            return Err(format!(
                "DM_WIRE=ucx: {} has no address for this process: {}",
                self.library,
                self.library.text(status)
            ));
        }
        // SAFETY: UCX says that many bytes are there. They are freed after the copy.
        unsafe {
            let bytes = std::slice::from_raw_parts(asked.address.cast::<u8>(), asked.address_bytes).to_vec();
            (self.library.functions.release_address)(self.worker, asked.address);
            Ok(bytes)
        }
    }

    /// Returns the descriptor that becomes readable when the worker is armed and something
    /// happens. The descriptor is a copy of UCX's descriptor, which stays open after the worker
    /// has ended.
    pub(super) fn descriptor(&self) -> Result<Private<OwnedFd>, String> {
        let mut fd = -1;
        // SAFETY: UCX writes the descriptor.
        match unsafe { (self.library.functions.event_fd)(self.worker, &raw mut fd) } {
            // SAFETY: the descriptor is open for as long as the worker lives.
            api::OK => Private::open(|| unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned())
                .map_err(|error| format!("copying a descriptor of {}: {error}", self.library)),
            status => Err(format!("DM_WIRE=ucx: {} has no descriptor: {}", self.library, self.library.text(status))),
        }
    }

    /// Prepares the descriptor for a sleep. Returns false where there is something to do first.
    pub(super) fn arm(&self) -> bool {
        // SAFETY: the worker lives.
        self.has_ended() || unsafe { (self.library.functions.arm)(self.worker) != api::BUSY }
    }

    /// Whether UCX's worker has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.worker.is_null()
    }

    /// Takes UCX's worker out, and returns it with the function that ends it. That function closes
    /// all endpoints and devices of the worker, so UCX does not touch memory of this process after
    /// the function has returned.
    pub(super) fn take(&mut self) -> (unsafe extern "C" fn(*mut c_void), *mut c_void) {
        (self.library.functions.worker_destroy, std::mem::replace(&mut self.worker, ptr::null_mut()))
    }

    /// Takes what UCX has reported.
    pub(super) fn mail(&self) -> Mailbox {
        // SAFETY: the mailbox lives as long as the worker, and no callback runs now.
        unsafe {
            if (*self.mailbox).over.is_empty() && (*self.mailbox).broken.is_empty() {
                return Mailbox::default();
            }
            std::mem::take(&mut *self.mailbox)
        }
    }

    /// Makes an endpoint to the worker with that address.
    pub(super) fn connect(&self, address: &[u8]) -> Result<*mut c_void, Status> {
        let params = EndpointParams {
            fields: 1 | 1 << 1 | 1 << 2,
            address: address.as_ptr().cast(),
            error_mode: api::ERRORS_OF_PEER,
            on_error: Some(on_error),
            argument: self.mailbox.cast(),
            user_data: 0,
            flags: 0,
            socket_address: [0; 2],
            connection_request: 0,
            name: ptr::null(),
            local_socket_address: [0; 2],
        };
        let mut endpoint = ptr::null_mut();
        // SAFETY: the parameters are whole, and UCX copies what it needs of the address.
        match unsafe { (self.library.functions.connect)(self.worker, &raw const params, &raw mut endpoint) } {
            api::OK => Ok(endpoint),
            status => Err(status),
        }
    }

    /// Runs an operation that has a callback. `flight` holds the memory that the operation uses.
    /// Returns the number of the operation, or `None` where it is over already.
    fn begin(
        &mut self,
        flight: Flight,
        flags: u32,
        callback: Callback,
        operation: impl FnOnce(&Library, *const OpParams) -> *mut c_void,
    ) -> Result<Option<u64>, Status> {
        self.last += 1;
        let number = self.last;
        let note = Box::new(Note { mailbox: self.mailbox, free: self.library.functions.free, flight: number });
        let note = Box::into_raw(note);
        let params = OpParams {
            attributes: api::OP_CALLBACK | api::OP_USER_DATA | api::OP_FLAGS,
            flags,
            request: 0,
            callback,
            datatype: 0,
            user_data: note.cast(),
            reply_buffer: 0,
            memory_type: 0,
            info: 0,
            memory: 0,
        };
        self.flights.insert(number, flight);
        match api::begun(operation(self.library, &raw const params)) {
            Begun::Pending => Ok(Some(number)),
            ended => {
                self.flights.remove(&number);
                // SAFETY: the operation has no callback any more, so the note is this function's.
                drop(unsafe { Box::from_raw(note) });
                match ended {
                    Begun::Failed(status) => Err(status),
                    _ => Ok(None),
                }
            }
        }
    }

    /// Sends a block: a header and the bytes after it.
    pub(super) fn send_block(&mut self, endpoint: *mut c_void, block: Box<[u8]>) -> Result<(), Status> {
        let (worker_id, start, bytes) = (MESSAGES, block.as_ptr(), block.len() - HEADER);
        let flight = Flight::Block(block);
        let operation = |library: &Library, params: *const OpParams| {
            // SAFETY: the block lives until the operation is over, because the flight owns it.
            unsafe {
                let data = start.add(HEADER).cast();
                (library.functions.send)(endpoint, worker_id, start.cast(), HEADER, data, bytes, params)
            }
        };
        self.begin(flight, api::SEND_EAGER, Callback { send: on_sent }, operation).map(drop)
    }

    /// Sends a greeting, and lets the receiver answer even if it does not know this process.
    pub(super) fn greet(&mut self, endpoint: *mut c_void, greeting: Greeting) -> Result<(), Status> {
        self.send_greeting(endpoint, greeting, api::SEND_EAGER | api::SEND_REPLY)
    }

    /// Answers a greeting, over the endpoint that came with it.
    pub(super) fn greet_back(&mut self, endpoint: *mut c_void, greeting: Greeting) -> Result<(), Status> {
        self.send_greeting(endpoint, greeting, api::SEND_EAGER)
    }

    fn send_greeting(&mut self, endpoint: *mut c_void, greeting: Greeting, flags: u32) -> Result<(), Status> {
        let block: Box<[u8]> = Box::new(greeting.to_bytes());
        let start = block.as_ptr();
        let operation = |library: &Library, params: *const OpParams| {
            // SAFETY: as in `send_block`.
            unsafe { (library.functions.send)(endpoint, GREETINGS, start.cast(), GREETING, ptr::null(), 0, params) }
        };
        self.begin(Flight::Block(block), flags, Callback { send: on_sent }, operation).map(drop)
    }

    /// Sends a piece of the send `number`. Returns whether the operation is under way; otherwise it
    /// is over.
    ///
    /// # Safety
    /// `data` stays valid and unchanged until the operation is over.
    pub(super) unsafe fn send_piece(
        &mut self,
        endpoint: *mut c_void,
        number: u64,
        header: Header,
        data: *const u8,
        bytes: usize,
    ) -> Result<bool, Status> {
        let block: Box<[u8]> = Box::new(header.to_bytes());
        let start = block.as_ptr();
        let operation = |library: &Library, params: *const OpParams| {
            // SAFETY: as in `send_block`, and the caller's contract.
            unsafe { (library.functions.send)(endpoint, MESSAGES, start.cast(), HEADER, data.cast(), bytes, params) }
        };
        let begun =
            self.begin(Flight::Piece(number, bytes, block), api::SEND_RNDV, Callback { send: on_sent }, operation);
        begun.map(|flight| flight.is_some())
    }

    /// Takes the data of a message that are still at the sender, for the receive `number`. Returns
    /// whether the operation is under way; otherwise it is over.
    ///
    /// # Safety
    /// `data` is the descriptor that UCX passed to the handler that runs now. The buffer stays
    /// valid until the operation is over, and nobody else uses it.
    pub(super) unsafe fn land(
        &mut self,
        number: u64,
        data: *mut c_void,
        to: *mut u8,
        bytes: usize,
    ) -> Result<bool, Status> {
        let worker = self.worker;
        let operation = |library: &Library, params: *const OpParams| {
            // SAFETY: the caller's contract.
            unsafe { (library.functions.receive)(worker, data, to.cast(), bytes, params) }
        };
        let callback = Callback { receive: on_received };
        self.begin(Flight::Landing(number, bytes), 0, callback, operation).map(|flight| flight.is_some())
    }

    /// Closes an endpoint at once. Operations that are under way on it fail.
    pub(super) fn close(&mut self, endpoint: *mut c_void) {
        let operation = |library: &Library, params: *const OpParams| {
            // SAFETY: the endpoint is not used again.
            unsafe { (library.functions.close)(endpoint, params) }
        };
        let _ = self.begin(Flight::Endpoint, api::CLOSE_FORCE, Callback { send: on_sent }, operation);
    }

    /// Begins to wait until all that was sent over the endpoint has arrived. Returns the number of
    /// the operation, or `None` where all has arrived already or cannot arrive any more.
    pub(super) fn flush(&mut self, endpoint: *mut c_void) -> Option<u64> {
        let operation = |library: &Library, params: *const OpParams| {
            // SAFETY: the endpoint is open.
            unsafe { (library.functions.flush)(endpoint, params) }
        };
        self.begin(Flight::Endpoint, 0, Callback { send: on_sent }, operation).ok().flatten()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: no other thread uses the worker. UCX drops what is still under way, and frees the
        // worker before the context. The mailbox is freed last, because UCX may write to it.
        unsafe {
            if !self.worker.is_null() {
                (self.library.functions.worker_destroy)(self.worker);
            }
            if !self.context.is_null() {
                (self.library.functions.cleanup)(self.context);
            }
            drop(Box::from_raw(self.mailbox));
        }
    }
}
