//! The error type of the library: a status of the C contract, a one-line message with the values,
//! and the codes of other layers.

mod about;
mod facts;

use std::any::Any;
use std::ffi::CStr;
use std::fmt;

use self::facts::Facts;
pub(crate) use self::facts::MOST_RANKS;
use crate::printable::printable;
use hostccl::{fork, machine};

/// The outcome classes of the C ABI (`dm_status`); the numbers are part of the ABI and never
/// change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Status {
    /// Success.
    Ok = 0,
    /// An argument is NULL, out of range, repeated or contradicts another.
    InvalidArgument = 1,
    /// The handle was never given out, or was freed.
    InvalidHandle = 2,
    /// No dimension, symbol or registered mesh of that name.
    NotFound = 3,
    /// The calling rank is not part of this mesh.
    NotMember = 4,
    /// The caller's buffer is smaller than the answer.
    BufferTooSmall = 5,
    /// Ranks disagree about a collective call.
    Mismatch = 6,
    /// A deadline passed.
    Timeout = 7,
    /// The rendezvous store is unreachable, broke the protocol, or refused this process.
    Store = 8,
    /// The communicator library failed.
    Ccl = 9,
    /// The device driver failed.
    Device = 10,
    /// No usable communicator library.
    Library = 11,
    /// The call is not available here.
    Unsupported = 12,
    /// Aborted or finalized.
    Aborted = 13,
    /// A rank died or left.
    PeerLost = 14,
    /// A bug in this library.
    Internal = 15,
    /// Handles, memory, descriptors or threads ran out.
    Exhausted = 16,
    /// The arguments are right, but the call may not be made now.
    InvalidState = 17,
}

impl Status {
    /// All statuses, in the order of their numbers.
    pub const ALL: [Status; 18] = [
        Status::Ok,
        Status::InvalidArgument,
        Status::InvalidHandle,
        Status::NotFound,
        Status::NotMember,
        Status::BufferTooSmall,
        Status::Mismatch,
        Status::Timeout,
        Status::Store,
        Status::Ccl,
        Status::Device,
        Status::Library,
        Status::Unsupported,
        Status::Aborted,
        Status::PeerLost,
        Status::Internal,
        Status::Exhausted,
        Status::InvalidState,
    ];

    /// The status with that number, if there is one.
    pub fn from_code(code: i32) -> Option<Status> {
        usize::try_from(code).ok().and_then(|index| Status::ALL.get(index).copied())
    }

    /// The name of the status in C, for example "DM_STATUS_TIMEOUT".
    ///
    /// ```
    /// assert_eq!(devicemesh::error::Status::PeerLost.name(), "DM_STATUS_PEER_LOST");
    /// ```
    pub fn name(self) -> &'static str {
        self.c_name().to_str().unwrap_or_default()
    }

    /// The name of the status, as a C string.
    pub(crate) fn c_name(self) -> &'static CStr {
        match self {
            Status::Ok => c"DM_STATUS_OK",
            Status::InvalidArgument => c"DM_STATUS_INVALID_ARGUMENT",
            Status::InvalidHandle => c"DM_STATUS_INVALID_HANDLE",
            Status::NotFound => c"DM_STATUS_NOT_FOUND",
            Status::NotMember => c"DM_STATUS_NOT_MEMBER",
            Status::BufferTooSmall => c"DM_STATUS_BUFFER_TOO_SMALL",
            Status::Mismatch => c"DM_STATUS_MISMATCH",
            Status::Timeout => c"DM_STATUS_TIMEOUT",
            Status::Store => c"DM_STATUS_STORE",
            Status::Ccl => c"DM_STATUS_CCL",
            Status::Device => c"DM_STATUS_DEVICE",
            Status::Library => c"DM_STATUS_LIBRARY",
            Status::Unsupported => c"DM_STATUS_UNSUPPORTED",
            Status::Aborted => c"DM_STATUS_ABORTED",
            Status::PeerLost => c"DM_STATUS_PEER_LOST",
            Status::Internal => c"DM_STATUS_INTERNAL",
            Status::Exhausted => c"DM_STATUS_EXHAUSTED",
            Status::InvalidState => c"DM_STATUS_INVALID_STATE",
        }
    }
}

/// A failure: its status, a message that says in one line what happened and with which values, and
/// the codes of other layers where they exist.
///
/// ```
/// use devicemesh::error::{Error, Status};
/// let error = Error::invalid(format!("dimension {} has size {}, which must be at least 1", 1, 0));
/// assert_eq!(error.status(), Status::InvalidArgument);
/// assert_eq!(error.to_string(), "dimension 1 has size 0, which must be at least 1");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    status: Status,
    /// One line, in which characters that a terminal would act on are escaped.
    message: String,
    /// The `ncclResult_t` of the communicator library; 0 when the library was not involved.
    ccl_result: i32,
    /// The `CUresult` of the device driver; 0 when the driver was not involved.
    device_error: i32,
    /// The `errno`; 0 when the operating system was not involved.
    os_error: i32,
    /// The ranks, the dimension, the waiting time and the number of the call; `None` where none of
    /// these is known.
    facts: Option<Box<Facts>>,
}

