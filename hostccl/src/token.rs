//! Random numbers that nobody else knows.

use std::io;

use crate::error::{Error, Result};

/// Returns the random number of a new segment.
pub(crate) fn random_token() -> Result<[u8; 16]> {
    let mut token = [0; 16];
    // SAFETY: the buffer has that many bytes. A request for so few bytes is never met in part.
    let got = unsafe { libc::getrandom(token.as_mut_ptr().cast(), token.len(), 0) };
    if got == token.len() as isize {
        Ok(token)
    } else {
        Err(Error::system("getting random bytes", io::Error::last_os_error()))
    }
}
