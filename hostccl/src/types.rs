//! NCCL's C types, as its header spells them.
//!
//! Enumerations travel as plain integers: a caller may pass any value, and a Rust enum with an unlisted value is
//! undefined behaviour. [`DataType`] and [`ReduceOp`] are the checked forms that the engine works with.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

use std::ffi::{c_char, c_int, c_void};

/// A result code: `ncclSuccess` or what went wrong.
pub type ncclResult_t = c_int;
/// The call did what it says.
pub const ncclSuccess: ncclResult_t = 0;
/// A CUDA call failed; never returned by this engine.
pub const ncclUnhandledCudaError: ncclResult_t = 1;
/// The operating system refused something; the message has its reason.
pub const ncclSystemError: ncclResult_t = 2;
/// A bug in this library, or the communicator was aborted by this process.
pub const ncclInternalError: ncclResult_t = 3;
/// An argument is out of range, NULL, or not a live communicator.
pub const ncclInvalidArgument: ncclResult_t = 4;
/// The calls of several ranks do not fit together, or come in an order that is not allowed.
pub const ncclInvalidUsage: ncclResult_t = 5;
/// A peer died, left or never came; the message names it.
pub const ncclRemoteError: ncclResult_t = 6;
/// A non-blocking call is still at work: ask `ncclCommGetAsyncError`.
pub const ncclInProgress: ncclResult_t = 7;
/// A wait passed its deadline.
pub const ncclTimeout: ncclResult_t = 8;

/// A communicator: an opaque token. It points at nothing and is never dereferenced.
#[repr(C)]
pub struct ncclComm {
    _private: [u8; 0],
}
/// Handle of a communicator.
pub type ncclComm_t = *mut ncclComm;

/// Bytes of an [`ncclUniqueId`].
pub const NCCL_UNIQUE_ID_BYTES: usize = 128;

/// What one process makes and all ranks of a communicator start from.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclUniqueId {
    /// Opaque bytes; copy them whole.
    pub internal: [c_char; NCCL_UNIQUE_ID_BYTES],
}

/// A `cudaStream_t`; ignored, since every call returns with its result in place.
pub type cudaStream_t = *mut c_void;

/// An element type as an integer; see [`DataType`].
pub type ncclDataType_t = c_int;
/// A reduction as an integer: [`ReduceOp`]'s values, or one made by `ncclRedOpCreatePreMulSum`.
pub type ncclRedOp_t = c_int;
/// Where the scalar of `ncclRedOpCreatePreMulSum` lives: 0 device (read when used), 1 host (read at once).
pub type ncclScalarResidence_t = c_int;
/// The scalar lives in "device" memory, which is host memory here, and is read when an operation uses it.
pub const ncclScalarDevice: ncclScalarResidence_t = 0;
/// The scalar is read during the creating call.
pub const ncclScalarHostImmediate: ncclScalarResidence_t = 1;

/// Colour of `ncclCommSplit` for a rank that takes part in the call but in no new communicator.
pub const NCCL_SPLIT_NOCOLOR: c_int = -1;
/// Flag of `ncclCommShrink`: nothing is under way on the parent.
pub const NCCL_SHRINK_DEFAULT: c_int = 0;
/// Flag of `ncclCommShrink`: ends what is under way on the parent, which may have failed.
pub const NCCL_SHRINK_ABORT: c_int = 1;
/// The value of an integer field of [`ncclConfig_t`] that the caller did not set.
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
/// The magic number of [`ncclConfig_t`].
pub const NCCL_CONFIG_MAGIC: u32 = 0xcafe_beef;

