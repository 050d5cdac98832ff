//! Starts the threads of this library.
//!
//! A signal that is sent to the process is handled on any thread that does not block it. The program knows nothing of the library's
//! threads, so its handlers must not run there: a handler may rely on a thread of the program, and an interrupted system call of the
//! library would have to be tried again.

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// The most bytes of a thread's name that Linux keeps.
const NAME_BYTES: usize = 15;

/// The signals that a thread raises itself by a fault, and that stay unblocked. The kernel ends a process whose thread blocks such a
/// signal and raises it, so the program's crash reporter would not run; and a program's own function on such a thread, for example a
/// store of the caller, may live in a runtime that handles faults (Go, Java, WebAssembly).
const FAULTS: [libc::c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// The calling thread's signals are blocked, but for [`FAULTS`], while this value lives.
struct Blocked {
    /// The mask of the calling thread before.
    before: libc::sigset_t,
}

impl Blocked {
    fn new() -> Blocked {
        let (mut all, mut before) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::uninit());
        // SAFETY: `sigfillset` makes the first set and `pthread_sigmask` the second one, and neither fails with these arguments.
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
        // SAFETY: the set that `pthread_sigmask` gave; signals that came meanwhile are handled now.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

fn builder(name: &str) -> Builder {
    debug_assert!(name.starts_with("dm-") && name.len() <= NAME_BYTES, "{name}");
    Builder::new().name(name.to_owned())
}

/// Starts a thread that handles none of the program's signals. `name` begins with "dm-" and has at most 15 bytes.
///
/// A new thread inherits the mask of the thread that starts it, so there is no moment at which a handler could run on it. A thread or
/// a process that `work` starts inherits the mask as well.
pub fn spawn<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    let _blocked = Blocked::new();
    builder(name).spawn(work)
}

/// Starts a thread as [`spawn`] does, which ends before `scope` does.
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

    /// The mask of blocked signals of the calling thread, bit 0 for signal 1.
    fn blocked() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    }

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
