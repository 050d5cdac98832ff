//! NCCL's functions as a table of pointers.

use std::ffi::{c_char, c_int, c_void};

use super::types::{NcclResult, UniqueId};
use crate::error::{Error, Result};

/// A raw `ncclComm_t`: a pointer that only its own library understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct RawComm(pub *mut c_void);

// SAFETY: the pointer is only handed to its library, whose functions may be called from any thread;
// the callers keep calls apart that must not run on one communicator at the same time.
unsafe impl Send for RawComm {}
// SAFETY: as above.
unsafe impl Sync for RawComm {}

impl RawComm {
    /// No communicator.
    pub const NULL: RawComm = RawComm(std::ptr::null_mut());

    /// Whether there is no communicator.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
}

/// A question that the blocked calls of a communicator of the host engine ask. To end them, the
/// question writes a reason and returns 1. Otherwise it returns 0.
pub(super) type Question = unsafe extern "C" fn(*mut c_void, *mut c_char, usize) -> c_int;
/// Frees the data of a question.
pub(super) type Release = unsafe extern "C" fn(*mut c_void);

/// NCCL's functions with the signatures of nccl.h. A field is an `Option` where some release or
/// implementation lacks the function.
pub(super) struct Functions {
    pub(super) get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> NcclResult,
    pub(super) init_rank_config: unsafe extern "C" fn(*mut RawComm, c_int, UniqueId, c_int, *mut c_void) -> NcclResult,
    pub(super) init_rank_scalable:
        Option<unsafe extern "C" fn(*mut RawComm, c_int, c_int, c_int, *mut UniqueId, *mut c_void) -> NcclResult>,
    pub(super) split: Option<unsafe extern "C" fn(RawComm, c_int, c_int, *mut RawComm, *mut c_void) -> NcclResult>,
    pub(super) shrink:
        Option<unsafe extern "C" fn(RawComm, *mut c_int, c_int, *mut RawComm, *mut c_void, c_int) -> NcclResult>,
    pub(super) finalize: Option<unsafe extern "C" fn(RawComm) -> NcclResult>,
    pub(super) destroy: unsafe extern "C" fn(RawComm) -> NcclResult,
    pub(super) abort: unsafe extern "C" fn(RawComm) -> NcclResult,
    pub(super) get_async_error: unsafe extern "C" fn(RawComm, *mut NcclResult) -> NcclResult,
    pub(super) count: unsafe extern "C" fn(RawComm, *mut c_int) -> NcclResult,
    pub(super) user_rank: unsafe extern "C" fn(RawComm, *mut c_int) -> NcclResult,
    pub(super) device: Option<unsafe extern "C" fn(RawComm, *mut c_int) -> NcclResult>,
    pub(super) get_error_string: unsafe extern "C" fn(NcclResult) -> *const c_char,
    pub(super) get_last_error: Option<unsafe extern "C" fn(RawComm) -> *const c_char>,
    pub(super) all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        c_int,
        RawComm,
        *mut c_void,
    ) -> NcclResult,
    pub(super) broadcast:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) reduce_scatter:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) all_to_all:
        Option<unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, *mut c_void) -> NcclResult>,
    pub(super) host_all_to_allv: Option<
        unsafe extern "C" fn(
            *const c_void,
            *const usize,
            *const usize,
            *mut c_void,
            *const usize,
            *const usize,
            c_int,
            RawComm,
            *mut c_void,
        ) -> NcclResult,
    >,
    pub(super) host_all_gatherv: Option<
        unsafe extern "C" fn(
            *const c_void,
            *mut c_void,
            *const usize,
            *const usize,
            c_int,
            RawComm,
            *mut c_void,
        ) -> NcclResult,
    >,
    pub(super) host_reduce_scatterv: Option<
        unsafe extern "C" fn(
            *const c_void,
            *const usize,
            *const usize,
            *mut c_void,
            c_int,
            c_int,
            RawComm,
            *mut c_void,
        ) -> NcclResult,
    >,
    pub(super) send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) group_start: unsafe extern "C" fn() -> NcclResult,
    pub(super) group_end: unsafe extern "C" fn() -> NcclResult,
    pub(super) host_unique_id_for: Option<unsafe extern "C" fn(*mut UniqueId, c_int) -> NcclResult>,
    pub(super) host_lost_rank: Option<unsafe extern "C" fn(RawComm, *mut c_int) -> NcclResult>,
    pub(super) host_last_error_ranks: Option<
        unsafe extern "C" fn(*mut NcclResult, *mut c_int, *mut c_int, c_int, *mut c_int, *mut i64) -> NcclResult,
    >,
    pub(super) host_set_timeout: Option<unsafe extern "C" fn(RawComm, i64) -> NcclResult>,
    pub(super) host_next_call_name: Option<unsafe extern "C" fn(u64, *const c_char) -> NcclResult>,
    pub(super) host_next_call_timeout: Option<unsafe extern "C" fn(i64) -> NcclResult>,
    pub(super) host_set_names: Option<unsafe extern "C" fn(RawComm, *const c_int, c_int) -> NcclResult>,
    pub(super) host_refuse: Option<unsafe extern "C" fn(RawComm, *const c_char) -> NcclResult>,
    pub(super) host_group_fail: Option<unsafe extern "C" fn(*const c_char) -> NcclResult>,
    pub(super) host_set_interrupt:
        Option<unsafe extern "C" fn(RawComm, Option<Question>, Option<Release>, *mut c_void) -> NcclResult>,
    pub(super) host_wait: Option<unsafe extern "C" fn(RawComm, i64, *mut NcclResult) -> NcclResult>,
}

