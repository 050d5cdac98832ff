//! Starts the threads of this library. These threads block the program's signals.
//!
//! The kernel delivers a signal for the process to any thread that does not block it. The program
//! does not know the library's threads, so its handlers must not run on them. A handler may rely on
//! data of a thread of the program. And a handler would interrupt system calls of the library,
//! which the library would have to repeat.

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// The longest name of a thread in bytes. Linux cuts longer names.
const NAME_BYTES: usize = 15;

/// The signals of faults, which a thread raises by its own instructions. The library's threads do
/// not block them, for two reasons. When a thread blocks the signal that it raises, the kernel ends
/// the process at once, and the program's crash reporter does not run. And functions of the program
/// may run on these threads, for example a store of the caller, in a runtime that handles faults
/// (Go, Java, WebAssembly).
const FAULTS: [libc::c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Blocks all signals of the calling thread except [`FAULTS`] while this value lives.
struct Blocked {
    /// The thread's signal mask before this value was made. The drop restores that mask.
    before: libc::sigset_t,
}

impl Blocked {
    fn new() -> Blocked {
        let (mut all, mut before) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::uninit());
        // SAFETY: `sigfillset` initialises `all`, and `pthread_sigmask` initialises `before`.
        // Neither fails with these arguments.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            for fault in FAULTS {
                libc::sigdelset(all.as_mut_ptr(), fault);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Blocked { before: before.assume_init() }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: `before` is a set that `pthread_sigmask` wrote. Signals that came meanwhile are
        // delivered now.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

/// Returns a builder for a thread of that name.
fn builder(name: &str) -> Builder {
    debug_assert!(name.starts_with("dm-") && name.len() <= NAME_BYTES, "{name}");
    Builder::new().name(name.to_owned())
}

/// Starts a thread that handles no signals but its own faults. `name` begins with "dm-" and has at
/// most 15 bytes.
///
/// A new thread inherits the mask of the thread that starts it. So the signals are blocked before
/// the thread exists, and no handler can run on it in between. A thread or a process that `work`
/// starts inherits the mask as well.
pub fn spawn<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    let _blocked = Blocked::new();
    builder(name).spawn(work)
}

/// Starts a thread as [`spawn`] does. The thread ends before `scope` ends.
pub fn spawn_scoped<'scope, 'env, T: Send + 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let _blocked = Blocked::new();
    builder(name).spawn_scoped(scope, work)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the signals that the calling thread blocks. Bit 0 stands for signal 1.
    fn blocked() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    }

    /// Returns the bit of a signal in the mask.
    fn bit(signal: libc::c_int) -> u64 {
        1 << (signal - 1)
    }

    #[test]
    fn a_thread_blocks_what_can_come_from_outside_and_its_parent_is_as_before() {
        let before = blocked();
        let look = || (blocked(), std::thread::current().name().map(str::to_owned));
        let here = spawn("dm-test", look).unwrap().join().unwrap();
        let scoped = std::thread::scope(|scope| spawn_scoped(scope, "dm-test", look).unwrap().join().unwrap());
        assert_eq!(here, scoped);
        assert_eq!(here.1.as_deref(), Some("dm-test"));
        for signal in [libc::SIGALRM, libc::SIGTERM, libc::SIGINT, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPROF, 40] {
            assert!(here.0 & bit(signal) != 0, "signal {signal} is not blocked: {:#x}", here.0);
        }
        for signal in FAULTS {
            assert!(here.0 & bit(signal) == 0, "fault {signal} is blocked: {:#x}", here.0);
        }
        assert_eq!(blocked(), before);
    }
}
