//! libhostccl.so: the host engine under its NCCL names, and nothing else. `include/hostccl.h` documents them for C.

use engine::types::*;
use std::ffi::{c_char, c_int, c_void};

macro_rules! export {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        ///
        /// As the C header says: pointers are NULL or valid for what the call reads and writes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: the caller's promise, handed on as it is.
            unsafe { engine::$name($($argument),*) }
        }
    )*};
}

engine::for_each_function!(export);
