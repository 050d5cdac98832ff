//! The operations of a communicator library: thin calls of its functions, arguments as in nccl.h.

use std::ffi::c_void;

use super::functions::RawComm;
use super::library::Library;
use super::types::{NcclResult, element_size, result};

/// The collectives: thin calls, arguments as in nccl.h.
///
/// # Safety
/// Each buffer is as large as the count, the data type and the size of the communicator make it,
/// and lives until the work is done.
#[allow(clippy::too_many_arguments, reason = "they are NCCL's")]
#[allow(
    missing_docs,
    clippy::missing_safety_doc,
    reason = "nccl.h documents them; what they have in common is said above"
)]
impl Library {
    pub unsafe fn all_reduce(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: i32,
        op: i32,
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract is NCCL's.
        unsafe { (self.functions.all_reduce)(send, recv, count, dtype, op, comm, stream) }
    }

    pub unsafe fn reduce(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: i32,
        op: i32,
        root: i32,
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract is NCCL's.
        unsafe { (self.functions.reduce)(send, recv, count, dtype, op, root, comm, stream) }
    }

    pub unsafe fn broadcast(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: i32,
        root: i32,
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract is NCCL's.
        unsafe { (self.functions.broadcast)(send, recv, count, dtype, root, comm, stream) }
    }

    pub unsafe fn all_gather(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        send_count: usize,
        dtype: i32,
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract is NCCL's.
        unsafe { (self.functions.all_gather)(send, recv, send_count, dtype, comm, stream) }
    }

    pub unsafe fn reduce_scatter(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        recv_count: usize,
        dtype: i32,
        op: i32,
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract is NCCL's.
        unsafe { (self.functions.reduce_scatter)(send, recv, recv_count, dtype, op, comm, stream) }
    }

    /// `ncclAlltoAll` (2.28). On older libraries a group of sends and receives with every rank
    /// takes its place.
    pub unsafe fn all_to_all(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count_per_peer: usize,
        dtype: i32,
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        if let Some(all_to_all) = self.functions.all_to_all {
            // SAFETY: the caller's contract is NCCL's.
            return unsafe { all_to_all(send, recv, count_per_peer, dtype, comm, stream) };
        }
        let Some(element) = element_size(dtype) else { return result::INVALID_ARGUMENT };
        let mut size = 0;
        // SAFETY: the out-parameter is valid.
        let code = unsafe { (self.functions.count)(comm, &mut size) };
        if code != result::SUCCESS {
            return code;
        }
        let block = count_per_peer * element;
        // SAFETY: both buffers hold `size` blocks of `block` bytes; a group that was started is
        // always ended.
        unsafe {
            let mut first = (self.functions.group_start)();
            for peer in 0..size {
                let at = peer as usize * block;
                for code in [
                    (self.functions.send)(send.byte_add(at), count_per_peer, dtype, peer, comm, stream),
                    (self.functions.recv)(recv.byte_add(at), count_per_peer, dtype, peer, comm, stream),
                ] {
                    if first == result::SUCCESS {
                        first = code;
                    }
                }
            }
            let end = (self.functions.group_end)();
            if first == result::SUCCESS { end } else { first }
        }
    }

    pub unsafe fn send(
        &self,
        send: *const c_void,
        count: usize,
        dtype: i32,
        peer: i32,
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract is NCCL's.
        unsafe { (self.functions.send)(send, count, dtype, peer, comm, stream) }
    }

    pub unsafe fn recv(
        &self,
        recv: *mut c_void,
        count: usize,
        dtype: i32,
        peer: i32,
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract is NCCL's.
        unsafe { (self.functions.recv)(recv, count, dtype, peer, comm, stream) }
    }
}
