//! NCCL's C types, as its header spells them.
//!
//! Enumerations of the C API are plain integers here. A caller may pass any value, and a Rust enum
//! that holds a value outside its list is undefined behaviour. The engine checks the integers and
//! then works with [`DataType`] and [`ReduceOp`].

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

use std::ffi::{c_char, c_int, c_void};

pub use hostccl_reduce::{DataType, ReduceOp};

/// A result code: `ncclSuccess`, or the kind of the failure.
pub type ncclResult_t = c_int;
/// The call succeeded.
pub const ncclSuccess: ncclResult_t = 0;
/// A CUDA call failed. This engine never returns this code.
pub const ncclUnhandledCudaError: ncclResult_t = 1;
/// The operating system refused something. The message has the system's reason.
pub const ncclSystemError: ncclResult_t = 2;
/// This library has a bug, or this process has aborted the communicator.
pub const ncclInternalError: ncclResult_t = 3;
/// An argument is out of range, NULL, or not a live communicator.
pub const ncclInvalidArgument: ncclResult_t = 4;
/// The calls of several ranks do not fit together, or their order is not allowed.
pub const ncclInvalidUsage: ncclResult_t = 5;
/// A peer died, left or never came. The message names the peer.
pub const ncclRemoteError: ncclResult_t = 6;
/// A non-blocking call is still in progress. `ncclCommGetAsyncError` tells when it has ended.
pub const ncclInProgress: ncclResult_t = 7;
/// A wait passed its deadline.
pub const ncclTimeout: ncclResult_t = 8;

/// Returns the code of a failure that another process has reported. A code that is no error of
/// NCCL becomes `ncclRemoteError`, because a failure must not look like a success.
pub(crate) fn failure_of_another(code: ncclResult_t) -> ncclResult_t {
    let is_error = (ncclUnhandledCudaError..=ncclTimeout).contains(&code) && code != ncclInProgress;
    if is_error { code } else { ncclRemoteError }
}

/// A question of `hostcclCommSetInterrupt`. The question returns 0 while blocked calls go on
/// waiting. To end the calls, the question writes the reason to `reason`, as a C string, and
/// returns 1. The reason and its final 0 have room for `capacity` bytes, which is 1024.
pub type hostcclQuestion_t =
    Option<unsafe extern "C" fn(data: *mut c_void, reason: *mut c_char, capacity: usize) -> c_int>;
/// The function of `hostcclCommSetInterrupt` that frees the data of the question.
pub type hostcclRelease_t = Option<unsafe extern "C" fn(data: *mut c_void)>;

/// The type behind [`ncclComm_t`]. No value of it exists, because the handle is a token that is
/// never dereferenced.
#[repr(C)]
pub struct ncclComm {
    _private: [u8; 0],
}
/// The handle of a communicator: an opaque token.
pub type ncclComm_t = *mut ncclComm;

/// The size of an [`ncclUniqueId`] in bytes.
pub const NCCL_UNIQUE_ID_BYTES: usize = 128;

/// An id that one process makes. All ranks of a communicator start from it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclUniqueId {
    /// Opaque bytes, which have to be copied whole.
    pub internal: [c_char; NCCL_UNIQUE_ID_BYTES],
}

/// A CUDA stream. The engine ignores the stream, because every call returns with its result in
/// place.
pub type cudaStream_t = *mut c_void;

/// An element type as an integer: a value of [`DataType`].
pub type ncclDataType_t = c_int;
/// A reduction as an integer: a value of [`ReduceOp`], or a number that `ncclRedOpCreatePreMulSum`
/// returned.
pub type ncclRedOp_t = c_int;
/// Says when the scalar of `ncclRedOpCreatePreMulSum` is read: [`ncclScalarDevice`] or
/// [`ncclScalarHostImmediate`].
pub type ncclScalarResidence_t = c_int;
/// The scalar is read each time an operation uses the reduction. In NCCL the scalar lies in device
/// memory, and here it lies in host memory.
pub const ncclScalarDevice: ncclScalarResidence_t = 0;
/// The scalar is read during `ncclRedOpCreatePreMulSum`.
pub const ncclScalarHostImmediate: ncclScalarResidence_t = 1;

/// The colour of `ncclCommSplit` for a rank that makes the call but joins no new communicator.
pub const NCCL_SPLIT_NOCOLOR: c_int = -1;
/// The flag of `ncclCommRevoke`. There is no other one.
pub const NCCL_REVOKE_DEFAULT: c_int = 0;
/// The flag of `ncclCommShrink` for a parent on which no call is under way.
pub const NCCL_SHRINK_DEFAULT: c_int = 0;
/// The flag of `ncclCommShrink` that ends the calls under way on the parent. The parent may have
/// failed.
pub const NCCL_SHRINK_ABORT: c_int = 1;
/// The version of NCCL whose API this one follows.
pub const NCCL_VERSION: c_int = 22_707;
/// The value of an integer field of [`ncclConfig_t`] that the caller did not set.
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
/// The magic number of [`ncclConfig_t`].
pub const NCCL_CONFIG_MAGIC: u32 = 0xcafe_beef;

/// The caller's configuration. NCCL appends fields from release to release, so the field `size`
/// says which fields the caller's struct has.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ncclConfig_t {
    /// The size of the struct in the caller's header.
    pub size: usize,
    /// The value [`NCCL_CONFIG_MAGIC`].
    pub magic: u32,
    /// The NCCL version of the caller's header.
    pub version: u32,
    /// With 0, init, split, shrink and grow return at once. Otherwise these calls wait until they
    /// are done.
    pub blocking: c_int,
    /// The size of a thread block cluster on a GPU, which the engine ignores.
    pub cgaClusterSize: c_int,
    /// The least number of thread blocks on a GPU, which the engine ignores.
    pub minCTAs: c_int,
    /// The largest number of thread blocks on a GPU, which the engine ignores.
    pub maxCTAs: c_int,
    /// The name of NCCL's network, which the engine ignores.
    pub netName: *const c_char,
    /// Whether a split shares resources with its parent. The engine checks the value and ignores
    /// it, because a split has nothing to share.
    pub splitShare: c_int,
    /// The traffic class of NCCL's network, which the engine ignores.
    pub trafficClass: c_int,
    /// The communicator's name in messages.
    pub commName: *const c_char,
}

/// The configuration in which nothing is set, as NVIDIA's header has it for callers to start from.
pub const NCCL_CONFIG_INITIALIZER: ncclConfig_t = ncclConfig_t {
    size: size_of::<ncclConfig_t>(),
    magic: NCCL_CONFIG_MAGIC,
    version: NCCL_VERSION as u32,
    blocking: NCCL_CONFIG_UNDEF_INT,
    cgaClusterSize: NCCL_CONFIG_UNDEF_INT,
    minCTAs: NCCL_CONFIG_UNDEF_INT,
    maxCTAs: NCCL_CONFIG_UNDEF_INT,
    netName: std::ptr::null(),
    splitShare: NCCL_CONFIG_UNDEF_INT,
    trafficClass: NCCL_CONFIG_UNDEF_INT,
    commName: std::ptr::null(),
};
