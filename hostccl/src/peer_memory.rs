//! Reads of another process's memory by the kernel (`process_vm_readv`), where the machine allows
//! them. Nothing here ever writes to the memory of another process.
//!
//! # Which process is read
//! A process number may mean another process when it is read than when it was published: in another
//! namespace, or because the process has ended, or because it has started another program. So every
//! process keeps a *mark*, which is a random number at a fixed address. A read gets the mark of the
//! other process in the same system call, after the data. The data counts only if this mark is the
//! one that the process has published.

use std::env;
use std::fs;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// The variable that says when ranks read each other's memory.
const SWITCH: &str = "DM_HOSTCCL_SINGLE_COPY";

/// The mark of this process; 0 until somebody has asked for it.
static MARK: AtomicU64 = AtomicU64::new(0);

/// How many bytes this process has read from the memory of ranks.
static READ: AtomicU64 = AtomicU64::new(0);

/// Returns how many bytes this process has copied straight from the buffers of other ranks. Tests
/// see by this number in which way data has come.
pub fn bytes_read_from_ranks() -> u64 {
    READ.load(Ordering::Relaxed)
}

/// When ranks read each other's memory, as [`SWITCH`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Never.
    Never,
    /// Where it is faster than to copy through shared memory, if the processors share no cache.
    Large,
    /// Wherever it is possible. Tests use this.
    Always,
}

/// Returns the policy of this process. A value that is none counts as never, but
/// [`check_environment`] refuses it before a communicator is made.
pub(crate) fn policy() -> Policy {
    read_once().as_ref().copied().unwrap_or(Policy::Never)
}

/// Fails where the variable has no valid value. This function is called before a communicator is
/// made.
pub(crate) fn check_environment() -> Result<()> {
    read_once().as_ref().map(drop).map_err(Clone::clone)
}

fn read_once() -> &'static Result<Policy> {
    static POLICY: OnceLock<Result<Policy>> = OnceLock::new();
    POLICY.get_or_init(|| parse(&env::var_os(SWITCH).unwrap_or_default().to_string_lossy()))
}

fn parse(value: &str) -> Result<Policy> {
    match value.trim() {
        "" | "0" => Ok(Policy::Never),
        "1" => Ok(Policy::Large),
        "always" => Ok(Policy::Always),
        _ => Err(Error::argument(format!("{SWITCH} is {value:?}: it must be 0 (the default), 1 or always"))),
    }
}

/// Returns the address of this process's mark, and the mark. The mark is 0 where there are no
/// random numbers, and then nobody reads this process's memory.
pub(crate) fn own_mark() -> (u64, u64) {
    if MARK.load(Ordering::Acquire) == 0 {
        let mut bytes = [0; 8];
        // SAFETY: the buffer has that many bytes.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if got == bytes.len() as isize {
            let _ = MARK.compare_exchange(0, u64::from_ne_bytes(bytes), Ordering::AcqRel, Ordering::Acquire);
        }
    }
    (MARK.as_ptr() as u64, MARK.load(Ordering::Acquire))
}

/// Why memory was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// This process may not read that process's memory at all, or the machine has no such call.
    Forbidden,
    /// There is no memory of that kind at the address: it is not mapped, or belongs to a device.
    Unreadable,
    /// The process has ended, or is another one than the one that published the mark.
    Gone,
}

/// A process whose memory this process may be able to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    /// The process number.
    pub(crate) pid: u32,
    /// The address of the process's mark.
    pub(crate) mark_at: u64,
    /// The mark.
    pub(crate) mark: u64,
}

impl Source {
    /// Whether this process can read that process's mark.
    pub(crate) fn can_be_read(&self) -> bool {
        // SAFETY: no byte is written.
        self.mark != 0 && unsafe { self.read(0, std::ptr::null_mut(), 0) }.is_ok()
    }

