//! NCCL's plain types and numbers (nccl.h, 2.18 to 2.32): the parts that are ABI.

use std::ffi::c_int;

/// `ncclResult_t`. An integer, because libraries newer than this one may return codes that it does not know.
pub type NcclResult = c_int;

/// Values of `ncclResult_t`.
pub mod result {
    use super::NcclResult;
    /// The call succeeded.
    pub const SUCCESS: NcclResult = 0;
    /// A call of the CUDA runtime failed: no driver, one too old, no memory.
    pub const UNHANDLED_CUDA_ERROR: NcclResult = 1;
    /// The call was used wrongly, for example ranks made different calls.
    pub const INVALID_USAGE: NcclResult = 5;
    /// A peer failed or has gone.
    pub const REMOTE_ERROR: NcclResult = 6;
    /// A non-blocking call goes on in the background.
    pub const IN_PROGRESS: NcclResult = 7;
    /// A wait of the library passed its deadline (NCCL 2.30.3 and later, and the host engine).
    pub const TIMEOUT: NcclResult = 8;
}

/// `NCCL_SPLIT_NOCOLOR`: takes part in a split without getting a communicator of it.
pub(crate) const NO_COLOR: c_int = -1;

/// `ncclUniqueId`: 128 opaque bytes, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId {
    /// The bytes, to be sent to the other ranks as they are.
    pub(crate) bytes: [u8; 128],
}

impl UniqueId {
    /// So many ids from the bytes that another rank published; `None` unless they are exactly that long.
    pub(crate) fn list(bytes: &[u8], count: usize) -> Option<Vec<UniqueId>> {
        let ids: Vec<UniqueId> =
            bytes.chunks_exact(128).filter_map(|bytes| Some(UniqueId { bytes: bytes.try_into().ok()? })).collect();
        (bytes.len() == 128 * count).then_some(ids)
    }
}

/// Names and sizes in bytes of the ten data types, by their `ncclDataType_t` number.
pub const DATA_TYPES: [(&str, usize); 10] = [
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("bfloat16", 2),
];

/// Bytes of one element of that `ncclDataType_t`, `None` for a number outside 0..=9.
pub fn element_size(dtype: i32) -> Option<usize> {
    usize::try_from(dtype).ok().and_then(|index| DATA_TYPES.get(index)).map(|(_, size)| *size)
}
