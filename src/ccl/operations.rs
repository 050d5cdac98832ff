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
        // SAFETY: both buffers hold `size` blocks of `block` bytes.
        unsafe {
            self.in_one_group(size as usize, |rank, peer| {
                let (from, to) = (send.byte_add(rank * block), recv.byte_add(rank * block));
                [
                    (self.functions.send)(from, count_per_peer, dtype, peer, comm, stream),
                    (self.functions.recv)(to, count_per_peer, dtype, peer, comm, stream),
                ]
            })
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::ffi::c_int;
    use std::ptr::null_mut;

    use super::*;

    thread_local! {
        /// How many sends were called.
        static SENDS: Cell<usize> = const { Cell::new(0) };
    }

    unsafe extern "C" fn version(version: *mut c_int) -> NcclResult {
        // SAFETY: the library passes a valid int.
        unsafe { version.write(22_700) };
        result::SUCCESS
    }

    unsafe extern "C" fn count(_: RawComm, count: *mut c_int) -> NcclResult {
        // SAFETY: the library passes a valid int.
        unsafe { count.write(2) };
        result::SUCCESS
    }

    unsafe extern "C" fn send(
        _: *const c_void,
        _: usize,
        _: c_int,
        _: c_int,
        _: RawComm,
        _: *mut c_void,
    ) -> NcclResult {
        SENDS.set(SENDS.get() + 1);
        result::IN_PROGRESS
    }

    unsafe extern "C" fn recv(_: *mut c_void, _: usize, _: c_int, _: c_int, _: RawComm, _: *mut c_void) -> NcclResult {
        result::SYSTEM_ERROR
    }

    unsafe extern "C" fn succeeds() -> NcclResult {
        result::SUCCESS
    }

    unsafe extern "C" fn fails() -> NcclResult {
        result::UNHANDLED_CUDA_ERROR
    }

    /// Returns the result of an all-to-all on a library of NCCL 2.27, whose groups begin by
    /// `start`.
    fn all_to_all(start: unsafe extern "C" fn() -> NcclResult) -> NcclResult {
        let library = Library::from_lookup("libnccl.so.2", |symbol| match symbol {
            "ncclGetVersion" => Some(version as *const c_void),
            "ncclCommCount" => Some(count as *const c_void),
            "ncclSend" => Some(send as *const c_void),
            "ncclRecv" => Some(recv as *const c_void),
            "ncclGroupStart" => Some(start as *const c_void),
            "ncclAlltoAll" => None,
            // No other function is called.
            _ => Some(succeeds as *const c_void),
        });
        let (from, mut to) = ([0_u8; 2], [0_u8; 2]);
        let (from, to) = (from.as_ptr().cast(), to.as_mut_ptr().cast());
        // SAFETY: both buffers hold an element of one byte for each of the two ranks.
        unsafe { library.unwrap().all_to_all(from, to, 1, 0, RawComm::NULL, null_mut()) }
    }

    #[test]
    fn an_all_to_all_without_ncclalltoall_gives_its_first_failure() {
        assert_eq!(all_to_all(succeeds), result::SYSTEM_ERROR);
        assert_eq!(SENDS.take(), 1, "no call follows the failure");
        assert_eq!(all_to_all(fails), result::UNHANDLED_CUDA_ERROR);
        assert_eq!(SENDS.take(), 0, "no call is made outside a group");
    }
}
