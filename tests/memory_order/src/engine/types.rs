//! NCCL's types, as far as the protocols use them.

#![allow(non_camel_case_types, non_upper_case_globals)]

#[path = "../../../../hostccl/reduce/src/types.rs"]
mod elements;

use std::ffi::c_int;

pub(crate) use self::elements::DataType;

pub(crate) type ncclResult_t = c_int;
pub(crate) const ncclInternalError: ncclResult_t = 3;
pub(crate) const ncclInvalidUsage: ncclResult_t = 5;
pub(crate) const ncclRemoteError: ncclResult_t = 6;
