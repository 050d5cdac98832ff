//! Signals as something to wait for.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Instant;

use crate::output::Output;
use crate::ranks::Failure;

const CAUGHT: [i32; 7] =
    [libc::SIGCHLD, libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// The caught signals, as a descriptor.
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// From now on these signals come only through here.
    pub fn catch() -> Result<Signals, Failure> {
        let broken = || Failure::new(1, format!("cannot catch signals: {}", io::Error::last_os_error()));
        let set = caught();
        // SAFETY: the set is initialised; a fresh descriptor is owned by nobody else.
        unsafe {
            if libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) != 0 {
                return Err(broken());
            }
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 { Err(broken()) } else { Ok(Signals { fd: OwnedFd::from_raw_fd(fd) }) }
        }
    }

    /// Sleeps until a signal comes, a rank writes (which is passed on here), the bell rings or the moment is there; gives the signals.
    pub fn wait(&mut self, until: Option<Instant>, output: &mut Output, bell: Option<RawFd>) -> Vec<i32> {
        // poll(2) leaves out what is negative.
        let entry = |fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut polls = vec![entry(self.fd.as_raw_fd()), entry(bell.unwrap_or(-1))];
        polls.extend(output.polls());
        let millis = until.map_or(-1, |until| {
            let left = until.saturating_duration_since(Instant::now()).as_millis() + 1;
            i32::try_from(left).unwrap_or(i32::MAX)
        });
        // SAFETY: the entries are valid.
        unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, millis) };
        output.pass_on(&polls[2..]);
        let mut signals = Vec::new();
        loop {
            let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
            let size = size_of::<libc::signalfd_siginfo>();
            // SAFETY: the buffer has that size.
            let count = unsafe { libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size) };
            if count != size as isize {
                return signals;
            }
            // SAFETY: the kernel has filled it.
            signals.push(unsafe { info.assume_init() }.ssi_signo as i32);
        }
    }
}

/// In a rank before exec: the signals' usual meaning. Async-signal-safe.
pub fn reset_in_child() {
    let set = caught();
    // SAFETY: the set is initialised.
    unsafe { libc::sigprocmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut()) };
}

fn caught() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in CAUGHT {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}
