//! The functions that are neither about making a communicator nor about moving data: version,
//! errors, groups, operators, memory.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::arguments::{check_out, data_type};
use crate::call_name::{NAME_BYTES, Name};
use crate::error::{self, Error, Result};
use crate::fork;
use crate::group;
use crate::handle;
use crate::machine::page_bytes;
use crate::operators::{self, PreMulSum, Scalar};
use crate::timeout;
use crate::types::*;

pub(crate) unsafe fn ncclGetVersion(version: *mut c_int) -> Result<ncclResult_t> {
    check_out("version", version)?;
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { version.write(NCCL_VERSION) };
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclGetErrorString(result: ncclResult_t) -> Result<*const c_char> {
    Ok(error::describe(result).as_ptr())
}

pub(crate) unsafe fn ncclGetLastError(comm: ncclComm_t) -> Result<*const c_char> {
    // A forked child has no communicators.
    if !error::has_last() && !comm.is_null() && !fork::is_child() {
        if let Err(error) = handle::find(comm).and_then(|handle| handle.status()) {
            error::remember_state(error);
        }
    }
    Ok(error::last())
}

pub(crate) unsafe fn hostcclLastErrorRanks(
    code: *mut ncclResult_t,
    ranks: *mut c_int,
    lost: *mut c_int,
    capacity: c_int,
    count: *mut c_int,
    waited_ms: *mut i64,
) -> Result<ncclResult_t> {
    check_out("code", code)?;
    check_out("count", count)?;
    check_out("waited_ms", waited_ms)?;
    let room = usize::try_from(capacity).unwrap_or(0);
    if room > 0 {
        check_out("ranks", ranks)?;
        check_out("lost", lost)?;
    }
    let last = error::fresh();
    let blame = last.as_ref().map(Error::blame).cloned().unwrap_or_default();
    let waited = last.as_ref().and_then(Error::waited);
    // SAFETY: none is NULL, and all are valid by the caller's contract; the lists have `room`
    // places.
    unsafe {
        code.write(last.as_ref().map_or(ncclSuccess, Error::code));
        count.write(blame.ranks.len() as c_int);
        waited_ms.write(waited.map_or(-1, |waited| i64::try_from(waited.as_millis()).unwrap_or(i64::MAX)));
        for (place, rank) in blame.ranks.iter().take(room).enumerate() {
            ranks.add(place).write(*rank as c_int);
            lost.add(place).write(c_int::from(blame.lost.contains(rank)));
        }
    }
    Ok(ncclSuccess)
}

#[inline]
pub(crate) unsafe fn hostcclNextCallName(tag: u64, name: *const c_char) -> Result<ncclResult_t> {
    // SAFETY: `name` is NULL, or by the caller's contract points to that many bytes, which nobody
    // changes during this call.
    let text = unsafe { name.cast::<[u8; NAME_BYTES]>().as_ref() };
    let is_free = Name::set_next(tag, text.unwrap_or(&[0; NAME_BYTES]));
    // A timeout that was set for a call that was not made does not concern this one.
    timeout::set_next(0);
    error::begin_call();
    match is_free {
        true => Ok(ncclSuccess),
        false => Err(Error::argument(format!("tag {tag:#x} is reserved: the two largest tags name no call"))),
    }
}

pub(crate) unsafe fn ncclGroupStart() -> Result<ncclResult_t> {
    group::start();
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclGroupEnd() -> Result<ncclResult_t> {
    group::end()
}

pub(crate) unsafe fn hostcclGroupFail(why: *const c_char) -> Result<ncclResult_t> {
    if why.is_null() {
        return Err(Error::argument("why is NULL"));
    }
    // SAFETY: not NULL, and a C string by the caller's contract.
    group::fail(Error::usage(unsafe { CStr::from_ptr(why) }.to_string_lossy()));
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclRedOpCreatePreMulSum(
    op: *mut ncclRedOp_t,
    scalar: *mut c_void,
    datatype: ncclDataType_t,
    residence: ncclScalarResidence_t,
    comm: ncclComm_t,
) -> Result<ncclResult_t> {
    check_out("op", op)?;
    check_out("scalar", scalar)?;
    let dtype = data_type(datatype)?;
    let handle = handle::find(comm)?;
    let scalar = match residence {
        ncclScalarDevice => Scalar::At(scalar.expose_provenance()),
        // SAFETY: the caller's contract says that an element of that type lies there.
        ncclScalarHostImmediate => Scalar::Value(unsafe { operators::read_scalar(scalar.cast(), dtype) }),
        _ => return Err(Error::argument(format!("residence {residence} is neither 0 (device) nor 1 (host)"))),
    };
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { op.write(handle.operators.add(PreMulSum { dtype, scalar })) };
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> Result<ncclResult_t> {
    handle::find(comm)?.operators.remove(op)?;
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> Result<ncclResult_t> {
    check_out("ptr", ptr)?;
    let mut memory = std::ptr::null_mut();
    // SAFETY: `memory` takes the address, and the size of a page is a power of two.
    let refused = unsafe { libc::posix_memalign(&raw mut memory, page_bytes(), size.max(1)) };
    if refused != 0 {
        let reason = std::io::Error::from_raw_os_error(refused);
        return Err(Error::system(&format!("allocating {size} bytes"), reason));
    }
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { ptr.write(memory) };
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclMemFree(ptr: *mut c_void) -> Result<ncclResult_t> {
    // SAFETY: the caller's contract says that the pointer is NULL, or memory of ncclMemAlloc that
    // is not freed yet.
    unsafe { libc::free(ptr) };
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclCommRegister(
    comm: ncclComm_t,
    buff: *mut c_void,
    size: usize,
    registration: *mut *mut c_void,
) -> Result<ncclResult_t> {
    check_out("buff", buff)?;
    check_out("handle", registration)?;
    handle::find(comm)?;
    if size == 0 {
        return Err(Error::argument("size is 0"));
    }
    // SAFETY: not NULL, and valid by the caller's contract.
    unsafe { registration.write(buff) };
    Ok(ncclSuccess)
}

pub(crate) unsafe fn ncclCommDeregister(comm: ncclComm_t, registration: *mut c_void) -> Result<ncclResult_t> {
    check_out("handle", registration)?;
    handle::find(comm)?;
    Ok(ncclSuccess)
}
