//! Handles, statuses, types of elements and reductions of the C contract. The numbers are part of
//! the ABI and never change.

/// NCCL's communicator, as nccl.h declares it.
///
/// cbindgen:no-export
#[repr(C)]
pub struct ncclComm {
    _private: [u8; 0],
}

/// A communicator of NCCL or of a library with its API: the same line as in nccl.h, so that both
/// headers can be included, in either order.
pub type ncclComm_t = *mut ncclComm;

/// This process's place in the job: its rank, the store in which the ranks meet, the device, and
/// the communicator library.
///
/// A handle is a token, not an address: a stale, freed or made-up one gives
/// DM_STATUS_INVALID_HANDLE. It may be used from several threads at once. dm_world_init,
/// dm_get_world and dm_default_world give one, and dm_world_free frees it.
pub struct dm_world {
    _private: [u8; 0],
}

/// One rank's immutable view of a mesh: shape, names, ranks, communicators.
///
/// A handle is a token, not an address: a stale, freed or made-up one gives
/// DM_STATUS_INVALID_HANDLE. It may be used from several threads at once. dm_init and every
/// function with a mesh_out give one, and dm_free frees it.
pub struct dm_mesh {
    _private: [u8; 0],
}

/// Bytes of one or several ranks: the result of dm_all_gather_bytes, dm_broadcast_bytes,
/// dm_world_all_gather_bytes and dm_world_broadcast_bytes.
///
/// A handle is a token, not an address, as dm_mesh is. dm_buffers_free frees it.
pub struct dm_buffers {
    _private: [u8; 0],
}

/// A queue of events, from dm_events_open.
///
/// A handle is a token, not an address, as dm_mesh is. dm_events_free frees it.
pub struct dm_events {
    _private: [u8; 0],
}

/// The outcome of a call: one of the DM_STATUS_ values. A newer library may give values that are
/// not listed here, so a program has a case for all others.
pub type dm_status = i32;
/// Success.
pub const DM_STATUS_OK: dm_status = 0;
/// An argument is NULL, is out of range, is repeated or contradicts another one; or a struct_size
/// is wrong; or a flag is unknown.
pub const DM_STATUS_INVALID_ARGUMENT: dm_status = 1;
/// The handle was never given out, or was freed.
pub const DM_STATUS_INVALID_HANDLE: dm_status = 2;
/// There is no dimension, symbol or registered mesh of that name.
pub const DM_STATUS_NOT_FOUND: dm_status = 3;
/// The calling rank, or the rank that the call asks about, is not in this view or in this rank's
/// group along the dimension.
pub const DM_STATUS_NOT_MEMBER: dm_status = 4;
/// The buffer is smaller than the answer; the length that is needed was written.
pub const DM_STATUS_BUFFER_TOO_SMALL: dm_status = 5;
/// Ranks disagree about a collective call; the message says which rank asked for what.
pub const DM_STATUS_MISMATCH: dm_status = 6;
/// A deadline passed. Where the call waited for ranks, the message names those that did not come.
pub const DM_STATUS_TIMEOUT: dm_status = 7;
/// The rendezvous store is unreachable, broke the protocol, or refused this process.
pub const DM_STATUS_STORE: dm_status = 8;
/// The communicator library failed; ccl_result of dm_error_info has its code.
pub const DM_STATUS_CCL: dm_status = 9;
/// The device driver failed; device_error of dm_error_info has its code.
pub const DM_STATUS_DEVICE: dm_status = 10;
/// There is no usable communicator library; the message lists what was tried.
pub const DM_STATUS_LIBRARY: dm_status = 11;
/// The call is not available for this device type, world or library version, or in a forked child;
/// the message says what to do instead.
pub const DM_STATUS_UNSUPPORTED: dm_status = 12;
/// The mesh or its world has ended (see "ended" at the head of this file), or the call was ended by
/// an abort.
pub const DM_STATUS_ABORTED: dm_status = 13;
/// A rank is lost (see "lost" at the head of this file), or has aborted what the call uses. The
/// message names it where known. Only the lost_ranks of dm_error_info are gone for good.
pub const DM_STATUS_PEER_LOST: dm_status = 14;
/// A bug in this library (a caught panic).
pub const DM_STATUS_INTERNAL: dm_status = 15;
/// This process has no more handles (2^24 of a kind), memory, descriptors or threads; the message
/// names the limit and how to raise it.
pub const DM_STATUS_EXHAUSTED: dm_status = 16;
/// The arguments are right, but the call may not be made now; the message says what to do first.
pub const DM_STATUS_INVALID_STATE: dm_status = 17;

/// This value means "no rank". dm_neighbor gives it past the edge of a dimension.
pub const DM_RANK_NONE: i32 = -1;

/// The type of a buffer's elements: the values of ncclDataType_t. On cuda every number up to 255
/// goes to NCCL, which refuses those that it does not know. For a number that is not listed here,
/// the library does not check whether buffers overlap.
pub type dm_dtype = i32;
/// Signed 8-bit integers.
pub const DM_INT8: dm_dtype = 0;
/// Unsigned 8-bit integers.
pub const DM_UINT8: dm_dtype = 1;
/// Signed 32-bit integers.
pub const DM_INT32: dm_dtype = 2;
/// Unsigned 32-bit integers.
pub const DM_UINT32: dm_dtype = 3;
/// Signed 64-bit integers.
pub const DM_INT64: dm_dtype = 4;
/// Unsigned 64-bit integers.
pub const DM_UINT64: dm_dtype = 5;
/// IEEE 754 binary16.
pub const DM_FLOAT16: dm_dtype = 6;
/// IEEE 754 binary32.
pub const DM_FLOAT32: dm_dtype = 7;
/// IEEE 754 binary64.
pub const DM_FLOAT64: dm_dtype = 8;
/// bfloat16: the upper half of a binary32.
pub const DM_BFLOAT16: dm_dtype = 9;
/// ncclFloat8e4m3 (NCCL 2.24): 4 bits of exponent, 3 of mantissa, no infinity, 448 at most. The
/// host engine computes in binary32 and rounds once; what is beyond the largest number becomes the
/// largest number, as in NCCL.
pub const DM_FLOAT8E4M3: dm_dtype = 10;
/// ncclFloat8e5m2 (NCCL 2.24): 5 bits of exponent, 2 of mantissa, 57344 at most. Results are
/// rounded as for DM_FLOAT8E4M3. So the sum of infinities is the largest number, but DM_MAX and
/// DM_MIN keep infinities.
pub const DM_FLOAT8E5M2: dm_dtype = 11;

/// A reduction: the values of ncclRedOp_t. A number that ncclRedOpCreatePreMulSum of the library
/// (dm_get_proc) has made for the communicator (dm_get_comm) is one, too.
pub type dm_op = i32;
/// Sum.
pub const DM_SUM: dm_op = 0;
/// Product.
pub const DM_PROD: dm_op = 1;
/// Maximum. On the host engine it is NaN where a rank has NaN; NCCL ignores a NaN where another
/// rank has a number.
pub const DM_MAX: dm_op = 2;
/// Minimum. NaNs are as in DM_MAX.
pub const DM_MIN: dm_op = 3;
/// Sum divided by the number of ranks. On the host engine the sum does not overflow, and the
/// average of integers is the exact sum, divided and truncated towards zero. NCCL adds integers in
/// the element's own type, in which the sum can overflow, and multiplies floating-point numbers by
/// 1/n before it adds them.
pub const DM_AVG: dm_op = 4;
