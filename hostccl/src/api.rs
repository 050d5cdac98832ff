//! The C functions. Each runs its body in the module `body` inside the guard of the module `error`.

use std::ffi::{c_char, c_int, c_void};

use crate::body;
use crate::error;
use crate::for_each_function;
use crate::types::*;

macro_rules! define {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// Pointers are NULL or valid for what NCCL documents for this function.
            #[allow(non_snake_case)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                // SAFETY: the caller keeps NCCL's contract, which is also the body's.
                error::guard(stringify!($name), || unsafe { body::$name($($arg),*) })
            }
        )*

        /// Returns the address of the function of that C name, as `dlsym` would if this crate
        /// exported its names.
        pub fn symbol(name: &str) -> Option<*const c_void> {
            match name {
                $(stringify!($name) => Some($name as unsafe extern "C" fn($($type),*) -> $result as *const c_void),)*
                _ => None,
            }
        }

        /// The C names that [`symbol`] knows.
        pub const SYMBOLS: &[&str] = &[$(stringify!($name)),*];
    };
}

for_each_function!(define);

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_listed_name_has_an_address_of_its_own() {
        let addresses: HashSet<_> = SYMBOLS.iter().map(|name| symbol(name).expect("listed")).collect();
        assert_eq!(addresses.len(), SYMBOLS.len());
        assert_eq!(symbol("ncclAllReduce"), Some(ncclAllReduce as *const c_void));
        assert_eq!(symbol("ncclCommSuspend"), None);
        assert_eq!(symbol(""), None);
    }
}
