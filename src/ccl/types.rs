//! NCCL's plain types and numbers, as the layers above call them. hostccl has them as nccl.h spells
//! them.

use hostccl::types::{DataType, ReduceOp};

/// `ncclResult_t`. It is an integer, because libraries newer than this one may return codes that it
/// does not know.
pub use hostccl::types::ncclResult_t as NcclResult;

/// `NCCL_SPLIT_NOCOLOR`: the colour of a rank that takes part in a split without getting a
/// communicator of it.
pub(crate) use hostccl::types::NCCL_SPLIT_NOCOLOR as NO_COLOR;

/// Values of `ncclResult_t`.
pub mod result {
    pub use hostccl::types::{
        ncclInProgress as IN_PROGRESS, ncclInvalidArgument as INVALID_ARGUMENT, ncclInvalidUsage as INVALID_USAGE,
        ncclRemoteError as REMOTE_ERROR, ncclSuccess as SUCCESS, ncclSystemError as SYSTEM_ERROR,
        ncclTimeout as TIMEOUT, ncclUnhandledCudaError as UNHANDLED_CUDA_ERROR,
    };
}

/// `ncclUniqueId`: 128 opaque bytes, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId {
    /// The bytes, to be sent to the other ranks as they are.
    pub(crate) bytes: [u8; 128],
}

impl UniqueId {
    /// Reads `count` ids from the bytes that another rank published; `None` unless the bytes are
    /// exactly `count` ids.
    pub(crate) fn list(bytes: &[u8], count: usize) -> Option<Vec<UniqueId>> {
        let ids: Vec<UniqueId> =
            bytes.chunks_exact(128).filter_map(|bytes| Some(UniqueId { bytes: bytes.try_into().ok()? })).collect();
        (bytes.len() == 128 * count).then_some(ids)
    }
}

/// Names and sizes in bytes of the data types, by their `ncclDataType_t` number.
pub const DATA_TYPES: [(&str, usize); DataType::ALL.len()] = {
    let mut table = [("", 0); DataType::ALL.len()];
    let mut index = 0;
    while index < table.len() {
        table[index] = (DataType::ALL[index].name(), DataType::ALL[index].size());
        index += 1;
    }
    table
};

/// Names of the five reductions, by their `ncclRedOp_t` number.
pub(crate) const REDUCTIONS: [&str; ReduceOp::ALL.len()] = {
    let mut table = [""; ReduceOp::ALL.len()];
    let mut index = 0;
    while index < table.len() {
        table[index] = ReduceOp::ALL[index].name();
        index += 1;
    }
    table
};

/// Bytes of one element of that `ncclDataType_t`, `None` for a number outside 0..=11.
pub fn element_size(dtype: i32) -> Option<usize> {
    DataType::from_raw(dtype).map(DataType::size)
}
