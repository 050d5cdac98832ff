//! Anonymous files of shared memory (memfd): how they are made and sized.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::error::{Error, Result};
use crate::types::ncclSystemError;

/// Makes an empty anonymous file. `/proc/<pid>/fd` and `/proc/<pid>/maps` show the name.
pub(crate) fn open(name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string, and the result is a new descriptor or -1.
    unsafe { owned(libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)) }
}

/// Turns the result of a system call into a descriptor or the error.
///
/// # Safety
/// `fd` is an open descriptor that nobody else owns, or negative.
pub(crate) unsafe fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the caller's contract.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

/// Sets the size of the memory.
pub(crate) fn resize(fd: &OwnedFd, bytes: usize) -> Result<()> {
    check_limit(bytes)?;
    // SAFETY: the call only takes a descriptor that this process owns.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) } != 0 {
        return Err(Error::system(&format!("sizing shared memory to {bytes} bytes"), io::Error::last_os_error()));
    }
    Ok(())
}

/// Forbids every process to change the size of the memory: `seals` says whether to forbid shrinking
/// or growing. If the memory could shrink, a process that touches the lost part would get SIGBUS.
pub(crate) fn seal(fd: &OwnedFd, seals: libc::c_int) -> Result<()> {
    // SAFETY: the call only takes a descriptor that this process owns.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(Error::system("sealing the size of shared memory", io::Error::last_os_error()));
    }
    Ok(())
}

/// Fails when a file of that size is beyond the process's limit.
pub(crate) fn check_limit(bytes: usize) -> Result<()> {
    // Beyond the limit on file sizes the kernel does not only refuse: it sends SIGXFSZ, which ends
    // the process. So the limit is checked first.
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is valid to write to. When the call fails, it keeps its initial value.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if bytes as libc::rlim_t > limit.rlim_cur {
        let limit = limit.rlim_cur;
        return Err(Error::new(
            ncclSystemError,
            format!("shared memory of {bytes} bytes is beyond the limit on file sizes, {limit}: raise `ulimit -f`"),
        ));
    }
    Ok(())
}