    /// Copies `bytes` bytes at the address `from` of that process to `to`. When it fails, any part
    /// of `to` may have been written.
    ///
    /// # Safety
    /// `to` is writable for `bytes` bytes, and nobody else uses them.
    pub(crate) unsafe fn read(&self, from: u64, to: *mut u8, bytes: usize) -> std::result::Result<(), Refusal> {
        let mut mark = 0_u64;
        let mark_bytes = size_of::<u64>();
        let here = [
            libc::iovec { iov_base: to.cast(), iov_len: bytes },
            libc::iovec { iov_base: (&raw mut mark).cast(), iov_len: mark_bytes },
        ];
        let there = [
            libc::iovec { iov_base: from as *mut libc::c_void, iov_len: bytes },
            libc::iovec { iov_base: self.mark_at as *mut libc::c_void, iov_len: mark_bytes },
        ];
        // The kernel refuses addresses of no bytes in some versions.
        let first = usize::from(bytes == 0);
        let parts = (here.len() - first) as libc::c_ulong;
        let pid = self.pid as libc::pid_t;
        // SAFETY: this function's contract, and the mark's place is a number of this function. The
        // kernel checks the other process's addresses, and writes nothing there.
        let read = unsafe {
            let (here, there) = (here[first..].as_ptr(), there[first..].as_ptr());
            libc::syscall(libc::SYS_process_vm_readv, pid, here, parts, there, parts, 0 as libc::c_ulong)
        };
        if read == (bytes + mark_bytes) as libc::c_long {
            READ.fetch_add(bytes as u64, Ordering::Relaxed);
            return if mark == self.mark { Ok(()) } else { Err(Refusal::Gone) };
        }
        if read >= 0 {
            return Err(Refusal::Unreadable);
        }
        Err(match io::Error::last_os_error().raw_os_error() {
            Some(libc::EFAULT) => Refusal::Unreadable,
            Some(libc::ESRCH) => Refusal::Gone,
            _ => Refusal::Forbidden,
        })
    }
}

/// Whether this process can read all of its own `bytes` bytes at `at`. Returns true where `/proc`
/// does not tell.
pub(crate) fn is_readable(at: u64, bytes: usize) -> bool {
    fs::read_to_string("/proc/self/maps").map_or(true, |maps| covers(&maps, at, bytes))
}

/// Whether readable mappings of a `maps` file cover the range without a gap.
fn covers(maps: &str, at: u64, bytes: usize) -> bool {
    let end = at.saturating_add(bytes as u64);
    let mut next = at;
    for line in maps.lines() {
        let mut fields = line.split([' ', '-']);
        let mut address = || u64::from_str_radix(fields.next()?, 16).ok();
        let (Some(first), Some(last)) = (address(), address()) else { continue };
        if (first..last).contains(&next) && fields.next().is_some_and(|rights| rights.starts_with('r')) {
            next = last;
        }
    }
    next >= end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> Source {
        let (mark_at, mark) = own_mark();
        Source { pid: std::process::id(), mark_at, mark }
    }

    #[test]
    fn memory_is_read_and_a_wrong_mark_a_hole_and_a_missing_process_are_told_apart() {
        let source = here();
        assert!(source.can_be_read());
        let from: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        let mut to = vec![0; from.len()];
        let at = from.as_ptr() as u64;
        // SAFETY: the target has as many bytes as the source.
        unsafe {
            source.read(at, to.as_mut_ptr(), to.len()).unwrap();
            assert_eq!(to, from);
            let other = Source { mark: source.mark ^ 1, ..source };
            assert_eq!(other.read(at, to.as_mut_ptr(), to.len()), Err(Refusal::Gone));
            assert!(!other.can_be_read());
            // No process has that number.
            let gone = Source { pid: i32::MAX as u32, ..source };
            assert_eq!(gone.read(at, to.as_mut_ptr(), to.len()), Err(Refusal::Gone));
        }
    }

    #[test]
    fn a_range_with_a_hole_is_not_readable() {
        const PAGE: usize = 4096;
        // SAFETY: a new mapping touches no other memory, and only its own second page is unmapped.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), 3 * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::munmap(at.byte_add(PAGE), PAGE), 0);
            at as u64
        };
        let mut to = vec![0_u8; 3 * PAGE];
        assert!(is_readable(at, PAGE) && !is_readable(at, PAGE + 1) && !is_readable(at, 3 * PAGE));
        // SAFETY: the target is large enough.
        unsafe {
            assert_eq!(here().read(at, to.as_mut_ptr(), PAGE), Ok(()));
            assert_eq!(here().read(at, to.as_mut_ptr(), PAGE + 1), Err(Refusal::Unreadable));
            assert_eq!(here().read(at + PAGE as u64, to.as_mut_ptr(), PAGE), Err(Refusal::Unreadable));
        }
        let maps = "1000-2000 r--p 0 x\n2000-3000 rw-p 0 y\n3000-4000 ---p 0\n4000-5000 r--p 0";
        assert!(covers(maps, 0x1000, 0x2000) && covers(maps, 0x1800, 0x1800));
        assert!(!covers(maps, 0x1000, 0x2001) && !covers(maps, 0x800, 0x900) && !covers(maps, 0x2fff, 0x1002));
    }

    #[test]
    fn a_switch_that_is_none_is_refused_with_its_value() {
        let values = [("", Policy::Never), (" 1 ", Policy::Large), ("0", Policy::Never), ("always", Policy::Always)];
        for (value, policy) in values {
            assert_eq!(parse(value).unwrap(), policy);
        }
        for value in ["2", "yes", "-1"] {
            let error = parse(value).unwrap_err();
            assert!(error.message().contains(&format!("DM_HOSTCCL_SINGLE_COPY is {value:?}")), "{}", error.message());
        }
    }
}