impl Functions {
    /// Fills the table by `lookup`, which gives a symbol's address by its name, as dlsym does.
    /// `missing` is the error for a function of the core that is not there.
    pub(super) fn from_lookup(
        lookup: impl Fn(&str) -> Option<*const c_void>,
        missing: impl Fn(&str) -> Error,
    ) -> Result<Functions> {
        macro_rules! symbol {
            ($name:literal) => {{
                let address = lookup($name).filter(|address| !address.is_null());
                // SAFETY: the address is that of the C function of this name, whose signature
                // nccl.h fixes and the field it goes into repeats.
                address.map(|address| unsafe { std::mem::transmute(address) })
            }};
            ($name:literal, core) => {
                symbol!($name).ok_or_else(|| missing($name))?
            };
        }
        Ok(Functions {
            get_unique_id: symbol!("ncclGetUniqueId", core),
            init_rank_config: symbol!("ncclCommInitRankConfig", core),
            init_rank_scalable: symbol!("ncclCommInitRankScalable"),
            split: symbol!("ncclCommSplit"),
            shrink: symbol!("ncclCommShrink"),
            finalize: symbol!("ncclCommFinalize"),
            destroy: symbol!("ncclCommDestroy", core),
            abort: symbol!("ncclCommAbort", core),
            get_async_error: symbol!("ncclCommGetAsyncError", core),
            count: symbol!("ncclCommCount", core),
            user_rank: symbol!("ncclCommUserRank", core),
            device: symbol!("ncclCommCuDevice"),
            get_error_string: symbol!("ncclGetErrorString", core),
            get_last_error: symbol!("ncclGetLastError"),
            all_reduce: symbol!("ncclAllReduce", core),
            reduce: symbol!("ncclReduce", core),
            broadcast: symbol!("ncclBroadcast", core),
            all_gather: symbol!("ncclAllGather", core),
            reduce_scatter: symbol!("ncclReduceScatter", core),
            all_to_all: symbol!("ncclAlltoAll"),
            host_all_to_allv: symbol!("hostcclAlltoAllv"),
            host_all_gatherv: symbol!("hostcclAllGatherv"),
            host_reduce_scatterv: symbol!("hostcclReduceScatterv"),
            send: symbol!("ncclSend", core),
            recv: symbol!("ncclRecv", core),
            group_start: symbol!("ncclGroupStart", core),
            group_end: symbol!("ncclGroupEnd", core),
            host_unique_id_for: symbol!("hostcclGetUniqueIdFor"),
            host_lost_rank: symbol!("hostcclCommLostRank"),
            host_last_error_ranks: symbol!("hostcclLastErrorRanks"),
            host_set_timeout: symbol!("hostcclCommSetTimeout"),
            host_next_call_name: symbol!("hostcclNextCallName"),
            host_next_call_timeout: symbol!("hostcclNextCallTimeout"),
            host_set_names: symbol!("hostcclCommSetNames"),
            host_refuse: symbol!("hostcclCommRefuse"),
            host_group_fail: symbol!("hostcclGroupFail"),
            host_set_interrupt: symbol!("hostcclCommSetInterrupt"),
            host_wait: symbol!("hostcclCommWait"),
        })
    }
}