/// The caller's configuration, grown by NCCL at its tail from release to release and therefore read by its own `size`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ncclConfig_t {
    /// `sizeof` in the caller's header.
    pub size: usize,
    /// [`NCCL_CONFIG_MAGIC`].
    pub magic: u32,
    /// NCCL version of the caller's header.
    pub version: u32,
    /// 0: init and split return at once; else they block.
    pub blocking: c_int,
    /// Ignored.
    pub cgaClusterSize: c_int,
    /// Ignored.
    pub minCTAs: c_int,
    /// Ignored.
    pub maxCTAs: c_int,
    /// Ignored.
    pub netName: *const c_char,
    /// Accepted; there is nothing to share.
    pub splitShare: c_int,
    /// Ignored.
    pub trafficClass: c_int,
    /// Name that messages call the communicator by.
    pub commName: *const c_char,
}

/// An element type.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DataType {
    /// `ncclInt8`, also `ncclChar`.
    Int8 = 0,
    /// `ncclUint8`.
    Uint8 = 1,
    /// `ncclInt32`, also `ncclInt`.
    Int32 = 2,
    /// `ncclUint32`.
    Uint32 = 3,
    /// `ncclInt64`.
    Int64 = 4,
    /// `ncclUint64`.
    Uint64 = 5,
    /// `ncclFloat16`, also `ncclHalf`.
    Float16 = 6,
    /// `ncclFloat32`, also `ncclFloat`.
    Float32 = 7,
    /// `ncclFloat64`, also `ncclDouble`.
    Float64 = 8,
    /// `ncclBfloat16`.
    Bfloat16 = 9,
}

impl DataType {
    /// Every type, in the order of its integer value.
    pub const ALL: [DataType; 10] = [
        DataType::Int8,
        DataType::Uint8,
        DataType::Int32,
        DataType::Uint32,
        DataType::Int64,
        DataType::Uint64,
        DataType::Float16,
        DataType::Float32,
        DataType::Float64,
        DataType::Bfloat16,
    ];

    /// The type of that integer value.
    pub fn from_raw(raw: ncclDataType_t) -> Option<DataType> {
        usize::try_from(raw).ok().and_then(|index| DataType::ALL.get(index).copied())
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DataType::Int8 | DataType::Uint8 => 1,
            DataType::Float16 | DataType::Bfloat16 => 2,
            DataType::Int32 | DataType::Uint32 | DataType::Float32 => 4,
            DataType::Int64 | DataType::Uint64 | DataType::Float64 => 8,
        }
    }

    /// The name without its prefix, as messages show it.
    pub const fn name(self) -> &'static str {
        match self {
            DataType::Int8 => "int8",
            DataType::Uint8 => "uint8",
            DataType::Int32 => "int32",
            DataType::Uint32 => "uint32",
            DataType::Int64 => "int64",
            DataType::Uint64 => "uint64",
            DataType::Float16 => "float16",
            DataType::Float32 => "float32",
            DataType::Float64 => "float64",
            DataType::Bfloat16 => "bfloat16",
        }
    }
}

/// A reduction.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// `ncclSum`.
    Sum = 0,
    /// `ncclProd`.
    Prod = 1,
    /// `ncclMax`.
    Max = 2,
    /// `ncclMin`.
    Min = 3,
    /// `ncclAvg`: the sum divided by the number of ranks.
    Avg = 4,
}

impl ReduceOp {
    /// Every reduction, in the order of its integer value.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg];

    /// The reduction of that integer value; `None` also for those made by `ncclRedOpCreatePreMulSum`.
    pub fn from_raw(raw: ncclRedOp_t) -> Option<ReduceOp> {
        usize::try_from(raw).ok().and_then(|index| ReduceOp::ALL.get(index).copied())
    }

    /// The name without its prefix, as messages show it.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Avg => "avg",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_nccls() {
        for (raw, dtype) in DataType::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, raw);
            assert_eq!(DataType::from_raw(raw as c_int), Some(dtype));
        }
        for (raw, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, raw);
            assert_eq!(ReduceOp::from_raw(raw as c_int), Some(op));
        }
        assert_eq!(DataType::from_raw(-1), None);
        assert_eq!(DataType::from_raw(10), None);
        assert_eq!(ReduceOp::from_raw(5), None);
    }
}
