//! A function of the program that gives the addresses of NCCL's functions, for programs that have
//! NCCL linked into themselves.

use std::ffi::{CString, c_char, c_void};

/// The program's function: gives the address of the function of that name, or NULL.
pub(crate) type Resolve = unsafe extern "C" fn(user_data: *mut c_void, name: *const c_char) -> *mut c_void;

/// The program's function, and the data that it gets.
#[derive(Clone, Copy)]
pub(crate) struct Resolver {
    /// The program's function.
    resolve: Resolve,
    /// The first argument of every call.
    user_data: *mut c_void,
}

// SAFETY: whoever makes a resolver promises that it may be called from any thread.
unsafe impl Send for Resolver {}
// SAFETY: as above.
unsafe impl Sync for Resolver {}

impl Resolver {
    /// A resolver that calls `resolve` with `user_data`.
    ///
    /// # Safety
    /// Until the process ends, `resolve` may be called with `user_data` from any thread, from
    /// several at once. For a name of NCCL's C API it gives NULL or the address of that function.
    pub(crate) unsafe fn new(resolve: Resolve, user_data: *mut c_void) -> Resolver {
        Resolver { resolve, user_data }
    }

    /// The address of the function of that name.
    pub(super) fn find(&self, name: &str) -> Option<*const c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the promise of `new`; the name is a C string that outlives the call.
        let address = unsafe { (self.resolve)(self.user_data, name.as_ptr()) };
        (!address.is_null()).then_some(address.cast_const())
    }
}
