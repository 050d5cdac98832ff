//! Descriptors that are closed in forked children and do not count as held.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use super::{place, register, section};

/// Owns a descriptor that is closed in forked children, and that does not keep them from using this
/// library. A program may make a unique id and then fork its ranks, while the maker serves the id.
#[derive(Debug)]
pub struct Closed<T: AsRawFd> {
    /// The owner of the descriptor.
    inner: ManuallyDrop<T>,
    /// The process in which the descriptor is open.
    pid: u32,
}

impl<T: AsRawFd> Closed<T> {
    /// Opens a descriptor under the rules of [`Private::open`](super::Private::open).
    pub fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Closed<T>> {
        register();
        section(|| {
            let opened = open()?;
            if let Some((word, bit)) = place(opened.as_raw_fd()) {
                word.fetch_or(bit, Ordering::Relaxed);
            }
            Ok(Closed { inner: ManuallyDrop::new(opened), pid: std::process::id() })
        })
    }

    /// Whether this process is the one that opened the descriptor, and not a child of it.
    pub fn is_mine(&self) -> bool {
        self.pid == std::process::id()
    }
}

impl<T: AsRawFd> Deref for Closed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsRawFd> DerefMut for Closed<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: AsRawFd> Drop for Closed<T> {
    fn drop(&mut self) {
        if !self.is_mine() {
            // The descriptor is closed in the child already, and its number may belong to another
            // file by now.
            return;
        }
        section(|| {
            if let Some((word, bit)) = place(self.inner.as_raw_fd()) {
                word.fetch_and(!bit, Ordering::Relaxed);
            }
            // SAFETY: the descriptor is not used again.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        });
    }
}
