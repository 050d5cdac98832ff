//! Checks that a pointer of the caller is not NULL.

use std::fmt::Display;
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// The error for a pointer that is NULL and must not be.
pub(super) fn null(what: impl Display) -> Error {
    Error::invalid(format!("{what} is NULL"))
}

/// Checks that an out-parameter can be written.
pub(super) fn out<T>(what: &str, pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(|| null(what))
}
