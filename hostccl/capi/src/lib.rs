//! libhostccl.so: the host engine with its NCCL names exported, and nothing else.
//! `include/hostccl.h` documents the functions for C.

use engine::types::*;
use std::ffi::{c_char, c_int, c_void};

macro_rules! export {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        ///
        /// Pointers are NULL, or valid for what the call reads and writes, as the C header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: the caller keeps the contract of the engine's function.
            unsafe { engine::$name($($argument),*) }
        }
    )*};
}

engine::for_each_function!(export);