/// The result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of that status. Characters that a terminal would act on are escaped
    /// ([`printable`]), because names, keys and hosts in messages may come from anybody.
    pub fn new(status: Status, message: impl Into<String>) -> Error {
        Error { status, message: one_line(&message.into()), ccl_result: 0, device_error: 0, os_error: 0, facts: None }
    }

    /// `DM_STATUS_INVALID_ARGUMENT`.
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(Status::InvalidArgument, message)
    }

    /// `DM_STATUS_INVALID_STATE`: the arguments are right, but the call may not be made now.
    pub fn invalid_state(message: impl Into<String>) -> Error {
        Error::new(Status::InvalidState, message)
    }

    /// `DM_STATUS_NOT_FOUND`.
    pub fn not_found(message: impl Into<String>) -> Error {
        Error::new(Status::NotFound, message)
    }

    /// `DM_STATUS_NOT_MEMBER`.
    pub fn not_member(message: impl Into<String>) -> Error {
        Error::new(Status::NotMember, message)
    }

    /// `DM_STATUS_TIMEOUT`.
    pub fn timeout(message: impl Into<String>) -> Error {
        Error::new(Status::Timeout, message)
    }

    /// `DM_STATUS_ABORTED`.
    pub fn aborted(message: impl Into<String>) -> Error {
        Error::new(Status::Aborted, message)
    }

    /// `DM_STATUS_UNSUPPORTED`.
    pub fn unsupported(message: impl Into<String>) -> Error {
        Error::new(Status::Unsupported, message)
    }

    /// `DM_STATUS_STORE`.
    pub fn store(message: impl Into<String>) -> Error {
        Error::new(Status::Store, message)
    }

    /// `DM_STATUS_STORE` caused by the operating system, or `DM_STATUS_EXHAUSTED` where this
    /// process ran out of descriptors or memory. `action` says what failed. The message also gets
    /// the cause and what to do about it, and the error gets the `errno`.
    pub fn store_io(action: impl fmt::Display, cause: &std::io::Error) -> Error {
        let status = if is_exhaustion(cause) { Status::Exhausted } else { Status::Store };
        Error::new(status, format!("{action}: {}", machine::explained(cause)))
            .with_os_error(cause.raw_os_error().unwrap_or(0))
    }

    /// `DM_STATUS_EXHAUSTED`: a thread could not be started.
    pub fn no_thread(cause: &std::io::Error) -> Error {
        Error::new(Status::Exhausted, machine::no_thread(cause)).with_os_error(cause.raw_os_error().unwrap_or(0))
    }

    /// `DM_STATUS_EXHAUSTED`: this process gets no more memory of the host. The message says how
    /// much was asked for, which limit refused it, and what to do.
    ///
    /// ```
    /// use devicemesh::error::{Error, Status};
    /// let error = Error::no_memory(1 << 60);
    /// assert_eq!(error.status(), Status::Exhausted);
    /// assert!(error.message().starts_with("no memory for 1152921504606846976 bytes: "));
    /// ```
    pub fn no_memory(bytes: usize) -> Error {
        let cause = std::io::Error::from_raw_os_error(libc::ENOMEM);
        let message = format!("no memory for {bytes} bytes: {}", machine::explained_memory(bytes, &cause));
        Error::new(Status::Exhausted, message).with_os_error(libc::ENOMEM)
    }

    /// `DM_STATUS_UNSUPPORTED` in a forked child of a process that holds worlds or communicators.
    pub fn check_fork() -> Result<()> {
        if fork::is_child() { Err(Error::unsupported(fork::refusal())) } else { Ok(()) }
    }

    /// `DM_STATUS_INTERNAL`.
    pub fn internal(message: impl Into<String>) -> Error {
        Error::new(Status::Internal, message)
    }

    /// Sets the result code of a communicator library (`ncclResult_t`).
    #[must_use]
    pub fn with_ccl_result(mut self, code: i32) -> Error {
        self.ccl_result = code;
        self
    }

    /// Sets the code of a device driver (`CUresult`).
    #[must_use]
    pub fn with_device_error(mut self, code: i32) -> Error {
        self.device_error = code;
        self
    }

    /// Sets the `errno`.
    #[must_use]
    pub fn with_os_error(mut self, code: i32) -> Error {
        self.os_error = code;
        self
    }

    /// `DM_STATUS_INTERNAL` for a caught panic.
    pub(crate) fn of_panic(panic: &(dyn Any + Send)) -> Error {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Error::internal(format!(
            "a bug in libdevicemesh, please report it: {}",
            text.unwrap_or("a panic without a message")
        ))
    }

    /// Puts `what`, which says what was being done, in front of the message.
    #[must_use]
    pub fn within(mut self, what: &str) -> Error {
        self.message = one_line(&format!("{what}: {}", self.message));
        self
    }

    /// Returns the error with `text` at the end of its message.
    #[must_use]
    pub(crate) fn followed_by(mut self, text: &str) -> Error {
        self.message = one_line(&format!("{}{text}", self.message));
        self
    }

    /// The status.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The one-line message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The result of the communicator library; 0 when the library was not involved.
    pub fn ccl_result(&self) -> i32 {
        self.ccl_result
    }

    /// The result of the device driver; 0 when the driver was not involved.
    pub fn device_error(&self) -> i32 {
        self.device_error
    }

    /// The `errno`; 0 when the operating system was not involved.
    pub fn os_error(&self) -> i32 {
        self.os_error
    }
}

/// Whether the operating system says that this process or machine has no more descriptors or
/// memory.
fn is_exhaustion(cause: &std::io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS))
}

fn one_line(message: &str) -> String {
    printable(message.trim_end_matches(['\n', '\r'])).into_owned()
}
